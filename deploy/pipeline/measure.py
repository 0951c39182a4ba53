"""Measure speed and accuracy of the built engines, beside the float model."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from deploy.calibration.reference_outputs import ReferenceOutputs, outputs_match
from deploy.errors import BackendError, SdkMissingError
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel
from deploy.graph.bounds import find_bounds
from deploy.machine import AcceleratorInfo
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import find_devices, read_engine_layers
from deploy.metrics.latency import DeviceSession, Latency, measure
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.precision import GroundTruth
from deploy.pipeline.evaluate import (
    Candidate,
    Evaluation,
    InnerTensors,
    evaluate,
    evaluation_of,
    find_candidates,
    float_model,
    open_single_thread,
)
from deploy.report.figures import compare_with_plan
from deploy.report.parts import EngineRow
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildResult, Target
from deploy.tasks import Metric
from deploy.tasks.evaluation_task import Example
from deploy.tensors import Array, Session
from deploy.terminal import phase

_FEEDS = 8  # samples that the latency runs use in turn
_SAME_DB = 100.0  # SQNR of a state above which it lost nothing: summation order differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Speed and accuracy of all engines.

    Attributes:
        engines: the float model first, then each target's baselines and its own engine.
        layers: target -> its inner tensors compared with the float model's.
        decodes: number of images decoded for the evaluation only.
        looks: sample number -> name and picture of each example, uint8 [h, w, 3].
    """

    engines: tuple[EngineRow, ...]
    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    devices: tuple[AcceleratorInfo, ...] = ()
    decodes: int = 0
    reference_runs: int = 0
    engine_runs: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    looks: Mapping[int, tuple[str, Array]] = field(default_factory=dict)


