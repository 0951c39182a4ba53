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
guess  input of Hard-Swish or SiLU        output + 0.375, the maximum of x - y
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
from deploy.frontends.shapes import infer_shapes
from deploy.graph.bounds import find_bounds
from deploy.graph.edit import copy_message
from deploy.graph.index import Graph, attributes, optional_input, standard_type
from deploy.graph.placement import MOVES, pads_nonzero, resize_mode
from deploy.targets.tensorrt.cache_contents import POOLING_OPS, trt_tensors

EQUAL, BOUND, GUESS = 0, 1, 2
LEVEL_NAMES = ("equal", "bound", "guess")  # by level
Range = tuple[float, int]  # (largest |x|, level: how certain it is)

_QMAX = 127
_MAX_GATE_LOSS = 0.375  # maximum of x - y, where y is the Hard-Swish of x; 0.279 for a SiLU
_COPY_OPS = MOVES | {"Identity", "Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"}
_MAX_POOL_OPS = frozenset({"MaxPool", "GlobalMaxPool"})
# Operators that pass a part of their input on, or clip it.
_CLIPPING_OPS = frozenset({"Relu", "Clip", "Slice", "Split", "Gather", "Resize nearest", "Pad"})
# Operators whose output is within the range of their input.
_SHRINKING_OPS = _CLIPPING_OPS | {
    "Abs", "LeakyRelu", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax",
    "HardSwish", "Gelu", "Resize linear",
}  # fmt: skip
_UNIT_RANGE_OPS = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf"})
_MEAN_OPS = frozenset(
    {"LeakyRelu", "LeakyRelu steep", "AveragePool", "GlobalAveragePool", "ReduceMean"}
    | {"Resize linear"}
)
_SUM_OPS = frozenset({"Add", "Sub", "Sum"})
_OPS_OF_SEVERAL_OPERANDS = _SUM_OPS | {"Mul", "Div", "Concat", "Max", "Min"}


class TensorRanges:
    """Ranges of a model's tensors, as far as they are known.

    Attributes:
        graph: the nodes of the model, and its constants.
        range_by_tensor: tensor or constant -> its range.
        saturated: tensor -> the |x| beyond which all of its readers saturate.
    """

    def __init__(self, model: onnx.ModelProto, scales: Mapping[str, np.float32]) -> None:
        """Start with the constants and the tensors of Q/DQ pairs.

        `scales`: tensor -> the scale of its pair.
        """
        self.graph = Graph(model)
        self.range_by_tensor: dict[str, Range] = {}
        for name, scale in scales.items():
            self.range_by_tensor[name] = _QMAX * float(scale), EQUAL
        for name, constant in self.graph.constants.items():
            self.range_by_tensor[name] = _largest_magnitude(constant), EQUAL
        # `find_bounds` gives the values beyond which all readers of a tensor saturate
        self.saturated = {}
        for name, (low, high) in find_bounds(model).items():
            if math.isfinite(low) and math.isfinite(high):
                self.saturated[name] = max(abs(low), abs(high))


def range_from_inputs(tensor_ranges: TensorRanges, name: str) -> Range | None:
    """Return the range of a node's output, from the ranges of its inputs.

    Args:
        tensor_ranges: the ranges that are known so far.
        name: the output.

    Returns:
        (largest |x|, level), with the level EQUAL for an exact range, BOUND for an upper limit or
        GUESS for one that may clip values; None if no rule gives a range. The largest |x| is
        infinite if an input has no range yet.
    """
    node = tensor_ranges.graph.producer[name]
    operator = _operator_name(tensor_ranges.graph, node)  # with its variant, as "Resize linear"
    if operator in _UNIT_RANGE_OPS:  # results of -1 to 1, whatever the input
        return 1.0, BOUND
    operands = list(node.input[:1])  # other inputs are shapes, limits or weights
    if operator in _OPS_OF_SEVERAL_OPERANDS:
        operands = [operand for operand in node.input if operand]
    ranges = [tensor_ranges.range_by_tensor.get(operand) for operand in operands]
    known_ranges = [operand_range for operand_range in ranges if operand_range is not None]
    if not known_ranges or len(known_ranges) < len(ranges):  # an operand has no range yet
        return _clip_limit(tensor_ranges, node), BOUND  # infinite, but for a Clip

    amaxes = [amax for amax, _ in known_ranges]  # the operands' largest |x|
    level = max(level for _, level in known_ranges)  # a result is as uncertain as its inputs
    bound_level = max(level, BOUND)  # of a rule that gives an upper limit only
    if operator in _COPY_OPS | POOLING_OPS:
        return amaxes[0], level
    if operator in _SHRINKING_OPS:
        return min(amaxes[0], _clip_limit(tensor_ranges, node)), bound_level
    if operator == "Concat":
        have_one_range = len(set(amaxes)) == 1
        return max(amaxes), (level if have_one_range else bound_level)
    if operator in _SUM_OPS:
        return sum(amaxes), bound_level
    if operator in ("Mul", "Div"):
        return _product(tensor_ranges, node, amaxes, level)
    if operator in ("Max", "Min"):
        return max(amaxes), bound_level
    return None


