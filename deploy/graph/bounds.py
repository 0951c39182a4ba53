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

**float16**: a value past 65504 becomes infinity, one below 6e-5 loses bits, and a constant of 1e-9
that keeps a logarithm finite becomes 0. `find_float16_overflows` finds the nodes that must not
compute in it.

Source: ONNX operators Clip-13, HardSigmoid-6, HardSwish-14 and Gelu-20.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.grids import INT8
from calibrators.rounding import ConvWindow
from deploy.graph.index import FLOAT, Graph, attributes, optional_input, other_inputs, standard_type
from deploy.graph.placement import MOVES, WEIGHTED

Bounds = tuple[float, float]

_UNBOUNDED: Bounds = (-math.inf, math.inf)
_UNREAD: Bounds = (math.inf, -math.inf)  # of an unread tensor: any bounds are looser
SIGMOID: Bounds = (-8.0, 8.0)
_SMOOTH_BOUNDS: dict[str, Bounds] = {"Sigmoid": SIGMOID, "Tanh": (-4.0, 4.0), "Erf": (-3.0, 3.0)}
_FLOOR_BY_OP_TYPE = {"HardSwish": -3.0, "Gelu": -4.0, "com.microsoft.Gelu": -4.0}
_AMPLIFIES = frozenset({"Log", "Reciprocal", "Sqrt"})
VALUE_MOVES = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Split"}
    | {"Identity", "Expand", "Tile", "MaxPool", "DepthToSpace", "SpaceToDepth"}
)
_SILU_FLOOR = -10.0  # of u in t * Sigmoid(u)
_GELU_FLOOR = -4.0 / math.sqrt(2)  # of u in t * (1 + Erf(u))
_MAX_FLOAT16 = 65504 / 8  # largest float16, with a margin for values that calibration did not see
_MIN_FLOAT16 = 2.0**-14 * 8  # smallest with all its bits in float16, with the same margin
_MAX_VANISHING = 2.0**-25  # float16 rounds this and less to 0
_GUARDS = frozenset({"Add", "Clip", "Max", "Sub"})  # may keep a Log or divisor above 0
_PASSING = MOVES | {"Expand", "Identity", "Tile"}  # pass values on unchanged


def find_bounds(model: onnx.ModelProto) -> dict[str, Bounds]:
    """Return tensor -> (floor, ceiling) in real units, for tensors with at least one finite bound.

    Args:
        model: a cleaned model, its nodes in execution order.
    """
    limiting_bounds = {}
    for name, bounds in _BoundsPropagation(Graph(model)).bounds.items():
        floor, ceiling = bounds
        is_read = floor < ceiling  # a tensor that no node reads has `_UNREAD`
        if is_read and bounds != _UNBOUNDED:
            limiting_bounds[name] = bounds
    return limiting_bounds


def _find_loosest(needs: Iterable[Bounds]) -> Bounds:
    """Return the loosest of several bounds."""
    loosest_floor, loosest_ceiling = _UNREAD
    for floor, ceiling in needs:
        loosest_floor = min(loosest_floor, floor)
        loosest_ceiling = max(loosest_ceiling, ceiling)
    return loosest_floor, loosest_ceiling


