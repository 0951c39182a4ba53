"""Speed and accuracy of what was built, side by side with the float model."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from deploy.errors import BackendError, SdkMissingError
from deploy.feed.parallel import Sample, in_order
from deploy.graph.edit import with_outputs
from deploy.graph.saturation import bounds
from deploy.metrics.accuracy import Accuracy, Comparison, OutputAccuracy, TensorComparison
from deploy.metrics.latency import Latency, measure
from deploy.metrics.layerwise import shared_tensors
from deploy.ort import OrtSession
from deploy.progress import bar
from deploy.report import EngineRow
from deploy.targets.base import Built, Target
from deploy.tensors import Array, Samples, Session

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel

_FEEDS = 8  # different inputs that the latency runs use in turn
_LAYER_SAMPLES = 4  # samples for the figures of inner tensors, which keep them all in memory
_CALIBRATION_SAMPLES = 100  # of the calibration images, where no evaluation images are given


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        engines: the float model first, then one row a target.
        layers: target -> its inner tensors against the float model's.
        failed: target -> why its engine could not be run, as a sentence.
        notes: sentences on how the figures came about.
        decodes: images read for the evaluation alone.
        reference_runs: inferences of the float model for the accuracy figures.
        engine_runs: target -> inferences for the same.
    """

    engines: tuple[EngineRow, ...]
    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    decodes: int = 0
    reference_runs: int = 0
    engine_runs: Mapping[str, int] = field(default_factory=dict)


