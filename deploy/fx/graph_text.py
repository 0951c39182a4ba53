"""Print a graph as a table or as Python source."""

import re
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from deploy.terminal import join_visible

COLUMNS = ("opcode", "name", "target", "args", "kwargs")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PACKAGES = {"_operator": "operator", "torch._C._nn": "torch.nn.functional", None: "torch"}


def format_graph(graph_module: fx.GraphModule) -> str:
    """Format the graph, one line per node: opcode, name, target, args, kwargs."""
    rows: list[Sequence[str]] = [COLUMNS]
    for node in graph_module.graph.nodes:
        target = target_name(node.target)
        rows.append((node.op, node.name, target, _text(node.args), _text(node.kwargs)))
    return format_columns(rows)


def graph_source(graph_module: fx.GraphModule) -> str:
    """Return the Python source of the graph's forward."""
    return _ADDRESS.sub("", graph_module.code.strip()) + "\n"


def target_name(target: Any) -> str:
    """Return the name of a module or method, or package.name of a function, without addresses."""
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return _ADDRESS.sub("", repr(target))
    package = getattr(target, "__module__", None)
    return f"{_PACKAGES.get(package, package)}.{name.rpartition('.')[2]}"


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text in aligned columns, with a rule under the first row, the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return join_visible(line.rstrip() for line in lines) + "\n"


class _Name(str):
    """A text that is its own repr, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _text(arguments: Any) -> str:
    """Return repr of a node's arguments, with nodes and functions as their names."""
    return _ADDRESS.sub("", repr(fx.node.map_aggregate(arguments, _named)))


def _named(value: Any) -> Any:
    """Return a node or a function as its name; any other value is returned as it is."""
    if isinstance(value, fx.Node):
        return _Name(f"%{value.name}")
    if callable(value) and hasattr(value, "__name__"):
        return _Name(target_name(value))
    return value
