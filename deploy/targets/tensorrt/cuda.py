"""CUDA: the calls that building and running an engine needs, by cuda-python or by pycuda.

::

    open_gpu(0) --> Cuda   with cuda.current(): allocate, copy, record, wait
                    '-- DeviceBuffer   device memory, freed with its last reference
                         '-- CudaMemory   input batches for a calibrator

`Cuda` is one GPU. All its methods but `current` and `free` must run inside `with cuda.current()`.
Addresses are integers. A call that CUDA refuses is a `BackendError`, which quotes CUDA.

Each call of cuda-python returns a tuple that starts with the error code. The module is
`cuda.bindings.runtime` since 12.6; before it was `cuda.cudart`. pycuda's contexts are pushed and
popped, since a leftover one aborts the process. Both bindings use the device's primary context, as
TensorRT and torch do.
"""

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from deploy.errors import BackendError, ConfigError, SdkMissingError, first_line
from deploy.tensors import Array

_REFUSED_CALL = "CUDA must take every call, but refused one"
_ADVICE = "`nvidia-smi` shows the state of the GPU and what else holds its memory"


@dataclass(frozen=True)
class CudaStream:
    """A CUDA stream.

    Attributes:
        handle: its address, as TensorRT takes it.
        binding: the object of cuda-python or pycuda.
    """

    handle: int
    binding: Any


def _format_version(number: int) -> str:
    """Format CUDA's integer version: 12040 is "12.4"."""
    major, remainder = divmod(number, 1000)
    return f"{major}.{remainder // 10}"


def _runtime() -> Any:
    """Import and return cuda-python's module of the runtime API, by its new or old name."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        from cuda import cudart as runtime
    return runtime


def _check(result: Sequence[Any]) -> Any:
    """Return the value in the result of a cuda-python call, whose first entry is an error code.

    None if the call has no value.

    Raises:
        BackendError: the code says that CUDA refused the call.
    """
    code, *values = result
    if int(code) != 0:
        raise BackendError(f"{_REFUSED_CALL}: {_error_text(code)}; {_ADVICE}")
    return values[0] if values else None


def _error_text(code: Any) -> str:
    """Return CUDA's text for an error code, and its number."""
    _, text = _runtime().cudaGetErrorString(code)
    return f"{text.decode() if isinstance(text, bytes) else text} ({int(code)})"


@dataclass(frozen=True)
class _Event:
    """An event, destroyed with the last reference to this object."""

    binding: Any


class _CudaPython:
    """One GPU by cuda-python.

    Attributes:
        name: device name and compute capability, such as "NVIDIA H200 sm_90".
        newest: newest CUDA version that the driver supports, such as "12.4".
    """

    def __init__(self, number: int) -> None:
        self._cudart = _runtime()
        self._number = number
        properties = _check(self._cudart.cudaGetDeviceProperties(number))
        name = properties.name
        if isinstance(name, bytes):
            name = name.decode()
        self.name = f"{name.rstrip(chr(0))} sm_{properties.major}{properties.minor}"
        self.newest = _format_version(int(_check(self._cudart.cudaDriverGetVersion())))

    @staticmethod
    def count() -> int:
        """Return the number of GPUs.

        Raises:
            ImportError, OSError: cuda-python is not installed.
            SdkMissingError: CUDA does not start.
        """
        code, gpus = _runtime().cudaGetDeviceCount()
        if int(code) != 0:
            raise SdkMissingError(_error_text(code))
        return int(gpus)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Set the thread's device; restore the previous one at exit."""
        previous_device = _check(self._cudart.cudaGetDevice())
        _check(self._cudart.cudaSetDevice(self._number))
        try:
            yield
        finally:
            _check(self._cudart.cudaSetDevice(previous_device))

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes (at least 1) of device memory; return the address."""
        return int(_check(self._cudart.cudaMalloc(max(size, 1))))

    def free(self, address: int) -> None:
        """Free device memory; from any thread, also outside of `current`."""
        with self.current():
            _check(self._cudart.cudaFree(address))

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array in page-locked host memory, freed with the last array that views it."""
        count = prod(shape)
        element_type = np.dtype(dtype)
        size = max(count, 1) * element_type.itemsize
        address = int(_check(self._cudart.cudaHostAlloc(size, 0)))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._cudart.cudaFreeHost, address).atexit = False
        flat: Array = np.frombuffer(memoryview(memory), element_type)
        return flat[:count].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array to the device, synchronously; the others queue their copy."""
        direction = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        _check(self._cudart.cudaMemcpy(address, array.ctypes.data, array.nbytes, direction))

    def copy_in_later(self, address: int, array: Array, stream: CudaStream) -> None:
        direction = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        source = array.ctypes.data
        _check(
            self._cudart.cudaMemcpyAsync(address, source, array.nbytes, direction, stream.binding)
        )

    def copy_out_later(self, array: Array, address: int, stream: CudaStream) -> None:
        direction = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        target = array.ctypes.data
        _check(
            self._cudart.cudaMemcpyAsync(target, address, array.nbytes, direction, stream.binding)
        )

    def stream(self) -> CudaStream:
        binding = _check(self._cudart.cudaStreamCreate())
        stream = CudaStream(int(binding), binding)
        weakref.finalize(stream, self._cudart.cudaStreamDestroy, binding).atexit = False
        return stream

    def wait(self, stream: CudaStream) -> None:
        _check(self._cudart.cudaStreamSynchronize(stream.binding))

    def event(self) -> _Event:
        event = _Event(_check(self._cudart.cudaEventCreate()))
        weakref.finalize(event, self._cudart.cudaEventDestroy, event.binding).atexit = False
        return event

    def record(self, event: _Event, stream: CudaStream) -> None:
        _check(self._cudart.cudaEventRecord(event.binding, stream.binding))

    def between_ms(self, start: _Event, end: _Event) -> float:
        """Return the milliseconds between two recorded events, on the GPU's clock."""
        return float(_check(self._cudart.cudaEventElapsedTime(start.binding, end.binding)))


