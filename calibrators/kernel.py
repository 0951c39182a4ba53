"""C kernel for histogram counting and weight rounding, loaded with ctypes if it is built.

`cpp/src/kernel/count.c` counts values into bins, else OpenCV does; `round.c` rounds weights, else
numpy does. Both give the same numbers. Installation compiles the kernel if there is a C compiler,
and wheels contain it. `CALIB8_COUNTING` selects "c" or "opencv"; if unset, the kernel is used if
available::

    installed with a compiler, or from a wheel of this platform    _count.so next to this file
    otherwise, or CALIB8_COUNTING=opencv                           None
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from calibrators.errors import CalibrationError

KERNEL_VARIABLE = "CALIB8_COUNTING"
LIBRARY = Path(__file__).with_name("_count.so")
SCRATCH = 66048  # bytes, as in count.h
_FORM = 3  # interface version of count.h; a library with another version is not used


class HistogramState(ctypes.Structure):
    """State of a histogram except its counts; layout as in count.h."""

    _base: float
    full_range: float
    minimum: float
    maximum: float
    latest: float
    total: int
    infinite: int

    _fields_ = (
        ("_base", ctypes.c_double),
        ("full_range", ctypes.c_double),
        ("minimum", ctypes.c_double),
        ("maximum", ctypes.c_double),
        ("latest", ctypes.c_double),
        ("total", ctypes.c_int64),
        ("infinite", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class CountingKernel:
    """A loaded library with one of its instruction sets."""

    observe: Callable[..., int]  # `calib8_observe`; releases the GIL
    observe_each: Callable[..., int]  # `calib8_observe_each`; releases the GIL
    round_rows: Callable[..., int]  # `calib8_round`
    way: int  # number of the instruction set
    name: str


def load_kernels(library: Path) -> tuple[CountingKernel, ...]:
    """Load a library; return one `CountingKernel` per instruction set of this CPU, fastest last.

    Raises:
        OSError: there is no such library, or it is for another platform or version.
    """
    loaded = ctypes.CDLL(str(library))
    try:
        form = loaded.calib8_kernel_form()
        way_of = loaded.calib8_kernel_way
        observe, observe_each = loaded.calib8_observe, loaded.calib8_observe_each
        round_rows = loaded.calib8_round
        ways = loaded.calib8_kernel_ways()
    except AttributeError as error:
        raise OSError(f"{library.name} is not the counting kernel") from error
    if form != _FORM:
        raise OSError(f"{library.name} must have form {_FORM}, got {form}; install calib8 again")
    way_of.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    observe.argtypes = (ctypes.c_int, pointer, pointer, pointer, ctypes.c_size_t, pointer)
    observe_each.argtypes = (ctypes.c_int, ctypes.c_size_t, *[pointer] * 6)
    observe.restype = observe_each.restype = ctypes.c_int64
    size, real = ctypes.c_size_t, ctypes.c_double
    round_rows.argtypes = (size, size, ctypes.c_int, *[pointer] * 5, real, pointer)
    round_rows.restype = ctypes.c_int64
    return tuple(
        CountingKernel(observe, observe_each, round_rows, way, way_of(way).decode())
        for way in range(ways)
    )


@cache
def kernel() -> CountingKernel | None:
    """Return the kernel to use; None for numpy and OpenCV.

    Raises:
        CalibrationError: `CALIB8_COUNTING` has an unknown value, or "c" without a kernel.
    """
    wanted = os.environ.get(KERNEL_VARIABLE, "")
    if wanted not in ("", "c", "opencv"):
        raise CalibrationError(f"{KERNEL_VARIABLE} must be c, opencv or unset, got {wanted!r}")
    if wanted == "opencv":
        return None
    available, why = _here()
    if available is None and wanted == "c":
        raise CalibrationError(
            f"{KERNEL_VARIABLE}=c needs the C kernel, which {why}; install calib8 where there is a"
            " C compiler, or unset it"
        )
    return available


def describe_kernel() -> str:
    """Return which implementation counts, as text.

    Raises:
        CalibrationError: as `kernel`.
    """
    used = kernel()
    if used is not None:
        return f"C kernel ({used.name})"
    if os.environ.get(KERNEL_VARIABLE):
        return f"numpy and OpenCV ({KERNEL_VARIABLE}=opencv)"
    return f"numpy and OpenCV (the C kernel {_here()[1]})"


@cache
def _here() -> tuple[CountingKernel | None, str]:
    """Return (kernel, ""), or (None, why there is none)."""
    if not LIBRARY.exists():
        return None, "is not built here"
    try:
        return load_kernels(LIBRARY)[-1], ""
    except OSError as error:
        return None, f"cannot be loaded: {error}"
