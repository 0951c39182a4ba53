"""A build that was written before, read back: its report, and the options it was built with.

Values of the report's dataclasses out of JSON that anybody may have written, by their types.

::

    {"label": "FP32", "reference": true}      ->  EngineRow(label="FP32", reference=True)
    {"label": 3}                              ->  engines[0].label of a report must be a string, ...

What a dataclass does not know is left out; what it must have and the JSON lacks is an error.

Builds side by side: each engine in a line, and what the builds differ in.

Builds side by side as a screen of text, a page and JSON.
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
from deploy.report import EngineRow, Report, figures, model, tables
from deploy.report import page as markup
from deploy.report.model import SCHEMA, plain
from deploy.report.page import Section, page, written
from deploy.report.screen import entry
from deploy.report.verdict import Verdict
from deploy.terminal import page as lines_of

_LARGEST_INTEGER = 1 << 63  # of a whole number

Value = TypeVar("Value")


def decoded(kind: type[Value], value: object, path: Path) -> Value:
    """A dataclass out of an object of JSON.

    Args:
        kind: the dataclass.
        value: of JSON.
        path: the file, for sentences.

    Raises:
        ConfigError: something is missing, or of another type.
    """
    found: Value = _of(kind, value, "", path)
    return found


def _of(kind: Any, value: object, place: str, path: Path) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, place, path)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (one,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _of(one, value, place, path)
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
            held[field.name] = _of(hint, value[field.name], at, path)
        elif field.default is MISSING and field.default_factory is MISSING:
            if type(None) not in get_args(hint):  # a report leaves out what is None
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
        _of(kind, one, f"{place}[{at}]", path)
        for at, (kind, one) in enumerate(zip(each, value, strict=True))
    )


def _mapping(kind: Any, value: object, place: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse("an object", value, place, path)
    return {key: _of(kind, one, f"{place}.{key}", path) for key, one in value.items()}


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
    """A number, or one of the words for those that JSON has none for."""
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


_MOST_BYTES = 1 << 30  # bytes; a report has a row for every tensor
_WIDE = 60  # letters of an option's value


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build.

    Attributes:
        name: its folder, as it was named.
        report: what was found; without the samples of latency, which no file keeps.
        options: flag without dashes -> value in words, of `calib8.toml`; None where there is none.
    """

    name: str
    report: Report
    options: Mapping[str, str] | None = None


def read_build(folder: Path | str) -> Build:
    """Read a build.

    Args:
        folder: that was built into, or its report.json.

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
    return Build(name=str(folder), report=_report(path), options=_options(path.with_name(SETTINGS)))


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
    report = decoded(Report, held, path)
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
    """The options of the file beside a report.

    Raises:
        ConfigError: there is one, and it cannot be read.
    """
    if not os.path.isfile(path):
        return None
    what = "the options of a build, as calib8 wrote them"
    tables = toml.read(path, what=what, way_out="build again")
    table = tables.get("build", {})
    return {name: _words(value) for name, value in table.items()} if isinstance(table, dict) else {}


def _words(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= _WIDE else f"{said[:_WIDE]}..."


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
    rival = next(iter(model.rivals(build.report.engines, engine)), None)
    accuracy = engine.accuracy
    return EngineLine(
        build=build.name,
        target=engine.target,
        verdict=engine.verdict,
        error=target.error if target else "",
        speed_up=None if rival is None else model.speed_up(rival, engine),
        p50_ms=engine.latency.latency.p50 if engine.latency else None,
        size_bytes=engine.size_bytes,
        task=_task(engine),
        sqnr_db=tables.sqnr(accuracy)
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


BUILDS_SCHEMA = "calib8-builds/1"
_HEADS = ("target", "verdict", "speed-up", "p50", "size", "task", "worst SQNR", "int8 nodes",
          "method", "effort")  # fmt: skip
_LEFT = (0, 1, 2)  # columns of words


def to_screen(found: Builds) -> str:
    """Plain text, without colours."""
    blocks = [
        [f"{figures.count(len(found.names), 'build')} compared"],
        list(_engines(found)),
        list(_why(found)),
        list(_difference_lines(found)),
        [line for n, note in enumerate(found.notes) for line in entry("" if n else "Notes", note)],
    ]
    return "\n\n".join(lines_of(block) for block in blocks if block) + "\n"


def to_html(found: Builds) -> str:
    """A page of the same kind as a build's report."""
    title = f"calib8: {figures.count(len(found.names), 'build')} compared"
    judged = [(_called(one), one.verdict) for one in found.engines if one.verdict]
    troubles = [f"{_called(one)} failed: {one.error}" for one in found.engines if one.error]
    body = (
        f"<h1>{escape(title)}</h1>",
        markup.verdicts(judged) if judged else "",
        markup.bullets(troubles, "troubles") if troubles else "",
        markup.bullets(found.notes, "notes") if found.notes else "",
        *written(list(_sections(found))),
    )
    return page(title, "\n".join(body))


