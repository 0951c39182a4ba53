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

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx

from calibrators.grids import FP8, INT8
from deploy.errors import list_first
from deploy.graph.gates import Gate, collapse_gates, find_gates
from deploy.graph.index import (
    GATE,
    Graph,
    Nodes,
    channel_axis,
    group_count,
    optional_input,
    standard_type,
)
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
from deploy.graph.refusal import (
    find_refusal,
    find_scale_owner,
    find_unscaled_tensor,
    is_scalar_glue,
)

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
        unscaled_tensor: the tensor that would need a scale for int8 and has none, if the reason is
            that; else "".
        host: the node that it is fused into, which decides its precision too; "" for none.
    """

    node: str
    op_type: str
    precision: str
    reason: str = ""
    unscaled_tensor: str = ""
    host: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the node is not float."""
        return self.precision not in FLOATS


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
        bias_shift_gates: Conv -> the gate that alone reads it and multiplies another tensor
            (squeeze-excite). The gate's shift is added to the Conv's bias, and the Conv's output
            is then clipped by its own grid.
        gemm_bias_adds: MatMul -> the Add of its bias, if both form one Gemm.
        int8_scalars: Adds and Muls whose constant operand, a number, is to be stored in int8.
        int8_pads: Pads that run on the integers themselves.
    """

    placement: Placement
    decisions: tuple[Decision, ...]
    pairs: tuple[QdqPair, ...]
    weights: tuple[WeightTarget, ...]
    scale_owners: Mapping[str, str] = field(default_factory=dict)
    range_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    bias_shift_gates: Mapping[str, Gate] = field(default_factory=dict)
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
        self.graph = Graph(model)
        self._model = model

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """Gates of the graph."""
        return find_gates(self.graph)

    @cached_property
    def collapsed(self) -> Graph:
        """The index with each gate as one node."""
        return Graph(self._model, collapse_gates(self.graph.nodes, self.gates))


def analyse(
    model: onnx.ModelProto,
    placement: Placement,
    *,
    float_nodes: FloatNodes = (),
    float_tensors: Mapping[str, str] | None = None,
    analysis: ModelAnalysis | None = None,
) -> Plan:
    """Return the plan of a model: which nodes run in int8, which tensors and weights get a scale.

    Args:
        model: cleaned model with unique node names and inferred shapes.
        placement: the target's rules.
        float_nodes: names of nodes to keep in float, with reasons if the user did not choose them.
        float_tensors: tensor -> why it has no scale ("was 0 in every sample"); None for none.
        analysis: of the model, from an earlier call; None to analyse the model now.
    """
    if analysis is None:
        analysis = ModelAnalysis(model)
    # a gate, such as a Hard-Swish, is several nodes; for a target that runs gates in int8, one node
    # stands for each in the graph (`glue`: what a target runs in int8 beside layers)
    gates = analysis.gates if GATE in placement.glue else ()
    graph = analysis.collapsed if gates else analysis.graph
    gate_by_node: dict[str, str] = {}  # node of a gate -> the one node in its place
    for gate in gates:
        gate_by_node |= dict.fromkeys(gate.nodes, gate.name)
    # node that the caller keeps in float -> why
    requested_reasons = {
        gate_by_node.get(name, name): reason
        for name, reason in reasons_by_node(float_nodes).items()
    }

    # node -> why it stays in float, "" if it runs in int8
    float_reasons, unscaled_tensor_by_node = _find_float_reasons(
        graph, placement, requested_reasons, float_tensors or {}
    )

    int8_nodes = [node for node in graph.nodes if not float_reasons[node.name]]
    int8_gates = tuple(gate for gate in gates if not float_reasons[gate.name])
    pairs = _place_pairs(graph, placement, int8_nodes)
    bias_add_by_matmul = _find_bias_adds(graph, placement, int8_nodes, requested_reasons)
    weights = _find_weights(graph, placement, int8_nodes, bias_add_by_matmul)
    decisions = _decide(
        model.graph.node,
        graph,
        placement,
        float_reasons,
        unscaled_tensor_by_node,
        gate_by_node,
        bias_add_by_matmul,
    )
    # in the graph where a gate is still several nodes, since those that read its source count
    bias_shift_gates = _find_bias_shift_gates(analysis.graph, weights, int8_gates)
    int8_scalars = []  # Adds and Muls of a constant number, which is stored in int8
    if placement.runs_on_onnxruntime:  # which runs them in int8 with a single number alone
        int8_scalars = [node.name for node in int8_nodes if has_constant_operand(graph, node)]
    return Plan(
        placement=placement,
        decisions=decisions,
        pairs=pairs,
        gates=int8_gates,
        bias_shift_gates=bias_shift_gates,
        gemm_bias_adds={name: add.name for name, add in bias_add_by_matmul.items()},
        int8_scalars=tuple(int8_scalars),
        int8_pads=tuple(node.name for node in int8_nodes if node.op_type == "Pad"),
        weights=weights,
        scale_owners=_find_scale_owners(graph, placement, pairs),
    )


def _find_float_reasons(
    graph: Graph,
    placement: Placement,
    requested_reasons: Mapping[str, str],
    unscaled_tensors: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (node -> why it stays float, node -> the tensor whose missing scale is the reason).

    A node that runs in int8 has the reason "". The second dict has only nodes with that reason.

    First the nodes that cannot run in int8 are refused, then those that gain nothing among their
    neighbours. A node that becomes float changes the neighbours of others, so the second step is
    repeated until nothing changes.

    Args:
        graph: index of the model's nodes and tensors.
        placement: the target's rules.
        requested_reasons: nodes to keep in float -> why.
        unscaled_tensors: tensor without a scale -> why it has none.
    """
    reasons = {}
    unscaled_tensor_by_node = {}
    for node in graph.nodes:
        refusal = find_refusal(graph, node, placement, requested_reasons)
        if not refusal:
            tensor = find_unscaled_tensor(graph, node, placement, unscaled_tensors)
            if tensor:
                refusal = f"{tensor} {unscaled_tensors[tensor]}"
                unscaled_tensor_by_node[node.name] = tensor
        reasons[node.name] = refusal

    # on DLA every node that can run in int8 does: neighbours do not matter
    if placement.runs_on_dla:
        return reasons, unscaled_tensor_by_node
    has_changed = True
    while has_changed:
        has_changed = False
        # it reads the reasons that are added in this round, but finds the int8 tensors only here
        flow = _Int8Flow(graph, placement, reasons)
        for node in graph.nodes:
            if not reasons[node.name]:
                reasons[node.name] = flow.find_stranded_reason(node)
                has_changed |= reasons[node.name] != ""
    return reasons, unscaled_tensor_by_node


