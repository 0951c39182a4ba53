"""Builds side by side: each engine in a line, and what the builds differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.builds.read import Build
from deploy.errors import ConfigError
from deploy.report import EngineRow, figures, speed, truth
from deploy.report.verdict import Verdict

_DEFAULT = "default"
_COLUMNS = frozenset(("effort", "method"))  # options that have columns of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """One engine of one build.

    Attributes:
        build: name of the build.
        target: it was built for.
        verdict: what was thought of it; None where nothing was.
        error: why it could not be built; "" where it was.
        speed_up: over the float engine that it was held against, in its own build.
        p50_ms: median latency.
        size_bytes: of its file.
        task: what is left of what the float model says, in words; "" where it is not known.
        sqnr_db: of the worst part of the outputs.
        quantized, nodes: how many nodes run on a grid, of how many.
        method: what chose its ranges.
        effort: of the search, as it was asked for; "" where no file tells.
    """

    build: str
    target: str
    verdict: Verdict | None = None
    error: str = ""
    speed_up: float | None = None
    p50_ms: float | None = None
    size_bytes: int | None = None
    task: str = ""
    sqnr_db: float | None = None
    quantized: int = 0
    nodes: int = 0
    method: str = ""
    effort: str = ""


@dataclass(frozen=True, slots=True)
class SettingLine:
    """Something that the builds differ in: its name, and each build's value, "" for none."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """Builds side by side.

    Attributes:
        names: of the builds, as they were given.
        engines: a line each.
        differences: what the builds differ in.
        notes: what a reader must know, in sentences.
    """

    names: tuple[str, ...]
    engines: tuple[EngineLine, ...]
    differences: tuple[SettingLine, ...]
    notes: tuple[str, ...] = ()


def compare(builds: Sequence[Build]) -> Builds:
    """Hold builds side by side.

    Raises:
        ConfigError: fewer than two.
    """
    if len(builds) < 2:
        raise ConfigError(f"two builds at least can be compared, got {len(builds)}; name another")
    return Builds(
        names=tuple(build.name for build in builds),
        engines=tuple(line for build in builds for line in _lines(build)),
        differences=tuple(_differences(builds)),
        notes=tuple(_notes(builds)),
    )


def _lines(build: Build) -> Iterator[EngineLine]:
    effort = "" if build.options is None else build.options.get("effort", _DEFAULT)
    for engine in build.report.engines:
        if not (engine.reference or engine.baseline):
            yield _line(build, engine, effort)
    measured = {engine.target for engine in build.report.engines if not engine.reference}
    for target in build.report.targets:
        if target.error and target.name not in measured:
            yield EngineLine(build=build.name, target=target.name, error=target.error)


def _line(build: Build, engine: EngineRow, effort: str) -> EngineLine:
    target = build.report.target_of(engine)
    rival = next(iter(speed.rivals(build.report.engines, engine)), None)
    accuracy = engine.accuracy
    return EngineLine(
        build=build.name,
        target=engine.target,
        verdict=engine.verdict,
        error=target.error if target else "",
        speed_up=None if rival is None else speed.speed_up(rival, engine),
        p50_ms=engine.latency.latency.p50 if engine.latency else None,
        size_bytes=engine.size_bytes,
        task=_task(engine),
        sqnr_db=truth.sqnr(accuracy) if accuracy and (accuracy.parts or accuracy.outputs) else None,
        quantized=sum(node.quantized for node in target.nodes) if target else 0,
        nodes=len(target.nodes) if target else 0,
        method=target.method if target else "",
        effort=effort,
    )


def _task(engine: EngineRow) -> str:
    accuracy = engine.accuracy
    if accuracy is None:
        return ""
    if accuracy.precision is not None:
        return f"mAP {figures.percent(accuracy.precision.candidate)}"
    if accuracy.top1_candidate is not None:
        return f"top-1 {figures.percent(accuracy.top1_candidate)}"
    return "" if accuracy.task is None else f"{accuracy.task.figure} {accuracy.task.count}"


def _differences(builds: Sequence[Build]) -> Iterator[SettingLine]:
    """Options and circumstances that are not the same everywhere."""
    told = [{**dict(_circumstances(build)), **(build.options or {})} for build in builds]
    for name in dict.fromkeys(name for one in told for name in one):
        values = tuple(one.get(name, "") for one in told)
        if len(set(values)) > 1 and name not in _COLUMNS:
            yield SettingLine(name, values)


def _circumstances(build: Build) -> Iterator[tuple[str, str]]:
    """What a report tells of how it came about, under the names of options where there are any."""
    report = build.report
    if report.model:
        yield "model", report.model.path
    if report.feed:
        yield "images", report.feed.source
        yield "samples", str(report.feed.samples)
        yield "pictures", report.feed.prepared
    yield "target", ", ".join(target.name for target in report.targets)
    for target in report.targets if build.options is None else ():
        yield f"options of {target.name}", target.typed
    if report.machine:
        yield "machine", f"{report.machine.cpu}, {figures.count(report.machine.cores, 'core')}"
        yield from ((f"version of {k}", v) for k, v in report.machine.versions.items())


def _notes(builds: Sequence[Build]) -> Iterator[str]:
    machines = {(m.cpu, m.cores, m.devices) if (m := b.report.machine) else None for b in builds}
    if len(machines) > 1:
        yield "they were measured on different machines: compare speed-ups, not milliseconds"
    digests = {build.report.feed.digest for build in builds if build.report.feed}
    if len(digests) > 1:
        yield "they were calibrated with different images"
