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
        texts = (target_name(node.target), _text(node.args), _text(node.kwargs))
        rows.append((node.op, node.name, *texts))
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


def _text(value: Any) -> str:
    """Return repr of a value, with nodes and functions as their names."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(_text, value))}{comma})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        entries = [f"{key}: {_text(item)}" for key, item in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if callable(value) and hasattr(value, "__name__"):
        return target_name(value)
    return _ADDRESS.sub("", repr(value))
