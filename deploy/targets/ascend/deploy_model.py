"""The surgery that Ascend's deploy and fake-quant models share.

::

    x -> Conv -> y    becomes    x -> [Mul 1/factor] -> pre -> Conv' -> post -> y

`pre` and `post` differ between the deploy model (AscendQuant, AscendDequant) and the fake-quant
model (plain ops); the layer's weight and bias are replaced by integers in both. A MatMul of two
activations has `pre` on both; an input of an Add or MaxPool gets `pre` and `back`, and the node
stays as it is.

<prefix>_deploy_model.onnx: what ATC compiles. AscendQuant, int8 layer, AscendDequant.

The packed parameter of AscendDequant is one uint64 a channel::

    bits 31..0   float32 bits of scale_w * scale_d
    bits 39..32  shift N, 0
    bits 47..40  offset_w, 0

Weights of 4 bits are int8 tensors of half as many input channels, two integers a byte.

Source: hicann/ge quant_host_cpu_op_common.h; measured on AMCT's own outputs.

<prefix>_modified_model.onnx: the float model with the weights that AdaRound rounded.

As in AMCT, whose quantize_model leaves such a model beside the record: a record holds scales alone,
and only with these weights do they give the codes again. It is left too where layers shared their
weights, which AMCT refuses: here each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.graph.edit import copied, free_inputs, replace_nodes, update
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import (
    Float32Array,
    QuantLayer,
    array_of,
    balanced_weight,
    from_rows,
    rows_of,
)
from deploy.targets.ascend.record import LayerRecord

if TYPE_CHECKING:
    from deploy.targets.ascend.layers import LayerGraph


Nodes = list[onnx.NodeProto]
Before = Callable[[QuantLayer, str], tuple[Nodes, str]]
After = Callable[[QuantLayer, str, str], Nodes]
Store = Callable[[str, QuantLayer], onnx.TensorProto]


def _as_it_is(q: QuantLayer, bias: str) -> tuple[Nodes, str]:
    return [], bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What one of the models has in place of a float layer.

    Attributes:
        before: nodes from the layer's input to its integers, and the tensor they end in.
        after: nodes from the layer's integers to its output.
        back: nodes from an input's integers to floats again, and the tensor they end in.
        weight, bias: how its integers are kept, under a name.
        behind_bias: nodes between the kept bias and the layer, and the tensor they end in.
    """

    before: Before
    after: After
    back: Before
    weight: Store
    bias: Store
    behind_bias: Before = _as_it_is


def rewrite(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], form: Form
) -> onnx.ModelProto:
    """A copy of `model` whose `layers` run on integers.

    Every float tensor keeps its name; a layer's integer output is '<layer>_output0'.

    Args:
        model: float model, nodes named.
        layers: by node name; inputs of tensor_quantize by their own.
        form: what they become.
    """
    out = copied(model)
    surgery = _Surgery(out, form)
    ends = {q.layer.bias_add or name: q for name, q in layers.items() if q.layer.at is None}
    inputs = inputs_of(layers)
    nodes: Nodes = []
    for node in out.graph.node:
        for q in inputs.get(node.name, ()):
            nodes += surgery.pass_through(node, q)
        if node.name in layers:
            nodes += surgery.enter(node, layers[node.name])
        nodes.append(node)
        if node.name in ends:
            nodes += surgery.leave(node, ends[node.name])
    surgery.finish(nodes)
    return out


def inputs_of(layers: Mapping[str, QuantLayer]) -> dict[str, list[QuantLayer]]:
    """Node -> what of `layers` is an input of it, and not the node itself."""
    found: dict[str, list[QuantLayer]] = {}
    for q in layers.values():
        if q.layer.at is not None:
            found.setdefault(q.layer.node, []).append(q)
    return found


