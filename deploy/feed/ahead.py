"""Work that is done some items ahead, by several threads; results in the items' order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
