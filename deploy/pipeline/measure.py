"""Measure speed and accuracy of the built engines, compared with the float model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.calibration.reference_outputs import (
    EngineOutputs,
    ReferenceOutputs,
    open_single_thread,
    outputs_match,
)
from deploy.errors import BackendError, SdkMissingError, counted
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
    LAYER_SAMPLES,
    EngineSessions,
    Evaluation,
    EvaluationResult,
    InnerTensors,
    choose_evaluation,
    compare_inner_tensors,
    evaluate,
    find_candidates,
    find_stored_outputs,
)
from deploy.pipeline.float_reference import read_float_model
from deploy.report.figures import compare_with_plan
from deploy.report.parts import EngineRow
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildResult, Target
from deploy.tasks import Metric
from deploy.tensors import Session
from deploy.terminal import phase

_LATENCY_SAMPLES = 8  # samples that the latency runs use in turn
_LOSSLESS_DB = 100.0  # SQNR of a state above which it lost nothing: summation order differs
_FLOAT_ENGINE = "FP32"
ALL_CALIBRATED = "on calibration images"  # `Figures.calibrated` if all evaluation images calibrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Speed and accuracy of all engines.

    Attributes:
        engines: the float model first, then each target's baselines and its own engine.
        layers: target -> its inner tensors compared with the float model's.
        failures: engine -> why it cannot be opened or run.
        absent: engine -> the runtime or device that this machine lacks for it.
        notes: sentences on how the figures were measured.
        devices: devices that run engines.
        decodes: number of images decoded for the evaluation only.
        evaluation: the evaluation pass: its inferences, and the samples worth showing.
        calibrated: how many of the evaluation images calibrated, as text; "" for none.
        skipped: why evaluation images were skipped.
    """

    engines: tuple[EngineRow, ...]
    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    devices: tuple[AcceleratorInfo, ...] = ()
    decodes: int = 0
    evaluation: EvaluationResult = field(default_factory=EvaluationResult)
    calibrated: str = ""
    skipped: tuple[str, ...] = ()


