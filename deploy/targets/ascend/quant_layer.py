"""Quantization of a layer by its record: integers within the limits of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import arq_integers, ascend_range, ascend_s19, channels_first
from deploy.errors import ExportError
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.record import LayerRecord, check_record
from deploy.targets.stored_weights import StoredWeight, make_stored_weight

# GE stores the quantize scale in float16, or its square root if it is larger (sqrt_mode), which
# happens with 16 bits; quant_host_cpu_op_common, MIN/MAX_SCALE_VALUE and DealQauntNotRequant
_LEAST, _MOST = 2.0**-14, 65504.0

Float32Array = NDArray[np.float32]
Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantLayer:
    """The integers of one layer.

    Attributes:
        scale: factor of AscendQuant, float32: 1 / scale_d.
        weight: integers of record.weight_bits, int8 in the deploy model's layout (a Gemm's is
            [C_in, C_out]), one per byte; None for a pool.
        bias: int32 [C_out]; None without bias.
        dequant: scale_w * scale_d, float32 [C_out] or [1], truncated if the record says so.
        inverse_factors: 1 / DMQ factors, shaped to broadcast over the input; None without DMQ.
        second_factor: the second factor of a MatMul of two activations, as an input layer.
    """

    layer: Layer
    record: LayerRecord
    scale: np.float32
    weight: NDArray[np.int8] | None
    bias: NDArray[np.int32] | None
    dequant: Float32Array
    inverse_factors: Float32Array | None
    second_factor: QuantLayer | None = None


def quantize_layers(
    model: onnx.ModelProto, graph: LayerGraph, records: Mapping[str, LayerRecord]
) -> dict[str, QuantLayer]:
    """Return the integers of all layers with a record.

    Raises:
        ConfigError: the record does not fit the model.
        ExportError: a scale or bias exceeds the limits of the hardware; the message names all such
            layers.
    """
    quantized, unfit = quantize_fitting(model, graph, records)
    if unfit:
        reasons = [f"{name}: {why}" for name, why in unfit.items()]
        raise ExportError(
            f"{len(unfit)} layer(s) do not fit Ascend's int8 path, got "
            + "; ".join(reasons[:5])
            + "; leave them in float by --keep-float or skip_layers, or take them out of the record"
        )
    return quantized


def quantize_fitting(
    model: onnx.ModelProto, graph: LayerGraph, records: Mapping[str, LayerRecord]
) -> tuple[dict[str, QuantLayer], dict[str, str]]:
    """Return layer -> integers, and layer -> reason for layers beyond the hardware's limits.

    Raises:
        ConfigError: the record does not fit the model.
    """
    check_record(records, graph)
    index = Graph(model)
    quantized, unfit = {}, {}
    for name, layer in graph.select(records).items():
        try:
            quantized[name] = _quantize(layer, records[name], index)
        except ExportError as error:
            unfit[name] = str(error)
    return quantized, unfit


def deployed_weights(layers: Mapping[str, QuantLayer]) -> tuple[StoredWeight, ...]:
    """Return the layers' weights as the deploy model stores them."""
    return tuple(
        make_stored_weight(
            name, one.layer.kind, to_rows(one.weight, _deployed(one.layer)), one.record.scale_w
        )
        for name, one in layers.items()
        if one.weight is not None
    )


