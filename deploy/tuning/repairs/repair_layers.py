"""Layers with constant weights, and their quantization in a target's int8 model.

The layers are Conv, ConvTranspose, Gemm and MatMul.

The quantization grid of a layer's weight is read from the target's int8 model::

    Q/DQ          x -> Q -> DQ -.
                                 Conv                 integers and scales stand in the pairs
                  w -> [Q] -> DQ'
    fake quant    x -> [Mul] -> Mul -> Round -> Add -> Clip -> Sub -> Conv -> [Add] -> Mul
                    1/factors 1/scale_d                                       scale_d scale_w

so a repair works for any target that writes pairs, or constants with the names of Ascend's
fake-quant model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from calibrators.grids import FP8, INT8, Grid, broadcast_parameter
from deploy.graph.edit import copy_message, update_tensors
from deploy.graph.index import (
    Graph,
    attributes,
    by_name,
    count_reads,
    pad_with_zeros,
    padded_name,
)
from deploy.graph.placement import WEIGHTED

FloatArray = NDArray[np.float32]
Float64Array = NDArray[np.float64]

_MATRIX_PRODUCTS = ("Gemm", "MatMul")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLayer:
    """A layer with constant weights.

    Attributes:
        name: name of its node.
        kind: its operator type, one of `WEIGHTED`.
        input: tensor that it reads.
        weight: name of the weight.
        array: the weight, float32 in ONNX layout.
        attributes: attributes of its node.
        is_only_reader: whether no other node reads the weight.
    """

    name: str
    kind: str
    input: str
    weight: str
    array: FloatArray
    attributes: Mapping[str, Any]
    is_only_reader: bool

    @property
    def is_transposed_conv(self) -> bool:
        """Whether it is a ConvTranspose."""
        return self.kind == "ConvTranspose"

    @property
    def is_transposed_gemm(self) -> bool:
        """Whether it is a Gemm whose weight is stored as [C_out, C_in]."""
        return self.kind == "Gemm" and bool(self.attributes.get("transB", 0))

    @property
    def _has_inputs_first(self) -> bool:
        """Whether the input channels are the first dimension of the weight."""
        return self.kind != "Conv" and not self.is_transposed_gemm

    @property
    def groups(self) -> int:
        """Number of groups of a convolution; 1 for a matrix product."""
        return int(self.attributes.get("group", 1))

    @property
    def channel_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weight as groups, C_out per group, C_in per group, taps."""
        groups, out_channels, in_channels, taps = self._to_channels(self.array).shape
        return groups, out_channels, in_channels, taps

    @property
    def patch_size(self) -> int:
        """Number of input values that an output value is made of."""
        _, _, in_channels, taps = self.channel_shape
        return in_channels * taps

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.groups * self.channel_shape[1]

    def _to_channels(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Return a weight as [groups, C_out per group, C_in per group, taps]; a view or a copy."""
        rows, columns = weight.shape[:2]
        channels = weight.reshape(self.groups, rows // self.groups, columns, -1)
        return channels.swapaxes(1, 2) if self._has_inputs_first else channels

    def to_rows(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the weight's shape as [groups, C_out per group, K], as patches are."""
        channels = self._to_channels(weight)
        return channels.reshape(*channels.shape[:2], -1)

    def from_rows(self, rows: NDArray[Any]) -> FloatArray:
        """Inverse of `to_rows`, as float32; `rows`: of the same number of values, in that order."""
        channels = rows.reshape(self.channel_shape)
        if self._has_inputs_first:
            channels = channels.swapaxes(1, 2)
        return np.ascontiguousarray(channels.reshape(self.array.shape), np.float32)


def find_weighted_layers(model: onnx.ModelProto) -> list[WeightedLayer]:
    """Return the layers of the main graph, in its order."""
    graph = Graph(model)
    read_counts = count_reads(model.graph)
    layers = []
    for node in graph.nodes:
        if node.op_type in WEIGHTED and not node.domain:
            layer = _read_layer(graph, read_counts, node)
            if layer is not None:
                layers.append(layer)
    return layers


def _read_layer(
    graph: Graph, read_counts: Mapping[str, int], node: onnx.NodeProto
) -> WeightedLayer | None:
    """Return a node of an operator in `WEIGHTED` as a layer that repairs can change, or None.

    None for a weight that is no float32 initializer, a Gemm that scales its terms or transposes its
    input, and a matrix product with a weight of other than two dimensions.
    """
    weight = graph.initializers.get(node.input[1])
    if weight is None or weight.data_type != TensorProto.FLOAT:
        return None
    node_attributes = attributes(node)
    is_scaled = any(node_attributes.get(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    if is_scaled or node_attributes.get("transA", 0):
        return None
    is_matrix_product = node.op_type in _MATRIX_PRODUCTS
    is_weight_matrix = len(weight.dims) == 2
    # the weight of a MatMul is a batch of matrices, or that of a Conv has no kernel
    if is_matrix_product != is_weight_matrix:
        return None

    return WeightedLayer(
        name=node.name,
        kind=node.op_type,
        input=str(node.input[0]),
        weight=str(node.input[1]),
        array=np.asarray(numpy_helper.to_array(weight), np.float32),
        attributes=node_attributes,
        is_only_reader=read_counts[node.input[1]] == 1,
    )


def with_constants(model: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """Return a copy in which the named initializers hold these arrays, as float32."""
    changed_model = copy_message(model)
    tensors = {}
    for name, array in arrays.items():
        values = np.asarray(array, np.float32, order="C")
        tensors[name] = numpy_helper.from_array(values, name)
    update_tensors(changed_model.graph.initializer, tensors)
    return changed_model


def original_weights(
    model: onnx.ModelProto, layers: Iterable[WeightedLayer]
) -> dict[str, onnx.TensorProto]:
    """Return layer -> its weight in a model."""
    tensors = by_name(model.graph.initializer)
    return {layer.name: tensors[layer.weight] for layer in layers}


def restore_weights(
    model: onnx.ModelProto,
    original_by_layer: Mapping[str, onnx.TensorProto],
    layers: Iterable[str],
) -> None:
    """Give layers of a target's model the weights of the float model back, in place.

    A target's model has a layer's weight under its own name, or a copy padded with zero channels
    under the name that `padded_name` gives: both are given back. A weight in another form, under
    neither name, stays as it is.

    Args:
        model: the target's model.
        original_by_layer: layer -> its weight in the float model (`original_weights`).
        layers: the layers to restore.
    """
    dims_by_constant = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    restored_tensors = {}
    for layer in original_by_layer.keys() & set(layers):
        weight = original_by_layer[layer]
        padded_copy = padded_name(weight.name, layer)
        if weight.name in dims_by_constant:
            restored_tensors[weight.name] = weight
        elif padded_copy in dims_by_constant:
            values = pad_with_zeros(numpy_helper.to_array(weight), dims_by_constant[padded_copy])
            restored_tensors[padded_copy] = numpy_helper.from_array(values, padded_copy)
    update_tensors(model.graph.initializer, restored_tensors)


_MAX_STEP_ERROR = 0.5001  # half a step, plus the error of float32 scales


@dataclass(frozen=True, slots=True, eq=False)
class LayerQuantization:
    """Quantization of a layer's weight in the int8 model.

    Attributes:
        weight_scale: shaped to broadcast over the float weight.
        grid: integer or FP8 grid whose rounding rule applies.
        is_nearest: whether the integers are the float weight's nearest ones; False for weights that
            AMCT's AdaRound rounds, or DMQ multiplies by factors first, which stay as they are.
    """

    weight_scale: Float64Array
    grid: Grid = INT8
    is_nearest: bool = True


def read_all_quantizations(
    int8: onnx.ModelProto, layers: Iterable[WeightedLayer]
) -> dict[str, tuple[WeightedLayer, LayerQuantization]]:
    """Return name -> (layer, its quantization) of layers that an int8 model runs in integers."""
    graph = Graph(int8)
    node_by_name = by_name(graph.nodes)
    quantizations = {}
    for layer in layers:
        if layer.name in node_by_name:
            quantization = _read_quantization(graph, node_by_name[layer.name], layer)
            if quantization is not None:
                quantizations[layer.name] = layer, quantization
    return quantizations


def _read_quantization(
    graph: Graph, node: onnx.NodeProto, layer: WeightedLayer
) -> LayerQuantization | None:
    """Read a layer's quantization from an int8 model; None if it runs in float or another form."""
    source, weight = (graph.producer.get(name) for name in node.input[:2])
    if weight is None:
        return _read_fake_quant(graph, node, layer)
    if source is not None and source.op_type == weight.op_type == "DequantizeLinear":
        return _read_pairs(graph, node, layer, source, weight)
    return None


def _read_pairs(
    graph: Graph,
    node: onnx.NodeProto,
    layer: WeightedLayer,
    input_dq: onnx.NodeProto,
    weight_dq: onnx.NodeProto,
) -> LayerQuantization | None:
    """Read a layer's quantization from the two DequantizeLinear (DQ) of its input and its weight.

    None where the input has a scale per channel.
    """
    if _to_array(graph, input_dq.input[1]).size != 1:
        return None

    weight_scales = _to_array(graph, weight_dq.input[1]).astype(np.float64)
    axis = None  # of the output channels, in the weight of the float model
    if weight_scales.size > 1:
        axis = int(attributes(weight_dq).get("axis", 1))  # 1: ONNX's default
        if layer.is_transposed_conv and node.op_type == "Conv":  # a ConvTranspose written as a Conv
            axis = 1  # where the ConvTranspose has its output channels
        # the target may have more channels than the float model: padding channels at the end, or,
        # in a ConvTranspose that is written as a Conv, the same channels again for further pixels
        weight_scales = weight_scales[: layer.out_channels]

    is_fp8 = graph.constants[input_dq.input[2]].data_type == TensorProto.FLOAT8E4M3FN
    return LayerQuantization(
        broadcast_parameter(weight_scales, layer.array.ndim, axis),
        grid=FP8 if is_fp8 else INT8,
    )


def _read_fake_quant(
    graph: Graph, node: onnx.NodeProto, layer: WeightedLayer
) -> LayerQuantization | None:
    """Read a layer's quantization from Ascend's fake-quant model; None if the layer is float there.

    A fake-quant model computes in float what the chip computes in integers. It multiplies by the
    constants that are read here, which AMCT names after the layer, and after the nodes that
    quantize its input: x -> Mul (scale) -> Round -> Add (offset) -> Clip (min_val, max_val) -> Sub.
    """
    input_prefix = node.input[0].removesuffix(".sub.output0")
    # the factor of the first Mul is 1 / scale of the input, though AMCT calls it "scale"
    inverse_input_scale_name = f"{input_prefix}.scale.output0"
    output_scale_name = f"{node.name}.fakedequant.dqscale.output0"
    if not graph.constants.keys() >= {inverse_input_scale_name, output_scale_name}:
        return None
    inverse_input_scale = float(_to_array(graph, inverse_input_scale_name))

    # the output is multiplied by input scale * weight scale: one value, or one for each channel
    output_scales = _to_array(graph, output_scale_name).astype(np.float64).reshape(-1)
    channel_scales = np.broadcast_to(output_scales * inverse_input_scale, layer.out_channels)
    # each weight has the scale of its channel: [groups, C_out per group, C_in per group, taps]
    grouped_scales = np.broadcast_to(
        channel_scales.reshape(layer.groups, -1, 1, 1), layer.channel_shape
    )
    weight_scale = layer.from_rows(grouped_scales).astype(np.float64)
    is_balanced = f"{node.name}.tensor_balance_factor.output0" in graph.constants  # by DMQ
    codes = _to_array(graph, node.input[1])
    return LayerQuantization(
        weight_scale=weight_scale,
        is_nearest=not is_balanced and _is_nearest(codes, layer, weight_scale),
    )


def _is_nearest(codes: NDArray[Any], layer: WeightedLayer, scales: Float64Array) -> bool:
    """Whether stored integers, [C_in, C_out] of a Gemm, are those nearest to the weight."""
    if layer.is_transposed_gemm:
        codes = codes.T
    steps = np.clip(layer.array / scales, INT8.qmin, INT8.qmax)
    return bool(np.abs(steps - codes).max() < _MAX_STEP_ERROR)


def _to_array(graph: Graph, name: str) -> NDArray[Any]:
    return np.asarray(numpy_helper.to_array(graph.constants[name]))
