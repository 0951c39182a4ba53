"""Questions and edits on an ONNX graph that each cleaning step needs; subgraphs are included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from deploy.errors import ModelError

if TYPE_CHECKING:
    import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Bodies of an If, Loop or Scan, in the order of the attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of the graph and of every subgraph in it."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Every tensor that a node reads, those that its subgraphs capture included."""
    yield from (name for name in node.input if name)
    for body in subgraphs(node):
        own = {o for inner in body.node for o in inner.output}
        own |= {i.name for i in body.input} | {t.name for t in body.initializer}
        yield from (n for inner in body.node for n in reads(inner) if n not in own)
        yield from (o.name for o in body.output if o.name not in own)


def users(graph: onnx.GraphProto) -> Counter[str]:
    """Tensor name -> how often it is read; being a graph output counts as once."""
    count = Counter(name for node in graph.node for name in reads(node))
    count.update(value.name for value in graph.output)
    return count


def rename_reads(nodes: Iterable[onnx.NodeProto], new_name: Mapping[str, str]) -> None:
    """Let every reader of a key of `new_name`, in subgraphs too, read its value instead."""
    for node in nodes:
        for position, name in enumerate(node.input):
            if name in new_name:
                node.input[position] = new_name[name]
        for body in subgraphs(node):
            rename_reads(body.node, new_name)
            for value in body.output:
                value.name = new_name.get(value.name, value.name)


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let the graph have exactly these nodes, in this order."""
    kept = list(nodes)
    copies = [type(node).FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)


def drop_dead(graph: onnx.GraphProto) -> int:
    """Remove nodes that no output needs, then constants that no node reads; counts the nodes."""
    needed = {value.name for value in graph.output}
    alive = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(reads(node))
            alive.append(node)
    dropped = len(graph.node) - len(alive)
    if dropped:
        replace_nodes(graph, reversed(alive))
    kept = [tensor for tensor in graph.initializer if tensor.name in needed]
    if len(kept) < len(graph.initializer):
        copies = [type(tensor).FromString(tensor.SerializeToString()) for tensor in kept]
        del graph.initializer[:]
        graph.initializer.extend(copies)
    return dropped


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Put producers before readers, changing the order as little as possible; says if it did.

    Raises:
        ModelError: the graph has a cycle.
    """
    made = {name for node in graph.node for name in node.output if name}
    waiting = list(graph.node)
    order: list[onnx.NodeProto] = []
    ready: set[str] = set()
    while waiting:
        later = []
        for node in waiting:
            if all(name in ready or name not in made for name in reads(node)):
                order.append(node)
                ready.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ModelError(
                "a graph must have no cycle, got one through "
                f"{later[0].op_type} '{later[0].name or ', '.join(later[0].output)}'; "
                "export the model again"
            )
        waiting = later
    moved = any(a is not b for a, b in zip(order, graph.node, strict=True))
    if moved:
        replace_nodes(graph, order)
    return moved


def name_nodes(graph: onnx.GraphProto) -> int:
    """Give each node of the main graph a name of its own; counts the names it made.

    A node without a name is called after its type and first output, which do not change when
    other nodes come or go; a name used before gets a number.
    """
    taken: set[str] = set()
    made = 0
    for node in graph.node:
        wanted = node.name or f"{node.op_type}_{next(filter(None, node.output), 'none')}"
        name = unused(wanted, taken)
        made += name != node.name
        node.name = name
        taken.add(name)
    return made


def unused(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or `wanted_1`, `wanted_2`, ..., whichever first is not in `taken`."""
    names = taken if isinstance(taken, set | dict) else set(taken)
    name, number = wanted, 0
    while name in names:
        number += 1
        name = f"{wanted}_{number}"
    return name
