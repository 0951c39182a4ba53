"""Normalize the BatchNorms of a graph to one form, so that passes see one kind of module.

==============================  ==============================================================
nn.BatchNorm, SyncBatchNorm     modules already
F.batch_norm(x, mean, ...)      `ChannelNorm`, also where a layer of timm calls it (BatchNormAct2d)
FrozenBatchNorm2d               stays one module (`is_frozen_norm`); it does not train
==============================  ==============================================================

A norm folds into a layer also across dropout in eval mode and, into a Linear, across views that
keep its outputs in the last dimension (`path_to_layer`)::

    Linear [N, L, C] -> flatten(0, 1) -> BatchNorm1d [N*L, C]
"""

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from deploy.fx.operations import (
    arguments_by_name,
    called_module,
    has_hooks,
    input_of,
    is_call,
    is_plain,
)

_VIEWS_LIKE = (torch.ops.aten.reshape_as.default, torch.ops.aten.view_as.default)
_VIEWS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, *_VIEWS_LIKE)
_VIEW_METHODS = (
    "flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as",
)  # fmt: skip
# their second argument gives only the size
_LIKE_METHODS = ("reshape_as", "view_as", "expand_as")
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def path_to_layer(graph_module: fx.GraphModule, norm: fx.Node) -> list[Any]:
    """Return what a norm reads, upstream through views and dropout to the first other node.

    The norm itself is not on the path. The last value is the call of a layer if the norm follows
    one, or it may be no node at all.
    """
    path: list[Any] = [input_of(norm)]
    while isinstance(path[-1], fx.Node) and _is_transparent(graph_module, path[-1]):
        path.append(input_of(path[-1]))
    return path


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the users of a tensor that read its values, not only its size."""
    return [user for user in node.users if not _reads_size(user, node)]


def _reads_size(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a user of a node reads only the size of its tensor."""
    if is_call(user) and user.target in (*_LIKE_METHODS, *_VIEWS_LIKE):
        return user.args[0] is not node
    if user.op == "call_method":
        return user.target in ("size", "dim")
    return user.target is getattr and user.args[1:] == ("shape",)


def has_view(graph_module: fx.GraphModule, path: list[Any]) -> bool:
    """Return whether there is a view on a path, its last node left out."""
    return any(_is_view(graph_module, node) for node in path[:-1])


def keeps_channels(layer: Any, path: list[Any], channels: int) -> bool:
    """Return whether a view of a layer's output is [M, C], with C the outputs of a Linear.

    Args:
        layer: the layer.
        path: `path_to_layer` of the norm.
        channels: C of the norm.
    """
    is_linear_of_channels = isinstance(layer, nn.Linear) and layer.out_features == channels
    return is_linear_of_channels and path[0].meta.get("rank") == 2


def _is_transparent(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether folding may pass a node: a view, or dropout in eval mode."""
    if is_plain(called_module(graph_module, node), _IDENTITIES):
        return True
    if node.target is functional.dropout:
        options = arguments_by_name(node, ("input", "p", "training"))
        return options.get("training", True) is False
    return _is_view(graph_module, node)


def _is_view(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _VIEWS
    if node.op == "call_method":
        return node.target in _VIEW_METHODS
    return is_plain(called_module(graph_module, node), (nn.Flatten,))


TORCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")

# function of a norm -> its arguments, in order
_OPTIONS = ("training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: ("input", "weight", "bias", *STATISTICS, *_OPTIONS),
    functional.batch_norm: ("input", *STATISTICS, "weight", "bias", *_OPTIONS),
}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


class ChannelNorm(_BatchNorm):
    """BatchNorm over dimension 1 of a tensor of any rank."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any rank will do."""


def is_frozen_norm(module: nn.Module | None) -> bool:
    """Return whether a module is a FrozenBatchNorm2d, of torchvision, detectron2 or DETR.

    Hugging Face puts the model's name in front, as in RTDetrFrozenBatchNorm2d. The module has the
    statistics, weight and bias of a BatchNorm as buffers, and always uses them.
    """
    return type(module).__name__.endswith("FrozenBatchNorm2d")


def is_norm(module: nn.Module | None) -> bool:
    """Return whether `module` is a BatchNorm and does nothing else.

    A subclass of BatchNorm that overrides `forward`, or one with forward hooks, is not.
    """
    if isinstance(module, ChannelNorm) or is_frozen_norm(module):
        return not has_hooks(module)
    return is_plain(module, TORCH_NORMS)


def has_factors(norm: nn.Module | None) -> bool:
    """Return whether `norm_factors` exist: the norm keeps running statistics."""
    return getattr(norm, "running_var", None) is not None


def norm_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (factor, shift), [C] each, of a norm in eval mode: y = x * factor + shift."""
    factor, shift = trained_factors(norm)
    return factor.detach(), shift.detach()


def trained_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (factor, shift), [C] each, of a norm in eval mode: y = x * factor + shift.

    Gradients go on to its weight and bias.
    """
    mean = norm.running_mean
    gamma = norm.weight if norm.weight is not None else torch.ones_like(mean)
    beta = norm.bias if norm.bias is not None else torch.zeros_like(mean)
    eps = getattr(norm, "eps", 1e-5)  # the frozen norm of DETR has this number in its forward
    factor = gamma / torch.sqrt(norm.running_var + eps)
    return factor, beta - mean * factor


def batch_norm_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a call of F.batch_norm by name; None for any other node."""
    if node.op != "call_function" or node.target not in _ARGUMENTS:
        return None
    return _DEFAULTS | arguments_by_name(node, _ARGUMENTS[node.target])
