"""Numbers of a command line: NaN is none, and no machine has a thousand cores to spare."""

from __future__ import annotations

import math
from typing import Any

import click

THREADS = click.IntRange(1, 1024)
MOST_BATCH = 65_536


class Real(click.FloatRange):
    """A finite number, within bounds where they are given."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; NaN would be below no bound and above none."""
        found = super().convert(value, param, ctx)
        if isinstance(found, float) and not math.isfinite(found):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return found


def batches(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """The whole numbers of an option, with commas between them; none where it is not given."""
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= MOST_BATCH for word in words):
        raise click.BadParameter(
            f"must be batches of 1 to {MOST_BATCH}, such as 1,2,4,8, got {text!r}"
        )
    return tuple(map(int, words))