def measure_engines(
    loaded: LoadedModel,
    targets: Sequence[Target],
    results: Sequence[BuildResult],
    *,
    calibration_samples: EvaluationSubset,
    evaluation_feed: Feed | None,
    objects: GroundTruth | None,
    metric: Metric | None = None,
    observed_outputs: ReferenceOutputs | None = None,
    engine_outputs: Mapping[str, EngineOutputs] | None = None,
    duration_s: float,
    threads: int,
) -> Figures:
    """Measure every engine's speed, and how far its outputs are from the float model's.

    Each engine runs every evaluation sample once. The float model runs only those whose outputs
    were not stored. Inner tensors are compared on a few of these samples.

    Args:
        loaded: the float model.
        targets: the targets of `results`, in the same order.
        results: files of each target.
        calibration_samples: inputs of the latency runs; without evaluation samples, also the
            samples to evaluate on.
        evaluation_feed: evaluation samples; None without.
        objects: annotated objects on the evaluation samples, in place of labels; None without.
        metric: the user's metric or task; None recognises the task.
        observed_outputs: outputs of the float model on the calibration samples, which were stored
            while it was calibrated; None if the calibration ran another model than `loaded`.
        engine_outputs: target -> outputs of its int8 model on calibration samples, which its search
            has stored; None for none.
        duration_s: seconds of latency runs a model; 0 leaves them out.
        threads: threads inside one inference.

    Raises:
        ModelError: the float model's file changed since it was loaded.
        FeedError: an image cannot be fed, or changed.
    """
    metric = metric or Metric(None, declared=loaded.declaration)
    evaluation = choose_evaluation(calibration_samples, evaluation_feed, objects, metric)
    is_timed = duration_s > 0  # else all sessions are for accuracy only
    float_engine, float_outputs, float_size = _open_float_model(
        loaded, evaluation, threads=threads, is_timed=is_timed
    )
    target_engines, failures, missing_runtimes = _open_engines(
        targets, results, threads=threads, is_timed=is_timed
    )

    # engines are compared with the float model; those of a Q/DQ model with that model itself
    qdq_outputs = _open_qdq_outputs(loaded)
    reference = qdq_outputs or _choose_reference(float_outputs, observed_outputs, evaluation)
    # inferences of the float model so far: none, or one to check the stored outputs
    check_run_count = float_outputs.runs
    float_outputs.close_session()  # frees its weights: stored outputs may suffice from here on

    # accuracy: of inner tensors on a few samples, of the outputs on all of them
    opened_results = [result for result in results if result.target not in failures]
    if evaluation_feed is not None:
        evaluation_feed.cache_samples(LAYER_SAMPLES)  # they are used twice, and decoded once
    # the search stored outputs of calibration samples, of no use on other evaluation samples
    stored_engine_outputs = engine_outputs if evaluation_feed is None else None
    inner_tensors, evaluation_result = _measure_accuracy(
        loaded,
        opened_results,
        target_engines,
        reference,
        evaluation,
        engine_outputs=stored_engine_outputs or {},
        threads=threads,
    )
    failures |= evaluation_result.failures
    # the evaluation has counted its own inferences of the float model. Add the others: that of
    # the check, and one for each sample whose inner tensors are compared
    evaluation_result.reference_runs += check_run_count + inner_tensors.sample_count

    # latency, when nothing else runs
    engines = {_FLOAT_ENGINE: float_engine, **target_engines}
    timed_sessions = _find_timed_sessions(engines, failures)
    latency = _measure_latency(timed_sessions, calibration_samples, duration_s)
    devices = find_devices(timed_sessions)
    measurements = _Measurements(
        engines=engines,
        timed_sessions=timed_sessions,
        latency=latency,
        accuracy=evaluation_result.accuracy,
        failures=failures,
        threads=threads,
    )

    float_row = _make_float_row(loaded, float_size, measurements, has_devices=bool(devices))
    evaluated_results = [result for result in opened_results if result.target not in failures]
    notes = (
        *_sample_notes(
            evaluation_result.accuracy,
            evaluation_feed,
            calibration_samples,
            inner_tensors.sample_count,
        ),
        *_weights_as_inputs_notes(loaded, latency),
        *_reference_notes(loaded, has_qdq_outputs=qdq_outputs is not None),
    )
    return Figures(
        engines=(float_row, *_make_rows(results, measurements)),
        layers=_find_lossy_layers(inner_tensors, loaded, evaluated_results),
        failures=failures,
        absent=missing_runtimes,
        notes=notes,
        devices=devices,
        decodes=0 if evaluation_feed is None else evaluation_feed.decodes,
        evaluation=evaluation_result,
    )


def _make_float_row(
    loaded: LoadedModel, size_bytes: int, measurements: _Measurements, *, has_devices: bool
) -> EngineRow:
    """Return the report's row of the float model, which runs on the CPU whatever the devices.

    Args:
        loaded: the float model.
        size_bytes: size of its file.
        measurements: figures of the engines.
        has_devices: whether other engines ran on devices.
    """
    return EngineRow(
        label="FP32 on the CPU" if has_devices else "FP32",
        reference=True,
        path=str(loaded.source) if loaded.source else None,
        size_bytes=size_bytes,
        load_ms=measurements.engines[_FLOAT_ENGINE].load_ms,
        threads=measurements.threads,
        latency=measurements.latency.get(_FLOAT_ENGINE),
    )


def list_engines(loaded: LoadedModel, results: Sequence[BuildResult]) -> Figures:
    """Return the engines of a build without images: their files, without figures."""
    size = len(read_float_model(loaded))
    float_row = EngineRow(label="FP32", reference=True, size_bytes=size)
    no_measurements = _Measurements(
        engines={}, timed_sessions={}, latency={}, accuracy={}, failures={}, threads=None
    )
    return Figures(engines=(float_row, *_make_rows(results, no_measurements)))


