"""Lp calibration: the clip range with the least sum of |x - stored x|^p, p greater than 2.

The squared error pays for a fine step with the few values that are far out. In a detector those
few are what it found: they are rare in the images that calibrate and decide in those that do not.
With a greater p a value weighs more the further it is clipped, and p to infinity keeps everything::

    p    2 (mse)        3            inf (minmax)
         fine steps  <------>  nothing is clipped

Source: the norm of Y. Nahshan et al., "Loss Aware Post-training Quantization", arXiv:1911.07190,
section 4.1; the search is that of `calibrators.mse`.
"""

from __future__ import annotations

from calibrators.grids import INT8, UINT8, Grid
from calibrators.histogram import Histogram
from calibrators.mse import least_error
from calibrators.scales import Scale


def lp(
    histogram: Histogram, *, power: float, symmetric: Grid = INT8, affine: Grid = UINT8
) -> Scale:
    """Statistics of one tensor -> the ranges with the least error to this power.

    Args:
        histogram: statistics of the tensor.
        power: p, as `searches.LpParams` checks it.
        symmetric: grid that `amax` is chosen for.
        affine: grid that `lo` and `hi` are chosen for.
    """
    return least_error(
        histogram, power=power, symmetric=symmetric, affine=affine, method=f"lp-{power:g}"
    )
