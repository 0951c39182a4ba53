"""Latency of one or two model files, also by batch size, in parallel streams and by kernel.

::

    files -> sessions -> inputs of each batch -> rounds (deploy.metrics.latency) -> Report
                                              -> streams, kernels: of the smallest batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from deploy.errors import BackendError, ConfigError
from deploy.feed.feed import Dataset, FeedSource, preprocessing_notes, to_dataset
from deploy.feed.model_preprocess import MetadataPreprocess
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import SAMPLES_IN_MEMORY, Feed
from deploy.feed.sampling import Limit
from deploy.files.reading import read_bytes
from deploy.frontends.metadata import read_metadata_preprocess
from deploy.frontends.onnx_reader import model_bytes, parse_model
from deploy.machine import this_machine, usable_cores
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.bench_inputs import (
    FEEDS,
    Shapes,
    random_feeds,
    read_calibration_shapes,
    refuse_fixed_batch,
    stack_samples,
)
from deploy.metrics.kernels import (
    ReportsLayers,
    find_devices,
    read_engine_layers,
    refuse_untimed,
    time_kernels,
)
from deploy.metrics.latency import Feeds, Latency, measure
from deploy.report import Report, figures
from deploy.report.figures import compare_with_plan
from deploy.report.parts import BatchRow, EngineRow
from deploy.runtimes.openvino import OpenvinoSession
from deploy.targets import TARGETS, OnnxRuntime, Target
from deploy.targets.tensorrt.inspector import throughput
from deploy.tasks import Metric, judge_of
from deploy.tensors import Session, TensorSpec
from deploy.terminal import phase, timed_phase, with_progress

_LOAD_BUDGET_MS = 200  # an engine is not loaded again after this much time


@with_progress
def bench(
    engine: Path | str,
    *,
    against: Path | str | None = None,
    threads: int | None = None,
    warmup_ms: float = 200,
    duration_s: float = 3,
    shapes: Shapes | None = None,
    seed: int = 0,
    targets: Sequence[Target] = (),
    streams: int = 1,
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
    """Measure an engine, and optionally a second one, each on the target of its file suffix.

    Args:
        engine: an ONNX file, which runs on the CPU, or an engine of a target, such as TensorRT's.
        against: file to compare with; it must have the engine's inputs.
        threads: threads inside one operator on the CPU; None uses every core.
        warmup_ms: warm-up time per model, not measured.
        duration_s: time measured, per model on average.
        shapes: input name -> dimensions, for inputs with open dimensions; the shapes of other
            inputs come from the build in the engine's folder, if there is one.
        seed: seed of random inputs.
        targets: targets with options; other targets use their defaults.
        streams: also measure the throughput of this many parallel sessions.
        batches: measure each of these batch sizes; other figures are those of the smallest.
        profile: also time each kernel, in separate runs.
        runtime: "openvino" runs the engine in OpenVINO too, next to ONNX Runtime.
        task: name of the outputs' task, as for `deploy.pipeline.build`.
        images: inputs, as for `deploy.pipeline.build`; the outputs of the second session are
            compared with those of the first. None uses random inputs.
        preprocess: preprocessing of images, or some of its options; the others come from the
            model's metadata, else from its input.
        limit: largest number of images, or a `Choice` of them.
        skip_bad: skip unreadable images.
        progress: report progress on stderr, where it takes over two seconds.

    Raises:
        BackendError: a file that its runtime cannot load or run.
        ConfigError: inputs that differ, a shape that does not fit, or a target or a number of
            threads that no engine uses; a second engine together with a second runtime; batches of
            a model with a fixed batch size, or a profile where the runtime has none.
        SdkMissingError: the runtime is not installed.
        FeedError: images that do not fit.
    """
    for given in (engine, against):
        if not isinstance(given, str | Path | None):
            raise ConfigError(
                f"what is measured is a file, got an object of class {type(given).__name__}; store"
                " it first: onnx.save(model, path), of a PyTorch module the one that"
                " calib8.torch.export(module, [example_input]) makes"
            )
    paths = _paths(Path(engine), Path(against) if against is not None else None)
    runtimes: dict[str, Target | _Openvino] = {
        label: _runtime(path, targets) for label, path in paths.items()
    }
    if runtime == "openvino":
        paths, runtimes = _both_runtimes(paths, runtimes)
    judge = judge_of(None, task)
    if judge is not None and (images is None or len(paths) < 2):
        raise ConfigError("a task is judged on --images, against another model; give both")
    for target in targets:
        if target not in runtimes.values():
            raise ConfigError(
                f"options of {target.name} need an engine of it"
                f" ({', '.join(target.engines)}), got {' and '.join(paths)}"
            )
    opened = {
        label: open_timed(path, runtimes[label], threads=threads) for label, path in paths.items()
    }
    sessions = {label: session for label, (session, _) in opened.items()}
    _check(paths, sessions, threads=threads, batches=batches, profile=profile)
    specs = _shared_inputs(sessions)
    accuracies: dict[str, Accuracy] = {}
    notes: tuple[str, ...] = ()
    if images is None:
        recalled = read_calibration_shapes(paths.values(), specs)
        taken = {name: dims for name, dims in recalled.items() if name not in (shapes or {})}
        notes = tuple(
            f"input {name!r} is open: {'x'.join(map(str, dims))}, as in the calibration of the"
            " build next to it; --shape sets another"
            for name, dims in taken.items()
        )
        feeds: Callable[..., Feeds] = partial(
            random_feeds, specs, shapes={**taken, **(shapes or {})}, seed=seed
        )
    else:
        dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
        carried = next(filter(None, map(_carried, paths.values())), None)
        feed = dataset.open(specs, metadata_preprocess=carried)
        feeds = partial(_image_feeds, feed)
        accuracies = _accuracy(sessions, feed, judge)
        notes = preprocessing_notes(feed)
    sizes: list[int | None] = [*sorted(set(batches))] or [None]
    latencies = {
        batch: _measured(sessions, feeds(batch=batch), batch, warmup_ms, duration_s)
        for batch in sizes
    }
    smallest = next(iter(latencies))
    smallest_feeds = feeds(batch=smallest)
    kernels = {
        label: time_kernels(
            path,
            sessions[label],
            smallest_feeds,
            again=partial(runtimes[label].open, path, threads=threads),
            duration_ms=1e3 * duration_s,
            p50_ms=latencies[smallest][label].host.p50,
        )
        for label, path in (paths.items() if profile else ())
    }
    rows = tuple(
        EngineRow(
            label=label,
            reference=len(paths) > 1 and label == next(iter(paths)),
            path=str(path),
            size_bytes=model_size(path),
            load_ms=opened[label][1],
            threads=sessions[label].threads,
            latency=latencies[smallest][label],
            sweep=tuple(_at(b, each[label]) for b, each in latencies.items() if b is not None),
            kernels=kernels.get(label, ()),
            accuracy=accuracies.get(label),
            ran=compare_with_plan(read_engine_layers(sessions[label])),
            notes=(
                *_streams(
                    path, runtimes[label], streams, smallest_feeds, threads, warmup_ms, duration_s
                ),
                *_output_notes(accuracies.get(label)),
            ),
        )
        for label, path in paths.items()
    )
    title = f"Latency of {' and '.join(dict.fromkeys(path.name for path in paths.values()))}"
    machine = replace(this_machine(), devices=find_devices(sessions))
    return Report(title=title, engines=rows, machine=machine, notes=notes)


@phase("loading")
def open_timed(
    path: Path, target: Target | _Openvino, *, threads: int | None = None
) -> tuple[Session, float]:
    """Load an engine; return the session and the least of up to three load times in ms.

    An engine that loads slowly is loaded only once.

    Raises:
        BackendError: the target's runtime cannot load it.
    """
    import onnxruntime  # noqa: F401 (the import is not part of a model's load time)

    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _LOAD_BUDGET_MS:
        start = time.perf_counter()
        session = target.open(path, threads=threads)
        taken.append((time.perf_counter() - start) * 1e3)
    return session, min(taken)


def _carried(path: Path) -> MetadataPreprocess | None:
    """Return the preprocessing in an ONNX model's metadata; None for other engines."""
    if path.suffix.lower() != ".onnx":
        return None
    return read_metadata_preprocess(parse_model(model_bytes(path), str(path)), path)


