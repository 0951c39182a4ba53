"""Stands in for cuda-python: `cuda.cudart`, `cuda.cuda`, `cuda.bindings.runtime` and `.driver`.

Every function gives a tuple that begins with its error code, which is always success here: what a
GPU would answer with a code is raised, since scripts seldom look at it.

Source: NVIDIA/cuda-python, cuda_bindings/docs (module runtime, module driver).

What stands in for libcudart where a script calls it by ctypes: `CDLL("libcudart.so")`.

Functions give their error code, which is always success, and results through pointers, as in C.
Source: CUDA Runtime API reference, sections memory, stream and device management.

What stands in for pycuda: `driver`, `autoinit`, `autoprimaryctx` and `gpuarray`.

Source: inducer/pycuda 2024.1, doc/driver.rst and doc/array.rst; as much of it as moves arrays.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deploy.standins.memory import Memory, absent, module


class cudaError_t(enum.IntEnum):
    """The error codes that there are."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2


class cudaMemcpyKind(enum.IntEnum):
    """Ways of a copy."""

    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class CUresult(enum.IntEnum):
    """The driver's error codes that there are."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Handle(int):
    """A pointer, stream, device or context: a number."""

    def getPtr(self) -> int:
        """The number."""
        return int(self)


def cudart_modules(memory: Memory) -> dict[str, ModuleType]:
    """Dotted name -> module, all on this memory."""
    runtime, driver = runtime_names(memory), driver_names(memory)
    parts = {
        "cudart": module("cuda.cudart", runtime),
        "cuda": module("cuda.cuda", driver),
        "bindings.runtime": module("cuda.bindings.runtime", runtime),
        "bindings.driver": module("cuda.bindings.driver", driver),
    }
    both = {"runtime": parts["bindings.runtime"], "driver": parts["bindings.driver"]}
    parts["bindings"] = module("cuda.bindings", both)
    tops = {name: part for name, part in parts.items() if "." not in name}
    whole = module("cuda", {**tops, "__version__": "12.6.0"})
    return {"cuda": whole, **{f"cuda.{name}": part for name, part in parts.items()}}


def runtime_names(memory: Memory) -> dict[str, Any]:
    """The names of the runtime API."""
    done = cudaError_t.cudaSuccess

    def allocate(size: Any, *more: Any) -> tuple[Any, int]:
        return done, memory.alloc(size)

    def free(pointer: Any, *more: Any) -> tuple[Any]:
        memory.free(pointer)
        return (done,)

    def copy(to: Any, source: Any, count: Any, *kind_and_stream: Any) -> tuple[Any]:
        memory.copy(to, source, int(count))
        return (done,)

    def fill(to: Any, value: int, count: int, *stream: Any) -> tuple[Any]:
        memory.copy(to, bytes([value & 255]) * count)
        return (done,)

    def nothing(*given: Any) -> tuple[Any]:
        return (done,)

    def stream(*flags: Any) -> tuple[Any, Handle]:
        return done, Handle(0)

    def word(error: Any) -> tuple[Any, bytes]:
        return done, cudaError_t(error).name.encode()

    names: dict[str, Any] = {"cudaError_t": cudaError_t, "cudaMemcpyKind": cudaMemcpyKind}
    for function, called in (
        (allocate, "Malloc MallocAsync MallocHost HostAlloc MallocManaged"),
        (free, "Free FreeAsync FreeHost"),
        (copy, "Memcpy MemcpyAsync"),
        (fill, "Memset MemsetAsync"),
        (stream, "StreamCreate StreamCreateWithFlags"),
        (nothing, "StreamSynchronize StreamDestroy DeviceSynchronize SetDevice GetLastError"),
        (word, "GetErrorName GetErrorString"),
    ):
        names |= {f"cuda{name}": function for name in called.split()}
    names["cudaGetDevice"] = lambda: (done, 0)
    names["cudaGetDeviceCount"] = lambda: (done, 1)
    names["cudaStream_t"] = Handle
    return names


def driver_names(memory: Memory) -> dict[str, Any]:
    """The names of the driver API."""
    done = CUresult.CUDA_SUCCESS

    def allocate(size: Any, *more: Any) -> tuple[Any, Handle]:
        return done, Handle(memory.alloc(size))

    def free(pointer: Any, *more: Any) -> tuple[Any]:
        memory.free(pointer)
        return (done,)

    def copy(to: Any, source: Any, count: Any, *stream: Any) -> tuple[Any]:
        memory.copy(to, source, int(count))
        return (done,)

    def nothing(*given: Any) -> tuple[Any]:
        return (done,)

    def handle(*given: Any) -> tuple[Any, Handle]:
        return done, Handle(0)

    def word(error: Any) -> tuple[Any, bytes]:
        return done, CUresult(error).name.encode()

    names: dict[str, Any] = {"CUresult": CUresult}
    names |= dict.fromkeys(("CUdeviceptr", "CUstream", "CUdevice", "CUcontext"), Handle)
    for function, called in (
        (allocate, "MemAlloc MemAllocHost MemAllocManaged"),
        (free, "MemFree MemFreeHost"),
        (copy, "MemcpyHtoD MemcpyHtoDAsync MemcpyDtoH MemcpyDtoHAsync MemcpyDtoD"),
        (handle, "DeviceGet CtxCreate DevicePrimaryCtxRetain StreamCreate CtxGetCurrent"),
        (
            nothing,
            "Init CtxPushCurrent CtxPopCurrent CtxSetCurrent CtxSynchronize CtxDestroy"
            " StreamSynchronize StreamDestroy",
        ),
        (word, "GetErrorName GetErrorString"),
    ):
        names |= {f"cu{name}": function for name in called.split()}
    return names


_FILE = re.compile(r"(.*[/\\])?(lib)?cudart(64_\d+)?(-[0-9a-f]+)?\.(so|dll|dylib)[.\d]*")


def libraries(memory: Memory) -> type[ctypes.CDLL]:
    """A `ctypes.CDLL` that gives this memory's functions for libcudart, and any other as it is."""
    library = Library(memory)

    class CDLL(ctypes.CDLL):
        """The libraries of this machine, and libcudart."""

        def __new__(cls, name: Any = None, *given: Any, **named: Any) -> Any:
            if isinstance(name, str) and _FILE.fullmatch(name):
                return library
            return super().__new__(cls)

    return CDLL


