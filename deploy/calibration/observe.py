"""One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

Each variant is tapped: the wanted tensors become outputs of it, and ONNX Runtime still optimises
the rest. Each worker takes one sample at a time and runs it with one thread inside. What no order
can change is recorded in recorders of the worker's own, merged at the end; what is defined by the
order waits for its turn, while the others go on inferring. So neither the number of workers nor
any batch size can change a bit.

Where something must be known of the first samples (TensorRT's range rule, AMCT's DMQ), these few
are run beforehand, kept, and run again in their place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.statistics import Recorder
from deploy.calibration.observation import Observation, Observed, with_needs
from deploy.errors import BackendError, FeedError
from deploy.graph.edit import with_outputs
from deploy.ort import OrtSession
from deploy.tensors import Array

Sample = Mapping[str, Array]
Progress = Callable[[], None]


def observe(
    wanted: Iterable[Observation],
    samples: Iterable[Sample],
    *,
    known: Observed | None = None,
    threads: int = 2,
    progress: Progress = lambda: None,
    runs: Counter[str] | None = None,
) -> Observed:
    """Record every wanted observation in one pass.

    Args:
        wanted: the observations; those that their variants need are found too.
        samples: {input: array} of one inference each, in the feed's order; drawn once.
        known: what a cache holds already; a variant is made from it where it has what it needs.
        threads: worker threads, each running whole samples.
        progress: called after every sample.
        runs: raised by one for each inference, by the variant's key.

    Returns:
        What was wanted and what that needed.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN, named with its sample; or a variant cannot be made.
        BackendError: ONNX Runtime refused a model or a sample.
    """
    before = known or Observed({})
    counted: Counter[str] = Counter() if runs is None else runs
    listed = before.missing(with_needs(wanted))
    early = _early(listed, before)
    feed = iter(samples)
    first = list(islice(feed, max((o.statistic.samples or 0 for o in early), default=0)))
    if early:
        before = before.and_also(_pass(early, before, first, 1, lambda: None, counted))
    late = [o for o in listed if o.key not in before]
    found = _pass(late, before, chain(first, feed), max(1, threads), progress, counted)
    keys = [o.key for o in listed]
    return Observed({key: found[key] if key in found else before[key] for key in keys})


def _early(listed: Iterable[Observation], known: Observed) -> tuple[Observation, ...]:
    """What must be recorded of the first samples before the pass."""
    needs = [need for o in listed for need in o.variant.needs]
    leads = [o.lead for o in listed if o.lead is not None]
    return known.missing((*needs, *leads))


def _pass(
    wanted: Iterable[Observation],
    known: Observed,
    samples: Iterable[Sample],
    threads: int,
    progress: Progress,
    runs: Counter[str],
) -> Observed:
    observations = list(wanted)
    if not observations:
        return Observed({})
    most = [o.statistic.samples for o in observations]
    limit = None if None in most else max(n for n in most if n is not None)
    source = _Locked(islice(samples, limit), runs)
    lines = _lines(observations, known)
    free = [o for o in observations if not o.statistic.ordered]
    parts = [_empty(free, known) for _ in range(threads)]
    work = [(part, source, lines, progress) for part in parts]
    try:
        if len(work) == 1:
            _drain(*work[0])
        else:
            with ThreadPoolExecutor(len(work)) as pool:
                for done in [pool.submit(_drain, *w) for w in work]:
                    done.result()
    finally:
        source.stop()
    if source.drawn == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    merged = parts[0]
    for part in parts[1:]:
        _merge(merged, part)
    for line in lines:
        merged.update({o: line.recorders[o] for o in line.ordered})
    return Observed({o.key: merged[o] for o in observations})


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


@dataclass(slots=True)
class _Line:
    """A variant in the pass: its session, who reads which tensor, and whose turn it is."""

    key: str
    tap: Tap
    readers: dict[str, list[Observation]]
    ordered: list[Observation]
    recorders: dict[Observation, Recorder]
    limit: int | None
    turn: _Turn = field(default_factory=lambda: _Turn())


def _lines(observations: list[Observation], known: Observed) -> list[_Line]:
    """One line for each variant, in the order in which they are first wanted."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        readers: dict[str, list[Observation]] = {}
        for observation in own:
            readers.setdefault(observation.tensor, []).append(observation)
        ordered = [o for o in own if o.statistic.ordered]
        most = [o.statistic.samples for o in own]
        lines.append(
            _Line(
                key=variant.key,
                tap=Tap(variant.make(known), list(readers)),
                readers=readers,
                ordered=ordered,
                recorders=_empty(ordered, known),
                limit=None if None in most else max(n for n in most if n is not None),
            )
        )
    return lines


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(
        self, model: onnx.ModelProto, tensors: list[str], *, threads: int | None = 1
    ) -> None:
        self._inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in self._inputs]
        self._made = [name for name in tensors if name not in self._inputs]
        self._session = OrtSession.open(with_outputs(model, self._made), threads=threads)

    def run(self, sample: Sample) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value."""
        try:
            values = self._session.run(sample)
        except BackendError as error:
            raise BackendError(f"could not run a sample: {error}") from error
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:
            yield name, values.pop(name)  # let go of each tensor once it is counted


class _Locked:
    """One iterator for several threads, and what they ran."""

    def __init__(self, samples: Iterable[Sample], runs: Counter[str]) -> None:
        self._iterator = iter(samples)
        self._lock = threading.Lock()
        self._stopped = False
        self.drawn = 0
        self.runs = runs

    def draw(self) -> tuple[int, Sample] | None:
        with self._lock:
            if self._stopped:
                return None
            try:
                sample = next(self._iterator, None)
            except BaseException:
                self._stopped = True
                raise
            if sample is None:
                self._stopped = True
                return None
            self.drawn += 1
            return self.drawn, sample

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def ran(self, variant: str) -> None:
        with self._lock:
            self.runs[variant] += 1


class _Turn:
    """Lets sample n + 1 in when sample n is done; a failure lets everybody out."""

    def __init__(self) -> None:
        self._next = 1
        self._broken = False
        self._moved = threading.Condition()

    def wait(self, number: int) -> bool:
        """Whether it is this sample's turn now; False where another one failed."""
        with self._moved:
            self._moved.wait_for(lambda: self._broken or self._next == number)
            return not self._broken

    def done(self) -> None:
        with self._moved:
            self._next += 1
            self._moved.notify_all()

    def give_up(self) -> None:
        with self._moved:
            self._broken = True
            self._moved.notify_all()


