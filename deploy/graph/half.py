"""Nodes for which float16 is too narrow.

A value past 65504 is infinity in it, and a constant of 1e-9 that keeps a logarithm finite is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from deploy.graph.flow import MOVES
from deploy.graph.index import Graph

if TYPE_CHECKING:
    import onnx

_FLOAT = 1  # onnx.TensorProto
_LARGEST = 65504 / 8  # what float16 holds, with room for what calibration has not seen
_VANISHES = 2.0**-25  # float16 rounds this to 0, and what is less
_GUARDS = frozenset({"Add", "Clip", "Max", "Sub"})  # with such a constant, of a Log or a Div behind
_PASSES = MOVES | {"Expand", "Identity", "Tile"}  # give what they read
_ZERO = ", is 0 in float16"  # ends what is said of a constant


def wide_nodes(
    graph: Graph, largest: Mapping[str, float], *, but: Collection[str]
) -> dict[str, str]:
    """Node -> why it must not compute in float16.

    Of a node whose constant is 0 in it, also those that need what this keeps above 0.

    Args:
        graph: of the float model.
        largest: tensor -> largest |x| that was seen, as far as it is known.
        but: nodes that run in int8.
    """
    why: dict[str, str] = {}
    for node in graph.nodes:
        said = too_wide(graph, node, largest) if node.op_type != "Constant" else ""
        for each in _with_readers(graph, node, said) if said else ():
            why.setdefault(each.name, said)
    wide = why.keys() - but
    return {node.name: why[node.name] for node in graph.nodes if node.name in wide}


def _with_readers(graph: Graph, node: onnx.NodeProto, said: str) -> Iterator[onnx.NodeProto]:
    yield node
    if said.endswith(_ZERO) and node.op_type != "Div":
        yield from graph.readers.get(node.output[0], ())


def too_wide(graph: Graph, node: onnx.NodeProto, largest: Mapping[str, float]) -> str:
    """What float16 does not hold of what a node reads or makes; "" where it holds it all.

    Args:
        graph: of the float model, or of one with pairs.
        node: one of its nodes.
        largest: tensor of the float model -> largest |x| that was seen.
    """
    for name in (*node.input, *node.output):
        size = _largest_of(graph, name) or largest.get(_plain(name), 0.0)
        if not size <= _LARGEST:
            return f"|{_plain(name)}| reaches {size:.3g}, which is too near float16's 65504"
    return _vanishes(graph, node)


def _vanishes(graph: Graph, node: onnx.NodeProto) -> str:
    """The constant of the node, or of what makes its divisor or what it moves, that is 0 in it."""
    while node.op_type == "Div" or node.op_type in _PASSES:
        made_by = graph.producer.get(node.input[node.op_type == "Div"])
        if made_by is None:
            return ""
        node = made_by
    for name in node.input if node.op_type in _GUARDS else ():
        size = _largest_of(graph, name)
        if 0 < size <= _VANISHES:
            return f"{_plain(name)}, {size:.3g}, which may keep a value above 0{_ZERO}"
    return ""


def _largest_of(graph: Graph, name: str) -> float:
    """The largest |x| of a float constant; 0 of all else."""
    from onnx import numpy_helper

    constant = graph.initializers.get(name)
    if constant is None or constant.data_type != _FLOAT:
        return 0.0
    return float(np.abs(numpy_helper.to_array(constant)).max(initial=0.0))


def _plain(name: str) -> str:
    """The tensor of the float model behind one beside a pair."""
    return name.removesuffix("/dequantized").removesuffix("/float")
