"""HFMG: AMCT's histogram search for activations, which cuts bins at the ends for the least L2 loss.

::

    counts   .  :  |  #  #  #  |  :  .  .        every candidate is a run of bins [left, right];
             ^left ->             <- right^      each step cuts the side that gives up more bins
             0                          n-1      for the next 1/100000 of the data

    loss of [left, right]: integral of (x - centre of its code)^2 over the histogram's density;
    bins outside the run count with the code at the edge.

The statistic is one int32 histogram per tensor over all batches. Its range is that of the first
batch, then the union of all ranges with old bins redistributed, so that the result depends on the
batches, as in AMCT.

Source: hicann/amct, graph_based custom_op/hfmg; measured on AMCT's own outputs.
"""

import math
from bisect import bisect_left, bisect_right

import numpy as np

from calibrators.amct.arq import FLT_EPSILON, ascend_scale_offset, check_values
from calibrators.amct.ifmr import AscendScale
from calibrators.errors import CalibrationError
from calibrators.grids import (
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    RealArray,
)
from calibrators.histogram import prefix_sums
from calibrators.statistics import Arrays

NBINS = (1024, 2048, 4096, 8192)
_MARGIN = 1e-3  # bound of the float32 rounding error of AMCT's loss
_MAX_TERM = 1e36  # largest term of a loss in float32, far below its maximum of 3e38


class HfmgHistogram:
    """AMCT's histogram of one tensor over its calibration batches.

    Attributes:
        nbins: number of bins, one of `NBINS`.
        samples_per_batch: samples per batch; those of an incomplete batch wait for the others.
        counts: [nbins] int32; empty before the first batch.
        lo, hi: range in real units, float32.
    """

    def __init__(self, nbins: int = 4096, *, samples_per_batch: int = 1) -> None:
        self.nbins = nbins
        self.samples_per_batch = samples_per_batch
        self._waiting: list[Float32Array] = []
        self.counts: Int32Array = np.zeros(0, np.int32)
        self.lo = self.hi = np.float32(0)

    def observe(self, x: RealArray) -> None:
        """Add one sample of any shape, float32 or float16; a refused one changes nothing.

        Raises:
            CalibrationError: wrong dtype, empty, NaN or Inf.
        """
        data = check_values(x, "activation").reshape(-1)
        if self.samples_per_batch == 1:
            self._count_batch(data)
            return
        self._waiting.append(data.copy())
        if len(self._waiting) == self.samples_per_batch:
            self.end()

    def end(self) -> None:
        """Count the waiting samples as a batch; the last batch may be smaller, as in AMCT.

        Raises:
            CalibrationError: the range does not fit float32.
        """
        if self._waiting:
            self._count_batch(np.concatenate(self._waiting))
            self._waiting.clear()

    def _count_batch(self, data: Float32Array) -> None:
        """Count one batch: the histogram's range becomes the union of its range and the batch's.

        If that is wider, the counts of earlier batches are redistributed first.
        """
        lo = data.min()
        hi = data.max()
        earlier_counts = self.counts
        if not earlier_counts.size:  # this is the first batch
            self.counts = histc(data, self.nbins, lo, hi)
        else:
            lo = min(lo, self.lo)
            hi = max(hi, self.hi)
            if not (_is_close(lo, self.lo) and _is_close(hi, self.hi)):
                earlier_counts = redistribute(earlier_counts, (self.lo, self.hi), (lo, hi))
            self.counts = earlier_counts + histc(data, self.nbins, lo, hi)
        self.lo = lo
        self.hi = hi

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        return float(self.lo), float(self.hi)

    def to_arrays(self) -> Arrays:
        """Return plain 1-D arrays for `calibrators.amct.recorders.HfmgOf.restore`."""
        return {"counts": self.counts, "reals": np.array([self.lo, self.hi], np.float64)}


