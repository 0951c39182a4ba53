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

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.amct.arq import ascend_range
from deploy.graph.edit import (
    copy_message,
    drop_initializer_inputs,
    make_node,
    rebuild,
    update_tensors,
)
from deploy.targets.ascend.deploy_model import (
    LayerReplacement,
    Nodes,
    clear_transposition,
    group_tensor_inputs,
    make_constant,
    multiply_input,
    rewrite_layers,
)
from deploy.targets.ascend.quant_layer import QuantLayer


def fake_quant_model(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], *, npu_rounding: bool = False
) -> onnx.ModelProto:
    """Return a model that computes the int8 layers in standard float operators, for any runtime.

    Inputs, weights and biases of a layer are integers stored as float32.

    `npu_rounding`: add the offset before rounding, as AscendQuant does; by default after it, as
    AMCT's own fake-quant models do.
    """
    replacement = LayerReplacement(
        quantize_input=partial(_make_quant, npu_rounding=npu_rounding),
        dequantize_output=_make_dequant,
        dequantize_input=_make_anti_quant,
        store_weight=lambda _, weight: weight.astype(np.float32),
        bias_type=np.float32,
    )
    return rewrite_layers(model, layers, replacement)


def _make_quant(quant_layer: QuantLayer, tensor: str, *, npu_rounding: bool) -> tuple[Nodes, str]:
    """Return the nodes that compute a layer's rounded input, integers less the offset.

    Args:
        quant_layer: the layer's integers and scales.
        tensor: the float input.
        npu_rounding: add the offset before rounding instead of after it.

    Returns:
        The nodes, and the tensor that the last one makes.
    """
    name = f"{quant_layer.layer.stem}.quant.fakequant"
    low, high = ascend_range(quant_layer.record.act_bits)
    values = {
        "scale": float(quant_layer.scale),
        "offset": quant_layer.record.offset_d,
        "min_val": low,
        "max_val": high,
    }
    nodes = [make_constant(f"{name}.{key}", np.float32(value)) for key, value in values.items()]
    scale, offset, minimum, maximum = (node.output[0] for node in nodes)
    add_offset = ("Add", [offset])
    round_codes = ("Round", list[str]())
    rounding = [add_offset, round_codes] if npu_rounding else [round_codes, add_offset]
    # (operator, its inputs besides the output of the operator before it)
    operators = [("Mul", [scale]), *rounding, ("Clip", [minimum, maximum]), ("Sub", [offset])]
    for op, constants in operators:
        node_name = f"{name}.{op.lower()}"
        output = f"{node_name}.output0"
        nodes.append(make_node(op, [tensor, *constants], output, node_name))
        tensor = output  # the input of the next operator
    return nodes, tensor


def _make_dequant(quant_layer: QuantLayer, integers: str, output: str) -> Nodes:
    """Return the nodes that multiply a layer's sums by scale_w * scale_d."""
    name = f"{quant_layer.layer.name}.fakedequant"
    rank = quant_layer.layer.rank if quant_layer.layer.weight else 0  # a pool has one scale
    scale = make_constant(f"{name}.dqscale", quant_layer.dequant.reshape(1, -1, *[1] * rank))
    mul = make_node("Mul", [integers, scale.output[0]], output, f"{name}.mul")
    return [scale, mul]


def _make_anti_quant(quant_layer: QuantLayer, integers: str) -> tuple[Nodes, str]:
    """Return the nodes that restore an input of an Add or MaxPool; and their output."""
    name = f"{quant_layer.layer.stem}.anti_quant.fake_antiquant"
    scale = make_constant(f"{name}.scale", np.float32(quant_layer.record.scale_d))
    output = f"{name}.mul.output0"
    mul = make_node("Mul", [integers, scale.output[0]], output, f"{name}.mul")
    return [scale, mul], output


def amct_qdq_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Return the model with a pair (QuantizeLinear, DequantizeLinear) on each layer's input.

    Its weights are int8 with a DequantizeLinear. Layers that pairs cannot express stay float.

    Args:
        model: float model, nodes named; opset 13 or later if weights are per channel.
        layers: layer name -> its integers and scales.
    """
    qdq_model = copy_message(model)
    writer = _AmctQdqWriter(
        {name: quant_layer for name, quant_layer in layers.items() if can_be_pairs(quant_layer)}
    )
    nodes: Nodes = []
    for node in qdq_model.graph.node:
        nodes += writer.rewrite(node)
        nodes.append(node)
    update_tensors(qdq_model.graph.initializer, writer.tensors)
    rebuild(qdq_model.graph, nodes)
    drop_initializer_inputs(qdq_model.graph)
    return qdq_model


def can_be_pairs(quant_layer: QuantLayer) -> bool:
    """Whether the Q/DQ model can express a layer, and AMCT's `convert` takes it."""
    layer = quant_layer.layer
    if layer.two_activations or layer.kind == "MaxPool" or quant_layer.record.act_bits != 8:
        return False
    is_grouped_deconv = layer.kind == "ConvTranspose" and layer.group > 1
    return not is_grouped_deconv or quant_layer.record.scale_w.size == 1


