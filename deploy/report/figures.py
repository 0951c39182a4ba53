"""Formatting of numbers, and the comparison of an engine's layers with its plan.

Missing numbers are "-", those of a failed target "failed".

`EngineLayersPart` compares what an engine really runs with the plan::

    plan      /a/Conv int8     /a/Relu int8    /b/Add int8     /c/MaxPool float32
    engine    [ /a/Conv + /a/Relu: int8 ]      [ float16 ]     [ int8 ]
                      as planned                  lost           gained
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.errors import counted
from deploy.files.reading import format_bytes
from deploy.graph.plan import Decision
from deploy.metrics.kernels import EngineLayer
from deploy.terminal import join_visible

NONE = "-"
FAILED = "failed"
_NAN = "NaN"


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
    if value is None:
        return NONE
    return format_bytes(value)


def decibels(value: float | None) -> str:
    """Format with one decimal; "exact" for no noise, "NaN" if undefined."""
    if value is None:
        return NONE
    if value == math.inf:
        return "exact"
    if math.isnan(value):
        return _NAN
    return f"{value:.1f} dB"


def cosine(value: float | None) -> str:
    """Format with five decimals, since good engines differ in the fourth."""
    if value is None:
        return NONE
    if math.isnan(value):
        return _NAN
    return f"{value:.5f}"


def percent(value: float | None) -> str:
    """Format a share of 0 to 1 as percent with two decimals."""
    if value is None:
        return NONE
    return f"{100 * value:.2f} %"


def points(value: float) -> str:
    """Format a difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.2f} points"


def rate(value: float) -> str:
    """Format inferences per second."""
    if value >= 100:  # 3 significant digits would round it
        return f"{value:,.0f} /s"
    return f"{value:.3g} /s"


def real(value: float) -> str:
    """Format a tensor's value with four significant digits; -0 is 0."""
    return f"{value + 0.0:.4g}"


def ratio(value: float) -> str:
    """Format a factor: 2.13x."""
    return f"{value:.2f}x"


def size_change_text(size_ratio: float) -> str:
    """Return "2.00x smaller", or "larger" if the file grew; "" for equal sizes."""
    if ratio(size_ratio) == ratio(1):
        return ""
    if size_ratio > 1:
        return f"{ratio(size_ratio)} smaller"
    return f"{ratio(1 / size_ratio)} larger"


def encodable(text: str) -> str:
    """Make control characters, marks of direction and bytes that are not UTF-8 visible.

    They could rewrite a terminal or a page that shows a tensor's or a file's name.
    """
    return join_visible(text.split("\n"))


_QUANTIZED_TYPES = ("int8", "uint8", "fp8")  # layer types that count as quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeviation:
    """A node that does not run as planned.

    Attributes:
        node: name of the node.
        op: its operator.
        planned: its type in the plan.
        ran: its type in the engine.
    """

    node: str
    op: str
    planned: str
    ran: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayersPart:
    """Layers of an engine, as reported by its runtime, compared with the plan.

    Attributes:
        layers: number of computing layers, each of several nodes, without blocks.
        precisions: type -> number of computing layers.
        reformats: number of layers that only change type or layout.
        planned: number of nodes planned as quantized; None without a plan.
        grid: type they were planned in.
        unnamed: planned nodes that no layer names, because they were fused or removed.
        inside: planned nodes in blocks; the engine does not report their types.
        blocks: kinds of blocks as text, such as "2 DLA loadables".
        lost: planned nodes that run in float.
        gained: nodes planned in float that run quantized.
    """

    layers: int
    precisions: Mapping[str, int] = field(default_factory=dict)
    reformats: int = 0
    planned: int | None = None
    grid: str | None = None
    unnamed: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    blocks: str = ""
    lost: tuple[NodeDeviation, ...] = ()
    gained: tuple[NodeDeviation, ...] = ()

    @property
    def as_planned(self) -> int:
        """Number of planned nodes that run quantized."""
        return (self.planned or 0) - len(self.unnamed) - len(self.inside) - len(self.lost)


