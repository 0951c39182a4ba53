"""Compares the engines and options of builds, as text and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from deploy.analysis.build_reader import StoredBuild, read_stored_build
from deploy.errors import ConfigError, counted
from deploy.report import Report, figures
from deploy.report.model import find_rivals, speed_over, to_plain_object
from deploy.report.parts import EngineRow, TargetPart
from deploy.report.screen import align_columns, entries
from deploy.report.tables import worst_figure
from deploy.report.verdict import Verdict
from deploy.terminal import PrintedResult, join_visible

BUILDS_SCHEMA = "calib8-builds/1"
_DEFAULT_EFFORT = "default"
_COLUMN_OPTIONS = frozenset(("effort", "method"))  # options shown as columns of the engines
_HEADS = ("target", "verdict", "speed-up", "p50", "size", "task", "worst SQNR", "int8 nodes",
          "method", "effort")  # fmt: skip
_LEFT_COLUMNS = (0, 1, 2)  # build, target and verdict are aligned left


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """One engine of one build.

    Attributes:
        build: name of the build.
        target: name of the target.
        verdict: its verdict; None without one.
        error: why it could not be built; "" if it was.
        speed_up: over the float engine that it is compared with in its own build.
        p50_ms: median latency.
        size_bytes: size of its file.
        task: figure of the task as text; "" if unknown.
        sqnr_db: SQNR of the worst output slice.
        quantized: number of nodes in int8.
        nodes: number of nodes.
        method: calibration method; "" if unknown.
        effort: effort of the search; "" if unknown.
    """

    build: str
    target: str
    verdict: Verdict | None = None
    error: str
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
class SettingDifference:
    """A setting in which the builds differ.

    Attributes:
        name: name of the setting.
        values: each build's value, "" without one.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildComparison(PrintedResult):
    """Comparison of several builds; `repr` is its text for a screen.

    Attributes:
        names: names of the builds.
        engines: one entry per engine.
        differences: settings in which the builds differ.
        notes: sentences on whether the builds can be compared.
    """

    names: tuple[str, ...]
    engines: tuple[EngineSummary, ...]
    differences: tuple[SettingDifference, ...]
    notes: tuple[str, ...]

    def to_screen(self) -> str:
        """Return the comparison as plain text, without colours."""
        blocks = [
            [f"{counted(len(self.names), 'build')} compared"],
            list(_engine_table(self)),
            list(entries("Why", _reasons(self))),
            list(entries("They differ", _difference_lines(self))),
            list(entries("Notes", self.notes)),
        ]
        return "\n\n".join(join_visible(block) for block in blocks if block) + "\n"

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
        return to_plain_object({"schema": BUILDS_SCHEMA, **asdict(self)})


def report(*folders: Path | str) -> Report | BuildComparison:
    """Read the report of one build, or compare several builds; nothing is run or measured.

    Args:
        folders: output folders of builds, or their report.json.

    Raises:
        ConfigError: no folder, or one without a report that can be read.
    """
    builds = [read_stored_build(folder) for folder in folders]
    if len(builds) == 1:
        return builds[0].report
    if not builds:
        raise ConfigError("two builds at least can be compared, got 0; name another")
    return BuildComparison(
        names=tuple(build.name for build in builds),
        engines=tuple(chain.from_iterable(map(_summarize_engines, builds))),
        differences=tuple(_differences(builds)),
        notes=tuple(_notes(builds)),
    )


def _summarize_engines(build: StoredBuild) -> Iterator[EngineSummary]:
    """Yield the int8 engines of a build, then its targets that failed."""
    measured_targets = set()
    for engine in build.report.engines:
        if engine.reference:
            continue
        measured_targets.add(engine.target)
        if not engine.baseline:
            yield _summarize_engine(build, engine)
    for target in build.report.targets:
        if target.error and target.name not in measured_targets:
            yield EngineSummary(build=build.name, target=target.name, error=target.error)


def _summarize_engine(build: StoredBuild, engine: EngineRow) -> EngineSummary:
    """Return the figures of one int8 engine, as far as its build has them."""
    effort = ""
    if build.options is not None:
        effort = build.options.get("effort", _DEFAULT_EFFORT)
    # the float engines of the build that were measured too; the first is the main one
    rivals = find_rivals(build.report.engines, engine)
    sqnr_db = None
    accuracy = engine.accuracy
    if accuracy is not None and (accuracy.parts or accuracy.outputs):
        sqnr_db = worst_figure(accuracy, "sqnr_db")
    target = build.report.target_of(engine) or TargetPart(name=engine.target)
    return EngineSummary(
        build=build.name,
        target=engine.target,
        verdict=engine.verdict,
        error=target.error,
        speed_up=speed_over(rivals[0], engine) if rivals else None,
        p50_ms=None if engine.latency is None else engine.p50_ms,
        size_bytes=engine.size_bytes,
        task=_describe_task(engine),
        sqnr_db=sqnr_db,
        quantized=sum(node.quantized for node in target.nodes),
        nodes=len(target.nodes),
        method=target.method,
        effort=effort,
    )


