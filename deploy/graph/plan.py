"""What needs a scale: which nodes run in int8, which tensors and weights that takes, and why not.

Pure reading of a cleaned model (see `deploy.frontends`); nothing is run and nothing is changed.

A *heavy* node (Conv, Gemm, MatMul) is where int8 pays. A *glue* node (Add, Concat, pooling, ...)
only passes int8 on: it runs in int8 where all its inputs already are and somebody after it wants
int8. A Relu, Clip or bias Add that follows a heavy or glue node alone is its *tail* and is
computed inside it, so the scale is that of the tail's output::

    x --[Q DQ]--> Conv --> Relu --[Q DQ]--> ...       not between Conv and Relu
                  '---- tail --'

A Hard-Swish, however it is written, is decided as one node (see `deploy.graph.gates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx

from calibrators.grids import FP8, INT8, UINT8, Grid
from deploy.graph.flow import (
    CUTS,
    MOVES,
    NORM,
    POINTWISE,
    POOLS,
    added_bias,
    behind_float_concat,
    counts_beyond,
    has_number,
    inputs_read,
    is_pool,
    keeps_range,
    pads_with_more,
    read_in_float,
    reads_int8,
    resized_by,
    with_concats,
)
from deploy.graph.gates import GATE, Gate, collapsed, gates
from deploy.graph.index import Graph, Still, attributes
from deploy.graph.tiles import tile_of

AS_ASKED = "kept float as asked"  # the reason of a node that the user keeps in float
FLOAT32 = "float32"
FLOATS = frozenset({FLOAT32, "float16", "bfloat16"})  # precisions that need no scale
WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # where int8 is the gain
FloatNodes = Mapping[str, str] | Iterable[str]  # nodes to keep in float, with why
_FLOAT = onnx.TensorProto.FLOAT
_ACTIVATIONS = frozenset({GATE, "Sigmoid", "Mul", "LeakyRelu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a target wants Q/DQ pairs, and on which grid.

    Attributes:
        name: of the target, for reasons and reports.
        grid: integers of the activations.
        weights: integers of the weights.
        heavy: op types whose int8 kernel is the gain.
        glue: op types that pass int8 on.
        keeps_scale: op types whose output must have the input's scale.
        outputs: a pair after every int8 node (ONNX Runtime), or only on the inputs (TensorRT).
        bias: biases as int32 behind a DequantizeLinear (ONNX Runtime) or left float.
        gemms: a MatMul of rows and the Add of its bias are one Gemm.
        checked: glue stays float of which ONNX Runtime's integer kernel is missing or differs.
        per_tensor: op types whose weights get one scale for the whole tensor.
        numbers: an Add or Mul of a tensor and one number is glue too, the number held in int8.
        passes: op types that stay float between an int8 node and glue without parting them.
        float_behind_concat: what reads a Concat stays float unless int8 nodes make all its inputs.
        parted: op types with a pair of their own between them and their tail.
        thin: a Conv on an input of the model with fewer products a value than this stays float,
            unless a MaxPool follows.
        least_channels: a layer with fewer channels than this, in or out, stays float.
        most_window: a Conv whose window has more places than this stays float; 0 for no limit.
        groups: whether a Conv may have groups.
        tiles: a ConvTranspose that does more than make a tile of each pixel stays float.
    """

    name: str
    grid: Grid
    heavy: frozenset[str]
    glue: frozenset[str]
    keeps_scale: frozenset[str]
    outputs: bool
    bias: bool
    gemms: bool = False
    checked: bool = False
    weights: Grid = INT8
    per_tensor: frozenset[str] = frozenset()
    numbers: bool = False
    passes: frozenset[str] = frozenset()
    float_behind_concat: bool = False
    parted: frozenset[str] = frozenset()
    thin: int = 0
    least_channels: Mapping[str, int] = field(default_factory=dict)
    most_window: int = 0
    groups: bool = True
    tiles: bool = False

    @property
    def heavy_or_glue(self) -> frozenset[str]:
        """Op types that can leave float."""
        return self.heavy | self.glue

    @property
    def word(self) -> str:
        """What the grid is called in reasons: "int8", whatever its zero point, or "fp8"."""
        return INT8.name if self.grid.kind == "integer" else self.grid.name


