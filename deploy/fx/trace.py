"""Trace an `nn.Module` symbolically as an `fx.GraphModule`, and explain failures.

Calls of plain functions, of any package or builtins, can be kept as nodes. Unlike `torch.fx.wrap`,
which affects only the calling module, this holds in all loaded modules::

    graph_module = trace(model, wrap=[len])      # len(x) becomes a call_function node

torch.fx traces a torch.nn layer as one node, hooks included, and passes that replace the layer
would lose them. So forward hooks of layers are traced as separate nodes::

    conv with a forward hook (y -> 2 y)      becomes      conv -> mul

A layer whose weight is computed in every forward, such as by weight norm, keeps its hooks.
"""

import copy
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TracerBase

from deploy.errors import ConfigError, ModelError
from deploy.fx.model_inputs import input_names
from deploy.fx.norms import is_frozen_norm
from deploy.fx.operations import HOOKS, has_hooks
from deploy.fx.plain_copy import (
    computed_weights,
    refuse_reserved_names,
    replace_submodule,
    unwrap,
)
from deploy.fx.source import user_code_line

Function = Callable[..., Any]


def find_function(name: str) -> Function:
    """Return the function named `len` or `package.module.function`."""
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(import_module(module or "builtins"), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--wrap takes a builtin or package.module.function, got {name!r}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"--wrap takes a function, and {name!r} is {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def refuse_hooks(module: nn.Module, what: str) -> None:
    """Raise `ModelError` if the module has a forward hook."""
    if has_hooks(module):
        raise ModelError(
            f"{what} must not have a forward hook, got one; do in the model's forward what the"
            " hook does, or remove it (handle.remove())"
        )


Leaves = Sequence[str | type[nn.Module]]  # qualified names, class names and classes of modules


def names_module(leaf: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    """Return whether a leaf is the name of a module, its class, or the name of its class."""
    if isinstance(leaf, str):
        return leaf in (name, type(module).__name__)
    return isinstance(module, leaf)


class ClassKeepingTracer(TracerBase):
    """A tracer that keeps the class of a dict with attributes, as the outputs of transformers."""

    def create_arg(self, a: Any) -> Any:
        """Record a dataclass as a call of its class, also if it is a dict too."""
        if isinstance(a, dict) and is_dataclass(a):
            values = {field.name: self.create_arg(getattr(a, field.name)) for field in fields(a)}
            return self.create_node("call_function", type(a), (), values)
        return super().create_arg(a)


class LeafTracer(ClassKeepingTracer, fx.Tracer):
    """A tracer that keeps chosen modules as one `call_module` node each, and chosen functions."""

    def __init__(self, leaves: Leaves, functions: Sequence[Function]):
        super().__init__(autowrap_functions=tuple(functions))
        if functions:  # torch.fx looks for them in the modules of the forwards alone
            modules = [module for module in sys.modules.values() if _has_code_to_wrap(module)]
            self._autowrap_search = modules
        self.leaves = leaves
        self.unhooked_layers: set[str] = set()  # names; their hooks are traced as separate nodes

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Create a placeholder for each input, also of a forward that takes them by name.

        Return (function to trace, its arguments).
        """
        names = input_names(self.root)
        if names is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return root_fn, [self.root, *inputs]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a chosen leaf, a norm with torch's forward, or of torch.nn.

        The forward of a BatchNorm checks its input's rank, which is not known here.
        """
        has_norm_forward = getattr(type(m), "forward", None) is nn.BatchNorm2d.forward
        is_kept = self._is_chosen(m, module_qualified_name) or is_frozen_norm(m) or has_norm_forward
        return is_kept or bool(super().is_leaf_module(m, module_qualified_name))

    def _is_chosen(self, m: nn.Module, name: str) -> bool:
        return any(names_module(leaf, name, m) for leaf in self.leaves)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Record the call of a module; the hooks of a layer become separate nodes.

        `forward` is not the forward of the module but torch's `nn.Module.__call__` of it, which
        torch.fx has replaced: it runs the hooks, and `m.forward` between them.
        """
        record_call = super().call_module
        name = self.path_of_module(m)
        if self._is_chosen(m, name) or not self.is_leaf_module(m, name):
            return record_call(m, forward, args, kwargs)

        # what computes a weight is no part of the graph: such a layer stays as it is, with hooks
        if not has_hooks(m) or computed_weights(m):
            return record_call(m, forward, args, kwargs)

        def record_layer(*args: Any, **kwargs: Any) -> Any:
            return record_call(m, forward, args, kwargs)

        self.unhooked_layers.add(name)
        # the hooks run and are traced; in place of the layer's forward, its call is recorded
        m.forward = record_layer
        try:
            return forward(*args, **kwargs)
        finally:
            del m.forward


def _has_code_to_wrap(module: object) -> bool:
    """Return whether calls in a module may become nodes; torch.fx needs the real functions."""
    return isinstance(module, ModuleType) and not module.__name__.startswith("torch.fx")


def trace(
    model: nn.Module, *, leaves: Leaves = (), wrap: Sequence[Function] = ()
) -> fx.GraphModule:
    """Trace `model` symbolically; the graph module shares its parameters.

    Args:
        model: any module whose control flow does not depend on data.
        leaves: modules to keep as one node, by qualified name, class name or class.
        wrap: functions whose calls with a traced argument stay nodes. Functions in closures,
            default arguments, class attributes or under a name with an underscore are not found.
            Not thread-safe.

    Raises:
        ConfigError: a leaf matches nothing in the model.
        ModelError: the model cannot be traced; the message names module, file, line and remedies.
    """
    model = unwrap(model)
    refuse_reserved_names(model)
    _check_leaves(model, leaves)
    tracer = LeafTracer(leaves, wrap)
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the user's forward raises on symbolic values
        raise ModelError(_explain(error, model, tracer)) from error
    graph_module = fx.GraphModule(model, graph, type(model).__name__)
    # the hooks of these layers are nodes of the graph now: replace each layer by a copy without
    # hooks, which shares its parameters
    for name in sorted(tracer.unhooked_layers):
        unhooked_layer = copy.copy(graph_module.get_submodule(name))
        for attribute in HOOKS:
            setattr(unhooked_layer, attribute, OrderedDict())
        replace_submodule(graph_module, name, unhooked_layer)
    graph_module.graph.lint()
    return graph_module


def check_names(**arguments: object) -> None:
    """Raise `ConfigError` if an argument is no list of names, classes or pairs of names.

    `arguments`: name of an argument, for the message -> its value.
    """
    for argument, names in arguments.items():
        is_list = isinstance(names, Iterable) and not isinstance(names, str)
        entries: Any = names if is_list else [None]
        if not all(isinstance(entry, str | type | tuple | list) for entry in entries):
            raise ConfigError(f"{argument} takes a list of names, got {names!r}")


def _check_leaves(model: nn.Module, leaves: Leaves) -> None:
    """Raise `ConfigError` if a leaf matches nothing in the model."""
    check_names(leaves=leaves)
    modules = dict(model.named_modules())
    unknown_leaves: set[str] = set()
    for leaf in leaves:
        if not any(names_module(leaf, name, module) for name, module in modules.items()):
            unknown_leaves.add(leaf if isinstance(leaf, str) else leaf.__name__)
    if unknown_leaves:
        raise ConfigError(
            "a leaf must name a module or a class of the model, got"
            f" {', '.join(sorted(unknown_leaves))};"
            f" its modules: {', '.join(sorted(filter(None, modules)))}"
        )


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule with this qualified name."""
    modules = dict(model.named_modules())
    if not name or name not in modules:
        children = ", ".join(child for child, _ in model.named_children()) or "none"
        raise ConfigError(f"no submodule {name!r} in the model; its children: {children}")
    return modules[name]


def _explain(error: Exception, model: nn.Module, tracer: LeafTracer) -> str:
    """Return the message on a failed trace: the module and line that failed, and the ways out."""
    # torch.fx leaves the modules in which it fails on its stack, (name, class) each
    open_calls = [("", type(model)), *tracer.module_stack.values()]
    name, kind = open_calls[-1]
    line = failing_line(error) or "an unknown line"
    remedies = []
    if name:
        remedies.append(
            f"keep it whole and in float with --leaf {quote(name)} or --leaf {kind.__name__}"
        )
    remedies.append("trace only a traceable submodule with --only SUBMODULE")
    remedies.append(_rewrite_hint(str(error)))
    if "iterated" in str(error):  # torch.fx cannot unpack a tensor; torch.export knows its shape
        remedies.append("fuse with --input, profile, export and qat follow it by torch.export")
    numbered_remedies = [f"({number}) {remedy}" for number, remedy in enumerate(remedies, 1)]
    return (
        f"a traced model's control flow and shapes must not depend on data, but {kind.__name__}"
        f" ({name or 'the model itself'}) does at {line} ({_reason(error)}). Ways out:"
        f" {'; '.join(numbered_remedies)}"
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _rewrite_hint(text: str) -> str:
    """Return the usual remedy for torch.fx's message."""
    if "iterated" in text:
        return "pass a shape as one argument, view(shape) not view(*shape), do not unpack tensors"
    if "control flow" in text:
        return "replace `if` and `while` on tensors by torch.where or arithmetic"
    if "torch.fx.wrap" in text or "len" in text:
        return "keep the function's call as a node with --wrap len (or package.function)"
    return "use tensor operations only on what depends on the input"


# with a separator at the end, since torchvision is in the same folder as torch
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


def explain_export_failure(error: BaseException, model: nn.Module, *, fixed_batch: str = "") -> str:
    """Return one sentence on a failure of torch.export or of torch's exporter to ONNX.

    It has the module, the user's file and line, torch's message and remedies.

    Args:
        error: what was raised.
        model: the model that was exported.
        fixed_batch: the remedy "export with a fixed batch", in words; "" if that was done.
    """
    cause = root_cause(error)
    name = innermost_module(error, model) or innermost_module(cause, model)
    description = type(model.get_submodule(name)).__name__
    if name:
        description += f" ({name})"
    line = failing_line(cause) or failing_line(error)
    if line:
        description += f" at {line}"
    one_line = " ".join(str(cause).split())
    # torch's message repeats its condition in another form, "(unhinted: ...)"
    message, _, _ = one_line.partition(" (unhinted")
    remedy = _remedy(cause, name)
    # a fixed batch does not help if control flow depends on values
    if fixed_batch and "DataDependent" not in type(cause).__name__:
        remedy = f"{fixed_batch}, or {remedy}"
    return (
        f"torch.export must be able to follow the model, and cannot follow {description}"
        f" ({type(cause).__name__}: {message[:300]}); {remedy}"
    )


def root_cause(error: BaseException) -> BaseException:
    """Return the error from which `error` was raised, in however many steps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def innermost_module(error: BaseException, model: nn.Module) -> str:
    """Return the name of the submodule in whose forward `error` was raised, "" for the model."""
    names = {id(module.__dict__): name for name, module in model.named_modules()}
    innermost_name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):  # torch.export calls copies that share __dict__
            innermost_name = names.get(id(module.__dict__), innermost_name)
    return innermost_name


def failing_line(error: BaseException) -> str:
    """Return `file:line: code` of the user's deepest frame, else of a library's, or ''."""
    user_line = user_code_line(error)
    if user_line:
        return user_line
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _remedy(error: BaseException, name: str) -> str:
    """Return the remedy for an error of torch.export in a submodule, "" for the model itself."""
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error).lower():
        remedy = (
            "replace `if`, `while` and .item() on the values of tensors by torch.where or"
            " arithmetic"
        )
        if name:
            remedy += f"; profile can keep that module as one node with --leaf {name}"
        return remedy
    return "write it by tensor operations alone, which run in eval mode for inputs of these shapes"
