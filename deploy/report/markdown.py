"""The report as Markdown (GitHub's tables)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import deploy.report.figures as figures
from deploy.report.figures import encodable
from deploy.report.model import Report
from deploy.report.screen import calibration_words
from deploy.report.table import coverage, engine_lines, float_groups, int8_operators


def to_markdown(report: Report) -> str:
    """Markdown text; every name is escaped."""
    parts = (
        _head(report),
        _engines(report),
        _outputs(report),
        _coverage(report),
        _tensors(report),
        _where(report),
        _notes(report),
    )
    return encodable("\n\n".join(block for part in parts for block in part) + "\n")


def _head(report: Report) -> Iterator[str]:
    yield f"# {_escape(report.title)}"
    facts = []
    if report.model:
        facts += [f"Model: {_code(report.model.path)}"]
        facts += [f"Input: {_escape(text)}" for text in report.model.inputs]
        facts += [f"Output: {_escape(text)}" for text in report.model.outputs]
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        facts += [f"Feed: {samples} from {_code(report.feed.source)}"]
        facts += [f"Skipped: {_escape(text)}" for text in report.feed.skipped]
        known = {k: v for k, v in report.feed.preprocess.items() if v is not None}
        facts += [f"{_escape(k)}: {_escape(str(v))}" for k, v in known.items()]
    if report.calibration:
        facts += [f"Calibration: {_escape(calibration_words(report.calibration))}"]
    if facts:
        yield _bullets(facts)


def _engines(report: Report) -> Iterator[str]:
    lines = engine_lines(report)
    if lines:
        yield "## Engines"
        heads = ["", *(engine.label for engine in report.engines), ""]
        yield _table(heads, ([line.label, *line.cells, line.change] for line in lines))


def _outputs(report: Report) -> Iterator[str]:
    for engine in report.engines:
        if engine.accuracy:
            samples = figures.count(engine.accuracy.samples, "sample")
            yield f"## Accuracy of {_escape(engine.label)} over {samples}"
            yield _table(
                ["output", "SQNR", "cosine", "cosine, worst", "max abs error"],
                (
                    [
                        output.name,
                        figures.decibels(output.sqnr_db),
                        figures.cosine(output.cosine_mean),
                        figures.cosine(output.cosine_min),
                        figures.real(output.max_abs_error),
                    ]
                    for output in engine.accuracy.outputs
                ),
            )


def _coverage(report: Report) -> Iterator[str]:
    if report.nodes:
        yield "## Nodes"
        operators = int8_operators(report)
        yield f"{coverage(report)}{': ' + _escape(operators) if operators else ''}."
    groups = float_groups(report)
    if groups:
        yield _table(
            ["float operator", "nodes", "reason"],
            ([group.op, ", ".join(group.names), group.reason] for group in groups),
        )


def _tensors(report: Report) -> Iterator[str]:
    if not report.tensors:
        return
    yield "## Tensors"
    yield _table(
        ["tensor", "min", "max", "clip low", "clip high", "amax", "method", "clipped", "SQNR"],
        (
            [
                row.name,
                *map(figures.real, (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)),
                row.method,
                figures.percent(row.clipped),
                figures.decibels(row.sqnr_db),
            ]
            for row in report.tensors
        ),
    )


def _where(report: Report) -> Iterator[str]:
    if report.machine:
        machine = report.machine
        yield "## Machine"
        yield _bullets(
            [
                f"{_escape(machine.cpu)}, {figures.count(machine.cores, 'core')},"
                f" {_escape(', '.join(machine.int8) or 'no int8 dot product')}",
                _escape(machine.os),
                *(_escape(device) for device in machine.devices),
                _escape(", ".join(f"{k} {v}" for k, v in machine.versions.items())),
            ]
        )
    if report.files:
        yield "## Files"
        yield _table(
            ["file", "what it is", "size"],
            ([file.path, file.role, figures.size(file.size_bytes)] for file in report.files),
        )


def _notes(report: Report) -> Iterator[str]:
    if report.warnings:
        yield "## Notes"
        yield _bullets([_escape(text) for text in report.warnings])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [_row([_escape(text) for text in heads]), _row(["---"] * len(heads))]
    return "\n".join([*head, *(_row([_escape(cell) for cell in row]) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _code(text: str) -> str:
    """Inline code; a fence longer than any run of backticks inside."""
    flat = " ".join(text.split())
    fence = "`"
    while fence in flat:
        fence += "`"
    pad = " " if flat[:1] == "`" or flat[-1:] == "`" else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _escape(text: str) -> str:
    """Tensor names may hold anything: neutralize what Markdown or HTML would read."""
    flat = " ".join(text.split())
    for mark in "\\`*_[]|<>#":
        flat = flat.replace(mark, f"\\{mark}" if mark not in "<>" else f"&{_ENTITY[mark]};")
    return flat


_ENTITY = {"<": "lt", ">": "gt"}
