"""Weights of which no x86 CPU saturates the products: two beside each other fit 16 bits.

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

from calibrators.grids import INT16, UINT8

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
