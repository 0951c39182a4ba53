"""Streaming histogram of a tensor: fixed size, order-independent, exact merges.

A value x of a tensor with range R falls into bin trunc(x * BINS / R), so that bin 0 holds
|x| < R / BINS and bins k and -k are symmetric::

      -R                 0                  R
       |----|----|-- ... --|-- ... --|----|----|
     -BINS                 0               BINS      index
       '-- counts[0]       '-- counts[BINS]   '-- counts[2 * BINS]: x == R only

A value beyond R doubles R until it fits and merges bins pairwise, outwards from 0. Scaling by a
power of two is exact in binary floating point, so the result equals a histogram with the larger R
from the start. There are two range rules:

* `Histogram()`: R is the smallest power of two that covers the data. The counts depend on the set
  of values only, not on order, batch size or number of threads.
* `Histogram(initial_range=m)`: R starts at m, TensorRT's rule; m is the largest |x| of the first
  batch (measured on tables that TensorRT 7.2 wrote). As there, x == R is counted in bin BINS - 1
  before any doubling. The result depends on the first batch.

Memory is 8 * (2 * BINS + 1) bytes per tensor. This module defines the counts; `calibrators.kernel`
gives the same counts in C if it is built.

`HistogramGroup` counts the tensors of a sample in one call of the kernel, since in a small network
counting a tensor takes only microseconds, as long as a call from Python::

    histogram 0 --.                       array 0 --.
    histogram 1 --+-- addresses           array 1 --+-- of one sample --> calib8_observe_each
    histogram 2 --'                       array 2 --'
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import cv2
import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array, Float64Array, Int64Array, RealArray, Value
from calibrators.kernel import SCRATCH, HistogramState, kernel

BINS = 4096  # bins per side: two for each of TensorRT's 2048
_CHUNK_SIZE = 1 << 17  # values binned at a time, so that they fit in a core's cache
_MIN_RANGE = 2.0**-100  # below this, BINS / R could overflow float32


def range_for(amax: float) -> float:
    """Return the smallest power of two >= amax, in real units: the order-independent range."""
    mantissa, exponent = math.frexp(max(amax, _MIN_RANGE))
    is_power_of_two = mantissa == 0.5
    return math.ldexp(1.0, exponent - 1 if is_power_of_two else exponent)


def _count_bins(x: Float32Array, full_range: float) -> Int64Array:
    """Return the counts of a chunk of values, [2 * BINS + 1] int64."""
    index = (x * np.float32(BINS / full_range)).astype(np.int16)  # truncates towards zero
    index += np.int16(BINS)  # 0 to 2 * BINS
    bin_count = 2 * BINS + 1
    image = index.view(np.uint16)[None]
    histogram = cv2.calcHist([image], [0], None, [bin_count], [0, bin_count])
    return histogram.reshape(-1).astype(np.int64)


class _ThreadBuffers(threading.local):
    """Buffer of the kernel, one for each thread; it is zero between the calls."""

    def __init__(self) -> None:
        self.scratch = ctypes.create_string_buffer(SCRATCH)


_buffers = _ThreadBuffers()


def as_kernel_array(x: RealArray) -> Float32Array:
    """Return the values as the kernel reads them: float32, C-contiguous, aligned."""
    values = np.ascontiguousarray(x, np.float32)
    return values if values.flags.aligned else values.copy()


def array_address(array: NDArray[np.generic]) -> int:
    """Return the address of a C-contiguous array; mostly four times as fast as `ctypes.data`."""
    if not (array.flags.writeable and array.size):
        return array.ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def make_nan_error(nan_count: int) -> CalibrationError:
    """Return the error for values that contain NaN."""
    return CalibrationError(f"values must be numbers, got {nan_count} NaN")


def close_range(counts: Int64Array) -> Int64Array:
    """Return a copy in which |x| == R is counted in the outermost bin inside the range."""
    closed = counts.copy()
    closed[1] += closed[0]
    closed[-2] += closed[-1]
    closed[0] = closed[-1] = 0
    return closed


def prefix_sums(values: NDArray[np.generic]) -> Float64Array:
    """Return the sums of the values before each index and of all values, float64."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