class _BoundsPropagation:
    """Propagates the bounds of every tensor, from the last node to the first.

    Attributes:
        bounds: tensor -> the loosest bounds that any of its readers needs.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bounds: dict[str, Bounds] = {}
        for node in reversed(graph.nodes):
            self._add_bounds(node.output)
        self._add_bounds(graph.inputs)

    def _add_bounds(self, tensors: list[str]) -> None:
        """Set the bounds of tensors; those of everything downstream are set already."""
        for tensor in filter(None, tensors):
            readers = self.graph.readers.get(tensor, [])
            bounds = _find_loosest(self._bounds_for_reader(node, tensor) for node in readers)
            if self.graph.is_read_outside(tensor):
                bounds = _UNBOUNDED
            self.bounds[tensor] = bounds

    def _output_bounds(self, node: onnx.NodeProto) -> Bounds:
        """Return the bounds that the readers of a node's outputs need."""
        return _find_loosest(self.bounds[name] for name in node.output if name)

    def _bounds_for_reader(self, node: onnx.NodeProto, tensor: str) -> Bounds:
        """Return (floor, ceiling) of a tensor, beyond which a reader of it gives the same output.

        A Relu has the floor 0: all values below it become 0. A bound is infinite if there is none.
        """
        op_type = standard_type(node)
        # where the node only moves values, or adds or multiplies a scalar, the bounds follow from
        # those of its output
        if tensor in _moved_inputs(node):
            return self._output_bounds(node)
        bounds = self._invert_arithmetic(node, tensor)
        if bounds is not None:
            return bounds

        # a product with a gate, such as a Sigmoid, is 0 below the gate's floor
        if op_type == "Mul":
            return self._gated_bounds(node, tensor)
        # activations, which are nearly flat beyond their bounds; differences there hardly show in
        # the output, unless a Log or the like amplifies them
        if op_type in _SMOOTH_BOUNDS and not self._is_amplified(node):
            return _SMOOTH_BOUNDS[op_type]
        if op_type in _FLOOR_BY_OP_TYPE:
            return _FLOOR_BY_OP_TYPE[op_type], math.inf
        if op_type == "Relu":  # it passes positive values on, so its output's ceiling holds too
            _, ceiling = self._output_bounds(node)
            return 0.0, max(0.0, ceiling)
        return self._clip_bounds(node) or _UNBOUNDED

    def _invert_arithmetic(self, node: onnx.NodeProto, tensor: str) -> Bounds | None:
        """Return the bounds of x in x + 2, x - 2, x * 2 or x / 2, for any scalar; else None.

        They are the bounds of the node's output, with the arithmetic undone: if the readers of
        y = x + 2 need y between 0 and 6, they need x between -2 and 4. `tensor` is x.
        """
        op_type = standard_type(node)
        if op_type not in ("Add", "Sub", "Mul", "Div"):
            return None
        scalar = self.graph.scalar_operand(tensor, node)
        if scalar is None or (scalar == 0 and op_type in ("Mul", "Div")):
            return None
        if op_type in ("Sub", "Div") and node.input[0] != tensor:  # 2 - x or 2 / x
            return None

        low, high = self._output_bounds(node)
        if op_type == "Add":
            return low - scalar, high - scalar
        if op_type == "Sub":
            return low + scalar, high + scalar
        if op_type == "Mul":
            low /= scalar
            high /= scalar
        else:
            low *= scalar
            high *= scalar
        return min(low, high), max(low, high)  # a negative scalar exchanges them

    def _clip_bounds(self, node: onnx.NodeProto) -> Bounds | None:
        """Return the bounds of a HardSigmoid or Clip; None for any other node."""
        if standard_type(node) == "HardSigmoid":  # Clip(alpha * x + beta, 0, 1)
            attrs = attributes(node)
            alpha = attrs.get("alpha", 0.2)
            beta = attrs.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        if standard_type(node) != "Clip":
            return None
        low = self.graph.scalar(optional_input(node, 1))
        high = self.graph.scalar(optional_input(node, 2))
        return (-math.inf if low is None else low, math.inf if high is None else high)

    def _is_amplified(self, node: onnx.NodeProto) -> bool:
        """Whether a reader, or one downstream of a Reshape or the like, amplifies differences."""
        tensors = list(node.output)
        for tensor in tensors:  # grows during the loop
            for reader in self.graph.readers.get(tensor, []):
                if self._amplifies(reader, tensor):
                    return True
                if _moved_inputs(reader):
                    tensors += [name for name in reader.output if name not in tensors]
        return False

    def _amplifies(self, node: onnx.NodeProto, tensor: str) -> bool:
        """Whether a reader of a tensor is a Log, a square root or a division by it."""
        if standard_type(node) == "Pow":
            power = self.graph.scalar_operand(tensor, node)
            return power is None or power < 1
        if standard_type(node) == "Div":
            return bool(node.input[1] == tensor)
        return standard_type(node) in _AMPLIFIES

    def _gated_bounds(self, product: onnx.NodeProto, tensor: str) -> Bounds:
        """Return (floor, ceiling) of a factor of a Mul: values beyond them do not matter.

        They do not matter if the other factor is a gate that is computed from this one: it is 0, or
        nearly, below its floor, and then so is the product. Without such a gate they are infinite.
        """
        factors = other_inputs(product, tensor)  # none in a square
        gate = self.graph.producer.get(factors[0]) if len(factors) == 1 else None
        if gate is None:
            return _UNBOUNDED
        if standard_type(gate) == "Sigmoid":  # SiLU, t * Sigmoid(t)
            return self._bounds_by_gate(tensor, gate.input[0], _SILU_FLOOR)
        if standard_type(gate) == "Add":  # GELU, t * (1 + Erf(t / sqrt 2)), times 0.5
            erf = self._find_erf(gate)
            if erf is None:
                return _UNBOUNDED
            return self._bounds_by_gate(tensor, erf.input[0], _GELU_FLOOR)
        bounds = self._clip_bounds(gate)
        if bounds is None:  # neither a Clip nor a HardSigmoid
            return _UNBOUNDED
        gate_floor, _ = bounds
        # below its floor a HardSigmoid is 0, but a Clip is the floor itself
        if standard_type(gate) == "Clip" and gate_floor != 0.0:
            return _UNBOUNDED
        return self._bounds_by_gate(tensor, gate.input[0], gate_floor)

    def _find_erf(self, gate: onnx.NodeProto) -> onnx.NodeProto | None:
        """Return the Erf node of 1 + Erf(u); None if the Add is another sum."""
        for name in gate.input:
            erf = self.graph.find_producer(name, "Erf")
            if erf is not None:
                return erf if self.graph.scalar_operand(name, gate) == 1.0 else None
        return None

    def _bounds_by_gate(self, tensor: str, gate_input: str, gate_floor: float) -> Bounds:
        """Return the bounds of a tensor that is multiplied by a gate: (its floor, infinity).

        The gate is 0 if its input is below `gate_floor`. Both tensors must come from one source t::

            gate_input = gate_factor * t + gate_shift     tensor = factor * t

        Then t has the floor (gate_floor - gate_shift) / gate_factor, and the tensor `factor` times
        as much. If they do not come from one source, both bounds are infinite.
        """
        if gate_input == tensor:
            return gate_floor, math.inf
        source, factor, shift = self._linear_form(tensor)
        gate_source, gate_factor, gate_shift = self._linear_form(gate_input)
        if tensor == gate_source:  # the tensor is t, even if it comes from another one itself
            source = tensor
            factor = 1.0
            shift = 0.0
        if source != gate_source or shift or factor <= 0 or gate_factor <= 0:
            return _UNBOUNDED
        return factor * (gate_floor - gate_shift) / gate_factor, math.inf

    def _linear_form(self, tensor: str) -> tuple[str, float, float]:
        """Return (source, factor, shift) of a tensor: it is factor * source + shift.

        The source is an input of the Mul, Div or Add of a scalar that makes the tensor. It is the
        tensor itself, with factor 1 and shift 0, if another node makes it.
        """
        node = self.graph.producer.get(tensor)
        if node is None:
            return tensor, 1.0, 0.0
        for name in node.input[:2]:
            scalar = self.graph.scalar_operand(name, node)  # None if `name` is the scalar itself
            if scalar is None:
                continue
            if standard_type(node) == "Mul":
                return name, scalar, 0.0
            if standard_type(node) == "Div" and name == node.input[0] and scalar:
                return name, 1 / scalar, 0.0
            if standard_type(node) == "Add":
                return name, 1.0, scalar
        return tensor, 1.0, 0.0


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
    """Return tensor -> its limits, for tensors whose limits are not `UNLIMITED`.

    Args:
        model: a cleaned model, its nodes in execution order.
    """
    limits = {name: RangeLimits(*bounds) for name, bounds in find_bounds(model).items()}
    for name in _find_logits(Graph(model)):
        limits[name] = limits.get(name, UNLIMITED)._replace(extrapolation_limit=SIGMOID[1])
    return limits


