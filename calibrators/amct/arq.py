"""ARQ: AMCT's weight scales, one per output channel or one per tensor.

The extreme of each row decides both the scale and, by its sign, the denominator::

    row extremes   -0.9 .... 0.5          |-0.9| > |0.5|  ->  scale = 0.9 / 128
                   -0.2 .... 0.7          |-0.2| < |0.7|  ->  scale = 0.7 / 127

Source: hicann/amct, graph_based custom_op/arq; measured on AMCT's own outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.grid import IntArray, ascend_quantize, ascend_scale_offset
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array

BITS = (4, 6, 7, 8)


def arq(
    weight: NDArray[np.floating],
    *,
    bits: int = 8,
    channel_wise: bool = True,
    with_offset: bool = False,
) -> tuple[Float32Array, IntArray]:
    """Weight [C_out, ...], float32 or float16 -> (scale, offset), each [C_out] or [1].

    Args:
        weight: output channels on axis 0 (see `channels_first` for ConvTranspose).
        bits: 4, 6, 7 or 8.
        channel_wise: one scale per output channel, else one per tensor.
        with_offset: affine; the hardware takes offset 0 only, so deployments leave this off.

    Raises:
        CalibrationError: wrong dtype, NaN or Inf, no elements, or a scale that is not finite.
    """
    rows = checked(weight, "weight").reshape(weight.shape[0] if channel_wise else 1, -1)
    return ascend_scale_offset(
        rows.max(axis=1), rows.min(axis=1), with_offset=with_offset, bits=bits
    )


def arq_integers(
    weight: NDArray[np.floating], scale: Float32Array, offset: IntArray, *, bits: int = 8
) -> NDArray[np.int8]:
    """Weight [C_out, ...] -> int8 of the same shape: clip(rne(w / scale + offset))."""
    shape = (-1,) + (1,) * (weight.ndim - 1)
    steps = ascend_quantize(weight, scale.reshape(shape), offset.reshape(shape), bits=bits)
    return steps.astype(np.int8)


def arq_fake_quantize(
    weight: NDArray[np.floating], scale: Float32Array, offset: IntArray, *, bits: int = 8
) -> NDArray[np.floating]:
    """Weight [C_out, ...] -> what its integers stand for, in the weight's own dtype."""
    shape = (-1,) + (1,) * (weight.ndim - 1)
    step, zero = scale.reshape(shape), offset.reshape(shape)
    steps = ascend_quantize(weight, step, zero, bits=bits)
    return ((steps - zero.astype(np.float32)) * step).astype(weight.dtype)


def channels_first(weight: NDArray[np.generic], group: int) -> NDArray[np.generic]:
    """ConvTranspose weight [C_in, C_out / group, ...] -> [C_out, C_in / group, ...]."""
    c_in, c_out, *kernel = weight.shape
    split = weight.reshape(group, c_in // group, c_out, *kernel)
    return np.swapaxes(split, 1, 2).reshape(group * c_out, c_in // group, *kernel)


def channels_back(weight: NDArray[np.generic], group: int) -> NDArray[np.generic]:
    """Inverse of `channels_first`: [C_out, C_in / group, ...] -> [C_in, C_out / group, ...]."""
    c_out, c_in, *kernel = weight.shape
    split = weight.reshape(group, c_out // group, c_in, *kernel)
    return np.swapaxes(split, 1, 2).reshape(group * c_in, c_out // group, *kernel)


def checked(x: NDArray[np.generic], what: str) -> Float32Array:
    """`x` as float32, or the refusal AMCT would give.

    Raises:
        CalibrationError: not float32 or float16, empty, or holding NaN or Inf.
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float16):
        raise CalibrationError(
            f"AMCT quantizes a float32 or float16 {what}, got {x.dtype}; cast it first"
        )
    if x.size == 0:
        raise CalibrationError(f"the {what} to be quantized must not be empty, got {x.shape}")
    if not (np.isfinite(x.min()) and np.isfinite(x.max())):  # NaN shows in both
        bad = int((~np.isfinite(x)).sum())
        raise CalibrationError(
            f"the {what} to be quantized must be finite, got {bad} NaN or Inf values of {x.size}"
        )
    return x.astype(np.float32, copy=False)
