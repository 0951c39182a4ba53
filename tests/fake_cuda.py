"""CUDA for tests: device memory in host memory, streams that work only when waited for.

`pycuda()` and `cuda_python()` give the modules that the two bindings have, on the same GPUs. What a
real GPU answers with silence or a fault is an error here: an address that is no device memory, that
of another device, or one that was freed; a call without a current context.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], None]

GPUS = ["Fake H200", "Fake L4"]
CAPABILITY = (9, 0)
DRIVER = 13000

_here = threading.local()  # contexts of this thread, the current one last
_numbers = itertools.count(1)
_handles: dict[int, Any] = {}
_memory: dict[int, tuple[np.ndarray, int]] = {}  # address -> bytes, device
_pinned: dict[int, np.ndarray] = {}


class Fault(Exception):
    """What a driver would report, or what would end the process."""


def reset() -> None:
    """As a process starts: nothing allocated, no context, both GPUs there."""
    GPUS[:] = ["Fake H200", "Fake L4"]
    for kept in (_handles, _memory, _pinned):
        kept.clear()
    _here.stack = []


def contexts() -> list[int]:
    """Devices of the thread's contexts, the current one last."""
    if not hasattr(_here, "stack"):
        _here.stack = []
    return _here.stack


def current() -> int:
    """The device in force; CUDA's runtime takes the first where none was chosen."""
    return contexts()[-1] if contexts() else 0


def allocate(size: int) -> int:
    """Address of `size` bytes on the current device, not zeroed."""
    if size < 1:
        raise Fault("invalid argument: an allocation of 0 bytes")
    block = np.full(size, 0xA5, np.uint8)
    _memory[block.ctypes.data] = block, current()
    return block.ctypes.data


def free(address: int) -> None:
    if _memory.pop(address, None) is None:
        raise Fault("invalid argument: no allocated memory")


def allocated() -> int:
    """Blocks of device memory in use."""
    return len(_memory)


def at(address: int, size: int, device: int) -> np.ndarray:
    """The bytes at a device address."""
    block, owner = _memory.get(address, (np.empty(0, np.uint8), -1))
    if owner != device or size > block.size:
        raise Fault(f"an illegal memory access was encountered: {size} bytes on device {device}")
    return block[:size]


def host(address: int, size: int) -> np.ndarray:
    """The bytes at a host address."""
    if address in _memory:
        raise Fault("a device address where the host reads")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else _NONE


_NONE = np.empty(0, np.uint8)


class Stream:
    """Work in order, done when somebody waits for it; kept apart while it is captured."""

    def __init__(self) -> None:
        self.device = current()
        self.waiting: list[Work] = []
        self.captured: list[Work] | None = None

    def put(self, work: Work) -> None:
        (self.waiting if self.captured is None else self.captured).append(work)

    def wait(self) -> None:
        if self.captured is not None:
            raise Fault("operation not permitted when stream is capturing")
        while self.waiting:
            self.waiting.pop(0)()


class Moment:
    """An event's time."""

    at: float | None = None

    def mark(self) -> None:
        self.at = time.perf_counter()


def handle(thing: Any) -> int:
    number = next(_numbers) * 16
    _handles[number] = thing
    return number


def thing(number: int) -> Any:
    if int(number) not in _handles:
        raise Fault("invalid resource handle")
    return _handles[int(number)]


def elapsed(first: Moment, last: Moment) -> float:
    if first.at is None or last.at is None:
        raise Fault("device not ready")
    return (last.at - first.at) * 1e3


# pycuda


def pycuda() -> dict[str, types.ModuleType]:
    """Modules of pycuda, by name."""
    driver: Any = types.ModuleType("pycuda.driver")
    for name, value in _PYCUDA.items():
        setattr(driver, name, value)
    package: Any = types.ModuleType("pycuda")
    package.driver = driver
    return {"pycuda": package, "pycuda.driver": driver}


def _needs_context() -> None:
    if not contexts():
        raise Fault("cuCtxGetCurrent failed: invalid device context")


class _Context:
    def __init__(self, device: int) -> None:
        self.device = device

    def push(self) -> None:
        contexts().append(self.device)

    @staticmethod
    def pop() -> None:
        _needs_context()
        contexts().pop()


