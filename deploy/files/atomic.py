"""Write files atomically: a reader, or a crash at any moment, sees the old bytes or the new ones.

Temporary files and folders are claimed by locks of the operating system, which end with the
process however it ends. A file system without locks counts everything as locked for an hour after
its last write.
"""

import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.errors import ExportError
from deploy.files.guard import refuse_output

_STALE_AFTER_S = 3600.0
_LOCK_TIMEOUT_S = 60.0  # seconds; a lock is held while files are renamed, which takes milliseconds


def create_claimed_file(folder: Path, *, prefix: str) -> tuple[int, Path]:
    """Create a file that is `is_claimed` until the returned descriptor is closed.

    Its permissions are those of any new file of this process.

    Raises:
        OSError: the folder cannot be written to.
    """
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if _claim(handle):  # else another process removed it as a leftover: try again
            return handle, path


def create_claimed_folder(folder: Path, *, prefix: str) -> tuple[int, Path]:
    """Create a folder, like `create_claimed_file`."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it as a leftover
            continue
        if _claim(handle):
            return handle, path


def is_claimed(path: Path) -> bool:
    """Return whether a running process holds a file or folder; False if it cannot be opened.

    To find out, the lock is taken for a moment, if no process has it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks: then the time of the last write decides
        return time.time() - os.fstat(handle).st_mtime < _STALE_AFTER_S
    finally:
        os.close(handle)  # which releases the lock
    return False


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that only this process changes it; others wait here.

    Raises:
        ExportError: another process held it for a minute.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        _wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path) -> None:
    """Lock an open folder, once others have released it."""
    end = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ExportError(
                    f"one run at a time may change {folder}, but another has held it for a minute;"
                    " wait for it, or end it"
                ) from None
            time.sleep(0.01)
        except OSError:  # the file system has no locks
            return
        else:
            return


def _claim(handle: int) -> bool:
    """Lock a new file; return False if another process removed it as a leftover."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return True
    if os.fstat(handle).st_nlink:
        return True
    os.close(handle)
    return False


PREFIX = ".calib8-"  # of unfinished files


def write_bytes(path: Path, data: bytes) -> Path:
    """Write `data` to `path` through a temporary file in the same folder and one rename.

    Raises:
        ExportError: the folder cannot be created or written to.
    """
    return write_with(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text with `write_bytes`; newlines stay unchanged."""
    return write_bytes(path, text.encode("utf-8"))


def write_with(path: Path, fill: Callable[[Path], object]) -> Path:
    """Write a file so that a reader or a crash sees the old bytes or the new ones; return `path`.

    `fill` writes a temporary file beside it, which is flushed to disk and renamed to `path`. An
    existing file's permissions are kept.

    Args:
        path: of the file.
        fill: writes the file at the path that it is called with.

    Raises:
        ExportError: the file cannot be written, or must stay (`deploy.files.guard`).
    """
    path = Path(path)  # a caller in Python may give text
    refuse_output(path, is_named=True)  # an output that the user named may be written, too
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary_path = create_claimed_file(path.parent, prefix=PREFIX)
        try:
            # the permissions at the end: those of the file that is replaced, else those of any new
            # file, which `temporary_path` has until it is closed to others, next
            mode_source = path if path.exists() else temporary_path
            mode = stat.S_IMODE(os.stat(mode_source).st_mode)
            os.fchmod(handle, 0o600)  # while it is incomplete, nobody else reads it
            fill(temporary_path)
            _flush(temporary_path)
            temporary_path.chmod(mode)
            temporary_path.replace(path)
            flush_folder(path.parent)
        finally:
            temporary_path.unlink(missing_ok=True)
            os.close(handle)
    except OSError as error:
        raise ExportError(
            f"{path} must be writable, got: {error.strerror or error}; give another path"
        ) from error
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in `folder`."""
    for leftover in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process removed it first
            if belongs_to_user(leftover) and leftover.is_file() and not is_claimed(leftover):
                leftover.unlink()


def is_real_file(path: Path) -> bool:
    """Whether `path` is a regular file, not a link to one."""
    return path.is_file() and not path.is_symlink()


def is_real_folder(path: Path) -> bool:
    """Whether `path` is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def belongs_to_user(path: Path) -> bool:
    """Whether `path` belongs to this user and is not a link."""
    with suppress(OSError):
        return not path.is_symlink() and path.stat().st_uid == os.geteuid()
    return False


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk if the file system can do that."""
    with suppress(OSError):
        _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
