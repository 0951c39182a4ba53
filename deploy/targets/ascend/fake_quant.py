"""The fake-quant model, which any ONNX runtime runs, and the Q/DQ model for AMCT's `convert`.

<prefix>_fake_quant_model.onnx computes the same integers in standard float operators::

    x -> Mul 1/scale_d -> Round -> Add offset -> Clip -128 127 -> Sub offset -> layer -> Mul dqscale

The Clip is to -8 and 7, or -32768 and 32767, for activations of 4 or 16 bits. A tensor_quantize
input of an Add or MaxPool gets a Mul by scale_d after Sub. Weights and biases are integers stored
as floats. The offset is added after rounding here and before it in AscendQuant, so values exactly
between two integers differ by one if the offset is odd.

The Q/DQ model has a pair with int8 zero point offset_d on the input of each layer, int8 weights
with a DequantizeLinear (per tensor for Gemm and MatMul), and float biases rounded to multiples of
scale_w * scale_d, so that `convert` rounds them exactly. These stay in float in it:

- a grouped ConvTranspose with a scale per channel: its weight has no axis of output channels, so
  DequantizeLinear cannot express it;
- MatMuls of two activations, and inputs of MaxPool, which `convert` does not know (inputs of an
  Add get their pair);
- layers with activations of 4 or 16 bits, which `convert` does not take.
"""

import numpy as np
import onnx

from calibrators.amct.arq import ascend_range
from calibrators.grids import Int8Array, Int32Array, StoredArray
from deploy.graph.edit import (
    copy_message,
    drop_initializer_inputs,
    make_node,
    rebuild,
    update_tensors,
)
from deploy.graph.index import Nodes
from deploy.targets.ascend.deploy_model import (
    LayerRewriter,
    NodesAndOutput,
    copy_without_weights,
    make_constant,
)
from deploy.targets.ascend.quant_layer import QuantLayer, QuantLayers


def fake_quant_model(
    model: onnx.ModelProto, layers: QuantLayers, *, npu_rounding: bool = False
) -> onnx.ModelProto:
    """Return a model that computes the int8 layers in standard float operators, for any runtime.

    Inputs, weights and biases of a layer are integers stored as float32.

    Args:
        model: the float model.
        layers: layer name -> its integers and scales.
        npu_rounding: add the offset before rounding, as AscendQuant does; by default after it, as
            AMCT's own fake-quant models do.
    """
    writer = _FakeQuantWriter(copy_without_weights(model, layers), layers)
    writer.npu_rounding = npu_rounding
    return writer.rewrite()


class _FakeQuantWriter(LayerRewriter):
    """Writer of the fake-quant model, whose integers are stored as float32.

    Attributes:
        npu_rounding: whether the offset is added before rounding, as AscendQuant does.
    """

    npu_rounding = False

    def make_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the nodes that quantize a layer's input: clip(round(x * scale) + offset) - offset.

        Args:
            quant_layer: the layer's integers and scales.
            tensor: the float input.

        Returns:
            The nodes, and the tensor that the last one makes.
        """
        prefix = f"{quant_layer.layer.quant_node_prefix}.quant.fakequant"  # of new names
        nodes: Nodes = []

        def add_constant(key: str, value: float) -> str:
            """Append a Constant to the nodes; return its output."""
            node = make_constant(f"{prefix}.{key}", np.float32(value))
            nodes.append(node)
            return str(node.output[0])

        lowest_code, highest_code = ascend_range(quant_layer.record.act_bits)
        # names of the constants
        scale = add_constant("scale", float(quant_layer.quant_factor))
        offset = add_constant("offset", quant_layer.record.offset_d)
        minimum = add_constant("min_val", lowest_code)
        maximum = add_constant("max_val", highest_code)
        # (operator, its inputs besides the output of the operator before it)
        round_and_shift: list[tuple[str, list[str]]] = [("Round", []), ("Add", [offset])]
        if self.npu_rounding:  # the NPU adds the offset before it rounds
            round_and_shift.reverse()
        clip = ("Clip", [minimum, maximum])
        operators = [("Mul", [scale]), *round_and_shift, clip, ("Sub", [offset])]
        for op, constants in operators:
            node_name = f"{prefix}.{op.lower()}"
            output = f"{node_name}.output0"
            nodes.append(make_node(op, [tensor, *constants], output, node_name))
            tensor = output  # the next operator reads it
        return nodes, tensor

    def end_layer(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Let a layer make integers; return the nodes that multiply them by scale_w * scale_d."""
        integers, output = self.convert_output(node, quant_layer)
        layer = quant_layer.layer
        name = f"{layer.name}.fakedequant"
        spatial_rank = layer.spatial_rank if layer.weight else 0  # a pool has one scale
        scale = make_constant(
            f"{name}.dqscale", quant_layer.dequant_scale.reshape(1, -1, *[1] * spatial_rank)
        )
        return [scale, make_node("Mul", [integers, scale.output[0]], output, f"{name}.mul")]

    def make_anti_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the nodes that restore an input of an Add or MaxPool; and their output."""
        name = f"{quant_layer.layer.quant_node_prefix}.anti_quant.fake_antiquant"
        scale = make_constant(f"{name}.scale", np.float32(quant_layer.record.scale_d))
        output = f"{name}.mul.output0"
        mul = make_node("Mul", [tensor, scale.output[0]], output, f"{name}.mul")
        return [scale, mul], output

    def convert_weight(self, quant_layer: QuantLayer, weight: Int8Array) -> StoredArray:
        """Return the integers as float32."""
        return weight.astype(np.float32)


def amct_qdq_model(model: onnx.ModelProto, pair_layers: QuantLayers) -> onnx.ModelProto:
    """Return the model with a pair (QuantizeLinear, DequantizeLinear) on each layer's input.

    Its weights are int8 with a DequantizeLinear. Layers that are not given stay float.

    Args:
        model: float model, nodes named; opset 13 or later if weights are per channel.
        pair_layers: layer name -> its integers and scales, for layers that `can_be_pairs`.
    """
    return _AmctQdqWriter(copy_message(model), pair_layers).rewrite()


def can_be_pairs(quant_layer: QuantLayer) -> bool:
    """Whether the Q/DQ model can express a layer, and AMCT's `convert` takes it."""
    layer = quant_layer.layer
    if layer.two_activations or layer.kind == "MaxPool" or quant_layer.record.act_bits != 8:
        return False
    is_grouped_deconv = layer.kind == "ConvTranspose" and layer.group > 1
    return not is_grouped_deconv or quant_layer.record.scale_w.size == 1


