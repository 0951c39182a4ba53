"""MSE and Lp calibration: the clip range with the least quantization error.

Symmetric: thresholds amax * r are tried for a falling r. Affine: first the end further from 0 is
reduced, then the other end, each with the best other end, twice::

    error |*                    .
          | *                 .     r = 1: no clipping, wide steps
          |   *            .        r small: fine steps, the tail is clipped
          |      * * . *
          +------------------------ r

The error is that of the histogram: values are at the centre of their bin, and clipped to the range.
A bin is at least 8 times finer than an int8 step; 16-bit steps are finer than the bins, and then
only clipping counts. Errors are computed in float32 first, and in float64 only of the ranges that
may be best. Source: R. Banner et al., "Post training 4-bit quantization of convolutional
networks", arXiv:1810.05723, section 2; the search is a plain scan.

**Lp** minimizes the sum of |x - stored x|^p with p > 2. The squared error trades the few extreme
values for fine steps. In a detector these few are the detections, rare in the calibration images
but decisive in others. A greater p weighs clipped values more, and p = infinity clips nothing::

    p    2 (mse)        3            inf (minmax)
         fine steps  <------>  nothing is clipped

Source: the norm of Y. Nahshan et al., "Loss Aware Post-training Quantization", arXiv:1911.07190,
section 4.1; the search is that of `calibrators.mse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import (
    INT8,
    UINT8,
    Float32Array,
    Float64Array,
    Grid,
    Int64Array,
    RealArray,
    round_to_grid,
)
from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale

# ends that are tried, as shares of the extreme: 1 to 0.2 by 0.01, then to 0.005 by 0.005
_RATIOS = np.concatenate([np.arange(100, 20, -1), np.arange(20, 0, -0.5)]) / 100
_BINS_PER_BLOCK = 1 << 15  # bins per block of ranges, which fit in a core's cache
# with 8 bits a step is still a thousand times the float32 rounding error of the range's end
_MAX_FLOAT32_BITS = 8
_FLOAT32_TOLERANCE = 1e-3  # of the least error, per power: many times the float32 error of a sum
_MIN_FLOAT32_ERROR = 1e-30  # smaller errors are near the float32 minimum


def _blocks(range_count: int, bin_count: int) -> Iterator[slice]:
    """Yield slices that divide ranges into blocks whose bins fit in a core's cache."""
    size = max(_BINS_PER_BLOCK // max(bin_count, 1), 1)
    for start in range(0, range_count, size):
        yield slice(start, start + size)


def mse(histogram: Histogram, *, symmetric: Grid = INT8, affine: Grid = UINT8) -> Scale:
    """Return the ranges of a tensor with the least squared quantization error."""
    scale = lp(histogram, power=2.0, symmetric=symmetric, affine=affine)
    return replace(scale, method="mse")


def lp(
    histogram: Histogram,
    *,
    power: float,
    symmetric: Grid = INT8,
    affine: Grid = UINT8,
) -> Scale:
    """Return the ranges of a tensor with the least sum of |error|^power.

    Args:
        histogram: statistics of the tensor.
        power: 2 for the squared error; the greater, the more a clipped value weighs.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
    """
    amax = _symmetric(histogram, symmetric, power)
    low, high = _affine(histogram, affine, power)
    return Scale(
        lo=low,
        hi=high,
        amax=amax,
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method=f"lp-{power:g}",
    )


def range_errors(
    centres: Float64Array,
    counts: Int64Array,
    lows: Float64Array,
    highs: Float64Array,
    grid: Grid,
    power: float = 2.0,
) -> Float64Array:
    """Return the sum of |error|^power over a histogram's values for each of K ranges, [K].

    The error of a value is what clipping it to the range and rounding it to the grid changes.
    Every grid stores 0, so the stored values are multiples of a range's step.

    Args:
        centres: [B] centres of the bins, in real units.
        counts: [B] number of values in each.
        lows: [K] lower end of each range.
        highs: [K] upper end of each range.
        grid: values that are stored.
        power: 2 for the squared error.
    """
    step_widths, lowest, highest = _levels(lows, highs, grid)
    errors = []
    for block in _blocks(lows.size, centres.size):
        block_errors = _block_errors(
            centres, counts, step_widths[block], lowest[block], highest[block], grid, power
        )
        errors.append(block_errors)
    return np.concatenate(errors)


def _block_errors(
    centres: RealArray,
    counts: NDArray[Any],
    step_widths: RealArray,
    lowest: RealArray,
    highest: RealArray,
    grid: Grid,
    power: float,
) -> Float64Array:
    """Return the sum of |error|^power over a histogram's values for each of K ranges, [K].

    All [K, B] errors are in memory at once, so K is small. They are computed in float32 if all
    arrays are, else in float64.

    Args:
        centres: [B] centres of the bins.
        counts: [B] number of values in each.
        step_widths: [K] width of a step of each range, in the unit of the centres.
        lowest: [K] lowest stored value of each range, as a number of steps.
        highest: [K] highest stored value, as a number of steps.
        grid: values that are stored.
        power: power of the errors.
    """
    # one array, changed in place: the stored values of the centres, as numbers of steps; then these
    # in the unit of the centres; then their differences from the centres
    errors = round_to_grid(centres[None, :] / step_widths[:, None], grid)
    np.maximum(errors, lowest[:, None], out=errors)  # np.clip takes three times as long
    np.minimum(errors, highest[:, None], out=errors)
    errors *= step_widths[:, None]
    errors -= centres
    if power in (2, 3):  # products are much faster than powers
        costs = errors * errors
        if power == 3:
            costs *= np.abs(errors)
    else:
        costs = np.abs(errors) ** power
    costs *= counts
    # numpy's pairwise sum has the same order everywhere, unlike a matrix product
    return np.asarray(costs.sum(axis=1, dtype=np.float64), np.float64)


def _levels(
    lows: Float64Array, highs: Float64Array, grid: Grid
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return (step widths, lowest stored values, highest stored values) of the ranges, [K] each.

    A stored value is a number of steps. An empty range has the step width 1.
    """
    step_widths = (highs - lows) / grid.steps
    step_widths = np.where(step_widths > 0, step_widths, 1.0)
    lowest = round_to_grid(lows / step_widths, grid)
    highest = round_to_grid(highs / step_widths, grid)
    return step_widths, lowest, highest


class _Bins:
    """Input of a range search: the occupied bins, the grid and the power of the error.

    Attributes:
        centres, counts: [B] centres in real units and counts of the occupied bins, without the bin
            around 0, which clipping does not affect.
    """

    def __init__(self, centres: Float64Array, counts: Int64Array, grid: Grid, power: float) -> None:
        """Select the bins that count.

        Args:
            centres: centres of all bins, in real units.
            counts: number of values in each.
            grid: grid that ranges are searched for.
            power: power of the errors.
        """
        is_used = (counts > 0) & (np.abs(centres) > 0)
        self.centres = centres[is_used]
        self.counts = counts[is_used]
        self.grid = grid
        self.power = power

    def index_of_best(self, lows: Float64Array, highs: Float64Array) -> int:
        """Return the index of the [K] range with the least error; the first on ties."""
        if (lows == lows[0]).all() and (highs == highs[0]).all():  # all ranges are the same
            return 0
        candidates = self._candidates(lows, highs)
        lows = lows[candidates]
        highs = highs[candidates]
        errors = range_errors(self.centres, self.counts, lows, highs, self.grid, self.power)
        return int(candidates[np.argmin(errors)])

    def _candidates(self, lows: Float64Array, highs: Float64Array) -> NDArray[np.intp]:
        """Return the indices of the ranges that may have the least error.

        These are the ranges whose error, computed in float32, is nearly the least. Where float32 is
        too coarse, all indices are returned: for float grids, wide integer grids, and errors near
        0. Each range must lie within the one before: so ranges that clip far too much are the last.

        Args:
            lows: [K] lower ends.
            highs: [K] upper ends.
        """
        all_indices = np.arange(lows.size)
        fits_float32 = self.grid.kind == "integer" and self.grid.bits <= _MAX_FLOAT32_BITS
        if not fits_float32:
            return all_indices
        # an error sums |x - rounded x| ** power, of which float32 loses more if the power is higher
        tolerance = 1 + _FLOAT32_TOLERANCE * self.power
        # may be shorter than `lows`: ranges at the end that clip too much to be best have no error
        errors = self._float32_errors(lows, highs, tolerance)
        min_error = errors.min()
        if min_error < _MIN_FLOAT32_ERROR:  # high powers of small errors lose precision
            return all_indices
        return np.flatnonzero(errors <= tolerance * min_error)

    def _float32_errors(
        self, lows: Float64Array, highs: Float64Array, tolerance: float
    ) -> Float64Array:
        """Return the errors of the ranges, computed in float32; those of the last may be left out.

        Each range lies within the one before, and so clips more. Once the clipped values by
        themselves cost more than `tolerance` times the least error, no later range can be best.

        Args:
            lows: [K] lower ends.
            highs: [K] upper ends.
            tolerance: a factor a little over 1.
        """
        # all lengths in units of the longest end, so that their powers fit float32; the lowest and
        # highest values are numbers of steps, which have no unit
        unit = max(highs.max(), -lows.min()) or 1.0
        centres = (self.centres / unit).astype(np.float32)
        counts = (self.counts / self.counts.sum()).astype(np.float32)

        step_widths, lowest, highest = _levels(lows, highs, self.grid)
        step_widths32 = (step_widths / unit).astype(np.float32)
        lowest32 = lowest.astype(np.float32)
        highest32 = highest.astype(np.float32)
        # values outside these bounds are clipped by more than half a step, the most that rounding
        # costs
        lower_bounds = (lows - step_widths / 2) / unit
        upper_bounds = (highs + step_widths / 2) / unit

        block_errors = []
        min_error = np.inf
        for block in _blocks(lows.size, centres.size):
            # the block's first range contains the others, so that it clips the least
            clipping_error = _clipping_error(
                centres, counts, lower_bounds[block.start], upper_bounds[block.start], self.power
            )
            if clipping_error > tolerance * min_error:
                break
            errors = _block_errors(
                centres,
                counts,
                step_widths32[block],
                lowest32[block],
                highest32[block],
                self.grid,
                self.power,
            )
            block_errors.append(errors)
            min_error = min(min_error, errors.min())
        return np.concatenate(block_errors)


def _clipping_error(
    centres: Float32Array, counts: Float32Array, low: float, high: float, power: float
) -> float:
    """Return the error of the values beyond two bounds; `centres` ascend."""
    below, above = np.searchsorted(centres, (low, high))
    distances = np.concatenate([low - centres[:below], centres[above:] - high])
    costs = np.power(distances, power)
    costs *= np.concatenate([counts[:below], counts[above:]])
    return float(costs.sum(dtype=np.float64))


def _symmetric(histogram: Histogram, grid: Grid, power: float) -> float:
    """Return the threshold of |x| with the least error; the largest |x| if all values are 0."""
    counts = histogram.magnitudes(BINS)
    centres = (np.arange(BINS) + 0.5) * histogram.full_range / BINS
    bins = _Bins(centres, counts, grid, power)
    if not bins.counts.size:  # all values are in the bin around 0
        return histogram.amax
    highs = histogram.amax * _RATIOS
    return float(highs[bins.index_of_best(-highs, highs)])


def _affine(histogram: Histogram, grid: Grid, power: float) -> tuple[float, float]:
    """Return the range (low, high) with the least error on an affine grid.

    Candidates for an end are shares (`_RATIOS`, 1 to 0.005) of the extreme of the data on its side
    of 0. Each end is searched twice, with the other one fixed.

    Args:
        histogram: statistics of the tensor.
        grid: the affine grid.
        power: exponent of the error, 2 for the squared error.
    """
    edges = histogram.edges()
    centres = (edges[:-1] + edges[1:]) / 2
    counts = histogram.signed()  # of the bins between the edges, negative ones first
    bins = _Bins(centres, counts, grid, power)
    low = min(histogram.minimum, 0.0)
    high = max(histogram.maximum, 0.0)
    if not bins.counts.size:  # all values are in the bin around 0
        return low, high
    lows = low * _RATIOS
    highs = high * _RATIOS

    @cache  # since the second search of an end often repeats the first
    def best_low(fixed_high: float) -> float:
        return float(lows[bins.index_of_best(lows, np.full(_RATIOS.size, fixed_high))])

    @cache
    def best_high(fixed_low: float) -> float:
        return float(highs[bins.index_of_best(np.full(_RATIOS.size, fixed_low), highs)])

    # the end further from 0 first, then the other one, twice
    ends = ("high", "low") if high >= -low else ("low", "high")
    for end in ends * 2:
        if end == "high":
            high = best_high(low)
        else:
            low = best_low(high)
    return low, high
