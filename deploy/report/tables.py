"""Texts and table rows that all output formats of the report share.

Engines side by side, coverage of targets, the task's figure and output slices, calibration and
search as text, and kernels: the slowest first, and by kind for several engines.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from deploy.files.manifest import RECORDS
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import FEW
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.report import figures, model
from deploy.report.figures import quantized_layers
from deploy.report.model import Findings
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    GroupRow,
    SearchPart,
    TargetPart,
    TrialRow,
    WeightRow,
    WorkPart,
)

Part = TypeVar("Part")

ACCURACY_HEADS = ("SQNR", "cosine", "worst cosine", "max abs error")
LAYER_HEADS = ("tensor", "SQNR", "cosine")
_P99_RUNS = 100  # with fewer, p99 is the slowest run


def has_slices(accuracy: Accuracy) -> bool:
    """Whether an output has several slices, or is measured as a difference."""
    return any(one.label != one.output for one in accuracy.parts)


def worst_figure(accuracy: Accuracy, name: str) -> float | None:
    """Return a figure of the worst slice, else of the worst output; None for lists of boxes.

    `name`: "sqnr_db", "cosine_mean" or "cosine_min".
    """
    if accuracy.task and not accuracy.parts:
        return None
    if accuracy.worst is not None:
        return float(getattr(accuracy.worst, name))
    return figures.nan_aware_min(getattr(output, name) for output in accuracy.outputs)


def worst_label(accuracy: Accuracy) -> str:
    """Return the label of the worst slice; "" for a single output that is not sliced."""
    worst = accuracy.worst
    return worst.label if worst and (len(accuracy.parts) > 1 or has_slices(accuracy)) else ""


def task_label(accuracy: Accuracy) -> str:
    """Return the task's figure as a line's label; "" without a task or if top-1 covers it."""
    task = accuracy.task
    if task is None or (task.task == "classes" and accuracy.top1_agreement is not None):
        return ""
    return task.figure[:1].upper() + task.figure[1:]


def own_metric_value(accuracy: Accuracy) -> str:
    """Return the float model's own value of a user's metric; "" for agreement figures."""
    task = accuracy.task
    return f"{task.reference:.4g}" if task is not None and task.task == "metric" else ""


def accuracy_row(name: str, one: OutputAccuracy | SliceAccuracy) -> list[str]:
    """Return the name of an output or slice and its figures under `ACCURACY_HEADS`."""
    return [
        name,
        figures.decibels(one.sqnr_db),
        figures.cosine(one.cosine_mean),
        figures.cosine(one.cosine_min),
        figures.real(one.max_abs_error),
    ]


def layer_row(layer: OutputAccuracy) -> list[str]:
    """Return an inner tensor under `LAYER_HEADS`."""
    return accuracy_row(layer.name, layer)[: len(LAYER_HEADS)]


def accuracy_notes(accuracy: Accuracy) -> tuple[str, ...]:
    """Return the task's figure as text, how the outputs were interpreted, and by what."""
    words = accuracy.task.words if accuracy.task else ""
    return tuple(filter(None, (words, accuracy.reading, accuracy.why)))


@dataclass(frozen=True, slots=True)
class ComparisonLine:
    """A line of the engines table: a label, a cell per engine, and the change as text."""

    label: str
    cells: tuple[str, ...]
    change: str = ""


def engine_lines(report: Findings) -> tuple[ComparisonLine, ...]:
    """Return size, latency, layers and accuracy, without empty lines."""
    lines = (*_size(report), *_latency(report), *_ran(report), *_accuracy(report))
    return tuple(line for line in lines if set(line.cells) - {figures.NONE})


def coverage(target: TargetPart) -> str:
    """Return the number of quantized nodes: "25 of 27 nodes int8"; "" if unknown."""
    if not target.nodes:
        return ""
    counts = Counter(node.precision for node in target.nodes if node.quantized) or {"int8": 0}
    (first, number), *others = sorted(counts.items(), key=lambda item: -item[1])
    more = "".join(f", {count} {precision}" for precision, count in others)
    return f"{number} of {figures.count(len(target.nodes), 'node')} {first}{more}"


def quantized_operators(target: TargetPart) -> str:
    """Return the quantized operators with their number: "Conv 12, Add 3"."""
    counts = Counter(node.op for node in target.nodes if node.quantized).most_common()
    return ", ".join(f"{op} {number}" for op, number in counts)


