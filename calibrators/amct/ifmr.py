"""IFMR: AMCT's activation search, the range of least MSE among 61 around a percentile range.

::

    loss |  *                          clip range of candidate i:
         |     *                    *    symmetric    [-ratio_i * M, ratio_i * M]
         |        *              *       with offset  [min,          ratio_i * max]
         |            *  *  *
         +--+--------------------+-->  the error counts the data that was clipped away
          0.70       ratio     1.30

`ifmr` is AMCT's form, which needs all the data at once. The data are sorted once; the loss of a
candidate is then a sum over the boundaries between its codes, from cumulative sums. Candidates
within rounding of the best are evaluated again in float32, term by term, so that the choice is
AMCT's.

`ifmr_streaming` needs constant memory: it searches a fine histogram. An int8 step covers at least
128 bins, and the mean of each bin is known, so that only the few bins crossed by a boundary between
codes make the losses differ.

Source: hicann/amct, graph_based custom_op/ifmr; measured on AMCT's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import (
    FLT_EPSILON,
    ascend_clip_range,
    ascend_denominator,
    ascend_guard,
    ascend_range,
    check_values,
)
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.histogram import range_for
from calibrators.statistics import Arrays

_MARGIN = 1e-4  # bound of the float32 rounding error of AMCT's loss
_SMALL = 4096  # with fewer values, every candidate is evaluated directly
_CHUNK = 1 << 16
_STEPS = 1 << 19  # largest total number of steps per block of candidates
_DENSE = 1 << 20  # up to this size a table by position is faster than sorting positions


Float64Array = NDArray[np.float64]
_STREAM_CHUNK = 1 << 18  # several values per bin, since each chunk adds all bins once
KEPT = 1 << 16  # largest number of values that streaming stores unbinned
FINE_BINS = 1 << 15  # bins per side of the streaming histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class IfmrParams:
    """Parameters of the search, with AMCT's defaults."""

    # max_percentile, min_percentile: share of the data inside the initial range, (0, 1]
    # (configurations allow (0.5, 1])
    max_percentile: float = 0.999999
    min_percentile: float = 0.999999
    # (start, end) of the ratios, 0 < start < end; the end is a candidate only by rounding, as with
    # the defaults
    search_range: tuple[float, float] = (0.7, 1.3)
    search_step: float = 0.01  # step between ratios, 0 < step <= end - start
    bits: int = 8  # 4, 8 or 16
    with_offset: bool = False  # whether the grid is affine, else symmetric

    def __post_init__(self) -> None:
        start, end = self.search_range
        percentiles = (self.max_percentile, self.min_percentile)
        if not all(0 < p <= 1 for p in percentiles):
            raise CalibrationError(f"IFMR percentiles must be in (0, 1], got {percentiles}")
        if not (0 < start < end < math.inf and 0 < self.search_step <= end - start):
            raise CalibrationError(
                "IFMR needs finite 0 < start < end and 0 < step <= end - start,"
                f" got search_range [{start}, {end}] and search_step {self.search_step}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendScale:
    """Search result of one activation, on the signed grid with added offset.

    Attributes:
        scale, offset: q = clip(rne(x / scale + offset)).
        clip_min, clip_max: range of the grid, in real units.
        candidate: index of the chosen range, from 0.
        losses: loss of every candidate; NaN if it was not needed, None if not stored.
    """

    scale: np.float32
    offset: int
    clip_min: float
    clip_max: float
    candidate: int
    losses: Float64Array | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Clip ranges and scales to try, float32 [K] each."""

    lo: Float32Array
    hi: Float32Array
    scale: Float32Array

    def part(self, start: int, end: int) -> Candidates:
        """Return the candidates start..end - 1."""
        return Candidates(self.lo[start:end], self.hi[start:end], self.scale[start:end])


def ifmr(x: NDArray[np.floating], params: IfmrParams | None = None) -> AscendScale:
    """Return scale and offset for all activations of a tensor, any shape, float32 or float16.

    Raises:
        CalibrationError: wrong dtype, empty, NaN or Inf, or a scale that is not finite.
    """
    params = params or IfmrParams()
    data = np.sort(check_values(x, "activation"), axis=None)
    lo = kth_value(data, params.min_percentile, smallest=True)
    hi = kth_value(data, params.max_percentile, smallest=False)
    candidates = candidates_of(np.float32(hi), np.float32(lo), params)
    # AMCT's float32 loss may overflow, underflow or be mostly rounding error
    extreme = max(abs(float(data[0])), abs(float(data[-1])))
    plain = extreme > 1e-12 and extreme * extreme * data.size < 1e37
    if data.size < _SMALL or params.bits > 8 or not plain:
        losses = np.array([loss32(data, candidates, i) for i in range(candidates.hi.size)])
    else:
        losses = _refined(data, candidates, _sorted_losses(data, candidates))
    return result_of(candidates, losses, lo, params)


def ratios(params: IfmrParams) -> Float32Array:
    """Return the ratios start + i * step, ceil((end - start) / step) of them, float32.

    torch.arange on AVX2 rounds the base of each run of eight to float32 before it adds the rest.
    This function does the same; otherwise one ratio in six would differ from AMCT's by an ulp.
    """
    start, end = params.search_range
    step = params.search_step
    index = np.arange(int(np.ceil((end - start) / step)))
    vector = index - index % 8
    base = (start + step * vector).astype(np.float32).astype(np.float64)
    runs = base + (index - vector) * step
    vectorized = index < index.size - index.size % 16
    return np.where(vectorized, runs, start + step * index).astype(np.float32)


def kth_value(data: Float32Array, percentile: float, *, smallest: bool) -> float:
    """Return the bound of `percentile` of the sorted data, moved to 0 if it lies beyond."""
    size = data.size
    k = 1 if 1 - percentile < FLT_EPSILON else max(size - int(percentile * size), 1)
    return min(0.0, float(data[k - 1])) if smallest else max(0.0, float(data[size - k]))


def candidates_of(hi: np.float32, lo: np.float32, params: IfmrParams) -> Candidates:
    """Return the candidate ranges around [lo, hi].

    Raises:
        CalibrationError: a scale is not finite.
    """
    with np.errstate(over="ignore"):
        if params.with_offset:
            tops = ratios(params) * hi
            scales = (tops - lo) / np.float32(2**params.bits - 1)
            bottoms = np.full_like(tops, lo)
        else:
            tops = ratios(params) * np.maximum(np.abs(hi), np.abs(lo))
            codes = ascend_denominator(np.asarray(hi), np.asarray(lo), params.bits)
            scales = tops / np.float32(codes)
            bottoms = -tops
    scales = ascend_guard(scales)
    if not (np.isfinite(scales) & np.isfinite(np.float32(1) / scales)).all():
        raise CalibrationError(
            f"an Ascend scale must be finite, but the range [{lo}, {hi}] overflows float32"
            " within the search; leave this layer in float"
        )
    return Candidates(bottoms, tops, scales)


def loss32(data: Float32Array, candidates: Candidates, i: int) -> np.float32:
    """Return AMCT's loss of one candidate: MSE against unclipped data, all in float32."""
    with np.errstate(over="ignore"):
        clipped = np.clip(data, candidates.lo[i], candidates.hi[i])
        error = np.rint(clipped / candidates.scale[i]) * candidates.scale[i] - data
        return np.float32(np.mean(error * error))


def _sorted_losses(data: Float32Array, candidates: Candidates) -> Float64Array:
    """Return the MSE of every candidate from sorted data, float64."""
    squares = total = 0.0
    for start in range(0, data.size, _CHUNK):
        chunk = data[start : start + _CHUNK].astype(np.float64)
        squares += float(np.einsum("i,i->", chunk, chunk))  # dot would use BLAS threads
        total += float(chunk.sum())

    def below(cuts: Float64Array) -> tuple[Float64Array, Float64Array]:
        under = np.searchsorted(data, cuts.astype(np.float32))
        marks, place = _distinct(under, data.size)
        parts = np.add.reduceat(data, marks[:-1], dtype=np.float64)
        sums = np.concatenate(([0.0], np.cumsum(parts)))
        return under.astype(np.float64), sums[place]

    return staircase_losses(below, float(data.size), total, squares, candidates)


def _distinct(under: NDArray[np.intp], size: int) -> tuple[NDArray[np.intp], NDArray[np.integer]]:
    """Return the sorted distinct positions of 0, `size` and `under`; and the index of `under`."""
    if size > _DENSE:
        marks = np.unique(np.concatenate(([0], under, [size])))
        return marks, np.searchsorted(marks, under)
    table = np.zeros(size + 1, np.int32)
    table[[0, size]] = table[under] = 1
    marks = np.flatnonzero(table)
    table[marks] = np.arange(marks.size)
    return marks, table[under]


def staircase_losses(
    below: Callable[[Float64Array], tuple[Float64Array, Float64Array]],
    count: float,
    total: float,
    squares: float,
    candidates: Candidates,
) -> Float64Array:
    """Return the mean over x of (s q(x) - x)^2 for every candidate, with q a staircase.

    Expanded, the mean needs only ``sum q x`` and ``sum q^2``, which grow by known amounts at each
    boundary of codes. `below` returns the number and the sum of the data below each boundary.
    """
    scale = candidates.scale.astype(np.float64)
    first = np.rint(candidates.lo / candidates.scale).astype(np.int64)
    last = np.rint(candidates.hi / candidates.scale).astype(np.int64)
    last = np.maximum(last, first + 1)  # an empty staircase gets one step above all its data
    steps = last - first
    at_once = max(_STEPS // int(steps.max()), 1)
    if steps.size > at_once:  # for 16 bits, a few candidates at a time, to bound memory
        parts = [candidates.part(k, k + at_once) for k in range(0, steps.size, at_once)]
        return np.concatenate([staircase_losses(below, count, total, squares, p) for p in parts])
    starts = np.concatenate(([0], np.cumsum(steps)[:-1]))
    code = (np.arange(steps.sum()) - np.repeat(starts - first, steps)).astype(np.float64)
    number, weight = below((code + 0.5) * np.repeat(scale, steps))
    sum_qx = last * total - np.add.reduceat(weight, starts)
    sum_qq = np.square(last.astype(np.float64)) * count
    sum_qq -= np.add.reduceat((2.0 * code + 1.0) * number, starts)
    losses: Float64Array = (squares - 2 * scale * sum_qx + scale * scale * sum_qq) / count
    return losses


def _refined(data: Float32Array, candidates: Candidates, losses: Float64Array) -> Float64Array:
    """Replace the losses within rounding of the best by AMCT's float32 values."""
    close = np.flatnonzero(losses <= losses.min() * (1 + _MARGIN) + 1e-30)
    if close.size < 2:
        return losses
    refined = losses.copy()
    refined[close] = [loss32(data, candidates, int(i)) for i in close]
    return refined


def result_of(
    candidates: Candidates, losses: Float64Array, lo: float, params: IfmrParams
) -> AscendScale:
    """Return scale, offset and clip range of the candidate with the least loss."""
    best = int(np.argmin(losses))
    scale = np.float32(candidates.scale[best])
    qmin, _ = ascend_range(params.bits)
    offset = qmin - int(np.rint(np.float32(lo) / scale)) if params.with_offset else 0
    clip_min, clip_max = ascend_clip_range(scale, offset, params.bits)
    return AscendScale(
        scale=scale,
        offset=offset,
        clip_min=clip_min,
        clip_max=clip_max,
        candidate=best,
        losses=losses,
    )


class IfmrHistogram:
    """Statistics of one tensor for `ifmr_streaming`: the data while they are few, then counts.

    Bins and the order-independent range rule are those of `calibrators.histogram`, but finer: an
    int8 step covers at least 128 of them. Batches and their order do not matter.

    Attributes:
        minimum, maximum: extremes in real units (inf, -inf while empty).
        full_range: R in real units; 0 before counting, or while there are only zeros.
        counts: [2 * FINE_BINS + 1] int64; empty while the data are stored.
        sums: sum of the values in each bin, float64. Exact, since the values of a bin have one
            or two exponents; the sum of the bin around 0 stays 0, where its codes are.
    """

    def __init__(self) -> None:
        self.total = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self.full_range = 0.0
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self.sums: Float64Array = np.zeros(0)
        self._kept: list[Float32Array] = []

    @property
    def kept(self) -> Float32Array | None:
        """All the data while there are at most `KEPT` values, else None."""
        return None if self.counts.size else np.concatenate([*self._kept, np.zeros(0, np.float32)])

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add one batch of any shape, float32 or float16; a refused one changes nothing.

        Raises:
            CalibrationError: wrong dtype, empty, NaN or Inf.
        """
        data = check_values(x, "activation").reshape(-1)
        self.total += data.size
        self.minimum = min(self.minimum, float(data.min()))
        self.maximum = max(self.maximum, float(data.max()))
        if not self.counts.size and self.total <= KEPT:
            self._kept.append(data.copy())
            return
        if not self.counts.size:
            self.counts = np.zeros(2 * FINE_BINS + 1, np.int64)
            self.sums = np.zeros(2 * FINE_BINS + 1)
        self._widen(max(abs(self.minimum), abs(self.maximum)))
        for part in (*self._kept, data):
            self._count(part)
        self._kept.clear()

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        return self.minimum, self.maximum

    @property
    def dead(self) -> bool:
        """Whether every value was zero."""
        return self.minimum == self.maximum == 0

    def to_arrays(self) -> Arrays:
        """Return plain 1-D arrays for `calibrators.amct.recorders.IfmrOf.restore`."""
        kept = self.kept
        occupied = np.flatnonzero(self.counts)
        return {
            "kept": np.zeros(0, np.float32) if kept is None else kept,
            "bins": occupied.astype(np.int32),
            "counts": self.counts[occupied],
            "sums": self.sums[occupied],
            "reals": np.array([self.minimum, self.maximum, self.full_range], np.float64),
            "wholes": np.array([self.total], np.int64),
        }

    def keep(self, data: Float32Array) -> None:
        """Set the stored data."""
        self._kept = [data]

    def _widen(self, amax: float) -> None:
        wanted = range_for(amax)
        index = np.arange(-FINE_BINS, FINE_BINS + 1)
        self.full_range = self.full_range or wanted
        while self.full_range < wanted:
            merged = np.trunc(index / 2).astype(np.int64) + FINE_BINS
            self.counts = np.bincount(merged, self.counts, index.size).astype(np.int64)
            self.sums = np.bincount(merged, self.sums, index.size).astype(np.float64)
            self.sums[FINE_BINS] = 0.0
            self.full_range *= 2

    def _count(self, data: Float32Array) -> None:
        scale = np.float32(FINE_BINS / self.full_range)
        for part in np.split(data, range(_STREAM_CHUNK, data.size, _STREAM_CHUNK)):
            index = (part * scale).astype(np.intp)  # the type that bincount needs no copy of
            index += FINE_BINS
            self.counts += np.bincount(index, minlength=self.counts.size)
            self.sums += np.bincount(index, part, self.counts.size)
        self.sums[FINE_BINS] = 0.0


def ifmr_streaming(histogram: IfmrHistogram, params: IfmrParams | None = None) -> AscendScale:
    """Run the search of `ifmr` on a histogram, so that memory does not grow with the images.

    With few data the result is that of `ifmr`. Otherwise the values of a bin count as spread evenly
    around their mean, and the result may be a neighbour of the range that `ifmr` chooses.

    Raises:
        CalibrationError: nothing was observed, or a scale is not finite.
    """
    params = params or IfmrParams()
    if histogram.total == 0:
        raise CalibrationError("the activation to be quantized must not be empty, got no batch")
    kept = histogram.kept
    if kept is not None:
        return ifmr(kept, params)
    spread = _Spread.of(histogram)
    lo = min(0.0, spread.kth(params.min_percentile, histogram.minimum, smallest=True))
    hi = max(0.0, spread.kth(params.max_percentile, histogram.maximum, smallest=False))
    candidates = candidates_of(np.float32(hi), np.float32(lo), params)
    total, squares = float(spread.sums[-1]), spread.squares
    losses = staircase_losses(spread.below, float(histogram.total), total, squares, candidates)
    return result_of(candidates, losses, float(np.float32(lo)), params)


@dataclass(frozen=True, slots=True)
class _Spread:
    """A histogram as a density: the data of bin b are spread evenly over [lows[b], highs[b]]."""

    edges: Float64Array  # [B + 1] edges of the bins
    lows: Float64Array
    highs: Float64Array
    # numbers, sums: [B + 1] number and sum of the data below each edge
    numbers: Float64Array
    sums: Float64Array
    squares: float  # sum of the squares of all data

    @classmethod
    def of(cls, histogram: IfmrHistogram) -> _Spread:
        width = (histogram.full_range or 1.0) / FINE_BINS
        up = width * np.arange(1, FINE_BINS + 1)
        edges = np.concatenate((-up[-1:], -up[::-1], up, up[-1:]))
        counts = histogram.counts.astype(np.float64)
        middle = (edges[1:] + edges[:-1]) / 2  # 0 for the bin around 0, which holds ReLU zeros
        mean = np.where(counts > 0, histogram.sums / np.maximum(counts, 1.0), middle)
        mean = np.clip(mean, edges[:-1], edges[1:])
        half = np.minimum(mean - edges[:-1], edges[1:] - mean)
        half[FINE_BINS] = 0.0
        numbers = np.concatenate(([0.0], np.cumsum(counts)))
        sums = np.concatenate(([0.0], np.cumsum(counts * mean)))
        squares = float((counts * (mean**2 + half**2 / 3)).sum())
        return cls(edges, mean - half, mean + half, numbers, sums, squares)

    def below(self, cuts: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return number and sum of the data below each cut."""
        bin_ = np.clip(np.searchsorted(self.edges, cuts, "right") - 1, 0, self.lows.size - 1)
        low, high = self.lows[bin_], self.highs[bin_]
        inside = np.clip(cuts, low, high)
        span = np.where(high > low, high - low, 1.0)
        share = np.where(cuts >= high, 1.0, (inside - low) / span)
        share = share * (self.numbers[bin_ + 1] - self.numbers[bin_])
        return self.numbers[bin_] + share, self.sums[bin_] + share * (low + inside) / 2

    def kth(self, percentile: float, extreme: float, *, smallest: bool) -> float:
        """Return the k-th smallest or largest value: exact for k = 1, else interpolated."""
        size = int(self.numbers[-1])
        k = 1 if 1 - percentile < FLT_EPSILON else max(size - int(percentile * size), 1)
        if k == 1:
            return extreme
        rank = k if smallest else size - k
        bin_ = int(np.searchsorted(self.numbers, rank, "left" if smallest else "right")) - 1
        bin_ = min(max(bin_, 0), self.lows.size - 1)
        count = max(float(self.numbers[bin_ + 1] - self.numbers[bin_]), 1.0)
        share = (rank - self.numbers[bin_]) / count
        value = float(self.lows[bin_] + share * (self.highs[bin_] - self.lows[bin_]))
        return max(value, extreme) if smallest else min(value, extreme)
