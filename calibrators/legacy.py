"""TensorRT's legacy calibrator, as far as it is known: a quantile of |x|, without its regression.

Source: the header of the legacy table that comes with TensorRT 6 states the quantile; what the
calibrator then does with its cutoff is not published.
"""

from __future__ import annotations

from dataclasses import replace

from calibrators.histogram import Histogram
from calibrators.percentile import percentile
from calibrators.scales import Scale

QUANTILE = 0.999999


def legacy(histogram: Histogram) -> Scale:
    """Statistics of one tensor -> the range that holds the legacy quantile of its values."""
    return replace(percentile(histogram, percent=QUANTILE * 100), method="legacy")
