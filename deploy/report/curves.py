r"""The distribution of latency, one curve an engine on a shared axis, as HTML with inline SVG.

Places are shares of the width, so that letters keep their size however narrow the page is::

    A onnxruntime p50 0.0746 ms   B FP32 p50 0.0791 ms      a legend in HTML, which wraps

        A :  B                      lines at p50, their letters on top
       /\ :  :
      /  \:/\:____                 curves: an inner SVG that is stretched
    --0.07--0.08--0.09--
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from string import ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from deploy.report import figures
from deploy.report.parts import EngineRow

Float64Array = NDArray[np.float64]

LATENCY_WORDS = (
    "Latency of every measured iteration; engines ran in turn, so noise of the machine falls on all"
    " of them. Each curve is scaled to its own peak; the dashed line is the p50."
)
_HEIGHT, _TOP, _BOTTOM = 230, 34, 34  # in px
_FLOOR = _HEIGHT - _BOTTOM
_ACROSS = 1000  # units of the inner drawing's width
_BINS = 90
_WIDEST = 2.5  # times the p50, so that a long tail does not squeeze the rest
_COLOURS = 4  # classes c0..c3 of the page's style
_ROOM = 5  # labels of ticks that a narrow screen has room for
_LEVELS = 2  # heights of the letters, for lines that lie near each other


def latency_figure(engines: Sequence[EngineRow], *, on_device: bool = False) -> str:
    """Distribution of every measured iteration, of engines on the CPU or of those on a device.

    Each p50 is marked; empty without samples.

    The axis ends a little over the slowest engine's 99th percentile, or at `_WIDEST` times its
    p50 if that is less, and says how many iterations lie beyond.
    """
    drawn = [
        (f"c{index % _COLOURS}", engine, np.asarray(engine.latency.samples_ms, np.float64))
        for index, engine in enumerate(engines)
        if engine.on_device == on_device and engine.latency and engine.latency.samples_ms
    ]
    if not drawn:
        return ""
    lo, hi = _axis_ends([(_p50(engine), values) for _, engine, values in drawn])
    beyond = sum(int((values > hi).sum()) for _, _, values in drawn)
    curves = "".join(_curve(values, lo, hi, colour) for colour, _, values in drawn)
    marks, legend = [], []
    for place, (colour, engine, _) in enumerate(drawn):
        letter = _letter(place)
        marks.append(_mark(letter, _p50(engine), lo, hi, colour, place))
        said = f"{escape(engine.label)} <b>p50 {figures.milliseconds(_p50(engine))}</b>"
        legend.append(f'<li><i class="{colour}">{letter}</i> {said}</li>')
    return (
        f'<ul class="legend">{"".join(legend)}</ul>'
        f'<svg class="wide" width="100%" height="{_HEIGHT}" role="img">'
        f"<title>Distribution of latency</title>{_axis(lo, hi)}"
        f'<svg y="{_TOP}" width="100%" height="{_FLOOR - _TOP}" preserveAspectRatio="none"'
        f' viewBox="0 0 {_ACROSS} {_FLOOR - _TOP}">{curves}</svg>'
        f"{''.join(marks)}{_unit(beyond)}</svg>"
    )


def _p50(engine: EngineRow) -> float:
    assert engine.latency is not None
    return engine.latency.latency.p50


def _letter(place: int) -> str:
    """A to Z, then AA."""
    over, at = divmod(place, len(ascii_uppercase))
    return ascii_uppercase[at] * (over + 1)


def _axis_ends(samples: Sequence[tuple[float, Float64Array]]) -> tuple[float, float]:
    lo = min(float(values.min()) for _, values in samples)
    hi = max(min(float(np.quantile(v, 0.99)), _WIDEST * p50) for p50, v in samples)
    margin = 0.06 * (hi - lo) or 0.05 * hi or 1.0
    return max(0.0, lo - margin), float(hi + margin)


def _share(value: float, lo: float, hi: float) -> float:
    """Where a value stands, as a share of the width."""
    return (min(value, hi) - lo) / (hi - lo)


def _axis(lo: float, hi: float) -> str:
    """The floor and its ticks; of many every second label is left out where there is no room."""
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{_FLOOR}" y2="{_FLOOR}"/>']
    ticks = list(_ticks(lo, hi))
    for place, (value, text) in enumerate(ticks):
        x = f"{100 * _share(value, lo, hi):.2f}%"
        kind = "tick odd" if place % 2 and len(ticks) > _ROOM else "tick"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_FLOOR}"/>')
        parts.append(f'<text class="{kind}" x="{x}" y="{_FLOOR + 15}">{text}</text>')
    return "".join(parts)


def _unit(beyond: int) -> str:
    note = "ms per inference"
    if beyond:
        note += f"; {figures.count(beyond, 'slower iteration')} not drawn"
    return f'<text class="end" x="100%" y="{_HEIGHT - 3}">{note}</text>'


def _ticks(lo: float, hi: float) -> Iterator[tuple[float, str]]:
    """Round values inside the axis, 3 to 8 of them, with the decimals their step needs."""
    raw = (hi - lo) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    edge = 0.03 * (hi - lo)  # a label nearer than this to an end would be cut
    for index in range(math.ceil((lo + edge) / step), math.floor((hi - edge) / step) + 1):
        yield index * step, f"{index * step:.{decimals}f}"


def _curve(values: Float64Array, lo: float, hi: float, colour: str) -> str:
    """A step outline, its height the share of iterations, scaled to its own peak."""
    counts, edges = np.histogram(values, bins=_BINS, range=(lo, hi))
    floor = _FLOOR - _TOP
    heights = floor * counts / max(int(counts.max()), 1)
    across = _ACROSS * (edges - lo) / (hi - lo)
    points = [f"M0,{floor}"]
    for height, left, right in zip(heights, across[:-1], across[1:], strict=True):
        y = floor - float(height)
        points.append(f"L{left:.1f},{y:.1f}L{right:.1f},{y:.1f}")
    points.append(f"L{_ACROSS},{floor}Z")
    return f'<path class="area {colour}" d="{"".join(points)}"/>'


def _mark(letter: str, p50: float, lo: float, hi: float, colour: str, place: int) -> str:
    """A line at the p50, and its letter on top."""
    x = f"{100 * _share(p50, lo, hi):.2f}%"
    y = 12 + 14 * (place % _LEVELS)
    return (
        f'<line class="median {colour}" x1="{x}" x2="{x}" y1="{y + 3}" y2="{_FLOOR}"/>'
        f'<text class="tick name {colour}" x="{x}" y="{y}">{letter}</text>'
    )
