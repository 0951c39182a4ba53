"""Quantized tensors in numpy: what `torch.quantize_per_tensor` and `_per_channel` mean, by ONNX.

A stored integer q stands for the real value (q - zero_point) * scale::

    real      -1.0   -0.9            0.0                      24.5
                |------|--------------|------- ... ------------|
    stored      0      1             10                       255      (scale 0.1, zero_point 10)

so a value's *distance from the zero point*, in steps, is q - zero_point, and a real value outside
the stored range saturates at its end. The division x / scale is made in float32 and rounded half
to even, as ONNX QuantizeLinear does; torch multiplies by 1 / scale, which can differ by one code on
a near tie.

Sources: ONNX operator spec, QuantizeLinear and DequantizeLinear; PyTorch's documentation of
`torch.quantize_per_tensor` and `torch.quantize_per_channel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrators.errors import CalibrationError

# torch's name: the numpy type that stores it. The integers are all those of the type.
DTYPES: dict[str, type[np.integer]] = {"quint8": np.uint8, "qint8": np.int8, "qint32": np.int32}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """Integers with the affine map that gives them a real value.

    Attributes:
        stored: the integers, uint8, int8 or int32, of any shape.
        scale: float32 [1], or [C] along `axis`.
        zero_point: int64 [1], or [C] along `axis`.
        axis: the channel axis, or None for one map for the whole tensor.
    """

    stored: NDArray[np.integer]
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None = None

    def int_repr(self) -> NDArray[np.integer]:
        """The stored integers, a copy."""
        return self.stored.copy()

    def distance_from_zero_point(self) -> NDArray[np.int64]:
        """Steps between each stored integer and that of a real 0: q - zero_point, int64."""
        zero: NDArray[np.int64] = self._along(self.zero_point)
        distance: NDArray[np.int64] = self.stored.astype(np.int64) - zero
        return distance

    def dequantize(self) -> NDArray[np.float32]:
        """The real values, (q - zero_point) * scale, float32 of the same shape."""
        steps = self.distance_from_zero_point().astype(np.float32)
        return np.asarray(steps * self._along(self.scale), np.float32)

    def representable(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Least and greatest real value that can be stored: two float32 [1] or [C]."""
        limits = np.iinfo(self.stored.dtype)
        low = (limits.min - self.zero_point).astype(np.float32) * self.scale
        high = (limits.max - self.zero_point).astype(np.float32) * self.scale
        return low, high

    def _along(self, parameter: NDArray) -> NDArray:  # type: ignore[type-arg]
        return _along(parameter, self.stored.ndim, self.axis)


def quantize_per_tensor(
    x: ArrayLike, scale: float, zero_point: int, dtype: str = "quint8"
) -> QuantizedTensor:
    """Real values of any shape -> integers on one affine map.

    Raises:
        CalibrationError: an unknown dtype, a scale that is not finite and positive, a zero_point
            that the dtype cannot store, or NaN in `x`.
    """
    return _quantize(x, [scale], [zero_point], None, dtype)


def quantize_per_channel(
    x: ArrayLike,
    scales: Sequence[float],
    zero_points: Sequence[int],
    axis: int,
    dtype: str = "quint8",
) -> QuantizedTensor:
    """Real values -> integers, with a scale and a zero_point for each index along `axis`.

    Raises:
        CalibrationError: as `quantize_per_tensor`, or a length that is not that of the axis.
    """
    return _quantize(x, scales, zero_points, axis, dtype)


def _quantize(
    x: ArrayLike,
    scales: Sequence[float],
    zero_points: Sequence[int],
    axis: int | None,
    dtype: str,
) -> QuantizedTensor:
    real = np.asarray(x, np.float32)
    if axis is not None:
        axis = _checked_axis(axis, real, len(scales), len(zero_points))
    scale = np.asarray(scales, np.float32)
    zero = np.asarray(zero_points, np.int64)
    _check(real, scale, zero, dtype)
    limits = np.iinfo(DTYPES[dtype])
    # float64 holds every int32 exactly, float32 does not
    with np.errstate(over="ignore"):  # a quotient past float32 is inf, and saturates
        steps = np.rint(real / _along(scale, real.ndim, axis)).astype(np.float64)
    stored = np.clip(steps + _along(zero, real.ndim, axis), limits.min, limits.max)
    return QuantizedTensor(stored.astype(DTYPES[dtype]), scale, zero, axis)


def _along(parameter: NDArray, ndim: int, axis: int | None) -> NDArray:  # type: ignore[type-arg]
    if axis is None:
        return parameter.reshape([1] * ndim)
    return parameter.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _checked_axis(axis: int, real: NDArray[np.float32], scales: int, zero_points: int) -> int:
    if not -real.ndim <= axis < real.ndim:
        raise CalibrationError(f"the axis must be one of {real.ndim} dimensions, got {axis}")
    axis %= real.ndim
    if not scales == zero_points == real.shape[axis]:
        raise CalibrationError(
            f"axis {axis} has {real.shape[axis]} channels and needs as many scales and"
            f" zero_points, got {scales} and {zero_points}"
        )
    return axis


def _check(
    real: NDArray[np.float32], scale: NDArray[np.float32], zero: NDArray[np.int64], dtype: str
) -> None:
    if dtype not in DTYPES:
        raise CalibrationError(f"a quantized dtype is one of {sorted(DTYPES)}, got {dtype!r}")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise CalibrationError(f"a scale must be finite and positive, got {scale.tolist()}")
    limits = np.iinfo(DTYPES[dtype])
    if ((zero < limits.min) | (zero > limits.max)).any():
        raise CalibrationError(
            f"a zero_point of {dtype} must lie in {limits.min}..{limits.max}, got {zero.tolist()}"
        )
    if np.isnan(real).any():
        raise CalibrationError(f"NaN has no integer, got {int(np.isnan(real).sum())} of them")
