"""One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

Each variant is tapped: the wanted tensors become outputs of it, and ONNX Runtime still optimises
the rest (`deploy.calibration.blocked`). Each worker takes one sample at a time and runs it with one
thread inside. What no order can change is recorded in parts, by one worker at a time, merged at the
end; what is defined by the order waits for its turn, while the others go on inferring. So neither
the number of workers nor any batch size can change a bit.

Where it is asked whether the samples are enough, all workers come to rest at 8, 16, 32 ... of them,
so that what is looked at is the statistics of just so many.

Where something must be known of the first samples (TensorRT's range rule, AMCT's DMQ and AdaRound),
these few are run beforehand, kept, and run again in their place; more than once where what must be
known needs something itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.statistics import Batched, Recorder
from deploy.calibration.blocked import tapped
from deploy.calibration.observation import Observation, Observed, with_needs
from deploy.calibration.peaks import Peaks, largest
from deploy.calibration.subject import FOLDED
from deploy.errors import BackendError, FeedError
from deploy.feed.doubling import following
from deploy.feed.parallel import NEVER, Rest, Sample, in_order
from deploy.progress import phase

Progress = Callable[[], None]
Keep = Callable[[int, Sample], None]
Enough = Callable[[int, Observed, Observed], bool]
_Waiting = tuple[Observation, NDArray[np.float32]]
_Held = Mapping[str, Sequence[tuple[Observation, Recorder | None]]]
"""Tensor -> who reads it, with the recorder of a worker; None where values wait for their turn."""


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
    found = _pass(
        plan.late,
        before,
        chain(first[counted_before:], feed),
        max(1, threads),
        progress,
        counted,
        peaks,
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
            known = known.and_also(_pass(ready, known, first, able, lambda: None, runs, None))
            left = [o for o in left if o.key not in known]
    return known


def _pass(
    wanted: Iterable[Observation],
    known: Observed,
    samples: Iterable[Sample],
    threads: int,
    progress: Progress,
    runs: Counter[str],
    peaks: Peaks | None,
    *,
    keeper: Keeper | None = None,
    keep: Keep | None = None,
    halves: list[Observed] | None = None,
    enough: Enough | None = None,
) -> Observed:
    observations = list(wanted)
    if not observations:
        return Observed({})
    before = 0 if keeper is None else keeper.counted
    lines = _lines(observations, known)
    ordered = _empty((o for o in observations if o.statistic.ordered), known)
    free = [o for o in observations if not o.statistic.ordered]
    # a sample is begun when those `threads` before it are done, so no two are in one part at a
    # time; of an even number of parts, every other one holds the samples of odd numbers
    parts = [_empty(free, known) for _ in range(threads + (halves is not None and threads % 2))]
    held = [[line.held_by(part) for line in lines] for part in parts]
    own = [None if peaks is None else Peaks() for _ in range(threads)]
    if keeper is not None and before:
        earlier = keeper.known(observations)
        ordered = {o: earlier.of(o) for o in ordered}
        _merge(parts[0], {o: earlier.of(o) for o in free})

    def work(worker: int, number: int, sample: Sample) -> list[_Waiting]:
        return [
            waiting
            for line, recorders in zip(lines, held[number % len(held)], strict=True)
            if _reaches(line.limit, number)
            for waiting in line.run(recorders, own[worker], number, sample, keep)
        ]

    def take(number: int, waiting: list[_Waiting]) -> None:
        for observation, value in waiting:
            _record(ordered[observation], observation, number, value)
        runs.update(line.key for line in lines if _reaches(line.limit, number))
        progress()

    def take_peaks() -> None:
        for place, part_of in enumerate(own):
            if peaks is not None and part_of is not None:
                peaks.merge(part_of)
                own[place] = Peaks()

    def so_far() -> Observed:
        """All that was recorded; no other thread may record meanwhile."""
        take_peaks()
        recorded = _joined([_empty(free, known), *parts]) | ordered
        return Observed({o.key: recorded[o] for o in observations})

    limit = _limit(observations)
    rest = NEVER if keeper is None else _rest(keeper, ordered.values(), so_far)
    drawn, ahead = before, islice(samples, None if limit is None else max(limit - before, 0))
    apart = enough is not None or halves is not None  # what is looked at is left as it is
    whole = [_empty(free, known)] if apart else []
    while True:
        some = None if enough is None else following(drawn)
        piece = ahead if some is None else islice(ahead, some - drawn)
        drawn += in_order(piece, work, take, threads=threads, after=drawn, rest=rest)
        if drawn == 0:
            raise FeedError("a calibration needs at least one sample, got none")
        if enough is None or drawn != some:
            break
        new = _joined(parts)
        _merge(whole[0], new)
        parts[:] = [_empty(free, known) for _ in parts]
        held[:] = [[line.held_by(part) for line in lines] for part in parts]
        if enough(drawn, _by_key(new), _by_key(whole[0])):
            break
    for observation, recorder in ordered.items():
        if isinstance(recorder, Batched):
            try:
                recorder.end()
            except CalibrationError as error:
                raise _told(error, observation, f"tensor {observation.tensor}") from error
    if halves is not None:
        halves += [_by_key(_joined(parts[1::2])), _by_key(_joined(parts[::2]))]
        parts = [parts[0], parts[1]]
    take_peaks()
    merged = _joined([*whole, *parts]) | ordered
    return Observed({o.key: merged[o] for o in observations})


def _joined(parts: Sequence[dict[Observation, Recorder]]) -> dict[Observation, Recorder]:
    """The first part, with what all others saw."""
    for part in parts[1:]:
        _merge(parts[0], part)
    return parts[0]


def _by_key(part: Mapping[Observation, Recorder]) -> Observed:
    return Observed({o.key: recorder for o, recorder in part.items()})


def _rest(keeper: Keeper, ordered: Iterable[Recorder], so_far: Callable[[], Observed]) -> Rest:
    """Keep the state when it is time, and where no samples wait to be a batch."""
    batches = {recorder.together for recorder in ordered if isinstance(recorder, Batched)}

    def whole(number: int) -> bool:
        return all(number % samples == 0 for samples in batches)

    def use(number: int) -> None:
        if whole(number):
            keeper.keep(number, so_far())

    return Rest(due=lambda number: keeper.due() and whole(number), use=use)


def _limit(observations: Iterable[Observation]) -> int | None:
    """How many samples the observations look at; None for all."""
    most = [o.statistic.samples for o in observations]
    return None if None in most else max((n for n in most if n is not None), default=None)


def _reaches(limit: int | None, number: int) -> bool:
    return limit is None or number <= limit


def _empty(wanted: Iterable[Observation], known: Observed) -> dict[Observation, Recorder]:
    def lead(observation: Observation) -> Recorder | None:
        before = observation.lead
        return None if before is None else known.of(before)

    return {o: o.statistic.recorder(lead(o)) for o in wanted}


def _merge(into: dict[Observation, Recorder], part: Mapping[Observation, Recorder]) -> None:
    for observation, recorder in part.items():
        whole = into[observation]
        if isinstance(whole, Histogram) and isinstance(recorder, Histogram):
            whole.merge(recorder)
        else:
            raise AssertionError(f"{observation.statistic.key} is neither ordered nor mergeable")


@dataclass(frozen=True, slots=True)
class _Line:
    """A variant in the pass: its session, who reads which tensor, how many samples it is run on."""

    key: str
    tap: Tap
    readers: Mapping[str, Sequence[Observation]]
    limit: int | None

    def held_by(self, part: Mapping[Observation, Recorder]) -> _Held:
        """The readers with their recorders, looked up once and not for every sample."""
        return {name: [(o, part.get(o)) for o in read] for name, read in self.readers.items()}

    def run(
        self,
        held: _Held,
        peaks: Peaks | None,
        number: int,
        sample: Sample,
        keep: Keep | None,
    ) -> Iterator[_Waiting]:
        """Run one sample, record what has no order, and give what has."""
        kept = None if keep is None or self.key != FOLDED else partial(keep, number)
        for name, value in self.tap.run(sample, kept):
            amax: float | None = None
            for observation, recorder in held[name]:
                if not _reaches(observation.statistic.samples, number):
                    continue
                if recorder is None:
                    yield observation, value
                    continue
                _record(recorder, observation, number, value)
                if isinstance(recorder, Histogram):  # which had to find it anyway
                    amax = recorder.latest
            if peaks is not None:
                peaks.add((self.key, name), number, largest(value) if amax is None else amax)


def _lines(observations: list[Observation], known: Observed) -> list[_Line]:
    """One line for each variant, in the order in which they are first wanted."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        readers: dict[str, list[Observation]] = {}
        for observation in own:
            readers.setdefault(observation.tensor, []).append(observation)
        loose = [t for t, read in readers.items() if not any(o.statistic.ordered for o in read)]
        tap = Tap(variant.make(known), list(readers), in_any_order=loose)
        lines.append(_Line(variant.key, tap, readers, _limit(own)))
    return lines


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        tensors: list[str],
        *,
        threads: int | None = 1,
        in_any_order: Collection[str] = (),
    ) -> None:
        self._inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in self._inputs]
        self._made = [name for name in tensors if name not in self._inputs]
        self._open = tapped(model, self._made, threads=threads, in_any_order=in_any_order)

    def run(
        self, sample: Sample, keep: Callable[[Sample], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value, or its values in any order.

        `keep` gets the model's own outputs, and may get more.
        """
        try:
            values = self._open.session.run(sample)
        except BackendError as error:
            raise BackendError(f"could not run a sample: {error}") from error
        if keep is not None:
            keep(values)
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:  # let go of each tensor once it is counted
            blocked = self._open.blocked.get(name)
            if blocked is None:
                yield name, values.pop(name)
            else:
                yield name, blocked.values(values.pop(blocked.output))


def _record(
    recorder: Recorder, observation: Observation, number: int, value: NDArray[np.float32]
) -> None:
    try:
        recorder.observe(value)
    except CalibrationError as error:
        what = f"tensor {observation.tensor} of sample {number}"
        raise _told(error, observation, what) from error


def _told(error: CalibrationError, observation: Observation, what: str) -> CalibrationError:
    """The error with what it is of, and the way out."""
    if observation.whose:
        return CalibrationError(
            f"layer {observation.whose!r}: {what}: {error} (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{what}: {error}; check the model's weights and the preprocessing")
