"""Hooks of layers, which a graph calls as wholes, made operations of the graph.

torch.fx keeps a layer of torch.nn as one node and looks at nothing in it, so what a hook on the
layer computes would belong to a node that passes replace::

    conv with a forward hook (y -> 2 y)      becomes      conv -> mul
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from deploy.errors import ModelError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward hook or a forward pre-hook is registered on the module itself."""
    return any(getattr(module, name) for name in _HOOKS)


@contextmanager
def computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a call of `module` run its hooks around `forward` in place of its own."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def take_off(graph_module: fx.GraphModule, names: Iterable[str]) -> None:
    """Put modules without hooks, of the same parameters, where hooks are in the graph by now."""
    for name in sorted(names):
        parent, _, child = name.rpartition(".")
        setattr(graph_module.get_submodule(parent), child, _bare(graph_module.get_submodule(name)))


def refuse_hooks(module: nn.Module, what: str) -> None:
    """Raise `ModelError` where what the module computes is not all it gives."""
    if has_hooks(module):
        raise ModelError(
            f"{what} must compute its output alone, got a forward hook on it; do in the model's"
            " forward what the hook does, or take it off (handle.remove())"
        )


def _bare(module: nn.Module) -> nn.Module:
    bare = copy.copy(module)
    for name in _HOOKS:
        setattr(bare, name, OrderedDict())
    return bare
