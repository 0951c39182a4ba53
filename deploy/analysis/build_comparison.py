"""Reads builds back and compares their engines and options, as text, page and JSON.

The JSON may have been edited, so every value of the report's dataclasses is checked by its type::

    {"label": "FP32", "reference": true}      ->  EngineRow(label="FP32", reference=True)
    {"label": 3}                              ->  engines[0].label of a report must be a string, ...

Keys that a dataclass does not have are ignored; a missing required one is an error.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from deploy.errors import ConfigError
from deploy.files import toml
from deploy.files.manifest import PAGES, SETTINGS
from deploy.files.reading import read_json
from deploy.metrics.levels import LEVELS
from deploy.report import EngineRow, Report, figures, model
from deploy.report import page as markup
from deploy.report import tables as tables_module
from deploy.report.model import SCHEMA, to_plain
from deploy.report.page import Section, page, render_sections
from deploy.report.screen import entry
from deploy.report.verdict import Verdict
from deploy.terminal import join_visible as lines_of

BUILDS_SCHEMA = "calib8-builds/1"
_LARGEST_INTEGER = 1 << 63
_MOST_BYTES = 1 << 30  # of a report, which has a row for every tensor
_WIDE = 60  # characters of an option's value
_DEFAULT = "default"
_COLUMNS = frozenset(("effort", "method"))  # options shown as columns of the engines
_HEADS = ("target", "verdict", "speed-up", "p50", "size", "task", "worst SQNR", "int8 nodes",
          "method", "effort")  # fmt: skip
_LEFT = (0, 1, 2)  # left-aligned columns

Value = TypeVar("Value")


def decode_dataclass(kind: type[Value], value: object, path: Path) -> Value:
    """Decode a JSON value into a dataclass.

    Args:
        kind: the dataclass.
        value: the JSON value.
        path: the file, for messages.

    Raises:
        ConfigError: something is missing, or has another type.
    """
    result: Value = _decode(kind, value, "", path)
    return result


def _decode(kind: Any, value: object, place: str, path: Path) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, place, path)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (one,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _decode(one, value, place, path)
    if origin is tuple:
        return _tuple(get_args(kind), value, place, path)
    if origin in (dict, Mapping):
        return _mapping(get_args(kind)[1], value, place, path)
    return _plain(kind, value, place, path)


def _dataclass(kind: Any, value: object, place: str, path: Path) -> Any:
    if not isinstance(value, dict):
        _refuse("an object", value, place, path)
    held = {}
    for field, hint in _fields(kind):
        at = f"{place}.{field.name}" if place else field.name
        if field.name in value:
            held[field.name] = _decode(hint, value[field.name], at, path)
        elif field.default is MISSING and field.default_factory is MISSING:
            if type(None) not in get_args(hint):  # a report omits fields that are None
                _refuse("given", None, at, path)
            held[field.name] = None
    return kind(**held)


@cache
def _fields(kind: Any) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _tuple(kinds: tuple[Any, ...], value: object, place: str, path: Path) -> tuple[Any, ...]:
    several = len(kinds) == 2 and kinds[1] is Ellipsis
    if not isinstance(value, list):
        _refuse("a list", value, place, path)
    if not several and len(value) != len(kinds):
        _refuse(f"a list of {len(kinds)}", value, place, path)
    each = [kinds[0]] * len(value) if several else kinds
    return tuple(
        _decode(kind, one, f"{place}[{at}]", path)
        for at, (kind, one) in enumerate(zip(each, value, strict=True))
    )


def _mapping(kind: Any, value: object, place: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse("an object", value, place, path)
    return {key: _decode(kind, one, f"{place}.{key}", path) for key, one in value.items()}


def _plain(kind: Any, value: object, place: str, path: Path) -> Any:
    if kind is object:
        return value
    if kind is float:
        return _number(value, place, path)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return (
            value
            if abs(value) < _LARGEST_INTEGER
            else _refuse("a number of 64 bits", value, place, path)
        )
    if kind in (str, bool) and isinstance(value, kind):
        return value
    words = {str: "a string", bool: "true or false", int: "a whole number"}
    return _refuse(words[kind], value, place, path)


def _number(value: object, place: str, path: Path) -> float:
    """Return a float, also for the strings that stand for inf and NaN in JSON."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    return _refuse("a number", value, place, path)


