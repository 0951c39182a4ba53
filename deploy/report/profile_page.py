"""A profile of a PyTorch model as a page: figures, a tree map of time by module, every node.

A tree map: parts within parts, each an area as large as its share of the whole.

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from deploy.report import figures
from deploy.report import page as markup
from deploy.report.page import Section, page, written

if TYPE_CHECKING:
    from deploy.fx.profile import NodeCost, Profile


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


_HEADS = ("node", "module", "operation", "time", "share", "MFLOPs", "parameters")
_PRODUCTS, _REST = 1, 0  # colours of the page's style


def profile_page(found: Profile, *, name: str, notes: Sequence[str] = ()) -> str:
    """The whole page.

    Args:
        found: of `deploy.fx.profile.profile`.
        name: of the model.
        notes: sentences on how it was measured.
    """
    title = f"Profile of {name}"
    tiles = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for value, label in _figures(found)
    )
    body = (
        f"<h1>{escape(title)}</h1>",
        f'<div class="tiles">{tiles}</div>',
        markup.bullets(notes, "notes") if notes else "",
        *written(list(_sections(found))),
    )
    return page(title, "\n".join(body))


def _figures(found: Profile) -> Iterator[tuple[str, str]]:
    yield figures.milliseconds(found.seconds * 1e3), "one run, node by node"
    yield f"{found.macs / 1e6:,.1f} M", "multiply-accumulates"
    yield f"{found.parameters / 1e6:,.2f} M", "parameters"


def _sections(found: Profile) -> Iterator[Section]:
    picture = tree_map(_tiles(found.nodes, ()), "Time by module")
    if picture:
        drawn = f"<figure>{picture}{_LEGEND}</figure>"
        yield Section(title="Time by module", html=drawn, folded=False)
    slowest = sorted(found.nodes, key=lambda node: -node.seconds)
    rows = [_row(node) for node in slowest]
    table = markup.table(_HEADS, rows)
    yield Section(title="Nodes, slowest first", html=table, rows=len(rows))


_LEGEND = (
    '<figcaption><ul class="legend"><li><i class="c1">■</i> convolutions and matrix products</li>'
    '<li><i class="c0">■</i> all else</li></ul>Areas are mean times; point at one for its figures.'
    "</figcaption>"
)


def _tiles(nodes: Iterable[NodeCost], path: tuple[str, ...]) -> tuple[Tile, ...]:
    """What a module consists of: its own modules, and nodes that belong to none of them."""
    inner: dict[str, list[NodeCost]] = {}
    made = []
    for node in nodes:
        names = tuple(node.module.split(".")) if node.module else ()
        if len(names) > len(path):
            inner.setdefault(names[len(path)], []).append(node)
        else:
            made.append(_leaf(node, node.name))
    for name, own in inner.items():
        parts = _tiles(own, (*path, name))
        if len(parts) == 1 and not parts[0].parts:  # a layer that is one node
            made.append(_leaf(own[0], name))
        else:
            seconds = sum(node.seconds for node in own)
            said = f"{'.'.join((*path, name))}: {figures.milliseconds(seconds * 1e3)}"
            made.append(Tile(name, seconds, said, parts=parts))
    return tuple(made)


def _leaf(node: NodeCost, name: str) -> Tile:
    said = (
        f"{node.target} ({node.name}): {figures.milliseconds(node.seconds * 1e3)},"
        f" {node.percent:.1f} %, {node.flops / 1e6:,.1f} MFLOPs"
    )
    return Tile(name, node.seconds, said, _PRODUCTS if node.flops else _REST)


def _row(node: NodeCost) -> list[str]:
    return [
        node.name,
        node.module,
        node.target,
        figures.milliseconds(node.seconds * 1e3),
        f"{node.percent:.2f} %",
        f"{node.flops / 1e6:,.3f}",
        f"{node.parameters:,}",
    ]
