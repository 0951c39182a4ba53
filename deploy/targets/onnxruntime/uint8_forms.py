"""uint8 parameters by which the integers of one tensor are those of the same tensor, shifted.

A whole number of steps between two zero points adds a number without a node that computes it. A
step that is widened until that number is whole loses less than a second rounding would.

Int8 arithmetic on uint8 tensors: one number as an operand, and the nodes of a gate.

ONNX Runtime makes one integer kernel of an Add or Mul between pairs. Three pairs here are not read
as they were written, which computes what would be a node::

    Q(scale, zero) -> DQ(scale * gain, zero)               times gain
    Q(scale, zero + steps) -> DQ(scale, zero)              plus steps * scale
    Q(scale, zero) -> DQ(scale, zero - steps)              the same, for one of its readers

Source: ONNX operators QuantizeLinear-13 and DequantizeLinear-13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from calibrators.grids import UINT8, affine_params
from calibrators.scales import Scale
from deploy.graph.placement import Gate

_LEAST_STEPS = 3  # of which the step is a third wider at the most
_WIDEST = 1 + 1 / _LEAST_STEPS


@dataclass(frozen=True, slots=True)
class Shifted:
    """Parameters of a tensor, and how far from them it is read or written shifted.

    Attributes:
        scale: of a step.
        zero: its zero point.
        steps: between that and the other zero point; 0 where no number of them does.
    """

    scale: np.float32
    zero: int
    steps: int = 0


def with_offset(scale: np.float32, zero: int, offset: float) -> Shifted:
    """Parameters of y + offset by which y and y + offset differ in the zero point alone.

    Returns:
        those of y + offset, and the steps from its zero point to that of y.
    """
    steps = int(abs(offset) / float(scale))
    if steps >= _LEAST_STEPS:
        wide = np.float32(abs(offset) / steps)
        moved = int(np.rint(zero * float(scale) / float(wide)))
        signed_steps = steps if offset > 0 else -steps
        if 0 <= moved + signed_steps <= 255:
            return Shifted(wide, moved, signed_steps)
    return Shifted(scale, zero)


def with_shift(scale: np.float32, zero: int, shift: float) -> Shifted:
    """Parameters of x by which the integers of x are those of x + shift from a lower zero point.

    The range of x grows downwards as far as -shift, where x + shift is 0::

        x            |0 ........... zero ........... 255|
        x + shift    |0 .. zero - steps ............ 255|     the same integers

    What ends at 0 keeps its zero point of 0, which is the Relu that it ends by.

    Args:
        scale: of the range of x.
        zero: likewise.
        shift: positive; of any other there are no steps.

    Returns:
        those of x, and the steps from the zero point of x + shift to that of x.
    """
    low, high = zero * float(scale), (255 - zero) * float(scale)
    least = (high + max(low, shift)) / 255
    steps = int(shift / least)
    if not zero or steps < _LEAST_STEPS or shift / steps > float(scale) * _WIDEST:
        return Shifted(scale, zero)
    wide = np.float32(shift / steps)
    return Shifted(wide, max(steps, int(np.rint(low / float(wide)))), steps)


class Forms:
    """The arithmetic that is added to one model.

    Attributes:
        constant: adds an initializer of that name once, and gives the name.
        before: nodes that read constants only.
    """

    def __init__(
        self, constant: Callable[[str, NDArray[np.generic]], str], before: list[onnx.NodeProto]
    ) -> None:
        self.constant = constant
        self.before = before
        self._numbers: dict[float, str] = {}  # number -> the float tensor that holds it

    def number(self, value: float) -> str:
        """A float tensor of one value, held exactly: 128 steps of a 128th, on either side of 0."""
        if value not in self._numbers:
            name = self._numbers[value] = f"calib8/number/{value!r}"
            quantized = np.array(128 if value > 0 else 0, np.uint8)
            inputs = [
                self.constant(f"{name}/quantized", quantized),
                *self._parameters(name, abs(value) / 128, 128 - int(quantized)),
            ]
            self.before.append(_node("DequantizeLinear", inputs, name, f"{name}/DQ"))
        return self._numbers[value]

    def gate(
        self,
        gate: Gate,
        nodes: Sequence[onnx.NodeProto],
        quantize: onnx.NodeProto,
        found: Scale,
        *,
        shifted: str = "",
        own: Shifted | None = None,
    ) -> list[onnx.NodeProto]:
        """The int8 form of a gate: what is clipped, a Mul, and where it must be an Add behind it.

        Args:
            gate: the gate.
            nodes: its nodes, which read what the pairs before it left.
            quantize: the QuantizeLinear behind it; it may get another zero point.
            found: range of the gate's output.
            shifted: the float tensor that its source and its shift are already, as the layer
                before it makes it; "" where there is none.
            own: of its source, where the source's integers are to be clipped themselves.
        """
        read = {n.removesuffix("/dequantized"): n for node in nodes for n in node.input}
        if own is not None:
            clipped = self._clipped_integers(gate, own)
        else:
            clipped = self._clipped(gate, read[gate.source], shifted)
        product, last = self._offset(gate, nodes[-1].output[0], quantize, found)
        operands = [read[gate.factor], clipped[-1].output[0]]
        return [*clipped, _node("Mul", operands, product, gate.name), *last]

    def _clipped(self, gate: Gate, source: str, shifted: str) -> list[onnx.NodeProto]:
        """An Add and a pair, written where the Clip saturates and read times the gain.

        Without the Add where the layer before it has added the shift already.
        """
        name, step = f"{gate.name}/gate", gate.top / 255
        written = self._parameters(f"{name}/written", step, 0)
        scaled = self._parameters(f"{name}/read", step * gate.gain, 0)
        add: list[onnx.NodeProto] = []
        if not shifted:
            shifted = f"{name}/shifted"
            add = [_node("Add", [source, self.number(gate.shift)], shifted, f"{name}/Add")]
        return [
            *add,
            _node("QuantizeLinear", [shifted, *written], f"{name}/quantized", f"{name}/Q"),
            _node("DequantizeLinear", [f"{name}/quantized", *scaled], name, f"{name}/DQ"),
        ]

    def _clipped_integers(self, gate: Gate, own: Shifted) -> list[onnx.NodeProto]:
        """A Clip of the source's integers, read from another zero point and times the gain.

        Without the Clip where it would change none of 0..255.
        """
        name, low = f"{gate.name}/gate", own.zero - own.steps
        high, clip = low + round(gate.top / float(own.scale)), list[onnx.NodeProto]()
        integers = f"{gate.source}/quantized"
        if low > 0 or high < 255:
            ends = {"low": low, "high": min(high, 255)}
            inputs = [self.constant(f"{name}/{k}", np.array(v, np.uint8)) for k, v in ends.items()]
            clip = [_node("Clip", [integers, *inputs], f"{name}/quantized", f"{name}/Clip")]
            integers = f"{name}/quantized"
        scaled = self._parameters(f"{name}/read", float(own.scale) * gate.gain, low)
        return [*clip, _node("DequantizeLinear", [integers, *scaled], name, f"{name}/DQ")]

    def _offset(
        self, gate: Gate, output: str, quantize: onnx.NodeProto, found: Scale
    ) -> tuple[str, list[onnx.NodeProto]]:
        """What a gate's Mul makes, and what adds the offset to it: nothing, or an int8 Add."""
        if not gate.offset:
            return output, []
        of = with_offset(*found.on(UINT8), gate.offset)
        name = f"{gate.name}/product"
        if of.steps:
            zero = np.array(of.zero + of.steps, np.uint8)
            quantize.input[2] = self.constant(f"{name}/zero_point", zero)
            return output, []
        own = affine_params(found.lo - gate.offset, found.hi - gate.offset)
        pair = self._parameters(name, float(own[0]), own[1])
        return f"{name}/float", [
            _node("QuantizeLinear", [f"{name}/float", *pair], f"{name}/quantized", f"{name}/Q"),
            _node("DequantizeLinear", [f"{name}/quantized", *pair], name, f"{name}/DQ"),
            _node("Add", [name, self.number(gate.offset)], output, f"{name}/Add"),
        ]

    def _parameters(self, name: str, scale: float, zero: int) -> list[str]:
        return [
            self.constant(f"{name}/scale", np.array(scale, np.float32)),
            self.constant(f"{name}/zero_point", np.array(zero, np.uint8)),
        ]


def _node(op_type: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], name=name)
