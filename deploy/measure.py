"""Speed and accuracy of what was built, side by side with the float model."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

from deploy.errors import BackendError, SdkMissingError
from deploy.graph.edit import with_outputs
from deploy.graph.saturation import bounds
from deploy.metrics.accuracy import Accuracy, Comparison, OutputAccuracy, TensorComparison
from deploy.metrics.latency import Latency, measure
from deploy.metrics.layerwise import shared_tensors
from deploy.ort import OrtSession
from deploy.progress import bar
from deploy.report import EngineRow
from deploy.targets.base import Built, Target
from deploy.tensors import Samples, Session

if TYPE_CHECKING:
    from deploy.frontends import LoadedModel

_FEEDS = 8  # different inputs that the latency runs use in turn
_LAYER_SAMPLES = 8  # samples for the figures of inner tensors, which keep them all in memory
_CALIBRATION_SAMPLES = 100  # of the calibration images, where no evaluation images are given

T = TypeVar("T")


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

    The float model and each engine run every evaluation sample once, one after the other; the
    figures of inner tensors come from the first few of these runs.

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
    reference, load_ms = _timed(lambda: OrtSession.open(_float_model(loaded), threads=threads))
    failed: dict[str, str] = {}
    candidates: dict[str, _Candidate] = {}
    for target, result in zip(targets, built, strict=True):
        try:
            found = _candidate(loaded, target, result, threads)
        except BackendError as error:
            failed[result.target] = str(error)
            continue
        if found is not None:
            candidates[result.target] = found
    over = _evaluation(calibration, evaluation, labels)
    judged = _judged(loaded, reference, candidates, over, threads=threads, progress=progress)
    failed |= judged.failed
    sound = {name: one for name, one in candidates.items() if name not in failed}
    on_device = {name: one.session for name, one in sound.items() if one.engine}
    latency = _latencies({"FP32": reference, **on_device}, calibration, duration_s, progress)
    clamped = bounds(loaded.model)  # far off by design, where their readers do not look
    layers = {
        name: tuple(layer for layer in found if layer.name not in clamped)
        for name, found in judged.layers.items()
    }
    first = EngineRow(
        label="FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=_size(loaded),
        load_ms=load_ms,
        threads=threads,
        latency=latency.get("FP32"),
    )
    rows = [
        EngineRow(
            label="int8" if len(built) == 1 else result.target,
            target=result.target,
            path=str(result.engine) if result.engine else None,
            size_bytes=result.engine.stat().st_size if result.engine else None,
            load_ms=sound[result.target].load_ms if result.target in sound else None,
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
class _Candidate:
    """An engine, or the model that stands in for it, ready to run.

    Attributes:
        load_ms: of the engine; None for a stand-in.
        engine: whether it is the engine itself.
        pairs: inner tensors to compare, reference's name -> candidate's.
        tap: a session with those tensors as outputs; None where there are none.
    """

    session: Session
    load_ms: float | None
    engine: bool
    pairs: Mapping[str, str]
    tap: Session | None


def _candidate(
    loaded: LoadedModel, target: Target, built: Built, threads: int
) -> _Candidate | None:
    """None where nothing of this target can be run here."""
    import onnx

    session, load_ms = _runnable(target, built, threads)
    if session is None:
        return None
    pairs: dict[str, str] = {}
    tap: Session | None = None
    if built.runnable is not None and any(d.int8 for d in built.decisions):
        model = onnx.load(built.runnable)
        pairs = shared_tensors(loaded.model, model)
        if pairs:  # a fake-quant model has no DequantizeLinear
            tap = OrtSession.open(with_outputs(model, pairs.values()), threads=threads)
    return _Candidate(session, load_ms, load_ms is not None, pairs, tap)


@dataclass(slots=True)
class _Judged:
    """What the evaluation pass gives."""

    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    layers: dict[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Counter[str] = field(default_factory=Counter)


def _judged(
    loaded: LoadedModel,
    reference: Session,
    candidates: Mapping[str, _Candidate],
    over: _Evaluation,
    *,
    threads: int,
    progress: bool,
) -> _Judged:
    """One pass over the evaluation samples through the float model and every candidate."""
    found = _Judged()
    if not candidates:
        return found
    figures = {
        name: Comparison(reference, one.session, labels=over.labels)
        for name, one in candidates.items()
    }
    inner = {name: TensorComparison(one.pairs) for name, one in candidates.items() if one.tap}
    tapped = _tapped(loaded, candidates, threads) if inner else reference
    with bar("comparing", over.samples, shown=progress) as step, over.feed.samples() as samples:
        for number, sample in enumerate(itertools.islice(samples, over.samples)):
            looks_inside = number < _LAYER_SAMPLES
            left = (tapped if looks_inside else reference).run(sample)
            found.reference_runs += 1
            for name, one in candidates.items():
                if name in found.failed:
                    continue
                found.engine_runs[name] += 1
                try:
                    right = one.session.run(sample)
                    figures[name].add(sample, left, right, count=over.count)
                    if one.tap and looks_inside:
                        inner[name].add(sample, left, one.tap.run(sample))
                except BackendError as error:
                    found.failed[name] = str(error)
            step()
    for name, figure in figures.items():
        if name not in found.failed:
            found.accuracy[name] = figure.result()
            if name in inner:
                found.layers[name] = inner[name].result()
    return found


def _tapped(loaded: LoadedModel, candidates: Mapping[str, _Candidate], threads: int) -> Session:
    """The float model with every tensor among its outputs that some candidate is judged by."""
    tensors = dict.fromkeys(name for one in candidates.values() for name in one.pairs)
    return OrtSession.open(with_outputs(loaded.model, tensors), threads=threads)


def _runnable(backend: Target, built: Built, threads: int) -> tuple[Session | None, float | None]:
    """A session on the engine, or else on the model that stands in for it, and its load time."""
    if built.engine is not None:
        engine = built.engine
        try:
            return _timed(lambda: backend.open(engine, threads=threads))
        except SdkMissingError:  # built for another machine; the stand-in still tells accuracy
            pass
    if built.runnable is None:
        return None, None
    stand_in = built.runnable
    return OrtSession.open(stand_in, threads=threads), None


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


def _timed(make: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    made = make()
    return made, (time.perf_counter() - start) * 1e3


def _float_model(loaded: LoadedModel) -> Path | bytes:
    """The user's own file where there is one, so that its speed is what is compared with."""
    if loaded.source is not None and loaded.source.suffix != ".py":
        return loaded.source
    return bytes(loaded.model.SerializeToString())


def _size(loaded: LoadedModel) -> int:
    float_model = _float_model(loaded)
    return len(float_model) if isinstance(float_model, bytes) else float_model.stat().st_size
