"""Threads for samples: `run_in_order`, `prefetch` and `SampleStream`.

`run_in_order` runs `work` in several threads, and `take` on the results in the order of the
samples::

    feed --> 1 2 3 4 ... --> worker 0:  work(1)        work(3) ...     in any order
                             worker 1:      work(2)  work(4) ...
                             take(1) take(2) take(3) ...               one at a time, in order

So sums are accumulated in one order, whatever the number of threads. At a pause between two
samples, all samples drawn so far are taken and no worker runs: the sums are exactly those of the
first n samples.

`SampleStream` is a bounded background stream, one producer thread and any number of consumers::

    producer thread --put--> [ bounded queue ] --get--> worker, worker, ...

The queue holds a few items, so memory stays constant. The order is the producer's; the producer's
exception is raised in the consumer that reaches it; closing joins the thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from deploy.tensors import Array

Sample = Mapping[str, Array]
Work = TypeVar("Work")

_SIGNAL_POLL_S = 0.1  # seconds between checks for a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """When `run_in_order` pauses, and what it does then.

    Attributes:
        due: number of the last sample drawn -> whether to pause.
        use: called with that number while no worker runs, also if the user interrupts the run.
    """

    due: Callable[[int], bool]
    use: Callable[[int], None]


NO_PAUSE = Pause(due=lambda drawn: False, use=lambda drawn: None)


def run_in_order(
    samples: Iterable[Sample],
    work: Callable[[int, int, Sample], Work],
    take: Callable[[int, Work], None],
    *,
    threads: int,
    after: int = 0,
    rest: Pause = NO_PAUSE,
) -> int:
    """Work on every sample in several threads, and take the results in order.

    If the user interrupts the run, samples already drawn are still taken, and no other is drawn.

    Args:
        samples: drawn once, under a lock.
        work: (worker 0.., number of the sample 1.., sample) -> result; called concurrently.
        take: (number, result); called one at a time, in the order of the numbers.
        threads: workers, 1 or more.
        after: number of samples before these; the first one here has the next number.
        rest: pauses between samples.

    Returns:
        The number of samples.

    Raises:
        The first exception of `samples`, `work` or `take`; the other workers stop.
    """
    shared: _SharedIterator[Work] = _SharedIterator(samples, after, rest)
    try:
        # a single worker needs its own thread too: OpenCV's settings are per thread, and those for
        # decoding would slow down counting
        with ThreadPoolExecutor(threads) as pool:
            try:
                futures = [
                    pool.submit(_run_worker, worker, shared, work, take)
                    for worker in range(threads)
                ]
                while wait(futures, timeout=_SIGNAL_POLL_S).not_done:
                    pass  # any thread may receive a signal, but only this one acts on it
                for future in futures:
                    future.result()
            finally:
                shared.finish()
    except BaseException as ended:
        if not isinstance(ended, Exception):  # only this thread sees the user's interrupt
            shared.end()
        raise
    return shared.drawn - after


class _SharedIterator(Generic[Work]):
    """One iterator for several threads, and the number of the next result to take."""

    def __init__(self, samples: Iterable[Sample], after: int, rest: Pause) -> None:
        self._samples = iter(samples)
        self._rest = rest
        self._drawing = threading.Lock()
        self._moved = threading.Condition()
        self._next = after + 1
        self._stopped = False
        self._finished = False
        self.drawn = after

    def draw(self) -> tuple[int, Sample] | None:
        """Return the next sample with its number; None after the last or after a failure."""
        with self._drawing:
            if self._rest.due(self.drawn):
                self._pause()
            over = self._stopped or self._finished
            sample = None if over else next(self._samples, None)
            if sample is None:
                return None
            self.drawn += 1
            return self.drawn, sample

    def take(self, number: int, result: Work, taken: Callable[[int, Work], None]) -> None:
        """Wait for the turn of `number`, then take its result; return at once after a failure."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._next == number)
        if self._stopped:
            return
        taken(number, result)
        with self._moved:
            self._next += 1
            self._moved.notify_all()

    def finish(self) -> None:
        """Draw nothing more; samples already drawn are still taken."""
        self._finished = True

    def end(self) -> None:
        """Wait for the workers, and pause for the last time."""
        with self._drawing:
            self._pause()

    def _pause(self) -> None:
        """Pause once all samples drawn are taken; do nothing after a failure."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._next == self.drawn + 1)
        if not self._stopped:
            self._rest.use(self.drawn)

    def stop(self) -> None:
        """Stop after a failure: nothing more is drawn or taken."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()


def _run_worker(
    worker: int,
    shared: _SharedIterator[Work],
    work: Callable[[int, int, Sample], Work],
    take: Callable[[int, Work], None],
) -> None:
    try:
        while (next_sample := shared.draw()) is not None:
            number, sample = next_sample
            shared.take(number, work(worker, number, sample), take)
    except BaseException:
        shared.stop()
        raise


T = TypeVar("T")
_POLL_SECONDS = 0.05


class _End:
    """The queue's last item; holds the producer's exception, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class SampleStream(Iterator[T], Generic[T]):
    """An iterator for one pass, by any number of threads; a context manager, or `close()` it."""

    def __init__(self, produce: Callable[[], Iterator[T]], *, depth: int = 4) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        # the thread holds no reference to the stream, so dropping the stream ends the thread
        self._thread = threading.Thread(
            target=_run, args=(produce, self._queue, self._stop), name="calib8-feed", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> SampleStream[T]:
        return self

    def __next__(self) -> T:
        while not self._stop.is_set():
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if not isinstance(item, _End):
                return item
            self._stop.set()
            self._queue.put(_End(None))  # wakes the next consumer at once
            if item.error is not None:
                raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the producer and wait for its thread; safe to call twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> SampleStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)
        if stop is not None:
            stop.set()


def _run(
    produce: Callable[[], Iterator[T]], out: queue.Queue[T | _End], stop: threading.Event
) -> None:
    error: BaseException | None = None
    try:
        for item in produce():
            if not _put(item, out, stop):
                return
    except BaseException as caught:  # raised again in the consumer
        error = caught
    _put(_End(error), out, stop)


def _put(item: T | _End, out: queue.Queue[T | _End], stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            out.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    items: Iterable[Item], work: Callable[[Item], Result], *, threads: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) in order, with work on up to `threads` items in the background.

    Args:
        items: drawn by the calling thread.
        work: item -> result.
        threads: 1 works in the calling thread.

    Raises:
        The exception of `work` for an item when it is its turn; the other threads stop.
    """
    if threads == 1:
        yield from ((item, work(item)) for item in items)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="calib8-decode") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) == threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for item, future in waiting:
                yield item, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
