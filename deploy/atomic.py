"""Writing a file so that a reader, or a crash at any moment, sees the old bytes or the new ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from deploy.errors import ExportError
from deploy.inputs import refuse

_PREFIX = ".calib8-"


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
        mode = _mode(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=f"-{path.name}", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            fill(temporary)
            _flush(temporary)
            temporary.chmod(mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(
            f"{path} must be writable, got: {error.strerror or error}; give another --out"
        ) from error
    return path


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files that a killed process left in `folder`; gives how many.

    Only files an hour old or more are removed, since a younger one may be another build's.
    """
    import time

    removed = 0
    for leftover in Path(folder).glob(f"{_PREFIX}*"):
        try:
            if time.time() - leftover.stat().st_mtime > 3600:
                leftover.unlink()
                removed += 1
        except OSError:  # another process was faster
            continue
    return removed


def _write_all(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mode(path: Path) -> int:
    """Permissions of the file that is there, or of a new one."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
