"""A bounded background stream: one thread produces, any number of threads consume.

::

    producer thread --put--> [ bounded queue ] --get--> worker, worker, ...

Memory stays flat (the queue holds a few items), the order is the producer's, an exception of the
producer is raised in the consumer that meets it, and closing joins the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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
