"""Scales of stored weights, and how much of the integer grid each output channel uses.

`compute_weight_scales` computes the scales before a weight is written; `read_stored_weights` reads
the weights back from a written Q/DQ model, so the report shows what the files hold::

    one scale a channel    |#######|  |#######|  |#######|      each channel uses the complete grid
    one scale for all      |#######|  |###    |  |#      |      a small channel has few steps left

A *weight pair* is two adjacent weights of a channel: x86 CPUs without VNNI add their two products
in 16 bits, which may saturate (see `calibrators.weights`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import channels_first
from calibrators.grids import Grid, weight_scales
from calibrators.weights import (
    PAIR_LIMIT,
    PAIR_ROUNDING,
    is_depthwise,
    pair_maxima,
    pair_scales,
    pair_sums,
)
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import WEIGHTED

Float64Array = NDArray[np.float64]


def compute_weight_scales(
    tensor: onnx.TensorProto, axis: int | None, grid: Grid, *, fits_pairs_of: onnx.NodeProto | None
) -> NDArray[np.float32]:
    """Return the scales of a weight, float32 [C] along `axis` or [1].

    Args:
        tensor: the weight in real units.
        axis: axis of the output channels; None for one scale.
        grid: integer or fp8 grid that stores it.
        fits_pairs_of: the node that reads the weight, if its scales are to be so large that no
            pair of adjacent weights saturates: x86 CPUs without VNNI add two products in 16 bits.
            None allows that.

    Raises:
        CalibrationError: the weight is empty, or holds NaN or Inf.
    """
    weight = numpy_helper.to_array(tensor)
    scales = weight_scales(weight, axis, grid=grid)
    if fits_pairs_of is None:
        return scales
    if _is_depthwise(weight, fits_pairs_of):  # its kernels add no pairs
        return scales
    return pair_scales(channel_rows(weight, fits_pairs_of), scales)


def fit_trained_scales(
    tensor: onnx.TensorProto, scales: NDArray[np.float32], node: onnx.NodeProto
) -> NDArray[np.float32]:
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
    rows = channel_rows(weight, node)
    largest_sums = pair_maxima(rows, scales)  # of each scale's pairs, in real units
    # trained weights are multiples of their scale, so these sums are integers but for rounding
    sums_in_steps = np.rint(largest_sums / scales)
    return np.where(sums_in_steps > PAIR_LIMIT, pair_scales(rows, scales), scales)


def largest_pair_sums(stored: NDArray[Any], node: onnx.NodeProto) -> Float64Array | None:
    """Return each channel's largest sum of a weight pair in steps, [C]; None if never paired."""
    if stored.dtype != np.int8 or _is_depthwise(stored, node):
        return None
    sums = pair_sums(channel_rows(stored, node))
    return np.asarray(sums.max(axis=1, initial=0.0), np.float64)


def channel_rows(weight: NDArray[Any], node: onnx.NodeProto) -> NDArray[Any]:
    """Return a node's weight with output channels first, [C_out, C_in / groups, ...]."""
    attrs = attributes(node)
    if node.op_type == "ConvTranspose":
        return channels_first(weight, int(attrs.get("group", 1)))
    if weight.ndim == 1:  # a MatMul with a vector has one channel
        return weight[None]
    channels_last = node.op_type != "Conv" and not attrs.get("transB", 0)
    return np.moveaxis(weight, -1, 0) if channels_last else weight


def _is_depthwise(weight: NDArray[Any], node: onnx.NodeProto) -> bool:
    """Whether the weight is a depthwise Conv's; vectors and matrices have no groups."""
    groups = int(attributes(node).get("group", 1))
    return weight.ndim > 2 and is_depthwise(groups, *weight.shape[:2])


