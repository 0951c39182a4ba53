"""Infer scales for tensors without a Q/DQ pair, as the calibration cache for DLA needs them.

DLA takes caches up to TensorRT 10.7, and runs a layer in int8 only if all of its inputs and outputs
have a scale. A Q/DQ model has scales upstream of a Conv but not downstream of it; the others follow
from the operators::

    pair on x   x -> Conv -> c -> Relu -> r   pair on r:  c as r (equal), Relu clips c anyway
    pair on s   c -> Add(s) -> a -> Relu -> r pair on r:  a as r (equal), c = a + s (bound)

Let [t] be the largest |x| within the scale of tensor t. A rule is exact (equal), an upper limit
(bound), or may clip values (guess):

=====  =================================  ========================================================
level  tensor                             [t]
=====  =================================  ========================================================
equal  in or out of Reshape, Transpose..  as on the other side
equal  output of MaxPool, AveragePool     as the input; the input of a MaxPool: as its output
equal  input of Relu, Clip, Slice, Split, as the output: larger values are clipped there anyway
       Gather, nearest Resize, Pad
equal  Mul, Div with a constant c         times or divided by |c|
bound  outputs of these, Abs, LeakyRelu,  as the input, at most the bounds of a Clip
       global pools
bound  output of Sigmoid, Softmax, Tanh.. 1
bound  input of Sigmoid, Tanh, ...        where the operator saturates (`deploy.graph.bounds`)
bound  Concat                             output: the largest input; input: as the output
bound  Add, Sub                           output: sum of inputs; input: output + other input
bound  Mul                                product of the inputs
bound  input of Hard-Swish or SiLU        output + 0.375 or 0.279, the maximum of x - y
guess  the same with a small output       the same: some negative values are clipped
guess  input of LeakyRelu, AveragePool,   as the output: larger values are clipped
       ReduceMean, linear Resize, or of
       Mul by a Sigmoid
guess  some readers give no range         the largest of the others
=====  =================================  ========================================================

All rules of one level are applied until none changes anything, then those of the next. The output
of a Conv or Gemm that is a model output, or read by an operator not listed, gets no scale.

NVIDIA's qdq-translator (NVIDIA/Deep-Learning-Accelerator-SW, tools/qdq-translator) has similar
rules for some operators, but gives a Conv before an Add the scale 1.0, which DLA reads as "no
scale" from 3.13 on. The sum used here is a real range for every version. Source: ONNX operator
spec.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from deploy.frontends import checks
from deploy.frontends.onnx_file import infer_shapes
from deploy.graph.bounds import find_bounds
from deploy.graph.edit import copy_message
from deploy.graph.gates import find_gates
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import MOVES, pads_nonzero, resize_mode
from deploy.targets.tensorrt.cache_contents import POOLING_LAYERS, trt_tensors

EQUAL, BOUND, GUESS = 0, 1, 2
SURE = {EQUAL: "equal", BOUND: "bound", GUESS: "guess"}
Range = tuple[float, int]  # (largest |x|, level)

_QMAX = 127
_SAME = MOVES | {"Identity", "Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"}
_MAXIMA = frozenset({"MaxPool", "GlobalMaxPool"})
_CUTS = frozenset({"Relu", "Clip", "Slice", "Split", "Gather", "Resize nearest", "Pad"})
_SMALLER = _CUTS | {
    "Abs", "LeakyRelu", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax",
    "HardSwish", "Gelu", "Resize linear",
}  # fmt: skip
_ONES = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf"})
_MEANS = frozenset({"LeakyRelu", "AveragePool", "GlobalAveragePool", "ReduceMean", "Resize linear"})
_SUMS = frozenset({"Add", "Sub", "Sum"})
_SEVERAL = _SUMS | {"Mul", "Div", "Concat", "Max", "Min"}
# (maximum of t - gate(t), smallest output range with which no negative value is clipped)
_HARD, _SMOOTH = (0.375, 3.0), (0.279, 8.0)


class KnownRanges:
    """Ranges of a model's tensors, as far as they are known.

    Attributes:
        constants: constant -> its largest |x|.
        saturated: tensor -> the |x| beyond which all of its readers saturate.
        gated: tensor that only a Hard-Swish or SiLU reads -> (its output, its two numbers).
        wanted: tensors that a node reads, and model outputs.
    """

    def __init__(self, model: onnx.ModelProto, amaxes: Mapping[str, float]) -> None:
        self.graph = Graph(model)
        self.at: dict[str, Range] = {name: (amax, EQUAL) for name, amax in amaxes.items()}
        self.constants = {name: _largest(t) for name, t in self.graph.constants.items()}
        self.saturated = {
            name: max(abs(low), abs(high))
            for name, (low, high) in find_bounds(model).items()
            if math.isfinite(low) and math.isfinite(high)
        }
        self.wanted = frozenset(self.graph.readers) | self.graph.outputs
        self.gated = {**_hard_gates(self.graph), **_smooth_gates(self.graph)}

    def of(self, name: str) -> Range | None:
        """Return the range of a tensor or constant, or None."""
        if name in self.constants:
            return self.constants[name], EQUAL
        return self.at.get(name)


def range_from_inputs(known: KnownRanges, name: str) -> Range | None:
    """Return the range of a node's output, from the ranges of its inputs."""
    node = known.graph.producer[name]
    op = _operator(node)
    if op in _ONES:
        return 1.0, BOUND
    operands = [n for n in node.input if n] if op in _SEVERAL else list(node.input[:1])
    ranges = [one for one in map(known.of, operands) if one is not None]
    if not ranges or len(ranges) < len(operands):
        return _clip_limit(known, node), BOUND
    amaxes, sure = [amax for amax, _ in ranges], max(level for _, level in ranges)
    if op in _SAME | POOLING_LAYERS:
        return amaxes[0], sure
    if op in _SMALLER and _shrinks(known, node):
        return min(amaxes[0], _clip_limit(known, node)), max(sure, BOUND)
    if op == "Concat":
        return max(amaxes), sure if len(set(amaxes)) == 1 else max(sure, BOUND)
    if op in _SUMS:
        return sum(amaxes), max(sure, BOUND)
    if op in ("Mul", "Div"):
        return _product(known, node, amaxes, sure)
    return (max(amaxes), max(sure, BOUND)) if op in ("Max", "Min") else None