def built_targets(report: Findings) -> tuple[TargetPart, ...]:
    """Return the targets that were built and whose nodes are known."""
    return tuple(target for target in report.targets if target.nodes and not target.error)


def failures(report: Findings) -> tuple[TargetPart, ...]:
    """Return the targets that could not be built."""
    return tuple(target for target in report.targets if target.error)


def common_method(report: Findings) -> str:
    """Return the calibration method that all targets share; "" if they differ."""
    used = {target.method for target in report.targets if target.method}
    if not used:
        return report.calibration.method if report.calibration else ""
    return used.pop() if len(used) == 1 else ""


def size_ratio(report: Findings, engine: EngineRow) -> float | None:
    """Return the float model's size over the engine's; None for float engines."""
    reference = report.reference
    if engine.reference or engine.baseline or reference is None:
        return None
    if not (reference.size_bytes and engine.size_bytes):
        return None
    return reference.size_bytes / engine.size_bytes


def top1(report: Findings, engine: EngineRow) -> float | None:
    """Return an engine's top-1; the float model's own is that of any comparison with it."""
    if engine.accuracy:
        return engine.accuracy.top1_candidate
    if not engine.reference:
        return None
    compared = [e.accuracy.top1_reference for e in report.engines if e.accuracy]
    return next((share for share in compared if share is not None), None)


def _size(report: Findings) -> Iterator[ComparisonLine]:
    factor = [size_ratio(report, engine) for engine in report.engines]
    yield ComparisonLine(
        "Size",
        tuple(_size_or_failure(report, engine) for engine in report.engines),
        _change(factor, lambda f: " ".join(figures.size_change(f)).strip()),
    )
    yield _line("Load", [engine.load_ms for engine in report.engines], figures.milliseconds)


def _size_or_failure(report: Findings, engine: EngineRow) -> str:
    target = report.target_of(engine)
    return figures.FAILED if target and target.error else figures.size(engine.size_bytes)


def _line(
    label: str, parts: Iterable[Part | None], get: Callable[[Part], str], change: str = ""
) -> ComparisonLine:
    """Return a line with a cell per engine, given its part; "-" for an engine without the part."""
    cells = (figures.NONE if part is None else get(part) for part in parts)
    return ComparisonLine(label, tuple(cells), change)


def _latency(report: Findings) -> Iterator[ComparisonLine]:
    ms = figures.milliseconds
    parts = [engine.latency for engine in report.engines]
    if any(engine.sweep for engine in report.engines):
        yield _line("Batch", [e.sweep or None for e in report.engines], lambda x: str(x[0].batch))
    yield _line("Latency p50", parts, lambda x: ms(x.latency.p50), _faster(report))
    yield _line("Latency p90", parts, lambda x: ms(x.latency.p90))
    runs = min((part.queries for part in parts if part), default=0)
    if runs >= FEW:
        yield _line("Latency p95", parts, lambda x: ms(x.latency.p95))
    if runs >= _P99_RUNS:
        yield _line("Latency p99", parts, lambda x: ms(x.latency.p99))
    yield _line("Latency mean", parts, lambda x: ms(x.latency.mean))
    yield _line("Variation", parts, lambda x: f"{x.latency.cv_percent:.3g} %")
    yield _line("Enqueue", parts, lambda x: ms(x.enqueue.p50 if x.enqueue else None))
    yield _line("H2D", parts, lambda x: ms(x.h2d.p50 if x.h2d else None))
    yield _line("GPU compute", parts, lambda x: ms(x.gpu_compute.p50 if x.gpu_compute else None))
    yield _line("D2H", parts, lambda x: ms(x.d2h.p50 if x.d2h else None))
    yield _line("Throughput", parts, lambda x: figures.rate(x.throughput_qps))


def _ran(report: Findings) -> Iterator[ComparisonLine]:
    """Yield the numbers of layers, if the runtime reports them."""
    parts = [engine.ran for engine in report.engines]
    yield _line("Quantized layers", parts, quantized_layers)
    yield _line("Reformats", parts, lambda part: str(part.reformats))


