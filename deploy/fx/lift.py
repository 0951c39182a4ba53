"""Lift a program of torch.export to a graph over the modules of the model.

::

    exported    p_conv_weight, x -> aten.conv2d(x, p_conv_weight) -> aten.relu -> aten.chunk
    lifted      x                -> conv(x)                       -> relu()    -> torch.chunk

A call of a torch.nn layer becomes one `call_module` node, so that dropout and norms still follow
`train()` and `eval()`. A layer with hooks or parametrizations stays decomposed, since whatever
replaces a layer later would not run them. ATen operators in the tables below become the torch
function with the same arguments; all others stay ATen calls.
"""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn import functional
from torch.utils import _pytree as pytree

from deploy.errors import ModelError
from deploy.fx.norms import sizes_of
from deploy.fx.plain_copy import tensor_of

_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "clamp", "matmul", "bmm", "mean", "softmax")


_SHAPES = ("flatten", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "select")


_PARTS = ("cat", "stack", "chunk", "split")


_CONVS = tuple(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))


_TORCH = (*_ARITHMETIC, *_SHAPES, *_PARTS, *_CONVS, "relu", "sigmoid", "tanh", "batch_norm")


_ACTIVATIONS = (
    "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "leaky_relu", "elu",
)  # fmt: skip


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


