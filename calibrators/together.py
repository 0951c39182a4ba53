"""Histograms of many tensors, counted in one call of the kernel.

Of a small network a tensor is counted in a few microseconds, as many as a call from Python takes::

    histogram 0 --.                       array 0 --.
    histogram 1 --+-- where they lie,     array 1 --+-- of one sample --> calib8_observe_each
    histogram 2 --'   looked up once      array 2 --'
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram, address, no_numbers, plain, scratch
from calibrators.kernel import Kernel, kernel


class Refused(CalibrationError):
    """One of the arrays cannot be counted; those before it are.

    Attributes:
        place: of the array.
    """

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


class Located:
    """Arrays, and where they lie, for values that come again and again in the same memory.

    Attributes:
        arrays: as the kernel reads them.
    """

    def __init__(self, arrays: Iterable[NDArray[np.floating]]) -> None:
        self.arrays = [plain(x) for x in arrays]
        self._rows = np.array(
            [[address(x) for x in self.arrays], [x.size for x in self.arrays]], np.uintp
        )
        self.rows = [address(row) for row in self._rows]

    def put(self, place: int, x: NDArray[np.floating]) -> None:
        """Another array in place of one."""
        self.arrays[place] = plain(x)
        self._rows[:, place] = address(self.arrays[place]), x.size


class Together:
    """Histograms that see an array each at a time; one thread at once."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self.histograms = tuple(histograms)
        lie = [[ctypes.addressof(h), address(h.counts)] for h in self.histograms]
        self._places = np.array(lie, np.uintp).reshape(-1, 2).T.copy()
        self._rows = [address(row) for row in self._places]
        self._done = ctypes.c_size_t()

    def observe(self, located: Located) -> None:
        """Add to each histogram the values of its array, as `Histogram.observe`.

        Raises:
            Refused: as `Histogram.observe` refuses one.
        """
        counter = kernel()
        if counter is not None:
            self._observe_in_c(counter, located)
            return
        for place, (one, x) in enumerate(zip(self.histograms, located.arrays, strict=True)):
            with _named(place):
                one.observe(x)

    def _observe_in_c(self, counter: Kernel, located: Located) -> None:
        count, done = len(self.histograms), self._done
        nan = counter.observe_each(
            counter.way, count, *self._rows, *located.rows, scratch(), ctypes.byref(done)
        )
        if nan:
            with _named(done.value):
                self.histograms[done.value].refuse_unsound()
                raise no_numbers(nan)


@contextmanager
def _named(place: int) -> Iterator[None]:
    try:
        yield
    except CalibrationError as error:
        raise Refused(str(error), place) from error
