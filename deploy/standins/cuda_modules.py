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
from numpy.typing import DTypeLike

from deploy.standins.memory import Memory, make_absent_class, make_module
from deploy.tensors import Array


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
    """An address, stream, device or context, as an integer."""


def _to_int(number: Any) -> int:
    """Return the value of an integer of Python or ctypes."""
    return int(getattr(number, "value", number))


_CUDART_ALLOCATIONS = "Malloc MallocAsync MallocHost HostAlloc MallocManaged"
_CUDART_STREAMS = "StreamCreate StreamCreateWithFlags"
_CUDART_RELEASES = "Free FreeAsync FreeHost"
_CUDART_COPIES = "Memcpy MemcpyAsync"
_CUDART_NO_OPERATIONS = "StreamSynchronize StreamDestroy DeviceSynchronize SetDevice GetLastError"

# functions of libcudart: those that return an error code only, and those that write a result
_CUDART_ACTIONS = f"{_CUDART_RELEASES} {_CUDART_COPIES} {_CUDART_NO_OPERATIONS} Memset MemsetAsync"
_CUDART_RESULTS = f"{_CUDART_ALLOCATIONS} {_CUDART_STREAMS} GetDevice GetDeviceCount"


def cudart_modules(memory: Memory) -> dict[str, ModuleType]:
    """Return dotted name -> stand-in for each module of cuda-python.

    `memory`: the simulated device memory, where the functions of all modules allocate.
    """
    runtime = runtime_names(memory)
    driver = driver_names(memory)
    bindings = {
        "runtime": make_module("cuda.bindings.runtime", runtime),
        "driver": make_module("cuda.bindings.driver", driver),
    }
    # `cudart` and `cuda` are the older names of `bindings.runtime` and `bindings.driver`
    children = {
        "cudart": make_module("cuda.cudart", runtime),
        "cuda": make_module("cuda.cuda", driver),
        "bindings": make_module("cuda.bindings", bindings),
    }
    modules = {"cuda": make_module("cuda", {**children, "__version__": "12.6.0"})}
    modules |= {f"cuda.{name}": module for name, module in children.items()}
    modules |= {f"cuda.bindings.{name}": module for name, module in bindings.items()}
    return modules


def _common_functions(
    memory: Memory,
    success: enum.IntEnum,
    *,
    prefix: str,
    **names_by_action: str,
) -> dict[str, Any]:
    """Return name -> stand-in, for the functions that CUDA's runtime and driver API have in common.

    Each of them returns a tuple that begins with the error code, as cuda-python's do.

    Args:
        memory: the simulated device memory, where the functions allocate.
        success: the API's code for success, which every call returns.
        prefix: prefix of all names, "cuda" or "cu".
        names_by_action: what a function does ("allocate", "free", "copy", "get_handle" of a stream,
            device or context, "do_nothing") -> names without prefix, separated by spaces.
    """

    def allocate(size: Any, *flags: Any) -> tuple[Any, Handle]:
        return success, Handle(memory.alloc(size))

    def free(address: Any, *stream: Any) -> tuple[Any]:
        memory.free(address)
        return (success,)

    def copy(target: Any, source: Any, count: Any, *kind_and_stream: Any) -> tuple[Any]:
        memory.copy(target, source, _to_int(count))
        return (success,)

    def get_handle(*arguments: Any) -> tuple[Any, Handle]:
        return success, Handle(0)

    def do_nothing(*arguments: Any) -> tuple[Any]:
        return (success,)

    # the functions above are named as the actions
    function_by_name: dict[str, Callable[..., Any]] = {}
    for function in (allocate, free, copy, get_handle, do_nothing):
        for name in names_by_action[function.__name__].split():
            function_by_name[f"{prefix}{name}"] = function
    return function_by_name


def runtime_names(memory: Memory) -> dict[str, Any]:
    """Return name -> stand-in, for functions and types of CUDA's runtime API in cuda-python.

    `memory`: the simulated device memory, where the functions allocate.
    """
    success = cudaError_t.cudaSuccess

    def fill(target: Any, value: Any, count: Any, *stream: Any) -> tuple[Any]:
        memory.copy(target, bytes([_to_int(value) & 255]) * _to_int(count))
        return (success,)

    return {
        **_common_functions(
            memory,
            success,
            prefix="cuda",
            allocate=_CUDART_ALLOCATIONS,
            free=_CUDART_RELEASES,
            copy=_CUDART_COPIES,
            get_handle=_CUDART_STREAMS,
            do_nothing=_CUDART_NO_OPERATIONS,
        ),
        "cudaMemset": fill,
        "cudaMemsetAsync": fill,
        "cudaGetDevice": lambda: (success, 0),
        "cudaGetDeviceCount": lambda: (success, 1),
        "cudaError_t": cudaError_t,
        "cudaMemcpyKind": cudaMemcpyKind,
        "cudaStream_t": Handle,
    }


def driver_names(memory: Memory) -> dict[str, Any]:
    """Return name -> stand-in, for functions and types of CUDA's driver API in cuda-python.

    `memory`: the simulated device memory, where the functions allocate.
    """
    return {
        **_common_functions(
            memory,
            CUresult.CUDA_SUCCESS,
            prefix="cu",
            allocate="MemAlloc MemAllocHost MemAllocManaged",
            free="MemFree MemFreeHost",
            copy="MemcpyHtoD MemcpyHtoDAsync MemcpyDtoD",
            get_handle="DeviceGet CtxCreate DevicePrimaryCtxRetain StreamCreate CtxGetCurrent",
            do_nothing="Init CtxPushCurrent CtxPopCurrent CtxSetCurrent CtxSynchronize"
            " CtxDestroy StreamSynchronize StreamDestroy",
        ),
        "CUdeviceptr": Handle,
        "CUstream": Handle,
        "CUdevice": Handle,
        "CUcontext": Handle,
        "CUresult": CUresult,
    }


