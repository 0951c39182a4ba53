"""`Report`: everything a run found, as plain frozen values. Every part is optional."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from calibrators.scales import Scales
from deploy.machine import Machine
from deploy.metrics.accuracy import Accuracy, OutputAccuracy
from deploy.metrics.latency import Latency

SCHEMA = "calib8-report/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The model that was given. `inputs` and `outputs` are words: "image float32 [N,1,28,28]"."""

    path: str
    size_bytes: int | None = None
    opset: int | None = None
    nodes: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPart:
    """What was fed: where from, how many, prepared how, what was left out."""

    source: str
    samples: int
    preprocess: Mapping[str, object] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPart:
    """How the scales came about.

    Attributes:
        method: name of the search.
        reused: True where a cache was taken over and nothing was run.
        reason: why it was reused, or why not, in one sentence.
        seconds: time of observing and searching; None where reused.
        cache: path of the cache.
        options: the search's options.
    """

    method: str
    reused: bool = False
    reason: str = ""
    seconds: float | None = None
    cache: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of the model: int8, or float and why."""

    name: str
    op: str
    int8: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One calibrated tensor, in real units; `clipped` is the share of values outside [lo, hi]."""

    name: str
    observed_min: float
    observed_max: float
    lo: float
    hi: float
    amax: float
    method: str
    clipped: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One model or engine that was measured.

    Attributes:
        label: head of its column: "FP32", "int8", or the target's name where there are several.
        reference: True for the float model that the others are compared with.
        size_bytes: file and external data together.
        load_ms: time from the file to a session ready to run.
    """

    label: str
    reference: bool = False
    target: str = "onnxruntime"
    path: str | None = None
    size_bytes: int | None = None
    load_ms: float | None = None
    threads: int | None = None
    latency: Latency | None = None
    accuracy: Accuracy | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file that was written, and what it is for."""

    role: str
    path: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a run found.

    Attributes:
        title: one line: what was done.
        layers: inner tensors of the engine against the float model's, in the model's order.
        seconds: step -> time it took.
        notes: anything a reader must know, in sentences.
    """

    title: str = "calib8"
    model: ModelPart | None = None
    feed: FeedPart | None = None
    calibration: CalibrationPart | None = None
    nodes: tuple[NodeRow, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    layers: tuple[OutputAccuracy, ...] = ()
    machine: Machine | None = None
    files: tuple[FileRow, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a target was not built because of an error."""
        return False

    @property
    def reference(self) -> EngineRow | None:
        """The float model's row, where it was measured."""
        return next((engine for engine in self.engines if engine.reference), None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences of the run, the engines, their latency and accuracy, each once."""
        whose: dict[str, list[str]] = {}
        for engine in self.engines:
            accuracy = engine.accuracy.problems if engine.accuracy else ()
            latency = engine.latency.warnings if engine.latency else ()
            for text in (*accuracy, *_stand_in(engine), *engine.notes, *latency):
                whose.setdefault(text, []).append(engine.label)
        said = [f"{', '.join(dict.fromkeys(labels))}: {text}" for text, labels in whose.items()]
        return tuple(dict.fromkeys((*self.notes, *said)))


def _stand_in(engine: EngineRow) -> tuple[str, ...]:
    """What to say of an engine that was judged without having been built."""
    if engine.reference or engine.path is not None or engine.accuracy is None:
        return ()
    return ("not run on its device; its accuracy is that of its int8 model in ONNX Runtime",)


@runtime_checkable
class _Jsonable(Protocol):
    def to_json(self) -> dict[str, object]: ...


def to_json(report: Report) -> dict[str, object]:
    """Plain JSON types under `schema`; parts that are missing are left out.

    Numbers that JSON has no word for become "inf", "-inf" or "nan".
    """
    plain = _plain(report)
    assert isinstance(plain, dict)
    return {"schema": SCHEMA, **plain}


def tensor_rows(
    scales: Scales,
    *,
    clipped: Mapping[str, float] | None = None,
    layers: Sequence[OutputAccuracy] = (),
) -> tuple[TensorRow, ...]:
    """The rows of a calibration's tensors, with what is known of each."""
    sqnr = {layer.name: layer.sqnr_db for layer in layers}
    return tuple(
        TensorRow(
            name=name,
            observed_min=scale.observed_min,
            observed_max=scale.observed_max,
            lo=scale.lo,
            hi=scale.hi,
            amax=scale.amax,
            method=scale.method,
            clipped=(clipped or {}).get(name),
            sqnr_db=sqnr.get(name),
        )
        for name, scale in scales.items()
    )


def _plain(value: object) -> object:
    if isinstance(value, _Jsonable):
        return _plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        return {key: _plain(item) for key, item in held.items() if item not in (None, (), {})}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, bool | int | str | None) else _word(value)


def _word(value: object) -> object:
    """Anything else as a word: a path, a numpy scalar."""
    item = getattr(value, "item", None)
    if callable(item):
        return _plain(item())
    return value.as_posix() if isinstance(value, Path) else str(value)
