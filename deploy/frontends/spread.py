"""Ranges handed on where a node gives the values that it reads, and no others.

::

    x (range) --> MaxPool --> y              y gets it
    x ----------> MaxPool --> y (range)      x gets it, if nothing else reads x

A MaxPool of quantized values is the quantized MaxPool, so that it is all one where the pair stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deploy.graph.flow import CUTS, MOVES, keeps_range

if TYPE_CHECKING:
    from calibrators.scales import Scale
    from deploy.graph.index import Graph

_KEEPING = MOVES | CUTS | {"MaxPool", "Resize", "Cast"}  # a float16 model is cast at its ends


def spread(graph: Graph, scales: Mapping[str, Scale]) -> dict[str, Scale]:
    """The ranges with those of tensors that nodes between only hand on."""
    known = dict(scales)
    moves = [n for n in graph.nodes if n.op_type in _KEEPING and n.input and n.output]
    between = [node for node in moves if keeps_range(graph, node)]
    for node in reversed(between):
        source, made = node.input[0], node.output[0]
        if made in known and source not in known and graph.only_reader(source) is not None:
            known[source] = known[made]
    for node in between:
        if node.input[0] in known:
            known.setdefault(node.output[0], known[node.input[0]])
    return known
