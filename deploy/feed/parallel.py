"""Samples worked on by several threads, their results taken in the feed's order.

::

    feed --> 1 2 3 4 ... --> worker 0:  work(1)        work(3) ...     in any order
                             worker 1:      work(2)  work(4) ...
                             take(1) take(2) take(3) ...               one at a time, in order

So what is summed up is summed up in one order, whatever the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from deploy.tensors import Array

Sample = Mapping[str, Array]
Work = TypeVar("Work")


def in_order(
    samples: Iterable[Sample],
    work: Callable[[int, int, Sample], Work],
    take: Callable[[int, Work], None],
    *,
    threads: int,
    after: int = 0,
) -> int:
    """Work on every sample and take the results in order.

    Args:
        samples: drawn once, under a lock.
        work: (worker 0.., number of the sample 1.., sample) -> result; runs beside others.
        take: (number, result); no two at a time, in the order of the numbers.
        threads: workers, 1 or more.
        after: samples that went before; the first one here has the next number.

    Returns:
        How many samples there were.

    Raises:
        What `samples`, `work` or `take` raised first; the other workers end.
    """
    line: _Line[Work] = _Line(samples, after)
    # a thread of its own for a single worker too: OpenCV keeps settings a thread, and those for
    # decoding make counting slow
    with ThreadPoolExecutor(threads) as pool:
        ends = [pool.submit(_drain, worker, line, work, take) for worker in range(threads)]
        try:
            for end in ends:
                end.result()
        except BaseException:  # an interrupt of the user reaches this thread alone
            line.stop()
            raise
    return line.drawn - after


class _Line(Generic[Work]):
    """One iterator for several threads, and whose turn it is."""

    def __init__(self, samples: Iterable[Sample], after: int) -> None:
        self._samples = iter(samples)
        self._drawing = threading.Lock()
        self._moved = threading.Condition()
        self._next = after + 1
        self._stopped = False
        self.drawn = after

    def draw(self) -> tuple[int, Sample] | None:
        """The next sample with its number; None after the last, or where one failed."""
        with self._drawing:
            sample = None if self._stopped else next(self._samples, None)
            if sample is None:
                return None
            self.drawn += 1
            return self.drawn, sample

    def take(self, number: int, result: Work, taken: Callable[[int, Work], None]) -> None:
        """Wait for the turn of `number`; a failure elsewhere lets everybody out."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._next == number)
        if self._stopped:
            return
        taken(number, result)
        with self._moved:
            self._next += 1
            self._moved.notify_all()

    def stop(self) -> None:
        """End: nothing more is drawn or taken."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()


def _drain(
    worker: int,
    line: _Line[Work],
    work: Callable[[int, int, Sample], Work],
    take: Callable[[int, Work], None],
) -> None:
    try:
        while (drawn := line.draw()) is not None:
            number, sample = drawn
            line.take(number, work(worker, number, sample), take)
    except BaseException:
        line.stop()
        raise