ONNXRUNTIME = Placement(
    name="onnxruntime",
    grid=UINT8,
    heavy=WEIGHTED,
    glue=MOVES
    | CUTS
    | POOLS
    | {"Add", "Mul", "Sigmoid", "LeakyRelu", "Concat", "Resize", "Split", GATE},
    keeps_scale=MOVES | CUTS | {"MaxPool", "Resize", "Split"},
    outputs=True,
    bias=True,
    gemms=True,
    checked=True,
    numbers=True,
    # 3 colours times 3x3 are 27 products: the int8 kernel's unfolding costs what it saves, or more
    # (EfficientNet-Lite0 on AVX512-VNNI: 1.86x as fast as FP32 with the first Conv, 2.05x without;
    # 2.07x either way in ONNX Runtime 1.32)
    thin=32,
    tiles=True,
)
TENSORRT = Placement(
    name="tensorrt",
    grid=INT8,
    heavy=WEIGHTED,
    glue=POOLS | {"Add", "ReduceMean"},
    keeps_scale=MOVES | {"MaxPool", "Resize", "Split"},
    outputs=False,
    bias=False,
    # pointwise operators are fused into what is before them, and a residual Add with them
    passes=MOVES | POOLS | POINTWISE | NORM | {"Concat", "Split", "Slice", "Gather", "Resize"},
)
# FP8 has fewer kernels than int8. A window of over 32 places, and groups, have none that is fast
# ("Limitations" of TensorRT's release notes, such as 10.12). ModelOpt 0.47 leaves small layers in
# float16, which is faster there, and quantizes no ConvTranspose and no pooling in FP8
# (onnx/quantization/graph_utils.py, find_nodes_from_convs_to_exclude; fp8.py).
TENSORRT_FP8 = replace(
    TENSORRT,
    grid=FP8,
    weights=FP8,
    heavy=WEIGHTED - {"ConvTranspose"},
    glue=frozenset({"Add"}),
    least_channels={"Conv": 17, "Gemm": 16, "MatMul": 16},
    most_window=32,
    groups=False,
)
TENSORRT_ON = {one.grid.name: one for one in (TENSORRT, TENSORRT_FP8)}
# What AMCT quantizes and on which grid; deploy.targets.ascend.layers has its further conditions,
# which `analyse` does not know.
ASCEND = Placement(
    name="ascend",
    grid=replace(INT8, symmetric=False),
    heavy=WEIGHTED | {"AveragePool"},
    glue=frozenset(),
    keeps_scale=frozenset(),
    outputs=False,
    bias=True,
    per_tensor=frozenset({"Gemm", "MatMul"}),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One node: the grid it runs on, and why it stays float.

    Attributes:
        node: its name.
        op_type: its operator.
        precision: name of the grid of its activations ("int8", "uint8"), or of a float type.
        reason: why it is float; "" where it is not.
    """

    node: str
    op_type: str
    precision: str
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the node leaves float."""
        return self.precision not in FLOATS

    @property
    def int8(self) -> bool:
        """Whether the node runs on integers of 8 bits, signed or not."""
        return self.precision in (INT8.name, UINT8.name)


def word_of(decisions: Iterable[Decision]) -> str:
    """What quantized nodes run in: "int8", whatever their zero point, or "fp8"."""
    return FP8.name if any(d.precision == FP8.name for d in decisions) else INT8.name


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """An initializer to be stored as int8, the node it serves and its channel axis (None: one)."""

    name: str
    node: str
    axis: int | None
    bias: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A Q/DQ pair on `tensor`; `consumers` are the nodes that read it, None for all readers."""

    tensor: str
    consumers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model needs for one placement.

    Attributes:
        placement: the rules this plan follows.
        decisions: every node of the top graph, in its order.
        pairs: Q/DQ pairs to insert, in the graph's order.
        weights: initializers to store as int8.
        owners: tensor -> the tensor whose scale it must share.
        sources: tensor with a scale -> the tensors whose ranges it holds, where that is not its own
            range.
        gates: those that run in int8; `pairs` has their ends, their inner scales are fixed.
        shifts: Conv -> the gate that alone reads it and is made of another tensor too
            (squeeze-excite). Its shift is added to the Conv's bias, whose output is then clipped by
            its own grid.
        gemms: MatMul -> the Add of its bias, where both are one Gemm.
        numbers: Adds and Muls whose constant operand is to be stored in int8.
        pads: Pads that run on the integers themselves.
    """

    placement: Placement
    decisions: tuple[Decision, ...]
    pairs: tuple[Pair, ...]
    weights: tuple[WeightTarget, ...]
    owners: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    shifts: Mapping[str, Gate] = field(default_factory=dict)
    gemms: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    pads: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Tensors that need a scale of their own, in the graph's order."""
        names = [self.owners.get(p.tensor, p.tensor) for p in self.pairs]
        return tuple(dict.fromkeys(names))

    @property
    def int8_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that run on the placement's grid."""
        return tuple(d.node for d in self.decisions if d.quantized)


class Read:
    """What is found in a model whatever stays float; for many plans of a model that stays as it is.

    Attributes:
        graph: its index.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = Still(model)
        self._model = model

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """Of the graph."""
        return gates(self.graph)

    @cached_property
    def collapsed(self) -> Graph:
        """The index with each gate as one node."""
        found = self.gates
        return Still(self._model, collapsed(self.graph.nodes, found)) if found else self.graph


def analyse(
    model: onnx.ModelProto,
    placement: Placement,
    *,
    float_nodes: FloatNodes = (),
    float_tensors: Mapping[str, str] | None = None,
    read: Read | None = None,
) -> Plan:
    """Decide for every node whether it runs in int8.

    Args:
        model: cleaned model with unique node names and inferred shapes.
        placement: the target's rules.
        float_nodes: names of nodes to keep in float, with why where it was not the user's word.
        float_tensors: tensor -> why it has no scale ("was 0 in every sample").
        read: what was found in the model before.
    """
    known = Read(model) if read is None else read
    found = known.gates if GATE in placement.glue else ()
    graph = known.collapsed if found else known.graph
    stands_in = {name: gate.name for gate in found for name in gate.nodes}
    without = dict(float_tensors or {})
    kept = {stands_in.get(name, name): why for name, why in reasons(float_nodes).items()}
    why: dict[str, str] = {}
    for node in graph.nodes:
        why[node.name] = _refusal(graph, node, placement, kept, without)
    _drop_glue(graph, placement, why, without)
    chosen = [n for n in graph.nodes if not why[n.name]]
    pairs = _pairs(graph, placement, chosen)
    int8_gates = tuple(gate for gate in found if not why[gate.name])
    gemms = _gemms(graph, placement, chosen, kept) if placement.gemms else {}
    weights = tuple(w for n in chosen for w in _weights(graph, placement, n, gemms))
    return Plan(
        placement=placement,
        decisions=_decisions(model.graph.node, graph, placement, why, stands_in, gemms),
        pairs=pairs,
        gates=int8_gates,
        shifts=_shifts(known.graph, weights if placement.bias else (), int8_gates),
        gemms={name: add.name for name, add in gemms.items()},
        numbers=tuple(n.name for n in chosen if has_number(graph, n)),
        pads=tuple(n.name for n in chosen if n.op_type == "Pad"),
        weights=weights,
        owners=_owners(graph, placement, [p.tensor for p in pairs]),
    )


def _shifts(
    graph: Graph, weights: Iterable[WeightTarget], int8_gates: Iterable[Gate]
) -> dict[str, Gate]:
    """The Convs that a gate's shift can be added to; of the model as it is, gates written out."""
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
    kept: Mapping[str, str],
) -> dict[str, onnx.NodeProto]:
    """MatMul in int8 -> the Add of its bias.

    ONNX Runtime makes one Gemm of both itself, before it looks for integer kernels, and then has
    none where the bias is not stored in integers: the layer ran in float, its weights turned to
    float for every input (a net of three such layers: 9.6 times slower than FP32).
    """
    layers = (node for node in chosen if node.op_type == "MatMul")
    found = {node.name: added_bias(graph, node) for node in layers}
    return {
        name: add
        for name, add in found.items()
        if add is not None and add.name not in kept and not _holds_number(graph, placement, add)
    }


