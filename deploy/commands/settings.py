"""Options of a build's search, and `--config`: options from a TOML file, which each build writes.

::

    calib8.toml   [build]             an option on the command line overrides the file. A key is a
                  model = "net.onnx"  flag without its dashes; a repeatable option is a list. Paths
                  images = "photos/"  are relative to the folder in which the command runs, as on
                  target = ["ascend"] the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from deploy.commands import base
from deploy.commands.base import CommandArguments, Real, SectionedCommand
from deploy.errors import ConfigError, did_you_mean
from deploy.files.manifest import MANIFEST_NAME, SETTINGS
from deploy.tuning import CPU_NAMES, PREFERENCES

_FIRST_LINE = "# The options of a build: calib8 {} --config {}"
# of one run only, never in a file
_ONE_RUN_KEYS = frozenset(("config", "trust-config", "force", "resume", "help"))
# these say where and how a build runs, not what it builds; the next build has another cache
_UNWRITTEN_KEYS = _ONE_RUN_KEYS.union(
    ("out", "threads", "verbose", "quiet", "json", "scheduler", "send", "pieces", "retries"),
    ("require-cache", "refresh"),
)
# option on the command line -> options of the file that have no effect then
_OVERRIDDEN_OPTIONS = {
    "split": ("plan", "effort", "prefer"),
    "plan": ("split", "effort", "prefer"),
    "effort": ("split", "plan"),
    "prefer": ("split", "plan"),
    "refresh": ("split", "plan"),
    "images": ("calibrator_script",),
    "calibrator_script": ("images",),
}
_UNDECODED_BYTE = re.compile("[\ud800-\udfff]")  # in a file name, which UTF-8 cannot encode
_META = "calib8.options"  # key in a click context: parameter -> value on the line or in the file

config_options = partial(
    base.add_options,
    options=(
        base.general_option(
            "--config",
            type=base.FILE,
            expose_value=False,
            help="Read options from a TOML file; options on the command line override it. With the"
            f" {SETTINGS} of a build, --out is its folder.",
        ),
        base.general_option(
            "--trust-config",
            is_flag=True,
            expose_value=False,
            help="Run the code that --config names although another user can write the file.",
        ),
    ),
)


class ConfiguredCommand(SectionedCommand):
    """A command with `--config`, which records the options given on the line or in the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the file's values for options that the command line lacks.

        Raises:
            ConfigError: the file cannot be read, has an unknown option, or a value of the wrong
                type.
        """
        # parse a first time to find --config
        parsed_values, _, _ = self.make_parser(ctx).parse_args(list(args))
        # parameter -> value on the command line, without missing arguments: click parses these as
        # None, or as an object that marks them
        line_values = {
            name: value
            for name, value in parsed_values.items()
            if isinstance(value, str | bool | list | tuple)
        }
        file_values: dict[str, Any] = {}
        default_out: dict[str, Any] = {}
        if "config" in line_values:
            file = Path(str(line_values["config"]))
            file_values = self._read_config(ctx, file, line_values)
            if (file.parent / MANIFEST_NAME).exists():  # the file of a build: build there again
                default_out = {"out": str(file.parent)}
        ctx.meta[_META] = {**file_values, **line_values}
        # parse again: click takes the values of `default_map` for options that are not on the line
        ctx.default_map = {**default_out, **file_values}
        return super().parse_args(ctx, args)

    def _read_config(
        self, ctx: click.Context, file: Path, line_values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return parameter -> value in a file of options, unless the command line overrides it.

        A file may name code to run, such as a metric. Until the command ends, such code runs only
        if the user typed its name too, or if no other user can write the file.
        """
        file_values = options_in(self, file)
        for name in _OVERRIDDEN_OPTIONS.keys() & line_values.keys():
            for overridden_name in _OVERRIDDEN_OPTIONS[name]:
                file_values.pop(overridden_name, None)
        if "trust_config" not in line_values:
            from deploy.files.usercode import distrust_config

            typed_texts: list[str] = []
            for value in line_values.values():
                typed_texts += _value_texts(value)
            ctx.with_resource(distrust_config(file, typed_texts))
        return file_values


def settings_text() -> str:
    """Return the options of the running command as the text of a file that `--config` reads."""
    context = click.get_current_context()
    return "\n".join(_setting_lines(context.command, context.meta[_META])) + "\n"


def _value_texts(value: Any) -> list[str]:
    """Return the texts of an option's value, which is a list if the option may be repeated."""
    return list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]


