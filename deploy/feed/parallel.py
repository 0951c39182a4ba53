"""Samples worked on by several threads, their results taken in the feed's order.

::

    feed --> 1 2 3 4 ... --> worker 0:  work(1)        work(3) ...     in any order
                             worker 1:      work(2)  work(4) ...
                             take(1) take(2) take(3) ...               one at a time, in order

So what is summed up is summed up in one order, whatever the number of threads. Where the work
rests, between two samples, all that were drawn are taken and nobody works: what was summed up by
then is that of the first so many samples.

A bounded background stream: one thread produces, any number of threads consume.

::

    producer thread --put--> [ bounded queue ] --get--> worker, worker, ...

Memory stays flat (the queue holds a few items), the order is the producer's, an exception of the
producer is raised in the consumer that meets it, and closing joins the thread.

Work that is done some items ahead, by several threads; results in the items' order.
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

_LOOK_S = 0.1  # between looks for a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """When the work rests, and what is done then.

    Attributes:
        due: number of the last sample that was drawn -> whether it is time.
        use: told that number while nobody works; also where the user ends the run.
    """

    due: Callable[[int], bool]
    use: Callable[[int], None]


NEVER = Rest(due=lambda drawn: False, use=lambda drawn: None)


def in_order(
    samples: Iterable[Sample],
    work: Callable[[int, int, Sample], Work],
    take: Callable[[int, Work], None],
    *,
    threads: int,
    after: int = 0,
    rest: Rest = NEVER,
) -> int:
    """Work on every sample and take the results in order.

    An interrupt of the user lets the samples that were drawn be taken, and no other be drawn.

    Args:
        samples: drawn once, under a lock.
        work: (worker 0.., number of the sample 1.., sample) -> result; runs beside others.
        take: (number, result); no two at a time, in the order of the numbers.
        threads: workers, 1 or more.
        after: samples that went before; the first one here has the next number.
        rest: between two samples.

    Returns:
        How many samples there were.

    Raises:
        What `samples`, `work` or `take` raised first; the other workers end.
    """
    line: _Line[Work] = _Line(samples, after, rest)
    try:
        # a thread of its own for a single worker too: OpenCV keeps settings a thread, and those for
        # decoding make counting slow
        with ThreadPoolExecutor(threads) as pool:
            try:
                ends = [pool.submit(_drain, worker, line, work, take) for worker in range(threads)]
                while wait(ends, timeout=_LOOK_S).not_done:
                    pass  # a signal may reach any thread, and this one alone acts on it
                for end in ends:
                    end.result()
            finally:
                line.finish()
    except BaseException as ended:
        if not isinstance(ended, Exception):  # an interrupt of the user reaches this thread alone
            line.end()
        raise
    return line.drawn - after


class _Line(Generic[Work]):
    """One iterator for several threads, and whose turn it is."""

    def __init__(self, samples: Iterable[Sample], after: int, rest: Rest) -> None:
        self._samples = iter(samples)
        self._rest = rest
        self._drawing = threading.Lock()
        self._moved = threading.Condition()
        self._next = after + 1
        self._stopped = False
        self._finished = False
        self.drawn = after

    def draw(self) -> tuple[int, Sample] | None:
        """The next sample with its number; None after the last, or where one failed."""
        with self._drawing:
            if self._rest.due(self.drawn):
                self._settle()
            over = self._stopped or self._finished
            sample = None if over else next(self._samples, None)
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

    def finish(self) -> None:
        """Draw nothing more; what was drawn is taken."""
        self._finished = True

    def end(self) -> None:
        """Wait for those that are at work, and rest for the last time."""
        with self._drawing:
            self._settle()

    def _settle(self) -> None:
        """Rest once all that were drawn are taken, while nobody draws; not where one failed."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._next == self.drawn + 1)
        if not self._stopped:
            self._rest.use(self.drawn)

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


T = TypeVar("T")
_POLL_SECONDS = 0.05


class _End:
    """The last thing in the queue; holds the producer's exception, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Stream(Iterator[T], Generic[T]):
    """Iterate once, from any number of threads; use as a context manager or `close()` it."""

    def __init__(self, produce: Callable[[], Iterator[T]], *, depth: int = 4) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        # the thread holds no reference to the stream, so that dropping the stream ends it
        self._thread = threading.Thread(
            target=_run, args=(produce, self._queue, self._stop), name="calib8-feed", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Stream[T]:
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
        """Stop the producer, wait for its thread; safe to call twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Stream[T]:
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
    except BaseException as caught:  # crosses over to the consumer
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
Made = TypeVar("Made")


def ahead(
    items: Iterable[Item], work: Callable[[Item], Made], *, threads: int
) -> Iterator[tuple[Item, Made]]:
    """Each item with what is made of it; at most `threads` items are worked on or wait.

    Args:
        items: drawn by the calling thread.
        work: item -> result.
        threads: 1 does all in the calling thread.

    Raises:
        What `work` raised, at its item; the others end.
    """
    if threads == 1:
        yield from ((item, work(item)) for item in items)
        return
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="calib8-decode") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) == threads:
                    first, made = waiting.popleft()
                    yield first, made.result()
            for item, made in waiting:
                yield item, made.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
