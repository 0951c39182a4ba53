"""The int8 grids: the only place that writes -128, 127, 128 or 255, and the only rounding.

A *grid* says which integers a target stores; a *clip range* in real units says what they cover.
Every grid rounds half to even (IEEE 754 roundTiesToEven), as ONNX QuantizeLinear, TensorRT and
AMCT do.

==============  =========  =======================================  ==========================
grid            integers   scale                                    zero_point
==============  =========  =======================================  ==========================
INT8            -128..127  amax / 127                               0            (TensorRT)
UINT8           0..255     (hi - lo) / 255                          rne(-lo / scale)  (ORT CPU)
==============  =========  =======================================  ==========================

Sources: ONNX operator spec, QuantizeLinear; TensorRT developer guide, "Quantized types".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers a target stores for a quantized activation."""

    name: str
    dtype: str
    qmin: int
    qmax: int
    symmetric: bool


INT8 = Grid("int8", "int8", -128, 127, symmetric=True)
UINT8 = Grid("uint8", "uint8", 0, 255, symmetric=False)


def symmetric_scale(amax: float, bits: int = 8) -> np.float32:
    """Real value of one step of the symmetric grid: amax / (2^(bits-1) - 1), e.g. amax / 127.

    The division is made in float64 and rounded once. A zero amax gives a zero scale.
    """
    return np.float32(float(amax) / (2 ** (bits - 1) - 1))


def affine_params(lo: float, hi: float, grid: Grid = UINT8) -> tuple[np.float32, int]:
    """Clip range [lo, hi] in real units -> (scale, zero_point) of an affine grid.

    The range is widened to hold 0, so that zero padding is exact. A range of no width gives
    scale 1 and the zero_point of an exact zero.

    Raises:
        CalibrationError: lo or hi is not finite, or lo > hi.
    """
    if not (np.isfinite(lo) and np.isfinite(hi)) or lo > hi:
        raise CalibrationError(f"a clip range must be finite with lo <= hi, got [{lo}, {hi}]")
    lo, hi = min(float(lo), 0.0), max(float(hi), 0.0)
    scale = np.float32((hi - lo) / (grid.qmax - grid.qmin))
    if not scale > 0:
        return np.float32(1.0), grid.qmin
    zero_point = int(np.clip(np.rint(grid.qmin - lo / float(scale)), grid.qmin, grid.qmax))
    return scale, zero_point


def quantize(
    x: NDArray[np.floating], scale: NDArray[np.float32] | np.float32, zero_point: int, grid: Grid
) -> NDArray[np.integer]:
    """Float -> grid integers: clip(rne(x / scale) + zero_point), in float32 as ONNX defines it."""
    steps = np.rint(np.asarray(x, np.float32) / scale) + np.float32(zero_point)
    q: NDArray[np.integer] = np.clip(steps, grid.qmin, grid.qmax).astype(grid.dtype)
    return q


def dequantize(
    q: NDArray[np.integer], scale: NDArray[np.float32] | np.float32, zero_point: int
) -> Float32Array:
    """Grid integers -> float32: (q - zero_point) * scale."""
    return np.asarray((q.astype(np.int32) - zero_point).astype(np.float32) * scale, np.float32)


def weight_scales(
    weight: NDArray[np.floating], axis: int | None, *, bits: int = 8
) -> NDArray[np.float32]:
    """Weight -> symmetric float32 scales, max-abs per channel: [C] along `axis`, or [1].

    A channel of zeros gets scale 1, since its integers are all zero whatever the scale.

    Raises:
        CalibrationError: the weight is empty or holds NaN or Inf.
    """
    if weight.size == 0 or not np.isfinite(weight).all():
        raise CalibrationError(
            f"a weight must be finite and not empty, got shape {list(weight.shape)}"
            f" with {int((~np.isfinite(weight)).sum())} NaN or Inf values"
        )
    others = tuple(a for a in range(weight.ndim) if axis is None or a != axis % weight.ndim)
    amax = np.abs(weight.astype(np.float64)).max(axis=others).reshape(-1)
    scales = (amax / (2 ** (bits - 1) - 1)).astype(np.float32)
    return np.where(scales > 0, scales, np.float32(1.0)).astype(np.float32)


def quantize_weight(
    weight: NDArray[np.floating], scales: NDArray[np.float32], axis: int | None, *, bits: int = 8
) -> NDArray[np.int8]:
    """Weight -> int8 of the same shape, clip(rne(w / scale)) to +-(2^(bits-1) - 1)."""
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1
    limit = 2 ** (bits - 1) - 1
    steps = np.rint(np.asarray(weight, np.float32) / scales.reshape(shape))
    q: NDArray[np.int8] = np.clip(steps, -limit, limit).astype(np.int8)
    return q
