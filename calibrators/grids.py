"""The grids: which values a target stores, and the scale that lays them over a clip range.

A *grid* is a set of stored values; a *clip range* in real units says what they cover. Every grid
rounds half to even (IEEE 754 roundTiesToEven), as ONNX QuantizeLinear, TensorRT and AMCT do, and
saturates: a value beyond its ends becomes the end.

==============  =================  =======================  =================================
grid            stored values      scale                    zero_point
==============  =================  =======================  =================================
INT4            -8..7              amax / 7                 0
INT8            -128..127          amax / 127               0                      (TensorRT)
INT16           -32768..32767      amax / 32767             0
UINT8           0..255             (hi - lo) / 255          rne(-lo / scale)        (ORT CPU)
UINT16          0..65535           (hi - lo) / 65535        rne(-lo / scale)
FP8             E4M3, -448..448    amax / 448               0
FLOAT16         IEEE binary16      1: nothing is scaled     0
BFLOAT16        8 bits of float32  1                        0
FLOAT32         IEEE binary32      1                        0
==============  =================  =======================  =================================

A symmetric scale leaves the lowest integer unused, so that -amax and amax are equally far from 0.
The wide floats cover any clip range as they are: their scale is 1 whatever the range. A float of m
mantissa bits, whose smallest normal number is 2^e, is even only within an octave::

    0        2^e         2^(e+1)                2^(e+2)
    |.|.|.|.|.|.|.|.|.|.|..|..|..|..|..|..|..|..|...|...|      step 2^(e-m), twice that, ...
     subnormal

Sources: ONNX operator spec, QuantizeLinear; TensorRT developer guide, "Quantized types";
P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, table 1 (E4M3 has no
infinity; its largest value is 448, its smallest 2^-9).

Quantized tensors in numpy: what `torch.quantize_per_tensor` and `_per_channel` mean, by ONNX.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrators.errors import CalibrationError

Float32Array = NDArray[np.float32]
Stored = NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values that a target stores for a quantized tensor.

    Attributes:
        name: how it is written in options, reports and files.
        bits: of one stored value.
        qmin, qmax: lowest and highest stored value.
        symmetric: whether its zero_point is always 0.
        kind: "integer", or "float" where the steps grow with the value.
        dtype: numpy's type that holds the stored values here; it may be wider than `bits`.
        mantissa: of a float: explicit bits after the leading one.
        least_exponent: of a float: that of its smallest normal number.
        scaled: whether a clip range sets a scale; the wide floats store real values as they are.
    """

    name: str
    bits: int
    qmin: float
    qmax: float
    symmetric: bool
    kind: Literal["integer", "float"]
    dtype: str
    mantissa: int = 0
    least_exponent: int = 0
    scaled: bool = True

    @property
    def steps(self) -> float:
        """Width of the clip range in scales: 254 for int8, whose -128 is not used, 255 for uint8.

        Of a float, whose steps differ, its width all the same: 896 for fp8.
        """
        return 2 * self.qmax if self.symmetric else self.qmax - self.qmin


def signed(bits: int) -> Grid:
    """The symmetric grid of signed integers, 2 to 16 bits; of 8 bits it is `INT8`.

    Raises:
        CalibrationError: another number of bits.
    """
    if not 2 <= bits <= 16:
        raise CalibrationError(f"a signed integer grid has 2 to 16 bits, got {bits}")
    half = 2 ** (bits - 1)
    return Grid(
        name=f"int{bits}",
        bits=bits,
        qmin=-half,
        qmax=half - 1,
        symmetric=True,
        kind="integer",
        dtype="int8" if bits <= 8 else "int16",
    )


def unsigned(bits: int) -> Grid:
    """The affine grid of unsigned integers, 2 to 16 bits; of 8 bits it is `UINT8`.

    Raises:
        CalibrationError: another number of bits.
    """
    if not 2 <= bits <= 16:
        raise CalibrationError(f"an unsigned integer grid has 2 to 16 bits, got {bits}")
    return Grid(
        name=f"uint{bits}",
        bits=bits,
        qmin=0,
        qmax=2**bits - 1,
        symmetric=False,
        kind="integer",
        dtype="uint8" if bits <= 8 else "uint16",
    )


def _floating(
    name: str, bits: int, qmax: float, mantissa: int, least_exponent: int, dtype: str, scaled: bool
) -> Grid:
    return Grid(
        name=name,
        bits=bits,
        qmin=-qmax,
        qmax=qmax,
        symmetric=True,
        kind="float",
        dtype=dtype,
        mantissa=mantissa,
        least_exponent=least_exponent,
        scaled=scaled,
    )


INT4, INT8, INT16 = signed(4), signed(8), signed(16)
UINT8, UINT16 = unsigned(8), unsigned(16)
FP8 = _floating("fp8", 8, 448.0, 3, -6, "float32", scaled=True)
FLOAT16 = _floating("float16", 16, (2 - 2.0**-10) * 2.0**15, 10, -14, "float16", scaled=False)
BFLOAT16 = _floating("bfloat16", 16, (2 - 2.0**-7) * 2.0**127, 7, -126, "float32", scaled=False)
FLOAT32 = _floating("float32", 32, (2 - 2.0**-23) * 2.0**127, 23, -126, "float32", scaled=False)

GRIDS: dict[str, Grid] = {
    grid.name: grid for grid in (INT4, INT8, INT16, UINT8, UINT16, FP8, FLOAT16, BFLOAT16, FLOAT32)
}


