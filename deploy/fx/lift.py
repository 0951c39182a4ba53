"""A program of torch.export -> the graph of modules that symbolic tracing gives.

::

    exported    p_conv_weight, x -> aten.conv2d(x, p_conv_weight) -> aten.relu -> aten.chunk
    lifted      x                -> conv(x)                       -> relu()    -> torch.chunk

A call of one of torch.nn's own layers is one node again, so that dropout and norms still follow
`train()` and `eval()`. A layer with hooks or parametrizations stays in its pieces: what replaces a
layer later would not run them.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from deploy.errors import ModelError
from deploy.fx.aten import add_call, is_check
from deploy.fx.between import sizes_of

_LAYERS = ("activation", "conv", "dropout", "flatten", "linear", "padding", "pooling", "upsampling")
_NORMS = ("batchnorm", "instancenorm", "normalization")
_SHUFFLES = ("channelshuffle", "pixelshuffle")
_HOMES = {f"torch.nn.modules.{name}" for name in (*_LAYERS, *_NORMS, *_SHUFFLES)}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def lift(program: ExportedProgram, model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph of `program` over the modules of `model`, which it was exported from.

    Args:
        program: of torch.export, before any decomposition.
        model: whose modules and parameters are called, under their own names.
        inputs: positional arguments that it was exported with: tensors, or containers of them.

    Raises:
        ModelError: an output that is no tensor, number, tuple, list or dict of them.
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
    """A graph that is being written, and what stands in it for each node of the program."""

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
        """One placeholder for each argument; what lies inside of containers is taken out."""
        held = {**self.tensors, **self.constants}
        given = [n for n in _placeholders(self.program.graph) if n.name not in held]
        names = argument_names(self.model, len(inputs))
        arguments = [self.graph.placeholder(name) for name in names]
        leaves, _ = pytree.tree_flatten_with_path(tuple(inputs))
        for node, (path, _) in zip(given, leaves, strict=True):
            self.new[node] = self._inside(arguments[path[0].idx], path[1:])

    def add_nodes(self, nodes: Iterable[fx.Node]) -> None:
        """Write the calls, those of one layer as one."""
        calls = [node for node in nodes if node.op == "call_function" and not is_check(node)]
        for name, group in groupby(calls, self._layer_of):
            together = list(group)
            source = self._source(name, together) if name is not None else None
            if source is None:
                for node in together:
                    self._add_node(node)
            else:
                assert name is not None
                self._add_layer(name.partition("@")[0], source, together)

    def add_outputs(self) -> None:
        """Write what the model returns, in the containers it returns it in."""
        output = self.program.graph.output_node()
        found = fx.node.map_arg(output.args[0], self._value)
        spec = self.program.call_spec.out_spec
        assert spec is not None
        returned = pytree.tree_unflatten(found, spec)
        try:
            self.graph.output(returned)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise ModelError(
                "a captured model must return tensors, or tuples, lists and dicts of them, got"
                f" {type(returned).__name__}"
            ) from error

    def _inside(self, value: fx.Node, path: Sequence[Any]) -> fx.Node:
        for key in path:
            function = getattr if isinstance(key, pytree.GetAttrKey) else operator.getitem
            step = getattr(key, "name", None) or getattr(key, "key", getattr(key, "idx", None))
            value = self.graph.call_function(function, (value, step))
        return value

    def _value(self, node: fx.Node) -> Any:
        """What stands for `node`; a parameter is read where it is first used."""
        if node not in self.new:
            self.new[node] = self._tensor(node)
        return self.new[node]

    def _tensor(self, node: fx.Node) -> fx.Node:
        name = self.tensors.get(node.name)
        if name is not None:
            self.owned[name] = _attribute(self.model, name)
        else:
            name = f"_tensor_constant{len([n for n in self.owned if n.startswith('_tensor')])}"
            self.owned[name] = self.program.constants[self.constants[node.name]].detach().clone()
        return self.graph.get_attr(name)

    def _layer_of(self, node: fx.Node) -> str | None:
        """Name of the call of a layer that `node` is part of: the layer's, `@` and a number."""
        for key, (name, _) in node.meta.get("nn_module_stack", {}).items():
            path = re.sub(r"@[0-9]+", "", name)
            try:
                module = self.model.get_submodule(path)
            except AttributeError:
                return None
            if path and is_layer(module):
                return f"{path}@{key}"
        return None

    def _source(self, name: str, nodes: list[fx.Node]) -> fx.Node | None:
        """The only tensor that a layer's call takes, where it also gives only one; else None."""
        own = {id(t) for t in _tensors(self.model.get_submodule(name.partition("@")[0]))}
        outside = {
            n for node in nodes for n in node.all_input_nodes if n not in nodes and _is_tensor(n)
        }
        read = {n for n in outside if id(self._attribute_of(n)) not in own}
        given = {node for node in nodes if any(user not in nodes for user in node.users)}
        return read.pop() if len(read) == 1 and len(given) == 1 else None

    def _attribute_of(self, node: fx.Node) -> Any:
        name = self.tensors.get(node.name) if node.op == "placeholder" else None
        return _attribute(self.model, name) if name is not None else None

    def _add_layer(self, name: str, source: fx.Node, nodes: list[fx.Node]) -> None:
        self.owned[name] = self.model.get_submodule(name)
        call = self.graph.call_module(name, (self._value(source),))
        (given,) = (node for node in nodes if any(user not in nodes for user in node.users))
        self._put(given, call)

    def _add_node(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") in _REGIONS:
            self._add_region(node)
            return
        if node.target is operator.getitem and isinstance(self._value(node.args[0]), tuple):  # type: ignore[arg-type]
            self.new[node] = self._value(node.args[0])[node.args[1]]  # type: ignore[arg-type]
            return
        if node.target is torch.ops.aten.item.default:
            known = self._known(node)
            if known is not None:
                self.new[node] = known
                return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        self._put(node, add_call(self.graph, node, args, kwargs))

    def _known(self, node: fx.Node) -> Any:
        """The value of what is computed from the model's constants alone, or None."""
        if node.op == "placeholder":
            name = self.constants.get(node.name)
            return None if name is None else self.program.constants[name]
        if node.op != "call_function" or not node.all_input_nodes:
            return None
        values = {n: self._known(n) for n in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _put(self, node: fx.Node, call: fx.Node) -> None:
        self.new[node] = call
        call.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        if _is_tensor(node):
            call.meta["rank"] = node.meta["val"].dim()
            call.meta["sizes"] = sizes_of(node.meta["val"])

    def _add_region(self, node: fx.Node) -> None:
        """Write what stands under `torch.no_grad()` or autocast; captured values have no more."""
        at = next(i for i, arg in enumerate(node.args) if _is_graph(arg))
        region = getattr(self.program.graph_module, str(node.args[at].target))  # type: ignore[union-attr]
        for inner, outer in zip(_placeholders(region.graph), node.args[at + 1 :], strict=True):
            self.new[inner] = self._value(outer) if isinstance(outer, fx.Node) else outer
        self.add_nodes(region.graph.nodes)
        self.new[node] = tuple(map(self._value, region.graph.output_node().args[0]))


def is_layer(module: nn.Module) -> bool:
    """Whether `module` is a layer of torch.nn itself, one tensor in and one out, without hooks."""
    kind = type(module)
    if kind.__module__ not in _HOMES or isinstance(module, nn.MultiheadAttention):
        return False
    if getattr(module, "return_indices", False):
        return False
    return not any(getattr(module, hooks, None) for hooks in _HOOKS)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Names of the first arguments of forward, `args_0` and so on for those of `*args`."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return (plain + [f"{more}_{i}" for i in range(count)])[:count]


def _is_graph(arg: object) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "get_attr"


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)  # type: ignore[no-any-return]
