"""The CUDA calls that building and running an engine needs, independent of the Python binding.

::

    sdk.gpu(0) --> Cuda    with cuda.current(): allocate, copy, record, wait
                    '-- Buffer   device memory, freed with its last reference
                         '-- CudaMemory   input batches for a calibrator
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
class CudaStream:
    """A CUDA stream: its handle, as TensorRT takes it, and the binding's own object."""

    handle: int
    own: Any


class Cuda(Protocol):
    """One GPU. All methods but `current` and `free` must run inside `with cuda.current()`.

    Addresses are integers.

    Raises:
        BackendError: a CUDA call failed; the message quotes CUDA's error.
    """

    @property
    def name(self) -> str:
        """Device name and compute capability, such as "NVIDIA H200 sm_90"."""
        ...

    @property
    def newest(self) -> str:
        """Newest CUDA version that the driver supports, such as "12.4"."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Make this GPU the current device of the thread inside a `with` block."""
        ...

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes (at least 1) of device memory; return the address."""
        ...

    def free(self, address: int) -> None:
        """Free device memory; from any thread, also outside of `current`."""
        ...

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array in pinned (page-locked) host memory."""
        ...

    def copy_in(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array to the device, synchronously."""
        ...

    def copy_in_later(self, address: int, array: Array, stream: CudaStream) -> None:
        """Queue a copy of a C-contiguous array to the device on a stream."""
        ...

    def copy_out_later(self, array: Array, address: int, stream: CudaStream) -> None:
        """Queue a copy from the device into a C-contiguous array on a stream."""
        ...

    def stream(self) -> CudaStream:
        """Create a stream."""
        ...

    def wait(self, stream: CudaStream) -> None:
        """Wait until all work on the stream is done."""
        ...

    def event(self) -> Any:
        """Create an event; it can be recorded repeatedly."""
        ...

    def record(self, event: Any, stream: CudaStream) -> None:
        """Record an event on the stream."""
        ...

    def between_ms(self, first: Any, last: Any) -> float:
        """Return the milliseconds between two recorded events, on the GPU's clock."""
        ...


def format_cuda_version(number: int) -> str:
    """Format CUDA's integer version: 12040 is "12.4"."""
    major, rest = divmod(number, 1000)
    return f"{major}.{rest // 10}"


class DeviceBuffer:
    """Device memory, freed with the last reference to this object."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = max(size, 1)
        self.address = cuda.allocate(self.size)
        self._finalizer = weakref.finalize(self, cuda.free, self.address)
        self._finalizer.atexit = False  # the driver frees all memory, and may be gone by then

    def free(self) -> None:
        """Free the memory now."""
        self._finalizer()


class CudaMemory:
    """Device buffers from which TensorRT's calibrators read batches, one per network input."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffers: dict[str, DeviceBuffer] = {}

    def put(self, name: str, array: Array) -> int:
        """Copy `array` into the buffer of `name`, growing it if needed; return the address."""
        with self._cuda.current():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < array.nbytes:
                buffer = self._buffers[name] = DeviceBuffer(self._cuda, array.nbytes)
            self._cuda.copy_in(buffer.address, array)
            return buffer.address

    def free(self) -> None:
        """Free every buffer."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
