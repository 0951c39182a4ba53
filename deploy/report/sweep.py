"""Engines at several batches: latency and what a second takes, as a table and as a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from deploy.report import figures, markup
from deploy.report.model import Findings
from deploy.report.parts import BatchRow, EngineRow
from deploy.report.section import Section

_WIDTH, _HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 16, 170, 24, 34
_ROW, _LETTERS = 15, 22  # between names, and of one
_COLOURS = 4  # classes c0..c3 of the page's style


def sweep_section(report: Findings) -> Iterator[Section]:
    """The page's table and drawing."""
    heads, rows = sweep_table(report.engines)
    if not rows:
        return
    words = "Items a second, the batch over p50; the larger point is the best."
    figure = sweep_figure(report.engines)
    drawn = f"<figure>{figure}<figcaption>{words}</figcaption></figure>" if figure else ""
    yield Section(title="Batches", html=drawn + markup.table(heads, rows), folded=False)


def sweep_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: one row a batch, p50 and throughput of every engine; the best is marked.

    Throughput is in items a second.
    """
    swept = [engine for engine in engines if engine.sweep]
    rows = [
        [str(row.batch), *(_cell(engine, engine.sweep[place]) for engine in swept)]
        for place, row in enumerate(swept[0].sweep if swept else ())
    ]
    return ["batch", *(engine.label for engine in swept)], rows


def sweep_figure(engines: Sequence[EngineRow]) -> str:
    """Throughput over batch, one line an engine, as inline SVG; "" of fewer than two batches."""
    swept = [(index, engine) for index, engine in enumerate(engines) if len(engine.sweep) > 1]
    if not swept:
        return ""
    most = max(row.items_qps for _, engine in swept for row in engine.sweep)
    body = [*_axis([row.batch for row in swept[0][1].sweep])]
    lowest = -math.inf
    for index, engine in sorted(swept, key=lambda one: -one[1].sweep[-1].items_qps):
        colour = f"c{index % _COLOURS}"
        body += _line(engine, colour, most)
        lowest = max(_y(engine.sweep[-1], most) + 4, lowest + _ROW)
        body.append(
            f'<text class="name {colour}" x="{_WIDTH - _RIGHT + 10}" y="{lowest:.1f}">'
            f"{escape(engine.label[:_LETTERS])}</text>"
        )
    return (
        f'<svg class="wide" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img"><title>Throughput by batch</title>{"".join(body)}</svg>'
    )


def _cell(engine: EngineRow, row: BatchRow) -> str:
    mark = "best: " if row is _best(engine) else ""
    p50 = figures.milliseconds(row.latency.latency.p50)
    return f"{mark}{p50}, {figures.rate(row.items_qps)}"


def _best(engine: EngineRow) -> BatchRow:
    return max(engine.sweep, key=lambda row: row.items_qps)


def _x(batch: int, batches: Sequence[int]) -> float:
    """A batch on an axis of doublings."""
    low, high = math.log2(batches[0]), math.log2(batches[-1])
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log2(batch) - low) / (high - low)


def _y(row: BatchRow, most: float) -> float:
    floor = _HEIGHT - _BOTTOM
    return floor - (floor - _TOP) * row.items_qps / most


def _axis(batches: Sequence[int]) -> Iterator[str]:
    floor = _HEIGHT - _BOTTOM
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>'
    for batch in batches:
        x = _x(batch, batches)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{floor + 16}">{batch}</text>'
    yield f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}">batch</text>'


def _line(engine: EngineRow, colour: str, most: float) -> Iterator[str]:
    """The engine's points joined, the best one larger."""
    batches = [row.batch for row in engine.sweep]
    points = [(_x(row.batch, batches), _y(row, most)) for row in engine.sweep]
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<path class="{colour}" d="M{path}" fill="none" stroke-width="2"/>'
    best = _best(engine)
    for row, (x, y) in zip(engine.sweep, points, strict=True):
        said = f"{engine.label}, batch {row.batch}: {figures.rate(row.items_qps)}"
        radius = 6 if row is best else 3
        yield (
            f'<circle class="area {colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(said)}</title></circle>"
        )
