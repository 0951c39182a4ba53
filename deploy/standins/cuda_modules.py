"""What stands in for pycuda: `driver`, `autoinit`, `autoprimaryctx` and `gpuarray`.

Source: inducer/pycuda 2024.1, doc/driver.rst and doc/array.rst; as much of it as moves arrays.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deploy.standins.absent import module
from deploy.standins.memory import Memory

Array = NDArray[Any]


def modules(memory: Memory) -> dict[str, ModuleType]:
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
