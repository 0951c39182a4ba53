"""What torch.export records, as the torch functions that the rest of this package knows by name.

Only functions that take what their ATen operator takes, in its order; an operator that stands in no
table stays as it is, and is run as it was recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "clamp", "matmul", "bmm", "mean", "softmax")
_SHAPES = ("flatten", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "select")
_PARTS = ("cat", "stack", "chunk", "split")
_CONVS = tuple(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))
_TORCH = (*_ARITHMETIC, *_SHAPES, *_PARTS, *_CONVS, "relu", "sigmoid", "tanh", "batch_norm")
_ACTIVATIONS = (
    "silu",
    "gelu",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "relu6",
    "leaky_relu",
    "elu",
)
_POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
_OTHERS = ("linear", "pad", "dropout", "scaled_dot_product_attention")
_FUNCTIONAL = (*_ACTIVATIONS, *_POOLS, *_OTHERS)
_METHODS = ("view", "expand", "contiguous")
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "relu_": torch.relu_,
    "add_": operator.iadd,
    "sub_": operator.isub,
    "mul_": operator.imul,
}
FUNCTIONS: dict[str, Callable[..., Any]] = (
    {name: getattr(torch, name) for name in _TORCH}
    | {name: getattr(functional, name) for name in _FUNCTIONAL}
    | {"lift_fresh_copy": torch.clone, "split_with_sizes": torch.split}
)
_CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size")


def is_check(node: fx.Node) -> bool:
    """Whether `node` only asserts what held for the example inputs."""
    return _name(node.target) in _CHECKS


def add_call(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """A node of `graph` that computes what `node` of an exported program does."""
    name = _name(node.target)
    if name == "sym_size":
        return graph.call_method("size", args)
    if name in _METHODS:
        return graph.call_method(name, args, kwargs)
    if name in FUNCTIONS:
        return graph.call_function(FUNCTIONS[name], args, kwargs)
    if name in _IN_PLACE and node.users and not kwargs:  # unread, torch.fx would drop it
        return graph.call_function(_IN_PLACE[name], args)
    return graph.call_function(node.target, args, kwargs)


def _name(target: Any) -> str:
    """`aten.add.Tensor` -> "add"; "" for what is no ATen operator."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target.overloadpacket.__name__
