"""What a decoder says beside its pixels: the lines that libjpeg and libpng print on stderr.

libjpeg decodes damaged pictures as well as it can and tells of it in a line on stderr alone; OpenCV
passes nothing on. These libraries write to the C library's `stderr`, a variable, while all else
(Python, the runtimes, programs that are started) writes to file descriptor 2. So for the moment of
decoding the variable is pointed at a file without a name::

    libjpeg, libpng --fprintf--> stderr ---> nameless file --> the decoder's words
    everybody else  --write----> descriptor 2 --> the screen, as ever

The descriptor is never touched: nothing of others is lost or late, whenever the process ends. Where
the C library has no such variable (not glibc, not macOS) decoding goes on without the words.

Several threads decode at once. Words that fall meanwhile are nobody's in particular: whoever was
decoding does it again by itself, and has them, or not.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
_MOST = 1 << 16  # bytes that are read of what a decoder says


@contextmanager
def overheard() -> Iterator[list[str]]:
    """The lines that decoders print meanwhile, in a list that is filled at the end.

    One decoder is heard at a time; another thread's waits.
    """
    ear = _ear()
    if ear is None:
        yield []
        return
    with ear.alone() as lines:
        yield lines


def heard(decode: Callable[[], T]) -> tuple[T, list[str]]:
    """What a function gives, and the lines that it printed; others may decode meanwhile.

    It is called a second time, alone, where words fell that may be its own.
    """
    ear = _ear()
    if ear is None:
        return decode(), []
    with ear.among() as words:
        found = decode()
    if words.own or not words.lines:
        return found, words.lines
    with ear.alone() as lines:
        found = decode()
    return found, lines


@dataclass(slots=True)
class _Words:
    """What was said while somebody listened, and whether nobody else was there."""

    lines: list[str] = field(default_factory=list)
    own: bool = False


class _Ear:
    """A nameless file that takes the place of the C library's stderr, again and again."""

    def __init__(self, stderr: ctypes.c_void_p, stream: int, handle: int) -> None:
        self._stderr, self._stream, self._handle = stderr, stream, handle
        self._own: int | None = None
        self._turn = threading.Condition()
        self._inside = 0  # who decode now
        self._entered = 0  # who ever did
        self._alone = 0  # who wait to be alone, or are

    @contextmanager
    def among(self) -> Iterator[_Words]:
        """Listen, others too."""
        with self._turn:
            self._turn.wait_for(lambda: not self._alone)
            begun = self._enter()
            number, first = self._entered, self._inside == 1
        words = _Words()
        try:
            yield words
        finally:
            with self._turn:
                words.own = first and self._entered == number
                words.lines = self._leave(begun)

    @contextmanager
    def alone(self) -> Iterator[list[str]]:
        """Listen, while nobody else decodes; the lines are there at the end."""
        with self._turn:
            self._alone += 1
            self._turn.wait_for(lambda: not self._inside)
            begun = self._enter()
        lines: list[str] = []
        try:
            yield lines
        finally:
            with self._turn:
                self._alone -= 1
                lines += self._leave(begun)

    def _enter(self) -> int:
        """Listen from here on; gives what was written before."""
        self._inside += 1
        self._entered += 1
        if self._inside == 1:
            self._own, self._stderr.value = self._stderr.value, self._stream
        return os.fstat(self._handle).st_size

    def _leave(self, begun: int) -> list[str]:
        """What was said since; the last one puts the C library's stderr back."""
        self._inside -= 1
        if not self._inside:
            self._stderr.value = self._own
        size = os.fstat(self._handle).st_size
        said = os.pread(self._handle, min(size - begun, _MOST), begun) if size > begun else b""
        if not self._inside and size:
            os.ftruncate(self._handle, 0)
        self._turn.notify_all()
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
