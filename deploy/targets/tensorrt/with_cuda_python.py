"""`Cuda` by cuda-python, NVIDIA's own binding of the runtime API.

Each of its calls gives a tuple, the error code first. The module is `cuda.bindings.runtime` since
12.6, and was `cuda.cudart` before.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError
from deploy.targets.tensorrt.cuda import REFUSED, WAY_OUT, Stream, version_words
from deploy.tensors import Array


def count() -> int:
    """How many GPUs there are.

    Raises:
        ImportError, OSError: cuda-python is missing.
        SdkMissingError: CUDA does not start, or has no GPU.
    """
    code, found = _runtime().cudaGetDeviceCount()
    if int(code) != 0:
        raise SdkMissingError(_words(code))
    if found == 0:
        raise SdkMissingError("no GPU")
    return int(found)


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        from cuda import cudart as runtime
    return runtime


def _must(answer: Sequence[Any]) -> Any:
    """What a call gave, or None where it gives nothing.

    Raises:
        BackendError: its code is not that of success.
    """
    code, *given = answer
    if int(code) != 0:
        raise BackendError(f"{REFUSED}: {_words(code)}; {WAY_OUT}")
    return given[0] if given else None


def _words(code: Any) -> str:
    """CUDA's own words for an error code, and the code."""
    _, text = _runtime().cudaGetErrorString(code)
    return f"{text.decode() if isinstance(text, bytes) else text} ({int(code)})"


@dataclass(frozen=True)
class _Event:
    """An event, destroyed when nobody holds it any more."""

    own: Any


class CudaPython:
    """One GPU; the meaning of each method stands at `Cuda`."""

    def __init__(self, number: int) -> None:
        self._rt = _runtime()
        self._number = number
        about = _must(self._rt.cudaGetDeviceProperties(number))
        name = about.name.decode() if isinstance(about.name, bytes) else about.name
        self.name = f"{name.rstrip(chr(0))} sm_{about.major}{about.minor}"
        self.newest = version_words(int(_must(self._rt.cudaDriverGetVersion())))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Set the thread's device, and set back the one before."""
        before = _must(self._rt.cudaGetDevice())
        _must(self._rt.cudaSetDevice(self._number))
        try:
            yield
        finally:
            _must(self._rt.cudaSetDevice(before))

    def allocate(self, size: int) -> int:
        """`cudaMalloc`."""
        return int(_must(self._rt.cudaMalloc(max(size, 1))))

    def free(self, address: int) -> None:
        """`cudaFree`."""
        with self.current():
            _must(self._rt.cudaFree(address))

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """`cudaHostAlloc`; free when no array looks at it any more."""
        many, wanted = prod(shape), np.dtype(dtype)
        size = max(many, 1) * wanted.itemsize
        address = int(_must(self._rt.cudaHostAlloc(size, 0)))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._rt.cudaFreeHost, address).atexit = False
        flat: Array = np.frombuffer(memoryview(memory), wanted)
        return flat[:many].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        """`cudaMemcpy`."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        _must(self._rt.cudaMemcpy(address, array.ctypes.data, array.nbytes, kind))

    def copy_in_later(self, address: int, array: Array, stream: Stream) -> None:
        """`cudaMemcpyAsync`."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        size = array.nbytes
        _must(self._rt.cudaMemcpyAsync(address, array.ctypes.data, size, kind, stream.own))

    def copy_out_later(self, array: Array, address: int, stream: Stream) -> None:
        """`cudaMemcpyAsync`."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        size = array.nbytes
        _must(self._rt.cudaMemcpyAsync(array.ctypes.data, address, size, kind, stream.own))

    def stream(self) -> Stream:
        """`cudaStreamCreate`."""
        made = _must(self._rt.cudaStreamCreate())
        held = Stream(int(made), made)
        weakref.finalize(held, self._rt.cudaStreamDestroy, made).atexit = False
        return held

    def wait(self, stream: Stream) -> None:
        """`cudaStreamSynchronize`."""
        _must(self._rt.cudaStreamSynchronize(stream.own))

    def event(self) -> _Event:
        """`cudaEventCreate`."""
        made = _Event(_must(self._rt.cudaEventCreate()))
        weakref.finalize(made, self._rt.cudaEventDestroy, made.own).atexit = False
        return made

    def record(self, event: _Event, stream: Stream) -> None:
        """`cudaEventRecord`."""
        _must(self._rt.cudaEventRecord(event.own, stream.own))

    def between_ms(self, first: _Event, last: _Event) -> float:
        """`cudaEventElapsedTime`."""
        return float(_must(self._rt.cudaEventElapsedTime(first.own, last.own)))
