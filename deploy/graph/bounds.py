"""Bounds of tensors: ranges from their readers, rare large logits, float16 overflow, Conv windows.

**Bounds** beyond which no reader of a tensor distinguishes values. A HardSwish gives 0 below -3, so
a scale that reaches to -80 wastes its integers. Such tensors are common where int8 kernels need a
pair between a Conv and its activation::

    int8 Conv --> t --[Q DQ]--> HardSwish                     t below -3 is as good as -3
    int8 Conv --> t --[Q DQ]--> Reshape --> Concat --> Sigmoid          as is t below -8

Bounds are exact for Relu, Clip, HardSigmoid, HardSwish, and the HardSwish that exporters write out:
t * Clip(t + 3, 0, 6) and t * HardSigmoid(t), divided or not. Smooth functions never saturate; their
bounds are where the rest is far less than 8 bits resolve:

==================  ===========  ================================================================
reader              t beyond     largest error there
==================  ===========  ================================================================
Sigmoid             -8, 8        3.4e-4, a sixth of half a step of 1/255
Tanh                -4, 4        6.8e-4 of 2, the same share: tanh(t) = 2 sigmoid(2 t) - 1
Erf                 -3, 3        2.3e-5 of 2
t * Sigmoid(t)      -10          4.6e-4: a grid that holds its least value, -0.278, has steps of
                                 0.278 / 255 or more, and this is less than half of one
GELU by Erf, Gelu   -4           1.3e-4, likewise with -0.170
==================  ===========  ================================================================

If a Log, a square root or a division by it reads the output of a Sigmoid, Tanh or Erf, small
differences count and there are no bounds. Softmax has none: only differences within a row matter
to it, and the largest value of another row is unknown.

Data movement and maxima (Reshape, Concat, Split, MaxPool, ...), and an Add, Sub, Mul or Div with a
scalar, pass the bounds of their output to their input. A tensor has the loosest bounds that its
readers need; outputs of the model, and tensors with any other reader, have none.

**Reach** adds the logits of scores. Most scores of a detector, tagger or mask say "nothing", and
the few that say "here" matter: in 51 photos no YOLOv8n score exceeded 0.38, so the range ended at
0.5, and every later score of 0.9 became 0.5. For such a tensor rare large values are extrapolated,
as far as a Sigmoid distinguishes them (`calibrators.percentile`), unless the Sigmoid is a gate or a
layer with weights lies downstream::

    Conv --> t --> Reshape --> Concat --> Split --> Sigmoid --> score, output

**float16**: a value past 65504 becomes infinity, and a constant of 1e-9 that keeps a logarithm
finite becomes 0. `find_float16_overflows` finds the nodes that must not compute in it.

Source: ONNX operators Clip-13, HardSigmoid-6, HardSwish-14 and Gelu-20.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.rounding import ConvWindow
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import MOVES, WEIGHTED

Bounds = tuple[float, float]

_FREE: Bounds = (-math.inf, math.inf)
_UNREAD: Bounds = (math.inf, -math.inf)  # of an unread tensor: any bounds are looser
SIGMOID: Bounds = (-8.0, 8.0)
_SMOOTH: dict[str, Bounds] = {"Sigmoid": SIGMOID, "Tanh": (-4.0, 4.0), "Erf": (-3.0, 3.0)}
_GATED = {"HardSwish": -3.0, "Gelu": -4.0}
_AMPLIFIES = frozenset({"Log", "Reciprocal", "Sqrt"})
VALUE_MOVES = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Split"}
    | {"Identity", "Expand", "Tile", "MaxPool", "DepthToSpace", "SpaceToDepth"}
)
_SILU, _GELU = -10.0, -4.0 / math.sqrt(2)  # floors of u in t * Sigmoid(u) and t * (1 + Erf(u))
_FLOAT = 1  # onnx.TensorProto
_LARGEST = 65504 / 8  # largest float16, with a margin for values that calibration did not see
_VANISHES = 2.0**-25  # float16 rounds this and less to 0
_GUARDS = frozenset({"Add", "Clip", "Max", "Sub"})  # may keep a Log or divisor above 0
_PASSES = MOVES | {"Expand", "Identity", "Tile"}  # pass values on unchanged
_ZERO = ", is 0 in float16"  # ends the reason about a constant


def find_bounds(model: onnx.ModelProto) -> dict[str, Bounds]:
    """Return tensor -> (floor, ceiling) in real units, for tensors with at least one finite bound.

    Args:
        model: a cleaned model, its nodes in execution order.
    """
    readers = _Readers(Graph(model))
    return {name: (a, b) for name, (a, b) in readers.found.items() if (a, b) != _FREE and a < b}


def _union(needs: Iterable[Bounds]) -> Bounds:
    """Return the loosest of several bounds."""
    low, high = _UNREAD
    for floor, ceiling in needs:
        low, high = min(low, floor), max(high, ceiling)
    return low, high


class _Readers:
    """Propagates the bounds of every tensor, from the last node to the first."""

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
        """Return the loosest bounds that any reader of a tensor needs."""
        if tensor in self.graph.outputs or tensor in self.graph.captured:
            return _FREE
        return _union(self._need(tensor, node) for node in self.graph.readers[tensor])

    def _made(self, node: onnx.NodeProto) -> Bounds:
        """Return the bounds that the readers of a node's outputs need."""
        escaping = self.graph.outputs | self.graph.captured
        return _union(
            self.found.get(name, _FREE if name in escaping else _UNREAD)
            for name in node.output
            if name
        )

    def _need(self, tensor: str, node: onnx.NodeProto) -> Bounds:
        """Return the bounds of `tensor` that one of its readers needs."""
        if node.op_type == "Concat" or (node.op_type in VALUE_MOVES and node.input[0] == tensor):
            return self._made(node)
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            undone = self._undone(tensor, node)
            if undone is not None:
                return undone
            return self._product(tensor, node) if node.op_type == "Mul" else _FREE
        return self._unary(node)

    def _undone(self, tensor: str, node: onnx.NodeProto) -> Bounds | None:
        """Return the bounds that an Add, Sub, Mul or Div with a scalar needs; None for others."""
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
        """Return the bounds of a HardSigmoid or Clip; None for any other node."""
        if node.op_type == "HardSigmoid":
            given = attributes(node)
            alpha, beta = given.get("alpha", 0.2), given.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        if node.op_type == "Clip":
            low, high = (self.graph.scalar(name) for name in [*node.input, "", ""][1:3])
            return (-math.inf if low is None else low, math.inf if high is None else high)
        return None

    def _amplified(self, node: onnx.NodeProto) -> bool:
        """Whether a reader of a node's outputs, through moves too, amplifies small differences."""
        names, seen = list(node.output), set(node.output)
        while names:
            name = names.pop()
            for reader in self.graph.readers.get(name, []):
                if self._amplifies(reader, name):
                    return True
                if reader.op_type in VALUE_MOVES or reader.op_type == "Concat":
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
        """Bounds of tensor * gate, if the gate depends on the tensor and is 0 below a floor."""
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
        """Return the Erf node of 1 + Erf(u)."""
        for name in gate.input:
            before = self.graph.producer.get(name)
            if before is not None and before.op_type == "Erf":
                return before if self._number_beside(name, gate) == 1.0 else None
        return None

    def _floor(self, tensor: str, gated: str, floor: float) -> Bounds:
        """Return the floor of a tensor from that of `gated`, if both are linear in the same t.

        With tensor = a t and gated = c t + d, the floor of t is (floor - d) / c.
        """
        if gated == tensor:
            return floor, math.inf
        base, a, shift = self._line(tensor)
        same, c, d = self._line(gated)
        if tensor == same:  # t itself may be linear in another tensor
            base, a, shift = tensor, 1.0, 0.0
        if base != same or shift or a <= 0 or c <= 0:
            return _FREE
        return a * (floor - d) / c, math.inf

    def _line(self, tensor: str) -> tuple[str, float, float]:
        """Return (t, c, d) of a tensor that one node makes as c t + d; else (tensor, 1, 0)."""
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
        return self.graph.scalar(others[0]) if len(others) == 1 else None


