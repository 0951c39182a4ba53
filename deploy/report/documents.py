"""The report as an HTML page, as Markdown, and as a value with a `repr` and a notebook's display.

Both texts are made of the same `Section`s. The page's main results are open and first: verdict,
speed, size, accuracy, worst layers. The rest is folded under headings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from deploy.report import figures, model, tables
from deploy.report.blocks import (
    Bullets,
    Section,
    block_html,
    block_markdown,
    escape_markdown,
    sections_html,
    sections_markdown,
    table_of_contents,
)
from deploy.report.model import Findings
from deploy.report.page import page, tiles, verdicts
from deploy.report.screen import to_screen
from deploy.report.sections import SECTIONS

# The frame isolates the page's style from the notebook's.
_FRAME = (
    '<iframe srcdoc="{page}" title="{title}" sandbox="" width="100%" height="720"'
    ' style="border: 0"></iframe>'
)


def to_html(report: Findings) -> str:
    """Return a complete page; every name and sentence is escaped."""
    sections = _sections(report)
    figures_first = (*_page_head(report), tiles(_main_figures(report)))
    body = (*figures_first, table_of_contents(sections), *sections_html(sections))
    return page(report.title, "\n".join(filter(None, body)))


def to_markdown(report: Findings) -> str:
    """Return Markdown text with GitHub's tables; every name is escaped."""
    head = f"# {escape_markdown(report.title)}", block_markdown(Bullets(list(_facts(report))))
    texts = (*head, *sections_markdown(_sections(report)))
    return figures.encodable("\n\n".join(filter(None, texts)) + "\n")


def _sections(report: Findings) -> list[Section]:
    return [section for sections in SECTIONS for section in sections(report)]


def _page_head(report: Findings) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    yield verdicts((e.label, e.verdict) for e in report.engines if e.verdict)
    troubles = [f"{target.name} failed: {target.error}" for target in tables.failures(report)]
    troubles += [text for e in report.engines if e.accuracy for text in e.accuracy.problems]
    if troubles:
        yield block_html(Bullets(list(dict.fromkeys(troubles)), "troubles"))
    if report.model:
        words = [report.model.path, *report.model.inputs]
        yield f'<p class="sub">{" &middot; ".join(map(escape, words))}</p>'
    for device in report.machine.devices if report.machine else ():
        yield f'<p class="sub">{escape(device.description)}</p>'


def _facts(report: Findings) -> Iterator[str]:
    """Yield the head of the Markdown text."""
    for device in report.machine.devices if report.machine else ():
        yield f"Device: {device.description}"
    for engine in report.engines:
        if engine.verdict:
            yield f"Verdict on {engine.label}: {engine.verdict.text}"
    if report.model:
        yield f"Model: {report.model.path}"
        yield from (f"Input: {text}" for text in report.model.inputs)
        yield from (f"Output: {text}" for text in report.model.outputs)
    yield from (f"{target.name} failed: {target.error}" for target in tables.failures(report))


def _main_figures(report: Findings) -> Iterator[tuple[str, str]]:
    """Yield the first engine's main figures, then each target's coverage."""
    int8 = (engine for engine in report.engines if not (engine.reference or engine.baseline))
    engine = next(int8, None)
    if engine is not None:
        smaller = tables.size_ratio(report, engine)
        for rival in model.find_rivals(report.engines, engine):
            against = "the float model" if rival.reference else rival.label
            yield (
                figures.ratio(model.speed_over(rival, engine)),
                f"speed of {against}, {engine.label}",
            )
        if smaller is not None:
            factor, how = figures.size_change(smaller)
            if factor:
                yield factor, f"{how} on disk, {engine.label}"
        share = tables.top1(report, engine)
        if share is not None:
            yield figures.percent(share), f"top-1, {engine.label}"
        if engine.accuracy and engine.accuracy.task and tables.task_label(engine.accuracy):
            task = engine.accuracy.task
            yield task.count, f"{task.figure}, {engine.label}"
        if engine.accuracy and tables.has_slices(engine.accuracy):
            part = tables.worst_label(engine.accuracy)
            decibels = figures.decibels(tables.worst_figure(engine.accuracy, "sqnr_db"))
            yield decibels, f"SQNR of the worst part, {part}, {engine.label}"
        elif share is None and engine.accuracy:
            cosine = figures.cosine(tables.worst_figure(engine.accuracy, "cosine_mean"))
            yield cosine, f"cosine to the float model, {engine.label}"
    for target in tables.built_targets(report):
        quantized = sum(node.quantized for node in target.nodes)
        kinds = sorted({node.precision for node in target.nodes if node.quantized}) or ["int8"]
        own = tables.target_suffix(report, target.name, ", ")
        yield f"{quantized} / {len(target.nodes)}", f"nodes in {', '.join(kinds)}{own}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Findings):
    """All results of a run; `repr` is one screen of text, notebooks show the page."""

    def __repr__(self) -> str:
        try:
            return to_screen(self).rstrip("\n")
        except Exception:  # a debugger or traceback that shows this value must not fail
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, or the text if the page cannot be made."""
        try:
            return _FRAME.format(page=escape(to_html(self)), title=escape(self.title))
        except Exception:  # as above
            return f"<pre>{escape(repr(self))}</pre>"
