"""Moving range between the channels of two layers: factors that leave the float result as it was.

What one layer makes is divided by a factor a channel, and the weights of the next are multiplied
by it. Nothing, Relu, PRelu and LeakyRelu between them let a positive factor through::

    W2 f(W1 x + b1)  =  (W2 S) f(S^-1 W1 x + S^-1 b1)          f(s x) = s f(x) for s > 0

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), equations 11 (factors) and 15 (absorbed biases); Xiao et al., "SmoothQuant" (ICML
2023), equation 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError

FloatArray = NDArray[np.float64]

_MOST = 1e4  # a factor beyond it would cost float32 digits rather than win int8 steps


def equal_factors(first: FloatArray, second: FloatArray) -> FloatArray:
    """Ranges of a layer's output channels and of the next one's input channels -> factors [C].

    After division and multiplication both ranges are sqrt(first * second). A channel that is zero
    on either side keeps its factor 1.

    Raises:
        CalibrationError: ranges of different lengths, negative or not finite.
    """
    return smooth_factors(first, second, strength=0.5)


def smooth_factors(
    activations: FloatArray, weights: FloatArray, *, strength: float = 0.5
) -> FloatArray:
    """Greatest |x| and |w| of each channel [C] -> a^strength / w^(1 - strength), [C].

    The activations are to be divided by it and the weights multiplied.

    Raises:
        CalibrationError: ranges of different lengths, negative or not finite; a strength outside
            0..1.
    """
    if not 0 <= strength <= 1:
        raise CalibrationError(f"a strength must be from 0 to 1, got {strength}")
    a, w = np.asarray(activations, np.float64), np.asarray(weights, np.float64)
    sound = a.shape == w.shape and np.isfinite(a + w).all() and (a >= 0).all() and (w >= 0).all()
    if not sound:
        raise CalibrationError(
            "ranges of channels must be finite, not negative and of one length, got shapes"
            f" {list(a.shape)} and {list(w.shape)}"
        )
    both = (a > 0) & (w > 0)
    safe_a, safe_w = np.where(both, a, 1.0), np.where(both, w, 1.0)
    factors = safe_a**strength / safe_w ** (1 - strength)
    return np.clip(factors, 1 / _MOST, _MOST)


def absorbable(mean: FloatArray, deviation: FloatArray) -> FloatArray:
    """Mean and deviation of a channel before its Relu [C] -> what can leave its bias, [C] >= 0.

    max(0, mean - 3 deviations): nearly all values stay above 0 without it.
    """
    return np.maximum(np.asarray(mean, np.float64) - 3 * np.asarray(deviation, np.float64), 0.0)
