"""Entropy calibration: the clip threshold with the least KL divergence, as in TensorRT.

For every i from 128 to 2048, the first i bins of a 2048-bin histogram of |x| are kept::

    h:  bin 0    1 ............ i-1 | i ............ 2047
        (set 0)  kept               | outliers, added to P's bin i-1
        |----- 128 levels of -------|
        bin j belongs to level floor(j * 128 / i)

    P = kept bins + outliers in the last one          distribution of the clipped data
    Q = each level's raw sum, spread evenly over      distribution with 128 integers
        its non-empty bins
    KL(P || Q) = sum p ln(p / q), infinite where p > 0 = q

The smallest KL wins, with the last i on ties; the threshold is T = (i + 0.5) * R / 2048.

Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017, with the details (bin 0 ignored,
raw sums in Q, i up to 2048 inclusive, mid-bin threshold, last tie) established by reproducing
calibration tables that TensorRT 7.2 wrote.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import Float64Array, Int64Array
from calibrators.histogram import Histogram, prefix_sums
from calibrators.scales import Scale

BINS = 2048
LEVELS = 128
_TOLERANCE = 1e-9  # largest error of the divergences from prefix sums


def search_bins(histogram: Int64Array) -> int:
    """Return how many bins to keep, 128 to 2048, for the least KL divergence.

    `histogram`: [2048] counts of |x| over [0, R].
    """
    counts = histogram.astype(np.float64)
    counts[0] = 0.0  # as in TensorRT
    if not counts.any():  # all values are in bin 0, or there are none
        return BINS

    approximate_kls = _divergences(counts)  # of 128, 129, ... kept bins
    is_near_least = approximate_kls <= approximate_kls.min() + _TOLERANCE
    candidates = np.flatnonzero(is_near_least) + LEVELS
    min_kl = np.inf
    best_bin_count = BINS
    for bin_count in candidates.tolist():  # exact sums, so that equal divergences compare equal
        kl = divergence(counts, bin_count)
        if kl <= min_kl:  # the last one on ties
            min_kl = kl
            best_bin_count = bin_count
    return best_bin_count


def threshold(i: int, full_range: float) -> float:
    """Return the clip threshold in real units for i kept bins: (i + 0.5) * R / 2048."""
    return (i + 0.5) * full_range / BINS


def divergence(counts: Float64Array, kept_bins: int) -> float:
    """Return KL(P || Q) if the first `kept_bins` of [2048] `counts` are kept; counts[0] is 0.

    P are the kept counts, the last one with all counts beyond it. In Q each of 128 levels, runs of
    bins, has its mean count in all its bins that are not empty.
    """
    p = counts[:kept_bins].copy()
    p[-1] += counts[kept_bins:].sum()
    level_by_bin = np.arange(kept_bins) * LEVELS // kept_bins
    is_occupied = counts[:kept_bins] > 0
    level_sums = np.bincount(level_by_bin, weights=counts[:kept_bins], minlength=LEVELS)
    occupied_counts = np.bincount(level_by_bin, weights=is_occupied, minlength=LEVELS)
    level_means = level_sums / np.maximum(occupied_counts, 1)
    q = np.where(is_occupied, level_means[level_by_bin], 0.0)
    if q.sum() == 0 or np.any((p > 0) & (q == 0)):
        return np.inf
    p = p / p.sum()
    q = q / q.sum()
    is_positive = p > 0
    return float((p[is_positive] * np.log(p[is_positive] / q[is_positive])).sum())


def _divergences(counts: Float64Array) -> Float64Array:
    """Return KL(P, Q) for every number of bins that can be kept, 128 to 2048: [1921] float64.

    P has the count p of each kept bin; the last one also has the outliers, all counts beyond it.
    The kept bins are split into 128 levels, runs of neighbouring bins. Q has one value for the
    occupied bins of a level, the mean s / n: s is the sum of the level's counts without outliers, n
    the number of its occupied bins. With A the sum of all counts and S that of the kept bins::

        A * KL = sum p ln p  -  sum p ln(s / n)  +  A ln(S / A)

        sum p ln(s / n) = sum over levels of s ln(s / n)  +  outliers * ln(mean of the last level)

    Sums over bins are differences of prefix sums: entry i is the sum of the bins before bin i.
    """
    # the numbers of kept bins to compare; arrays below without another shape have a value for each
    bin_counts = np.arange(LEVELS, BINS + 1)
    counts_before = prefix_sums(counts)
    occupied_before = prefix_sums(counts > 0)
    kept_sums = counts_before[bin_counts]
    total = counts.sum()
    last_count = counts[bin_counts - 1]  # of the last kept bin, without the outliers
    outliers = total - kept_sums

    # sum p ln p; the outliers change the term of the last bin
    kept_bin_terms = prefix_sums(_xlogx(counts))[bin_counts]
    p_terms = kept_bin_terms - _xlogx(last_count) + _xlogx(last_count + outliers)

    # sum p ln(s / n): a level is a run of 1 to 16 bins. The term s ln(s / n) is computed once for
    # each possible run, since a run is a level for many numbers of kept bins; then the term of each
    # level is looked up, by the index of its run
    run_terms = _run_terms(counts_before, occupied_before)
    level_terms = np.take(run_terms, _run_indices()).sum(axis=1)  # [1921, 128] -> [1921]

    # outliers * ln(mean of the last level)
    last_level_start = _level_starts()[:, LEVELS - 1]  # its first bin
    occupied_in_last = occupied_before[bin_counts] - occupied_before[last_level_start]
    last_level_sum = kept_sums - counts_before[last_level_start]
    last_mean = last_level_sum / np.maximum(occupied_in_last, 1)
    # 0 for an empty level: if there are outliers, the divergence is infinite, see below
    outlier_terms = outliers * _log_or_zero(last_mean)

    with np.errstate(divide="ignore", invalid="ignore"):
        total_terms = total * np.log(kept_sums / total)  # A ln(S / A)
        kl = (p_terms - level_terms - outlier_terms + total_terms) / total
    # Q is 0 where P is not: all kept bins are empty, or the last one is and gets the outliers
    is_infinite = (kept_sums == 0) | ((last_count == 0) & (outliers > 0))
    return np.where(is_infinite, np.inf, kl)


def _run_terms(sums: Float64Array, occupied: Float64Array) -> Float64Array:
    """Return s ln(s / n) of the runs of 1 to 16 bins from each bin on: [16 * 2049], shortest first.

    Every level is one of these runs, for every i (number of kept bins), and most runs are levels
    for many i. `sums` and `occupied` are prefix sums over the bins.
    """
    widths = np.arange(1, BINS // LEVELS + 1)[:, None]
    ends = np.minimum(np.arange(BINS + 1) + widths, BINS)
    run_sums = sums[ends] - sums
    mean = run_sums / np.maximum(occupied[ends] - occupied, 1)
    return np.asarray(run_sums * _log_or_zero(mean)).ravel()


@cache
def _level_starts() -> NDArray[np.intp]:
    """Return the first bin of each level, then i, for each i (kept bins): [1921, 129]."""
    # level l holds the bins j with floor(j * 128 / i) == l, which start at ceil(l * i / 128)
    bin_counts = np.arange(LEVELS, BINS + 1)
    return -(-np.arange(LEVELS + 1)[None, :] * bin_counts[:, None] // LEVELS)


@cache
def _run_indices() -> NDArray[np.intp]:
    """Return the index in `_run_terms` of each level, for each i (kept bins): [1921, 128]."""
    return (np.diff(_level_starts(), axis=1) - 1) * (BINS + 1) + _level_starts()[:, :-1]


def _xlogx(x: Float64Array) -> Float64Array:
    """Return x ln x, and 0 for 0."""
    return x * _log_or_zero(x)


def _log_or_zero(x: Float64Array) -> Float64Array:
    """Return ln x, and 0 for 0."""
    return np.log(np.where(x > 0, x, 1.0))


def entropy(histogram: Histogram) -> Scale:
    """Return the clip range of a tensor: symmetric, cut at the extremes of the data."""
    amax = threshold(search_bins(histogram.magnitudes(BINS)), histogram.full_range)
    return Scale(
        lo=max(histogram.minimum, -amax),
        hi=min(histogram.maximum, amax),
        amax=amax,
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method="entropy" if histogram.initial_range is None else "entropy-tensorrt",
    )