class Function:
    """One function of the library; what ctypes would be told of its types is not needed."""

    argtypes: Any = None
    restype: Any = ctypes.c_int

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *given: Any) -> int:
        """Run it; gives success."""
        self._run(*given)
        return 0


class Library:
    """The functions of libcudart; each name gives the same object every time."""

    def __init__(self, memory: Memory) -> None:
        def allocate(result: Any, size: Any, *flags: Any) -> None:
            _pointed(result).value = memory.alloc(size)

        def copy(to: Any, source: Any, count: Any, *kind_and_stream: Any) -> None:
            memory.copy(to, source, int(getattr(count, "value", count)))

        def fill(to: Any, value: Any, count: Any, *stream: Any) -> None:
            byte, size = (int(getattr(number, "value", number)) for number in (value, count))
            memory.copy(to, bytes([byte & 255]) * size)

        def zero(result: Any, *flags: Any) -> None:
            _pointed(result).value = 0

        def one(result: Any) -> None:
            _pointed(result).value = 1

        def nothing(*given: Any) -> None:
            pass

        for run, called in (
            (allocate, "Malloc MallocHost HostAlloc MallocManaged"),
            (lambda pointer: memory.free(pointer), "Free FreeHost"),
            (copy, "Memcpy MemcpyAsync"),
            (fill, "Memset MemsetAsync"),
            (zero, "StreamCreate StreamCreateWithFlags GetDevice"),
            (one, "GetDeviceCount"),
            (nothing, "StreamSynchronize StreamDestroy DeviceSynchronize SetDevice GetLastError"),
        ):
            vars(self).update({f"cuda{name}": Function(run) for name in called.split()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"libcudart.{name}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _pointed(result: Any) -> Any:
    """What `byref` or `pointer` points to."""
    return result._obj if hasattr(result, "_obj") else result.contents


Array = NDArray[Any]


def pycuda_modules(memory: Memory) -> dict[str, ModuleType]:
    """Dotted name -> module, all on this memory."""
    driver = Driver(memory)
    arrays = Arrays(memory)
    parts = {
        "driver": module("pycuda.driver", driver.names()),
        "autoinit": module("pycuda.autoinit", {"device": Device(), "context": Context()}),
        "autoprimaryctx": module(
            "pycuda.autoprimaryctx", {"device": Device(), "context": Context()}
        ),
        "gpuarray": module("pycuda.gpuarray", arrays.names()),
        "compiler": module("pycuda.compiler", {}),
        "tools": module("pycuda.tools", {"make_default_context": Context}),
    }
    whole = module("pycuda", {"VERSION": (2024, 1), "VERSION_TEXT": "2024.1", **parts})
    return {"pycuda": whole, **{f"pycuda.{name}": part for name, part in parts.items()}}


class DeviceAllocation:
    """An allocation that is freed with its object; `int()` gives its address."""

    def __init__(self, memory: Memory, size: object) -> None:
        self._freed = True  # until there is something to be freed
        self._memory = memory
        self._address = memory.alloc(size)
        self._freed = False

    def __int__(self) -> int:
        return self._address

    __index__ = __int__

    def __add__(self, other: int) -> int:
        return self._address + other

    def free(self) -> None:
        """Give it back, once: its address may be another allocation's later."""
        if not self._freed:
            self._freed = True
            self._memory.free(self._address)

    def __del__(self) -> None:
        self.free()


class Device:
    """The one device there is."""

    def __init__(self, ordinal: object = 0) -> None:
        self.ordinal = ordinal

    @staticmethod
    def count() -> int:
        """One."""
        return 1

    def name(self) -> str:
        """What it is."""
        return "host memory"

    def make_context(self, *flags: object) -> Context:
        """A context, which there is no need of."""
        return Context()

    retain_primary_context = make_context


class Context:
    """A context: nothing to do."""

    def push(self) -> None:
        """Nothing."""

    @staticmethod
    def pop() -> None:
        """Nothing."""

    @staticmethod
    def synchronize() -> None:
        """Nothing: every copy is done when it returns."""

    def detach(self) -> None:
        """Nothing."""

    @staticmethod
    def get_device() -> Device:
        """The one device."""
        return Device()


class Stream:
    """A stream, which is done at any time."""

    handle = 0

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        """Nothing."""

    def is_done(self) -> bool:
        """Always."""
        return True


class Driver:
    """The functions of `pycuda.driver`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        """Every name of the module."""
        own = {name: getattr(self, name) for name in vars(Driver) if name[0] != "_"}
        kinds = (Device, Context, Stream, DeviceAllocation)
        errors = {name: type(name, (Exception,), {}) for name in ("Error", "LogicError")}
        own |= {kind.__name__: kind for kind in kinds} | errors
        del own["names"]
        return own

    def init(self, flags: int = 0) -> None:
        """Nothing."""

    def mem_alloc(self, size: object) -> DeviceAllocation:
        """So many bytes."""
        return DeviceAllocation(self._memory, size)

    def mem_alloc_like(self, array: Array) -> DeviceAllocation:
        """As many bytes as an array has."""
        return self.mem_alloc(array.nbytes)

    def to_device(self, array: Any) -> DeviceAllocation:
        """A copy of an array."""
        held = self.mem_alloc(memoryview(array).nbytes)
        self._memory.copy(held, array)
        return held

    def memcpy_htod(self, to: object, source: Any) -> None:
        """Copy a whole array to an address."""
        self._memory.copy(to, source)

    def memcpy_htod_async(self, to: object, source: Any, stream: object = None) -> None:
        """The same; done when it returns."""
        self._memory.copy(to, source)

    def memcpy_dtoh(self, to: Any, source: object) -> None:
        """Fill a whole array from an address."""
        self._memory.copy(to, source, to.nbytes)

    def memcpy_dtoh_async(self, to: Any, source: object, stream: object = None) -> None:
        """The same; done when it returns."""
        self.memcpy_dtoh(to, source)

    def memcpy_dtod(self, to: object, source: object, size: int) -> None:
        """Copy bytes from address to address."""
        self._memory.copy(to, source, size)

    def memset_d8(self, to: object, value: int, count: int) -> None:
        """Set bytes."""
        self._memory.copy(to, bytes([value & 255]) * count)

    def pagelocked_empty(
        self, shape: Any, dtype: DTypeLike, order: Any = "C", mem_flags: int = 0
    ) -> Array:
        """A plain array."""
        return np.zeros(shape, dtype, order)

    pagelocked_zeros = pagelocked_empty

    def pagelocked_empty_like(self, array: Array, mem_flags: int = 0) -> Array:
        """A plain array like another one."""
        return np.zeros_like(array)

    def register_host_memory(self, array: Array, flags: int = 0) -> Array:
        """The array as it is."""
        return array


class GPUArray:
    """An array on the device; the address is that of `gpudata`, and `ptr`."""

    def __init__(self, memory: Memory, array: Array) -> None:
        self._memory = memory
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.size = array.size
        self.gpudata = DeviceAllocation(memory, array.nbytes)
        self.set(array)

    @property
    def ptr(self) -> int:
        """The address."""
        return int(self.gpudata)

    def set(self, array: Array) -> None:
        """Copy an array to it."""
        self._memory.copy(self.gpudata, array)

    def get(self) -> Array:
        """A copy of it on the host."""
        found = np.zeros(self.shape, self.dtype)
        self._memory.copy(found, self.ptr, self.nbytes)
        return found


class Arrays:
    """The functions of `pycuda.gpuarray`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        """Every name of the module."""
        made = {name: getattr(self, name) for name in ("to_gpu", "to_gpu_async", "zeros", "empty")}
        return {**made, "GPUArray": GPUArray}

    def to_gpu(self, array: Array) -> GPUArray:
        """A copy of an array."""
        return GPUArray(self._memory, array)

    def to_gpu_async(self, array: Array, stream: object = None) -> GPUArray:
        """The same; done when it returns."""
        return self.to_gpu(array)

    def zeros(self, shape: Any, dtype: DTypeLike) -> GPUArray:
        """Zeros."""
        return self.to_gpu(np.zeros(shape, dtype))

    empty = zeros
