"""Units of a model, their prices in int8 and float, and the split of least price by a minimum cut.

A unit is a group of nodes that change sides together: an int8 node with what is fused into it::

    Conv -> Relu                          one unit: the Relu is the Conv's tail
    x -> Sigmoid -> Mul(x, .)             one unit: a gate is fused in float, and not half in int8
    Conv -> Add -> Clip -> Mul(x, .)      one unit: in float a Hard-Sigmoid is the Conv's tail

Prices are measured where the target runs on this machine: the kernels of the float and of the int8
model, two profiles each, in turns. For a CPU that is named (`CPUS`) they are products of a layer,
times the ratio of that CPU's kernels. Elsewhere they are products, times 0.7 in int8: vendors state
0.5 of fp16, the bound of layers that only multiply; others wait for memory. The price of a
conversion between int8 and float is unknown there and counts 0, so that a layer is float only for
its loss.

A tensor between the two sides adds the price of its conversion, and the split of least total price
is a minimum cut, found exactly::

    int8 end ==float's price==> unit ==int8's price==> float end     the cut pays what it cuts
                                 |^
                          price of conversion

Source: Picard, Ratliff, "Minimum cuts and related problems", Networks 5, 1975 (the model); Dinic,
"Algorithm for solution of a problem of maximum flow", 1970 (the flow).
"""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TypeVar

import onnx

from deploy.graph.edit import copy_with_outputs
from deploy.graph.gates import Gate, find_gates
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import WEIGHTED
from deploy.graph.plan import Decision
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.tuning.timing import PAIRS, KernelTimes, kernel_times, least_kernel_times

Unit = TypeVar("Unit", bound=Hashable)

_SIDE_INT8, _SIDE_FLOAT = 0, 1  # source and sink
_NOTHING = 1e-9  # smaller residual capacities, as a share of all prices, count as 0


def cheapest_split(
    prices: Mapping[Unit, tuple[float, float]],
    between: Iterable[tuple[Unit, Unit, float]],
    follows: Iterable[tuple[Unit, Unit]] = (),
) -> frozenset[Unit]:
    """Return the units to run in float for the least total price; on a tie a unit runs in int8.

    Args:
        prices: unit -> (price in int8, price in float), each 0 or more.
        between: (unit, unit, price if one is int8 and the other float).
        follows: (unit, other): the unit must be float where the other is float.
    """
    places = {unit: place for place, unit in enumerate(prices, start=2)}
    flow = _FlowNetwork(len(places) + 2)
    for unit, (int8, float32) in prices.items():
        shared = min(int8, float32)  # paid on either side
        flow.pipe(_SIDE_INT8, places[unit], float32 - shared)
        flow.pipe(places[unit], _SIDE_FLOAT, int8 - shared)
    for one, other, price in between:
        flow.pipe(places[one], places[other], price)
        flow.pipe(places[other], places[one], price)
    every = 1 + sum(max(pair) for pair in prices.values())
    for unit, other in follows:
        flow.pipe(places[unit], places[other], every)
    far = flow.far_side()
    return frozenset(unit for unit, place in places.items() if place in far)


class _FlowNetwork:
    """Network of numbered places, with the residual capacity of the pipe between each two."""

    def __init__(self, places: int) -> None:
        self._left: list[dict[int, float]] = [{} for _ in range(places)]

    def pipe(self, start: int, end: int, size: float) -> None:
        """Add a pipe; it widens one that is there."""
        if size > 0 and start != end:
            self._left[start][end] = self._left[start].get(end, 0.0) + size
            self._left[end].setdefault(start, 0.0)

    def far_side(self) -> frozenset[int]:
        """Return the places that can still reach the float end at maximum flow."""
        least = _NOTHING * (1 + sum(sum(pipes.values()) for pipes in self._left))
        while _SIDE_INT8 in (steps := self._steps(least)):
            untried = [[*pipes] for pipes in self._left]
            while self._push(steps, untried, least):
                pass
        return frozenset(steps)

    def _steps(self, least: float) -> dict[int, int]:
        """Return the places that can reach the float end -> the fewest pipes on the way."""
        steps, waiting = {_SIDE_FLOAT: 0}, deque([_SIDE_FLOAT])
        while waiting:
            end = waiting.popleft()
            for start in self._left[end]:
                if start not in steps and self._left[start][end] > least:
                    steps[start] = steps[end] + 1
                    waiting.append(start)
        return steps

    def _push(self, steps: Mapping[int, int], untried: list[list[int]], least: float) -> bool:
        """Send as much as fits along one path of fewest pipes; return whether one was left."""
        path = [_SIDE_INT8]
        while (place := path[-1]) != _SIDE_FLOAT:
            if not untried[place]:
                path.pop()
                if not path:
                    return False
                untried[path[-1]].pop()
                continue
            end = untried[place][-1]
            if self._left[place][end] > least and steps.get(end) == steps[place] - 1:
                path.append(end)
            else:
                untried[place].pop()
        size = min(self._left[start][end] for start, end in pairwise(path))
        for start, end in pairwise(path):
            self._left[start][end] -= size
            self._left[end][start] += size
        return True