def balanced_weight(weight: Float32Array, layer: Layer, factors: Float32Array) -> Float32Array:
    """Return a weight in ONNX layout times its DMQ factors [C_in]; empty factors do nothing."""
    if not factors.size:
        return weight
    if layer.kind == "Conv":
        per_group = factors.reshape(layer.group, 1, weight.shape[1])
        rows = np.repeat(per_group, weight.shape[0] // layer.group, axis=1)
        scaled = weight * rows.reshape(weight.shape[0], weight.shape[1], *[1] * (weight.ndim - 2))
    elif layer.kind == "Gemm" and layer.trans_b:
        scaled = weight * factors
    elif layer.kind == "MatMul":
        scaled = weight * factors[:, None]
    else:
        scaled = weight * factors.reshape(-1, *[1] * (weight.ndim - 1))
    return np.asarray(scaled, np.float32)


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


def _deployed(layer: Layer) -> Layer:
    """Return a layer with the weight layout of the deploy model, where no Gemm is transposed."""
    return replace(layer, trans_b=False)


def read_constant(index: Graph, name: str) -> Float32Array:
    """Return the value of a constant, float32."""
    return np.asarray(numpy_helper.to_array(index.constants[name]), np.float32)


def _quantize(layer: Layer, record: LayerRecord, index: Graph) -> QuantLayer:
    assert record.scale_d is not None
    scale = _inverse(record.scale_d, "scale_d", record.act_bits)
    channels = record.factors.size
    shape = (1, channels, *[1] * layer.rank)
    inverse = (np.float32(1) / record.factors).reshape(shape) if channels else None
    assert record.scale_d is not None
    scale_w = record.scale_w if record.scale_w.size else np.ones(1, np.float32)
    dequant = np.asarray(scale_w * record.scale_d, np.float32)
    stored = read_constant(index, layer.weight) if layer.weight else None
    weight = None if stored is None else _integers(stored, layer, record)
    bias = quantize_bias(read_constant(index, layer.bias), dequant) if layer.bias else None
    if weight is not None and record.act_bits < 16:
        # with all codes at their extreme; of 16-bit activations, where nearly every layer could
        # overflow, `deploy.targets.ascend.executor` measures the sums
        low, high = ascend_range(record.act_bits)
        sizes = np.abs(weight.astype(np.float64))
        if layer.kind in ("Gemm", "MatMul"):
            sums = sizes.sum(axis=-2)  # [C_out], for each matrix of a 3-D weight
        else:
            rows = to_rows(sizes, layer)
            sums = rows.reshape(len(rows), -1).sum(axis=1)
        largest = sums * (high - low) + (0 if bias is None else np.abs(bias.astype(np.float64)))
        worst = float(largest.max())
        if worst > np.iinfo(np.int32).max:
            raise ExportError(f"sums of products must fit int32, got up to {worst:.3g}")
    return QuantLayer(
        layer=layer,
        record=record,
        scale=scale,
        weight=weight,
        bias=bias,
        dequant=ascend_s19(dequant) if record.force_fp16 else dequant,
        inverse_factors=inverse,
        second_factor=_second(layer, record) if layer.two_activations else None,
    )


def _inverse(scale: np.float32, what: str, bits: int = 8) -> np.float32:
    """Return AscendQuant's factor, 1 / scale."""
    inverse, most = np.float32(np.float32(1) / scale), _MOST if bits < 16 else _MOST**2
    if not _LEAST <= inverse <= most:
        raise ExportError(f"1 / {what} must be in [2^-14, {most:.5g}], got {inverse}")
    return inverse


def _second(layer: Layer, record: LayerRecord) -> QuantLayer:
    """Return the second factor of a MatMul; the record has its scale as scale_w."""
    (scale_d,) = record.scale_w
    return QuantLayer(
        layer=replace(layer, name=f"{layer.name}:1", input=layer.other_inputs[0], input_index=1),
        record=replace(record, scale_d=scale_d),
        scale=_inverse(scale_d, "scale_w"),
        weight=None,
        bias=None,
        dequant=record.scale_w,
        inverse_factors=None,
    )


def _integers(weight: Float32Array, layer: Layer, record: LayerRecord) -> NDArray[np.int8]:
    if record.factors.size not in (0, layer.channels_in):
        raise ExportError(f"{layer.channels_in} DMQ factors are needed, got {record.factors.size}")
    rows = to_rows(balanced_weight(weight, layer, record.factors), layer)
    if record.scale_w.size not in (1, rows.shape[0]):
        raise ExportError(f"1 or {rows.shape[0]} scale_w are needed, got {record.scale_w.size}")
    integers = arq_integers(rows, record.scale_w, bits=record.weight_bits)
    if record.rounded_weight is not None:
        integers = record.rounded_weight.reshape(rows.shape)
    return from_rows(integers, _deployed(layer))


def quantize_bias(bias: Float32Array, dequant: Float32Array) -> NDArray[np.int32]:
    """Return a bias in steps of scale_w * scale_d, int32 [C_out].

    Raises:
        ExportError: the bias does not fit int32.
    """
    with np.errstate(over="ignore"):  # in float32, as AMCT divides
        steps = np.rint(bias.reshape(-1) / dequant).astype(np.float64)
    limits = np.iinfo(np.int32)
    if not ((steps >= limits.min) & (steps <= limits.max)).all():
        raise ExportError(
            f"bias / (scale_w * scale_d) must fit int32, got {np.abs(steps).max():.3g}"
        )
    return np.asarray(steps, np.int32)
