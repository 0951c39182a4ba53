"""Texts and table rows that all output formats of the report share.

Engines side by side, coverage of targets, the task's figure and output slices, calibration and
search as text, and kernels: the slowest first, and by kind for several engines.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from deploy.calibration.reuse import NO_CACHE
from deploy.errors import counted
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import KernelTime
from deploy.metrics.latency import MIN_RUNS_FOR_P95, Latency
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.report import figures
from deploy.report import model as report_model
from deploy.report.figures import quantized_layers
from deploy.report.model import Findings
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    FileRow,
    GroupRow,
    SearchPart,
    TargetPart,
    WorkPart,
)
from deploy.tuning.plan_file import SplitRow

Figure = TypeVar("Figure")

ACCURACY_HEADS = ("SQNR", "cosine", "worst cosine", "max abs error")
LAYER_HEADS = ("tensor", "SQNR", "cosine")  # of the first cells of an `accuracy_row`
# figure of the runs -> fewest runs that show it: with fewer, it is the slowest run
_MIN_RUNS_BY_FIGURE = {"p50": 0, "p90": 0, "p95": MIN_RUNS_FOR_P95, "p99": 100, "mean": 0}
_DEVICE_CLOCKS = {"Enqueue": "enqueue", "H2D": "h2d", "GPU compute": "gpu_compute", "D2H": "d2h"}


def has_slices(accuracy: Accuracy) -> bool:
    """Whether an output has several slices, or is measured as a difference."""
    return any(part.label != part.output for part in accuracy.parts)


def worst_figure(accuracy: Accuracy, name: str) -> float | None:
    """Return a figure of the worst slice, else of the worst output.

    A slice, in `accuracy.parts`, is the part of an output that is compared by itself: the boxes or
    the scores, for instance. Outputs without a task have no slices.

    None if the task's outputs are lists, whose rows cannot be compared one by one: then it has no
    slices either.

    Args:
        accuracy: of one engine.
        name: "sqnr_db", "cosine_mean" or "cosine_min".
    """
    if accuracy.task and not accuracy.parts:
        return None
    if accuracy.worst is not None:  # the worst slice
        return float(getattr(accuracy.worst, name))
    values = [getattr(output, name) for output in accuracy.outputs]
    return float(np.min(values, initial=math.inf))  # unlike Python's min, NaN if any value is NaN


def worst_label(accuracy: Accuracy) -> str:
    """Return the label of the worst slice; "" for a single output that is not sliced."""
    if accuracy.worst and (len(accuracy.parts) > 1 or has_slices(accuracy)):
        return accuracy.worst.label
    return ""


def task_label(accuracy: Accuracy) -> str:
    """Return the name of the task's figure as a line's label, such as "Boxes kept".

    "" without a task, and for classes that the line of top-1 agreement covers.
    """
    task = accuracy.task
    if task is None or (task.task == "classes" and accuracy.top1_agreement is not None):
        return ""
    return task.figure[:1].upper() + task.figure[1:]


def own_metric_value(accuracy: Accuracy) -> str:
    """Return the float model's own value of a user's metric; "" for agreement figures."""
    if accuracy.task is None or accuracy.task.task != "metric":
        return ""
    return f"{accuracy.task.reference:.4g}"


def accuracy_row(name: str, errors: OutputAccuracy | SliceAccuracy) -> list[str]:
    """Return the name of an output or slice and its figures under `ACCURACY_HEADS`."""
    return [
        name,
        figures.decibels(errors.sqnr_db),
        figures.cosine(errors.cosine_mean),
        figures.cosine(errors.cosine_min),
        figures.real(errors.max_abs_error),
    ]


def accuracy_notes(accuracy: Accuracy) -> tuple[str, ...]:
    """Return the task's figure as text, how the outputs were interpreted, and why so."""
    task_text = accuracy.task.words if accuracy.task else ""
    return tuple(filter(None, (task_text, accuracy.reading, accuracy.why)))


@dataclass(frozen=True, slots=True)
class ComparisonLine:
    """A line of the engines table.

    Attributes:
        label: name of the figure.
        cells: the figure of each engine as text.
        change: how the engines compare, as text; "" for nothing to say.
    """

    label: str
    cells: tuple[str, ...]
    change: str = ""


