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
from deploy.report.model import Findings
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
from deploy.terminal import join_visible

WIDTH = 98
MARGIN = 14


def entry(label: str, text: str) -> Iterator[str]:
    """Yield a label in the margin and its text, wrapped in its own column."""
    wrapped = textwrap.wrap(
        text, WIDTH - MARGIN, break_long_words=False, break_on_hyphens=False
    ) or [""]
    for number, line in enumerate(wrapped):
        yield f"{'' if number else label:<{MARGIN}}{line}"


def entries(label: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the entries of several texts, only the first with the label."""
    for number, text in enumerate(texts):
        yield from entry("" if number else label, text)


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> Iterator[str]:
    """Yield rows as lines with columns of equal width, aligned to the right except for `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = (c.ljust(w) if at in left else c.rjust(w) for at, (c, w) in enumerate(cells))
        yield "  ".join(padded).rstrip()


def labelled_table(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield a label and a table next to it, with the names of the first column at the right.

    Columns that are empty in every row are left out; without rows nothing is yielded.
    """
    if rows:
        filled = [c for c in (*range(1, len(heads)), 0) if any(row[c] for row in rows)]
        lines = align_columns(
            [[row[c] for c in filled] for row in (heads, *rows)], (len(filled) - 1,)
        )
        yield from (f"{'' if at else label:<{MARGIN}}{line}" for at, line in enumerate(lines))


_MOST_NOTES = 8
_MORE_EFFORT = " --prefer accuracy --effort 2 --repair all"
_MOST_KERNELS = 10


def to_screen(report: Findings) -> str:
    """Return plain text without colours, at most `WIDTH` columns if names allow."""
    if any(engine.verdict for engine in report.engines):
        lines = (report.title, *_verdicts(report), *_short_table(report), *_to_do(report))
        return join_visible(lines) + "\n"
    blocks = (
        (report.title,),
        (*_failed(report), *_layers(report)),
        tuple(_table(report, engine_lines(report))),
        tuple(labelled_table("Batches", *sweep_table(report.engines))),
        tuple(_kernels(report)),
        tuple(_where(report)),
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
    judged = [(engine.label, engine.verdict) for engine in report.engines if engine.verdict]
    alone = len(judged) == 1
    yield from entries("Verdict", (v.text if alone else f"{e}: {v.text}" for e, v in judged))


_SHORT = ("Size", "Latency p50")  # lines of the table of one screen
_TASKS = ("Top-1", "mAP .50:.95")
_WITHOUT_TASK = ("Top-1 agreement", "SQNR", "SQNR, worst part")
_MOST_ALERTS = 3
# role of a script -> where it is to be run
_DEVICE_SCRIPTS = {"script of trtexec": "on the GPU machine", "atc command": "where atc is"}
_PROGRAM = "program that runs it"  # role of a file of ONNX Runtime's target


def _short_table(report: Findings) -> Iterator[str]:
    """Yield size, speed and the task's figures; the output error where there is no task."""
    tasks = {*_TASKS, *(task_label(e.accuracy) for e in report.engines if e.accuracy)}
    lines = engine_lines(report)
    if not any(line.label in tasks for line in lines):
        tasks |= {*_WITHOUT_TASK}
    yield from _table(report, [line for line in lines if line.label in {*_SHORT, *tasks}])


def _to_do(report: Findings) -> Iterator[str]:
    """Yield what was fed, what to ship, what to look at, and what to do next."""
    yield from _devices(report)
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        taken = f": {report.feed.prepared}" if report.feed.prepared else ""
        yield from entry("Images", f"{samples} from {report.feed.source}{taken}")
    if report.calibration:
        yield from entry("Calibration", calibration_text(report))
    yield from _layers(report)
    yield from _failed(report)
    shipped = [e.path for e in report.engines if e.path and not (e.reference or e.baseline)]
    yield from entries("Ship", shipped)
    yield from entries("Warning", (*_lost_layers(report), *report.all_alerts)[:_MOST_ALERTS])
    pages = [file.path for file in report.files if file.role == REPORT]
    more = figures.count(len(report.warnings), "note")
    yield from entries(
        "Report", (f"{page}  (all figures and {more}; -v prints it)" for page in pages)
    )
    yield from entries("Next", dict.fromkeys(next_steps(report)))


def _layers(report: Findings) -> Iterator[str]:
    """Yield how many nodes of each target are int8."""
    built = [(one.name, coverage(one)) for one in built_targets(report)]
    alone = len(report.targets) == 1
    layers = ", ".join(words if alone else f"{name} {words}" for name, words in built)
    yield from entries("In int8", [layers] if layers else ())


def _lost_layers(report: Findings) -> Iterator[str]:
    """Yield how an engine differs from its plan, if layers run in float against it."""
    for engine in report.engines:
        if engine.ran and engine.ran.lost:
            yield f"{engine.label} runs {engine_layers_text(engine.ran)}"


def next_steps(report: Findings) -> Iterator[str]:
    """Yield one command for each engine of a build: what to do about its verdict."""
    options = next((f.path for f in report.files if f.role == OPTIONS), None)
    page = next((f.path for f in report.files if f.role == REPORT), None)
    folder = "" if page is None else shlex.quote(str(PurePath(page).parent))
    for target in report.targets:
        for file in target.files:
            if file.role in _DEVICE_SCRIPTS:
                yield f"{_DEVICE_SCRIPTS[file.role]}: sh {shlex.quote(file.path)}"
    for engine in report.engines:
        built = report.target_of(engine)
        if engine.verdict is None or built is None or engine.verdict.blames_float:
            continue
        again = None if options is None else f"calib8 build --config {shlex.quote(options)}"
        there = report.model and engine.path
        model = report.model.path if report.model else ""  # a name if it was in memory
        named = [*([model] if PurePath(model).suffix else ()), engine.path or ""]
        bench = f"calib8 bench {' --against '.join(map(shlex.quote, named))}"
        lossy = engine.verdict.level in (DOUBTFUL, UNUSABLE)
        if lossy and again and not engine.verdict.gated:
            searched = built.search is not None
            yield again + (_MORE_EFFORT if searched else " --effort 1")
        elif lossy and folder:
            yield f"calib8 explain {folder}"
        elif engine.verdict.level == FLOAT and there:
            yield f"on the CPU that will run it: {bench}"
        elif there and engine.speed and engine.speed.is_noisy:
            yield f"on a quiet machine: {bench} --duration 30"
        elif program := next((f.path for f in built.files if f.role == _PROGRAM), None):
            yield f"python {shlex.quote(program)} PICTURE"
        elif there:
            yield f"{bench} --threads 1"


def _failed(report: Findings) -> Iterator[str]:
    yield from entries("Failed", (f"{one.name}: {one.error}" for one in failures(report)))


def _table(report: Findings, lines: Sequence[ComparisonLine]) -> Iterator[str]:
    if not lines:
        return
    heads = (" " * MARGIN, *(engine.label for engine in report.engines), "")
    rows = [heads, *((line.label, *line.cells, f" {line.change}") for line in lines)]
    yield from align_columns(rows, (0, len(heads) - 1))


def _kernels(report: Findings) -> Iterator[str]:
    """Yield an engine's slowest kernels; for several engines the kinds of kernels, if known."""
    timed = timed_engines(report.engines)
    heads, kinds = kind_table(timed)
    if len(timed) > 1 and kinds:
        yield from labelled_table("Kernels", heads, kinds[:_MOST_KERNELS])
        return
    for engine in timed:
        label = "Kernels" if len(timed) == 1 else engine.label
        yield from labelled_table(label, KERNEL_HEADS, kernel_rows(engine, _MOST_KERNELS))
        more = remaining_kernels(engine, _MOST_KERNELS)
        yield from entry("", more) if more else ()


def _devices(report: Findings) -> Iterator[str]:
    devices = report.machine.devices if report.machine else ()
    yield from entries("Device", (device.description for device in devices))


def _where(report: Findings) -> Iterator[str]:
    yield from _devices(report)
    if report.machine:
        int8 = ", ".join(report.machine.int8) or "no int8 dot product"
        threads = sorted({e.threads for e in report.engines if e.threads is not None})
        used = f", {figures.count(threads[-1], 'thread')} used" if threads else ""
        cores = figures.count(report.machine.cores, "core")
        yield from entry("Machine", f"{report.machine.cpu}, {cores}{used}, {int8}")
    files = (f"{f.path}  ({f.role}{_bytes(f.size_bytes)})" for f in report.written)
    yield from entries("Files", files)


def _bytes(value: int | None) -> str:
    return f", {figures.size(value)}" if value is not None else ""


def _notes(report: Findings) -> Iterator[str]:
    warnings = report.warnings
    yield from entries("Notes", warnings[:_MOST_NOTES])
    if len(warnings) > _MOST_NOTES:
        yield from entry("", f"and {len(warnings) - _MOST_NOTES} more; the report has all")
