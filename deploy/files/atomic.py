"""Writing a file so that a reader, or a crash at any moment, sees the old bytes or the new ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deploy.errors import ExportError
from deploy.inputs import refuse
from deploy.locks import claimed, claimed_file

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