_GATE_STEPS = 4  # x -> Add -> Clip -> Div -> Mul is the longest gate that exporters write


@dataclass(frozen=True, slots=True)
class Units:
    """The int8 nodes of a model, in groups that change sides together."""

    # unit, named after its first node -> its nodes, in the model's order
    members: Mapping[str, tuple[str, ...]]
    # (unit that makes a tensor, unit that reads it, the tensor), each once
    edges: tuple[tuple[str, str, str], ...]
    inlets: tuple[tuple[str, str], ...]  # (unit, tensor that a float node makes for it)
    outlets: tuple[tuple[str, str], ...]  # (unit, its tensor that a float node reads)
    layers: tuple[str, ...]  # units with weights, in the model's order

    def nodes(self, units: Iterable[str]) -> tuple[str, ...]:
        """Return all nodes of some units."""
        return tuple(node for unit in units for node in self.members[unit])

    def shared_tensors(self, units: Iterable[str]) -> tuple[str, ...]:
        """Return the tensors that some units make for others or exchange with float nodes."""
        own = set(units)
        made = [tensor for maker, _, tensor in self.edges if maker in own]
        ends = [tensor for unit, tensor in (*self.inlets, *self.outlets) if unit in own]
        return tuple(dict.fromkeys((*made, *ends)))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor between units, or between units and float."""
        names = [tensor for *_, tensor in (*self.edges, *self.inlets, *self.outlets)]
        return tuple(dict.fromkeys(names))


def group_units(model: onnx.ModelProto, decisions: Iterable[Decision]) -> Units:
    """Group the nodes that run in int8 by default into units."""
    graph = Graph(model)
    int8 = {decision.node for decision in decisions if decision.quantized}
    heads = _Sets(node.name for node in graph.nodes if node.name in int8)
    for node in graph.nodes:
        if node.name in int8:
            heads.join(node.name, _tail(graph, node, int8))
            heads.join(node.name, _gate_steps(graph, node, int8))
    for gate in find_gates(graph):
        if int8.issuperset(gate.nodes):
            heads.join(gate.name, (*gate.nodes, *_gated_layer(graph, gate, int8)))
    members: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.name in int8:
            members.setdefault(heads.of(node.name), []).append(node.name)
    edges, inlets, outlets = _borders(graph, int8, heads)
    weighted = {n.name for n in graph.nodes if n.name in int8 and n.op_type in WEIGHTED}
    return Units(
        members={unit: tuple(nodes) for unit, nodes in members.items()},
        edges=edges,
        inlets=inlets,
        outlets=outlets,
        layers=tuple(unit for unit, nodes in members.items() if weighted & set(nodes)),
    )


def find_add_units(model: onnx.ModelProto, units: Units) -> frozenset[str]:
    """Return the units with an Add and without weights."""
    adds = {node.name for node in model.graph.node if node.op_type == "Add"}
    glue = units.members.keys() - set(units.layers)
    return frozenset(unit for unit in glue if adds & set(units.members[unit]))


class _Sets:
    """Disjoint sets of names (union-find), each named after its first member."""

    def __init__(self, names: Iterable[str]) -> None:
        self._order = {name: place for place, name in enumerate(names)}
        self._head = {name: name for name in self._order}

    def of(self, name: str) -> str:
        while self._head[name] != name:
            name = self._head[name]
        return name

    def join(self, name: str, others: Iterable[str]) -> None:
        for other in others:
            first, second = sorted((self.of(name), self.of(other)), key=self._order.__getitem__)
            self._head[second] = first


def _tail(graph: Graph, node: onnx.NodeProto, int8: set[str]) -> list[str]:
    """Return the int8 nodes of a node's tail, such as its Relu."""
    found, end, tensor = [], graph.tail(node), str(node.output[0])
    while tensor != end:
        (after,) = graph.readers[tensor]
        if after.name not in int8:
            break
        found.append(after.name)
        tensor = str(after.output[0])
    return found


