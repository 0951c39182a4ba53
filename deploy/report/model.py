"""`Findings`: everything a run found, as plain frozen values. Every part is optional.

What holds for the whole run stands once; what a target alone decides (coverage, ranges, method,
files) stands in its `TargetPart`. `deploy.report.Report` is this value with a face.

What an engine's speed is held against: a float engine of the same runtime and device.

A float model on the CPU tells nothing of int8 on a GPU, and its time is in no ratio with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from deploy.errors import ConfigError
from deploy.machine import Machine
from deploy.metrics.levels import UNUSABLE
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    ModelPart,
    TargetPart,
    WorkPart,
)
from deploy.report.previews import DRAWN

_APART = 1.5  # times, from which two ways to tell the speed do not tell the same


def rivals(engines: Iterable[EngineRow], engine: EngineRow) -> tuple[EngineRow, ...]:
    """The measured float engines that an engine may be held against, the one that counts first.

    Those that were built beside it, the narrowest type first, since it is what one would use but
    for int8; else the float model, where it ran on the same kind of device.
    """
    if engine.reference or engine.baseline or engine.latency is None:
        return ()
    known = [each for each in engines if each.latency is not None]
    own = [each for each in known if each.baseline and each.target == engine.target]
    alike = [each for each in known if each.reference and each.on_device == engine.on_device]
    return tuple(reversed(own)) or tuple(alike)


def speed_up(rival: EngineRow, engine: EngineRow) -> float:
    """The rival's p50 over the engine's, as both stand in the report; both were measured."""
    return _p50(rival) / _p50(engine)


def slower_ms(rival: EngineRow, engine: EngineRow) -> float:
    """How much longer the engine takes than its rival, by p50, in ms."""
    return _p50(engine) - _p50(rival)


def by_fastest(rival: EngineRow, engine: EngineRow) -> float | None:
    """`speed_up` by the fastest runs, where p50 tells another; None where it does not.

    A run that waits for other programs takes a time slice of theirs, however short it is by itself;
    where most of one engine's runs wait and few of the other's, p50 compares the waiting.
    """
    usual = max(speed_up(rival, engine), 1e-6)
    best = _fastest(rival) / _fastest(engine)
    return best if max(usual / best, best / usual) > _APART else None


def in_doubt(engines: Iterable[EngineRow], engine: EngineRow) -> str:
    """What to say where the fastest runs tell another speed than p50; "" where they agree."""
    for rival in rivals(engines, engine)[:1]:
        best = by_fastest(rival, engine)
        if best is not None:
            return (
                f"by its fastest run {best:.2f}x, by p50 {speed_up(rival, engine):.2f}x as fast as"
                f" {rival.label}: other programs ran, or the inputs differ in size; measure again"
                " on a quiet machine"
            )
    return ""


def _fastest(engine: EngineRow) -> float:
    assert engine.latency is not None
    return max(engine.latency.latency.min, 1e-6)  # a clock that stands still


def _p50(engine: EngineRow) -> float:
    assert engine.latency is not None
    return engine.latency.latency.p50


SCHEMA = "calib8-report/2"  # 2: nodes, tensors and layers stand in their target


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a run found.

    Attributes:
        title: one line: what was done.
        targets: what each target got, in the order they were asked for.
        files: what was written for no target alone.
        seconds: step -> time it took.
        work: what the run cost, counted.
        notes: anything a reader must know, in sentences.
    """

    title: str = "calib8"
    model: ModelPart | None = None
    feed: FeedPart | None = None
    calibration: CalibrationPart | None = None
    targets: tuple[TargetPart, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    machine: Machine | None = None
    files: tuple[FileRow, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    work: WorkPart | None = None
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> EngineRow | None:
        """The float model's row, where it was measured."""
        return next((engine for engine in self.engines if engine.reference), None)

    def engine(self, name: str) -> EngineRow:
        """The engine of a target, or the one with this label, such as "FP32".

        Raises:
            ConfigError: there is none.
        """
        labels = {engine.label: engine for engine in self.engines}
        own = {e.target: e for e in self.engines if not (e.reference or e.baseline)}
        if name not in (known := {**own, **labels}):
            raise ConfigError(
                f"an engine must be one of {', '.join(known) or 'none'}, got {name!r}"
            )
        return known[name]

    @property
    def failed(self) -> bool:
        """Whether a target could not be built."""
        return any(target.error for target in self.targets)

    @property
    def unusable(self) -> bool:
        """Whether an engine's verdict says so."""
        return any(e.verdict is not None and e.verdict.level == UNUSABLE for e in self.engines)

    @property
    def written(self) -> tuple[FileRow, ...]:
        """Every file: each target's, then those of the run."""
        return (*(file for target in self.targets for file in target.files), *self.files)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences of the run, the targets, their engines and latency, each once."""
        whose: dict[str, list[str]] = {}
        for engine in self.engines:
            for text in _said_of(engine, self.target_of(engine), self.engines):
                whose.setdefault(text, []).append(engine.label)
        measured = {engine.target for engine in self.engines if not engine.reference}
        for target in self.targets:
            for text in target.notes if target.name not in measured else ():
                whose.setdefault(text, []).append(target.name)
        said = [f"{', '.join(dict.fromkeys(labels))}: {text}" for text, labels in whose.items()]
        return tuple(dict.fromkeys((*self.notes, *said)))

    def target_of(self, engine: EngineRow) -> TargetPart | None:
        """What is known of the target that an engine was built for; of a float one nothing."""
        if engine.reference or engine.baseline:
            return None
        return next((target for target in self.targets if target.name == engine.target), None)


def _said_of(
    engine: EngineRow, target: TargetPart | None, engines: tuple[EngineRow, ...]
) -> tuple[str, ...]:
    """All sentences on one engine, the gravest first."""
    return (
        *(engine.accuracy.problems if engine.accuracy else ()),
        *_stand_in(engine, target),
        *engine.notes,
        *(target.notes if target else ()),
        *filter(None, [in_doubt(engines, engine)]),
        *(engine.latency.warnings if engine.latency else ()),
    )


def _stand_in(engine: EngineRow, target: TargetPart | None) -> tuple[str, ...]:
    """What to say of an engine that was judged without having been built."""
    if engine.reference or engine.path is not None or engine.accuracy is None:
        return ()
    model = f"its {_grid(target)} model"
    return (f"not run on its device; its accuracy is that of {model} in ONNX Runtime",)


def _grid(target: TargetPart | None) -> str:
    """int8 or fp8; float where the nodes are known and none of them left it."""
    nodes = target.nodes if target is not None else ()
    if any(node.precision == "fp8" for node in nodes):
        return "fp8"
    return "int8" if not nodes or any(node.quantized for node in nodes) else "float"


_WORDS = frozenset({str, int, bool, type(None)})  # as JSON holds them


@runtime_checkable
class _Jsonable(Protocol):
    def to_json(self) -> dict[str, object]: ...


def to_json(report: Findings) -> dict[str, object]:
    """Plain JSON types under `schema`; parts that are missing are left out.

    Numbers that JSON has no word for become "inf", "-inf" or "nan".
    """
    made = plain(report)
    assert isinstance(made, dict)
    return {"schema": SCHEMA, **made}


def plain(value: object) -> object:
    """A value as JSON holds it; a part's fields that are empty are left out."""
    if type(value) in _WORDS:  # most are; asking what they can do takes longer than the rest
        return value
    if isinstance(value, _Jsonable):
        return plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in fields(value) if f.metadata != DRAWN]
        held = {f.name: getattr(value, f.name) for f in kept}
        return {key: plain(item) for key, item in held.items() if item not in (None, (), {})}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, bool | int | str | None) else _word(value)


def _word(value: object) -> object:
    """Anything else as a word: a path, a numpy scalar."""
    item = getattr(value, "item", None)
    if callable(item):
        return plain(item())
    return value.as_posix() if isinstance(value, Path) else str(value)
