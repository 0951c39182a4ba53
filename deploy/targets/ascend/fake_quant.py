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
from onnx import helper, numpy_helper

from calibrators.amct.arq import ascend_range
from deploy.graph.edit import copy_message, drop_initializer_inputs, rebuild, replace_field
from deploy.targets.ascend.deploy_model import (
    LayerReplacement,
    Nodes,
    balance_nodes,
    group_tensor_inputs,
    make_constant,
    rewrite_layers,
)
from deploy.targets.ascend.quant_layer import QuantLayer


def fake_quant_model(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], *, npu_rounding: bool = False
) -> onnx.ModelProto:
    """Return a model of the same numerics in standard operators.

    `npu_rounding`: add the offset before rounding, as AscendQuant does; by default after it, as
    AMCT's own fake-quant models do.
    """
    before = partial(_quant, npu_rounding=npu_rounding)
    form = LayerReplacement(
        quantize_input=before,
        dequantize_output=_dequant,
        dequantize_input=_anti_quant,
        weight=_weight,
        bias=_bias,
    )
    return rewrite_layers(model, layers, form)


def _quant(q: QuantLayer, start: str, *, npu_rounding: bool) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.quant.fakequant"
    low, high = ascend_range(q.record.act_bits)
    values = {"scale": float(q.scale), "offset": q.record.offset_d, "min_val": low, "max_val": high}
    constants = [make_constant(f"{name}.{k}", np.float32(v)) for k, v in values.items()]
    scale, offset, least, most = (node.output[0] for node in constants)
    steps = [
        ("Mul", "mul", [scale]),
        ("Round", "round", []),
        ("Add", "add", [offset]),
        ("Clip", "clip", [least, most]),
        ("Sub", "sub", [offset]),
    ]
    if npu_rounding:
        steps[1], steps[2] = steps[2], steps[1]
    nodes, tensor = list(constants), start
    for op, word, others in steps:
        output = f"{name}.{word}.output0"
        nodes.append(helper.make_node(op, [tensor, *others], [output], name=f"{name}.{word}"))
        tensor = output
    return nodes, tensor


def _dequant(q: QuantLayer, start: str, end: str) -> Nodes:
    name = f"{q.layer.name}.fakedequant"
    rank = q.layer.rank if q.layer.weight else 0
    shape = (1, -1, *[1] * rank)
    constant = make_constant(f"{name}.dqscale", q.dequant.reshape(shape))
    return [
        constant,
        helper.make_node("Mul", [start, constant.output[0]], [end], name=f"{name}.mul"),
    ]


def _anti_quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.anti_quant.fake_antiquant"
    scale = make_constant(f"{name}.scale", np.float32(q.record.scale_d))
    output = f"{name}.mul.output0"
    mul = helper.make_node("Mul", [start, scale.output[0]], [output], name=f"{name}.mul")
    return [scale, mul], output