class _Pycuda:
    """One GPU by pycuda, with the methods of `_CudaPython`."""

    def __init__(self, number: int) -> None:
        import pycuda.driver as cuda

        self._cuda = cuda
        device = cuda.Device(number)
        major, minor = device.compute_capability()
        self.name = f"{device.name()} sm_{major}{minor}"
        self.newest = _format_version(cuda.get_driver_version())
        self._context = device.retain_primary_context()
        self._allocations: dict[int, Any] = {}  # address -> pycuda's object

    @staticmethod
    def count() -> int:
        import pycuda.driver as cuda

        try:
            cuda.init()
            return int(cuda.Device.count())
        except cuda.Error as error:
            raise SdkMissingError(str(error)) from error

    @contextmanager
    def current(self) -> Iterator[None]:
        """Push the primary context."""
        self._context.push()
        try:
            yield
        except self._cuda.Error as error:
            raise BackendError(f"{_REFUSED_CALL}: {error}; {_ADVICE}") from error
        finally:
            self._context.pop()

    def allocate(self, size: int) -> int:
        allocation = self._cuda.mem_alloc(max(size, 1))
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def free(self, address: int) -> None:
        with self.current():
            self._allocations.pop(address).free()

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """`pagelocked_empty`, which supports neither scalars nor empty arrays."""
        flat: Array = self._cuda.pagelocked_empty((max(prod(shape), 1),), np.dtype(dtype))
        return flat[: prod(shape)].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        self._cuda.memcpy_htod(self._allocations[address], array)

    def copy_in_later(self, address: int, array: Array, stream: CudaStream) -> None:
        self._cuda.memcpy_htod_async(self._allocations[address], array, stream.binding)

    def copy_out_later(self, array: Array, address: int, stream: CudaStream) -> None:
        self._cuda.memcpy_dtoh_async(array, self._allocations[address], stream.binding)

    def stream(self) -> CudaStream:
        binding = self._cuda.Stream()
        return CudaStream(int(binding.handle), binding)

    def wait(self, stream: CudaStream) -> None:
        stream.binding.synchronize()

    def event(self) -> Any:
        return self._cuda.Event()

    def record(self, event: Any, stream: CudaStream) -> None:
        event.record(stream.binding)

    def between_ms(self, start: Any, end: Any) -> float:
        return float(start.time_till(end))


Cuda = _CudaPython | _Pycuda
BINDINGS: Mapping[str, type[Cuda]] = {"cuda-python": _CudaPython, "pycuda": _Pycuda}


def open_gpu(number: int = 0) -> Cuda:
    """Return the GPU with this index, through the first binding that works.

    cuda-python is tried first, since it has wheels.

    Raises:
        SdkMissingError: no binding works, or there is no GPU.
        ConfigError: no GPU has this index.
    """
    failures = []
    for name, binding in BINDINGS.items():
        try:
            count = binding.count()
            if count == 0:
                raise SdkMissingError("no GPU")
        except (ImportError, OSError, SdkMissingError) as error:
            failures.append(f"{name}: {first_line(error)}")
            continue
        if number >= count:
            raise ConfigError(
                f"a device is one of the {count} GPUs of this machine, counted from 0, got {number}"
            )
        return binding(number)
    raise SdkMissingError(
        f"an engine is built and run on an NVIDIA GPU by way of cuda-python or pycuda, and neither"
        f" works here ({'; '.join(failures)}); on a machine with a GPU and its driver: pip install"
        " cuda-python, or pycuda"
    )


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
