"""Speed and accuracy of what was built, side by side with the float model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.reference import FloatOutputs, alike
from deploy.errors import BackendError, SdkMissingError
from deploy.feed.evaluation import Part
from deploy.graph.bounds import Bounds, bounds
from deploy.machine import Device
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import devices_of, layers_of
from deploy.metrics.latency import DeviceSession, Latency, measure
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.precision import GroundTruth
from deploy.metrics.tasks import Metric
from deploy.metrics.tasks.task import Example
from deploy.pipeline.judge import (
    Candidate,
    Evaluation,
    Inside,
    candidates_of,
    evaluation_of,
    float_model,
    judge,
    sleeping,
)
from deploy.report import EngineRow
from deploy.report.figures import ran_part
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import Built, Target
from deploy.tensors import Array, Samples, Session
from deploy.terminal import phase

if TYPE_CHECKING:
    from calibrators.scales import Scale
    from deploy.frontends import LoadedModel

_FEEDS = 8  # different inputs that the latency runs use in turn
_SAME_DB = 100.0  # of a state: what ONNX Runtime computes in another order is no loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        engines: the float model first, then each target's: its baselines before its own.
        layers: target -> its inner tensors against the float model's.
        failed: target or baseline -> why its engine could not be run, as a sentence.
        notes: sentences on how the figures came about.
        devices: accelerators that engines ran on.
        decodes: images read for the evaluation alone.
        reference_runs: inferences of the float model for the accuracy figures.
        engine_runs: target -> inferences for the same.
        examples: target -> a few samples where it and the float model differ most.
        looks: number of each of them -> its name and picture, uint8 [h, w, 3].
    """

    engines: tuple[EngineRow, ...]
    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    decodes: int = 0
    reference_runs: int = 0
    engine_runs: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    looks: Mapping[int, tuple[str, Array]] = field(default_factory=dict)


def measured(
    loaded: LoadedModel,
    targets: Sequence[Target],
    built: Sequence[Built],
    *,
    calibration: Part,
    evaluation: Samples | None,
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
    outputs: FloatOutputs | None = None,
    duration_s: float,
    threads: int,
) -> Figures:
    """Compare every engine with the float model, in outputs and in latency.

    Each engine runs every sample that judges once, the float model those whose outputs were not
    kept; the figures of inner tensors come from a few of these samples.

    Args:
        loaded: the float model.
        targets: the targets.
        built: what each of them made, in the same order.
        calibration: some of the calibration samples; they stand in for missing evaluation ones.
        evaluation: samples for the accuracy figures.
        labels: class of each evaluation sample.
        metric: the user's figure.
        outputs: what the float model said of the calibration samples, as far as it was kept; None
            where what was observed is not the model that was loaded.
        duration_s: seconds of latency runs a model; 0 leaves them out.
        threads: threads inside one inference.

    Raises:
        ModelError: the float model's file changed since it was loaded.
        FeedError: an image cannot be fed, or changed.
    """
    over = evaluation_of(calibration, evaluation, labels, metric)
    original = float_model(loaded)
    alone = duration_s <= 0  # nothing but judging is done with what is opened
    usual = partial(OrtSession.open, original, threads=threads)
    own = _timed(partial(sleeping, original) if alone else usual)
    itself = _itself(loaded, (own.session if alone else None) or original, over)
    timed = {"FP32": replace(own, session=None) if alone else own}
    failed = _open_engines(timed, targets, built, threads=threads, alone=alone)
    sound = [result for result in built if result.target not in failed]
    engines = {
        name: one.session if one.on_device else None
        for name, one in timed.items()
        if name != "FP32" and loaded.behind is None  # else its outputs are others
    }
    same, known = _same_model(itself, over, outputs)
    asked = itself.runs
    reference = outputs if outputs is not None and known else itself
    del own, itself  # a session that is needed no more lets go of its weights
    with phase("layers"):
        inside = Inside(loaded, sound, engines, over.samples, speaks=same)
    opened = {name: one.session for name, one in timed.items() if one.session and one.judges}
    candidates = candidates_of(sound, engines, opened, failed) | _alone(engines, sound)
    judged = judge(reference, candidates, over, inside, threads=threads)
    failed |= judged.failed
    sessions = {
        name: one.session
        for name, one in timed.items()
        if one.session is not None and name not in failed and not one.judges
    }
    latency = _latencies(sessions, calibration, duration_s)
    seen = _Seen(timed, sessions, latency, judged.accuracy, failed, threads)
    devices = devices_of(sessions)
    first = _first_row(loaded, seen, size=len(original), devices=bool(devices))
    rows = [row for result in built for row in _rows(result, seen, alone=len(built) == 1)]
    return Figures(
        engines=(first, *rows),
        layers=_telling(inside, loaded, [one for one in sound if one.target not in failed]),
        failed=failed,
        notes=(
            *_notes(judged.accuracy, evaluation, calibration, inside.samples),
            *_as_constants(loaded, latency),
        ),
        devices=devices,
        decodes=0 if evaluation is None else evaluation.decodes,
        reference_runs=asked + judged.reference_runs,
        engine_runs=judged.engine_runs,
        examples=judged.examples,
        looks=judged.looks,
    )


