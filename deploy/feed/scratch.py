"""Arrays in a file without a name, which is gone with the process.

What is there is known by who wrote it, so that there is no header to read: numpy parses those as
Python, and Python 3.11 fails at that by chance where several threads do (python/cpython#106905).
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np

from deploy.tensors import Array


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array is, and what it is."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Scratch:
    """Arrays by their places; several threads may write and read."""

    def __init__(self, prefix: str) -> None:
        """Make the file; its name begins with this while it has one.

        Raises:
            OSError: there is no room for it.
        """
        # without a buffer, in which what a full disk did not take would stand before every read
        self._file: FileIO = tempfile.TemporaryFile(prefix=prefix, buffering=0)  # noqa: SIM115
        self._using = threading.Lock()
        weakref.finalize(self, _close, self._file)

    def add(self, array: Array) -> Place:
        """Write one behind all others.

        Raises:
            OSError: the disk is full.
            ValueError: it holds Python objects.
        """
        values = np.ascontiguousarray(array)
        if values.dtype.hasobject:
            raise ValueError("it holds Python objects")
        left = memoryview(values.reshape(-1).view(np.uint8).data)
        with self._using:
            place = Place(self._file.seek(0, 2), values.dtype, np.shape(array))
            while left:
                left = left[self._file.write(left) :]
        return place

    def get(self, place: Place) -> Array:
        """What was written there; it may be written to."""
        found = np.empty(place.shape, place.dtype)
        left = memoryview(found.reshape(-1).view(np.uint8).data)
        with self._using:
            self._file.seek(place.start)
            while left and (read := self._file.readinto(left)):
                left = left[read:]
        if left:
            raise OSError("a temporary file must hold what was written to it, got less")
        return found


def _close(file: FileIO) -> None:
    """Let it go."""
    with suppress(OSError):
        file.close()
