"""The report as one HTML page: no scripts, nothing fetched, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

import deploy.report.figures as figures
from deploy.report.figures import encodable
from deploy.report.model import Report
from deploy.report.screen import calibration_words
from deploy.report.style import STYLE
from deploy.report.svg import latency_figure, range_bar
from deploy.report.table import (
    coverage,
    engine_lines,
    float_groups,
    int8_operators,
    shrink,
    speed_up,
    top1,
    worst,
)

_MANY = 40  # rows above which a table can be folded
_FEW = 8  # names that a cell shows unfolded


def to_html(report: Report) -> str:
    """A whole page; every name and sentence is escaped."""
    sections = (
        _head(report),
        _tiles(report),
        _engines(report),
        _outputs(report),
        _remarks(report),
        _setup(report),
        _nodes(report),
        _tensors(report),
        _layers(report),
        _machine(report),
        _files(report),
    )
    body = "\n".join(block for section in sections for block in section)
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    if report.model:
        words = [report.model.path, *report.model.inputs]
        yield f'<p class="sub">{" &middot; ".join(map(escape, words))}</p>'
    troubles = [text for e in report.engines if e.accuracy for text in e.accuracy.problems]
    if troubles:
        yield _notes(dict.fromkeys(troubles), "troubles")


def _remarks(report: Report) -> Iterator[str]:
    if report.warnings:
        yield "<h2>Notes</h2>"
        yield _notes(report.warnings, "notes")


def _notes(sentences: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    return f'<ul class="{kind}">{items}</ul>'


def _tiles(report: Report) -> Iterator[str]:
    tiles = list(_tile_values(report))
    if tiles:
        cells = (
            f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for value, label in tiles
        )
        yield f'<div class="tiles">{"".join(cells)}</div>'


def _tile_values(report: Report) -> Iterator[tuple[str, str]]:
    """The first engine in four figures."""
    engine = next((engine for engine in report.engines if not engine.reference), None)
    if engine is not None:
        factor, smaller = speed_up(report, engine), shrink(report, engine)
        if factor is not None:
            yield figures.ratio(factor), f"speed of the float model, {engine.label}"
        if smaller is not None:
            yield figures.ratio(smaller), f"smaller on disk, {engine.label}"
        share = top1(report, engine)
        if share is not None:
            yield figures.percent(share), f"top-1, {engine.label}"
        elif engine.accuracy:
            cosine = worst(output.cosine_mean for output in engine.accuracy.outputs)
            yield figures.cosine(cosine), f"cosine to the float model, {engine.label}"
    if report.nodes:
        int8 = sum(node.int8 for node in report.nodes)
        yield f"{int8} / {len(report.nodes)}", "nodes in int8"


def _engines(report: Report) -> Iterator[str]:
    lines = engine_lines(report)
    if not lines:
        return
    yield "<h2>Engines</h2>"
    figure = latency_figure(report.engines)
    if figure:
        yield f"<figure>{figure}<figcaption>{_FIGURE_WORDS}</figcaption></figure>"
    heads = ["", *(engine.label for engine in report.engines), ""]
    yield _table(heads, ([line.label, *line.cells, line.change] for line in lines), "engines")


_FIGURE_WORDS = (
    "Latency of every measured iteration; engines ran in turn, so noise of the machine falls on all"
    " of them. Each curve is scaled to its own peak; the line is the median."
)


def _outputs(report: Report) -> Iterator[str]:
    judged = [(e.label, e.accuracy) for e in report.engines if e.accuracy]
    if judged:
        samples = figures.count(judged[0][1].samples, "sample")
        yield f"<h2>Accuracy over {samples}</h2>"
        rows = (
            [
                label,
                output.name,
                figures.decibels(output.sqnr_db),
                figures.cosine(output.cosine_mean),
                figures.cosine(output.cosine_min),
                figures.real(output.max_abs_error),
            ]
            for label, accuracy in judged
            for output in accuracy.outputs
        )
        heads = ["engine", "output", "SQNR", "cosine", "worst cosine", "max abs error"]
        yield _table(heads, rows)


def _setup(report: Report) -> Iterator[str]:
    facts: list[tuple[str, str]] = []
    if report.calibration:
        part = report.calibration
        facts.append(("Calibration", calibration_words(part)))
        facts += [(key, str(value)) for key, value in part.options.items()]
        facts += [("Cache", part.cache)] if part.cache else []
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        facts.append(("Feed", f"{samples} from {report.feed.source}"))
        facts += [(k, str(v)) for k, v in report.feed.preprocess.items() if v is not None]
        facts += [("Skipped", text) for text in report.feed.skipped]
    facts += [(step, f"{seconds:.1f} s") for step, seconds in report.seconds.items()]
    if facts:
        yield "<h2>Calibration</h2>"
        yield _facts(facts)


def _nodes(report: Report) -> Iterator[str]:
    if not report.nodes:
        return
    yield "<h2>Nodes</h2>"
    operators = int8_operators(report)
    yield f"<p>{escape(coverage(report) + (': ' + operators if operators else ''))}.</p>"
    groups = float_groups(report)
    if groups:
        rows = ([escape(g.op), _names(g.names), escape(g.reason)] for g in groups)
        yield _raw_table(["float operator", "nodes", "why it stays float"], rows, "words")


def _names(names: Sequence[str]) -> str:
    """Names in a cell, folded where they are many."""
    text = escape(", ".join(names))
    if len(names) <= _FEW:
        return text
    return f"<details><summary>{len(names)} nodes</summary>{text}</details>"


def _tensors(report: Report) -> Iterator[str]:
    if not report.tensors:
        return
    yield f"<h2>Tensors ({len(report.tensors)})</h2>"
    yield (
        '<p class="sub">Thin line: values seen. Bar: range kept by the scale. Tick: zero.'
        " Each drawing has its own scale.</p>"
    )
    heads = ["tensor", "range", "min", "max", "low", "high", "amax", "clipped", "SQNR", "method"]
    rows = []
    for row in report.tensors:
        numbers = (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)
        cells = [*map(figures.real, numbers), figures.percent(row.clipped)]
        cells += [figures.decibels(row.sqnr_db), row.method]
        rows.append([escape(row.name), range_bar(row), *map(escape, cells)])
    yield _fold(_raw_table(heads, rows, "tensors"), len(rows))


def _layers(report: Report) -> Iterator[str]:
    shown = {row.name for row in report.tensors}
    if not shown.issuperset(row.name for row in report.layers):
        yield f"<h2>Inner tensors ({len(report.layers)})</h2>"
        rows = (
            [row.name, figures.decibels(row.sqnr_db), figures.cosine(row.cosine_mean)]
            for row in report.layers
        )
        yield _fold(_table(["tensor", "SQNR", "cosine"], rows), len(report.layers))


def _machine(report: Report) -> Iterator[str]:
    if report.machine:
        machine = report.machine
        yield "<h2>Machine</h2>"
        yield _facts(
            [
                ("CPU", f"{machine.cpu}, {figures.count(machine.cores, 'core')}"),
                ("int8 instructions", ", ".join(machine.int8) or "none found"),
                *(("Device", device) for device in machine.devices),
                ("System", machine.os),
                ("Versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())),
            ]
        )


def _files(report: Report) -> Iterator[str]:
    if report.files:
        yield "<h2>Files</h2>"
        rows = ([file.path, file.role, figures.size(file.size_bytes)] for file in report.files)
        yield _table(["file", "what it is", "size"], rows, "words")


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    return f"<dl>{rows}</dl>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "figures") -> str:
    return _raw_table(heads, ([escape(cell) for cell in row] for row in rows), kind)


def _raw_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; the heads are escaped here."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _fold(table: str, rows: int) -> str:
    if rows <= _MANY:
        return table
    return f"<details open><summary>{rows} rows</summary>{table}</details>"
