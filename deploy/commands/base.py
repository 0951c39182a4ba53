"""What all commands share: options in sections of `--help`, completion, `--quiet`, `--json`.

A `SectionOption` names the section of the help it is listed in; `SectionedCommand` prints the
sections in the order of a user's work. Completion looks its names up only when a shell asks, so
that no command imports anything for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from deploy.errors import ConfigError
from deploy.terminal import say_data, show_progress, without_text

MODEL, IMAGES, CALIBRATION, CACHE = "Model", "Images", "Calibration", "Cache"
SEARCH, TARGETS, MEASURING, GENERAL = "Search", "Targets", "Measuring", "General"
# The order of a user's work; other sections, such as a target's, come between.
_FIRST = (MODEL, IMAGES, CALIBRATION, CACHE, SEARCH, TARGETS)
_LAST = (MEASURING, GENERAL)

THREADS = click.IntRange(1, 1024)
FILE = click.Path(path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])

_NUMBERS = {"integer": "N", "float": "X"}  # click's name of a type -> metavar


class SectionOption(click.Option):
    """A click option with the section of the help that lists it, which shows its default."""

    def __init__(self, *words: Any, section: str, **rest: Any) -> None:
        if rest.get("default") is not None:
            rest.setdefault("show_default", True)
        super().__init__(*words, **rest)
        self.section = section
        if self.metavar is None and not self.is_flag and self.type.name.split()[0] in _NUMBERS:
            self.metavar = _NUMBERS[self.type.name.split()[0]]  # shorter than click's INTEGER RANGE


option = partial(click.option, cls=SectionOption)
model_option = partial(option, section=MODEL)
image_option = partial(option, section=IMAGES)
calibration_option = partial(option, section=CALIBRATION)
cache_option = partial(option, section=CACHE)
search_option = partial(option, section=SEARCH)
target_option = partial(option, section=TARGETS)
measuring_option = partial(option, section=MEASURING)
general_option = partial(option, section=GENERAL)


def add_options(command: Command, options: Sequence[Callable[..., Any]]) -> Command:
    """Add options to a command, in their order."""
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
        for title in sorted(rows, key=section_position):
            with formatter.section(title):
                formatter.write_dl(rows[title])


def section_of(param: click.Parameter) -> str:
    """The section of an option; options without one, such as `--help`, are general."""
    return param.section if isinstance(param, SectionOption) else GENERAL


def retired_option(
    flag: str, way_out: str, *, is_flag: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag of earlier versions, which is refused with its replacement."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise ConfigError(f"{flag} is no option of {ctx.info_name} any more: {way_out}")

    return click.option(
        flag, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse, help=way_out
    )


def section_position(title: str) -> int:
    """Position of a section in the help, as a sort key."""
    if title in _LAST:
        return len(_FIRST) + 1 + _LAST.index(title)
    return _FIRST.index(title) if title in _FIRST else len(_FIRST)


MOST_BATCH = 65_536


class Real(click.FloatRange):
    """A finite number, within bounds where they are given."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and refuse infinity and NaN, which no bound would refuse."""
        found = super().convert(value, param, ctx)
        if isinstance(found, float) and not math.isfinite(found):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return found


def parse_batches(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Parse batch sizes separated by commas; () if the option is not given."""
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= MOST_BATCH for word in words):
        raise click.BadParameter(
            f"must be batches of 1 to {MOST_BATCH}, such as 1,2,4,8, got {text!r}"
        )
    return tuple(map(int, words))


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_names(names: Callable[[], Iterable[str]]) -> Completer:
    """Complete one of these names; after a comma the next of several."""
    return partial(_completed, names)


def complete_names_of(module: str, attribute: str, *more: str) -> Completer:
    """Complete one of the names in an attribute of a module, or in `more`."""
    return complete_names(lambda: (*getattr(import_module(module), attribute), *more))


def _completed(
    names: Callable[[], Iterable[str]], _: click.Context, __: click.Parameter, typed: str
) -> list[CompletionItem]:
    before, comma, begun = typed.rpartition(",")
    chosen = before.split(",")
    left = (name for name in names() if name.startswith(begun) and name not in chosen)
    return [CompletionItem(f"{before}{comma}{name}") for name in left]


def given_flags(*names: str) -> list[str]:
    """Flags of these options that the user gave; without names, of all options."""
    return [_flag(option) for option in _given() if option.name in names or not names]


def given_flags_in(section: str) -> list[str]:
    """Flags of a section that the user gave."""
    return [_flag(option) for option in _given() if section_of(option) == section]


def refuse_without(flag: str, flags: list[str]) -> None:
    """Refuse `flags`, if there are any, since they have no effect without `flag`."""
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


_SCREEN = Path("-")

CommandFunction = Callable[..., None]

verbose_option = general_option(
    "-v", "--verbose", is_flag=True, help="Print counts: images decoded, inferences run."
)
json_option = general_option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write the results as JSON; - prints it in place of the text.",
)
html_option = general_option(
    "--html", "html_path", type=FILE, metavar="FILE", help="Write the results as an HTML page."
)
_quiet_option = general_option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print errors and warnings only; files are written all the same.",
)


def shows_progress(command: CommandFunction) -> CommandFunction:
    """Show progress on stderr, for a command without `--quiet`."""

    @wraps(command)
    def run(**words: Any) -> None:
        with show_progress():
            command(**words)

    return run


def quietable(*files: str) -> Callable[[CommandFunction], CommandFunction]:
    """Add `--quiet` to a command that shows progress; JSON on stdout replaces the text too.

    Args:
        files: flags of which one must be given with --quiet, if the command writes nothing else.
    """

    def added(command: CommandFunction) -> CommandFunction:
        @wraps(command)
        def gathered(quiet: bool, **words: Any) -> None:
            if quiet and words.get("verbose"):
                raise click.UsageError("--quiet and --verbose exclude each other")
            if quiet and files and not set(files) & set(given_flags()):
                refuse_without(" or ".join(files), ["--quiet"])
            with ExitStack() as stack:
                stack.enter_context(without_text(quiet or words.get("json_path") == _SCREEN))
                stack.enter_context(show_progress(not quiet))
                command(**words)

        return _quiet_option(gathered)

    return added


def put_json(path: Path | None, make: Callable[[], object]) -> None:
    """Write the JSON that `--json` asks for; do nothing without the option.

    Raises:
        ExportError: the file cannot be written, or is an input.
    """
    if path is None:
        return
    import json

    from deploy.files.atomic import write_text

    text = json.dumps(make(), indent=1, allow_nan=False) + "\n"
    if path == _SCREEN:
        say_data(text)
    else:
        write_text(path, text)