def histc(data: Float32Array, nbins: int, lo: np.float32, hi: np.float32) -> Int32Array:
    """Count as torch.histc in float32: bin trunc((x - lo) / (hi - lo) * nbins), hi in the last."""
    with np.errstate(over="ignore", invalid="ignore"):
        if lo == hi:
            lo = lo - np.float32(1)
            hi = hi + np.float32(1)
        position = (data - lo) / (hi - lo) * np.float32(nbins)
    if not np.isfinite(position).all():
        raise CalibrationError(
            f"the range of an activation must fit float32, got [{lo}, {hi}];"
            " leave this layer in float"
        )

    index = np.minimum(position.astype(np.int32), nbins - 1)
    return np.bincount(index, minlength=nbins).astype(np.int32)


def redistribute(
    counts: Int32Array,
    old_range: tuple[np.float32, np.float32],
    new_range: tuple[np.float32, np.float32],
) -> Int32Array:
    """Redistribute a histogram's counts to as many bins on a wider range.

    An old bin lies in one or two of the new bins, which are wider. If in two, its count is split by
    length, and the share of the lower one is truncated to an integer, as in AMCT.

    Args:
        counts: count of each of n old bins, int32.
        old_range: (lower end, upper end), in real units.
        new_range: the same of the wider range.
    """
    bin_count = counts.size
    old_lo = float(old_range[0])
    new_lo = float(new_range[0])
    old_width = (float(old_range[1]) - old_lo) / bin_count
    new_width = (float(new_range[1]) - new_lo) / bin_count

    # the new bins in which the lower and the upper edge of each old bin lie
    lower_edges = old_lo + old_width * np.arange(bin_count)
    edges = np.stack([lower_edges, lower_edges + old_width])
    positions = (edges - new_lo) // new_width
    lower_bins, upper_bins = np.clip(positions, 0, bin_count - 1).astype(np.int64)

    # the share of each old bin that lies in the lower of its two new bins
    with np.errstate(divide="ignore", invalid="ignore"):  # an old range of one value has no width
        upper_ends = new_lo + (lower_bins + 1) * new_width  # of the lower new bins
        lower_shares = (upper_ends - lower_edges) / old_width
    lower_shares = np.where(lower_bins == upper_bins, 1.0, lower_shares)
    lower_counts = (counts * lower_shares).astype(np.int64)
    redistributed = np.zeros(bin_count, np.int64)
    np.add.at(redistributed, lower_bins, lower_counts)
    np.add.at(redistributed, upper_bins, counts - lower_counts)
    return redistributed.astype(np.int32)


def candidate_runs(counts: Int32Array) -> Int64Array:
    """Return the candidate clip ranges as runs of bins, [K, 2]: (first bin, last bin) of each.

    A run is what remains of the histogram after cuts at both ends. Each run is the one before, cut
    by 1/100000 of all values at one end: the end where these take more bins, since they are sparse
    there.

    `counts`: number of values in each bin.
    """
    bin_count = counts.size
    counts_below = [0, *np.cumsum(counts, dtype=np.int64).tolist()]  # number of values below a bin
    values_per_cut = max(math.ceil(counts_below[-1] / 100000), 1)
    left = 0
    right = bin_count - 1
    min_distance = math.ceil(bin_count / 4)  # from the first to the last bin of a run, as in AMCT
    runs = []
    while right - left > min_distance:
        # the next cut takes the fewest bins that hold `values_per_cut` values, at either end

        # at the lower end: the bins from `left` to the one before `next_left`
        min_count_below = counts_below[left] + values_per_cut
        next_left = min(bisect_left(counts_below, min_count_below), right)
        # at the upper end: the bins from `first_cut_bin` to `right`, but not `next_left`, so that
        # a bin remains
        max_count_below = counts_below[right + 1] - values_per_cut
        first_cut_bin = bisect_right(counts_below, max_count_below) - 1
        next_right = max(first_cut_bin - 1, next_left)

        # the end where the cut takes more bins is cut
        if right - next_right >= next_left - left:
            right = next_right
        else:
            left = next_left
        runs.append((left, right))
    return np.array(runs, np.int64).reshape(-1, 2)