def _gated_layer(graph: Graph, gate: Gate, int8: set[str]) -> list[str]:
    """Return the layer whose output only the gate reads."""
    maker = graph.producer.get(gate.source)
    if maker is None or maker.name not in int8 or maker.op_type not in WEIGHTED:
        return []
    alone = gate.source not in graph.outputs and gate.source not in graph.captured
    readers = {node.name for node in graph.readers[gate.source]}
    return [maker.name] if alone and readers <= set(gate.nodes) else []


def _gate_steps(graph: Graph, node: onnx.NodeProto, int8: set[str]) -> list[str]:
    """Return the nodes between x and the gate of Mul(x, gate(x))."""
    if node.op_type != "Mul" or len(node.input) != 2:
        return []
    for gated, gate in (node.input, reversed(node.input)):
        steps: list[str] = []
        tensor = gate
        while tensor != gated and len(steps) < _GATE_STEPS:
            before = graph.producer.get(tensor)
            if before is None or before.name not in int8 or before.op_type in WEIGHTED:
                break
            steps.append(before.name)
            tensor = str(before.input[0])
        if steps and tensor == gated:
            return steps
    return []


def _borders(
    graph: Graph, int8: set[str], heads: _Sets
) -> tuple[
    tuple[tuple[str, str, str], ...], tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]
]:
    edges: dict[tuple[str, str, str], None] = {}
    inlets: dict[tuple[str, str], None] = {}
    outlets: dict[tuple[str, str], None] = {}
    for node in graph.nodes:
        for tensor in graph.data_inputs(node):
            maker = graph.producer.get(tensor)
            made = maker.name if maker is not None and maker.name in int8 else None
            if made is not None and node.name in int8:
                if heads.of(made) != heads.of(node.name):
                    edges[heads.of(made), heads.of(node.name), tensor] = None
            elif node.name in int8:
                inlets[heads.of(node.name), tensor] = None
            elif made is not None:
                outlets[heads.of(made), tensor] = None
    for tensor in graph.outputs:
        maker = graph.producer.get(tensor)
        if maker is not None and maker.name in int8:
            outlets[heads.of(maker.name), tensor] = None
    return tuple(edges), tuple(inlets), tuple(outlets)


MARGIN = 1.2  # int8 counts as slower from a fifth on; less is measurement noise
_LEAST_SHARE = 0.001  # of the model's time, that a unit must gain to be float by time
_LEAST_US, _MOST_US = 0.1e-3, 1.0e-3  # of converting one value, by all threads together
_CONVERSION_KERNELS = 2  # per border, however small: a Q or DQ, and a change of layout
_RUNS, _SECONDS = 4, 0.1  # least of a profiling round
_ROUNDS = 2
_INT8 = 0.7  # price of an int8 product, in float products, where it is not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """Time of ONNX Runtime's int8 kernels on a kind of CPU, as a share of its float kernels'."""

    dense: float  # Conv with a kernel of several pixels
    pointwise: float  # Conv of 1x1
    depthwise: float
    matrix: float  # Gemm, MatMul
    other: float = 0.6
    depthwise_product: float = 2.2  # time of a float product of a depthwise Conv, in dense ones
    conversion: float = 20.0  # time of a value's conversion between int8 and float, in dense ones


