"""Merge convolutions and norms that read one tensor and are added (RepVGG).

::

        .--> Conv 3x3 --.
    x --+--> Conv 1x1 --+--> +      becomes      x --> Conv 3x3
        '--> BN --------'

A smaller kernel is padded to the center of the larger one; a norm is a 1x1 convolution that maps
each channel to itself. Not merged: branches with other readers, or with different strides, groups
or positions. Source: X. Ding et al., 2021, "RepVGG", section 3.3.
"""

from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn import functional

from deploy.fx.norms import has_factors, is_norm, norm_factors
from deploy.fx.operations import (
    bias_of,
    called_module,
    called_once,
    drop_unread_nodes,
    has_hooks,
    is_op,
    replace_layer,
    replace_node,
    with_parameters,
)


def merge_branches(graph_module: fx.GraphModule) -> list[tuple[str, str]]:
    """Merge parallel branches, in place, and remove their additions.

    Return (name of the remaining layer, name of the one merged into it) for each.
    """
    merged_names = []
    for node in list(graph_module.graph.nodes):
        if _drop_zero(node):
            continue
        names = _merge(graph_module, node)
        if names is not None:
            merged_names.append(names)
    drop_unread_nodes(graph_module)
    return merged_names


def _drop_zero(node: fx.Node) -> bool:
    """Remove `x + 0`, the start of a sum over branches; return whether `node` was one."""
    if not is_op(node, "add") or len(node.all_input_nodes) != 1 or node.kwargs:
        return False
    if not any(isinstance(value, int | float) and value == 0 for value in node.args):
        return False
    replace_node(node, node.all_input_nodes[0])
    return True


def _merge(graph_module: fx.GraphModule, node: fx.Node) -> tuple[str, str] | None:
    """Merge the two branches of an addition, in place.

    Return (name of the layer that computes both, name of the one merged into it); None if `node`
    adds no two branches that can be merged.
    """
    branches = _find_branches(graph_module, node)
    if len(branches) != 2:
        return None
    # the smaller kernel is added to the larger one; of equal kernels, the first one remains
    larger, smaller = sorted(branches, key=_kernel_size, reverse=True)
    if larger.call.args[0] is not smaller.call.args[0]:  # they read different tensors
        return None
    # a norm has the smallest kernel size: if it is the larger one, both are norms
    if not isinstance(larger.module, nn.Conv2d):
        return None
    if is_norm(smaller.module):
        convolution = _as_convolution(smaller.module, larger.module.groups)
        if convolution is None:
            return None
        smaller = smaller._replace(module=convolution)
    if not _covers(larger.module, smaller.module):
        return None

    layer_name = str(larger.call.target)
    merged_name = str(smaller.call.target)
    replace_layer(graph_module, layer_name, _sum_branches(larger, smaller))
    replace_node(node, larger.call)
    return layer_name, merged_name


def _find_branches(graph_module: fx.GraphModule, node: fx.Node) -> list["_Branch"]:
    """Return the branches that an addition of two tensors reads and that can be merged."""
    has_options = bool(node.kwargs) or len(node.args) != 2  # such as alpha
    if not is_op(node, "add") or has_options or len(node.all_input_nodes) != 2:
        return []
    branches = []
    for call in node.all_input_nodes:
        module = _find_module(graph_module, call)
        if module is not None:
            branches.append(_Branch(call, module))
    return branches


class _Branch(NamedTuple):
    call: fx.Node
    module: Any  # Conv2d or a norm


def _find_module(graph_module: fx.GraphModule, call: fx.Node) -> nn.Module | None:
    """Return the module of a branch that can be merged, or None."""
    module = called_module(graph_module, call)
    if module is None or len(call.users) > 1 or not called_once(graph_module, call):
        return None
    if type(module) is nn.Conv2d and not has_hooks(module):
        is_mergeable = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    else:
        is_mergeable = is_norm(module) and has_factors(module)
    return module if is_mergeable else None


def _kernel_size(branch: _Branch) -> tuple[int, ...]:
    return getattr(branch.module, "kernel_size", (0, 0))  # a norm, which has none: the smallest


def _as_convolution(norm: nn.Module, groups: int) -> nn.Conv2d | None:
    """Return a norm as a 1x1 convolution: an output reads the input of its own channel.

    None if its channels do not divide into the groups.
    """
    factor, shift = norm_factors(norm)
    channels = len(factor)
    if channels % groups:
        return None
    # on "meta" without values, since its parameters are replaced
    convolution = nn.Conv2d(channels, channels, 1, groups=groups, device="meta")
    identity = nn.init.dirac_(factor.new_empty(convolution.weight.shape), groups)
    convolution.weight = nn.Parameter(identity * factor.reshape(-1, 1, 1, 1))
    convolution.bias = nn.Parameter(shift)
    return convolution


def _covers(larger: nn.Conv2d, smaller: nn.Conv2d) -> bool:
    """Return whether the kernel of a convolution covers a smaller one, which can be added to it.

    Both must have the same channels, stride and groups and no dilation, and the smaller kernel must
    read the pixels in the center of the larger one: its padding is smaller by as many pixels as the
    larger kernel extends beyond it on each side.
    """
    for name in ("in_channels", "out_channels", "stride", "groups"):
        if getattr(larger, name) != getattr(smaller, name):
            return False
    if not larger.dilation == smaller.dilation == (1, 1):
        return False

    larger_paddings: Any = larger.padding
    for axis, smaller_padding in enumerate(smaller.padding):
        offset = larger_paddings[axis] - smaller_padding
        if offset < 0 or smaller.kernel_size[axis] + 2 * offset != larger.kernel_size[axis]:
            return False
    return True


def _sum_branches(larger: _Branch, smaller: _Branch) -> nn.Conv2d:
    """Return a convolution that computes the sum of two branches."""
    weight = larger.module.weight.detach()  # [C_out, C_in / groups, h, w]
    added_weight = smaller.module.weight.detach()
    # the smaller kernel goes to the center of the larger one
    rows = (weight.shape[2] - added_weight.shape[2]) // 2
    columns = (weight.shape[3] - added_weight.shape[3]) // 2
    added_weight = functional.pad(added_weight, (columns, columns, rows, rows))
    channels = weight[:, 0, 0, 0]  # of the shape of a bias
    bias = bias_of(larger.module, channels) + bias_of(smaller.module, channels)
    return with_parameters(larger.module, weight + added_weight, bias)
