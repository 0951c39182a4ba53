"""Units of a model, their prices in int8 and float, and the split of least price.

A unit is a group of nodes that change sides together: an int8 node with what is fused into it::

    Conv -> Relu                          one unit: the Relu is the Conv's tail
    x -> Sigmoid -> Mul(x, .)             one unit: a gate is fused in float, and not half in int8
    Conv -> Add -> Clip -> Mul(x, .)      one unit: in float a Hard-Sigmoid is the Conv's tail

Prices are products of a layer. For a known kind of CPU (`CPUS`), int8 products take the share that
its kernels do. Elsewhere they take 0.7: vendors state 0.5 of fp16, the bound of layers that only
multiply; others wait for memory. The price of a conversion between int8 and float is unknown there
and counts 0, so that a layer is float only for its loss.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx

from calibrators.weights import is_depthwise
from deploy.graph.edit import copy_with_outputs
from deploy.graph.gates import Gate, find_gates
from deploy.graph.index import (
    Graph,
    attributes,
    by_name,
    channel_axis,
    group_count,
    names_of,
)
from deploy.graph.placement import WEIGHTED
from deploy.graph.plan import Decision
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.tuning.min_cut import cheapest_split

_MAX_ACTIVATION_NODES = 4  # x -> Add -> Clip -> Div -> Mul is the longest gate that exporters write

FLOAT_SIDE = ""  # stands for the float nodes in a border

Groups = dict[str, frozenset[str]]  # int8 node -> names of all nodes of its unit
# unit that makes a tensor, unit that reads it, the tensor
Border = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Units:
    """The int8 nodes of a model, in groups that change sides together.

    Attributes:
        members: unit, named after its first node -> names of its nodes, in the model's order.
        borders: the tensors between two units, each once, and between a unit and the float nodes
            (`FLOAT_SIDE`).
        layers: units with weights, in the model's order.
    """

    members: Mapping[str, tuple[str, ...]]
    borders: tuple[Border, ...]
    layers: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor between units, or between units and float nodes."""
        return tuple(dict.fromkeys(tensor for _, _, tensor in self.borders))

    def node_names(self, units: Iterable[str]) -> tuple[str, ...]:
        """Return the names of all nodes of some units, unit by unit in the model's order."""
        chosen_units = set(units)
        names: list[str] = []
        for unit, members in self.members.items():
            if unit in chosen_units:
                names += members
        return tuple(names)


def group_units(model: onnx.ModelProto, decisions: Iterable[Decision]) -> Units:
    """Group the nodes that run in int8 by default into units.

    The nodes of a unit run in int8 or in float together, such as a Conv and the Relu that is fused
    into it. `decisions`: int8 or float for each node, as the target decides without a search.
    """
    graph = Graph(model)
    int8_names = {decision.node for decision in decisions if decision.quantized}
    int8_nodes = [node for node in graph.nodes if node.name in int8_names]
    # each node alone at first; `_join` gives the nodes that it joins one group in place of theirs
    groups: Groups = {node.name: frozenset([node.name]) for node in int8_nodes}
    for node in int8_nodes:
        tail = _find_tail(graph, node, groups)  # such as the Relu of a Conv
        # such as the Sigmoid of x * Sigmoid(x)
        activation_nodes = _find_activation_nodes(graph, node, groups)
        _join(groups, [node.name, *tail, *activation_nodes])
    for gate in find_gates(graph):  # a Hard-Swish, in any of its forms, and the layer before it
        if all(name in int8_names for name in gate.nodes):
            _join(groups, [*gate.nodes, *_find_gated_layer(graph, gate, groups)])

    members_by_group: dict[frozenset[str], list[str]] = {}
    layer_groups = set()
    for node in int8_nodes:
        group = groups[node.name]
        members_by_group.setdefault(group, []).append(node.name)
        if node.op_type in WEIGHTED:
            layer_groups.add(group)

    # a unit has the name of its first node
    unit_by_node = {name: members_by_group[group][0] for name, group in groups.items()}
    layers = [names[0] for group, names in members_by_group.items() if group in layer_groups]
    return Units(
        members={names[0]: tuple(names) for names in members_by_group.values()},
        borders=_find_borders(graph, unit_by_node),
        layers=tuple(layers),
    )


