"""What every form of the report shares: engines side by side, what each target covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import Latency
from deploy.report import figures, speed, truth
from deploy.report.model import Findings
from deploy.report.parts import EngineRow, TargetPart
from deploy.report.ran import RanPart, quantized_layers


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the engines table: a label, one cell an engine, and the last one's change."""

    label: str
    cells: tuple[str, ...]
    change: str = ""


def engine_lines(report: Findings) -> tuple[Line, ...]:
    """Size, latency, layers and accuracy; lines that nothing fills are left out."""
    lines = (*_size(report), *_latency(report), *_ran(report), *_accuracy(report))
    return tuple(line for line in lines if set(line.cells) - {figures.NONE})


def coverage(target: TargetPart) -> str:
    """How many nodes are quantized, in words: "25 of 27 nodes int8"; empty where not known."""
    if not target.nodes:
        return ""
    counts = Counter(node.precision for node in target.nodes if node.quantized) or {"int8": 0}
    (first, number), *others = sorted(counts.items(), key=lambda item: -item[1])
    more = "".join(f", {count} {precision}" for precision, count in others)
    return f"{number} of {figures.count(len(target.nodes), 'node')} {first}{more}"


def quantized_operators(target: TargetPart, most: int | None = None) -> str:
    """Operators that are quantized with their number: "Conv 12, Add 3"; at most `most` of them."""
    counts = Counter(node.op for node in target.nodes if node.quantized).most_common()
    words = [f"{op} {number}" for op, number in counts[:most]]
    return ", ".join([*words, "..."] if len(words) < len(counts) else words)


def covered(report: Findings) -> tuple[TargetPart, ...]:
    """The targets that were built and whose nodes are known."""
    return tuple(target for target in report.targets if target.nodes and not target.error)


def failures(report: Findings) -> tuple[TargetPart, ...]:
    """The targets that could not be built."""
    return tuple(target for target in report.targets if target.error)


def common_method(report: Findings) -> str:
    """What chose the ranges of every target; "" where they differ, and each has to say its own."""
    used = {target.method for target in report.targets if target.method}
    if not used:
        return report.calibration.method if report.calibration else ""
    return used.pop() if len(used) == 1 else ""


def shrink(report: Findings, engine: EngineRow) -> float | None:
    """The float model's size over the engine's; None of a float engine."""
    reference = report.reference
    if engine.reference or engine.baseline or reference is None:
        return None
    if not (reference.size_bytes and engine.size_bytes):
        return None
    return reference.size_bytes / engine.size_bytes


def top1(report: Findings, engine: EngineRow) -> float | None:
    """Top-1 of an engine; the float model's own is known from any comparison with it."""
    if engine.accuracy:
        return engine.accuracy.top1_candidate
    if not engine.reference:
        return None
    compared = [e.accuracy.top1_reference for e in report.engines if e.accuracy]
    return next((share for share in compared if share is not None), None)


def _size(report: Findings) -> Iterator[Line]:
    factor = [shrink(report, engine) for engine in report.engines]
    yield Line(
        "Size",
        tuple(_size_or_failure(report, engine) for engine in report.engines),
        _change(factor, lambda f: " ".join(figures.sized(f)).strip()),
    )
    yield Line("Load", tuple(figures.milliseconds(engine.load_ms) for engine in report.engines))


def _size_or_failure(report: Findings, engine: EngineRow) -> str:
    target = report.target_of(engine)
    return figures.FAILED if target and target.error else figures.size(engine.size_bytes)


def _latency(report: Findings) -> Iterator[Line]:
    def line(label: str, get: Callable[[Latency], str], change: str = "") -> Line:
        cells = (get(e.latency) if e.latency else figures.NONE for e in report.engines)
        return Line(label, tuple(cells), change)

    ms = figures.milliseconds
    if any(engine.sweep for engine in report.engines):
        batches = (str(e.sweep[0].batch) if e.sweep else figures.NONE for e in report.engines)
        yield Line("Batch", tuple(batches))
    yield line("Latency p50", lambda x: ms(x.latency.p50), _faster(report))
    yield line("Latency p90", lambda x: ms(x.latency.p90))
    yield line("Latency p95", lambda x: ms(x.latency.p95))
    yield line("Latency p99", lambda x: ms(x.latency.p99))
    yield line("Latency mean", lambda x: ms(x.latency.mean))
    yield line("Variation", lambda x: f"{x.latency.cv_percent:.3g} %")
    yield line("Enqueue", lambda x: ms(x.enqueue.p50 if x.enqueue else None))
    yield line("H2D", lambda x: ms(x.h2d.p50 if x.h2d else None))
    yield line("GPU compute", lambda x: ms(x.gpu_compute.p50 if x.gpu_compute else None))
    yield line("D2H", lambda x: ms(x.d2h.p50 if x.d2h else None))
    yield line("Throughput", lambda x: figures.rate(x.throughput_qps))


