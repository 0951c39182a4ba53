"""Gates that stay float become operators that ONNX Runtime computes inside the layer before them.

A Hard-Swish written out between two Convs is four kernels and two changes of layout, where its own
operator costs nothing (`deploy.graph.gates` has y = factor * gain * clip(..) + offset)::

    Conv -> Add 3, Clip 0..6, Mul, Div 6      -->  Conv -> HardSwish       one kernel
    x * clip(g + 3, 0, 6) / 6                 -->  g -> HardSigmoid -> Mul
    .. * 0.9 + 0.1                            -->  .. -> BatchNormalization, which has the layout of
                                                   a Conv, as Mul and Add of a number have not

Source: ONNX operators HardSigmoid-6, HardSwish-14 and BatchNormalization-14.
"""

import math
from collections.abc import Sequence

import numpy as np
import onnx

from deploy.graph.edit import make_node, rebuild, set_opset
from deploy.graph.gates import Gate
from deploy.graph.index import Graph, Nodes, by_name, opset_of
from deploy.targets.onnxruntime.rewrite_base import (
    ReplacementNodes,
    RewriteContext,
    replaced_nodes,
)
from deploy.targets.onnxruntime.uint8_gates import map_read_names

_HARD_SWISH_OPSET = 14  # the first with HardSwish; since 13 no operator means another thing
_REL_TOLERANCE = 1e-6  # constants of a gate that are equal up to float32


def fuse_gates(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Replace the nodes of each gate that stays float by fewer operators, in place.

    A gate is a product with a clipped tensor, such as Hard-Swish, x * clip(x + 3, 0, 6) / 6.
    """
    node_by_name = by_name(model.graph.node)
    replacements: dict[str, Nodes] = {}  # name of a node -> the nodes in its place
    for gate in context.float_gates:
        gate_nodes = [node_by_name[name] for name in gate.nodes]
        fused_gate = _FusedGate(gate, gate_nodes, _channel_count(context.float_graph, gate))
        fused_nodes = fused_gate.write()
        if len(fused_nodes) < len(gate_nodes):  # else nothing is gained
            replacements |= {name: [] for name in gate.nodes}
            replacements[gate.name] = fused_nodes  # a gate has the name of one of its nodes
            model.graph.initializer.extend(fused_gate.constants)
    if not replacements:
        return
    rebuild(model.graph, replaced_nodes(model, replacements))
    if opset_of(model) < _HARD_SWISH_OPSET:  # a gate may be a HardSwish node now
        set_opset(model, _HARD_SWISH_OPSET)


def _channel_count(graph: Graph, gate: Gate) -> int | None:
    """Return the channels of a gate's output if it is a picture and their number is known."""
    sizes = graph.shapes.get(gate.output) or ()
    channels = sizes[1] if len(sizes) > 3 else None  # [N, C, H, W]
    return channels if isinstance(channels, int) else None


class _FusedGate(ReplacementNodes):
    """The new nodes of one gate, and their constants.

    Attributes:
        read_source, read_factor: the gate's tensors, by the names under which its nodes read them:
            the output of a Q/DQ pair may have another name than the tensor of the float model.
        output: the tensor that the gate makes.
        channels: of the output, as `_channel_count` returns them.
    """

    def __init__(
        self, gate: Gate, gate_nodes: Sequence[onnx.NodeProto], channels: int | None
    ) -> None:
        super().__init__(gate.name)
        self.gate = gate
        self.channels = channels
        read_name = map_read_names(gate_nodes)
        self.read_source = read_name[gate.source]
        self.read_factor = read_name[gate.factor]
        self.output = gate_nodes[-1].output[0]

    def write(self) -> Nodes:
        """Return the nodes that compute factor * gain * clip(source + shift, 0, top) + offset."""
        scale = self.gate.gain * self.gate.top
        if self.gate.offset == 0 and math.isclose(scale, 1.0, rel_tol=_REL_TOLERANCE):
            return self._write_product(self.name, self.output)
        product = f"{self.name}/gated"
        return [*self._write_product(product, product), *self._write_affine(product, scale)]

    def _write_product(self, name: str, output: str) -> Nodes:
        """Return the nodes that compute factor * clip(source + shift, 0, top) / top.

        That is factor * HardSigmoid(source), since a HardSigmoid is clip(alpha * x + beta, 0, 1).

        Args:
            name: name of the last node.
            output: the tensor that it makes.
        """
        gate = self.gate
        alpha = 1 / gate.top
        beta = gate.shift / gate.top
        # a HardSwish is x * HardSigmoid(x) with alpha 1/6 and beta 1/2
        has_usual_alpha = math.isclose(alpha, 1 / 6, rel_tol=_REL_TOLERANCE)
        has_usual_constants = has_usual_alpha and math.isclose(beta, 0.5)
        if has_usual_constants and gate.source == gate.factor:
            return [make_node("HardSwish", [self.read_source], output, name)]
        sigmoid = self.make_named_node(
            "HardSigmoid", [self.read_source], "open", alpha=alpha, beta=beta
        )
        inputs = [self.read_factor, sigmoid.output[0]]
        return [sigmoid, make_node("Mul", inputs, output, name)]

    def _write_affine(self, product: str, scale: float) -> Nodes:
        """Return the nodes that compute product * scale + the gate's offset.

        They are a Mul and an Add, or one BatchNormalization of mean 0 and variance 1 if the number
        of channels is known. The constant with the offset is called NAME/shift.
        """
        scale32 = np.float32(scale)
        offset = np.float32(self.gate.offset)
        if not self.channels:
            mul = self.make_named_node(
                "Mul", [product, self.add_constant("scale", scale32)], "product"
            )
            inputs = [mul.output[0], self.add_constant("shift", offset)]
            return [mul, make_node("Add", inputs, self.output, self.name)]
        ones = np.ones(self.channels, np.float32)
        inputs = [
            product,
            self.add_constant("scale", ones * scale32),
            self.add_constant("shift", ones * offset),
            self.add_constant("mean", ones * 0),
            self.add_constant("variance", ones),
        ]
        op_type = "BatchNormalization"
        return [make_node(op_type, inputs, self.output, self.name, epsilon=0.0)]
