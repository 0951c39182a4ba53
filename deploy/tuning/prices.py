"""What every unit costs in int8 and in float, and what it costs to go from one to the other.

Measured, where the target runs on this machine: the kernels of the float and of the int8 model, two
profiles each, in turns. Elsewhere counted: products of a layer, seven tenths of them in int8. Half
is what vendors state for int8 beside fp16, and is the bound of layers that do nothing but multiply;
others wait for memory in either form. What turning costs there is not known and counts nothing, so
that a layer is float only for what it loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from deploy.graph.edit import with_outputs
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import WEIGHTED
from deploy.runtimes.ort import OrtSession
from deploy.tuning.cut import cheapest_split
from deploy.tuning.timing import PAIRS, KernelTimes, kernel_times, quicker
from deploy.tuning.units import Units

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

MARGIN = 1.2  # slower by a fifth or more: less is noise
_LEAST_SHARE = 0.001  # of the model's time: what a unit must win to change sides by time
_LEAST_US, _MOST_US = 0.1e-3, 1.0e-3  # of turning a value, by all threads together
_TURNING = 2  # kernels at a border however little they turn: a Q or DQ, and a change of layout
_RUNS, _SECONDS = 4, 0.1  # a round, at least; kernels of a small model take little of either
_ROUNDS = 2
_INT8 = 0.7  # of a product in float, where nobody can measure it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one model on one target; microseconds where measured, else products.

    Attributes:
        units: unit -> (int8, float).
        turning: tensor -> price of a pair on it.
        outside: what is float anyway.
        measured: whether it is time of this machine.
        plain: all kernels of the model with all in int8; the prices of its units and borders,
            each for itself, add up to more where many small ones lie side by side.
    """

    units: Mapping[str, tuple[float, float]]
    turning: Mapping[str, float]
    outside: float
    measured: bool
    plain: float = math.inf

    def total(self, units: Units, in_float: frozenset[str]) -> float:
        """The whole model with these units in float."""
        own = sum(pair[unit in in_float] for unit, pair in self.units.items())
        crossing = {t for a, b, t in units.edges if (a in in_float) != (b in in_float)}
        crossing |= {t for unit, t in (*units.inlets, *units.outlets) if unit not in in_float}
        return self.outside + own + sum(self.turning[tensor] for tensor in crossing)

    def too_dear(self, units: Units) -> float:
        """What all in int8 took as a whole, of what its prices add up to: 1 or less."""
        priced = self.total(units, frozenset())
        return min(1.0, self.plain / priced) if priced else 1.0


