"""Keeping calls of plain functions, of any package and builtins, in a traced graph.

`torch.fx.wrap` reaches only the module that calls it. `global_wrap` replaces a function wherever a
loaded module names it, while a `with` block lasts::

    with global_wrap(len):
        graph_module = trace(model)      # len(x) becomes a call_function node
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import fx

from deploy.errors import ConfigError

Function = Callable[..., Any]


@contextmanager
def global_wrap(*functions: Function) -> Iterator[None]:
    """Make calls of `functions` with a traced argument into graph nodes, until the block ends.

    Every loaded module's globals (and `builtins`) that name one of the functions are patched, and
    restored at exit and on exception. Not reached: a function held in a closure, a default
    argument or a class attribute. Not for several threads at once.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for function in functions:
            recorded = _recording(function)
            for names, name in list(_uses(function)):
                saved.append((names, name, function))
                names[name] = recorded
        yield
    finally:
        for names, name, function in reversed(saved):
            names[name] = function


def find_function(name: str) -> Function:
    """`len` or `package.module.function` -> the function.

    Raises:
        ConfigError: no such function.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module or "builtins"), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--wrap takes a builtin or package.module.function, got {name!r}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"--wrap takes a function, and {name!r} is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _uses(function: Function) -> Iterator[tuple[dict[str, Any], str]]:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        # torch.fx itself needs the real function to trace with
        if not isinstance(names, dict) or str(names.get("__name__", "")).startswith("torch.fx"):
            continue
        for name, value in list(names.items()):
            if value is function:
                yield names, name


def _recording(function: Function) -> Function:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        proxies: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda value: _keep_proxy(value, proxies))
        if not proxies:
            return function(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

    return record


def _keep_proxy(value: Any, proxies: list[fx.Proxy]) -> Any:
    if isinstance(value, fx.Proxy):
        proxies.append(value)
    return value