@dataclass(slots=True)
class _Int8Flow:
    """Tensors that int8 nodes produce and read, under one state of the decisions.

    Attributes:
        float_reasons: node -> why it stays float, "" if it does not; changes while the nodes are
            asked one by one.
        int8_tensors: tensors that an int8 node makes or a heavy one reads. A float node that passes
            int8 on adds its outputs, if all its inputs are such tensors.
        tensors_read_in_int8: tensors that an int8 node reads. A float node that passes int8 on adds
            its inputs, if one of its outputs is such a tensor.
    """

    graph: Graph
    placement: Placement
    float_reasons: Mapping[str, str]
    int8_tensors: set[str] = field(default_factory=set)
    tensors_read_in_int8: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find the tensors around int8 nodes, and those beyond float nodes that pass int8 on."""
        graph = self.graph
        placement = self.placement
        for node in graph.nodes:
            if not self.float_reasons[node.name]:
                self._add_int8_node(node)

        # float nodes that pass int8 on: what is made in int8 goes downstream, what is read in int8
        # goes upstream
        passing_nodes = [node for node in graph.nodes if _passes_int8(graph, placement, node)]
        for node in passing_nodes:
            if self.int8_tensors.issuperset(graph.data_inputs(node)):
                self.int8_tensors.update(node.output)
        for node in reversed(passing_nodes):
            if not self.tensors_read_in_int8.isdisjoint(node.output):
                self.tensors_read_in_int8.update(graph.data_inputs(node))

    def _add_int8_node(self, node: onnx.NodeProto) -> None:
        """Add the tensors around a node that runs in int8."""
        graph = self.graph
        self.tensors_read_in_int8.update(graph.data_inputs(node))
        self.int8_tensors.add(graph.fused_output(node))  # behind its Relu, Clip or bias Add
        if node.op_type in self.placement.heavy:  # it quantizes its inputs itself
            self.int8_tensors.update(graph.data_inputs(node))
        elif node.op_type == "Split":
            self.int8_tensors.update(node.output)
            if not self.tensors_read_in_int8.isdisjoint(node.output):
                self.tensors_read_in_int8.add(graph.fused_output(node))

    def find_stranded_reason(self, node: onnx.NodeProto) -> str:
        """Return why a node gains nothing from int8 among its neighbours; "" if it gains.

        With the placement's `float_after_concat`, a node that reads a Concat with a float input
        gains nothing. Else a heavy node (Conv, Gemm, MatMul) always gains. Any other node only
        passes int8 on: its inputs must be int8 already, and a node downstream must read its output
        in int8. TensorRT has two rules more. It computes a residual Add inside the heavy node that
        makes one input, so only that input must be int8. And the input of a node that averages
        must not be read by a float node.
        """
        graph = self.graph
        placement = self.placement
        precision = placement.precision_name
        if placement.float_after_concat and reads_float_concat(graph, node, self.int8_tensors):
            return f"it reads a Concat whose inputs are not all {precision}"
        if node.op_type in placement.heavy:
            return ""
        if placement.runs_on_onnxruntime:
            has_int8_inputs = self.int8_tensors.issuperset(graph.data_inputs(node))
        else:  # TensorRT: of a residual Add, only the input that it is fused with counts
            has_int8_inputs = reads_int8(graph, node, self.int8_tensors, placement.heavy)
        if not has_int8_inputs:
            return f"an input of it is not {precision}"
        # an average, such as a pool, whose input a float Mul of squeeze-excite reads too
        if not placement.runs_on_onnxruntime and has_float_sibling(graph, node, self.float_reasons):
            return "its input is read in float too"
        if graph.fused_output(node) not in self.tensors_read_in_int8:
            return f"nothing after it runs in {precision}"
        return ""


def _passes_int8(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether a node passes int8 on while it stays float; an Add of a constant does too."""
    if node.op_type == "Add" and placement.passes_int8:
        return has_constant_operand(graph, node)
    return node.op_type in placement.passes_int8


