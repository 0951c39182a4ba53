"""Weights by their channels: a table of each target, and the worst of them drawn, as HTML.

::

    |  | |      || |         largest |w| of each channel, by the logarithm, beside the
    |||| |||..|||||||..|     largest of the weight
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from deploy.report import figures, markup
from deploy.report.channels import worst_weights
from deploy.report.model import Findings
from deploy.report.parts import WeightRow
from deploy.report.section import Section
from deploy.report.svg import drawing
from deploy.report.words import WEIGHT_HEADS, weight_row, whose

_WIDTH, _HEIGHT = 120, 26
_DECADES = 4  # below the largest that a strip shows
_WORDS = (
    "Largest |w| of each output channel: the least, the median and the largest of them, the ratio"
    " of the largest to the least, and the channel that lies lowest. Used: of the grid's steps, by"
    " the lowest channel; few where all share one scale, all where each has its own and no bias"
    " wants a wider one. Dead channels, below a millionth of the largest, are in no other figure."
)


def weights(report: Findings) -> Iterator[Section]:
    """The weights of each target, the worst first."""
    shown = [target for target in report.targets if target.weights]
    for number, target in enumerate(shown):
        own = whose(report, target.name)
        words = "" if number else f'<p class="sub">{escape(_WORDS)}</p>'
        rows = []
        for row in worst_weights(target.weights):
            name, *cells = map(markup.breakable, weight_row(row))
            rows.append([name, strip(row), *cells])
        heads = [WEIGHT_HEADS[0], "by channel", *WEIGHT_HEADS[1:]]
        html = words + markup.raw_table(heads, rows, "tensors")
        yield Section(title=f"Weights{own}", html=html, rows=len(rows))


def strip(row: WeightRow) -> str:
    """Its channels as bars, of `_DECADES` of ten; "" where none are told."""
    if not row.strip or not row.largest > 0:
        return ""
    step = _WIDTH / len(row.strip)
    path = "".join(
        f"M{place * step:.1f},{_HEIGHT}v-{_HEIGHT * _share(value, row.largest):.1f}"
        f"h{max(step - 0.4, 0.6):.1f}V{_HEIGHT}z"
        for place, value in enumerate(row.strip)
    )
    ends = f"{figures.real(row.least)} to {figures.real(row.largest)}"
    runs = "" if len(row.strip) == row.channels else "; each bar is the least of a run of channels"
    label = f"{row.node}: largest |w| of {row.channels} channels, {ends}{runs}"
    return drawing(_WIDTH, _HEIGHT, label, f'<path class="kept" d="{path}"/>', "bar")


def _share(value: float, largest: float) -> float:
    """A value's height, 0 to 1, by the logarithm."""
    return max(1 + math.log10(value / largest) / _DECADES, 0.02) if value > 0 else 0.0
