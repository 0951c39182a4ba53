"""Some samples of a feed, kept in a file without a name, so that nobody decodes them again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import numpy as np

from deploy.feed.scratch import Place, Scratch
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
        self._places: dict[int, dict[str, Place]] = {}
        self._scratch: Scratch | None = None
        self._bytes = 0
        self._using = threading.Lock()

    def __contains__(self, index: object) -> bool:
        """Whether a sample is kept."""
        return index in self._places

    def add(self, index: int, sample: Mapping[str, Array]) -> None:
        """Keep a sample, if it is wanted and there is room."""
        with self._using:
            if index not in self._wanted or index in self._places:
                return
            size = sum(np.asarray(array).nbytes for array in sample.values())
            if self._most_bytes is not None and self._bytes + size > self._most_bytes:
                return
            try:
                if self._scratch is None:
                    self._scratch = Scratch("calib8-")
                places = {name: self._scratch.add(array) for name, array in sample.items()}
            except (OSError, ValueError):  # full, or values that are no plain array
                self._wanted = ()
                return
            self._bytes += size
            self._places[index] = places

    def get(self, index: int) -> dict[str, Array] | None:
        """A sample that was kept; None for any other."""
        with self._using:
            places, scratch = self._places.get(index), self._scratch
        if places is None or scratch is None:
            return None
        return {name: scratch.get(place) for name, place in places.items()}