_MIN_COMPLETE_SHARE = 0.99  # a larger share of the grid counts as all: 127 of 128 steps are all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeight:
    """One weight as a target's files hold it, from which the report makes a row.

    Attributes:
        node: the node that reads it.
        op: operator of that node.
        amax: largest |w| of each output channel in real units, float64 [C]; 0 for a channel
            stored as zeros.
        scales: real value of a stored 1, float64 [C], or [1] for all channels.
        pairs: each channel's largest sum of a weight pair in steps, float64 [C], where CPU kernels
            add two products in 16 bits (`calibrators.weights`); None elsewhere.
    """

    node: str
    op: str
    amax: Float64Array
    scales: Float64Array
    pairs: Float64Array | None = None

    @property
    def used(self) -> Float64Array:
        """Share of the grid that each channel's largest weight or pair uses, 0 to 1, [C]."""
        steps = self.amax / self.scales
        share = steps / max(float(steps.max(initial=0.0)), np.finfo(np.float64).tiny)
        if self.pairs is not None:
            share = np.maximum(share, self.pairs / (PAIR_LIMIT - PAIR_ROUNDING))
        return np.where(share > _MIN_COMPLETE_SHARE, 1.0, share)

    @property
    def saturates(self) -> bool:
        """Whether products with this weight may saturate on x86 CPUs without VNNI."""
        return self.pairs is not None and bool((self.pairs > PAIR_LIMIT).any())


def make_stored_weight(
    node: str,
    op: str,
    rows: NDArray[Any],
    scales: NDArray[Any],
    *,
    in_real_units: bool = False,
    pairs: Float64Array | None = None,
) -> StoredWeight:
    """Return the `StoredWeight` of stored values and scales.

    Args:
        node: the node that reads the weight.
        op: operator of that node.
        rows: stored values, output channels first, [C, ...].
        scales: real value of a stored 1, [C], or [1] for all channels.
        in_real_units: whether `rows` are not stored integers or fp8, but real values, which the
            model quantizes when it runs.
        pairs: each channel's largest sum of two adjacent weights in steps, [C]; None if no kernel
            adds their products in 16 bits.
    """
    if rows.dtype.kind not in "iuf":  # fp8, which numpy itself cannot compare
        rows = rows.astype(np.float32)
    axes = tuple(range(1, rows.ndim))
    largest = rows.max(axis=axes).astype(np.float64)  # since -(-128) is no int8
    smallest = rows.min(axis=axes).astype(np.float64)
    amax = np.maximum(largest, -smallest)
    float64_scales = np.asarray(scales, np.float64).reshape(-1)
    if not in_real_units:
        amax = amax * float64_scales
    return StoredWeight(node=node, op=op, amax=amax, scales=float64_scales, pairs=pairs)


def read_stored_weights(
    model: onnx.ModelProto, *, on_cpus: bool = False
) -> tuple[StoredWeight, ...]:
    """Return the weights that a Q/DQ model reads through a DequantizeLinear, in node order.

    They are stored as integers, or as floats with a QuantizeLinear.

    `on_cpus`: whether CPU kernels run the model.
    """
    graph = Graph(model)
    weights = []
    for node in graph.nodes:
        if node.op_type not in WEIGHTED:
            continue
        dequantizer = graph.find_producer(node.input[1], "DequantizeLinear")
        if dequantizer is None:  # a float layer
            continue
        weight_name, scale_name = dequantizer.input[:2]
        quantizer = graph.producer.get(weight_name)
        if quantizer is not None:
            weight_name = quantizer.input[0]
        if weight_name not in graph.constants:  # a MatMul of two activations
            continue
        weight = numpy_helper.to_array(graph.constants[weight_name])
        is_float = quantizer is not None
        pairs = None
        if on_cpus and not is_float:  # models for CPUs hold integers
            pairs = largest_pair_sums(weight, node)
        stored_weight = make_stored_weight(
            node.name,
            node.op_type,
            channel_rows(weight, node),
            numpy_helper.to_array(graph.constants[scale_name]),
            in_real_units=is_float,
            pairs=pairs,
        )
        weights.append(stored_weight)
    return tuple(weights)