def _find_logits(graph: Graph) -> list[str]:
    """Return the logits: inputs of the Sigmoids that make scores, and the tensors they come from.

    A Sigmoid makes scores, not the values of an activation, if no layer with weights lies
    downstream and if no activation is multiplied by its output (`_is_score`). The tensors upstream
    of a Reshape, Concat or the like have the same values as the logits, and so are included.
    """
    upstream_of_layers: set[str] = set()
    for node in reversed(graph.nodes):
        if standard_type(node) in WEIGHTED or not upstream_of_layers.isdisjoint(node.output):
            upstream_of_layers.update(node.input)

    logits = []
    for node in graph.nodes:
        if standard_type(node) != "Sigmoid" or node.output[0] in upstream_of_layers:
            continue
        if _is_score(graph, node):
            logits.append(node.input[0])
    for logit in logits:  # the list grows during the loop, so that it goes upstream step by step
        sources = _moved_inputs(graph.producer.get(logit))
        logits += [source for source in sources if source not in logits]
    return logits


def _is_score(graph: Graph, sigmoid: onnx.NodeProto) -> bool:
    """Whether a Sigmoid's output is a score: it is multiplied by constants and scores at most.

    So is what a Reshape, Concat or the like makes of it.
    """
    scores = [sigmoid.output[0]]
    for score in scores:  # grows during the loop
        for reader in graph.readers.get(score, []):
            if score in _moved_inputs(reader):
                scores += reader.output
            elif standard_type(reader) == "Mul":
                factors = other_inputs(reader, score)
                if not all(_is_constant_or_score(graph, factor) for factor in factors):
                    return False
    return True


