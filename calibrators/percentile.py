"""Percentile calibration: clip the tails that hold less than a given share of the values.

The symmetric threshold is the percentile of |x|; the affine range cuts each side at its own
percentile, so that a one-sided tensor loses nothing at its bound.

Source: H. Wu et al., "Integer Quantization for Deep Learning Inference", arXiv:2004.09602, 3.3.

Min-max calibration: nothing is clipped. TensorRT's MinMax rule, amax = max |x|.

TensorRT's legacy calibrator, as far as it is known: a quantile of |x|, without its regression.

Source: the header of the legacy table that comes with TensorRT 6 states the quantile; what the
calibrator then does with its cutoff is not published.

Room for larger values than were seen, where the large ones are few.

The more images, the further the largest value lies out: where the few largest thin out evenly, a
hundred times as many values reach as much further as the largest lies above the hundredth::

    values above x
      100 |     *
       10 |        *
        1 |           *
     1/10 |              .
    1/100 +-----------------o------ x
               x100   max   max + (max - x100)

A tensor that ends sharply, as a mask that is sure of most places, has its hundredth value beside
the largest, and gets next to no room. Of few values no tail can be told: it begins at the hundredth
of the largest, or at the largest hundredth part, whichever is less.

Source: I. Weissman, "Estimation of parameters and large quantiles based on the k largest
observations", J. Amer. Statist. Assoc. 73 (1978), of an exponential tail, whose spread is taken
from the two ends of those observations alone.
"""

from __future__ import annotations

from dataclasses import replace

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


def minmax(histogram: Histogram) -> Scale:
    """Statistics of one tensor -> the range of its data."""
    low, high = histogram.minimum, histogram.maximum
    return Scale(
        lo=low,
        hi=high,
        amax=histogram.amax,
        observed_min=low,
        observed_max=high,
        method="minmax",
    )


QUANTILE = 0.999999


def legacy(histogram: Histogram) -> Scale:
    """Statistics of one tensor -> the range that holds the legacy quantile of its values."""
    return replace(percentile(histogram, percent=QUANTILE * 100), method="legacy")


_RANK = 100  # the value, from the largest, at which a tail begins
_SHARE = 100  # a tail is no more than this part of all values


def with_room(scale: Scale, histogram: Histogram, most: float) -> Scale:
    """The affine range, its upper end moved out to hold what the tail may yet bring.

    Args:
        scale: what a search found.
        histogram: statistics of the tensor.
        most: how far the tail is followed, in real units; what was seen up to there is
            not clipped.
    """
    return replace(scale, hi=max(scale.hi, min(histogram.maximum + tail(histogram), most)))


def tail(histogram: Histogram) -> float:
    """How far the largest value lies above where the tail begins, in real units; 0 of few values.

    Args:
        histogram: statistics of the tensor, to a bin.
    """
    rank = min(_RANK, histogram.total // _SHARE)
    if rank < 2:
        return 0.0
    above = np.cumsum(histogram.signed()[::-1])
    begins = histogram.edges()[::-1][int(np.searchsorted(above, rank))]
    return max(histogram.maximum - float(begins), 0.0)
