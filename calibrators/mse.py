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
only clipping counts. Source: R. Banner et al., "Post training 4-bit quantization of convolutional
networks", arXiv:1810.05723, section 2; the search is a plain scan.

**Fast squared error** (`Ramps`), for integer grids of at most 8 bits: it finds the ranges that may
be best, and only among candidates within `TOLERANCE` are errors summed over bins. A value c is
rounded to the nearest of the levels 0, s, 2s, ... on its side of 0. Each midpoint (q + 1/2) s that
it lies beyond takes 2 s (c - midpoint) from c^2::

    (c - level)^2 = c^2 - 2 s [ (c - s/2)+ + (c - 3s/2)+ + ... ]        to the last level

    G(b) = sum of counts * (c - b)+     is linear between bin centres, so that two cumulative sums
                                        of the counts give it anywhere

A range of 255 steps costs 255 evaluations of G. The rounding error is about 1e-15 of the sum of
squares.

**Lp** minimizes the sum of |x - stored x|^p with p > 2. The squared error trades the few extreme
values for fine steps. In a detector these few are the detections, rare in the calibration images
but decisive in others. A greater p weighs clipped values more, and p = infinity clips nothing::

    p    2 (mse)        3            inf (minmax)
         fine steps  <------>  nothing is clipped

Source: the norm of Y. Nahshan et al., "Loss Aware Post-training Quantization", arXiv:1911.07190,
section 4.1; the search is that of `calibrators.mse`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import INT8, UINT8, Grid, round_to_grid
from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale

FloatArray = NDArray[np.float64]

TOLERANCE = 1e-11  # of the sum of squares; closer candidates are summed over bins
_RAMPS_TOGETHER = 40  # ranges per block, whose levels fit in a core's cache
_RATIOS = np.concatenate([np.arange(100, 20, -1), np.arange(20, 0, -0.5)]) / 100
_TOGETHER = 1 << 15  # bins per block of ranges, which fit in a core's cache
_QUICK_BITS = 8  # with these a step is a thousand times the float32 rounding error of the end
_QUICK_TOLERANCE = 1e-3  # of the least error, per power: many times the float32 error of a sum
_QUICK_LEAST = 1e-30  # smaller errors are near the float32 minimum