def to_json(found: Builds) -> dict[str, object]:
    """Plain JSON types; numbers that JSON has no word for become "inf", "-inf" or "nan"."""
    held = {"schema": BUILDS_SCHEMA, **asdict(found)}
    made = plain(held)
    assert isinstance(made, dict)
    return made


def _cells(one: EngineLine) -> list[str]:
    """An engine under `_HEADS`; "" where nothing is known."""
    level = figures.FAILED if one.error else one.verdict.level if one.verdict else ""
    known = [
        "" if one.speed_up is None else figures.ratio(one.speed_up),
        figures.milliseconds(one.p50_ms),
        figures.size(one.size_bytes),
        one.task,
        figures.decibels(one.sqnr_db),
        f"{one.quantized} of {one.nodes}" if one.nodes else "",
    ]
    cells = ["" if cell == figures.NONE else cell for cell in known]
    return [one.target, level, *cells, one.method, one.effort]


def _called(one: EngineLine) -> str:
    return f"{one.build}, {one.target}"


def _engines(found: Builds) -> Iterator[str]:
    """A line each, the build's name first; columns that nothing fills are left out."""
    rows = [["build", *_HEADS], *([one.build, *_cells(one)] for one in found.engines)]
    filled = [c for c in range(len(rows[0])) if any(row[c] for row in rows[1:])]
    widths = {c: max(len(row[c]) for row in rows) for c in filled}
    for row in rows:
        name, *cells = (row[c].ljust(widths[c]) if c in _LEFT else row[c].rjust(widths[c])
                        for c in filled)  # fmt: skip
        yield "  ".join([name, *cells]).rstrip()


def _why(found: Builds) -> Iterator[str]:
    """The reasons of every verdict, and of every failure."""
    for number, one in enumerate(found.engines):
        said = one.error or (one.verdict.words if one.verdict else "nothing was measured")
        yield from entry("" if number else "Why", f"{_called(one)}: {said}")


def _difference_lines(found: Builds) -> Iterator[str]:
    """A sentence each; builds that are alike stand together."""
    for number, line in enumerate(found.differences):
        alike: dict[str, list[str]] = {}
        for name, value in zip(found.names, line.values, strict=True):
            alike.setdefault(value or figures.NONE, []).append(name)
        said = "; ".join(f"{value} ({', '.join(names)})" for value, names in alike.items())
        yield from entry("" if number else "They differ", f"{line.name}: {said}")


def _sections(found: Builds) -> Iterator[Section]:
    rows = [[one.build, *_cells(one)] for one in found.engines]
    table = markup.table(["build", *_HEADS], rows, "builds")
    yield Section(title="Engines", html=table, rows=len(rows), folded=False)
    lines = [[d.name, *(value or figures.NONE for value in d.values)] for d in found.differences]
    if lines:
        table = markup.table(["", *found.names], lines, "words")
        yield Section(title="They differ in", html=table, rows=len(lines), folded=False)
