"""One pass: every sample once, recorded by several workers as if it had been one.

::

    worker 0:  1   3   5 ...  --> parts, merged at the end: what any order gives
    worker 1:    2   4   6 ...
    taken:     1 2 3 4 5 6 ... --> recorders of what the order shows in
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.statistics import Batched, Recorder
from deploy.calibration.lines import Held, Keep, Waiting, limit_of, lines_of, reaches, record, told
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.sample_checks import Peaks
from deploy.errors import FeedError
from deploy.feed.doubling import following
from deploy.feed.parallel import NEVER, Rest, Sample, in_order
from deploy.machine import trim_memory

Progress = Callable[[], None]
Enough = Callable[[int, Observed, Observed], bool]
_Part = dict[Observation, Recorder]


class Keeper(Protocol):
    """What keeps the state of a pass now and then, and knows that of one that was ended.

    Attributes:
        counted: samples whose statistics it knows; 0 for none.
    """

    counted: int

    def known(self, wanted: Iterable[Observation]) -> Observed:
        """What those samples gave; nothing where there were none."""
        ...

    def due(self) -> bool:
        """Whether it is time to keep."""
        ...

    def keep(self, number: int, observed: Observed) -> None:
        """Keep what the first so many samples gave."""
        ...


def one_pass(
    observations: Sequence[Observation],
    known: Observed,
    samples: Iterable[Sample],
    *,
    threads: int,
    progress: Progress = lambda: None,
    runs: Counter[str],
    peaks: Peaks | None = None,
    keeper: Keeper | None = None,
    keep: Keep | None = None,
    halves: list[Observed] | None = None,
    enough: Enough | None = None,
) -> Observed:
    """Record these observations, whose variants what is `known` suffices to make.

    The arguments are those of `deploy.calibration.observe.observe`.

    Raises:
        As `observe`.
    """
    if not observations:
        return Observed({})
    split = halves is not None
    state = _Pass(observations, known, threads, peaks, split=split, looked=enough is not None)
    drawn = 0 if keeper is None else keeper.counted
    if keeper is not None and drawn:
        state.go_on(keeper.known(observations))
    limit = limit_of(observations)
    ahead = islice(samples, None if limit is None else max(limit - drawn, 0))
    rest = NEVER if keeper is None else _rest(keeper, state)

    def work(worker: int, number: int, sample: Sample) -> list[Waiting]:
        return state.work(worker, number, sample, keep)

    def take(number: int, waiting: list[Waiting]) -> None:
        state.take(number, waiting)
        runs.update(line.key for line in state.lines if reaches(line.limit, number))
        progress()

    while True:
        some = None if enough is None else following(drawn)
        piece = ahead if some is None else islice(ahead, some - drawn)
        drawn += in_order(piece, work, take, threads=threads, after=drawn, rest=rest)
        if enough is None or drawn != some or enough(drawn, *state.look()):
            break
    if drawn == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    state.end()
    if halves is not None:
        halves += state.halves()
    return state.whole()


class _Pass:
    """What was recorded so far, and by whom.

    Attributes:
        lines: one for each variant.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        known: Observed,
        threads: int,
        peaks: Peaks | None,
        *,
        split: bool,
        looked: bool,
    ) -> None:
        """Args beyond those of `one_pass`: split: into halves; looked: at what is recorded."""
        self.lines = lines_of(observations, known)
        self._observations = observations
        self._known = known
        self._free = [o for o in observations if not o.statistic.ordered]
        self._ordered = self._empty(o for o in observations if o.statistic.ordered)
        self._peaks = peaks
        trim_memory()  # of optimizing the models
        self._readings = [[line.reading() for line in self.lines] for _ in range(threads)]
        self._own = [None if peaks is None else Peaks() for _ in range(threads)]
        # a sample is begun when those `threads` before it are done, so no two are in one part at a
        # time; of an even number of parts, one more for the turns, every other one holds a half
        self._split = split
        self._width = threads + 2 - threads % 2 if split else threads
        # what is looked at is left as it is
        self._seen = [self._empty(self._free)] if split or looked else []
        self._anew()

    def _empty(self, wanted: Iterable[Observation]) -> _Part:
        def lead(observation: Observation) -> Recorder | None:
            before = observation.lead
            return None if before is None else self._known.of(before)

        return {o: o.statistic.recorder(lead(o)) for o in wanted}

    def _anew(self) -> None:
        self._parts = [self._empty(self._free) for _ in range(self._width)]
        self._held = [[Held(line, part) for line in self.lines] for part in self._parts]

    def go_on(self, earlier: Observed) -> None:
        """Begin with what another pass recorded."""
        self._ordered = {o: earlier.of(o) for o in self._ordered}
        _merge(self._parts[0], {o: earlier.of(o) for o in self._free})

    def work(self, worker: int, number: int, sample: Sample, keep: Keep | None) -> list[Waiting]:
        """Run a sample, record what any order gives, and give what waits for its turn."""
        place = in_turns(number) if self._split else number
        held, own = self._held[place % self._width], self._own[worker]
        return [
            waiting
            for line, reading, part in zip(self.lines, self._readings[worker], held, strict=True)
            if reaches(line.limit, number)
            for waiting in line.run(reading, part, own, number, sample, keep)
        ]

    def take(self, number: int, waiting: list[Waiting]) -> None:
        """Record what waited, when it is its turn."""
        for observation, value in waiting:
            record(self._ordered[observation], observation, number, value)

    def together(self) -> set[int]:
        """Numbers of samples that are recorded as one batch."""
        return {one.together for one in self._ordered.values() if isinstance(one, Batched)}

    def so_far(self) -> Observed:
        """A copy of all that was recorded; no other thread may record meanwhile."""
        self._tell_peaks()
        return self._observed(_joined([self._empty(self._free), *self._parts]))

    def look(self) -> tuple[Observed, Observed]:
        """What any order gives: recorded since it was looked at last, and all of it."""
        new = _joined(self._parts)
        _merge(self._seen[0], new)
        self._anew()
        return _by_key(new), _by_key(self._seen[0])

    def end(self) -> None:
        """Nothing more comes.

        Raises:
            CalibrationError: a batch that is left over cannot be recorded.
        """
        self._tell_peaks()
        for observation, recorder in self._ordered.items():
            if isinstance(recorder, Batched):
                try:
                    recorder.end()
                except CalibrationError as error:
                    raise told(error, observation, f"tensor {observation.tensor}") from error

    def halves(self) -> list[Observed]:
        """What one half of the samples gave, and what the other gave, which any order gives."""
        self._parts = [_joined(self._parts[1::2]), _joined(self._parts[::2])]
        return [_by_key(part) for part in self._parts]

    def whole(self) -> Observed:
        """All that was recorded; nothing may be recorded afterwards."""
        return self._observed(_joined([*self._seen, *self._parts]))

    def _observed(self, free: _Part) -> Observed:
        recorded = free | self._ordered
        return Observed({o.key: recorded[o] for o in self._observations})

    def _tell_peaks(self) -> None:
        for place, own in enumerate(self._own):
            if self._peaks is not None and own is not None:
                self._peaks.merge(own)
                self._own[place] = Peaks()


