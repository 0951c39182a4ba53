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
_NAME_HEIGHT = 15  # of a module's name above its parts
_GAP = 2
_LETTER_WIDTH = 6.6  # at the font's 12 px
_MIN_SIDE = 0.6  # smaller sides are not drawn


@dataclass(frozen=True, slots=True)
class Tile:
    """A node of the tree map.

    Attributes:
        name: written in the tile if there is room.
        value: its size in any unit; with parts, the sum of theirs.
        tooltip: text shown when it is pointed at.
        kind: 0 to 3, the colour.
        parts: tiles inside it.
    """

    name: str
    value: float
    tooltip: str
    kind: int = 0
    parts: tuple[Tile, ...] = ()


class Area(NamedTuple):
    """A rectangle of the drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def transposed(self) -> Area:
        """The area with its sides exchanged, mirrored at the diagonal."""
        return Area(self.y, self.x, self.height, self.width)


def tree_map(tiles: Sequence[Tile], title: str) -> str:
    """Return the drawing as inline SVG with the page's colours; "" if empty."""
    body = "".join(_draw_tiles(tiles, Area(0, 0, _WIDTH, _HEIGHT)))
    if not body:
        return ""
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def squarify(values: Sequence[float], area: Area) -> list[Area]:
    """Return a rectangle for each value, which together fill the area.

    Rows of rectangles are laid along the shorter side of the area that remains. A value joins the
    row unless that makes the rectangles of the row less square; then it starts the next row.

    Args:
        values: positive, descending.
        area: rectangle to divide.
    """
    if not values:
        return []

    px2_per_unit = area.width * area.height / sum(values)
    remaining_area = area
    areas = list[Area]()
    row: list[float] = []  # sizes in px^2
    for value in values:
        size = value * px2_per_unit
        side = min(remaining_area.width, remaining_area.height)
        if row and _worst_aspect([*row, size], side) > _worst_aspect(row, side):
            row_areas, remaining_area = _lay_row(row, remaining_area)
            areas += row_areas
            row = []
        row.append(size)
    last_row_areas, _ = _lay_row(row, remaining_area)
    return [*areas, *last_row_areas]


def _worst_aspect(row: Sequence[float], side: float) -> float:
    """Return the highest aspect ratio of a row's rectangles, inf for rectangles without area.

    `row`: sizes in px^2; `side`: the length that they share.
    """
    total = sum(row)
    if not total or not side:
        return float("inf")
    depth = total / side
    aspects = [size / depth**2 for size in row]  # length over depth of each
    return max(max(aspects), 1 / min(aspects))


def _lay_row(row: Sequence[float], area: Area) -> tuple[list[Area], Area]:
    """Place a row along the shorter side of an area; `row`: sizes in px^2.

    Returns:
        (the row's rectangles, the remaining area).
    """
    if area.width < area.height:  # the same with the sides exchanged
        areas, remaining_area = _lay_row(row, area.transposed)
        return [row_area.transposed for row_area in areas], remaining_area.transposed

    # the row is a column at the left of the area, `depth` wide. Rounding may leave an area without
    # height to the last row: its rectangles are empty
    depth = sum(row) / area.height if area.height else 0.0
    areas = []
    y = area.y
    for size in row:
        length = size / depth if depth else 0.0
        areas.append(Area(area.x, y, depth, length))
        y += length
    return areas, Area(area.x + depth, area.y, area.width - depth, area.height)


def _draw_tiles(tiles: Sequence[Tile], area: Area) -> Iterator[str]:
    """Yield the drawing of tiles and of their parts; those too small to see are left out."""
    tiles = [tile for tile in tiles if tile.value > 0]
    tiles.sort(key=lambda tile: -tile.value)
    areas = squarify([tile.value for tile in tiles], area)
    for tile, tile_area in zip(tiles, areas, strict=True):
        if min(tile_area.width, tile_area.height) < _MIN_SIDE:
            continue
        yield _draw_tile(tile, tile_area)
        parts_area = _parts_area(tile_area)
        if tile.parts and min(parts_area.width, parts_area.height) > _MIN_SIDE:
            yield from _draw_tiles(tile.parts, parts_area)


def _parts_area(area: Area) -> Area:
    """Return the area for the parts of a tile, below its name."""
    top = _NAME_HEIGHT if _has_name_above(area) else _GAP
    return Area(
        area.x + _GAP, area.y + top, area.width - 2 * _GAP, max(area.height - top - _GAP, 0)
    )


def _has_name_above(area: Area) -> bool:
    """Whether there is room for a name above the parts."""
    return area.height > 2 * _NAME_HEIGHT


