"""Options that all commands share: sections of `--help`, `--quiet`, `--json`, `--threads`.

A `SectionOption` names the section of the help it is listed in; `SectionedCommand` prints the
sections in the order of a user's work.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from deploy.errors import ConfigError
from deploy.files.reading import refuse_no_path
from deploy.machine import MAX_THREADS
from deploy.terminal import say_data, say_lines, separate_stdout, show_progress, without_text

MODEL, IMAGES, CALIBRATION, CACHE = "Model", "Images", "Calibration", "Cache"
SEARCH, TARGETS, MEASURING, GENERAL = "Search", "Targets", "Measuring", "General"
# The order of a user's work; "" stands for other sections, such as a target's.
_ORDER = (MODEL, IMAGES, CALIBRATION, CACHE, SEARCH, TARGETS, "", MEASURING, GENERAL)

THREADS = click.IntRange(1, MAX_THREADS)


class NamedPath(click.Path):
    """A path that is not empty, as an empty variable of a shell is: it would be this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a path; BadParameter if it is empty."""
        if not value:
            self.fail("a path must not be empty; name a file or a folder", param, ctx)
        return super().convert(value, param, ctx)


FILE = NamedPath(path_type=Path)


class InputPath(NamedPath):
    """A path that must exist: `SectionedCommand` checks it before anything heavy is imported.

    Patterns, `file.py:function` and `package:name` are left to what reads them.

    Raises:
        ConfigError: the address of a page or a stream.
    """

    def __init__(self, what: str, path_type: type = Path) -> None:
        super().__init__(path_type=path_type)
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a path, in which the two slashes of an address would be one."""
        if value:
            refuse_no_path(value)
        return super().convert(value, param, ctx)

    def check(self, path: object, *, advice: str = "check the path") -> None:
        """Raise `ConfigError` if there is nothing; a path that may not be read is not judged."""
        if set("*?[:") & set(str(path)):
            return
        try:
            os.stat(str(path))
        except FileNotFoundError as error:
            raise ConfigError(f"{path} must be {self.what}, got nothing there; {advice}") from error
        except (OSError, ValueError):
            return


class OutputFile(NamedPath):
    """A file to write, of a kind in `deploy.files.manifest.MARKS`; `-` prints JSON to the screen.

    A file that calib8 did not write is refused while the arguments are parsed.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(path_type=Path)
        self.kind = kind
        self.name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a path; ExportError as `deploy.files.manifest.name_output`."""
        from deploy.files.manifest import name_output

        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        is_screen = self.kind == "JSON file" and path == _SCREEN
        # click's `resilient_parsing`: a shell completes the line, and nothing is run
        if not is_screen and not (ctx and ctx.resilient_parsing):
            name_output(path, self.kind)
        return path


INPUT = InputPath("a file")
MODEL_FILE = InputPath("an ONNX file")
BUILD_FOLDER = InputPath("the folder of a build")
IMAGE_SOURCE = InputPath(
    "a folder of images or arrays, a list file, a pattern such as 'photos/*.jpg', or a file", str
)

Command = TypeVar("Command", bound=Callable[..., Any])
CommandFunction = Callable[..., None]
CommandArguments = dict[str, Any]  # name of an argument -> its value
Decorator = Callable[[CommandFunction], CommandFunction]  # adds options to a command

_NUMBERS = {"integer": "N", "float": "X"}  # click's name of a type -> metavar


