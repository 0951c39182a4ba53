"""Stands in for cuda-python: `cuda.cudart`, `cuda.cuda`, `cuda.bindings.runtime` and `.driver`.

Every function gives a tuple that begins with its error code, which is always success here: what a
GPU would answer with a code is raised, since scripts seldom look at it.

Source: NVIDIA/cuda-python, cuda_bindings/docs (module runtime, module driver).
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

from deploy.standins.absent import module
from deploy.standins.memory import Memory


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


def modules(memory: Memory) -> dict[str, ModuleType]:
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