class _AmctQdqWriter(LayerRewriter):
    """Writer of the Q/DQ model: its layers compute in float, between pairs."""

    def make_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return the Q/DQ pair that rounds a layer's input, and the tensor that it makes.

        `tensor`: the float input.
        """
        record = quant_layer.record
        prefix = quant_layer.layer.quant_node_prefix  # of the names of the new nodes and tensors
        parameters = [
            self.store(f"{prefix}.scale_d", np.asarray(record.scale_d)),
            self.store(f"{prefix}.offset_d", np.asarray(record.offset_d, np.int8)),
        ]
        name = f"{prefix}.input"
        integers = f"{name}.quantized"
        output = f"{name}.dequantized"
        quantize = make_node("QuantizeLinear", [tensor, *parameters], integers, f"{name}.quantize")
        dequantize = make_node(
            "DequantizeLinear", [integers, *parameters], output, f"{name}.dequantize"
        )
        return [quantize, dequantize], output

    def make_anti_quant(self, quant_layer: QuantLayer, tensor: str) -> NodesAndOutput:
        """Return no nodes: the pair's output is float already."""
        return [], tensor

    def replace_weight(
        self, node: onnx.NodeProto, quant_layer: QuantLayer, weight: Int8Array
    ) -> Nodes:
        """Let a layer read its int8 weight through a DequantizeLinear; return that node."""
        name = quant_layer.layer.name
        scales = quant_layer.record.scale_w
        axis = None
        if scales.size == 1:  # one for the tensor, as a scalar
            scales = scales.reshape(())
        else:  # one for each output channel
            axis = 1 if quant_layer.layer.kind == "ConvTranspose" else 0
        inputs = [
            self.store(f"{name}.weight.int8", weight),
            self.store(f"{name}.scale_w", scales),
            self.store(f"{name}.offset_w", np.zeros(scales.shape, np.int8)),
        ]
        output = f"{name}.weight.dequantized"
        node.input[1] = output
        return [
            make_node("DequantizeLinear", inputs, output, f"{name}.weight.dequantize", axis=axis)
        ]

    def replace_bias(
        self, node: onnx.NodeProto, quant_layer: QuantLayer, bias: Int32Array
    ) -> Nodes:
        """Let a layer read its rounded bias; that of a MatMul is in an Add, see `end_layer`."""
        if not quant_layer.layer.bias_add:
            node.input[2] = self.store_bias(quant_layer, bias)
        return []

    def end_layer(self, node: onnx.NodeProto, quant_layer: QuantLayer) -> Nodes:
        """Let the Add of a MatMul's bias read the rounded one; no node follows a layer."""
        if quant_layer.layer.bias_add:
            assert quant_layer.bias is not None
            position = list(node.input).index(quant_layer.layer.bias)
            node.input[position] = self.store_bias(quant_layer, quant_layer.bias)
        return []

    def store_bias(self, quant_layer: QuantLayer, bias: Int32Array) -> str:
        """Add a layer's bias in float, a multiple of scale_w * scale_d; return its name."""
        rounded = (bias * quant_layer.dequant_scale.astype(np.float64)).astype(np.float32)
        return self.store(f"{quant_layer.layer.name}.bias.rounded", rounded)

    def update_graph(self, nodes: Nodes) -> None:
        """Put the new nodes and tensors into the graph; the float weights and biases go."""
        update_tensors(self.graph.initializer, self.tensors)
        rebuild(self.graph, nodes)
        drop_initializer_inputs(self.graph)
