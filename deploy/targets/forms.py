"""Int8 arithmetic on uint8 tensors: one number as an operand, and the nodes of a gate.

ONNX Runtime makes one integer kernel of an Add or Mul between pairs. Two pairs here are not read as
they were written, which computes what would be a node::

    Q(scale, zero) -> DQ(scale * gain, zero)               times gain
    Q(scale, zero + steps) -> DQ(scale, zero)              plus steps * scale

Source: ONNX operators QuantizeLinear-13 and DequantizeLinear-13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from calibrators.grids import UINT8, affine_params
from calibrators.scales import Scale
from deploy.graph.gates import Gate

_LEAST_STEPS = 3  # of an offset: a step coarser by a third loses less than a second rounding


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
        shifted: str = "",
    ) -> list[onnx.NodeProto]:
        """The int8 form of a gate: an Add, a pair and a Mul, and where it must be another Add.

        Without the first Add where the layer before it has added the shift already.

        The pair is written where the Clip saturates, and read times the gain.

        Args:
            gate: the gate.
            nodes: its nodes, which read what the pairs before it left.
            quantize: the QuantizeLinear behind it; it may get another zero point.
            found: range of the gate's output.
            shifted: the float tensor that its source and its shift are already; "" where an Add is
                to make it.
        """
        name, step = f"{gate.name}/gate", gate.top / 255
        read = {n.removesuffix("/dequantized"): n for node in nodes for n in node.input}
        written = self._parameters(f"{name}/written", step, 0)
        scaled = self._parameters(f"{name}/read", step * gate.gain, 0)
        add: list[onnx.NodeProto] = []
        if not shifted:
            shifted = f"{name}/shifted"
            operands = [read[gate.source], self.number(gate.shift)]
            add = [_node("Add", operands, shifted, f"{name}/Add")]
        product, last = self._offset(gate, nodes[-1].output[0], quantize, found)
        return [
            *add,
            _node("QuantizeLinear", [shifted, *written], f"{name}/quantized", f"{name}/Q"),
            _node("DequantizeLinear", [f"{name}/quantized", *scaled], name, f"{name}/DQ"),
            _node("Mul", [read[gate.factor], name], product, gate.name),
            *last,
        ]

    def _offset(
        self, gate: Gate, output: str, quantize: onnx.NodeProto, found: Scale
    ) -> tuple[str, list[onnx.NodeProto]]:
        """What a gate's Mul makes, and what adds the offset to it: nothing, or an int8 Add."""
        if not gate.offset:
            return output, []
        _, zero, steps = with_offset(*found.on(UINT8), gate.offset)
        name = f"{gate.name}/product"
        if steps:
            quantize.input[2] = self.constant(
                f"{name}/zero_point", np.array(zero + steps, np.uint8)
            )
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


def with_offset(scale: np.float32, zero: int, offset: float) -> tuple[np.float32, int, int]:
    """uint8 parameters of y + offset by which y and y + offset differ in the zero point alone.

    The scale is widened until the offset is a whole number of steps, by a third at the most.

    Returns:
        (scale, zero_point) of y + offset, and the steps between its zero_point and that of y; the
        parameters as they were, and 0 steps, where no such number does.
    """
    steps = int(abs(offset) / float(scale))
    if steps >= _LEAST_STEPS:
        wide = np.float32(abs(offset) / steps)
        moved = int(np.rint(zero * float(scale) / float(wide)))
        signed_steps = steps if offset > 0 else -steps
        if 0 <= moved + signed_steps <= 255:
            return wide, moved, signed_steps
    return scale, zero, 0


def _node(op_type: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], name=name)
