"""C kernel for histogram counting and weight rounding, loaded with ctypes if it is built.

`cpp/src/kernel/count.c` counts values into bins, else OpenCV does. `round.c` rounds weights and
`sums.c` adds up the values of bins, else numpy does. All give the same numbers. Installation
compiles the kernel if there is a C compiler, and wheels contain it. It is used if available, unless
`CALIB8_COUNTING` is "opencv"::

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
_INTERFACE_VERSION = 4  # interface version of count.h; a library with another version is not used


class HistogramState(ctypes.Structure):
    """State of a histogram except its counts, which are a separate array; layout as in count.h."""

    _initial_range: float
    full_range: float
    minimum: float
    maximum: float
    batch_amax: float
    total: int
    infinite: int

    _fields_ = (
        ("_initial_range", ctypes.c_double),
        ("full_range", ctypes.c_double),
        ("minimum", ctypes.c_double),
        ("maximum", ctypes.c_double),
        ("batch_amax", ctypes.c_double),
        ("total", ctypes.c_int64),
        ("infinite", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class CountingKernel:
    """A loaded library with one of its instruction sets.

    Attributes:
        observe: `calib8_observe`; releases the GIL.
        observe_each: `calib8_observe_each`; releases the GIL.
        round_rows: `calib8_round`.
        count_and_sum: `calib8_count_and_sum`; releases the GIL.
        instruction_set: number of the instruction set, an argument of the counting functions.
        name: name of the instruction set.
    """

    observe: Callable[..., int]
    observe_each: Callable[..., int]
    round_rows: Callable[..., int]
    count_and_sum: Callable[..., None]
    instruction_set: int
    name: str


def load_kernels(library: Path) -> tuple[CountingKernel, ...]:
    """Load a library; return one `CountingKernel` per instruction set of this CPU, fastest last.

    Raises:
        OSError: there is no such library, or it is for another platform or version.
    """
    functions = ctypes.CDLL(str(library))
    try:
        version = functions.calib8_kernel_form()
        name_instruction_set = functions.calib8_kernel_way
        observe = functions.calib8_observe
        observe_each = functions.calib8_observe_each
        round_rows = functions.calib8_round
        count_and_sum = functions.calib8_count_and_sum
        instruction_set_count = functions.calib8_kernel_ways()
    except AttributeError as error:
        raise OSError(f"{library.name} is not the counting kernel") from error
    if version != _INTERFACE_VERSION:
        raise OSError(
            f"{library.name} must have form {_INTERFACE_VERSION}, got {version};"
            " install calib8 again"
        )

    # the signatures in count.h, round.h and sums.h
    integer = ctypes.c_int
    size = ctypes.c_size_t
    real = ctypes.c_double
    pointer = ctypes.c_void_p
    observe.argtypes = (integer, pointer, pointer, pointer, size, pointer)
    observe_each.argtypes = (integer, size, *[pointer] * 6)
    round_rows.argtypes = (size, size, integer, *[pointer] * 5, real, pointer)
    count_and_sum.argtypes = (size, pointer, ctypes.c_float, size, pointer, pointer)
    count_and_sum.restype = None
    observe.restype = observe_each.restype = round_rows.restype = ctypes.c_int64
    name_instruction_set.restype = ctypes.c_char_p

    kernels = []
    for index in range(instruction_set_count):
        name = name_instruction_set(index).decode()
        kernels.append(
            CountingKernel(observe, observe_each, round_rows, count_and_sum, index, name)
        )
    return tuple(kernels)


@cache
def kernel() -> CountingKernel | None:
    """Return the kernel to use; None for numpy and OpenCV.

    Raises:
        CalibrationError: `CALIB8_COUNTING` has an unknown value.
    """
    requested = os.environ.get(KERNEL_VARIABLE, "")
    if requested not in ("", "opencv"):
        raise CalibrationError(f"{KERNEL_VARIABLE} must be opencv or unset, got {requested!r}")
    return None if requested else _load_own_kernel()[0]


def describe_kernel() -> str:
    """Return which implementation counts, as text.

    Raises:
        CalibrationError: as `kernel`.
    """
    if (counting_kernel := kernel()) is not None:
        return f"C kernel ({counting_kernel.name})"
    if os.environ.get(KERNEL_VARIABLE):
        return f"numpy and OpenCV ({KERNEL_VARIABLE}=opencv)"
    return f"numpy and OpenCV (the C kernel {_load_own_kernel()[1]})"


@cache
def _load_own_kernel() -> tuple[CountingKernel | None, str]:
    """Return (kernel, ""), or (None, why there is none)."""
    if not LIBRARY.exists():
        return None, "is not built here"
    try:
        return load_kernels(LIBRARY)[-1], ""
    except OSError as error:
        return None, f"cannot be loaded: {error}"