class _Device:
    def __init__(self, number: int) -> None:
        if not 0 <= number < len(GPUS):
            raise Fault("cuDeviceGet failed: invalid device ordinal")
        self.number = number

    @staticmethod
    def count() -> int:
        return len(GPUS)

    def name(self) -> str:
        return GPUS[self.number]

    def compute_capability(self) -> tuple[int, int]:
        return CAPABILITY

    def retain_primary_context(self) -> _Context:
        return _Context(self.number)


class _Allocation:
    def __init__(self, size: int) -> None:
        _needs_context()
        self.address, self.device = allocate(size), current()

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        free(self.address)


class _PycudaStream:
    def __init__(self) -> None:
        _needs_context()
        self.stream = Stream()
        self.handle = handle(self.stream)

    def synchronize(self) -> None:
        self.stream.wait()


class _PycudaEvent(Moment):
    def __init__(self, flags: int = 0) -> None:
        _needs_context()

    def record(self, stream: _PycudaStream) -> None:
        stream.stream.put(self.mark)

    def time_till(self, last: Moment) -> float:
        return elapsed(self, last)


def _bytes(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise Fault("only C-contiguous arrays are copied")
    return host(array.ctypes.data, array.nbytes)


def _to_device(allocation: _Allocation, array: np.ndarray) -> None:
    _needs_context()
    at(int(allocation), array.nbytes, current())[:] = _bytes(array)


def _to_device_later(allocation: _Allocation, array: np.ndarray, stream: _PycudaStream) -> None:
    device = current()

    def copy() -> None:
        at(int(allocation), array.nbytes, device)[:] = _bytes(array)

    stream.stream.put(copy)


def _to_host_later(array: np.ndarray, allocation: _Allocation, stream: _PycudaStream) -> None:
    device = current()

    def copy() -> None:
        _bytes(array)[:] = at(int(allocation), array.nbytes, device)

    stream.stream.put(copy)


def _pagelocked(shape: Any, dtype: Any, order: str = "C", mem_flags: int = 0) -> np.ndarray:
    _needs_context()
    if shape == ():
        raise Fault("cuMemHostAlloc failed: a scalar has no shape")  # so does pycuda refuse
    return np.full(shape, 0, dtype)


_PYCUDA: dict[str, Any] = {
    "Error": Fault,
    "init": lambda: None if GPUS else _no_gpu(),
    "Device": _Device,
    "Stream": _PycudaStream,
    "Event": _PycudaEvent,
    "mem_alloc": _Allocation,
    "memcpy_htod": _to_device,
    "memcpy_htod_async": _to_device_later,
    "memcpy_dtoh_async": _to_host_later,
    "pagelocked_empty": _pagelocked,
    "get_driver_version": lambda: DRIVER,
}


def _no_gpu() -> None:
    raise Fault("cuInit failed: no CUDA-capable device is detected")


# cuda-python


class Code(enum.IntEnum):
    """cudaError_t, as far as it is met here."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101


class Kind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class Capture(enum.IntEnum):
    cudaStreamCaptureModeRelaxed = 2


def cuda_python(*, old: bool = False) -> dict[str, types.ModuleType]:
    """Modules of cuda-python, by name: `cuda.bindings.runtime`, or `cuda.cudart` before 12.6."""
    runtime: Any = types.ModuleType("cuda.cudart" if old else "cuda.bindings.runtime")
    for name, call in _RUNTIME.items():
        setattr(runtime, name, _answering(call))
    runtime.cudaError_t, runtime.cudaMemcpyKind = Code, Kind
    runtime.cudaStreamCaptureMode = Capture
    package: Any = types.ModuleType("cuda")
    package.__path__ = []
    if old:
        package.cudart = runtime
        return {"cuda": package, "cuda.cudart": runtime}
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.__path__, bindings.runtime, package.bindings = [], runtime, bindings
    return {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime}


_said: list[str] = ["no error"]


def _answering(call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """As cuda-python answers: (code,) or (code, result), never an exception of CUDA."""

    def answer(*words: Any) -> tuple[Any, ...]:
        try:
            if not GPUS and call is not _text:
                return (Code.cudaErrorNoDevice, None)
            result = call(*words)
        except Fault as fault:
            _said[0] = str(fault)
            return (Code.cudaErrorInvalidValue, None)
        return (Code.cudaSuccess,) if result is None else (Code.cudaSuccess, result)

    return answer


def _text(code: Code) -> bytes:
    known = {Code.cudaErrorNoDevice: "no CUDA-capable device is detected"}
    return known.get(code, _said[0]).encode()


def _choose(device: int) -> None:
    if not 0 <= device < len(GPUS):
        raise Fault("invalid device ordinal")
    contexts()[:] = [device]


def _properties(device: int) -> types.SimpleNamespace:
    major, minor = CAPABILITY
    return types.SimpleNamespace(name=GPUS[device].encode(), major=major, minor=minor)


def _copy(target: int, source: int, size: int, kind: Kind, device: int) -> None:
    if kind == Kind.cudaMemcpyHostToDevice:
        at(target, size, device)[:] = host(source, size)
    else:
        host(target, size)[:] = at(source, size, device)


def _copy_later(target: int, source: int, size: int, kind: Kind, stream: int) -> None:
    device = current()
    thing(stream).put(lambda: _copy(target, source, size, kind, device))


def _pin(size: int, flags: int) -> int:
    block = np.zeros(max(size, 1), np.uint8)
    _pinned[block.ctypes.data] = block
    return block.ctypes.data


def _unpin(address: int) -> None:
    if _pinned.pop(address, None) is None:
        raise Fault("invalid argument: no pinned memory")


def _forget(number: int) -> None:
    thing(number)
    del _handles[int(number)]


# Graphs: of the runtime and, under the names of the driver, of libcuda


def begin_capture(stream: int, mode: int) -> None:
    thing(stream).captured = []


def end_capture(stream: int) -> int:
    works, thing(stream).captured = thing(stream).captured, None
    return handle(works)


def instantiate(graph: int, flags: int = 0) -> int:
    return handle(list(thing(graph)))


def launch(graph: int, stream: int) -> None:
    for work in thing(graph):
        thing(stream).put(work)


_RUNTIME: dict[str, Callable[..., Any]] = {
    "cudaGetErrorString": _text,
    "cudaGetDeviceCount": lambda: len(GPUS),
    "cudaGetDeviceProperties": _properties,
    "cudaSetDevice": _choose,
    "cudaGetDevice": current,
    "cudaDriverGetVersion": lambda: DRIVER,
    "cudaMalloc": allocate,
    "cudaFree": lambda address: free(int(address)),
    "cudaMemcpy": lambda *words: _copy(*words, current()),
    "cudaMemcpyAsync": _copy_later,
    "cudaHostAlloc": _pin,
    "cudaFreeHost": _unpin,
    "cudaStreamCreate": lambda: handle(Stream()),
    "cudaStreamSynchronize": lambda stream: thing(stream).wait(),
    "cudaStreamDestroy": _forget,
    "cudaEventCreate": lambda: handle(Moment()),
    "cudaEventRecord": lambda event, stream: thing(stream).put(thing(event).mark),
    "cudaEventElapsedTime": lambda first, last: elapsed(thing(first), thing(last)),
    "cudaEventDestroy": _forget,
    "cudaStreamBeginCapture": begin_capture,
    "cudaStreamEndCapture": end_capture,
    "cudaGraphInstantiate": instantiate,
    "cudaGraphLaunch": launch,
    "cudaGraphExecDestroy": _forget,
    "cudaGraphDestroy": _forget,
}


class Libcuda:
    """The few calls of libcuda.so.1 that capture a graph, as ctypes would make them."""

    @staticmethod
    def cuStreamBeginCapture_v2(stream: Any, mode: int) -> int:
        begin_capture(stream.value, mode)
        return 0

    @staticmethod
    def cuStreamEndCapture(stream: Any, graph: Any) -> int:
        graph._obj.value = end_capture(stream.value)
        return 0

    @staticmethod
    def cuGraphInstantiateWithFlags(made: Any, graph: Any, flags: Any) -> int:
        made._obj.value = instantiate(graph.value)
        return 0

    @staticmethod
    def cuGraphLaunch(graph: Any, stream: Any) -> int:
        launch(graph.value, stream.value)
        return 0

    @staticmethod
    def cuGraphDestroy(graph: Any) -> int:
        _forget(graph.value)
        return 0

    @staticmethod
    def cuGraphExecDestroy(graph: Any) -> int:
        _forget(graph.value)
        return 0
