"""Two layers in a row, and between them only what lets a positive factor a channel through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.graph.index import Graph
from deploy.tuning.repairs.repair_layers import Layer, layers_of

if TYPE_CHECKING:
    import onnx

_PASSES = frozenset({"Relu", "PRelu", "LeakyRelu", "Identity", "MaxPool", "AveragePool"})
_CONVS = ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class Link:
    """What `first` makes is read by `second` alone, through the operators `between`."""

    first: Layer
    second: Layer
    between: tuple[str, ...]


def links_of(model: onnx.ModelProto) -> tuple[Link, ...]:
    """Every such pair, in the order of the graph; a layer may be in two of them."""
    graph = Graph(model)
    layers = layers_of(model)
    by_name = {layer.name: layer for layer in layers}
    found = (_link(graph, by_name, layer) for layer in layers)
    return tuple(link for link in found if link is not None)


def _link(graph: Graph, layers: dict[str, Layer], first: Layer) -> Link | None:
    path = list(_path(graph, first.output))
    end = path[-1] if path else None
    second = layers.get(end.name) if end is not None else None
    if end is None or second is None or second.input not in end.input[:1]:
        return None
    between = tuple(node.op_type for node in path[:-1])
    convs = first.kind in _CONVS, second.kind in _CONVS
    fits = convs in ((True, True), (False, False)) and first.outputs == second.inputs
    pools = any(op in ("MaxPool", "AveragePool") for op in between)
    owned = first.alone and second.alone and not (pools and not all(convs))
    return Link(first, second, between) if fits and owned else None


def _path(graph: Graph, tensor: str) -> Iterator[onnx.NodeProto]:
    """The nodes behind a tensor, one reader each, up to the first that does not pass factors."""
    while True:
        readers = graph.readers.get(tensor, [])
        shared = tensor in graph.outputs or tensor in graph.captured
        if len(readers) != 1 or shared or readers[0].input[0] != tensor:
            return
        node = readers[0]
        yield node
        if node.op_type not in _PASSES or len(node.output) != 1 or not _constant(graph, node):
            return
        tensor = str(node.output[0])


def _constant(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether all but the first input of a node are constants."""
    return all(name in graph.constants for name in node.input[1:])
