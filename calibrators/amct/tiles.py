"""A layer's weights and inputs in tiles, so that their products are the same for any threads.

::

    weight [G, M, K]     -->  [G, K/64, M, 64]      zeros behind K where 64 does not divide it
    inputs [P, G, K]     -->  at B places: [B/64, 64, G, K/64, 64]
    outputs              -->  [G, B/64, M, 64]

A product of 64 x 64 x 64 is as much as BLAS does in one thread; for more it wakes others, and adds
up in their order. Here tiles are added up in the order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.activation import Activation

FloatArray = NDArray[np.float32]

TILE = 64
_MOST = 256  # places at a time


@dataclass(frozen=True, slots=True)
class Tiles:
    """At most 64 output channels of a layer.

    Attributes:
        weight: float32 [G, A, M, T], A tiles of T values of K.
        scale: float32 [G, 1, M, 1].
        bias: float32 [G, 1, M, 1].
        inputs: float32 [P, G, A * T].
        width: K.
        batch: (tiles, places of a tile) that are looked at at a time.
    """

    weight: FloatArray
    scale: FloatArray
    bias: FloatArray
    inputs: FloatArray
    width: int
    batch: tuple[int, int]

    @classmethod
    def of(
        cls, weight: FloatArray, scale: FloatArray, bias: FloatArray, inputs: FloatArray
    ) -> Tiles:
        """Of weight [G, M, K], scale [G, M, 1], bias [G, M] and inputs [P, G, K]."""
        groups, rows, width = weight.shape
        count, size = cut(width)
        more = count * size - width
        wide = np.pad(weight, ((0, 0), (0, 0), (0, more)))
        tiled = wide.reshape(groups, rows, count, size).transpose(0, 2, 1, 3)
        return cls(
            weight=np.ascontiguousarray(tiled, np.float32),
            scale=np.ascontiguousarray(scale[:, None], np.float32),
            bias=np.ascontiguousarray(bias[:, None, :, None], np.float32),
            inputs=np.pad(inputs, ((0, 0), (0, 0), (0, more))),
            width=width,
            batch=cut(min(len(inputs), _MOST), whole=True),
        )

    def wanted(self, targets: FloatArray, activation: Activation) -> FloatArray:
        """Targets [P, G, M] behind the activation, [G, M, P]."""
        return np.ascontiguousarray(activation.value(targets.transpose(1, 2, 0)[:, None])[:, 0])

    def draw(self, source: np.random.Generator) -> NDArray[np.int64]:
        """The places of one iteration, each at most once; all of them where they are few."""
        count = self.batch[0] * self.batch[1]
        if count == len(self.inputs):
            return np.arange(count)
        return source.choice(len(self.inputs), count, replace=False, shuffle=False)

    def at(self, places: NDArray[np.int64]) -> FloatArray:
        """The inputs there, [B, T, G, A, T']."""
        groups, count, _, size = self.weight.shape
        return self.inputs[places].reshape(*self.batch, groups, count, size)

    def among(self, wanted: FloatArray, places: NDArray[np.int64]) -> FloatArray:
        """[G, M, P] -> those values, laid out as `outputs`."""
        groups, rows, _ = wanted.shape
        return wanted[:, :, places].reshape(groups, rows, *self.batch).transpose(0, 2, 1, 3)

    def outputs(self, weight: FloatArray, inputs: FloatArray) -> FloatArray:
        """Weight [G, A, M, T] on `at`'s inputs, with the bias, [G, B, M, T]."""
        right = inputs.transpose(2, 0, 3, 4, 1)  # [G, B, A, T', T]
        return np.asarray((weight[:, None] @ right).sum(axis=2) + self.bias)

    def back(self, slope: FloatArray, inputs: FloatArray) -> FloatArray:
        """Slopes by the outputs [G, B, M, T] -> by the weight [G, A, M, T']."""
        right = inputs.transpose(2, 0, 3, 1, 4)  # [G, B, A, T, T']
        return np.asarray((slope[:, :, None] @ right).sum(axis=1))

    def rows(self, tiled: FloatArray) -> FloatArray:
        """[G, A, M, T] -> [G, M, K]."""
        groups, count, rows, size = tiled.shape
        wide = tiled.transpose(0, 2, 1, 3).reshape(groups, rows, count * size)
        return wide[:, :, : self.width]


def cut(count: int, *, whole: bool = False) -> tuple[int, int]:
    """(tiles, their size) for a count, each as large as the others.

    With `whole` no tile reaches beyond the count, so that a few at its end may be left out.
    """
    tiles = max(-(-count // TILE), 1)
    return tiles, max(count // tiles if whole else -(-count // tiles), 1)
