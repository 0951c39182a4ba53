"""Builds side by side as a screen of text, a page and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from html import escape

from deploy.analysis.builds import Builds, EngineLine
from deploy.report import figures, markup
from deploy.report.margin import entry
from deploy.report.model import plain
from deploy.report.page import page
from deploy.report.section import Section, written
from deploy.terminal import page as lines_of

SCHEMA = "calib8-builds/1"
_HEADS = ("target", "verdict", "speed-up", "p50", "size", "task", "worst SQNR", "int8 nodes",
          "method", "effort")  # fmt: skip
_LEFT = (0, 1, 2)  # columns of words


def to_screen(found: Builds) -> str:
    """Plain text, without colours."""
    blocks = [
        [f"{figures.count(len(found.names), 'build')} compared"],
        list(_engines(found)),
        list(_why(found)),
        list(_differences(found)),
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
    held = {"schema": SCHEMA, **asdict(found)}
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


def _differences(found: Builds) -> Iterator[str]:
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