def range_from_readers(tensor_ranges: TensorRanges, name: str) -> Range | None:
    """Return the range of a tensor beyond which its readers do not tell values apart.

    They clip larger values: to the range of a reader's output, or where an activation such as a
    Sigmoid saturates.

    Returns:
        (largest |x|, level: EQUAL, BOUND or GUESS, from certain to uncertain), as of
        `range_from_inputs`; None if no rule gives a range.
    """
    needed_range = _range_for_readers(tensor_ranges, name)
    saturation = tensor_ranges.saturated.get(name)  # the |x| beyond which all readers saturate
    if saturation is None:
        return needed_range
    if needed_range is not None:
        amax, level = needed_range
        if level == EQUAL:
            return needed_range
        if level == BOUND:  # of two bounds the smaller one; a guess is less certain than a bound
            saturation = min(saturation, amax)
    return saturation, BOUND


def _range_for_readers(tensor_ranges: TensorRanges, name: str) -> Range | None:
    """Return the largest of the ranges that the readers of a tensor need; None if unknown.

    A range is (largest |x|, level). The level tells how certain it is: EQUAL (exact), BOUND (an
    upper limit) or GUESS, in ascending order. A reader may need less than the tensor holds: a Clip
    needs no values beyond its limits.
    """
    graph = tensor_ranges.graph
    readers = graph.readers.get(name, [])
    ranges = [_range_for_reader(tensor_ranges, name, node) for node in readers]
    needed_ranges = [reader_range for reader_range in ranges if reader_range is not None]
    if not needed_ranges:
        return None

    amaxes = {amax for amax, _ in needed_ranges}
    level = max(level for _, level in needed_ranges)
    if len(needed_ranges) < len(readers) or graph.is_read_outside(name):
        level = GUESS  # some reader may need a larger range
    elif len(amaxes) > 1:  # one scale serves all: for the other readers it is only a bound
        level = max(level, BOUND)
    return max(amaxes), level


def _range_for_reader(tensor_ranges: TensorRanges, name: str, node: onnx.NodeProto) -> Range | None:
    """Return the range that one reader of a tensor needs, from the ranges of the reader's outputs.

    It is (largest |x|, level). None if an output has no range yet, or if the output's range says
    nothing about the input, as with a Conv or Gemm.

    Args:
        tensor_ranges: the ranges that are known so far.
        name: the tensor.
        node: the reader.
    """
    graph = tensor_ranges.graph
    operator = _operator_name(graph, node)
    output_ranges = []
    for output in node.output:
        if output in tensor_ranges.range_by_tensor:
            output_ranges.append(tensor_ranges.range_by_tensor[output])
        elif output in graph.readers or output in graph.outputs:  # its range is not known yet
            return None
    if not output_ranges:
        return None

    amax, level = max(output_ranges)  # the one of the largest |x|; only a Split has several
    if operator == "Concat":
        return amax, max(level, BOUND)
    if operator in ("Add", "Sub", "Mul", "Div") and len(node.input) == 2:
        return _operand_range(tensor_ranges, name, node, amax, level)
    if node.input[0] != name:  # the tensor is a shape, a limit or a weight
        return None
    if operator in _COPY_OPS | _MAX_POOL_OPS | _CLIPPING_OPS:
        return amax, level
    if operator == "HardSwish":  # its input may be larger than its output by this much
        return amax + _MAX_GATE_LOSS, GUESS
    if operator in _MEAN_OPS:  # the input may hold larger values, which are then clipped
        return amax, GUESS
    return None


