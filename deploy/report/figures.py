"""Formatting of numbers, and the comparison of an engine's layers with its plan.

Missing numbers are "-", those of a failed target "failed".

`EngineLayersPart` compares what an engine really runs with the plan::

    plan      /a/Conv int8     /a/Relu int8    /b/Add int8     /c/MaxPool float32
    engine    [ /a/Conv + /a/Relu: int8 ]      [ float16 ]     [ int8 ]
                      as planned                  lost           gained
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.files.reading import format_bytes
from deploy.graph.plan import Decision
from deploy.metrics.kernels import EngineLayer
from deploy.terminal import join_visible

NONE = "-"
FAILED = "failed"


def milliseconds(value: float | None) -> str:
    """Format with at least three significant digits: 0.123 ms, 12.3 ms, 1234 ms."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g} ms"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f} ms"


def size(value: int | None) -> str:
    """Format bytes in binary units: 223 KiB."""
    return NONE if value is None else format_bytes(value)


def decibels(value: float | None) -> str:
    """Format with one decimal; "exact" for no noise, "NaN" if undefined."""
    if value is None:
        return NONE
    if value == math.inf:
        return "exact"
    return "NaN" if math.isnan(value) else f"{value:.1f} dB"


def cosine(value: float | None) -> str:
    """Format with five decimals, since good engines differ in the fourth."""
    if value is None:
        return NONE
    return "NaN" if math.isnan(value) else f"{value:.5f}"


def percent(value: float | None) -> str:
    """Format a share of 0 to 1 as percent with two decimals."""
    return NONE if value is None else f"{100 * value:.2f} %"


def points(value: float) -> str:
    """Format a difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.2f} points"


def rate(value: float | None) -> str:
    """Format inferences per second."""
    return NONE if value is None else f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"


def real(value: float) -> str:
    """Format a tensor's value with four significant digits."""
    return f"{value:.4g}"


def ratio(value: float) -> str:
    """Format a factor: 2.13x."""
    return f"{value:.2f}x"


def size_change(smaller: float) -> tuple[str, str]:
    """Return ("2.00x", "smaller"), or "larger" if the file grew; empty texts for equal sizes."""
    if ratio(smaller) == ratio(1):
        return "", ""
    return (ratio(smaller), "smaller") if smaller > 1 else (ratio(1 / smaller), "larger")