class SectionOption(click.Option):
    """A click option with the section of the help that lists it, which shows its default."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        if settings.get("default") is not None:
            settings.setdefault("show_default", True)
        super().__init__(*names, **settings)
        self.section = section
        type_name = self.type.name.split()[0]  # "integer" of "integer range"
        if self.metavar is None and not self.is_flag and type_name in _NUMBERS:
            self.metavar = _NUMBERS[type_name]  # shorter than click's INTEGER RANGE


option = partial(click.option, cls=SectionOption)
model_option = partial(option, section=MODEL)
image_option = partial(option, section=IMAGES)
calibration_option = partial(option, section=CALIBRATION)
cache_option = partial(option, section=CACHE)
search_option = partial(option, section=SEARCH)
target_option = partial(option, section=TARGETS)
measuring_option = partial(option, section=MEASURING)
general_option = partial(option, section=GENERAL)


model_argument = click.argument("model", type=MODEL_FILE)
# of a command without sections; needs type= and help=
out_option = partial(click.option, "-o", "--out", required=True)


def add_options(command: Command, options: Sequence[Callable[..., Any]]) -> Command:
    """Add options to a command, in their order."""
    for add_option in reversed(options):
        command = add_option(command)
    return command


def gathered_options(
    gather: Callable[[CommandArguments], None], options: Sequence[Callable[..., Any]]
) -> Decorator:
    """Return a decorator that adds options to a command, which gets their values gathered.

    `gather`: takes the values of the options out of a command's arguments, and puts in what the
    command gets in their place.
    """

    def add(command: CommandFunction) -> CommandFunction:
        """Return the command with the options."""

        @wraps(command)
        def run(**arguments: Any) -> None:
            """Gather the values of the options, then run the command."""
            gather(arguments)
            command(**arguments)

        return add_options(run, options)

    return add


_MAX_UNFOLDED_OPTIONS = 16  # a command with more has a short `--help`
_SHORT_HELP_OPTIONS = 12
# The options that most people need, in the order of use.
COMMON = """
--against --images --preprocess --target --for --prefer --out --eval-images --labels --ranges
--epochs --effort --max-loss --min-speedup --accept --input --keep-float --qdq --mode --method
--runtime --batch --duration --profile --min-sqnr --strategy --all --model
--cache --keep-rounding --bits --teacher --checkpoint --limit --soc --require-cache --refresh
--resume --shard --ascend-config --trt-version --device --amp --threads --force --html --json
"""


def _print_help_all(context: click.Context, param: click.Parameter, is_given: bool) -> None:
    """Print the help of a command with all its options, and exit."""
    if is_given and not context.resilient_parsing:
        context.meta[_ALL] = True
        say_lines(context.get_help())
        context.exit()


_ALL = "calib8.help-all"
_HELP_ALL = SectionOption(
    ["--help-all"],
    section=GENERAL,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_help_all,
    help="Show all options and exit.",
)


class SectionedCommand(click.Command):
    """A command whose options are listed by section.

    If there are many options, `--help` lists the first ones of `COMMON`, and `--help-all` all.
    """

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **settings)
        options = [param for param in self.params if isinstance(param, click.Option)]
        flags = {flag for option in options for flag in option.opts}
        self.short_help_flags: list[str] = []  # none if `--help` lists all
        if len(options) > _MAX_UNFOLDED_OPTIONS:
            common_flags = [flag for flag in COMMON.split() if flag in flags]
            self.short_help_flags = common_flags[:_SHORT_HELP_OPTIONS]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and check the paths.

        Raises:
            ConfigError: a path that must exist does not.
            UsageError: an option of images is repeated: click would take the last one.
        """
        flags = [arg.partition("=")[0] for arg in args]  # click empties `args`
        extra_args = super().parse_args(ctx, args)
        for param in self.params:
            if param.type is IMAGE_SOURCE and flags.count(param.opts[0]) > 1:
                raise click.UsageError(
                    f"{param.opts[0]} takes one path; a list file or a pattern such as"
                    " 'photos*/*.jpg' names the images of several folders",
                    ctx,
                )
            name = param.name or ""
            value = ctx.params.get(name)
            if not isinstance(param.type, InputPath) or not value or ctx.resilient_parsing:
                continue  # with `resilient_parsing` a shell completes the line
            advice = "check the path"
            if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                advice += " in the file of --config; a relative path starts at the current folder"
            paths = value if isinstance(value, tuple) else (value,)
            for path in paths:
                param.type.check(path, advice=advice)
        return extra_args

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what a user's code prints meanwhile goes to stderr."""
        with separate_stdout():
            return super().invoke(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with `--help` and `--help-all`."""
        params = super().get_params(ctx)
        return [*params, _HELP_ALL] if self.short_help_flags else params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the short help, or all with one heading a section.

        A record, click's word, is the pair (flags, help text) of an option.
        """
        records_by_section: dict[str, list[tuple[str, str]]] = {}
        record_by_flag: dict[str, tuple[str, str]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                records_by_section.setdefault(section_of(param), []).append(record)
                record_by_flag |= dict.fromkeys(param.opts, record)

        if self.short_help_flags and _ALL not in ctx.meta:
            with formatter.section("Options"):
                formatter.write_dl([record_by_flag[flag] for flag in self.short_help_flags])
            formatter.write_paragraph()
            option_count = sum(map(len, records_by_section.values()))
            formatter.write_text(f"--help-all lists all {option_count} options.")
            return
        for title in sorted(records_by_section, key=section_position):
            with formatter.section(title):
                formatter.write_dl(records_by_section[title])


sectioned_command = partial(click.command, cls=SectionedCommand)


def section_of(param: click.Parameter) -> str:
    """Return the section of an option; options without one, such as `--help`, are general."""
    return param.section if isinstance(param, SectionOption) else GENERAL


def section_position(title: str) -> int:
    """Return the position of a section in the help, as a sort key."""
    return _ORDER.index(title if title in _ORDER else "")


_MAX_BATCH = 65_536


class Real(click.FloatRange):
    """A finite number, within bounds where they are given."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and refuse infinity and NaN, which no bound would refuse."""
        number = super().convert(value, param, ctx)
        if isinstance(number, float) and not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return the bounds as text for the help; "" without bounds."""
        return "" if self.min is None and self.max is None else super()._describe_range()


def parse_batches(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Parse batch sizes separated by commas; () if the option is not given."""
    if text is None:
        return ()
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and 0 < int(size) <= _MAX_BATCH for size in sizes):
        raise click.BadParameter(
            f"must be batches of 1 to {_MAX_BATCH}, such as 1,2,4,8, got {text!r}"
        )
    return tuple(map(int, sizes))


task_option = measuring_option(
    "--task",
    metavar="NAME",
    help="Task of the outputs, in place of the recognised one: boxes, classes, labels, ..., or none"
    " to compare values.",
)


def given_flags(*names: str) -> list[str]:
    """Return the flags of these options that the user gave; without names, of all options."""
    return [_long_flag(option) for option in _given_options() if option.name in names or not names]


def given_flags_in(section: str) -> list[str]:
    """Return the flags of a section that the user gave."""
    return [_long_flag(option) for option in _given_options() if section_of(option) == section]


def refuse_flags(flags: list[str], *, without: str) -> None:
    """Refuse the given `flags`, if there are any: they have no effect without another option.

    `without`: the option that was not given, or what was not given instead of one.
    """
    if flags:
        verb, pronoun = ("goes", "it") if len(flags) == 1 else ("go", "them")
        raise ConfigError(
            f"{' and '.join(flags)} {verb} with {without}, which was not given;"
            f" give it too, or leave {pronoun} out"
        )


def refuse_image_flags() -> None:
    """Refuse the options of images that the user gave, if --images was not."""
    refuse_flags(given_flags_in(IMAGES), without="--images")


def refuse_beside(flag: str, *names: str) -> None:
    """Refuse the flags of these options that the user gave, since `flag` excludes them."""
    if flags := given_flags(*names):
        raise ConfigError(
            f"{flag} cannot be given with {' and '.join(flags)}; leave one of them out"
        )


def refuse_given(*names: str, without: str) -> None:
    """Refuse the flags of these options that the user gave, or of any; see `refuse_flags`."""
    refuse_flags(given_flags(*names), without=without)


def _given_options() -> Iterator[click.Option]:
    """Yield the options that the user gave, on the command line or in the file of --config."""
    context = click.get_current_context()
    for param in context.command.get_params(context):
        if isinstance(param, click.Option) and param.name is not None:
            source = context.get_parameter_source(param.name)
            if source not in (None, ParameterSource.DEFAULT):
                yield param


def _long_flag(option: click.Option) -> str:
    """Return the long form of an option's flag: "--out" of -o and --out."""
    return max(option.opts, key=len)


_SCREEN = Path("-")

shows_progress = show_progress()  # decorator of a command without `--quiet`

verbose_option = general_option(
    "-v", "--verbose", is_flag=True, help="Print everything, with counts of images and inferences."
)
json_option = general_option(
    "--json",
    "json_path",
    type=OutputFile("JSON file"),
    help="Write the results as JSON; - prints it in place of the text.",
)
html_option = general_option(
    "--html", "html_path", type=OutputFile("page"), help="Write the results as an HTML page."
)
threads_option = partial(
    option,
    "--threads",
    type=THREADS,
    help="Worker threads; results do not depend on them.  [default: up to 4 cores]",
)


def quietable(*file_flags: str) -> Decorator:
    """Return a decorator that adds `--quiet` to a command, and shows its progress.

    `--json -` suppresses the command's text too, since it prints JSON in its place.

    Args:
        file_flags: of a command that otherwise writes no file, the flags that write its result to
            a file or print it by `say_data`. With --quiet one of them must be given.
    """

    def add_quiet(command: CommandFunction) -> CommandFunction:
        """Return the command with --quiet."""

        @wraps(command)
        def run(quiet: bool, **arguments: Any) -> None:
            """Run the command: without text if it is quiet, else with progress."""
            if quiet and arguments.get("verbose"):
                raise click.UsageError("--quiet and --verbose exclude each other")
            # a command with `file_flags` writes no other file: if it is quiet and none of them is
            # given, it would have no result
            if quiet and file_flags and set(file_flags).isdisjoint(given_flags()):
                refuse_flags(["--quiet"], without=" or ".join(file_flags))
            prints_json = arguments.get("json_path") == _SCREEN
            with without_text(quiet or prints_json), show_progress(not quiet):
                command(**arguments)

        quiet_option = general_option(
            "-q",
            "--quiet",
            is_flag=True,
            help="Print errors and warnings only; files are still written.",
        )
        return quiet_option(run)

    return add_quiet


def put_json(path: Path | None, make_document: Callable[[], object]) -> None:
    """Write the JSON that `--json` asks for; do nothing without the option.

    Args:
        path: value of `--json`: a file, or `-` for the screen; None without the option.
        make_document: returns plain JSON types; not called without the option.

    Raises:
        ExportError: the file cannot be written, or is an input.
    """
    if path is None:
        return

    from deploy.files.atomic import write_text

    text = json.dumps(make_document(), indent=1, allow_nan=False) + "\n"
    if path == _SCREEN:
        say_data(text)
    else:
        write_text(path, text)
