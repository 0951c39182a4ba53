"""First Convs of pictures with a fourth channel, as ONNX Runtime's integer kernel wants them.

It gathers what each window sees a pixel at a time, and a pixel of three bytes takes longer than one
of four (AVX512-VNNI, 3x3 over 224x224 to 32 channels: 365 us, and 182 with the fourth). So the
integers of the picture get channels of real zeros, for which the weights are 0; all values keep
their bits::

    Q -> DQ -> Conv [32, 3, 3, 3]      Q -> Pad -> DQ -> Conv [32, 4, 3, 3]

A window of one pixel gathers nothing, and few channels of output are not worth the Pad.

Source: ONNX operators Conv-11, Pad-13, QuantizeLinear-13.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import drop_dead, replace_nodes
from deploy.graph.index import Graph, attributes
from deploy.graph.width import wide_for
from deploy.targets.onnxruntime.conv_rewrites import integers_of, wider

_AT_ONCE = 4
_LEAST = 16  # channels of output


def write_stems(model: onnx.ModelProto, like: Graph) -> None:
    """Give the int8 Convs of fewer than four channels four, in place.

    Args:
        model: with pairs, opset 13 or later; every node has a name of its own.
        like: the model without pairs.
    """
    if not any(_is_stem(node, like.initializers.get(node.input[1])) for node in _convs(like)):
        return
    graph = Graph(model)
    before: dict[str, list[onnx.NodeProto]] = {}
    for node in _convs(graph):
        pair = _pair(graph, node)
        if pair is not None:
            weight = graph.initializers[graph.producer[node.input[1]].input[0]]
            more = -weight.dims[1] % _AT_ONCE
            wider(model, graph, node, 1, [1], more)
            before[node.name] = _padded(model, node, pair, len(weight.dims), more)
    if before:
        nodes = [n for old in graph.nodes for n in (*before.get(old.name, []), old)]
        replace_nodes(model.graph, nodes)
        drop_dead(model.graph)  # the pair that nobody else reads


def _convs(graph: Graph) -> list[onnx.NodeProto]:
    return [node for node in graph.nodes if node.op_type == "Conv"]


def _is_stem(node: onnx.NodeProto, weight: onnx.TensorProto | None) -> bool:
    """Whether a Conv of this weight is worth more channels."""
    if weight is None or attributes(node).get("group", 1) != 1:
        return False
    outer, inner, *window = weight.dims
    return bool(inner < _AT_ONCE and outer >= _LEAST and math.prod(window) > 1)


def _pair(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The DequantizeLinear that a Conv reads, where more channels are worth it."""
    weight, pair = integers_of(graph, node), graph.producer.get(node.input[0])
    if pair is None or pair.op_type != "DequantizeLinear" or not _is_stem(node, weight):
        return None
    return pair if all(graph.number(name) is not None for name in pair.input[1:]) else None


def _padded(
    model: onnx.ModelProto, node: onnx.NodeProto, pair: onnx.NodeProto, rank: int, more: int
) -> list[onnx.NodeProto]:
    """What stands before a Conv, which is told to read it."""
    source = pair.input[0]
    name = wide_for(source, node.name)  # a node may be called as a tensor that gets wider
    ends = np.zeros(2 * rank, np.int64)
    ends[rank + 1] = more
    model.graph.initializer.append(numpy_helper.from_array(ends, f"{name}/pads"))
    pad = helper.make_node("Pad", [source, f"{name}/pads", pair.input[2]], [name], name=name)
    node.input[0] = f"{name}/dequantized"
    read = helper.make_node(
        "DequantizeLinear", [name, *pair.input[1:]], [node.input[0]], name=f"{name}/DQ"
    )
    return [pad, read]