def _find_bias_shift_gates(
    graph: Graph, weights: Iterable[WeightTarget], int8_gates: Iterable[Gate]
) -> dict[str, Gate]:
    """Return Conv -> the gate whose shift can be added to the Conv's bias.

    A gate is factor * clip(source + shift, 0, top), written by several nodes (see `Gate`).
    """
    bias_by_node = {weight.node: weight.bias for weight in weights}
    gate_by_conv = {}
    for gate in int8_gates:
        conv = graph.find_producer(gate.source, "Conv")
        if conv is None or conv.name not in bias_by_node:
            continue
        has_other_reader = graph.only_reader(gate.source) is None
        is_hard_swish = gate.source == gate.factor
        if has_other_reader or is_hard_swish:  # both need the source without the shift too
            continue
        bias = bias_by_node[conv.name]
        if bias is None or bias in graph.initializers:
            gate_by_conv[conv.name] = gate
    return gate_by_conv


def _find_bias_adds(
    graph: Graph,
    placement: Placement,
    int8_nodes: Iterable[onnx.NodeProto],
    requested_reasons: Mapping[str, str],
) -> dict[str, onnx.NodeProto]:
    """Return name of a MatMul in int8 -> the Add node of its bias.

    `requested_reasons`: node that the user keeps in float -> why.

    ONNX Runtime fuses both into a Gemm before it selects integer kernels, and has none for a Gemm
    whose bias is float: the layer would run in float and dequantize its weights for every input
    (a net of three such layers was 9.6 times slower than FP32). So both are planned as one layer.
    """
    if not placement.runs_on_onnxruntime:
        return {}
    add_by_matmul = {}
    for node in int8_nodes:
        if node.op_type != "MatMul":
            continue
        add = find_bias_add(graph, node)
        if add is None or add.name in requested_reasons:
            continue
        # glue is a node without weights that may run in int8, such as an Add of a scalar: that one
        # is planned by itself
        if not is_scalar_glue(graph, placement, add):
            add_by_matmul[node.name] = add
    return add_by_matmul


