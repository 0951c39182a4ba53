"""Gates that stay float, as operators that ONNX Runtime computes inside the layer before them.

A Hard-Swish written out between two Convs is four kernels and two changes of layout, where its own
operator costs nothing (see `deploy.graph.gates` for y = factor * gain * clip(..) + offset)::

    Conv -> Add 3, Clip 0..6, Mul, Div 6      -->  Conv -> HardSwish       one kernel
    x * clip(g + 3, 0, 6) / 6                 -->  g -> HardSigmoid -> Mul
    .. * 0.9 + 0.1                            -->  .. -> BatchNormalization, which has the layout of
                                                   a Conv, as Mul and Add of a number have not

Source: ONNX operators HardSigmoid-6, HardSwish-14 and BatchNormalization-14.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.frontends.checks import opset_of
from deploy.frontends.lift import set_opset
from deploy.graph.edit import rebuild
from deploy.graph.gates import Gate
from deploy.graph.index import Graph

_OPSET = 14  # the first with HardSwish; since 13 no operator means another thing
_EQUAL = 1e-6


def fuse_gates(model: onnx.ModelProto, gates: Iterable[Gate], like: Graph) -> None:
    """Write gates that stay float anew, in place.

    Args:
        model: with pairs or without, opset 13 or later.
        gates: of the model without pairs.
        like: that model.
    """
    anew = list(gates)
    nodes = {node.name: node for node in model.graph.node} if anew else {}
    instead: dict[str, list[onnx.NodeProto]] = {}
    for gate in anew:
        own = [nodes[name] for name in gate.nodes]
        fused = _Fused(gate, own, _channels(like, gate))
        written = fused.nodes()
        if len(written) < len(own):
            instead |= {name: [] for name in gate.nodes} | {gate.name: written}
            model.graph.initializer.extend(fused.constants)
    if not instead:
        return
    rebuild(model.graph, [n for old in model.graph.node for n in instead.get(old.name, [old])])
    if opset_of(model) < _OPSET:
        set_opset(model, _OPSET)


class _Fused:
    """The new nodes of one gate, and the constants that they read."""

    def __init__(self, gate: Gate, own: Sequence[onnx.NodeProto], channels: int) -> None:
        self.gate, self.channels = gate, channels
        self.constants: list[onnx.TensorProto] = []
        read = {n.removesuffix("/dequantized"): n for node in own for n in node.input}
        self.source, self.factor = read[gate.source], read[gate.factor]
        self.output = str(own[-1].output[0])
        self.scale = gate.gain * gate.top
        self.affine = gate.offset != 0 or not math.isclose(self.scale, 1.0, rel_tol=_EQUAL)

    def nodes(self) -> list[onnx.NodeProto]:
        """In their order."""
        if not self.affine:
            return self._gated(self.gate.name, self.output)
        gated = f"{self.gate.name}/gated"
        return [*self._gated(gated, gated), *self._scaled(gated)]

    def _gated(self, name: str, output: str) -> list[onnx.NodeProto]:
        """Without gain and offset."""
        gate = self.gate
        alpha, beta = 1 / gate.top, gate.shift / gate.top
        swish = math.isclose(alpha, 1 / 6, rel_tol=_EQUAL) and math.isclose(beta, 0.5)
        if swish and gate.source == gate.factor:
            return [helper.make_node("HardSwish", [self.source], [output], name=name)]
        open_ = f"{gate.name}/open"
        return [
            helper.make_node(
                "HardSigmoid", [self.source], [open_], name=open_, alpha=alpha, beta=beta
            ),
            helper.make_node("Mul", [self.factor, open_], [output], name=name),
        ]

    def _scaled(self, gated: str) -> list[onnx.NodeProto]:
        """Gain and offset, behind the rest."""
        scale, shift = np.float32(self.scale), np.float32(self.gate.offset)
        name = self.gate.name
        if not self.channels:
            product = f"{name}/product"
            times, plus = self._constant("scale", scale), self._constant("shift", shift)
            return [
                helper.make_node("Mul", [gated, times], [product], name=product),
                helper.make_node("Add", [product, plus], [self.output], name=name),
            ]
        every = np.ones(self.channels, np.float32)
        inputs = [
            self._constant("scale", every * scale),
            self._constant("shift", every * shift),
            self._constant("mean", every * 0),
            self._constant("variance", every),
        ]
        node = helper.make_node(
            "BatchNormalization", [gated, *inputs], [self.output], name=name, epsilon=0.0
        )
        return [node]

    def _constant(self, what: str, array: NDArray[np.float32] | np.float32) -> str:
        name = f"{self.gate.name}/{what}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name


def _channels(like: Graph, gate: Gate) -> int:
    """Of what a gate makes, where that is a picture of so many; else 0."""
    sizes = like.shapes.get(gate.output) or ()
    channels = sizes[1] if len(sizes) > 3 else None
    return channels if isinstance(channels, int) else 0