def find_add_units(model: onnx.ModelProto, units: Units) -> frozenset[str]:
    """Return the units with an Add and without weights."""
    adds = {node.name for node in model.graph.node if node.op_type == "Add"}
    with_add = [unit for unit, names in units.members.items() if not adds.isdisjoint(names)]
    return frozenset(with_add).difference(units.layers)


def _join(groups: Groups, nodes: Iterable[str]) -> None:
    """Merge the groups of some nodes, in place."""
    merged_nodes = frozenset[str]().union(*(groups[node] for node in nodes))
    groups |= dict.fromkeys(merged_nodes, merged_nodes)


def _find_tail(graph: Graph, node: onnx.NodeProto, groups: Groups) -> list[str]:
    """Return the int8 nodes of a node's tail, such as its Relu."""
    tail = []
    end = graph.fused_output(node)
    tensor = str(node.output[0])
    while tensor != end:
        (reader,) = graph.readers[tensor]
        if reader.name not in groups:
            break
        tail.append(reader.name)
        tensor = str(reader.output[0])
    return tail


def _find_gated_layer(graph: Graph, gate: Gate, groups: Groups) -> list[str]:
    """Return the int8 layer whose output only the gate reads; empty without one."""
    layer = graph.find_producer(gate.source, *WEIGHTED)
    if layer is None or layer.name not in groups or graph.is_read_outside(gate.source):
        return []
    readers = names_of(graph.readers[gate.source])
    return [layer.name] if readers <= set(gate.nodes) else []


def _find_activation_nodes(graph: Graph, node: onnx.NodeProto, groups: Groups) -> list[str]:
    """Return the nodes that compute gate(x), for a node Mul(x, gate(x)); empty for any other node.

    Such as the Sigmoid of x * Sigmoid(x), which is SiLU.

    `groups`: its keys are the int8 nodes; a gate with other nodes is left out.
    """
    if node.op_type != "Mul" or len(node.input) != 2:
        return []
    # either input of the Mul may be x (`gated_tensor`). From the other, gate(x), `tensor` goes
    # upstream until it is x
    for gated_tensor, tensor in itertools.permutations(node.input):
        names: list[str] = []
        while tensor != gated_tensor and len(names) < _MAX_ACTIVATION_NODES:
            maker = graph.producer.get(tensor)
            if maker is None or maker.name not in groups or maker.op_type in WEIGHTED:
                break
            names.append(maker.name)
            tensor = str(maker.input[0])
        if tensor == gated_tensor:
            return names
    return []


def _find_borders(graph: Graph, unit_by_node: Mapping[str, str]) -> tuple[Border, ...]:
    """Return the tensors between units, which are converted where one is int8 and one float.

    Each is (unit that makes it, unit that reads it, tensor), in the order of the nodes that read
    it. `FLOAT_SIDE` stands for nodes in no unit, and for the model's inputs and outputs.

    `unit_by_node`: int8 node -> its unit.
    """
    unit_by_tensor: dict[str, str] = {}  # tensor -> the unit that makes it
    reads: list[tuple[str, str]] = []  # (unit that reads it, tensor)
    for node in graph.nodes:
        unit = unit_by_node.get(node.name, FLOAT_SIDE)
        unit_by_tensor |= dict.fromkeys(node.output, unit)
        reads += [(unit, tensor) for tensor in graph.data_inputs(node)]
    reads += [(FLOAT_SIDE, tensor) for tensor in graph.outputs]

    borders: dict[Border, None] = {}
    for reader, tensor in reads:
        maker = unit_by_tensor.get(tensor, FLOAT_SIDE)
        if maker != reader:
            borders[maker, reader, tensor] = None
    return tuple(borders)


ASSUMED_INT8_TIME = 0.7  # price of an int8 product, in float products, where it is not measured
NO_LOSSES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """Time of ONNX Runtime's int8 kernels on a kind of CPU, as a share of its float kernels'.

    Attributes:
        dense: Conv with a kernel of several pixels.
        pointwise: Conv of 1x1.
        depthwise: Conv with one channel a group.
        matrix: Gemm, MatMul.
        other_ratio: nodes without weights.
        price_per_other_value: time of a float value of a node without weights, in dense products.
        price_per_depthwise_product: time of a float product of a depthwise Conv, in dense ones.
        price_per_weight_read: time to read a float weight from memory, in dense products; the price
            of a layer of few products a weight, such as the last Gemm of a classifier.
        conversion: time of a value's conversion between int8 and float, in dense products.
    """

    dense: float
    pointwise: float
    depthwise: float
    matrix: float
    other_ratio: float = 1.0
    price_per_other_value: float = 12.0
    price_per_depthwise_product: float = 2.2
    price_per_weight_read: float = 8.0
    conversion: float = 20.0


