"""The surgery that Ascend's deploy and fake-quant models share.

::

    x -> Conv -> y    becomes    x -> [Mul 1/factor] -> pre -> Conv' -> post -> y

`pre` and `post` differ between the deploy model (AscendQuant, AscendDequant) and the fake-quant
model (plain ops); the layer's weight and bias are replaced by integers in both. A MatMul of two
activations has `pre` on both; an input of an Add or MaxPool gets `pre` and `back`, and the node
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.graph.edit import copied, free_inputs, replace_nodes, update
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import Float32Array, QuantLayer

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
