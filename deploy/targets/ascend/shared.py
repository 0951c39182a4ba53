"""Weights that several nodes read: each layer of them gets one of its own.

::

    left -> Conv(w) ->                left -> Conv(w) ->
    right -> Conv(w) ->               right -> Conv(right/conv.weight) ->

AMCT writes integers over a weight, by the scales of the one layer that reads it, and refuses the
others. Heads of detectors that go over maps of several sizes, two pictures through one network and
cells that are written out step by step would stay in float, whole models of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.graph.edit import copied, unused
from deploy.graph.index import Graph, users

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.layers import Layer, LayerGraph


def with_own_weights(model: onnx.ModelProto, nodes: Collection[str]) -> dict[str, str]:
    """Give each of these nodes a weight that it alone reads, in place.

    Args:
        model: every node has a name of its own.
        nodes: names of those whose second input is a weight that others read too.

    Returns:
        Name of a new weight -> the one that it is a copy of.
    """
    index, readers = Graph(model), users(model.graph)
    taken = {*readers, *index.constants, *index.producer}
    made: dict[str, str] = {}
    for node in model.graph.node:
        if node.name not in nodes or readers[node.input[1]] < 2:
            continue
        shared, own = node.input[1], unused(f"{node.name}.weight", taken)
        tensor = copied(index.constants[shared])
        tensor.name = own
        model.graph.initializer.append(tensor)
        taken.add(own)
        readers[shared] -= 1
        node.input[1], made[own] = own, shared
    return made


def own_of(layers: Iterable[Layer], graph: LayerGraph) -> list[str]:
    """Names of those of the layers that share their weight in the model as it was given."""
    shared = {*graph.shared, *graph.shared.values()}
    return [layer.name for layer in layers if layer.weight in shared]


def as_given(graph: LayerGraph) -> dict[str, Layer]:
    """The layers, each with the weight that it reads in the model as it was given."""
    own = graph.shared
    return {
        name: replace(layer, weight=own.get(layer.weight, layer.weight))
        for name, layer in graph.layers.items()
    }
