"""Latency of one or two model files, side by side, on inputs made from their specs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from shlex import quote
from typing import Protocol

import numpy as np

from deploy.errors import ConfigError
from deploy.feed.choice import Limit
from deploy.feed.feed import Feed, FeedSource, open_feed
from deploy.feed.preprocess import Preprocess
from deploy.machine import memory_bytes, this_machine
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.latency import measure
from deploy.metrics.ran import devices_of, layers_of
from deploy.openvino import OpenvinoSession
from deploy.progress import lasting, on_request, phase
from deploy.reading import read_bytes, size
from deploy.report import EngineRow, Report
from deploy.report.ran import ran_part
from deploy.targets import TARGETS, OnnxRuntime, Target
from deploy.targets.tensorrt.streams import throughput
from deploy.tensors import Array, Session, TensorSpec

Shapes = Mapping[str, Sequence[int]]


class Opens(Protocol):
    """A target, or a runtime that is none."""

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """A session of an engine's file."""
        ...


_FEEDS = 4  # different inputs, used in turn
_LOAD_BUDGET_MS = 200


@on_request
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
    runtime: str = "onnxruntime",
    images: FeedSource | None = None,
    preprocess: Preprocess | None = None,
    limit: Limit = None,
    skip_bad: bool = False,
    progress: bool = False,
) -> Report:
    """Measure an engine, and another beside it, each on the target whose suffix it has.

    Args:
        engine: an ONNX file, which runs on the CPU, or an engine of a target, such as TensorRT's.
        against: file to compare with; it must have the engine's inputs.
        threads: threads inside one operator on the CPU; None takes every core.
        warmup_ms: time thrown away first, per model.
        duration_s: time measured, per model on average.
        shapes: input name -> dimensions, for inputs whose shape the model leaves open.
        seed: of the random inputs.
        targets: targets with options of their own; the others have their defaults.
        streams: measure the throughput of so many sessions at once too.
        runtime: "openvino" runs the engine there too, beside ONNX Runtime.
        images: run on these, as `deploy.pipeline.build` takes them, and compare the outputs of
            the second session with those of the first; None makes up random inputs.
        preprocess: how images become inputs; None takes it from the engine's input.
        limit: use at most so many images, or a `Choice` of them.
        skip_bad: go on without unreadable images.
        progress: tell on stderr what is going on, where it takes over two seconds.

    Raises:
        BackendError: a file that its runtime cannot load or run.
        ConfigError: inputs that differ, a shape that does not fit, or a target or a number of
            threads that no engine makes use of; a second engine beside a second runtime.
        SdkMissingError: the runtime is not installed.
        FeedError: images that do not fit.
    """
    paths = _paths(Path(engine), Path(against) if against is not None else None)
    runtimes: dict[str, Opens] = {label: _runtime(path, targets) for label, path in paths.items()}
    if runtime == "openvino":
        paths, runtimes = _both(paths, runtimes)
    for target in targets:
        if target not in runtimes.values():
            raise ConfigError(
                f"an option of {target.name} must have an engine of it to run"
                f" ({', '.join(target.engines)}), got {' and '.join(paths)}"
            )
    opened = {
        label: open_timed(path, runtimes[label], threads=threads) for label, path in paths.items()
    }
    sessions = {label: session for label, (session, _) in opened.items()}
    if threads is not None and all(s.threads != threads for s in sessions.values()):
        raise ConfigError(
            f"threads are those of engines that run on the CPU, got {' and '.join(paths)}; leave"
            " --threads away"
        )
    judged: dict[str, Accuracy] = {}
    if images is None:
        feeds = _shared_feeds(sessions, shapes or {}, seed)
    else:
        specs = _shared_inputs(sessions)
        feed = open_feed(images, specs, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
        feeds = [dict(sample) for sample in feed.first(_FEEDS)]
        judged = _judged(sessions, feed)
    latencies = measure(sessions, feeds, warmup_ms=warmup_ms, duration_s=duration_s)
    rows = tuple(
        EngineRow(
            label=label,
            reference=len(paths) > 1 and label == next(iter(paths)),
            path=str(path),
            size_bytes=model_size(path),
            load_ms=opened[label][1],
            threads=sessions[label].threads,
            latency=latencies[label],
            accuracy=judged.get(label),
            ran=ran_part(layers_of(sessions[label])),
            notes=(
                *_streams(path, runtimes[label], streams, feeds, threads, warmup_ms, duration_s),
                *_by_output(judged.get(label)),
            ),
        )
        for label, path in paths.items()
    )
    title = f"Latency of {' and '.join(dict.fromkeys(path.name for path in paths.values()))}"
    machine = replace(this_machine(), devices=devices_of(sessions))
    return Report(title=title, engines=rows, machine=machine)


@phase("loading")
def open_timed(path: Path, target: Opens, *, threads: int | None = None) -> tuple[Session, float]:
    """Load an engine; gives the session and the best of up to three load times in ms.

    An engine that loads slowly is loaded once, as a second and third time would cost too much.

    Raises:
        BackendError: the target's runtime cannot load it.
    """
    import onnxruntime  # noqa: F401 (its own start-up is no part of a model's load time)

    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _LOAD_BUDGET_MS:
        start = time.perf_counter()
        session = target.open(path, threads=threads)
        taken.append((time.perf_counter() - start) * 1e3)
    return session, min(taken)


def _runtime(path: Path, targets: Sequence[Target]) -> Target:
    """The target whose engines have this suffix; of any other file ONNX Runtime tells its fault."""
    own = {target.name: target for target in targets}
    for name, kind in TARGETS.items():
        if path.suffix in kind.engines:
            return own[name] if name in own else kind()
    return OnnxRuntime()


def _streams(
    path: Path,
    target: Opens,
    count: int,
    feeds: list[dict[str, Array]],
    threads: int | None,
    warmup_ms: float,
    duration_s: float,
) -> tuple[str, ...]:
    """The throughput of `count` sessions at once, as a note."""
    if count <= 1:
        return ()
    sessions = [target.open(path, threads=threads) for _ in range(count)]
    with lasting("streams", warmup_ms / 1000 + duration_s):
        rate = throughput(sessions, feeds, warmup_ms=warmup_ms, duration_s=duration_s)
    return (f"{count} streams at once: {rate:,.0f} inferences a second",)


def random_feeds(
    inputs: Sequence[TensorSpec],
    *,
    shapes: Shapes | None = None,
    count: int = _FEEDS,
    seed: int = 0,
) -> list[dict[str, Array]]:
    """Seeded inputs for a session: normal floats, 0 or 1 for integers and bools.

    An open first dimension is taken as a batch of 1; other open dimensions need `shapes`.

    Raises:
        ConfigError: an open dimension with no shape, a shape that does not fit, a name that is
            no input, an input type that cannot be made up.
    """
    shapes = shapes or {}
    unknown = sorted(set(shapes) - {spec.name for spec in inputs})
    if unknown:
        names = ", ".join(spec.name for spec in inputs)
        raise ConfigError(f"--shape must name an input of the model ({names}), got {unknown[0]!r}")
    sizes = {spec.name: _shape(spec, shapes.get(spec.name)) for spec in inputs}
    _refuse_too_much(count * 4 * sum(map(prod, sizes.values())))
    random = np.random.default_rng(seed)
    return [
        {spec.name: _values(spec, sizes[spec.name], random) for spec in inputs}
        for _ in range(count)
    ]


def _refuse_too_much(needed: int) -> None:
    """Refuse inputs of so many bytes that no memory holds them."""
    memory = memory_bytes()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"random inputs must fit into the memory, got {size(needed)} of them and a machine of"
            f" {size(memory)}; give a smaller --shape"
        )