def _accuracy(report: Findings) -> Iterator[ComparisonLine]:
    shares = [top1(report, engine) for engine in report.engines]
    lost = [
        share - shares[0] for share in shares[1:] if share is not None and shares[0] is not None
    ]
    words = "worst " if len(lost) > 1 else ""
    change = words + figures.points(min(lost)) if lost else ""
    yield ComparisonLine("Top-1", tuple(figures.percent(share) for share in shares), change)

    judged = [engine.accuracy for engine in report.engines]
    measured = [accuracy for accuracy in judged if accuracy]
    yield from _precision(report, "mAP .50:.95", "")
    yield from _precision(report, "mAP .50", "_50")
    for label in dict.fromkeys(filter(None, map(task_label, measured))):
        task = _line(label, judged, lambda x: x.task.count if x.task else figures.NONE)
        fp32 = dict.fromkeys(filter(None, map(own_metric_value, measured)))
        cells = (
            next(iter(fp32), cell) if engine.reference else cell
            for engine, cell in zip(report.engines, task.cells, strict=True)
        )
        yield ComparisonLine(label, tuple(cells))
    yield _line("Top-1 agreement", judged, lambda x: figures.percent(x.top1_agreement))
    parts = dict.fromkeys(filter(None, map(worst_label, measured)))
    detail = f"of {', '.join(parts)}" if parts else ""

    def worst(name: str) -> list[float | None]:
        return [None if accuracy is None else worst_figure(accuracy, name) for accuracy in judged]

    sqnr = tuple(map(figures.decibels, worst("sqnr_db")))
    yield ComparisonLine("SQNR, worst part" if parts else "SQNR", sqnr, detail)
    yield ComparisonLine("Cosine", tuple(map(figures.cosine, worst("cosine_mean"))))
    yield ComparisonLine("Cosine, worst", tuple(map(figures.cosine, worst("cosine_min"))))


def _precision(report: Findings, label: str, at: str) -> Iterator[ComparisonLine]:
    """Yield mean average precision of every engine; FP32's is that of any comparison with it."""
    measured = [e.accuracy.precision for e in report.engines if e.accuracy and e.accuracy.precision]
    if measured:
        fp32: float = getattr(measured[0], f"reference{at}")
        shares = [fp32 if e.reference else _precision_of(e, at) for e in report.engines]
        lost = min(share - fp32 for share in shares if share is not None)
        yield ComparisonLine(label, tuple(map(figures.percent, shares)), figures.points(lost))


def _precision_of(engine: EngineRow, at: str) -> float | None:
    precision = engine.accuracy.precision if engine.accuracy else None
    return None if precision is None else float(getattr(precision, f"candidate{at}"))


def _change(factors: list[float | None], words: Callable[[float], str]) -> str:
    known = [factor for factor in factors if factor is not None]
    return words(known[0]) if len(known) == 1 else ""


def _faster(report: Findings) -> str:
    """Return how much faster the only comparable engine is than each of its rivals."""
    compared = [
        (e, rivals) for e in report.engines if (rivals := model.find_rivals(report.engines, e))
    ]
    if len(compared) != 1:
        return ""
    ((engine, rivals),) = compared
    words = []
    for rival in rivals:
        first = engine.speed if rival is rivals[0] else None
        speed = first.words if first else figures.ratio(model.speed_over(rival, engine))
        words.append(speed if rival.reference else f"{speed} of {rival.label}")
    return ", ".join(words)


PLAN, OPTIONS, REPORT = "plan", "options", "report"  # roles of the report's files
TRIAL_HEADS = ("tried whole", "SQNR", "time, FP32 = 1", "built")
WEIGHT_HEADS = (
    "weight", "channels", "scales", "dead", "used", "ratio", "least", "median", "largest", "worst",
)  # fmt: skip


def target_suffix(report: Findings, name: str, joint: str = " of ") -> str:
    """Return a suffix of a title with the target's name, if there are several targets."""
    return f"{joint}{name}" if len(report.targets) > 1 else ""


def calibration_text(report: Findings) -> str:
    """Return common method, cache reuse and time in one line."""
    part = report.calibration or CalibrationPart()
    method = common_method(report)
    time = f" in {part.seconds:.1f} s" if part.seconds is not None else ""
    reason = f": {part.reason}" if part.reason else ""
    return f"{f'{method}, ' if method else ''}{_reuse(part)}{time}{reason}"


def _reuse(part: CalibrationPart) -> str:
    if part.reused:
        return "cache reused"
    if part.by_model:
        return "nothing calibrated"
    some = any(group.reused for group in part.groups)
    return "cache reused in part" if some else "calibrated anew"


