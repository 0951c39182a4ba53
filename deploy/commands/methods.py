"""`--method` and the searches' parameters, made from the rows of the table of searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import wraps
from typing import Any, get_type_hints

import click

from calibrators.searches import DEFAULT_METHOD, SEARCHES
from deploy.commands import base, given
from deploy.method import Method

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of one or more searches, and what the help says of it."""

    name: str
    kind: type
    help: str
    default: object
    takers: tuple[str, ...]

    @property
    def flag(self) -> str:
        """As a user types it."""
        return f"--{self.name.replace('_', '-')}"


def parameters() -> tuple[Parameter, ...]:
    """The parameters of all searches, each name once."""
    found: dict[str, tuple[type, Field[Any], list[str]]] = {}
    for method, search in SEARCHES.items():
        hints = get_type_hints(search.params)
        for held in fields(search.params):
            _, _, takers = found.setdefault(held.name, (hints[held.name], held, []))
            takers.append(method)
    return tuple(
        Parameter(
            name=name,
            kind=kind,
            help=held.metadata["help"],
            default=held.default,
            takers=tuple(takers),
        )
        for name, (kind, held, takers) in found.items()
    )


def method_options(command: Command) -> Command:
    """Add `--method` and the parameters; the command gets `method`, and `asked`: flags typed."""
    known = parameters()

    @wraps(command)
    def gathered(method: str, **words: Any) -> None:
        values = {p.name: words.pop(p.name) for p in known}
        chosen = Method.of(method, {k: v for k, v in values.items() if v is not None})
        asked = tuple(given.typed("method", *values))
        command(method=chosen, asked=asked, **words)

    wrapped: Command = gathered
    for parameter in reversed(known):
        wrapped = _option(parameter)(wrapped)
    return base.option(
        "--method",
        section=base.CALIBRATION,
        type=click.Choice(list(SEARCHES)),
        default=DEFAULT_METHOD,
        show_default=True,
        help=f"How clip ranges are searched: {'; '.join(_said())}.",
    )(wrapped)


def _said() -> list[str]:
    return [f"{name} {search.help}" for name, search in SEARCHES.items()]


def _option(parameter: Parameter) -> Callable[[Command], Command]:
    flag = parameter.kind is bool
    return base.option(
        parameter.flag,
        parameter.name,
        section=base.CALIBRATION,
        type=None if flag else parameter.kind,
        is_flag=flag,
        default=None,
        help=f"{parameter.help} For --method {' and '.join(parameter.takers)}."
        f"  [default: {parameter.default}]",
    )
