"""What a search tried whole, beside each other: noise and time of each, and which was built.

::

    |##############------|   bar: SQNR of the worst part, of the best
    |____________        |   line: time, of the longest
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deploy.report import figures, markup
from deploy.report.parts import TrialRow
from deploy.report.svg import drawing
from deploy.report.words import TRIAL_HEADS, trial_row

_WIDTH, _HEIGHT = 120, 16
_WORDS = (
    "Bar: SQNR of the worst part, beside the best of all; a higher one is nearer to FP32. Line"
    " below it: the time, beside the longest."
)


def trials(tried: Sequence[TrialRow]) -> str:
    """The table of them, what was built in another colour."""
    best = max((t.sqnr_db for t in tried if math.isfinite(t.sqnr_db)), default=0.0)
    longest = max((t.time for t in tried if math.isfinite(t.time)), default=0.0)
    rows = []
    for trial in tried:
        *cells, what = map(markup.breakable, trial_row(trial))
        rows.append([what, _bar(trial, best, longest), *cells])
    heads = [TRIAL_HEADS[-1], "side by side", *TRIAL_HEADS[:-1]]
    return f'<p class="sub">{_WORDS}</p>' + markup.raw_table(heads, rows, "tensors")


def _bar(trial: TrialRow, best: float, longest: float) -> str:
    """Two lengths of one trial; exact is as long as it can be, less than 0 dB or NaN is none."""
    label = f"{trial.what}: {figures.decibels(trial.sqnr_db)}, time {trial.time:.2f} of FP32"
    body = "".join(
        f'<rect class="{kind}" width="{_WIDTH * _share(value, most):.1f}" y="{y}" height="{high}"/>'
        for kind, value, most, y, high in (
            ("kept" if trial.taken else "tried", trial.sqnr_db, best, 2, 8),
            ("time", trial.time, longest, 12, 2),
        )
    )
    return drawing(_WIDTH, _HEIGHT, label, body, "bar")


def _share(value: float, most: float) -> float:
    if value == math.inf:
        return 1.0
    return max(value / most, 0.0) if most > 0 and not math.isnan(value) else 0.0