class RangeLimits(NamedTuple):
    """Limits of one tensor's range, in real units.

    Attributes:
        floor: no reader distinguishes values below it.
        ceiling: no reader distinguishes values above it.
        extrapolation_limit: limit up to which rare large values are extrapolated; -inf for none.
    """

    floor: float
    ceiling: float
    extrapolation_limit: float = -math.inf


UNLIMITED = RangeLimits(-math.inf, math.inf)


def find_range_limits(model: onnx.ModelProto) -> dict[str, RangeLimits]:
    """Return tensor -> its reach, for tensors whose reach is not `UNLIMITED`.

    Args:
        model: a cleaned model, its nodes in execution order.
    """
    found = {name: RangeLimits(*ends) for name, ends in find_bounds(model).items()}
    for name in _logits(Graph(model)):
        found[name] = found.get(name, UNLIMITED)._replace(extrapolation_limit=SIGMOID[1])
    return found


def _logits(graph: Graph) -> set[str]:
    """Return the inputs of score Sigmoids, traced back through nodes that only move values."""
    read_on: set[str] = set()  # what a weighted node is computed from
    for node in reversed(graph.nodes):
        if node.op_type in WEIGHTED or not read_on.isdisjoint(node.output):
            read_on.update(node.input)
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


def _is_score(graph: Graph, sigmoid: onnx.NodeProto) -> bool:
    """Whether only outputs of Sigmoids are multiplied by a Sigmoid's output, moved or not."""
    names = [str(sigmoid.output[0])]
    for name in names:  # grows during the loop
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
    """Return the inputs whose values a node passes on unchanged."""
    if node is None:
        return []
    if node.op_type == "Concat":
        return list(map(str, node.input))
    return [str(node.input[0])] if node.op_type in VALUE_MOVES else []