def engine_lines(report: Findings) -> tuple[ComparisonLine, ...]:
    """Return size, latency, layers and accuracy, without empty lines."""
    lines = (*_size(report), *_latency(report), *_layers(report), *_accuracy(report))
    return tuple(line for line in lines if set(line.cells) - {figures.NONE})


def coverage(target: TargetPart) -> str:
    """Return the number of quantized nodes: "25 of 27 nodes int8"; "" if unknown."""
    if not target.nodes:
        return ""
    counts = Counter(node.precision for node in target.nodes if node.quantized)
    if not counts:
        counts["int8"] = 0
    (main_precision, main_count), *other_counts = counts.most_common()
    text = f"{main_count} of {counted(len(target.nodes), 'node')} {main_precision}"
    for precision, count in other_counts:
        text += f", {count} {precision}"
    return text


def quantized_operators(target: TargetPart) -> str:
    """Return the quantized operators with their number: "Conv 12, Add 3"."""
    counts = Counter(node.op for node in target.nodes if node.quantized).most_common()
    return ", ".join(f"{op} {number}" for op, number in counts)


def built_targets(report: Findings) -> tuple[TargetPart, ...]:
    """Return the targets that were built and whose nodes are known."""
    return tuple(target for target in report.targets if target.nodes and not target.error)


def failure_texts(report: Findings) -> Iterator[str]:
    """Yield why targets could not be built."""
    for target in report.targets:
        if target.error:
            yield f"{target.name} failed: {target.error}"


def common_method(report: Findings) -> str:
    """Return the calibration method that all targets share; "" if they differ."""
    methods = {target.method for target in report.targets if target.method}
    if not methods and report.calibration:
        return report.calibration.method
    if len(methods) != 1:
        return ""
    return methods.pop()


def _comparison_line(
    label: str, values: Iterable[Figure | None], to_text: Callable[[Figure], str], change: str = ""
) -> ComparisonLine:
    """Return a line with a cell per engine.

    Args:
        label: of the line.
        values: of each engine; None for "-".
        to_text: returns the cell of a value.
        change: how the engines compare, as text.
    """
    cells = []
    for value in values:
        cells.append(figures.NONE if value is None else to_text(value))
    return ComparisonLine(label, tuple(cells), change)


def _size(report: Findings) -> Iterator[ComparisonLine]:
    """Yield the line of file sizes, and the line of load times.

    If there is one int8 engine only, the first line also compares it: "2.00x smaller".
    """
    reference = report.reference
    cells = []
    ratios = []  # size of the float model over that of each int8 engine
    for engine in report.engines:
        target = report.target_of(engine)
        if target is not None and target.error:
            cells.append(figures.FAILED)
        else:
            cells.append(figures.size(engine.size_bytes))
        if reference is not None and not engine.is_float:
            ratio = report_model.size_over(reference, engine)
            if ratio is not None:
                ratios.append(ratio)
    change = figures.size_change_text(ratios[0]) if len(ratios) == 1 else ""
    yield ComparisonLine("Size", tuple(cells), change)
    yield _comparison_line(
        "Load", [engine.load_ms for engine in report.engines], figures.milliseconds
    )


def time_name(engines: Iterable[EngineRow]) -> str:
    """Return what was measured: "CPU time" if that is the time of all engines, else "Latency"."""
    latencies = [engine.latency for engine in engines if engine.latency]
    is_cpu_time = latencies and all(latency.is_cpu_time for latency in latencies)
    return "CPU time" if is_cpu_time else "Latency"


