"""Quantization plan: which nodes run in int8, which tensors and weights need a scale, and why not.

Reads a cleaned model (see `deploy.frontends`); runs nothing and changes nothing.

A *heavy* node (Conv, Gemm, MatMul) gains from int8. A *glue* node (Add, Concat, pooling, ...) only
passes int8 on: it runs in int8 if all its inputs are int8 and a node downstream wants int8. A
Relu, Clip or bias Add that is the only reader of a heavy or glue node is its *tail* and is fused
into it, so the scale is that of the tail's output::

    x --[Q DQ]--> Conv --> Relu --[Q DQ]--> ...       not between Conv and Relu
                  '---- tail --'

A Hard-Swish, in any of its forms, counts as one node (see `deploy.graph.gates`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx

from calibrators.grids import FP8, INT8, UINT8
from deploy.graph.gates import Gate, collapse_gates, find_gates
from deploy.graph.index import GATE, CachedGraph, Graph, attributes, channel_axis
from deploy.graph.placement import (
    MOVES,
    POOLS,
    Placement,
    add_concat_readers,
    find_bias_add,
    has_constant_operand,
    has_float_sibling,
    int8_inputs,
    reads_float_concat,
    reads_int8,
)
from deploy.graph.refusal import find_refusal, find_scale_owner, is_scalar_glue

FLOAT_BY_USER = "kept float as asked"  # reason of a node that the user keeps in float
FLOAT32 = "float32"
FLOATS = frozenset({FLOAT32, "float16", "bfloat16"})  # precisions that need no scale
FloatNodes = Mapping[str, str] | Iterable[str]  # nodes to keep in float, optionally with reasons


@dataclass(frozen=True, slots=True)
class Decision:
    """Precision of one node.

    Attributes:
        precision: name of the grid of its activations ("int8", "uint8"), or of a float type.
        reason: why it is float; "" if it is not.
    """

    node: str
    op_type: str
    precision: str
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the node is not float."""
        return self.precision not in FLOATS

    @property
    def int8(self) -> bool:
        """Whether the node runs on 8-bit integers, signed or not."""
        return self.precision in (INT8.name, UINT8.name)


def quantized_precision(decisions: Iterable[Decision]) -> str:
    """Return the precision that reports name for quantized nodes: "int8" or "fp8"."""
    return FP8.name if any(d.precision == FP8.name for d in decisions) else INT8.name


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """An initializer to store as int8, its node and its channel axis (None: per tensor)."""

    name: str
    node: str
    axis: int | None
    bias: str | None


@dataclass(frozen=True, slots=True)
class QdqPair:
    """A Q/DQ pair on `tensor`; `consumers` are the nodes that read the pair, None for all."""

    tensor: str
    consumers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Quantization of a model under one placement.

    Attributes:
        placement: the rules this plan follows.
        decisions: every node of the main graph, in graph order.
        pairs: Q/DQ pairs to insert, in graph order.
        weights: initializers to store as int8.
        scale_owners: tensor -> the tensor whose scale it must share.
        range_sources: tensor with a scale -> the tensors whose ranges the scale covers, if not its
            own.
        gates: gates that run in int8; `pairs` has their ends, their inner scales are fixed.
        bias_shifts: Conv -> the gate that alone reads it and multiplies another tensor
            (squeeze-excite). The gate's shift is added to the Conv's bias, and the Conv's output
            is then clipped by its own grid.
        gemm_bias_adds: MatMul -> the Add of its bias, if both form one Gemm.
        int8_scalars: Adds and Muls whose constant operand is to be stored in int8.
        int8_pads: Pads that run on the integers themselves.
    """

    placement: Placement
    decisions: tuple[Decision, ...]
    pairs: tuple[QdqPair, ...]
    weights: tuple[WeightTarget, ...]
    scale_owners: Mapping[str, str] = field(default_factory=dict)
    range_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    bias_shifts: Mapping[str, Gate] = field(default_factory=dict)
    gemm_bias_adds: Mapping[str, str] = field(default_factory=dict)
    int8_scalars: tuple[str, ...] = ()
    int8_pads: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Tensors that need their own scale, in graph order."""
        names = [self.scale_owners.get(p.tensor, p.tensor) for p in self.pairs]
        return tuple(dict.fromkeys(names))

    @property
    def int8_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that run on the placement's grid."""
        return tuple(d.node for d in self.decisions if d.quantized)