def _ran(report: Findings) -> Iterator[Line]:
    """What the engines are made of, where their runtime tells."""

    def line(label: str, get: Callable[[RanPart], str]) -> Line:
        return Line(label, tuple(get(e.ran) if e.ran else figures.NONE for e in report.engines))

    yield line("Quantized layers", quantized_layers)
    yield line("Reformats", lambda part: str(part.reformats))


def _accuracy(report: Findings) -> Iterator[Line]:
    shares = [top1(report, engine) for engine in report.engines]
    lost = [
        share - shares[0] for share in shares[1:] if share is not None and shares[0] is not None
    ]
    words = "worst " if len(lost) > 1 else ""
    change = words + figures.points(min(lost)) if lost else ""
    yield Line("Top-1", tuple(figures.percent(share) for share in shares), change)

    judged = [engine.accuracy for engine in report.engines if engine.accuracy]
    yield from _precision(report, "mAP .50:.95", "")
    yield from _precision(report, "mAP .50", "_50")

    def line(label: str, get: Callable[[Accuracy], str], change: str = "") -> Line:
        cells = (get(e.accuracy) if e.accuracy else figures.NONE for e in report.engines)
        return Line(label, tuple(cells), change)

    for label in dict.fromkeys(filter(None, map(truth.task_label, judged))):
        task = line(label, lambda x: x.task.count if x.task else figures.NONE)
        own = dict.fromkeys(filter(None, map(truth.own_count, judged)))
        cells = (
            next(iter(own), cell) if engine.reference else cell
            for engine, cell in zip(report.engines, task.cells, strict=True)
        )
        yield Line(label, tuple(cells))
    yield line("Top-1 agreement", lambda x: figures.percent(x.top1_agreement))
    parts = dict.fromkeys(filter(None, map(truth.worst_label, judged)))
    of = f"of {', '.join(parts)}" if parts else ""
    yield line(
        "SQNR, worst part" if parts else "SQNR", lambda x: figures.decibels(truth.sqnr(x)), of
    )
    yield line("Cosine", lambda x: figures.cosine(truth.cosine(x)))
    yield line("Cosine, worst", lambda x: figures.cosine(truth.cosine_min(x)))


def _precision(report: Findings, label: str, at: str) -> Iterator[Line]:
    """Mean average precision of every engine; the float model's from any comparison with it."""
    known = [e.accuracy.precision for e in report.engines if e.accuracy and e.accuracy.precision]
    if known:
        own: float = getattr(known[0], f"reference{at}")
        shares = [own if e.reference else _precision_of(e, at) for e in report.engines]
        lost = min(share - own for share in shares if share is not None)
        yield Line(label, tuple(map(figures.percent, shares)), figures.points(lost))


def _precision_of(engine: EngineRow, at: str) -> float | None:
    found = engine.accuracy.precision if engine.accuracy else None
    return None if found is None else float(getattr(found, f"candidate{at}"))


def _change(factors: list[float | None], words: Callable[[float], str]) -> str:
    known = [factor for factor in factors if factor is not None]
    return words(known[0]) if len(known) == 1 else ""


def _faster(report: Findings) -> str:
    """The one engine that may be held against float ones: how much faster it is than each."""
    held = [(e, found) for e in report.engines if (found := speed.rivals(report.engines, e))]
    if len(held) != 1:
        return ""
    ((engine, found),) = held
    words = []
    for rival in found:
        factor = speed.speed_up(rival, engine)
        how = "faster" if factor >= 1 else "slower"
        than = "" if rival.reference else f" than {rival.label}"
        words.append(f"{figures.ratio(factor if factor >= 1 else 1 / factor)} {how}{than}")
    return ", ".join(words)
