"""Moving range between the channels of two layers: factors that leave the float result as it was.

What one layer makes is divided by a factor a channel, and the weights of the next are multiplied
by it. Nothing, Relu, PRelu and LeakyRelu between them let a positive factor through::

    W2 f(W1 x + b1)  =  (W2 S) f(S^-1 W1 x + S^-1 b1)          f(s x) = s f(x) for s > 0

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), equations 11 (factors) and 15 (absorbed biases); Xiao et al., "SmoothQuant" (ICML
2023), equation 4.

What quantization moves the mean of a channel by, as far as a few samples tell.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2; the shrinking is calib8's own.

Weights of which no x86 CPU saturates the products: two beside each other fit 16 bits.

A CPU with int8 dot products sums in 32 bits. An older x86 multiplies uint8 by int8 and adds two
products in 16, where what passes the end is lost (VPMADDUBSW)::

    a[0] w[0] + a[1] w[1]            a up to 255: of one sign, safe up to |w[0]| + |w[1]| = 128
    a[2] w[2] + a[3] w[3]

Which two meet is told by the order in which a kernel goes through an input patch: place by place,
channel by channel, as ONNX Runtime's and oneDNN's do::

    3 channels     a b c | a b c | a b c        4 channels     a b c d | a b c d
    pairs          --- ----- ---  ...           pairs          --- ---   --- ---

Channels of an odd number may get zeros beside them, so there all neighbours are held to it. A
depthwise Conv has other kernels, which sum in 32 bits.

A channel whose largest pair does not fit gets a larger scale: of a pair's 126 steps, 128 are left
however both are rounded. So what a channel loses goes by its own pairs, a fifth of its steps
usually; of 7 bits all lose half.

Source: MLAS of ONNX Runtime, GemmU8S8KernelAvx2; its documentation, "Quantize ONNX models", on
`reduce_range`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import INT16, UINT8

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


def trusted_mean(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Differences [samples, C] -> their mean [C], shrunk where the samples do not agree.

    The mean m is multiplied by m^2 / (m^2 + variance / samples); of one sample it is taken whole.
    """
    mean = differences.mean(axis=0)
    if len(differences) < 2:
        return np.asarray(mean, np.float64)
    doubt = differences.var(axis=0, ddof=1) / len(differences)
    square = mean * mean
    with np.errstate(invalid="ignore"):
        share = np.where(square > 0, square / (square + doubt), 0.0)
    return np.asarray(mean * share, np.float64)


FIT = INT16.qmax // UINT8.qmax  # steps of a pair: 128
ROUNDED = 2  # steps that two weights may gain together, each rounded up


def is_depthwise(groups: int, outputs: int, inputs: int) -> bool:
    """Whether a Conv's kernels sum in 32 bits, so that no pairs of it need to fit.

    Args:
        groups: of the Conv, several where it is depthwise.
        outputs: channels that it makes, one a group.
        inputs: channels of a group that it reads, one.
    """
    return groups > 1 and outputs == groups and inputs == 1


def pair_scales(rows: NDArray[np.floating], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales that store a weight so that its pairs fit, as large as they were or larger.

    Args:
        rows: weight in real units, [C_out, C_in of a group, ...]: output channels first.
        scales: of its channels, float32 [C_out]; or [1], one for all.

    Returns:
        float32 of the shape of `scales`.
    """
    largest = pair_sums(rows).max(axis=1, initial=0.0)
    if scales.size == 1:
        largest = largest.max(keepdims=True)
    least = (largest / (FIT - ROUNDED)).astype(np.float32)
    return np.asarray(np.maximum(scales, least), np.float32)


def pair_sums(rows: NDArray[np.generic]) -> NDArray[np.float32]:
    """|w| + |w'| of every pair of one sign, and |w| of the larger of any other: [C_out, pairs].

    Args:
        rows: [C_out, C_in of a group, ...], in real units or in steps.
    """
    wide = np.pad(_flat(rows), ((0, 0), (0, 2))).astype(np.float32)  # none beside it: 0
    step = step_of(rows.shape)
    first, second = slice(0, wide.shape[1] - 2, step), slice(1, wide.shape[1] - 1, step)
    one_sign = (wide[:, first] > 0) == (wide[:, second] > 0)
    np.abs(wide, out=wide)
    left, right = wide[:, first], wide[:, second]
    with np.errstate(over="ignore"):  # of weights of 1e38 there is no larger sum
        both = np.minimum(left + right, np.finfo(np.float32).max)
    return np.where(one_sign, both, np.maximum(left, right))


def step_of(shape: Sequence[int]) -> int:
    """From where a pair of a weight [C_out, C_in of a group, ...] begins to where the next does.

    Along a patch, place by place, channel by channel.
    """
    return 1 if shape[1] % 2 and len(shape) > 2 else 2


def in_tight_pairs(steps: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Weights of pairs that may not fit, or give another scale, once both are rounded up.

    Args:
        steps: weight / scale of `pair_scales`, [C_out, C_in of a group, ...].

    Returns:
        As `steps`; with these at their nearest, the largest pair of a channel stays the largest.
    """
    tight = pair_sums(steps) > FIT - 2 * ROUNDED
    width, step = _flat(steps).shape[1], step_of(steps.shape)
    held = np.zeros((len(steps), width + 2), np.bool_)
    held[:, 0:width:step] = tight
    held[:, 1 : width + 1 : step] |= tight
    flat = held[:, :width].reshape(len(steps), *steps.shape[2:], steps.shape[1])
    return np.ascontiguousarray(np.moveaxis(flat, -1, 1))


def _flat(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    """[C_out, C_in, ...] -> [C_out, values], place by place, channel by channel."""
    return np.moveaxis(rows, 1, -1).reshape(len(rows), -1)