class ModelAnalysis:
    """Analysis of an unchanging model that does not depend on the plan; shared by many plans."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = CachedGraph(model)
        self._model = model

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """Gates of the graph."""
        return find_gates(self.graph)

    @cached_property
    def collapsed(self) -> Graph:
        """The index with each gate as one node."""
        found = self.gates
        return (
            CachedGraph(self._model, collapse_gates(self.graph.nodes, found))
            if found
            else self.graph
        )


def analyse(
    model: onnx.ModelProto,
    placement: Placement,
    *,
    float_nodes: FloatNodes = (),
    float_tensors: Mapping[str, str] | None = None,
    analysis: ModelAnalysis | None = None,
) -> Plan:
    """Decide for every node whether it runs in int8.

    Args:
        model: cleaned model with unique node names and inferred shapes.
        placement: the target's rules.
        float_nodes: names of nodes to keep in float, with reasons if the user did not choose them.
        float_tensors: tensor -> why it has no scale ("was 0 in every sample").
        analysis: of the model, from an earlier call.
    """
    known = ModelAnalysis(model) if analysis is None else analysis
    found = known.gates if GATE in placement.glue else ()
    graph = known.collapsed if found else known.graph
    stands_in = {name: gate.name for gate in found for name in gate.nodes}
    no_scale = dict(float_tensors or {})
    float_reasons = {
        stands_in.get(name, name): why for name, why in reasons_by_node(float_nodes).items()
    }
    why: dict[str, str] = {}
    for node in graph.nodes:
        why[node.name] = find_refusal(graph, node, placement, float_reasons, no_scale)
    if not placement.pairs_everywhere:
        # refuse nodes that gain nothing in int8; refusing one node can strand another
        changed = True
        while changed:
            changed = False
            made, wanted = _made_and_wanted(graph, placement, why)
            for node in graph.nodes:
                if not why[node.name]:
                    why[node.name] = _stranded(graph, placement, node, why, made, wanted)
                    changed = changed or bool(why[node.name])
    chosen = [n for n in graph.nodes if not why[n.name]]
    pairs = _pairs(graph, placement, chosen)
    int8_gates = tuple(gate for gate in found if not why[gate.name])
    gemms = _gemms(graph, placement, chosen, float_reasons) if placement.fuses_gemm_bias else {}
    weights = tuple(w for n in chosen for w in _weights(graph, placement, n, gemms))
    return Plan(
        placement=placement,
        decisions=_decisions(model.graph.node, graph, placement, why, stands_in, gemms),
        pairs=pairs,
        gates=int8_gates,
        bias_shifts=_shifts(known.graph, weights if placement.quantizes_bias else (), int8_gates),
        gemm_bias_adds={name: add.name for name, add in gemms.items()},
        int8_scalars=tuple(
            n.name for n in chosen if placement.quantizes_scalars and has_constant_operand(graph, n)
        ),
        int8_pads=tuple(n.name for n in chosen if n.op_type == "Pad"),
        weights=weights,
        scale_owners=_owners(graph, placement, [p.tensor for p in pairs]),
    )


def _shifts(
    graph: Graph, weights: Iterable[WeightTarget], int8_gates: Iterable[Gate]
) -> dict[str, Gate]:
    """Return Conv -> the gate whose shift its bias can absorb; `graph` has gates uncollapsed."""
    found = {}
    convs = {weight.node: weight for weight in weights}
    for gate in int8_gates:
        maker = graph.producer.get(gate.source)
        own = convs.get(maker.name) if maker is not None and maker.op_type == "Conv" else None
        alone = graph.only_reader(gate.source) is not None and gate.source != gate.factor
        if own is not None and alone and (own.bias is None or own.bias in graph.initializers):
            found[own.node] = gate
    return found


def _gemms(
    graph: Graph,
    placement: Placement,
    chosen: Iterable[onnx.NodeProto],
    float_reasons: Mapping[str, str],
) -> dict[str, onnx.NodeProto]:
    """Return MatMul in int8 -> the Add of its bias.

    ONNX Runtime fuses both into a Gemm before it selects integer kernels. If the bias is not
    stored in integers it then has none: the layer ran in float and dequantized its weights for
    every input (a net of three such layers: 9.6 times slower than FP32).
    """
    layers = (node for node in chosen if node.op_type == "MatMul")
    found = {node.name: find_bias_add(graph, node) for node in layers}
    return {
        name: add
        for name, add in found.items()
        if add is not None
        and add.name not in float_reasons
        and not is_scalar_glue(graph, placement, add)
    }


def reasons_by_node(float_nodes: FloatNodes) -> Mapping[str, str]:
    """Return node to keep in float -> why; without reasons, the user chose it."""
    if isinstance(float_nodes, Mapping):
        return float_nodes
    return dict.fromkeys(float_nodes, FLOAT_BY_USER)


def _decisions(
    nodes: Iterable[onnx.NodeProto],
    graph: Graph,
    placement: Placement,
    why: Mapping[str, str],
    stands_in: Mapping[str, str],
    gemms: Mapping[str, onnx.NodeProto],
) -> tuple[Decision, ...]:
    """Return one decision per node; tails follow their head, nodes of a gate decide as one."""
    heads = {graph.tail(n): n.name for n in graph.nodes if n.op_type in placement.heavy_or_glue}
    for name, add in gemms.items():
        heads |= {str(add.output[0]): name, graph.tail(add): name}
    found = []
    for node in nodes:
        name = stands_in.get(node.name, node.name)
        reason = why[name]
        head = heads.get(node.output[0], name)
        if reason and head != name:
            reason = why[head] and "the node before it is float"
        precision = FLOAT32 if reason else placement.grid.name
        found.append(Decision(node.name, node.op_type, precision, reason))
    return tuple(found)


def _stranded(
    graph: Graph,
    placement: Placement,
    node: onnx.NodeProto,
    why: Mapping[str, str],
    made: set[str],
    wanted: set[str],
) -> str:
    """Return why a node that can run in int8 gains nothing among its neighbours, or ""."""
    if placement.float_after_concat and reads_float_concat(graph, node, made):
        return f"it reads a Concat whose inputs are not all {placement.precision_name}"
    if node.op_type in placement.heavy:
        return ""
    if placement.pairs_on_outputs:
        comes_in = all(name in made for name in graph.data_inputs(node))
    else:
        comes_in = reads_int8(graph, node, made, placement.heavy)
    if not comes_in:
        return f"an input of it is not {placement.precision_name}"
    if not placement.pairs_on_outputs and has_float_sibling(graph, node, why):
        return "its input is read in float too"
    return (
        "" if graph.tail(node) in wanted else f"nothing after it runs in {placement.precision_name}"
    )


def _made_and_wanted(
    graph: Graph, placement: Placement, why: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Return (tensors an int8 node makes or a heavy one reads, tensors an int8 node reads)."""
    made: set[str] = set()
    wanted: set[str] = set()
    for node in graph.nodes:
        if why[node.name]:
            continue
        wanted.update(graph.data_inputs(node))
        made.add(graph.tail(node))
        if node.op_type in placement.heavy:
            made.update(graph.data_inputs(node))
        elif node.op_type == "Split":
            made.update(node.output)
            if wanted.intersection(node.output):
                wanted.add(graph.tail(node))
    # propagate `made` forwards and `wanted` backwards through float nodes that pass int8 on
    between = [node for node in graph.nodes if _passes_on(graph, placement, node)]
    for node in between:
        if all(name in made for name in graph.data_inputs(node)):
            made.update(node.output)
    for node in reversed(between):
        if wanted.intersection(node.output):
            wanted.update(graph.data_inputs(node))
    return made, wanted


