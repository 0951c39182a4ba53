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
from deploy.graph.reach import Reach

Sources = Sequence[tuple[fx.Node, Reach | None]]


class Watch(nn.Module):
    """A tensor that is looked at, and nobody reads from here.

    Attributes:
        name: the tensor's, for messages.
        reach: how far its readers tell values apart; None for no end.
    """

    def __init__(self, name: str, reach: Reach | None):
        super().__init__()
        self.name = name
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X."""
        return x


def watch(graph_module: fx.GraphModule, quant: FakeQuant, sources: Sources) -> None:
    """Let a quantizer have the range of tensors other than its own."""
    quant.watches = []
    for number, (node, reach) in enumerate(sources):
        one = Watch(node.name, reach)
        name = f"watch_{quant.name}_{number}"
        graph_module.add_submodule(name, one)
        place = node
        if node.op == "placeholder":  # the graph's inputs come first, all of them
            place = [other for other in graph_module.graph.nodes if other.op == "placeholder"][-1]
        with graph_module.graph.inserting_after(place):
            graph_module.graph.call_module(name, (node,))
        quant.watches.append(one)


def loosest(reaches: Iterable[Reach | None]) -> Reach | None:
    """The reach that holds all of several; None where one tensor has none."""
    known = list(reaches)
    held = [one for one in known if one is not None]
    if not held or len(held) < len(known):
        return None
    floors, ceilings, followed = zip(*held, strict=True)
    return Reach(min(floors), max(ceilings), max(followed))


def unwatch(graph_module: fx.GraphModule) -> None:
    """Take out what was only watched."""
    for node in list(graph_module.graph.nodes):
        if isinstance(called_module(graph_module, node), Watch):
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
