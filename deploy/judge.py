"""Accuracy of what was built: every engine beside the float model, in one pass.

The float model and each engine run every evaluation sample once, in sessions of one thread that
run beside each other. Inner tensors are compared first, over a few samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

from deploy.errors import BackendError
from deploy.feed.looks import Looks
from deploy.feed.parallel import Sample, in_order
from deploy.frontends.again import file_of
from deploy.frontends.reader import parse_model
from deploy.graph.edit import name_nodes, with_outputs
from deploy.metrics.accuracy import Accuracy, Comparison, OutputAccuracy, TensorComparison
from deploy.metrics.layerwise import shared_tensors
from deploy.metrics.precision import GroundTruth
from deploy.metrics.tasks import Metric
from deploy.metrics.tasks.examples import Example
from deploy.ort import OrtSession
from deploy.progress import phase
from deploy.targets.base import Built
from deploy.tensors import Array, Samples, Session

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel

_LAYER_SAMPLES = 4  # samples for the figures of inner tensors, which keep them all in memory
CALIBRATION_SAMPLES = 100  # of the calibration images, where no evaluation images are given


def _sleeping(model: Path | bytes | onnx.ModelProto, *, stand_in: bool = False) -> Session:
    """A session of one thread that wakes nobody: samples run beside each other instead."""
    return OrtSession.open(model, threads=1, spin=False, int8_kernels=not stand_in)


@dataclass(frozen=True, slots=True)
class Inside:
    """Figures of inner tensors over the first few samples.

    Attributes:
        layers: target -> its figures.
        reference: the float model's outputs of these samples, so that it is not run again.
    """

    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    reference: tuple[Mapping[str, Array], ...] = ()


@phase("layers")
def look_inside(
    loaded: LoadedModel,
    built: Sequence[Built],
    engines: Mapping[str, Session | None],
    over: Evaluation,
) -> Inside:
    """Compare inner tensors; all of one sample's are in memory at a time, and no more.

    Args:
        loaded: the float model.
        built: what each target made.
        engines: target whose engine can be opened here -> its session where a device runs it,
            None where ONNX Runtime does.
        over: the samples.
    """
    import onnx

    pairs: dict[str, Mapping[str, str]] = {}
    taps: dict[str, Session] = {}
    for result in built:
        if result.runnable is None or not any(d.quantized for d in result.decisions):
            continue
        model = onnx.load(result.runnable)
        shared = shared_tensors(loaded.model, model)
        if shared:  # a fake-quant model has no DequantizeLinear
            tapped = with_outputs(model, shared.values())
            pairs[result.target] = shared
            taps[result.target] = _sleeping(tapped, stand_in=result.target not in engines)
    if not taps:
        return Inside()
    tensors = dict.fromkeys(name for own in pairs.values() for name in own)
    reference = _sleeping(with_outputs(loaded.model, tensors))
    figures = {name: TensorComparison(own) for name, own in pairs.items()}
    kept = []
    for sample in over.feed.first(min(_LAYER_SAMPLES, over.samples)):
        left = reference.run(sample)
        kept.append({spec.name: left[spec.name] for spec in loaded.outputs})
        for name, tap in list(taps.items()):
            try:
                figures[name].add(sample, left, tap.run(sample))
            except BackendError:  # what is wrong with it is told of the engine itself
                del taps[name], figures[name]
    return Inside({name: one.result() for name, one in figures.items()}, tuple(kept))


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is judged: the engine, or the model that stands in for it.

    Attributes:
        alone: whether the session takes one sample at a time, as one of a device does.
    """

    session: Session
    alone: bool


def candidates_of(
    built: Sequence[Built], engines: Mapping[str, Session | None], failed: dict[str, str]
) -> dict[str, Candidate]:
    """Target -> what can be run of it here; why not is added to `failed`."""
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
            found[result.target] = Candidate(_sleeping(path, stand_in=stand_in), alone=False)
        except BackendError as error:
            failed[result.target] = str(error)
    return found


@dataclass(slots=True)
class Judged:
    """What the evaluation pass gives.

    Attributes:
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
    original: bytes,
    candidates: Mapping[str, Candidate],
    over: Evaluation,
    inside: Inside,
    *,
    threads: int,
) -> Judged:
    """One pass over the evaluation samples through the `original` model and every candidate."""
    found = Judged()
    if not candidates:
        return found
    reference = _sleeping(original)
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
        known = number <= len(inside.reference)
        ran = _Ran(sample, inside.reference[number - 1] if known else reference.run(sample))
        for name, one in candidates.items():
            if not one.alone:
                attempt(name, sample, ran)
        return ran

    looks = Looks(over.feed)

    def take(_: int, ran: _Ran) -> None:
        found.reference_runs += 1
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
        metric: the user's figure.
    """

    feed: Samples
    samples: int
    most: int
    labels: Sequence[int] | GroundTruth | None
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
    calibration: Samples,
    evaluation: Samples | None,
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
) -> Evaluation:
    """The evaluation feed, or else some of the calibration images, without labels."""
    if evaluation is not None:
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
    return Evaluation(
        feed=calibration,
        samples=min(CALIBRATION_SAMPLES, len(calibration)),
        most=min(CALIBRATION_SAMPLES, calibration.count),
        labels=None,
        metric=metric,
    )


def float_model(loaded: LoadedModel) -> bytes:
    """The user's own file as it was loaded, so that its speed is what is compared with.

    With names of their own for nodes that share one, which ONNX Runtime does not load.

    Not a float16 file: the CPU casts around its nodes, and int8 would look better than it is. Nor
    one with nodes that ONNX Runtime does not know: the part before them stands for it. Of a Q/DQ
    model it is the float model that was taken out of it.

    Raises:
        ModelError: the file changed since.
    """
    if loaded.widened or loaded.behind is not None or loaded.trained is not None:
        return bytes(loaded.model.SerializeToString())
    data = file_of(loaded)
    if not loaded.renamed:
        return data
    given = parse_model(data, str(loaded.source))
    name_nodes(given.graph)
    return bytes(given.SerializeToString())
