"""CUDA as far as an engine needs it: one GPU, whichever binding reaches it.

::

    gpus.gpu(0) --> Cuda    with cuda.current(): allocate, copy, record, wait     (what a binding
                     '-- Buffer   device memory, free when nobody holds it         raises is a
                          '-- CudaMemory   batches for a calibrator                BackendError)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.tensors import Array

REFUSED = "CUDA must take every call, but refused one"
WAY_OUT = "`nvidia-smi` shows the state of the GPU and what else holds its memory"


@dataclass(frozen=True)
class Stream:
    """A CUDA stream: its handle, as TensorRT takes it, and what the binding made."""

    handle: int
    own: Any


class Cuda(Protocol):
    """One GPU. All methods but `current` are called while it is; addresses are numbers.

    Raises:
        BackendError: CUDA refused a call; in its own words.
    """

    @property
    def name(self) -> str:
        """The device's name and compute capability, as "NVIDIA H200 sm_90"."""
        ...

    @property
    def newest(self) -> str:
        """The newest CUDA that the driver has, as "12.4"."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Make it the device of this thread for a while."""
        ...

    def allocate(self, size: int) -> int:
        """Address of `size` bytes on the device, at least one."""
        ...

    def free(self, address: int) -> None:
        """Give them back; from any thread, current or not."""
        ...

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """An array in host memory that the device can copy from and to by itself."""
        ...

    def copy_in(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array to the device, and wait for it."""
        ...

    def copy_in_later(self, address: int, array: Array, stream: Stream) -> None:
        """The same on a stream."""
        ...

    def copy_out_later(self, array: Array, address: int, stream: Stream) -> None:
        """Copy into a C-contiguous array, on a stream."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def wait(self, stream: Stream) -> None:
        """Until all that was put on the stream is done."""
        ...

    def event(self) -> Any:
        """A new event, to be recorded again and again."""
        ...

    def record(self, event: Any, stream: Stream) -> None:
        """Mark the moment at which the stream comes to this point."""
        ...

    def between_ms(self, first: Any, last: Any) -> float:
        """Milliseconds between two recorded moments, by the GPU's clock."""
        ...


def version_words(number: int) -> str:
    """A version of CUDA as CUDA counts it: 12040 is "12.4"."""
    major, rest = divmod(number, 1000)
    return f"{major}.{rest // 10}"


class Buffer:
    """Memory of a GPU, given back when nobody holds it any more.

    Attributes:
        size: in bytes.
        address: on the device.
    """

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = max(size, 1)
        self.address = cuda.allocate(self.size)
        self._end = weakref.finalize(self, cuda.free, self.address)
        self._end.atexit = False  # the driver frees all, and may be gone by then

    def free(self) -> None:
        """Give it back now."""
        self._end()


class CudaMemory:
    """Buffers on the GPU that TensorRT's calibrators read batches from, one a network input."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffers: dict[str, Buffer] = {}

    def put(self, name: str, array: Array) -> int:
        """Copy `array` to the GPU, into the buffer of `name`, made larger where it must be."""
        with self._cuda.current():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < array.nbytes:
                buffer = self._buffers[name] = Buffer(self._cuda, array.nbytes)
            self._cuda.copy_in(buffer.address, array)
            return buffer.address

    def free(self) -> None:
        """Release every buffer."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
