"""Percentile, min-max and legacy calibration, and extrapolation of rare large values.

**Percentile** clips the tails that hold less than a given share of the values. The symmetric
threshold is the percentile of |x|; the affine range is cut at each side's percentile, so that a
one-sided tensor loses nothing at its bound. Source: H. Wu et al., "Integer Quantization for Deep
Learning Inference", arXiv:2004.09602, 3.3.

**Min-max** clips nothing: amax = max |x|, as TensorRT's MinMax calibrator.

**Legacy** is TensorRT's legacy calibrator as far as it is known: a quantile of |x|, without its
regression. Source: the header of the legacy table that comes with TensorRT 6 states the quantile;
the use of its cutoff is not published.

**Extrapolation** (`extend_by_tail`): the more images, the larger the maximum. If the largest values
thin out exponentially, a hundred times as many values reach further by the distance from the
hundredth largest value to the maximum::

    values above x
      100 |     *
       10 |        *
        1 |           *
     1/10 |              .
    1/100 +-----------------o------ x
               x100   max   max + (max - x100)

For a sharply bounded tensor, such as a mask with mostly certain pixels, the hundredth largest value
is close to the maximum, so the range hardly grows. With few values the tail is shorter: it begins
at the hundredth largest value or at the largest 1 %, whichever has fewer values. Source: I.
Weissman, "Estimation of parameters and large quantiles based on the k largest observations", J.
Amer. Statist. Assoc. 73 (1978), for an exponential tail; its spread is estimated here from the two
ends of those observations only.
"""

from dataclasses import replace

import numpy as np

from calibrators.grids import Int64Array
from calibrators.histogram import BINS, Histogram, prefix_sums
from calibrators.scales import Scale

QUANTILE = 0.999999
_MAX_TAIL_VALUES = 100  # values that the upper tail holds at most
_MIN_VALUES_PER_TAIL_VALUE = 100  # the tail holds at most 1 / 100 of all values


def percentile(histogram: Histogram, *, percent: float) -> Scale:
    """Return the clip range that keeps a share of a tensor's values, and clips the largest.

    The threshold `amax` clips the share 100 - percent of the |values|. The affine range is apart
    from it: `lo` clips this share of all values at the lower end, `hi` the same share at the upper
    end; but `lo` clips negative values only, and `hi` positive ones. Values count as evenly spread
    within a bin.

    Args:
        histogram: statistics of the tensor.
        percent: share of the values to keep, over 50 and at most 100.
    """
    share = percent / 100
    bin_width = histogram.full_range / BINS
    position = quantile(histogram.magnitudes(BINS), share)  # of the threshold, in bins above 0
    amax = position * bin_width
    minimum = histogram.minimum
    maximum = histogram.maximum
    # `lo` clips negative values only: if there are none, it is the minimum. `hi` is the same for
    # positive values and the maximum
    lo = max(minimum, min(_signed_quantile(histogram, 1 - share), 0.0))
    hi = min(maximum, max(_signed_quantile(histogram, share), 0.0))
    return Scale(
        # a quantile is exact to a bin only: that of negative values may be above the maximum, that
        # of positive ones below the minimum
        lo=min(lo, maximum),
        hi=max(hi, minimum),
        amax=min(amax, histogram.amax),
        observed_min=minimum,
        observed_max=maximum,
        method=f"percentile-{percent:g}",
    )


def quantile(counts: Int64Array, share: float) -> float:
    """Return the position of a quantile in [B] counts, 0..B in bins, linear within a bin."""
    counts_below = prefix_sums(counts)  # number of values below each edge of a bin
    rank = share * counts_below[-1]
    upper_edge = int(np.searchsorted(counts_below, rank))  # of the bin that has the quantile
    if upper_edge == 0:
        return 0.0
    lower_edge = upper_edge - 1
    bin_count = counts_below[upper_edge] - counts_below[lower_edge]
    return lower_edge + float(rank - counts_below[lower_edge]) / float(bin_count)


def _signed_quantile(histogram: Histogram, share: float) -> float:
    """Return a quantile of the values with their signs, in real units."""
    position = quantile(histogram.signed(), share)  # in bins
    edges = histogram.edges()
    lower_edge = int(position)
    if lower_edge == edges.size - 1:
        return float(edges[lower_edge])
    # not by np.interp, which rounds once in place of twice where its compiler fuses both operations
    bin_width = edges[lower_edge + 1] - edges[lower_edge]
    return float(bin_width * (position - lower_edge) + edges[lower_edge])


def minmax(histogram: Histogram) -> Scale:
    """Return the range of a tensor's data, unclipped."""
    low = histogram.minimum
    high = histogram.maximum
    return Scale(
        lo=low, hi=high, amax=histogram.amax, observed_min=low, observed_max=high, method="minmax"
    )


def legacy(histogram: Histogram) -> Scale:
    """Return the range that holds the legacy quantile of a tensor's values."""
    return replace(percentile(histogram, percent=QUANTILE * 100), method="legacy")


def extend_by_tail(scale: Scale, histogram: Histogram, limit: float) -> Scale:
    """Return the scale with the upper end of its affine range extended by the tail.

    `limit`: limit of the extension, in real units; observed values up to it are not clipped.
    """
    extended = min(histogram.maximum + tail_length(histogram), limit)
    return replace(scale, hi=max(scale.hi, extended))


def tail_length(histogram: Histogram) -> float:
    """Return the length of the upper tail in real units, to a bin; 0 with too few values."""
    rank = min(_MAX_TAIL_VALUES, histogram.total // _MIN_VALUES_PER_TAIL_VALUE)
    if rank < 2:
        return 0.0
    counts_above = np.cumsum(histogram.signed()[::-1])
    tail_start = histogram.edges()[::-1][np.searchsorted(counts_above, rank)]
    return max(histogram.maximum - float(tail_start), 0.0)