def hfmg(histogram: HfmgHistogram, *, bits: int = 8, with_offset: bool = True) -> AscendScale:
    """Return scale and offset by AMCT's HFMG: of the clip range with the least squared error.

    A candidate for the clip range is a run of bins of the histogram.

    Args:
        histogram: that of all batches. Samples that fill no batch yet are counted first, as a
            smaller last batch.
        bits: width of the grid: 4, 8 or 16.
        with_offset: whether the grid is affine, else symmetric.

    Raises:
        CalibrationError: no batch was observed, or a scale is not finite.
    """
    histogram.end()  # counts the waiting samples
    counts = histogram.counts
    if not counts.size:
        raise CalibrationError("HFMG needs at least one calibration batch, got none")
    lo = histogram.lo
    hi = histogram.hi
    width = (hi - lo) / np.float32(counts.size)
    runs = candidate_runs(counts)
    losses = _run_losses(counts, runs, width, bits)

    # the ends of the best run of bins, in float32 as in AMCT
    left, right = runs[np.argmin(losses)].astype(np.float32)
    run_lo = lo + left * width
    run_hi = lo + (right + np.float32(1)) * width
    scale, offset = ascend_scale_offset(run_hi, run_lo, with_offset=with_offset, bits=bits)
    return AscendScale(scale=np.float32(scale), offset=int(offset), losses=losses)


def _run_losses(counts: Int32Array, runs: Int64Array, width: np.float32, bits: int) -> Float64Array:
    """Return the squared error (loss) of each run of bins as a clip range, [K].

    AMCT computes losses in float32, and its rounding decides between runs of nearly the same loss.
    That takes long, so only runs near the least loss get AMCT's value, the others a float64 value.

    Args:
        counts: the histogram.
        runs: candidates, first and last bin of each, [K, 2].
        width: width of a bin, in real units.
        bits: width of the grid.
    """
    # with 16 bits there are more codes than bins, so that the float64 loss is no faster
    has_more_codes_than_bins = bits > 8
    # a term of AMCT's loss is a cubed distance times a density, count / width; `largest_term` is an
    # upper bound. If terms overflow float32, AMCT's losses are infinite, and so all equal, which
    # float64 losses would not be
    span = float(width) * counts.size
    largest_term = span**3 * float(counts.sum()) / max(float(width), 1e-30)
    may_overflow = largest_term > _MAX_TERM
    if has_more_codes_than_bins or may_overflow:
        return np.array([_amct_loss(counts, left, right, width, bits) for left, right in runs])

    losses_in_squared_bins = _float64_losses(counts, runs, bits)
    losses = losses_in_squared_bins * float(width) ** 2
    run_widths = (runs[:, 1] - runs[:, 0] + 1).astype(np.float32)  # in bins
    steps = width * run_widths / np.float32(2**bits)  # between the codes of each run
    losses[steps < FLT_EPSILON] = 0.0  # as `_amct_loss` does
    for index in np.flatnonzero(losses <= losses.min() * (1 + _MARGIN)):
        left, right = runs[index]
        losses[index] = _amct_loss(counts, left, right, width, bits)
    return losses


