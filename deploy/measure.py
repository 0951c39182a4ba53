"""Speed and accuracy of what was built, side by side with the float model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deploy.errors import SdkMissingError
from deploy.graph.saturation import bounds
from deploy.metrics.accuracy import Accuracy, OutputAccuracy, compare
from deploy.metrics.latency import Latency, measure
from deploy.metrics.layerwise import compare_layers, shared_tensors
from deploy.ort import OrtSession
from deploy.report import EngineRow
from deploy.targets.base import Built, Target
from deploy.tensors import Array, Samples, Session

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
        layers: inner tensors of the first engine against the float model's.
        notes: sentences on how the figures came about.
    """

    engines: tuple[EngineRow, ...]
    layers: tuple[OutputAccuracy, ...] = ()
    notes: tuple[str, ...] = ()


def measured(
    loaded: LoadedModel,
    backends: Sequence[Target],
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

    Args:
        loaded: the float model.
        backends: the targets.
        built: what each of them made, in the same order.
        calibration: the calibration samples; some of them stand in for missing evaluation ones.
        evaluation: samples for the accuracy figures.
        labels: class of each evaluation sample.
        duration_s: seconds of latency runs a model; 0 leaves them out.
        threads: threads inside one inference.
        progress: draw bars on stderr.
    """
    reference, load_ms = _timed(lambda: OrtSession.open(_float_model(loaded), threads=threads))
    runnable = [_runnable(b, r, threads) for b, r in zip(backends, built, strict=True)]
    accuracy: dict[str, Accuracy] = {}
    for result, (session, _) in zip(built, runnable, strict=True):
        if session is not None:
            samples, count, some_labels = _samples(calibration, evaluation, labels)
            accuracy[result.target] = compare(
                reference, session, samples, labels=some_labels, count=count
            )
    on_device = {
        r.target: s
        for r, (s, _) in zip(built, runnable, strict=True)
        if s is not None and r.engine is not None
    }
    latency = _latencies({"FP32": reference, **on_device}, calibration, duration_s, progress)
    rows = [
        EngineRow(
            label="FP32",
            reference=True,
            path=str(loaded.source) if loaded.source else None,
            size_bytes=_size(loaded),
            load_ms=load_ms,
            threads=threads,
            latency=latency.get("FP32"),
        )
    ]
    for result, (_, ms) in zip(built, runnable, strict=True):
        rows.append(
            EngineRow(
                label="int8" if len(built) == 1 else result.target,
                target=result.target,
                path=str(result.engine) if result.engine else None,
                size_bytes=result.engine.stat().st_size if result.engine else None,
                load_ms=ms,
                threads=threads,
                latency=latency.get(result.target),
                accuracy=accuracy.get(result.target),
            )
        )
    return Figures(
        engines=tuple(rows),
        layers=_layers(loaded, built, calibration, threads),
        notes=_notes(accuracy, evaluation),
    )


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


def _samples(
    calibration: Samples, evaluation: Samples | None, labels: Sequence[int] | None
) -> tuple[itertools.islice[Mapping[str, Array]], int, Sequence[int] | None]:
    """The samples to compare on, how many images they hold, and their labels."""
    if evaluation is not None:
        known = labels if labels is not None else getattr(evaluation, "labels", None)
        return itertools.islice(evaluation.samples(), None), evaluation.count, known
    count = min(_CALIBRATION_SAMPLES, calibration.count)
    return itertools.islice(calibration.samples(), _CALIBRATION_SAMPLES), count, None


def _latencies(
    sessions: Mapping[str, Session], calibration: Samples, duration_s: float, progress: bool
) -> dict[str, Latency]:
    if duration_s <= 0:
        return {}
    feeds = list(itertools.islice(calibration.samples(), _FEEDS))
    return measure(sessions, feeds, duration_s=duration_s, progress=progress)


def _layers(
    loaded: LoadedModel, built: Sequence[Built], calibration: Samples, threads: int
) -> tuple[OutputAccuracy, ...]:
    """Inner tensors of the first target that ONNX Runtime can run."""
    import onnx

    path = next((r.runnable for r in built if r.runnable is not None), None)
    if path is None or not any(d.int8 for r in built for d in r.decisions):
        return ()
    candidate = onnx.load(path)
    if not shared_tensors(loaded.model, candidate):  # a fake-quant model has no DequantizeLinear
        return ()
    samples = itertools.islice(calibration.samples(), _LAYER_SAMPLES)
    layers = compare_layers(loaded.model, candidate, samples, threads=threads)
    clamped = bounds(loaded.model)  # far off by design, where their readers do not look
    return tuple(layer for layer in layers if layer.name not in clamped)


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
