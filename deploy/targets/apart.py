"""What stays float between two pairs, kept apart from them.

ONNX Runtime makes one integer kernel of an operator between pairs, whoever wanted it in float. A
Sum of one tensor is a copy, past which it moves no pair::

    DQ -> Softmax -> Q              an integer kernel
    DQ -> Sum -> Softmax -> Q       a float one

The integer one may differ (an AveragePool that counts its padding, with ceil_mode: 15.5 dB), and
may be slower: a Softmax of 12 x 128 x 128 takes 0.54 ms of a core, apart 0.14.

Source: onnxruntime 1.32, qdq_selector_action_transformer.cc and qdq_propagation.cc.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from deploy.graph.edit import replace_nodes
from deploy.graph.index import Graph

# Operators with an integer kernel that ONNX Runtime puts in by itself
_FUSED = frozenset(
    {"Add", "Mul", "Concat", "Where", "Sigmoid", "LeakyRelu", "Softmax", "MatMul"}
    | {"AveragePool", "GlobalAveragePool"}
)
# Operators past which it moves a pair
_PASSED = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "MaxPool"}
)


def keep_apart(model: onnx.ModelProto, float_nodes: Collection[str]) -> None:
    """Put a Sum before every node that is to stay float and would not, in place.

    Args:
        model: with pairs.
        float_nodes: names of the nodes that were left in float.
    """
    if not any(node.op_type in _FUSED and node.name in float_nodes for node in model.graph.node):
        return
    graph = Graph(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        if node.name in float_nodes and _fused(graph, node):
            nodes.append(_copy(node))
        nodes.append(node)
    if len(nodes) > len(graph.nodes):
        replace_nodes(model.graph, nodes)


def _fused(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime would run a node on integers."""
    if node.op_type not in _FUSED or not all(_read(graph, tensor) for tensor in _data(node)):
        return False
    return node.op_type == "MatMul" or _written(graph, node.output[0])


def _data(node: onnx.NodeProto) -> list[str]:
    """What a node reads, without a condition."""
    return list(node.input)[node.op_type == "Where" :]


def _read(graph: Graph, tensor: str) -> bool:
    """Whether a tensor comes from a DequantizeLinear."""
    maker = graph.producer.get(tensor)
    while maker is not None and maker.op_type in _PASSED:
        maker = graph.producer.get(maker.input[0])
    return maker is not None and maker.op_type == "DequantizeLinear"


def _written(graph: Graph, tensor: str) -> bool:
    """Whether a tensor goes to a QuantizeLinear."""
    return any(
        node.op_type == "QuantizeLinear"
        or (node.op_type in _PASSED and _written(graph, node.output[0]))
        for node in graph.readers.get(tensor, ())
    )


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """What a node reads from now on: the same values, not from a DequantizeLinear."""
    at = len(node.input) - len(_data(node))
    source, apart = node.input[at], f"{node.output[0]}/apart"
    node.input[at] = apart
    return helper.make_node("Sum", [source], [apart], name=f"{node.name}/apart")