def _setting_lines(command: click.Command, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a TOML file with the options that decide what a command builds.

    Args:
        command: the command.
        values: parameter -> value on the command line or in the file of `--config`.
    """
    from deploy.files import toml

    yield _FIRST_LINE.format(command.name, SETTINGS)
    yield ""
    yield f"[{command.name}]"
    for key, param in _param_by_key(command).items():
        if param.name not in values or key in _UNWRITTEN_KEYS:
            continue
        value = values[param.name]
        if any(map(_UNDECODED_BYTE.search, _value_texts(value))):  # TOML holds Unicode only
            yield f"# {key} has a name that is no text: it must be typed"
        else:
            yield f"{toml.toml_key(key)} = {_toml_value(param, value)}"


def _toml_value(param: click.Parameter, value: Any) -> str:
    """Return a value as TOML: a number if the option takes a number."""
    from deploy.files import toml

    if isinstance(value, list | tuple):
        value = _value_texts(value)
    elif isinstance(value, str):
        if isinstance(param.type, click.types.IntParamType):
            value = int(value)
        elif isinstance(param.type, click.types.FloatParamType):
            value = float(value)
    return toml.toml_value(value)


def _param_by_key(command: click.Command) -> dict[str, click.Parameter]:
    """Return key in the file -> parameter."""
    return {max(param.opts, key=len).lstrip("-"): param for param in command.params}


def options_in(command: click.Command, path: Path) -> dict[str, Any]:
    """Read parameter -> value from a file with the options of a command.

    Raises:
        ConfigError: the file cannot be read, has an unknown option, or a value of the wrong type.
    """
    from deploy.files import toml

    way_out = f"take the {SETTINGS} of a build as a pattern"
    tables = toml.read_toml(path, what="a TOML file of the options of a command", way_out=way_out)
    table = tables.get(str(command.name), {})
    other_name = next((name for name in tables if name != command.name), None)  # of a table
    if other_name is not None or not isinstance(table, dict):
        raise ConfigError(
            f"{path} must have its options under [{command.name}],"
            f" got {other_name or command.name!r}; {way_out}"
        )

    param_by_key = _param_by_key(command)
    values = {}
    for key, value in table.items():
        if key in _ONE_RUN_KEYS:
            raise ConfigError(
                f"--{key} belongs on the command line alone, got {key!r} in {path}; remove it there"
            )
        if key not in param_by_key:
            hint = did_you_mean(key, param_by_key, f"`calib8 {command.name} --help` has them")
            raise ConfigError(f"{key!r} in {path} is no option of {command.name}; {hint}")
        param = param_by_key[key]
        values[str(param.name)] = _typed_value(key, param, value, path)
    return values


def _typed_value(key: str, param: click.Parameter, value: Any, path: Path) -> Any:
    """Return the value of an option in the file, as the command line would have given it.

    Numbers become texts, which click parses, and a single value of a repeatable option a list.

    Raises:
        ConfigError: a value of the wrong type.
    """
    if getattr(param, "is_flag", False):
        if isinstance(value, bool):
            return value
        kind = "true or false"
    elif getattr(param, "multiple", False):
        values = value if isinstance(value, list) else [value]
        if all(map(_is_text_or_number, values)):
            return list(map(str, values))
        kind = "texts or numbers"
    else:
        if _is_text_or_number(value):
            return str(value)
        kind = "a text or number"
    raise ConfigError(f"{key} in {path} must be {kind}, got {value!r}")


def _is_text_or_number(value: object) -> bool:
    """Whether a value of TOML is a text or a number, which a bool is not here."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


max_loss_option = base.search_option(
    "--max-loss",
    type=Real(0, 1),
    help="Largest loss of accuracy, or of agreement with FP32 (0.01 is one in a hundred);"
    " an engine that loses more is unusable (exit code 3).",
)
min_speedup_option = base.search_option(
    "--min-speedup",
    type=Real(min=0),
    help="Least speed-up over FP32, on a GPU over its runtime's FP16; a slower engine is"
    " unusable (exit code 3), one that was not timed is doubtful.",
)


def _gather_tuning(arguments: CommandArguments) -> None:
    """Put a `Tuning` in as `tuning`, and the limits as `gates`."""
    from deploy.report.verdict import Gates
    from deploy.tuning.search_options import Tuning

    max_loss = arguments.pop("max_loss")
    arguments["tuning"] = Tuning(
        effort=arguments.pop("effort"),
        plan=arguments.pop("plan"),
        split=arguments.pop("split"),
        max_loss=max_loss,
        prefer=arguments.pop("prefer"),
        cpu=arguments.pop("cpu"),
    )
    arguments["gates"] = Gates(
        max_loss=max_loss,
        min_speedup=arguments.pop("min_speedup"),
        accept=arguments.pop("accept"),
    )


# the options of the search and of acceptance, which a command gets as `tuning` and `gates`
tuning_options = base.gathered_options(
    _gather_tuning,
    (
        base.search_option(
            "--effort",
            type=click.IntRange(0, 3),
            help="Effort of the search for layers to leave in float and for methods: 0 does not"
            " search, 3 tries most.  [default: 1; 0 with --ascend-config]",
        ),
        base.search_option(
            "--plan",
            metavar="FILE",
            type=base.INPUT,
            help="Plan of an earlier build to follow.  [default: the one in --out, if it fits]",
        ),
        base.search_option(
            "--split",
            metavar="N",
            type=click.IntRange(min=1),
            help="Split to build without a search, by its number in the report of the build in"
            " --out. Each target has its own splits.",
        ),
        base.search_option(
            "--prefer",
            type=click.Choice(PREFERENCES),
            default=PREFERENCES[0],
            help="What decides between int8 and float where both are good: speed; accuracy, which"
            " weighs loss four times as much; size, which counts bytes in place of time.",
        ),
        base.search_option(
            "--for",
            "cpu",
            type=click.Choice(CPU_NAMES),
            default=CPU_NAMES[0],
            help="CPU that will run the onnxruntime engine. For this one, time is measured; for"
            " another, known ratios of its kernels decide, and latency is not measured unless"
            " --duration is given.",
        ),
        max_loss_option,
        min_speedup_option,
        base.search_option(
            "--accept", is_flag=True, help="Exit with code 0 even if an engine is unusable."
        ),
    ),
)
