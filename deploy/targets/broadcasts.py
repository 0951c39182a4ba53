"""Factors of a few channels, repeated along a row, as ONNX Runtime's integer kernel wants them.

It multiplies pixel by pixel what has a factor a channel, since its Convs keep the channels of a
pixel together; with few channels it does little else than begin anew. A row of factors makes it
begin once a row (16 channels of 56 x 56: 47 us, 18 with the Tile); all values keep their bits::

    Q -> DQ [n, c, 1, 1]             -> Mul        Q -> Tile -> DQ [n, c, 1, w] -> Mul
    Q -> DQ [n, c, h, w] ------------^             Q -> DQ [n, c, h, w] -----------^

Source: onnxruntime 1.32, qlinear_binary_op.cc and element_wise_ops.h (BroadcastLooper).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import drop_dead, replace_nodes
from deploy.graph.gates import Gate
from deploy.graph.index import Graph

_FEW = 64  # channels, of which a pixel's are multiplied no faster than it is begun


def write_broadcasts(model: onnx.ModelProto, like: Graph, gates: Iterable[Gate]) -> None:
    """Repeat the few factors of every int8 Mul along the rows of what it multiplies, in place.

    Args:
        model: with pairs; its Muls have the names that they have in the model without.
        like: the model without pairs, which knows shapes.
        gates: those in int8, of which no more than the last node is left, a Mul by the factor.
    """
    widths = _widths(like, gates)
    if not widths:
        return
    graph = Graph(model)
    before: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        place, width = widths.get(node.name, (0, 0))
        if width and node.op_type == "Mul" and _is_int8(graph, node):
            before[node.name] = _repeated(model, graph.producer[node.input[place]], node, width)
            node.input[place] = before[node.name][-1].output[0]
    if before:
        nodes = [n for old in model.graph.node for n in (*before.get(old.name, []), old)]
        replace_nodes(model.graph, nodes)
        drop_dead(model.graph)  # what dequantized the factors, where nobody else reads that


def _widths(like: Graph, gates: Iterable[Gate]) -> dict[str, tuple[int, int]]:
    """Mul -> which of its inputs has a factor a channel, of a few, and how wide the other is."""
    pairs = {node.name: tuple(node.input) for node in like.nodes if node.op_type == "Mul"}
    pairs |= {gate.name: (gate.factor, gate.source) for gate in gates}
    found = {}
    for name, both in pairs.items():
        for place in (0, 1):
            width = _width(like.shapes, both[1 - place], both[place])
            if width:
                found[name] = place, width
    return found


def _width(
    shapes: Mapping[str, tuple[int | str | None, ...] | None], picture: str, factors: str
) -> int:
    """How wide a picture is that factors multiply; 0 where they are not a few channels'."""
    wide, few = shapes.get(picture) or (), shapes.get(factors) or ()
    if len(wide) != 4 or len(few) != 4 or few[2:] != (1, 1) or few[:2] != wide[:2]:
        return 0
    channels, high, width = (size if isinstance(size, int) else 0 for size in wide[1:])
    return width if 0 < channels <= _FEW and min(high, width) > 1 else 0


def _is_int8(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node stands between pairs, and a Conv reads what it makes."""
    after = graph.only_reader(node.output[0])
    if after is None or after.op_type != "QuantizeLinear":
        return False
    for name in node.input:
        if name not in graph.producer or graph.producer[name].op_type != "DequantizeLinear":
            return False
    read = [
        reader
        for back in graph.readers.get(after.output[0], [])
        for reader in graph.readers.get(back.output[0], [])
    ]
    return any(reader.op_type == "Conv" for reader in read)


def _repeated(
    model: onnx.ModelProto, dequantize: onnx.NodeProto, node: onnx.NodeProto, width: int
) -> list[onnx.NodeProto]:
    """The Tile of the integers of the factors, and what reads it."""
    name, often = f"{node.name}/row", f"calib8/row/{width}"
    if often not in {tensor.name for tensor in model.graph.initializer}:
        times = np.array([1, 1, 1, width], np.int64)
        model.graph.initializer.append(numpy_helper.from_array(times, often))
    integers, scale, zero = dequantize.input
    return [
        helper.make_node("Tile", [integers, often], [f"{name}/quantized"], name=f"{name}/Tile"),
        helper.make_node(
            "DequantizeLinear", [f"{name}/quantized", scale, zero], [name], name=f"{name}/DQ"
        ),
    ]