@dataclass(frozen=True, slots=True)
class Ramps:
    """G on both sides of 0, for one tensor."""

    heights: FloatArray  # [2 * (B + 1)] G at -1/2, 1/2, 3/2, ... bins; values above 0 first
    slopes: FloatArray  # [2 * (B + 1)] decrease of G from there to the next bin
    squares: float  # sum of counts * c^2

    @classmethod
    def of(cls, above: NDArray[np.int64], below: NDArray[np.int64]) -> Ramps:
        """Args: above, below: [B] counts of bins whose centres are 1/2, 3/2, ... bins from 0."""
        both = np.zeros((2, above.size + 1), np.int64)
        both[0, :-1], both[1, :-1] = above, below
        slopes = _reverse_cumsum(both)
        centres = np.arange(above.size) + 0.5
        squares = float(((above + below) * (centres * centres)).sum())
        heights = _reverse_cumsum(slopes).ravel().astype(np.float64)
        return cls(heights, slopes.ravel().astype(np.float64), squares)

    def errors(self, steps: FloatArray, lowest: FloatArray, highest: FloatArray) -> FloatArray:
        """Return the summed squared errors of K ranges, [K], in squared bins.

        Args:
            steps: [K] step widths, in bins.
            lowest: [K] levels at the lower end, integers <= 0.
            highest: [K] levels at the upper end, integers >= 0.
        """
        if not self.slopes[self.slopes.size // 2]:  # no value is below 0
            lowest = np.zeros_like(lowest)
        sums = [
            self._sums(
                steps[at : at + _RAMPS_TOGETHER], lowest[at : at + _RAMPS_TOGETHER], highest[at:]
            )
            for at in range(0, steps.size, _RAMPS_TOGETHER)
        ]
        return np.asarray(self.squares - 2 * steps * np.concatenate(sums), np.float64)

    def _sums(self, steps: FloatArray, lowest: FloatArray, highest: FloatArray) -> FloatArray:
        """Return the sums of G over all midpoints of each range, [k]."""
        side = self.heights.size // 2
        levels = (highest[: steps.size] - lowest)[:, None]
        index = np.arange(int(levels.max(initial=0)))
        midpoint = (index + (lowest + 0.5)[:, None]) * steps[:, None]
        position = np.abs(midpoint) + 0.5
        np.minimum(position, side - 1, out=position)  # beyond the last bin G is 0
        knot = position.astype(np.int64)
        position -= knot
        knot[midpoint < 0] += side
        g = self.heights[knot]
        g -= self.slopes[knot] * position
        g *= index < levels
        return np.asarray(g.sum(axis=1), np.float64)


def _reverse_cumsum(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums from each element to the end of its row, [2, N]."""
    return np.asarray(np.cumsum(rows[:, ::-1], axis=1)[:, ::-1])


def mse(histogram: Histogram, *, symmetric: Grid = INT8, affine: Grid = UINT8) -> Scale:
    """Return the ranges of a tensor with the least squared quantization error."""
    return lp(histogram, power=2.0, symmetric=symmetric, affine=affine, method="mse")


def lp(
    histogram: Histogram,
    *,
    power: float,
    symmetric: Grid = INT8,
    affine: Grid = UINT8,
    method: str = "",
) -> Scale:
    """Return the ranges of a tensor with the least sum of |error|^power.

    Args:
        histogram: statistics of the tensor.
        power: 2 for the squared error; the greater, the more a clipped value weighs.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
        method: name of the method, for the scale; "" for that of the power.
    """
    amax = _symmetric(histogram, symmetric, power)
    low, high = _affine(histogram, affine, power)
    return Scale(
        lo=low,
        hi=high,
        amax=amax,
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method=method or f"lp-{power:g}",
    )


def range_errors(
    centres: FloatArray,
    counts: NDArray[np.int64],
    lows: FloatArray,
    highs: FloatArray,
    grid: Grid,
    power: float = 2.0,
) -> FloatArray:
    """Return the sums of |error|^power, [K], of [B] bin centres on `grid` for each of [K] ranges.

    0 is assumed to be a stored value, as on every grid.
    """
    some = max(_TOGETHER // max(centres.size, 1), 1)
    parts = [
        _errors(centres, counts, lows[at : at + some], highs[at : at + some], grid, power)
        for at in range(0, lows.size, some)
    ]
    return np.concatenate(parts)


def _errors(
    centres: FloatArray,
    counts: NDArray[np.int64],
    lows: FloatArray,
    highs: FloatArray,
    grid: Grid,
    power: float,
) -> FloatArray:
    scale = _steps(lows, highs, grid)[:, None]
    error = np.clip(centres[None, :], lows[:, None], highs[:, None])
    error = round_to_grid(error / scale, grid) * scale
    error -= centres
    weight = error * error if power == 2 else np.abs(error) ** power
    weight *= counts
    # numpy's pairwise sum has the same order everywhere, unlike a matrix product
    return np.asarray(weight.sum(axis=1), np.float64)


def _steps(lows: FloatArray, highs: FloatArray, grid: Grid) -> FloatArray:
    scale = (highs - lows) / grid.steps
    return np.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bins:
    """Input of a range search: the occupied bins, the grid and the power of the error."""

    # centres, counts: [B] centres in real units and counts of the occupied bins
    centres: FloatArray
    counts: NDArray[np.int64]
    grid: Grid
    power: float
    ramps: Ramps | None  # the bins for the fast squared error; None for another grid or power
    width: float  # width of a bin, in real units

    @classmethod
    def of(
        cls,
        histogram: Histogram,
        centres: FloatArray,
        counts: NDArray[np.int64],
        grid: Grid,
        power: float,
    ) -> _Bins:
        """Return the occupied bins, without the one around 0, which clipping does not affect.

        `counts`: [BINS] of |x|, or [2 * BINS - 1] of x.
        """
        inside = (counts > 0) & (np.abs(centres) > 0)
        ramps = None
        if power == 2 and grid.kind == "integer" and grid.bits <= _QUICK_BITS:
            above, below = counts[-BINS:].copy(), np.zeros(BINS, np.int64)
            if counts.size > BINS:
                below[1:] = counts[BINS - 2 :: -1]
                above[0] = 0
            ramps = Ramps.of(above, below)
        return cls(
            centres=centres[inside],
            counts=counts[inside],
            grid=grid,
            power=power,
            ramps=ramps,
            width=histogram.full_range / BINS,
        )

    def best(self, lows: FloatArray, highs: FloatArray) -> int:
        """Return the index of the [K] range with the least error; the first on ties."""
        if (lows == lows[0]).all() and (highs == highs[0]).all():
            return 0
        near = self._near(lows, highs)
        if near.size == 1:
            return int(near[0])
        tried = range_errors(
            self.centres, self.counts, lows[near], highs[near], self.grid, self.power
        )
        return int(near[np.argmin(tried)])

    def _near(self, lows: FloatArray, highs: FloatArray) -> NDArray[np.intp]:
        """Return the indices of the ranges that may be best."""
        if self.ramps is None:
            return self._near_in_float32(lows, highs)
        steps = _steps(lows, highs, self.grid)
        lowest, highest = (np.rint(ends / steps) for ends in (lows, highs))
        sums = self.ramps.errors(steps / self.width, lowest, highest)
        return np.flatnonzero(sums <= sums.min() + TOLERANCE * self.ramps.squares)

    def _near_in_float32(self, lows: FloatArray, highs: FloatArray) -> NDArray[np.intp]:
        """Return the indices of the ranges with nearly the least error in float32.

        Ranges must shrink with their index. For float and wide integer grids return all indices.
        """
        if self.grid.kind != "integer" or self.grid.bits > _QUICK_BITS:
            return np.arange(lows.size)
        near = 1 + _QUICK_TOLERANCE * self.power
        unit = max(float(highs.max()), -float(lows.min())) or 1.0  # powers must fit float32
        centres = (self.centres / unit).astype(np.float32)
        counts = (self.counts / self.counts.sum()).astype(np.float32)
        steps = _steps(lows, highs, self.grid)
        levels = [np.rint(ends / steps).astype(np.float32) for ends in (lows, highs)]
        outer = [(lows - steps / 2) / unit, (highs + steps / 2) / unit]
        widths = (steps / unit).astype(np.float32)
        some = max(_TOGETHER // max(centres.size, 1), 1)
        blocks: list[FloatArray] = []
        least = np.inf
        for at in range(0, lows.size, some):
            if _clipped(centres, counts, outer[0][at], outer[1][at], self.power) > near * least:
                break  # shorter ranges clip even more
            width, lowest, highest = (part[at : at + some] for part in (widths, *levels))
            blocks.append(_quick_errors(centres, counts, width, lowest, highest, self.power))
            least = min(least, float(blocks[-1].min()))
        sums = np.concatenate(blocks)
        if least < _QUICK_LEAST:  # high powers of small errors lose precision
            return np.arange(lows.size)
        return np.flatnonzero(sums <= near * least)


def _quick_errors(
    centres: NDArray[np.float32],
    counts: NDArray[np.float32],
    steps: NDArray[np.float32],
    lowest: NDArray[np.float32],
    highest: NDArray[np.float32],
    power: float,
) -> FloatArray:
    """Return `_errors` in float32, with given levels at both ends of the ranges."""
    error = centres[None, :] * (1 / steps)[:, None]
    np.rint(error, out=error)
    np.clip(error, lowest[:, None], highest[:, None], out=error)
    error *= steps[:, None]
    error -= centres
    np.abs(error, out=error)
    if power == 3:
        weight = error * error
        weight *= error
    else:
        weight = np.power(error, np.float32(power), out=error)
    weight *= counts
    return np.asarray(weight.sum(axis=1, dtype=np.float64))


def _clipped(
    centres: NDArray[np.float32], counts: NDArray[np.float32], low: float, high: float, power: float
) -> float:
    """Return the error of the values beyond two bounds; `centres` ascend."""
    below, above = np.searchsorted(centres, (low, high))
    beyond = np.concatenate([low - centres[:below], centres[above:] - high])
    weight = np.power(beyond, power)
    weight *= np.concatenate([counts[:below], counts[above:]])
    return float(weight.sum(dtype=np.float64))


def _symmetric(histogram: Histogram, grid: Grid, power: float) -> float:
    counts = histogram.magnitudes(BINS)
    centres = (np.arange(BINS) + 0.5) * histogram.full_range / BINS
    bins = _Bins.of(histogram, centres, counts, grid, power)
    highs = histogram.amax * _RATIOS
    return float(highs[bins.best(-highs, highs)]) if bins.counts.size else histogram.amax


def _affine(histogram: Histogram, grid: Grid, power: float) -> tuple[float, float]:
    edges = histogram.edges()
    bins = _Bins.of(histogram, (edges[:-1] + edges[1:]) / 2, histogram.signed(), grid, power)
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    if not bins.counts.size:
        return low, high
    lows, highs = low * _RATIOS, high * _RATIOS
    known: dict[tuple[str, float], float] = {}  # the second round often repeats the first
    for side in ("high", "low", "high", "low") if high >= -low else ("low", "high") * 2:
        other, ends = (low, highs) if side == "high" else (high, lows)
        if (side, other) not in known:
            fixed = np.full(_RATIOS.size, other)
            best = bins.best(fixed, ends) if side == "high" else bins.best(ends, fixed)
            known[side, other] = float(ends[best])
        if side == "high":
            high = known[side, other]
        else:
            low = known[side, other]
    return low, high