def unmeasured(loaded: LoadedModel, built: Sequence[Built]) -> Figures:
    """The engines of a build without images: their files, and no figure of how they run."""
    size = len(float_model(loaded))
    first = EngineRow(label="FP32", reference=True, path=None, size_bytes=size)
    nothing = _Seen({}, {}, {}, {}, {}, None)
    rows = [row for one in built for row in _rows(one, nothing, alone=len(built) == 1)]
    return Figures(engines=(first, *rows))


@dataclass(frozen=True, slots=True)
class _Timed:
    """A session as a user would open it, and what opening took.

    Attributes:
        session: None once it was closed.
        on_device: whether another runtime than ONNX Runtime runs it.
        judges: whether it is opened to judge alone: in one thread, and not to be timed.
    """

    session: Session | None
    load_ms: float
    on_device: bool
    judges: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was found of the engines, by their names."""

    timed: Mapping[str, _Timed]
    sessions: Mapping[str, Session]
    latency: Mapping[str, Latency]
    accuracy: Mapping[str, Accuracy]
    failed: Mapping[str, str]
    threads: int | None


def _first_row(loaded: LoadedModel, seen: _Seen, *, size: int, devices: bool) -> EngineRow:
    """The float model's, which runs on the CPU whatever device runs others."""
    return EngineRow(
        label="FP32 on the CPU" if devices else "FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=size,
        load_ms=seen.timed["FP32"].load_ms,
        threads=seen.threads,
        latency=seen.latency.get("FP32"),
    )


def _rows(built: Built, seen: _Seen, *, alone: bool) -> Iterator[EngineRow]:
    """The row of a target's engine, after those of its baselines."""
    paths: dict[str, Path | None] = {**built.baselines, built.target: built.engine}
    for name, path in paths.items():
        own = name == built.target
        layers = layers_of(seen.sessions.get(name))
        yield EngineRow(
            label=built.word if own and alone else name,
            baseline=not own,
            target=built.target,
            path=str(path) if path else None,
            size_bytes=path.stat().st_size if path else None,
            load_ms=seen.timed[name].load_ms if name in seen.timed else None,
            threads=seen.threads,
            latency=seen.latency.get(name),
            accuracy=seen.accuracy.get(name),
            ran=ran_part(layers, built.decisions if own else ()),
            notes=(seen.failed[name],) if name in seen.failed and not own else (),
        )


def _open_engines(
    timed: dict[str, _Timed],
    targets: Sequence[Target],
    built: Sequence[Built],
    *,
    threads: int,
    alone: bool,
) -> dict[str, str]:
    """Open all that was built, beside what is in `timed`; gives why some cannot be, by name."""
    failed = {}
    for target, result in zip(targets, built, strict=True):
        for label, path in _engines_of(result).items():
            judges = alone and target.runs_here and path == result.runnable
            usual = partial(target.open, path, threads=threads)
            try:
                one = _timed(partial(sleeping, path) if judges else usual)
            except SdkMissingError:
                continue  # built for another machine
            except BackendError as error:
                failed[label] = str(error)
                continue
            closed = alone and not judges and not one.on_device
            timed[label] = replace(one, session=None if closed else one.session, judges=judges)
    return failed


@phase("loading the engines")
def _timed(make: Callable[[], Session]) -> _Timed:
    start = time.perf_counter()
    session = make()
    taken = (time.perf_counter() - start) * 1e3
    return _Timed(session, taken, not isinstance(session, OrtSession))


