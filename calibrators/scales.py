"""Clip ranges of tensors: `Scale` and `Scales`, the interface between searches and writers.

A `Scale` holds clip ranges in real units, independent of the target. The writer of a target turns
them into stored integers with a grid of `calibrators.grids`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calibrators.errors import CalibrationError
from calibrators.grids import Grid, affine_params, symmetric_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The clip range of one activation tensor, in real units.

    Attributes:
        lo, hi: clip range for an affine grid; lo <= hi, both finite.
        amax: threshold for a symmetric grid, >= 0; 0 for a tensor that is always zero.
        observed_min, observed_max: extremes of the data, unclipped.
        method: name of the search.
    """

    lo: float
    hi: float
    amax: float
    observed_min: float
    observed_max: float
    method: str

    def __post_init__(self) -> None:
        numbers = (self.lo, self.hi, self.amax, self.observed_min, self.observed_max)
        are_finite = all(math.isfinite(number) for number in numbers)
        if not are_finite or self.lo > self.hi or self.amax < 0:
            raise CalibrationError(
                "a scale needs finite lo <= hi and amax >= 0,"
                f" got lo={self.lo} hi={self.hi} amax={self.amax}"
            )

    @property
    def symmetric(self) -> np.float32:
        """Float32 scale of the symmetric int8 grid: amax / 127."""
        return symmetric_scale(self.amax)

    def on(self, grid: Grid) -> tuple[np.float32, int]:
        """Return (scale, zero_point) of this range on `grid`."""
        if grid.symmetric:
            return symmetric_scale(self.amax, grid), 0
        return affine_params(self.lo, self.hi, grid)


# Tensor name -> `Scale`, in the model's order
Scales = Mapping[str, Scale]
