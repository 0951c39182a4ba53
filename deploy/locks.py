"""Locks of the operating system: each ends with the process that holds it, whatever ends that.

On a file system without locks everything counts as locked for an hour after it was last written.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import ExportError

_HOUR = 3600.0
_PATIENCE = 60.0  # seconds; what is locked is renamed files, which takes milliseconds


def claimed_file(folder: Path, *, prefix: str) -> tuple[int, Path]:
    """A new file that `claimed` tells of until the descriptor is closed.

    Raises:
        OSError: the folder cannot be written to.
    """
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        if _claim(handle):
            return handle, Path(name)


def claimed_folder(folder: Path, *, prefix: str) -> tuple[int, Path]:
    """As `claimed_file`, a folder."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # somebody cleaned up in between
            continue
        if _claim(handle):
            return handle, path


def claimed(path: Path) -> bool:
    """Whether a living process holds it; what is gone is held by nobody."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(handle).st_mtime < _HOUR
    finally:
        os.close(handle)
    return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the only process that changes the folder; others wait here.

    Raises:
        ExportError: another process held it for a minute.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        _wait(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait(handle: int, folder: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ExportError(
                    f"one run at a time may change {folder}, got another that has held it for a"
                    " minute; wait for it, or end it"
                ) from None
            time.sleep(0.01)
        except OSError:  # no locks here
            return
        else:
            return


def _claim(handle: int) -> bool:
    """Lock what was just made, unless somebody took it for a leftover and removed it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return True
    if os.fstat(handle).st_nlink:
        return True
    os.close(handle)
    return False
