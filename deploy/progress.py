"""Progress bars, on stderr, only for what takes over two seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps; gives the function that makes one step, from any thread."""
    if not shown:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, delay=2, leave=False, unit="sample") as drawn:
        yield lambda: _step(drawn)


def _step(drawn: object) -> None:
    drawn.update()  # type: ignore[attr-defined]
