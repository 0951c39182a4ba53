"""What each kernel of the engines takes, in words: worst first, and of several engines by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from deploy.report import figures, markup
from deploy.report.model import Findings
from deploy.report.parts import EngineRow
from deploy.report.section import Section

KERNEL_HEADS = ("time", "share", "kind", "kernel")


def kernel_rows(engine: EngineRow, most: int | None = None) -> list[list[str]]:
    """An engine's kernels under `KERNEL_HEADS`, the slowest first, at most so many."""
    total = sum(kernel.ms for kernel in engine.kernels)
    return [
        [figures.milliseconds(kernel.ms), _share(kernel.ms, total), kernel.kind, kernel.name]
        for kernel in engine.kernels[:most]
    ]


def more_kernels(engine: EngineRow, most: int) -> str:
    """How many more there are, and what they take; "" of none."""
    rest = engine.kernels[most:]
    total = sum(kernel.ms for kernel in engine.kernels)
    if not rest:
        return ""
    taken = sum(kernel.ms for kernel in rest)
    return f"and {figures.count(len(rest), 'more kernel')} of {_share(taken, total)}"


def kind_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: one row a kind of kernel, its time and number in every engine.

    The slowest first, by the engine in which it takes longest; runtimes that tell no kinds give no
    rows.
    """
    timed = timed_engines(engines)
    found = [_by_kind(engine) for engine in timed]
    kinds = {kind for one in found for kind in one if kind}
    slowest = {kind: max(sum(one.get(kind, ())) for one in found) for kind in kinds}
    rows = [
        [*(_cell(one.get(kind, ())) for one in found), kind]
        for kind in sorted(kinds, key=lambda kind: (-slowest[kind], kind))
    ]
    return [*(engine.label for engine in timed), "kind"], rows


def timed_engines(engines: Sequence[EngineRow]) -> list[EngineRow]:
    """Those whose kernels were timed."""
    return [engine for engine in engines if engine.kernels]


def kernel_section(report: Findings) -> Iterator[Section]:
    """The page's tables: by kind, then every kernel of each engine."""
    timed = timed_engines(report.engines)
    if not timed:
        return
    heads, rows = kind_table(timed)
    html = []
    if rows:
        html.append(markup.table([heads[-1], *heads[:-1]], ([r[-1], *r[:-1]] for r in rows)))
    for engine in timed:
        table = markup.table(KERNEL_HEADS, kernel_rows(engine), "words")
        html += [f"<h3>{escape(engine.label)}</h3>", table]
    most = max(len(engine.kernels) for engine in timed)
    yield Section(title="Kernels", html="\n".join(html), rows=most)


def _by_kind(engine: EngineRow) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in engine.kernels:
        found[kernel.kind].append(kernel.ms)
    return found


def _cell(taken: Sequence[float]) -> str:
    return f"{figures.milliseconds(sum(taken))} in {len(taken)}" if taken else figures.NONE


def _share(ms: float, total: float) -> str:
    return f"{100 * ms / total:.1f} %" if total else figures.NONE
