"""Min-max calibration: nothing is clipped. TensorRT's MinMax rule, amax = max |x|."""

from __future__ import annotations

from calibrators.histogram import Histogram
from calibrators.scales import Scale


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
