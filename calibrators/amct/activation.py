"""The activation behind a layer, through which AdaRound's loss looks: its value and its slope.

Source: hicann/amct, graph_based ada_round/ada_round_groups.py, which knows GELU too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

NONE, RELU, SIGMOID, TANH, LEAKY, RELU6 = "none", "relu", "sigmoid", "tanh", "leaky", "relu6"


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of each value by itself, of layers with G groups of M output channels.

    Attributes:
        kind: one of this module's names.
        slope: of negative values where it leaks, float32 [1, 1] or [G, M].
    """

    kind: str = NONE
    slope: FloatArray = field(default_factory=lambda: np.zeros((1, 1), np.float32))

    def of_part(self, groups: slice, rows: slice) -> Activation:
        """That of some groups and channels."""
        return Activation(
            self.kind, self.slope[groups, rows] if self.slope.size > 1 else self.slope
        )

    def value(self, x: FloatArray) -> FloatArray:
        """[G, B, M, P] -> what the next layer gets."""
        if self.kind == RELU:
            return np.maximum(x, np.float32(0))
        if self.kind == SIGMOID:
            return sigmoid(x)
        if self.kind == TANH:
            return np.tanh(x)
        if self.kind == LEAKY:
            return np.where(x > 0, x, x * self._leak)
        if self.kind == RELU6:
            return np.clip(x, np.float32(0), np.float32(6))
        return x

    def derivative(self, x: FloatArray) -> FloatArray | np.float32:
        """[G, B, M, P] -> its derivative there; at an edge that of the lower side, as in torch."""
        one = np.float32(1)
        if self.kind == RELU:
            return (x > 0).astype(np.float32)
        if self.kind == SIGMOID:
            found = sigmoid(x)
            return found * (one - found)
        if self.kind == TANH:
            return one - np.square(np.tanh(x))
        if self.kind == LEAKY:
            return np.where(x > 0, one, self._leak)
        if self.kind == RELU6:
            return ((x > 0) & (x < 6)).astype(np.float32)
        return one

    @property
    def _leak(self) -> FloatArray:
        return self.slope[:, None, :, None]


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + e^-x), 0 far below."""
    with np.errstate(over="ignore"):
        return np.reciprocal(np.float32(1) + np.exp(-x))