def _holds_number(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether an Add or Mul of a constant is glue: the constant is one number, held in int8."""
    varying = graph.data_inputs(node)
    beside = graph.number_beside(varying[0], node) if varying else None
    return placement.numbers and bool(beside)


def reasons(float_nodes: FloatNodes) -> Mapping[str, str]:
    """Node to keep in float -> why; where nothing is said, the user asked for it."""
    if isinstance(float_nodes, Mapping):
        return float_nodes
    return dict.fromkeys(float_nodes, AS_ASKED)


def _refusal(
    graph: Graph,
    node: onnx.NodeProto,
    placement: Placement,
    kept: Mapping[str, str],
    without: Mapping[str, str],
) -> str:
    """Why a node cannot run in int8 on its own account; "" where it can."""
    if node.domain not in ("", "ai.onnx"):
        return f"custom domain {node.domain}"
    if node.op_type not in placement.heavy_or_glue:
        return f"{node.op_type} is not run in {placement.word} on {placement.name}"
    if node.name in kept:
        return kept[node.name]
    if node.op_type in placement.heavy and (reason := _weight_refusal(graph, node, placement)):
        return reason
    if node.op_type == "Conv" and _fed(graph, node.input[0]):
        products = math.prod(graph.initializers[node.input[1]].dims[1:])
        if products < placement.thin and not _pooled(graph, placement, node):
            return f"the first Conv has only {products} products a value, and is faster in float"
    if has_number(graph, node) and not _holds_number(graph, placement, node):
        return "one of its operands is constant"
    if node.op_type == "Pad" and (reason := _pad_refusal(graph, node)):
        return reason
    if node.op_type == "ReduceMean" and not is_pool(graph, node):
        return "it is the mean over other axes than a picture's"
    if placement.checked and (reason := _kernel_refusal(node)):
        return f"{reason} on {placement.name}"
    tensors = [*graph.data_inputs(node), *([graph.tail(node)] if placement.outputs else [])]
    for tensor in tensors:
        if not graph.is_float(tensor):
            return f"{tensor} is not float32"
        owner = _owner(graph, placement, tensor)
        if owner in without:
            return f"{owner} {without[owner]}"
    return "" if graph.data_inputs(node) else "all its inputs are constant"


def _pad_refusal(graph: Graph, node: onnx.NodeProto) -> str:
    """Why a Pad cannot run on integers: with anything but zeros, or a Relu inside its pair."""
    if attributes(node).get("mode", b"constant") != b"constant" or pads_with_more(graph, node):
        return "it pads with something else than 0"
    return "" if graph.tail(node) == node.output[0] else "an activation follows it"


def _kernel_refusal(node: onnx.NodeProto) -> str:
    """Why ONNX Runtime has no integer kernel of glue, or one that computes something else.

    A Resize that interpolates is computed in float between its pairs; for the average, see
    `deploy.targets.averages`.
    """
    if node.op_type == "Resize" and (mode := resized_by(node)) != "nearest":
        return f"a Resize by {mode} is not run in int8"
    if counts_beyond(node) and any(attributes(node).get("pads", [])):
        return "an average that counts its padding, with ceil_mode, is another one in int8"
    return ""


def _fed(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is an input of the model, cast or not."""
    maker = graph.producer.get(tensor)
    if maker is not None and maker.op_type == "Cast":
        tensor = str(maker.input[0])
    return tensor in graph.inputs


def _pooled(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether a MaxPool reads a node's activation and hands it to what can run in int8.

    ONNX Runtime would pull the Q behind such a pool before it, where the pool of a float Conv's
    uint8 output costs more than the Conv saves (an ImageNet stem, a pool and four Convs: 0.62x as
    fast as FP32 with the Conv in float, 1.7x with it in int8; before a Conv 2.8x and 2.6x).
    """
    reached = [graph.tail(node)]
    for tensor in reached:
        for reader in graph.readers.get(tensor, []):
            if reader.op_type == "MaxPool" and "MaxPool" in placement.glue:
                after = graph.readers.get(reader.output[0], [])
                return any(n.op_type in placement.heavy_or_glue for n in after)
            if reader.op_type in _ACTIVATIONS and reader.output[0] not in reached:
                reached.append(graph.tail(reader))
    return False


def _weight_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    if node.op_type == "MatMul":
        constants = [name for name in node.input if name in graph.initializers]
        if constants and (len(constants) == 2 or node.input[1] not in graph.initializers):
            return "its constant is the first factor"
        names = constants
    else:
        names = list(node.input[1:2])
    for name in names:
        if name not in graph.initializers:
            return "its weights are not constant"
        if graph.initializers[name].data_type != _FLOAT:
            return "its weights are not float32"
        if name in graph.outputs:
            return "its weights are an output of the model"
    given = attributes(node)
    plain = given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0
    if node.op_type == "Gemm" and (given.get("transA", 0) or not plain):
        return f"Gemm with transA, alpha or beta has no {placement.word} kernel"
    return form_refusal(graph, node, placement)


def form_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Why a layer of this form is no gain on the placement's grid; "" where it is."""
    weight = graph.initializers.get(node.input[1])
    if weight is None:
        return ""
    sizes = list(weight.dims)
    if placement.tiles and node.op_type == "ConvTranspose":
        if any(name and name not in graph.initializers for name in node.input[2:]):
            return "its bias is not constant"
        if tile_of(node, sizes) is None:
            return f"it has no {placement.word} kernel: its windows do not just lie side by side"
    if node.op_type == "Conv":
        if not placement.groups and attributes(node).get("group", 1) != 1:
            return f"a Conv with groups has no fast {placement.word} kernel"
        if 0 < placement.most_window < math.prod(sizes[2:]):
            return (
                f"a window of {math.prod(sizes[2:])} places has no {placement.word} kernel, which"
                f" takes {placement.most_window} at most"
            )
    channels, least = sizes[:2] if node.op_type == "Conv" else sizes[-2:], placement.least_channels
    if min(channels, default=1) < least.get(node.op_type, 0):
        return f"too few channels ({min(channels)}) to be faster in {placement.word} than in float"
    return ""


def _decisions(
    nodes: Iterable[onnx.NodeProto],
    graph: Graph,
    placement: Placement,
    why: Mapping[str, str],
    stands_in: Mapping[str, str],
    gemms: Mapping[str, onnx.NodeProto],
) -> tuple[Decision, ...]:
    """One decision a node; a tail runs where the node before it runs, a gate's as one."""
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


def _drop_glue(
    graph: Graph, placement: Placement, why: dict[str, str], without: Mapping[str, str]
) -> None:
    """Glue stays float unless all its inputs are int8 and something after it wants int8.

    Refusing one node can take the ground from another, so this repeats until nothing changes.
    """
    changed = True
    while changed:
        changed = False
        made, wanted = _made_and_wanted(graph, placement, why)
        for node in graph.nodes:
            if not why[node.name]:
                why[node.name] = _stranded(graph, placement, node, why, made, wanted)
                changed = changed or bool(why[node.name])


def _stranded(
    graph: Graph,
    placement: Placement,
    node: onnx.NodeProto,
    why: Mapping[str, str],
    made: set[str],
    wanted: set[str],
) -> str:
    """Why a node that can run in int8 does not pay for what is around it; "" where it does."""
    if placement.float_behind_concat and behind_float_concat(graph, node, made):
        return f"it reads a Concat of what is not {placement.word}"
    if node.op_type in placement.heavy:
        return ""
    if placement.outputs:
        comes_in = all(name in made for name in graph.data_inputs(node))
    else:
        comes_in = reads_int8(graph, node, made, placement.heavy)
    if not comes_in:
        return f"an input of it is not {placement.word}"
    if not placement.outputs and read_in_float(graph, node, why):
        return "its input is read in float too"
    return "" if graph.tail(node) in wanted else f"nothing after it runs in {placement.word}"


def _made_and_wanted(
    graph: Graph, placement: Placement, why: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Tensors that an int8 node makes or a heavy one reads, and tensors an int8 node reads."""
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
    _pass_on(graph, placement, made, wanted)
    return made, wanted


def _pass_on(graph: Graph, placement: Placement, made: set[str], wanted: set[str]) -> None:
    """Let float nodes between hand on what is made, forwards, and what is wanted, backwards."""
    between = [node for node in graph.nodes if _passes_on(graph, placement, node)]
    for node in between:
        if all(name in made for name in graph.data_inputs(node)):
            made.update(node.output)
    for node in reversed(between):
        if wanted.intersection(node.output):
            wanted.update(graph.data_inputs(node))


def _passes_on(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether a node hands int8 on while it stays float itself; an Add of a constant does too."""
    shift = node.op_type == "Add" and has_number(graph, node)
    return node.op_type in placement.passes or (shift and bool(placement.passes))


def _pairs(graph: Graph, placement: Placement, chosen: list[onnx.NodeProto]) -> tuple[Pair, ...]:
    readers: dict[str, list[str]] = {}
    wanted = {name for node in chosen for name in graph.data_inputs(node)}
    for node in chosen:
        names = graph.data_inputs(node)
        if not placement.outputs:
            names = inputs_read(graph, node, placement.heavy)
        for name in names:
            readers.setdefault(name, []).append(node.name)
        if node.op_type in placement.parted:
            after = graph.readers.get(node.output[0], [])
            readers.setdefault(node.output[0], []).extend(n.name for n in after)
        if placement.outputs:
            ends = list(node.output) if node.op_type == "Split" else [graph.tail(node)]
            # the int8 kernels of Gemm and MatMul can write float, which loses nothing
            needed = node.op_type not in {"Gemm", "MatMul"} or ends[0] in wanted
            for name in ends if needed else []:
                readers.setdefault(name, [])
    if not placement.outputs:
        with_concats(graph, readers)
    order = [*graph.inputs, *(o for n in graph.nodes for o in n.output)]
    rank = {name: position for position, name in enumerate(order)}
    names = sorted(readers, key=lambda name: rank[name])
    return tuple(Pair(n, None if placement.outputs else tuple(readers[n])) for n in names)


def _weights(
    graph: Graph, placement: Placement, node: onnx.NodeProto, gemms: Mapping[str, onnx.NodeProto]
) -> list[WeightTarget]:
    if node.op_type not in placement.heavy or node.input[1] not in graph.initializers:
        return []
    weight = graph.initializers[node.input[1]]
    bias = str(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if node.name in gemms:
        bias = next(str(n) for n in gemms[node.name].input if n in graph.initializers)
    axis = None if node.op_type in placement.per_tensor else _channel_axis(node, len(weight.dims))
    return [WeightTarget(str(node.input[1]), node.name, axis, bias)]


def _channel_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """Axis of the output channels in a node's weight."""
    if node.op_type == "Conv":
        return 0
    given = attributes(node)
    if node.op_type == "ConvTranspose":  # [in, out / group, ...]: one axis cannot name the groups
        return 1 if given.get("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if given.get("transB", 0) else 1
    return 1 if rank == 2 else None


def _owners(graph: Graph, placement: Placement, paired: Iterable[str]) -> dict[str, str]:
    """Paired tensor -> the tensor whose scale it has, where that is another one."""
    owners = {tensor: _owner(graph, placement, tensor) for tensor in paired}
    return {tensor: owner for tensor, owner in owners.items() if owner != tensor}


def _owner(graph: Graph, placement: Placement, tensor: str) -> str:
    """Where a tensor's values were made, through the nodes that only move them."""
    while (source := _moved_from(graph, placement, tensor)) is not None:
        tensor = source
    return tensor


def _moved_from(graph: Graph, placement: Placement, tensor: str) -> str | None:
    """What a node that keeps the scale made `tensor` from; None where another node made it."""
    node = graph.producer.get(tensor)
    if node is None or node.op_type not in placement.keeps_scale or not node.input:
        return None
    if not keeps_range(graph, node):
        return None
    source = str(node.input[0])
    moved = node.op_type == "Split" or tensor == node.output[0]
    return source if moved and source not in graph.initializers else None


def never_negative(model: onnx.ModelProto) -> frozenset[str]:
    """Tensors that cannot hold a negative value, whatever is fed: what a Relu and its like make."""
    ops = {"Relu", "Sigmoid", "Softmax", "HardSigmoid"}
    graph = Graph(model)
    names: set[str] = set()
    for node in graph.nodes:
        passed = node.op_type in MOVES | POOLS and node.input[0] in names
        if node.op_type in ops or passed or (node.op_type == "Clip" and graph.holds_zero(node)):
            names.update(node.output)
    return frozenset(names)
