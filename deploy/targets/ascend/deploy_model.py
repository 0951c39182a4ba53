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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.amct.arq import by_row
from calibrators.grids import Float32Array, Int8Array, Int32Array, StoredArray
from deploy.graph.edit import (
    drop_initializer_inputs,
    make_node,
    replace_nodes,
    unique_name,
    update_tensors,
)
from deploy.graph.index import Graph, Nodes
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.targets.ascend.quant_layer import (
    QuantLayer,
    QuantLayers,
    from_rows,
    invert_dmq_factors,
    multiply_input_channels,
    read_weight_rows,
)
from deploy.tensors import Array

NodesAndOutput = tuple[Nodes, str]  # new nodes, and the tensor that they make


def copy_without_weights(model: onnx.ModelProto, layers: QuantLayers) -> onnx.ModelProto:
    """Return a copy with empty tensors in place of the weights of these layers."""
    quantized = {name for name, quant_layer in layers.items() if quant_layer.weight is not None}
    weights = {node.input[1] for node in model.graph.node if node.name in quantized}
    return copy_without_initializers(model, weights, placeholders=True)


class LayerRewriter(ABC):
    """Base of the writers of models with quantized layers; a writer rewrites node after node.

    All float tensors keep their names. By default a layer computes with integers of the type
    `bias_type`; the Q/DQ model differs.

    Attributes:
        model: the model that is rewritten in place.
        graph: its graph.
        index: who makes and reads its tensors, before they are rewritten.
        layers: layer name, or '<node>:<index>' of a tensor_quantize input -> its integers. Such an
            input is rounded to int8 and back, and its node computes in float.
        tensors: name -> new initializer.
        quantized_by_input: (tensor, scale, offset, bits) -> the quantized tensor.
        inputs_by_node: node -> its tensor_quantize inputs.
        layer_by_last_node: name of the node that ends a layer -> the layer. The Add of a MatMul's
            bias is a part of the layer, so that the dequantization follows the Add.
        bias_by_add: Add of a MatMul's bias -> the integer bias that it reads.
        bias_type: type in which biases are stored.
    """

    bias_type: type[np.number[Any]] = np.float32

    def __init__(self, model: onnx.ModelProto, layers: QuantLayers) -> None:
        """Index the model; find each layer's last node, and the node of a tensor_quantize input.

        The arguments are the attributes of the same names.
        """
        self.model = model
        self.graph = model.graph
        self.layers = layers
        self.index = Graph(model)
        self.tensors: dict[str, onnx.TensorProto] = {}  # new initializers, by name
        # (tensor, scale, offset, bits) -> the quantized tensor
        self.quantized_by_input: dict[tuple[str, float, int, int], str] = {}
        self.bias_by_add: dict[str, str] = {}  # Add -> tensor of the integer bias that it reads
        self.inputs_by_node: dict[str, list[QuantLayer]] = {}
        self.layer_by_last_node: dict[str, QuantLayer] = {}
        for name, quant_layer in layers.items():
            layer = quant_layer.layer
            if layer.input_index is None:  # a node; the Add of its bias, if there is one, ends it
                self.layer_by_last_node[layer.bias_add or name] = quant_layer
            else:  # an input of tensor_quantize
                self.inputs_by_node.setdefault(layer.node, []).append(quant_layer)

    def rewrite(self) -> onnx.ModelProto:
        """Let layers compute with integers, and round tensor_quantize inputs; return the model."""
        nodes: Nodes = []
        for node in self.graph.node:
            for rounded_input in self.inputs_by_node.get(node.name, ()):
                nodes += self.round_input(node, rounded_input)
            if node.name in self.layers:
                nodes += self.convert_layer(node, self.layers[node.name])
            nodes.append(node)
            # a layer ends with its own node, or with the Add of its bias
            if node.name in self.layer_by_last_node:
                nodes += self.end_layer(node, self.layer_by_last_node[node.name])
        self.update_graph(nodes)
        return self.model

    def convert_layer(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Give a layer quantized inputs, weight and bias; return the new nodes before it.

        Args:
            node: the layer's node; changed in place.
            quant_layer: the layer's integers.
        """
        nodes: Nodes = []
        dmq_factors = quant_layer.record.dmq_factors
        if dmq_factors.size:  # DMQ has multiplied the weight by the factors
            nodes += multiply_input(node, invert_dmq_factors(dmq_factors, quant_layer.layer))
        nodes += self.quantize_input(node, 0, quant_layer)
        if quant_layer.second_operand is not None:
            nodes += self.quantize_input(node, 1, quant_layer.second_operand)
        if quant_layer.weight is not None:
            nodes += self.replace_weight(node, quant_layer, quant_layer.weight)
        if quant_layer.bias is not None:
            nodes += self.replace_bias(node, quant_layer, quant_layer.bias)
        clear_transposition(node)  # the integers of a Gemm's weight are not transposed
        return nodes

    def quantize_input(self, node: onnx.NodeProto, index: int, quant_layer: QuantLayer) -> Nodes:
        """Let a node's input read its tensor in integers; return the new nodes that make these.

        Inputs with equal tensor, scale, offset and width share the integers: then none are new.

        Args:
            node: the node; changed in place.
            index: index of the input.
            quant_layer: has the input's scale, offset and width in its record.
        """
        new_nodes: Nodes = []
        tensor = node.input[index]
        record = quant_layer.record
        key = (tensor, float(record.scale_d), record.offset_d, record.act_bits)
        if key not in self.quantized_by_input:
            new_nodes, quantized = self.make_quant(quant_layer, tensor)
            self.quantized_by_input[key] = quantized
        node.input[index] = self.quantized_by_input[key]
        return new_nodes

    def round_input(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Round a tensor_quantize input to int8 and back; return the new nodes before its node."""
        index = quant_layer.layer.input_index
        assert index is not None
        nodes = self.quantize_input(node, index, quant_layer)
        new_nodes, node.input[index] = self.make_anti_quant(quant_layer, node.input[index])
        return [*nodes, *new_nodes]

    def replace_weight(
        self, node: onnx.NodeProto, quant_layer: QuantLayer, weight: Int8Array
    ) -> Nodes:
        """Put a layer's integers in the place of its float weight; return new nodes before it."""
        self.store(node.input[1], self.convert_weight(quant_layer, weight))
        return []

    def replace_bias(
        self, node: onnx.NodeProto, quant_layer: QuantLayer, bias: Int32Array
    ) -> Nodes:
        """Let a layer read its integer bias; return the new nodes before it.

        The bias takes the place and name of the float bias, unless other nodes read that one too.
        """
        layer = quant_layer.layer
        stored_bias = layer.bias  # name of the new initializer
        if len(self.index.readers[stored_bias]) > 1:
            stored_bias = f"{layer.name}.quant_bias"
        self.store(stored_bias, bias.astype(self.bias_type))
        # the layer reads the stored bias, or what the new nodes make of it
        nodes, bias_tensor = self.convert_bias(quant_layer, stored_bias)
        if layer.bias_add:  # a MatMul's bias is read by an Add, which comes later
            self.bias_by_add[layer.bias_add] = bias_tensor
        else:
            node.input[2] = bias_tensor
        return nodes

    def convert_output(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> tuple[str, str]:
        """Let the node that ends a layer make an integer tensor.

        Returns:
            The integer tensor, '<layer>_output0'; the float one, which the node made before.
        """
        if node.name in self.bias_by_add:  # the Add of a MatMul's bias
            bias_position = list(node.input).index(quant_layer.layer.bias)
            node.input[bias_position] = self.bias_by_add[node.name]
        float_output = node.output[0]
        # the name that AMCT gives it, unless a tensor of the model has it
        integer_output = unique_name(f"{quant_layer.layer.name}_output0", self.index.producer)
        node.output[0] = integer_output
        return integer_output, float_output

    @abstractmethod
    def make_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the nodes that quantize an input of a layer, and the tensor that they make."""

    @abstractmethod
    def make_anti_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the nodes that restore a float tensor from `make_quant`'s, and that tensor."""

    @abstractmethod
    def end_layer(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Change the node that ends a layer in place; return the nodes that make its output."""

    def convert_weight(self, quant_layer: QuantLayer, weight: Int8Array) -> StoredArray:
        """Return a weight as this model stores it."""
        return weight

    def convert_bias(self, quant_layer: QuantLayer, bias: str) -> NodesAndOutput:
        """Return the nodes between the stored bias and its layer, and their output."""
        return [], bias

    def update_graph(self, nodes: Nodes) -> None:
        """Put the new nodes and tensors into the graph; replaced initializers keep their place."""
        constants = [node for node in nodes if node.op_type == "Constant"]
        unreplaced_constants = [node for node in constants if node.output[0] not in self.tensors]
        computing_nodes = [node for node in nodes if node.op_type != "Constant"]
        update_tensors(self.graph.initializer, self.tensors)
        replace_nodes(self.graph, unreplaced_constants + computing_nodes)
        drop_initializer_inputs(self.graph)
        del self.graph.value_info[:]

    def store(self, name: str, value: Array) -> str:
        """Add an initializer; return its name."""
        self.tensors[name] = numpy_helper.from_array(value, name)
        return name


def clear_transposition(node: onnx.NodeProto) -> None:
    """Let a Gemm read its weight untransposed."""
    for attribute in node.attribute:
        if attribute.name == "transB":
            attribute.i = 0


def multiply_input(node: onnx.NodeProto, inverse_dmq_factors: Float32Array) -> Nodes:
    """Let a layer read its input times 1 / DMQ factors; return the new nodes before it."""
    name = node.name
    constant = make_constant(f"{name}.tensor_balance_factor", inverse_dmq_factors)
    inputs = [node.input[0], constant.output[0]]
    product = f"{name}.mul.output0"
    node.input[0] = product
    return [constant, make_node("Mul", inputs, product, f"{name}.mul")]


def make_constant(name: str, value: Array | np.generic) -> onnx.NodeProto:
    """Return a Constant node; its output is '<name>.output0'."""
    tensor = numpy_helper.from_array(np.asarray(value))
    return make_node("Constant", [], f"{name}.output0", name, value=tensor)


def rewrite_inputs(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    inverse_dmq_factors: Mapping[str, Float32Array],
) -> onnx.ModelProto:
    """Return a float copy with other weights, and with inputs multiplied by channel.

    Args:
        model: the float model.
        weights: weight name -> tensor that replaces it.
        inverse_dmq_factors: layer name -> 1 / DMQ factors, shaped to broadcast over its input; a
            Mul before the layer multiplies its input by them.
    """
    # placeholders keep the places of the weights that `update_tensors` fills in below
    rewritten = copy_without_initializers(model, weights, placeholders=True)
    nodes: Nodes = []
    for node in rewritten.graph.node:
        if node.op_type == "Constant" and node.output[0] in weights:
            continue  # the weight becomes an initializer
        if node.name in inverse_dmq_factors:
            nodes += multiply_input(node, inverse_dmq_factors[node.name])
        nodes.append(node)
    update_tensors(rewritten.graph.initializer, weights)
    replace_nodes(rewritten.graph, nodes)
    drop_initializer_inputs(rewritten.graph)  # a graph of IR 3 lists them as inputs too
    return rewritten


# attribute of AscendDequant for packed 4-bit weights: AMCT marks them nowhere, and ATC ignores
# unknown attributes
PACKED = "wts_type"


def deploy_model(model: onnx.ModelProto, layers: QuantLayers) -> onnx.ModelProto:
    """Return the model for atc: layers in integers, between AscendQuant and AscendDequant nodes.

    The activation offset is not folded into the bias: atc does that when it compiles.

    Args:
        model: the float model.
        layers: layer name, or '<node>:<index>' of a tensor_quantize input -> its integers.
    """
    deploy = _DeployWriter(copy_without_weights(model, layers), layers).rewrite()
    for quant_layer in layers.values():
        # each AscendDequant reads its scales, packed; an input of tensor_quantize has none
        if quant_layer.layer.input_index is None:
            packed_scales = pack_dequant_scales(quant_layer.dequant_scale)
            parameter = helper.make_tensor(  # as numbers, as AMCT does, and not as raw bytes
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
    return low.view(np.float32)


def packed_axis(kind: str) -> int:
    """Return the input channel axis of a weight in the deploy model."""
    return {"Conv": 1, "ConvTranspose": 0}.get(kind, -2)


def pack_int4(weight: Int8Array, axis: int) -> Int8Array:
    """Pack integers in [-8, 7], two neighbors along `axis` per byte, the first in the low half.

    Args:
        weight: int8, an even number of values along `axis`.
        axis: axis of the input channels.
    """
    nibbles = np.moveaxis(weight, axis, -1).view(np.uint8) & 15
    pairs = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(np.int8)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, axis))


def unpack_int4(packed: Int8Array, axis: int) -> Int8Array:
    """Invert `pack_int4`."""
    pairs = np.moveaxis(packed, axis, -1)
    nibbles = np.stack((pairs << 4 >> 4, pairs >> 4), axis=-1)  # shifts keep the sign
    unpacked = nibbles.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return np.ascontiguousarray(np.moveaxis(unpacked, -1, axis), np.int8)


class _DeployWriter(LayerRewriter):
    """Writer of the deploy model, with the operators of the NPU."""

    bias_type = np.int32

    def make_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the AscendQuant of a layer's input, and its output."""
        options = {
            "scale": float(quant_layer.quant_factor),
            "dst_type": f"INT{quant_layer.record.act_bits}",
        }
        return _scaling_node("AscendQuant", "quant", quant_layer, tensor, options)

    def make_anti_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the AscendAntiQuant of a tensor_quantize input, and its output."""
        options = {"scale": float(quant_layer.record.scale_d), "dst_type": "INT8", "dtype": 0}
        return _scaling_node("AscendAntiQuant", "anti_quant", quant_layer, tensor, options)

    def end_layer(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Let a layer make integers; return the AscendDequant that makes its output from them."""
        integers, output = self.convert_output(node, quant_layer)
        name = f"{quant_layer.layer.name}.dequant"
        dequant = make_node("AscendDequant", [integers, f"{name}.param"], output, name, dtype=0)
        if quant_layer.record.weight_bits == 4:
            dequant.attribute.append(helper.make_attribute(PACKED, "INT4"))
        return [dequant]

    def convert_weight(self, quant_layer: QuantLayer, weight: Int8Array) -> StoredArray:
        """Return a weight of 4 bits with two integers per byte, any other one as it is."""
        if quant_layer.record.weight_bits == 4:
            return pack_int4(weight, packed_axis(quant_layer.layer.kind))
        return weight

    def convert_bias(self, quant_layer: QuantLayer, bias: str) -> NodesAndOutput:
        """Return the nodes between the int32 bias and its layer, and their output.

        With 4-bit activations that is a Cast to float, as in AMCT's models; else there are none.
        """
        if quant_layer.record.act_bits != 4:
            return [], bias
        name = f"{quant_layer.layer.name}.bias_quant"
        output = f"{name}.output0"
        cast = make_node("Cast", [bias], output, name, to=onnx.TensorProto.FLOAT)
        return [cast], output


def _scaling_node(
    op: str, suffix: str, quant_layer: QuantLayer, tensor: str, options: Mapping[str, Any]
) -> NodesAndOutput:
    """Return an AscendQuant or AscendAntiQuant with the layer's offset, and its output."""
    name = f"{quant_layer.layer.quant_node_prefix}.{suffix}"
    offset = float(quant_layer.record.offset_d)
    output = f"{name}.output0"
    return [make_node(op, [tensor], output, name, offset=offset, **options)], output


def modified_model(model: onnx.ModelProto, layers: QuantLayers) -> onnx.ModelProto:
    """Return the float model whose weights AMCT rounds to AdaRound's integers.

    AMCT reads a layer's scales and DMQ factors from its record. It multiplies the weight by the
    factors, and rounds it to the nearest multiple of the scale. So the new weight is AdaRound's
    integers times their scale, divided by the factors; other weights do not change.
    """
    index = Graph(model)
    new_weights = {}
    for quant_layer in layers.values():
        layer = quant_layer.layer
        record = quant_layer.record
        if record.rounded_weight is None:
            continue
        # a row is an output channel
        shape = read_weight_rows(index, layer).shape
        rows = record.rounded_weight.reshape(shape) * by_row(record.scale_w, len(shape))
        inverse_dmq_factors = np.asarray(1 / record.dmq_factors, np.float32)  # empty without DMQ
        weight = from_rows(multiply_input_channels(rows, layer, inverse_dmq_factors), layer)
        new_weights[layer.weight] = numpy_helper.from_array(weight, layer.weight)
    return rewrite_inputs(model, new_weights, inverse_dmq_factors={})
