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


def runtime_names(memory: Memory) -> dict[str, Any]:
    """Return the names of the runtime API."""
    success = cudaError_t.cudaSuccess

    def allocate(size: Any, *more: Any) -> tuple[Any, int]:
        return success, memory.alloc(size)

    def free(pointer: Any, *more: Any) -> tuple[Any]:
        memory.free(pointer)
        return (success,)

    def copy(to: Any, source: Any, count: Any, *kind_and_stream: Any) -> tuple[Any]:
        memory.copy(to, source, int(count))
        return (success,)

    def fill(to: Any, value: int, count: int, *stream: Any) -> tuple[Any]:
        memory.copy(to, bytes([value & 255]) * count)
        return (success,)

    def nothing(*given: Any) -> tuple[Any]:
        return (success,)

    def stream(*flags: Any) -> tuple[Any, Handle]:
        return success, Handle(0)

    def word(error: Any) -> tuple[Any, bytes]:
        return success, cudaError_t(error).name.encode()

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
    names["cudaGetDevice"] = lambda: (success, 0)
    names["cudaGetDeviceCount"] = lambda: (success, 1)
    names["cudaStream_t"] = Handle
    return names


def driver_names(memory: Memory) -> dict[str, Any]:
    """Return the names of the driver API."""
    success = CUresult.CUDA_SUCCESS

    def allocate(size: Any, *more: Any) -> tuple[Any, Handle]:
        return success, Handle(memory.alloc(size))

    def free(pointer: Any, *more: Any) -> tuple[Any]:
        memory.free(pointer)
        return (success,)

    def copy(to: Any, source: Any, count: Any, *stream: Any) -> tuple[Any]:
        memory.copy(to, source, int(count))
        return (success,)

    def nothing(*given: Any) -> tuple[Any]:
        return (success,)

    def handle(*given: Any) -> tuple[Any, Handle]:
        return success, Handle(0)

    def word(error: Any) -> tuple[Any, bytes]:
        return success, CUresult(error).name.encode()

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


def make_cdll(memory: Memory) -> type[ctypes.CDLL]:
    """Return a `ctypes.CDLL` that loads a stand-in for libcudart, and other libraries as usual."""
    library = CudartLibrary(memory)

    class CDLL(ctypes.CDLL):
        """The libraries of this machine, and the stand-in."""

        def __new__(cls, name: Any = None, *given: Any, **named: Any) -> Any:
            if isinstance(name, str) and _FILE.fullmatch(name):
                return library
            return super().__new__(cls)

    return CDLL


class LibraryFunction:
    """One function of the library; argument types declared for ctypes are ignored."""

    argtypes: Any = None
    restype: Any = ctypes.c_int

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *given: Any) -> int:
        """Run the function and return success."""
        self._run(*given)
        return 0


class CudartLibrary:
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
            vars(self).update({f"cuda{name}": LibraryFunction(run) for name in called.split()})

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
    driver = PycudaDriver(memory)
    arrays = GpuArrayFunctions(memory)
    parts = {
        "driver": make_module("pycuda.driver", driver.names()),
        "autoinit": make_module(
            "pycuda.autoinit", {"device": PycudaDevice(), "context": Context()}
        ),
        "autoprimaryctx": make_module(
            "pycuda.autoprimaryctx", {"device": PycudaDevice(), "context": Context()}
        ),
        "gpuarray": make_module("pycuda.gpuarray", arrays.names()),
        "compiler": make_module("pycuda.compiler", {}),
        "tools": make_module("pycuda.tools", {"make_default_context": Context}),
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


class PycudaDevice:
    """The only device."""

    def __init__(self, ordinal: object = 0) -> None:
        self.ordinal = ordinal

    @staticmethod
    def count() -> int:
        """Return 1."""
        return 1

    def name(self) -> str:
        """Return the device's name."""
        return "host memory"

    def make_context(self, *flags: object) -> Context:
        """Return a context, which is not needed."""
        return Context()

    retain_primary_context = make_context


class Context:
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
    def get_device() -> PycudaDevice:
        """Return the only device."""
        return PycudaDevice()


class PycudaStream:
    """A stream, which is always idle."""

    handle = 0

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        """Do nothing."""

    def is_done(self) -> bool:
        """Return True."""
        return True


class PycudaDriver:
    """The functions of `pycuda.driver`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        """Return every name of the module."""
        names = {name: getattr(self, name) for name in vars(PycudaDriver) if name[0] != "_"}
        errors = {name: type(name, (Exception,), {}) for name in ("Error", "LogicError")}
        names |= {"Device": PycudaDevice, "Context": Context, "Stream": PycudaStream}
        names |= {"DeviceAllocation": DeviceAllocation} | errors
        del names["names"]
        return names

    def init(self, flags: int = 0) -> None:
        """Do nothing."""

    def mem_alloc(self, size: object) -> DeviceAllocation:
        """Allocate `size` bytes."""
        return DeviceAllocation(self._memory, size)

    def mem_alloc_like(self, array: Array) -> DeviceAllocation:
        """Allocate as many bytes as an array has."""
        return self.mem_alloc(array.nbytes)

    def to_device(self, array: Any) -> DeviceAllocation:
        """Allocate a copy of an array."""
        allocation = self.mem_alloc(memoryview(array).nbytes)
        self._memory.copy(allocation, array)
        return allocation

    def memcpy_htod(self, to: object, source: Any) -> None:
        """Copy a complete array to an address."""
        self._memory.copy(to, source)

    def memcpy_htod_async(self, to: object, source: Any, stream: object = None) -> None:
        """Copy a complete array to an address, synchronously."""
        self._memory.copy(to, source)

    def memcpy_dtoh(self, to: Any, source: object) -> None:
        """Fill a complete array from an address."""
        self._memory.copy(to, source, to.nbytes)

    def memcpy_dtoh_async(self, to: Any, source: object, stream: object = None) -> None:
        """Fill a complete array from an address, synchronously."""
        self.memcpy_dtoh(to, source)

    def memcpy_dtod(self, to: object, source: object, size: int) -> None:
        """Copy bytes between addresses."""
        self._memory.copy(to, source, size)

    def memset_d8(self, to: object, value: int, count: int) -> None:
        """Set bytes."""
        self._memory.copy(to, bytes([value & 255]) * count)

    def pagelocked_empty(
        self, shape: Any, dtype: DTypeLike, order: Any = "C", mem_flags: int = 0
    ) -> Array:
        """Return an ordinary array."""
        return np.zeros(shape, dtype, order)

    pagelocked_zeros = pagelocked_empty

    def pagelocked_empty_like(self, array: Array, mem_flags: int = 0) -> Array:
        """Return an ordinary array like another one."""
        return np.zeros_like(array)

    def register_host_memory(self, array: Array, flags: int = 0) -> Array:
        """Return the array unchanged."""
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


class GpuArrayFunctions:
    """The functions of `pycuda.gpuarray`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        """Return every name of the module."""
        functions = {
            name: getattr(self, name) for name in ("to_gpu", "to_gpu_async", "zeros", "empty")
        }
        return {**functions, "GPUArray": GPUArray}

    def to_gpu(self, array: Array) -> GPUArray:
        """Return a copy of an array."""
        return GPUArray(self._memory, array)

    def to_gpu_async(self, array: Array, stream: object = None) -> GPUArray:
        """Return a copy of an array, synchronously."""
        return self.to_gpu(array)

    def zeros(self, shape: Any, dtype: DTypeLike) -> GPUArray:
        """Return zeros."""
        return self.to_gpu(np.zeros(shape, dtype))

    empty = zeros
