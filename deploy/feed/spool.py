"""Some samples of a feed, kept in a file without a name, so that nobody decodes them again."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import IO

import numpy as np

from deploy.tensors import Array


class Spool:
    """Samples by their index; written once, read as often as needed, gone with the process.

    A disk that is full ends the keeping, not the run: what was kept stays, the rest is made
    again by whoever asks.
    """

    def __init__(self, wanted: Collection[int], *, most_bytes: int | None = None) -> None:
        """Args: wanted: which samples to keep; most_bytes: of all of them, None for no limit."""
        self._wanted = wanted
        self._most_bytes = most_bytes
        self._places: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._file: IO[bytes] | None = None
        self._using = threading.Lock()

    def __contains__(self, index: object) -> bool:
        """Whether a sample is kept."""
        return index in self._places

    def add(self, index: int, sample: Mapping[str, Array]) -> None:
        """Keep a sample, if it is wanted and there is room."""
        with self._using:
            if index not in self._wanted or index in self._places:
                return
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(prefix="calib8-")  # noqa: SIM115
                    weakref.finalize(self, _close, self._file)
                place = self._file.seek(0, 2)
                if self._most_bytes is not None and place + _bytes(sample) > self._most_bytes:
                    return
                for array in sample.values():
                    np.save(self._file, array, allow_pickle=False)
                self._file.flush()
            except (OSError, ValueError):  # full, or values that are no plain array
                self._wanted = ()
                return
            self._places[index] = place, tuple(sample)

    def get(self, index: int) -> dict[str, Array] | None:
        """A sample that was kept; None for any other."""
        with self._using:
            if index not in self._places or self._file is None:
                return None
            place, names = self._places[index]
            self._file.seek(place)
            return {name: np.load(self._file, allow_pickle=False) for name in names}


def _bytes(sample: Mapping[str, Array]) -> int:
    return sum(np.asarray(array).nbytes for array in sample.values())


def _close(file: IO[bytes]) -> None:
    """Let it go; what a full disk did not take is not tried again."""
    with suppress(OSError):
        file.close()
