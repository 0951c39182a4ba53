"""Latency of one or two model files, also by batch size and by kernel.

::

    files -> sessions -> inputs of each batch -> rounds (deploy.metrics.latency) -> Report
                                              -> kernels: of the smallest batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from deploy.calibration.reference_outputs import warn_of_random_outputs
from deploy.errors import BackendError, ConfigError
from deploy.feed.batch_axis import batch_inputs, mark_batch_axes
from deploy.feed.bench_inputs import (
    FEED_COUNT,
    Shapes,
    random_feeds,
    read_calibration_shapes,
    refuse_fixed_batch,
    stack_samples,
)
from deploy.feed.feed import Dataset, FeedSource, preprocessing_notes, to_dataset
from deploy.feed.model_preprocess import MetadataPreprocess
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import SAMPLES_IN_MEMORY, Feed
from deploy.feed.sampling import Limit
from deploy.feed.states import Recurrence, find_states
from deploy.files.reading import read_bytes
from deploy.frontends.metadata import read_declaration, read_metadata_preprocess
from deploy.frontends.onnx_reader import model_bytes, parse_model
from deploy.machine import this_machine
from deploy.metrics import DURATION_S
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import (
    KernelTime,
    find_devices,
    read_engine_layers,
    refuse_untimed,
    time_kernels,
)
from deploy.metrics.latency import Feeds, Latency, measure
from deploy.report import Report
from deploy.report.figures import compare_with_plan
from deploy.report.parts import BatchRow, EngineRow
from deploy.runtimes.openvino import OpenvinoSession
from deploy.runtimes.ort import warn_of_int8_kernels
from deploy.targets import TARGETS, OnnxRuntime, Target
from deploy.tasks import Metric, make_metric
from deploy.tasks.declarations import Declaration
from deploy.tensors import Session, TensorSpec, describe_inputs
from deploy.terminal import phase, with_progress

# batch size, None for the model's own -> label of an engine -> its latency
_LatencyByBatch = dict[int | None, dict[str, Latency]]

_MAX_LOADS = 3  # the load time is the least of so many
_LOAD_BUDGET_MS = 200  # an engine is not loaded again after this much time


@with_progress
def bench(
    engine: Path | str,
    *,
    against: Path | str | None = None,
    threads: int | None = None,
    warmup_ms: float = 200,
    duration_s: float = DURATION_S,
    shapes: Shapes | None = None,
    seed: int = 0,
    targets: Sequence[Target] = (),
    batches: Sequence[int] = (),
    profile: bool = False,
    runtime: str = "onnxruntime",
    task: str | None = None,
    images: FeedSource | Dataset | None = None,
    preprocess: PreprocessRequest = None,
    limit: Limit = None,
    skip_bad: bool = False,
    progress: bool = False,
) -> Report:
    """Measure the latency of an engine, or of two in turn; the file suffix selects the target.

    Args:
        engine: an ONNX file, which runs on the CPU, or an engine of a target, such as TensorRT's.
        against: file to compare with; it must have the engine's inputs.
        threads: threads inside one operator on the CPU; None uses every core.
        warmup_ms: warm-up time per model, not measured.
        duration_s: seconds of timed runs for each model, on average.
        shapes: input name -> dimensions, for inputs with dynamic dimensions; None for those of the
            build in the engine's folder.
        seed: seed of random inputs.
        targets: targets with options; other targets use their defaults.
        batches: measure each of these batch sizes; other figures are those of the smallest.
        profile: also time each kernel, in separate runs.
        runtime: "openvino" runs the engine in OpenVINO too, next to ONNX Runtime.
        task: name of the outputs' task, as for `build`.
        images: inputs, as for `build`; the outputs of the second session are
            compared with those of the first. None uses random inputs.
        preprocess: preprocessing of images, or some of its options; the others come from the
            model's metadata, else from the shape of its input.
        limit: largest number of images, or a `Choice` of them.
        skip_bad: skip unreadable images.
        progress: report steps that take over two seconds on stderr.

    Raises:
        BackendError: a file that its runtime cannot load or run.
        ConfigError: the engines' inputs differ; a shape does not fit; `targets` or `threads` is
            given, but no engine uses it; both `against` and `runtime` are given; `batches` is
            given, but a model has a fixed batch; or the runtime has no profiler.
        SdkMissingError: the runtime is not installed.
        FeedError: images that do not fit.
    """
    _refuse_models_in_memory(engine, against)
    sources = _list_sources(engine, against, targets)  # label -> model file and its runtime
    if runtime == "openvino":
        sources = _add_openvino(sources)
    metric = make_metric(metric=None, task=task)
    compares_outputs = images is not None and len(sources) > 1
    if metric.is_set and not compares_outputs:
        raise ConfigError("a task is judged on --images, against another model; give both")
    _refuse_unused_targets(targets, sources)

    engines = {label: _load_engine(source, threads=threads) for label, source in sources.items()}
    _refuse_unsupported(engines, threads=threads, batches=batches, profile=profile)
    sessions = {label: engine.session for label, engine in engines.items()}
    input_specs = _shared_inputs(sessions)

    # what the engines are run on: random inputs, or images, on which their outputs are compared too
    accuracies: dict[str, Accuracy] = {}  # label of the second engine -> its accuracy
    feed = None
    if images is None:
        make_inputs, notes = _choose_random_inputs(
            engines.values(), input_specs, shapes or {}, seed
        )
    else:
        dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
        feed = _open_images(dataset, engines, input_specs)
        make_inputs = partial(_take_images, feed)
        notes = ()
        if compares_outputs:
            accuracies = _compare_outputs(engines, feed, metric)
            notes = tuple(_comparison_notes(engines, feed))

    # the latency of all engines at each batch size, the smallest first; None is the model's own
    batch_sizes: list[int | None] = [*sorted(set(batches))] or [None]
    latencies_by_batch: _LatencyByBatch = {
        batch: _measure_batch(sessions, make_inputs(batch), batch, warmup_ms, duration_s)
        for batch in batch_sizes
    }

    kernels: dict[str, tuple[KernelTime, ...]] = {}
    if profile:  # at the smallest batch, of which all other figures are, too
        smallest_batch = batch_sizes[0]
        inputs = make_inputs(smallest_batch)
        latency_by_label = latencies_by_batch[smallest_batch]
        kernels = _time_kernels(
            engines, inputs, latency_by_label, threads=threads, duration_s=duration_s
        )

    if feed is not None:  # its images have been read, so it knows which ones were skipped
        notes = (*preprocessing_notes(feed), *notes)

    # a row of the report for each engine, the reference first
    rows = [
        _make_row(
            label,
            loaded_engine,
            latencies_by_batch,
            accuracies.get(label),
            kernels.get(label, ()),
        )
        for label, loaded_engine in engines.items()
    ]
    if len(rows) > 1:  # the others are compared with the first
        rows[0] = replace(rows[0], reference=True)
    file_names = dict.fromkeys(loaded_engine.path.name for loaded_engine in engines.values())
    return Report(
        title=f"Latency of {' and '.join(file_names)}",
        engines=tuple(rows),
        machine=replace(this_machine(), devices=find_devices(sessions)),
        notes=notes,
    )


def _make_row(
    label: str,
    engine: _LoadedEngine,
    latencies_by_batch: _LatencyByBatch,
    accuracy: Accuracy | None,
    kernels: tuple[KernelTime, ...],
) -> EngineRow:
    """Return the report's row of an engine; its latency is that of the smallest batch.

    Args:
        label: name of the engine in the report.
        engine: the engine.
        latencies_by_batch: batch size (the smallest first; None for the model's own) -> label of an
            engine -> its latency.
        accuracy: accuracy of the engine; None for the reference, or without images.
        kernels: kernels of the engine, with their times; () if they were not timed.
    """
    latency_by_label = next(iter(latencies_by_batch.values()))  # at the smallest batch
    engine_layers = read_engine_layers(engine.session)  # what the runtime made of the model
    return EngineRow(
        label=label,
        path=str(engine.path),
        size_bytes=model_size(engine.path),
        load_ms=engine.load_ms,
        threads=engine.session.threads,
        latency=latency_by_label[label],
        sweep=_make_batch_rows(label, latencies_by_batch),
        kernels=kernels,
        accuracy=accuracy,
        ran=compare_with_plan(engine_layers),  # without a plan: only what ran
        notes=tuple(_output_notes(accuracy)),
    )


def _open_images(
    dataset: Dataset, engines: Mapping[str, _LoadedEngine], input_specs: Sequence[TensorSpec]
) -> Feed:
    """Open images as inputs of the engines; `input_specs`: what all engines take."""
    session = next(iter(engines.values())).session
    return dataset.open(
        mark_batch_axes(input_specs, session.outputs),
        metadata_preprocess=_find_metadata_preprocess(engines.values()),
        # a recurrent model: latency is measured with the states of the first engine
        recurrence=Recurrence(
            inputs=tuple(session.inputs),
            outputs=tuple(spec.name for spec in session.outputs),
            states=find_states(session.inputs, session.outputs),
            run=session.run,
        ),
    )


def _compare_outputs(
    engines: Mapping[str, _LoadedEngine], feed: Feed, metric: Metric
) -> dict[str, Accuracy]:
    """Compare the outputs of two engines on images.

    Args:
        engines: label -> engine, the reference first.
        feed: the images.
        metric: the user's task. What the model files declare of their outputs is added here.

    Returns:
        label of the second engine -> its accuracy.
    """
    from deploy.pipeline.evaluate import compare_sessions  # imports much else

    reference, candidate = engines.values()
    candidate_label = list(engines)[1]
    declaration = _read_declaration(engines.values())
    declaration = replace(declaration, batch_inputs=batch_inputs(feed.specs))
    metric = replace(metric, declared=declaration)
    accuracy = compare_sessions(reference.session, candidate.session, feed, metric)
    return {candidate_label: accuracy}


def _comparison_notes(engines: Mapping[str, _LoadedEngine], feed: Feed) -> Iterator[str]:
    """Yield what makes outputs of ONNX models wrong here: the CPU's kernels, or random numbers.

    Args:
        engines: label -> engine; others than ONNX models are not looked at.
        feed: the images, of which the first is run.
    """
    (sample,) = feed.first_samples(1)
    for label, engine in engines.items():
        if engine.runtime is OpenvinoSession:
            continue  # ONNX Runtime is measured beside it: it runs the same file, and is named
        for model, path in _read_onnx_models([engine]):
            if warning := warn_of_int8_kernels(model, label):
                yield warning
            yield from warn_of_random_outputs(model, sample, label, path)


@dataclass(frozen=True, slots=True)
class _EngineSource:
    """A model file, and the target, or the class of sessions, whose `open` opens it."""

    path: Path
    runtime: Target | type[OpenvinoSession]


@dataclass(frozen=True, slots=True)
class _LoadedEngine(_EngineSource):
    """An engine, and its load time."""

    session: Session
    load_ms: float


def _refuse_models_in_memory(*models: object) -> None:
    """Refuse models that are not files; None is allowed."""
    for model in models:
        if not isinstance(model, str | Path | None):
            raise ConfigError(
                f"what is measured is a file, got an object of class {type(model).__name__}; store"
                " it first: onnx.save(model, path), of a PyTorch module the one that"
                " calib8.torch.export(module, [example_input]) makes"
            )


def _list_sources(
    engine: Path | str, against: Path | str | None, targets: Sequence[Target]
) -> dict[str, _EngineSource]:
    """Return label -> model file with the runtime that opens it, the reference first.

    A label is the name of the file, or its path if both files have the same name.

    Args:
        engine: file of the engine.
        against: file of the reference; None to measure the engine alone.
        targets: targets with options, which open the files of their suffixes.
    """
    paths = [Path(engine)]
    if against is not None:
        paths.insert(0, Path(against))
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--against needs another model than the engine, got {paths[0]} twice")

    has_unique_names = len({path.name for path in paths}) == len(paths)
    sources = {}
    for path in paths:
        label = path.name if has_unique_names else str(path)
        sources[label] = _EngineSource(path, find_target(path, targets))
    return sources


def find_target(path: Path, targets: Sequence[Target]) -> Target:
    """Return the target whose engines have the file's suffix; ONNX Runtime for any other suffix.

    Opening a file that ONNX Runtime cannot read reports what is wrong.

    Args:
        path: the file.
        targets: targets with the user's options, which go before those with the defaults.
    """
    default_targets = [target_class() for target_class in TARGETS.values()]
    matching_target: Target = OnnxRuntime()
    longest_suffix = ""  # "x.rtx.engine" also has the suffix of TensorRT's engines
    for target in (*targets, *default_targets):
        for suffix in target.engines:
            if path.name.endswith(suffix) and len(suffix) > len(longest_suffix):
                matching_target = target
                longest_suffix = suffix
    return matching_target


def _add_openvino(sources: Mapping[str, _EngineSource]) -> dict[str, _EngineSource]:
    """Return label -> source of the same engine twice: run in ONNX Runtime, and in OpenVINO.

    `sources`: label -> the one engine to measure; two engines, or one that is no ONNX model, are
    refused.
    """
    if len(sources) > 1:
        raise ConfigError(
            f"two runtimes take one engine, got {' and '.join(sources)}; leave --against out, or"
            " --runtime"
        )
    ((label, source),) = sources.items()
    if not isinstance(source.runtime, OnnxRuntime):
        raise ConfigError(
            f"OpenVINO reads ONNX models, got {source.path}; name the .onnx file, or leave"
            " --runtime out"
        )
    return {
        f"{label} in ONNX Runtime": source,
        f"{label} in OpenVINO": _EngineSource(source.path, OpenvinoSession),
    }


def _refuse_unused_targets(targets: Sequence[Target], sources: Mapping[str, _EngineSource]) -> None:
    """Refuse a target with options that opens none of the engines."""
    runtimes = [source.runtime for source in sources.values()]
    for target in targets:
        if target not in runtimes:
            raise ConfigError(
                f"options of {target.name} need an engine of it"
                f" ({', '.join(target.engines)}), got {' and '.join(sources)}"
            )


@phase("loading")
def _load_engine(source: _EngineSource, *, threads: int | None) -> _LoadedEngine:
    """Load an engine, up to three times; its load time is the least, in ms.

    It is not loaded again after 200 ms, so an engine that loads slowly is loaded only once.

    Raises:
        BackendError: the target's runtime cannot load it.
    """
    import onnxruntime  # noqa: F401 (the import is not part of a model's load time)

    times_ms: list[float] = []
    while len(times_ms) < _MAX_LOADS and sum(times_ms) < _LOAD_BUDGET_MS:
        start = time.perf_counter()
        session = source.runtime.open(source.path, threads=threads)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return _LoadedEngine(source.path, source.runtime, session, min(times_ms))


def _read_onnx_models(engines: Iterable[_LoadedEngine]) -> Iterator[tuple[onnx.ModelProto, Path]]:
    """Yield (model, its file) of the engines that are ONNX files."""
    for engine in engines:
        if engine.path.suffix.lower() == ".onnx":
            yield parse_model(model_bytes(engine.path), str(engine.path)), engine.path


def _find_metadata_preprocess(engines: Iterable[_LoadedEngine]) -> MetadataPreprocess | None:
    """Return the preprocessing in the metadata of the first ONNX model that has some."""
    for model, path in _read_onnx_models(engines):
        preprocess = read_metadata_preprocess(model, path)
        if preprocess:
            return preprocess
    return None


def _read_declaration(engines: Iterable[_LoadedEngine]) -> Declaration:
    """Return what the first ONNX model declares of its outputs."""
    for model, path in _read_onnx_models(engines):
        return read_declaration(model, path)
    return Declaration()


def _refuse_unsupported(
    engines: Mapping[str, _LoadedEngine],
    *,
    threads: int | None,
    batches: Sequence[int],
    profile: bool,
) -> None:
    """Refuse options that the engines do not support.

    Args:
        engines: label -> engine.
        threads: the user's number of threads; None if not set.
        batches: the user's batch sizes; they need models whose batch size is open.
        profile: whether kernels are to be timed.
    """
    # the sessions are open: one on the CPU has the user's number of threads, any other has none
    thread_counts = [engine.session.threads for engine in engines.values()]
    if threads is not None and threads not in thread_counts:
        raise ConfigError(
            f"--threads is for engines on the CPU, got {' and '.join(engines)}; leave it out"
        )
    for engine in engines.values():
        if batches:
            refuse_fixed_batch(engine.session.inputs)
        if profile:
            refuse_untimed(engine.path, engine.session)


def _choose_random_inputs(
    engines: Iterable[_LoadedEngine], specs: Sequence[TensorSpec], shapes: Shapes, seed: int
) -> tuple[Callable[[int | None], Feeds], tuple[str, ...]]:
    """Return a function that makes random inputs, and notes on their shapes.

    The function takes a batch size, None for the model's own.

    Args:
        engines: the engines. If the folder of one holds its build, open dimensions are those that
            it was calibrated with.
        specs: inputs of the engines.
        shapes: input name -> dimensions that the user set.
        seed: seed of the random values.
    """
    calibration_shapes = read_calibration_shapes((engine.path for engine in engines), specs)
    chosen_shapes: dict[str, Sequence[int]] = dict(shapes)
    notes = []
    for name, dimensions in calibration_shapes.items():
        if name not in shapes:
            chosen_shapes[name] = dimensions
            notes.append(
                f"input {name!r} is open: {'x'.join(map(str, dimensions))}, as in the calibration"
                " of the build next to it; --shape sets another"
            )

    def make_inputs(batch: int | None) -> Feeds:
        return random_feeds(specs, shapes=chosen_shapes, seed=seed, batch=batch)

    return make_inputs, tuple(notes)


def _take_images(feed: Feed, batch: int | None) -> Feeds:
    """Return the first images, single or stacked to a batch."""
    if batch is None:
        return feed.first_samples(FEED_COUNT)
    return stack_samples(feed.first_samples(SAMPLES_IN_MEMORY), batch)


def _measure_batch(
    sessions: Mapping[str, Session],
    inputs: Feeds,
    batch: int | None,
    warmup_ms: float,
    duration_s: float,
) -> dict[str, Latency]:
    """Return the latency of all engines at one batch.

    `batch`: its size, which an error names; None for the batch of the model itself.
    """
    try:
        with phase("measuring" if batch is None else f"batch {batch}"):
            return measure(sessions, inputs, warmup_ms=warmup_ms, duration_s=duration_s)
    except BackendError as error:
        if batch is None:
            raise
        raise BackendError(f"with a batch of {batch}: {error}") from error


def _make_batch_rows(label: str, latencies_by_batch: _LatencyByBatch) -> tuple[BatchRow, ...]:
    """Return a row for each batch size that an engine was measured at.

    `latencies_by_batch`: batch size, None for the model's own -> label -> latency.
    """
    rows = []
    for batch, latency_by_label in latencies_by_batch.items():
        if batch is not None:
            latency = latency_by_label[label]
            p50_s = max(latency.run_time.p50, 1e-6) / 1e3
            rows.append(BatchRow(batch=batch, items_qps=batch / p50_s, latency=latency))
    return tuple(rows)


def _time_kernels(
    engines: Mapping[str, _LoadedEngine],
    inputs: Feeds,
    latency_by_label: Mapping[str, Latency],
    *,
    threads: int | None,
    duration_s: float,
) -> dict[str, tuple[KernelTime, ...]]:
    """Return label -> kernels of the engine, the slowest first.

    A kernel computes one node, or several that are fused. Profiling slows a session down, so each
    engine is opened once more for it.

    Args:
        engines: label -> engine.
        inputs: the inputs to run.
        latency_by_label: label -> latency of the engine, which decides the number of runs.
        threads: threads of one inference on the CPU; None uses every core.
        duration_s: seconds of runs for each engine.
    """
    return {
        label: time_kernels(
            engine.path,
            engine.session,
            inputs,
            open_session=partial(engine.runtime.open, engine.path, threads=threads),
            duration_ms=1e3 * duration_s,
            p50_ms=latency_by_label[label].run_time.p50,
        )
        for label, engine in engines.items()
    }


def model_size(path: Path) -> int:
    """Return the size in bytes of a model file and of the external files with its weights.

    A file that is no ONNX file (an engine) has no external files.

    Raises:
        ConfigError: the file does not exist.
    """
    data = read_bytes(path, what="a model", error=ConfigError)
    total = len(data)
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # DecodeError of protobuf: the file is no ONNX file
        return total
    external_tensors = filter(uses_external_data, model.graph.initializer)
    # a set of paths, since several weights may lie in one file, as "m.data" or "./m.data"
    files = {path.parent / ExternalDataInfo(tensor).location for tensor in external_tensors}
    for file in files:
        if file.is_file():  # else it was removed after the model was loaded
            total += file.stat().st_size
    return total


def _shared_inputs(sessions: Mapping[str, Session]) -> Sequence[TensorSpec]:
    """Return the inputs of the sessions, which must be the same."""
    reference_label = next(iter(sessions))
    reference_specs = sessions[reference_label].inputs
    for label, session in sessions.items():
        reference_inputs = describe_inputs(reference_specs, session.inputs)
        inputs = describe_inputs(session.inputs, reference_specs)
        if inputs != reference_inputs:
            raise ConfigError(
                f"models measured side by side must have the same inputs, got {reference_inputs} of"
                f" {reference_label} and {inputs} of {label}; measure each by itself, without"
                " --against"
            )
    return reference_specs


def _output_notes(accuracy: Accuracy | None) -> Iterator[str]:
    """Yield the accuracy of each output as a note; none for one output, see the table."""
    if accuracy is None or len(accuracy.outputs) < 2:
        return
    for output in accuracy.outputs:
        yield (f"output {output.name!r}: {output.sqnr_db:.1f} dB, cosine {output.cosine_mean:.5f}")
