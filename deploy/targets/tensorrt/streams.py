"""Throughput of several sessions at once, each on its own stream, as trtexec's --infStreams."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from deploy.errors import ConfigError
from deploy.tensors import Array, Session


def throughput(
    sessions: Sequence[Session],
    feeds: Sequence[Mapping[str, Array]],
    *,
    warmup_ms: float = 200,
    duration_s: float = 3,
) -> float:
    """Inferences a second of all sessions together.

    Latencies are not given: those of streams that share a device say nothing of one inference.
    Each run is waited for before the next is queued, so trtexec, which queues one ahead, may show
    more.

    Raises:
        ConfigError: no session or no feed.
        BackendError: a session refused a feed.
    """
    if not sessions or not feeds:
        raise ConfigError(f"got {len(sessions)} sessions and {len(feeds)} inputs, both must be > 0")
    _together(sessions, feeds, seconds=warmup_ms / 1e3)
    counted, seconds = _together(sessions, feeds, seconds=duration_s)
    return counted / seconds


def _together(
    sessions: Sequence[Session], feeds: Sequence[Mapping[str, Array]], *, seconds: float
) -> tuple[int, float]:
    """(inferences, seconds) of one thread a session, each running at least once."""
    counts = [0] * len(sessions)
    errors: list[BaseException] = []
    start = time.perf_counter()

    def work(index: int) -> None:
        try:
            while counts[index] == 0 or time.perf_counter() - start < seconds:
                sessions[index].run(feeds[counts[index] % len(feeds)])
                counts[index] += 1
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts), time.perf_counter() - start