def measured(
    loaded: LoadedModel,
    targets: Sequence[Target],
    built: Sequence[Built],
    *,
    calibration: Samples,
    evaluation: Samples | None,
    labels: Sequence[int] | None,
    duration_s: float,
    threads: int,
    progress: bool,
) -> Figures:
    """Compare every engine with the float model, in outputs and in latency.

    The float model and each engine run every evaluation sample once; the figures of inner tensors
    come from the first few of them.

    Args:
        loaded: the float model.
        targets: the targets.
        built: what each of them made, in the same order.
        calibration: the calibration samples; some of them stand in for missing evaluation ones.
        evaluation: samples for the accuracy figures.
        labels: class of each evaluation sample.
        duration_s: seconds of latency runs a model; 0 leaves them out.
        threads: threads inside one inference.
        progress: draw bars on stderr.
    """
    over = _evaluation(calibration, evaluation, labels)
    timed: dict[str, _Timed] = {"FP32": _timed(lambda: _open(_float_model(loaded), threads))}
    failed: dict[str, str] = {}
    for target, result in zip(targets, built, strict=True):
        try:
            engine = _engine(target, result, threads)
        except BackendError as error:
            failed[result.target] = str(error)
            continue
        if engine is not None:
            timed[result.target] = engine
    if duration_s <= 0:  # those that ONNX Runtime runs were opened to be timed alone
        timed = {name: one.closed() for name, one in timed.items()}
    sound = [result for result in built if result.target not in failed]
    inside = _inside(loaded, sound, timed, over)
    candidates = _candidates(sound, timed, failed)
    judged = _judged(loaded, candidates, over, inside, threads=threads, progress=progress)
    failed |= judged.failed
    sessions = {
        name: one.session
        for name, one in timed.items()
        if one.session is not None and name not in failed
    }
    latency = _latencies(sessions, calibration, duration_s, progress)
    clamped = bounds(loaded.model)  # far off by design, where their readers do not look
    layers = {
        name: tuple(layer for layer in found if layer.name not in clamped)
        for name, found in inside.layers.items()
        if name not in failed
    }
    first = EngineRow(
        label="FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=_size(loaded),
        load_ms=timed["FP32"].load_ms,
        threads=threads,
        latency=latency.get("FP32"),
    )
    rows = [
        EngineRow(
            label="int8" if len(built) == 1 else result.target,
            target=result.target,
            path=str(result.engine) if result.engine else None,
            size_bytes=result.engine.stat().st_size if result.engine else None,
            load_ms=timed[result.target].load_ms if result.target in timed else None,
            threads=threads,
            latency=latency.get(result.target),
            accuracy=judged.accuracy.get(result.target),
        )
        for result in built
    ]
    return Figures(
        engines=(first, *rows),
        layers=layers,
        failed=failed,
        notes=_notes(judged.accuracy, evaluation),
        decodes=0 if evaluation is None else evaluation.decodes,
        reference_runs=judged.reference_runs,
        engine_runs=judged.engine_runs,
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    """A session as a user would open it, and what opening took.

    Attributes:
        session: None once it was closed.
        on_device: whether another runtime than ONNX Runtime runs it.
    """

    session: Session | None
    load_ms: float
    on_device: bool

    def closed(self) -> _Timed:
        """Without its session, but for one of a device, which is judged itself."""
        return self if self.on_device else replace(self, session=None)


def _timed(make: Callable[[], Session]) -> _Timed:
    start = time.perf_counter()
    session = make()
    taken = (time.perf_counter() - start) * 1e3
    return _Timed(session, taken, not isinstance(session, OrtSession))


def _engine(target: Target, built: Built, threads: int) -> _Timed | None:
    """The engine; None where there is none, or it was built for another machine."""
    path = built.engine
    if path is None:
        return None
    try:
        return _timed(lambda: target.open(path, threads=threads))
    except SdkMissingError:
        return None


def _open(model: Path | bytes, threads: int) -> Session:
    return OrtSession.open(model, threads=threads)


def _sleeping(model: Path | bytes | onnx.ModelProto, *, stand_in: bool = False) -> Session:
    """A session of one thread that wakes nobody: samples run beside each other instead."""
    return OrtSession.open(model, threads=1, spin=False, int8_kernels=not stand_in)


@dataclass(frozen=True, slots=True)
class _Inside:
    """Figures of inner tensors over the first few samples.

    Attributes:
        layers: target -> its figures.
        reference: the float model's outputs of these samples, so that it is not run again.
    """

    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    reference: tuple[Mapping[str, Array], ...] = ()


def _inside(
    loaded: LoadedModel, built: Sequence[Built], timed: Mapping[str, _Timed], over: _Evaluation
) -> _Inside:
    """Compare inner tensors; all of one sample's are in memory at a time, and no more."""
    import onnx

    pairs: dict[str, Mapping[str, str]] = {}
    taps: dict[str, Session] = {}
    for result in built:
        if result.runnable is None or not any(d.int8 for d in result.decisions):
            continue
        model = onnx.load(result.runnable)
        shared = shared_tensors(loaded.model, model)
        if shared:  # a fake-quant model has no DequantizeLinear
            tapped = with_outputs(model, shared.values())
            pairs[result.target] = shared
            taps[result.target] = _sleeping(tapped, stand_in=result.target not in timed)
    if not taps:
        return _Inside()
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
    return _Inside({name: one.result() for name, one in figures.items()}, tuple(kept))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What is judged: the engine, or the model that stands in for it.

    Attributes:
        alone: whether the session takes one sample at a time, as one of a device does.
    """

    session: Session
    alone: bool


def _candidates(
    built: Sequence[Built], timed: Mapping[str, _Timed], failed: dict[str, str]
) -> dict[str, _Candidate]:
    """Target -> what can be run of it here; why not is added to `failed`."""
    found = {}
    for result in built:
        engine = timed.get(result.target)
        if engine is not None and engine.on_device and engine.session is not None:
            found[result.target] = _Candidate(engine.session, alone=True)
            continue
        path = result.runnable if engine is None else result.engine
        if path is None:
            continue
        try:
            found[result.target] = _Candidate(_sleeping(path, stand_in=engine is None), alone=False)
        except BackendError as error:
            failed[result.target] = str(error)
    return found


@dataclass(slots=True)
class _Judged:
    """What the evaluation pass gives."""

    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Ran:
    """One sample's outputs: the float model's and each candidate's."""

    sample: Sample
    reference: Mapping[str, Array]
    outputs: dict[str, Mapping[str, Array]] = field(default_factory=dict)


def _judged(
    loaded: LoadedModel,
    candidates: Mapping[str, _Candidate],
    over: _Evaluation,
    inside: _Inside,
    *,
    threads: int,
    progress: bool,
) -> _Judged:
    """One pass over the evaluation samples through the float model and every candidate."""
    found = _Judged()
    if not candidates:
        return found
    reference = _sleeping(_float_model(loaded))
    figures = {
        name: Comparison(reference, one.session, labels=over.labels)
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

    def take(_: int, ran: _Ran) -> None:
        found.reference_runs += 1
        for name, one in candidates.items():
            if one.alone:
                attempt(name, ran.sample, ran)
            if name in ran.outputs:
                found.engine_runs[name] += 1
                figures[name].add(ran.sample, ran.reference, ran.outputs[name], count=over.count)
        step()

    with bar("comparing", over.samples, shown=progress) as step, over.feed.samples() as samples:
        in_order(itertools.islice(samples, over.samples), work, take, threads=threads)
    for name, figure in figures.items():
        if name not in found.failed:
            found.accuracy[name] = figure.result()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """What the engines are judged on.

    Attributes:
        samples: at most how many of the feed.
        most: at most how many images in them.
    """

    feed: Samples
    samples: int
    most: int
    labels: Sequence[int] | None

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


def _evaluation(
    calibration: Samples, evaluation: Samples | None, labels: Sequence[int] | None
) -> _Evaluation:
    """The evaluation feed, or else some of the calibration images, without labels."""
    if evaluation is not None:
        known = labels
        if labels is None and evaluation.labels is not None:
            known = _Labels(evaluation)
        return _Evaluation(
            feed=evaluation, samples=len(evaluation), most=evaluation.count, labels=known
        )
    return _Evaluation(
        feed=calibration,
        samples=min(_CALIBRATION_SAMPLES, len(calibration)),
        most=min(_CALIBRATION_SAMPLES, calibration.count),
        labels=None,
    )


def _latencies(
    sessions: Mapping[str, Session], calibration: Samples, duration_s: float, progress: bool
) -> dict[str, Latency]:
    if duration_s <= 0:
        return {}
    feeds = calibration.first(_FEEDS)
    return measure(sessions, feeds, duration_s=duration_s, progress=progress)


def _notes(accuracy: Mapping[str, Accuracy], evaluation: Samples | None) -> tuple[str, ...]:
    if evaluation is not None or not accuracy:
        return ()
    count = next(iter(accuracy.values())).samples
    return (
        f"accuracy was measured on {count} of the calibration images;"
        " --eval-images gives others, which tell more",
    )


def _float_model(loaded: LoadedModel) -> Path | bytes:
    """The user's own file where there is one, so that its speed is what is compared with."""
    if loaded.source is not None and loaded.source.suffix != ".py":
        return loaded.source
    return bytes(loaded.model.SerializeToString())


def _size(loaded: LoadedModel) -> int:
    float_model = _float_model(loaded)
    return len(float_model) if isinstance(float_model, bytes) else float_model.stat().st_size
