"""Scales of the tensors that have no Q/DQ pair, from those that have: what DLA's cache must list.

TensorRT runs a layer in int8 on DLA only where all that it reads and makes has a scale. A Q/DQ
model says the scales of its pairs, which stand before a Conv and not behind it; the others follow
from what the operators do, by the table of `deploy.targets.tensorrt.dla`::

    pair on x   x -> Conv -> c -> Relu -> r   pair on r:  c as r (equal), what Relu cuts is cut
    pair on s   c -> Add(s) -> a -> Relu -> r pair on r:  a as r (equal), c = a + s (bound)

The surest rule that applies is taken first, and all that follows from it before the next. What a
Conv or Gemm makes for the end of the model, or for an operator that is not in the table, has none.

NVIDIA's qdq-translator gives a Conv before an Add the scale 1.0, which DLA from 3.13 on reads as
none; the sum here is a range, and means the same to every version.

What the largest |x| of a tensor is, from the nodes that make and read it, and how sure that is.

With [t] for the largest |x| that the scale of t stands for:

=====  =================================  ========================================================
sure   what                               [t], from what is known around it
=====  =================================  ========================================================
equal  reshapes, transposes, ...          the same on both sides
equal  pools                              behind a pool as before it, as in TensorRT's own caches;
                                          before a MaxPool as behind it
equal  before a Relu, Clip, Slice, Split, as behind it: what is cut there is cut here all the same
       Gather, Resize to the nearest, Pad
equal  Mul, Div with one number           times or by its |c|
bound  behind those, Abs, LeakyRelu       as before them, and not beyond a Clip's bounds
bound  Sigmoid, Softmax, Tanh, Erf, ...   1
bound  before a Sigmoid, Tanh, ...        where its readers tell no values apart
                                          (`deploy.graph.bounds`)
bound  Concat                             the largest of its inputs; each of these as the output
bound  Add, Sub                           sum of the inputs; an input: output + other input
bound  Mul                                product of the inputs
bound  before a Hard-Swish or SiLU        output + 0.375 or 0.279, since x - y is never more
guess  the same, of a small output        the same: some of the values below are cut off
guess  before a LeakyRelu, AveragePool,   as behind it: what is larger there is cut off
       ReduceMean, linear Resize, or Mul by
       a Sigmoid
guess  whose readers are not all known    the largest of those that are
=====  =================================  ========================================================

Source: ONNX operators; naming.py for pools. NVIDIA's qdq-translator has rules of the same kind for
some of these (NVIDIA/Deep-Learning-Accelerator-SW, tools/qdq-translator).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deploy.frontends import checks
from deploy.graph.bounds import bounds
from deploy.graph.edit import copied
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import MOVES, gates, resized_by
from deploy.targets.tensorrt.naming import POOLS, trt_tensors

if TYPE_CHECKING:
    import onnx


EQUAL, BOUND, GUESS = 0, 1, 2
Range = tuple[float, int]  # the largest |x|, and how sure it is

_SAME = MOVES | {"Identity", "Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"}
_MAXIMA = frozenset({"MaxPool", "GlobalMaxPool"})
_CUTS = frozenset({"Relu", "Clip", "Slice", "Split", "Gather", "Resize nearest", "Pad"})
_SMALLER = _CUTS | {
    "Abs",
    "LeakyRelu",
    "ReduceMean",
    "ReduceMax",
    "HardSwish",
    "Gelu",
    "Resize linear",
}
_ONES = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf"})
_MEANS = frozenset({"LeakyRelu", "AveragePool", "GlobalAveragePool", "ReduceMean", "Resize linear"})
_SUMS = frozenset({"Add", "Sub", "Sum"})
_SEVERAL = _SUMS | {"Mul", "Div", "Concat", "Max", "Min"}
# t - gate(t) at most, and the output from which on no value below 0 is lost (graph.saturation)
_HARD, _SMOOTH = (0.375, 3.0), (0.279, 8.0)


class Known:
    """The ranges that are known of a model's tensors.

    Attributes:
        graph: its index, with inferred types.
        at: tensor -> its range.
        constants: constant -> its largest |x|.
        saturated: tensor -> the |x| beyond which no reader tells values apart.
        gated: tensor -> what the gate makes that alone reads it, and that gate's two numbers.
        wanted: tensors that somebody reads, the user included.
    """

    def __init__(self, model: onnx.ModelProto, amaxes: Mapping[str, float]) -> None:
        self.graph = Graph(model)
        self.at: dict[str, Range] = {name: (amax, EQUAL) for name, amax in amaxes.items()}
        self.constants = {name: _largest(t) for name, t in self.graph.constants.items()}
        self.saturated = {
            name: max(abs(low), abs(high))
            for name, (low, high) in bounds(model).items()
            if math.isfinite(low) and math.isfinite(high)
        }
        self.wanted = frozenset(self.graph.readers) | self.graph.outputs
        self.gated = {**_hard_gates(self.graph), **_smooth_gates(self.graph)}

    def of(self, name: str) -> Range | None:
        """The range of a tensor or constant."""
        if name in self.constants:
            return self.constants[name], EQUAL
        return self.at.get(name)


def behind(known: Known, name: str) -> Range | None:
    """The range of what a node makes, from what it reads."""
    node = known.graph.producer[name]
    op = _operator(node)
    if op in _ONES:
        return 1.0, BOUND
    operands = [n for n in node.input if n] if op in _SEVERAL else list(node.input[:1])
    given = [one for one in map(known.of, operands) if one is not None]
    if not given or len(given) < len(operands):
        return _clipped(known, node), BOUND
    amaxes, sure = [amax for amax, _ in given], max(level for _, level in given)
    if op in _SAME | POOLS:
        return amaxes[0], sure
    if op in _SMALLER and _shrinks(known, node):
        return min(amaxes[0], _clipped(known, node)), max(sure, BOUND)
    if op == "Concat":
        return max(amaxes), sure if len(set(amaxes)) == 1 else max(sure, BOUND)
    if op in _SUMS:
        return sum(amaxes), max(sure, BOUND)
    if op in ("Mul", "Div"):
        return _product(known, node, amaxes, sure)
    return (max(amaxes), max(sure, BOUND)) if op in ("Max", "Min") else None


def before(known: Known, name: str) -> Range | None:
    """The range of a tensor from what its readers make, or tell apart."""
    found = _needed(known, name)
    if name in known.saturated and (found is None or found[1] > EQUAL):
        told = known.saturated[name]
        return told if found is None or found[1] > BOUND else min(told, found[0]), BOUND
    return found


def _needed(known: Known, name: str) -> Range | None:
    """The largest range that a reader needs of a tensor; a guess where one of them says nothing."""
    if name in known.gated:
        output, (more, enough) = known.gated[name]
        amax, sure = known.at.get(output, (0.0, GUESS))
        return (amax + more, max(sure, BOUND if amax >= enough else GUESS)) if amax else None
    readers = known.graph.readers.get(name, [])
    needs = [need for need in (_need(known, name, node) for node in readers) if need is not None]
    if not needs:
        return None
    amax, sure = max(amax for amax, _ in needs), max(level for _, level in needs)
    if len(needs) < len(readers) or name in known.graph.outputs | known.graph.captured:
        return amax, GUESS
    return amax, sure if len({amax for amax, _ in needs}) == 1 else max(sure, BOUND)


def _need(known: Known, name: str, node: onnx.NodeProto) -> Range | None:
    """The range that one reader needs of a tensor."""
    op = _operator(node)
    seen = [out for out in node.output if out in known.at or out in known.wanted]
    made = [known.at.get(out) for out in seen]
    ranges = [one for one in made if one is not None]
    if not ranges or len(ranges) < len(made):
        return None
    amax, sure = max(ranges)
    if op == "Concat":
        return amax, max(sure, BOUND)
    if op in ("Add", "Sub", "Mul", "Div") and len(node.input) == 2:
        return _operand(known, name, node, amax, sure)
    if node.input[0] != name:
        return None
    if op in _SAME | _MAXIMA or (op in _CUTS and _shrinks(known, node)):
        return amax, sure
    return (amax, GUESS) if op in _MEANS else None


def _operator(node: onnx.NodeProto) -> str:
    """The operator, with its mode where that decides; of another domain none that is known."""
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type}"
    return f"Resize {resized_by(node)}" if node.op_type == "Resize" else str(node.op_type)


def _operand(known: Known, name: str, node: onnx.NodeProto, amax: float, sure: int) -> Range | None:
    """The range of one of two operands, whose result is known."""
    first = node.input[0] == name
    beside = node.input[1] if first else node.input[0]
    other, number = known.of(beside), known.graph.number(beside)
    if beside == name:
        return None
    if node.op_type in _SUMS:
        return None if other is None else (amax + other[0], max(sure, other[1], BOUND))
    if node.op_type == "Mul":
        maker = known.graph.producer.get(beside)
        share = maker is not None and maker.op_type in ("Sigmoid", "HardSigmoid")
        return (amax / abs(number), sure) if number else ((amax, GUESS) if share else None)
    return (amax * abs(number), sure) if number and first else None


def _product(known: Known, node: onnx.NodeProto, amaxes: list[float], sure: int) -> Range | None:
    """A product of ranges; a quotient by one number."""
    if node.op_type == "Mul":
        exact = any(known.graph.number(name) is not None for name in node.input)
        return math.prod(amaxes), sure if exact else max(sure, BOUND)
    number = known.graph.number(node.input[1])
    return (amaxes[0] / abs(number), sure) if number else None


def _shrinks(known: Known, node: onnx.NodeProto) -> bool:
    """Whether a node makes nothing larger than what it reads."""
    given = attributes(node)
    if node.op_type == "Pad":
        value = node.input[2] if len(node.input) > 2 else ""
        return not value or known.graph.number(value) == 0
    return node.op_type != "LeakyRelu" or abs(given.get("alpha", 0.01)) <= 1


def _clipped(known: Known, node: onnx.NodeProto) -> float:
    """The largest |x| that a Clip lets through; of any other node, any."""
    ends = [known.graph.number(name) for name in [*node.input, "", ""][1:3]]
    low, high = ends
    if node.op_type != "Clip" or low is None or high is None:
        return math.inf
    return max(abs(low), abs(high))


def _hard_gates(graph: Graph) -> dict[str, tuple[str, tuple[float, float]]]:
    """Tensor that nothing but a Hard-Swish reads -> what that makes."""
    found: dict[str, tuple[str, tuple[float, float]]] = {}
    for gate in gates(graph):
        plain = gate.source == gate.factor and not gate.offset
        if plain and np.allclose((gate.gain * gate.top, gate.shift), (1, 3), rtol=1e-3):
            inside = {node.name for node in graph.readers[gate.source]} <= set(gate.nodes)
            if inside and gate.source not in graph.outputs:
                found[gate.source] = gate.output, _HARD
    return found


def _smooth_gates(graph: Graph) -> dict[str, tuple[str, tuple[float, float]]]:
    """Tensor that nothing but t * Sigmoid(t) reads -> what that makes."""
    found: dict[str, tuple[str, tuple[float, float]]] = {}
    for node in graph.nodes:
        if node.op_type == "Sigmoid" and node.input[0] not in graph.outputs:
            name, share = str(node.input[0]), str(node.output[0])
            others = [n for n in graph.readers[name] if n.output[0] != share]
            if len(others) == 1 and set(others[0].input) == {name, share}:
                found[name] = others[0].output[0], _SMOOTH
    return {name: gate for name, gate in found.items() if graph.producer[gate[0]].op_type == "Mul"}


def _largest(constant: onnx.TensorProto) -> float:
    """The largest |x| of a constant; infinite of what is no number or not there."""
    array = checks.to_array(constant)
    if array.dtype.kind not in "fiu" or not array.size:
        return math.inf
    return float(np.abs(array.astype(np.float64)).max())


SURE = {EQUAL: "equal", BOUND: "bound", GUESS: "guess"}
_QMAX = 127


@dataclass(frozen=True, slots=True)
class Inferred:
    """Scales of a model's tensors.

    Attributes:
        scales: tensor -> float32 scale, the pairs' own among them, in the model's order.
        sure: tensor whose scale was inferred -> "equal", "bound" or "guess".
        missing: tensors that nothing gives a scale.
    """

    scales: dict[str, np.float32]
    sure: dict[str, str]
    missing: tuple[str, ...]


def inferred(
    model: onnx.ModelProto, scales: Mapping[str, np.float32], *, guesses: bool = True
) -> Inferred:
    """The scales of all tensors that TensorRT's cache lists, as far as they follow from others.

    Args:
        model: plain float model.
        scales: tensor -> float32 scale of its pair; these stay as they are to the bit.
        guesses: infer scales too that may cut values off.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    from deploy.frontends.onnx_file import with_shapes

    typed = with_shapes(copied(model))
    known = Known(typed, {name: _QMAX * float(scale) for name, scale in scales.items()})
    _complete(known, (EQUAL, BOUND, GUESS) if guesses else (EQUAL, BOUND))
    wanted = [name for name in trt_tensors(typed) if name not in known.constants]
    found = {n: np.float32(known.at[n][0] / _QMAX) for n in wanted if n in known.at}
    sure = {name: SURE[known.at[name][1]] for name in found if name not in scales}
    missing = tuple(name for name in wanted if name not in found)
    return Inferred({**found, **scales}, sure, missing)


def _complete(known: Known, levels: Iterable[int]) -> None:
    """Apply the rules of each level in turn, until none applies."""
    made = [name for node in known.graph.nodes for name in node.output if name]
    back = [*known.graph.inputs, *made][::-1]
    for level in levels:  # what follows from a bound is one: none goes back a level
        some = True
        while some:
            some = _sweep(known, made, behind, level)
            if not some or level < GUESS:  # of two guesses the second may follow from the first
                some = _sweep(known, back, before, level) or some


def _sweep(
    known: Known,
    names: Iterable[str],
    rule: Callable[[Known, str], Range | None],
    level: int,
) -> bool:
    """Find the ranges that a rule gives at this level, of guesses the first; whether it has."""
    some = False
    for name in names:
        found = None if name in known.at or not known.graph.is_float(name) else rule(known, name)
        if found is not None and found[1] <= level and 0 < found[0] < math.inf:
            known.at[name] = found
            some = True
            if level == GUESS:
                break
    return some
