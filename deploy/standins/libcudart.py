"""What stands in for libcudart where a script calls it by ctypes: `CDLL("libcudart.so")`.

Functions give their error code, which is always success, and results through pointers, as in C.
Source: CUDA Runtime API reference, sections memory, stream and device management.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from deploy.standins.absent import absent
from deploy.standins.memory import Memory

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
