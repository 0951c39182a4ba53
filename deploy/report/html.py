"""The report as one HTML page: no scripts, nothing fetched, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import deploy.report.figures as figures
import deploy.report.markup as markup
import deploy.report.sections as sections
import deploy.report.speed as speed
import deploy.report.truth as truth
from deploy.report.figures import encodable
from deploy.report.model import Findings
from deploy.report.style import STYLE
from deploy.report.svg import latency_figure
from deploy.report.sweep import sweep_section
from deploy.report.table import (
    covered,
    engine_lines,
    failures,
    shrink,
    top1,
)
from deploy.report.timed import kernel_section
from deploy.report.words import calibration_words, group_words, work_words


def to_html(report: Findings) -> str:
    """A whole page; every name and sentence is escaped."""
    blocks = (
        _head(report),
        _tiles(report),
        _engines(report),
        sweep_section(report.engines),
        kernel_section(report.engines),
        _outputs(report),
        _remarks(report),
        _setup(report),
        sections.search(report),
        sections.nodes(report),
        sections.ran(report),
        sections.tensors(report),
        sections.layers(report),
        _machine(report),
        _files(report),
        _work(report),
    )
    body = "\n".join(block for section in blocks for block in section)
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: Findings) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    if report.model:
        words = [report.model.path, *report.model.inputs]
        yield f'<p class="sub">{" &middot; ".join(map(escape, words))}</p>'
    for device in report.machine.devices if report.machine else ():
        yield f'<p class="sub">{escape(device.words)}</p>'
    judged = [(e.label, e.verdict) for e in report.engines if e.verdict]
    if judged:
        yield markup.verdicts(judged)
    troubles = [f"{target.name} failed: {target.error}" for target in failures(report)]
    troubles += [text for e in report.engines if e.accuracy for text in e.accuracy.problems]
    if troubles:
        yield markup.bullets(dict.fromkeys(troubles), "troubles")


def _remarks(report: Findings) -> Iterator[str]:
    if report.warnings:
        yield "<h2>Notes</h2>"
        yield markup.bullets(report.warnings, "notes")


def _tiles(report: Findings) -> Iterator[str]:
    tiles = list(_tile_values(report))
    if tiles:
        cells = (
            f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for value, label in tiles
        )
        yield f'<div class="tiles">{"".join(cells)}</div>'


def _tile_values(report: Findings) -> Iterator[tuple[str, str]]:
    """The first engine in three figures, then what each target covers."""
    int8 = (engine for engine in report.engines if not (engine.reference or engine.baseline))
    engine = next(int8, None)
    if engine is not None:
        smaller = shrink(report, engine)
        for rival in speed.rivals(report.engines, engine):
            whose = "the float model" if rival.reference else rival.label
            yield figures.ratio(speed.speed_up(rival, engine)), f"speed of {whose}, {engine.label}"
        if smaller is not None:
            yield figures.ratio(smaller), f"smaller on disk, {engine.label}"
        share = top1(report, engine)
        if share is not None:
            yield figures.percent(share), f"top-1, {engine.label}"
        if engine.accuracy and engine.accuracy.task and truth.task_label(engine.accuracy):
            task = engine.accuracy.task
            yield task.count, f"{task.figure}, {engine.label}"
        if engine.accuracy and truth.parted(engine.accuracy):
            part = truth.worst_label(engine.accuracy)
            decibels = figures.decibels(truth.sqnr(engine.accuracy))
            yield decibels, f"SQNR of the worst part, {part}, {engine.label}"
        elif share is None and engine.accuracy:
            cosine = figures.cosine(truth.cosine(engine.accuracy))
            yield cosine, f"cosine to the float model, {engine.label}"
    for target in covered(report):
        quantized = sum(node.quantized for node in target.nodes)
        kinds = sorted({node.precision for node in target.nodes if node.quantized}) or ["int8"]
        whose = f", {target.name}" if len(report.targets) > 1 else ""
        yield f"{quantized} / {len(target.nodes)}", f"nodes in {', '.join(kinds)}{whose}"


def _engines(report: Findings) -> Iterator[str]:
    lines = engine_lines(report)
    if not lines:
        return
    yield "<h2>Engines</h2>"
    for on_device in (False, True):  # on an axis of their own
        figure = latency_figure(report.engines, on_device=on_device)
        if figure:
            yield f"<figure>{figure}<figcaption>{_FIGURE_WORDS}</figcaption></figure>"
    heads = ["", *(engine.label for engine in report.engines), ""]
    yield markup.table(heads, ([line.label, *line.cells, line.change] for line in lines), "engines")


_FIGURE_WORDS = (
    "Latency of every measured iteration; engines ran in turn, so noise of the machine falls on all"
    " of them. Each curve is scaled to its own peak; the line is p50."
)


def _outputs(report: Findings) -> Iterator[str]:
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
        said = [f"{label}: {text}" for label, one in judged for text in truth.sentences(one)]
        if said:
            yield markup.bullets(said, "notes")
        parts = [
            [label, *truth.part_row(part)]
            for label, accuracy in judged
            if truth.parted(accuracy)
            for part in accuracy.parts
        ]
        if parts:
            yield markup.table(["engine", *truth.PART_HEADS], parts)
        yield markup.table(heads, rows)


def _setup(report: Findings) -> Iterator[str]:
    facts: list[tuple[str, str]] = []
    if report.calibration:
        part = report.calibration
        facts.append(("Calibration", calibration_words(report)))
        facts += [("Observed", group_words(group)) for group in part.groups]
        facts += [("Cache", part.cache)] if part.cache else []
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        facts.append(("Feed", f"{samples} from {report.feed.source}"))
        facts += [(k, str(v)) for k, v in report.feed.preprocess.items() if v is not None]
        facts += [("Skipped", text) for text in report.feed.skipped]
    facts += [(step, f"{seconds:.1f} s") for step, seconds in report.seconds.items()]
    if facts:
        yield "<h2>Calibration</h2>"
        yield markup.facts(facts)


def _machine(report: Findings) -> Iterator[str]:
    if report.machine:
        machine = report.machine
        yield "<h2>Machine</h2>"
        yield markup.facts(
            [
                ("CPU", f"{machine.cpu}, {figures.count(machine.cores, 'core')}"),
                ("int8 instructions", ", ".join(machine.int8) or "none found"),
                *(("Device", device.words) for device in machine.devices),
                ("System", machine.os),
                ("Versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())),
            ]
        )


def _files(report: Findings) -> Iterator[str]:
    if report.written:
        yield "<h2>Files</h2>"
        rows = ([file.path, file.role, figures.size(file.size_bytes)] for file in report.written)
        yield markup.table(["file", "what it is", "size"], rows, "words")


def _work(report: Findings) -> Iterator[str]:
    if report.work:
        spent = markup.bullets(work_words(report.work), "notes")
        yield f"<details><summary>Work</summary>{spent}</details>"
