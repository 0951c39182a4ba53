"""`Findings`: all results of a run as plain frozen values, every one of them optional.

An engine's speed is compared with its `find_rivals`, float engines of the same runtime and device:
the time of a float model on the CPU says nothing about int8 on a GPU.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path

from deploy.errors import ConfigError
from deploy.machine import Machine
from deploy.metrics.latency import speed_up
from deploy.metrics.levels import UNUSABLE
from deploy.report.parts import (
    CalibrationPart,
    EarlierPart,
    EngineRow,
    FeedPart,
    FileRow,
    ModelPart,
    RequestPart,
    TargetPart,
    WorkPart,
)
from deploy.report.previews import PAGE_ONLY


def find_rivals(engines: Iterable[EngineRow], engine: EngineRow) -> tuple[EngineRow, ...]:
    """Return the measured float engines to compare an engine's speed with, the main one first.

    These are the float engines built for the same target, the narrowest type first: a user would
    run that one instead of int8. If there are none, it is the float model, provided that it ran on
    the same kind of device: the time on a CPU says nothing about int8 on a GPU.
    """
    if engine.is_float or engine.latency is None:
        return ()

    baselines = []
    references = []
    for rival in engines:
        if rival.latency is None:
            continue
        if rival.baseline and rival.target == engine.target:
            baselines.append(rival)
        if rival.reference and rival.on_device == engine.on_device:
            references.append(rival)
    # targets build the widest type first, such as float32 and then float16
    return tuple(reversed(baselines)) or tuple(references)


def with_speed(engine: EngineRow, rivals: Sequence[EngineRow]) -> EngineRow:
    """Return an engine's row with its speed beside the first of its `find_rivals`, if any."""
    if not rivals:
        return engine
    rival_latency = rivals[0].latency
    assert rival_latency is not None and engine.latency is not None
    return replace(engine, speed=speed_up(rival_latency, engine.latency))


def speed_over(rival: EngineRow, engine: EngineRow) -> float:
    """Return the rival's p50 over the engine's; both must be measured."""
    return rival.p50_ms / engine.p50_ms


def size_over(rival: EngineRow, engine: EngineRow) -> float | None:
    """Return the size of the rival's file over the engine's; None if one is not known."""
    if not rival.size_bytes or not engine.size_bytes:
        return None
    return rival.size_bytes / engine.size_bytes


SCHEMA = "calib8-report/2"  # 2: nodes, tensors and layers moved into their target


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results of a run as plain values; `Report` adds the display, and explains each field."""

    title: str = "calib8"
    model: ModelPart | None = None
    feed: FeedPart | None = None
    calibration: CalibrationPart | None = None
    targets: tuple[TargetPart, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    machine: Machine | None = None
    files: tuple[FileRow, ...] = ()
    work: WorkPart | None = None
    request: RequestPart | None = None
    earlier: tuple[EarlierPart, ...] = ()
    alerts: tuple[str, ...] = ()
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
        engine_by_label = {engine.label: engine for engine in self.engines}
        engine_by_name = self.engine_by_target | engine_by_label
        if name not in engine_by_name:
            names = ", ".join(engine_by_name) or "none"
            raise ConfigError(f"an engine must be one of {names}, got {name!r}")
        return engine_by_name[name]

    @property
    def engine_by_target(self) -> dict[str, EngineRow]:
        """Target -> its int8 engine."""
        return {engine.target: engine for engine in self.engines if not engine.is_float}

    @property
    def device_texts(self) -> tuple[str, ...]:
        """The accelerators of the machine, as text."""
        if self.machine is None:
            return ()
        return tuple(device.description for device in self.machine.devices)

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
        """All alerts and notes: on the run, the targets, their engines and latency, each once.

        A sentence on an engine or target begins with its label; one on several, with all labels.
        """
        labels_by_text: dict[str, list[str]] = {}
        for engine in self.engines:
            for text in _engine_notes(engine, self.target_of(engine)):
                labels_by_text.setdefault(text, []).append(engine.label)
        for target in self.targets:
            if target.name not in self.engine_by_target:  # else its notes are among the engine's
                for text in target.notes:
                    labels_by_text.setdefault(text, []).append(target.name)

        sentences = [*self.all_alerts, *self.notes]
        for text, labels in labels_by_text.items():
            sentences.append(f"{', '.join(dict.fromkeys(labels))}: {text}")
        return tuple(dict.fromkeys(sentences))

    def target_of(self, engine: EngineRow) -> TargetPart | None:
        """Return the target an engine was built for; None for a float engine."""
        if engine.is_float:
            return None
        return next((target for target in self.targets if target.name == engine.target), None)


def _engine_notes(engine: EngineRow, target: TargetPart | None) -> Iterator[str]:
    """Yield the sentences on an engine, its target and its latency."""
    if engine.accuracy:
        yield from engine.accuracy.problems
        if engine.path is None and not engine.reference:
            yield (
                "not run on its device; its accuracy is that of a model which computes the same in"
                " ONNX Runtime"
            )
    yield from engine.notes
    if target:
        yield from target.notes
    if engine.latency:
        if engine.latency.is_cpu_time:
            yield (
                "its time is CPU time of the one thread that runs it, which other programs do not"
                " prolong"
            )
        yield from engine.latency.warnings


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
    """Return a value as JSON types.

    Empty fields of dataclasses are left out if they have a default, with which they are read again.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    write_json = getattr(value, "to_json", None)  # a class that writes itself in another way
    if callable(write_json):
        return to_plain(write_json())
    if is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, object] = {}
        for stored_field in fields(value):
            item = getattr(value, stored_field.name)
            is_required = (
                stored_field.default is MISSING and stored_field.default_factory is MISSING
            )
            is_stored = is_required or item not in (None, (), {})
            if is_stored and stored_field.metadata != PAGE_ONLY:
                plain[stored_field.name] = to_plain(item)
        return plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_plain, value))
    if isinstance(value, float):  # also numpy's float64
        number = float(value)
        return number if math.isfinite(number) else str(number)
    to_number = getattr(value, "item", None)  # of a numpy scalar
    if callable(to_number):
        return to_plain(to_number())
    return value.as_posix() if isinstance(value, Path) else str(value)