def _float64_losses(counts: Int32Array, runs: Int64Array, bits: int) -> Float64Array:
    """Return the squared error (loss) of each run of bins as a clip range, [K] float64.

    The errors are summed as if every value x had the last code of the run, at c, and then
    corrected. A value below a boundary t between two codes really has a lower one: each such
    boundary lowers its squared error by 2 d (t - x), where d is the spacing of the codes. With G(t)
    the sum of t - x over the values below t::

        loss = sum (x - c)^2  -  2 d * sum of G over the boundaries

    All positions are in bins, from the lower end of the histogram, so the losses are in units of
    the squared bin width.

    Args:
        counts: the histogram.
        runs: first and last bin of each run, [K, 2].
        bits: width of the grid.
    """
    counts_below = prefix_sums(counts)  # number of values below each edge; 0 below the first
    half_counts = counts / 2.0
    # G of each edge: over a bin, G grows by the count below the bin's middle
    g_at_edges = prefix_sums(counts_below[:-1] + half_counts)

    # moments of the histogram, each bin spread evenly over its width, with a variance of 1/12
    bin_centres = np.arange(counts.size) + 0.5
    total = counts_below[-1]
    first_moment = np.dot(counts, bin_centres)
    second_moment = np.dot(counts, bin_centres**2 + 1 / 12)

    code_count = 2**bits
    run_starts = runs[:, 0].astype(np.float64)
    spacing = (runs[:, 1] - runs[:, 0] + 1) / code_count
    last_centre = runs[:, 1] + 1 - spacing / 2  # c of each run
    g_sums = np.empty(len(runs))  # over the boundaries of each run
    block_count = max(1, len(runs) // 64)  # blocks bound the memory
    for block in np.array_split(np.arange(len(runs)), block_count):
        distances = spacing[block, None] * np.arange(1, code_count)  # from the start of the run
        boundaries = run_starts[block, None] + distances
        bins = boundaries.astype(np.int32)
        fractions = boundaries - bins  # of the bin that each boundary is in
        # the slope of G is the count below, which grows evenly in a bin; from the bin's lower edge
        # to the boundary it has this mean
        mean_slopes = half_counts[bins] * fractions + counts_below[bins]
        g_at_boundaries = mean_slopes * fractions + g_at_edges[bins]
        g_sums[block] = g_at_boundaries.sum(axis=1)
    losses: Float64Array = second_moment - 2 * last_centre * first_moment + last_centre**2 * total
    losses -= 2 * spacing * g_sums
    return losses


def _amct_loss(
    counts: Int32Array, left: int, right: int, width: np.float32, bits: int
) -> np.float32:
    """Return AMCT's squared error (loss) of a run of bins as a clip range, in float32.

    The run is divided into codes of one step each. The values of a bin count as spread evenly over
    it. Its error is the integral of the squared distance to the centres of the codes that it
    overlaps: a part of its first code, complete codes between, and a part of its last code. A bin
    outside the run has the code at its end.

    Args:
        counts: the histogram.
        left: first bin of the run.
        right: last bin of the run.
        width: width of a bin, in real units.
        bits: width of the grid.
    """
    step = width * np.float32(right - left + 1) / np.float32(2**bits)
    if step < FLT_EPSILON:
        return np.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):
        density = counts.astype(np.float32) / width
        # the edges of the bins, from the start of the run, and the code at each
        edge_numbers = np.arange(-left, counts.size + 1 - left).astype(np.float32)
        edges = edge_numbers * width
        unclipped_codes = np.floor(edges / step)
        codes = np.clip(unclipped_codes, 0, 2**bits - 1).astype(np.float32)
        bin_start = edges[:-1]
        bin_end = edges[1:]
        first_code = codes[:-1]  # of the codes that each bin overlaps
        last_code = codes[1:]
        has_one_code = first_code == last_code

        # the parts of each bin, by their ends relative to the centre of their code
        half_step = step * np.float32(0.5)
        first_centre = first_code * step + half_step
        first_part_end = np.where(has_one_code, bin_end - first_centre, half_step)
        first_part_loss = _integrate_square(bin_start - first_centre, first_part_end, density)
        loss_per_code = _integrate_square(-half_step, half_step, density)
        complete_codes_loss = (last_code - first_code - np.float32(1)) * loss_per_code
        last_part_end = bin_end - last_code * step - half_step
        last_part_loss = _integrate_square(-half_step, last_part_end, density)
        other_parts_loss = np.where(
            has_one_code, np.float32(0), complete_codes_loss + last_part_loss
        )
        return np.float32(np.sum(first_part_loss + other_parts_loss, dtype=np.float32))


def _integrate_square(
    low: Float32Array | np.float32, high: Float32Array | np.float32, density: Float32Array
) -> Float32Array:
    """Return the integral of x^2 * density from low to high: (high^3 - low^3) / 3 * density."""
    difference_of_cubes = high * high * high - low * low * low
    return np.asarray(difference_of_cubes / np.float32(3) * density, np.float32)


def _is_close(a: np.float32, b: np.float32) -> bool:
    """Whether AMCT takes two ends of a range for equal."""
    return math.isclose(float(a), float(b), abs_tol=float(FLT_EPSILON))
