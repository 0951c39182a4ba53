"""Scales of stored weights, and the layers whose weights may saturate on x86 CPUs.

`compute_weight_scales` computes the scales before a weight is written. `find_saturating_layers`
reads the weights back from a written Q/DQ model.

A *weight pair* is two adjacent weights of a channel: x86 CPUs without VNNI add their two products
in 16 bits, which may saturate (see `calibrators.weights`).
"""

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.amct.arq import channels_first
from calibrators.grids import Float32Array, Grid, weight_scales
from calibrators.weights import (
    PAIR_LIMIT,
    is_depthwise,
    pair_maxima,
    pair_scales,
    pair_sums,
)
from deploy.graph.index import Graph, attributes, standard_type
from deploy.graph.placement import WEIGHTED
from deploy.tensors import Array


def compute_weight_scales(
    tensor: onnx.TensorProto,
    axis: int | None,
    grid: Grid,
    node: onnx.NodeProto,
    *,
    limits_pair_sums: bool,
) -> Float32Array:
    """Return the scales of a weight, float32 [C] along `axis` or [1].

    Args:
        tensor: the weight in real units.
        axis: axis of the output channels; None for one scale.
        grid: integer or fp8 grid that stores it.
        node: the node that reads the weight.
        limits_pair_sums: choose scales so large that no pair of adjacent weights saturates: x86
            CPUs without VNNI add two products in 16 bits.

    Raises:
        CalibrationError: the weight is empty, or holds NaN or Inf.
    """
    weight = numpy_helper.to_array(tensor)
    scales = weight_scales(weight, axis, grid=grid)
    if not limits_pair_sums or _is_depthwise(weight, node):  # depthwise kernels add no pairs
        return scales
    rows = channel_rows(weight, node)  # output channels first
    return pair_scales(rows, scales)  # larger where a pair would saturate


def fit_trained_scales(
    tensor: onnx.TensorProto, scales: Float32Array, node: onnx.NodeProto
) -> Float32Array:
    """Return the scales of a trained weight, larger for channels whose weight pairs saturate.

    A pair is two adjacent weights, whose products x86 CPUs without VNNI add in 16 bits. They
    saturate if the sum of the two weights, in steps of the scale, exceeds `PAIR_LIMIT`.

    Args:
        tensor: the weight in real units, multiples of `scales`.
        scales: the scales that it was trained with, float32 [C], or [1].
        node: the node that reads the weight.
    """
    weight = numpy_helper.to_array(tensor)
    if _is_depthwise(weight, node):  # its kernels add no pairs
        return scales
    rows = channel_rows(weight, node)  # output channels first
    # for each scale, the largest sum of two adjacent weights that have it, in real units
    largest_sums = pair_maxima(rows, scales)
    # trained weights are multiples of their scale, so these sums are integers but for rounding
    sums_in_steps = np.rint(largest_sums / scales)
    larger_scales = pair_scales(rows, scales)  # with which no pair saturates
    return np.where(sums_in_steps > PAIR_LIMIT, larger_scales, scales)


def may_saturate(integers: Array, node: onnx.NodeProto) -> bool:
    """Whether products of a node's stored weight may saturate on x86 CPUs without VNNI."""
    if integers.dtype != np.int8 or _is_depthwise(integers, node):
        return False
    return bool((pair_sums(channel_rows(integers, node)) > PAIR_LIMIT).any())


def channel_rows(weight: Array, node: onnx.NodeProto) -> Array:
    """Return a node's weight with output channels first, [C_out, C_in / groups, ...]."""
    attrs = attributes(node)
    if node.op_type == "ConvTranspose":
        return channels_first(weight, int(attrs.get("group", 1)))
    if weight.ndim == 1:  # a MatMul with a vector has one channel
        return weight[None]
    channels_last = node.op_type != "Conv" and not attrs.get("transB", 0)
    return np.moveaxis(weight, -1, 0) if channels_last else weight


def _is_depthwise(weight: Array, node: onnx.NodeProto) -> bool:
    """Whether the weight is a depthwise Conv's; vectors and matrices have no groups."""
    groups = int(attributes(node).get("group", 1))
    return weight.ndim > 2 and is_depthwise(groups, *weight.shape[:2])


def find_saturating_layers(model: onnx.ModelProto) -> list[str]:
    """Return the names of the layers of a Q/DQ model whose stored weights `may_saturate`."""
    graph = Graph(model)
    layers = []
    for node in graph.nodes:
        if standard_type(node) not in WEIGHTED:
            continue
        dequantizer = graph.find_producer(node.input[1], "DequantizeLinear")  # None for a float one
        if dequantizer is None or dequantizer.input[0] not in graph.constants:
            continue  # a float layer, or a MatMul of two activations
        integers = numpy_helper.to_array(graph.constants[dequantizer.input[0]])
        if may_saturate(integers, node):
            layers.append(node.name)
    return layers