def reasons_by_node(float_nodes: FloatNodes) -> Mapping[str, str]:
    """Return node to keep in float -> why; without reasons, the user chose it."""
    if isinstance(float_nodes, Mapping):
        return float_nodes
    return dict.fromkeys(float_nodes, FLOAT_BY_USER)


def find_unkept(plan: Plan, target: str, float_nodes: Collection[str]) -> Iterator[str]:
    """Yield a warning if nodes that the user keeps in float run in int8 nodes nevertheless.

    Args:
        plan: the plan of a target.
        target: its name.
        float_nodes: names of the nodes that the user keeps in float.
    """
    host_by_node = {
        decision.node: decision.host
        for decision in plan.decisions
        if decision.node in float_nodes and decision.host and decision.quantized
    }
    if host_by_node:
        hosts = list(dict.fromkeys(host_by_node.values()))
        yield (
            f"on {target}, --keep-float has no effect on {list_first(list(host_by_node), 3)}: each"
            " is fused into the int8 node before it; name that node instead:"
            f" {list_first(hosts, 3)}"
        )


def _decide(
    nodes: Iterable[onnx.NodeProto],
    graph: Graph,
    placement: Placement,
    float_reasons: Mapping[str, str],
    unscaled_tensor_by_node: Mapping[str, str],
    gate_by_node: Mapping[str, str],
    bias_add_by_matmul: Mapping[str, onnx.NodeProto],
) -> tuple[Decision, ...]:
    """Return one decision, int8 or float, for each node of the model.

    A fused Relu, Clip or bias Add runs where the node runs that it is fused into, and the nodes of
    a gate (a Hard-Swish or squeeze-excite) run where the gate runs.

    Args:
        nodes: nodes of the model.
        graph: the same nodes, but each gate as one node.
        placement: the target's rules.
        float_reasons: node of `graph` -> why it stays float, or "".
        unscaled_tensor_by_node: node of `graph` -> the tensor whose missing scale keeps it float.
        gate_by_node: node of a gate -> the node of `graph` that stands for it.
        bias_add_by_matmul: name of a MatMul -> the Add of its bias, which is fused into it too.
    """
    host_by_output = {}  # output of a node, or of the last one fused into it -> the node's name
    for node in graph.nodes:
        if node.op_type in placement.runnable_op_types:
            host_by_output[graph.fused_output(node)] = node.name
    for matmul, add in bias_add_by_matmul.items():  # the Add, and a Relu or Clip after it
        host_by_output |= {add.output[0]: matmul, graph.fused_output(add): matmul}

    decisions = []
    for node in nodes:
        # the node in `graph`: the one that stands for a gate, or itself
        name_in_graph = gate_by_node.get(node.name, node.name)
        # the node that it is fused into, or itself
        host_name = host_by_output.get(node.output[0], name_in_graph)
        fused_into = host_name if host_name != name_in_graph else ""
        reason = float_reasons[name_in_graph]
        # a fused Relu or Clip has a reason of its own, since no int8 kernel computes it alone; what
        # counts is whether its host is float
        if fused_into and reason:
            reason = "the node before it is float" if float_reasons[host_name] else ""
        precision = FLOAT32 if reason else placement.grid.name
        unscaled_tensor = unscaled_tensor_by_node.get(host_name, "")
        decisions.append(
            Decision(node.name, node.op_type, precision, reason, unscaled_tensor, fused_into)
        )
    return tuple(decisions)


def _place_pairs(graph: Graph, placement: Placement, int8_nodes: Nodes) -> tuple[QdqPair, ...]:
    """Return the Q/DQ pairs of a plan: on inputs of the model first, then in graph order.

    ONNX Runtime and DLA have pairs on tensors, which all readers then read; TensorRT has them in
    front of the nodes that run in int8.
    """
    tensors = (*graph.inputs, *graph.producer)
    if placement.runs_on_dla or placement.runs_on_onnxruntime:
        paired_tensors = _find_paired_tensors(graph, placement, int8_nodes)
        return tuple(QdqPair(name, consumers=None) for name in tensors if name in paired_tensors)
    readers = _find_pair_readers(graph, placement, int8_nodes)
    return tuple(QdqPair(name, tuple(readers[name])) for name in tensors if name in readers)