def cheapest(
    prices: Prices,
    units: Units,
    noise: Mapping[str, float],
    *,
    weight: float,
    pinned: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Units to run in float so that price plus weighted noise is least.

    Args:
        prices: of every unit.
        units: how they hang together.
        noise: unit -> noise that it brings in int8; 0 where it is not named.
        weight: price of one unit of noise.
        pinned: units that are float whatever they cost.
    """
    paid = {
        unit: (int8 + weight * noise.get(unit, 0.0), float32)
        for unit, (int8, float32) in prices.units.items()
    }
    for unit, tensor in (*units.inlets, *units.outlets):
        int8, float32 = paid[unit]
        paid[unit] = (int8 + prices.turning[tensor], float32)
    paid |= {unit: (math.inf, 0.0) for unit in pinned}
    most = 1 + sum(price for pair in paid.values() for price in pair if math.isfinite(price))
    paid = {unit: (min(int8, most), float32) for unit, (int8, float32) in paid.items()}
    between = [(a, b, prices.turning[tensor]) for a, b, tensor in units.edges]
    glue = [(b, a) for a, b, _ in units.edges if b not in units.layers]
    return cheapest_split(paid, between, glue)


def counted(model: onnx.ModelProto, units: Units, sample: Mapping[str, Array]) -> Prices:
    """Prices in products; one inference tells how many values each tensor holds."""
    graph = Graph(model)
    nodes = {node.name: node for node in graph.nodes}
    made = {
        name: str(nodes[name].output[0]) for nodes_ in units.members.values() for name in nodes_
    }
    sizes = _sizes(model, made.values(), sample)
    products = {
        unit: sum(sizes[made[name]] * _products(graph, nodes[name]) for name in members)
        for unit, members in units.members.items()
    }
    return Prices(
        units={unit: (_INT8 * count, count) for unit, count in products.items()},
        turning=dict.fromkeys(units.tensors, 0.0),
        outside=0.0,
        measured=False,
    )


def measured(
    model: onnx.ModelProto,
    float32: onnx.ModelProto,
    int8: onnx.ModelProto,
    units: Units,
    feeds: Sequence[Mapping[str, Array]],
) -> Prices:
    """Prices in microseconds, from profiles of the model as it is written on either side."""
    floats, ours = _in_turns((float32, int8), feeds, model)
    sizes = _sizes(model, units.tensors, feeds[0])
    rate = _turning(ours, int8, sizes)
    border = _TURNING * min((t for t in ours.nodes.values() if t > 0), default=0.0)
    inside = _sum(floats.nodes, [n for members in units.members.values() for n in members])
    layout = 1 + floats.rest / inside if inside else 1.0  # float kernels have a layout of their own
    prices = {
        unit: _with_margin(
            _sum(ours.nodes, members),
            layout * _sum(floats.nodes, members),
            _LEAST_SHARE * floats.total,
        )
        for unit, members in units.members.items()
    }
    return Prices(
        units=prices,
        turning={tensor: border + rate * size for tensor, size in sizes.items()},
        outside=max(floats.total - floats.rest - inside, 0.0),
        measured=True,
        plain=ours.total,
    )


def _in_turns(
    written: Sequence[onnx.ModelProto],
    feeds: Sequence[Mapping[str, Array]],
    made_from: onnx.ModelProto,
) -> list[KernelTimes]:
    """Kernel times of some models: what disturbs the machine for a while disturbs one round."""
    rounds = [
        [kernel_times(m, feeds, made_from=made_from, runs=_RUNS, seconds=_SECONDS) for m in written]
        for _ in range(_ROUNDS)
    ]
    return [reduce(quicker, times) for times in zip(*rounds, strict=True)]


def _with_margin(int8: float, float32: float, least: float) -> tuple[float, float]:
    """Int8 that is slower by less than a fifth, or by next to nothing, is as fast as float."""
    slower = int8 > max(MARGIN * float32, float32 + least)
    return (int8 if slower else min(int8, float32)), float32


def _turning(ours: KernelTimes, int8: onnx.ModelProto, sizes: Mapping[str, int]) -> float:
    """Microseconds to turn one value, layout changes on the way included."""
    time, values = ours.rest, 0
    for node in int8.graph.node:
        if node.op_type in PAIRS and ours.nodes[node.name] > 0:
            time += ours.nodes[node.name]
            values += sizes.get(node.name.rpartition("/")[0], 0)
    return min(max(time / values, _LEAST_US), _MOST_US) if values else _LEAST_US


def _sum(times: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(times.get(name, 0.0) for name in names)


def _sizes(
    model: onnx.ModelProto, tensors: Iterable[str], sample: Mapping[str, Array]
) -> dict[str, int]:
    """Values that each tensor holds for one sample."""
    wanted = list(dict.fromkeys(tensors))
    fed = {value.name for value in model.graph.input}
    session = OrtSession.open(
        with_outputs(model, [t for t in wanted if t not in fed]), threads=1, spin=False
    )
    values = {**sample, **session.run(sample)}
    return {tensor: int(values[tensor].size) for tensor in wanted}


def _products(graph: Graph, node: onnx.NodeProto) -> float:
    """Products behind one value of a node's output; 1 for what has no weights."""
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
