"""Profile of a PyTorch model as a page: figures, a tree map of time by module, every node.

In a tree map each area is proportional to its share of the total::

    +----------------+-----------+
    | layer1         | layer2    |      a module's area is the sum of its parts';
    |+-------++-----+|+---------+|      areas are as square as possible
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
from deploy.report.blocks import Bullets, Drawing, Section, Table, block_html, sections_html
from deploy.report.page import page, tiles

if TYPE_CHECKING:
    from deploy.fx.profile import GraphProfile, NodeCost


_WIDTH, _HEIGHT = 720, 440
_HEAD = 15  # height of a module's name above its parts
_GAP = 2
_LETTER = 6.6  # width of a letter at the font's 12 px
_SMALL = 0.6  # smaller sides are not drawn


@dataclass(frozen=True, slots=True)
class Tile:
    """A node of the tree map."""

    name: str
    value: float  # its size in any unit; with parts, the sum of theirs
    tooltip: str
    kind: int = 0  # 0 to 3, the colour
    parts: tuple[Tile, ...] = ()


class Area(NamedTuple):
    """A rectangle of the drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float


def tree_map(tiles: Sequence[Tile], title: str) -> str:
    """Return the drawing as inline SVG with the page's colours; "" if empty."""
    body = "".join(_drawn(tiles, Area(0, 0, _WIDTH, _HEIGHT)))
    if not body:
        return ""
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def squarify(values: Sequence[float], area: Area) -> list[Area]:
    """Return a rectangle for each value, which together fill the area.

    `values`: positive, descending. `area`: rectangle to divide.
    """
    remaining, scale = area, area.width * area.height / sum(values) if values else 0.0
    sizes, areas, row = [value * scale for value in values], list[Area](), list[float]()
    for size in sizes:
        side = min(remaining.width, remaining.height)
        if row and _worst([*row, size], side) > _worst(row, side):
            placed, remaining = _lay(row, remaining)
            areas += placed
            row = []
        row.append(size)
    return [*areas, *_lay(row, remaining)[0]] if row else areas


def _worst(row: Sequence[float], side: float) -> float:
    """Return the highest aspect ratio of the row's rectangles."""
    total = sum(row)
    if not total or not side:
        return float("inf")
    return max(max(side**2 * size / total**2, total**2 / (side**2 * size)) for size in row)


def _lay(row: Sequence[float], area: Area) -> tuple[list[Area], Area]:
    """Place the row's rectangles along the shorter side; return them and the remaining area."""
    total, areas, offset = sum(row), list[Area](), 0.0
    upright = area.width >= area.height
    side = area.height if upright else area.width
    depth = total / side if side else 0.0
    for size in row:
        length = size / depth if depth else 0.0
        if upright:
            areas.append(Area(area.x, area.y + offset, depth, length))
        else:
            areas.append(Area(area.x + offset, area.y, length, depth))
        offset += length
    if upright:
        return areas, Area(area.x + depth, area.y, area.width - depth, area.height)
    return areas, Area(area.x, area.y + depth, area.width, area.height - depth)


def _drawn(tiles: Sequence[Tile], area: Area) -> Iterator[str]:
    shown = sorted((tile for tile in tiles if tile.value > 0), key=lambda tile: -tile.value)
    for tile, place in zip(shown, squarify([t.value for t in shown], area), strict=True):
        if min(place.width, place.height) < _SMALL:
            continue
        yield _rectangle(tile, place)
        inside = _inside(place)
        if tile.parts and min(inside.width, inside.height) > _SMALL:
            yield from _drawn(tile.parts, inside)


def _inside(area: Area) -> Area:
    """Return the area for the parts of a tile, below its name."""
    head = _HEAD if _has_head(area) else _GAP
    return Area(
        area.x + _GAP, area.y + head, area.width - 2 * _GAP, max(area.height - head - _GAP, 0)
    )


def _has_head(area: Area) -> bool:
    """Whether there is room for a name above the parts."""
    return area.height > 2 * _HEAD


