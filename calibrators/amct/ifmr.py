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
from decimal import Decimal

import numpy as np

from calibrators.amct.arq import (
    FLT_EPSILON,
    ascend_denominator,
    ascend_range,
    check_values,
    replace_tiny_scales,
)
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array, Float64Array, Int64Array, RealArray
from calibrators.histogram import (
    array_address,
    as_kernel_array,
    halve_resolution,
    prefix_sums,
    range_for,
)
from calibrators.kernel import kernel
from calibrators.statistics import Arrays

# boundaries -> the number and the sum of the data below each
CountAndSumBelow = Callable[[Float64Array], tuple[Float64Array, Float64Array]]

MAX_STORED_VALUES = 1 << 16  # largest number of values that streaming stores unbinned
FINE_BINS = 1 << 15  # bins per side of the streaming histogram
_MARGIN = 1e-4  # bound of the float32 rounding error of AMCT's loss
_MIN_SORTED_SIZE = 4096  # with fewer values, every candidate is evaluated directly
_COUNT_CHUNK = 1 << 18  # several values per bin, since each chunk adds all bins once


@dataclass(frozen=True, slots=True, kw_only=True)
class IfmrParams:
    """Parameters of the search, with AMCT's defaults.

    Attributes:
        max_percentile, min_percentile: share of the data inside the initial range, (0, 1].
        search_range: (start, end) of the ratios, 0 < start < end; the end is a candidate only by
            rounding, as with the defaults.
        search_step: step between ratios, 0 < step <= end - start.
        bits: width of the grid: 4, 8 or 16.
        with_offset: whether the grid is affine, else symmetric.
    """

    max_percentile: float = 0.999999
    min_percentile: float = 0.999999
    search_range: tuple[float, float] = (0.7, 1.3)
    search_step: float = 0.01
    bits: int = 8
    with_offset: bool = False


_AMCT_DEFAULTS = IfmrParams()


def count_steps(search_range: tuple[float, float], search_step: float) -> float:
    """Return (end - start) / step of a search range.

    It is computed in decimals, as AMCT compares them: in binary, 1.0 - 0.9 is less than 0.1.
    """
    start, end, step = (Decimal(str(number)) for number in (*search_range, search_step))
    return float((end - start) / step)


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendScale:
    """Search result of one activation, on the signed grid with added offset.

    Attributes:
        scale, offset: q = clip(rne(x / scale + offset)), of the candidate with the least loss.
        losses: loss of every candidate.
    """

    scale: np.float32
    offset: int
    losses: Float64Array


@dataclass(frozen=True, slots=True)
class Candidates:
    """Clip ranges and scales to try, float32 [K] each."""

    lo: Float32Array
    hi: Float32Array
    scale: Float32Array

    def codes_and_boundaries(self, index: int) -> tuple[Float64Array, Float64Array]:
        """Return the codes of a candidate, except for the highest, and the boundary above each.

        A range near 0, of scale 1, has one code: then the next one, above all data, is added.
        """
        scale = self.scale[index]
        lowest_code = np.rint(self.lo[index] / scale)
        highest_code = max(np.rint(self.hi[index] / scale), lowest_code + 1)
        codes = np.arange(lowest_code, highest_code, dtype=np.float64)
        return codes, (codes + 0.5) * float(scale)


