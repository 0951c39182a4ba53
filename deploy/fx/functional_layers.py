"""Rewrite functional layers as modules.

`functions_to_modules` turns `F.conv2d(x, self.weight, ...)` into a call of an `nn.Conv2d` with the
same weight, named `<owner of the weight>.conv`; `F.batch_norm(...)` into `<owner of the
statistics>.norm`; and `x @ self.weight` into an `nn.Linear` with the transposed weight,
`<owner>.linear`. Further linears of one owner have the weight's name in front.
"""

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from deploy.fx.norms import (
    STATISTICS,
    ChannelNorm,
    as_parameter,
    batch_norm_arguments,
    create_channel_norm,
)
from deploy.fx.operations import refresh
from deploy.fx.plain_copy import tensor_of

CONVS: dict[Any, tuple[type[nn.Module], str]] = {
    torch.conv1d: (nn.Conv1d, "conv"),
    torch.conv2d: (nn.Conv2d, "conv"),
    torch.conv3d: (nn.Conv3d, "conv"),
    functional.linear: (nn.Linear, "linear"),
}


PRODUCTS = frozenset({torch.matmul, operator.matmul})


_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


_CONV_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def functions_to_modules(graph_module: fx.GraphModule) -> int:
    """Turn functional convolutions, linears and norms into modules, in place; return how many.

    Not changed: calls with a computed weight, with a weight that is used elsewhere with other
    options, and norms that use the statistics of the batch.
    """
    made: dict[str, dict[str, Any]] = {}
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in CONVS:
            _to_module(graph_module, node, made)
        elif _is_product(graph_module, node):
            source, weight = node.all_input_nodes
            options = {"weight": weight.target, "bias": None, "transposed": True}
            _call(graph_module, node, source, nn.Linear, _name(weight, "linear"), options, made)
        elif batch_norm_arguments(node) is not None:
            _to_norm(graph_module, node, made)
    graph_module.graph.eliminate_dead_code()
    # parameters that only the new modules use would be stored twice
    read = {node.target for node in graph_module.graph.nodes if node.op == "get_attr"}
    called = {node.target for node in graph_module.graph.nodes if node.op == "call_module"}
    keys = ("weight", "bias", *STATISTICS)
    moved = {options.get(key) for options in made.values() for key in keys}
    for name in moved - read - {None}:
        owner, _, attribute = str(name).rpartition(".")
        if owner not in called:
            delattr(graph_module.get_submodule(owner), attribute)
    refresh(graph_module)
    return len(made)


def _to_module(
    graph_module: fx.GraphModule, node: fx.Node, made: dict[str, dict[str, Any]]
) -> None:
    options = _arguments(node)
    source, weight, bias = (options.pop(key) for key in ("input", "weight", "bias"))
    if not _is_parameter(weight) or not (bias is None or _is_parameter(bias)):
        return
    kind, suffix = CONVS[node.target]
    options |= {"weight": weight.target, "bias": bias and bias.target}
    _call(graph_module, node, source, kind, _name(weight, suffix), options, made)


def _is_product(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node multiplies a tensor by a matrix parameter."""
    matmul = node.target in PRODUCTS or (node.op == "call_method" and node.target == "matmul")
    if not matmul or len(node.args) != 2 or not _is_parameter(node.args[1]):
        return False
    matrix = tensor_of(graph_module, str(node.all_input_nodes[-1].target))
    return matrix.dim() == 2 and matrix.is_floating_point() and not _is_parameter(node.args[0])


def _to_norm(graph_module: fx.GraphModule, node: fx.Node, made: dict[str, dict[str, Any]]) -> None:
    options = batch_norm_arguments(node)
    assert options is not None
    tensors = {key: options[key] for key in ("weight", "bias", *STATISTICS)}
    mean = tensors["running_mean"]
    by_batch = options.pop("training") and not graph_module.training
    if by_batch or not all(value is None or _is_parameter(value) for value in tensors.values()):
        return
    if not isinstance(mean, fx.Node) or not isinstance(options["momentum"], float):
        return
    source = options.pop("input")
    options |= {key: value and value.target for key, value in tensors.items()}
    _call(graph_module, node, source, ChannelNorm, _name(mean, "norm"), options, made)


def _name(tensor: fx.Node, suffix: str) -> str:
    owner, _, _ = str(tensor.target).rpartition(".")
    return f"{owner}.{suffix}" if owner else suffix


def _call(
    graph_module: fx.GraphModule,
    node: fx.Node,
    source: fx.Node,
    kind: type[nn.Module],
    name: str,
    options: dict[str, Any],
    made: dict[str, dict[str, Any]],
) -> None:
    """Replace `node` by a call of the module `name`, unless the name is used by another module."""
    if kind is nn.Linear and _is_used(graph_module, name, options, made):
        name = f"{options['weight']}_{name.rpartition('.')[2]}"
    if _is_used(graph_module, name, options, made):
        return
    if name not in made:
        graph_module.add_submodule(name, _module(graph_module, kind, options))
        made[name] = options
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(name, (source,))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    graph_module.graph.erase_node(node)


def _is_used(
    graph_module: fx.GraphModule,
    name: str,
    options: dict[str, Any],
    made: dict[str, dict[str, Any]],
) -> bool:
    """Return whether a new module with other options, or one of the user's, has this name."""
    if name in made:
        return made[name] != options
    return name in dict(graph_module.named_modules())


def _arguments(node: fx.Node) -> dict[str, Any]:
    if node.target is functional.linear:
        return {"bias": None, **_by_name(("input", "weight", "bias"), node)}
    return {**_CONV_DEFAULTS, **_by_name(_CONV_ARGUMENTS, node)}


def _by_name(names: tuple[str, ...], node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_parameter(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _module(graph_module: fx.GraphModule, kind: Any, options: dict[str, Any]) -> nn.Module:
    if kind is ChannelNorm:
        tensors = {
            key: tensor_of(graph_module, options[key]) if options[key] else None
            for key in ("weight", "bias", *STATISTICS)
        }
        return create_channel_norm(tensors, options).train(graph_module.training)
    weight = tensor_of(graph_module, options["weight"])
    bias = tensor_of(graph_module, options["bias"]) if options["bias"] else None
    has_bias = bias is not None
    if options.get("transposed"):
        is_trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        weight = nn.Parameter(weight.detach().t().contiguous(), is_trained)
    if kind is nn.Linear:
        module = kind(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    else:
        groups = options["groups"]
        sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
        hyper = {key: options[key] for key in ("stride", "padding", "dilation", "groups")}
        # torch.fx's immutable lists become tuples, which the modules take
        hyper = {key: tuple(v) if isinstance(v, list) else v for key, v in hyper.items()}
        module = kind(*sizes, bias=has_bias, device="meta", **hyper)
    module.register_parameter("weight", as_parameter(weight))
    module.register_parameter("bias", as_parameter(bias) if bias is not None else None)
    return module.train(graph_module.training)
