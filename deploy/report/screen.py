"""The report as text: one screen of a build, or everything; labels in the margin.

The screen of a build has what a user decides by: verdict, speed, size, task, what the images were
taken for, the files to ship, warnings that need an action, and the next command. All else is on the
page and in the Markdown text, which `-v` prints in its place.
"""

import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePath

from deploy.metrics.levels import DOUBTFUL, FLOAT, UNUSABLE
from deploy.report import figures
from deploy.report.charts import sweep_table
from deploy.report.figures import engine_layers_text
from deploy.report.front import speed_texts
from deploy.report.model import Findings
from deploy.report.parts import EngineRow, FileRow, TargetPart
from deploy.report.tables import (
    KERNEL_HEADS,
    OPTIONS,
    REPORT,
    ComparisonLine,
    built_targets,
    calibration_text,
    coverage,
    engine_lines,
    failures,
    kernel_rows,
    kind_table,
    remaining_kernels,
    task_label,
    timed_engines,
)
from deploy.report.verdict import Verdict
from deploy.terminal import join_visible

WIDTH = 98
MARGIN = 14


def entry(label: str, text: str) -> Iterator[str]:
    """Yield a label in the margin and its text, wrapped in its own column."""
    lines = textwrap.wrap(text, WIDTH - MARGIN, break_long_words=False, break_on_hyphens=False)
    yield from _with_label(label, lines or [""])