def _is_constant_or_score(graph: Graph, factor: str) -> bool:
    """Whether a factor is constant, or the output of a Sigmoid, at most reshaped or the like."""
    if factor in graph.constants:
        return True
    node = graph.producer.get(factor)
    while node is not None and standard_type(node) != "Sigmoid" and len(_moved_inputs(node)) == 1:
        node = graph.producer.get(_moved_inputs(node)[0])
    return node is not None and standard_type(node) == "Sigmoid"


def _moved_inputs(node: onnx.NodeProto | None) -> list[str]:
    """Return the inputs whose values a node passes on unchanged."""
    if node is None:
        return []
    if standard_type(node) == "Concat":
        return list(node.input)
    return [node.input[0]] if standard_type(node) in VALUE_MOVES else []


def find_float16_overflows(
    graph: Graph, largest_by_tensor: Mapping[str, float], *, int8_nodes: Collection[str]
) -> dict[str, str]:
    """Return node -> why it must not compute in float16, for nodes that must not.

    A node must not if its values are too large or too small for float16. Nor must an Add or Max of
    a constant such as 1e-9, which keeps its output above 0 and is itself 0 in float16. The readers
    of that output, such as a Log, must compute in float32 too.

    Args:
        graph: the float model's.
        largest_by_tensor: tensor -> largest |x| observed, of the tensors for which it is known.
        int8_nodes: names of the nodes that run in int8.
    """
    reasons = {node.name: "" for node in graph.nodes}  # in graph order
    for node in graph.nodes:
        if standard_type(node) == "Constant":
            continue
        reason = _describe_misfit(graph, node, largest_by_tensor)
        affected_nodes = [node]
        if not reason:
            reason = _describe_vanishing(graph, node)
            # of a / Max(b, 1e-9) the Div is affected, but not the nodes that read its quotient
            if reason and standard_type(node) != "Div":
                affected_nodes += graph.readers.get(node.output[0], ())
        for affected_node in affected_nodes:  # the first reason of a node stays
            reasons[affected_node.name] = reasons[affected_node.name] or reason
    return {name: reason for name, reason in reasons.items() if reason and name not in int8_nodes}


def scales_fit_float16(scales: NDArray[np.float32]) -> bool:
    """Whether float16 can hold the scales of a tensor, and the values that they express."""
    return bool(_MIN_FLOAT16 <= INT8.qmax * scales.max(initial=0.0) <= _MAX_FLOAT16)


def float16_overflow(
    graph: Graph, node: onnx.NodeProto, largest_by_tensor: Mapping[str, float]
) -> str:
    """Return which input or output of a node float16 cannot hold, as text; "" if it holds all.

    Args:
        graph: the float model's, or that of a model with Q/DQ pairs.
        node: one of its nodes.
        largest_by_tensor: tensor of the float model -> largest |x| observed.
    """
    return _describe_misfit(graph, node, largest_by_tensor) or _describe_vanishing(graph, node)