def _draw_tile(tile: Tile, area: Area) -> str:
    """Draw a tile without its parts: its area, and as much of its name as fits.

    A name of which less than three letters fit is left out.
    """
    # with 3 px free at each side
    max_letters = int((area.width - 6) / _LETTER_WIDTH)
    name = tile.name
    if len(name) > max_letters:
        name = f"{name[: max(max_letters - 1, 0)]}…"
    kind = f"c{tile.kind}"  # its class in the page's style
    has_room = area.height >= _NAME_HEIGHT
    if tile.parts:  # they are drawn later, below the name
        kind = "whole"
        has_room = _has_name_above(area)
    text = ""
    if max_letters >= 3 and has_room:
        text = f'<text x="{area.x + 3:.1f}" y="{area.y + 11.5:.1f}">{escape(name)}</text>'
    return (
        f'<g><title>{escape(tile.tooltip)}</title><rect class="{kind}" x="{area.x:.1f}"'
        f' y="{area.y:.1f}" width="{area.width:.1f}" height="{area.height:.1f}"/>{text}</g>'
    )


_HEADS = ("node", "module", "operation", "time", "share", "MFLOPs", "parameters")
_PRODUCT_COLOUR, _OTHER_COLOUR = 1, 0  # of the page's style


def profile_page(profile: GraphProfile, *, name: str, notes: Sequence[str]) -> str:
    """Return the complete page.

    Args:
        profile: result of `deploy.fx.profile.profile`.
        name: of the model.
        notes: sentences above the drawing.
    """
    title = f"Profile of {name}"
    body = (
        f"<h1>{escape(title)}</h1>",
        tiles(_main_figures(profile)),
        block_html(Bullets(notes)),
        *sections_html(_sections(profile)),
    )
    return page(title, "\n".join(body))


def _main_figures(profile: GraphProfile) -> Iterator[tuple[str, str]]:
    """Yield (value, label) of the time, the products and the parameters of all nodes."""
    yield _time_text(profile.seconds), "one run, node by node"
    yield f"{profile.macs / 1e6:,.1f} M", "multiply-accumulates"
    yield f"{profile.parameters / 1e6:,.2f} M", "parameters"


def _sections(profile: GraphProfile) -> Iterator[Section]:
    """Yield the tree map of time, and the table of all nodes."""
    if picture := tree_map(_module_tiles(profile.nodes, ()), "Time by module"):
        drawing = Drawing(f"<figure>{picture}{_LEGEND}</figure>")
        yield Section("Time by module", (drawing,), folded=False)
    nodes = sorted(profile.nodes, key=lambda node: -node.seconds)
    table = Table(_HEADS, list(map(_node_row, nodes)))
    yield Section("Nodes, slowest first", (table,), rows=len(nodes))


_LEGEND = (
    '<figcaption><ul class="legend"><li><i class="c1">■</i> convolutions and matrix products</li>'
    '<li><i class="c0">■</i> all else</li></ul>Areas are mean times; point at one for its figures.'
    "</figcaption>"
)


def _module_tiles(nodes: Iterable[NodeCost], path: tuple[str, ...]) -> tuple[Tile, ...]:
    """Return tiles of a module's submodules, and of the nodes that are in none of them.

    A tile is an area of the tree map; a submodule's tile has the tiles of its parts inside.

    Args:
        nodes: all nodes of the module.
        path: its name, split at the dots; () for the model itself.
    """
    nodes_by_submodule: dict[str, list[NodeCost]] = {}
    tiles = []
    for node in nodes:
        module_path = list(filter(None, node.module.split(".")))  # [] if it is in no submodule
        if len(module_path) > len(path):
            submodule = module_path[len(path)]
            nodes_by_submodule.setdefault(submodule, []).append(node)
        else:
            tiles.append(_node_tile(node, node.name))
    for name, submodule_nodes in nodes_by_submodule.items():
        if len(submodule_nodes) == 1:  # such as a Linear: one tile, under the submodule's name
            tiles.append(_node_tile(submodule_nodes[0], name))
            continue
        submodule_path = (*path, name)
        seconds = sum(node.seconds for node in submodule_nodes)
        tooltip = f"{'.'.join(submodule_path)}: {_time_text(seconds)}"
        parts = _module_tiles(submodule_nodes, submodule_path)
        tiles.append(Tile(name, seconds, tooltip, parts=parts))
    return tuple(tiles)


def _node_tile(node: NodeCost, name: str) -> Tile:
    """Return the tile of one node; products, which have FLOPs, have a colour of their own."""
    tooltip = (
        f"{node.target} ({node.name}): {_time_text(node.seconds)},"
        f" {node.percent:.1f} %, {node.flops / 1e6:,.1f} MFLOPs"
    )
    return Tile(name, node.seconds, tooltip, _PRODUCT_COLOUR if node.flops else _OTHER_COLOUR)


def _node_row(node: NodeCost) -> list[str]:
    """Return a node under `_HEADS`."""
    return [
        node.name,
        node.module,
        node.target,
        _time_text(node.seconds),
        f"{node.percent:.2f} %",
        f"{node.flops / 1e6:,.3f}",
        f"{node.parameters:,}",
    ]


def _time_text(seconds: float) -> str:
    """Return a time in ms as text."""
    return figures.milliseconds(seconds * 1e3)
