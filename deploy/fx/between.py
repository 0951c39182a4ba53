"""What may stand between a layer and its norm: nothing of it changes what folding gives.

Dropout in eval mode, and a view that keeps each value's channel known::

    Linear [N, L, C] -> flatten(0, 1) -> BatchNorm1d [N*L, C]      channels stay last
    Conv [N, C, 1, 1] -> flatten(1) -> BatchNorm1d [N, C]          nothing but the channels
    BatchNorm2d [N, C, H, W] -> flatten(1) -> Linear of C*H*W      each channel H*W times
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

_LIKE = (torch.ops.aten.reshape_as.default, torch.ops.aten.view_as.default)
_VIEWS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, *_LIKE)
_LIKE_METHODS = ("reshape_as", "view_as", "expand_as")
_VIEW_METHODS = ("flatten", "reshape", "view", "squeeze", "unsqueeze", *_LIKE_METHODS[:2])
_IDLE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def way_up(graph_module: fx.GraphModule, norm: fx.Node) -> list[Any]:
    """The nodes from what a norm reads to the first that is more than a view or dropout."""
    way: list[Any] = [norm.args[0]]
    while isinstance(way[-1], fx.Node) and _passes(graph_module, way[-1]):
        way.append(way[-1].args[0])
    return way


def way_down(graph_module: fx.GraphModule, norm: fx.Node) -> list[fx.Node]:
    """As `way_up`, to what alone reads the norm; empty where several do or none."""
    way, readers = list[fx.Node](), readers_of(norm)
    while len(readers) == 1:
        way += readers
        if not _passes(graph_module, way[-1]):
            return way
        readers = readers_of(way[-1])
    return []


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The users of a tensor that read its values, not its size alone."""
    return [user for user in node.users if not _reads_size(user, node)]


def _reads_size(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_method" and user.target in ("size", "dim"):
        return True
    like = user.target in (_LIKE if user.op == "call_function" else _LIKE_METHODS)
    if like and user.op != "call_module":
        return user.args[0] is not node
    return user.target is getattr and user.args[1:] == ("shape",)


def viewed(graph_module: fx.GraphModule, way: list[Any]) -> bool:
    """Whether the values have other dimensions at the end of a way."""
    return any(_is_view(graph_module, node) for node in way[:-1])


def keeps_channels(layer: Any, way: list[Any], channels: int) -> bool:
    """Whether dimension 1 of a view [M, C] of a layer's output is that of the layer's channels."""
    if way[0].meta.get("rank") != 2:
        return False
    if isinstance(layer, nn.Linear):
        return layer.out_features == channels
    sizes = way[-1].meta.get("sizes")
    return sizes is not None and layer.out_channels == channels == prod(sizes[1:])


def repeats(layer: Any, norm: fx.Node, channels: int) -> int | None:
    """How many values in a row of a Linear's input are of one channel of the norm; None if not."""
    sizes = norm.meta.get("sizes")
    if not isinstance(layer, nn.Linear) or sizes is None or sizes[1] != channels:
        return None
    return layer.in_features // channels if layer.in_features == prod(sizes[1:]) else None


def sizes_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """A batch, taken for 0, and the sizes of an exported value; None where one is not known."""
    rest = value.shape[1:]
    return (0, *rest) if value.dim() and all(isinstance(size, int) for size in rest) else None


def _passes(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        return isinstance(module, (*_IDLE, nn.Flatten))
    if node.target is functional.dropout:
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return training is False
    return _is_view(graph_module, node)


def _is_view(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph_module.get_submodule(str(node.target)), nn.Flatten)
    return node.target in (_VIEWS if node.op == "call_function" else _VIEW_METHODS) and (
        node.op in ("call_function", "call_method")
    )
