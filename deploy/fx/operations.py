"""Edit the operations of a graph, and run it for the shapes of its nodes.

`SPELLINGS` lists the operators, functions and methods of each operation; `replace_op` edits a graph
by them.
"""

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from deploy.errors import ConfigError, ModelError, first_line
from deploy.fx.device import quiet
from deploy.fx.plain_copy import replace_submodule, tensor_of

# operation -> (functions, operators and methods; in-place operators and methods)
SPELLINGS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "add": ((torch.add, operator.add, "add", "__add__", "__radd__"), (operator.iadd, "add_")),
    "sub": ((torch.sub, operator.sub, "sub", "__sub__"), (operator.isub, "sub_")),
    "mul": ((torch.mul, operator.mul, "mul", "__mul__", "__rmul__"), (operator.imul, "mul_")),
    "div": ((torch.div, operator.truediv, "div", "__truediv__"), (operator.itruediv, "div_")),
    "matmul": ((torch.matmul, operator.matmul, "matmul", "__matmul__"), ()),
    "neg": ((torch.neg, operator.neg, "neg", "__neg__"), ("neg_",)),
    "relu": ((torch.relu, nn.functional.relu, "relu"), (torch.relu_, "relu_")),
    "flatten": ((torch.flatten, "flatten"), ()),
}


def is_op(node: fx.Node, name: str) -> bool:
    """Return whether `node` is the operation `name` of `SPELLINGS`, in any spelling."""
    spellings, in_place = SPELLINGS[name]
    return is_call(node) and node.target in spellings + in_place


def is_call(node: fx.Node) -> bool:
    """Return whether `node` calls a function or a method."""
    return node.op in ("call_function", "call_method")


def is_attribute(value: object) -> bool:
    """Return whether a value is a node that reads a parameter, buffer or submodule."""
    return isinstance(value, fx.Node) and value.op == "get_attr"


def called_module(graph_module: fx.GraphModule, node: object) -> nn.Module | None:
    """Return the module that `node` calls, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return graph_module.get_submodule(str(node.target))


def module_calls(graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """Yield (node, module that it calls); the caller may edit the graph meanwhile."""
    for node in graph_module.graph.find_nodes(op="call_module"):
        yield node, called_module(graph_module, node)


def calls_of_module(graph_module: fx.GraphModule, call: fx.Node) -> list[fx.Node]:
    """Return all calls of the module that a node calls, also under other names of the module."""
    callee = called_module(graph_module, call)
    return [node for node, module in module_calls(graph_module) if module is callee]


def called_once(graph_module: fx.GraphModule, call: fx.Node) -> bool:
    """Return whether no other node calls the module that a node calls."""
    return len(calls_of_module(graph_module, call)) == 1


HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # attributes of a module


def has_hooks(module: nn.Module | None) -> bool:
    """Return whether a forward hook or pre-hook is registered on the module itself."""
    return any(getattr(module, name, None) for name in HOOKS)


def is_plain(module: nn.Module | None, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of one of these classes and does nothing else.

    A subclass that overrides `forward` does something else, and so do forward hooks.
    """
    if has_hooks(module):
        return False
    forward = getattr(type(module), "forward", None)
    return any(isinstance(module, kind) and forward is kind.forward for kind in kinds)


def pass_by_position(graph_module: fx.GraphModule) -> None:
    """Turn calls of modules such as `layer(input=x)` into `layer(x)`, in place.

    Passes read the input of a layer by position, and replace layers by modules without that name.
    """
    for node, module in module_calls(graph_module):
        if node.kwargs:
            arguments = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
            node.args, node.kwargs = arguments.args, arguments.kwargs
    graph_module.recompile()


def input_of(call: fx.Node) -> Any:
    """Return the first argument of a call; a function of torch may get it as `input=x`."""
    return call.args[0] if call.args else call.kwargs["input"]


def replace_node(node: fx.Node, replacement: fx.Node) -> None:
    """Let the readers of a node read another one, and remove the node."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def add_module(graph_module: fx.GraphModule, name: str, module: nn.Module) -> str:
    """Add a module under a name, with "_" after it if the user's model has it; return the name."""
    while hasattr(graph_module, name):
        name += "_"
    graph_module.add_submodule(name, module)
    return name


def replace_layer(graph_module: fx.GraphModule, name: str, replacement: nn.Module) -> None:
    """Replace a layer; nodes that read its tensors themselves, such as a tied Embedding, keep them.

    So do functional layers with a tensor of it, which have become modules in it.
    """
    for node in graph_module.graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target).startswith(f"{name}."):
            shared_name = f"shared_{node.name}"
            setattr(graph_module, shared_name, tensor_of(graph_module, node.target))
            node.target = shared_name
    replace_submodule(graph_module, name, replacement)