class _Surgery:
    def __init__(self, model: onnx.ModelProto, form: Form) -> None:
        self.graph, self.index, self.form = model.graph, Graph(model), form
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.shared: dict[tuple[str, float, int, int], str] = {}
        self.biases: dict[str, str] = {}  # Add of a MatMul's bias -> what it reads in its place

    def enter(self, node: onnx.NodeProto, q: QuantLayer) -> Nodes:
        """Nodes before the layer; the layer itself gets its integer weight and bias."""
        nodes, start = [], node.input[0]
        if q.inverse_factors is not None:
            nodes += balance(q, start)
            start = f"{node.name}.mul.output0"
        nodes += self.quantize(node, 0, q, start)
        if q.second is not None:
            nodes += self.quantize(node, 1, q.second, node.input[1])
        if q.weight is not None:
            self.tensors[node.input[1]] = self.form.weight(node.input[1], q)
        if q.bias is not None:
            more, bias = self.form.behind_bias(q, self.keep_bias(q))
            nodes += more
            if q.layer.bias_add:
                self.biases[q.layer.bias_add] = bias
            else:
                node.input[2] = bias
        for attribute in node.attribute:
            if attribute.name == "transB":
                attribute.i = 0
        return nodes

    def quantize(self, node: onnx.NodeProto, place: int, q: QuantLayer, start: str) -> Nodes:
        """Have an input read integers; nodes that agree on tensor and scale share them."""
        nodes: Nodes = []
        key = (start, float(q.scale), q.record.offset_d, q.record.act_bits)
        if key not in self.shared:
            nodes, self.shared[key] = self.form.before(q, start)
        node.input[place] = self.shared[key]
        return nodes

    def pass_through(self, node: onnx.NodeProto, q: QuantLayer) -> Nodes:
        """Have an input read floats that were integers on their way."""
        place = q.layer.at
        assert place is not None
        nodes = self.quantize(node, place, q, node.input[place])
        more, node.input[place] = self.form.back(q, node.input[place])
        return [*nodes, *more]

    def leave(self, node: onnx.NodeProto, q: QuantLayer) -> Nodes:
        """Nodes after the layer, or after the Add that holds a MatMul's bias."""
        if node.name in self.biases:
            place = list(node.input).index(q.layer.bias)
            node.input[place] = self.biases[node.name]
        output = node.output[0]
        node.output[0] = f"{q.layer.name}_output0"
        return self.form.after(q, node.output[0], output)

    def keep_bias(self, q: QuantLayer) -> str:
        """The bias's name; one of its own where other nodes read the float bias too."""
        name = q.layer.bias
        own = f"{q.layer.name}.quant_bias" if len(self.index.readers[name]) > 1 else name
        self.tensors[own] = self.form.bias(own, q)
        return own

    def finish(self, nodes: Nodes) -> None:
        """Put nodes and tensors in place: replaced weights first as they were, then the new."""
        gone = set(self.tensors)
        constants = [n for n in nodes if n.op_type == "Constant" and n.output[0] not in gone]
        others = [n for n in nodes if n.op_type != "Constant"]
        update(self.graph.initializer, self.tensors)
        replace_nodes(self.graph, constants + others)
        free_inputs(self.graph)
        del self.graph.value_info[:]


def balance(q: QuantLayer, start: str) -> Nodes:
    """Divide the input by its DMQ factors, as a multiplication with their inverses."""
    assert q.inverse_factors is not None
    name = q.layer.name
    constant = make_constant(f"{name}.tensor_balance_factor", q.inverse_factors)
    inputs = [start, constant.output[0]]
    return [constant, helper.make_node("Mul", inputs, [f"{name}.mul.output0"], name=f"{name}.mul")]


def make_constant(name: str, value: NDArray[Any] | np.generic) -> onnx.NodeProto:
    """A Constant node; its output is '<name>.output0'."""
    tensor = numpy_helper.from_array(np.asarray(value))
    return helper.make_node("Constant", [], [f"{name}.output0"], name=name, value=tensor)


def rewrite_inputs(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    weights: Mapping[str, onnx.TensorProto],
    inverse_factors: Mapping[str, Float32Array],
) -> onnx.ModelProto:
    """A float copy with other weights, and inputs multiplied by `inverse_factors` [C_in]."""
    out = copied(model)
    nodes: Nodes = []
    for node in out.graph.node:
        if node.name in inverse_factors:
            layer, name = layers[node.name], node.name
            shape = (1, -1, *[1] * layer.rank)
            constant = make_constant(
                f"{name}.tensor_balance_factor", inverse_factors[name].reshape(shape)
            )
            inputs = [node.input[0], constant.output[0]]
            mul = helper.make_node("Mul", inputs, [f"{name}.mul.output0"], name=f"{name}.mul")
            nodes += [constant, mul]
            node.input[0] = mul.output[0]
        if not (node.op_type == "Constant" and node.output[0] in weights):
            nodes.append(node)
    update(out.graph.initializer, weights)
    replace_nodes(out.graph, nodes)
    free_inputs(out.graph)
    return out


# AMCT leaves no sign of weights that are two to a byte; ATC passes over attributes it does not know
PACKED = "wts_type"


def deploy_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Float model + integers -> deploy model.

    The activation offset is not folded into the bias: GE does that itself when it compiles.
    """
    form = Form(
        before=_quant,
        after=_dequant,
        back=_anti_quant,
        weight=_weight,
        bias=_bias,
        behind_bias=_behind_bias,
    )
    made = rewrite(model, layers, form)
    parameters = [_parameter(q) for q in layers.values() if q.layer.at is None]
    made.graph.initializer.extend(parameters)
    return made


def pack(dequant: Float32Array) -> NDArray[np.uint64]:
    """float32 [C] -> uint64 [C] with the scale's bits in the low half."""
    return np.ascontiguousarray(dequant).view(np.uint32).astype(np.uint64)


