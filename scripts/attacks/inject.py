"""Faults at the n-th call: of what touches the disk, or of what asks for memory.

::

    mkdir  open  write  fsync  chmod  rename  unlink      disk: these in the order they come
    numpy.zeros  concatenate  read_array  session.run     memory: the same

Only files below the given folders count, so that nothing of Python's own is disturbed. Of a write
that fails, or is the last thing a killed process does, the first half is on the disk.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

KILLED = 137
_EVENTS = {
    "os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "unlink", "os.chmod": "chmod",
    "os.rmdir": "rmdir", "os.link": "link", "os.symlink": "symlink", "os.truncate": "truncate",
}  # fmt: skip
_NUMPY = (
    "zeros",
    "empty",
    "ones",
    "full",
    "asarray",
    "array",
    "concatenate",
    "stack",
    "frombuffer",
)


class Trigger:
    """Counts calls, and does what was planned at one of them."""

    def __init__(self, at: int | None, act: Callable[[], None], log: int | None = None) -> None:
        """`at`: the call, from 0, or None for none; `log`: a descriptor to write calls to."""
        self._at, self._act, self._log = at, act, log
        self._count = 0
        self.busy = False

    def __call__(self, what: str, *, half: Callable[[], object] | None = None) -> None:
        """A call of this kind is about to be made; `half` does a part of it."""
        if self.busy:
            return
        self.busy = True
        try:
            if self._log is not None:
                os.write(self._log, f"{what}\n".encode())
            self._count += 1
            if self._count - 1 == self._at:
                if half is not None:
                    half()
                self._act()
        finally:
            self.busy = False


def fails(number: int) -> Callable[[], None]:
    """The system refuses with this number of an error."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def kills() -> None:
    """The process is gone, as by kill -9."""
    os._exit(KILLED)


def starves() -> None:
    """There is no memory."""
    raise MemoryError


ACTS: dict[str, Callable[[], None]] = {
    "ENOSPC": fails(errno.ENOSPC), "EIO": fails(errno.EIO), "kill": kills,
}  # fmt: skip


def on_disk(trigger: Trigger, folders: tuple[Path, ...]) -> None:
    """Let the trigger hear of every call that changes something below the folders; for good."""
    below = tuple(f"{folder}{os.sep}" for folder in folders)

    def ours(path: object) -> bool:
        if isinstance(path, int) or not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(below)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and ours(arguments[0]):
            trigger(_EVENTS[event])
        elif event == "open" and ours(arguments[0]) and _writes(arguments[1], arguments[2]):
            trigger("open")

    sys.addaudithook(hear)
    fsync = os.fsync
    os.fsync = lambda handle: (trigger("fsync"), fsync(handle))[1]
    _hear_writes(trigger, ours)


def _writes(mode: object, flags: object) -> bool:
    if isinstance(mode, str) and set(mode) & set("wax+"):
        return True
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _hear_writes(trigger: Trigger, ours: Callable[[object], bool]) -> None:
    """`open` gives files that tell of every write to the system."""
    plain = io.open

    class Heard(io.FileIO):
        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            trigger("write", half=lambda: io.FileIO.write(self, view[: len(view) // 2]))
            return io.FileIO.write(self, data)

    @wraps(plain)
    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax") or "+" in mode or not ours(file) or named.get("opener"):
            return plain(file, mode, buffering, *rest, **named)
        held = io.BufferedWriter(Heard(file, mode.replace("b", "").replace("t", "")))
        if "b" in mode:
            return held
        encoding = rest[0] if rest else named.get("encoding")
        return io.TextIOWrapper(held, encoding, newline=named.get("newline"))

    io.open = opened
    __builtins__["open"] = opened


def on_memory(trigger: Trigger) -> None:
    """Let the trigger hear of numpy's allocations by name and of every inference; for good."""
    import numpy as np
    import onnxruntime

    def heard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def told(*arguments: Any, **named: Any) -> Any:
            trigger(name)
            return call(*arguments, **named)

        return told

    for name in _NUMPY:
        setattr(np, name, heard(name, getattr(np, name)))
    np.lib.format.read_array = heard("read_array", np.lib.format.read_array)
    session = onnxruntime.InferenceSession
    for name in ("run", "__init__"):
        setattr(session, name, heard(name, getattr(session, name)))