def bias_of(layer: Any, template: torch.Tensor) -> Any:
    """Return a layer's bias without gradient, or zeros like another tensor."""
    return torch.zeros_like(template) if layer.bias is None else layer.bias.detach()


def with_parameters(layer: Any, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """Return a copy of `layer` with another weight and bias, trained if its weight is."""
    layer_copy = copy.deepcopy(layer)
    layer_copy.weight = nn.Parameter(weight, layer.weight.requires_grad)
    layer_copy.bias = nn.Parameter(bias, layer.weight.requires_grad)
    return layer_copy


def arguments_by_name(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a call by name; `names`: those of its parameters, in order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def replace_op(graph_module: fx.GraphModule, name: str, function: Callable[..., Any]) -> int:
    """Replace every call of an operation by a call of `function`, in place; return how many.

    `name`: of the operation, such as "add", which stands for its operator, function and method.
    `function` takes the same arguments.

    Raises:
        ConfigError: `name` is not in `SPELLINGS`, or the graph has no such node.
        ModelError: a node has options that `function` may not take (add's alpha), or works in
            place on an input that has other readers.
    """
    if name not in SPELLINGS:
        raise ConfigError(f"an operation is one of {', '.join(SPELLINGS)}, got {name!r}")
    nodes = [node for node in graph_module.graph.nodes if is_op(node, name)]
    if not nodes:
        raise ConfigError(f"the graph has no {name} to replace")
    for node in nodes:
        _check_replaceable(node, name)
        with graph_module.graph.inserting_after(node):
            replacement = graph_module.graph.call_function(function, node.args, dict(node.kwargs))
        replace_node(node, replacement)
    refresh(graph_module)
    return len(nodes)


def propagate_shapes(
    graph_module: fx.GraphModule, *inputs: torch.Tensor
) -> dict[str, tuple[int, ...]]:
    """Run the graph once; return node name -> shape for each tensor node.

    The shapes are also stored in `node.meta["tensor_meta"]`, where torch.fx passes expect them.

    Raises:
        ModelError: a node does not run for these inputs.
    """
    try:
        with torch.no_grad(), quiet():  # torch prints a traceback before it raises
            ShapeProp(graph_module).propagate(*inputs)
    except Exception as error:  # whatever a user's model raises
        shown_inputs = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        cause = error.__cause__ or error  # torch.fx wraps what the model raised
        message = f"the model must run for inputs {shown_inputs}, got: {first_line(cause)}"
        raise ModelError(message) from cause

    shapes = {}
    for node in graph_module.graph.nodes:
        meta = node.meta.get("tensor_meta")
        if hasattr(meta, "shape"):
            shapes[node.name] = tuple(meta.shape)
    return shapes


def _check_replaceable(node: fx.Node, name: str) -> None:
    """Raise `ModelError` for a call of the operation `name` that `replace_op` must not replace."""
    options = sorted(set(node.kwargs) - {"input", "other"})
    if options:
        raise ModelError(f"{name} at {node.name} has options that differ: {', '.join(options)}")
    _, in_place = SPELLINGS[name]
    source = input_of(node)
    if node.target in in_place and isinstance(source, fx.Node) and len(source.users) > 1:
        raise ModelError(f"in-place {name} at {node.name} changes {source.name}, used elsewhere")


def drop_unread_nodes(graph_module: fx.GraphModule) -> None:
    """Remove the nodes whose result nothing reads, but for those that change a tensor in place."""

    def is_kept(node: fx.Node) -> bool:
        return node.is_impure() or _changes_input(graph_module, node)

    graph_module.graph.eliminate_dead_code(is_kept)


def _changes_input(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a call changes its input: `x.clamp_(0, 6)`, `F.relu(x, inplace=True)`."""
    if node.op == "call_module":
        return bool(getattr(called_module(graph_module, node), "inplace", False))
    name = str(getattr(node.target, "__name__", node.target))
    is_in_place_name = name.endswith("_") and not name.endswith("__")
    return is_call(node) and (is_in_place_name or bool(node.kwargs.get("inplace")))


def delete_unused_modules(graph_module: fx.GraphModule) -> None:
    """Delete the modules that no node of an edited graph reads any more, and `refresh` it."""
    graph_module.delete_all_unused_submodules()
    refresh(graph_module)


def refresh(graph_module: fx.GraphModule) -> None:
    """Check an edited graph, and regenerate the module's code."""
    graph_module.graph.lint()
    graph_module.recompile()
