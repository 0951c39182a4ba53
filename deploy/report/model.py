"""`Findings`: everything a run found, as plain frozen values. Every part is optional.

What holds for the whole run stands once; what a target alone decides (coverage, ranges, method,
files) stands in its `TargetPart`. `deploy.report.Report` is this value with a face.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from deploy.errors import ConfigError
from deploy.machine import Machine
from deploy.metrics.levels import UNUSABLE
from deploy.report import speed
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
        *filter(None, [speed.in_doubt(engines, engine)]),
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
