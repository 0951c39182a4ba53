"""Percentile calibration: clip the tails that hold less than a given share of the values.

The symmetric threshold is the percentile of |x|; the affine range cuts each side at its own
percentile, so that a one-sided tensor loses nothing at its bound.

Source: H. Wu et al., "Integer Quantization for Deep Learning Inference", arXiv:2004.09602, 3.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale


def percentile(histogram: Histogram, *, percent: float) -> Scale:
    """Statistics of one tensor -> the range that holds `percent` of its values.

    Args:
        histogram: statistics of the tensor.
        percent: share of the values to keep, in percent, as `searches.PercentileParams` checks
            it: 50 < percent <= 100. Within a bin the values count as evenly spread.
    """
    keep = percent / 100
    amax = quantile(histogram.magnitudes(BINS), keep) * histogram.full_range / BINS
    least, most = histogram.minimum, histogram.maximum
    low = max(least, min(_edge(histogram, 1 - keep), 0.0)) if least < 0 else least
    high = min(most, max(_edge(histogram, keep), 0.0)) if most > 0 else most
    return Scale(
        lo=min(low, most),  # values that share one bin: its quantiles may lie beyond them
        hi=max(high, least),
        amax=min(amax, histogram.amax),
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method=f"percentile-{percent:g}",
    )


def quantile(counts: NDArray[np.int64], share: float) -> float:
    """[B] counts -> position of the quantile `share` in 0..B, in bins, linear within a bin."""
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    rank = share * cumulative[-1]
    above = int(np.searchsorted(cumulative, rank, side="left"))
    if above == 0:
        return 0.0
    inside = cumulative[above] - cumulative[above - 1]
    return above - 1 + float(rank - cumulative[above - 1]) / float(inside)


def _edge(histogram: Histogram, share: float) -> float:
    position = quantile(histogram.signed(), share)
    edges = histogram.edges()
    below = int(position)
    if below == edges.size - 1:
        return float(edges[below])
    return float((edges[below + 1] - edges[below]) * (position - below) + edges[below])