@dataclass(frozen=True, slots=True)
class _OpenedEngine:
    """An engine, and its loading time.

    Attributes:
        session: the session as a user would open it; None of the float model if its outputs own it.
        load_ms: the ms that opening it took.
        is_single_thread: whether it is opened in one thread, for accuracy alone; else it is timed.
    """

    session: Session | None
    load_ms: float
    is_single_thread: bool = False


def _measure_accuracy(
    loaded: LoadedModel,
    results: Sequence[BuildResult],
    target_engines: Mapping[str, _OpenedEngine],
    reference: ReferenceOutputs,
    evaluation: Evaluation,
    *,
    engine_outputs: Mapping[str, EngineOutputs],
    threads: int,
) -> tuple[InnerTensors, EvaluationResult]:
    """Compare the engines with the float model: inner tensors, then the outputs.

    Args:
        loaded: the float model.
        results: files of the targets whose engines could be opened, or are not for this machine.
        target_engines: the engines that were opened.
        reference: outputs that those of the engines are compared with.
        evaluation: the evaluation samples.
        engine_outputs: target -> outputs of its int8 model on these samples that its search stored.
        threads: samples that run in parallel.
    """
    engine_sessions = _find_engine_sessions(target_engines)
    if loaded.cut_off is not None:
        # the float model was cut off before operators that ONNX Runtime does not know, so that it
        # has other outputs than the engines. The targets' runnable files were cut off as well: they
        # are compared with it in place of the engines
        engine_sessions = {}
    with phase("layers"):
        layer_samples = evaluation.feed.spread_samples(LAYER_SAMPLES)
        inner_tensors = compare_inner_tensors(loaded, results, engine_sessions, layer_samples)
    candidates, open_failures = find_candidates(results, engine_sessions)
    stored_outputs = find_stored_outputs(results, candidates, engine_outputs)
    evaluation_result = evaluate(
        reference, candidates, evaluation, stored_outputs=stored_outputs, threads=threads
    )
    evaluation_result.failures |= open_failures
    return inner_tensors, evaluation_result


def _find_engine_sessions(target_engines: Mapping[str, _OpenedEngine]) -> EngineSessions:
    """Return engine -> its session; None for a session of ONNX Runtime in several threads.

    The evaluation runs samples in parallel, each in one thread, and opens sessions for that.
    """
    sessions = {}
    for name, engine in target_engines.items():
        is_on_device = not isinstance(engine.session, OrtSession)
        is_usable = is_on_device or engine.is_single_thread
        sessions[name] = engine.session if is_usable else None
    return sessions


def _find_timed_sessions(
    engines: Mapping[str, _OpenedEngine], failures: Collection[str]
) -> dict[str, Session]:
    """Return engine -> the session whose latency is measured; none for engines in `failures`."""
    sessions = {}
    for name, engine in engines.items():
        is_timed = not engine.is_single_thread and name not in failures
        if is_timed and engine.session is not None:
            sessions[name] = engine.session
    return sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurements:
    """What was measured, each by the name of the engine.

    Attributes:
        engines: the opened engines.
        timed_sessions: the sessions whose latency was measured.
        latency: their latency.
        accuracy: figures against the float model.
        failures: why engines cannot be opened or run.
        threads: threads inside one inference; None if nothing was run.
    """

    engines: Mapping[str, _OpenedEngine]
    timed_sessions: Mapping[str, Session]
    latency: Mapping[str, Latency]
    accuracy: Mapping[str, Accuracy]
    failures: Mapping[str, str]
    threads: int | None


@phase("loading the engines")
def _time_loading(open_session: Callable[[], Session]) -> tuple[Session, float]:
    """Return a session, and the ms that opening it took."""
    start = time.perf_counter()
    session = open_session()
    return session, (time.perf_counter() - start) * 1e3