def count(number: int, noun: str) -> str:
    """Format a count with its noun: 1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def encodable(text: str) -> str:
    """Make control characters, marks of direction and bytes that are not UTF-8 visible.

    They could rewrite a terminal or a page that shows a tensor's or a file's name.
    """
    return join_visible(text.split("\n"))


def nan_aware_min(values: Iterable[float]) -> float:
    """Return the minimum, NaN if any is NaN (for `min` it would depend on the order)."""
    numbers = tuple(values)
    return math.nan if any(map(math.isnan, numbers)) else min(numbers, default=math.nan)


DEVIATION_HEADS = ("node", "operator", "planned in", "runs in")
_GRIDS = ("int8", "uint8", "fp8")  # layer types that count as quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeviation:
    """A node that does not run as planned: its operator and both types."""

    node: str
    op: str
    planned: str
    ran: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayersPart:
    """Layers of an engine, as reported by its runtime."""

    layers: int  # number of computing layers, each of several nodes, without blocks
    # type -> number of computing layers
    precisions: Mapping[str, int] = field(default_factory=dict)
    reformats: int = 0  # number of layers that only change type or layout
    planned: int | None = None  # number of nodes planned as quantized; None without a plan
    grid: str | None = None  # type they were planned in
    unnamed: tuple[str, ...] = ()  # those that no layer names, because they were fused or removed
    inside: tuple[str, ...] = ()  # those in blocks, whose types the engine does not tell
    blocks: str = ""  # such as "2 DLA loadables"
    lost: tuple[NodeDeviation, ...] = ()  # those that run in float
    gained: tuple[NodeDeviation, ...] = ()  # nodes planned in float that run quantized

    @property
    def deviation_rows(self) -> list[list[str]]:
        """Rows under `DEVIATION_HEADS` of the nodes that do not run as planned."""
        return [[r.node, r.op, r.planned, r.ran] for r in (*self.lost, *self.gained)]

    @property
    def as_planned(self) -> int:
        """Number of planned nodes that run quantized."""
        return (self.planned or 0) - len(self.unnamed) - len(self.inside) - len(self.lost)


def compare_with_plan(
    layers: Sequence[EngineLayer], plan: Iterable[Decision] = ()
) -> EngineLayersPart | None:
    """Compare an engine's layers with the plan of its model; None without layers."""
    if not layers:
        return None
    work = [layer for layer in layers if not layer.reformat]
    types: dict[str, str] = {}  # a node of several layers is quantized if one of them is
    for layer in work:
        for node in layer.nodes if layer.precision else ():
            if types.get(node) not in _GRIDS:
                types[node] = layer.precision
    decisions = list(plan)
    quantized = [d for d in decisions if d.quantized]
    rows = [NodeDeviation(node=d.node, op=d.op_type, planned=d.precision, ran=types[d.node])
            for d in decisions if d.node in types]  # fmt: skip
    on_grid = {d.node for d in quantized}
    blocks = [layer for layer in work if layer.block]
    kinds = Counter("DLA loadable" if b.block == "DLA" else f"{b.block} block" for b in blocks)
    known = [d.node for d in decisions if d.node not in types]
    inside = {node for block in blocks for node in _inside(block, known)} & on_grid
    return EngineLayersPart(
        layers=len(work) - len(blocks),
        precisions=dict(Counter(layer.precision for layer in work if layer.precision)),
        reformats=len(layers) - len(work),
        planned=len(quantized) if decisions else None,
        grid=" or ".join(sorted({d.precision for d in quantized})) or None,
        unnamed=tuple(d.node for d in quantized if d.node not in {*types, *inside}),
        inside=tuple(d.node for d in quantized if d.node in inside),
        blocks=" and ".join(count(number, kind) for kind, number in kinds.items()),
        lost=tuple(r for r in rows if r.node in on_grid and r.ran not in _GRIDS),
        gained=tuple(r for r in rows if r.node not in on_grid and r.ran in _GRIDS),
    )


def _inside(block: EngineLayer, nodes: Sequence[str]) -> Sequence[str]:
    """Return the nodes of a block; `nodes`, in the model's order, are those of no other layer.

    An end that is no node of the plan, such as a QuantizeLinear, bounds nothing.
    """
    if block.ends is None:
        return block.nodes
    first, last = (nodes.index(end) if end in nodes else None for end in block.ends)
    return nodes[first : None if last is None else last + 1]


def quantized_layers(part: EngineLayersPart) -> str:
    """Return the number of quantized layers: "12 of 31"."""
    if not part.precisions:
        return "the engine does not tell"
    quantized = sum(part.precisions.get(grid, 0) for grid in _GRIDS)
    return f"{quantized} of {part.layers}{f', and {part.blocks}' if part.blocks else ''}"


def engine_layers_text(part: EngineLayersPart) -> str:
    """Return the comparison with the plan in one line; "" without a plan."""
    if not part.planned or not (part.precisions or part.blocks):
        return ""
    outside, inside, texts = part.planned - len(part.inside), len(part.inside), []
    if outside:
        texts.append(f"{part.as_planned} of {count(outside, 'planned node')} in {part.grid}")
    if inside:
        noun = str(inside) if outside else count(inside, "planned node")
        texts.append(f"{noun} inside {part.blocks}, whose types the engine does not tell")
    if part.unnamed:
        texts.append(f"{len(part.unnamed)} that no layer names")
    if part.gained:
        texts.append(f"{len(part.gained)} more that the plan left in float")
    return f"{', '.join(texts)}; {count(part.reformats, 'reformat')}"
