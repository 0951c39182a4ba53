"""Normalize the BatchNorms of a graph to one form, so that passes see one kind of module.

==============================  ==============================================================
nn.BatchNorm, SyncBatchNorm     modules already
F.batch_norm(x, mean, ...)      `ChannelNorm`, also where a layer of timm calls it (BatchNormAct2d)
x * factor + shift              `FrozenNorm`, if both are computed from buffers only, as in
                                torchvision's FrozenBatchNorm2d; it does not train
==============================  ==============================================================

A norm folds into a layer also across dropout in eval mode and across views that keep track of the
channels (`path_to_layer`, `path_to_reader`)::

    Linear [N, L, C] -> flatten(0, 1) -> BatchNorm1d [N*L, C]      channels stay last
    Conv [N, C, 1, 1] -> flatten(1) -> BatchNorm1d [N, C]          nothing but the channels
    BatchNorm2d [N, C, H, W] -> flatten(1) -> Linear of C*H*W      each channel H*W times
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from deploy.fx.operations import (
    SPELLINGS,
    add_module,
    arguments_by_name,
    called_module,
    is_call,
    is_op,
)
from deploy.fx.plain_copy import tensor_of

_VIEWS_LIKE = (torch.ops.aten.reshape_as.default, torch.ops.aten.view_as.default)
_VIEWS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, *_VIEWS_LIKE)
_VIEW_METHODS = (
    "flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as",
)  # fmt: skip
# their second argument gives only the size
_LIKE_METHODS = ("reshape_as", "view_as", "expand_as")
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def path_to_layer(graph_module: fx.GraphModule, norm: fx.Node) -> list[Any]:
    """Return the nodes upstream of a norm, through views and dropout to the first other node."""
    path: list[Any] = [norm.args[0]]
    while isinstance(path[-1], fx.Node) and _is_transparent(graph_module, path[-1]):
        path.append(path[-1].args[0])
    return path


def path_to_reader(graph_module: fx.GraphModule, norm: fx.Node) -> list[fx.Node]:
    """As `path_to_layer`, downstream; empty if a tensor on the path has not exactly one reader."""
    path: list[fx.Node] = []
    readers = readers_of(norm)
    while len(readers) == 1:
        path += readers
        if not _is_transparent(graph_module, path[-1]):
            return path
        readers = readers_of(path[-1])
    return []


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the users of a tensor that read its values, not only its size."""
    return [user for user in node.users if not _reads_size(user, node)]


def _reads_size(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_method":
        if user.target in _LIKE_METHODS:
            return user.args[0] is not node
        return user.target in ("size", "dim")
    if user.op == "call_function" and user.target in _VIEWS_LIKE:
        return user.args[0] is not node
    return user.target is getattr and user.args[1:] == ("shape",)


def has_view(graph_module: fx.GraphModule, path: list[Any]) -> bool:
    """Return whether there is a view on a path, its last node left out."""
    return any(_is_view(graph_module, node) for node in path[:-1])


def keeps_channels(layer: Any, path: list[Any], channels: int) -> bool:
    """Return whether dimension 1 of a view [M, C] of a layer's output is the layer's channels."""
    if path[0].meta.get("rank") != 2:
        return False
    if isinstance(layer, nn.Linear):
        return layer.out_features == channels
    sizes = path[-1].meta.get("sizes")
    return sizes is not None and layer.out_channels == channels == prod(sizes[1:])


def inputs_per_channel_of_view(layer: Any, norm: fx.Node, channels: int) -> int:
    """Return how many consecutive inputs of a Linear belong to one channel of a norm before a view.

    0 if the view does not give the Linear all values of the norm's channels.
    """
    sizes = norm.meta.get("sizes")
    if not isinstance(layer, nn.Linear) or sizes is None or sizes[1] != channels:
        return 0
    if layer.in_features != prod(sizes[1:]):
        return 0
    return layer.in_features // channels


def sizes_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the sizes of an exported value, the batch as 0; None if another size is dynamic."""
    sizes = value.shape[1:]
    if not value.dim() or not all(isinstance(size, int) for size in sizes):
        return None
    return (0, *sizes)


def _is_transparent(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether folding may pass a node: a view, or dropout in eval mode."""
    if isinstance(called_module(graph_module, node), _IDENTITIES):
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
    return isinstance(called_module(graph_module, node), nn.Flatten)


TORCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")

# function of a norm -> its arguments, in order
_OPTIONS = ("training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: ("input", "weight", "bias", *STATISTICS, *_OPTIONS),
    functional.batch_norm: ("input", *STATISTICS, "weight", "bias", *_OPTIONS),
}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}

_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "setitem")

Constants = Mapping[fx.Node, Any]


class ChannelNorm(_BatchNorm):
    """BatchNorm over dimension 1 of a tensor of any rank."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any rank will do."""