def _open_float_model(
    loaded: LoadedModel, evaluation: Evaluation, *, threads: int, is_timed: bool
) -> tuple[_OpenedEngine, ReferenceOutputs, int]:
    """Return (the float model's engine, its outputs, its size in bytes).

    The outputs are computed in a session of a single thread. With latency runs it is opened on
    demand, and the engine has another session, in `threads` threads, which is timed. Without
    latency runs it is opened at once, and its loading time is the engine's.

    Args:
        loaded: the float model.
        evaluation: the evaluation samples.
        threads: threads inside one inference.
        is_timed: whether there are latency runs.
    """
    float_file = read_float_model(loaded)
    engine_session: Session | None = None
    output_session: Session | None = None
    if is_timed:
        open_engine = partial(OrtSession.open, float_file, threads=threads)
        engine_session, load_ms = _time_loading(open_engine)
    else:
        output_session, load_ms = _time_loading(partial(open_single_thread, float_file))
    float_outputs = ReferenceOutputs(
        # opens a session on demand; the file is read again, so that its bytes are not held here
        lambda: open_single_thread(read_float_model(loaded)),
        [spec.name for spec in loaded.outputs],
        keys=_first_sample_keys(evaluation),  # the outputs of this sample are stored
        session=output_session,
    )
    return _OpenedEngine(engine_session, load_ms), float_outputs, len(float_file)


def _open_engines(
    targets: Sequence[Target], results: Sequence[BuildResult], *, threads: int, is_timed: bool
) -> tuple[dict[str, _OpenedEngine], dict[str, str], dict[str, str]]:
    """Open each target's own engine, and its baselines: float engines that were built for it.

    `is_timed`: whether latency is measured.

    Returns:
        (engine -> its session and load time, engine -> why its runtime refused it, engine -> the
        runtime or device that is not here).
    """
    engines = {}
    failures = {}
    missing_runtimes = {}
    for target, result in zip(targets, results, strict=True):
        path_by_engine = dict(result.baselines)
        if result.engine is not None:  # the engine has the name of its target
            path_by_engine[result.target] = result.engine
        # to measure latency, an engine is opened as a user would open it. For accuracy alone, ONNX
        # Runtime (`runs_here`) opens it in a single thread
        is_single_thread = target.runs_here and not is_timed
        for name, path in path_by_engine.items():
            if is_single_thread:
                open_session = partial(open_single_thread, path)
            else:
                open_session = partial(target.open, path, threads=threads)
            try:
                session, load_ms = _time_loading(open_session)
            except SdkMissingError as error:  # built for another machine
                missing_runtimes[name] = str(error)
            except BackendError as error:
                failures[name] = str(error)
            else:
                engines[name] = _OpenedEngine(session, load_ms, is_single_thread)
    return engines, failures, missing_runtimes


def _first_sample_keys(evaluation: Evaluation) -> tuple[int, ...]:
    """Return (key of the first sample,) if calibration samples are evaluated on; else ()."""
    return evaluation.feed.keys[:1] if isinstance(evaluation.feed, EvaluationSubset) else ()


def _choose_reference(
    float_outputs: ReferenceOutputs,
    observed_outputs: ReferenceOutputs | None,
    evaluation: Evaluation,
) -> ReferenceOutputs:
    """Return the outputs to compare with: of the user's file, or those that calibration stored.

    Calibration ran a cleaned model, with constants folded, for instance. Its outputs are taken if
    they match the file's on the first sample.
    """
    first_keys = _first_sample_keys(evaluation)  # none, or one
    if observed_outputs is None or not first_keys:
        return float_outputs
    (first_key,) = first_keys
    if first_key not in observed_outputs:
        return float_outputs
    (sample,) = evaluation.feed.first_samples(1)
    file_values = float_outputs.get(first_key, sample)
    if outputs_match(file_values, observed_outputs.get(first_key, sample)):
        return observed_outputs
    return float_outputs


