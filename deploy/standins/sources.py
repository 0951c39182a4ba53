"""What a copy comes from: an array, or bytes behind an address."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_OWN_MEMORY = "/proc/self/mem"  # to read where nothing is there is an error and no crash


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes to be copied.

    Attributes:
        data: the bytes.
        dtype: name of the numpy dtype that they are of; None of bytes behind an address.
        shape: sizes of the array that they are; None likewise.
    """

    data: Bytes
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


def address_of(value: object) -> int | None:
    """The number that a pointer of numpy, ctypes, pycuda or cuda-python stands for; None of arrays.

    Of a ctypes array, which is memory itself and no pointer to it, there is none either.
    """
    value = getattr(value, "_as_parameter_", value)  # of `array.ctypes`
    if hasattr(value, "_obj"):  # of `byref`
        return ctypes.addressof(value._obj)
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value or 0
    if isinstance(value, ctypes._SimpleCData):
        return int(value.value or 0)
    if isinstance(value, np.ndarray | float | np.floating) or not hasattr(type(value), "__int__"):
        return None
    return int(value)  # type: ignore[call-overload, no-any-return]


def of_array(value: object, size: int | None) -> Source:
    """The bytes of an array, or its first ones.

    Raises:
        ValueError: it is no array, is not contiguous, or has fewer.
    """
    try:
        array: NDArray[Any] = np.asarray(memoryview(value))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a copy takes arrays and addresses, got {type(value).__name__}"
        ) from error
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ValueError(
            f"a copy takes contiguous arrays, got strides {array.strides} of shape {array.shape};"
            " use numpy.ascontiguousarray"
        )
    data: Bytes = array.reshape(-1, order="A").view(np.uint8)
    if size is not None and not 0 <= size <= data.size:
        raise ValueError(f"a copy must not read beyond its array, got {size} bytes of {data.size}")
    if isinstance(value, bytes | bytearray | memoryview):  # of whatever they were
        return Source(data[:size])
    whole = array.flags.c_contiguous and size in (None, data.size)
    return Source(data[:size], array.dtype.name, array.shape if whole else None)


def behind(address: int, size: int) -> Bytes:
    """A copy of bytes of this process, wherever they are.

    Raises:
        ValueError: some of them are not there.
    """
    try:
        return _peek(address, size)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"a copy must read memory that is there, got {size} bytes at {address:#x}, which are"
            " not all there"
        ) from error


def _peek(address: int, size: int) -> Bytes:
    found: Bytes = np.empty(size, np.uint8)
    try:
        handle = os.open(_OWN_MEMORY, os.O_RDONLY)
    except OSError:  # not Linux: then a wrong address is what it always was
        ctypes.memmove(found.ctypes.data, address, size)
        return found
    try:
        done = 0
        while done < size:
            count = os.preadv(handle, [found[done:].data], address + done)
            if not count:
                raise OSError("nothing is there")
            done += count
    finally:
        os.close(handle)
    return found
