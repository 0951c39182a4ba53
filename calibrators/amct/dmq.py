"""DMQ balancer: moves range from activations to weights, one factor per input channel.

::

    activation channel c  / factor_c  -->  AscendQuant
    weight     channel c  * factor_c           factor = act_max^s / weight_max^(1 - s)

Source: hicann/amct, graph_based custom_op/dmq_balancer; measured on AMCT's own outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import checked
from calibrators.amct.grid import FLT_EPSILON
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array


def channel_max(x: NDArray[np.floating], axis: int) -> Float32Array:
    """Largest |x| of each channel along `axis`, float32 [C].

    Raises:
        CalibrationError: wrong dtype, empty, NaN or Inf.
    """
    data = np.abs(checked(x, "tensor"))
    others = tuple(a for a in range(data.ndim) if a != axis % data.ndim)
    return np.asarray(data.max(axis=others), np.float32)


def weight_channel_max(weight: NDArray[np.floating], group: int = 1) -> Float32Array:
    """Weight [C_out, C_in / group, ...] -> largest |w| of each input channel, float32 [C_in]."""
    c_out, c_in = checked(weight, "weight").shape[:2]
    split = np.abs(weight).reshape(group, c_out // group, c_in, -1)
    return np.asarray(split.max(axis=(1, 3)).reshape(-1), np.float32)


def balance_factors(
    act_max: Float32Array, weight_max: Float32Array, *, strength: float = 0.5
) -> Float32Array:
    """Largest |activation| and |weight| per input channel [C] -> factors [C], float32.

    Args:
        act_max: [C], from `channel_max`.
        weight_max: [C], from `weight_channel_max`.
        strength: migration strength s in [0.2, 0.8].

    A channel that is zero in both keeps factor 1; one that is zero in one of them takes the factor
    that brings its other side level with the largest of the tensor.

    Raises:
        CalibrationError: s out of range, or a factor outside (FLT_EPSILON, 1 / FLT_EPSILON).
    """
    if not 0.2 <= strength <= 0.8:
        raise CalibrationError(f"the DMQ migration strength must be in [0.2, 0.8], got {strength}")
    act, wts = np.asarray(act_max, np.float32), np.asarray(weight_max, np.float32)
    no_act, no_wts = act < FLT_EPSILON, wts < FLT_EPSILON
    one = np.float32(1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # replaced or refused below
        factor = act ** np.float32(strength) / wts ** np.float32(1 - strength)
        factor = np.where(no_act | no_wts, one, factor)
        from_weight = (wts * factor).max() / wts
        from_act = act / (act / factor).max()
    factor = np.where(no_act & ~no_wts, from_weight, factor)
    factor = np.where(no_wts & ~no_act, from_act, factor).astype(np.float32)
    if not ((factor > FLT_EPSILON) & (factor < one / FLT_EPSILON)).all():
        raise CalibrationError(
            "DMQ factors must be within float32's epsilon and its inverse, got"
            f" {factor.min()} to {factor.max()}; leave dmq_balancer off for this layer"
        )
    return factor