# `vnni` and `avx2` were measured on an EPYC 9005 with ONNX Runtime 1.23 (one thread, 32 to 256
# channels, 14 to 112 pixels), `avx2` with the wider instructions hidden from ONNX Runtime. `arm` is
# the bound of arithmetic, 16 products a SDOT and 4 a FMLA, with the losses of `vnni`. Nodes without
# weights (SiLU, Add, Concat) wait for memory, in int8 too: measured on AVX2, 20 to 80 pixels.
CPUS: Mapping[str, CpuKernels] = {
    "vnni": CpuKernels(dense=0.28, pointwise=0.36, depthwise=1.5, matrix=0.5),
    "avx2": CpuKernels(dense=0.53, pointwise=0.6, depthwise=1.5, matrix=0.7),
    "arm": CpuKernels(dense=0.3, pointwise=0.4, depthwise=1.5, matrix=0.5),
}
_OTHER_DEVICE = CpuKernels(
    dense=ASSUMED_INT8_TIME,
    pointwise=ASSUMED_INT8_TIME,
    depthwise=ASSUMED_INT8_TIME,
    matrix=ASSUMED_INT8_TIME,
    other_ratio=ASSUMED_INT8_TIME,
    price_per_other_value=1.0,
    price_per_depthwise_product=1.0,
    price_per_weight_read=0.0,
    conversion=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one model on one target, in products of a dense Conv in float.

    Attributes:
        units: of the model.
        unit_prices: unit -> (price in int8, price in float).
        conversions: tensor -> price of converting it between int8 and float.
    """

    units: Units
    unit_prices: Mapping[str, tuple[float, float]]
    conversions: Mapping[str, float]

    @property
    def float_total(self) -> float:
        """Price of the float model."""
        return self.total(frozenset(self.units.members))

    def total(self, in_float: frozenset[str]) -> float:
        """Return the price of the model with these units in float."""
        price = 0.0
        for unit, (int8_price, float_price) in self.unit_prices.items():
            price += float_price if unit in in_float else int8_price
        # a tensor with several readers is converted once
        float_units = in_float.union([FLOAT_SIDE])
        converted_tensors: dict[str, None] = {}
        for maker, reader, tensor in self.units.borders:
            if (maker in float_units) != (reader in float_units):
                converted_tensors[tensor] = None
        return price + sum(self.conversions[tensor] for tensor in converted_tensors)

    def time_share(self, in_float: frozenset[str]) -> float:
        """Return the price with these units in float, as a share of the float model's."""
        float_total = self.float_total
        return self.total(in_float) / float_total if float_total else 1.0

    def cheapest_float_units(
        self,
        losses: Mapping[str, float] = NO_LOSSES,
        weight: float = 0.0,
        pinned: frozenset[str] = frozenset(),
    ) -> frozenset[str]:
        """Return the units to run in float for the least total of prices and weighted losses.

        The total counts conversions between int8 and float too.

        Args:
            losses: unit -> its loss in int8, 0 if missing.
            weight: price of a loss of 1.
            pinned: units that must be float.
        """
        # unit -> price in int8 with its loss, price in float. The nodes in no unit are a further
        # one, `FLOAT_SIDE`, which is pinned to float and has no price
        costs = {FLOAT_SIDE: (0.0, 0.0)}
        for unit, (int8_price, float_price) in self.unit_prices.items():
            costs[unit] = int8_price + weight * losses.get(unit, 0.0), float_price

        border_prices = []  # (unit, unit, price of converting the tensor between them)
        followers = []  # (unit, the unit with which it must be float)
        layers = {*self.units.layers, FLOAT_SIDE}
        for maker, reader, tensor in self.units.borders:
            border_prices.append((maker, reader, self.conversions[tensor]))
            # a unit without weights gains nothing in int8 downstream of a float unit. Downstream of
            # `FLOAT_SIDE` it may gain: else all units from the model's input on would be float
            if reader not in layers and maker != FLOAT_SIDE:
                followers.append((reader, maker))
        float_units = cheapest_split(costs, border_prices, followers, pinned.union([FLOAT_SIDE]))
        return float_units.difference([FLOAT_SIDE])


def count_prices(
    model: onnx.ModelProto,
    units: Units,
    sample: Mapping[str, Array],
    cpu_kernels: CpuKernels | None = None,
) -> Prices:
    """Return prices from counts of operations; the unit is the duration of one multiplication.

    Args:
        model: the float model.
        units: of the model.
        sample: one inference on it gives the size of each tensor.
        cpu_kernels: of the CPU that is to run the model, one of `CPUS`; None where it is not known.
    """
    kernels = cpu_kernels or _OTHER_DEVICE
    graph = Graph(model)
    nodes = by_name(graph.nodes)
    outputs = [str(nodes[name].output[0]) for name in units.node_names(units.members)]
    sizes = _count_values(model, [*outputs, *units.tensors], sample)
    unit_prices = {}
    for unit, members in units.members.items():
        int8_price = float_price = 0.0
        for node in map(nodes.__getitem__, members):
            # what is fused into a layer, such as its Relu, takes no time of its own
            if unit in units.layers and node.op_type not in WEIGHTED:
                continue
            value_count = sizes[node.output[0]]
            node_int8_price, node_float_price = _price_node(graph, node, value_count, kernels)
            int8_price += node_int8_price
            float_price += node_float_price
        unit_prices[unit] = int8_price, float_price
    conversions = {tensor: kernels.conversion * sizes[tensor] for tensor in units.tensors}
    return Prices(units=units, unit_prices=unit_prices, conversions=conversions)


def _price_node(
    graph: Graph, node: onnx.NodeProto, value_count: int, kernels: CpuKernels
) -> tuple[float, float]:
    """Return (price in int8, price in float) of a node.

    The unit is the time of a float multiplication in a Conv that is not depthwise.

    `value_count`: number of its output values. `kernels`: for each kind of layer, the price of int8
    relative to float, and some prices in float.
    """
    weight = graph.initializers.get(node.input[1]) if node.op_type in WEIGHTED else None
    if weight is None:
        float_price = kernels.price_per_other_value * value_count
        return kernels.other_ratio * float_price, float_price

    dims = list(weight.dims)
    product_price = 1.0
    if node.op_type in ("Gemm", "MatMul"):
        int8_ratio = kernels.matrix
    elif is_depthwise(group_count(node), dims[0], dims[1]):
        int8_ratio = kernels.depthwise
        product_price = kernels.price_per_depthwise_product
    elif math.prod(dims[2:]) == 1:
        int8_ratio = kernels.pointwise
    else:
        int8_ratio = kernels.dense
    compute_price = product_price * value_count * _products_per_value(node, dims)
    # a layer that uses each weight only a few times waits for its weights from memory
    float_price = max(compute_price, kernels.price_per_weight_read * math.prod(dims))
    return int8_ratio * float_price, float_price


def _products_per_value(node: onnx.NodeProto, dims: Sequence[int]) -> float:
    """Return the number of multiplications by weights that an output value of a layer takes.

    `dims`: shape of the weight::

        Conv             [C_out, C_in of a group, *kernel]
        ConvTranspose    [C_in, C_out of a group, *kernel]
        MatMul, Gemm     [C_in, C_out], or [C_out, C_in] with transB
    """
    out_channels = dims[channel_axis(node, len(dims))]
    if node.op_type == "ConvTranspose":
        # a pixel of the input gives as many pixels of the output as the product of the strides
        pixels = math.prod(attributes(node).get("strides", [1]))
        out_channels *= group_count(node) * pixels
    return math.prod(dims) / max(out_channels, 1)


def _count_values(
    model: onnx.ModelProto, tensors: Sequence[str], sample: Mapping[str, Array]
) -> dict[str, int]:
    """Return the number of values of each tensor for one sample."""
    graph_inputs = names_of(model.graph.input)
    inner_tensors = [name for name in tensors if name not in graph_inputs]
    session = OrtSession.open(copy_with_outputs(model, inner_tensors), threads=1, spin=False)
    values = {**sample, **session.run(sample)}
    return {name: int(values[name].size) for name in tensors}