def ifmr(x: RealArray, params: IfmrParams = _AMCT_DEFAULTS) -> AscendScale:
    """Return scale and offset for all activations of a tensor, any shape, float32 or float16.

    Of some 60 candidate ranges, the one with the least squared error (loss) is taken. AMCT computes
    each loss in float32 from all the data. Here, with many values, the losses are computed faster
    from the sorted data, and only those near the least one are computed as AMCT does.

    Raises:
        CalibrationError: wrong dtype, empty, NaN or Inf, or a scale that is not finite.
    """
    data = np.sort(check_values(x, "activation"), axis=None)
    lo = initial_end(data, params.min_percentile, smallest=True)
    hi = initial_end(data, params.max_percentile, smallest=False)
    candidates = make_candidates(np.float32(hi), np.float32(lo), params)

    # exact losses show which candidates may be AMCT's best, unless AMCT's loss in float32 is mostly
    # rounding error (with more than 8 bits), or its squares underflow or overflow float32
    amax = max(abs(float(data[0])), abs(float(data[-1])))
    fits_float32 = amax > 1e-12 and amax * amax * data.size < 1e37
    if data.size >= _MIN_SORTED_SIZE and params.bits <= 8 and fits_float32:
        exact_losses = _sorted_losses(data, candidates)
        losses = _refine_losses(data, candidates, exact_losses)
    else:
        indices = range(len(candidates.hi))
        losses = np.array([amct_loss(data, candidates, index) for index in indices])
    return best_scale(candidates, losses, lo, params)


def ratios(params: IfmrParams) -> Float32Array:
    """Return the ratios start + i * step, ceil((end - start) / step) of them, float32.

    torch.arange on AVX2 rounds the base of each run of eight to float32 before it adds the rest.
    This function does the same; otherwise one ratio in six would differ from AMCT's by an ulp.
    """
    start, end = params.search_range
    step = params.search_step
    index = np.arange(int(np.ceil((end - start) / step)))
    first_of_eight = index - index % 8
    rounded_ratio = (start + step * first_of_eight).astype(np.float32).astype(np.float64)
    vectorized = rounded_ratio + (index - first_of_eight) * step
    # torch's loop takes sixteen at a time; the remaining ones are computed one by one
    is_vectorized = index < index.size - index.size % 16
    return np.where(is_vectorized, vectorized, start + step * index).astype(np.float32)


def initial_end(data: Float32Array, percentile: float, *, smallest: bool) -> float:
    """Return an end of the initial range, which holds a share `percentile` of the values.

    The range includes 0: an end on the other side of 0 is moved to 0.

    Args:
        data: all values, ascending.
        percentile: share of the values in (0, 1] that the end leaves inside.
        smallest: whether it is the lower end.
    """
    k = _rank(percentile, data.size)
    if smallest:
        return min(0.0, float(data[k - 1]))
    return max(0.0, float(data[data.size - k]))


def _rank(percentile: float, size: int) -> int:
    """Return k: the end of a percentile is the k-th smallest or k-th largest of `size` values."""
    if 1 - percentile < FLT_EPSILON:
        return 1
    return max(size - int(percentile * size), 1)


def make_candidates(hi: np.float32, lo: np.float32, params: IfmrParams) -> Candidates:
    """Return the candidate ranges around [lo, hi] and their scales, one for each of `ratios`.

    On an affine grid (with offset) a ratio scales only the upper end, as in AMCT. On a symmetric
    one it scales the larger of |lo| and |hi|, whose sign decides its code: 128 or 127 with 8 bits.
    A scale of practically 0 becomes 1.

    Raises:
        CalibrationError: a scale is not finite.
    """
    with np.errstate(over="ignore"):
        if params.with_offset:
            highs = ratios(params) * hi
            lows = np.full_like(highs, lo)
            scales = (highs - lo) / np.float32(2**params.bits - 1)
        else:
            highs = ratios(params) * np.maximum(np.abs(hi), np.abs(lo))
            lows = -highs
            largest_code = ascend_denominator(hi, lo, params.bits)
            scales = highs / np.float32(largest_code)
    scales = replace_tiny_scales(scales)
    if not (np.isfinite(scales) & np.isfinite(np.float32(1) / scales)).all():
        raise CalibrationError(
            f"an Ascend scale must be finite, but the range [{lo}, {hi}] overflows float32"
            " within the search; leave this layer in float"
        )
    return Candidates(lows, highs, scales)


