"""A tensor's range as inline SVG that takes its colours from the page.

::

    observed   |------------------0-----------------------------|
    kept             [############0##########]
"""

from __future__ import annotations

import math
from html import escape

from deploy.report import figures
from deploy.report.parts import TensorRow

_BAR_WIDTH, _BAR_HEIGHT = 190, 16


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
    return drawing(_BAR_WIDTH, _BAR_HEIGHT, label, body, "bar")


def drawing(width: int, height: int, label: str, body: str, kind: str, *, desc: str = "") -> str:
    """An SVG of its own size, with what a screen reader says of it."""
    said = f"<desc>{escape(desc)}</desc>" if desc else ""
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"><title>{escape(label)}</title>{said}{body}</svg>'
    )