def _latency(report: Findings) -> Iterator[ComparisonLine]:
    """Yield lines with latency, its spread, and throughput.

    After a sweep, which measures several batch sizes, all lines are of the smallest batch, and a
    line with its size comes first.
    """
    time_label = time_name(report.engines)  # "Latency" or "CPU time"
    latencies = [engine.latency for engine in report.engines]
    if any(engine.sweep for engine in report.engines):
        smallest_batches = []
        for engine in report.engines:
            smallest_batches.append(engine.sweep[0].batch if engine.sweep else None)
        yield _comparison_line("Batch", smallest_batches, str)
    run_count = min((latency.queries for latency in latencies if latency), default=0)
    for figure, min_runs in _MIN_RUNS_BY_FIGURE.items():  # p50, p90, ...
        if run_count >= min_runs:
            change = _speed_text(report) if figure == "p50" else ""  # speeds are compared by p50
            yield _comparison_line(
                f"{time_label} {figure}",
                latencies,
                partial(_clock_text, "latency", figure),
                change,
            )
    # an engine is timed by several clocks: `latency.latency` is the `Timing` of the main one
    yield _comparison_line(
        "Spread (std / mean)", latencies, lambda latency: f"{latency.latency.cv_percent:.3g} %"
    )
    for label, clock in _DEVICE_CLOCKS.items():
        yield _comparison_line(label, latencies, partial(_clock_text, clock, "p50"))
    yield _comparison_line(
        "Throughput", latencies, lambda latency: figures.rate(latency.throughput_qps)
    )


def _clock_text(clock: str, figure: str, latency: Latency) -> str:
    """Return a figure of one clock as text; "-" if the engine was not timed by that clock.

    Args:
        clock: field of `Latency`, such as "gpu_compute".
        figure: field of its `Timing`, such as "p50".
        latency: of one engine.
    """
    timing = getattr(latency, clock)
    return figures.milliseconds(getattr(timing, figure, None))


def _speed_text(report: Findings) -> str:
    """Return how many times as fast the only int8 engine is as each of its rivals.

    Rivals are the float engines that it replaces. "" for several int8 engines: the text would not
    say which of them it is about.
    """
    engines_with_rivals = []
    for engine in report.engines:
        if rivals := report_model.find_rivals(report.engines, engine):
            engines_with_rivals.append((engine, rivals))
    if len(engines_with_rivals) != 1:
        return ""

    engine, rivals = engines_with_rivals[0]
    texts = []
    for rival in rivals:
        if engine.speed and rival is rivals[0]:  # `speed` is over the main rival, with an interval
            text = engine.speed.text
            if engine.speed.is_noisy:
                text += ", too noisy"
        else:
            text = figures.ratio(report_model.speed_over(rival, engine))
        if not rival.reference:  # a text that names no engine is about the float model
            text += f" of {rival.label}"
        texts.append(text)
    return ", ".join(texts)


def _layers(report: Findings) -> Iterator[ComparisonLine]:
    """Yield the numbers of layers, if the runtime reports them."""
    layers_by_engine = [engine.ran for engine in report.engines]
    yield _comparison_line("Quantized layers", layers_by_engine, quantized_layers)
    yield _comparison_line("Reformats", layers_by_engine, lambda layers: str(layers.reformats))


def _accuracy(report: Findings) -> Iterator[ComparisonLine]:
    """Yield top-1, mean average precision, the task's figures, and the errors of the outputs."""
    for label in ("Top-1", "mAP .50:.95", "mAP .50"):
        yield _share_line(report, label)
    accuracies = [engine.accuracy for engine in report.engines]
    measured_accuracies = [accuracy for accuracy in accuracies if accuracy]
    for label in _distinct(map(task_label, measured_accuracies)):
        yield _task_line(report, label)
    yield _comparison_line(
        "Top-1 agreement", accuracies, lambda accuracy: figures.percent(accuracy.top1_agreement)
    )

    label = "SQNR"
    worst_text = ""
    worst_labels = _distinct(map(worst_label, measured_accuracies))
    if worst_labels:  # an output is compared in parts, such as boxes and scores
        label = "SQNR, worst part"
        worst_text = f"of {', '.join(worst_labels)}"  # behind the cells: which parts these are
    yield _comparison_line(
        label,
        accuracies,
        lambda accuracy: figures.decibels(worst_figure(accuracy, "sqnr_db")),
        worst_text,
    )
    yield _comparison_line("Cosine", accuracies, partial(_cosine_text, "cosine_mean"))
    yield _comparison_line("Cosine, worst", accuracies, partial(_cosine_text, "cosine_min"))


def _cosine_text(name: str, accuracy: Accuracy) -> str:
    """Return the cosine of the worst slice or output as text; `name`: as for `worst_figure`."""
    return figures.cosine(worst_figure(accuracy, name))


