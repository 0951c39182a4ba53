"""Numbers of a command line: NaN is none, and no machine has a thousand cores to spare."""

from __future__ import annotations

import math
from typing import Any

import click

THREADS = click.IntRange(1, 1024)


class Real(click.FloatRange):
    """A finite number, within bounds where they are given."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; NaN would be below no bound and above none."""
        found = super().convert(value, param, ctx)
        if isinstance(found, float) and not math.isfinite(found):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return found
