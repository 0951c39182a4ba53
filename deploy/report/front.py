"""The front of a search in one line: the speed of what was built, and a split worth knowing.

::

    about 1.19x FP32 (estimated); 1.36x with 27 of 28 boxes: --split 3
          what was built                another split, its price, how to build it
"""

from collections.abc import Iterable, Iterator, Sequence

from deploy.metrics.latency import MIN_GAIN
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE
from deploy.report import figures
from deploy.report.model import Findings, find_rivals
from deploy.report.parts import EngineRow, SplitRow

_RANKS = {GOOD: 0, DOUBTFUL: 1, UNUSABLE: 2}
_UNKNOWN_RANK = 3  # of a split that was not judged
MIN_FASTER = 1.08  # speed over the built split's from which a noisier split is worth knowing
MIN_QUIETER_DB = 3.0  # SQNR over the built split's from which a split is worth its price
_MAX_SLOWER = 1.08  # time over the built split's that this SQNR may cost


def find_taken(front: Iterable[SplitRow]) -> SplitRow | None:
    """Return the split that was built; None if the front does not have it."""
    return next((split for split in front if split.taken and split.time > 0), None)


def find_better(front: Iterable[SplitRow], level: str) -> SplitRow | None:
    """Return the fastest split of the best level, if that is better than `level`."""
    splits = [split for split in front if rank_of(split.level) < rank_of(level)]
    return min(splits, key=_rank_and_time, default=None)


def find_alternative(front: Sequence[SplitRow], taken: SplitRow) -> SplitRow | None:
    """Return the split that is most worth knowing beside the one that was built.

    In this order: one of a better level that still wins time; a clearly faster one of the same
    level or the next; one with clearly more SQNR for little time.
    """
    fast_splits = [split for split in front if 0 < split.time * MIN_GAIN <= 1]
    better = find_better(fast_splits, taken.level) if taken.level else None
    if better is not None:
        return better

    max_rank = min(rank_of(taken.level) + 1, _RANKS[DOUBTFUL])
    faster = [
        split
        for split in front
        if 0 < split.time * MIN_FASTER <= taken.time and rank_of(split.level) <= max_rank
    ]
    if faster:
        return min(faster, key=_rank_and_time)

    quieter = [
        split
        for split in fast_splits
        if split.sqnr_db >= taken.sqnr_db + MIN_QUIETER_DB
        and split.time <= taken.time * _MAX_SLOWER
    ]
    return max(quieter, key=lambda split: split.sqnr_db, default=None)


def rank_of(level: str) -> int:
    """Return the rank of an expected level, 0 for the best."""
    return _RANKS.get(level, _UNKNOWN_RANK)


def _rank_and_time(split: SplitRow) -> tuple[int, float]:
    return rank_of(split.level), split.time


def speed_texts(report: Findings) -> Iterator[str]:
    """Yield a line for each target whose front tells a speed that the table does not."""
    engine_by_target = {e.target: e for e in report.engines if not e.is_float}
    for target in report.targets:
        front = target.search.front if target.search else ()
        text = _speed_text(report, front, engine_by_target.get(target.name))
        if text:
            yield f"{target.name}: {text}" if len(report.targets) > 1 else text


def _speed_text(report: Findings, front: Sequence[SplitRow], engine: EngineRow | None) -> str:
    """Return what was built and what else is worth knowing; "" if the table says it all."""
    taken = find_taken(front)
    if taken is None:
        return ""

    other = find_alternative(front, taken)
    if engine is None or engine.speed is None:
        speed = 1 / taken.time
        source = "measured in the search" if taken.is_timed else "estimated"
        text = f"about {figures.ratio(speed)} FP32 ({source})"
    elif other is None:
        return ""
    else:
        speed = engine.speed.ratio
        baselines = [r.label for r in find_rivals(report.engines, engine) if r.baseline]
        text = f"{figures.ratio(speed)} {baselines[0] if baselines else 'FP32'}"
    if other is None:
        return text

    other_speed = figures.ratio(speed * taken.time / other.time)
    price = other.figure or figures.decibels(other.sqnr_db)
    if taken.level != other.level:
        price += f" ({other.level})"
    return f"{text}; {other_speed} with {price}: --split {other.number}"
