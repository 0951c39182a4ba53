"""Lift a program of torch.export to a graph over the modules of the model.

::

    exported    p_conv_weight, x -> aten.conv2d(x, p_conv_weight) -> aten.relu -> aten.chunk
    lifted      x                -> conv(x)                       -> relu()    -> torch.chunk

A call of a torch.nn layer becomes one `call_module` node, so that dropout and norms still follow
`train()` and `eval()`. A layer with hooks or parametrizations stays decomposed, since whatever
replaces a layer later would not run them. ATen operators in the tables below become the torch
function with the same arguments; all others stay ATen calls.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional
from torch.utils import _pytree as pytree

from deploy.errors import ModelError
from deploy.fx.model_inputs import argument_names
from deploy.fx.norms import is_frozen_norm
from deploy.fx.operations import delete_unused_modules, is_attribute
from deploy.fx.plain_copy import tensor_of
from deploy.fx.trace import ClassKeepingTracer

# ATen operators that become the torch function of the same name
_TORCH = (
    "add", "sub", "mul", "div", "neg", "clamp", "matmul", "bmm", "mean", "softmax",
    "flatten", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "select",
    "cat", "stack", "chunk", "split",
    "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "relu", "sigmoid", "tanh", "batch_norm",
)  # fmt: skip

# those that become the function of torch.nn.functional
_FUNCTIONAL = (
    "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "leaky_relu", "elu",
    "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "linear", "pad", "dropout", "scaled_dot_product_attention",
)  # fmt: skip

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
    target: Any = node.target
    name = _aten_name(target)
    if name == "sym_size":
        return graph.call_method("size", args)
    if name in _METHODS:
        return graph.call_method(name, args, kwargs)
    if name in FUNCTIONS:
        return graph.call_function(FUNCTIONS[name], args, kwargs)
    if name in _IN_PLACE and node.users and not kwargs:  # torch.fx would drop an unused one
        return graph.call_function(_IN_PLACE[name], args)
    return graph.call_function(target, args, kwargs)


def _aten_name(target: Any) -> str:
    """Return "add" for `aten.add.Tensor`, "" for anything but an ATen operator."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target.overloadpacket.__name__


_LAYER_FILES = (
    "activation", "conv", "dropout", "flatten", "linear", "padding", "pooling", "upsampling",
    "batchnorm", "instancenorm", "normalization",
    "channelshuffle", "pixelshuffle",
)  # fmt: skip
_LAYER_MODULES = {f"torch.nn.modules.{name}" for name in _LAYER_FILES}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def lift_program(
    program: ExportedProgram, model: nn.Module, inputs: Sequence[Any]
) -> fx.GraphModule:
    """Return an exported program as a graph that calls the layers of its model again.

    torch.export flattens a model to single operations; here those of one call of a layer become a
    call of the layer.

    Args:
        program: the program of torch.export.
        model: the exported model; its modules and parameters keep their names.
        inputs: positional arguments of the export: tensors, or containers of them.

    Raises:
        ModelError: an output is not a tensor, a number, or a tuple, list or dict of them.
    """
    lifter = _Lifter(program, model)
    lifter.add_inputs(inputs)
    lifter.add_nodes(program.graph.nodes)
    lifter.add_outputs()
    lifted_graph = fx.GraphModule(lifter.modules_and_tensors, lifter.graph, type(model).__name__)
    lifted_graph.graph.eliminate_dead_code()
    delete_unused_modules(lifted_graph)
    lifted_graph.training = model.training
    return lifted_graph


