"""`nn.Module` -> `fx.GraphModule`, and a failed trace said in the user's own lines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from shlex import quote
from typing import Any

from torch import fx, nn

from deploy.errors import ConfigError, ModelError
from deploy.fx.copied import unwrapped
from deploy.fx.hooks import computing, has_hooks, take_off
from deploy.fx.model_inputs import input_names
from deploy.fx.refusal import line_of
from deploy.fx.wrap import Function, global_wrap


class LeafTracer(fx.Tracer):
    """A tracer that keeps chosen modules whole, as one `call_module` node each."""

    def __init__(self, texts: frozenset[str], classes: tuple[type, ...]):
        super().__init__()
        self.texts = texts  # qualified names and class names
        self.classes = classes
        self.path: list[tuple[str, str]] = []  # (qualified name, class) of modules being traced
        self.unhooked: set[str] = set()  # layers whose hooks are nodes of their own

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """A placeholder for each input, also of a forward that takes them by name."""
        names = input_names(self.root)
        if names is None:
            found: tuple[Any, list[Any]] = super().create_args_for_root(
                root_fn, is_module, concrete_args
            )
            return found
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return root_fn, [self.root, *inputs]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Chosen leaves, and what torch.fx itself keeps whole (torch.nn's own modules)."""
        return self._is_chosen(m, module_qualified_name) or bool(
            super().is_leaf_module(m, module_qualified_name)
        )

    def _is_chosen(self, m: nn.Module, name: str) -> bool:
        named = name in self.texts or type(m).__name__ in self.texts
        return named or isinstance(m, self.classes)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Remember which module is being traced, so that a failure can name it."""
        name = self.path_of_module(m)
        self.path.append((name, type(m).__name__))
        if has_hooks(m) and self.is_leaf_module(m, name) and not self._is_chosen(m, name):
            self.unhooked.add(name)
            call = super().call_module
            with computing(m, lambda *a, **k: call(m, forward, a, k)):
                result = forward(*args, **kwargs)
        else:
            result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result


def trace(
    model: nn.Module,
    *,
    leaves: Sequence[str | type[nn.Module]] = (),
    wrap: Sequence[Function] = (),
) -> fx.GraphModule:
    """Trace `model` symbolically; the graph module shares its parameters.

    Args:
        model: any module whose control flow does not depend on data.
        leaves: modules to keep whole, by qualified name, class name or class.
        wrap: functions of any package, or builtins, whose calls stay nodes (see `global_wrap`).

    Raises:
        ConfigError: a leaf that names nothing in the model.
        ModelError: the model cannot be traced; the message names the module, the file and the
            line, and the remedies: leaf, split, rewrite.
    """
    model = unwrapped(model)
    classes = tuple(leaf for leaf in leaves if isinstance(leaf, type))
    texts = frozenset(leaf for leaf in leaves if isinstance(leaf, str))
    _check_leaves(model, texts, classes)
    tracer = LeafTracer(texts, classes)
    try:
        with global_wrap(*wrap):
            graph = tracer.trace(model)
    except Exception as error:  # whatever the user's forward raises on symbolic values
        raise ModelError(_explain(error, model, tracer)) from error
    graph_module = fx.GraphModule(model, graph, type(model).__name__)
    take_off(graph_module, tracer.unhooked)
    graph_module.graph.lint()
    return graph_module


def trace_only(
    model: nn.Module, only: str, *, leaves: Sequence[str | type[nn.Module]] = ()
) -> nn.Module:
    """A copy of `model` whose submodule `only` is traced and the rest is left as it is.

    Raises:
        ConfigError: no such submodule.
        ModelError: that submodule cannot be traced.
    """
    model = copy.deepcopy(model)
    replace_submodule(model, only, trace(submodule(model, only), leaves=leaves))
    return model


def submodule(model: nn.Module, name: str) -> nn.Module:
    """The submodule of that qualified name.

    Raises:
        ConfigError: there is none; the message lists the model's children.
    """
    modules = dict(model.named_modules())
    if not name or name not in modules:
        children = ", ".join(child for child, _ in model.named_children()) or "none"
        raise ConfigError(f"no submodule {name!r} in the model; its children: {children}")
    return modules[name]


def replace_submodule(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where the submodule `name` was."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _check_leaves(model: nn.Module, texts: frozenset[str], classes: tuple[type, ...]) -> None:
    known = set()
    for name, module in model.named_modules():
        known |= {name, type(module).__name__}
        known |= {kind.__name__ for kind in classes if isinstance(module, kind)}
    missing = sorted((texts | {kind.__name__ for kind in classes}) - known)
    if missing:
        raise ConfigError(
            f"a leaf must name a module or a class of the model, got {', '.join(missing)};"
            f" its modules: {', '.join(sorted(name for name, _ in model.named_modules() if name))}"
        )


def _explain(error: Exception, model: nn.Module, tracer: LeafTracer) -> str:
    name, kind = tracer.path[-1] if tracer.path else ("", type(model).__name__)
    where = line_of(error) or "an unknown line"
    ways = (
        [f"keep it whole and in float with --leaf {quote(name)} or --leaf {kind}"] if name else []
    )
    ways += ["trace only a part that can be, with --only SUBMODULE", _rewrite_hint(str(error))]
    if "iterated" in str(error):
        ways.append("fuse with --input, profile, export and qat follow it by torch.export")
    return (
        f"a traced model's control flow and shapes must not depend on data, but {kind}"
        f" ({name or 'the model itself'}) does at {where} ({_reason(error)}). Ways out: "
        + "; ".join(f"({i}) {way}" for i, way in enumerate(ways, 1))
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _rewrite_hint(text: str) -> str:
    """What usually lies behind torch.fx's message."""
    if "iterated" in text:
        return "pass a shape whole, view(shape) in place of view(*shape), and do not unpack tensors"
    if "control flow" in text:
        return "replace `if` and `while` on tensors by torch.where or arithmetic"
    if "torch.fx.wrap" in text or "len" in text:
        return "keep the function's call as a node with --wrap len (or package.function)"
    return "use tensor operations only on what depends on the input"
