"""Nodes that must compute in float32 where TensorRT chooses types itself.

With `--fp16` TensorRT runs a layer in float16 wherever that is faster, whatever its values are:
one that grows past 65504 is infinity there, and a constant of 1e-9 that keeps a logarithm finite
is 0. What `deploy.targets.tensorrt.rest` keeps out of the typed model for that, and other operators
for the same reason, are bound to float32 with all that they give.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from deploy.graph.index import Graph
from deploy.targets.tensorrt.rest import too_wide

if TYPE_CHECKING:
    import onnx


def wide_layers(
    model: onnx.ModelProto, largest: Mapping[str, float], *, rest: str, but: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(node -> the tensor that it gives, node -> why it must compute in float32).

    Args:
        model: cleaned float model.
        largest: tensor -> largest |x| that was seen.
        rest: type of what is not int8; only float16 holds too little.
        but: nodes that run in int8.
    """
    graph = Graph(model)
    why: dict[str, str] = {}
    for node in graph.nodes:
        said = too_wide(graph, node, rest, largest)
        for each in _with_readers(graph, node, said) if said else ():
            why.setdefault(each.name, said)
    bound = {
        node.name: str(node.output[0])
        for node in graph.nodes
        if node.name in why and node.name not in but and _binds(graph, node)
    }
    return bound, {name: why[name] for name in bound}


def _with_readers(graph: Graph, node: onnx.NodeProto, said: str) -> Iterator[onnx.NodeProto]:
    """The node; where its constant is 0 in float16 also those that need what it keeps above 0."""
    yield node
    if "is 0 in float16" in said:
        yield from graph.readers.get(node.output[0], ())


def _binds(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether it is a layer that gives one float tensor."""
    return node.op_type != "Constant" and len(node.output) == 1 and graph.is_float(node.output[0])
