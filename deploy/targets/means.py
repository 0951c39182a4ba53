"""Means over all places of a picture, written as the GlobalAveragePool that they are.

Exporters write what squeezes a picture, in a squeeze-excite or before the last layer, as a
ReduceMean over the last two axes. ONNX Runtime has an integer kernel of the pool alone, and a
float one that reads the layout of its Convs::

    x -> ReduceMean [2, 3] -> m               x -> GlobalAveragePool -> m
    the same without keepdims                 x -> GlobalAveragePool -> Q -> DQ -> Reshape -> m

The pair is that of m, where m has one, so that the Reshape moves integers.

Source: ONNX operators ReduceMean-18 and GlobalAveragePool-1.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import rebuild
from deploy.graph.flow import is_pool
from deploy.graph.index import Graph, attributes

_FLAT = "calib8/flat"  # 0 is "as it was"


def write_means(model: onnx.ModelProto, like: Graph) -> None:
    """Put a GlobalAveragePool in place of every ReduceMean over a picture, in place.

    Args:
        model: with pairs or without.
        like: the model without pairs, which knows ranks.
    """
    means = {n.name for n in like.nodes if n.op_type == "ReduceMean" and is_pool(like, n)}
    if not means:
        return
    pairs = {n.input[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes += _pool(node, pairs.get(node.output[0])) if node.name in means else [node]
    if any(_FLAT in node.input for node in nodes):
        flat = numpy_helper.from_array(np.array([0, -1], np.int64), _FLAT)
        model.graph.initializer.append(flat)
    rebuild(model.graph, nodes)


def _pool(mean: onnx.NodeProto, quantize: onnx.NodeProto | None) -> list[onnx.NodeProto]:
    """The nodes in place of one ReduceMean, whose name the pool keeps."""
    source, output, name = mean.input[0], mean.output[0], mean.name
    if attributes(mean).get("keepdims", 1):
        return [helper.make_node("GlobalAveragePool", [source], [output], name=name)]
    made = f"{output}/pooled"
    nodes = [helper.make_node("GlobalAveragePool", [source], [made], name=name)]
    if quantize is not None:
        integers, parameters = f"{made}/quantized", quantize.input[1:]
        nodes += [
            helper.make_node("QuantizeLinear", [made, *parameters], [integers], name=f"{made}/Q"),
            helper.make_node(
                "DequantizeLinear", [integers, *parameters], [f"{made}/read"], name=f"{made}/DQ"
            ),
        ]
        made = f"{made}/read"
    return [*nodes, helper.make_node("Reshape", [made, _FLAT], [output], name=f"{name}/flat")]
