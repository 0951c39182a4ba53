"""`--help` in sections: an option says which one it stands in, a command prints them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from deploy.errors import ConfigError

MODEL, IMAGES, CALIBRATION, CACHE = "Model", "Images", "Calibration", "Cache"
SEARCH, TARGETS, MEASURING, GENERAL = "Search", "Targets", "Measuring", "General"
# The order of a user's work; a section that is not named here, such as a target's, comes between.
_FIRST = (MODEL, IMAGES, CALIBRATION, CACHE, SEARCH, TARGETS)
_LAST = (MEASURING, GENERAL)

Command = TypeVar("Command", bound=Callable[..., Any])

_NUMBERS = {"integer": "N", "float": "X"}  # click's name of a type -> how a value is shown


class SectionOption(click.Option):
    """A click option that stands in a section of the help."""

    def __init__(self, *words: Any, section: str, **rest: Any) -> None:
        super().__init__(*words, **rest)
        self.section = section
        if self.metavar is None and not self.is_flag and self.type.name.split()[0] in _NUMBERS:
            self.metavar = _NUMBERS[self.type.name.split()[0]]  # click's INTEGER RANGE says less


option = partial(click.option, cls=SectionOption)


def added(command: Command, options: Sequence[Callable[..., Any]]) -> Command:
    """A command with these options, in their order."""
    for one in reversed(options):
        command = one(command)
    return command


class SectionedCommand(click.Command):
    """A command whose options are listed by section.

    Raises:
        ConfigError: two options of one flag.
    """

    def __init__(self, *words: Any, **rest: Any) -> None:
        super().__init__(*words, **rest)
        seen: dict[str, str] = {}
        for param in self.params:
            for flag in (*param.opts, *param.secondary_opts):
                if flag in seen and flag.startswith("-"):
                    raise ConfigError(
                        f"a flag belongs to one option of a command, got {flag} in"
                        f" {seen[flag]} and in {section_of(param)}; rename one of them"
                    )
                seen[flag] = section_of(param)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one heading a section."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                rows.setdefault(section_of(param), []).append(record)
        for title in sorted(rows, key=place):
            with formatter.section(title):
                formatter.write_dl(rows[title])


def section_of(param: click.Parameter) -> str:
    """The section of an option; what has none, such as `--help`, is general."""
    return param.section if isinstance(param, SectionOption) else GENERAL


def retired(
    flag: str, way_out: str, *, is_flag: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag of earlier versions, kept to say what took its place."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise ConfigError(f"{flag} is no option of {ctx.info_name} any more: {way_out}")

    return click.option(
        flag, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse, help=way_out
    )


def place(title: str) -> int:
    """Where a section stands in the help, for sorting."""
    if title in _LAST:
        return len(_FIRST) + 1 + _LAST.index(title)
    return _FIRST.index(title) if title in _FIRST else len(_FIRST)
