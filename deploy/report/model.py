"""`Findings`: all results of a run as plain frozen values, every one of them optional.

An engine's speed is compared with its `find_rivals`, float engines of the same runtime and device:
the time of a float model on the CPU says nothing about int8 on a GPU.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path

from deploy.errors import ConfigError
from deploy.machine import Machine
from deploy.metrics.latency import speed_up
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


def find_rivals(engines: Iterable[EngineRow], engine: EngineRow) -> tuple[EngineRow, ...]:
    """Return the measured float engines to compare an engine's speed with, the main one first.

    These are the float engines built for the same target, narrowest type first, since one would
    use it instead of int8; else the float model, if it ran on the same kind of device.
    """
    if engine.reference or engine.baseline or engine.latency is None:
        return ()
    measured = [each for each in engines if each.latency is not None]
    of_target = [each for each in measured if each.baseline and each.target == engine.target]
    references = [
        each for each in measured if each.reference and each.on_device == engine.on_device
    ]
    return tuple(reversed(of_target)) or tuple(references)


def with_speed(engines: Iterable[EngineRow], engine: EngineRow) -> EngineRow:
    """Return an engine's row with its speed beside the first of its rivals, if it has one."""
    for rival in find_rivals(engines, engine)[:1]:
        assert rival.latency is not None and engine.latency is not None
        return replace(engine, speed=speed_up(rival.latency, engine.latency))
    return engine


def speed_over(rival: EngineRow, engine: EngineRow) -> float:
    """Return the rival's p50 over the engine's; both must be measured."""
    return rival.p50_ms / engine.p50_ms


SCHEMA = "calib8-report/2"  # 2: nodes, tensors and layers moved into their target


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results of a run.

    Attributes:
        targets: results per target, in the order requested.
        files: files written for no single target.
        seconds: step -> its duration.
        alerts: notes that need an action; `notes` has all others.
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
    alerts: tuple[str, ...] = ()  # those of `notes` that need an action
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> EngineRow | None:
        """The float model's row, if it was measured."""
        return next((engine for engine in self.engines if engine.reference), None)

    def engine(self, name: str) -> EngineRow:
        """Return the engine of a target, or the one with this label, such as "FP32".

        Raises:
            ConfigError: there is none.
        """
        labels = {engine.label: engine for engine in self.engines}
        by_target = {e.target: e for e in self.engines if not (e.reference or e.baseline)}
        if name not in (known := {**by_target, **labels}):
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
        """Whether an engine's verdict is UNUSABLE."""
        return any(e.verdict is not None and e.verdict.level == UNUSABLE for e in self.engines)

    @property
    def written(self) -> tuple[FileRow, ...]:
        """All files: each target's, then those of the run."""
        return (*(file for target in self.targets for file in target.files), *self.files)

    @property
    def all_alerts(self) -> tuple[str, ...]:
        """Notes that need an action, of the run and of each target."""
        return (*self.alerts, *(f"{t.name}: {text}" for t in self.targets for text in t.alerts))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Distinct sentences on the run, the targets, their engines and latency."""
        labels_of: dict[str, list[str]] = {}
        for engine in self.engines:
            target = self.target_of(engine)
            for text in (
                *(engine.accuracy.problems if engine.accuracy else ()),
                *_stand_in(engine, target),
                *engine.notes,
                *(target.notes if target else ()),
                *(engine.latency.warnings if engine.latency else ()),
            ):
                labels_of.setdefault(text, []).append(engine.label)
        measured = {engine.target for engine in self.engines if not engine.reference}
        for target in self.targets:
            for text in target.notes if target.name not in measured else ():
                labels_of.setdefault(text, []).append(target.name)
        prefixed = [
            f"{', '.join(dict.fromkeys(labels))}: {text}" for text, labels in labels_of.items()
        ]
        return tuple(dict.fromkeys((*self.all_alerts, *self.notes, *prefixed)))

    def target_of(self, engine: EngineRow) -> TargetPart | None:
        """Return the target an engine was built for; None for a float engine."""
        if engine.reference or engine.baseline:
            return None
        return next((target for target in self.targets if target.name == engine.target), None)


def _stand_in(engine: EngineRow, target: TargetPart | None) -> tuple[str, ...]:
    """Return a note on an engine that was judged without being built."""
    if engine.reference or engine.path is not None or engine.accuracy is None:
        return ()
    model = f"its {_grid(target)} model"
    return (f"not run on its device; its accuracy is that of {model} in ONNX Runtime",)


def _grid(target: TargetPart | None) -> str:
    """Return int8 or fp8; float if the nodes are known and none of them is quantized."""
    nodes = target.nodes if target is not None else ()
    if any(node.precision == "fp8" for node in nodes):
        return "fp8"
    return "int8" if not nodes or any(node.quantized for node in nodes) else "float"


_WORDS = frozenset({str, int, bool, type(None)})  # types that JSON holds unchanged


def to_json(report: Findings) -> dict[str, object]:
    """Return plain JSON types under `schema`; missing parts are left out.

    Non-finite numbers become "inf", "-inf" or "nan".
    """
    return {"schema": SCHEMA, **to_plain_object(report)}


def to_plain_object(value: object) -> dict[str, object]:
    """Return a mapping or dataclass as a JSON object, see `to_plain`."""
    plain = to_plain(value)
    assert isinstance(plain, dict)
    return plain


def to_plain(value: object) -> object:
    """Return a value as JSON types; empty fields of dataclasses are left out."""
    if type(value) in _WORDS:  # the usual case; the checks below are slower
        return value
    if callable(own := getattr(value, "to_json", None)):
        return to_plain(own())
    if is_dataclass(value) and not isinstance(value, type):
        stored = [f for f in fields(value) if f.metadata != DRAWN]
        items = {f.name: getattr(value, f.name) for f in stored}
        return {key: to_plain(item) for key, item in items.items() if item not in (None, (), {})}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, bool | int | str | None) else _word(value)


def _word(value: object) -> object:
    """Convert anything else, such as a path or a numpy scalar."""
    item = getattr(value, "item", None)
    if callable(item):
        return to_plain(item())
    return value.as_posix() if isinstance(value, Path) else str(value)
