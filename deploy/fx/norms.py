"""BatchNorm in every spelling, as one kind of module.

==============================  ==============================================================
nn.BatchNorm, SyncBatchNorm     modules already
F.batch_norm(x, mean, ...)      `ChannelNorm`, also where a layer of timm calls it (BatchNormAct2d)
x * factor + shift              `FrozenNorm`, where both are computed from buffers alone, as in
                                torchvision's FrozenBatchNorm2d; it does not train
==============================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from deploy.fx.rewrite import SPELLINGS, is_op

STOCK = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ORDERS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var"),
    functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias"),
}
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "setitem")
Constants = Mapping[fx.Node, Any]
_REST = ("training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
STATISTICS = ("running_mean", "running_var")


class ChannelNorm(_BatchNorm):
    """BatchNorm over dimension 1 of a tensor of any rank."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any rank will do."""


class FrozenNorm(nn.Module):
    """x * factor + shift by channel, dimension 1 of four; constants, as a frozen BatchNorm has.

    Args:
        factor, shift: [C].
    """

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
    """Whether `module` normalizes by running statistics and does nothing else.

    A layer derived from BatchNorm with a forward of its own, kept whole, is none.
    """
    if isinstance(module, ChannelNorm | FrozenNorm):
        return True
    return any(isinstance(module, kind) and _forward(module) is kind.forward for kind in STOCK)


def norm_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm in eval mode as y = x * factor + shift: two [C] tensors."""
    if isinstance(norm, FrozenNorm):
        return norm.factor, norm.shift
    mean, variance = norm.running_mean, norm.running_var
    gamma = norm.weight.detach() if norm.weight is not None else torch.ones_like(mean)
    beta = norm.bias.detach() if norm.bias is not None else torch.zeros_like(mean)
    factor = gamma / torch.sqrt(variance + norm.eps)
    return factor, beta - mean * factor


def batch_norm_arguments(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a call of F.batch_norm by name, or None for any other node."""
    if node.op != "call_function" or node.target not in _ORDERS:
        return None
    names = (*_ORDERS[node.target], *_REST)
    return {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def channel_norm(tensors: dict[str, torch.Tensor | None], options: dict[str, Any]) -> ChannelNorm:
    """The module of a call of F.batch_norm with these tensors."""
    mean, weight = tensors["running_mean"], tensors["weight"]
    assert mean is not None
    norm = ChannelNorm(mean.numel(), options["eps"], options["momentum"], weight is not None)
    for name, tensor in tensors.items():
        if name in STATISTICS:
            setattr(norm, name, tensor)
        elif tensor is not None:
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            norm.register_parameter(name, kept)
    return norm


def freeze_affines(graph_module: fx.GraphModule) -> int:
    """Make each x * factor + shift of constants by channel a `FrozenNorm`, in place; how many."""
    made, known = 0, _constants(graph_module)
    for node in list(graph_module.graph.nodes):
        found = _affine(known, node)
        if found is None:
            continue
        source, norm = found
        name = f"frozen_norm_{made}"
        graph_module.add_submodule(name, norm)
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, (source,))
        node.replace_all_uses_with(call)
        made += 1
    if made:
        graph_module.graph.eliminate_dead_code()
    return made


def _affine(known: Constants, add: fx.Node) -> tuple[fx.Node, FrozenNorm] | None:
    product, shift = _with_constant(known, add, "add")
    if product is None or len(product.users) > 1:
        return None
    source, factor = _with_constant(known, product, "mul")
    if source is None or factor.shape != shift.shape:
        return None
    if product.target in SPELLINGS["mul"][1] and len(source.users) > 1:
        return None  # what is multiplied in place is read again
    return source, FrozenNorm(factor.reshape(-1).clone(), shift.reshape(-1).clone())


def _with_constant(known: Constants, node: fx.Node, op: str) -> tuple[Any, Any]:
    """(the tensor, the constant [1, C, 1, 1]) of an addition or product, in either order."""
    if not is_op(node, op) or node.kwargs or len(node.args) != 2:
        return None, None
    for tensor, other in (node.args, node.args[::-1]):
        if not isinstance(tensor, fx.Node) or not isinstance(other, fx.Node):
            continue
        constant = known.get(other)
        if isinstance(constant, torch.Tensor) and _is_by_channel(constant):
            return tensor, constant
    return None, None


def _is_by_channel(constant: torch.Tensor) -> bool:
    shape = constant.shape
    return len(shape) in (3, 4) and tuple(shape[-2:]) == (1, 1) and shape.numel() == shape[-3]


def _constants(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """What is computed from buffers alone, by its node; each is computed once."""
    known: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(graph_module.get_submodule(owner), name)
            if not isinstance(value, nn.Parameter):
                known[node] = value
        elif _calls(node) and all(source in known for source in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            of_class = node.op == "call_method"
            called = getattr(args[0], str(node.target)) if of_class else node.target
            known[node] = called(*args[of_class:], **kwargs)
    return known


def _calls(node: fx.Node) -> bool:
    """Whether a node computes something of others, and writes over none of them."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    calls = node.op in ("call_function", "call_method") and bool(node.all_input_nodes)
    return calls and not in_place


def _forward(module: nn.Module | None) -> Any:
    return getattr(type(module), "forward", None)
