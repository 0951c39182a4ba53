"""A profile of a PyTorch model as a page: figures, a tree map of time by module, every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from deploy.report import figures, markup
from deploy.report.page import page
from deploy.report.profile_page import Tile, tree_map
from deploy.report.section import Section, written

if TYPE_CHECKING:
    from deploy.fx.profile import NodeCost, Profile

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