def _find_paired_tensors(graph: Graph, placement: Placement, int8_nodes: Nodes) -> set[str]:
    """Return the tensors whose Q/DQ pair all their readers use: inputs and outputs of int8 nodes.

    ONNX Runtime's int8 kernels of Gemm and MatMul can write float, which loses nothing, so their
    output has a pair only as the input of an int8 node.
    """
    paired_tensors: set[str] = set()
    for node in int8_nodes:
        paired_tensors.update(graph.data_inputs(node))
        if placement.runs_on_dla:
            paired_tensors.add(node.output[0])
        elif node.op_type == "Split":
            paired_tensors.update(node.output)
        elif node.op_type not in {"Gemm", "MatMul"}:
            paired_tensors.add(graph.fused_output(node))  # after a fused Relu or Clip
    return paired_tensors


def _find_pair_readers(
    graph: Graph, placement: Placement, int8_nodes: Nodes
) -> dict[str, list[str]]:
    """Return tensor with a Q/DQ pair -> names of the nodes that read the pair."""
    readers: dict[str, list[str]] = {}
    for node in int8_nodes:
        for name in int8_inputs(graph, node, placement.heavy):
            readers.setdefault(name, []).append(node.name)
        if node.op_type in placement.separates_tail:
            for tail in graph.readers.get(node.output[0], []):
                readers.setdefault(node.output[0], []).append(tail.name)
    add_concat_readers(graph, readers)
    return readers


def _find_weights(
    graph: Graph,
    placement: Placement,
    int8_nodes: Iterable[onnx.NodeProto],
    bias_add_by_matmul: Mapping[str, onnx.NodeProto],
) -> tuple[WeightTarget, ...]:
    """Return the constant weights of int8 layers (Conv, Gemm, MatMul, ...), with their biases.

    `bias_add_by_matmul`: name of a MatMul -> the Add of its bias, if both form one Gemm.
    """
    weights = []
    for node in int8_nodes:
        weight_name = optional_input(node, 1)
        if node.op_type not in placement.heavy or weight_name not in graph.initializers:
            continue
        bias_name: str | None = optional_input(node, 2) or None
        if node.name in bias_add_by_matmul:
            add_inputs = bias_add_by_matmul[node.name].input
            bias_name = next(name for name in add_inputs if name in graph.initializers)
        axis = None  # one scale for the weight
        if node.op_type not in placement.per_tensor:
            axis = _scale_axis(node, len(graph.initializers[weight_name].dims))
        weights.append(WeightTarget(weight_name, node.name, axis, bias_name))
    return tuple(weights)


def _scale_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """Return the axis of the scales of a node's weight; None for one scale.

    A ConvTranspose with groups has weights [in, out / group, ...], of which one axis cannot name
    the groups; a MatMul of stacked matrices has no channels.
    """
    has_groups = node.op_type == "ConvTranspose" and group_count(node) != 1
    is_stacked = node.op_type == "MatMul" and rank != 2
    return None if has_groups or is_stacked else channel_axis(node, rank)


def _find_scale_owners(
    graph: Graph, placement: Placement, pairs: Iterable[QdqPair]
) -> dict[str, str]:
    """Return paired tensor -> the other tensor whose scale it must share."""
    owners = {}
    for pair in pairs:
        owner = find_scale_owner(graph, placement, pair.tensor)
        if owner != pair.tensor:
            owners[pair.tensor] = owner
    return owners


def never_negative(model: onnx.ModelProto) -> frozenset[str]:
    """Return the tensors that cannot be negative for any input, such as outputs of a Relu."""
    graph = Graph(model)
    non_negative: set[str] = set()
    for node in graph.nodes:
        if cannot_be_negative(graph, node, non_negative):
            non_negative.update(node.output)
    return frozenset(non_negative)


def cannot_be_negative(graph: Graph, node: onnx.NodeProto, non_negative: Collection[str]) -> bool:
    """Whether a node's output cannot be negative, given that the `non_negative` tensors cannot."""
    op_type = standard_type(node)
    if op_type in MOVES | POOLS:
        return node.input[0] in non_negative
    if op_type == "Clip":
        return graph.clips_at_zero(node)
    return op_type in {"Relu", "Sigmoid", "Softmax", "HardSigmoid"}
