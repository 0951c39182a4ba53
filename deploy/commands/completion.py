"""What a shell completes: values of options that take a name out of a list.

The lists are looked up when a shell asks, so that no command imports anything for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def among(names: Callable[[], Iterable[str]]) -> Completer:
    """Complete one of these names; behind a comma the next of several."""
    return partial(_completed, names)


def among_those_of(module: str, attribute: str, *more: str) -> Completer:
    """Complete one of the names that a module holds, or of `more`."""
    return among(lambda: (*getattr(import_module(module), attribute), *more))


def _completed(
    names: Callable[[], Iterable[str]], _: click.Context, __: click.Parameter, typed: str
) -> list[CompletionItem]:
    before, comma, begun = typed.rpartition(",")
    chosen = before.split(",")
    left = (name for name in names() if name.startswith(begun) and name not in chosen)
    return [CompletionItem(f"{before}{comma}{name}") for name in left]
