"""Weights that several nodes read: each layer of them gets one of its own.

::

    left -> Conv(w) ->                left -> Conv(w) ->
    right -> Conv(w) ->               right -> Conv(right/conv.weight) ->

AMCT writes integers over a weight, by the scales of the one layer that reads it, and refuses the
others. Heads of detectors that go over maps of several sizes, two pictures through one network and
cells that are written out step by step would stay in float, whole models of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.graph.edit import copied, unused
from deploy.graph.index import Graph, users

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.layers import Layer, LayerGraph

_MOST = 1 << 29  # bytes of copies in float32: a file holds 2 GiB


def with_own_weights(model: onnx.ModelProto, nodes: Collection[str]) -> dict[str, str]:
    """Give each of these nodes a weight that it alone reads, in place.

    All that share a weight get one, or none where the copies would be too large: a cell that is
    written out for hundreds of steps.

    Args:
        model: every node has a name of its own.
        nodes: names of those whose second input is a weight that others read too.

    Returns:
        Name of a new weight -> the one that it is a copy of.
    """
    index, readers = Graph(model), users(model.graph)
    sharing = [node for node in model.graph.node if node.name in nodes]
    few = _affordable(Counter(node.input[1] for node in sharing), index.constants)
    taken = {*readers, *index.constants, *index.producer}
    made: dict[str, str] = {}
    for node in sharing:
        shared = node.input[1]
        if shared not in few or readers[shared] < 2:
            continue
        tensor = copied(index.constants[shared])
        tensor.name = unused(f"{node.name}.weight", taken)
        model.graph.initializer.append(tensor)
        taken.add(tensor.name)
        readers[shared] -= 1
        node.input[1], made[tensor.name] = tensor.name, shared
    return made


def _affordable(wanted: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]) -> set[str]:
    """Weights of which there may be so many, those first that add least."""
    bytes_of = {name: 4 * math.prod(constants[name].dims) * wanted[name] for name in wanted}
    found, total = set(), 0
    for name in sorted(bytes_of, key=bytes_of.__getitem__):
        total += bytes_of[name]
        if total <= _MOST:
            found.add(name)
    return found


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
