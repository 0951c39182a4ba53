"""Quantization of a layer by its record: integers within the limits of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import arq_integers, ascend_range, ascend_s19, channels_first
from calibrators.grids import Float32Array, Int8Array, Int32Array, Value
from deploy.errors import ExportError
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.record import (
    NO_DMQ_FACTORS,
    LayerRecord,
    Records,
    check_record,
)

# GE stores the quantize scale in float16, or its square root if it is larger (sqrt_mode), which
# happens with 16 bits; quant_host_cpu_op_common, MIN/MAX_SCALE_VALUE and DealQauntNotRequant
_MIN_FACTOR, _MAX_FACTOR = 2.0**-14, 65504.0
_LEAVE_OUT = "leave them in float by --keep-float or skip_layers, or take them out of the record"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantLayer:
    """The integers of one layer.

    Attributes:
        layer: the float layer.
        record: its scales.
        quant_factor: factor of AscendQuant, float32: 1 / scale_d.
        weight: integers of record.weight_bits, int8 in the deploy model's layout (a Gemm's is
            [C_in, C_out]), one per byte; None for a pool.
        bias: int32 [C_out]; None without bias.
        dequant_scale: scale_w * scale_d, float32 [C_out] or [1], truncated if the record says so.
        second_operand: the second input of a MatMul of two activations; None for other layers.
    """

    layer: Layer
    record: LayerRecord
    quant_factor: np.float32
    weight: Int8Array | None
    bias: Int32Array | None
    dequant_scale: Float32Array
    second_operand: QuantLayer | None = None


# layer name, or '<node>:<index>' of a tensor_quantize input -> its integers
QuantLayers = Mapping[str, QuantLayer]


def quantize_layers(model: onnx.ModelProto, graph: LayerGraph, records: Records) -> QuantLayers:
    """Return layer name -> its integer weight, bias and scales, for all layers with a record.

    A layer's record has its scales and offsets; a record file has those of all layers.

    Raises:
        ConfigError: the records do not fit the model.
        ExportError: scales or biases exceed the limits of the hardware; the message counts such
            layers and names the first five.
    """
    quantized, refusals = quantize_fitting_layers(model, graph, records)
    if refusals:
        raise refused_layers_error(refusals)
    return quantized


def refused_layers_error(refusals: Mapping[str, str], remedy: str = _LEAVE_OUT) -> ExportError:
    """Return the error for layers that do not fit the hardware, each with its reason."""
    reasons = [f"{name}: {reason}" for name, reason in refusals.items()]
    return ExportError(
        f"{len(reasons)} layer(s) do not fit Ascend's int8 path, got {'; '.join(reasons[:5])};"
        f" {remedy}"
    )


def quantize_fitting_layers(
    model: onnx.ModelProto, graph: LayerGraph, records: Records
) -> tuple[QuantLayers, dict[str, str]]:
    """Quantize the layers with a record, as far as they are within the hardware's limits.

    Args:
        model: the float model.
        graph: its layers.
        records: layer name -> its scales and offsets.

    Returns:
        Layer name -> its integers and scales; name of each refused layer -> why it does not fit.

    Raises:
        ConfigError: the records do not fit the model.
    """
    check_record(records, graph)
    index = Graph(model)
    quantized = {}
    refusals = {}
    for name, layer in graph.select(records).items():
        try:
            quantized[name] = _quantize(layer, records[name], index)
        except ExportError as error:
            refusals[name] = str(error)
    return quantized, refusals


def invert_dmq_factors(dmq_factors: Float32Array, layer: Layer) -> Float32Array:
    """Return 1 / DMQ factors [C_in], shaped to broadcast over the layer's input."""
    return (np.float32(1) / dmq_factors).reshape(1, -1, *[1] * layer.spatial_rank)