def packed_axis(kind: str) -> int:
    """Axis of the input channels of a weight in the deploy model."""
    return {"Conv": 1, "ConvTranspose": 0}.get(kind, -2)


def pack_fours(weight: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Integers in [-8, 7] -> int8, two neighbours along `axis` in one: the first in the low half.

    Args:
        weight: an even number of them along `axis`.
        axis: that of the input channels.
    """
    nibbles = np.moveaxis(weight, axis, -1).view(np.uint8) & 15
    pairs = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(np.int8)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, axis))


def unpack_fours(packed: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Inverse of `pack_fours`."""
    bytes_ = np.moveaxis(packed, axis, -1)
    halves = np.stack((bytes_ << 4 >> 4, bytes_ >> 4), axis=-1)  # shifts keep the sign
    whole = halves.reshape(*bytes_.shape[:-1], 2 * bytes_.shape[-1])
    return np.ascontiguousarray(np.moveaxis(whole, -1, axis), np.int8)


def unpack(parameter: NDArray[np.uint64]) -> Float32Array:
    """Inverse of `pack`; shift and offset are not looked at."""
    low = (parameter & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.asarray(low.view(np.float32))


def _quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.quant"
    node = helper.make_node(
        "AscendQuant",
        [start],
        [f"{name}.output0"],
        name=name,
        scale=float(q.scale),
        offset=float(q.record.offset_d),
        dst_type=f"INT{q.record.act_bits}",
    )
    return [node], f"{name}.output0"


def _dequant(q: QuantLayer, start: str, end: str) -> Nodes:
    name = f"{q.layer.name}.dequant"
    inputs = [start, f"{name}.param"]
    node = helper.make_node("AscendDequant", inputs, [end], name=name, dtype=0)
    if q.record.weight_bits == 4:
        node.attribute.append(helper.make_attribute(PACKED, "INT4"))
    return [node]


def _anti_quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    """(q - offset) * scale, in float32; the operator adds, and ATC's parser turns the sign."""
    assert q.record.scale_d is not None
    name = f"{q.layer.stem}.anti_quant"
    node = helper.make_node(
        "AscendAntiQuant",
        [start],
        [f"{name}.output0"],
        name=name,
        scale=float(q.record.scale_d),
        offset=float(q.record.offset_d),
        dst_type="INT8",
        dtype=0,
    )
    return [node], f"{name}.output0"


def _parameter(q: QuantLayer) -> onnx.TensorProto:
    values = pack(q.dequant)
    return helper.make_tensor(
        f"{q.layer.name}.dequant.param", onnx.TensorProto.UINT64, [values.size], values.tolist()
    )


def _weight(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.weight is not None
    if q.record.weight_bits != 4:
        return numpy_helper.from_array(q.weight, name)
    return numpy_helper.from_array(pack_fours(q.weight, packed_axis(q.layer.kind)), name)


def _bias(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.bias is not None
    return numpy_helper.from_array(q.bias, name)


def _behind_bias(q: QuantLayer, bias: str) -> tuple[Nodes, str]:
    """Beside activations of 4 bits AMCT casts the int32 bias to float."""
    if q.record.act_bits != 4:
        return [], bias
    name = f"{q.layer.name}.bias_quant"
    cast = helper.make_node("Cast", [bias], [f"{name}.output0"], name=name, to=1)
    return [cast], cast.output[0]


_NEAR = 0.01  # of a step: what factors and float32 leave of a weight on its code


def modified_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """A copy of the float model with what AdaRound's codes stand for as weights."""
    index, arrays = Graph(model), {}
    for q in layers.values():
        if q.record.rounded is None:
            continue
        name, layer = q.layer.weight, q.layer
        shape = rows_of(array_of(index, name), layer).shape
        scale = q.record.scale_w.reshape((-1,) + (1,) * (len(shape) - 1))
        weight = from_rows(q.record.rounded.reshape(shape) * scale, layer)
        inverse = np.asarray(1 / q.record.factors, np.float32)
        arrays[name] = numpy_helper.from_array(balanced_weight(weight, layer, inverse), name)
    return rewrite_inputs(model, {}, arrays, {})


def unrounded(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, LayerRecord],
    names: list[str],
) -> list[str]:
    """Those of the layers that AdaRound rounded whose weights are not on codes in this model."""
    index, found = Graph(model), []
    for name in names:
        if name not in records or name not in graph.layers:
            continue
        layer, record = graph.layers[name], records[name]
        rows = rows_of(balanced_weight(array_of(index, layer.weight), layer, record.factors), layer)
        steps = rows / record.scale_w.reshape((-1,) + (1,) * (rows.ndim - 1))
        if np.abs(steps - np.rint(steps)).max() > _NEAR:
            found.append(name)
    return found
