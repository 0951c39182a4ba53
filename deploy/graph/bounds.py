"""Bounds beyond which no reader of a tensor can tell its values apart.

A HardSwish gives 0 for everything below -3, so a scale that reaches to -80 spends its integers on
nothing. Such tensors are common where int8 kernels need a pair between a Conv and its activation::

    int8 Conv --> t --[Q DQ]--> HardSwish                     t below -3 is as good as -3
    int8 Conv --> t --[Q DQ]--> Reshape --> Concat --> Sigmoid          as is t below -8

Exact are Relu, Clip, HardSigmoid, HardSwish, and the HardSwish that exporters write out: t *
Clip(t + 3, 0, 6) and t * HardSigmoid(t), divided or not. The smooth ones never saturate, so their
bounds are where all that is left is far less than what 8 bits resolve:

==================  ===========  ================================================================
reader              t beyond     what is lost there, at most
==================  ===========  ================================================================
Sigmoid             -8, 8        3.4e-4, a sixth of half a step of 1/255
Tanh                -4, 4        6.8e-4 of 2, the same share: tanh(t) = 2 sigmoid(2 t) - 1
Erf                 -3, 3        2.3e-5 of 2
t * Sigmoid(t)      -10          4.6e-4: a grid that holds its least value, -0.278, has steps of
                                 0.278 / 255 or more, and this is less than half of one
GELU by Erf, Gelu   -4           1.3e-4, likewise with -0.170
==================  ===========  ================================================================

Where a Log, a root or a division by it reads what a Sigmoid, Tanh or Erf makes, small differences
count, and it has no bounds. Softmax has none: it sees the differences within a row alone, and no
number tells where another row's largest value lies.

What moves values or takes the largest of them (Reshape, Concat, Split, MaxPool, ...), and an Add,
Sub, Mul or Div with one number, hand the bounds of what they make to what they read. A tensor has
the loosest of what its readers need; what leaves the model, or is read by anything else, has none.

Source: ONNX operators Clip-13, HardSigmoid-6, HardSwish-14 and Gelu-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import onnx

from deploy.graph.index import Graph, attributes

Bounds = tuple[float, float]

_FREE: Bounds = (-math.inf, math.inf)
_UNREAD: Bounds = (math.inf, -math.inf)  # what nobody looks at: looser than it is anything
SIGMOID: Bounds = (-8.0, 8.0)
_SMOOTH: dict[str, Bounds] = {"Sigmoid": SIGMOID, "Tanh": (-4.0, 4.0), "Erf": (-3.0, 3.0)}
_GATED = {"HardSwish": -3.0, "Gelu": -4.0}
_AMPLIFIES = frozenset({"Log", "Reciprocal", "Sqrt"})
MOVED = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Split"}
    | {"Identity", "Expand", "Tile", "MaxPool", "DepthToSpace", "SpaceToDepth"}
)
_SILU, _GELU = -10.0, -4.0 / math.sqrt(2)  # floors of u in t * Sigmoid(u) and t * (1 + Erf(u))


def bounds(model: onnx.ModelProto) -> dict[str, Bounds]:
    """Tensor -> (floor, ceiling) in real units, either may be infinite; only tensors with any.

    Args:
        model: a cleaned model, its nodes in the order in which they run.
    """
    readers = _Readers(Graph(model))
    return {name: (a, b) for name, (a, b) in readers.found.items() if (a, b) != _FREE and a < b}


def _union(needs: Iterable[Bounds]) -> Bounds:
    """The loosest of several needs."""
    low, high = _UNREAD
    for floor, ceiling in needs:
        low, high = min(low, floor), max(high, ceiling)
    return low, high


class _Readers:
    """The bounds of every tensor, from the last node to the first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: dict[str, Bounds] = {}
        for node in reversed(graph.nodes):
            self._settle(node.output)
        self._settle(graph.inputs)

    def _settle(self, tensors: list[str]) -> None:
        for tensor in tensors:
            if tensor in self.graph.readers:
                self.found[tensor] = self._loosest(tensor)

    def _loosest(self, tensor: str) -> Bounds:
        """The loosest of what every reader needs."""
        if tensor in self.graph.outputs or tensor in self.graph.captured:
            return _FREE
        return _union(self._need(tensor, node) for node in self.graph.readers[tensor])

    def _made(self, node: onnx.NodeProto) -> Bounds:
        """What the readers of all that a node makes need."""
        kept = self.graph.outputs | self.graph.captured
        return _union(
            self.found.get(name, _FREE if name in kept else _UNREAD) for name in node.output if name
        )

    def _need(self, tensor: str, node: onnx.NodeProto) -> Bounds:
        """What one reader of `tensor` can tell apart."""
        if node.op_type == "Concat" or (node.op_type in MOVED and node.input[0] == tensor):
            return self._made(node)
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            undone = self._undone(tensor, node)
            if undone is not None:
                return undone
            return self._product(tensor, node) if node.op_type == "Mul" else _FREE
        return self._unary(node)

    def _undone(self, tensor: str, node: onnx.NodeProto) -> Bounds | None:
        """What an Add, Sub, Mul or Div of a tensor with one number needs; None of any other."""
        number = self._number_beside(tensor, node)
        first = node.input[0] == tensor
        if number is None or (not first and node.op_type in ("Sub", "Div")):
            return None
        if node.op_type in ("Mul", "Div") and number == 0:
            return None
        undo: dict[str, Callable[[float], float]] = {
            "Add": lambda y: y - number,
            "Sub": lambda y: y + number,
            "Mul": lambda y: y / number,
            "Div": lambda y: y * number,
        }
        low, high = sorted(undo[node.op_type](end) for end in self._made(node))
        return low, high

    def _unary(self, node: onnx.NodeProto) -> Bounds:
        if node.op_type in _SMOOTH:
            return _FREE if self._amplified(node) else _SMOOTH[node.op_type]
        if node.op_type in _GATED:
            return _GATED[node.op_type], math.inf
        if node.op_type == "Relu":
            return 0.0, max(0.0, self._made(node)[1])
        return self._hard(node) or _FREE

    def _hard(self, node: onnx.NodeProto) -> Bounds | None:
        """Where a HardSigmoid or Clip ends; None of any other node."""
        if node.op_type == "HardSigmoid":
            given = attributes(node)
            alpha, beta = given.get("alpha", 0.2), given.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        if node.op_type == "Clip":
            low, high = (self.graph.number(name) for name in [*node.input, "", ""][1:3])
            return (-math.inf if low is None else low, math.inf if high is None else high)
        return None

    def _amplified(self, node: onnx.NodeProto) -> bool:
        """Whether a reader of what a node makes, moved or not, tells small differences apart."""
        names, seen = list(node.output), set(node.output)
        while names:
            name = names.pop()
            for reader in self.graph.readers.get(name, []):
                if self._amplifies(reader, name):
                    return True
                if reader.op_type in MOVED or reader.op_type == "Concat":
                    names += [made for made in reader.output if made not in seen]
                    seen.update(reader.output)
        return False

    def _amplifies(self, node: onnx.NodeProto, tensor: str) -> bool:
        if node.op_type == "Pow":
            power = self._number_beside(tensor, node)
            return power is None or power < 1
        divides = node.op_type == "Div" and node.input[1] == tensor
        return node.op_type in _AMPLIFIES or divides

    def _product(self, tensor: str, node: onnx.NodeProto) -> Bounds:
        """Tensor * gate, where the gate is made of the same tensor and is 0 below its floor."""
        others = [name for name in node.input if name != tensor]
        gate = self.graph.producer.get(others[0]) if len(others) == 1 else None
        if gate is None:
            return _FREE
        if gate.op_type == "Sigmoid":
            return self._floor(tensor, str(gate.input[0]), _SILU)
        if gate.op_type == "Add" and (erf := self._erf(gate)) is not None:
            return self._floor(tensor, str(erf.input[0]), _GELU)
        need = self._hard(gate)
        if need is None or (gate.op_type == "Clip" and need[0] != 0.0):
            return _FREE
        return self._floor(tensor, str(gate.input[0]), need[0])

    def _erf(self, gate: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Erf of 1 + Erf(u)."""
        for name in gate.input:
            before = self.graph.producer.get(name)
            if before is not None and before.op_type == "Erf":
                return before if self._number_beside(name, gate) == 1.0 else None
        return None

    def _floor(self, tensor: str, gated: str, floor: float) -> Bounds:
        """The floor of a tensor, where `gated` has one and both are lines of the same tensor.

        With tensor = a t and gated = c t + d, the floor of t is (floor - d) / c.
        """
        if gated == tensor:
            return floor, math.inf
        base, a, shift = self._line(tensor)
        same, c, d = self._line(gated)
        if tensor == same:  # t itself may be a line of something else
            base, a, shift = tensor, 1.0, 0.0
        if base != same or shift or a <= 0 or c <= 0:
            return _FREE
        return a * (floor - d) / c, math.inf

    def _line(self, tensor: str) -> tuple[str, float, float]:
        """(t, c, d) of a tensor that one node makes as c t + d; itself, 1, 0 of any other."""
        node = self.graph.producer.get(tensor)
        for name in node.input[:2] if node is not None else ():
            number = self._number_beside(name, node) if node is not None else None
            if node is None or number is None:
                continue
            if node.op_type == "Mul":
                return name, number, 0.0
            if node.op_type == "Div" and name == node.input[0] and number:
                return name, 1 / number, 0.0
            if node.op_type == "Add":
                return name, 1.0, number
        return tensor, 1.0, 0.0

    def _number_beside(self, tensor: str, node: onnx.NodeProto) -> float | None:
        others = [name for name in node.input if name != tensor]
        return self.graph.number(others[0]) if len(others) == 1 else None
