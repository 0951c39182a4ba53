"""CUDA for tests: device memory in host memory, streams that work only when waited for.

`pycuda()` and `cuda_python()` give the modules that the two bindings have, on the same GPUs. What a
real GPU answers with silence or a fault is an error here: an address that is no device memory, that
of another device, or one that was freed; a call without a current context.
"""

import ctypes
import enum
import itertools
import threading
import time
import types

import numpy as np

GPUS = ["Fake H200", "Fake L4"]
CAPABILITY = (9, 0)
DRIVER = 13000


class _Here(threading.local):
    """Devices of this thread's contexts, the current one last."""

    def __init__(self):
        self.stack = []


_here = _Here()
_numbers = itertools.count(1)
_handles = {}
_memory = {}  # address -> bytes, device
_pinned = {}


class Fault(Exception):
    """An error that a driver would report, or that would end the process."""


def reset():
    """Return to the state of a new process: nothing allocated, no context, both GPUs."""
    GPUS[:] = ["Fake H200", "Fake L4"]
    for registry in (_handles, _memory, _pinned):
        registry.clear()
    _here.stack = []


def current():
    """The device in force; CUDA's runtime takes the first where none was chosen."""
    return _here.stack[-1] if _here.stack else 0


def allocate(size):
    """Address of `size` bytes on the current device, not zeroed."""
    if size < 1:
        raise Fault("invalid argument: an allocation of 0 bytes")
    block = np.full(size, 0xA5, np.uint8)
    _memory[block.ctypes.data] = block, current()
    return block.ctypes.data


def free(address):
    if _memory.pop(address, None) is None:
        raise Fault("invalid argument: no allocated memory")


def allocated():
    """Blocks of device memory in use."""
    return len(_memory)


def at(address, size, device):
    """The bytes at a device address."""
    block, owner = _memory.get(address, (np.empty(0, np.uint8), -1))
    if owner != device or size > block.size:
        raise Fault(f"an illegal memory access was encountered: {size} bytes on device {device}")
    return block[:size]


def host(address, size):
    """The bytes at a host address."""
    if address in _memory:
        raise Fault("a device address where the host reads")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else _NONE


_NONE = np.empty(0, np.uint8)


class Stream:
    """Work in order, done when somebody waits for it; kept apart while it is captured."""

    def __init__(self):
        self.device = current()
        self.waiting = []
        self.captured = None

    def put(self, work):
        (self.waiting if self.captured is None else self.captured).append(work)

    def wait(self):
        if self.captured is not None:
            raise Fault("operation not permitted when stream is capturing")
        while self.waiting:
            self.waiting.pop(0)()


class Moment:
    """An event's time."""

    seconds: float | None = None

    def mark(self):
        self.seconds = time.perf_counter()


def handle(thing):
    number = next(_numbers) * 16
    _handles[number] = thing
    return number


def thing(number):
    if int(number) not in _handles:
        raise Fault("invalid resource handle")
    return _handles[int(number)]


def elapsed(start, end):
    if start.seconds is None or end.seconds is None:
        raise Fault("device not ready")
    return (end.seconds - start.seconds) * 1e3


# pycuda


def pycuda():
    """Modules of pycuda, by name."""
    driver = types.ModuleType("pycuda.driver")
    vars(driver).update(_PYCUDA)
    package = types.ModuleType("pycuda")
    package.driver = driver
    return {"pycuda": package, "pycuda.driver": driver}


def _needs_context():
    if not _here.stack:
        raise Fault("cuCtxGetCurrent failed: invalid device context")


def _start():
    if not GPUS:
        raise Fault("cuInit failed: no CUDA-capable device is detected")


class _Context:
    def __init__(self, device):
        self.device = device

    def push(self):
        _here.stack.append(self.device)

    @staticmethod
    def pop():
        _needs_context()
        _here.stack.pop()


class _Device:
    def __init__(self, number):
        if not 0 <= number < len(GPUS):
            raise Fault("cuDeviceGet failed: invalid device ordinal")
        self.number = number

    @staticmethod
    def count():
        return len(GPUS)

    def name(self):
        return GPUS[self.number]

    def compute_capability(self):
        return CAPABILITY

    def retain_primary_context(self):
        return _Context(self.number)


class _Allocation:
    def __init__(self, size):
        _needs_context()
        self.address, self.device = allocate(size), current()

    def __int__(self):
        return self.address

    def free(self):
        free(self.address)


class _PycudaStream:
    def __init__(self):
        _needs_context()
        self.stream = Stream()
        self.handle = handle(self.stream)

    def synchronize(self):
        self.stream.wait()


class _PycudaEvent(Moment):
    def __init__(self, flags=0):
        _needs_context()

    def record(self, stream):
        stream.stream.put(self.mark)

    def time_till(self, end):
        return elapsed(self, end)


def _bytes(array):
    if not array.flags.c_contiguous:
        raise Fault("only C-contiguous arrays are copied")
    return host(array.ctypes.data, array.nbytes)


def _to_device(allocation, array):
    _needs_context()
    at(int(allocation), array.nbytes, current())[:] = _bytes(array)


def _to_device_later(allocation, array, stream):
    device = current()
    stream.stream.put(lambda: np.copyto(at(int(allocation), array.nbytes, device), _bytes(array)))


