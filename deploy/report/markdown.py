"""The report as Markdown, with GitHub's tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote

from deploy.report import figures, tables
from deploy.report.charts import sweep_table
from deploy.report.figures import DEVIATION_HEADS, encodable, engine_layers_words
from deploy.report.model import Findings
from deploy.report.parts import TargetPart
from deploy.report.report_rows import float_groups, worst_first, worst_weights
from deploy.report.tables import (
    KERNEL_HEADS,
    TRIAL_HEADS,
    WEIGHT_HEADS,
    built_targets,
    calibration_words,
    coverage,
    engine_lines,
    failures,
    group_words,
    kernel_rows,
    plan_name,
    quantized_operators,
    search_words,
    target_suffix,
    timed_engines,
    trial_row,
    weight_row,
    work_words,
)

_WEIGHTS = 8  # weights listed per target


def to_markdown(report: Findings) -> str:
    """Return Markdown text; every name is escaped."""
    parts = (
        _head(report),
        _engines(report),
        _swept(report),
        _kernels(report),
        _outputs(report),
        _search(report),
        _coverage(report),
        _ran(report),
        _tensors(report),
        _weights(report),
        _where(report),
        _notes(report),
        _work(report),
    )
    return encodable("\n\n".join(block for part in parts for block in part) + "\n")


def _head(report: Findings) -> Iterator[str]:
    yield f"# {_escape(report.title)}"
    devices = report.machine.devices if report.machine else ()
    facts = [f"Device: {_escape(device.words)}" for device in devices]
    facts += [
        f"Verdict on {_escape(e.label)}: {_escape(e.verdict.words)}"
        for e in report.engines
        if e.verdict
    ]
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
        facts += [f"Calibration: {_escape(calibration_words(report))}"]
        if report.calibration.agreement:
            facts += [f"Ranges: {_escape(report.calibration.agreement.words)}"]
        facts += [f"Observed: {_escape(group_words(g))}" for g in report.calibration.groups]
    facts += [f"{_escape(t.name)} failed: {_escape(t.error)}" for t in failures(report)]
    if facts:
        yield _bullets(facts)


def _engines(report: Findings) -> Iterator[str]:
    lines = engine_lines(report)
    if lines:
        yield "## Engines"
        heads = ["", *(engine.label for engine in report.engines), ""]
        yield _table(heads, ([line.label, *line.cells, line.change] for line in lines))


def _swept(report: Findings) -> Iterator[str]:
    heads, rows = sweep_table(report.engines)
    if rows:
        yield "## Batches"
        yield _table(heads, rows)


def _kernels(report: Findings) -> Iterator[str]:
    for engine in timed_engines(report.engines):
        yield f"## Kernels of {_escape(engine.label)}"
        yield _table(KERNEL_HEADS, kernel_rows(engine))


def _outputs(report: Findings) -> Iterator[str]:
    for engine in report.engines:
        if engine.accuracy:
            samples = figures.count(engine.accuracy.samples, "sample")
            yield f"## Accuracy of {_escape(engine.label)} over {samples}"
            notes = tables.accuracy_notes(engine.accuracy)
            if notes:
                yield _bullets([_escape(text) for text in notes])
            if tables.has_slices(engine.accuracy):
                yield _table(tables.PART_HEADS, map(tables.part_row, engine.accuracy.parts))
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


def _search(report: Findings) -> Iterator[str]:
    """Yield the trials of each target's search, and the name of the plan file."""
    for target in report.targets:
        if target.search is not None:
            own = target_suffix(report, _escape(target.name), " for ")
            yield f"## Search{own}"
            name = plan_name(report)
            kept = f" It is kept in [{_escape(name)}]({_url(name)})." if name else ""
            yield f"Built: {_escape(search_words(target.search))}.{kept}"
            if target.search.tried:
                yield _table(TRIAL_HEADS, map(trial_row, target.search.tried))