def _operator_name(graph: Graph, node: onnx.NodeProto) -> str:
    """Return a node's operator as the rules name it: a Resize with its mode, "Resize linear".

    A Pad with other values than 0 and a LeakyRelu of a slope above 1, which make values larger,
    have names of their own. An operator of a custom domain is returned with its domain, so that it
    matches no rule.
    """
    op_type = standard_type(node)
    if op_type == "Resize":
        return f"Resize {resize_mode(node)}"
    if op_type == "Pad" and pads_nonzero(graph, node):
        return "Pad nonzero"
    if op_type == "LeakyRelu" and abs(attributes(node).get("alpha", 0.01)) > 1:
        return "LeakyRelu steep"
    return op_type


def _operand_range(
    tensor_ranges: TensorRanges, name: str, node: onnx.NodeProto, amax: float, level: int
) -> Range | None:
    """Return the range of one of two operands, from the range of the result, or None.

    Args:
        tensor_ranges: the ranges that are known so far.
        name: the operand.
        node: an Add, Sub, Mul or Div.
        amax: largest |x| of its output.
        level: EQUAL, BOUND or GUESS: how certain `amax` is.
    """
    is_first = node.input[0] == name
    other_operand = node.input[1] if is_first else node.input[0]
    if other_operand == name:  # x + x
        return None
    if node.op_type in _SUM_OPS:  # |x| is at most |sum| + |other operand|
        other_range = tensor_ranges.range_by_tensor.get(other_operand)
        if other_range is None:
            return None
        other_amax, other_level = other_range
        return amax + other_amax, max(level, other_level, BOUND)

    constant = tensor_ranges.graph.scalar(other_operand)  # None if it is no constant number
    if node.op_type == "Div":
        if is_first and constant:
            return amax * abs(constant), level
        return None  # the operand is the divisor, or its divisor is not known
    if constant:
        return amax / abs(constant), level
    # x times a Sigmoid, which is near 1 where x is large: the product has about the range of x. For
    # x * Sigmoid(x), a SiLU or Hard-Swish, the largest difference is known
    sigmoid = tensor_ranges.graph.find_producer(other_operand, "Sigmoid", "HardSigmoid")
    if sigmoid is None:
        return None
    is_of_operand = sigmoid.input[0] == name
    return amax + (_MAX_GATE_LOSS if is_of_operand else 0.0), GUESS


def _product(
    tensor_ranges: TensorRanges, node: onnx.NodeProto, amaxes: list[float], level: int
) -> Range | None:
    """Return the range of the output of a Mul, or of a Div by a constant; None for other Divs.

    A constant changes the range by exactly its factor; the product of two tensors is only bounded
    by that of their largest |x|, which need not meet in one place.

    Args:
        tensor_ranges: has the constants.
        node: the Mul or Div.
        amaxes: largest |x| of each operand.
        level: how certain these are: EQUAL, BOUND or GUESS.
    """
    if node.op_type == "Mul":
        has_constant = any(tensor_ranges.graph.scalar(name) is not None for name in node.input)
        return math.prod(amaxes), level if has_constant else max(level, BOUND)
    divisor = tensor_ranges.graph.scalar(node.input[1])
    return (amaxes[0] / abs(divisor), level) if divisor else None


def _clip_limit(tensor_ranges: TensorRanges, node: onnx.NodeProto) -> float:
    """Return the largest |x| that a Clip passes; inf for any other node."""
    if standard_type(node) != "Clip":
        return math.inf
    low = tensor_ranges.graph.scalar(optional_input(node, 1))
    high = tensor_ranges.graph.scalar(optional_input(node, 2))
    if low is None or high is None:
        return math.inf
    return max(abs(low), abs(high))