def model_size(path: Path) -> int:
    """Bytes of an ONNX file and of the external data that it names.

    A file in ONNX Runtime's own format names none.

    Raises:
        ConfigError: the file is not there.
    """
    import onnx
    from onnx.external_data_helper import uses_external_data

    data = read_bytes(path, what="a model", error=ConfigError)
    total = len(data)
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's DecodeError: the session was opened, so this is no ONNX protobuf
        return total
    beside = {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = (path.parent / name for name in beside)
    return total + sum(int(file.stat().st_size) for file in files if file.is_file())


def _paths(engine: Path, against: Path | None) -> dict[str, Path]:
    """Label -> path, the one compared with first; labels are file names, or paths where alike."""
    if against is None:
        return {engine.name: engine}
    if engine.name != against.name:
        return {against.name: against, engine.name: engine}
    if engine == against:
        raise ConfigError(f"--against needs another model than the engine, got {engine} twice")
    return {str(against): against, str(engine): engine}


def _shared_feeds(
    sessions: Mapping[str, Session], shapes: Shapes, seed: int
) -> list[dict[str, Array]]:
    return random_feeds(_shared_inputs(sessions), shapes=shapes, seed=seed)


def _shared_inputs(sessions: Mapping[str, Session]) -> Sequence[TensorSpec]:
    """The inputs that all sessions have, as the first one describes them."""
    wanted = {label: {spec.name: spec.dtype for spec in s.inputs} for label, s in sessions.items()}
    first, last = next(iter(wanted)), next(reversed(wanted))
    if wanted[first] != wanted[last]:
        raise ConfigError(
            f"models measured side by side must have the same inputs,"
            f" got {wanted[first]} and {wanted[last]}"
        )
    return sessions[first].inputs


def _judged(sessions: Mapping[str, Session], feed: Feed) -> dict[str, Accuracy]:
    """How far the second session's outputs are from the first one's."""
    if len(sessions) < 2:
        return {}
    left, right = sessions.values()
    comparison = Comparison(left, right)
    with phase("accuracy", len(feed), "samples") as step, feed.samples() as samples:
        for sample in samples:
            comparison.add(sample, left.run(sample), right.run(sample), count=feed.count)
            step()
    return {list(sessions)[-1]: comparison.result()}


def _by_output(accuracy: Accuracy | None) -> tuple[str, ...]:
    """Each output's figures as a note; of one alone the table tells."""
    if accuracy is None or len(accuracy.outputs) < 2:
        return ()
    return tuple(
        f"output {one.name!r}: {one.sqnr_db:.1f} dB, cosine {one.cosine_mean:.5f}"
        for one in accuracy.outputs
    )


def _both(
    paths: Mapping[str, Path], runtimes: Mapping[str, Opens]
) -> tuple[dict[str, Path], dict[str, Opens]]:
    """One engine in ONNX Runtime and in OpenVINO.

    Raises:
        ConfigError: there is a second engine, or it is no ONNX model.
    """
    (label, path), *others = paths.items()
    if others:
        raise ConfigError(
            f"two runtimes take one engine, got {' and '.join(paths)}; leave --against away, or"
            " --runtime"
        )
    if not isinstance(runtimes[label], OnnxRuntime):
        raise ConfigError(
            f"OpenVINO reads ONNX models, got {path}; name the .onnx file, or leave --runtime away"
        )
    here, there = f"{label} in ONNX Runtime", f"{label} in OpenVINO"
    return {here: path, there: path}, {here: runtimes[label], there: _Openvino()}


class _Openvino:
    """What opens a model there."""

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        return OpenvinoSession.open(engine, threads=threads)


def _shape(spec: TensorSpec, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is not None:
        fits = len(given) == len(spec.shape) and all(
            not isinstance(own, int) or own == dim
            for own, dim in zip(spec.shape, given, strict=False)
        )
        if not fits or any(dim < 1 for dim in given):
            got = "x".join(map(str, given))
            raise ConfigError(f"input {spec.name!r} has shape {_words(spec)}, got --shape {got}")
        return tuple(given)
    dims = tuple(
        1 if axis == 0 and not isinstance(d, int) else d for axis, d in enumerate(spec.shape)
    )
    if not all(isinstance(dim, int) for dim in dims):
        example = "x".join(
            "1" if i == 0 else "224" if not isinstance(d, int) else str(d)
            for i, d in enumerate(spec.shape)
        )
        raise ConfigError(
            f"every dimension of an input but the batch must be known, got {_words(spec)}"
            f" for {spec.name!r}; give it, e.g. --shape {quote(f'{spec.name}:{example}')}"
        )
    return tuple(int(dim) for dim in dims if isinstance(dim, int))


def _words(spec: TensorSpec) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in spec.shape)}]"


def _values(spec: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if np.issubdtype(dtype, np.floating):
        return random.standard_normal(shape, np.float32).astype(dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return random.integers(0, 2, shape).astype(dtype)
    raise ConfigError(f"input {spec.name!r} must be of numbers to be made up, got {spec.dtype}")
