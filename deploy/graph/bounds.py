"""How far a tensor's readers can tell its values apart, and where larger ones than seen will come.

To the bounds of `deploy.graph.bounds` this adds the logits of scores. What a detector, a tagger
or a mask says of most places is "nothing", and the few values that say "here" are what it is for:
of 51 photos none held an object that a YOLOv8n was more than 0.38 sure of, so its range ended at
0.5, and every score of 0.9 that came later was read as 0.5. Of such a tensor the rare large values
are followed on, as far as a Sigmoid tells apart (`calibrators.percentile`)::

    Conv --> t --> Reshape --> Concat --> Split --> Sigmoid --> score, output

Not so where the Sigmoid is a gate, or any layer with weights reads on from it.

Bounds beyond which no reader of a tensor can tell its values apart.

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

Nodes for which float16 is too narrow.

A value past 65504 is infinity in it, and a constant of 1e-9 that keeps a logarithm finite is 0.

How a convolution goes over its input, from its node's attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

from calibrators.rounding import Window
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import MOVES, WEIGHTED

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


class Reach(NamedTuple):
    """Of one tensor, in real units.

    Attributes:
        floor: no reader tells values below it apart.
        ceiling: nor above it.
        followed: how far rare large values are followed beyond those seen; -inf for not at all.
    """

    floor: float
    ceiling: float
    followed: float = -math.inf


EVERYWHERE = Reach(-math.inf, math.inf)


def reaches(model: onnx.ModelProto) -> dict[str, Reach]:
    """Tensor -> its reach; only tensors whose reach is not `EVERYWHERE`.

    Args:
        model: a cleaned model, its nodes in the order in which they run.
    """
    found = {name: Reach(*ends) for name, ends in bounds(model).items()}
    for name in _logits(Graph(model)):
        found[name] = found.get(name, EVERYWHERE)._replace(followed=SIGMOID[1])
    return found


def _logits(graph: Graph) -> set[str]:
    """Tensors that only moves part from the Sigmoid of a score, the Sigmoid's input included."""
    read_on = _before_weights(graph)
    waiting = [
        str(node.input[0])
        for node in graph.nodes
        if node.op_type == "Sigmoid" and node.output[0] not in read_on and _is_score(graph, node)
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _handed_on(graph.producer.get(name))
    return found


def _before_weights(graph: Graph) -> set[str]:
    """Tensors from which a way leads to a layer with weights."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op_type in WEIGHTED or not found.isdisjoint(node.output):
            found.update(node.input)
    return found


def _is_score(graph: Graph, sigmoid: onnx.NodeProto) -> bool:
    """Whether what a Sigmoid makes, moved or not, only scales what other Sigmoids make."""
    names = [str(sigmoid.output[0])]
    for name in names:  # grows while it is walked
        for reader in graph.readers.get(name, []):
            if name in _handed_on(reader):
                names += reader.output
            elif reader.op_type == "Mul" and not all(
                other in graph.constants or other == name or _made_by_sigmoid(graph, other)
                for other in reader.input
            ):
                return False
    return True


def _made_by_sigmoid(graph: Graph, name: str) -> bool:
    node = graph.producer.get(name)
    while node is not None and node.op_type != "Sigmoid" and len(_handed_on(node)) == 1:
        node = graph.producer.get(_handed_on(node)[0])
    return node is not None and node.op_type == "Sigmoid"


def _handed_on(node: onnx.NodeProto | None) -> list[str]:
    """The inputs whose values a node hands on as they are."""
    if node is None:
        return []
    if node.op_type == "Concat":
        return list(map(str, node.input))
    return [str(node.input[0])] if node.op_type in MOVED else []


_FLOAT = 1  # onnx.TensorProto
_LARGEST = 65504 / 8  # what float16 holds, with room for what calibration has not seen
_VANISHES = 2.0**-25  # float16 rounds this to 0, and what is less
_GUARDS = frozenset({"Add", "Clip", "Max", "Sub"})  # with such a constant, of a Log or a Div behind
_PASSES = MOVES | {"Expand", "Identity", "Tile"}  # give what they read
_ZERO = ", is 0 in float16"  # ends what is said of a constant


def wide_nodes(
    graph: Graph, largest: Mapping[str, float], *, but: Collection[str]
) -> dict[str, str]:
    """Node -> why it must not compute in float16.

    Of a node whose constant is 0 in it, also those that need what this keeps above 0.

    Args:
        graph: of the float model.
        largest: tensor -> largest |x| that was seen, as far as it is known.
        but: nodes that run in int8.
    """
    why: dict[str, str] = {}
    for node in graph.nodes:
        said = too_wide(graph, node, largest) if node.op_type != "Constant" else ""
        for each in _with_readers(graph, node, said) if said else ():
            why.setdefault(each.name, said)
    wide = why.keys() - but
    return {node.name: why[node.name] for node in graph.nodes if node.name in wide}


def _with_readers(graph: Graph, node: onnx.NodeProto, said: str) -> Iterator[onnx.NodeProto]:
    yield node
    if said.endswith(_ZERO) and node.op_type != "Div":
        yield from graph.readers.get(node.output[0], ())


def too_wide(graph: Graph, node: onnx.NodeProto, largest: Mapping[str, float]) -> str:
    """What float16 does not hold of what a node reads or makes; "" where it holds it all.

    Args:
        graph: of the float model, or of one with pairs.
        node: one of its nodes.
        largest: tensor of the float model -> largest |x| that was seen.
    """
    for name in (*node.input, *node.output):
        size = _largest_of(graph, name) or largest.get(_plain(name), 0.0)
        if not size <= _LARGEST:
            return f"|{_plain(name)}| reaches {size:.3g}, which is too near float16's 65504"
    return _vanishes(graph, node)


def _vanishes(graph: Graph, node: onnx.NodeProto) -> str:
    """The constant of the node, or of what makes its divisor or what it moves, that is 0 in it."""
    while node.op_type == "Div" or node.op_type in _PASSES:
        made_by = graph.producer.get(node.input[node.op_type == "Div"])
        if made_by is None:
            return ""
        node = made_by
    for name in node.input if node.op_type in _GUARDS else ():
        size = _largest_of(graph, name)
        if 0 < size <= _VANISHES:
            return f"{_plain(name)}, {size:.3g}, which may keep a value above 0{_ZERO}"
    return ""


def _largest_of(graph: Graph, name: str) -> float:
    """The largest |x| of a float constant; 0 of all else."""
    from onnx import numpy_helper

    constant = graph.initializers.get(name)
    if constant is None or constant.data_type != _FLOAT:
        return 0.0
    return float(np.abs(numpy_helper.to_array(constant)).max(initial=0.0))


def _plain(name: str) -> str:
    """The tensor of the float model behind one beside a pair."""
    return name.removesuffix("/dequantized").removesuffix("/float")


def window_of(
    given: Mapping[str, Any], kernel: Sequence[int], *, transposed: bool = False
) -> Window:
    """The window of a Conv or ConvTranspose.

    Args:
        given: the node's attributes.
        kernel: sizes of its weight's spatial axes.
        transposed: it is a ConvTranspose, without auto_pad and output_shape.
    """
    rank = len(kernel)

    def whole(name: str, otherwise: list[int]) -> tuple[int, ...]:
        return tuple(int(v) for v in given.get(name, otherwise))

    return Window(
        kernel=tuple(int(k) for k in kernel),
        strides=whole("strides", [1] * rank),
        dilations=whole("dilations", [1] * rank),
        pads=whole("pads", [0] * 2 * rank),
        auto=given.get("auto_pad", b"NOTSET").decode(),
        group=int(given.get("group", 1)),
        transposed=transposed,
        more=whole("output_padding", []),
    )
