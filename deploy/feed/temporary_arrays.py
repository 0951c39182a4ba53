"""Store items, arrays by input, in a temporary file without a name.

Dtypes and shapes stay in memory, so the file has no headers: numpy parses headers as Python code,
and Python 3.11 sometimes fails at that in several threads (python/cpython#106905).
"""

import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.tensors import Array

Item = dict[str, Array]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ArrayLocation:
    """Location, dtype and shape of an array in the file of an `ItemStore`."""

    start: int
    dtype: np.dtype[Any]
    shape: Shape


class ItemStore:
    """Items in a temporary file that is removed with the object; several threads may read."""

    def __init__(self) -> None:
        """Create the file.

        Raises:
            OSError: the disk is full.
        """
        # unbuffered: a buffer would retry data that a full disk refused before every read
        self._file: FileIO = tempfile.TemporaryFile(prefix="calib8-", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._locations: list[dict[str, _ArrayLocation]] = []  # of the arrays of each item
        weakref.finalize(self, self._file.close)

    def append(self, item: Mapping[str, Array]) -> None:
        """Append an item.

        Raises:
            FeedError: the disk is full.
            ValueError: an array holds Python objects.
        """
        try:
            locations = {name: self._write(array) for name, array in item.items()}
        except OSError as error:
            raise FeedError(
                f"the iterable must fit into a temporary file, got: {error.strerror or error}; free"
                " some disk space, or set TMPDIR to another disk"
            ) from error
        self._locations.append(locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int, /) -> Item:
        """Return an item, its arrays new and writable."""
        return {name: self._read(location) for name, location in self._locations[index].items()}

    def _write(self, array: Array) -> _ArrayLocation:
        """Write an array to the end of the file.

        Raises:
            OSError: the disk is full.
            ValueError: the array holds Python objects.
        """
        values = np.ascontiguousarray(array)
        if values.dtype.hasobject:
            raise ValueError("it holds Python objects")
        unwritten = memoryview(values.reshape(-1).view(np.uint8).data)
        with self._lock:
            # the shape of `array`: for a scalar, `values` has one dimension
            location = _ArrayLocation(self._file.seek(0, 2), values.dtype, np.shape(array))
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        return location

    def _read(self, location: _ArrayLocation) -> Array:
        with self._lock:
            self._file.seek(location.start)
            values: Array = np.fromfile(self._file, location.dtype, prod(location.shape))
        return values.reshape(location.shape)