def _runtime(path: Path, targets: Sequence[Target]) -> Target:
    """Return the target of this suffix; ONNX Runtime for any other, which reports what is wrong."""
    own = {target.name: target for target in targets}
    for name, kind in TARGETS.items():
        if path.suffix in kind.engines:
            return own[name] if name in own else kind()
    return OnnxRuntime()


def _check(
    paths: Mapping[str, Path],
    sessions: Mapping[str, Session],
    *,
    threads: int | None,
    batches: Sequence[int],
    profile: bool,
) -> None:
    """Refuse options that the sessions do not support."""
    if threads is not None and all(s.threads != threads for s in sessions.values()):
        raise ConfigError(
            f"--threads is for engines on the CPU, got {' and '.join(paths)}; leave it out"
        )
    for label, session in sessions.items():
        if batches:
            refuse_fixed_batch(session.inputs)
        if profile:
            refuse_untimed(paths[label], session)


def _image_feeds(feed: Feed, *, batch: int | None) -> Feeds:
    """Return the first images, single or stacked to a batch."""
    if batch is None:
        return feed.first_samples(FEEDS)
    return stack_samples(feed.first_samples(SAMPLES_IN_MEMORY), batch)


def _measured(
    sessions: Mapping[str, Session],
    feeds: Feeds,
    batch: int | None,
    warmup_ms: float,
    duration_s: float,
) -> dict[str, Latency]:
    try:
        with phase("measuring" if batch is None else f"batch {batch}"):
            return measure(sessions, feeds, warmup_ms=warmup_ms, duration_s=duration_s)
    except BackendError as error:
        if batch is None:
            raise
        raise BackendError(f"with a batch of {batch}: {error}") from error


