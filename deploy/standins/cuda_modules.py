"""Stand-ins for cuda-python, for libcudart loaded by ctypes, and for pycuda.

`cudart_modules`: `cuda.cudart`, `cuda.cuda`, `cuda.bindings.runtime` and `.driver`. Every function
returns a tuple that begins with its error code. The code is always success: errors are raised
instead, since scripts seldom check codes.
Source: NVIDIA/cuda-python, cuda_bindings/docs (module runtime, module driver).

`make_cdll`: `CDLL("libcudart.so")`. Functions return their error code, always success, and write
results through pointers, as in C.
Source: CUDA Runtime API reference, sections memory, stream and device management.

`pycuda_modules`: `driver`, `autoinit`, `autoprimaryctx` and `gpuarray`, as far as they move arrays.
Source: inducer/pycuda 2024.1, doc/driver.rst and doc/array.rst.
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

from deploy.standins.memory import Memory, make_absent_class, make_module


class cudaError_t(enum.IntEnum):
    """The runtime's error codes, as far as used."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2


class cudaMemcpyKind(enum.IntEnum):
    """Directions of a copy."""

    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class CUresult(enum.IntEnum):
    """The driver's error codes, as far as used."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Handle(int):
    """A pointer, stream, device or context, as an integer."""

    def getPtr(self) -> int:
        """Return the integer."""
        return int(self)


def cudart_modules(memory: Memory) -> dict[str, ModuleType]:
    """Return dotted name -> module, all on this memory."""
    runtime, driver = runtime_names(memory), driver_names(memory)
    parts = {
        "cudart": make_module("cuda.cudart", runtime),
        "cuda": make_module("cuda.cuda", driver),
        "bindings.runtime": make_module("cuda.bindings.runtime", runtime),
        "bindings.driver": make_module("cuda.bindings.driver", driver),
    }
    both = {"runtime": parts["bindings.runtime"], "driver": parts["bindings.driver"]}
    parts["bindings"] = make_module("cuda.bindings", both)
    children = {name: part for name, part in parts.items() if "." not in name}
    top = make_module("cuda", {**children, "__version__": "12.6.0"})
    return {"cuda": top, **{f"cuda.{name}": part for name, part in parts.items()}}


def _calls(
    memory: Memory, errors: type[enum.IntEnum], pointer: type[int], prefix: str, *calls: str
) -> dict[str, Any]:
    """Return name -> function of one of the two APIs.

    `errors`: the API's error codes; the first is success. `pointer`: class of the allocated
    addresses. `prefix`: of all names. `calls`: names of the functions that allocate, free, copy,
    give a handle, do nothing, and name an error.
    """
    success = errors(0)

    def allocate(size: Any, *more: Any) -> tuple[Any, int]:
        return success, pointer(memory.alloc(size))

    def free(address: Any, *more: Any) -> tuple[Any]:
        memory.free(address)
        return (success,)

    def copy(to: Any, source: Any, count: Any, *kind_and_stream: Any) -> tuple[Any]:
        memory.copy(to, source, int(count))
        return (success,)

    def handle(*given: Any) -> tuple[Any, Handle]:
        return success, Handle(0)

    def nothing(*given: Any) -> tuple[Any]:
        return (success,)

    def word(error: Any) -> tuple[Any, bytes]:
        return success, errors(error).name.encode()

    functions = (allocate, free, copy, handle, nothing, word)
    return {
        f"{prefix}{name}": function
        for function, names in zip(functions, calls, strict=True)
        for name in names.split()
    }


def runtime_names(memory: Memory) -> dict[str, Any]:
    """Return the names of the runtime API."""
    success = cudaError_t.cudaSuccess

    def fill(to: Any, value: int, count: int, *stream: Any) -> tuple[Any]:
        memory.copy(to, bytes([value & 255]) * count)
        return (success,)

    return {
        **_calls(
            memory,
            cudaError_t,
            int,
            "cuda",
            "Malloc MallocAsync MallocHost HostAlloc MallocManaged",
            "Free FreeAsync FreeHost",
            "Memcpy MemcpyAsync",
            "StreamCreate StreamCreateWithFlags",
            "StreamSynchronize StreamDestroy DeviceSynchronize SetDevice GetLastError",
            "GetErrorName GetErrorString",
        ),
        **dict.fromkeys(("cudaMemset", "cudaMemsetAsync"), fill),
        "cudaGetDevice": lambda: (success, 0),
        "cudaGetDeviceCount": lambda: (success, 1),
        "cudaError_t": cudaError_t,
        "cudaMemcpyKind": cudaMemcpyKind,
        "cudaStream_t": Handle,
    }


def driver_names(memory: Memory) -> dict[str, Any]:
    """Return the names of the driver API."""
    return {
        **_calls(
            memory,
            CUresult,
            Handle,
            "cu",
            "MemAlloc MemAllocHost MemAllocManaged",
            "MemFree MemFreeHost",
            "MemcpyHtoD MemcpyHtoDAsync MemcpyDtoH MemcpyDtoHAsync MemcpyDtoD",
            "DeviceGet CtxCreate DevicePrimaryCtxRetain StreamCreate CtxGetCurrent",
            "Init CtxPushCurrent CtxPopCurrent CtxSetCurrent CtxSynchronize CtxDestroy"
            " StreamSynchronize StreamDestroy",
            "GetErrorName GetErrorString",
        ),
        **dict.fromkeys(("CUdeviceptr", "CUstream", "CUdevice", "CUcontext"), Handle),
        "CUresult": CUresult,
    }


_FILE = re.compile(r"(.*[/\\])?(lib)?cudart(64_\d+)?(-[0-9a-f]+)?\.(so|dll|dylib)[.\d]*")


def make_cdll(memory: Memory) -> type[ctypes.CDLL]:
    """Return a `ctypes.CDLL` that loads a stand-in for libcudart, and other libraries as usual."""
    library = _CudartLibrary(memory)

    class CDLL(ctypes.CDLL):
        """The libraries of this machine, and the stand-in."""

        def __new__(cls, name: Any = None, *given: Any, **named: Any) -> Any:
            if isinstance(name, str) and _FILE.fullmatch(name):
                return library
            return super().__new__(cls)

    return CDLL


class _LibraryFunction:
    """One function of the library; argument types declared for ctypes are ignored."""

    argtypes: Any = None
    restype: Any = ctypes.c_int

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *given: Any) -> int:
        self._run(*given)
        return 0


class _CudartLibrary:
    """The functions of libcudart; each name is the same object every time."""

    def __init__(self, memory: Memory) -> None:
        def allocate(result: Any, size: Any, *flags: Any) -> None:
            _pointee(result).value = memory.alloc(size)

        def copy(to: Any, source: Any, count: Any, *kind_and_stream: Any) -> None:
            memory.copy(to, source, int(getattr(count, "value", count)))

        def fill(to: Any, value: Any, count: Any, *stream: Any) -> None:
            byte, size = (int(getattr(number, "value", number)) for number in (value, count))
            memory.copy(to, bytes([byte & 255]) * size)

        def zero(result: Any, *flags: Any) -> None:
            _pointee(result).value = 0

        def one(result: Any) -> None:
            _pointee(result).value = 1

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
            vars(self).update({f"cuda{name}": _LibraryFunction(run) for name in called.split()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_absent_class(f"libcudart.{name}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _pointee(result: Any) -> Any:
    """Return the object that `byref` or `pointer` points to."""
    return result._obj if hasattr(result, "_obj") else result.contents


Array = NDArray[Any]


def pycuda_modules(memory: Memory) -> dict[str, ModuleType]:
    """Return dotted name -> module, all on this memory."""
    driver = _Driver(memory)
    arrays = _GpuArrayFunctions(memory)
    parts = {
        "driver": make_module("pycuda.driver", driver.names()),
        "autoinit": make_module("pycuda.autoinit", {"device": _Device(), "context": _Context()}),
        "autoprimaryctx": make_module(
            "pycuda.autoprimaryctx", {"device": _Device(), "context": _Context()}
        ),
        "gpuarray": make_module("pycuda.gpuarray", arrays.names()),
        "compiler": make_module("pycuda.compiler", {}),
        "tools": make_module("pycuda.tools", {"make_default_context": _Context}),
    }
    top = make_module("pycuda", {"VERSION": (2024, 1), "VERSION_TEXT": "2024.1", **parts})
    return {"pycuda": top, **{f"pycuda.{name}": part for name, part in parts.items()}}


class DeviceAllocation:
    """An allocation that is freed with its object; `int()` gives its address."""

    def __init__(self, memory: Memory, size: object) -> None:
        self._freed = True  # until the allocation succeeded
        self._memory = memory
        self._address = memory.alloc(size)
        self._freed = False

    def __int__(self) -> int:
        return self._address

    __index__ = __int__

    def __add__(self, other: int) -> int:
        return self._address + other

    def free(self) -> None:
        """Free it, once only: its address may belong to another allocation later."""
        if not self._freed:
            self._freed = True
            self._memory.free(self._address)

    def __del__(self) -> None:
        self.free()


class _Device:
    """The only device."""

    def __init__(self, ordinal: object = 0) -> None:
        self.ordinal = ordinal

    @staticmethod
    def count() -> int:
        return 1

    def name(self) -> str:
        return "host memory"

    def make_context(self, *flags: object) -> _Context:
        """Return a context, which is not needed."""
        return _Context()

    retain_primary_context = make_context


class _Context:
    """A context without any state."""

    def push(self) -> None:
        """Do nothing."""

    @staticmethod
    def pop() -> None:
        """Do nothing."""

    @staticmethod
    def synchronize() -> None:
        """Do nothing: every copy is complete when it returns."""

    def detach(self) -> None:
        """Do nothing."""

    @staticmethod
    def get_device() -> _Device:
        return _Device()


class _Stream:
    """A stream, which is always idle."""

    handle = 0

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        """Do nothing."""

    def is_done(self) -> bool:
        return True


class _Driver:
    """The functions of `pycuda.driver`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        names = {name: getattr(self, name) for name in vars(_Driver) if name[0] != "_"}
        errors = {name: type(name, (Exception,), {}) for name in ("Error", "LogicError")}
        names |= {"Device": _Device, "Context": _Context, "Stream": _Stream}
        names |= {"DeviceAllocation": DeviceAllocation} | errors
        del names["names"]
        return names

    def init(self, flags: int = 0) -> None:
        """Do nothing."""

    def mem_alloc(self, size: object) -> DeviceAllocation:
        return DeviceAllocation(self._memory, size)

    def mem_alloc_like(self, array: Array) -> DeviceAllocation:
        return self.mem_alloc(array.nbytes)

    def to_device(self, array: Any) -> DeviceAllocation:
        allocation = self.mem_alloc(memoryview(array).nbytes)
        self._memory.copy(allocation, array)
        return allocation

    def memcpy_htod(self, to: object, source: Any) -> None:
        self._memory.copy(to, source)

    def memcpy_htod_async(self, to: object, source: Any, stream: object = None) -> None:
        """Copy a complete array to an address, synchronously."""
        self._memory.copy(to, source)

    def memcpy_dtoh(self, to: Any, source: object) -> None:
        self._memory.copy(to, source, to.nbytes)

    def memcpy_dtoh_async(self, to: Any, source: object, stream: object = None) -> None:
        """Fill a complete array from an address, synchronously."""
        self.memcpy_dtoh(to, source)

    def memcpy_dtod(self, to: object, source: object, size: int) -> None:
        self._memory.copy(to, source, size)

    def memset_d8(self, to: object, value: int, count: int) -> None:
        self._memory.copy(to, bytes([value & 255]) * count)

    def pagelocked_empty(
        self, shape: Any, dtype: DTypeLike, order: Any = "C", mem_flags: int = 0
    ) -> Array:
        return np.zeros(shape, dtype, order)

    pagelocked_zeros = pagelocked_empty

    def pagelocked_empty_like(self, array: Array, mem_flags: int = 0) -> Array:
        return np.zeros_like(array)

    def register_host_memory(self, array: Array, flags: int = 0) -> Array:
        return array