def _coverage(report: Findings) -> Iterator[str]:
    targets = built_targets(report)
    if targets:
        yield "## Nodes"
        yield _covered(targets)
    groups = float_groups(targets)
    if groups:
        yield _table(
            ["float operator", "nodes", "on", "reason"],
            (
                [group.op, ", ".join(names), ", ".join(where), group.reason]
                for group in groups
                for names, where in group.places
            ),
        )


def _ran(report: Findings) -> Iterator[str]:
    """Yield the comparison of each engine's layers with its plan."""
    for engine in report.engines:
        words = engine_layers_words(engine.ran) if engine.ran else ""
        if engine.ran and words:
            yield f"## In the engine of {_escape(engine.target)}"
            yield f"{_escape(words)}."
            if engine.ran.otherwise:
                yield _table(DEVIATION_HEADS, engine.ran.otherwise)


def _covered(targets: Sequence[TargetPart]) -> str:
    return _table(
        ["target", "nodes", "operators", "ranges by", "options"],
        ([t.name, coverage(t), quantized_operators(t), t.method, t.typed] for t in targets),
    )


def _tensors(report: Findings) -> Iterator[str]:
    for target in report.targets:
        if target.tensors:
            own = target_suffix(report, _escape(target.name))
            yield f"## Tensors{own}"
            yield _ranges(target)


def _ranges(target: TargetPart) -> str:
    return _table(
        ["tensor", "min", "max", "clip low", "clip high", "amax", "method", "clipped", "SQNR"],
        (
            [
                row.name,
                *map(figures.real, (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)),
                row.method,
                figures.percent(row.clipped),
                figures.decibels(row.sqnr_db),
            ]
            for row in worst_first(target.tensors)
        ),
    )


def _weights(report: Findings) -> Iterator[str]:
    """Yield the worst weights of each target."""
    for target in report.targets:
        if target.weights:
            own = target_suffix(report, _escape(target.name))
            yield f"## Weights{own}"
            worst = worst_weights(target.weights)
            yield _table(WEIGHT_HEADS, map(weight_row, worst[:_WEIGHTS]))
            if len(worst) > _WEIGHTS:
                yield f"and {len(worst) - _WEIGHTS} more, whose channels lie less far apart."


def _where(report: Findings) -> Iterator[str]:
    if report.machine:
        machine = report.machine
        yield "## Machine"
        yield _bullets(
            [
                f"{_escape(machine.cpu)}, {figures.count(machine.cores, 'core')},"
                f" {_escape(', '.join(machine.int8) or 'no int8 dot product')}",
                _escape(machine.os),
                *(_escape(device.words) for device in machine.devices),
                _escape(", ".join(f"{k} {v}" for k, v in machine.versions.items())),
            ]
        )
    if report.written:
        yield "## Files"
        yield _table(
            ["file", "what it is", "size"],
            ([file.path, file.role, figures.size(file.size_bytes)] for file in report.written),
        )


def _notes(report: Findings) -> Iterator[str]:
    if report.warnings:
        yield "## Notes"
        yield _bullets([_escape(text) for text in report.warnings])


def _work(report: Findings) -> Iterator[str]:
    if report.work:
        yield "<details><summary>Work</summary>"
        yield _bullets([_escape(text) for text in work_words(report.work)])
        yield "</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [_row([_escape(text) for text in heads]), _row(["---"] * len(heads))]
    return "\n".join([*head, *(_row([_escape(cell) for cell in row]) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _code(text: str) -> str:
    """Return inline code; its fence is longer than any run of backticks inside."""
    flat = " ".join(text.split())
    fence = "`"
    while fence in flat:
        fence += "`"
    pad = " " if flat[:1] == "`" or flat[-1:] == "`" else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _url(name: str) -> str:
    """Return a link target for a file next to the report."""
    return quote(encodable(name))


def _escape(text: str) -> str:
    """Escape what Markdown or HTML would interpret: tensor names may hold anything."""
    flat = " ".join(text.split())
    for mark in "\\`*_[]|<>#":
        flat = flat.replace(mark, f"\\{mark}" if mark not in "<>" else f"&{_ENTITY[mark]};")
    return flat


_ENTITY = {"<": "lt", ">": "gt"}