def _describe_task(engine: EngineRow) -> str:
    """Return the figure that judges an engine: mAP, top-1, or the task's; "" without any."""
    accuracy = engine.accuracy
    if accuracy is None:
        return ""
    if accuracy.precision is not None:
        return f"mAP {figures.percent(accuracy.precision.candidate)}"
    if accuracy.top1_candidate is not None:
        return f"top-1 {figures.percent(accuracy.top1_candidate)}"
    if accuracy.task is not None:
        return f"{accuracy.task.figure} {accuracy.task.count}"
    return ""


def _differences(builds: Sequence[StoredBuild]) -> Iterator[SettingDifference]:
    """Yield the options and facts that differ, unless the table of engines shows them."""
    builds_settings = []
    for build in builds:
        builds_settings.append({**dict(_build_facts(build)), **(build.options or {})})
    for name in dict.fromkeys(chain.from_iterable(builds_settings)):
        values = tuple(settings.get(name, "") for settings in builds_settings)
        if len(set(values)) > 1 and name not in _COLUMN_OPTIONS:
            yield SettingDifference(name, values)


def _build_facts(build: StoredBuild) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the model, images, targets and machine of a build.

    A build from Python has no file of options; for it the options of each target are yielded too.
    """
    report = build.report
    if report.model:
        yield "model", report.model.path
    if report.feed:
        yield "images", report.feed.source
        yield "samples", str(report.feed.samples)
        yield "pictures", report.feed.prepared  # their preprocessing as text
    yield "target", ", ".join(target.name for target in report.targets)
    if build.options is None:
        for target in report.targets:
            yield f"options of {target.name}", target.options_text
    if report.machine:
        yield "machine", report.machine.cpu_text
        for package, version in report.machine.versions.items():
            yield f"version of {package}", version


def _notes(builds: Sequence[StoredBuild]) -> Iterator[str]:
    """Yield sentences on what makes figures of the builds hard to compare."""
    machines = set()
    for build in builds:
        if machine := build.report.machine:
            machines.add((machine.cpu, machine.cores, machine.devices))
    if len(machines) > 1:
        yield "they were measured on different machines: compare speed-ups, not milliseconds"
    digests = {build.report.feed.digest for build in builds if build.report.feed}
    if len(digests) > 1:
        yield "they were calibrated with different images"


def _cells(engine: EngineSummary) -> list[str]:
    """Return an engine's cells in the table of engines (`_HEADS`); "" where unknown."""
    level = ""
    if engine.error:
        level = figures.FAILED
    elif engine.verdict:
        level = engine.verdict.level
    node_count = f"{engine.quantized} of {engine.nodes}" if engine.nodes else ""
    speed_up = "" if engine.speed_up is None else figures.ratio(engine.speed_up)
    cells = (
        engine.target,
        level,
        speed_up,
        figures.milliseconds(engine.p50_ms),
        figures.size(engine.size_bytes),
        engine.task,
        figures.decibels(engine.sqnr_db),
        node_count,
        engine.method,
        engine.effort,
    )
    # NONE is the text that `figures` returns for an unknown number
    return ["" if cell == figures.NONE else cell for cell in cells]


def _engine_table(builds: BuildComparison) -> Iterator[str]:
    """Yield the table of engines, without empty columns."""
    rows = [["build", *_HEADS]]
    for engine in builds.engines:
        rows.append([engine.build, *_cells(engine)])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    yield from align_columns(list(zip(*columns, strict=True)), _LEFT_COLUMNS)


def _reasons(builds: BuildComparison) -> Iterator[str]:
    """Yield the reasons of every verdict and of every failure."""
    for engine in builds.engines:
        verdict_text = engine.verdict.text if engine.verdict else "nothing was measured"
        yield f"{engine.build}, {engine.target}: {engine.error or verdict_text}"


def _difference_lines(builds: BuildComparison) -> Iterator[str]:
    """Yield one sentence per difference; builds with equal values are listed together."""
    for difference in builds.differences:
        names_by_value: dict[str, list[str]] = {}
        for name, value in zip(builds.names, difference.values, strict=True):
            names_by_value.setdefault(value or figures.NONE, []).append(name)
        values = [f"{value} ({', '.join(names)})" for value, names in names_by_value.items()]
        yield f"{difference.name}: {'; '.join(values)}"
