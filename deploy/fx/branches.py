"""Merge convolutions and norms that read one tensor and are added (RepVGG).

::

        .--> Conv 3x3 --.
    x --+--> Conv 1x1 --+--> +      becomes      x --> Conv 3x3
        '--> BN --------'

A smaller kernel is padded to the center of the larger one; a norm is a 1x1 convolution that maps
each channel to itself. Not merged: branches with other readers, or with different strides, groups
or positions. Source: X. Ding et al., 2021, "RepVGG", section 3.3.
"""

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from deploy.fx.norms import (
    is_norm,
    norm_factors,
)
from deploy.fx.operations import is_op
from deploy.fx.plain_copy import replace_submodule


def merge_branches(graph_module: fx.GraphModule) -> list[tuple[str, str]]:
    """Merge parallel branches, in place, and remove their additions or subtractions.

    Return (name of the remaining layer, name of the one merged into it) for each.
    """
    nodes = (node for node in list(graph_module.graph.nodes) if not _drop_zero(node))
    merged = [names for node in nodes if (names := _merge(graph_module, node)) is not None]
    graph_module.graph.eliminate_dead_code()
    return merged


def _drop_zero(node: fx.Node) -> bool:
    """Remove `x + 0`, the start of a sum over branches; return whether `node` was one."""
    if not is_op(node, "add") or len(node.all_input_nodes) != 1 or node.kwargs:
        return False
    if not any(isinstance(value, int | float) and value == 0 for value in node.args):
        return False
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)
    return True


def _merge(graph_module: fx.GraphModule, node: fx.Node) -> tuple[str, str] | None:
    sign = 1 if is_op(node, "add") else -1 if is_op(node, "sub") else 0
    if not sign or node.kwargs or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    sides = [_branch(graph_module, side) for side in node.args]
    left, right = sides
    if left is None or right is None or node.args[0].args[0] is not node.args[1].args[0]:  # type: ignore[union-attr]
        return None
    keeper, other, first = _larger(left, right)
    if keeper is None or not _fits(keeper, other):
        return None
    layer = _sum(keeper, other, 1 if first else sign, sign if first else 1)
    kept, taken = node.args if first else node.args[::-1]
    replace_submodule(graph_module, str(kept.target), layer)  # type: ignore[union-attr]
    node.replace_all_uses_with(kept)  # type: ignore[arg-type]
    graph_module.graph.erase_node(node)
    return str(kept.target), str(taken.target)  # type: ignore[union-attr]


def _branch(graph_module: fx.GraphModule, side: Any) -> Any:
    """Return the module of a branch that can be merged, or None."""
    if not isinstance(side, fx.Node) or side.op != "call_module" or len(side.users) > 1:
        return None
    calls = [n for n in graph_module.graph.nodes if n.op == "call_module"]
    if sum(n.target == side.target for n in calls) > 1:
        return None
    module = graph_module.get_submodule(str(side.target))
    plain = type(module) is nn.Conv2d and module.padding_mode == "zeros"
    if plain and not isinstance(module.padding, str):
        return module
    return module if is_norm(module) and getattr(module, "running_var", 0) is not None else None


def _larger(left: Any, right: Any) -> tuple[Any, Any, bool]:
    """Return (branch to keep, the other, whether the first is kept); (None, ...) for two norms."""
    sizes = [m.kernel_size if isinstance(m, nn.Conv2d) else (0, 0) for m in (left, right)]
    first = sizes[0] >= sizes[1]
    keeper, other = (left, right) if first else (right, left)
    return (keeper if isinstance(keeper, nn.Conv2d) else None), other, first


def _fits(keeper: nn.Conv2d, other: Any) -> bool:
    if not isinstance(other, nn.Conv2d):
        channels = norm_factors(other)[0].numel()
        same = keeper.in_channels == keeper.out_channels == channels
        return same and keeper.stride == (1, 1) and _is_inside(keeper, (1, 1), (0, 0))
    equal = ("in_channels", "out_channels", "stride", "groups")
    if any(getattr(keeper, name) != getattr(other, name) for name in equal):
        return False
    return other.dilation == (1, 1) and _is_inside(keeper, other.kernel_size, other.padding)


def _is_inside(keeper: nn.Conv2d, size: Any, padding: Any) -> bool:
    """Return whether a kernel of this size and padding lies in the center of the keeper's."""
    offsets = [p - q for p, q in zip(keeper.padding, padding, strict=True)]
    dims = zip(size, offsets, keeper.kernel_size, strict=True)
    return keeper.dilation == (1, 1) and all(o >= 0 and s + 2 * o == k for s, o, k in dims)


def _sum(keeper: nn.Conv2d, other: Any, sign: int, others_sign: int) -> nn.Conv2d:
    layer = copy.deepcopy(keeper)
    weight, bias = _weight_and_bias(keeper, keeper)
    added, shift = _weight_and_bias(other, keeper)
    rows, columns = ((k - m) // 2 for k, m in zip(keeper.kernel_size, added.shape[2:], strict=True))
    added = functional.pad(added, (columns, columns, rows, rows))
    layer.weight = nn.Parameter(sign * weight + others_sign * added)
    layer.bias = nn.Parameter(sign * bias + others_sign * shift)
    return layer


def _weight_and_bias(module: Any, keeper: nn.Conv2d) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [C_out, C_in / groups, h, w] and bias [C_out] of a branch."""
    if isinstance(module, nn.Conv2d):
        weight = module.weight.detach()
        bias = module.bias.detach() if module.bias is not None else weight.new_zeros(len(weight))
        return weight, bias
    factor, shift = norm_factors(module)
    width = keeper.in_channels // keeper.groups
    columns = torch.arange(len(factor), device=factor.device) % width
    weight = torch.zeros(len(factor), width, 1, 1, dtype=factor.dtype, device=factor.device)
    weight[range(len(factor)), columns, 0, 0] = factor
    return weight, shift