def halve_resolution(values: NDArray[Value]) -> NDArray[Value]:
    """Merge bins pairwise, outwards from bin 0, to the histogram of the doubled range.

    `values`: counts or sums of the bins -n to n, [2 n + 1].
    """
    side = values.size // 2
    # -1, 0 and 1 meet in 0; 2 and 3 in 1; ...
    merged_bins = np.trunc(np.arange(-side, side + 1) / 2).astype(np.int64)
    return np.bincount(merged_bins + side, values, values.size).astype(values.dtype)


class Histogram(HistogramState):
    """Counts and extremes of one tensor over any number of batches.

    The bins divide [-R, R]; R, `full_range`, doubles when a larger value comes. The kernel accesses
    this structure and its counts by address, so neither may move.

    Attributes:
        full_range: R, the end of the histogram's range, in real units; 0 while all values were 0.
        minimum, maximum: extremes of the finite values (inf, -inf while empty).
        total: number of finite values.
        infinite: number of +-Inf values; they are in no bin.
        batch_amax: largest finite |x| of the last call of `observe`.
    """

    def __init__(self, *, initial_range: float | None = None) -> None:
        if initial_range is not None and not (math.isfinite(initial_range) and initial_range >= 0):
            raise CalibrationError(
                f"a histogram's initial range must be finite and >= 0, got {initial_range}"
            )
        kernel()  # reports an invalid CALIB8_COUNTING before any value is counted
        super().__init__(minimum=math.inf, maximum=-math.inf)
        self._initial_range = max(initial_range, _MIN_RANGE) if initial_range else 0.0
        self._counts = np.zeros(2 * BINS + 1, np.int64)

    @property
    def counts(self) -> Int64Array:
        """Counts, [2 * BINS + 1] int64."""
        return self._counts

    @property
    def initial_range(self) -> float | None:
        """Initial R of TensorRT's rule; None for powers of two."""
        return self._initial_range or None

    @property
    def amax(self) -> float:
        """Largest |x| so far; 0 for a tensor that is empty or always zero."""
        return max(abs(self.minimum), abs(self.maximum)) if self.total else 0.0

    def observe(self, x: RealArray) -> None:
        """Count every value of `x`, any shape, float16/32/64 (binned as float32).

        Raises:
            CalibrationError: `x` holds NaN, or the range is invalid.
        """
        self.check_range()
        flat = as_kernel_array(x).reshape(-1)
        counting_kernel = kernel()  # the C library; None if it was not compiled
        if counting_kernel is None:
            self.batch_amax = 0.0  # each chunk raises it to its own largest |x|
            for chunk in np.split(flat, range(_CHUNK_SIZE, flat.size, _CHUNK_SIZE)):
                self._observe_chunk(chunk)
            return

        # the kernel changes this histogram, which is a ctypes structure (`HistogramState`), and the
        # counts, at their addresses
        nan_count = counting_kernel.observe(
            counting_kernel.instruction_set,
            ctypes.byref(self),
            array_address(self.counts),
            array_address(flat),
            flat.size,
            _buffers.scratch,
        )
        if nan_count:
            raise make_nan_error(nan_count)

    def check_range(self) -> None:
        """Check that the range is valid, as a stored histogram may not be.

        Raises:
            CalibrationError: it is not.
        """
        if self.full_range and not _MIN_RANGE <= self.full_range < math.inf:
            raise CalibrationError(
                f"a histogram's range is 0 or at least {_MIN_RANGE}, got {self.full_range}"
            )

    def _observe_chunk(self, chunk: Float32Array) -> None:
        """Count one chunk of a batch: extremes, range, counts; used where no kernel was compiled.

        A chunk is small enough for a core's cache.

        Raises:
            CalibrationError: it holds NaN.
        """
        if chunk.size == 0:
            return
        # + 0.0 turns -0.0 into 0.0, so that the order of both does not matter
        low = float(chunk.min()) + 0.0
        high = float(chunk.max()) + 0.0
        if math.isnan(low):
            raise make_nan_error(int(np.isnan(chunk).sum()))
        if math.isinf(low) or math.isinf(high):
            finite_values = chunk[np.isfinite(chunk)]
            self.infinite += chunk.size - finite_values.size
            self._observe_chunk(finite_values)  # the others are in no bin
            return

        amax = max(abs(low), abs(high))
        self.batch_amax = max(self.batch_amax, amax)
        self._widen(amax)
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)
        self.total += chunk.size

        if not self.full_range:  # only zeros so far, all in bin 0, the middle one
            self.counts[BINS] += chunk.size
        else:
            self.counts[:] += _count_bins(chunk, self.full_range)
        if self.initial_range is not None:
            # TensorRT's rule, in all batches: |x| == full_range is counted in the bin below the end
            # (the first batch always has such a value, since its largest |x| is the range)
            self.counts[:] = close_range(self.counts)

    def merge(self, histogram: Histogram) -> None:
        """Add the counts of `histogram`, which stays unchanged; exact, in any order.

        Raises:
            CalibrationError: the two follow different range rules.
        """
        if self.initial_range != histogram.initial_range:
            raise CalibrationError(
                "histograms merge only with equal initial ranges, got"
                f" {self.initial_range} and {histogram.initial_range}"
            )
        # bring both to the wider of the two ranges
        self._widen_to(histogram.full_range)
        counts = histogram.counts
        full_range = histogram.full_range  # 0 if all its values are 0: then only bin 0 has counts
        while full_range and full_range < self.full_range:
            counts = halve_resolution(counts)
            full_range = full_range * 2
        self.counts[:] += counts
        self.minimum = min(self.minimum, histogram.minimum)
        self.maximum = max(self.maximum, histogram.maximum)
        self.total += histogram.total
        self.infinite += histogram.infinite

    def without(self, subset: Histogram) -> Histogram:
        """Return the histogram without the values of `subset`, the histogram of some of them.

        An extreme (minimum or maximum) that `subset` shares may be gone, so the new one is known
        only to a bin. Counts never fall below 0, even if the two binned a value differently, as
        after another optimization of the model.

        Raises:
            CalibrationError: a range follows TensorRT's rule.
        """
        if self.initial_range is not None or subset.initial_range is not None:
            raise CalibrationError("histograms of TensorRT's range rule cannot be subtracted")
        # copies of both, on the wider of the two ranges
        removed = Histogram()
        removed._widen_to(self.full_range)
        removed.merge(subset)
        remaining = Histogram()
        remaining._widen_to(removed.full_range)
        remaining.merge(self)

        remaining.counts[:] = np.maximum(remaining.counts - removed.counts, 0)
        remaining.total = int(remaining.counts.sum())
        remaining.infinite = max(self.infinite - subset.infinite, 0)
        occupied_bins = np.flatnonzero(remaining.counts) - BINS  # -BINS..BINS
        if not occupied_bins.size:  # nothing finite remains: nothing to find a range of
            return Histogram()

        # an extreme that may be gone is replaced by the outer edge of the last occupied bin
        width = remaining.full_range / BINS
        low_bin = occupied_bins[0]
        high_bin = occupied_bins[-1]
        if subset.minimum <= self.minimum:
            # bin 3 starts at 3 widths, bin 0 at -1, bin -3 at -4
            lower_edge = low_bin if low_bin > 0 else low_bin - 1
            remaining.minimum = max(self.minimum, lower_edge * width)
        if subset.maximum >= self.maximum:
            # bin 3 ends at 4 widths, bin 0 at 1, bin -3 at -3
            upper_edge = high_bin if high_bin < 0 else high_bin + 1
            remaining.maximum = min(self.maximum, upper_edge * width)
        return remaining

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return plain 1-D arrays for `calibrators.statistics.HistogramOf.restore`."""
        reals = (self.initial_range or 0.0, self.full_range, self.minimum, self.maximum)
        return {
            "counts": self.counts,
            "reals": np.array(reals, np.float64),
            "wholes": np.array([self.total, self.infinite], np.int64),
        }

    def clamped(self, floor: float, ceiling: float) -> Histogram:
        """Return the histogram of all values clamped to [floor, ceiling], as exact as bins are.

        Values beyond these bounds make no difference to the nodes that read the tensor, so a clip
        range should spend no integers on them. The bounds are ignored if all of [floor, ceiling]
        lies beyond the range of the bins, where no bin could hold the clamped values.
        """
        clamped = Histogram(initial_range=self.initial_range)
        clamped.merge(self)  # now it is a copy of this histogram
        lies_beyond_bins = floor > self.full_range or ceiling < -self.full_range
        changes_nothing = floor <= self.minimum and self.maximum <= ceiling
        if self.total == 0 or lies_beyond_bins or changes_nothing:
            return clamped

        # the values beyond the bounds join the outermost bins that remain
        clamped.minimum = min(max(self.minimum, floor), ceiling)
        clamped.maximum = max(min(self.maximum, ceiling), floor)
        low = self._bin_index(clamped.minimum)
        high = self._bin_index(clamped.maximum)
        clamped.counts[low] += clamped.counts[:low].sum()
        clamped.counts[high] += clamped.counts[high + 1 :].sum()
        clamped.counts[:low] = clamped.counts[high + 1 :] = 0
        return clamped

    def _bin_index(self, value: float) -> int:
        """Return the index into `counts` of a real value; that of the last bin beyond the range."""
        index = math.trunc(value * BINS / self.full_range)
        return min(max(index, -BINS), BINS) + BINS

    def magnitudes(self, bins: int) -> Int64Array:
        """Return the histogram of |x| over [0, R], [bins] int64; `bins` must divide BINS."""
        counts = close_range(self.counts)
        folded = counts[BINS : 2 * BINS]
        folded[1:] += counts[BINS - 1 : 0 : -1]
        return np.asarray(folded.reshape(bins, -1).sum(axis=1), np.int64)

    def edges(self) -> Float64Array:
        """Return the bin edges of `signed()`, [2 * BINS] in real units, ascending."""
        index = np.concatenate([np.arange(-BINS, 0), np.arange(1, BINS + 1)])
        return index * (self.full_range / BINS)

    def signed(self) -> Int64Array:
        """Return the counts between `edges()`, [2 * BINS - 1] int64; the middle bin contains 0."""
        return close_range(self.counts)[1:-1]

    def _widen(self, amax: float) -> None:
        """Double the range until it covers `amax`."""
        if amax <= self.full_range:
            return
        if self.initial_range is None:
            self._widen_to(range_for(amax))
            return
        target = self.full_range or self.initial_range
        while target < amax:
            target *= 2
        self._widen_to(target)

    def _widen_to(self, target: float) -> None:
        """Double the range until it is `target`, merging bins; a range of 0 becomes it at once."""
        if self.full_range == 0.0:
            self.full_range = target
        while self.full_range < target:
            self.counts[:] = halve_resolution(self.counts)
            self.full_range *= 2


class ArrayRefused(CalibrationError):
    """An array cannot be counted; those before it were counted.

    Attributes:
        index: index of the array in the group.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class HistogramGroup:
    """Histograms that each count one array per call; not thread-safe."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self.histograms = tuple(histograms)
        states = [ctypes.addressof(histogram) for histogram in self.histograms]
        counts = [array_address(histogram.counts) for histogram in self.histograms]
        self._tables = np.array([states, counts], np.uintp)
        self._table_addresses = [array_address(table) for table in self._tables]
        self._counted_arrays = ctypes.c_size_t()

    def observe(self, arrays: Iterable[RealArray]) -> None:
        """Count each array in its histogram, as `Histogram.observe`, with one kernel call for all.

        Raises:
            ArrayRefused: an array has NaN, or the range of its histogram is invalid; names which.
        """
        values = [as_kernel_array(x) for x in arrays]
        counting_kernel = kernel()  # the C library; None if it was not compiled
        if counting_kernel is None:
            for index, x in enumerate(values):
                with _naming_array(index):
                    self.histograms[index].observe(x)
            return

        addresses = [array_address(x) for x in values]
        sizes = [x.size for x in values]
        array_tables = np.array([addresses, sizes], np.uintp)
        # the kernel takes four tables: the addresses of the histograms' states and of their counts,
        # the addresses of the arrays, and their sizes. It ends at an array that it refuses, and
        # returns how many NaN that has, or -1 if the range of its histogram is invalid; else 0
        refusal = counting_kernel.observe_each(
            counting_kernel.instruction_set,
            len(self.histograms),
            *self._table_addresses,
            *map(array_address, array_tables),
            _buffers.scratch,
            ctypes.byref(self._counted_arrays),
        )
        if refusal:
            index = self._counted_arrays.value  # number of arrays before the refused one
            with _naming_array(index):
                self.histograms[index].check_range()  # raises if the range is invalid
                raise make_nan_error(refusal)


@contextmanager
def _naming_array(index: int) -> Iterator[None]:
    """Raise a CalibrationError of the block as `ArrayRefused`."""
    try:
        yield
    except CalibrationError as error:
        raise ArrayRefused(str(error), index) from error