def amct_loss(data: Float32Array, candidates: Candidates, index: int) -> np.float32:
    """Return AMCT's loss of one candidate: MSE against unclipped data, all in float32."""
    scale = candidates.scale[index]
    with np.errstate(over="ignore"):
        clipped = np.clip(data, candidates.lo[index], candidates.hi[index])
        codes = np.rint(clipped / scale)
        error = codes * scale - data
        return np.float32(np.mean(error * error))


def _sorted_losses(data: Float32Array, candidates: Candidates) -> Float64Array:
    """Return the mean squared error of every candidate from sorted data, float64."""
    # cumulative sums of the data at the boundaries between codes, the cuts; sums at all values
    # would take twice the memory of the data
    all_boundaries = []
    for index in range(candidates.scale.size):
        _, candidate_boundaries = candidates.codes_and_boundaries(index)
        all_boundaries.append(candidate_boundaries)
    boundaries32 = np.concatenate(all_boundaries).astype(np.float32)
    boundary_positions = np.searchsorted(data, boundaries32)
    cuts = np.unique(np.append(boundary_positions, [0, data.size]))
    sums_between_cuts = np.add.reduceat(data, cuts[:-1], dtype=np.float64)
    sums_below_cuts = prefix_sums(sums_between_cuts)

    def count_and_sum_below(boundaries: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the number and the sum of the values below each boundary."""
        positions = np.searchsorted(data, boundaries.astype(np.float32))
        sums_below = sums_below_cuts[np.searchsorted(cuts, positions)]
        return positions.astype(np.float64), sums_below

    total = sums_below_cuts[-1]
    sum_of_squares = np.einsum("i,i->", data, data, dtype=np.float64)  # dot would use BLAS threads
    return staircase_losses(count_and_sum_below, data.size, total, sum_of_squares, candidates)


def staircase_losses(
    count_and_sum_below: CountAndSumBelow,
    count: int,
    total: float,
    sum_of_squares: float,
    candidates: Candidates,
) -> Float64Array:
    """Return the mean over x of (s q(x) - x)^2 for every candidate: s its scale, q(x) the code.

    As a function of x, the code q is a staircase: at the boundary (c + 0.5) s it steps from c to
    c + 1. The square is expanded, so that only sum q x and sum q^2 must be computed for each
    candidate: as if all data had the highest code h, then corrected for the data below each
    boundary::

        sum q x  =  h sum x     -  sum over boundaries of (sum of x below it)
        sum q^2  =  h^2 count   -  sum over boundaries of (2 c + 1) (number of x below it)

    Args:
        count_and_sum_below: boundaries -> (number, sum) of the data below each.
        count: number of the data.
        total: sum of the data.
        sum_of_squares: sum of the squares of the data.
        candidates: clip ranges and scales.
    """
    losses = np.empty(candidates.scale.size)
    for index, scale in enumerate(candidates.scale.astype(np.float64)):
        # each boundary is between a lower code and the next one
        lower_codes, boundaries = candidates.codes_and_boundaries(index)
        counts_below, sums_below = count_and_sum_below(boundaries)
        highest_code = lower_codes[-1] + 1
        sum_qx = highest_code * total - sums_below.sum()
        rises_of_square = 2 * lower_codes + 1  # (c + 1)^2 - c^2
        sum_qq = highest_code**2 * count - (rises_of_square * counts_below).sum()
        squared_error = sum_of_squares - 2 * scale * sum_qx + scale**2 * sum_qq
        losses[index] = squared_error / count
    return losses


def _refine_losses(
    data: Float32Array, candidates: Candidates, losses: Float64Array
) -> Float64Array:
    """Replace the losses within rounding of the best by AMCT's float32 values."""
    max_loss = losses.min() * (1 + _MARGIN) + 1e-30
    candidate_indices = np.flatnonzero(losses <= max_loss)
    if candidate_indices.size < 2:
        return losses
    refined = losses.copy()
    for index in candidate_indices:
        refined[index] = amct_loss(data, candidates, int(index))
    return refined


def best_scale(
    candidates: Candidates, losses: Float64Array, lo: float, params: IfmrParams
) -> AscendScale:
    """Return scale and offset of the candidate with the least loss.

    `lo`: the lower end, the same for all candidates with offset.
    """
    best_index = int(np.argmin(losses))
    scale = candidates.scale[best_index]
    qmin, _ = ascend_range(params.bits)
    offset = 0
    if params.with_offset:
        offset = qmin - int(np.rint(np.float32(lo) / scale))
    return AscendScale(scale=scale, offset=offset, losses=losses)


class IfmrHistogram:
    """Statistics of one tensor for `ifmr_streaming`: the data while they are few, then counts.

    Bins and the order-independent range rule are those of `calibrators.histogram`, but finer: an
    int8 step covers at least 128 of them. Batches and their order do not matter.

    Attributes:
        exact: whether all the data are stored, however many they are.
        total: number of values.
        minimum, maximum: extremes in real units (inf, -inf while empty).
        full_range: R in real units; 0 before counting, or while there are only zeros.
        counts: [2 * FINE_BINS + 1] int64; empty while the data are stored.
        sums: sum of the values in each bin, float64. Exact, since the values of a bin have one
            or two exponents; the sum of the bin around 0 stays 0, where its codes are.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.total = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.full_range = 0.0
        self.counts: Int64Array = np.zeros(0, np.int64)
        self.sums: Float64Array = np.zeros(0)
        self._chunks: list[Float32Array] = []

    @property
    def stored_values(self) -> Float32Array:
        """All the data if `exact`, or up to `MAX_STORED_VALUES` values; empty once they count."""
        return np.concatenate([*self._chunks, np.zeros(0, np.float32)])

    def observe(self, x: RealArray) -> None:
        """Add one batch of any shape, float32 or float16; a refused one changes nothing.

        Raises:
            CalibrationError: wrong dtype, empty, NaN or Inf.
        """
        data = check_values(x, "activation").reshape(-1)
        self.total += data.size
        self.minimum = min(self.minimum, float(data.min()))
        self.maximum = max(self.maximum, float(data.max()))
        is_counting = self.counts.size > 0  # until then, the values themselves are stored
        if not is_counting:
            if self.exact or self.total <= MAX_STORED_VALUES:
                self._chunks.append(data.copy())
                return
            self.start_counting()
        self._widen(max(abs(self.minimum), abs(self.maximum)))
        for chunk in (*self._chunks, data):  # the stored values are counted first
            self._count(chunk)
        self._chunks.clear()

    def start_counting(self) -> None:
        """Set all counts and sums to 0."""
        self.counts = np.zeros(2 * FINE_BINS + 1, np.int64)
        self.sums = np.zeros(2 * FINE_BINS + 1)

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        return self.minimum, self.maximum

    def to_arrays(self) -> Arrays:
        """Return 1-D arrays for `calibrators.amct.recorders.IfmrOf.restore`; {} if `exact`."""
        if self.exact:
            return {}
        occupied = np.flatnonzero(self.counts)
        return {
            "kept": self.stored_values,
            "bins": occupied.astype(np.int32),
            "counts": self.counts[occupied],
            "sums": self.sums[occupied],
            "reals": np.array([self.minimum, self.maximum, self.full_range], np.float64),
            "wholes": np.array([self.total], np.int64),
        }

    def set_values(self, data: Float32Array) -> None:
        """Set the stored data."""
        self._chunks = [data]

    def _widen(self, amax: float) -> None:
        """Double the range until it covers `amax`; each doubling joins bin 2 k with 2 k + 1."""
        target = range_for(amax)
        self.full_range = self.full_range or target
        while self.full_range < target:
            self.counts = halve_resolution(self.counts)
            self.sums = halve_resolution(self.sums)
            self.sums[FINE_BINS] = 0.0
            self.full_range *= 2

    def _count(self, data: Float32Array) -> None:
        """Add flat values, which lie within the range, to counts and sums of their bins."""
        bins_per_unit = np.float32(FINE_BINS / self.full_range)
        c_kernel = kernel()
        if c_kernel is not None:
            values = as_kernel_array(data)
            c_kernel.count_and_sum(
                values.size,
                array_address(values),
                bins_per_unit,
                FINE_BINS,
                array_address(self.counts),
                array_address(self.sums),
            )
            return
        for chunk in np.split(data, range(_COUNT_CHUNK, data.size, _COUNT_CHUNK)):
            index = (chunk * bins_per_unit).astype(np.intp)  # bincount copies any other type
            index += FINE_BINS
            self.counts += np.bincount(index, minlength=self.counts.size)
            self.sums += np.bincount(index, chunk, self.counts.size)
        self.sums[FINE_BINS] = 0.0  # no sum around 0 (see the class); the kernel does the same


def ifmr_streaming(histogram: IfmrHistogram, params: IfmrParams = _AMCT_DEFAULTS) -> AscendScale:
    """Search scale and offset as `ifmr` does, but in a histogram, whose memory does not grow.

    With few data, which the histogram stores, the result is that of `ifmr`. Otherwise all values of
    a bin count as their mean, and the result may be a neighbour of the range that `ifmr` chooses.

    Raises:
        CalibrationError: nothing was observed, or a scale is not finite.
    """
    if histogram.total == 0:
        raise CalibrationError("the activation to be quantized must not be empty, got no batch")
    if not histogram.counts.size:  # the values were few, and are not counted
        return ifmr(histogram.stored_values, params)

    # number, sum and mean of the values of each bin that has some
    occupied_bins = np.flatnonzero(histogram.counts)
    counts = histogram.counts[occupied_bins]
    sums = histogram.sums[occupied_bins]
    means = sums / counts  # ascending
    counts_below = prefix_sums(counts)  # number of values in the bins before each
    sums_below = prefix_sums(sums)

    def count_and_sum_below(boundaries: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the number and the sum of the values below each boundary."""
        positions = np.searchsorted(means, boundaries)
        return counts_below[positions], sums_below[positions]

    lo, hi = _initial_range(histogram, means, counts_below[1:], params)
    candidates = make_candidates(np.float32(hi), np.float32(lo), params)
    sum_of_squares = (sums * means).sum()  # as if each value were the mean of its bin
    losses = staircase_losses(
        count_and_sum_below, histogram.total, sums_below[-1], sum_of_squares, candidates
    )
    return best_scale(candidates, losses, lo, params)


def _initial_range(
    histogram: IfmrHistogram,
    means: Float64Array,
    cumulative_counts: Float64Array,
    params: IfmrParams,
) -> tuple[float, float]:
    """Return (lower end, upper end) of the range that holds the percentiles of the values, and 0.

    An end is the k-th smallest or largest value, where k follows from the percentile. For k = 1 it
    is the extreme, else the mean of the bin that holds it.

    Args:
        histogram: the counted values.
        means: mean of each occupied bin, ascending.
        cumulative_counts: number of values up to and including each of these bins.
        params: parameters of the search. Each percentile is the share of the values that its end
            leaves inside.
    """
    lo = histogram.minimum
    hi = histogram.maximum
    rank_from_below = _rank(params.min_percentile, histogram.total)
    rank_from_above = _rank(params.max_percentile, histogram.total)
    if rank_from_below > 1:
        lo = float(means[np.searchsorted(cumulative_counts, rank_from_below)])
    if rank_from_above > 1:
        rank = histogram.total + 1 - rank_from_above
        hi = float(means[np.searchsorted(cumulative_counts, rank)])
    return min(0.0, lo), max(0.0, hi)
