"""Whose values give a quantizer its range, where that is not the one tensor that it rounds.

As in a build: what only moves values has the range of what it moves, a pool of TensorRT's that of
its input, and what meets in a Concat there the widest of them all. Such a tensor is watched while a
model is calibrated, whether it is quantized or not::

    relu --.-- quant --> maxpool -- quant --> conv       quant: the range of relu
           '-- Watch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from deploy.fx.fakequant import FakeQuant
from deploy.fx.fuse import called_module
from deploy.graph.saturation import Bounds

Sources = Sequence[tuple[fx.Node, Bounds | None]]


class Watch(nn.Module):
    """A tensor that is looked at, and nobody reads from here.

    Attributes:
        name: the tensor's, for messages.
        bounds: beyond which no reader tells its values apart; None for none.
    """

    def __init__(self, name: str, bounds: Bounds | None):
        super().__init__()
        self.name = name
        self.bounds = bounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X."""
        return x


def watch(graph_module: fx.GraphModule, quant: FakeQuant, sources: Sources) -> None:
    """Let a quantizer have the range of tensors other than its own."""
    quant.watches = []
    for number, (node, bounds) in enumerate(sources):
        one = Watch(node.name, bounds)
        name = f"watch_{quant.name}_{number}"
        graph_module.add_submodule(name, one)
        place = node
        if node.op == "placeholder":  # the graph's inputs come first, all of them
            place = [other for other in graph_module.graph.nodes if other.op == "placeholder"][-1]
        with graph_module.graph.inserting_after(place):
            graph_module.graph.call_module(name, (node,))
        quant.watches.append(one)


def loosest(bounds: Iterable[Bounds | None]) -> Bounds | None:
    """The bounds beyond all of several; None where one tensor has none."""
    known = list(bounds)
    held = [one for one in known if one is not None]
    if not held or len(held) < len(known):
        return None
    return min(low for low, _ in held), max(high for _, high in held)


def unwatch(graph_module: fx.GraphModule) -> None:
    """Take out what was only watched."""
    for node in list(graph_module.graph.nodes):
        if isinstance(called_module(graph_module, node), Watch):
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
