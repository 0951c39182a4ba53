"""Speed and accuracy of what was built, side by side with the float model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deploy.errors import BackendError, SdkMissingError
from deploy.graph.saturation import Bounds, bounds
from deploy.judge import candidates_of, evaluation_of, float_model, judge, look_inside
from deploy.metrics.accuracy import Accuracy, OutputAccuracy
from deploy.metrics.latency import Latency, measure
from deploy.metrics.precision import GroundTruth
from deploy.metrics.tasks import Metric
from deploy.ort import OrtSession
from deploy.report import EngineRow
from deploy.targets.base import Built, Target
from deploy.tensors import Samples, Session

if TYPE_CHECKING:
    from calibrators.scales import Scale
    from deploy.frontends import LoadedModel

_FEEDS = 8  # different inputs that the latency runs use in turn


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
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
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
        metric: the user's figure.
        duration_s: seconds of latency runs a model; 0 leaves them out.
        threads: threads inside one inference.
        progress: draw bars on stderr.

    Raises:
        ModelError: the float model's file changed since it was loaded.
        FeedError: an image cannot be fed, or changed.
    """
    over = evaluation_of(calibration, evaluation, labels, metric)
    original = float_model(loaded)
    timed: dict[str, _Timed] = {"FP32": _timed(lambda: OrtSession.open(original, threads=threads))}
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
    engines = {
        name: one.session if one.on_device else None
        for name, one in timed.items()
        if name != "FP32" and loaded.behind is None  # else its outputs are others
    }
    inside = look_inside(loaded, sound, engines, over)
    candidates = candidates_of(sound, engines, failed)
    judged = judge(original, candidates, over, inside, threads=threads, progress=progress)
    failed |= judged.failed
    sessions = {
        name: one.session
        for name, one in timed.items()
        if one.session is not None and name not in failed
    }
    latency = _latencies(sessions, calibration, duration_s, progress)
    limits = bounds(loaded.model)
    clamped = {result.target: _clamped(limits, result.ranges) for result in sound}
    layers = {
        name: tuple(layer for layer in found if layer.name not in clamped[name])
        for name, found in inside.layers.items()
        if name not in failed
    }
    first = EngineRow(
        label="FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=len(original),
        load_ms=timed["FP32"].load_ms,
        threads=threads,
        latency=latency.get("FP32"),
    )
    rows = [
        EngineRow(
            label=result.word if len(built) == 1 else result.target,
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


def _clamped(limits: Mapping[str, Bounds], ranges: Mapping[str, Scale]) -> set[str]:
    """Tensors that are far off by design, where their readers do not look."""
    own = {name: ranges.get(name) for name in limits}
    return {
        name
        for name, scale in own.items()
        if scale is None
        or scale.observed_min < limits[name][0]
        or scale.observed_max > limits[name][1]
    }


def _engine(target: Target, built: Built, threads: int) -> _Timed | None:
    """The engine; None where there is none, or it was built for another machine."""
    path = built.engine
    if path is None:
        return None
    try:
        return _timed(lambda: target.open(path, threads=threads))
    except SdkMissingError:
        return None


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