def find_float16_overflows(
    graph: Graph, largest: Mapping[str, float], *, int8_nodes: Collection[str]
) -> dict[str, str]:
    """Return node -> why it must not compute in float16.

    A node whose constant becomes 0 in float16 brings in the readers of its output too.

    Args:
        graph: the float model's.
        largest: tensor -> largest |x| observed, of the tensors for which it is known.
        int8_nodes: names of the nodes that run in int8.
    """
    why: dict[str, str] = {}
    for node in graph.nodes:
        reason = float16_overflow(graph, node, largest) if node.op_type != "Constant" else ""
        for each in _with_readers(graph, node, reason) if reason else ():
            why.setdefault(each.name, reason)
    wide = why.keys() - int8_nodes
    return {node.name: why[node.name] for node in graph.nodes if node.name in wide}


def _with_readers(graph: Graph, node: onnx.NodeProto, reason: str) -> Iterator[onnx.NodeProto]:
    yield node
    if reason.endswith(_ZERO) and node.op_type != "Div":
        yield from graph.readers.get(node.output[0], ())


def float16_overflow(graph: Graph, node: onnx.NodeProto, largest: Mapping[str, float]) -> str:
    """Return which input or output of a node float16 cannot hold; "" if it holds all.

    Args:
        graph: the float model's, or that of a model with Q/DQ pairs.
        node: one of its nodes.
        largest: tensor of the float model -> largest |x| observed.
    """
    for name in (*node.input, *node.output):
        size = _largest_of(graph, name) or largest.get(_plain(name), 0.0)
        if not size <= _LARGEST:
            return f"|{_plain(name)}| reaches {size:.3g}, which is too near float16's 65504"
    return _vanishes(graph, node)


def _vanishes(graph: Graph, node: onnx.NodeProto) -> str:
    """Return a note on the constant that vanishes, found back through Div and moves; else ""."""
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
    """Return the largest |x| of a float constant; 0 for any other tensor."""
    constant = graph.initializers.get(name)
    if constant is None or constant.data_type != _FLOAT:
        return 0.0
    return float(np.abs(numpy_helper.to_array(constant)).max(initial=0.0))


def _plain(name: str) -> str:
    """Return the float model's name of a tensor next to a Q/DQ pair."""
    return name.removesuffix("/dequantized").removesuffix("/float")


def make_window(
    given: Mapping[str, Any], kernel: Sequence[int], *, transposed: bool = False
) -> ConvWindow:
    """Return the window of a Conv or ConvTranspose.

    Args:
        given: the node's attributes.
        kernel: sizes of its weight's spatial axes.
        transposed: for a ConvTranspose, without auto_pad and output_shape.
    """
    rank = len(kernel)

    def ints(name: str, default: list[int]) -> tuple[int, ...]:
        return tuple(int(v) for v in given.get(name, default))

    return ConvWindow(
        kernel=tuple(int(k) for k in kernel),
        strides=ints("strides", [1] * rank),
        dilations=ints("dilations", [1] * rank),
        pads=ints("pads", [0] * 2 * rank),
        auto=given.get("auto_pad", b"NOTSET").decode(),
        group=int(given.get("group", 1)),
        transposed=transposed,
        more=ints("output_padding", []),
    )