def input_placeholders(program: ExportedProgram) -> list[fx.Node]:
    """Return the placeholders of the inputs, without those of parameters, buffers and constants."""
    placeholders = program.graph.find_nodes(op="placeholder")
    specs = program.graph_signature.input_specs  # one for each placeholder
    return [
        node
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


class _OutputTracer(ClassKeepingTracer, GraphAppendingTracer):
    """Adds the calls that build what forward returns to a graph."""


class _Lifter:
    """Writes the new graph, which calls the layers of the model.

    Attributes:
        modules_and_tensors: those that the graph uses, by qualified name.
        new_values: node of the program -> its node in the new graph, or its value if that is known:
            a number, or the tuple of a region's outputs.
    """

    def __init__(self, program: ExportedProgram, model: nn.Module):
        self.program = program
        self.model = model
        self.graph = fx.Graph()
        self.tracer = _OutputTracer(self.graph)
        self.modules_and_tensors: dict[str, Any] = {}
        self.new_values: dict[fx.Node, Any] = {}
        signature = program.graph_signature
        self._name_by_placeholder = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
        }
        self._constant_by_placeholder = signature.inputs_to_lifted_tensor_constants

    def add_inputs(self, inputs: Sequence[Any]) -> None:
        """Add a placeholder per argument, and unpack the containers."""
        names = argument_names(self.model, len(inputs))
        placeholders = map(self.graph.placeholder, names)
        arguments = [fx.Proxy(placeholder, self.tracer) for placeholder in placeholders]
        leaves, _ = pytree.tree_flatten_with_path(tuple(inputs))
        for node, (path, _) in zip(input_placeholders(self.program), leaves, strict=True):
            # the path leads from the tuple of arguments through containers to the tensor
            self.new_values[node] = pytree.key_get(arguments, path).node

    def add_nodes(self, nodes: Iterable[fx.Node]) -> None:
        """Add the calls; those of one layer become one `call_module`."""
        calls = list(filter(_is_computation, nodes))
        for layer_call, group in groupby(calls, self._layer_call_of):
            call_nodes = list(group)
            if layer_call is not None:
                layer_name, _, _ = layer_call.partition("@")
                if self._add_layer(layer_name, call_nodes):
                    continue
            for node in call_nodes:
                self._add_node(node)

    def add_outputs(self) -> None:
        """Add the output node: what forward returns, in the containers of the user's code.

        Raises:
            ModelError: an output is of a class that torch.fx cannot make.
        """
        values = fx.node.map_arg(self.program.graph.output_node().args[0], self._new_value)
        spec = self.program.call_spec.out_spec
        assert spec is not None
        # `create_arg` takes proxies of nodes, as symbolic tracing has them
        proxies = fx.node.map_arg(values, partial(fx.Proxy, tracer=self.tracer))
        returned = pytree.tree_unflatten(proxies, spec)
        try:  # a dataclass becomes a call of its class, as in symbolic tracing
            self.graph.output(self.tracer.create_arg(returned))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise ModelError(
                "a captured model must return tensors, or tuples, lists and dicts of them, got"
                f" {type(returned).__name__}"
            ) from error

    def _new_value(self, node: fx.Node) -> Any:
        """Return `new_values` of a node; a parameter or constant is added at its first use."""
        if node not in self.new_values:
            self.new_values[node] = self._add_tensor(node)
        return self.new_values[node]

    def _add_tensor(self, node: fx.Node) -> fx.Node:
        """Add a parameter, buffer or constant, which is named "_tensor_constant0" and so on."""
        name = self._name_by_placeholder.get(node.name)
        if name is not None:
            self.modules_and_tensors[name] = tensor_of(self.model, name)
        else:
            tensor_names = [key for key in self.modules_and_tensors if key.startswith("_tensor")]
            name = f"_tensor_constant{len(tensor_names)}"
            constant = self.program.constants[self._constant_by_placeholder[node.name]]
            self.modules_and_tensors[name] = constant.detach().clone()
        return self.graph.get_attr(name)

    def _layer_call_of(self, node: fx.Node) -> str | None:
        """Return "<layer>@<its call>" if `node` is part of the call of a layer, else None."""
        # nn_module_stack: the modules in whose forward torch.export recorded the node, outermost
        # first, as {key of the call: ("layer1.conv@1", class)}; @1 is the second call of a module
        for call_key, (numbered_name, _) in node.meta.get("nn_module_stack", {}).items():
            name = re.sub(r"@[0-9]+", "", numbered_name)
            try:
                module = self.model.get_submodule(name)
            except AttributeError:
                return None
            if name and is_layer(module):
                return f"{name}@{call_key}"
        return None

    def _add_layer(self, name: str, nodes: list[fx.Node]) -> bool:
        """Add one call of a layer to the new graph, in place of the operations it was exported as.

        Return False, and add nothing, unless these operations read exactly one tensor besides the
        layer's parameters and buffers, and exactly one of their results is read by other nodes.

        Args:
            name: qualified name of the layer.
            nodes: nodes of the exported program: the operations of one call of the layer.
        """
        layer = self.model.get_submodule(name)
        layer_tensor_ids = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
        call_nodes = set(nodes)
        input_nodes: set[fx.Node] = set()
        output_nodes = []
        for node in nodes:
            for source in set(node.all_input_nodes) - call_nodes:
                if _is_tensor(source) and id(self._parameter_of(source)) not in layer_tensor_ids:
                    input_nodes.add(source)
            if not node.users.keys() <= call_nodes:
                output_nodes.append(node)
        if len(input_nodes) != 1 or len(output_nodes) != 1:
            return False

        self.modules_and_tensors[name] = layer
        layer_input = self._new_value(input_nodes.pop())
        self._set_new_call(output_nodes[0], self.graph.call_module(name, (layer_input,)))
        return True

    def _parameter_of(self, node: fx.Node) -> Any:
        """Return the parameter or buffer of a placeholder, None for any other node."""
        if node.op != "placeholder" or node.name not in self._name_by_placeholder:
            return None
        return tensor_of(self.model, self._name_by_placeholder[node.name])

    def _add_node(self, node: fx.Node) -> None:
        """Add an operation of the exported program that belongs to no layer to the new graph.

        A node whose value is known gets it in `new_values`, and adds no node: a number, or an
        output of a region, which is a part of the model under `torch.no_grad()` or autocast.
        """
        if getattr(node.target, "__name__", "") in _REGIONS:
            self._add_region(node)
            return
        if node.target is operator.getitem:
            source: Any = node.args[0]
            values = self._new_value(source)
            if isinstance(values, tuple):  # the outputs of a region
                self.new_values[node] = values[node.args[1]]
                return
        if node.target is torch.ops.aten.item.default:
            number = self._constant_value(node)
            if number is not None:  # x.item() of a constant x is a plain number
                self.new_values[node] = number
                return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._new_value)
        self._set_new_call(node, add_call(self.graph, node, args, kwargs))

    def _constant_value(self, node: fx.Node) -> Any:
        """Return the value of a node computed only from the model's constants, or None."""
        if node.op == "placeholder" and node.name in self._constant_by_placeholder:
            return self.program.constants[self._constant_by_placeholder[node.name]]
        # a call without inputs may create random numbers
        if node.op != "call_function" or not node.all_input_nodes:
            return None
        value_by_source = {}
        for source in node.all_input_nodes:
            value = self._constant_value(source)
            if value is None:
                return None
            value_by_source[source] = value
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_by_source.__getitem__)
        return target(*args, **kwargs)

    def _set_new_call(self, node: fx.Node, call: fx.Node) -> None:
        """Set the call that stands for a node in the new graph; give it the node's rank."""
        self.new_values[node] = call
        call.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        if _is_tensor(node):
            call.meta["rank"] = node.meta["val"].dim()

    def _add_region(self, node: fx.Node) -> None:
        """Inline a region under `torch.no_grad()` or autocast, which is a separate graph.

        In `new_values` (node of the program -> its value in the new graph), the region's
        placeholders get its inputs, and the node gets the tuple of its outputs.

        `node`: its arguments are (*options of the region, its graph, *inputs of the graph).
        """
        args: list[Any] = list(node.args)
        while not is_attribute(args[0]):  # drop the options: only the graph is an attribute
            args.pop(0)
        subgraph_node, *region_inputs = args
        region = getattr(self.program.graph_module, str(subgraph_node.target))
        placeholders = region.graph.find_nodes(op="placeholder")
        for placeholder, region_input in zip(placeholders, region_inputs, strict=True):
            # an input that is no node is a number, which stays
            self.new_values[placeholder] = fx.node.map_arg(region_input, self._new_value)
        self.add_nodes(region.graph.nodes)
        self.new_values[node] = tuple(map(self._new_value, region.graph.output_node().args[0]))


def is_layer(module: nn.Module) -> bool:
    """Return whether `module` is a torch.nn layer with one input and output, without hooks.

    So is a frozen norm.
    """
    is_of_torch = type(module).__module__ in _LAYER_MODULES
    if not is_of_torch and not is_frozen_norm(module):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return False
    if getattr(module, "return_indices", False):
        return False
    return not any(getattr(module, hooks, None) for hooks in _HOOKS)


def _is_computation(node: fx.Node) -> bool:
    return node.op == "call_function" and _aten_name(node.target) not in _CHECKS


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
