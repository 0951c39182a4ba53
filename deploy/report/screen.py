"""The report as one screen of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import deploy.report.figures as figures
from deploy.report.model import CalibrationPart, Report
from deploy.report.table import coverage, engine_lines, float_groups, int8_operators

WIDTH = 98
_MARGIN = 14
_MOST_GROUPS = 5
_MOST_NOTES = 8


def to_screen(report: Report) -> str:
    """Plain text, at most `WIDTH` columns where names allow, without colours."""
    blocks = (
        (report.title,),
        tuple(_how(report)),
        tuple(_table(report)),
        tuple(_where(report)),
        tuple(_notes(report)),
    )
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    """A name from a file must not steer the terminal, nor fail to be encoded."""
    return (
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
    )


def _how(report: Report) -> Iterator[str]:
    if report.feed:
        skipped = f", {len(report.feed.skipped)} skipped" if report.feed.skipped else ""
        samples = figures.count(report.feed.samples, "sample")
        yield from _entry("Feed", f"{samples} from {report.feed.source}{skipped}")
    if report.calibration:
        yield from _entry("Calibration", calibration_words(report.calibration))
    if report.nodes:
        operators = int8_operators(report)
        yield from _entry("Coverage", coverage(report) + (f" ({operators})" if operators else ""))
        yield from _float(report)


def calibration_words(part: CalibrationPart) -> str:
    """Method, reuse and time, in one line."""
    how = "cache reused" if part.reused else "calibrated anew"
    time = f" in {part.seconds:.1f} s" if part.seconds is not None else ""
    reason = f": {part.reason}" if part.reason else ""
    return f"{part.method}, {how}{time}{reason}"


def _float(report: Report) -> Iterator[str]:
    groups = float_groups(report)
    for group in groups[:_MOST_GROUPS]:
        names = group.names[0] if len(group.names) == 1 else f"{len(group.names)} nodes"
        yield from _entry("  float", f"{group.op} ({names}): {group.reason or 'no reason given'}")
    if len(groups) > _MOST_GROUPS:
        rest = sum(len(group.names) for group in groups[_MOST_GROUPS:])
        yield from _entry("", f"and {figures.count(rest, 'more float node')}; the report has all")


def _table(report: Report) -> Iterator[str]:
    lines = engine_lines(report)
    if not lines:
        return
    heads = ("", *(engine.label for engine in report.engines))
    rows = [heads, *((line.label, *line.cells) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    changes = ("", *(line.change for line in lines))
    for row, change in zip(rows, changes, strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        label = row[0].ljust(max(widths[0], _MARGIN))
        yield f"{label}{cells[widths[0] :]}   {change}".rstrip()


def _where(report: Report) -> Iterator[str]:
    if report.machine:
        int8 = ", ".join(report.machine.int8) or "no int8 dot product"
        threads = sorted({e.threads for e in report.engines if e.threads is not None})
        used = f", {figures.count(threads[-1], 'thread')} used" if threads else ""
        cores = figures.count(report.machine.cores, "core")
        yield from _entry("Machine", f"{report.machine.cpu}, {cores}{used}, {int8}")
    for number, file in enumerate(report.files):
        text = f"{file.path}  ({file.role}{_bytes(file.size_bytes)})"
        yield from _entry("" if number else "Files", text)


def _bytes(value: int | None) -> str:
    return f", {figures.size(value)}" if value is not None else ""


def _notes(report: Report) -> Iterator[str]:
    warnings = report.warnings
    for number, text in enumerate(warnings[:_MOST_NOTES]):
        yield from _entry("" if number else "Notes", text)
    if len(warnings) > _MOST_NOTES:
        yield from _entry("", f"and {len(warnings) - _MOST_NOTES} more; the report has all")


def _entry(label: str, text: str) -> Iterator[str]:
    """A label in the margin and its text, wrapped under itself."""
    wrapped = textwrap.wrap(
        text, WIDTH - _MARGIN, break_long_words=False, break_on_hyphens=False
    ) or [""]
    for number, line in enumerate(wrapped):
        yield f"{'' if number else label:<{_MARGIN}}{line}"
