"""How far a tensor's readers can tell its values apart, and where larger ones than seen will come.

To the bounds of `deploy.graph.bounds` this adds the logits of scores. What a detector, a tagger
or a mask says of most places is "nothing", and the few values that say "here" are what it is for:
of 51 photos none held an object that a YOLOv8n was more than 0.38 sure of, so its range ended at
0.5, and every score of 0.9 that came later was read as 0.5. Of such a tensor the rare large values
are followed on, as far as a Sigmoid tells apart (`calibrators.tails`)::

    Conv --> t --> Reshape --> Concat --> Split --> Sigmoid --> score, output

Not so where the Sigmoid is a gate, or any layer with weights reads on from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx

from deploy.graph.bounds import MOVED, SIGMOID, bounds
from deploy.graph.index import Graph
from deploy.graph.placement import WEIGHTED


class Reach(NamedTuple):
    """Of one tensor, in real units.

    Attributes:
        floor: no reader tells values below it apart.
        ceiling: nor above it.
        followed: how far rare large values are followed beyond those seen; -inf for not at all.
    """

    floor: float
    ceiling: float
    followed: float = -math.inf


EVERYWHERE = Reach(-math.inf, math.inf)


def reaches(model: onnx.ModelProto) -> dict[str, Reach]:
    """Tensor -> its reach; only tensors whose reach is not `EVERYWHERE`.

    Args:
        model: a cleaned model, its nodes in the order in which they run.
    """
    found = {name: Reach(*ends) for name, ends in bounds(model).items()}
    for name in _logits(Graph(model)):
        found[name] = found.get(name, EVERYWHERE)._replace(followed=SIGMOID[1])
    return found


def _logits(graph: Graph) -> set[str]:
    """Tensors that only moves part from the Sigmoid of a score, the Sigmoid's input included."""
    read_on = _before_weights(graph)
    waiting = [
        str(node.input[0])
        for node in graph.nodes
        if node.op_type == "Sigmoid" and node.output[0] not in read_on and _is_score(graph, node)
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _handed_on(graph.producer.get(name))
    return found


def _before_weights(graph: Graph) -> set[str]:
    """Tensors from which a way leads to a layer with weights."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op_type in WEIGHTED or not found.isdisjoint(node.output):
            found.update(node.input)
    return found


def _is_score(graph: Graph, sigmoid: onnx.NodeProto) -> bool:
    """Whether what a Sigmoid makes, moved or not, only scales what other Sigmoids make."""
    names = [str(sigmoid.output[0])]
    for name in names:  # grows while it is walked
        for reader in graph.readers.get(name, []):
            if name in _handed_on(reader):
                names += reader.output
            elif reader.op_type == "Mul" and not all(
                other in graph.constants or other == name or _made_by_sigmoid(graph, other)
                for other in reader.input
            ):
                return False
    return True


def _made_by_sigmoid(graph: Graph, name: str) -> bool:
    node = graph.producer.get(name)
    while node is not None and node.op_type != "Sigmoid" and len(_handed_on(node)) == 1:
        node = graph.producer.get(_handed_on(node)[0])
    return node is not None and node.op_type == "Sigmoid"


def _handed_on(node: onnx.NodeProto | None) -> list[str]:
    """The inputs whose values a node hands on as they are."""
    if node is None:
        return []
    if node.op_type == "Concat":
        return list(map(str, node.input))
    return [str(node.input[0])] if node.op_type in MOVED else []
