"""One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

The wanted tensors become outputs of each variant, and ONNX Runtime still optimizes the rest
(`deploy.calibration.taps`). Each worker runs one sample at a time with one intra-op thread.
Order-free statistics are recorded in parts, each used by one worker at a time, and merged at the
end. Order-dependent values wait for their turn while the workers go on, so that the number of
workers and the batch size never change a bit of the result::

    worker 0:  1   3   5 ...  --> parts, merged at the end: order-free statistics
    worker 1:    2   4   6 ...
    taken:     1 2 3 4 5 6 ... --> recorders of order-dependent statistics

With a stop rule (`should_stop`), all workers pause after 8, 16, 32 ... samples, so that the rule
sees the statistics of exactly these.

If something must be known of the first samples (TensorRT's range rule, AMCT's DMQ and AdaRound),
these are run beforehand, stored, and run again in the pass; repeatedly if needs have needs.

Memory and disk are estimated before a run. The estimates are lower bounds from the shapes that the
model states, so only what is clearly impossible is refused. If all workers together would exceed
the memory, fewer are used, which changes no result.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path

import onnx

from calibrators.histogram import BINS, Histogram
from calibrators.statistics import BatchRecorder, Recorder
from deploy.calibration.checkpoint import Checkpoint
from deploy.calibration.observation import Observation, ObservedStatistics, with_needs
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.taps import (
    OutputCallback,
    VariantRecorders,
    Waiting,
    explain_error,
    is_within_limit,
    make_runners,
    record,
    sample_limit,
)
from deploy.errors import CalibrationError, ExportError, FeedError
from deploy.feed.parallel import NO_PAUSE, Pause, Sample, run_in_order
from deploy.feed.sampling import next_check
from deploy.files.reading import format_bytes
from deploy.graph.index import Graph
from deploy.machine import memory_bytes, trim_memory
from deploy.terminal import phase

Progress = Callable[[], None]
StopCallback = Callable[[int, ObservedStatistics, ObservedStatistics], bool]
_Part = dict[Observation, Recorder]
_VALUE = 4  # bytes of a float32
_HISTOGRAM = 8 * (2 * BINS + 1)  # bytes of a histogram


class _Pass:
    """State of a pass: the recorders, by worker."""

    def __init__(
        self,
        observations: Sequence[Observation],
        known: ObservedStatistics,
        threads: int,
        peaks: Peaks | None,
        *,
        split: bool,
        looked: bool,
    ) -> None:
        """Args: known: enough to build the variants; split: halves; looked: `look` is called."""
        self.lines = make_runners(observations, known)
        self._observations = observations
        self._known = known
        self._free = [o for o in observations if not o.statistic.ordered]
        self._ordered = self._empty(o for o in observations if o.statistic.ordered)
        self._peaks = peaks
        trim_memory()  # which optimizing the models took
        self._readings = [[line.reading() for line in self.lines] for _ in range(threads)]
        self._own = [None if peaks is None else Peaks() for _ in range(threads)]
        # a sample starts once those `threads` before it are done, so two never share a part; for
        # halves the number of parts is even, and every other part belongs to one half
        self._split = split
        self._width = threads + 2 - threads % 2 if split else threads
        # sum of the parts that `look` has returned, which it replaces by empty ones
        self._seen = [self._empty(self._free)] if split or looked else []
        self._reset_parts()

    def _empty(self, wanted: Iterable[Observation]) -> _Part:
        def lead(observation: Observation) -> Recorder | None:
            before = observation.lead
            return None if before is None else self._known.recorder(before)

        return {o: o.statistic.recorder(lead(o)) for o in wanted}

    def _reset_parts(self) -> None:
        self._parts = [self._empty(self._free) for _ in range(self._width)]
        self._held = [[VariantRecorders(line, part) for line in self.lines] for part in self._parts]

    def go_on(self, earlier: ObservedStatistics) -> None:
        """Start from the statistics of an earlier pass."""
        self._ordered = {o: earlier.recorder(o) for o in self._ordered}
        _merge(self._parts[0], {o: earlier.recorder(o) for o in self._free})

    def work(
        self, worker: int, number: int, sample: Sample, keep: OutputCallback | None
    ) -> list[Waiting]:
        """Run a sample, record order-free statistics, return the values that wait their turn."""
        place = alternate_halves(number) if self._split else number
        held, own = self._held[place % self._width], self._own[worker]
        return [
            waiting
            for line, reading, part in zip(self.lines, self._readings[worker], held, strict=True)
            if is_within_limit(line.limit, number)
            for waiting in line.run(reading, part, own, number, sample, keep)
        ]

    def take(self, number: int, waiting: list[Waiting]) -> None:
        """Record waiting values, in sample order."""
        for observation, value in waiting:
            record(self._ordered[observation], observation, number, value)

    def together(self) -> set[int]:
        """Batch sizes of the recorders that take several samples at once."""
        return {one.together for one in self._ordered.values() if isinstance(one, BatchRecorder)}

    def so_far(self) -> ObservedStatistics:
        """Return a copy of all statistics; no other thread may record meanwhile."""
        self._merge_peaks()
        return self._observed(_joined([self._empty(self._free), *self._parts]))

    def look(self) -> tuple[ObservedStatistics, ObservedStatistics]:
        """Return the order-free statistics (since the last call, of all samples so far)."""
        new = _joined(self._parts)
        _merge(self._seen[0], new)
        self._reset_parts()
        return _by_key(new), _by_key(self._seen[0])

    def end(self) -> None:
        """Finish after the last sample."""
        self._merge_peaks()
        for observation, recorder in self._ordered.items():
            if isinstance(recorder, BatchRecorder):
                try:
                    recorder.end()
                except CalibrationError as error:
                    raise explain_error(
                        error, observation, f"tensor {observation.tensor}"
                    ) from error

    def halves(self) -> list[ObservedStatistics]:
        """Return the order-free statistics of each half of the samples."""
        self._parts = [_joined(self._parts[1::2]), _joined(self._parts[::2])]
        return [_by_key(part) for part in self._parts]

    def whole(self) -> ObservedStatistics:
        """Return all statistics; nothing may be recorded afterwards."""
        return self._observed(_joined([*self._seen, *self._parts]))

    def _observed(self, free: _Part) -> ObservedStatistics:
        recorded = free | self._ordered
        return ObservedStatistics({o.key: recorded[o] for o in self._observations})

    def _merge_peaks(self) -> None:
        for place, own in enumerate(self._own):
            if self._peaks is not None and own is not None:
                self._peaks.merge(own)
                self._own[place] = Peaks()


def alternate_halves(number: int) -> int:
    """Return `number` or its neighbour, so that odd results are one half of all samples.

    The Thue-Morse sequence 0 1 1 0 1 0 0 1 ... decides, which is in step with no period: if the
    classes of a feed alternate, both halves get both classes.
    """
    return number ^ ((number >> 1).bit_count() & 1)


def _rest(checkpoint: Checkpoint, state: _Pass) -> Pause:
    """Store the state when it is due and no samples wait for their batch to be complete."""

    def no_open_batch(number: int) -> bool:
        return all(number % samples == 0 for samples in state.together())

    def use(number: int) -> None:
        if no_open_batch(number):
            checkpoint.save(number, state.so_far())

    return Pause(is_due=lambda number: checkpoint.is_due() and no_open_batch(number), run=use)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Merge all parts into the first and return it."""
    for part in parts[1:]:
        _merge(parts[0], part)
    return parts[0]