def _drain(
    own: Mapping[Observation, Recorder],
    source: _Locked,
    lines: list[_Line],
    progress: Progress,
) -> None:
    try:
        while (drawn := source.draw()) is not None:
            number, sample = drawn
            for line in lines:
                if line.limit is None or number <= line.limit:
                    _run(line, own, number, sample)
                    source.ran(line.key)
            progress()
    except BaseException:
        source.stop()
        for line in lines:
            line.turn.give_up()
        raise


def _run(line: _Line, own: Mapping[Observation, Recorder], number: int, sample: Sample) -> None:
    """One sample through one variant."""
    waiting: list[tuple[Observation, NDArray[np.float32]]] = []
    for name, value in line.tap.run(sample):
        for observation in line.readers[name]:
            if observation.statistic.ordered:
                waiting.append((observation, value))
            elif _within(observation, number):
                _record(own[observation], observation, number, value)
    if not line.ordered or not line.turn.wait(number):
        return
    for observation, value in waiting:
        if _within(observation, number):
            _record(line.recorders[observation], observation, number, value)
    line.turn.done()


def _within(observation: Observation, number: int) -> bool:
    most = observation.statistic.samples
    return most is None or number <= most


def _record(
    recorder: Recorder, observation: Observation, number: int, value: NDArray[np.float32]
) -> None:
    try:
        recorder.observe(value)
    except CalibrationError as error:
        what = f"tensor {observation.tensor} of sample {number}: {error}"
        if observation.whose:
            raise CalibrationError(
                f"layer {observation.whose!r}: {what} (to leave it in float, use --keep-float)"
            ) from error
        raise CalibrationError(f"{what}; check the model's weights and the preprocessing") from (
            error
        )