def _rectangle(tile: Tile, area: Area) -> str:
    """Draw the tile's area, and as much of its name as fits."""
    letters = int((area.width - 6) / _LETTER)
    name = tile.name if len(tile.name) <= letters else f"{tile.name[: max(letters - 1, 0)]}…"
    text, room = "", _has_head(area) if tile.parts else area.height >= _HEAD
    if letters >= 3 and room:
        text = f'<text x="{area.x + 3:.1f}" y="{area.y + 11.5:.1f}">{escape(name)}</text>'
    kind = "whole" if tile.parts else f"c{tile.kind}"
    return (
        f'<g><title>{escape(tile.tooltip)}</title><rect class="{kind}" x="{area.x:.1f}"'
        f' y="{area.y:.1f}" width="{area.width:.1f}" height="{area.height:.1f}"/>{text}</g>'
    )


_HEADS = ("node", "module", "operation", "time", "share", "MFLOPs", "parameters")
_PRODUCTS, _REST = 1, 0  # colours of the page's style


def profile_page(found: GraphProfile, *, name: str, notes: Sequence[str] = ()) -> str:
    """Return the complete page.

    `found`: result of `deploy.fx.profile.profile`.
    """
    title = f"Profile of {name}"
    body = (
        f"<h1>{escape(title)}</h1>",
        tiles(_figures(found)),
        block_html(Bullets(notes)) if notes else "",
        *sections_html(list(_sections(found))),
    )
    return page(title, "\n".join(body))


def _figures(found: GraphProfile) -> Iterator[tuple[str, str]]:
    yield figures.milliseconds(found.seconds * 1e3), "one run, node by node"
    yield f"{found.macs / 1e6:,.1f} M", "multiply-accumulates"
    yield f"{found.parameters / 1e6:,.2f} M", "parameters"


def _sections(found: GraphProfile) -> Iterator[Section]:
    picture = tree_map(_tiles(found.nodes, ()), "Time by module")
    if picture:
        drawn = Drawing(f"<figure>{picture}{_LEGEND}</figure>")
        yield Section("Time by module", (drawn,), folded=False)
    rows = [_row(node) for node in sorted(found.nodes, key=lambda node: -node.seconds)]
    yield Section("Nodes, slowest first", (Table(_HEADS, rows),), len(rows))


_LEGEND = (
    '<figcaption><ul class="legend"><li><i class="c1">■</i> convolutions and matrix products</li>'
    '<li><i class="c0">■</i> all else</li></ul>Areas are mean times; point at one for its figures.'
    "</figcaption>"
)


def _tiles(nodes: Iterable[NodeCost], path: tuple[str, ...]) -> tuple[Tile, ...]:
    """Return a module's submodules and its own nodes."""
    inner: dict[str, list[NodeCost]] = {}
    tiles = []
    for node in nodes:
        names = tuple(node.module.split(".")) if node.module else ()
        if len(names) > len(path):
            inner.setdefault(names[len(path)], []).append(node)
        else:
            tiles.append(_leaf(node, node.name))
    for name, members in inner.items():
        parts = _tiles(members, (*path, name))
        if len(parts) == 1 and not parts[0].parts:  # a layer that is one node
            tiles.append(_leaf(members[0], name))
        else:
            seconds = sum(node.seconds for node in members)
            tooltip = f"{'.'.join((*path, name))}: {figures.milliseconds(seconds * 1e3)}"
            tiles.append(Tile(name, seconds, tooltip, parts=parts))
    return tuple(tiles)


def _leaf(node: NodeCost, name: str) -> Tile:
    tooltip = (
        f"{node.target} ({node.name}): {figures.milliseconds(node.seconds * 1e3)},"
        f" {node.percent:.1f} %, {node.flops / 1e6:,.1f} MFLOPs"
    )
    return Tile(name, node.seconds, tooltip, _PRODUCTS if node.flops else _REST)


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
