"""Stems: the int8 Convs of a picture of three channels get a fourth one, of zeros.

The kernel gathers each window a row at a time, and rows of 3, 6, 9 or 15 bytes take longer than
those of 12 or 20 (3x3 over 224x224 to 32 channels: 357 us, 246 with the fourth). The picture gets
channels of real zeros, for which the weights are 0, so that all values keep every bit::

    Q -> DQ -> Conv [32, 3, 3, 3]      Q -> Pad -> DQ -> Conv [32, 4, 3, 3]

Wider rows gain nothing, nor does a window of one pixel; few output channels are not worth the Pad,
and a Conv over one axis (sound) is slower with it. Without VNNI the products with zeros cost more
than they gain where there are many of them (`rewrite_base.KERNELS`).

Source: ONNX operators Conv-11 and Pad-13.
"""

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import drop_dead
from deploy.graph.index import Graph, padded_name
from deploy.targets.onnxruntime.conv_constants import (
    WEIGHT,
    append_zero_channels,
    group_count,
    unshared_integers,
)
from deploy.targets.onnxruntime.rewrite_base import RewriteContext, substitute_nodes

_STEM_CHANNELS = 4
_MIN_OUTPUT_CHANNELS = 16  # fewer are not worth the Pad
_MAX_WINDOW_COLUMNS = 5  # wider rows gain nothing


def pad_stems(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give the int8 Convs of fewer than four channels four, where that is faster."""
    stems = _find_stems(context)
    if not stems:
        return
    graph = Graph(model)
    replacements = {}
    for node in graph.nodes:
        if node.name not in stems:
            continue
        weight, pair = unshared_integers(graph, node), graph.producer.get(node.input[0])
        if weight is None or pair is None or pair.op_type != "DequantizeLinear":
            continue  # it stays float
        if any(graph.scalar(name) is None for name in pair.input[1:]):
            continue  # a scale for each channel
        added = _STEM_CHANNELS - weight.dims[1]
        append_zero_channels(model, graph, node, WEIGHT, [1], added)
        replacements[node.name] = [*_padded_input(model, node, pair, len(weight.dims), added), node]
    if replacements:
        substitute_nodes(model, replacements, keeps_unread=True)
        drop_dead(model.graph)  # the pairs that nobody reads any more


def _find_stems(context: RewriteContext) -> set[str]:
    """Return the Convs that gain by a fourth channel."""
    graph, max_zero_products = context.float_graph, context.kernels.max_zero_products
    return {
        node.name
        for node in graph.nodes
        if node.op_type == "Conv" and _gains(graph, node, max_zero_products)
    }


def _gains(graph: Graph, node: onnx.NodeProto, max_zero_products: float) -> bool:
    """Whether a Conv over pictures gains by a fourth channel of at most so many products."""
    weight = graph.initializers.get(node.input[1])
    if weight is None or group_count(node) != 1:
        return False
    out_channels, in_channels, *window = weight.dims
    pixels, added = math.prod(window), _STEM_CHANNELS - in_channels
    is_picture_window = len(window) >= 2 and pixels >= 2
    if not is_picture_window or window[-1] > _MAX_WINDOW_COLUMNS:
        return False
    if added <= 0 or out_channels < _MIN_OUTPUT_CHANNELS:
        return False
    return bool(added * pixels * out_channels <= max_zero_products)


def _padded_input(
    model: onnx.ModelProto, node: onnx.NodeProto, pair: onnx.NodeProto, rank: int, added: int
) -> list[onnx.NodeProto]:
    """Return Pad and DequantizeLinear before a Conv, which reads them from now on."""
    source = pair.input[0]
    name = padded_name(source, node.name)  # a node may be called as a tensor that gets wider
    pads = np.zeros(2 * rank, np.int64)
    pads[rank + 1] = added  # at the end of the channels
    model.graph.initializer.append(numpy_helper.from_array(pads, f"{name}/pads"))
    pad = helper.make_node("Pad", [source, f"{name}/pads", pair.input[2]], [name], name=name)
    node.input[0] = f"{name}/dequantized"
    dequantize = helper.make_node(
        "DequantizeLinear", [name, *pair.input[1:]], [node.input[0]], name=f"{name}/DQ"
    )
    return [pad, dequantize]
