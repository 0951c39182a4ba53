"""Bounds beyond which no reader of a tensor can tell its values apart.

A HardSwish gives 0 for everything below -3, so a scale that reaches to -80 spends its integers on
nothing. Such tensors are common where int8 kernels need a pair between a Conv and its activation::

    int8 Conv --> t --[Q DQ]--> HardSwish          t below -3 is as good as -3

Known readers, with their bounds: Relu, Clip, HardSigmoid, HardSwish, and the HardSwish that
exporters write out: t * Clip(t + 3, 0, 6) and t * HardSigmoid(t), divided or not. A tensor that
anything else reads, or that leaves the model, has no bounds.

Source: ONNX operators Clip-13, HardSigmoid-6 and HardSwish-14.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from deploy.graph.index import Graph, attributes

Bounds = tuple[float, float]


def bounds(model: onnx.ModelProto) -> dict[str, Bounds]:
    """Tensor -> (floor, ceiling) in real units, either may be infinite; only tensors with any."""
    graph = _Readers(Graph(model))
    found = {name: graph.bounds(name) for name in graph.graph.readers}
    return {name: both for name, both in found.items() if both != (-math.inf, math.inf)}


@dataclass(frozen=True, slots=True)
class _Readers:
    graph: Graph

    def bounds(self, tensor: str) -> Bounds:
        """The loosest of what every reader needs."""
        graph = self.graph
        if tensor in graph.outputs or tensor in graph.captured or tensor in graph.initializers:
            return -math.inf, math.inf
        needs = [self._need(tensor, node) for node in graph.readers[tensor]]
        return min(low for low, _ in needs), max(high for _, high in needs)

    def _need(self, tensor: str, node: onnx.NodeProto) -> Bounds:
        """What one reader of `tensor` can tell apart."""
        if node.op_type == "Mul":
            return self._product(tensor, node)
        if node.op_type == "Add" and (shift := self._constant_beside(tensor, node)) is not None:
            low, high = self.bounds(node.output[0])
            return low - shift, high - shift
        return self._unary(node) or (-math.inf, math.inf)

    def _unary(self, node: onnx.NodeProto) -> Bounds | None:
        if node.op_type == "Relu":
            return 0.0, math.inf
        if node.op_type == "HardSwish":
            return -3.0, math.inf
        if node.op_type == "HardSigmoid":
            given = attributes(node)
            alpha, beta = given.get("alpha", 0.2), given.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        if node.op_type == "Clip":
            ends = [self.graph.number(name) for name in [*node.input, "", ""][1:3]]
            low, high = ends
            return (-math.inf if low is None else low, math.inf if high is None else high)
        return None

    def _product(self, tensor: str, node: onnx.NodeProto) -> Bounds:
        """Tensor * gate, where the gate is made of the same tensor and is 0 below its floor."""
        others = [name for name in node.input if name != tensor]
        gate = self.graph.producer.get(others[0]) if len(others) == 1 else None
        if gate is None or gate.op_type not in {"Clip", "HardSigmoid"}:
            return -math.inf, math.inf
        need = self._unary(gate)
        if need is None or (gate.op_type == "Clip" and need[0] != 0.0):
            return -math.inf, math.inf
        if gate.input[0] == tensor:
            return need[0], math.inf
        before = self.graph.producer.get(gate.input[0])
        if before is None or before.op_type != "Add" or tensor not in before.input:
            return -math.inf, math.inf
        shift = self._constant_beside(tensor, before)
        return (-math.inf if shift is None else need[0] - shift), math.inf

    def _constant_beside(self, tensor: str, node: onnx.NodeProto) -> float | None:
        others = [name for name in node.input if name != tensor]
        return self.graph.number(others[0]) if len(others) == 1 else None
