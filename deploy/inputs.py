"""Files that a run reads, which it must never write.

A run (a command, or a call of `calibrate` or `build`) guards its inputs: what reads a model,
images, labels, weights or a configuration says so, and `deploy.files.atomic` writes over none of them::

    with guarded():
        is_read(model)        # remembered by device and inode, so that no other name hides it,
                              # as long as it is there: a new file may get the inode of a lost one
        refuse(output)        # ExportError: it is an input, a folder, or a device

Outside of a run nothing is remembered: what one run reads another may write.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from deploy.errors import ExportError

_Inode = tuple[int, int]


class _Many:
    """The files of a feed, of which there may be very many: two numbers of each."""

    def __init__(self, count: int, path: Callable[[int], Path]) -> None:
        self._devices, self._inodes = array("Q"), array("Q")
        self._path = path
        for index in range(count):
            found = _state(path(index))
            self._devices.append(0 if found is None else found.st_dev)
            self._inodes.append(0 if found is None else found.st_ino)

    def paths(self, inode: _Inode) -> Iterator[Path]:
        """Where a file of this inode was."""
        for index, number in enumerate(self._inodes):
            if number == inode[1] and self._devices[index] == inode[0]:
                yield self._path(index)


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read so far."""

    alone: dict[_Inode, str] = field(default_factory=dict)  # -> path
    many: list[_Many] = field(default_factory=list)

    def copy(self) -> _Read:
        return _Read(dict(self.alone), list(self.many))

    def paths(self, inode: _Inode) -> Iterator[Path | str]:
        """Where an input of this inode was."""
        if inode in self.alone:
            yield self.alone[inode]
        for one in self.many:
            yield from one.paths(inode)


_READ: ContextVar[_Read | None] = ContextVar("_READ", default=None)


@contextmanager
def guarded() -> Iterator[None]:
    """Remember inputs until the end; those of a run around this one too, and for it."""
    around = _READ.get()
    own = _Read() if around is None else around.copy()
    token = _READ.set(own)
    try:
        yield
    finally:
        _READ.reset(token)
        if around is not None:
            around.alone.update(own.alone)
            around.many[:] = own.many


def is_read(path: Path | str) -> None:
    """Remember a file as an input of this run; what does not exist is none."""
    read = _READ.get()
    if read is not None and (found := _state(path)) is not None:
        read.alone[found.st_dev, found.st_ino] = os.fspath(path)


def are_read(count: int, path: Callable[[int], Path]) -> None:
    """Remember so many files as inputs of this run.

    Args:
        count: how many there are.
        path: number of a file, from 0 -> its path; asked for again when something is written.
    """
    read = _READ.get()
    if read is not None:
        read.many.append(_Many(count, path))


def refuse(path: Path | str) -> None:
    """Refuse to write where an input, a folder or a device is.

    Raises:
        ExportError: one of these.
    """
    found = _state(path)
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode) or _stands_in_dev(path):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device"
        raise ExportError(f"{path} must be a file to write to, got {kind}; give another path")
    if _still_read((found.st_dev, found.st_ino)):
        raise ExportError(
            f"an output must not be an input, got {path}, which this run reads; give another path"
        )


def _still_read(inode: _Inode) -> bool:
    """Whether it is an input, and not a file that another run made since in place of a lost one."""
    states = map(_state, (_READ.get() or _Read()).paths(inode))
    return any(found and (found.st_dev, found.st_ino) == inode for found in states)


def _stands_in_dev(path: Path | str) -> bool:
    """Whether it is of /dev itself, as /dev/stdout, which may lead to a plain file."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"


def _state(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None
