"""The report as an HTML page, as Markdown, as plain text, and as a value that a notebook displays.

All are made of the same `Section`s. The page's main results are open and first: verdict,
speed, size, accuracy, worst layers. The rest is folded under headings.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from deploy.errors import ConfigError
from deploy.files.reading import convert, read_json
from deploy.metrics.levels import LEVELS
from deploy.report import figures, tables
from deploy.report import model as report_model
from deploy.report.blocks import (
    Block,
    Bullets,
    Drawing,
    Paragraph,
    Section,
    Table,
    block_html,
    block_markdown,
    cell_text,
    escape_markdown,
    sections_html,
    sections_markdown,
    table_of_contents,
)
from deploy.report.model import Findings
from deploy.report.page import page, tiles, verdicts
from deploy.report.parts import EngineRow, FileRow
from deploy.report.screen import align_columns, main_lines, to_screen
from deploy.report.sections import SECTIONS
from deploy.terminal import PrintedResult, join_visible

_MAX_REPORT_BYTES = 1 << 30  # a report has a row for every tensor
_MAX_FILE_SIZE = 1 << 63  # bytes of a file
_MAX_TEXT = 60  # characters of a value in a message
_MAX_COLUMN = 40  # characters to which the cells of a text are aligned; longer ones are not cut
_WAY_OUT = "build again with this calib8"

# The frame isolates the page's style from the notebook's.
_FRAME = (
    '<iframe srcdoc="{page}" title="{title}" sandbox="" width="100%" height="720"'
    ' style="border: 0"></iframe>'
)


def to_html(report: Findings) -> str:
    """Return a complete page; every name and sentence is escaped."""
    sections = _sections(report)
    parts = (
        *_page_head(report),
        tiles(_main_figures(report)),
        table_of_contents(sections),
        *sections_html(sections),
    )
    return page(report.title, "\n".join(filter(None, parts)))


def to_markdown(report: Findings) -> str:
    """Return Markdown text with GitHub's tables; every name is escaped."""
    parts = (
        f"# {escape_markdown(report.title)}",
        block_markdown(Bullets(list(_head_facts(report)))),
        *sections_markdown(_sections(report)),
    )
    return figures.encodable("\n\n".join(filter(None, parts)) + "\n")


def to_text(report: Findings) -> str:
    """Return plain text for a terminal, in which names and commands are as they are typed."""
    parts = [join_visible([report.title]), _block_text(Bullets(list(_head_facts(report))))]
    for section in _sections(report):
        texts = list(filter(None, map(_block_text, section.blocks)))
        if texts:  # else it has drawings only
            underline = "=" * len(section.title)
            parts += [join_visible((section.title, underline)), *texts]
    return "\n\n".join(filter(None, parts)) + "\n"


def _block_text(block: Block) -> str:
    """Return a block as plain text, with the columns of a table aligned; "" for a drawing."""
    match block:
        case Paragraph(text):
            return join_visible([text])
        case Bullets(sentences):
            return join_visible(f"- {text}" for text in sentences)
        case Table(heads, rows):
            texts = [list(map(cell_text, row)) for row in (heads, *rows)]
            columns = range(len(heads))
            return join_visible(align_columns(texts, columns, max_width=_MAX_COLUMN))
        case Drawing():
            return ""


def _sections(report: Findings) -> list[Section]:
    """Return the sections that have contents, in the order of the report."""
    sections: list[Section] = []
    for find_sections in SECTIONS:
        sections += find_sections(report)
    return sections


def _page_head(report: Findings) -> Iterator[str]:
    """Yield title, verdicts, failures and wrong outputs, model and devices as HTML."""
    yield f"<h1>{escape(report.title)}</h1>"
    yield verdicts((engine.label, engine.verdict) for engine in report.engines if engine.verdict)
    troubles = list(tables.failure_texts(report))
    for engine in report.engines:
        if engine.accuracy:
            troubles += engine.accuracy.problems
    if troubles:
        yield block_html(Bullets(list(dict.fromkeys(troubles)), "troubles"))
    if report.model:
        texts = map(escape, (report.model.path, *report.model.inputs))
        yield f'<p class="sub">{" &middot; ".join(texts)}</p>'
    for device in report.device_texts:
        yield f'<p class="sub">{escape(device)}</p>'


