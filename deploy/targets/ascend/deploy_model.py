"""Rewriting of layers to integers; the deploy model for ATC, and AdaRound's modified float model.

The deploy model and the fake-quant model rewrite a layer alike::

    x -> Conv -> y    becomes    x -> [Mul 1/factor] -> before -> Conv' -> after -> y

`before` and `after` are AscendQuant and AscendDequant in <prefix>_deploy_model.onnx, and standard
operators in the fake-quant model; both have integer weights and biases. A MatMul of two activations
has `before` on both inputs. A tensor_quantize input of an Add or MaxPool gets `before` and `back`;
the node itself does not change.

The packed parameter of AscendDequant is one uint64 per channel::

    bits 31..0   float32 bits of scale_w * scale_d
    bits 39..32  shift N, 0
    bits 47..40  offset_w, 0

4-bit weights are int8 tensors with half as many input channels, two integers per byte.

<prefix>_modified_model.onnx is the float model with AdaRound's weights, which AMCT's quantize_model
writes too: a record has only scales, and they give the same integers only with these weights. It is
also written for layers with shared weights, which AMCT refuses; in it each layer has a copy.

Source: hicann/ge quant_host_cpu_op_common.h; measured on AMCT's own outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.amct.arq import by_row
from deploy.graph.edit import (
    drop_initializer_inputs,
    make_node,
    replace_nodes,
    unique_name,
    update_tensors,
)
from deploy.graph.index import Graph
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.quant_layer import (
    Float32Array,
    QuantLayer,
    balanced_weight,
    from_rows,
    read_weight_rows,
)
from deploy.targets.ascend.record import LayerRecord

Nodes = list[onnx.NodeProto]
InputNodes = Callable[[QuantLayer, str], tuple[Nodes, str]]
OutputNodes = Callable[[QuantLayer, str, str], Nodes]
StoredWeight = Callable[[QuantLayer, NDArray[np.int8]], NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReplacement:
    """The functions that make one model's replacement of a float layer.

    Attributes:
        quantize_input: (layer, input tensor) -> nodes that quantize it, and the quantized tensor.
        dequantize_output: (layer, integer output, float output) -> nodes that dequantize it.
        dequantize_input: (layer, integer input) -> nodes that dequantize it, and the float tensor.
        store_weight: (layer, integers) -> weight as it is stored.
        bias_type: type in which biases are stored.
        convert_bias: (layer, stored bias) -> nodes between it and the layer, and their output.
    """

    quantize_input: InputNodes
    dequantize_output: OutputNodes
    dequantize_input: InputNodes
    store_weight: StoredWeight
    bias_type: type[np.number[Any]]
    convert_bias: InputNodes = lambda layer, bias: ([], bias)


def rewrite_layers(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], replacement: LayerReplacement
) -> onnx.ModelProto:
    """Return a copy of `model` whose `layers` run on integers.

    All float tensors keep their names; a layer's integer output is '<layer>_output0'.

    Args:
        model: the float model.
        layers: layer name, or '<node>:<index>' of a tensor_quantize input -> its integers. Such an
            input is rounded to int8 and back, and its node computes in float.
        replacement: makes the nodes and tensors of this kind of model.
    """
    rewritten = copy_without_weights(model, layers)
    rewriter = _LayerRewriter(rewritten, replacement)
    # the Add of a MatMul's bias is a part of the layer, so that the dequantization follows the Add
    layer_by_last_node = {
        quant_layer.layer.bias_add or name: quant_layer
        for name, quant_layer in layers.items()
        if quant_layer.layer.input_index is None
    }
    inputs_by_node = group_tensor_inputs(layers)
    nodes: Nodes = []
    for node in rewritten.graph.node:
        for quant_layer in inputs_by_node.get(node.name, ()):
            nodes += rewriter.round_input(node, quant_layer)
        if node.name in layers:
            nodes += rewriter.convert_to_integers(node, layers[node.name])
        nodes.append(node)
        if node.name in layer_by_last_node:
            nodes += rewriter.dequantize_output(node, layer_by_last_node[node.name])
    rewriter.update_graph(nodes)
    return rewritten


def copy_without_weights(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer]
) -> onnx.ModelProto:
    """Return a copy with empty tensors in place of the weights that `rewrite_layers` replaces."""
    quantized = {name for name, quant_layer in layers.items() if quant_layer.weight is not None}
    weights = {node.input[1] for node in model.graph.node if node.name in quantized}
    return copy_without_initializers(model, weights, placeholders=True)


def group_tensor_inputs(layers: Mapping[str, QuantLayer]) -> dict[str, list[QuantLayer]]:
    """Return node -> its tensor_quantize inputs in `layers`."""
    inputs: dict[str, list[QuantLayer]] = {}
    for quant_layer in layers.values():
        if quant_layer.layer.input_index is not None:
            inputs.setdefault(quant_layer.layer.node, []).append(quant_layer)
    return inputs


class _LayerRewriter:
    """Rewriter of the layers of a graph, in the order of its nodes.

    Attributes:
        tensors: name -> new initializer.
        quantized_by_input: (tensor, scale, offset, bits) -> the quantized tensor.
        bias_by_add: Add of a MatMul's bias -> the integer bias that it reads.
    """

    def __init__(self, model: onnx.ModelProto, replacement: LayerReplacement) -> None:
        self.graph = model.graph
        self.index = Graph(model)
        self.replacement = replacement
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.quantized_by_input: dict[tuple[str, float, int, int], str] = {}
        self.bias_by_add: dict[str, str] = {}

    def convert_to_integers(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Give a layer quantized inputs, integer weight and bias; return the new nodes before it.

        Args:
            node: the layer's node; changed in place.
            quant_layer: the layer's integers.
        """
        nodes: Nodes = []
        if quant_layer.inverse_factors is not None:  # DMQ has multiplied the weight by the factors
            nodes += multiply_input(node, quant_layer.inverse_factors)
        nodes += self.quantize_input(node, 0, quant_layer)
        if quant_layer.second_operand is not None:
            nodes += self.quantize_input(node, 1, quant_layer.second_operand)
        if quant_layer.weight is not None:
            weight = self.replacement.store_weight(quant_layer, quant_layer.weight)
            self.tensors[node.input[1]] = numpy_helper.from_array(weight, node.input[1])
        if quant_layer.bias is not None:
            bias_nodes, bias = self.replacement.convert_bias(
                quant_layer, self.store_bias(quant_layer, quant_layer.bias)
            )
            nodes += bias_nodes
            if quant_layer.layer.bias_add:  # a MatMul's bias is read by an Add, which comes later
                self.bias_by_add[quant_layer.layer.bias_add] = bias
            else:
                node.input[2] = bias
        clear_transposition(node)
        return nodes

    def quantize_input(self, node: onnx.NodeProto, index: int, quant_layer: QuantLayer) -> Nodes:
        """Let a node's input read the quantized tensor; return the nodes that make it, if new.

        Inputs with equal tensor, scale, offset and width share it.
        """
        new_nodes: Nodes = []
        tensor = node.input[index]
        key = (
            tensor,
            float(quant_layer.scale),
            quant_layer.record.offset_d,
            quant_layer.record.act_bits,
        )
        if key not in self.quantized_by_input:
            new_nodes, quantized = self.replacement.quantize_input(quant_layer, tensor)
            self.quantized_by_input[key] = quantized
        node.input[index] = self.quantized_by_input[key]
        return new_nodes

    def round_input(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Quantize and dequantize a tensor_quantize input."""
        index = quant_layer.layer.input_index
        assert index is not None
        nodes = self.quantize_input(node, index, quant_layer)
        new_nodes, node.input[index] = self.replacement.dequantize_input(
            quant_layer, node.input[index]
        )
        return [*nodes, *new_nodes]

    def dequantize_output(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Let a layer make an integer tensor; return the nodes that make the float one from it.

        `node`: the layer, or the Add of a MatMul's bias.
        """
        if node.name in self.bias_by_add:
            bias_position = list(node.input).index(quant_layer.layer.bias)
            node.input[bias_position] = self.bias_by_add[node.name]
        float_output = node.output[0]
        # the name that AMCT gives it, unless a tensor of the model has it
        integer_output = unique_name(f"{quant_layer.layer.name}_output0", self.index.producer)
        node.output[0] = integer_output
        return self.replacement.dequantize_output(quant_layer, integer_output, float_output)

    def store_bias(self, quant_layer: QuantLayer, bias: NDArray[np.int32]) -> str:
        """Store a layer's integer bias; return its name.

        It takes the place and name of the float bias, unless other nodes read that one too.
        """
        name = quant_layer.layer.bias
        if len(self.index.readers[name]) > 1:
            name = f"{quant_layer.layer.name}.quant_bias"
        self.tensors[name] = numpy_helper.from_array(bias.astype(self.replacement.bias_type), name)
        return name

    def update_graph(self, nodes: Nodes) -> None:
        """Put the new nodes and tensors into the graph; replaced initializers keep their place."""
        constants = [node for node in nodes if node.op_type == "Constant"]
        unreplaced_constants = [node for node in constants if node.output[0] not in self.tensors]
        computing_nodes = [node for node in nodes if node.op_type != "Constant"]
        update_tensors(self.graph.initializer, self.tensors)
        replace_nodes(self.graph, unreplaced_constants + computing_nodes)
        drop_initializer_inputs(self.graph)
        del self.graph.value_info[:]


def clear_transposition(node: onnx.NodeProto) -> None:
    """Let a Gemm read its weight untransposed."""
    for attribute in node.attribute:
        if attribute.name == "transB":
            attribute.i = 0


def multiply_input(node: onnx.NodeProto, factors: Float32Array) -> Nodes:
    """Let a layer read its input times inverse DMQ factors; return the new nodes before it."""
    name = node.name
    constant = make_constant(f"{name}.tensor_balance_factor", factors)
    inputs = [node.input[0], constant.output[0]]
    product = f"{name}.mul.output0"
    node.input[0] = product
    return [constant, make_node("Mul", inputs, product, f"{name}.mul")]


def make_constant(name: str, value: NDArray[Any] | np.generic) -> onnx.NodeProto:
    """Return a Constant node; its output is '<name>.output0'."""
    tensor = numpy_helper.from_array(np.asarray(value))
    return make_node("Constant", [], f"{name}.output0", name, value=tensor)


def rewrite_inputs(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    layers: Mapping[str, Layer] = MappingProxyType({}),
    inverse_factors: Mapping[str, Float32Array] = MappingProxyType({}),
) -> onnx.ModelProto:
    """Return a float copy with other weights, and with inputs multiplied by channel.

    Args:
        model: the float model.
        weights: weight name -> tensor that replaces it.
        layers: name -> layer, at least for those in `inverse_factors`.
        inverse_factors: layer name -> 1 / DMQ factors, float32 [C_in]; a Mul before the layer
            multiplies its input by them.
    """
    # placeholders keep the places of the weights that `update_tensors` fills in below
    rewritten = copy_without_initializers(model, weights, placeholders=True)
    nodes: Nodes = []
    for node in rewritten.graph.node:
        if node.op_type == "Constant" and node.output[0] in weights:
            continue  # the weight becomes an initializer
        if node.name in inverse_factors:
            shape = (1, -1, *[1] * layers[node.name].rank)
            nodes += multiply_input(node, inverse_factors[node.name].reshape(shape))
        nodes.append(node)
    update_tensors(rewritten.graph.initializer, weights)
    replace_nodes(rewritten.graph, nodes)
    drop_initializer_inputs(rewritten.graph)  # a graph of IR 3 lists them as inputs too
    return rewritten


# attribute of AscendDequant for packed 4-bit weights: AMCT marks them nowhere, and ATC ignores
# unknown attributes
PACKED = "wts_type"


def deploy_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Return the model for atc: layers in integers, between AscendQuant and AscendDequant nodes.

    The activation offset is not folded into the bias: atc does that when it compiles.

    Args:
        model: the float model.
        layers: layer name, or '<node>:<index>' of a tensor_quantize input -> its integers.
    """
    replacement = LayerReplacement(
        quantize_input=_make_quant,
        dequantize_output=_make_dequant,
        dequantize_input=_make_anti_quant,
        store_weight=_pack_weight,
        bias_type=np.int32,
        convert_bias=_cast_bias,
    )
    deploy = rewrite_layers(model, layers, replacement)
    for quant_layer in layers.values():
        # a tensor_quantize input has an AscendAntiQuant instead, without packed scales
        if quant_layer.layer.input_index is None:
            packed_scales = pack_dequant_scales(quant_layer.dequant)
            parameter = helper.make_tensor(
                f"{quant_layer.layer.name}.dequant.param",
                onnx.TensorProto.UINT64,
                packed_scales.shape,
                packed_scales.tolist(),
            )
            deploy.graph.initializer.append(parameter)
    return deploy


def pack_dequant_scales(dequant: Float32Array) -> NDArray[np.uint64]:
    """Return AscendDequant's uint64 parameters [C] of float32 scales [C]."""
    return np.ascontiguousarray(dequant).view(np.uint32).astype(np.uint64)


def unpack_dequant_scales(parameter: NDArray[np.uint64]) -> Float32Array:
    """Invert `pack_dequant_scales`; ignore shift and offset."""
    low = (parameter & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.asarray(low.view(np.float32))


def packed_axis(kind: str) -> int:
    """Return the input channel axis of a weight in the deploy model."""
    return {"Conv": 1, "ConvTranspose": 0}.get(kind, -2)


def pack_int4(weight: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Pack integers in [-8, 7], two neighbors along `axis` per byte, the first in the low half.

    Args:
        weight: int8, an even number of values along `axis`.
        axis: axis of the input channels.
    """
    nibbles = np.moveaxis(weight, axis, -1).view(np.uint8) & 15
    pairs = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(np.int8)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, axis))


def unpack_int4(packed: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Invert `pack_int4`."""
    pairs = np.moveaxis(packed, axis, -1)
    nibbles = np.stack((pairs << 4 >> 4, pairs >> 4), axis=-1)  # shifts keep the sign
    unpacked = nibbles.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return np.ascontiguousarray(np.moveaxis(unpacked, -1, axis), np.int8)


def _make_quant(quant_layer: QuantLayer, tensor: str) -> tuple[Nodes, str]:
    dst_type = f"INT{quant_layer.record.act_bits}"
    return _scaling_node(
        "AscendQuant",
        "quant",
        quant_layer,
        tensor,
        scale=float(quant_layer.scale),
        dst_type=dst_type,
    )


def _make_dequant(quant_layer: QuantLayer, integers: str, output: str) -> Nodes:
    name = f"{quant_layer.layer.name}.dequant"
    inputs = [integers, f"{name}.param"]
    node = make_node("AscendDequant", inputs, output, name, dtype=0)
    if quant_layer.record.weight_bits == 4:
        node.attribute.append(helper.make_attribute(PACKED, "INT4"))
    return [node]


def _make_anti_quant(quant_layer: QuantLayer, integers: str) -> tuple[Nodes, str]:
    options = {"scale": float(quant_layer.record.input_scale), "dst_type": "INT8", "dtype": 0}
    return _scaling_node("AscendAntiQuant", "anti_quant", quant_layer, integers, **options)


def _scaling_node(
    op: str, suffix: str, quant_layer: QuantLayer, tensor: str, **options: Any
) -> tuple[Nodes, str]:
    name = f"{quant_layer.layer.stem}.{suffix}"
    offset = float(quant_layer.record.offset_d)
    output = f"{name}.output0"
    return [make_node(op, [tensor], output, name, offset=offset, **options)], output


def _pack_weight(quant_layer: QuantLayer, weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return a weight of 4 bits with two integers per byte, any other one as it is."""
    if quant_layer.record.weight_bits == 4:
        return pack_int4(weight, packed_axis(quant_layer.layer.kind))
    return weight


def _cast_bias(quant_layer: QuantLayer, bias: str) -> tuple[Nodes, str]:
    """Return the nodes between the int32 bias and its layer, and their output.

    With 4-bit activations that is a Cast to float, as in AMCT's models; else there are none.
    """
    if quant_layer.record.act_bits != 4:
        return [], bias
    name = f"{quant_layer.layer.name}.bias_quant"
    output = f"{name}.output0"
    cast = make_node("Cast", [bias], output, name, to=onnx.TensorProto.FLOAT)
    return [cast], output


_MAX_GRID_ERROR = 0.01  # steps: float32 error of a weight that is an integer times its scale


def modified_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Return the float model with weights that AMCT rounds to AdaRound's integers.

    AMCT's record has the scales, but not the integers, and AMCT rounds weights to the nearest. So a
    weight becomes AdaRound's integers times their scale, divided by DMQ's factors.
    """
    index = Graph(model)
    new_weights = {}
    for quant_layer in layers.values():
        layer = quant_layer.layer
        record = quant_layer.record
        if record.rounded_weight is None:
            continue
        shape = read_weight_rows(index, layer).shape
        rows = record.rounded_weight.reshape(shape) * by_row(record.scale_w, len(shape))
        inverse_factors = np.asarray(1 / record.factors, np.float32)
        weight = balanced_weight(from_rows(rows, layer), layer, inverse_factors)
        new_weights[layer.weight] = numpy_helper.from_array(weight, layer.weight)
    return rewrite_inputs(model, new_weights)


def find_unrounded_layers(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, LayerRecord],
    adaround_names: list[str],
) -> list[str]:
    """Return the AdaRound layers whose float weights are not integers times the record's scale.

    A record of AdaRound belongs to the model that was saved with the rounded weights (see
    `modified_model`). If the result is not empty, the user gave another model.

    `adaround_names`: layers that AdaRound rounded; those without record or layer are left out.
    """
    index = Graph(model)
    unrounded = []
    for name in adaround_names:
        if name not in records or name not in graph.layers:
            continue
        layer = graph.layers[name]
        record = records[name]
        rows = read_weight_rows(index, layer, record.factors)
        codes = rows / by_row(record.scale_w, rows.ndim)  # integers if AdaRound's weights are here
        if np.abs(codes - np.rint(codes)).max() > _MAX_GRID_ERROR:
            unrounded.append(name)
    return unrounded
