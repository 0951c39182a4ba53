"""What a shell completes: values of options that take a name out of a list.

The lists are looked up when a shell asks, so that no command imports anything for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def among(names: Callable[[], Iterable[str]]) -> Completer:
    """Complete one of these names; behind a comma the next of several."""
    return partial(_completed, names)


def _completed(
    names: Callable[[], Iterable[str]], _: click.Context, __: click.Parameter, typed: str
) -> list[CompletionItem]:
    before, comma, begun = typed.rpartition(",")
    chosen = before.split(",")
    left = (name for name in names() if name.startswith(begun) and name not in chosen)
    return [CompletionItem(f"{before}{comma}{name}") for name in left]


def presets() -> Iterable[str]:
    """Of `--preprocess`."""
    from deploy.feed.presets import PRESETS

    return PRESETS


def resizes() -> Iterable[str]:
    """Of `--resize`."""
    from deploy.feed.preprocess import RESIZES

    return RESIZES


def interpolations() -> Iterable[str]:
    """Of `--interpolation`."""
    from deploy.feed.preprocess import INTERPOLATIONS

    return INTERPOLATIONS


def colors() -> Iterable[str]:
    """Of `--color`."""
    from deploy.feed.preprocess import COLORS

    return COLORS


def layouts() -> Iterable[str]:
    """Of `--layout`."""
    from deploy.feed.preprocess import LAYOUTS

    return LAYOUTS


def repairs() -> Iterable[str]:
    """Of `--repair`."""
    from deploy.repairs import REPAIRS

    return (*REPAIRS, "all", "none")