class GPUArray:
    """An array on the device, at the address `gpudata` or `ptr`."""

    def __init__(self, memory: Memory, array: Array) -> None:
        self._memory = memory
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.size = array.size
        self.gpudata = DeviceAllocation(memory, array.nbytes)
        self.set(array)

    @property
    def ptr(self) -> int:
        """Its address."""
        return int(self.gpudata)

    def set(self, array: Array) -> None:
        """Copy an array from the host."""
        self._memory.copy(self.gpudata, array)

    def get(self) -> Array:
        """Return a copy on the host."""
        array = np.zeros(self.shape, self.dtype)
        self._memory.copy(array, self.ptr, self.nbytes)
        return array


class _GpuArrayFunctions:
    """The functions of `pycuda.gpuarray`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        functions = {
            name: getattr(self, name) for name in ("to_gpu", "to_gpu_async", "zeros", "empty")
        }
        return {**functions, "GPUArray": GPUArray}

    def to_gpu(self, array: Array) -> GPUArray:
        return GPUArray(self._memory, array)

    def to_gpu_async(self, array: Array, stream: object = None) -> GPUArray:
        """Return a copy of an array, synchronously."""
        return self.to_gpu(array)

    def zeros(self, shape: Any, dtype: DTypeLike) -> GPUArray:
        return self.to_gpu(np.zeros(shape, dtype))

    empty = zeros
