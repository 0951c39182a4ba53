"""Writing a file so that a reader, or a crash at any moment, sees the old bytes or the new ones.

Locks of the operating system: each ends with the process that holds it, whatever ends that.

On a file system without locks everything counts as locked for an hour after it was last written.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.errors import ExportError
from deploy.files.reading import refuse

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


PREFIX = ".calib8-"  # of what is not finished


def write_bytes(path: Path, data: bytes) -> Path:
    """Write `data` to `path` by a temporary file in the same folder and one rename.

    Raises:
        ExportError: the folder cannot be made or written to.
    """
    return write_with(path, lambda temporary: _write_all(temporary, data))


def write_text(path: Path, text: str) -> Path:
    """`write_bytes` of UTF-8 text, newlines as they are."""
    return write_bytes(path, text.encode("utf-8"))


def write_with(path: Path, fill: Callable[[Path], object]) -> Path:
    """Let `fill` write a temporary file beside `path`, flush it to disk, rename it to `path`.

    The permissions of a file that was there stay.

    Raises:
        ExportError: it cannot be written, or is an input, a folder or a device.
    """
    path = Path(path)
    refuse(path)
    try:
        mode = mode_at(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = claimed_file(path.parent, prefix=PREFIX)
        try:
            fill(temporary)
            _flush(temporary)
            temporary.chmod(mode)
            temporary.replace(path)
            flush_names(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(handle)
    except OSError as error:
        raise ExportError(
            f"{path} must be writable, got: {error.strerror or error}; give another --out"
        ) from error
    return path


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files that a killed process left in `folder`; gives how many."""
    removed = 0
    for leftover in Path(folder).glob(f"{PREFIX}*"):
        try:
            if leftover.is_file() and not claimed(leftover):
                leftover.unlink()
                removed += 1
        except OSError:  # another process was faster
            continue
    return removed


def _write_all(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def flush_names(folder: Path) -> None:
    """Have the names in a folder reach the disk, where the file system can be asked to."""
    with suppress(OSError):
        _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mode_at(path: Path) -> int:
    """Permissions of the file that is there, or of a new one."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