def symmetric_scale(amax: float, grid: Grid = INT8) -> np.float32:
    """Threshold in real units -> what a stored 1 means on a symmetric grid: amax / qmax.

    The division is made in float64 and rounded once. A zero amax gives a zero scale. On a grid
    that is not scaled the scale is 1.
    """
    return np.float32(float(amax) / grid.qmax) if grid.scaled else np.float32(1.0)


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
        return np.float32(1.0), int(grid.qmin)
    zero_point = int(np.clip(np.rint(grid.qmin - lo / float(scale)), grid.qmin, grid.qmax))
    return scale, zero_point


def rounded(
    x: NDArray[np.floating], grid: Grid, to: Callable[[Any], Any] = np.rint
) -> NDArray[np.floating]:
    """Values in scales -> the nearest that the grid's rule knows, its ends aside; half to even.

    Integers are rounded to whole numbers, floats to their mantissa; computed in x's own dtype,
    where all that is done is exact but for the rounding itself.

    Args:
        x: values of any shape.
        grid: whose rule it is.
        to: np.floor or np.ceil take the neighbour below or above instead of the nearest.
    """
    if grid.kind == "integer":
        return np.asarray(to(x), x.dtype)
    _, exponent = np.frexp(x)  # |x| = [0.5, 1) * 2^exponent
    octave = np.maximum(exponent - 1, grid.least_exponent) - grid.mantissa
    with np.errstate(over="ignore"):  # past the end of float32 it is inf, and saturates
        return np.asarray(np.ldexp(to(np.ldexp(x, -octave)), octave), x.dtype)


def quantize(
    x: NDArray[np.floating], scale: NDArray[np.float32] | np.float32, zero_point: int, grid: Grid
) -> Stored:
    """Float -> stored values: clip(rne(x / scale) + zero_point), in float32 as ONNX defines it.

    Floats of a grid are held as their own values in `grid.dtype`: of fp8 and bfloat16 those of
    float32 that the type has. A NaN stays one on a float grid and has no integer.
    """
    steps = rounded(np.asarray(x, np.float32) / scale, grid) + np.float32(zero_point)
    q: Stored = np.clip(steps, grid.qmin, grid.qmax).astype(grid.dtype)
    return q


def codes(q: Stored, grid: Grid) -> NDArray[np.uint8]:
    """Stored values of fp8 -> the bytes that files hold: sign, exponent, mantissa; NaN is 0x7f.

    Raises:
        CalibrationError: another grid, whose values numpy itself can hold.
    """
    if grid != FP8:
        raise CalibrationError(f"codes are made of fp8 values, got {grid.name}")
    values = np.asarray(q, np.float32)
    size = np.nan_to_num(np.abs(values))
    _, exponent = np.frexp(size)
    octave = np.where(size > 0, np.maximum(exponent - 1, grid.least_exponent), grid.least_exponent)
    steps = np.ldexp(size, grid.mantissa - octave)  # whole, since q is on the grid
    code = (octave - grid.least_exponent) * 2**grid.mantissa + steps.astype(np.int32)
    code = np.where(np.isnan(values), 0x7F, code) | np.where(np.signbit(values), 0x80, 0)
    return np.asarray(code, np.uint8)


def dequantize(q: Stored, scale: NDArray[np.float32] | np.float32, zero_point: int) -> Float32Array:
    """Stored values of any grid -> float32: (q - zero_point) * scale."""
    # float32 holds every stored value and every difference of two of 16 bits exactly
    return np.asarray((q.astype(np.float32) - np.float32(zero_point)) * scale, np.float32)


def fake_quantize(
    x: NDArray[np.floating], scale: NDArray[np.float32] | np.float32, zero_point: int, grid: Grid
) -> Float32Array:
    """Float -> what is left of it on the grid: quantized and back, float32 of the same shape."""
    return dequantize(quantize(x, scale, zero_point, grid), scale, zero_point)


def weight_scales(
    weight: NDArray[np.floating], axis: int | None, *, grid: Grid = INT8
) -> NDArray[np.float32]:
    """Weight -> symmetric float32 scales, max-abs per channel: [C] along `axis`, or [1].

    A channel of zeros gets scale 1, since it is stored as zeros whatever the scale.

    Raises:
        CalibrationError: the weight is empty or holds NaN or Inf, or the grid is not symmetric.
    """
    if not grid.symmetric:
        raise CalibrationError(f"a weight is stored on a symmetric grid, got {grid.name}")
    if weight.size == 0 or not np.isfinite(weight).all():
        raise CalibrationError(
            f"a weight must be finite and not empty, got shape {list(weight.shape)}"
            f" with {int((~np.isfinite(weight)).sum())} NaN or Inf values"
        )
    others = tuple(a for a in range(weight.ndim) if axis is None or a != axis % weight.ndim)
    amax = np.abs(weight.astype(np.float64)).max(axis=others).reshape(-1)
    scales = (amax / grid.qmax).astype(np.float32) if grid.scaled else np.zeros_like(amax)
    return np.where(scales > 0, scales, np.float32(1.0)).astype(np.float32)


def quantize_weight(
    weight: NDArray[np.floating],
    scales: NDArray[np.float32],
    axis: int | None,
    *,
    grid: Grid = INT8,
) -> Stored:
    """Weight -> stored values of the same shape, clip(rne(w / scale)) to +-qmax, in grid.dtype.

    The lowest integer is left out, as in the scale.
    """
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1
    steps = rounded(np.asarray(weight, np.float32) / scales.reshape(shape), grid)
    q: Stored = np.clip(steps, -grid.qmax, grid.qmax).astype(grid.dtype)
    return q


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
