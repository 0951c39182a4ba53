"""The report as one HTML page: no external resources, complete without its script, light and dark.

The main results are open and first: verdict, speed, size, accuracy, worst layers. The rest is
folded under headings. To add a part, write a function that yields `Section`s of the findings and
list it in `to_html`.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deploy.report import figures, model, sections, tables
from deploy.report import page as markup
from deploy.report.charts import LATENCY_WORDS, histograms, latency_figure, sweep_section
from deploy.report.model import Findings
from deploy.report.page import Section, page, render_sections, table_of_contents
from deploy.report.sections import weights
from deploy.report.tables import (
    built_targets,
    calibration_words,
    engine_lines,
    failures,
    group_words,
    kernel_section,
    size_ratio,
    target_suffix,
    top1,
    work_words,
)


def to_html(report: Findings) -> str:
    """Return a complete page; every name and sentence is escaped."""
    blocks = (
        _engines,
        sweep_section,
        kernel_section,
        _outputs,
        sections.examples,
        sections.worst,
        histograms,
        sections.views,
        _remarks,
        _setup,
        sections.search,
        sections.nodes,
        sections.engine_layers,
        sections.tensors,
        sections.layers,
        weights,
        _machine,
        _files,
        _work,
    )
    shown = [section for block in blocks for section in block(report)]
    body = "\n".join(
        (*_head(report), *_tiles(report), table_of_contents(shown), *render_sections(shown))
    )
    return page(report.title, body)


def _head(report: Findings) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    judged = [(e.label, e.verdict) for e in report.engines if e.verdict]
    if judged:
        yield markup.verdicts(judged)
    troubles = [f"{target.name} failed: {target.error}" for target in failures(report)]
    troubles += [text for e in report.engines if e.accuracy for text in e.accuracy.problems]
    if troubles:
        yield markup.bullets(dict.fromkeys(troubles), "troubles")
    if report.model:
        words = [report.model.path, *report.model.inputs]
        yield f'<p class="sub">{" &middot; ".join(map(escape, words))}</p>'
    for device in report.machine.devices if report.machine else ():
        yield f'<p class="sub">{escape(device.words)}</p>'


def _remarks(report: Findings) -> Iterator[Section]:
    if report.warnings:
        sentences = markup.bullets(report.warnings, "notes")
        yield Section(title="Notes", html=sentences, rows=len(report.warnings))


def _tiles(report: Findings) -> Iterator[str]:
    tiles = list(_tile_values(report))
    if tiles:
        cells = (
            f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for value, label in tiles
        )
        yield f'<div class="tiles">{"".join(cells)}</div>'


def _tile_values(report: Findings) -> Iterator[tuple[str, str]]:
    """Yield the first engine's main figures, then each target's coverage."""
    int8 = (engine for engine in report.engines if not (engine.reference or engine.baseline))
    engine = next(int8, None)
    if engine is not None:
        smaller = size_ratio(report, engine)
        for rival in model.find_rivals(report.engines, engine):
            against = "the float model" if rival.reference else rival.label
            yield (
                figures.ratio(model.speed_up(rival, engine)),
                f"speed of {against}, {engine.label}",
            )
        if smaller is not None:
            factor, how = figures.size_change(smaller)
            if factor:
                yield factor, f"{how} on disk, {engine.label}"
        share = top1(report, engine)
        if share is not None:
            yield figures.percent(share), f"top-1, {engine.label}"
        if engine.accuracy and engine.accuracy.task and tables.task_label(engine.accuracy):
            task = engine.accuracy.task
            yield task.count, f"{task.figure}, {engine.label}"
        if engine.accuracy and tables.has_slices(engine.accuracy):
            part = tables.worst_label(engine.accuracy)
            decibels = figures.decibels(tables.sqnr(engine.accuracy))
            yield decibels, f"SQNR of the worst part, {part}, {engine.label}"
        elif share is None and engine.accuracy:
            cosine = figures.cosine(tables.cosine(engine.accuracy))
            yield cosine, f"cosine to the float model, {engine.label}"
    for target in built_targets(report):
        quantized = sum(node.quantized for node in target.nodes)
        kinds = sorted({node.precision for node in target.nodes if node.quantized}) or ["int8"]
        own = target_suffix(report, target.name, ", ")
        yield f"{quantized} / {len(target.nodes)}", f"nodes in {', '.join(kinds)}{own}"


def _engines(report: Findings) -> Iterator[Section]:
    lines = engine_lines(report)
    if not lines:
        return
    curves = []
    for on_device in (False, True):  # on separate axes
        figure = latency_figure(report.engines, on_device=on_device)
        if figure:
            curves.append(
                f"<figure>{figure}<figcaption>{escape(LATENCY_WORDS)}</figcaption></figure>"
            )
    heads = ["", *(engine.label for engine in report.engines), ""]
    rows = ([line.label, *line.cells, line.change] for line in lines)
    table = markup.table(heads, rows, "engines")
    yield Section(title="Engines", html="\n".join((*curves, table)), folded=False)


def _outputs(report: Findings) -> Iterator[Section]:
    compared = [(e.label, e.accuracy) for e in report.engines if e.accuracy]
    if not compared:
        return
    over = figures.count(compared[0][1].samples, "sample")
    rows = (
        [
            label,
            output.name,
            figures.decibels(output.sqnr_db),
            figures.cosine(output.cosine_mean),
            figures.cosine(output.cosine_min),
            figures.real(output.max_abs_error),
        ]
        for label, accuracy in compared
        for output in accuracy.outputs
    )
    heads = ["engine", "output", "SQNR", "cosine", "worst cosine", "max abs error"]
    notes = [f"{label}: {text}" for label, one in compared for text in tables.accuracy_notes(one)]
    slices = [
        [label, *tables.part_row(part)]
        for label, accuracy in compared
        if tables.has_slices(accuracy)
        for part in accuracy.parts
    ]
    html = [f'<p class="sub">Over {over}, against the float model.</p>']
    html += [markup.bullets(notes, "notes")] if notes else []
    html += [markup.table(["engine", *tables.PART_HEADS], slices)] if slices else []
    html += [markup.table(heads, rows)]
    yield Section(title="Accuracy", html="\n".join(html), folded=False)


def _setup(report: Findings) -> Iterator[Section]:
    facts: list[tuple[str, str]] = []
    if report.calibration:
        part = report.calibration
        facts.append(("Calibration", calibration_words(report)))
        facts += [("Ranges", part.agreement.words)] if part.agreement else []
        facts += [("Observed", group_words(group)) for group in part.groups]
        facts += [("Cache", part.cache)] if part.cache else []
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        facts.append(("Feed", f"{samples} from {report.feed.source}"))
        facts += [(k, str(v)) for k, v in report.feed.preprocess.items() if v is not None]
        facts += [("Skipped", text) for text in report.feed.skipped]
    facts += [(step, f"{seconds:.1f} s") for step, seconds in report.seconds.items()]
    if facts:
        yield Section(title="Calibration", html=markup.facts(facts) + _disagreeing_ranges(report))


def _disagreeing_ranges(report: Findings) -> str:
    """Return a table of ranges on which the halves of the samples disagree."""
    agreement = report.calibration.agreement if report.calibration else None
    if agreement is None or not agreement.apart:
        return ""
    rows = [[name, figures.percent(share)] for name, share in agreement.apart.items()]
    return markup.table(["tensor", "halves differ by"], rows)


def _machine(report: Findings) -> Iterator[Section]:
    if report.machine:
        machine = report.machine
        facts = markup.facts(
            [
                ("CPU", f"{machine.cpu}, {figures.count(machine.cores, 'core')}"),
                ("int8 instructions", ", ".join(machine.int8) or "none found"),
                *(("Device", device.words) for device in machine.devices),
                ("System", machine.os),
                ("Versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())),
            ]
        )
        yield Section(title="Machine", html=facts)


def _files(report: Findings) -> Iterator[Section]:
    if report.written:
        rows = [[file.path, file.role, figures.size(file.size_bytes)] for file in report.written]
        table = markup.table(["file", "what it is", "size"], rows, "words")
        yield Section(title="Files", html=table, rows=len(rows))


def _work(report: Findings) -> Iterator[Section]:
    if report.work:
        yield Section(title="Work", html=markup.bullets(work_words(report.work), "notes"))
