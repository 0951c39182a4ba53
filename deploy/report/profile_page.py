"""Profile of a PyTorch model as a page: main figures, the time by module, every node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from deploy.report import figures
from deploy.report.blocks import Bullets, Section, Table, block_html, sections_html
from deploy.report.page import page, tiles

if TYPE_CHECKING:
    from deploy.fx.profile import GraphProfile, NodeCost

_MODULE_HEADS = ("module", "nodes", "time", "share", "MFLOPs", "parameters")
_NODE_HEADS = ("node", "module", "operation", "time", "share", "MFLOPs", "parameters")


def profile_page(profile: GraphProfile, *, name: str, notes: Sequence[str] = ()) -> str:
    """Return the complete page.

    Args:
        profile: result of `deploy.fx.profile.profile`.
        name: of the model.
        notes: sentences above the tables.
    """
    title = f"Profile of {name}"
    body = (
        f"<h1>{escape(title)}</h1>",
        tiles(_main_figures(profile)),
        block_html(Bullets(notes)) if notes else "",
        *sections_html(list(_sections(profile))),
    )
    return page(title, "\n".join(body))


def _main_figures(profile: GraphProfile) -> Iterator[tuple[str, str]]:
    """Yield (value, label) of the time, the products and the parameters of all nodes."""
    yield _time_text(profile.seconds), "one run, node by node"
    yield f"{profile.macs / 1e6:,.1f} M", "multiply-accumulates"
    yield f"{profile.parameters / 1e6:,.2f} M", "parameters"


def _sections(profile: GraphProfile) -> Iterator[Section]:
    """Yield the time of modules with several nodes, and the table of all nodes."""
    if module_rows := _module_rows(profile.nodes):
        yield Section("Time by module", (Table(_MODULE_HEADS, module_rows),), folded=False)
    nodes = sorted(profile.nodes, key=lambda node: -node.seconds)
    rows = [[node.name, node.module, node.target, *_cost_cells([node])] for node in nodes]
    yield Section("Nodes, slowest first", (Table(_NODE_HEADS, rows),), len(nodes))


def _module_rows(nodes: Sequence[NodeCost]) -> list[list[str]]:
    """Return the costs of each module with several nodes, the slowest first.

    A module's nodes are its own and those of its submodules.
    """
    nodes_by_module = defaultdict[str, list["NodeCost"]](list)
    for node in nodes:
        module = node.module
        while module:
            nodes_by_module[module].append(node)
            module, _, _ = module.rpartition(".")
    modules = sorted(nodes_by_module, key=lambda module: -_total_seconds(nodes_by_module[module]))
    rows = []
    for module in modules:
        module_nodes = nodes_by_module[module]
        if len(module_nodes) > 1:  # a single node is in the other table
            rows.append([module, str(len(module_nodes)), *_cost_cells(module_nodes)])
    return rows


def _cost_cells(nodes: Sequence[NodeCost]) -> list[str]:
    """Return time, share, MFLOPs and parameters of nodes together."""
    return [
        _time_text(_total_seconds(nodes)),
        f"{sum(node.percent for node in nodes):.2f} %",
        f"{sum(node.flops for node in nodes) / 1e6:,.3f}",
        f"{sum(node.parameters for node in nodes):,}",
    ]


def _total_seconds(nodes: Sequence[NodeCost]) -> float:
    """Return the time of all these nodes in one run."""
    return sum(node.seconds for node in nodes)


def _time_text(seconds: float) -> str:
    """Return a time in ms as text."""
    return figures.milliseconds(seconds * 1e3)