def group_text(group: GroupRow) -> str:
    """Return one kind of observation: "folded, histogram: 31 tensors, reused"."""
    how = "reused" if group.reused else "observed anew"
    tensors = figures.count(group.tensors, "tensor")
    return f"{group.variant}, {group.statistic}: {tensors}, {how}"


def work_texts(part: WorkPart) -> Iterator[str]:
    """Yield the cost of a run: decoded images, then inferences by purpose."""
    yield f"{figures.count(part.decodes, 'image')} decoded"
    yield _runs("calibration", part.calibration_runs)
    yield figures.count(part.reference_runs, "reference inference")
    yield _runs("engine", part.engine_runs)


def _runs(what: str, runs: Mapping[str, int]) -> str:
    total = figures.count(sum(runs.values()), f"{what} inference")
    each = ", ".join(f"{name} {number}" for name, number in runs.items())
    return f"{total} ({each})" if each else total


def search_text(search: SearchPart) -> str:
    """Return the result of a search and its number of trials."""
    tried = "from the plan, nothing tried" if search.reused else f"{search.probes} trials"
    return f"{search.settled} ({tried})" if search.settled else tried


def trial_row(trial: TrialRow) -> list[str]:
    """Return one trial under `TRIAL_HEADS`."""
    built = "yes" if trial.taken else ""
    return [trial.what, figures.decibels(trial.sqnr_db), f"{trial.time:.2f}", built]


def weight_row(row: WeightRow) -> list[str]:
    """Return one weight under `WEIGHT_HEADS`."""
    return [
        row.node,
        str(row.channels),
        str(row.scales),
        str(row.dead) if row.dead else "",
        f"{100 * row.used:.3g} %",
        f"{row.ratio:.3g}",
        *map(figures.real, (row.least, row.median, row.largest)),
        *map(str, row.worst[:1] or ("",)),
    ]


def plan_path(report: Findings) -> str:
    """Return the path of the plan from the report's folder; "" without a plan."""
    paths = [PurePath(file.path) for file in report.files if file.role == PLAN]
    if not paths:
        return ""
    record = paths[0].parent.name == RECORDS
    return f"{RECORDS}/{paths[0].name}" if record else paths[0].name


KERNEL_HEADS = ("kernel", "time", "share", "kind")


def kernel_rows(engine: EngineRow, most: int | None = None) -> list[list[str]]:
    """Return at most `most` of an engine's kernels under `KERNEL_HEADS`, the slowest first."""
    total = sum(kernel.ms for kernel in engine.kernels)
    return [
        [kernel.name, figures.milliseconds(kernel.ms), _share(kernel.ms, total), kernel.kind]
        for kernel in engine.kernels[:most]
    ]


def remaining_kernels(engine: EngineRow, most: int) -> str:
    """Return the number and share of time of the kernels beyond `most`; "" if none."""
    rest = engine.kernels[most:]
    total = sum(kernel.ms for kernel in engine.kernels)
    if not rest:
        return ""
    ms = sum(kernel.ms for kernel in rest)
    return f"and {figures.count(len(rest), 'more kernel')} of {_share(ms, total)}"


def kind_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: time and number of each kind of kernel in every engine.

    Sorted by the kind's longest time in any engine; without kinds there are no rows.
    """
    timed = timed_engines(engines)
    by_kind = [_by_kind(engine) for engine in timed]
    kinds = {kind for one in by_kind for kind in one if kind}
    slowest = {kind: max(sum(one.get(kind, ())) for one in by_kind) for kind in kinds}
    rows = [
        [kind, *(_cell(one.get(kind, ())) for one in by_kind)]
        for kind in sorted(kinds, key=lambda kind: (-slowest[kind], kind))
    ]
    return ["kind", *(engine.label for engine in timed)], rows


def timed_engines(engines: Sequence[EngineRow]) -> list[EngineRow]:
    """Return the engines whose kernels were timed."""
    return [engine for engine in engines if engine.kernels]


def _by_kind(engine: EngineRow) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in engine.kernels:
        times[kernel.kind].append(kernel.ms)
    return times


def _cell(times: Sequence[float]) -> str:
    return f"{figures.milliseconds(sum(times))} in {len(times)}" if times else figures.NONE


def _share(ms: float, total: float) -> str:
    return f"{100 * ms / total:.1f} %" if total else figures.NONE