def range_from_readers(known: KnownRanges, name: str) -> Range | None:
    """Return the range of a tensor, from the output ranges of its readers or their saturation."""
    needed = _range_for_readers(known, name)
    if name in known.saturated and (needed is None or needed[1] > EQUAL):
        limit = known.saturated[name]
        return limit if needed is None or needed[1] > BOUND else min(limit, needed[0]), BOUND
    return needed


def _range_for_readers(known: KnownRanges, name: str) -> Range | None:
    """Return the largest range that a reader needs; a guess if one of them gives none."""
    if name in known.gated:
        output, (offset, enough) = known.gated[name]
        amax, sure = known.at.get(output, (0.0, GUESS))
        return (amax + offset, max(sure, BOUND if amax >= enough else GUESS)) if amax else None
    readers = known.graph.readers.get(name, [])
    ranges = (_range_for_reader(known, name, node) for node in readers)
    needs = [need for need in ranges if need is not None]
    if not needs:
        return None
    amax, sure = max(amax for amax, _ in needs), max(level for _, level in needs)
    if len(needs) < len(readers) or name in known.graph.outputs | known.graph.captured:
        return amax, GUESS
    return amax, sure if len({amax for amax, _ in needs}) == 1 else max(sure, BOUND)


def _range_for_reader(known: KnownRanges, name: str, node: onnx.NodeProto) -> Range | None:
    """Return the range that one reader needs of a tensor."""
    op = _operator(node)
    outputs = [out for out in node.output if out in known.at or out in known.wanted]
    ranges = [known.at[out] for out in outputs if out in known.at]
    if not ranges or len(ranges) < len(outputs):
        return None
    amax, sure = max(ranges)
    if op == "Concat":
        return amax, max(sure, BOUND)
    if op in ("Add", "Sub", "Mul", "Div") and len(node.input) == 2:
        return _operand_range(known, name, node, amax, sure)
    if node.input[0] != name:
        return None
    if op in _SAME | _MAXIMA or (op in _CUTS and _shrinks(known, node)):
        return amax, sure
    return (amax, GUESS) if op in _MEANS else None


def _operator(node: onnx.NodeProto) -> str:
    """Return the operator, Resize with its mode; one of a custom domain matches no rule."""
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type}"
    return f"Resize {resize_mode(node)}" if node.op_type == "Resize" else str(node.op_type)


def _operand_range(
    known: KnownRanges, name: str, node: onnx.NodeProto, amax: float, sure: int
) -> Range | None:
    """Return the range of one of two operands, from the range of the result."""
    first = node.input[0] == name
    other = node.input[1] if first else node.input[0]
    other_range, constant = known.of(other), known.graph.scalar(other)
    if other == name:
        return None
    if node.op_type in _SUMS:
        if other_range is None:
            return None
        return amax + other_range[0], max(sure, other_range[1], BOUND)
    if node.op_type == "Mul":
        producer = known.graph.producer.get(other)
        gate = producer is not None and producer.op_type in ("Sigmoid", "HardSigmoid")
        return (amax / abs(constant), sure) if constant else ((amax, GUESS) if gate else None)
    return (amax * abs(constant), sure) if constant and first else None


def _product(
    known: KnownRanges, node: onnx.NodeProto, amaxes: list[float], sure: int
) -> Range | None:
    """Return the range of a product, or of a quotient by a constant."""
    if node.op_type == "Mul":
        exact = any(known.graph.scalar(name) is not None for name in node.input)
        return math.prod(amaxes), sure if exact else max(sure, BOUND)
    number = known.graph.scalar(node.input[1])
    return (amaxes[0] / abs(number), sure) if number else None