def _describe_misfit(
    graph: Graph, node: onnx.NodeProto, largest_by_tensor: Mapping[str, float]
) -> str:
    """Return which input or output of a node is too large or small for float16, as text, or ""."""
    weights = node.input[1:2] if standard_type(node) in WEIGHTED else ()
    for name in (*node.input, *node.output):
        float_name = _name_in_float_model(name)
        # largest |x|: of a constant or Q/DQ pair, else as observed; 0 if unknown
        magnitude = _max_magnitude(graph, name) or largest_by_tensor.get(float_name, 0.0)
        if not magnitude <= _MAX_FLOAT16:  # NaN too
            return f"|{float_name}| reaches {magnitude:.3g}, which is too near float16's 65504"
        # a constant that is no weight may be small: a norm's epsilon is added to larger values
        is_data = name in weights or name not in graph.constants
        if is_data and 0 < magnitude < _MIN_FLOAT16:
            return f"|{float_name}| is at most {magnitude:.3g}, of which float16 holds too few bits"
    return ""


def _describe_vanishing(graph: Graph, node: onnx.NodeProto) -> str:
    """Return, as text, which constant keeps a value above 0 and is 0 in float16; "" if none does.

    In a / Max(b, 1e-9) the Max is the guard and 1e-9 its constant, which keeps the divisor above 0.
    The guard is the node itself or, if the node is a Div, what makes its divisor. Between the two
    there may be nodes that only move values.
    """
    candidate: onnx.NodeProto | None = node
    while candidate is not None:  # go upstream to the first node that may be the guard
        if standard_type(candidate) == "Div":
            upstream_tensor = candidate.input[1]
        elif standard_type(candidate) in _PASSING:
            upstream_tensor = candidate.input[0]
        else:
            break
        candidate = graph.producer.get(upstream_tensor)
    if candidate is None or standard_type(candidate) not in _GUARDS:
        return ""
    for name in candidate.input:
        magnitude = _max_magnitude(graph, name)
        if 0 < magnitude <= _MAX_VANISHING:
            constant_text = f"{_name_in_float_model(name)}, {magnitude:.3g}"
            return f"{constant_text}, which may keep a value above 0, is 0 in float16"
    return ""


def _max_magnitude(graph: Graph, name: str) -> float:
    """Return the largest |x| of a float constant, or of what a Q/DQ pair holds; 0 without these."""
    constant_name = name
    multiple = 1.0
    # the nodes of pairs that make or read the tensor; None if no pair makes it
    pair_nodes = [graph.find_producer(name, "DequantizeLinear")]
    pair_nodes += [
        node for node in graph.readers.get(name, ()) if standard_type(node) == "QuantizeLinear"
    ]
    for node in filter(None, pair_nodes):
        constant_name = node.input[1]  # the scale of the pair, which holds up to 127 times as much
        multiple = INT8.qmax
    constant = graph.initializers.get(constant_name)
    if constant is None or constant.data_type != FLOAT:
        return 0.0
    return multiple * float(np.abs(numpy_helper.to_array(constant)).max(initial=0.0))


def _name_in_float_model(name: str) -> str:
    """Return the float model's name of a tensor next to a Q/DQ pair."""
    return name.removesuffix("/dequantized").removesuffix("/float")


def make_window(attrs: Mapping[str, Any], kernel: Sequence[int], *, transposed: bool) -> ConvWindow:
    """Return the window of a Conv or ConvTranspose.

    Args:
        attrs: the node's attributes.
        kernel: sizes of its weight's spatial axes.
        transposed: whether it is a ConvTranspose, which must have no auto_pad or output_shape.
    """
    rank = len(kernel)
    return ConvWindow(
        kernel=tuple(kernel),
        strides=tuple(attrs.get("strides", [1] * rank)),
        dilations=tuple(attrs.get("dilations", [1] * rank)),
        pads=tuple(attrs.get("pads", [0] * 2 * rank)),
        auto_pad=attrs.get("auto_pad", b"NOTSET").decode(),
        group=attrs.get("group", 1),
        transposed=transposed,
        output_padding=tuple(attrs.get("output_padding", ())),
    )