def _weight(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.weight is not None
    return numpy_helper.from_array(q.weight.astype(np.float32), name)


def _bias(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.bias is not None
    return numpy_helper.from_array(q.bias.astype(np.float32), name)


def amct_qdq_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Return the Q/DQ model of a float model and its integers.

    `model`: float model, nodes named; opset 13 or later if weights are per channel.
    """
    out = copy_message(model)
    writer = _AmctQdqWriter({name: q for name, q in layers.items() if _expressible(q)})
    nodes = [new for node in out.graph.node for new in writer.rewrite(node)]
    old = [tensor for tensor in out.graph.initializer if tensor.name not in writer.tensors]
    replace_field(out.graph.initializer, [*old, *writer.tensors.values()])
    rebuild(out.graph, nodes)
    drop_initializer_inputs(out.graph)
    return out


def _expressible(q: QuantLayer) -> bool:
    grouped = q.layer.kind == "ConvTranspose" and q.layer.group > 1
    unknown = q.layer.two_activations or q.layer.kind == "MaxPool" or q.record.act_bits != 8
    return not unknown and not (grouped and q.record.scale_w.size > 1)


class _AmctQdqWriter:
    def __init__(self, layers: Mapping[str, QuantLayer]) -> None:
        self.layers, self.inputs = layers, group_tensor_inputs(layers)
        self.adds = {q.layer.bias_add: q for q in layers.values() if q.layer.bias_add}
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.shared: dict[tuple[str, float, int], str] = {}

    def rewrite(self, node: onnx.NodeProto) -> Nodes:
        """Return a layer with the nodes before it; any other node unchanged."""
        if node.name in self.adds:
            q = self.adds[node.name]
            node.input[list(node.input).index(q.layer.bias)] = self.bias(q)
        if node.name in self.inputs:
            pairs = [
                self.activation(q, node, q.layer.input_index or 0) for q in self.inputs[node.name]
            ]
            return [*(one for pair in pairs for one in pair), node]
        if node.name not in self.layers:
            return [node]
        q, start = self.layers[node.name], node.input[0]
        nodes: Nodes = []
        if q.inverse_factors is not None:
            nodes += balance_nodes(q, start)
            node.input[0] = f"{node.name}.mul.output0"
        nodes += self.activation(q, node, 0)
        if q.weight is not None:
            nodes.append(self.weight(q, node))
        if q.bias is not None and not q.layer.bias_add:
            node.input[2] = self.bias(q)
        return [*nodes, node]

    def activation(self, q: QuantLayer, node: onnx.NodeProto, place: int) -> Nodes:
        """Add the pair of an input; inputs with equal tensor and scale share it."""
        assert q.record.scale_d is not None
        start = node.input[place]
        key = (start, float(q.record.scale_d), q.record.offset_d)
        if key in self.shared:
            node.input[place] = self.shared[key]
            return []
        name = q.layer.stem
        scale = self.put(f"{name}.scale_d", np.asarray(q.record.scale_d))
        zero = self.put(f"{name}.offset_d", np.asarray(q.record.offset_d, np.int8))
        node.input[place] = self.shared[key] = f"{name}.input.dequantized"
        return _pair(name, start, f"{name}.input.quantized", node.input[place], [scale, zero])

    def weight(self, q: QuantLayer, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return the DequantizeLinear of the int8 weight, which a Gemm reads untransposed."""
        name, scales = q.layer.name, q.record.scale_w
        assert q.weight is not None
        per_channel = scales.size > 1
        inputs = [
            self.put(f"{name}.weight.int8", q.weight),
            self.put(f"{name}.scale_w", scales if per_channel else scales.reshape(())),
            self.put(f"{name}.offset_w", np.zeros(scales.size if per_channel else (), np.int8)),
        ]
        node.input[1] = f"{name}.weight.dequantized"
        for attribute in node.attribute:
            if attribute.name == "transB":
                attribute.i = 0
        dequantize = helper.make_node(
            "DequantizeLinear", inputs, [node.input[1]], name=f"{name}.weight.dequantize"
        )
        if per_channel:
            axis = 1 if q.layer.kind == "ConvTranspose" else 0
            dequantize.attribute.append(helper.make_attribute("axis", axis))
        return dequantize

    def bias(self, q: QuantLayer) -> str:
        assert q.bias is not None
        rounded = (q.bias * q.dequant.astype(np.float64)).astype(np.float32)
        return self.put(f"{q.layer.name}.bias.rounded", rounded)

    def put(self, name: str, value: np.ndarray) -> str:
        self.tensors[name] = numpy_helper.from_array(
            np.ascontiguousarray(value).reshape(np.shape(value)), name
        )
        return name


def _pair(name: str, start: str, middle: str, end: str, parameters: list[str]) -> Nodes:
    make = helper.make_node
    return [
        make("QuantizeLinear", [start, *parameters], [middle], name=f"{name}.input.quantize"),
        make("DequantizeLinear", [middle, *parameters], [end], name=f"{name}.input.dequantize"),
    ]
