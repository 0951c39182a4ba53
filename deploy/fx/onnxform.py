"""What is changed in an ONNX model that torch's exporter wrote: its notes, and one operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deploy.graph.edit import copied, drop_unread
from deploy.graph.index import attributes

if TYPE_CHECKING:
    import onnx


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the exporter's notes, and with GlobalAveragePool by its name.

    The notes hold paths of this machine. The exporter writes the pool as ReduceMean, for which
    runtimes have no int8 kernel.
    """
    copy = copied(model)
    graph = copy.graph
    for holder in (copy, graph, *graph.node, *graph.initializer, *graph.value_info):
        del holder.metadata_props[:]
        holder.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    _name_global_pools(graph)
    return copy


def _name_global_pools(graph: onnx.GraphProto) -> None:
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in _values(graph)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "ReduceMean" and _is_global_pool(node, ranks, constants):
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
    drop_unread(graph)


def _is_global_pool(
    node: onnx.NodeProto, ranks: dict[str, int], constants: dict[str, onnx.TensorProto]
) -> bool:
    """Whether it is the mean over H and W of [N, C, H, W], both kept as 1."""
    from onnx import numpy_helper

    kept = attributes(node).get("keepdims", 1)
    if len(node.input) != 2 or node.input[1] not in constants or not kept:
        return False
    axes = np.asarray(numpy_helper.to_array(constants[node.input[1]])).reshape(-1)
    return ranks.get(node.input[0]) == 4 and sorted(int(a) % 4 for a in axes) == [2, 3]


def _values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.value_info, *graph.output]
