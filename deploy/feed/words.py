"""What a decoder says beside its pixels: the lines that libjpeg and libpng print on stderr.

libjpeg decodes damaged pictures as well as it can and tells of it in a line on stderr alone; OpenCV
passes nothing on. These libraries write to the C library's `stderr`, a variable, while all else
(Python, the runtimes, programs that are started) writes to file descriptor 2. So for the moment of
decoding the variable is pointed at a file without a name::

    libjpeg, libpng --fprintf--> stderr ---> nameless file --> the decoder's words
    everybody else  --write----> descriptor 2 --> the screen, as ever

The descriptor is never touched: nothing of others is lost or late, whenever the process ends. Where
the C library has no such variable (not glibc, not macOS) decoding goes on without the words.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_MOST = 1 << 16  # bytes that are read of what a decoder says


@contextmanager
def overheard() -> Iterator[list[str]]:
    """The lines that decoders print meanwhile, in a list that is filled at the end.

    One decoder is heard at a time; another thread's waits.
    """
    lines: list[str] = []
    ear = _ear()
    if ear is None:
        yield lines
        return
    with ear.using:
        ear.open()
        try:
            yield lines
        finally:
            lines += ear.close()


class _Ear:
    """A nameless file that takes the place of the C library's stderr, again and again."""

    def __init__(self, stderr: ctypes.c_void_p, stream: int, handle: int) -> None:
        self.using = threading.Lock()
        self._stderr, self._stream, self._handle = stderr, stream, handle
        self._own: int | None = None

    def open(self) -> None:
        self._own, self._stderr.value = self._stderr.value, self._stream

    def close(self) -> list[str]:
        self._stderr.value = self._own
        size = os.fstat(self._handle).st_size
        if not size:
            return []
        said = os.pread(self._handle, min(size, _MOST), 0)
        os.ftruncate(self._handle, 0)
        text = said.decode("ascii", "backslashreplace")
        shown = ("".join(c for c in line if c.isprintable()).strip() for line in text.splitlines())
        return [line for line in shown if line]


@lru_cache(maxsize=1)
def _ear() -> _Ear | None:
    """Made once; the stream is never closed, since a thread may be about to write to it."""
    name = {"linux": "stderr", "darwin": "__stderrp"}.get(sys.platform)
    try:
        library = ctypes.CDLL(None)
        if name is None or (name == "stderr" and not hasattr(library, "gnu_get_libc_version")):
            return None  # musl's is a constant
        stderr = ctypes.c_void_p.in_dll(library, name)
        handle = _nameless()
        library.fdopen.restype = ctypes.c_void_p
        stream = library.fdopen(os.dup(handle), b"a")
        unbuffered = 2
        library.setvbuf(ctypes.c_void_p(stream), None, unbuffered, ctypes.c_size_t(0))
    except (OSError, ValueError, AttributeError):
        return None
    return _Ear(stderr, stream, handle) if stream else None


def _nameless() -> int:
    """A file in memory where the system has such, so that a full disk swallows no word."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("calib8-words")
    with tempfile.TemporaryFile(prefix="calib8-") as file:
        return os.dup(file.fileno())