def _shrinks(known: KnownRanges, node: onnx.NodeProto) -> bool:
    """Return whether no output value of a node exceeds the largest input |x|."""
    if node.op_type == "Pad":
        return not pads_nonzero(known.graph, node)
    return node.op_type != "LeakyRelu" or abs(attributes(node).get("alpha", 0.01)) <= 1


def _clip_limit(known: KnownRanges, node: onnx.NodeProto) -> float:
    """Return the largest |x| that a Clip passes; inf for any other node."""
    low, high = (known.graph.scalar(name) for name in [*node.input, "", ""][1:3])
    if node.op_type != "Clip" or low is None or high is None:
        return math.inf
    return max(abs(low), abs(high))


def _hard_gates(graph: Graph) -> dict[str, tuple[str, tuple[float, float]]]:
    """Map each tensor that only a Hard-Swish reads to (its output, _HARD)."""
    gated: dict[str, tuple[str, tuple[float, float]]] = {}
    for gate in find_gates(graph):
        plain = gate.source == gate.factor and not gate.offset
        if plain and np.allclose((gate.gain * gate.top, gate.shift), (1, 3), rtol=1e-3):
            alone = {node.name for node in graph.readers[gate.source]} <= set(gate.nodes)
            if alone and gate.source not in graph.outputs:
                gated[gate.source] = gate.output, _HARD
    return gated


def _smooth_gates(graph: Graph) -> dict[str, tuple[str, tuple[float, float]]]:
    """Map each tensor t that only t * Sigmoid(t) reads to (its output, _SMOOTH)."""
    gated: dict[str, tuple[str, tuple[float, float]]] = {}
    for node in graph.nodes:
        if node.op_type == "Sigmoid" and node.input[0] not in graph.outputs:
            name, sigmoid = str(node.input[0]), str(node.output[0])
            others = [n for n in graph.readers[name] if n.output[0] != sigmoid]
            if len(others) == 1 and set(others[0].input) == {name, sigmoid}:
                gated[name] = others[0].output[0], _SMOOTH
    return {name: gate for name, gate in gated.items() if graph.producer[gate[0]].op_type == "Mul"}


def _largest(constant: onnx.TensorProto) -> float:
    """Return the largest |x| of a constant; inf if it is empty or not numeric."""
    array = checks.to_array(constant)
    if array.dtype.kind not in "fiu" or not array.size:
        return math.inf
    return float(np.abs(array.astype(np.float64)).max())


@dataclass(frozen=True, slots=True)
class InferredScales:
    """Scales of a model's tensors, those of its pairs and inferred ones."""

    scales: dict[str, np.float32]  # tensor -> float32 scale, in the model's order
    sure: dict[str, str]  # tensor with an inferred scale -> "equal", "bound" or "guess"
    missing: tuple[str, ...]


def infer_missing_scales(
    model: onnx.ModelProto, scales: Mapping[str, np.float32], *, guesses: bool = True
) -> InferredScales:
    """Infer the scales of all tensors that a TensorRT cache lists.

    `scales`: tensor -> float32 scale of its pair; returned bit for bit. `guesses`: also infer
    scales that may clip values.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    typed = infer_shapes(copy_message(model))
    known = KnownRanges(typed, {name: _QMAX * float(scale) for name, scale in scales.items()})
    _apply_rules(known, (EQUAL, BOUND, GUESS) if guesses else (EQUAL, BOUND))
    listed = [name for name in trt_tensors(typed) if name not in known.constants]
    known_scales = {n: np.float32(known.at[n][0] / _QMAX) for n in listed if n in known.at}
    sure = {name: SURE[known.at[name][1]] for name in known_scales if name not in scales}
    missing = tuple(name for name in listed if name not in known_scales)
    return InferredScales({**known_scales, **scales}, sure, missing)


def _apply_rules(known: KnownRanges, levels: Iterable[int]) -> None:
    """Apply the rules of each level in turn, until none changes anything."""
    forward = [name for node in known.graph.nodes for name in node.output if name]
    backward = [*known.graph.inputs, *forward][::-1]
    for level in levels:  # a range derived from a bound is a bound: no level has to be revisited
        changed = True
        while changed:
            changed = _sweep(known, forward, range_from_inputs, level)
            if not changed or level < GUESS:  # a second guess may follow from the first
                changed = _sweep(known, backward, range_from_readers, level) or changed


def _sweep(
    known: KnownRanges,
    names: Iterable[str],
    rule: Callable[[KnownRanges, str], Range | None],
    level: int,
) -> bool:
    """Add the ranges that a rule gives at this level (one guess only); return whether any."""
    changed = False
    for name in names:
        new = None if name in known.at or not known.graph.is_float(name) else rule(known, name)
        if new is not None and new[1] <= level and 0 < new[0] < math.inf:
            known.at[name] = new
            changed = True
            if level == GUESS:
                break
    return changed
