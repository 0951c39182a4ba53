"""MSE calibration: the clip range with the least squared error between x and its stored value.

Symmetric: thresholds amax * r are tried for a falling r. Affine: first the end that lies further
from 0 is lowered, then the other, each against the other's best, twice over::

    error |*                    .
          | *                 .     r = 1: no clipping, wide steps
          |   *            .        r small: fine steps, the tail is clipped
          |      * * . *
          +------------------------ r

The error comes from the histogram: a bin's values stand at its centre, and those beyond the clip
range at its end. A bin is at least 8 times finer than an int8 step; steps of 16 bits are finer
than the bins, and then clipping is all that the error sees.

That is what defines the range. Which ranges may be the best is found sooner where the error is
squared and the grid has integers of 8 bits or fewer (`calibrators.mse`), and only among those
that come so close that rounding could tell them apart are the bins added up.

Source: R. Banner et al., "Post training 4-bit quantization of convolutional networks",
arXiv:1810.05723, section 2; the search itself is a plain scan.

Squared errors of many clip ranges at once, a few levels each instead of every bin.

A value c goes to the nearest of the levels 0, s, 2s, ... of its side of 0: past each of the middles
(q + 1/2) s that it lies beyond, and each of these takes 2 s (c - middle) from c^2::

    (c - level)^2 = c^2 - 2 s [ (c - s/2)+ + (c - 3s/2)+ + ... ]        to the last level

    G(b) = sum of counts * (c - b)+     falls from bin centre to bin centre in straight lines, so
                                        that two sums of the counts give it anywhere

A range of 255 steps costs 255 looks into G. What is left to rounding is about 1e-15 of the values'
own squares, so ranges that are closer than `TOLERANCE` of it are left to whoever adds up bins.

Lp calibration: the clip range with the least sum of |x - stored x|^p, p greater than 2.

The squared error pays for a fine step with the few values that are far out. In a detector those
few are what it found: they are rare in the images that calibrate and decide in those that do not.
With a greater p a value weighs more the further it is clipped, and p to infinity keeps everything::

    p    2 (mse)        3            inf (minmax)
         fine steps  <------>  nothing is clipped

Source: the norm of Y. Nahshan et al., "Loss Aware Post-training Quantization", arXiv:1911.07190,
section 4.1; the search is that of `calibrators.mse`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import INT8, UINT8, Grid, rounded
from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale

TOLERANCE = 1e-11  # of the sum of squares
_RAMPS_TOGETHER = 40  # ranges whose levels stay in a core's cache


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
            self._won(
                steps[at : at + _RAMPS_TOGETHER], lowest[at : at + _RAMPS_TOGETHER], highest[at:]
            )
            for at in range(0, steps.size, _RAMPS_TOGETHER)
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


_RATIOS = np.concatenate([np.arange(100, 20, -1), np.arange(20, 0, -0.5)]) / 100
_TOGETHER = 1 << 15  # bins of several ranges that stay in a core's cache
_QUICK_BITS = 8  # a step of which is a thousand times what float32 leaves of the end
_QUICK_TOLERANCE = 1e-3  # of the least error, a power: many times what float32 leaves of a sum
_QUICK_LEAST = 1e-30  # less is near the end of float32


def mse(histogram: Histogram, *, symmetric: Grid = INT8, affine: Grid = UINT8) -> Scale:
    """Statistics of one tensor -> the ranges with the least squared quantization error.

    Args:
        histogram: statistics of the tensor.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
    """
    return least_error(histogram, power=2.0, symmetric=symmetric, affine=affine, method="mse")


def least_error(
    histogram: Histogram, *, power: float, symmetric: Grid, affine: Grid, method: str
) -> Scale:
    """The ranges with the least sum of |error| to a power.

    Args:
        histogram: statistics of the tensor.
        power: 2 is the squared error; the greater, the more a clipped value weighs.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
        method: what the scale says that chose it.
    """
    amax = _symmetric(histogram, symmetric, power)
    low, high = _affine(histogram, affine, power)
    return Scale(
        lo=low,
        hi=high,
        amax=amax,
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method=method,
    )


def errors(
    centres: NDArray[np.float64],
    counts: NDArray[np.int64],
    lows: NDArray[np.float64],
    highs: NDArray[np.float64],
    grid: Grid,
    power: float = 2.0,
) -> NDArray[np.float64]:
    """Summed error [K], to a power, of storing [B] bin centres on `grid` over each [K] range.

    Each range is taken to hold 0 at a stored value, as every grid has it.
    """
    some = max(_TOGETHER // max(centres.size, 1), 1)
    parts = [
        _errors(centres, counts, lows[at : at + some], highs[at : at + some], grid, power)
        for at in range(0, lows.size, some)
    ]
    return np.concatenate(parts)


def _errors(
    centres: NDArray[np.float64],
    counts: NDArray[np.int64],
    lows: NDArray[np.float64],
    highs: NDArray[np.float64],
    grid: Grid,
    power: float,
) -> NDArray[np.float64]:
    scale = _steps(lows, highs, grid)[:, None]
    error = np.clip(centres[None, :], lows[:, None], highs[:, None])
    error = rounded(error / scale, grid) * scale
    error -= centres
    weight = error * error if power == 2 else np.abs(error) ** power
    weight *= counts
    # numpy adds pairwise in one order everywhere, which a product of matrices does not
    return np.asarray(weight.sum(axis=1), np.float64)


def _steps(
    lows: NDArray[np.float64], highs: NDArray[np.float64], grid: Grid
) -> NDArray[np.float64]:
    scale = (highs - lows) / grid.steps
    return np.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bins:
    """What is searched: the bins that hold anything, a grid, and how errors weigh.

    Attributes:
        centres, counts: [B] of the bins that hold anything, in real units.
        ramps: the same for a quick look; None where the grid or the power has none.
        width: of a bin, in real units.
    """

    centres: NDArray[np.float64]
    counts: NDArray[np.int64]
    grid: Grid
    power: float
    ramps: Ramps | None
    width: float

    def best(self, lows: NDArray[np.float64], highs: NDArray[np.float64]) -> int:
        """Which of the [K] ranges has the least error; the first among equals."""
        if (lows == lows[0]).all() and (highs == highs[0]).all():
            return 0
        near = self._near(lows, highs)
        if near.size == 1:
            return int(near[0])
        tried = errors(self.centres, self.counts, lows[near], highs[near], self.grid, self.power)
        return int(near[np.argmin(tried)])

    def _near(self, lows: NDArray[np.float64], highs: NDArray[np.float64]) -> NDArray[np.intp]:
        """Those that may be the best."""
        if self.ramps is None:
            return self._near_in_float32(lows, highs)
        steps = _steps(lows, highs, self.grid)
        lowest, highest = (np.rint(ends / steps) for ends in (lows, highs))
        found = self.ramps.errors(steps / self.width, lowest, highest)
        return np.flatnonzero(found <= found.min() + TOLERANCE * self.ramps.squares)

    def _near_in_float32(
        self, lows: NDArray[np.float64], highs: NDArray[np.float64]
    ) -> NDArray[np.intp]:
        """Those whose error in half the digits is next to the least; all on a grid of floats.

        The ranges become shorter, one end or both.
        """
        if self.grid.kind != "integer" or self.grid.bits > _QUICK_BITS:
            return np.arange(lows.size)
        near = 1 + _QUICK_TOLERANCE * self.power
        unit = max(float(highs.max()), -float(lows.min())) or 1.0  # powers stay in float32's range
        centres = (self.centres / unit).astype(np.float32)
        counts = (self.counts / self.counts.sum()).astype(np.float32)
        steps = _steps(lows, highs, self.grid)
        levels = [np.rint(ends / steps).astype(np.float32) for ends in (lows, highs)]
        outer = [(lows - steps / 2) / unit, (highs + steps / 2) / unit]
        widths = (steps / unit).astype(np.float32)
        some = max(_TOGETHER // max(centres.size, 1), 1)
        found: list[NDArray[np.float64]] = []
        least = np.inf
        for at in range(0, lows.size, some):
            if _clipped(centres, counts, outer[0][at], outer[1][at], self.power) > near * least:
                break  # what a range clips, every shorter one does
            width, lowest, highest = (part[at : at + some] for part in (widths, *levels))
            found.append(_quick_errors(centres, counts, width, lowest, highest, self.power))
            least = min(least, float(found[-1].min()))
        sums = np.concatenate(found)
        if least < _QUICK_LEAST:  # a high power of little errors
            return np.arange(lows.size)
        return np.flatnonzero(sums <= near * least)


def _quick_errors(
    centres: NDArray[np.float32],
    counts: NDArray[np.float32],
    steps: NDArray[np.float32],
    lowest: NDArray[np.float32],
    highest: NDArray[np.float32],
    power: float,
) -> NDArray[np.float64]:
    """`_errors` in float32, but for the levels at both ends of the ranges, which are known."""
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
    centres: NDArray[np.float32],
    counts: NDArray[np.float32],
    low: float,
    high: float,
    power: float,
) -> float:
    """The error of values beyond two bounds alone; `centres` ascend."""
    below, above = np.searchsorted(centres, (low, high))
    beyond = np.concatenate([low - centres[:below], centres[above:] - high])
    weight = np.power(beyond, power)
    weight *= np.concatenate([counts[:below], counts[above:]])
    return float(weight.sum(dtype=np.float64))


def _symmetric(histogram: Histogram, grid: Grid, power: float) -> float:
    counts = histogram.magnitudes(BINS)
    centres, held = _occupied((np.arange(BINS) + 0.5) * histogram.full_range / BINS, counts)
    highs = histogram.amax * _RATIOS
    if not centres.size:
        return histogram.amax
    bins = _Bins(
        centres=centres,
        counts=held,
        grid=grid,
        power=power,
        ramps=Ramps.of(counts, np.zeros_like(counts)) if _quick(grid, power) else None,
        width=histogram.full_range / BINS,
    )
    return float(highs[bins.best(-highs, highs)])


def _affine(histogram: Histogram, grid: Grid, power: float) -> tuple[float, float]:
    edges, counts = histogram.edges(), histogram.signed()
    centres, held = _occupied((edges[:-1] + edges[1:]) / 2, counts)
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    if not centres.size:
        return low, high
    bins = _Bins(
        centres=centres,
        counts=held,
        grid=grid,
        power=power,
        ramps=_sides(counts) if _quick(grid, power) else None,
        width=histogram.full_range / BINS,
    )
    lows, highs = low * _RATIOS, high * _RATIOS
    known: dict[tuple[str, float], float] = {}  # the second time round, often of the same end
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


def _quick(grid: Grid, power: float) -> bool:
    return power == 2 and grid.kind == "integer" and grid.bits <= 8


def _sides(counts: NDArray[np.int64]) -> Ramps:
    """[2 * BINS - 1] counts -> both sides of 0, without the bin around it."""
    above, below = counts[BINS - 1 :].copy(), counts[BINS - 1 :: -1].copy()
    above[0] = below[0] = 0
    return Ramps.of(above, below)


def _occupied(
    centres: NDArray[np.float64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The bins that hold anything but the one around 0, whose values lose nothing to clipping."""
    inside = (counts > 0) & (np.abs(centres) > 0)
    return centres[inside], counts[inside]


def lp(
    histogram: Histogram, *, power: float, symmetric: Grid = INT8, affine: Grid = UINT8
) -> Scale:
    """Statistics of one tensor -> the ranges with the least error to this power.

    Args:
        histogram: statistics of the tensor.
        power: p, as `searches.LpParams` checks it.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
    """
    return least_error(
        histogram, power=power, symmetric=symmetric, affine=affine, method=f"lp-{power:g}"
    )
