"""MSE calibration: the clip range with the least squared error between x and its stored value.

Symmetric: thresholds amax * r are tried for a falling r. Affine: first the end that lies further
from 0 is lowered, then the other, each against the other's best, twice over::

    error |*                    .
          | *                 .     r = 1: no clipping, wide steps
          |   *            .        r small: fine steps, the tail is clipped
          |      * * . *
          +------------------------ r

The error comes from the histogram: a bin's values stand at its centre, and those beyond the clip
range at its end. A bin is at least 8 times finer than an int8 step; steps of 16 bits are finer
than the bins, and then clipping is all that the error sees.

Source: R. Banner et al., "Post training 4-bit quantization of convolutional networks",
arXiv:1810.05723, section 2; the search itself is a plain scan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import INT8, UINT8, Grid, rounded
from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale

_RATIOS = np.concatenate([np.arange(100, 20, -1), np.arange(20, 0, -0.5)]) / 100


def mse(histogram: Histogram, *, symmetric: Grid = INT8, affine: Grid = UINT8) -> Scale:
    """Statistics of one tensor -> the ranges with the least squared quantization error.

    Args:
        histogram: statistics of the tensor.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
    """
    return least_error(histogram, power=2.0, symmetric=symmetric, affine=affine, method="mse")


def least_error(
    histogram: Histogram, *, power: float, symmetric: Grid, affine: Grid, method: str
) -> Scale:
    """The ranges with the least sum of |error| to a power.

    Args:
        histogram: statistics of the tensor.
        power: 2 is the squared error; the greater, the more a clipped value weighs.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
        method: what the scale says that chose it.
    """
    amax = _symmetric(histogram, symmetric, power)
    low, high = _affine(histogram, affine, power)
    return Scale(
        lo=low,
        hi=high,
        amax=amax,
        observed_min=histogram.minimum,
        observed_max=histogram.maximum,
        method=method,
    )


def errors(
    centres: NDArray[np.float64],
    counts: NDArray[np.int64],
    lows: NDArray[np.float64],
    highs: NDArray[np.float64],
    grid: Grid,
    power: float = 2.0,
) -> NDArray[np.float64]:
    """Summed error [K], to a power, of storing [B] bin centres on `grid` over each [K] range.

    Each range is taken to hold 0 at a stored value, as every grid has it.
    """
    scale = (highs - lows) / grid.steps
    scale = np.where(scale > 0, scale, 1.0)[:, None]
    clipped = np.clip(centres[None, :], lows[:, None], highs[:, None])
    error = rounded(clipped / scale, grid) * scale - centres[None, :]
    weight = error * error if power == 2 else np.abs(error) ** power
    weight *= counts
    # numpy adds pairwise in one order everywhere, which a product of matrices does not
    return np.asarray(weight.sum(axis=1), np.float64)


def _symmetric(histogram: Histogram, grid: Grid, power: float) -> float:
    counts = histogram.magnitudes(BINS)
    centres, counts = _occupied((np.arange(BINS) + 0.5) * histogram.full_range / BINS, counts)
    highs = histogram.amax * _RATIOS
    if not centres.size:
        return histogram.amax
    return float(highs[np.argmin(errors(centres, counts, -highs, highs, grid, power))])


def _affine(histogram: Histogram, grid: Grid, power: float) -> tuple[float, float]:
    edges = histogram.edges()
    centres, counts = _occupied((edges[:-1] + edges[1:]) / 2, histogram.signed())
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    if not centres.size:
        return low, high
    for side in ("high", "low", "high", "low") if high >= -low else ("low", "high") * 2:
        lows = np.minimum(histogram.minimum, 0.0) * _RATIOS if side == "low" else None
        highs = np.maximum(histogram.maximum, 0.0) * _RATIOS if side == "high" else None
        tried = errors(
            centres,
            counts,
            np.full(_RATIOS.size, low) if lows is None else lows,
            np.full(_RATIOS.size, high) if highs is None else highs,
            grid,
            power,
        )
        best = int(np.argmin(tried))
        low = low if lows is None else float(lows[best])
        high = high if highs is None else float(highs[best])
    return low, high


def _occupied(
    centres: NDArray[np.float64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The bins that hold anything but the one around 0, whose values lose nothing to clipping."""
    inside = (counts > 0) & (np.abs(centres) > 0)
    return centres[inside], counts[inside]