def compare_with_plan(
    layers: Sequence[EngineLayer], plan: Iterable[Decision] = ()
) -> EngineLayersPart | None:
    """Compare an engine's layers with the plan of its model; None without layers.

    A layer runs one or several nodes, or only changes the type or layout of a tensor (a reformat).
    A block, such as a DLA's loadable, is a layer of many nodes that does not tell their types.

    Args:
        layers: as the engine's runtime reports them.
        plan: the planned type of each node, in the model's order; empty if it is not known.
    """
    if not layers:
        return None

    computing_layers = [layer for layer in layers if not layer.reformat]
    blocks = [layer for layer in computing_layers if layer.block]
    decisions = list(plan)
    type_by_node = _type_by_node(computing_layers)
    # a block may not list its nodes: they are then among those that no other layer has
    untyped_nodes = [decision.node for decision in decisions if decision.node not in type_by_node]
    nodes_in_blocks: set[str] = set()
    for block in blocks:
        nodes_in_blocks.update(_block_nodes(block, untyped_nodes))

    quantized_decisions = [decision for decision in decisions if decision.quantized]
    # the planned nodes whose type is unknown: those in blocks, and those that no layer names
    # because they were fused into another node's layer, or removed
    quantized_in_blocks = []
    unnamed_nodes = []
    for decision in quantized_decisions:
        if decision.node in nodes_in_blocks:
            quantized_in_blocks.append(decision.node)
        elif decision.node not in type_by_node:
            unnamed_nodes.append(decision.node)

    planned_types = sorted({decision.precision for decision in quantized_decisions})
    planned_types_text = " or ".join(planned_types)  # one type, or several as in "fp8 or int8"
    deviations = list(_find_deviations(decisions, type_by_node))
    return EngineLayersPart(
        layers=len(computing_layers) - len(blocks),
        precisions=dict(Counter(layer.precision for layer in computing_layers if layer.precision)),
        reformats=len(layers) - len(computing_layers),
        planned=len(quantized_decisions) if decisions else None,
        grid=planned_types_text or None,
        unnamed=tuple(unnamed_nodes),
        inside=tuple(quantized_in_blocks),
        blocks=_count_blocks(blocks),
        lost=tuple(deviation for deviation in deviations if deviation.ran not in _QUANTIZED_TYPES),
        gained=tuple(deviation for deviation in deviations if deviation.ran in _QUANTIZED_TYPES),
    )


def _find_deviations(
    decisions: Iterable[Decision], type_by_node: Mapping[str, str]
) -> Iterator[NodeDeviation]:
    """Yield the nodes that were planned as quantized and run in float, or the other way round.

    `type_by_node`: node -> its type in the engine; a node whose type is unknown is left out.
    """
    for decision in decisions:
        engine_type = type_by_node.get(decision.node)
        if engine_type is None:
            continue
        runs_quantized = engine_type in _QUANTIZED_TYPES
        if decision.quantized != runs_quantized:
            yield NodeDeviation(
                node=decision.node, op=decision.op_type, planned=decision.precision, ran=engine_type
            )


def _type_by_node(layers: Iterable[EngineLayer]) -> dict[str, str]:
    """Return node -> its type in the engine; quantized if one of its layers is."""
    type_by_node: dict[str, str] = {}
    for layer in layers:
        if layer.precision:
            for node in layer.nodes:
                if type_by_node.get(node) not in _QUANTIZED_TYPES:
                    type_by_node[node] = layer.precision
    return type_by_node


def _count_blocks(blocks: Iterable[EngineLayer]) -> str:
    """Return the kinds of blocks as text: "2 DLA loadables"."""
    kinds = Counter(map(_block_kind, blocks))
    return " and ".join(counted(number, kind) for kind, number in kinds.items())


def _block_kind(block: EngineLayer) -> str:
    """Return what a block is called: a DLA's is a loadable."""
    if block.block == "DLA":
        return "DLA loadable"
    return f"{block.block} block"


def _block_nodes(block: EngineLayer, nodes: Sequence[str]) -> Sequence[str]:
    """Return the names of the nodes in a block.

    If only its first and last node are known, the block has all of `nodes` between them. An end
    that is not among `nodes`, such as a QuantizeLinear, sets no bound.

    `nodes`: names of the nodes that no other layer has, in the model's order.
    """
    if block.end_nodes is None:
        return block.nodes
    first_node, last_node = block.end_nodes
    start = nodes.index(first_node) if first_node in nodes else 0
    stop = nodes.index(last_node) + 1 if last_node in nodes else len(nodes)
    return nodes[start:stop]


def quantized_layers(part: EngineLayersPart) -> str:
    """Return the number of quantized layers: "12 of 31"."""
    if not part.precisions:
        return "the engine does not tell"
    quantized_count = sum(part.precisions.get(grid, 0) for grid in _QUANTIZED_TYPES)
    text = f"{quantized_count} of {part.layers}"
    if part.blocks:
        text += f", and {part.blocks}"
    return text


def engine_layers_text(part: EngineLayersPart) -> str:
    """Return the comparison with the plan in one line; "" if nothing was planned or is reported.

    For example "14 of 16 planned nodes in int8, 2 that no layer names; 3 reformats". A block is a
    part of the engine that does not report the types of its nodes, such as a DLA's loadable.
    """
    if not part.planned or not (part.precisions or part.blocks):
        return ""

    inside_count = len(part.inside)  # planned nodes in blocks
    outside_count = part.planned - inside_count
    texts = []
    if outside_count:
        nodes = counted(outside_count, "planned node")
        texts.append(f"{part.as_planned} of {nodes} in {part.grid}")
    if inside_count:
        nodes = counted(inside_count, "planned node")
        # `blocks` is a text, such as "2 DLA loadables"
        texts.append(f"{nodes} inside {part.blocks}, whose types the engine does not tell")
    if part.unnamed:
        texts.append(f"{len(part.unnamed)} that no layer names")
    if part.gained:
        texts.append(f"{len(part.gained)} more that the plan left in float")
    return f"{', '.join(texts)}; {counted(part.reformats, 'reformat')}"
