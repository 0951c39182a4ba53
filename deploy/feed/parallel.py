"""Threads for samples: `run_in_order`, `prefetch` and `SampleStream`.

`run_in_order` runs `work` in several threads, and `consume` on the results in the order of the
samples::

    feed --> 1 2 3 4 ... --> worker 0:  work(1)        work(3) ...     in any order
                             worker 1:      work(2)  work(4) ...
                             take(1) take(2) take(3) ...               one at a time, in order

So sums are accumulated in one order, whatever the number of threads. At a pause between two
samples, all samples drawn so far are taken and no worker runs: the sums are exactly those of the
first n samples.

`SampleStream` is a bounded background stream, one producer thread and any number of consumers::

    producer thread --> [ a few items ] --> worker, worker, ...

The items ahead are few, so memory stays constant. The order is the producer's; the producer's
exception is raised in the consumer that reaches it; closing joins the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from deploy.tensors import Array

Sample = Mapping[str, Array]
Work = TypeVar("Work")

_SIGNAL_POLL_S = 0.1  # seconds between checks for a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """When `run_in_order` pauses, and what it does then.

    Attributes:
        is_due: number of the last sample drawn -> whether to pause.
        run: what is to be done then, such as storing a checkpoint: called with that number while no
            worker runs, also if the user interrupts the run.
    """

    is_due: Callable[[int], bool]
    run: Callable[[int], None]


NO_PAUSE = Pause(is_due=lambda drawn: False, run=lambda drawn: None)


def run_in_order(
    samples: Iterable[Sample],
    work: Callable[[int, int, Sample], Work],
    consume: Callable[[int, Work], None],
    *,
    threads: int,
    first_number: int = 1,
    pause: Pause = NO_PAUSE,
) -> int:
    """Call `work` on every sample in several threads, and `consume` on the results in order.

    If the user interrupts the run, no other sample is drawn, and results of those already drawn are
    still consumed.

    Args:
        samples: drawn once, by one thread.
        work: (worker from 0, number of the sample, sample) -> result; called concurrently.
        consume: (number, result); called one at a time, in the order of the numbers.
        threads: workers, 1 or more.
        first_number: number of the first of these samples; more than 1 if earlier calls had others.
        pause: pauses between samples.

    Returns:
        The number of samples that were drawn.

    Raises:
        The first exception of `samples`, `work` or `consume`; the other workers stop.
    """
    run = _OrderedRun(
        samples, work, consume, threads=threads, drawn_count=first_number - 1, pause=pause
    )
    # in a thread of its own, so that a signal cannot interrupt it between two results
    with ThreadPoolExecutor(1) as pool:
        run_future = pool.submit(run.draw_and_consume)
        try:
            while wait([run_future], timeout=_SIGNAL_POLL_S).not_done:
                pass  # any thread may receive a signal, but only this one acts on it
        except BaseException:  # the user's interrupt
            run.stop_drawing()
            if run_future.exception() is None:  # waits for the samples already drawn
                pause.run(run.drawn_count)  # such as to store a checkpoint, for --resume
            raise
    run_future.result()
    return run.drawn_count - first_number + 1


@dataclass(slots=True)
class _OrderedRun(Generic[Work]):
    """One call of `run_in_order`; its thread draws the samples and consumes the results.

    A single worker needs its own thread too: OpenCV's settings are per thread, and those for
    decoding would slow down counting.
    """

    samples: Iterable[Sample]
    work: Callable[[int, int, Sample], Work]
    consume: Callable[[int, Work], None]
    threads: int
    drawn_count: int
    pause: Pause
    # of the last samples drawn, which are not consumed yet
    pending_results: deque[Future[Work]] = field(default_factory=deque)
    may_draw: bool = True

    def draw_and_consume(self) -> None:
        """Draw samples, let workers work on them, and consume the results in order.

        At most as many samples as workers are drawn ahead. It ends with the samples, or once
        `stop_drawing` was called.
        """
        samples = iter(self.samples)
        with ThreadPoolExecutor(self.threads) as pool:
            while True:
                # such as to store a checkpoint, with the results of all samples drawn so far
                if self.pause.is_due(self.drawn_count):
                    self._consume_first(len(self.pending_results))
                    self.pause.run(self.drawn_count)
                sample = next(samples, None) if self.may_draw else None
                if sample is None:
                    break
                self.drawn_count += 1
                # workers take turns, and fewer results are pending than there are workers: so the
                # previous result of this worker was consumed already
                worker = self.drawn_count % self.threads
                self.pending_results.append(
                    pool.submit(self.work, worker, self.drawn_count, sample)
                )
                if len(self.pending_results) == self.threads:
                    self._consume_first(1)
            self._consume_first(len(self.pending_results))

    def stop_drawing(self) -> None:
        """Draw no more samples; the results of those already drawn are still consumed."""
        self.may_draw = False

    def _consume_first(self, count: int) -> None:
        """Wait for the first results, and take them in order."""
        for _ in range(count):
            number = self.drawn_count - len(self.pending_results) + 1
            self.consume(number, self.pending_results.popleft().result())


T = TypeVar("T")
_END = object()
_MAX_ITEMS_AHEAD = 4


class SampleStream(Iterator[T], Generic[T]):
    """An iterator for one pass, by any number of threads; a context manager, or `close()` it.

    A background thread draws a few items ahead. A stream that is dropped without `close()` does not
    wait for it: the garbage collector may drop it in any thread, within any call.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="calib8-feed")
        self._items = _read_ahead(items, self._pool)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def close(self) -> None:
        """Stop the background thread and wait for it; safe to call twice."""
        with self._lock:
            self._items.close()
            self._pool.shutdown()

    def __enter__(self) -> SampleStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ahead(items: Iterator[T], pool: ThreadPoolExecutor) -> Generator[T]:
    """Yield items in order, of which the pool's one thread draws up to `_MAX_ITEMS_AHEAD` ahead."""
    draw = partial(next, items, _END)
    try:
        futures = deque(pool.submit(draw) for _ in range(_MAX_ITEMS_AHEAD))
        while (item := futures.popleft().result()) is not _END:
            futures.append(pool.submit(draw))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    items: Iterable[Item], work: Callable[[Item], Result], *, threads: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) in order, with work on up to `threads` items in the background.

    Args:
        items: drawn by the calling thread.
        work: item -> result.
        threads: at most so many items are worked on ahead.

    Raises:
        The exception of `work` for an item when it is its turn; the other threads stop.
    """
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="calib8-decode")
    try:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) == threads:
                oldest_item, future = pending.popleft()
                yield oldest_item, future.result()
        for item, future in pending:
            yield item, future.result()
    finally:  # no waiting: the garbage collector may run it in any thread, see `SampleStream`
        pool.shutdown(wait=False, cancel_futures=True)