def multiply_input_channels(
    rows: Float32Array, layer: Layer, factors: Float32Array
) -> Float32Array:
    """Return a weight, output channels first, times a factor for each input channel, [C_in].

    Empty factors do nothing.
    """
    if not factors.size:
        return rows
    shaped_factors = factors  # for a MatMul, [C_out, ..., C_in]
    if layer.kind != "MatMul":  # [C_out, C_in / group, ...]
        group_factors = factors.reshape(layer.group, rows.shape[1])
        row_factors = np.repeat(group_factors, len(rows) // layer.group, axis=0)
        shaped_factors = row_factors.reshape(*rows.shape[:2], *[1] * (rows.ndim - 2))
    return np.asarray(rows * shaped_factors, np.float32)


def to_rows(weight: NDArray[Value], layer: Layer) -> NDArray[Value]:
    """Return a weight in ONNX layout with output channels first, for `calibrators.amct.arq`."""
    if layer.kind == "ConvTranspose":
        weight = channels_first(weight, layer.group)
    elif layer.channels_last:
        weight = np.moveaxis(weight, -1, 0)
    return np.ascontiguousarray(weight)


def from_rows(rows: NDArray[Value], layer: Layer) -> NDArray[Value]:
    """Invert `to_rows`."""
    if layer.kind == "ConvTranspose":
        rows = channels_first(rows, layer.group)
    elif layer.channels_last:
        rows = np.moveaxis(rows, 0, -1)
    return np.ascontiguousarray(rows)


def read_constant(index: Graph, name: str) -> Float32Array:
    """Return the value of a constant, float32."""
    return np.asarray(numpy_helper.to_array(index.constants[name]), np.float32)


def read_weight_rows(
    index: Graph, layer: Layer, dmq_factors: Float32Array = NO_DMQ_FACTORS
) -> Float32Array:
    """Return a layer's weight times its DMQ factors [C_in], output channels first."""
    rows = to_rows(read_constant(index, layer.weight), layer)
    return multiply_input_channels(rows, layer, dmq_factors)


def _quantize(layer: Layer, record: LayerRecord, index: Graph) -> QuantLayer:
    """Return a layer's weight and bias as integers, with the scales for the hardware.

    Args:
        layer: the float layer.
        record: the scales and offsets that AMCT's searches found for it.
        index: has the values of weight and bias.

    Raises:
        ExportError: a scale, a bias or the sums of products exceed the limits of the hardware.
    """
    quant_factor = _invert_scale(record.scale_d, "scale_d", record.act_bits)
    # a pool, and an input of tensor_quantize, have no weight
    weight_scale = record.scale_w if record.scale_w.size else np.ones(1, np.float32)
    dequant_scale = np.asarray(weight_scale * record.scale_d, np.float32)
    weight = _quantize_weight(layer, record, index) if layer.weight else None
    bias = quantize_bias(read_constant(index, layer.bias), dequant_scale) if layer.bias else None
    # with 16-bit activations nearly every layer could overflow: a build measures their sums
    if weight is not None and record.act_bits < 16:
        _refuse_overflow(layer, record, weight, bias)
    if record.force_fp16:  # for Nano chips, which read fewer bits of the scale
        dequant_scale = ascend_s19(dequant_scale)
    return QuantLayer(
        layer=layer,
        record=record,
        quant_factor=quant_factor,
        weight=weight,
        bias=bias,
        dequant_scale=dequant_scale,
        second_operand=_second_operand(layer, record) if layer.two_activations else None,
    )


def _refuse_overflow(
    layer: Layer, record: LayerRecord, weight: Int8Array, bias: Int32Array | None
) -> None:
    """Refuse a layer whose sums of products could exceed int32.

    Args:
        layer: the layer.
        record: has the bits of its activations.
        weight: its weight in integers.
        bias: its bias in integers; None without bias.

    Raises:
        ExportError: the largest possible sum exceeds int32.
    """
    low, high = ascend_range(record.act_bits)  # an input code less its offset is up to high - low
    weight_magnitudes = np.abs(weight.astype(np.float64))
    if layer.kind in ("Gemm", "MatMul"):
        weight_sums = weight_magnitudes.sum(axis=-2)  # [C_out], for each matrix of a 3-D weight
    else:
        rows = to_rows(weight_magnitudes, layer)
        weight_sums = rows.reshape(len(rows), -1).sum(axis=1)
    max_sums_by_channel = weight_sums * (high - low)
    if bias is not None:
        max_sums_by_channel = max_sums_by_channel + np.abs(bias.astype(np.float64))
    max_sum = float(max_sums_by_channel.max())
    if max_sum > np.iinfo(np.int32).max:
        raise ExportError(f"sums of products must fit int32, got up to {max_sum:.3g}")


def _invert_scale(scale: np.float32, name: str, bits: int = 8) -> np.float32:
    """Return AscendQuant's factor, 1 / scale."""
    factor = np.float32(np.float32(1) / scale)
    max_factor = _MAX_FACTOR if bits < 16 else _MAX_FACTOR**2
    if not _MIN_FACTOR <= factor <= max_factor:
        raise ExportError(f"1 / {name} must be in [2^-14, {max_factor:.5g}], got {factor}")
    return factor


def _second_operand(layer: Layer, record: LayerRecord) -> QuantLayer:
    """Return the second operand of a MatMul; the record has its scale as scale_w."""
    (scale,) = record.scale_w
    return QuantLayer(
        layer=replace(layer, name=f"{layer.name}:1", input=layer.other_inputs[0], input_index=1),
        record=replace(record, scale_d=scale),
        quant_factor=_invert_scale(scale, "scale_w"),
        weight=None,
        bias=None,
        dequant_scale=record.scale_w,
    )


def _quantize_weight(layer: Layer, record: LayerRecord, index: Graph) -> Int8Array:
    """Return a layer's weight as integers: AdaRound's, if the record has them, else the nearest."""
    if record.dmq_factors.size not in (0, layer.channels_in):
        raise ExportError(
            f"{layer.channels_in} DMQ factors are needed, got {record.dmq_factors.size}"
        )
    rows = read_weight_rows(index, layer, record.dmq_factors)
    if record.scale_w.size not in (1, rows.shape[0]):
        raise ExportError(f"1 or {rows.shape[0]} scale_w are needed, got {record.scale_w.size}")
    if record.rounded_weight is None:
        integers = arq_integers(rows, record.scale_w, bits=record.weight_bits)
    else:
        integers = record.rounded_weight.reshape(rows.shape)
    return from_rows(integers, replace(layer, trans_b=False))  # the deploy model transposes none


def quantize_bias(bias: Float32Array, dequant: Float32Array) -> Int32Array:
    """Return a bias in steps of scale_w * scale_d, int32 [C_out].

    Raises:
        ExportError: the bias does not fit int32.
    """
    with np.errstate(over="ignore"):  # AMCT divides in float32, which may overflow
        steps = np.rint(bias.reshape(-1) / dequant).astype(np.float64)
    limits = np.iinfo(np.int32)
    if not ((steps >= limits.min) & (steps <= limits.max)).all():
        raise ExportError(
            f"bias / (scale_w * scale_d) must fit int32, got {np.abs(steps).max():.3g}"
        )
    return np.asarray(steps, np.int32)