def add_call(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Add to `graph` a node that computes what `node` of an exported program does."""
    name = _name(node.target)
    if name == "sym_size":
        return graph.call_method("size", args)
    if name in _METHODS:
        return graph.call_method(name, args, kwargs)
    if name in FUNCTIONS:
        return graph.call_function(FUNCTIONS[name], args, kwargs)
    if name in _IN_PLACE and node.users and not kwargs:  # torch.fx would drop an unused one
        return graph.call_function(_IN_PLACE[name], args)
    return graph.call_function(node.target, args, kwargs)


def _name(target: Any) -> str:
    """Return "add" for `aten.add.Tensor`, "" for anything but an ATen operator."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target.overloadpacket.__name__


_LAYERS = ("activation", "conv", "dropout", "flatten", "linear", "padding", "pooling", "upsampling")


_NORMS = ("batchnorm", "instancenorm", "normalization")


_SHUFFLES = ("channelshuffle", "pixelshuffle")


_LAYER_MODULES = {f"torch.nn.modules.{name}" for name in (*_LAYERS, *_NORMS, *_SHUFFLES)}


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def lift_program(
    program: ExportedProgram, model: nn.Module, inputs: Sequence[Any]
) -> fx.GraphModule:
    """Return the graph of `program` over the modules of `model`.

    `model`: the exported model; its modules and parameters keep their names. `inputs`: positional
    arguments of the export: tensors, or containers of them.

    Raises:
        ModelError: an output is not a tensor, a number, or a tuple, list or dict of them.
    """
    lifter = _Lifter(program, model)
    lifter.add_inputs(inputs)
    lifter.add_nodes(program.graph.nodes)
    lifter.add_outputs()
    lifted = fx.GraphModule(lifter.owned, lifter.graph, type(model).__name__)
    lifted.graph.eliminate_dead_code()
    lifted.delete_all_unused_submodules()
    lifted.graph.lint()
    lifted.recompile()
    lifted.training = model.training
    return lifted


class _Lifter:
    """Writes the lifted graph; `new` maps each node of the program to its node or value there."""

    def __init__(self, program: ExportedProgram, model: nn.Module):
        self.program = program
        self.model = model
        self.graph = fx.Graph()
        self.owned: dict[str, Any] = {}  # modules and tensors that the graph uses, by name
        self.new: dict[fx.Node, Any] = {}
        signature = program.graph_signature
        self.tensors = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.constants = signature.inputs_to_lifted_tensor_constants

    def add_inputs(self, inputs: Sequence[Any]) -> None:
        """Add a placeholder per argument, and unpack the containers."""
        state = {**self.tensors, **self.constants}
        placeholders = [n for n in _placeholders(self.program.graph) if n.name not in state]
        names = argument_names(self.model, len(inputs))
        arguments = [self.graph.placeholder(name) for name in names]
        leaves, _ = pytree.tree_flatten_with_path(tuple(inputs))
        for node, (path, _) in zip(placeholders, leaves, strict=True):
            self.new[node] = self._unpack(arguments[path[0].idx], path[1:])

    def add_nodes(self, nodes: Iterable[fx.Node]) -> None:
        """Add the calls; those of one layer become one `call_module`."""
        functions = (node for node in nodes if node.op == "call_function")
        calls = [node for node in functions if _name(node.target) not in _CHECKS]
        for name, group in groupby(calls, self._layer_of):
            layer_nodes = list(group)
            source = self._single_input(name, layer_nodes) if name is not None else None
            if source is None:
                for node in layer_nodes:
                    self._add_node(node)
            else:
                assert name is not None
                self._add_layer(name.partition("@")[0], source, layer_nodes)

    def add_outputs(self) -> None:
        values = fx.node.map_arg(self.program.graph.output_node().args[0], self._value)
        spec = self.program.call_spec.out_spec
        assert spec is not None
        returned = pytree.tree_unflatten(values, spec)
        try:
            self.graph.output(returned)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise ModelError(
                "a captured model must return tensors, or tuples, lists and dicts of them, got"
                f" {type(returned).__name__}"
            ) from error

    def _unpack(self, value: fx.Node, path: Sequence[Any]) -> fx.Node:
        for key in path:
            function = getattr if isinstance(key, pytree.GetAttrKey) else operator.getitem
            step = getattr(key, "name", None) or getattr(key, "key", getattr(key, "idx", None))
            value = self.graph.call_function(function, (value, step))
        return value

    def _value(self, node: fx.Node) -> Any:
        """Return the new node or value of `node`; a parameter is added where it is first used."""
        if node not in self.new:
            self.new[node] = self._tensor(node)
        return self.new[node]

    def _tensor(self, node: fx.Node) -> fx.Node:
        name = self.tensors.get(node.name)
        if name is not None:
            self.owned[name] = tensor_of(self.model, name)
        else:
            name = f"_tensor_constant{len([n for n in self.owned if n.startswith('_tensor')])}"
            self.owned[name] = self.program.constants[self.constants[node.name]].detach().clone()
        return self.graph.get_attr(name)

    def _layer_of(self, node: fx.Node) -> str | None:
        """Return "<layer>@<call>" of the layer call that `node` is part of, or None."""
        for key, (name, _) in node.meta.get("nn_module_stack", {}).items():
            path = re.sub(r"@[0-9]+", "", name)
            try:
                module = self.model.get_submodule(path)
            except AttributeError:
                return None
            if path and is_layer(module):
                return f"{path}@{key}"
        return None

    def _single_input(self, name: str, nodes: list[fx.Node]) -> fx.Node | None:
        """Return the input tensor of a layer call with one input and one output, else None."""
        own = {id(t) for t in _tensors(self.model.get_submodule(name.partition("@")[0]))}
        outside = {
            n for node in nodes for n in node.all_input_nodes if n not in nodes and _is_tensor(n)
        }
        inputs = {n for n in outside if id(self._attribute_of(n)) not in own}
        outputs = {node for node in nodes if any(user not in nodes for user in node.users)}
        return inputs.pop() if len(inputs) == 1 and len(outputs) == 1 else None

    def _attribute_of(self, node: fx.Node) -> Any:
        name = self.tensors.get(node.name) if node.op == "placeholder" else None
        return tensor_of(self.model, name) if name is not None else None

    def _add_layer(self, name: str, source: fx.Node, nodes: list[fx.Node]) -> None:
        self.owned[name] = self.model.get_submodule(name)
        call = self.graph.call_module(name, (self._value(source),))
        (output,) = (node for node in nodes if any(user not in nodes for user in node.users))
        self._set(output, call)

    def _add_node(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") in _REGIONS:
            self._add_region(node)
            return
        if node.target is operator.getitem and isinstance(self._value(node.args[0]), tuple):  # type: ignore[arg-type]
            self.new[node] = self._value(node.args[0])[node.args[1]]  # type: ignore[arg-type]
            return
        if node.target is torch.ops.aten.item.default:
            constant = self._constant(node)
            if constant is not None:
                self.new[node] = constant
                return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        self._set(node, add_call(self.graph, node, args, kwargs))

    def _constant(self, node: fx.Node) -> Any:
        """Return the value of a node computed only from the model's constants, or None."""
        if node.op == "placeholder":
            name = self.constants.get(node.name)
            return None if name is None else self.program.constants[name]
        if node.op != "call_function" or not node.all_input_nodes:
            return None
        values = {n: self._constant(n) for n in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _set(self, node: fx.Node, call: fx.Node) -> None:
        self.new[node] = call
        call.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        if _is_tensor(node):
            call.meta["rank"] = node.meta["val"].dim()
            call.meta["sizes"] = sizes_of(node.meta["val"])

    def _add_region(self, node: fx.Node) -> None:
        """Inline a region under `torch.no_grad()` or autocast."""
        is_graph = [isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in node.args]
        index = is_graph.index(True)
        region = getattr(self.program.graph_module, str(node.args[index].target))  # type: ignore[union-attr]
        for inner, outer in zip(_placeholders(region.graph), node.args[index + 1 :], strict=True):
            self.new[inner] = self._value(outer) if isinstance(outer, fx.Node) else outer
        self.add_nodes(region.graph.nodes)
        self.new[node] = tuple(map(self._value, region.graph.output_node().args[0]))


def is_layer(module: nn.Module) -> bool:
    """Return whether `module` is a torch.nn layer with one input and output, without hooks."""
    kind = type(module)
    if kind.__module__ not in _LAYER_MODULES or isinstance(module, nn.MultiheadAttention):
        return False
    if getattr(module, "return_indices", False):
        return False
    return not any(getattr(module, hooks, None) for hooks in _HOOKS)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Return names of the first `count` arguments of forward, `args_0`... for `*args`."""
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [p.name for p in _positional(model)]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return (plain + [f"{variadic}_{i}" for i in range(count)])[:count]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [p for p in parameters if p.kind in plain]