# `vnni` and `avx2` were measured on an EPYC 9005 with ONNX Runtime 1.23 (one thread, 32 to 256
# channels, 14 to 112 pixels), `avx2` with the wider instructions hidden from ONNX Runtime. `arm` is
# the bound of arithmetic, 16 products a SDOT and 4 a FMLA, with the losses of `vnni`.
CPUS: Mapping[str, CpuKernels] = {
    "vnni": CpuKernels(dense=0.28, pointwise=0.36, depthwise=1.5, matrix=0.5),
    "avx2": CpuKernels(dense=0.53, pointwise=0.6, depthwise=1.5, matrix=0.7),
    "arm": CpuKernels(dense=0.3, pointwise=0.4, depthwise=1.5, matrix=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one model on one target: microseconds if measured, else products."""

    units: Mapping[str, tuple[float, float]]  # unit -> (price in int8, price in float)
    conversions: Mapping[str, float]  # tensor -> price of converting it between int8 and float
    fixed_price: float
    measured: bool  # whether prices are times on this machine
    # time of all kernels with all units in int8; less than the sum of the prices where many small
    # units and borders lie side by side
    int8_total: float = math.inf

    def total(self, units: Units, in_float: frozenset[str]) -> float:
        """Return the price of the model with these units in float."""
        own = sum(pair[unit in in_float] for unit, pair in self.units.items())
        crossing = {t for a, b, t in units.edges if (a in in_float) != (b in in_float)}
        crossing |= {t for unit, t in (*units.inlets, *units.outlets) if unit not in in_float}
        return self.fixed_price + own + sum(self.conversions[tensor] for tensor in crossing)

    def measured_share(self, units: Units) -> float:
        """Return measured time over summed prices with all units in int8, at most 1."""
        priced = self.total(units, frozenset())
        return min(1.0, self.int8_total / priced) if priced else 1.0


def cheapest_float_units(
    prices: Prices,
    units: Units,
    noise: Mapping[str, float],
    *,
    weight: float,
    pinned: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the units to run in float for the least price plus weighted noise.

    `noise`: unit -> its noise in int8, 0 if missing.
    """
    by_unit = {
        unit: (int8 + weight * noise.get(unit, 0.0), float32)
        for unit, (int8, float32) in prices.units.items()
    }
    for unit, tensor in (*units.inlets, *units.outlets):
        int8, float32 = by_unit[unit]
        by_unit[unit] = (int8 + prices.conversions[tensor], float32)
    by_unit |= {unit: (math.inf, 0.0) for unit in pinned}
    most = 1 + sum(price for pair in by_unit.values() for price in pair if math.isfinite(price))
    by_unit = {unit: (min(int8, most), float32) for unit, (int8, float32) in by_unit.items()}
    between = [(a, b, prices.conversions[tensor]) for a, b, tensor in units.edges]
    glue = [(b, a) for a, b, _ in units.edges if b not in units.layers]
    return cheapest_split(by_unit, between, glue)


def count_prices(
    model: onnx.ModelProto, units: Units, sample: Mapping[str, Array], cpu: CpuKernels | None = None
) -> Prices:
    """Return prices in products; one inference gives the size of each tensor.

    `cpu`: the CPU that is to run it, one of `CPUS`; None where it is not known.
    """
    graph = Graph(model)
    nodes = {node.name: node for node in graph.nodes}
    outputs = {
        name: str(nodes[name].output[0]) for nodes_ in units.members.values() for name in nodes_
    }
    sizes = _sizes(model, [*outputs.values(), *units.tensors], sample)

    def price(name: str) -> tuple[float, float]:
        """Return the price of a node in int8 and in float."""
        count = sizes[outputs[name]] * _products(graph, nodes[name])
        ratio, float32 = (_INT8, 1.0) if cpu is None else _kernel_prices(graph, nodes[name], cpu)
        return ratio * float32 * count, float32 * count

    pairs = {unit: [price(name) for name in members] for unit, members in units.members.items()}
    turning = 0.0 if cpu is None else cpu.conversion
    return Prices(
        units={
            unit: (sum(q for q, _ in own), sum(f for _, f in own)) for unit, own in pairs.items()
        },
        conversions={tensor: turning * sizes[tensor] for tensor in units.tensors},
        fixed_price=0.0,
        measured=False,
    )


def _kernel_prices(graph: Graph, node: onnx.NodeProto, cpu: CpuKernels) -> tuple[float, float]:
    """Return (int8 over float, price of a float product) of a node on a CPU."""
    weight = graph.initializers.get(node.input[1]) if node.op_type in WEIGHTED else None
    if weight is None:
        return cpu.other, 1.0
    if node.op_type not in ("Conv", "ConvTranspose"):
        return cpu.matrix, 1.0
    if attributes(node).get("group", 1) == weight.dims[0] > 1 == weight.dims[1]:
        return cpu.depthwise, cpu.depthwise_product
    return (cpu.pointwise if math.prod(weight.dims[2:]) == 1 else cpu.dense), 1.0


def measure_prices(
    model: onnx.ModelProto,
    float32: onnx.ModelProto,
    int8: onnx.ModelProto,
    units: Units,
    feeds: Sequence[Mapping[str, Array]],
) -> Prices:
    """Return prices in microseconds, from profiles of the float and of the int8 model."""
    floats, quantized = _profile_in_turns((float32, int8), feeds, model)
    sizes = _sizes(model, units.tensors, feeds[0])
    rate = _conversion_us(quantized, int8, sizes)
    border = _CONVERSION_KERNELS * min((t for t in quantized.nodes.values() if t > 0), default=0.0)
    inside = _sum(floats.nodes, [n for members in units.members.values() for n in members])
    layout = 1 + floats.unattributed / inside if inside else 1.0  # share of float's layout changes
    prices = {
        unit: _with_margin(
            _sum(quantized.nodes, members),
            layout * _sum(floats.nodes, members),
            _LEAST_SHARE * floats.total,
        )
        for unit, members in units.members.items()
    }
    return Prices(
        units=prices,
        conversions={tensor: border + rate * size for tensor, size in sizes.items()},
        fixed_price=max(floats.total - floats.unattributed - inside, 0.0),
        measured=True,
        int8_total=quantized.total,
    )


def _profile_in_turns(
    written: Sequence[onnx.ModelProto],
    feeds: Sequence[Mapping[str, Array]],
    float_model: onnx.ModelProto,
) -> list[KernelTimes]:
    """Return kernel times of models profiled in turns: a disturbance hits one round of each."""
    rounds = [
        [
            kernel_times(m, feeds, float_model=float_model, runs=_RUNS, seconds=_SECONDS)
            for m in written
        ]
        for _ in range(_ROUNDS)
    ]
    return [reduce(least_kernel_times, times) for times in zip(*rounds, strict=True)]


def _with_margin(int8: float, float32: float, least: float) -> tuple[float, float]:
    """Treat int8 as no slower than float where the difference is within the margin."""
    slower = int8 > max(MARGIN * float32, float32 + least)
    return (int8 if slower else min(int8, float32)), float32


def _conversion_us(
    quantized: KernelTimes, int8: onnx.ModelProto, sizes: Mapping[str, int]
) -> float:
    """Return the microseconds to convert one value, changes of layout included."""
    time, values = quantized.unattributed, 0
    for node in int8.graph.node:
        if node.op_type in PAIRS and quantized.nodes[node.name] > 0:
            time += quantized.nodes[node.name]
            values += sizes.get(node.name.rpartition("/")[0], 0)
    return min(max(time / values, _LEAST_US), _MOST_US) if values else _LEAST_US


def _sum(times: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(times.get(name, 0.0) for name in names)


def _sizes(
    model: onnx.ModelProto, tensors: Iterable[str], sample: Mapping[str, Array]
) -> dict[str, int]:
    """Return the number of values of each tensor for one sample."""
    wanted = list(dict.fromkeys(tensors))
    fed = {value.name for value in model.graph.input}
    session = OrtSession.open(
        copy_with_outputs(model, [t for t in wanted if t not in fed]), threads=1, spin=False
    )
    values = {**sample, **session.run(sample)}
    return {tensor: int(values[tensor].size) for tensor in wanted}


def _products(graph: Graph, node: onnx.NodeProto) -> float:
    """Return the products per output value of a node; 1 without weights."""
    weight = graph.initializers.get(node.input[1]) if node.op_type in WEIGHTED else None
    if weight is None:
        return 1.0
    dims = list(weight.dims)
    if node.op_type == "Conv":
        return float(math.prod(dims[1:]))
    if node.op_type == "ConvTranspose":
        return float(dims[0])
    columns = dims[0] if attributes(node).get("transB", 0) else dims[-1]
    return float(math.prod(dims) / max(columns, 1))
