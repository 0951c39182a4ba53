"""IFMR in flat memory: the search of `calibrators.amct.ifmr` over a fine histogram.

An int8 step holds 128 bins or more, and each bin knows its mean, so the losses are those of the
data but for the few bins that a boundary between two codes crosses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import checked
from calibrators.amct.grid import FLT_EPSILON
from calibrators.amct.ifmr import (
    AscendScale,
    Float64Array,
    IfmrParams,
    candidates_of,
    ifmr,
    result_of,
    staircase_losses,
)
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.histogram import range_for
from calibrators.statistics import Arrays

_CHUNK = 1 << 18  # several values a bin, since each chunk adds all bins once
KEPT = 1 << 16  # values of a tensor that streaming still keeps as they are
FINE_BINS = 1 << 15  # bins a side of the streaming histogram


class IfmrHistogram:
    """Statistics of one tensor for `ifmr_streaming`: all data while they are few, then counts.

    Bins as in `calibrators.histogram`, whose order-independent range rule this shares, but finer:
    an int8 step holds 128 of them or more. Batches and their order leave no trace.

    Attributes:
        total: values seen.
        minimum, maximum: extremes in real units (inf, -inf while empty).
        full_range: R in real units; 0 until counts are kept, or while only zeros were seen.
        counts: [2 * FINE_BINS + 1] int64; empty while the data themselves are kept.
        sums: of the values in each bin, float64. Exact, since the values of a bin have one
            exponent or two; that of the bin around 0 is left at 0, where its codes are.
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
        """All the data, while there are at most `KEPT` of them."""
        return None if self.counts.size else np.concatenate([*self._kept, np.zeros(0, np.float32)])

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add one batch, any shape, float32 or float16. The state is unchanged if it is refused.

        Raises:
            CalibrationError: wrong dtype, empty, NaN or Inf.
        """
        data = checked(x, "activation").reshape(-1)
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
        """Plain 1-D arrays; see `calibrators.amct.recorders.IfmrOf.restore`."""
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
        """Take stored data as they are."""
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
        for part in np.split(data, range(_CHUNK, data.size, _CHUNK)):
            index = (part * scale).astype(np.intp)  # as bincount takes it, with no copy
            index += FINE_BINS
            self.counts += np.bincount(index, minlength=self.counts.size)
            self.sums += np.bincount(index, part, self.counts.size)
        self.sums[FINE_BINS] = 0.0


def ifmr_streaming(histogram: IfmrHistogram, params: IfmrParams | None = None) -> AscendScale:
    """The same search over counts, so that memory does not grow with the images.

    Few data were kept as they are and give `ifmr`'s own result. Else the values of a bin are taken
    as spread evenly around their mean, and the range that wins may be the one beside `ifmr`'s.

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
    """A histogram as a density; the data of bin b are even over [lows[b], highs[b]].

    edges [B + 1] of the bins; numbers, sums [B + 1]: of the data under each edge.
    """

    edges: Float64Array
    lows: Float64Array
    highs: Float64Array
    numbers: Float64Array
    sums: Float64Array
    squares: float

    @classmethod
    def of(cls, histogram: IfmrHistogram) -> _Spread:
        width = (histogram.full_range or 1.0) / FINE_BINS
        up = width * np.arange(1, FINE_BINS + 1)
        edges = np.concatenate((-up[-1:], -up[::-1], up, up[-1:]))
        counts = histogram.counts.astype(np.float64)
        middle = (edges[1:] + edges[:-1]) / 2  # of the bin around 0: 0, where a ReLU's zeros are
        mean = np.where(counts > 0, histogram.sums / np.maximum(counts, 1.0), middle)
        mean = np.clip(mean, edges[:-1], edges[1:])
        half = np.minimum(mean - edges[:-1], edges[1:] - mean)
        half[FINE_BINS] = 0.0
        numbers = np.concatenate(([0.0], np.cumsum(counts)))
        sums = np.concatenate(([0.0], np.cumsum(counts * mean)))
        squares = float((counts * (mean**2 + half**2 / 3)).sum())
        return cls(edges, mean - half, mean + half, numbers, sums, squares)

    def below(self, cuts: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Number and sum of the data under each cut."""
        bin_ = np.clip(np.searchsorted(self.edges, cuts, "right") - 1, 0, self.lows.size - 1)
        low, high = self.lows[bin_], self.highs[bin_]
        inside = np.clip(cuts, low, high)
        span = np.where(high > low, high - low, 1.0)
        share = np.where(cuts >= high, 1.0, (inside - low) / span)
        share = share * (self.numbers[bin_ + 1] - self.numbers[bin_])
        return self.numbers[bin_] + share, self.sums[bin_] + share * (low + inside) / 2

    def kth(self, percentile: float, extreme: float, *, smallest: bool) -> float:
        """The k-th smallest or largest value: exact where k is 1, else spread over its bin."""
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
