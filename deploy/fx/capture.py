"""`nn.Module` -> `fx.GraphModule` by torch.export, which runs the model's own Python.

Symbolic tracing (`deploy.fx.trace`) sees a model without values, so it fails on whatever looks at
one: `for` over a tensor, `list(x.chunk(2, 1))`, `forward(x, *args)`. torch.export has shapes to
look at, and fails only where Python follows the values of a tensor. It needs example inputs, so
`calib8 trace`, and `fuse` without `--input`, trace symbolically, as does what keeps modules whole.

What torch.export records, as the torch functions that the rest of this package knows by name.

Only functions that take what their ATen operator takes, in its order; an operator that stands in no
table stays as it is, and is run as it was recorded.

A program of torch.export -> the graph of modules that symbolic tracing gives.

::

    exported    p_conv_weight, x -> aten.conv2d(x, p_conv_weight) -> aten.relu -> aten.chunk
    lifted      x                -> conv(x)                       -> relu()    -> torch.chunk

A call of one of torch.nn's own layers is one node again, so that dropout and norms still follow
`train()` and `eval()`. A layer with hooks or parametrizations stays in its pieces: what replaces a
layer later would not run them.
"""

from __future__ import annotations

import copy
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

from deploy.errors import ModelError, first_line
from deploy.fx.device import device_of, quiet
from deploy.fx.norms import sizes_of
from deploy.fx.source import plain_copy
from deploy.fx.trace import explain, trace
from deploy.terminal import phase

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


TOLERANCE = 1e-4  # of the largest output


def graph_of(
    model: nn.Module,
    inputs: Sequence[Any] | None,
    *,
    leaves: Sequence[str | type[nn.Module]] = (),
) -> fx.GraphModule:
    """A graph of a copy of `model`: itself where it is one, captured where that can be, or traced.

    Args:
        model: a float model; it is not changed.
        inputs: example inputs; None where there are none, then it is traced symbolically.
        leaves: modules to keep whole, as `deploy.fx.trace.trace`, which then traces it.

    Raises:
        ConfigError: a leaf that names nothing.
        ModelError: neither way leads through the model; the message names file, line and remedy.
    """
    if isinstance(model, fx.GraphModule):
        return copy.deepcopy(model)
    if leaves or inputs is None:
        return trace(plain_copy(model), leaves=leaves)
    try:
        return capture(model, inputs)
    except ModelError:
        try:
            traced = trace(plain_copy(model))
        except ModelError:
            pass
        else:
            if device_of(model).type != "meta":
                _run(plain_copy(model).eval(), inputs)  # else it fails later, with no sentence
            return traced
        raise


@phase("capturing the model")
def capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph of what a copy of `model` computes in eval mode, with its modules and parameters.

    The batch, dimension 0 of each input, stays open unless the model fixes it; all else is as in
    `inputs`. Layers that behave otherwise in train mode still do.

    Args:
        model: any module whose Python does not follow the values of tensors; it is not changed.
        inputs: positional arguments: tensors, or tuples, lists and dicts of them.

    Raises:
        ModelError: torch.export cannot follow the model, or its graph computes something else.
    """
    own = plain_copy(model)
    modes = {module: module.training for module in own.modules()}
    own.eval()
    captured = _capture(own, inputs)
    if device_of(own).type != "meta":  # which holds no values
        check_same(captured, plain_copy(model).eval(), inputs)  # exporting leaves marks in `own`
    for module in captured.modules():
        module.training = modes.get(module, model.training)
    return captured


def check_same(captured: nn.Module, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise `ModelError` where `captured` gives other values than `model`."""
    wanted, got = (_run(module, inputs) for module in (model, captured))
    for ours, theirs in zip(got, wanted, strict=True):
        largest = float(theirs.double().abs().max()) if theirs.numel() else 0.0
        bound = TOLERANCE * largest
        if not torch.allclose(ours.double(), theirs.double(), 0.0, bound, equal_nan=True):
            raise ModelError(
                f"a captured model must compute what {type(model).__name__} does, and does not:"
                " its forward keeps something from one call to the next, or changes its input"
            )


def _run(model: nn.Module, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that `model` gives for copies of the inputs, with the same random numbers."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            found = model(*copy.deepcopy(list(inputs)))
    except Exception as error:  # torch.export computes types and shapes, and lets some pass
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        raise ModelError(
            f"{type(model).__name__} must run for inputs {shapes}, got {type(error).__name__}:"
            f" {first_line(error)}"
        ) from error
    finally:
        torch.set_rng_state(state)
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """With the batch open, else with it fixed; the first failure is the one to tell."""
    widened = pytree.tree_map(_at_least_two, tuple(inputs))
    try:
        program = _export(model, widened, torch.export.Dim.AUTO)
        if _kept_open(program, inputs, widened):
            return lift(program, model, inputs)
    except Exception as error:  # torch.export raises what it likes, and what the model raises
        first: Exception | None = error
    else:
        first = None
    try:
        return lift(_export(model, tuple(inputs), None), model, inputs)
    except Exception as error:
        raise ModelError(explain(first or error, model)) from error


def _export(model: nn.Module, inputs: tuple[Any, ...], batch: Any) -> torch.export.ExportedProgram:
    shapes = None
    if batch is not None:
        shapes = pytree.tree_map(lambda leaf: {0: batch} if _has_batch(leaf) else None, inputs)
        if _is_variadic(model, len(inputs)):
            shapes = _variadic(model, shapes)
    own = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)  # one tensor twice is one input
    with quiet(), torch.enable_grad():  # without, attention is one kernel that nothing can open
        return torch.export.export(model, own, dynamic_shapes=shapes, strict=False)


def _is_variadic(model: nn.Module, count: int) -> bool:
    return count > len(_positional(model))


def _variadic(model: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The form that torch.export wants shapes in: those of `*args` in one tuple."""
    named = len(_positional(model))
    return (*shapes[:named], shapes[named:])


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [p for p in parameters if p.kind in plain]


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _at_least_two(leaf: Any) -> Any:
    """A batch of one would be taken for a constant 1."""
    return torch.cat([leaf, leaf]) if _has_batch(leaf) and leaf.shape[0] == 1 else leaf


def _kept_open(program: Any, inputs: Sequence[Any], widened: Any) -> bool:
    """Whether every batch that was made larger than it is stayed open."""
    held = program.graph_signature
    fixed = {*held.inputs_to_parameters, *held.inputs_to_buffers}
    fixed |= {*held.inputs_to_lifted_tensor_constants}
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name not in fixed]
    for node, ours, wide in zip(
        nodes, pytree.tree_leaves(tuple(inputs)), pytree.tree_leaves(widened), strict=True
    ):
        if wide is not ours and not isinstance(node.meta["val"].shape[0], torch.SymInt):
            return False
    return True
