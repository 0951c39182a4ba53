"""numpy arrays <-> what lies in a GPU's memory, in TensorRT's types.

numpy has no bfloat16 and no float8: those are float32 here, and their bits there.

Source of E4M3 (float8 of TensorRT and ONNX): Micikevicius et al., FP8 formats for deep learning,
arXiv 2209.05433, section 3; it has no infinity, and one NaN a sign.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BITS = {"bfloat16": "uint16", "float8": "uint8"}  # types that numpy lacks, and whose bits it holds
_SIGN8 = 1 << 7
_NAN8 = _SIGN8 - 1


def host_type(dtype: str) -> str:
    """The numpy type that stands for one of TensorRT's."""
    return "float32" if dtype in BITS else dtype


def stored(array: Array, dtype: str) -> Array:
    """An array of any shape, C-contiguous, as the device reads it as `dtype`.

    Numbers become narrower where every one fits; float8 takes its largest for what is larger.

    Raises:
        ValueError: one does not fit, or `array` is of another kind; as the end of a sentence.
    """
    if dtype == "bfloat16":
        return _to_bfloat16(np.asarray(array, np.float32, order="C"))
    if dtype == "float8":
        return _to_float8(np.asarray(array, np.float32, order="C"))
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return np.asarray(array, order="C")
    if wanted.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(wanted)
        for value in (array.min(initial=0), array.max(initial=0)):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{dtype} from {limits.min} to {limits.max}, got {value}")
    elif not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ValueError(f"{dtype}, got {array.dtype}")
    with np.errstate(over="ignore"):
        made = np.asarray(array, wanted, order="C")
    if wanted.kind == "f" and np.any(lost := np.isinf(made) & np.isfinite(array)):
        raise ValueError(f"{dtype} up to {np.finfo(wanted).max:g}, got {array[lost].flat[0]:g}")
    return made


def loaded(bits: Array, dtype: str) -> Array:
    """Inverse of `stored`: what the device wrote as `dtype`, in numpy's type for it; a copy."""
    if dtype == "bfloat16":
        wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return _float8()[bits] if dtype == "float8" else bits.copy()


def _to_bfloat16(values: Array) -> Array:
    """float32 -> its upper 16 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + even) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _to_float8(values: Array) -> Array:
    """float32 -> E4M3, rounded to nearest, ties to even; beyond 448 it is 448."""
    steps = _float8()[:_NAN8]
    middles = (steps[:-1] + steps[1:]) / 2
    sizes = np.abs(values)
    below = np.searchsorted(middles, sizes, side="left")
    tie = (below < middles.size) & (sizes == middles[np.minimum(below, middles.size - 1)])
    codes = below + (tie & (below % 2 == 1))
    signs = np.where(np.signbit(values), _SIGN8, 0)
    return np.where(np.isnan(values), _NAN8, codes | signs).astype(np.uint8)


@cache
def _float8() -> Array:
    """float32 of every E4M3 code: 4 bits of exponent, 3 of mantissa, bias 7."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    sizes = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    sizes[[_NAN8, _NAN8 | _SIGN8]] = np.nan
    return np.where(codes & _SIGN8, -sizes, sizes).astype(np.float32)
