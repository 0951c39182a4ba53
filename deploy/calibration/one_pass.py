"""One pass: every sample once, recorded by several workers as if it had been one.

::

    worker 0:  1   3   5 ...  --> parts, merged at the end: what any order gives
    worker 1:    2   4   6 ...
    taken:     1 2 3 4 5 6 ... --> recorders of what the order shows in

One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

Each variant is tapped: the wanted tensors become outputs of it, and ONNX Runtime still optimises
the rest (`deploy.calibration.taps`). Each worker takes one sample at a time and runs it with one
thread inside. What no order can change is recorded in parts, by one worker at a time, merged at the
end; what is defined by the order waits for its turn, while the others go on inferring. So neither
the number of workers nor any batch size can change a bit.

Where it is asked whether the samples are enough, all workers come to rest at 8, 16, 32 ... of them,
so that what is looked at is the statistics of just so many.

Where something must be known of the first samples (TensorRT's range rule, AMCT's DMQ and AdaRound),
these few are run beforehand, kept, and run again in their place; more than once where what must be
known needs something itself.

Whether this machine can hold what a run takes, told before an hour of it and not after.

Estimates are lower bounds, by the shapes that the model states: only what is clearly impossible is
refused. Where all workers together would need more memory than there is, fewer of them do the work,
which changes no result.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from calibrators.histogram import BINS, Histogram
from calibrators.statistics import Batched, Recorder
from deploy.calibration.observation import Observation, Observed, with_needs
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.taps import Held, Keep, Waiting, limit_of, lines_of, reaches, record, told
from deploy.errors import CalibrationError, ExportError, FeedError
from deploy.feed.parallel import NEVER, Rest, Sample, in_order
from deploy.feed.sampling import following
from deploy.files.reading import size
from deploy.graph.index import Graph
from deploy.machine import memory_bytes, trim_memory
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx


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

    The arguments are those of `deploy.calibration.one_pass.observe`.

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


def observe(
    wanted: Iterable[Observation],
    samples: Iterable[Sample],
    *,
    known: Observed | None = None,
    threads: int = 2,
    progress: Progress = lambda: None,
    runs: Counter[str] | None = None,
    peaks: Peaks | None = None,
    keeper: Keeper | None = None,
    keep: Keep | None = None,
    halves: list[Observed] | None = None,
    enough: Enough | None = None,
) -> Observed:
    """Record every wanted observation in one pass.

    Args:
        wanted: the observations; those that their variants need are found too.
        samples: {input: array} of one inference each, in the feed's order; drawn once. Where a
            keeper has counted some, these are not among them, but for those that `planned` says.
        known: what a cache holds already; a variant is made from it where it has what it needs.
        threads: worker threads, each running whole samples.
        progress: called after every sample.
        runs: raised by one for each inference, by the variant's key.
        peaks: is told the largest |x| of every tensor that is observed, sample by sample.
        keeper: keeps the state; the peaks that it knows are told already.
        keep: is given (number of the sample, all that the cleaned model gave for it).
        halves: gets what the first, third, fifth ... sample gave, and what the others gave, of
            observations that any order gives.
        enough: (samples so far, what those since it was asked last gave, what all gave) -> whether
            no more are to be looked at; asked at 8, 16, 32 ... samples, of such observations.

    Returns:
        What was wanted and what that needed.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN, named with its sample; or a variant cannot be made.
        BackendError: ONNX Runtime refused a model or a sample.
    """
    before = known or Observed({})
    counted: Counter[str] = Counter() if runs is None else runs
    plan = planned(wanted, before)
    feed = iter(samples)
    first = list(islice(feed, plan.first))
    if plan.early:
        before = _prepared(plan.early, before, first, max(1, threads), counted)
    counted_before = 0 if keeper is None else keeper.counted
    found = one_pass(
        plan.late,
        before,
        chain(first[counted_before:], feed),
        threads=max(1, threads),
        progress=progress,
        runs=counted,
        peaks=peaks,
        keeper=keeper,
        keep=keep,
        halves=halves,
        enough=enough,
    )
    keys = [o.key for o in plan.listed]
    return Observed({key: found[key] if key in found else before[key] for key in keys})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is recorded when.

    Attributes:
        listed: all that is missing, needs first.
        early: what must be known of the first samples before the pass.
        late: what is recorded in the pass.
        first: how many samples are run beforehand.
    """

    listed: tuple[Observation, ...]
    early: tuple[Observation, ...]
    late: tuple[Observation, ...]
    first: int