def _to_host_later(array, allocation, stream):
    device = current()
    stream.stream.put(lambda: np.copyto(_bytes(array), at(int(allocation), array.nbytes, device)))


def _pagelocked(shape, dtype, order="C", mem_flags=0):
    _needs_context()
    if shape == ():
        raise Fault("cuMemHostAlloc failed: a scalar has no shape")  # so does pycuda refuse
    return np.full(shape, 0, dtype)


_PYCUDA = {
    "Error": Fault,
    "init": _start,
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


# cuda-python


class Code(enum.IntEnum):
    """cudaError_t, as far as it is met here."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNoDevice = 100


Kind = types.SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)


def cuda_python(*, old=False):
    """Modules of cuda-python, by name: `cuda.bindings.runtime`, or `cuda.cudart` before 12.6."""
    runtime = types.ModuleType("cuda.cudart" if old else "cuda.bindings.runtime")
    vars(runtime).update({name: _answering(call) for name, call in _RUNTIME.items()})
    runtime.cudaError_t, runtime.cudaMemcpyKind = Code, Kind
    package = types.ModuleType("cuda")
    package.__path__ = []
    if old:
        package.cudart = runtime
        return {"cuda": package, "cuda.cudart": runtime}
    bindings = types.ModuleType("cuda.bindings")
    bindings.__path__, bindings.runtime, package.bindings = [], runtime, bindings
    return {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime}


_last_error = ["no error"]


def _answering(call):
    """Answer as cuda-python does: (code,) or (code, result), never an exception of CUDA."""

    def answer(*arguments):
        try:
            if not GPUS and call is not _text:
                return (Code.cudaErrorNoDevice, None)
            result = call(*arguments)
        except Fault as fault:
            _last_error[0] = str(fault)
            return (Code.cudaErrorInvalidValue, None)
        return (Code.cudaSuccess,) if result is None else (Code.cudaSuccess, result)

    return answer


def _text(code):
    text_by_code = {Code.cudaErrorNoDevice: "no CUDA-capable device is detected"}
    return text_by_code.get(code, _last_error[0]).encode()


def _choose(device):
    if not 0 <= device < len(GPUS):
        raise Fault("invalid device ordinal")
    _here.stack[:] = [device]


def _properties(device):
    major, minor = CAPABILITY
    return types.SimpleNamespace(name=GPUS[device].encode(), major=major, minor=minor)


def _copy(target, source, size, kind, device):
    if kind == Kind.cudaMemcpyHostToDevice:
        at(target, size, device)[:] = host(source, size)
    else:
        host(target, size)[:] = at(source, size, device)


def _copy_later(target, source, size, kind, stream):
    device = current()
    thing(stream).put(lambda: _copy(target, source, size, kind, device))


def _pin(size, flags):
    block = np.zeros(max(size, 1), np.uint8)
    _pinned[block.ctypes.data] = block
    return block.ctypes.data


def _unpin(address):
    if _pinned.pop(address, None) is None:
        raise Fault("invalid argument: no pinned memory")


def _forget(number):
    thing(number)
    del _handles[int(number)]


# Graphs, under the names of the driver, of libcuda


def begin_capture(stream, mode):
    thing(stream).captured = []


def end_capture(stream):
    works, thing(stream).captured = thing(stream).captured, None
    return handle(works)


def launch(graph, stream):
    for work in thing(graph):
        thing(stream).put(work)


_RUNTIME = {
    "cudaGetErrorString": _text,
    "cudaGetDeviceCount": lambda: len(GPUS),
    "cudaGetDeviceProperties": _properties,
    "cudaSetDevice": _choose,
    "cudaGetDevice": current,
    "cudaDriverGetVersion": lambda: DRIVER,
    "cudaMalloc": allocate,
    "cudaFree": lambda address: free(int(address)),
    "cudaMemcpy": lambda *arguments: _copy(*arguments, current()),
    "cudaMemcpyAsync": _copy_later,
    "cudaHostAlloc": _pin,
    "cudaFreeHost": _unpin,
    "cudaStreamCreate": lambda: handle(Stream()),
    "cudaStreamSynchronize": lambda stream: thing(stream).wait(),
    "cudaStreamDestroy": _forget,
    "cudaEventCreate": lambda: handle(Moment()),
    "cudaEventRecord": lambda event, stream: thing(stream).put(thing(event).mark),
    "cudaEventElapsedTime": lambda start, end: elapsed(thing(start), thing(end)),
    "cudaEventDestroy": _forget,
}


def _into(target, number):
    target._obj.value = number
    return 0


class Libcuda:
    """The few calls of libcuda.so.1 that capture a graph, as ctypes would make them."""

    cuStreamBeginCapture_v2 = staticmethod(lambda s, mode: begin_capture(s.value, mode) or 0)
    cuStreamEndCapture = staticmethod(lambda s, graph: _into(graph, end_capture(s.value)))
    cuGraphInstantiateWithFlags = staticmethod(
        lambda executable, graph, flags: _into(executable, handle(list(thing(graph.value))))
    )
    cuGraphLaunch = staticmethod(lambda graph, s: launch(graph.value, s.value) or 0)
    cuGraphDestroy = cuGraphExecDestroy = staticmethod(lambda graph: _forget(graph.value) or 0)
