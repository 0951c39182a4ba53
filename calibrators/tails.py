"""Room for larger values than were seen, where the large ones are few.

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

from calibrators.histogram import Histogram
from calibrators.scales import Scale

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