def entries(label: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the entries of several texts, only the first with the label."""
    for text in texts:
        yield from entry(label, text)
        label = ""


def _with_label(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines beside a margin, which has the label in the first one."""
    for line in lines:
        yield f"{label:<{MARGIN}}{line}"
        label = ""


def align_columns(rows: Sequence[Sequence[str]], left_columns: Collection[int]) -> Iterator[str]:
    """Yield rows as lines with columns of equal width.

    Cells are aligned to the right, those of `left_columns` to the left.
    """
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        align = str.ljust if index in left_columns else str.rjust
        width = max(map(len, cells))
        columns.append([align(cell, width) for cell in cells])
    for line_cells in zip(*columns, strict=True):
        yield "  ".join(line_cells).rstrip()


def labelled_table(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield a label and a table next to it, with the names of the first column at the right.

    Columns that are empty in every row are left out; without rows nothing is yielded.
    """
    if not rows:
        return

    names, *values = zip(heads, *rows, strict=False)
    columns = [column for column in (*values, names) if any(column[1:])]
    table_rows = list(zip(*columns, strict=True))
    yield from _with_label(label, align_columns(table_rows, left_columns=(len(columns) - 1,)))


_MAX_NOTES = 8
_MAX_ALERTS = 3
_MAX_KERNELS = 10
_MORE_EFFORT = " --prefer accuracy --effort 2 --repair all"


def to_screen(report: Findings) -> str:
    """Return plain text without colours, at most `WIDTH` columns if names allow."""
    if any(engine.verdict for engine in report.engines):
        lines = (report.title, *_verdicts(report), *_short_table(report), *_decisions(report))
        return join_visible(lines) + "\n"
    blocks = (
        (report.title,),
        (*_failures(report), *_int8_nodes(report)),
        tuple(_table(report, engine_lines(report))),
        tuple(labelled_table("Batches", *sweep_table(report.engines))),
        tuple(_kernels(report)),
        tuple(_machine(report)),
        tuple(_notes(report)),
    )
    return "\n\n".join(join_visible(block) for block in blocks if block) + "\n"


def serious_findings(report: Findings) -> Iterator[str]:
    """Yield failures and verdicts that are not good, for runs that do not show the report."""
    for target in failures(report):
        yield f"{target.name} failed: {target.error}"
    for engine in report.engines:
        if engine.verdict is not None and engine.verdict.level in (DOUBTFUL, UNUSABLE):
            yield f"{engine.label}: {engine.verdict.text}"


def _verdicts(report: Findings) -> Iterator[str]:
    """Yield one line per engine, with its name if there are several."""
    verdicts = [(engine.label, engine.verdict.text) for engine in report.engines if engine.verdict]
    if len(verdicts) == 1:
        yield from entry("Verdict", verdicts[0][1])
    else:
        yield from entries("Verdict", map(": ".join, verdicts))


_SHORT = ("Size", "Latency p50", "CPU time p50")  # lines of the table of one screen
_TASKS = ("Top-1", "mAP .50:.95")
_WITHOUT_TASK = ("Top-1 agreement", "SQNR", "SQNR, worst part")
# role of a script -> where it is to be run
_DEVICE_SCRIPTS = {"script of trtexec": "on the GPU machine", "atc command": "where atc is"}
_PROGRAM = "program that runs it"  # role of a file of ONNX Runtime's target


def _short_table(report: Findings) -> Iterator[str]:
    """Yield size, speed and the task's figures; the output error where there is no task."""
    lines = engine_lines(report)
    labels = set(_TASKS)
    for engine in report.engines:
        if engine.accuracy:
            labels.add(task_label(engine.accuracy))
    if not any(line.label in labels for line in lines):
        labels.update(_WITHOUT_TASK)
    labels.update(_SHORT)
    yield from _table(report, [line for line in lines if line.label in labels])


def _decisions(report: Findings) -> Iterator[str]:
    """Yield what was fed, what to ship, what to look at, and what to do next."""
    yield from entries("Speed", speed_texts(report))
    yield from _devices(report)
    if report.feed:
        text = f"{figures.count(report.feed.samples, 'sample')} from {report.feed.source}"
        if report.feed.prepared:
            text += f": {report.feed.prepared}"
        yield from entry("Images", text)
    if report.calibration:
        yield from entry("Calibration", calibration_text(report))
    yield from _int8_nodes(report)
    yield from _failures(report)

    yield from entries("Ship", dict.fromkeys(_shipped_files(report)))
    yield from entries("Warning", (*_lost_layers(report), *report.all_alerts)[:_MAX_ALERTS])
    notes = figures.count(len(report.warnings), "note")
    if page := _path_of(report.files, REPORT):
        yield from entry("Report", f"{page}  (all figures and {notes}; -v prints it)")
    yield from entries("Next", dict.fromkeys(next_steps(report)))


def _shipped_files(report: Findings) -> Iterator[str]:
    """Yield each engine's file; the float model's where int8 is not worth it, with both names."""
    for engine in report.engines:
        if engine.is_float or not engine.path:
            continue
        level = engine.verdict.level if engine.verdict else ""
        if level in (FLOAT, UNUSABLE) and report.model:
            yield f"{report.model.path}  (the float model; int8 is in {engine.path})"
        else:
            yield engine.path


def _int8_nodes(report: Findings) -> Iterator[str]:
    """Yield how many nodes of each target are int8."""
    texts = []
    for target in built_targets(report):
        name = f"{target.name} " if len(report.targets) > 1 else ""
        texts.append(name + coverage(target))
    if texts:
        yield from entry("In int8", ", ".join(texts))


def _lost_layers(report: Findings) -> Iterator[str]:
    """Yield how an engine differs from its plan, if layers run in float against it."""
    for engine in report.engines:
        if engine.ran and engine.ran.lost:
            yield f"{engine.label} runs {engine_layers_text(engine.ran)}"


def next_steps(report: Findings) -> Iterator[str]:
    """Yield one command for each engine of a build: what to do about its verdict."""
    for target in report.targets:
        for file in target.files:
            if file.role in _DEVICE_SCRIPTS:
                yield f"{_DEVICE_SCRIPTS[file.role]}: sh {shlex.quote(file.path)}"
    for engine in report.engines:
        built_target = report.target_of(engine)
        if built_target and engine.verdict and not engine.verdict.blames_float:
            yield from _next_step(report, engine, built_target, engine.verdict)


def _next_step(
    report: Findings, engine: EngineRow, target: TargetPart, verdict: Verdict
) -> Iterator[str]:
    """Yield the command for one engine, if there is any."""
    options, page = _path_of(report.files, OPTIONS), _path_of(report.files, REPORT)
    program = _path_of(target.files, _PROGRAM)
    bench = _bench_command(report, engine)
    is_lossy = verdict.level in (DOUBTFUL, UNUSABLE)
    if is_lossy and options and not verdict.gated:
        more_effort = " --effort 1" if target.search is None else _MORE_EFFORT
        yield f"calib8 build --config {shlex.quote(options)}{more_effort}"
    elif is_lossy and page:
        yield f"calib8 explain {shlex.quote(str(PurePath(page).parent))}"
    elif verdict.level == FLOAT and bench:
        yield f"on the CPU that will run it: {bench}"
    elif bench and engine.speed and engine.speed.is_noisy:
        yield f"on a quiet machine: {bench} --duration 30"
    elif program:
        yield f"python {shlex.quote(program)} PICTURE"
    elif bench:
        yield f"{bench} --threads 1"


def _path_of(files: Iterable[FileRow], role: str) -> str:
    """Return the path of the first file of a role; "" without one."""
    return next((file.path for file in files if file.role == role), "")


def _bench_command(report: Findings, engine: EngineRow) -> str:
    """Return the command that measures an engine beside its float model; "" without files."""
    if not report.model or not engine.path:
        return ""
    models = shlex.quote(engine.path)
    if PurePath(report.model.path).suffix:  # else it was in memory, and this is a name
        models = f"{shlex.quote(report.model.path)} --against {models}"
    return f"calib8 bench {models}"


def _failures(report: Findings) -> Iterator[str]:
    yield from entries("Failed", (f"{part.name}: {part.error}" for part in failures(report)))


def _table(report: Findings, lines: Sequence[ComparisonLine]) -> Iterator[str]:
    if not lines:
        return
    heads = (" " * MARGIN, *(engine.label for engine in report.engines), "")
    rows = [(line.label, *line.cells, f" {line.change}") for line in lines]
    yield from align_columns([heads, *rows], (0, len(heads) - 1))


def _kernels(report: Findings) -> Iterator[str]:
    """Yield an engine's slowest kernels; for several engines the kinds of kernels, if known."""
    timed = timed_engines(report.engines)
    heads, kind_rows = kind_table(timed)
    if len(timed) > 1 and kind_rows:
        yield from labelled_table("Kernels", heads, kind_rows[:_MAX_KERNELS])
        return
    for engine in timed:
        label = "Kernels" if len(timed) == 1 else engine.label
        yield from labelled_table(label, KERNEL_HEADS, kernel_rows(engine, _MAX_KERNELS))
        if remaining := remaining_kernels(engine, _MAX_KERNELS):
            yield from entry("", remaining)


def _devices(report: Findings) -> Iterator[str]:
    if report.machine:
        yield from entries("Device", (device.description for device in report.machine.devices))


def _machine(report: Findings) -> Iterator[str]:
    yield from _devices(report)
    if report.machine:
        text = f"{report.machine.cpu}, {figures.count(report.machine.cores, 'core')}"
        threads = [engine.threads for engine in report.engines if engine.threads is not None]
        if threads:
            text += f", {figures.count(max(threads), 'thread')} used"
        int8 = ", ".join(report.machine.int8) or "no int8 dot product"
        yield from entry("Machine", f"{text}, {int8}")
    yield from entries("Files", map(_file_text, report.written))


def _file_text(file: FileRow) -> str:
    size = "" if file.size_bytes is None else f", {figures.size(file.size_bytes)}"
    return f"{file.path}  ({file.role}{size})"


def _notes(report: Findings) -> Iterator[str]:
    warnings = report.warnings
    yield from entries("Notes", warnings[:_MAX_NOTES])
    if len(warnings) > _MAX_NOTES:
        yield from entry("", f"and {len(warnings) - _MAX_NOTES} more; the report has all")