def _refuse(rule: str, value: object, place: str, path: Path) -> NoReturn:
    got = "nothing" if value is None else repr(value)
    got = got if len(got) <= 60 else f"{got[:60]}..."
    raise ConfigError(
        f"{place or 'what stands in it'} of a report must be {rule}, got {got} in {path}; build"
        " again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBuild:
    """A build that was read back.

    Attributes:
        name: its folder, as the user gave it.
        report: its report, without the latency samples, which no file stores.
        options: flag without dashes -> value as text, from `calib8.toml`; None without that file.
    """

    name: str
    report: Report
    options: Mapping[str, str] | None = None


def read_stored_build(folder: Path | str) -> StoredBuild:
    """Read a build.

    Args:
        folder: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or one that is broken or of another version.
    """
    named = Path(folder)
    path = named if named.suffix == ".json" else named / PAGES[0]
    if not os.path.isfile(path):
        raise ConfigError(
            f"a build must be a folder that `calib8 build` wrote, got {named} without a {PAGES[0]};"
            " build first, or name the folder that --out named"
        )
    return StoredBuild(
        name=str(folder), report=_report(path), options=_options(path.with_name(SETTINGS))
    )


def _report(path: Path) -> Report:
    what = "the report of a build, as calib8 wrote it"
    held = read_json(path, what=what, error=ConfigError, most=_MOST_BYTES)
    found = held.get("schema") if isinstance(held, dict) else None
    if found != SCHEMA:
        got = repr(found)[:_WIDE]
        raise ConfigError(
            f"a report must be of schema {SCHEMA}, got {got} in {path}; build again with this"
            " calib8"
        )
    report = decode_dataclass(Report, held, path)
    for engine in report.engines:
        if engine.latency is not None and not 0 < engine.latency.latency.p50 < math.inf:
            raise _wrong(path, "latencies must be over 0", engine.latency.latency.p50)
        if engine.verdict is not None and engine.verdict.level not in LEVELS:
            raise _wrong(
                path, f"a verdict must be one of {', '.join(LEVELS)}", engine.verdict.level
            )
    return report


def _wrong(path: Path, rule: str, got: object) -> ConfigError:
    return ConfigError(f"{rule}, got {repr(got)[:_WIDE]} in {path}; build again")


def _options(path: Path) -> dict[str, str] | None:
    """Read the options file next to a report; None if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    if not os.path.isfile(path):
        return None
    what = "the options of a build, as calib8 wrote them"
    tables = toml.read_toml(path, what=what, way_out="build again")
    table = tables.get("build", {})
    return (
        {name: _as_text(value) for name, value in table.items()} if isinstance(table, dict) else {}
    )


def _as_text(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= _WIDE else f"{said[:_WIDE]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """One engine of one build.

    Attributes:
        build: name of the build.
        target: its target.
        verdict: its verdict; None without one.
        error: why it could not be built; "" where it was.
        speed_up: over the float engine that it is compared with in its own build.
        p50_ms: median latency.
        size_bytes: size of its file.
        task: figure of the task as text; "" if unknown.
        sqnr_db: SQNR of the worst output slice.
        quantized, nodes: number of quantized nodes, and of all nodes.
        method: method of its ranges.
        effort: effort of the search; "" if unknown.
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
class SettingDifference:
    """A setting in which the builds differ, with its name and each build's value or ""."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildComparison:
    """Comparison of several builds.

    Attributes:
        names: names of the builds, as the user gave them.
        engines: one line per engine.
        differences: options and circumstances in which they differ.
        notes: notes to the reader.
    """

    names: tuple[str, ...]
    engines: tuple[EngineSummary, ...]
    differences: tuple[SettingDifference, ...]
    notes: tuple[str, ...] = ()


def compare_builds(builds: Sequence[StoredBuild]) -> BuildComparison:
    """Compare builds.

    Raises:
        ConfigError: fewer than two.
    """
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
        speed_up=None if rival is None else model.speed_up(rival, engine),
        p50_ms=engine.latency.latency.p50 if engine.latency else None,
        size_bytes=engine.size_bytes,
        task=_task(engine),
        sqnr_db=tables_module.sqnr(accuracy)
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
    """Yield facts on how a report was made, named like the options where there are such."""
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
        list(_reasons(builds)),
        list(_difference_lines(builds)),
        [line for n, note in enumerate(builds.notes) for line in entry("" if n else "Notes", note)],
    ]
    return "\n\n".join(lines_of(block) for block in blocks if block) + "\n"


def to_html(builds: BuildComparison) -> str:
    """Return the comparison as a page in the style of a build's report."""
    title = f"calib8: {figures.count(len(builds.names), 'build')} compared"
    judged = [(_engine_name(one), one.verdict) for one in builds.engines if one.verdict]
    troubles = [f"{_engine_name(one)} failed: {one.error}" for one in builds.engines if one.error]
    body = (
        f"<h1>{escape(title)}</h1>",
        markup.verdicts(judged) if judged else "",
        markup.bullets(troubles, "troubles") if troubles else "",
        markup.bullets(builds.notes, "notes") if builds.notes else "",
        *render_sections(list(_sections(builds))),
    )
    return page(title, "\n".join(body))


def to_json(builds: BuildComparison) -> dict[str, object]:
    """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
    held = {"schema": BUILDS_SCHEMA, **asdict(builds)}
    made = to_plain(held)
    assert isinstance(made, dict)
    return made


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
    widths = {c: max(len(row[c]) for row in rows) for c in filled}
    for row in rows:
        name, *cells = (row[c].ljust(widths[c]) if c in _LEFT else row[c].rjust(widths[c])
                        for c in filled)  # fmt: skip
        yield "  ".join([name, *cells]).rstrip()


def _reasons(builds: BuildComparison) -> Iterator[str]:
    """Yield the reasons of every verdict and of every failure."""
    for number, one in enumerate(builds.engines):
        said = one.error or (one.verdict.words if one.verdict else "nothing was measured")
        yield from entry("" if number else "Why", f"{_engine_name(one)}: {said}")


def _difference_lines(builds: BuildComparison) -> Iterator[str]:
    """Yield one sentence per difference; builds with equal values are listed together."""
    for number, line in enumerate(builds.differences):
        by_value: dict[str, list[str]] = {}
        for name, value in zip(builds.names, line.values, strict=True):
            by_value.setdefault(value or figures.NONE, []).append(name)
        said = "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
        yield from entry("" if number else "They differ", f"{line.name}: {said}")


def _sections(builds: BuildComparison) -> Iterator[Section]:
    rows = [[one.build, *_cells(one)] for one in builds.engines]
    table = markup.table(["build", *_HEADS], rows, "builds")
    yield Section(title="Engines", html=table, rows=len(rows), folded=False)
    lines = [[d.name, *(value or figures.NONE for value in d.values)] for d in builds.differences]
    if lines:
        table = markup.table(["", *builds.names], lines, "words")
        yield Section(title="They differ in", html=table, rows=len(lines), folded=False)