def planned(wanted: Iterable[Observation], known: Observed) -> Plan:
    """What `observe` records when; what is known is recorded no more."""
    listed = known.missing(with_needs(wanted, known))
    early = _early(listed, known)
    return Plan(
        listed=listed,
        early=early,
        late=tuple(o for o in listed if o not in early),
        first=max((o.statistic.samples or 0 for o in early), default=0),
    )


def _early(listed: Iterable[Observation], known: Observed) -> tuple[Observation, ...]:
    """What must be recorded of the first samples before the pass, needs first."""
    needs = [need for o in listed for need in o.variant.needs]
    leads = [o.lead for o in listed if o.lead is not None]
    return known.missing(with_needs((*needs, *leads), known))


def _prepared(
    early: Sequence[Observation],
    known: Observed,
    first: Sequence[Sample],
    threads: int,
    runs: Counter[str],
) -> Observed:
    """What is known after these too, in as many passes over the first samples as it takes."""
    left = list(early)
    with phase("what it is made from"):
        while left:
            ready = [o for o in left if all(need.key in known for need in o.variant.needs)]
            able = threads if all(o.statistic.ordered for o in ready) else 1  # none can be merged
            known = known.and_also(one_pass(ready, known, first, threads=able, runs=runs))
            left = [o for o in left if o.key not in known]
    return known


_VALUE = 4  # bytes of a float32
_HISTOGRAM = 8 * (2 * BINS + 1)  # bytes of one


def workers(wanted: Iterable[Observation], model: onnx.ModelProto, threads: int) -> int:
    """How many workers can observe at once, at most `threads`.

    Args:
        wanted: what is to be observed.
        model: the cleaned model, whose shapes are counted; tensors of other forms are not.
        threads: workers that were asked for.

    Raises:
        CalibrationError: not one of them: a sample's tensors are larger than the memory.
    """
    listed = list(wanted)
    memory = memory_bytes()
    if not listed or memory is None:
        return threads
    values = _values(listed, model)
    needed = max(
        _VALUE * sum(values.get(o.tensor, 0) for o in listed if o.variant == variant)
        for variant in {o.variant for o in listed}
    )
    if needed > memory:
        largest = max(values, key=lambda name: values[name])
        raise CalibrationError(
            f"the tensors that are observed of one sample must fit into the memory, got"
            f" {size(needed)} of them (the largest is {largest!r} with {values[largest]:,} values)"
            f" and a machine of {size(memory)}; use a smaller input, or a larger machine"
        )
    return max(1, min(threads, memory // (needed + _HISTOGRAM * len(listed))))


def refuse_full_disk(folder: Path, model: onnx.ModelProto, targets: int) -> None:
    """Refuse a folder whose disk has less room than int8 weights for each target take.

    Raises:
        ExportError: there is less.
    """
    there = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), None)
    if there is None:
        return
    needed = targets * sum(len(tensor.raw_data) for tensor in model.graph.initializer) // _VALUE
    if needed > (free := shutil.disk_usage(there).free):
        raise ExportError(
            f"{folder} must have room for {targets} int8 models of at least {size(needed)}, got"
            f" {size(free)} that are free; give another --out"
        )


def _values(wanted: Iterable[Observation], model: onnx.ModelProto) -> dict[str, int]:
    """Tensor -> how many values a sample has at least, where the model says so."""
    shapes = Graph(model).shapes
    found = {}
    for name in {o.tensor for o in wanted}:
        first, *others = shapes.get(name) or (None,)
        known = [first if isinstance(first, int) else 1, *others]
        if all(isinstance(side, int) and side > 0 for side in known):
            found[name] = prod(int(side or 0) for side in known)
    return found