def _by_key(part: Mapping[Observation, Recorder]) -> ObservedStatistics:
    return ObservedStatistics({o.key: recorder for o, recorder in part.items()})


def _merge(into: _Part, part: Mapping[Observation, Recorder]) -> None:
    for observation, recorder in part.items():
        total = into[observation]
        if isinstance(total, Histogram) and isinstance(recorder, Histogram):
            total.merge(recorder)
        else:
            raise AssertionError(f"{observation.statistic.key} is neither ordered nor mergeable")


def observe(
    wanted: Iterable[Observation],
    samples: Iterable[Sample],
    *,
    known: ObservedStatistics | None = None,
    threads: int = 2,
    progress: Progress = lambda: None,
    runs: Counter[str] | None = None,
    peaks: Peaks | None = None,
    checkpoint: Checkpoint | None = None,
    on_outputs: OutputCallback | None = None,
    halves: list[ObservedStatistics] | None = None,
    should_stop: StopCallback | None = None,
) -> ObservedStatistics:
    """Record every wanted observation in one pass.

    `samples`: {input: array} of one inference each, in feed order; iterated once. If a checkpoint
    has counted some, these are left out, except the first ones that `schedule_observations`
    asks for.
    `known`: statistics from a cache, from which variants are made if possible.
    `threads`: worker threads, each running one sample at a time.
    `checkpoint`: stores the state; `peaks` must already hold the peaks that it knows.
    `on_outputs`: called with (sample number, outputs of the cleaned model for it, possibly more).
    `halves`: receives the order-free statistics of each half of the samples.
    `should_stop`: stop rule, called after 8, 16, 32 ... samples with (number of samples, order-free
    statistics since the last call, of all samples).

    Returns:
        The wanted statistics and those that they needed.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN (names it and the sample), or a variant cannot be made.
        BackendError: ONNX Runtime refused a model or a sample.
    """
    before, threads = known or ObservedStatistics({}), max(1, threads)
    counted: Counter[str] = Counter() if runs is None else runs
    plan = schedule_observations(wanted, before)
    feed = iter(samples)
    first = list(islice(feed, plan.first))
    if plan.early:
        before = _prepared(plan.early, before, first, threads, counted)
    if not plan.late:
        return ObservedStatistics({o.key: before[o.key] for o in plan.listed})
    split = halves is not None
    state = _Pass(plan.late, before, threads, peaks, split=split, looked=should_stop is not None)
    drawn = 0 if checkpoint is None else checkpoint.counted
    if checkpoint is not None and drawn:
        state.go_on(checkpoint.load_observed(plan.late))
    limit = sample_limit(plan.late)
    left = None if limit is None else max(limit - drawn, 0)
    ahead = islice(chain(first[drawn:], feed), left)
    rest = NO_PAUSE if checkpoint is None else _rest(checkpoint, state)

    def work(worker: int, number: int, sample: Sample) -> list[Waiting]:
        return state.work(worker, number, sample, on_outputs)

    def take(number: int, waiting: list[Waiting]) -> None:
        state.take(number, waiting)
        counted.update(line.key for line in state.lines if is_within_limit(line.limit, number))
        progress()

    while True:
        stop = None if should_stop is None else next_check(drawn)
        piece = ahead if stop is None else islice(ahead, stop - drawn)
        drawn += run_in_order(
            piece, work, take, threads=threads, first_number=drawn + 1, pause=rest
        )
        if should_stop is None or drawn != stop or should_stop(drawn, *state.look()):
            break
    if drawn == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    state.end()
    if halves is not None:
        halves += state.halves()
    known_now = {**before, **state.whole()}
    return ObservedStatistics({o.key: known_now[o.key] for o in plan.listed})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSchedule:
    """Schedule of the observations.

    Attributes:
        early: those recorded on the first samples before the pass.
        first: number of samples to run before the pass.
    """

    listed: tuple[Observation, ...]
    early: tuple[Observation, ...]
    late: tuple[Observation, ...]
    first: int


