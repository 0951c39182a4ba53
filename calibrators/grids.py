"""Quantization grids: stored values, scales and zero points; quantized tensors in numpy.

A *grid* is a set of stored values; a *clip range* is the interval in real units that they cover.
Every grid rounds half to even (IEEE 754 roundTiesToEven), as ONNX QuantizeLinear, TensorRT and AMCT
do, and saturates at its ends.

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
The wide floats cover any clip range with scale 1. A float with m mantissa bits and the smallest
normal number 2^e has equal steps only within an octave::

    0        2^e         2^(e+1)                2^(e+2)
    |.|.|.|.|.|.|.|.|.|.|..|..|..|..|..|..|..|..|...|...|      step 2^(e-m), twice that, ...
     subnormal

Sources: ONNX operator spec, QuantizeLinear; TensorRT developer guide, "Quantized types";
P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, table 1 (E4M3 has no
infinity; its largest value is 448, its smallest 2^-9).

`QuantizedTensor` is `torch.quantize_per_tensor` and `_per_channel` in numpy, with ONNX rounding. A
stored integer q means the real value (q - zero_point) * scale::

    real      -1.0   -0.9            0.0                      24.5
                |------|--------------|------- ... ------------|
    stored      0      1             10                       255      (scale 0.1, zero_point 10)

The *distance from the zero point*, in steps, is q - zero_point. x / scale is computed in float32
and rounded half to even, as in ONNX QuantizeLinear; torch multiplies by 1 / scale, which can differ
by one step near a tie.

Sources: ONNX operator spec, QuantizeLinear and DequantizeLinear; PyTorch's documentation of
`torch.quantize_per_tensor` and `torch.quantize_per_channel`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrators.errors import CalibrationError

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
RealArray = NDArray[np.floating]
Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
StoredArray = NDArray[np.number[Any]]
Value = TypeVar("Value", bound=np.generic)
Real = TypeVar("Real", bound=np.floating)

# torch's name -> numpy type. All integers of the type are used.
DTYPES: dict[str, type[np.integer]] = {"quint8": np.uint8, "qint8": np.int8, "qint32": np.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values that a target stores for a quantized tensor.

    Attributes:
        name: name of the grid, a key of `GRIDS` or of `signed_grid` and `unsigned_grid`.
        bits: bits per stored value.
        qmin, qmax: lowest and highest stored value.
        symmetric: whether the zero_point is always 0.
        kind: "integer", or "float" if the steps grow with the value.
        dtype: numpy type of the stored values in memory; it may be wider than `bits`.
        mantissa: explicit mantissa bits of a float.
        least_exponent: exponent of a float's smallest normal number.
        scaled: whether a clip range sets the scale; wide floats store real values.
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
        """Width of the clip range / scale: 254 for int8 (without -128), 255 for uint8.

        For a float grid also the width, although its steps differ: 896 for fp8.
        """
        return 2 * self.qmax if self.symmetric else self.qmax - self.qmin


def signed_grid(bits: int) -> Grid:
    """Return the symmetric grid of signed integers with 2 to 16 bits; `INT8` for 8.

    Raises:
        CalibrationError: another number of bits.
    """
    return _integer_grid(bits, signed=True)


def unsigned_grid(bits: int) -> Grid:
    """Return the affine grid of unsigned integers with 2 to 16 bits; `UINT8` for 8.

    Raises:
        CalibrationError: another number of bits.
    """
    return _integer_grid(bits, signed=False)


def _integer_grid(bits: int, *, signed: bool) -> Grid:
    """Return the grid of all integers of this width: symmetric if signed, else affine."""
    if not 2 <= bits <= 16:
        raise CalibrationError(f"an integer grid has 2 to 16 bits, got {bits}")
    name = "int" if signed else "uint"
    qmin = -(2 ** (bits - 1)) if signed else 0
    return Grid(
        name=f"{name}{bits}",
        bits=bits,
        qmin=qmin,
        qmax=qmin + 2**bits - 1,
        symmetric=signed,
        kind="integer",
        dtype=f"{name}8" if bits <= 8 else f"{name}16",
    )


def _float_grid(
    name: str, bits: int, qmax: float, mantissa: int, least_exponent: int, dtype: str, scaled: bool
) -> Grid:
    """Return a grid of floats, symmetric around 0.

    Args:
        name: name of the grid.
        bits: bits per stored value.
        qmax: largest value.
        mantissa: mantissa bits that are stored.
        least_exponent: exponent of the smallest normal number.
        dtype: numpy type that holds the values.
        scaled: whether a clip range sets the scale; else it is always 1.
    """
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


INT4, INT8, INT16 = signed_grid(4), signed_grid(8), signed_grid(16)
UINT8, UINT16 = unsigned_grid(8), unsigned_grid(16)
FP8 = _float_grid("fp8", 8, 448.0, 3, -6, "float32", scaled=True)
FLOAT16 = _float_grid("float16", 16, (2 - 2.0**-10) * 2.0**15, 10, -14, "float16", scaled=False)
BFLOAT16 = _float_grid("bfloat16", 16, (2 - 2.0**-7) * 2.0**127, 7, -126, "float32", scaled=False)
FLOAT32 = _float_grid("float32", 32, (2 - 2.0**-23) * 2.0**127, 23, -126, "float32", scaled=False)

GRIDS: dict[str, Grid] = {
    grid.name: grid for grid in (INT4, INT8, INT16, UINT8, UINT16, FP8, FLOAT16, BFLOAT16, FLOAT32)
}


def symmetric_scale(amax: float, grid: Grid = INT8) -> np.float32:
    """Return the scale of a symmetric grid for a threshold in real units: amax / qmax.

    The division is in float64, rounded once. A zero amax gives a zero scale. A grid that is not
    scaled has scale 1.

    Raises:
        CalibrationError: amax is negative or not finite.
    """
    if not 0 <= amax < np.inf:
        raise CalibrationError(f"a threshold must be finite and not negative, got {amax}")
    if not grid.scaled:
        return np.float32(1.0)
    return np.float32(float(amax) / grid.qmax)


def affine_params(lo: float, hi: float, grid: Grid = UINT8) -> tuple[np.float32, int]:
    """Return (scale, zero_point) of an affine grid for a clip range [lo, hi] in real units.

    The range is widened to include 0, so that zero padding is exact. The range [0, 0] gives
    scale 1 and zero_point qmin, which stores 0 exactly.

    Raises:
        CalibrationError: lo > hi, or the scale is not finite.
    """
    low = min(float(lo), 0.0)
    high = max(float(hi), 0.0)
    with np.errstate(over="ignore"):
        scale = np.float32((high - low) / (grid.qmax - grid.qmin))
    if not lo <= hi or np.isinf(scale):
        raise CalibrationError(f"a clip range must be finite with lo <= hi, got [{lo}, {hi}]")
    if not scale > 0:
        return np.float32(1.0), int(grid.qmin)
    zero_point = int(np.clip(np.rint(grid.qmin - low / float(scale)), grid.qmin, grid.qmax))
    return scale, zero_point


def round_to_grid(
    x: NDArray[Real], grid: Grid, round_numbers: Callable[[Any], Any] = np.rint
) -> NDArray[Real]:
    """Round values to a grid: integers, or floats of fewer digits. Large values do not saturate.

    The result has the dtype of x, in which every step but the rounding is exact.

    Args:
        x: values / scale, of any shape.
        grid: the grid.
        round_numbers: rounds to whole numbers: np.rint to nearest, half to even; np.floor down;
            np.ceil up.
    """
    if grid.kind == "integer":
        return np.asarray(round_numbers(x), x.dtype)
    _, exponent = np.frexp(x)  # |x| = [0.5, 1) * 2^exponent
    # the grid's steps near x are 2^step_exponent
    step_exponent = np.maximum(exponent - 1, grid.least_exponent) - grid.mantissa
    step_numbers = round_numbers(np.ldexp(x, -step_exponent))
    with np.errstate(over="ignore"):  # an overflow is inf, which saturates later
        return np.asarray(np.ldexp(step_numbers, step_exponent), x.dtype)


def quantize(
    x: RealArray, scale: Float32Array | np.float32, zero_point: int, grid: Grid
) -> StoredArray:
    """Return the stored values clip(rne(x / scale) + zero_point), in float32 as ONNX defines it.

    Values of float grids are held as numbers in `grid.dtype`; for fp8 and bfloat16 that is
    float32. NaN stays NaN on a float grid and is undefined on an integer grid.

    Raises:
        CalibrationError: a scale is not finite and positive.
    """
    check_scale(scale)
    steps = round_to_grid(np.asarray(x, np.float32) / scale, grid) + np.float32(zero_point)
    q: StoredArray = np.clip(steps, grid.qmin, grid.qmax).astype(grid.dtype)
    return q


def fp8_codes(q: StoredArray) -> NDArray[np.uint8]:
    """Return the bytes of values on the grid FP8: sign, exponent, mantissa; NaN is 0x7f."""
    # a float16 has the same fields: sign, exponent, whose bias is 15 in place of 7, and mantissa
    halves = (np.asarray(q, np.float32) / 2**8).astype(np.float16)
    bits = halves.view(np.uint16)
    magnitude = np.where(np.isnan(halves), 0x7F, bits >> 7 & 0x7F)
    return np.asarray(bits >> 8 & 0x80 | magnitude, np.uint8)


def fp8_values(codes: NDArray[np.uint8]) -> Float32Array:
    """Return the values of bytes on the grid FP8, float32: the inverse of `fp8_codes`."""
    bits = codes.astype(np.uint16)
    magnitude = bits & 0x7F
    halves = ((bits & 0x80) << 8 | magnitude << 7).astype(np.uint16).view(np.float16)
    values = halves.astype(np.float32) * np.float32(2**8)
    return np.where(magnitude == 0x7F, np.copysign(np.float32(np.nan), values), values)


def dequantize(q: StoredArray, scale: Float32Array | np.float32, zero_point: int) -> Float32Array:
    """Return the real values (q - zero_point) * scale of any grid, float32."""
    # float32 is exact for every stored value and for differences of 16-bit values
    return (q.astype(np.float32) - np.float32(zero_point)) * scale


def weight_scales(weight: RealArray, axis: int | None, *, grid: Grid = INT8) -> Float32Array:
    """Return the scales of a weight from its largest |w|, float32: [C], or [1] for one scale.

    A channel of zeros gets scale 1, as does any channel on a grid that scales nothing (float16).

    Args:
        weight: the weight, of any shape.
        axis: axis of its C channels; None for one scale.
        grid: the grid of the stored values, a symmetric one.

    Raises:
        CalibrationError: the weight is empty or holds NaN or Inf (as float32), or the axis is none
            of its dimensions.
    """
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(weight.astype(np.float32, copy=False))
    if weight.size == 0 or not is_finite.all():
        raise CalibrationError(
            f"a weight must be finite and not empty, got shape {list(weight.shape)}"
            f" with {int((~is_finite).sum())} NaN or Inf values"
        )
    channel_axis = None if axis is None else checked_axis(axis, weight.ndim)
    reduced_axes = tuple(a for a in range(weight.ndim) if a != channel_axis)
    amax = np.abs(weight.astype(np.float64)).max(axis=reduced_axes).reshape(-1)
    if not grid.scaled:
        return np.ones(amax.shape, np.float32)
    scales = (amax / grid.qmax).astype(np.float32)
    return np.where(scales > 0, scales, np.float32(1.0))


def quantize_weight(
    weight: RealArray,
    scales: Float32Array,
    axis: int | None,
    *,
    grid: Grid = INT8,
) -> StoredArray:
    """Return the stored values of a weight, in the grid's dtype: w / scale rounded half to even.

    They are clipped to -qmax and qmax, so the lowest integer of the grid, -128 for int8, is unused.

    Args:
        weight: the weight, of any shape.
        scales: float32 [C], or [1] for one scale.
        axis: axis of the C channels; None for one scale.
        grid: the grid, a symmetric one.

    Raises:
        CalibrationError: a scale is not finite and positive.
    """
    check_scale(scales)
    scale = broadcast_parameter(scales, weight.ndim, axis)
    steps = round_to_grid(np.asarray(weight, np.float32) / scale, grid)
    q: StoredArray = np.clip(steps, -grid.qmax, grid.qmax).astype(grid.dtype)
    return q


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """Stored integers with their scale and zero point.

    Attributes:
        stored: uint8, int8 or int32, of any shape.
        scale: float32 [1], or [C] along `axis`.
        zero_point: int64 [1], or [C] along `axis`.
        axis: the channel axis; None for per-tensor quantization.
    """

    stored: NDArray[np.integer]
    scale: Float32Array
    zero_point: Int64Array
    axis: int | None = None

    def int_repr(self) -> NDArray[np.integer]:
        """Return a copy of the stored integers."""
        return self.stored.copy()

    def distance_from_zero_point(self) -> Int64Array:
        """Return q - zero_point, int64."""
        zero_point = broadcast_parameter(self.zero_point, self.stored.ndim, self.axis)
        return self.stored.astype(np.int64) - zero_point

    def dequantize(self) -> Float32Array:
        """Return the real values (q - zero_point) * scale, float32 of the same shape."""
        steps = self.distance_from_zero_point().astype(np.float32)
        scales = broadcast_parameter(self.scale, self.stored.ndim, self.axis)
        return steps * scales

    def representable(self) -> tuple[Float32Array, Float32Array]:
        """Return the least and greatest representable real value: two float32 [1] or [C]."""
        limits = np.iinfo(self.stored.dtype)
        low = (limits.min - self.zero_point).astype(np.float32) * self.scale
        high = (limits.max - self.zero_point).astype(np.float32) * self.scale
        return low, high


def quantize_per_tensor(
    x: ArrayLike, scale: float, zero_point: int, dtype: str = "quint8"
) -> QuantizedTensor:
    """Quantize values of any shape with one scale and zero point.

    Raises:
        CalibrationError: an unknown dtype, a scale that is not finite and positive, a zero_point
            that is no integer of the dtype, or NaN in `x`.
    """
    return _quantize(x, [scale], [zero_point], None, dtype)


def quantize_per_channel(
    x: ArrayLike,
    scales: Sequence[float],
    zero_points: Sequence[int],
    axis: int,
    dtype: str = "quint8",
) -> QuantizedTensor:
    """Quantize values with a scale and a zero point per index along `axis`.

    Raises:
        CalibrationError: as `quantize_per_tensor`, or a length differs from that of the axis.
    """
    return _quantize(x, scales, zero_points, axis, dtype)


def _quantize(
    x: ArrayLike, scales: Sequence[float], zero_points: Sequence[int], axis: int | None, dtype: str
) -> QuantizedTensor:
    """Quantize values with a scale and a zero point for each channel, or one for all values.

    Args:
        x: the values, of any shape.
        scales: one for each channel of `axis`, or one.
        zero_points: the same.
        axis: axis of the channels; None for one scale.
        dtype: "quint8", "qint8" or "qint32".

    Raises:
        CalibrationError: an argument that does not fit, or NaN among the values.
    """
    real = np.asarray(x, np.float32)
    if axis is not None:
        axis = checked_axis(axis, real.ndim)
        if not len(scales) == len(zero_points) == real.shape[axis]:
            raise CalibrationError(
                f"axis {axis} has {real.shape[axis]} channels and needs as many scales and"
                f" zero_points, got {len(scales)} and {len(zero_points)}"
            )
    if dtype not in DTYPES:
        raise CalibrationError(f"a quantized dtype is one of {sorted(DTYPES)}, got {dtype!r}")
    scale = np.asarray(scales, np.float32)
    check_scale(scale)
    limits = np.iinfo(DTYPES[dtype])
    exact_zero_points = np.asarray(zero_points, np.float64)  # exact for every integer of the dtypes
    is_integer = exact_zero_points == np.rint(exact_zero_points)
    is_in_range = (exact_zero_points >= limits.min) & (exact_zero_points <= limits.max)
    if not (is_integer & is_in_range).all():
        raise CalibrationError(
            f"a zero_point of {dtype} must be an integer in {limits.min}..{limits.max},"
            f" got {list(zero_points)}"
        )
    nan_count = np.isnan(real).sum()
    if nan_count:
        raise CalibrationError(f"NaN has no integer, got {nan_count} of them")

    # float64 is exact for every int32, float32 is not
    with np.errstate(over="ignore"):  # an overflow is inf, which saturates
        steps = np.rint(real / broadcast_parameter(scale, real.ndim, axis)).astype(np.float64)
    steps += broadcast_parameter(exact_zero_points, real.ndim, axis)
    stored = np.clip(steps, limits.min, limits.max).astype(DTYPES[dtype])
    return QuantizedTensor(stored, scale, exact_zero_points.astype(np.int64), axis)


def broadcast_parameter(parameter: NDArray[Value], ndim: int, axis: int | None) -> NDArray[Value]:
    """Return parameters [1], or [C] along `axis`, in a shape that broadcasts over the tensor."""
    shape = [1] * ndim
    if axis is not None:
        shape[axis] = -1
    return parameter.reshape(shape)


def checked_axis(axis: int, ndim: int) -> int:
    """Return the axis counted from the front.

    Raises:
        CalibrationError: an array of `ndim` dimensions does not have it.
    """
    if not -ndim <= axis < ndim:
        raise CalibrationError(f"the axis must be one of {ndim} dimensions, got {axis}")
    return axis % ndim


def check_scale(scale: Float32Array | np.float32) -> None:
    """Raise CalibrationError if a scale is not finite and positive."""
    values = np.ravel(scale)
    invalid = values[~((values > 0) & (values < np.inf))]
    if invalid.size:
        raise CalibrationError(f"a scale must be finite and positive, got {invalid[:3].tolist()}")
