"""Squared errors of many clip ranges at once, a few levels each instead of every bin.

A value c goes to the nearest of the levels 0, s, 2s, ... of its side of 0: past each of the middles
(q + 1/2) s that it lies beyond, and each of these takes 2 s (c - middle) from c^2::

    (c - level)^2 = c^2 - 2 s [ (c - s/2)+ + (c - 3s/2)+ + ... ]        to the last level

    G(b) = sum of counts * (c - b)+     falls from bin centre to bin centre in straight lines, so
                                        that two sums of the counts give it anywhere

A range of 255 steps costs 255 looks into G. What is left to rounding is about 1e-15 of the values'
own squares, so ranges that are closer than `TOLERANCE` of it are left to whoever adds up bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-11  # of the sum of squares
_TOGETHER = 40  # ranges whose levels stay in a core's cache


@dataclass(frozen=True, slots=True)
class Ramps:
    """G of the values on both sides of 0, for one tensor.

    Attributes:
        heights: [2 * (B + 1)] G at -1/2, 1/2, 3/2, ... bins; first of the values above 0.
        slopes: [2 * (B + 1)] how steeply it falls from there to the next.
        squares: sum of counts * c^2.
    """

    heights: NDArray[np.float64]
    slopes: NDArray[np.float64]
    squares: float

    @classmethod
    def of(cls, above: NDArray[np.int64], below: NDArray[np.int64]) -> Ramps:
        """Args: above, below: [B] counts of bins whose centres are 1/2, 3/2, ... bins from 0."""
        both = np.zeros((2, above.size + 1), np.int64)
        both[0, :-1], both[1, :-1] = above, below
        slopes = _from_behind(both)
        centres = np.arange(above.size) + 0.5
        squares = float(((above + below) * (centres * centres)).sum())
        heights = _from_behind(slopes).ravel().astype(np.float64)
        return cls(heights, slopes.ravel().astype(np.float64), squares)

    def errors(
        self,
        steps: NDArray[np.float64],
        lowest: NDArray[np.float64],
        highest: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """[K] summed squared errors, in squares of a bin.

        Args:
            steps: [K] widths of a step, in bins.
            lowest: [K] levels at the lower end, whole numbers up to 0.
            highest: [K] levels at the upper end, whole numbers from 0 on.
        """
        if not self.slopes[self.slopes.size // 2]:  # nothing lies below 0, whatever the level
            lowest = np.zeros_like(lowest)
        won = [
            self._won(steps[at : at + _TOGETHER], lowest[at : at + _TOGETHER], highest[at:])
            for at in range(0, steps.size, _TOGETHER)
        ]
        return np.asarray(self.squares - 2 * steps * np.concatenate(won), np.float64)

    def _won(
        self,
        steps: NDArray[np.float64],
        lowest: NDArray[np.float64],
        highest: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """[k] sums of G over all middles of a range."""
        side = self.heights.size // 2
        levels = (highest[: steps.size] - lowest)[:, None]
        place = np.arange(int(levels.max(initial=0)))
        middle = (place + (lowest + 0.5)[:, None]) * steps[:, None]
        far = np.abs(middle) + 0.5
        np.minimum(far, side - 1, out=far)  # beyond the last bin G is 0
        knot = far.astype(np.int64)
        far -= knot
        knot[middle < 0] += side
        won = self.heights[knot]
        won -= self.slopes[knot] * far
        won *= place < levels
        return np.asarray(won.sum(axis=1), np.float64)


def _from_behind(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, N] -> of each place, the sum of the row from there on."""
    return np.asarray(np.cumsum(rows[:, ::-1], axis=1)[:, ::-1])