class _AmctQdqWriter:
    """Writer of the pairs of all layers.

    Attributes:
        tensors: name -> new initializer.
        dequantized_by_input: (tensor, scale, offset) -> the output of the tensor's pair.
    """

    def __init__(self, layers: Mapping[str, QuantLayer]) -> None:
        self.layers = layers
        self.inputs_by_node = group_tensor_inputs(layers)
        self.layer_by_add = {
            quant_layer.layer.bias_add: quant_layer
            for quant_layer in layers.values()
            if quant_layer.layer.bias_add
        }
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.dequantized_by_input: dict[tuple[str, float, int], str] = {}

    def rewrite(self, node: onnx.NodeProto) -> Nodes:
        """Let a node read the outputs of pairs, in place; return the new nodes before it.

        Three kinds of nodes change: the Add of a MatMul's bias, a node with tensor_quantize inputs,
        and a layer.
        """
        nodes: Nodes = []
        if node.name in self.layer_by_add:
            quant_layer = self.layer_by_add[node.name]
            bias_position = list(node.input).index(quant_layer.layer.bias)
            node.input[bias_position] = self.store_bias(quant_layer)
        for quant_layer in self.inputs_by_node.get(node.name, ()):
            nodes += self.add_pair(quant_layer, node, quant_layer.layer.input_index or 0)
        if node.name not in self.layers:
            return nodes

        quant_layer = self.layers[node.name]
        if quant_layer.inverse_factors is not None:
            nodes += multiply_input(node, quant_layer.inverse_factors)
        nodes += self.add_pair(quant_layer, node, 0)
        if quant_layer.weight is not None:
            nodes.append(self.dequantize_weight(quant_layer, node))
        if quant_layer.bias is not None and not quant_layer.layer.bias_add:
            node.input[2] = self.store_bias(quant_layer)
        return nodes

    def add_pair(self, quant_layer: QuantLayer, node: onnx.NodeProto, index: int) -> Nodes:
        """Let a node's input read the output of its pair; return the pair's nodes.

        Inputs with equal tensor and scale share a pair, which only the first call returns.
        """
        tensor = node.input[index]
        record = quant_layer.record
        key = (tensor, float(record.input_scale), record.offset_d)
        if key in self.dequantized_by_input:
            node.input[index] = self.dequantized_by_input[key]
            return []
        name = quant_layer.layer.stem
        quantized = f"{name}.input.quantized"
        dequantized = f"{name}.input.dequantized"
        parameters = [
            self.store(f"{name}.scale_d", np.asarray(record.scale_d)),
            self.store(f"{name}.offset_d", np.asarray(record.offset_d, np.int8)),
        ]
        node.input[index] = self.dequantized_by_input[key] = dequantized
        return [
            make_node("QuantizeLinear", [tensor, *parameters], quantized, f"{name}.input.quantize"),
            make_node(
                "DequantizeLinear",
                [quantized, *parameters],
                dequantized,
                f"{name}.input.dequantize",
            ),
        ]

    def dequantize_weight(self, quant_layer: QuantLayer, node: onnx.NodeProto) -> onnx.NodeProto:
        """Let a layer read its int8 weight through a DequantizeLinear; return that node.

        The stored weight of a Gemm is not transposed, so that its transB goes.
        """
        assert quant_layer.weight is not None
        name = quant_layer.layer.name
        scales = quant_layer.record.scale_w
        axis = None
        if scales.size == 1:  # one for the tensor, as a scalar
            scales = scales.reshape(())
        else:  # one for each output channel
            axis = 1 if quant_layer.layer.kind == "ConvTranspose" else 0
        inputs = [
            self.store(f"{name}.weight.int8", quant_layer.weight),
            self.store(f"{name}.scale_w", scales),
            self.store(f"{name}.offset_w", np.zeros(scales.shape, np.int8)),
        ]
        node.input[1] = f"{name}.weight.dequantized"
        clear_transposition(node)
        output = node.input[1]
        node_name = f"{name}.weight.dequantize"
        return make_node("DequantizeLinear", inputs, output, node_name, axis=axis)

    def store_bias(self, quant_layer: QuantLayer) -> str:
        """Add a layer's bias in float, a multiple of scale_w * scale_d; return its name."""
        assert quant_layer.bias is not None
        rounded = (quant_layer.bias * quant_layer.dequant.astype(np.float64)).astype(np.float32)
        return self.store(f"{quant_layer.layer.name}.bias.rounded", rounded)

    def store(self, name: str, value: np.ndarray) -> str:
        """Add an initializer; return its name."""
        self.tensors[name] = numpy_helper.from_array(value, name)
        return name
