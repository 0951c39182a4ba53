"""Nodes that must compute in float32 where TensorRT chooses types itself.

With `--fp16` TensorRT runs a layer in float16 wherever that is faster, whatever its values are.
What `deploy.targets.tensorrt.float_types` keeps out of the typed model for what they are, and other
operators for the same reason, are bound to float32 with all that they give.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from deploy.graph.half import wide_nodes
from deploy.graph.index import Graph
from deploy.targets.tensorrt.words import FP16

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
    if rest != FP16:
        return {}, {}
    graph = Graph(model)
    why = wide_nodes(graph, largest, but=but)
    nodes = (node for node in graph.nodes if node.name in why and len(node.output) == 1)
    bound = {n.name: str(n.output[0]) for n in nodes if graph.is_float(n.output[0])}
    return bound, {name: why[name] for name in bound}
