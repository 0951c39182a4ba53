"""CUDA: the calls that building and running an engine needs, by cuda-python.

::

    open_gpu(0) --> Cuda   with cuda.current(): allocate, copy, record, wait
                    '-- DeviceBuffer   device memory, freed with its last reference
                         '-- CudaMemory   input batches for a calibrator

`Cuda` is one GPU. All its methods but `current` and `free` must run inside `with cuda.current()`.
Addresses are integers. A call that CUDA refuses is a `BackendError`, which quotes CUDA.

Each call of cuda-python returns a tuple that starts with the error code. The module is
`cuda.bindings.runtime` since 12.6; before it was `cuda.cudart`. It uses the device's primary
context, as TensorRT and torch do.
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from deploy.errors import BackendError, ConfigError, SdkMissingError, first_line
from deploy.tensors import Array


@dataclass(frozen=True)
class CudaStream:
    """A CUDA stream.

    Attributes:
        handle: its address, as TensorRT takes it.
        binding: the object of cuda-python.
    """

    handle: int
    binding: Any


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        from cuda import cudart as runtime
    return runtime


def _check(result: Sequence[Any]) -> Any:
    """Return the value of a call, or None if it has none."""
    code, *values = result
    if int(code) != 0:
        raise BackendError(
            f"CUDA must take every call, but refused one: {_error_text(code)}; `nvidia-smi` shows"
            " the state of the GPU and what else holds its memory"
        )
    return values[0] if values else None


def _error_text(code: Any) -> str:
    _, text = _runtime().cudaGetErrorString(code)
    return f"{text.decode() if isinstance(text, bytes) else text} ({int(code)})"


@dataclass(frozen=True)
class _Event:
    """An event, destroyed with the last reference to this object."""

    binding: Any


class Cuda:
    """One GPU.

    Attributes:
        name: device name and compute capability, such as "NVIDIA H200 sm_90".
        newest: newest CUDA version that the driver supports, such as "12.4".
    """

    def __init__(self, number: int) -> None:
        self._rt = _runtime()
        self._number = number
        properties = _check(self._rt.cudaGetDeviceProperties(number))
        name = properties.name
        if isinstance(name, bytes):
            name = name.decode()
        self.name = f"{name.rstrip(chr(0))} sm_{properties.major}{properties.minor}"
        major, remainder = divmod(int(_check(self._rt.cudaDriverGetVersion())), 1000)
        self.newest = f"{major}.{remainder // 10}"  # 12040 is "12.4"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Set the thread's device; restore the previous one at exit."""
        previous_device = _check(self._rt.cudaGetDevice())
        _check(self._rt.cudaSetDevice(self._number))
        try:
            yield
        finally:
            _check(self._rt.cudaSetDevice(previous_device))

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes (at least 1) of device memory; return the address."""
        return int(_check(self._rt.cudaMalloc(max(size, 1))))

    def free(self, address: int) -> None:
        """Free device memory; from any thread, also outside of `current`."""
        with self.current():
            _check(self._rt.cudaFree(address))

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array in page-locked host memory, freed with the last array that views it."""
        count = prod(shape)
        element_type = np.dtype(dtype)
        size = max(count, 1) * element_type.itemsize
        address = int(_check(self._rt.cudaHostAlloc(size, 0)))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._rt.cudaFreeHost, address).atexit = False
        flat: Array = np.frombuffer(memoryview(memory), element_type)
        return flat[:count].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array to the device, synchronously."""
        direction = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        _check(self._rt.cudaMemcpy(address, array.ctypes.data, array.nbytes, direction))

    def copy_in_later(self, address: int, array: Array, stream: CudaStream) -> None:
        """Queue the copy of a C-contiguous array to the device."""
        direction = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        source = array.ctypes.data
        _check(self._rt.cudaMemcpyAsync(address, source, array.nbytes, direction, stream.binding))

    def copy_out_later(self, array: Array, address: int, stream: CudaStream) -> None:
        """Queue the copy from the device to a C-contiguous array."""
        direction = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        target = array.ctypes.data
        _check(self._rt.cudaMemcpyAsync(target, address, array.nbytes, direction, stream.binding))

    def stream(self) -> CudaStream:
        """Create a stream, destroyed with the last reference to it."""
        binding = _check(self._rt.cudaStreamCreate())
        stream = CudaStream(int(binding), binding)
        weakref.finalize(stream, self._rt.cudaStreamDestroy, binding).atexit = False
        return stream

    def wait(self, stream: CudaStream) -> None:
        """Wait until a stream's work is done."""
        _check(self._rt.cudaStreamSynchronize(stream.binding))

    def event(self) -> _Event:
        """Create an event."""
        event = _Event(_check(self._rt.cudaEventCreate()))
        weakref.finalize(event, self._rt.cudaEventDestroy, event.binding).atexit = False
        return event

    def record(self, event: _Event, stream: CudaStream) -> None:
        """Let a stream record the time at which it reaches an event."""
        _check(self._rt.cudaEventRecord(event.binding, stream.binding))

    def between_ms(self, start: _Event, end: _Event) -> float:
        """Return the milliseconds between two recorded events, on the GPU's clock."""
        return float(_check(self._rt.cudaEventElapsedTime(start.binding, end.binding)))


def open_gpu(number: int = 0) -> Cuda:
    """Return the GPU with this index.

    Raises:
        SdkMissingError: cuda-python is missing or does not work, or there is no GPU.
        ConfigError: no GPU has this index.
    """
    try:
        count = _count_gpus()
    except (ImportError, OSError, SdkMissingError) as error:
        raise SdkMissingError(
            "an engine is built and run on an NVIDIA GPU by way of cuda-python, which does not work"
            f" here ({first_line(error)}); on a machine with a GPU and its driver: pip install"
            " cuda-python"
        ) from error
    if number >= count:
        raise ConfigError(
            f"a device is one of the {count} GPUs of this machine, counted from 0, got {number}"
        )
    return Cuda(number)


def _count_gpus() -> int:
    """Return the number of GPUs, at least 1.

    Raises:
        ImportError, OSError: cuda-python is missing, or its library.
        SdkMissingError: CUDA does not start, or there is no GPU.
    """
    code, gpus = _runtime().cudaGetDeviceCount()
    if int(code) != 0:
        raise SdkMissingError(_error_text(code))
    if not gpus:
        raise SdkMissingError("no GPU")
    return int(gpus)


class DeviceBuffer:
    """Device memory, freed with the last reference to this object."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = max(size, 1)
        self.address = cuda.allocate(self.size)
        # at exit the driver frees all memory, and may be gone by then
        weakref.finalize(self, cuda.free, self.address).atexit = False


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
