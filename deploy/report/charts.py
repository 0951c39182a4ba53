"""What was seen of the worst tensors and where their ranges end, as HTML with inline SVG.

::

             : |  '  '          : : clip range    ' what other searches would choose
       .:|:. : |.               bars: how often, by the logarithm
    ___|||||||:||:|:|__.__
      0       lo        hi
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from deploy.report import figures, markup
from deploy.report.model import Findings
from deploy.report.parts import HistogramPart, TensorRow
from deploy.report.section import Section
from deploy.report.svg import drawing
from deploy.report.words import whose
from deploy.report.worst import worst_first

_WIDTH, _HEIGHT, _TOP, _FLOOR = 320, 104, 14, 86
_SIDE = 6  # room beside the axis
_ROOM = 0.3  # of what was seen: a clip line further out than this is told, not drawn
_WORDS = (
    "Bars: how often values were seen, by the logarithm. Dashed: the ends of the range that is"
    " kept; bars of another colour lie beyond, and count as clipped where a reader looks. Marks on"
    " top: what other searches find in the same histogram. Each drawing has its own scales."
)


def histograms(report: Findings) -> Iterator[Section]:
    """The worst tensors of each target that a histogram is known of, the worst first."""
    for target in report.targets:
        rows = [row for row in worst_first(target.tensors) if row.histogram is not None]
        if rows:
            own = whose(report, target.name)
            drawn = "\n".join(_figure(row, row.histogram) for row in rows if row.histogram)
            html = f'<p class="sub">{_WORDS}</p>\n<div class="drawn">{drawn}</div>'
            yield Section(title=f"Histograms{own}", html=html, rows=len(rows))


def _figure(row: TensorRow, part: HistogramPart) -> str:
    said = markup.breakable("; ".join(_words(row, part)))
    name = f"<b>{markup.breakable(row.name)}</b>"
    return f"<figure>{name}{histogram(row, part)}<figcaption>{said}</figcaption></figure>"


def _words(row: TensorRow, part: HistogramPart) -> Iterator[str]:
    yield f"kept {_span(row.lo, row.hi)} by {row.method}"
    if row.clipped is not None:
        yield f"{figures.percent(row.clipped)} clipped"
    if row.sqnr_db is not None:
        yield figures.decibels(row.sqnr_db)
    if part.others:
        yield "others: " + ", ".join(f"{o.method} {_span(o.lo, o.hi)}" for o in part.others)


def _span(lo: float, hi: float) -> str:
    if lo == -hi:
        return f"\N{PLUS-MINUS SIGN}{figures.real(hi)}"
    return f"{figures.real(lo)} to {figures.real(hi)}"


def histogram(row: TensorRow, part: HistogramPart) -> str:
    """One tensor's bars with the ends of its range; "" where they cannot be drawn."""
    axis = _axis(row)
    if not all(map(math.isfinite, axis)):
        return ""

    def x(value: float) -> float:
        return _SIDE + (_WIDTH - 2 * _SIDE) * (value - axis[0]) / (axis[1] - axis[0])

    body = (
        *_bars(row, part, x),
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{_FLOOR}" y2="{_FLOOR}"/>',
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{_FLOOR}" y2="{_FLOOR + 4}"/>',
        *(_line("clip", x(end), 2, _FLOOR) for end in _inside((row.lo, row.hi), axis)),
        *(
            _line("other", x(end), 0, _TOP - 4)
            for other in part.others
            for end in _inside((other.lo, other.hi), axis)
        ),
        f'<text x="0" y="{_HEIGHT - 3}">{figures.real(axis[0])}</text>',
        f'<text class="end" x="{_WIDTH}" y="{_HEIGHT - 3}">{figures.real(axis[1])}</text>',
    )
    label = f"Histogram of {row.name}"
    return drawing(_WIDTH, _HEIGHT, label, "".join(body), "hist", desc=_description(row, part))


def _axis(row: TensorRow) -> tuple[float, float]:
    """What was seen, zero, and the ends of the range where they are not far."""
    left, right = min(row.observed_min, 0.0), max(row.observed_max, 0.0)
    far = _ROOM * (right - left)
    lo, hi = max(row.lo, left - far), min(row.hi, right + far)
    lo = min(left, lo) if lo == row.lo else left
    hi = max(right, hi) if hi == row.hi else right
    return (lo, hi) if hi > lo else (lo - 1.0, hi + 1.0)  # of zeros alone


def _inside(ends: tuple[float, float], axis: tuple[float, float]) -> Iterator[float]:
    """Each end once, where the axis has it."""
    return (end for end in dict.fromkeys(ends) if axis[0] <= end <= axis[1])


def _bars(row: TensorRow, part: HistogramPart, x: Callable[[float], float]) -> Iterator[str]:
    """What is kept and what is cut off; a bar that a line crosses is parted there."""
    tallest = math.log1p(max(part.counts))
    paths: dict[str, list[str]] = {"kept": [], "cut": []}
    for place, count in enumerate(part.counts):
        if not count:
            continue
        top = f"{_FLOOR - (_FLOOR - _TOP) * math.log1p(count) / tallest:.1f}"
        left = part.start + place * part.width
        for kind, start, end in _pieces(row, left, left + part.width):
            wide = max(x(end) - x(start), 1.0)
            paths[kind].append(f"M{x(start):.1f},{_FLOOR}V{top}h{wide:.1f}V{_FLOOR}z")
    return (f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items() if path)


def _pieces(row: TensorRow, left: float, right: float) -> Iterator[tuple[str, float, float]]:
    """A bar in what is kept and what is cut off, without where no values were."""
    left, right = max(left, row.observed_min), min(right, row.observed_max)
    if left >= right:  # all its values are equal
        yield "kept" if row.lo <= right <= row.hi else "cut", right, right
        return
    held = min(row.lo, 0.0), max(row.hi, 0.0)  # every grid holds 0
    lo, hi = (min(max(end, left), right) for end in held)
    pieces = (("cut", left, lo), ("kept", lo, hi), ("cut", hi, right))
    yield from (piece for piece in pieces if piece[1] < piece[2])


def _line(kind: str, x: float, top: int, floor: int) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor}"/>'


def _description(row: TensorRow, part: HistogramPart) -> str:
    """The drawing in a sentence."""
    peak = part.start + (part.counts.index(max(part.counts)) + 0.5) * part.width
    return (
        f"{sum(part.counts):,} values from {figures.real(row.observed_min)} to"
        f" {figures.real(row.observed_max)}, most of them near {figures.real(peak)};"
        f" {_span(row.lo, row.hi)} is kept"
    )