class FrozenNorm(nn.Module):
    """Frozen BatchNorm of [N, C, H, W]: x * factor + shift per channel, both constant."""

    factor: torch.Tensor
    shift: torch.Tensor

    def __init__(self, factor: torch.Tensor, shift: torch.Tensor):
        super().__init__()
        self.register_buffer("factor", factor)
        self.register_buffer("shift", shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] -> the same shape."""
        return x * self.factor.reshape(1, -1, 1, 1) + self.shift.reshape(1, -1, 1, 1)


def is_norm(module: nn.Module | None) -> bool:
    """Return whether `module` is a BatchNorm and does nothing else.

    A subclass of BatchNorm that overrides `forward` is not.
    """
    if isinstance(module, ChannelNorm | FrozenNorm):
        return True
    forward = getattr(type(module), "forward", None)
    return any(isinstance(module, kind) and forward is kind.forward for kind in TORCH_NORMS)


def has_factors(norm: nn.Module | None) -> bool:
    """Return whether `norm_factors` exist: the norm is frozen, or keeps running statistics."""
    return isinstance(norm, FrozenNorm) or getattr(norm, "running_var", None) is not None


def norm_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (factor, shift), [C] each, of a norm in eval mode: y = x * factor + shift."""
    if isinstance(norm, FrozenNorm):
        return norm.factor, norm.shift
    factor, shift = trained_factors(norm)
    return factor.detach(), shift.detach()


def trained_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm_factors`, of a BatchNorm whose weight and bias gradients go on to."""
    mean = norm.running_mean
    gamma = norm.weight if norm.weight is not None else torch.ones_like(mean)
    beta = norm.bias if norm.bias is not None else torch.zeros_like(mean)
    factor = gamma / torch.sqrt(norm.running_var + norm.eps)
    return factor, beta - mean * factor


def batch_norm_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a call of F.batch_norm by name; None for any other node."""
    if node.op != "call_function" or node.target not in _ARGUMENTS:
        return None
    return _DEFAULTS | arguments_by_name(node, _ARGUMENTS[node.target])


def create_channel_norm(
    tensors: dict[str, torch.Tensor | None], options: dict[str, Any]
) -> ChannelNorm:
    """Return the module for a call of F.batch_norm with these tensors."""
    mean = tensors["running_mean"]
    weight = tensors["weight"]
    assert mean is not None
    norm = ChannelNorm(mean.numel(), options["eps"], options["momentum"], weight is not None)
    for name, tensor in tensors.items():
        if name in STATISTICS:
            setattr(norm, name, tensor)
        elif tensor is not None:
            norm.register_parameter(name, as_parameter(tensor))
    return norm


def as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Return a tensor as a parameter; one that is a parameter stays the same."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def freeze_affines(graph_module: fx.GraphModule) -> None:
    """Replace each x * factor + shift with per-channel constants by a `FrozenNorm`, in place."""
    constants = _evaluate_constants(graph_module)
    norm_count = 0
    for node in list(graph_module.graph.nodes):
        affine = _find_affine(constants, node)
        if affine is None:
            continue
        source, norm = affine
        name = add_module(graph_module, f"frozen_norm_{norm_count}", norm)
        norm_count += 1
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, (source,))
        node.replace_all_uses_with(call)
    graph_module.graph.eliminate_dead_code()


def _find_affine(constants: Constants, addition: fx.Node) -> tuple[fx.Node, FrozenNorm] | None:
    """Return (x, norm) if an addition computes x * factor + shift, else None."""
    product, shift = _with_constant(constants, addition, "add")
    if product is None or len(product.users) > 1:
        return None
    source, factor = _with_constant(constants, product, "mul")
    if source is None or factor.shape != shift.shape:
        return None
    _, in_place_products = SPELLINGS["mul"]
    if product.target in in_place_products and len(source.users) > 1:
        return None  # multiplied in place, and read elsewhere
    return source, FrozenNorm(factor.flatten().clone(), shift.flatten().clone())


def _with_constant(constants: Constants, node: fx.Node, op: str) -> tuple[Any, Any]:
    """Return (tensor, per-channel constant) of an addition or product, in either order."""
    has_two_tensors = len(node.args) == 2 and all(isinstance(x, fx.Node) for x in node.args)
    if not is_op(node, op) or node.kwargs or not has_two_tensors:
        return None, None
    arguments: Any = node.args
    for tensor, factor in (arguments, arguments[::-1]):
        constant = constants.get(factor)
        if isinstance(constant, torch.Tensor) and _is_per_channel(constant):
            return tensor, constant
    return None, None


def _is_per_channel(constant: torch.Tensor) -> bool:
    """Return whether the shape is [C, 1, 1] or [1, C, 1, 1]."""
    shape = constant.shape
    return len(shape) in (3, 4) and tuple(shape[-2:]) == (1, 1) and shape.numel() == shape[-3]


def _evaluate_constants(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Compute all nodes that depend on buffers only; return node -> value."""
    interpreter = fx.Interpreter(graph_module)
    values: dict[fx.Node, Any] = interpreter.env
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            is_constant = not isinstance(tensor_of(graph_module, node.target), nn.Parameter)
        else:
            is_constant = _is_pure_call(node) and values.keys() >= set(node.all_input_nodes)
        if is_constant:
            values[node] = interpreter.run_node(node)
    return values


def _is_pure_call(node: fx.Node) -> bool:
    """Return whether a node computes something from other nodes, not in place."""
    if not is_call(node) or not node.all_input_nodes:
        return False
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    has_in_place_name = name.endswith("_") and not name.endswith("__")
    return not has_in_place_name and name not in _IN_PLACE
