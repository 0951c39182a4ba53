"""AMCT's grid: a signed one whose offset is added before rounding; all arithmetic in float32.

The offset is thus a zero_point. A symmetric scale divides by 2^(bits-1) where the extreme is
negative, so that the lowest code is reached, and by 2^(bits-1) - 1 where it is positive::

    extreme  -1.0   scale 1.0 / 128     codes -128 ......... 0 ......... 127
    extreme  +1.0   scale 1.0 / 127     codes -127 ......... 0 ......... 127

Source: hicann/amct, calculate_scale_offset, process_scale, cast_fp16_precision and cast_to_s19,
measured on AMCT itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array

FLT_EPSILON = np.float32(2.0**-23)
IntArray = NDArray[np.int32]


def ascend_range(bits: int) -> tuple[int, int]:
    """(qmin, qmax) of a signed Ascend grid: (-128, 127) for 8 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def ascend_denominator(hi: NDArray[np.floating], lo: NDArray[np.floating], bits: int) -> IntArray:
    """Codes that the symmetric grid spends on its extreme: 128 if |lo| > |hi|, else 127."""
    return np.asarray(2 ** (bits - 1) - 1 + (np.abs(hi) < np.abs(lo)), np.int32)


def ascend_guard(scale: Float32Array) -> Float32Array:
    """A scale under FLT_EPSILON becomes 1, as in AMCT: the tensor is as good as zero."""
    return np.where(scale < FLT_EPSILON, np.float32(1.0), scale).astype(np.float32)


def ascend_scale_offset(
    hi: NDArray[np.floating], lo: NDArray[np.floating], *, with_offset: bool, bits: int = 8
) -> tuple[Float32Array, IntArray]:
    """Clip range [lo, hi] in real units -> (scale float32, offset int32), elementwise.

    Args:
        hi: upper ends, any shape; computed in float32.
        lo: lower ends, same shape.
        with_offset: affine grid (the range is widened to hold 0), else symmetric with offset 0.
        bits: width of the signed grid.

    Raises:
        CalibrationError: a scale, its inverse or an offset is not finite.
    """
    hi, lo = np.asarray(hi, np.float32), np.asarray(lo, np.float32)
    qmin, _ = ascend_range(bits)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if with_offset:
            hi, lo = np.maximum(hi, np.float32(0)), np.minimum(lo, np.float32(0))
            raw = (hi - lo) / np.float32(2**bits - 1)
            offset = np.where(hi == lo, np.float32(qmin), np.float32(qmin) - lo / raw)
            offset = np.where(raw < FLT_EPSILON, np.float32(qmin), offset)
        else:
            denominator = ascend_denominator(hi, lo, bits).astype(np.float32)
            raw = np.maximum(np.abs(hi), np.abs(lo)) / denominator
            offset = np.zeros_like(raw)
        scale = ascend_guard(np.asarray(raw, np.float32))
        sound = np.isfinite(scale) & np.isfinite(np.float32(1) / scale) & np.isfinite(offset)
    if not sound.all():
        raise CalibrationError(
            "an Ascend scale and its inverse must be finite and not zero,"
            f" got scale {np.ravel(scale)[~np.ravel(sound)][:3]} for a range up to"
            f" {np.ravel(np.maximum(np.abs(hi), np.abs(lo))).max()}; leave this layer in float"
        )
    return scale, np.rint(offset).astype(np.int32)


def ascend_quantize(
    x: NDArray[np.floating], scale: Float32Array, offset: IntArray | int, *, bits: int = 8
) -> Float32Array:
    """Float -> integers held in float32: clip(rne(x / scale + offset)) to the signed grid."""
    qmin, qmax = ascend_range(bits)
    steps = np.asarray(x, np.float32) / scale + np.asarray(offset, np.float32)
    return np.asarray(np.clip(np.rint(steps), qmin, qmax), np.float32)


def ascend_clip_range(scale: np.float32, offset: int, bits: int = 8) -> tuple[float, float]:
    """(lo, hi) in real units that a signed grid covers, computed in float32."""
    qmin, qmax = ascend_range(bits)
    return float(-np.float32(offset - qmin) * scale), float(np.float32(qmax - offset) * scale)


def ascend_half(scale: np.float32) -> np.float32:
    """A scale, float32, at float16's precision; beyond its normal range the square of its root."""
    value = float(scale)
    if 2.0**-14 <= value <= 65504.0:
        return np.float32(np.float16(value))
    root = np.float32(np.float16(np.sqrt(value)))
    return np.float32(root * root)


def ascend_s19(scales: Float32Array) -> Float32Array:
    """Scales, float32 of any shape, cut to 10 bits of mantissa, as Nano chips read them."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return np.asarray(bits.view(np.float32))
