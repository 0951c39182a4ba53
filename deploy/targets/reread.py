"""uint8 parameters by which the integers of one tensor are those of the same tensor, shifted.

A whole number of steps between two zero points adds a number without a node that computes it. A
step that is widened until that number is whole loses less than a second rounding would.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