def _open_qdq_outputs(loaded: LoadedModel) -> ReferenceOutputs | None:
    """Return the outputs of the user's Q/DQ model, which are computed when they are needed.

    None for a float model, and for Q/DQ pairs that ONNX Runtime has no kernels for.
    """
    if loaded.qdq is None:
        return None
    try:  # its pairs are computed in float as written, without int8 kernels (`stand_in`)
        session = open_single_thread(loaded.qdq.model, stand_in=True)
    except BackendError:
        return None
    return ReferenceOutputs(lambda: session, [spec.name for spec in loaded.outputs])


def _reference_notes(loaded: LoadedModel, *, has_qdq_outputs: bool) -> Iterator[str]:
    """Yield the note on the model that a Q/DQ model's engines are compared with; none for others.

    `has_qdq_outputs`: whether they are compared with the Q/DQ model itself. If ONNX Runtime cannot
    run it, they are compared with the float model.
    """
    if loaded.qdq is not None:
        reference = "FP32"
        if has_qdq_outputs:
            reference = f"{Path(loaded.qdq.name).name} itself"
        yield f"accuracy is compared with {reference}; speed and size are compared with FP32"


def _measure_latency(
    sessions: Mapping[str, Session], calibration_samples: EvaluationSubset, duration_s: float
) -> dict[str, Latency]:
    """Return the latency of all sessions; none if `duration_s` is 0.

    Sessions take turns: first those on the CPU, then those on a device, which would cool down while
    one on the CPU runs.
    """
    if duration_s <= 0:
        return {}
    samples = calibration_samples.first_samples(_LATENCY_SAMPLES)
    latency: dict[str, Latency] = {}
    for on_device in (False, True):
        group = {
            name: session
            for name, session in sessions.items()
            if isinstance(session, DeviceSession) == on_device
        }
        if group:
            latency |= measure(group, samples, duration_s=duration_s, until_settled=True)
    return latency


def _make_rows(results: Sequence[BuildResult], measurements: _Measurements) -> Iterator[EngineRow]:
    """Yield the report's rows: for each target those of its baselines, then that of its engine.

    A baseline is a float engine built for the target.

    `measurements`: figures of the engines; empty if nothing was measured.
    """
    failures = measurements.failures
    for result in results:
        # the engine has the name of its target, each baseline a name of its own
        path_by_engine = {**result.baselines, result.target: result.engine}
        for name, path in path_by_engine.items():
            is_baseline = name != result.target
            label = name
            if not is_baseline and len(results) == 1:
                label = result.precision  # such as int8, beside FP32
            # `discard_failed` removes all files of a target whose engine failed, its baselines too
            if result.target in failures:
                path = None
            size = None if path is None else path.stat().st_size
            opened_engine = measurements.engines.get(name)
            # the types in which the engine ran its layers are compared with the planned ones
            engine_layers = read_engine_layers(measurements.timed_sessions.get(name))
            planned_types = () if is_baseline else result.decisions
            # why a baseline failed is told in its row; why an engine failed, with its target
            has_failure_note = is_baseline and name in failures
            yield EngineRow(
                label=label,
                baseline=is_baseline,
                target=result.target,
                path=None if path is None else str(path),
                size_bytes=size,
                load_ms=None if opened_engine is None else opened_engine.load_ms,
                threads=measurements.threads,
                latency=measurements.latency.get(name),
                accuracy=measurements.accuracy.get(name),
                ran=compare_with_plan(engine_layers, planned_types),
                notes=(failures[name],) if has_failure_note else (),
            )


def _find_lossy_layers(
    inner_tensors: InnerTensors, loaded: LoadedModel, results: Sequence[BuildResult]
) -> dict[str, tuple[OutputAccuracy, ...]]:
    """Return target -> figures of its inner tensors, without those that int8 clamps by design.

    Values below 0 that only a Relu reads, for instance, may be clamped to 0 already by int8: the
    tensor differs from the float model's, but nothing is lost.

    Args:
        inner_tensors: figures of the inner tensors of each target.
        loaded: the float model.
        results: files and ranges of the targets that were evaluated.
    """
    bounds = find_bounds(loaded.model)  # tensor -> range of its values that its readers keep
    lossy_layers = {}
    for result in results:
        layers = inner_tensors.layers.get(result.target)
        if layers is not None:
            lossy_layers[result.target] = tuple(
                layer for layer in layers if not _is_clamped(layer.name, bounds, result)
            )
    return lossy_layers