def _at(batch: int, found: Latency) -> BatchRow:
    p50_s = max(found.host.p50, 1e-6) / 1e3
    return BatchRow(batch=batch, items_qps=batch / p50_s, latency=found)


def _streams(
    path: Path,
    target: Target | _Openvino,
    count: int,
    feeds: Feeds,
    threads: int | None,
    warmup_ms: float,
    duration_s: float,
) -> tuple[str, ...]:
    """Return a note on the throughput of parallel sessions, which share the cores of a CPU."""
    if count <= 1:
        return ()
    each = threads or max(usable_cores() // count, 1)
    sessions = [target.open(path, threads=each) for _ in range(count)]
    with timed_phase("streams", warmup_ms / 1000 + duration_s):
        rate = throughput(sessions, feeds, warmup_ms=warmup_ms, duration_s=duration_s)
    own = (
        "" if isinstance(sessions[0], ReportsLayers) else f", {figures.count(each, 'thread')} each"
    )
    return (f"{count} streams at once{own}: {rate:,.0f} inferences a second",)


def model_size(path: Path) -> int:
    """Return the bytes of an ONNX file and of the external data that it names.

    A file in ONNX Runtime's own format names none.

    Raises:
        ConfigError: the file does not exist.
    """
    data = read_bytes(path, what="a model", error=ConfigError)
    total = len(data)
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's DecodeError: the session was opened, so this is no ONNX protobuf
        return total
    external = {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = (path.parent / name for name in external)
    return total + sum(int(file.stat().st_size) for file in files if file.is_file())


def _paths(engine: Path, against: Path | None) -> dict[str, Path]:
    """Return label -> path, the reference first; a label is the file name if that is unique."""
    if against is None:
        return {engine.name: engine}
    if engine.name != against.name:
        return {against.name: against, engine.name: engine}
    if engine == against:
        raise ConfigError(f"--against needs another model than the engine, got {engine} twice")
    return {str(against): against, str(engine): engine}


def _shared_inputs(sessions: Mapping[str, Session]) -> Sequence[TensorSpec]:
    """Return the inputs of the sessions, which must be the same."""
    labels = list(sessions)
    first, last = labels[0], labels[-1]
    ours, theirs = (
        ", ".join(sorted(f"{spec.name} ({spec.dtype})" for spec in sessions[label].inputs))
        for label in (first, last)
    )
    if ours != theirs:
        raise ConfigError(
            f"models measured side by side must have the same inputs, got {ours} of {first} and"
            f" {theirs} of {last}; measure each by itself, without --against"
        )
    return sessions[first].inputs


def _accuracy(
    sessions: Mapping[str, Session], feed: Feed, judge: Metric | None
) -> dict[str, Accuracy]:
    """Return the accuracy of the second session against the first."""
    if len(sessions) < 2:
        return {}
    left, right = sessions.values()
    comparison = Comparison(left, right, metric=judge)
    with phase("accuracy", len(feed), "samples") as step, feed.samples() as samples:
        for sample in samples:
            found = left.run(sample), right.run(sample)
            comparison.add(sample, *found, count=feed.unpadded_count)
            step()
    return {list(sessions)[-1]: comparison.result()}


def _output_notes(accuracy: Accuracy | None) -> tuple[str, ...]:
    """Return the accuracy of each output as a note; none for one output, see the table."""
    if accuracy is None or len(accuracy.outputs) < 2:
        return ()
    return tuple(
        f"output {one.name!r}: {one.sqnr_db:.1f} dB, cosine {one.cosine_mean:.5f}"
        for one in accuracy.outputs
    )


def _both_runtimes(
    paths: Mapping[str, Path], runtimes: Mapping[str, Target | _Openvino]
) -> tuple[dict[str, Path], dict[str, Target | _Openvino]]:
    """Return one engine in ONNX Runtime and in OpenVINO."""
    (label, path), *others = paths.items()
    if others:
        raise ConfigError(
            f"two runtimes take one engine, got {' and '.join(paths)}; leave --against out, or"
            " --runtime"
        )
    if not isinstance(runtimes[label], OnnxRuntime):
        raise ConfigError(
            f"OpenVINO reads ONNX models, got {path}; name the .onnx file, or leave --runtime out"
        )
    here, there = f"{label} in ONNX Runtime", f"{label} in OpenVINO"
    return {here: path, there: path}, {here: runtimes[label], there: _Openvino()}


class _Openvino:
    """Opens models in OpenVINO."""

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        return OpenvinoSession.open(engine, threads=threads)
