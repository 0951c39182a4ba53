"""Files that a run reads, which it must never write.

A run (a command, or a call of `calibrate` or `build`) guards its inputs: what reads a model,
images, labels, weights or a configuration says so, and `deploy.atomic` writes over none of them::

    with guarded():
        is_read(model)        # remembered by device and inode, so that no other name hides it,
                              # as long as it is there: a new file may get the inode of a lost one
        refuse(output)        # ExportError: it is an input, a folder, or a device

Outside of a run nothing is remembered: what one run reads another may write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from deploy.errors import ExportError

_Inode = tuple[int, int]
_READ: ContextVar[dict[_Inode, str] | None] = ContextVar("_READ", default=None)  # -> path


@contextmanager
def guarded() -> Iterator[None]:
    """Remember inputs until the end; those of a run around this one too, and for it."""
    around = _READ.get()
    own = dict(around or {})
    token = _READ.set(own)
    try:
        yield
    finally:
        _READ.reset(token)
        if around is not None:
            around |= own


def is_read(path: Path | str) -> None:
    """Remember a file as an input of this run; what does not exist is none."""
    read = _READ.get()
    if read is not None and (found := _state(path)) is not None:
        read[found.st_dev, found.st_ino] = os.fspath(path)


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
    path = (_READ.get() or {}).get(inode)
    found = None if path is None else _state(path)
    return found is not None and (found.st_dev, found.st_ino) == inode


def _stands_in_dev(path: Path | str) -> bool:
    """Whether it is of /dev itself, as /dev/stdout, which may lead to a plain file."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"


def _state(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None
