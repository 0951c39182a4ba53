"""The tables every form of the report shares: engines side by side, node coverage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import deploy.report.figures as figures
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import Latency
from deploy.report.model import EngineRow, NodeRow, Report


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the engines table: a label, one cell an engine, and the last one's change."""

    label: str
    cells: tuple[str, ...]
    change: str = ""


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """Float nodes that share an operator and a reason."""

    op: str
    reason: str
    names: tuple[str, ...]


def engine_lines(report: Report) -> tuple[Line, ...]:
    """Size, latency, throughput, load and accuracy; lines that nothing fills are left out."""
    lines = (*_size(report), *_latency(report), *_accuracy(report))
    return tuple(line for line in lines if set(line.cells) - {figures.NONE})


def coverage(report: Report) -> str:
    """How many nodes run in int8, in words; empty where nodes are not known."""
    if not report.nodes:
        return ""
    int8 = sum(node.int8 for node in report.nodes)
    return f"{int8} of {figures.count(len(report.nodes), 'node')} int8"


def float_groups(report: Report) -> tuple[FloatGroup, ...]:
    """Float nodes by reason and operator, the largest group first."""
    groups: dict[tuple[str, str], list[NodeRow]] = {}
    for node in report.nodes:
        if not node.int8:
            groups.setdefault((node.op, node.reason), []).append(node)
    found = [
        FloatGroup(op, reason, tuple(node.name for node in nodes))
        for (op, reason), nodes in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -len(group.names)))


def int8_operators(report: Report) -> str:
    """Operators that run in int8 with their number: "Conv 12, Add 3"."""
    counts = Counter(node.op for node in report.nodes if node.int8)
    return ", ".join(f"{op} {number}" for op, number in counts.most_common())


def speed_up(report: Report, engine: EngineRow) -> float | None:
    """The float model's median latency over the engine's; None where either was not measured."""
    reference = report.reference
    if engine.reference or reference is None or not (reference.latency and engine.latency):
        return None
    return reference.latency.latency.median / engine.latency.latency.median


def shrink(report: Report, engine: EngineRow) -> float | None:
    """The float model's size over the engine's."""
    reference = report.reference
    if engine.reference or reference is None or not (reference.size_bytes and engine.size_bytes):
        return None
    return reference.size_bytes / engine.size_bytes


def top1(report: Report, engine: EngineRow) -> float | None:
    """Top-1 of an engine; the float model's own is known from any comparison with it."""
    if engine.accuracy:
        return engine.accuracy.top1_candidate
    compared = [e.accuracy.top1_reference for e in report.engines if e.accuracy]
    return next((share for share in compared if share is not None), None)


def worst(values: Iterable[float]) -> float:
    """The least of several, NaN where any is NaN (which `min` would lose by its order)."""
    found = tuple(values)
    return math.nan if any(map(math.isnan, found)) else min(found, default=math.nan)


def _size(report: Report) -> Iterator[Line]:
    factor = [shrink(report, engine) for engine in report.engines]
    yield Line(
        "Size",
        tuple(figures.size(engine.size_bytes) for engine in report.engines),
        _change(factor, lambda f: f"{figures.ratio(f)} smaller"),
    )
    yield Line("Load", tuple(figures.milliseconds(engine.load_ms) for engine in report.engines))


def _latency(report: Report) -> Iterator[Line]:
    factor = [speed_up(report, engine) for engine in report.engines]

    def line(label: str, get: Callable[[Latency], str], change: str = "") -> Line:
        cells = (get(e.latency) if e.latency else figures.NONE for e in report.engines)
        return Line(label, tuple(cells), change)

    ms = figures.milliseconds
    yield line("Latency p50", lambda x: ms(x.latency.p50), _change(factor, _faster))
    yield line("Latency p90", lambda x: ms(x.latency.p90))
    yield line("Latency p95", lambda x: ms(x.latency.p95))
    yield line("Latency p99", lambda x: ms(x.latency.p99))
    yield line("Latency mean", lambda x: ms(x.latency.mean))
    yield line("Variation", lambda x: f"{x.latency.cv_percent:.3g} %")
    yield line("GPU compute", lambda x: ms(x.gpu_compute.median) if x.gpu_compute else figures.NONE)
    yield line("Throughput", lambda x: figures.rate(x.throughput_qps))


def _accuracy(report: Report) -> Iterator[Line]:
    shares = [top1(report, engine) for engine in report.engines]
    lost = [
        share - shares[0] for share in shares[1:] if share is not None and shares[0] is not None
    ]
    words = "worst " if len(lost) > 1 else ""
    change = words + figures.points(min(lost)) if lost else ""
    yield Line("Top-1", tuple(figures.percent(share) for share in shares), change)

    def line(label: str, get: Callable[[Accuracy], str]) -> Line:
        cells = (get(e.accuracy) if e.accuracy else figures.NONE for e in report.engines)
        return Line(label, tuple(cells))

    yield line("Top-1 agreement", lambda x: figures.percent(x.top1_agreement))
    yield line("SQNR", lambda x: figures.decibels(worst(o.sqnr_db for o in x.outputs)))
    yield line("Cosine", lambda x: figures.cosine(worst(o.cosine_mean for o in x.outputs)))
    yield line("Cosine, worst", lambda x: figures.cosine(worst(o.cosine_min for o in x.outputs)))


def _change(factors: list[float | None], words: Callable[[float], str]) -> str:
    known = [factor for factor in factors if factor is not None]
    return words(known[0]) if len(known) == 1 else ""


def _faster(factor: float) -> str:
    return (
        f"{figures.ratio(factor)} faster" if factor >= 1 else f"{figures.ratio(1 / factor)} slower"
    )