def _telling(
    inside: Inside, loaded: LoadedModel, built: Sequence[Built]
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Target -> the inner tensors whose figures tell of a loss."""
    limits, found = bounds(loaded.model), inside.layers
    clamped = {one.target: _clamped(limits, one.ranges) for one in built}
    return {
        name: tuple(layer for layer in found[name] if layer.name not in beyond)
        for name, beyond in clamped.items()
        if name in found
    }


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


def _engines_of(built: Built) -> dict[str, Path]:
    """Name -> engine: the baselines by their labels, the target's own by the target's name."""
    own = {} if built.engine is None else {built.target: built.engine}
    return {**built.baselines, **own}


def _alone(engines: Mapping[str, Session | None], built: Sequence[Built]) -> dict[str, Candidate]:
    """The baselines, which are judged as the engines of a device."""
    labels = {label for result in built for label in result.baselines}
    found = {label: engines.get(label) for label in labels}
    return {n: Candidate(session, alone=True) for n, session in found.items() if session}


def _latencies(
    sessions: Mapping[str, Session], calibration: Samples, duration_s: float
) -> dict[str, Latency]:
    """Times of all sessions; a device's in rounds of their own, as it would cool down meanwhile."""
    if duration_s <= 0:
        return {}
    feeds = calibration.first(_FEEDS)
    device = {name: one for name, one in sessions.items() if isinstance(one, DeviceSession)}
    host = {name: one for name, one in sessions.items() if name not in device}
    groups = [group for group in (host, device) if group]
    found = [measure(one, feeds, duration_s=duration_s) for one in groups]
    return {name: latency for each in found for name, latency in each.items()}


def _itself(loaded: LoadedModel, original: Session | bytes, over: Evaluation) -> FloatOutputs:
    """The user's own file, run when it is asked."""

    def opened() -> Session:
        return sleeping(original) if isinstance(original, bytes) else original

    first = over.feed.keys[:1] if isinstance(over.feed, Part) else ()
    return FloatOutputs(opened, [spec.name for spec in loaded.outputs], first)


def _same_model(
    itself: FloatOutputs, over: Evaluation, outputs: FloatOutputs | None
) -> tuple[bool, bool]:
    """Whether what was observed says the same as the user's own file; whether its word was kept.

    It is the cleaned model. Where its outputs were kept, the file is asked of the first sample too.
    """
    keys = over.feed.keys[:1] if isinstance(over.feed, Part) else ()
    if outputs is None or not keys or keys[0] not in outputs:
        return outputs is not None, False
    (first,) = over.feed.first(1)
    same = alike(itself.of(keys[0], first), outputs.of(keys[0], first))
    return same, same


def _notes(
    accuracy: Mapping[str, Accuracy], evaluation: Samples | None, calibration: Part, inside: int
) -> tuple[str, ...]:
    """What the figures stand on."""
    if not accuracy:
        return ()
    states = tuple(_states(accuracy.values()))
    count = next(iter(accuracy.values())).samples
    layers = f"that of inner tensors on {inside} of these" if inside else ""
    if evaluation is not None:
        over = f"accuracy was measured on {count} evaluation images, {layers}"
        return (over, *states) if layers else states
    said = f"accuracy was measured on {count} of the calibration images{layers and f', {layers}'}"
    found = [f"{said}; --eval-images gives others, which tell more"]
    if calibration.labelled:
        found.append("labels of images that calibrate are not used; --eval-images takes both")
    return (*found, *states)


def _states(found: Iterable[Accuracy]) -> Iterator[str]:
    """That what a state loses from call to call is not seen where each call is fed by itself."""
    lost = {
        (output.name, one.carried[output.name])
        for one in found
        for output in one.outputs
        if output.name in one.carried and not output.sqnr_db >= _SAME_DB
    }
    if lost:
        pairs = ", ".join(f"{name} like {source}" for name, source in sorted(lost))
        yield (
            f"some outputs are what the next call is fed ({pairs}): here every call got what was"
            " fed, so that what int8 loses from call to call is not in these figures; compare"
            " whole sequences too"
        )


def _as_constants(loaded: LoadedModel, latency: Mapping[str, Latency]) -> Iterator[str]:
    """That the float model was timed without what its file does to its speed."""
    if loaded.listed and "FP32" in latency:
        some = "1 weight" if loaded.listed == 1 else f"{loaded.listed} weights"
        yield (
            f"FP32 was timed with constants for {some} that the file lists as inputs: ONNX Runtime"
            " optimizes no layer whose weights may be fed, so the file itself is likely slower;"
            " export it again with constants (keep_initializers_as_inputs=False)"
        )
