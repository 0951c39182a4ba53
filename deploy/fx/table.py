"""The traced graph as text: an IR table and Python code, equal on every run and machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from deploy.terminal import page

COLUMNS = ("opcode", "name", "target", "args", "kwargs")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HOMES = {"_operator": "operator", "torch._C._nn": "torch.nn.functional", None: "torch"}


def table(graph_module: fx.GraphModule) -> str:
    """One line a node: opcode, name, target, args, kwargs, in the graph's order."""
    rows = [
        (node.op, node.name, target_name(node.target), _text(node.args), _text(node.kwargs))
        for node in graph_module.graph.nodes
    ]
    return columns([COLUMNS, *rows])


def code(graph_module: fx.GraphModule) -> str:
    """The Python source of the graph's forward."""
    return _ADDRESS.sub("", graph_module.code.strip()) + "\n"


def target_name(target: Any) -> str:
    """A module's or method's name as it is; a function's as package.name, with no address."""
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return _ADDRESS.sub("", repr(target))
    home = getattr(target, "__module__", None)
    return f"{_HOMES.get(home, home)}.{name.rpartition('.')[2]}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first a heading, in aligned columns with a rule under the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return page(line.rstrip() for line in lines) + "\n"


def _text(value: Any) -> str:
    """Like repr, with a node as its name and a function as its dotted name."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if callable(value) and hasattr(value, "__name__"):
        return target_name(value)
    return _ADDRESS.sub("", repr(value))
