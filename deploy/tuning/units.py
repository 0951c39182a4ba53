"""What can change sides alone: an int8 node with what is computed inside it or beside it.

::

    Conv -> Relu                          one unit: the Relu is the Conv's tail
    x -> Sigmoid -> Mul(x, .)             one unit: a gate is fused in float, and not half in int8
    Conv -> Add -> Clip -> Mul(x, .)      one unit: in float a Hard-Sigmoid is the Conv's tail
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.graph.gates import Gate, gates
from deploy.graph.index import Graph
from deploy.graph.placement import WEIGHTED

if TYPE_CHECKING:
    import onnx

    from deploy.graph.plan import Decision

_GATE_STEPS = 4  # x -> Add -> Clip -> Div -> Mul is the longest that exporters write


@dataclass(frozen=True, slots=True)
class Units:
    """The int8 nodes of a model, in groups that change sides together.

    Attributes:
        members: unit, named after its first node -> its nodes, in the model's order.
        edges: (unit that makes a tensor, unit that reads it, the tensor), each once.
        inlets: (unit, tensor that float makes for it).
        outlets: (unit, tensor of it that float reads).
        layers: units that hold weights, in the model's order.
    """

    members: Mapping[str, tuple[str, ...]]
    edges: tuple[tuple[str, str, str], ...]
    inlets: tuple[tuple[str, str], ...]
    outlets: tuple[tuple[str, str], ...]
    layers: tuple[str, ...]

    def nodes(self, units: Iterable[str]) -> tuple[str, ...]:
        """All nodes of some units."""
        return tuple(node for unit in units for node in self.members[unit])

    def around(self, units: Iterable[str]) -> tuple[str, ...]:
        """Tensors that some units make for others, and what they get from float."""
        own = set(units)
        made = [tensor for maker, _, tensor in self.edges if maker in own]
        ends = [tensor for unit, tensor in (*self.inlets, *self.outlets) if unit in own]
        return tuple(dict.fromkeys((*made, *ends)))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor between units, or between them and float."""
        names = [tensor for *_, tensor in (*self.edges, *self.inlets, *self.outlets)]
        return tuple(dict.fromkeys(names))


def units_of(model: onnx.ModelProto, decisions: Iterable[Decision]) -> Units:
    """Group the nodes that run in int8 by default."""
    graph = Graph(model)
    int8 = {decision.node for decision in decisions if decision.quantized}
    heads = _Sets(node.name for node in graph.nodes if node.name in int8)
    for node in graph.nodes:
        if node.name in int8:
            heads.join(node.name, _tail_of(graph, node, int8))
            heads.join(node.name, _gate_of(graph, node, int8))
    for gate in gates(graph):
        if int8.issuperset(gate.nodes):
            heads.join(gate.name, (*gate.nodes, *_made_for(graph, gate, int8)))
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


def sums_of(model: onnx.ModelProto, units: Units) -> frozenset[str]:
    """Units of Adds that hold no weights."""
    adds = {node.name for node in model.graph.node if node.op_type == "Add"}
    glue = units.members.keys() - set(units.layers)
    return frozenset(unit for unit in glue if adds & set(units.members[unit]))


class _Sets:
    """Disjoint sets of names, each called by its first name."""

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


def _tail_of(graph: Graph, node: onnx.NodeProto, int8: set[str]) -> list[str]:
    """Nodes between a node's own output and the end of its tail."""
    found, end, tensor = [], graph.tail(node), str(node.output[0])
    while tensor != end:
        (after,) = graph.readers[tensor]
        if after.name not in int8:
            break
        found.append(after.name)
        tensor = str(after.output[0])
    return found


def _made_for(graph: Graph, gate: Gate, int8: set[str]) -> list[str]:
    """The layer that makes a gate's source for it alone."""
    maker = graph.producer.get(gate.source)
    if maker is None or maker.name not in int8 or maker.op_type not in WEIGHTED:
        return []
    alone = gate.source not in graph.outputs and gate.source not in graph.captured
    readers = {node.name for node in graph.readers[gate.source]}
    return [maker.name] if alone and readers <= set(gate.nodes) else []


def _gate_of(graph: Graph, node: onnx.NodeProto, int8: set[str]) -> list[str]:
    """Nodes that make the gate of a Mul of a tensor with a gate made of that same tensor."""
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
