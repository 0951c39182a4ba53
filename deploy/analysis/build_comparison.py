"""Compares the engines and options of builds, as text, page and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from deploy.analysis.build_reader import StoredBuild, read_stored_build
from deploy.errors import ConfigError
from deploy.report import Report, figures, model
from deploy.report.blocks import Bullets, Section, Table, block_html, sections_html
from deploy.report.model import to_plain_object
from deploy.report.page import page, verdicts
from deploy.report.parts import EngineRow
from deploy.report.screen import align_columns, entries
from deploy.report.tables import worst_figure
from deploy.report.verdict import Verdict
from deploy.terminal import join_visible as lines_of

BUILDS_SCHEMA = "calib8-builds/1"
_DEFAULT = "default"
_COLUMNS = frozenset(("effort", "method"))  # options shown as columns of the engines
_HEADS = ("target", "verdict", "speed-up", "p50", "size", "task", "worst SQNR", "int8 nodes",
          "method", "effort")  # fmt: skip
_LEFT = (0, 1, 2)  # left-aligned columns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """One engine of one build."""

    build: str
    target: str
    verdict: Verdict | None = None  # its verdict; None without one
    error: str = ""  # why it could not be built; "" where it was
    speed_up: float | None = None  # over the float engine that it is compared with in its own build
    p50_ms: float | None = None
    size_bytes: int | None = None
    task: str = ""  # figure of the task as text; "" if unknown
    sqnr_db: float | None = None  # SQNR of the worst output slice
    quantized: int = 0
    nodes: int = 0
    method: str = ""
    effort: str = ""  # effort of the search; "" if unknown


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting in which the builds differ, with its name and each build's value or ""."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildComparison:
    """Comparison of several builds; `repr` is its text for a screen."""

    names: tuple[str, ...]
    engines: tuple[EngineSummary, ...]  # one line per engine
    differences: tuple[SettingDifference, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return to_screen(self)


def report(*folders: Path | str) -> Report | BuildComparison:
    """Read the report of one build, or compare several builds; nothing is run or measured.

    Args:
        folders: output folders of builds, or their report.json.

    Raises:
        ConfigError: no folder, or one without a report that can be read.
    """
    builds = [read_stored_build(folder) for folder in folders]
    return builds[0].report if len(builds) == 1 else compare_builds(builds)


def compare_builds(builds: Sequence[StoredBuild]) -> BuildComparison:
    """Compare builds."""
    if len(builds) < 2:
        raise ConfigError(f"two builds at least can be compared, got {len(builds)}; name another")
    return BuildComparison(
        names=tuple(build.name for build in builds),
        engines=tuple(line for build in builds for line in _lines(build)),
        differences=tuple(_differences(builds)),
        notes=tuple(_notes(builds)),
    )


def _lines(build: StoredBuild) -> Iterator[EngineSummary]:
    effort = "" if build.options is None else build.options.get("effort", _DEFAULT)
    for engine in build.report.engines:
        if not (engine.reference or engine.baseline):
            yield _line(build, engine, effort)
    measured = {engine.target for engine in build.report.engines if not engine.reference}
    for target in build.report.targets:
        if target.error and target.name not in measured:
            yield EngineSummary(build=build.name, target=target.name, error=target.error)


def _line(build: StoredBuild, engine: EngineRow, effort: str) -> EngineSummary:
    target = build.report.target_of(engine)
    rival = next(iter(model.find_rivals(build.report.engines, engine)), None)
    accuracy = engine.accuracy
    return EngineSummary(
        build=build.name,
        target=engine.target,
        verdict=engine.verdict,
        error=target.error if target else "",
        speed_up=None if rival is None else model.speed_over(rival, engine),
        p50_ms=engine.latency.latency.p50 if engine.latency else None,
        size_bytes=engine.size_bytes,
        task=_task(engine),
        sqnr_db=worst_figure(accuracy, "sqnr_db")
        if accuracy and (accuracy.parts or accuracy.outputs)
        else None,
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


def _differences(builds: Sequence[StoredBuild]) -> Iterator[SettingDifference]:
    """Yield the options and circumstances that differ."""
    settings = [{**dict(_circumstances(build)), **(build.options or {})} for build in builds]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = tuple(one.get(name, "") for one in settings)
        if len(set(values)) > 1 and name not in _COLUMNS:
            yield SettingDifference(name, values)


def _circumstances(build: StoredBuild) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of what a report was made from and on."""
    report = build.report
    if report.model:
        yield "model", report.model.path
    if report.feed:
        yield "images", report.feed.source
        yield "samples", str(report.feed.samples)
        yield "pictures", report.feed.prepared
    yield "target", ", ".join(target.name for target in report.targets)
    for target in report.targets if build.options is None else ():
        yield f"options of {target.name}", target.options_text
    if report.machine:
        yield "machine", f"{report.machine.cpu}, {figures.count(report.machine.cores, 'core')}"
        yield from ((f"version of {k}", v) for k, v in report.machine.versions.items())