def _is_clamped(
    tensor: str, bounds: Mapping[str, tuple[float, float]], result: BuildResult
) -> bool:
    """Whether int8 clamps a tensor to the values that its reader, such as a Relu, clamps it to.

    Then nothing is lost.

    `bounds`: tensor -> (lowest, highest) value; the readers take values beyond them as these.
    """
    if tensor not in bounds:
        return False
    lowest, highest = bounds[tensor]
    scale = result.ranges.get(tensor)
    return scale is None or scale.observed_min < lowest or scale.observed_max > highest


def _sample_notes(
    accuracy: Mapping[str, Accuracy],
    evaluation_feed: Feed | None,
    calibration_samples: EvaluationSubset,
    inner_tensor_samples: int,
) -> Iterator[str]:
    """Yield notes on the samples on which accuracy was measured, if it was.

    Args:
        accuracy: engine -> its accuracy.
        evaluation_feed: evaluation samples; None if engines ran calibration samples.
        calibration_samples: some of the calibration samples.
        inner_tensor_samples: number of samples on which inner tensors were compared.
    """
    if not accuracy:
        return
    sample_count = next(iter(accuracy.values())).samples  # the same for every engine
    inner_tensor_text = ""
    if inner_tensor_samples:
        inner_tensor_text = f", that of inner tensors on {inner_tensor_samples} of these"
    # the ranges fit the images that calibrated, so int8 looks better on these than on new ones
    if evaluation_feed is None:
        yield (
            f"accuracy was measured on {sample_count} of the calibration images{inner_tensor_text};"
            " --eval-images gives others, which tell more"
        )
        if calibration_samples.has_labels:
            yield "labels of images that calibrate are not used; --eval-images takes both"
    elif inner_tensor_text:
        images_text = counted(sample_count, "evaluation image")
        yield f"accuracy was measured on {images_text}{inner_tensor_text}"
    # a recurrent model hands states on to its next call. If the samples are sequences, it ran with
    # these states, and the accuracy includes their errors
    if not calibration_samples.states:
        yield from state_notes(accuracy.values())


def state_notes(accuracies: Iterable[Accuracy]) -> Iterator[str]:
    """Yield a note that errors which add up in states from call to call are not measured.

    A state is an output that the next call takes as an input (`Accuracy.carried`). There is no note
    if no state has an error.
    """
    state_texts = set()
    for accuracy in accuracies:
        for output in accuracy.outputs:
            input_name = accuracy.carried.get(output.name)  # of the next call
            is_lossless = output.sqnr_db >= _LOSSLESS_DB  # False for NaN
            if input_name is not None and not is_lossless:
                state_texts.add(f"{output.name} as {input_name}")
    if state_texts:
        yield (
            f"some outputs are inputs of the next call ({', '.join(sorted(state_texts))}): here"
            " every call got the inputs of its sample, so that what int8 loses from call to call is"
            " not in these figures; compare whole sequences too"
        )


def _weights_as_inputs_notes(loaded: LoadedModel, latency: Mapping[str, Latency]) -> Iterator[str]:
    """Yield a note if the float model was timed and its file lists weights as inputs."""
    if loaded.fed_weights and _FLOAT_ENGINE in latency:
        yield (
            f"FP32 was timed with constants for {counted(loaded.fed_weights, 'weight')} that the"
            " file lists as inputs: ONNX Runtime optimizes no layer whose weights may be fed, so"
            " the file itself is likely slower; export it again with constants"
            " (keep_initializers_as_inputs=False)"
        )
