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

from deploy.graph.edit import drop_dead, make_node
from deploy.graph.index import Nodes, group_count, padded_name
from deploy.graph.rewrite import RewriteRule, is_op
from deploy.targets.onnxruntime.rewrite_base import (
    WEIGHT,
    RewriteContext,
    RewriteScope,
    append_zero_channels,
    apply_to_model,
    find_unshared_integers,
)

_STEM_CHANNELS = 4  # input channels of a stem, a Conv that reads the picture, after the Pad
_MIN_OUTPUT_CHANNELS = 16  # fewer are not worth the Pad
_MAX_WINDOW_COLUMNS = 5  # wider rows gain nothing


def pad_stems(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give the int8 Convs of fewer than four channels four, where that is faster."""
    if apply_to_model(_PAD_STEM, model, context):
        drop_dead(model.graph)  # the pairs that nobody reads any more


def _why_not_padded(node: onnx.NodeProto, scope: RewriteScope) -> str:
    """Return why a Conv does not gain by a fourth channel, or cannot have one; "" if it gains."""
    float_conv = scope.float_node_by_name.get(node.name)
    if float_conv is None:
        return "it is no layer of the float model"
    weight = scope.context.float_graph.initializers.get(float_conv.input[WEIGHT])
    if weight is None or group_count(node) != 1:
        return "its weight is computed, or it has groups"
    out_channels, in_channels, *window = weight.dims  # window: sides of the kernel
    if in_channels >= _STEM_CHANNELS:
        return "it has enough channels"
    if len(window) < 2 or math.prod(window) < 2:
        return "its window has one axis or one pixel"
    if window[-1] > _MAX_WINDOW_COLUMNS:  # rows of so many bytes are gathered fast as they are
        return "its rows are wide enough"
    if out_channels < _MIN_OUTPUT_CHANNELS:
        return "its few output channels are not worth a Pad"
    zero_products = (_STEM_CHANNELS - in_channels) * math.prod(window) * out_channels
    if zero_products > scope.context.kernels.max_zero_products:
        return "the products with zeros cost more than they gain"

    if find_unshared_integers(scope.graph, node) is None:
        return "its weight is float, or shared"
    dequantize = scope.graph.find_producer(node.input[0], "DequantizeLinear")
    if dequantize is None:
        return "its input is float"
    if any(scope.graph.scalar(name) is None for name in dequantize.input[1:]):
        return "its input has no single scale"
    return ""


def _pad_input(node: onnx.NodeProto, scope: RewriteScope) -> Nodes:
    """Return the nodes in place of a Conv: a Pad of its input's channels, a DQ, and the Conv.

    The input is padded before it is dequantized, with the integer that stands for 0, and the Conv's
    weight gets channels of zeros, in place::

        x (integers) --> DQ --> Conv     becomes     x --> Pad --> DQ --> Conv
    """
    weight = find_unshared_integers(scope.graph, node)
    assert weight is not None  # `_why_not_padded` has checked it
    rank = len(weight.dims)
    added_channels = _STEM_CHANNELS - weight.dims[1]
    append_zero_channels(scope.model, scope.graph, node, WEIGHT, [1], added_channels)

    source, scale, zero_point = scope.graph.producer[node.input[0]].input
    # with the tensor's name too: `depthwise_rewrite` appends the same suffix to names of tensors,
    # and one of these may be the Conv's name
    padded = padded_name(source, node.name)
    pads = np.zeros(2 * rank, np.int64)  # before each axis, then after each
    pads[rank + 1] = added_channels
    pads_name = scope.add_constant(f"{padded}/pads", pads)
    pad = make_node("Pad", [source, pads_name, zero_point], padded, padded)
    node.input[0] = f"{padded}/dequantized"
    inputs = [padded, scale, zero_point]
    dequantize = make_node("DequantizeLinear", inputs, node.input[0], f"{padded}/DQ")
    return [pad, dequantize, node]


_PAD_STEM = RewriteRule(pattern=is_op("Conv"), check=_why_not_padded, rewrite=_pad_input)
