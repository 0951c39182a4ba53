"""Accuracy of what was built: every engine beside the float model, in one pass.

Each engine runs every sample that judges once, in sessions of one thread that run beside each
other; so does the float model, where its outputs were not kept while the calibration was made::

    sample            1    2    3    4    5 ...      spread over the feed
    float outputs     kept, or run
    engines           run  run  run  run  run
    inner tensors     of both, for a few of them     the float model's outputs come with these
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

from deploy.calibration.reference import FloatOutputs
from deploy.errors import BackendError
from deploy.feed.evaluation import Part
from deploy.feed.parallel import Sample, in_order
from deploy.feed.preview import Looks
from deploy.frontends.base import file_of
from deploy.frontends.reader import parse_model
from deploy.graph.edit import free_inputs, name_nodes, with_outputs
from deploy.metrics.accuracy import Accuracy, Comparison, TensorComparison
from deploy.metrics.layerwise import shared_tensors
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.precision import GroundTruth
from deploy.metrics.tasks import Metric
from deploy.metrics.tasks.task import Example
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import Built
from deploy.tensors import Array, Samples, Session
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel

LAYER_SAMPLES = 4  # for the figures of inner tensors, of which both models give all
CALIBRATION_SAMPLES = 100  # of the calibration images, where no evaluation images are given


def sleeping(model: Path | bytes | onnx.ModelProto, *, stand_in: bool = False) -> Session:
    """A session of one thread that wakes nobody: samples run beside each other instead."""
    return OrtSession.open(model, threads=1, spin=False, keep=True, int8_kernels=not stand_in)


class Inside:
    """Inner tensors of both models over a few samples; all of one's are in memory, and no more.

    Attributes:
        places: numbers, from 1, of the samples that are looked into.
        samples: how many were.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        built: Sequence[Built],
        engines: Mapping[str, Session | None],
        samples: int,
        *,
        speaks: bool = True,
    ) -> None:
        """What is to be compared.

        Args:
            loaded: the float model.
            built: what each target made.
            engines: target whose engine can be opened here -> its session where a device runs it,
                None where ONNX Runtime does.
            samples: how many there will be.
            speaks: whether engines are held against `loaded` as it is, with no repair in it.
        """
        self.samples = 0
        self._speaks = speaks
        self._looking = threading.Lock()
        self._taps: dict[str, Session] = {}
        self._figures: dict[str, TensorComparison] = {}
        for result in built:
            if result.runnable is not None and any(d.quantized for d in result.decisions):
                self._tap(loaded, result, stand_in=result.target not in engines)
        self.places: frozenset[int] = frozenset()
        if self._taps:
            tensors = dict.fromkeys(t for one in self._figures.values() for t in one.pairs)
            self._names = [spec.name for spec in loaded.outputs]
            self._reference = sleeping(with_outputs(loaded.model, tensors))
            few = min(LAYER_SAMPLES, samples)
            self.places = frozenset(1 + at * samples // few for at in range(few))

    def _tap(self, loaded: LoadedModel, result: Built, *, stand_in: bool) -> None:
        import onnx

        assert result.runnable is not None
        model = onnx.load(result.runnable)
        shared = shared_tensors(loaded.model, model)
        if shared:  # a fake-quant model has no DequantizeLinear
            tapped = with_outputs(model, shared.values())
            self._taps[result.target] = sleeping(tapped, stand_in=stand_in)
            self._figures[result.target] = TensorComparison(shared)

    def look(self, sample: Sample) -> Mapping[str, Array] | None:
        """Compare one sample's; gives the float model's outputs where engines are held against it.

        So it is not run again.
        """
        with self._looking:
            left = self._reference.run(sample)
            for name, tap in list(self._taps.items()):
                try:
                    self._figures[name].add(sample, left, tap.run(sample))
                except BackendError:  # what is wrong with it is told of the engine itself
                    del self._taps[name], self._figures[name]
            self.samples += 1
        return {name: left[name] for name in self._names} if self._speaks else None

    @property
    def layers(self) -> dict[str, tuple[OutputAccuracy, ...]]:
        """Target -> its figures."""
        return {name: one.result() for name, one in self._figures.items() if self.samples}


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is judged: the engine, or the model that stands in for it.

    Attributes:
        alone: whether the session takes one sample at a time, as one of a device does.
    """

    session: Session
    alone: bool


def candidates_of(
    built: Sequence[Built],
    engines: Mapping[str, Session | None],
    opened: Mapping[str, Session],
    failed: dict[str, str],
) -> dict[str, Candidate]:
    """Target -> what can be run of it here; why not is added to `failed`.

    Args:
        built: what each target made.
        engines: as `Inside` has them.
        opened: target -> its runnable file, where it is open already, in one thread.
        failed: target -> why its engine cannot be run.
    """
    found = {}
    for result in built:
        engine = engines.get(result.target)
        if engine is not None:
            found[result.target] = Candidate(engine, alone=True)
            continue
        stand_in = result.target not in engines
        path = result.runnable if stand_in else result.runnable or result.engine
        if path is None:
            continue
        try:
            session = opened.get(result.target) or sleeping(path, stand_in=stand_in)
            found[result.target] = Candidate(session, alone=False)
        except BackendError as error:
            failed[result.target] = str(error)
    return found


@dataclass(slots=True)
class Judged:
    """What the evaluation pass gives.

    Attributes:
        reference_runs: inferences of the float model.
        examples: candidate -> a few samples where it and the float model differ most.
        looks: number of each of them -> its name and picture, uint8 [h, w, 3].
    """

    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Example, ...]] = field(default_factory=dict)
    looks: Mapping[int, tuple[str, Array]] = field(default_factory=dict)


@dataclass(slots=True)
class _Ran:
    """One sample's outputs: the float model's and each candidate's."""

    sample: Sample
    reference: Mapping[str, Array]
    outputs: dict[str, Mapping[str, Array]] = field(default_factory=dict)


def judge(
    reference: FloatOutputs,
    candidates: Mapping[str, Candidate],
    over: Evaluation,
    inside: Inside,
    *,
    threads: int,
) -> Judged:
    """One pass over the samples that judge: every candidate's outputs beside the float model's."""
    found = Judged()
    if not candidates:
        return found
    before = reference.runs
    figures = {
        name: Comparison(reference, one.session, labels=over.labels, metric=over.metric)
        for name, one in candidates.items()
    }

    def attempt(name: str, sample: Sample, ran: _Ran) -> None:
        if name in found.failed:
            return
        try:
            ran.outputs[name] = candidates[name].session.run(sample)
        except BackendError as error:
            found.failed[name] = str(error)

    def work(_: int, number: int, sample: Sample) -> _Ran:
        inner = inside.look(sample) if number in inside.places else None
        ran = _Ran(sample, inner or reference.of(over.key(number), sample))
        for name, one in candidates.items():
            if not one.alone:
                attempt(name, sample, ran)
        return ran

    looks = Looks(over.feed)

    def take(_: int, ran: _Ran) -> None:
        for name, one in candidates.items():
            if one.alone:
                attempt(name, ran.sample, ran)
            if name in ran.outputs:
                found.engine_runs[name] += 1
                figures[name].add(ran.sample, ran.reference, ran.outputs[name], count=over.count)
        looks.add(ran.sample, {n for figure in figures.values() for n in figure.watched})
        step()

    most = over.samples
    with phase("accuracy", most, "samples") as step, over.feed.samples() as samples:
        in_order(itertools.islice(samples, most), work, take, threads=threads)
    found.reference_runs = reference.runs - before + inside.samples
    for name, figure in figures.items():
        if name not in found.failed:
            found.accuracy[name] = figure.result()
            found.examples[name] = figure.shown()
    found.looks = looks.of(one.number for own in found.examples.values() for one in own)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the engines are judged on.

    Attributes:
        samples: at most how many of the feed.
        most: at most how many images in them.
        key: number of a sample, from 1, in a pass over them -> its key.
        metric: the user's figure.
    """

    feed: Samples
    samples: int
    most: int
    labels: Sequence[int] | GroundTruth | None
    key: Callable[[int], int] = int
    metric: Metric | None = None

    @property
    def count(self) -> int:
        """Images so far known to be good; a fixed batch may be filled up with others."""
        return min(self.most, self.feed.count)


class _Labels(Sequence[int]):
    """The labels of a feed's good images; which are bad shows only as they are read."""

    def __init__(self, feed: Samples) -> None:
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed.labels or ())

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return (self._feed.labels or ())[place]


