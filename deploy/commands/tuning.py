"""Options of the search and of what is demanded of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.numbers import Real
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.report.verdict import Gates
    from deploy.tuning.wish import Tuning

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """What `tuning_options` gathers from the command line."""

    wish: Tuning
    gates: Gates


def tuning_options(command: Command) -> Command:
    """Add how much is searched and what is demanded; the command gets them as `tuning`."""

    @wraps(command)
    def gathered(
        effort: int | None,
        plan: Path | None,
        max_loss: float | None,
        min_speedup: float | None,
        accept: bool,
        **words: Any,
    ) -> None:
        from deploy.report.verdict import Gates
        from deploy.tuning.wish import DEFAULT_EFFORT, Tuning

        if plan is not None and effort is not None:
            raise ConfigError(
                f"--plan is obeyed and nothing is searched, got --effort {effort} too; leave one"
                " of them away"
            )
        wish = Tuning(
            effort=DEFAULT_EFFORT if effort is None else effort,
            plan=plan,
            min_speedup=1.0 if min_speedup is None else min_speedup,
            max_loss=max_loss,
        )
        gates = Gates(max_loss=max_loss, min_speedup=min_speedup, accept=accept)
        command(tuning=TuningOptions(wish=wish, gates=gates), **words)

    wrapped: Command = gathered
    return base.added(wrapped, _options())


def _options() -> list[Callable[[Command], Command]]:
    return [
        base.option(
            "--effort",
            section=base.SEARCH,
            type=click.IntRange(0, 3),
            help="How much is tried to find what stays float and which method finds each range: 0"
            " nothing, 3 as long as it finds something.  [default: 1]",
        ),
        base.option(
            "--plan",
            section=base.SEARCH,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="A plan of an earlier build to obey.  [default: the one in --out, where it fits]",
        ),
        base.option(
            "--max-loss",
            section=base.SEARCH,
            type=Real(0, 1),
            help="Most that may be lost of accuracy, or of what FP32 says (0.01 is one in a"
            " hundred); more is unusable.",
        ),
        base.option(
            "--min-speedup",
            section=base.SEARCH,
            type=Real(min=0),
            help="Least speed over FP32, on a GPU over its runtime's own FP16; a slower engine is"
            " unusable.",
        ),
        base.option(
            "--accept",
            section=base.SEARCH,
            is_flag=True,
            help="Exit code 0 even where an engine is unusable.",
        ),
    ]
