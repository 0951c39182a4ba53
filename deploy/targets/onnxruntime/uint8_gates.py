"""int8 gates (Hard-Swish, squeeze-excite) on uint8 tensors, and shifted uint8 parameters for them.

A gate computes factor * gain * clip(source + shift, 0, top) + offset (`deploy.graph.gates`).
ONNX Runtime fuses an Add or Mul between Q/DQ pairs into one integer kernel. Three pairs here have
different parameters in Q and DQ, which computes a Mul or Add without a node::

    Q(scale, zero) -> DQ(scale * gain, zero)               times gain
    Q(scale, zero + steps) -> DQ(scale, zero)              plus steps * scale
    Q(scale, zero) -> DQ(scale, zero - steps)              the same, for one of its readers

A shift must be an integer number of steps. Widening the step until it is one loses less than a
second rounding would.

Source: ONNX operators QuantizeLinear-13 and DequantizeLinear-13.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from calibrators.grids import UINT8, affine_params
from calibrators.scales import Scale
from deploy.graph.edit import make_node
from deploy.graph.gates import Gate
from deploy.graph.index import Nodes
from deploy.tensors import Array

_MIN_SHIFT_STEPS = 3  # with 3 steps or more, the step grows by at most a third
_MAX_WIDENING = 1 + 1 / _MIN_SHIFT_STEPS


@dataclass(frozen=True, slots=True)
class ShiftedParams:
    """uint8 parameters of a tensor, and the distance to the zero point of its shifted form.

    Attributes:
        scale: real value of a step.
        zero: zero point.
        steps: steps between the two zero points; 0 if the shift cannot be expressed in steps.
    """

    scale: np.float32
    zero: int
    steps: int = 0


def fit_output_offset(scale: np.float32, zero: int, offset: float) -> ShiftedParams:
    """Choose parameters of y + offset whose integers are those of y, at another zero point.

    The scale is widened until the offset is an integer number of steps. The parameters stay as they
    are, with 0 steps, if the offset is less than a few steps, or if the zero point of y would be no
    uint8.

    Args:
        scale: scale of the range of y + offset.
        zero: zero point of that range.
        offset: the number that is added.

    Returns:
        The parameters of y + offset, and the steps from its zero point to that of y.
    """
    unshifted = ShiftedParams(scale, zero)
    step = float(scale)
    step_count = int(abs(offset) / step)
    if step_count < _MIN_SHIFT_STEPS:
        return unshifted
    # with this scale, the offset is an integer number of steps
    widened_scale = np.float32(abs(offset) / step_count)
    new_zero = int(np.rint(zero * step / float(widened_scale)))  # of y + offset
    steps = step_count if offset > 0 else -step_count
    zero_without_offset = new_zero + steps  # of y
    if not 0 <= zero_without_offset <= 255:
        return unshifted
    return ShiftedParams(widened_scale, new_zero, steps)


def fit_input_shift(scale: np.float32, zero: int, shift: float) -> ShiftedParams:
    """Choose parameters of x such that x + shift has the same integers and a lower zero point.

    The range of x is extended down to -shift, where x + shift is 0, and its scale widened until the
    shift is an integer number of steps::

        x            |0 ........... zero ........... 255|
        x + shift    |0 .. zero - steps ............ 255|     the same integers

    The parameters stay as they are, with 0 steps, in three cases. The shift is less than a few
    steps. The scale would be widened too much. Or zero is 0: the QuantizeLinear of such a range may
    stand for a Relu, which it would not with a range that reaches below 0.

    Args:
        scale: scale of the range of x.
        zero: zero point of that range.
        shift: the number that is added.

    Returns:
        The parameters of x, and the steps from the zero point of x + shift to that of x.
    """
    unshifted = ShiftedParams(scale, zero)
    step = float(scale)
    # lengths of the range of x on both sides of 0
    below_zero = zero * step
    above_zero = (255 - zero) * step
    # scale of a range that reaches down to -shift, and the whole steps of the shift in it
    min_scale = (above_zero + max(below_zero, shift)) / 255
    steps = int(shift / min_scale)
    if zero == 0 or steps < _MIN_SHIFT_STEPS:
        return unshifted
    if shift / steps > step * _MAX_WIDENING:  # coarser steps would lose too much
        return unshifted
    # with this scale, which is `min_scale` or more, the shift is an integer number of steps
    widened_scale = np.float32(shift / steps)
    zero_of_range = int(np.rint(below_zero / float(widened_scale)))
    new_zero = max(zero_of_range, steps)  # the range reaches at least to -shift
    return ShiftedParams(widened_scale, new_zero, steps)


class GateWriter:
    """Writer of the int8 gates and scalar operands of one model.

    Attributes:
        add_constant: adds an initializer once, and returns its name.
        constant_nodes: nodes that read only constants; scalars are appended here.
    """

    def __init__(
        self,
        add_constant: Callable[[str, Array], str],
        constant_nodes: Nodes,
    ) -> None:
        self.add_constant = add_constant
        self.constant_nodes = constant_nodes
        self._numbers: dict[float, str] = {}  # number -> float tensor that holds it

    def add_number(self, value: float) -> str:
        """Return a dequantized tensor of one value, exact: 128 steps of |value| / 128."""
        if value not in self._numbers:
            name = f"calib8/number/{value!r}"
            self._numbers[value] = name
            quantized = np.array(128 if value > 0 else 0, np.uint8)
            inputs = [
                self.add_constant(f"{name}/quantized", quantized),
                *self._add_scale_and_zero(name, abs(value) / 128, 128 - int(quantized)),
            ]
            self.constant_nodes.append(make_node("DequantizeLinear", inputs, name, f"{name}/DQ"))
        return self._numbers[value]

    def write_gate(
        self,
        gate: Gate,
        nodes: Sequence[onnx.NodeProto],
        quantize: onnx.NodeProto,
        output_range: Scale,
        *,
        shifted_source: str,
        clip_params: ShiftedParams | None,
    ) -> Nodes:
        """Return the int8 nodes of a gate: the clip, a Mul and, if needed, an Add of the offset.

        A gate computes factor * gain * clip(source + shift, 0, top) + offset.

        Args:
            gate: the gate, whose tensors have their names in the float model.
            nodes: its float nodes, which read the outputs of the pairs upstream.
            quantize: the QuantizeLinear of its output, whose zero point may be replaced.
            output_range: clip range of its output.
            shifted_source: float tensor source + shift, if the layer upstream computes it; else "".
            clip_params: scale and zero point of the source, and the shift in steps, to clip its
                integers. None to clip by a Q/DQ pair whose range is 0 to top; always None with a
                `shifted_source`.
        """
        read_name = map_read_names(nodes)  # name in the float model -> name in this one
        if clip_params is not None:
            clip_nodes = self._clip_integers(gate, clip_params)
        else:
            clip_nodes = self._clip_by_pair(gate, read_name[gate.source], shifted_source)
        gate_output = nodes[-1].output[0]
        # the output of the Mul: the gate's own output, if no Add of the offset follows
        product_name, offset_nodes = self._add_offset(gate, gate_output, quantize, output_range)
        clipped = clip_nodes[-1].output[0]
        multiply = make_node("Mul", [read_name[gate.factor], clipped], product_name, gate.name)
        return [*clip_nodes, multiply, *offset_nodes]

    def _clip_by_pair(self, gate: Gate, source: str, shifted_source: str) -> Nodes:
        """Return an Add and a Q/DQ pair that compute a gate's gain * clip(source + shift, 0, top).

        The Add adds the shift. The QuantizeLinear saturates at 0 and `top`. The scale of the
        DequantizeLinear is that of the QuantizeLinear times the gain.

        `shifted_source`: the tensor source + shift, if the layer upstream computes it; "" to add it
        here.
        """
        name = f"{gate.name}/gate"
        step = gate.top / 255  # a uint8 of zero point 0 then spans 0 to `top`
        quantize_params = self._add_scale_and_zero(f"{name}/written", step, 0)
        dequantize_params = self._add_scale_and_zero(f"{name}/read", step * gate.gain, 0)
        add_nodes: Nodes = []
        if not shifted_source:
            shifted_source = f"{name}/shifted"
            operands = [source, self.add_number(gate.shift)]
            add_nodes.append(make_node("Add", operands, shifted_source, f"{name}/Add"))
        # the pair and its output, the clipped tensor, have the same name
        pair = make_pair(shifted_source, name, name, quantize_params, dequantize_params)
        return [*add_nodes, *pair]

    def _clip_integers(self, gate: Gate, clip_params: ShiftedParams) -> Nodes:
        """Return the nodes that compute gain * clip(source + shift, 0, top) from uint8 integers.

        They are a Clip of the source's integers, left out if no uint8 is outside its limits, and a
        DequantizeLinear whose zero point adds the shift and whose scale multiplies by the gain.

        `clip_params`: scale and zero point of the source, and the shift as a number of steps, from
        `fit_input_shift`.
        """
        name = f"{gate.name}/gate"
        # the integer for which source + shift is 0; never negative, see `fit_input_shift`
        step = float(clip_params.scale)
        zero_level = clip_params.zero - clip_params.steps
        top_level = zero_level + round(gate.top / step)
        integers = f"{gate.source}/quantized"  # made by the pair of the source
        clip_nodes: Nodes = []
        if zero_level > 0 or top_level < 255:
            limits = [
                self.add_constant(f"{name}/low", np.array(zero_level, np.uint8)),
                self.add_constant(f"{name}/high", np.array(min(top_level, 255), np.uint8)),
            ]
            clipped = f"{name}/quantized"
            clip_nodes.append(make_node("Clip", [integers, *limits], clipped, f"{name}/Clip"))
            integers = clipped
        params = self._add_scale_and_zero(f"{name}/read", step * gate.gain, zero_level)
        dequantize = make_node("DequantizeLinear", [integers, *params], name, f"{name}/DQ")
        return [*clip_nodes, dequantize]

    def _add_offset(
        self, gate: Gate, output: str, quantize: onnx.NodeProto, output_range: Scale
    ) -> tuple[str, Nodes]:
        """Add the offset to a gate's product; return (tensor that the Mul is to write, new nodes).

        A gate computes factor * gain * clip(source + shift, 0, top) + offset. An offset of an
        integer number of steps takes no node: the Mul writes the gate's output, which `quantize`
        then reads without the offset. It gets the zero point of the product, and the
        DequantizeLinear after it keeps that of the output, which adds the offset. Else the product
        gets a pair of its own and an int8 Add.

        Args:
            gate: the gate.
            output: its output.
            quantize: the QuantizeLinear that reads it, edited in place.
            output_range: range of the output, the offset included.
        """
        if not gate.offset:
            return output, []
        name = f"{gate.name}/product"
        output_params = fit_output_offset(*output_range.on(UINT8), gate.offset)
        if output_params.steps:  # 0 if the offset is no integer number of steps
            zero_of_product = output_params.zero + output_params.steps
            quantize.input[2] = self.add_constant(
                f"{name}/zero_point", np.array(zero_of_product, np.uint8)
            )
            return output, []

        product_lo = output_range.lo - gate.offset
        product_hi = output_range.hi - gate.offset
        product_scale, product_zero = affine_params(product_lo, product_hi)
        params = self._add_scale_and_zero(name, float(product_scale), product_zero)
        float_product = f"{name}/float"
        # the pair and its output have the same name
        pair = make_pair(float_product, name, name, params, params)
        operands = [name, self.add_number(gate.offset)]
        add = make_node("Add", operands, output, f"{name}/Add")
        return float_product, [*pair, add]

    def _add_scale_and_zero(self, name: str, scale: float, zero: int) -> list[str]:
        """Add a scale and a zero point; return their names."""
        return [
            self.add_constant(f"{name}/scale", np.array(scale, np.float32)),
            self.add_constant(f"{name}/zero_point", np.array(zero, np.uint8)),
        ]


def make_pair(
    source: str,
    output: str,
    name: str,
    quantize_params: Sequence[str],
    dequantize_params: Sequence[str],
) -> Nodes:
    """Return the Q/DQ pair `name` from one float tensor to another.

    The integers are `name`/quantized; the parameters are names of scale and zero point.
    """
    integers = f"{name}/quantized"
    return [
        make_node("QuantizeLinear", [source, *quantize_params], integers, f"{name}/Q"),
        make_node("DequantizeLinear", [integers, *dequantize_params], output, f"{name}/DQ"),
    ]


def map_read_names(nodes: Iterable[onnx.NodeProto]) -> dict[str, str]:
    """Tensor of the float model -> the tensor that some of these nodes read in its place."""
    read_names = {}
    for node in nodes:
        for name in node.input:
            read_names[name.removesuffix("/dequantized")] = name
    return read_names