_CUDART_FILE = re.compile(r"(.*[/\\])?(lib)?cudart(64_\d+)?(-[0-9a-f]+)?\.(so|dll|dylib)[.\d]*")


def make_cdll(memory: Memory) -> type[ctypes.CDLL]:
    """Return a `ctypes.CDLL` that loads a stand-in for libcudart, and other libraries as usual."""
    library = _CudartLibrary(memory)

    class CDLL(ctypes.CDLL):
        """The libraries of this machine, and the stand-in."""

        def __new__(cls, name: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _CUDART_FILE.fullmatch(str(name)):
                return library
            return super().__new__(cls)

    return CDLL


class _LibraryFunction:
    """One function of the library; argument types declared for ctypes are ignored.

    `function`: that of cuda-python. `has_result`: whether it returns a value, which C writes
    through the first argument.
    """

    argtypes: Any = None
    restype: Any = ctypes.c_int

    def __init__(self, function: Callable[..., Any], *, has_result: bool) -> None:
        self._function = function
        self._has_result = has_result

    def __call__(self, *arguments: Any) -> int:
        if self._has_result:
            result, *parameters = arguments
            _, _pointee(result).value = self._function(*parameters)
        else:
            self._function(*arguments)
        return 0


class _CudartLibrary:
    """The functions of libcudart; each name is the same object every time."""

    def __init__(self, memory: Memory) -> None:
        functions = runtime_names(memory)
        for names, has_result in ((_CUDART_ACTIONS, False), (_CUDART_RESULTS, True)):
            for name in names.split():
                function = functions[f"cuda{name}"]
                setattr(self, f"cuda{name}", _LibraryFunction(function, has_result=has_result))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_absent_class(f"libcudart.{name}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _pointee(result: Any) -> Any:
    """Return the ctypes object that `byref` or `pointer` points to."""
    return result._obj if hasattr(result, "_obj") else result.contents


def pycuda_modules(memory: Memory) -> dict[str, ModuleType]:
    """Return dotted name -> stand-in for each module of pycuda.

    `memory`: the simulated device memory, where arrays are allocated.
    """
    context_names = {"device": _Device(), "context": _Context()}
    names_by_module: dict[str, dict[str, Any]] = {
        "driver": _Driver(memory).names(),
        "autoinit": context_names,
        "autoprimaryctx": context_names,
        "gpuarray": _gpuarray_names(memory),
        "compiler": {},
        "tools": {"make_default_context": _Context},
    }
    modules = {
        name: make_module(f"pycuda.{name}", names) for name, names in names_by_module.items()
    }
    top = make_module("pycuda", {"VERSION": (2024, 1), "VERSION_TEXT": "2024.1", **modules})
    return {"pycuda": top, **{f"pycuda.{name}": module for name, module in modules.items()}}


class DeviceAllocation:
    """An allocation that is freed with its object; `int()` gives its address."""

    def __init__(self, memory: Memory, size: object) -> None:
        self._is_freed = True  # until the allocation succeeded
        self._memory = memory
        self._address = memory.alloc(size)
        self._is_freed = False

    def __int__(self) -> int:
        return self._address

    __index__ = __int__

    def __add__(self, other: int) -> int:
        return self._address + other

    def free(self) -> None:
        """Free it, once only: its address may belong to another allocation later."""
        if not self._is_freed:
            self._is_freed = True
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


class _Stream:
    """A stream, which is always idle."""

    handle = 0

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        """Do nothing."""


class _Driver:
    """The functions of `pycuda.driver`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def names(self) -> dict[str, Any]:
        """Return the names of the module: its classes, and the functions below."""
        names: dict[str, Any] = {
            "Device": _Device,
            "Context": _Context,
            "Stream": _Stream,
            "DeviceAllocation": DeviceAllocation,
            "Error": type("Error", (Exception,), {}),
            "LogicError": type("LogicError", (Exception,), {}),
        }
        for name in vars(_Driver):
            if not name.startswith("_") and name != "names":
                names[name] = getattr(self, name)
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

    def memcpy_htod(self, target: object, source: Any, stream: object = None) -> None:
        """Copy a complete array to an address, synchronously."""
        self._memory.copy(target, source)

    memcpy_htod_async = memcpy_htod

    def pagelocked_empty(
        self, shape: Any, dtype: DTypeLike, order: Any = "C", mem_flags: int = 0
    ) -> Array:
        return np.zeros(shape, dtype, order)

    pagelocked_zeros = pagelocked_empty


class GPUArray:
    """An array on the device, at the address `gpudata` or `ptr`."""

    def __init__(self, memory: Memory, array: Array) -> None:
        self._memory = memory
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes
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


def _gpuarray_names(memory: Memory) -> dict[str, Any]:
    """Return name -> stand-in, for `pycuda.gpuarray`: arrays on the simulated memory."""

    def to_gpu(array: Array, stream: object = None) -> GPUArray:
        return GPUArray(memory, array)

    def zeros(shape: Any, dtype: DTypeLike) -> GPUArray:
        return to_gpu(np.zeros(shape, dtype))

    return {
        "GPUArray": GPUArray,
        "to_gpu": to_gpu,
        "to_gpu_async": to_gpu,
        "zeros": zeros,
        "empty": zeros,
    }
