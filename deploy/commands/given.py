"""Which options the user gave, typed or in a file, so that one without effect is refused."""

from __future__ import annotations

import click
from click.core import ParameterSource

from deploy.commands.base import section_of
from deploy.errors import ConfigError


def typed(*names: str) -> list[str]:
    """Flags of these options of the running command that the user gave a value; of all of none."""
    return [_flag(option) for option in _given() if option.name in names or not names]


def typed_in(section: str) -> list[str]:
    """Flags of this section that the user gave a value."""
    return [_flag(option) for option in _given() if section_of(option) == section]


def refuse_without(flag: str, flags: list[str]) -> None:
    """Refuse `flags`, if there are any, since they say nothing without another.

    Raises:
        ConfigError: there are some.
    """
    if flags:
        many = len(flags) > 1
        raise ConfigError(
            f"{' and '.join(flags)} {'go' if many else 'goes'} with {flag}, which was not given;"
            f" give it too, or leave {'them' if many else 'it'} away"
        )


def _given() -> list[click.Option]:
    context = click.get_current_context()
    untyped = (None, ParameterSource.DEFAULT)
    return [
        option
        for option in context.command.get_params(context)
        if isinstance(option, click.Option) and option.name is not None
        if context.get_parameter_source(option.name) not in untyped
    ]


def _flag(option: click.Option) -> str:
    return max(option.opts, key=len)