def _notes(builds: Sequence[StoredBuild]) -> Iterator[str]:
    machines = {(m.cpu, m.cores, m.devices) if (m := b.report.machine) else None for b in builds}
    if len(machines) > 1:
        yield "they were measured on different machines: compare speed-ups, not milliseconds"
    digests = {build.report.feed.digest for build in builds if build.report.feed}
    if len(digests) > 1:
        yield "they were calibrated with different images"


def to_screen(builds: BuildComparison) -> str:
    """Return the comparison as plain text, without colours."""
    blocks = [
        [f"{figures.count(len(builds.names), 'build')} compared"],
        list(_engines(builds)),
        list(entries("Why", _reasons(builds))),
        list(entries("They differ", _difference_lines(builds))),
        list(entries("Notes", builds.notes)),
    ]
    return "\n\n".join(lines_of(block) for block in blocks if block) + "\n"


def to_html(builds: BuildComparison) -> str:
    """Return the comparison as a page in the style of a build's report."""
    title = f"calib8: {figures.count(len(builds.names), 'build')} compared"
    judged = [(_engine_name(one), one.verdict) for one in builds.engines if one.verdict]
    troubles = [f"{_engine_name(one)} failed: {one.error}" for one in builds.engines if one.error]
    body = (
        f"<h1>{escape(title)}</h1>",
        verdicts(judged),
        block_html(Bullets(troubles, "troubles")) if troubles else "",
        block_html(Bullets(builds.notes)) if builds.notes else "",
        *sections_html(list(_sections(builds))),
    )
    return page(title, "\n".join(body))


def to_json(builds: BuildComparison) -> dict[str, object]:
    """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
    return to_plain_object({"schema": BUILDS_SCHEMA, **asdict(builds)})


def _cells(one: EngineSummary) -> list[str]:
    """Return an engine's cells under `_HEADS`; "" where unknown."""
    level = figures.FAILED if one.error else one.verdict.level if one.verdict else ""
    values = [
        "" if one.speed_up is None else figures.ratio(one.speed_up),
        figures.milliseconds(one.p50_ms),
        figures.size(one.size_bytes),
        one.task,
        figures.decibels(one.sqnr_db),
        f"{one.quantized} of {one.nodes}" if one.nodes else "",
    ]
    cells = ["" if cell == figures.NONE else cell for cell in values]
    return [one.target, level, *cells, one.method, one.effort]


def _engine_name(one: EngineSummary) -> str:
    return f"{one.build}, {one.target}"


def _engines(builds: BuildComparison) -> Iterator[str]:
    """Yield the table of engines, without empty columns."""
    rows = [["build", *_HEADS], *([one.build, *_cells(one)] for one in builds.engines)]
    filled = [c for c in range(len(rows[0])) if any(row[c] for row in rows[1:])]
    left = [at for at, column in enumerate(filled) if column in _LEFT]
    yield from align_columns([[row[c] for c in filled] for row in rows], left)


def _reasons(builds: BuildComparison) -> Iterator[str]:
    """Yield the reasons of every verdict and of every failure."""
    for one in builds.engines:
        said = one.error or (one.verdict.text if one.verdict else "nothing was measured")
        yield f"{_engine_name(one)}: {said}"


def _difference_lines(builds: BuildComparison) -> Iterator[str]:
    """Yield one sentence per difference; builds with equal values are listed together."""
    for line in builds.differences:
        by_value: dict[str, list[str]] = {}
        for name, value in zip(builds.names, line.values, strict=True):
            by_value.setdefault(value or figures.NONE, []).append(name)
        said = "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
        yield f"{line.name}: {said}"


def _sections(builds: BuildComparison) -> Iterator[Section]:
    rows = [[one.build, *_cells(one)] for one in builds.engines]
    table = Table(["build", *_HEADS], rows, "builds")
    yield Section("Engines", (table,), len(rows), folded=False)
    lines = [[d.name, *(value or figures.NONE for value in d.values)] for d in builds.differences]
    if lines:
        table = Table(["", *builds.names], lines, "words")
        yield Section("They differ in", (table,), len(lines), folded=False)