def _head_facts(report: Findings) -> Iterator[str]:
    """Yield the first lines of the Markdown text: devices, verdicts, model and failures."""
    for device in report.device_texts:
        yield f"Device: {device}"
    for engine in report.engines:
        if engine.verdict:
            yield f"Verdict on {engine.label}: {engine.verdict.text}"
    if report.model:
        yield f"Model: {report.model.path}"
        for text in report.model.inputs:
            yield f"Input: {text}"
        for text in report.model.outputs:
            yield f"Output: {text}"
    yield from tables.failure_texts(report)


def _main_figures(report: Findings) -> Iterator[tuple[str, str]]:
    """Yield (value, label): the first int8 engine's lines of the screen, and targets' coverage."""
    int8_columns = [index for index, engine in enumerate(report.engines) if not engine.is_float]
    if int8_columns:
        first_column = int8_columns[0]
        for line in main_lines(report):
            if line.cells[first_column] != figures.NONE:
                label = f"{line.label}, {report.engines[first_column].label}"
                yield line.cells[first_column], ": ".join(filter(None, (label, line.change)))
    for target in tables.built_targets(report):
        quantized_precisions = [node.precision for node in target.nodes if node.quantized]
        precisions = ", ".join(sorted(set(quantized_precisions))) or "int8"
        suffix = tables.target_suffix(report, target.name, ", ")
        yield f"{len(quantized_precisions)} / {len(target.nodes)}", f"nodes in {precisions}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(PrintedResult, Findings):
    """All results of a run; `repr` is one screen of text, notebooks show the page.

    Parts that a run does not have are None or empty.

    Attributes:
        title: title of the report.
        model: the input model.
        feed: the calibration data.
        calibration: how the scales were determined.
        targets: results per target, in the order requested.
        engines: the float model and every engine that was measured.
        machine: the machine that ran it.
        files: written files that belong to no target, or to several.
        work: cost of the run in inferences and decoded images.
        request: what the user asked for.
        earlier: engines of the previous build in this folder that were better.
        alerts: notes that need an action.
        notes: all other notes.
    """

    def to_screen(self) -> str:
        """Return one screen of text."""
        return to_screen(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, or the text if the page cannot be made."""
        try:
            return _FRAME.format(page=escape(to_html(self)), title=escape(self.title))
        except Exception:  # a notebook that shows this value must not fail
            return PrintedResult._repr_html_(self)


def read_report(path: Path, *, rewritable: bool = False) -> Report:
    """Read a report.json; `rewritable`: this run may overwrite it.

    Raises:
        ConfigError: it cannot be read, or is broken, or of another version.
    """
    what = "the report of a build, as calib8 wrote it"
    document = read_json(
        path, what=what, error=ConfigError, max_bytes=_MAX_REPORT_BYTES, rewritable=rewritable
    )
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != report_model.SCHEMA:
        raise _refusal(path, f"a report must be of schema {report_model.SCHEMA}", repr(schema))
    report = convert(
        document,
        Report,
        rule=f"{path} must be {what}",
        error=ConfigError,
        way_out=_WAY_OUT,
        strict=False,  # numbers may be "inf" or "nan"
    )
    for rule, value in _find_flaws(report):
        raise _refusal(path, rule, value)
    return report


def _find_flaws(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (rule that a report breaks, value that breaks it), of rules that types do not show."""
    if not report.targets and not report.engines:
        yield "a report must have targets or engines", "none"
    sized_rows: list[EngineRow | FileRow] = [*report.engines, *report.written]
    for row in sized_rows:
        size = row.size_bytes or 0
        if abs(size) >= _MAX_FILE_SIZE:
            yield "size_bytes of a report must be a number of 64 bits", repr(size)
    for engine in report.engines:
        if engine.latency is not None and not 0 < engine.p50_ms < math.inf:
            yield "latencies must be over 0", str(engine.p50_ms)
        if engine.verdict is not None and engine.verdict.level not in LEVELS:
            yield f"a verdict must be one of {', '.join(LEVELS)}", repr(engine.verdict.level)


def _refusal(path: Path, rule: str, value: str) -> ConfigError:
    """Return the error of a broken report: the rule, the value, the file and the way out."""
    return ConfigError(f"{rule}, got {value[:_MAX_TEXT]} in {path}; {_WAY_OUT}")