def _largest_magnitude(constant: onnx.TensorProto) -> float:
    """Return the largest |x| of a constant; inf if it is empty or not numeric."""
    array = checks.to_array(constant)
    if array.dtype.kind not in "fiu" or not array.size:
        return math.inf
    return float(np.abs(array.astype(np.float64)).max())


@dataclass(frozen=True, slots=True)
class InferredScales:
    """Scales of a model's tensors, those of its pairs and inferred ones.

    Attributes:
        scales: tensor -> float32 scale, in the model's order.
        levels: tensor with an inferred scale -> "equal", "bound" or "guess".
        missing: tensors without a scale.
    """

    scales: dict[str, np.float32]
    levels: dict[str, str]
    missing: tuple[str, ...]


def infer_missing_scales(
    model: onnx.ModelProto, scales: Mapping[str, np.float32], *, guesses: bool = True
) -> InferredScales:
    """Infer the scales of all tensors that a TensorRT cache lists.

    Args:
        model: the float model, not changed.
        scales: tensor -> float32 scale of its Q/DQ pair; returned bit for bit.
        guesses: also infer scales that may clip values.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    shaped_model = infer_shapes(copy_message(model))
    tensor_ranges = TensorRanges(shaped_model, scales)
    _apply_rules(tensor_ranges, (EQUAL, BOUND, GUESS) if guesses else (EQUAL, BOUND))

    scale_by_tensor: dict[str, np.float32] = {}
    levels = {}
    missing_tensors = []
    for name in trt_tensors(shaped_model):
        if name in tensor_ranges.graph.constants:  # TensorRT reads its range from its values
            continue
        if name not in tensor_ranges.range_by_tensor:
            missing_tensors.append(name)
            continue
        amax, level = tensor_ranges.range_by_tensor[name]
        scale_by_tensor[name] = np.float32(amax / _QMAX)
        if name not in scales:
            levels[name] = LEVEL_NAMES[level]
    # the tensors stay in the model's order, and those of pairs get exactly the scale of their pair
    return InferredScales({**scale_by_tensor, **scales}, levels, tuple(missing_tensors))


def _apply_rules(tensor_ranges: TensorRanges, levels: Iterable[int]) -> None:
    """Add the ranges that follow from the known ones, level after level (EQUAL, BOUND, GUESS).

    The rules of a level are repeated until they add nothing.
    """
    node_outputs = [name for node in tensor_ranges.graph.nodes for name in node.output if name]
    tensors_from_the_end = [*tensor_ranges.graph.inputs, *node_outputs][::-1]
    known_ranges = tensor_ranges.range_by_tensor
    for level in levels:  # a range derived from a bound is a bound: no level has to be revisited
        known_count = -1
        while known_count < len(known_ranges):  # until a round adds no range
            known_count = len(known_ranges)
            _apply_rule(tensor_ranges, node_outputs, range_from_inputs, level)
            # A round makes one guess only, since a range that follows from it is more certain than
            # a second guess: the second rule is for a round in which the first one made none.
            if level < GUESS or len(known_ranges) == known_count:
                _apply_rule(tensor_ranges, tensors_from_the_end, range_from_readers, level)


def _apply_rule(
    tensor_ranges: TensorRanges,
    names: Iterable[str],
    rule: Callable[[TensorRanges, str], Range | None],
    max_level: int,
) -> None:
    """Add the ranges that a rule gives to tensors, if they are certain enough.

    Only one guess is added: others may then follow from it with more certainty.

    Args:
        tensor_ranges: the ranges that are known so far; extended.
        names: tensors, in the order in which the rule is tried.
        rule: `range_from_inputs` or `range_from_readers`.
        max_level: EQUAL, BOUND or GUESS: level of the least certain ranges to add.
    """
    for name in names:
        if name in tensor_ranges.range_by_tensor or not tensor_ranges.graph.is_float(name):
            continue
        new_range = rule(tensor_ranges, name)
        if new_range is None:
            continue
        amax, level = new_range
        if level <= max_level and 0 < amax < math.inf:  # a scale must be positive and finite
            tensor_ranges.range_by_tensor[name] = new_range
            if max_level == GUESS:  # then all that is more certain was added before: it is a guess
                return