def measure_engines(
    loaded: LoadedModel,
    targets: Sequence[Target],
    built: Sequence[BuildResult],
    *,
    calibration: EvaluationSubset,
    evaluation: Feed | EvaluationSubset | None,
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
    outputs: ReferenceOutputs | None = None,
    duration_s: float,
    threads: int,
) -> Figures:
    """Compare every engine with the float model, in outputs and in latency.

    Each engine runs every evaluation sample once, the float model only those whose outputs were
    not stored; inner tensors are compared on a few of these samples.

    `calibration`: calibration samples, used if there are no evaluation samples.
    `outputs`: stored outputs of the float model on the calibration samples; None if another model
    was observed than the one loaded.
    `duration_s`: seconds of latency runs a model; 0 leaves them out.
    `threads`: threads inside one inference.

    Raises:
        ModelError: the float model's file changed since it was loaded.
        FeedError: an image cannot be fed, or changed.
    """
    over = evaluation_of(calibration, evaluation, labels, metric)
    original = float_model(loaded)
    alone = duration_s <= 0  # the sessions are used for accuracy only
    usual = partial(OrtSession.open, original, threads=threads)
    own = _timed(partial(open_single_thread, original) if alone else usual)
    itself = _reference_of(loaded, (own.session if alone else None) or original, over)
    timed = {"FP32": replace(own, session=None) if alone else own}
    failed = _open_engines(timed, targets, built, threads=threads, alone=alone)
    sound = [result for result in built if result.target not in failed]
    engines = {
        name: one.session if one.on_device else None
        for name, one in timed.items()
        if name != "FP32" and loaded.cut_off is None  # else the engine has other outputs
    }
    same, known = _same_model(itself, over, outputs)
    asked = itself.runs
    reference = outputs if outputs is not None and known else itself
    del own, itself  # frees the weights of sessions that are no longer needed
    with phase("layers"):
        inside = InnerTensors(loaded, sound, engines, over.samples, speaks=same)
    opened = {name: one.session for name, one in timed.items() if one.session and one.judges}
    candidates = find_candidates(sound, engines, opened, failed)
    baselines = {label: engines.get(label) for result in sound for label in result.baselines}
    candidates |= {n: Candidate(one, alone=True) for n, one in baselines.items() if one}
    judged = evaluate(reference, candidates, over, inside, threads=threads)
    failed |= judged.failed
    sessions = {
        name: one.session
        for name, one in timed.items()
        if one.session is not None and name not in failed and not one.judges
    }
    latency = _latencies(sessions, calibration, duration_s)
    seen = _Results(timed, sessions, latency, judged.accuracy, failed, threads)
    devices = find_devices(sessions)
    first = EngineRow(  # the float model runs on the CPU even if a device runs the others
        label="FP32 on the CPU" if devices else "FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=len(original),
        load_ms=timed["FP32"].load_ms,
        threads=threads,
        latency=latency.get("FP32"),
    )
    rows = [row for result in built for row in _rows(result, seen, alone=len(built) == 1)]
    return Figures(
        engines=(first, *rows),
        layers=_lossy_layers(inside, loaded, [one for one in sound if one.target not in failed]),
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


def unmeasured_figures(loaded: LoadedModel, built: Sequence[BuildResult]) -> Figures:
    """The engines of a build without images: their files, without figures."""
    size = len(float_model(loaded))
    first = EngineRow(label="FP32", reference=True, path=None, size_bytes=size)
    nothing = _Results({}, {}, {}, {}, {}, None)
    rows = [row for one in built for row in _rows(one, nothing, alone=len(built) == 1)]
    return Figures(engines=(first, *rows))


@dataclass(frozen=True, slots=True)
class _Timed:
    """A session as a user would open it, and its loading time.

    Attributes:
        session: None once it was closed.
        on_device: whether another runtime than ONNX Runtime runs it.
        judges: whether it is opened for accuracy only: in one thread, and not timed.
    """

    session: Session | None
    load_ms: float
    on_device: bool
    judges: bool = False


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of the engines, by their names."""

    timed: Mapping[str, _Timed]
    sessions: Mapping[str, Session]
    latency: Mapping[str, Latency]
    accuracy: Mapping[str, Accuracy]
    failed: Mapping[str, str]
    threads: int | None


def _rows(built: BuildResult, seen: _Results, *, alone: bool) -> Iterator[EngineRow]:
    """The rows of a target's baselines and of its engine."""
    paths: dict[str, Path | None] = {**built.baselines, built.target: built.engine}
    if built.target in seen.failed:
        paths = dict.fromkeys(paths)  # `discard_failed` removes the files
    for name, path in paths.items():
        own = name == built.target
        layers = read_engine_layers(seen.sessions.get(name))
        yield EngineRow(
            label=built.precision if own and alone else name,
            baseline=not own,
            target=built.target,
            path=str(path) if path else None,
            size_bytes=path.stat().st_size if path else None,
            load_ms=seen.timed[name].load_ms if name in seen.timed else None,
            threads=seen.threads,
            latency=seen.latency.get(name),
            accuracy=seen.accuracy.get(name),
            ran=compare_with_plan(layers, built.decisions if own else ()),
            notes=(seen.failed[name],) if name in seen.failed and not own else (),
        )


def _open_engines(
    timed: dict[str, _Timed],
    targets: Sequence[Target],
    built: Sequence[BuildResult],
    *,
    threads: int,
    alone: bool,
) -> dict[str, str]:
    """Open all engines and add them to `timed`; return name -> why it cannot be opened."""
    failed = {}
    for target, result in zip(targets, built, strict=True):
        own = {} if result.engine is None else {result.target: result.engine}
        for label, path in {**result.baselines, **own}.items():
            judges = alone and target.runs_here and path == result.runnable
            usual = partial(target.open, path, threads=threads)
            try:
                one = _timed(partial(open_single_thread, path) if judges else usual)
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


def _lossy_layers(
    inside: InnerTensors, loaded: LoadedModel, built: Sequence[BuildResult]
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Target -> inner tensors whose figures show a loss."""
    limits, found, lossy = find_bounds(loaded.model), inside.layers, {}
    for one in built:
        clamped = {  # by design, where their readers cannot tell values apart
            name
            for name, (low, high) in limits.items()
            if (scale := one.ranges.get(name)) is None
            or scale.observed_min < low
            or scale.observed_max > high
        }
        if one.target in found:
            own = found[one.target]
            lossy[one.target] = tuple(layer for layer in own if layer.name not in clamped)
    return lossy


def _latencies(
    sessions: Mapping[str, Session], calibration: Feed | EvaluationSubset, duration_s: float
) -> dict[str, Latency]:
    """Latency of all sessions; devices are timed separately, so that they do not cool down."""
    if duration_s <= 0:
        return {}
    feeds = calibration.first(_FEEDS)
    device = {name: one for name, one in sessions.items() if isinstance(one, DeviceSession)}
    host = {name: one for name, one in sessions.items() if name not in device}
    groups = [group for group in (host, device) if group]
    found = [measure(one, feeds, duration_s=duration_s) for one in groups]
    return {name: latency for each in found for name, latency in each.items()}


def _reference_of(
    loaded: LoadedModel, original: Session | bytes, over: Evaluation
) -> ReferenceOutputs:
    """Outputs of the user's own file, run on demand."""

    def opened() -> Session:
        return open_single_thread(original) if isinstance(original, bytes) else original

    first = over.feed.keys[:1] if isinstance(over.feed, EvaluationSubset) else ()
    return ReferenceOutputs(opened, [spec.name for spec in loaded.outputs], first)


def _same_model(
    itself: ReferenceOutputs, over: Evaluation, outputs: ReferenceOutputs | None
) -> tuple[bool, bool]:
    """Return (equal, stored) for the cleaned model that was observed.

    equal: it reproduces the user's own file on the first sample. stored: its outputs of that
    sample were stored, so they can serve as the reference.
    """
    keys = over.feed.keys[:1] if isinstance(over.feed, EvaluationSubset) else ()
    if outputs is None or not keys or keys[0] not in outputs:
        return outputs is not None, False
    (first,) = over.feed.first(1)
    same = outputs_match(itself.get(keys[0], first), outputs.get(keys[0], first))
    return same, same


def _notes(
    accuracy: Mapping[str, Accuracy],
    evaluation: Feed | EvaluationSubset | None,
    calibration: EvaluationSubset,
    inside: int,
) -> tuple[str, ...]:
    """Notes on which samples the figures stand on."""
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
    """A note that errors which add up in states from call to call are not measured."""
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
    """A note that the float model was timed with constants its file lists as inputs."""
    if loaded.fed_weights and "FP32" in latency:
        some = "1 weight" if loaded.fed_weights == 1 else f"{loaded.fed_weights} weights"
        yield (
            f"FP32 was timed with constants for {some} that the file lists as inputs: ONNX Runtime"
            " optimizes no layer whose weights may be fed, so the file itself is likely slower;"
            " export it again with constants (keep_initializers_as_inputs=False)"
        )
