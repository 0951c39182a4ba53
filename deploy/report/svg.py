"""The report's drawings, as inline SVG that takes its colours from the page.

`latency_figure` overlays one histogram an engine on a shared axis; `range_bar` shows what a
calibration keeps of a tensor::

    observed   |------------------0-----------------------------|
    kept             [############0##########]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

import deploy.report.figures as figures
from deploy.metrics.latency import percentile
from deploy.report.parts import EngineRow, TensorRow

Float64Array = NDArray[np.float64]

_WIDTH, _HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 12, 12, 46, 34
_BINS = 90
_WIDEST = 2.5  # times p50, so that a long tail does not squeeze the rest
_COLOURS = 4  # classes c0..c3 of the page's style

_BAR_WIDTH, _BAR_HEIGHT = 190, 16


def latency_figure(engines: Sequence[EngineRow], *, on_device: bool = False) -> str:
    """Distribution of every measured iteration, of engines on the CPU or of those on a device.

    Each p50 is marked; empty without samples.

    The axis ends a little over the slowest engine's 99th percentile, or at `_WIDEST` times its
    p50 if that is less, and says how many iterations lie beyond.
    """
    shown = [(i, e) for i, e in enumerate(engines) if e.on_device == on_device]
    drawn = [(i, e) for i, e in shown if e.latency and e.latency.samples_ms]
    if not drawn:
        return ""
    samples = [np.asarray(e.latency.samples_ms, np.float64) for _, e in drawn if e.latency]
    lo, hi = _axis_ends(samples)
    beyond = sum(int((values > hi).sum()) for values in samples)
    parts, names = [_axis(lo, hi, beyond)], []
    for row, ((index, engine), values) in enumerate(zip(drawn, samples, strict=True)):
        colour = f"c{index % _COLOURS}"
        parts.append(_histogram(values, lo, hi, colour))
        line, name = _marked(engine.label, values, lo, hi, colour, row)
        parts.append(line)
        names.append(name)  # drawn last, over every line
    parts += names
    return _svg(_WIDTH, _HEIGHT, "Distribution of latency", "".join(parts), "wide")


def range_bar(row: TensorRow) -> str:
    """What a tensor's values span, and which part of it the calibration keeps."""
    lo, hi = min(row.observed_min, row.lo, 0.0), max(row.observed_max, row.hi, 0.0)
    if not (math.isfinite(lo) and math.isfinite(hi)) or hi <= lo:
        return ""

    def x(value: float) -> float:
        return 1 + (_BAR_WIDTH - 2) * (value - lo) / (hi - lo)

    middle = _BAR_HEIGHT / 2
    body = (
        f'<line class="seen" x1="{x(row.observed_min):.1f}" x2="{x(row.observed_max):.1f}"'
        f' y1="{middle}" y2="{middle}"/>'
        f'<rect class="kept" x="{x(row.lo):.1f}" width="{max(x(row.hi) - x(row.lo), 1):.1f}"'
        f' y="4" height="{_BAR_HEIGHT - 8}" rx="2"/>'
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="1" y2="{_BAR_HEIGHT - 1}"/>'
    )
    label = (
        f"{row.name}: values {figures.real(row.observed_min)} to {figures.real(row.observed_max)},"
        f" kept {figures.real(row.lo)} to {figures.real(row.hi)}"
    )
    return _svg(_BAR_WIDTH, _BAR_HEIGHT, label, body, "bar")


def _svg(width: int, height: int, label: str, body: str, kind: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"><title>{escape(label)}</title>{body}</svg>'
    )


def _axis_ends(samples: Sequence[Float64Array]) -> tuple[float, float]:
    lo = min(float(values.min()) for values in samples)
    hi = max(min(np.quantile(v, 0.99), _WIDEST * _p50_of(v)) for v in samples)
    margin = 0.06 * (hi - lo) or 0.05 * hi or 1.0
    return max(0.0, lo - margin), float(hi + margin)


def _x(value: float, lo: float, hi: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - lo) / (hi - lo)


def _axis(lo: float, hi: float, beyond: int) -> str:
    floor = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>']
    for value, text in _ticks(lo, hi):
        x = _x(value, lo, hi)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{floor + 16}">{text}</text>')
    note = "ms per inference"
    if beyond:
        note += f"; {figures.count(beyond, 'slower iteration')} not drawn"
    parts.append(f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}">{note}</text>')
    return "".join(parts)


def _ticks(lo: float, hi: float) -> Iterator[tuple[float, str]]:
    """Round values inside the axis, 5 to 10 of them, with the decimals their step needs."""
    raw = (hi - lo) / 7
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    for index in range(math.ceil(lo / step), math.floor(hi / step) + 1):
        yield index * step, f"{index * step:.{decimals}f}"


def _histogram(values: Float64Array, lo: float, hi: float, colour: str) -> str:
    """A step outline, its height the share of iterations, scaled to its own peak."""
    counts, edges = np.histogram(values, bins=_BINS, range=(lo, hi))
    floor = _HEIGHT - _BOTTOM
    heights = (floor - _TOP) * counts / max(int(counts.max()), 1)
    points = [f"M{_x(lo, lo, hi):.1f},{floor}"]
    for height, left, right in zip(heights, edges[:-1], edges[1:], strict=True):
        y = floor - float(height)
        points.append(
            f"L{_x(float(left), lo, hi):.1f},{y:.1f}L{_x(float(right), lo, hi):.1f},{y:.1f}"
        )
    points.append(f"L{_x(hi, lo, hi):.1f},{floor}Z")
    return f'<path class="area {colour}" d="{"".join(points)}"/>'


def _p50_of(values: Float64Array) -> float:
    return percentile(np.sort(values), 50)


def _marked(
    label: str, values: Float64Array, lo: float, hi: float, colour: str, row: int
) -> tuple[str, str]:
    """A line at p50, and its label, which reads away from the nearer edge."""
    p50 = _p50_of(values)
    x = _x(min(p50, hi), lo, hi)
    left = x > _WIDTH * 0.6
    y = 14 + 16 * (row % 2)
    line = (
        f'<line class="median {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 10}"'
        f' y2="{_HEIGHT - _BOTTOM}"/>'
    )
    name = (
        f'<text class="name {colour}{" left" if left else ""}" x="{x - 6 if left else x + 6:.1f}"'
        f' y="{y}">{escape(label)} {figures.milliseconds(p50)}</text>'
    )
    return line, name