def _passes_on(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether a node passes int8 on while it stays float; an Add of a constant does too."""
    shift = node.op_type == "Add" and has_constant_operand(graph, node)
    return node.op_type in placement.passes_int8 or (shift and bool(placement.passes_int8))


def _pairs(graph: Graph, placement: Placement, chosen: list[onnx.NodeProto]) -> tuple[QdqPair, ...]:
    order = [*graph.inputs, *(o for n in graph.nodes for o in n.output)]
    if placement.pairs_everywhere:
        around = {n for node in chosen for n in (*graph.data_inputs(node), node.output[0])}
        return tuple(QdqPair(name, None) for name in order if name in around)
    readers: dict[str, list[str]] = {}
    wanted = {name for node in chosen for name in graph.data_inputs(node)}
    for node in chosen:
        names = graph.data_inputs(node)
        if not placement.pairs_on_outputs:
            names = int8_inputs(graph, node, placement.heavy)
        for name in names:
            readers.setdefault(name, []).append(node.name)
        if node.op_type in placement.separates_tail:
            after = graph.readers.get(node.output[0], [])
            readers.setdefault(node.output[0], []).extend(n.name for n in after)
        if placement.pairs_on_outputs:
            ends = list(node.output) if node.op_type == "Split" else [graph.tail(node)]
            # the int8 kernels of Gemm and MatMul can write float, which loses nothing
            needed = node.op_type not in {"Gemm", "MatMul"} or ends[0] in wanted
            for name in ends if needed else []:
                readers.setdefault(name, [])
    if not placement.pairs_on_outputs:
        add_concat_readers(graph, readers)
    names = [name for name in order if name in readers]
    return tuple(
        QdqPair(n, None if placement.pairs_on_outputs else tuple(readers[n])) for n in names
    )


def _weights(
    graph: Graph, placement: Placement, node: onnx.NodeProto, gemms: Mapping[str, onnx.NodeProto]
) -> list[WeightTarget]:
    if node.op_type not in placement.heavy or node.input[1] not in graph.initializers:
        return []
    weight = graph.initializers[node.input[1]]
    bias = str(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if node.name in gemms:
        bias = next(str(n) for n in gemms[node.name].input if n in graph.initializers)
    axis = None if node.op_type in placement.per_tensor else _scale_axis(node, len(weight.dims))
    return [WeightTarget(str(node.input[1]), node.name, axis, bias)]


def _scale_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """Axis of the scales of a node's weight; None for one scale."""
    # [in, out / group, ...]: one axis cannot name the groups
    grouped = node.op_type == "ConvTranspose" and attributes(node).get("group", 1) != 1
    stacked = node.op_type == "MatMul" and rank != 2
    return None if grouped or stacked else channel_axis(node, rank)


def _owners(graph: Graph, placement: Placement, paired: Iterable[str]) -> dict[str, str]:
    """Return paired tensor -> the other tensor whose scale it must share."""
    owners = {tensor: find_scale_owner(graph, placement, tensor) for tensor in paired}
    return {tensor: owner for tensor, owner in owners.items() if owner != tensor}


def never_negative(model: onnx.ModelProto) -> frozenset[str]:
    """Return the tensors that cannot be negative for any input, such as outputs of a Relu."""
    ops = {"Relu", "Sigmoid", "Softmax", "HardSigmoid"}
    graph = Graph(model)
    names: set[str] = set()
    for node in graph.nodes:
        passed = node.op_type in MOVES | POOLS and node.input[0] in names
        if node.op_type in ops or passed or (node.op_type == "Clip" and graph.clips_at_zero(node)):
            names.update(node.output)
    return frozenset(names)