def evaluation_of(
    part: Part,
    evaluation: Samples | None,
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
) -> Evaluation:
    """The evaluation feed, or else a part of the calibration images, without labels."""
    if evaluation is None:
        return Evaluation(
            feed=part,
            samples=len(part),
            most=part.count,
            labels=None,
            key=part.key,
            metric=metric,
        )
    known: Sequence[int] | GroundTruth | None = labels
    if labels is None and evaluation.labels is not None:
        known = _Labels(evaluation)
    return Evaluation(
        feed=evaluation,
        samples=len(evaluation),
        most=evaluation.count,
        labels=known,
        metric=metric,
    )


def float_model(loaded: LoadedModel) -> bytes:
    """The user's own file as it was loaded, so that its speed is what is compared with.

    With names of their own for nodes that share one, which ONNX Runtime does not load; and with
    its weights off the list of inputs: what may be fed ONNX Runtime does not optimize, and int8,
    whose weights are constants, would look far better than it is.

    Not a float16 file: the CPU casts around its nodes, and int8 would look better than it is. Nor
    one with nodes that ONNX Runtime does not know: the part before them stands for it. Of a Q/DQ
    model, or of one whose weights are stored as integers, it is the float model that was taken out.

    Raises:
        ModelError: the file changed since.
    """
    taken = loaded.trained is not None or loaded.restored
    if loaded.widened or loaded.behind is not None or taken:
        return bytes(loaded.model.SerializeToString())
    data = file_of(loaded)
    if not loaded.renamed and not loaded.listed:
        return data
    given = parse_model(data, str(loaded.source))
    if loaded.renamed:
        name_nodes(given.graph)
    if loaded.listed:
        free_inputs(given.graph)
    return bytes(given.SerializeToString())