def schedule_observations(
    wanted: Iterable[Observation], known: ObservedStatistics
) -> ObservationSchedule:
    """Return the schedule of `observe` for the observations that are not in `known`."""
    listed = known.missing(with_needs(wanted, known))
    needs = [need for o in listed for need in o.variant.needs]
    leads = [o.lead for o in listed if o.lead is not None]
    early = known.missing(with_needs((*needs, *leads), known))  # on the first samples
    return ObservationSchedule(
        listed=listed,
        early=early,
        late=tuple(o for o in listed if o not in early),
        first=max((o.statistic.samples or 0 for o in early), default=0),
    )


def _prepared(
    early: Sequence[Observation],
    known: ObservedStatistics,
    first: Sequence[Sample],
    threads: int,
    runs: Counter[str],
) -> ObservedStatistics:
    """Record the early observations and return all known; runs as many passes as needs require."""
    left = list(early)
    with phase("what it is made from"):
        while left:
            ready = [o for o in left if all(need.key in known for need in o.variant.needs)]
            # ordered statistics need no merge; the others here cannot be merged
            usable = threads if all(o.statistic.ordered for o in ready) else 1
            known = known.merged_with(observe(ready, first, known=known, threads=usable, runs=runs))
            left = [o for o in left if o.key not in known]
    return known


def count_workers(wanted: Iterable[Observation], model: onnx.ModelProto, threads: int) -> int:
    """Return how many workers fit into memory, at most `threads`.

    `model`: the cleaned model with shapes; tensors of other variants are not counted.
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
            f" {format_bytes(needed)} of them (the largest is {largest!r} with"
            f" {values[largest]:,} values)"
            f" and a machine of {format_bytes(memory)}; use a smaller input, or a larger machine"
        )
    return max(1, min(threads, memory // (needed + _HISTOGRAM * len(listed))))


def refuse_full_disk(folder: Path, model: onnx.ModelProto, targets: int) -> None:
    """Refuse a folder whose disk has too little space for the int8 weights of each target."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    needed = targets * sum(len(tensor.raw_data) for tensor in model.graph.initializer) // _VALUE
    if needed > (free := shutil.disk_usage(there).free):
        raise ExportError(
            f"{folder} must have room for {targets} int8 models of at least"
            f" {format_bytes(needed)}, got"
            f" {format_bytes(free)} that are free; give another --out"
        )


def _values(wanted: Iterable[Observation], model: onnx.ModelProto) -> dict[str, int]:
    """Return tensor -> least number of values per sample, of tensors whose shape is known."""
    shapes = Graph(model).shapes
    found = {}
    for name in {o.tensor for o in wanted}:
        first, *others = shapes.get(name) or (None,)
        known = [first if isinstance(first, int) else 1, *others]
        if all(isinstance(side, int) and side > 0 for side in known):
            found[name] = prod(int(side or 0) for side in known)
    return found