def in_turns(number: int) -> int:
    """The same, or its neighbour: odd of one half of all numbers, even of the other.

    Which of two neighbours is odd changes as Thue and Morse have it, 0 1 1 0 1 0 0 1 ..., in step
    with nothing: with a feed whose classes take turns, both halves have both.
    """
    return number ^ ((number >> 1).bit_count() & 1)


def _rest(keeper: Keeper, state: _Pass) -> Rest:
    """Keep the state when it is time, and where no samples wait to be a batch."""

    def whole(number: int) -> bool:
        return all(number % samples == 0 for samples in state.together())

    def use(number: int) -> None:
        if whole(number):
            keeper.keep(number, state.so_far())

    return Rest(due=lambda number: keeper.due() and whole(number), use=use)


def _joined(parts: Sequence[_Part]) -> _Part:
    """The first part, with what all others saw."""
    for part in parts[1:]:
        _merge(parts[0], part)
    return parts[0]


def _by_key(part: Mapping[Observation, Recorder]) -> Observed:
    return Observed({o.key: recorder for o, recorder in part.items()})


def _merge(into: _Part, part: Mapping[Observation, Recorder]) -> None:
    for observation, recorder in part.items():
        whole = into[observation]
        if isinstance(whole, Histogram) and isinstance(recorder, Histogram):
            whole.merge(recorder)
        else:
            raise AssertionError(f"{observation.statistic.key} is neither ordered nor mergeable")
