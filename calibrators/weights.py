"""Weight preprocessing: bias correction, saturation-free weight pairs.

**Bias correction** estimates from a few samples how far quantization shifts the mean of a channel.
Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2; the shrinkage is calib8's.

**Pairs**: a CPU with int8 dot products sums in 32 bits. An older x86 CPU multiplies uint8 by int8
and adds two products in 16 bits with saturation (VPMADDUBSW)::

    a[0] w[0] + a[1] w[1]            a up to 255: of one sign, safe up to |w[0]| + |w[1]| = 128
    a[2] w[2] + a[3] w[3]

Which two weights are added depends on the order of values in an input patch: position by position,
channel by channel, in ONNX Runtime and oneDNN::

    3 channels     a b c | a b c | a b c        4 channels     a b c d | a b c d
    pairs          --- ----- ---  ...           pairs          --- ---   --- ---

An odd number of channels may be padded with zeros, so there every two neighbours count as a pair.
Depthwise Convs have other kernels, which sum in 32 bits.

A channel whose largest pair exceeds the limit gets a larger scale, with 126 steps for the pair, so
that it stays within 128 however both are rounded. The channel usually loses a fifth of its steps;
with 7-bit weights every channel would lose half.

Source: MLAS of ONNX Runtime, GemmU8S8KernelAvx2; its documentation, "Quantize ONNX models", on
`reduce_range`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import INT16, UINT8, Float32Array, RealArray

PAIR_LIMIT = INT16.qmax // UINT8.qmax  # largest sum of a pair, in steps: 128
PAIR_ROUNDING = 2  # by less than this, in steps, a pair grows if both its weights are rounded up


def is_depthwise(groups: int, outputs: int, inputs: int) -> bool:
    """Whether a Conv is depthwise; its kernels sum in 32 bits, so that pairs do not matter.

    `outputs`: output channels of all groups. `inputs`: input channels of a group.
    """
    return groups > 1 and outputs == groups and inputs == 1


def pair_scales(rows: RealArray, scales: Float32Array) -> Float32Array:
    """Return scales with which the pairs of a weight fit, no smaller than before.

    `rows`: weight in real units, [C_out, C_in of a group, ...]. `scales`: its scales, float32
    [C_out], or [1] per tensor.
    """
    min_scales = pair_maxima(rows, scales) / (PAIR_LIMIT - PAIR_ROUNDING)
    return np.maximum(scales, min_scales.astype(np.float32))


def pair_maxima(rows: RealArray, scales: Float32Array) -> Float32Array:
    """Return the largest of `pair_sums` for each scale: of a channel, or of all if it is one."""
    axis = None if scales.size == 1 else 1
    maxima = pair_sums(rows).max(axis=axis, initial=0.0)
    return np.asarray(maxima, np.float32).reshape(-1)


def pair_sums(weights: NDArray[np.generic]) -> Float32Array:
    """Return |w| + |w'| of each pair of equal sign, else the larger |w|: [C_out, pairs].

    A pair is a weight and the next one, whose products are added in 16 bits. Pairs start at every
    second weight, or at every weight if they may overlap.

    `weights`: [C_out, C_in of a group, ...], in real units or in steps.
    """
    # each row in the order in which the CPU reads it, and 0 after the last weight
    padded = np.pad(_flatten(weights), ((0, 0), (0, 1))).astype(np.float32)
    stride = pair_stride(weights.shape)
    first_weights = padded[:, :-1:stride]
    second_weights = padded[:, 1::stride]
    # a zero adds nothing, whatever its sign
    has_equal_sign = (first_weights > 0) == (second_weights > 0)
    first_sizes = np.abs(first_weights)
    second_sizes = np.abs(second_weights)
    with np.errstate(over="ignore"):  # sums of weights near 1e38 are capped
        sums = np.minimum(first_sizes + second_sizes, np.finfo(np.float32).max)
    return np.where(has_equal_sign, sums, np.maximum(first_sizes, second_sizes))


def pair_stride(shape: Sequence[int]) -> int:
    """Return the distance between pairs in a flattened row of a weight [C_out, C_in, ...]."""
    return 1 if shape[1] % 2 and len(shape) > 2 else 2


def tight_pair_mask(weight_steps: RealArray) -> NDArray[np.bool_]:
    """Return a mask of the weights that must be rounded to nearest, so that the scales stay.

    An older x86 CPU adds the products of two neighbouring weights, a pair, in 16 bits, which can
    overflow. An output channel's weights lie in channels-last order: position by position in the
    window, and at each position one input channel after the other. Pairs start at every second
    weight, or at every weight if the number of input channels is odd.

    `pair_scales` limits the largest pair of a channel to 126 steps. Rounding both weights of a pair
    up adds less than 2, so a pair above 124 steps could exceed the limit and change the scale: its
    weights are in the mask.

    `weight_steps`: weight / scale of `pair_scales`, [C_out, C_in of a group, ...]; the mask has the
    same shape.
    """
    max_steps = PAIR_LIMIT - PAIR_ROUNDING  # of a pair, by `pair_scales`: 126
    is_tight = pair_sums(weight_steps) > max_steps - PAIR_ROUNDING  # [C_out, pairs]
    out_channels, in_channels, *kernel = weight_steps.shape
    weight_count = _flatten(weight_steps).shape[1]
    stride = pair_stride(weight_steps.shape)
    # one column more than weights: the last weight may be the first of a pair
    is_in_tight_pair = np.zeros((out_channels, weight_count + 1), np.bool_)
    is_in_tight_pair[:, 0:weight_count:stride] = is_tight  # first weight of each pair
    is_in_tight_pair[:, 1 : weight_count + 1 : stride] |= is_tight  # second weight

    channels_last = is_in_tight_pair[:, :weight_count].reshape(out_channels, *kernel, in_channels)
    return np.ascontiguousarray(np.moveaxis(channels_last, -1, 1))


def _flatten(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    """Flatten [C_out, C_in, ...] to [C_out, values], position by position, channel by channel."""
    return np.moveaxis(rows, 1, -1).reshape(len(rows), -1)