def _distinct(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not empty, each once."""
    return list(dict.fromkeys(filter(None, texts)))


def _share_line(report: Findings, label: str) -> ComparisonLine:
    """Return the line of a figure by labels, such as top-1, with the engines' largest loss.

    `label`: name of the line, and of the figure in `_shares_by_labels`.
    """
    float_share: float | None = None
    shares: list[float | None] = []
    changes = []
    for engine in report.engines:
        share = None
        shares_by_figure = _shares_by_labels(engine.accuracy) if engine.accuracy else {}
        if label in shares_by_figure:
            # every engine's accuracy has the float model's share too, which is the same in all
            float_share, share = shares_by_figure[label]
            changes.append(share - float_share)
        shares.append(share)
    for index, engine in enumerate(report.engines):
        if engine.reference:  # the float model's own row
            shares[index] = float_share
    return ComparisonLine(label, tuple(map(figures.percent, shares)), _worst_change(changes))


def _shares_by_labels(accuracy: Accuracy) -> dict[str, tuple[float, float]]:
    """Return figure -> (share of the float model, share of an engine), 0 to 1, of those measured.

    Top-1 needs labels of classes, mean average precision (over all IoUs, and at IoU .50) objects.
    """
    shares = {}
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        shares["Top-1"] = (accuracy.top1_reference, accuracy.top1_candidate)
    precision = accuracy.precision
    if precision is not None:
        shares["mAP .50:.95"] = (precision.reference, precision.candidate)
        shares["mAP .50"] = (precision.reference_50, precision.candidate_50)
    return shares


def _worst_change(changes: Sequence[float]) -> str:
    """Return the largest loss of the engines as text; marked as the worst if there are several.

    `changes`: share that each engine gains against the float model, negative for a loss. "" is
    returned if there are none.
    """
    text = figures.points(min(changes)) if changes else ""
    return f"worst {text}" if len(changes) > 1 else text


def _task_line(report: Findings, label: str) -> ComparisonLine:
    """Return the line of the task's figure, such as "27 of 28 boxes"; `label`: its name.

    The figure compares an engine with the float model, so the float model's cell is empty. Only a
    user's own metric has a value for the float model too; the accuracy of each engine holds it.
    """
    accuracies = [engine.accuracy for engine in report.engines if engine.accuracy]
    float_model_values = _distinct(map(own_metric_value, accuracies))  # none, or one
    cells = []
    for engine in report.engines:
        if engine.reference and float_model_values:  # `reference`: it is the float model
            cells.append(float_model_values[0])
        elif engine.accuracy and engine.accuracy.task:
            cells.append(engine.accuracy.task.count)
        else:
            cells.append(figures.NONE)
    return ComparisonLine(label, tuple(cells))


PLAN, OPTIONS, REPORT = "plan", "options", "report"  # roles of the report's files
FRONT_HEADS = (
    "split",
    "layers in float",
    "time, FP32 = 1",
    "size, FP32 = 1",
    "SQNR",
    "task",
    "expected",
    "built",
)


def target_suffix(report: Findings, name: str, joint: str = " of ") -> str:
    """Return a suffix of a title with the target's name, if there are several targets."""
    if len(report.targets) <= 1:
        return ""
    return f"{joint}{name}"


def calibration_text(report: Findings) -> str:
    """Return common method, cache reuse and time in one line."""
    part = report.calibration or CalibrationPart()
    text = _reuse_text(part)
    if method := common_method(report):
        text = f"{method}, {text}"
    if part.seconds is not None:
        text += f" in {part.seconds:.1f} s"
    # that there was no cache yet needs no mention
    if part.reason and not part.reason.endswith(NO_CACHE):
        text += f": {part.reason}"
    return text


def _reuse_text(part: CalibrationPart) -> str:
    """Return whether the statistics were observed in this run or came from the cache."""
    if part.reused:
        return "cache reused"
    if part.by_model:
        return "nothing calibrated"
    if any(group.reused for group in part.groups):
        return "cache reused in part"
    return "calibrated"


def group_text(group: GroupRow) -> str:
    """Return one kind of observation: "folded, histogram: 31 tensors, reused"."""
    origin = "reused" if group.reused else "observed now"
    tensors = counted(group.tensors, "tensor")
    return f"{group.variant}, {group.statistic}: {tensors}, {origin}"


def work_texts(part: WorkPart) -> Iterator[str]:
    """Yield the cost of a run: decoded images, then inferences by purpose."""
    yield f"{counted(part.decodes, 'image')} decoded"
    yield _runs("calibration", part.calibration_runs)
    yield counted(part.reference_runs, "reference inference")
    yield _runs("engine", part.engine_runs)


def _runs(purpose: str, runs: Mapping[str, int]) -> str:
    """Return numbers of inferences as text, such as "12 engine inferences (tensorrt 12)"."""
    total = counted(sum(runs.values()), f"{purpose} inference")
    details = ", ".join(f"{name} {number}" for name, number in runs.items())
    if details:
        total += f" ({details})"
    return total


def search_text(search: SearchPart) -> str:
    """Return the result of a search and its number of trials."""
    trials = counted(search.probes, "trial")
    if search.reused:
        trials = "from the plan, nothing tried"
    if search.settled:
        return f"{search.settled} ({trials})"
    return trials


def split_row(split: SplitRow) -> list[str]:
    """Return one split of a front under `FRONT_HEADS`."""
    return [
        f"--split {split.number}",
        f"{split.float_layers} of {split.layers}",
        f"{split.time:.2f} {'measured' if split.is_timed else 'estimated'}",
        f"{split.size:.2f}",
        figures.decibels(split.sqnr_db),
        split.figure,
        split.level,
        "yes" if split.taken else "",
    ]


def path_of(files: Iterable[FileRow], role: str) -> str:
    """Return the path of the first file of a role; "" without one."""
    return next((file.path for file in files if file.role == role), "")


KERNEL_HEADS = ("kernel", "time", "share", "kind")


def kernel_rows(engine: EngineRow, limit: int | None = None) -> list[list[str]]:
    """Return at most `limit` of an engine's kernels under `KERNEL_HEADS`, the slowest first."""
    total_ms = _total_ms(engine.kernels)
    rows = []
    for kernel in engine.kernels[:limit]:
        time = figures.milliseconds(kernel.ms)
        share = _share(kernel.ms, total_ms)
        rows.append([kernel.name, time, share, kernel.kind])
    return rows


def remaining_kernels(engine: EngineRow, limit: int) -> str:
    """Return the number and share of time of the kernels beyond `limit`; "" if none."""
    other_kernels = engine.kernels[limit:]
    if not other_kernels:
        return ""
    share = _share(_total_ms(other_kernels), _total_ms(engine.kernels))
    return f"and {counted(len(other_kernels), 'more kernel')} of {share}"


def _total_ms(kernels: Sequence[KernelTime]) -> float:
    """Return the time of all these kernels in one inference."""
    return sum(kernel.ms for kernel in kernels)


def kind_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Return (heads, rows): time and number of each kind of kernel in every engine.

    A kind is an operator, such as "Conv". Rows are sorted by the kind's longest time in any engine.
    There are no rows if the runtimes do not tell kinds.

    `engines`: those whose kernels were timed.
    """
    kinds: set[str] = set()
    for engine in engines:
        kinds.update(kernel.kind for kernel in engine.kernels if kernel.kind)
    timed_rows = []  # (longest time in any engine, row)
    for kind in sorted(kinds):
        cells = []
        max_ms = 0.0
        for engine in engines:
            kernels = [kernel for kernel in engine.kernels if kernel.kind == kind]
            cells.append(_kind_cell(kernels))
            max_ms = max(max_ms, _total_ms(kernels))
        timed_rows.append((max_ms, [kind, *cells]))
    timed_rows.sort(key=lambda timed_row: -timed_row[0])
    heads = ["kind", *(engine.label for engine in engines)]
    return heads, [row for _, row in timed_rows]


def timed_engines(engines: Sequence[EngineRow]) -> list[EngineRow]:
    """Return the engines whose kernels were timed."""
    return [engine for engine in engines if engine.kernels]


def _kind_cell(kernels: Sequence[KernelTime]) -> str:
    """Return the time and number of an engine's kernels of one kind."""
    if not kernels:
        return figures.NONE
    return f"{figures.milliseconds(_total_ms(kernels))} in {len(kernels)}"


def _share(ms: float, total_ms: float) -> str:
    """Return a part of the total time in percent; "-" if the clock measured nothing."""
    if not total_ms:
        return figures.NONE
    return f"{100 * ms / total_ms:.1f} %"
