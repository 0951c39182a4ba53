"""A tree map: parts within parts, each an area as large as its share of the whole.

::

    +----------------+-----------+
    | layer1         | layer2    |      a module's area is that of its parts together;
    |+-------++-----+|+---------+|      areas are as near to squares as they come
    ||0      ||1    |||0        ||
    |+-------++-----+|+---------+|
    +----------------+-----------+

Source: M. Bruls, K. Huizing, J. van Wijk, 2000, "Squarified Treemaps", section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 720, 440
_HEAD = 15  # height of a module's name above its parts
_GAP = 2
_LETTER = 6.6  # width of one, of the font's 12 px
_SMALL = 0.6  # a side below which nothing is drawn


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a whole.

    Attributes:
        name: as it is written into the area.
        value: its size, in any unit; of a tile with parts the sum of theirs.
        said: about it, shown by the browser when it is pointed at.
        kind: 0 to 3: its colour.
        parts: what it consists of.
    """

    name: str
    value: float
    said: str
    kind: int = 0
    parts: tuple[Tile, ...] = ()


class Area(NamedTuple):
    """A rectangle of the drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float


def tree_map(tiles: Sequence[Tile], title: str) -> str:
    """The drawing as inline SVG, which takes its colours from the page; "" of nothing."""
    body = "".join(_drawn(tiles, Area(0, 0, _WIDTH, _HEIGHT)))
    if not body:
        return ""
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def squarified(values: Sequence[float], area: Area) -> list[Area]:
    """A rectangle for each value, all together the area.

    Args:
        values: positive, the largest first.
        area: to be divided.
    """
    left, scale = area, area.width * area.height / sum(values) if values else 0.0
    sizes, made, row = [value * scale for value in values], list[Area](), list[float]()
    for size in sizes:
        side = min(left.width, left.height)
        if row and _worst([*row, size], side) > _worst(row, side):
            laid, left = _lay(row, left)
            made += laid
            row = []
        row.append(size)
    return [*made, *_lay(row, left)[0]] if row else made


def _worst(row: Sequence[float], side: float) -> float:
    """The longest of the row's rectangles: its long side over its short one."""
    whole = sum(row)
    if not whole or not side:
        return float("inf")
    return max(max(side**2 * size / whole**2, whole**2 / (side**2 * size)) for size in row)


def _lay(row: Sequence[float], area: Area) -> tuple[list[Area], Area]:
    """The row's rectangles along the shorter side, and what is left of the area."""
    whole, made, at = sum(row), list[Area](), 0.0
    upright = area.width >= area.height
    side = area.height if upright else area.width
    deep = whole / side if side else 0.0
    for size in row:
        long = size / deep if deep else 0.0
        if upright:
            made.append(Area(area.x, area.y + at, deep, long))
        else:
            made.append(Area(area.x + at, area.y, long, deep))
        at += long
    if upright:
        return made, Area(area.x + deep, area.y, area.width - deep, area.height)
    return made, Area(area.x, area.y + deep, area.width, area.height - deep)


def _drawn(tiles: Sequence[Tile], area: Area) -> Iterator[str]:
    shown = sorted((tile for tile in tiles if tile.value > 0), key=lambda tile: -tile.value)
    for tile, place in zip(shown, squarified([t.value for t in shown], area), strict=True):
        if min(place.width, place.height) < _SMALL:
            continue
        yield _rectangle(tile, place)
        inside = _inside(place)
        if tile.parts and min(inside.width, inside.height) > _SMALL:
            yield from _drawn(tile.parts, inside)


def _inside(area: Area) -> Area:
    """Where the parts of a tile stand, under its name."""
    head = _HEAD if _has_head(area) else _GAP
    return Area(
        area.x + _GAP, area.y + head, area.width - 2 * _GAP, max(area.height - head - _GAP, 0)
    )


def _has_head(area: Area) -> bool:
    """Whether there is room for a name above parts."""
    return area.height > 2 * _HEAD


def _rectangle(tile: Tile, area: Area) -> str:
    """The tile's area, and as much of its name as has room."""
    letters = int((area.width - 6) / _LETTER)
    name = tile.name if len(tile.name) <= letters else f"{tile.name[: max(letters - 1, 0)]}…"
    text, room = "", _has_head(area) if tile.parts else area.height >= _HEAD
    if letters >= 3 and room:
        text = f'<text x="{area.x + 3:.1f}" y="{area.y + 11.5:.1f}">{escape(name)}</text>'
    kind = "whole" if tile.parts else f"c{tile.kind}"
    return (
        f'<g><title>{escape(tile.said)}</title><rect class="{kind}" x="{area.x:.1f}"'
        f' y="{area.y:.1f}" width="{area.width:.1f}" height="{area.height:.1f}"/>{text}</g>'
    )
