"""Options of a build's search, and `--config`: options from a TOML file, which each build writes.

::

    calib8.toml   [build]             an option on the command line overrides the file. A key is a
                  model = "net.onnx"  flag without its dashes; a repeatable option is a list. Paths
                  images = "photos/"  are relative to the folder in which the command runs, as on
                  target = ["ascend"] the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from deploy.commands import base
from deploy.commands.base import GENERAL, Real, SectionedCommand, option
from deploy.errors import ConfigError, did_you_mean
from deploy.files.manifest import MANIFEST_NAME, SETTINGS
from deploy.tuning import CPU_NAMES, PREFERENCES

_HEAD = "# The options of a build: calib8 {} --config {}"
# of one run only, never in a file
_APART = frozenset(("config", "trust-config", "force", "resume", "help"))
_UNSAID = frozenset(
    ("out", "threads", "verbose", "quiet", "json", "scheduler", "send", "pieces", "retries")
)  # without effect on what is built, so not written
_RUNS = frozenset(("plugin", "scheduler"))  # code that is no Python file: a library, dask's tasks
_META = "calib8.asked"

_CONFIG = (
    option(
        "--config",
        section=GENERAL,
        type=base.FILE,
        expose_value=False,
        help=f"Read options from a TOML file, such as the {SETTINGS} of a build; options on the"
        " command line override it.",
    ),
    option(
        "--trust-config",
        section=GENERAL,
        is_flag=True,
        expose_value=False,
        help="Run the code that --config names although the file or its folder is another user's.",
    ),
)
config_options = partial(base.add_options, options=_CONFIG)


class ConfiguredCommand(SectionedCommand):
    """A command with `--config`, which records the options given on the line or in the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the file's values for options that the command line lacks.

        Raises:
            ConfigError: the file cannot be read, has an unknown option, or a value of the wrong
                type; or it is another user's and names code.
        """
        words = self.make_parser(ctx).parse_args(list(args))[0]
        kinds = str, bool, list, tuple  # anything else is a placeholder of click
        typed = {name: value for name, value in words.items() if isinstance(value, kinds)}
        held: dict[str, Any] = {}
        ctx.default_map = held
        if "config" in typed:
            file = Path(str(typed["config"]))
            held = options_in(self, file)
            if "trust_config" not in typed:
                _refuse_foreign_code(self, file, {k: v for k, v in held.items() if k not in typed})
            # a build's own file is built again in its folder
            own = (file.parent / MANIFEST_NAME).exists()
            ctx.default_map = {"out": str(file.parent), **held} if own else held
        ctx.meta[_META] = {**held, **typed}
        return super().parse_args(ctx, args)


def _refuse_foreign_code(command: click.Command, file: Path, held: Mapping[str, Any]) -> None:
    """Refuse to run code that a file names if it, or its folder, is not this user's."""
    places = {one for path in (file.absolute(), file.resolve()) for one in (path, path.parent)}
    if all(os.stat(place).st_uid == os.geteuid() for place in places):
        return
    for flag, param in _options_by_name(command).items():
        value = held.get(param.name or "")
        words = value if isinstance(value, list) else [str(value)]
        code = [w for w in words if flag in _RUNS or w.rpartition(":")[0].endswith(".py")]
        if value and code:
            raise ConfigError(
                f"code named in a file of another user runs only with --trust-config, got {flag} ="
                f" {code[0]!r} in {file}; read that code first"
            )


def settings_text() -> str:
    """The options of the running command, as a file that `--config` reads."""
    context = click.get_current_context()
    return "\n".join(_lines(context.command, context.meta[_META])) + "\n"


def _lines(command: click.Command, asked: Mapping[str, Any]) -> Iterator[str]:
    from deploy.files import toml

    yield _HEAD.format(command.name, SETTINGS)
    yield ""
    yield f"[{command.name}]"
    for flag, param in _options_by_name(command).items():
        if param.name not in asked or flag in _APART | _UNSAID:
            continue
        value = asked[param.name]
        # file names may hold bytes that UTF-8 cannot encode
        words = value if isinstance(value, list | tuple) else [value]
        if not any(0xD800 <= ord(c) <= 0xDFFF for word in words for c in str(word)):
            yield f"{toml.toml_key(flag)} = {_said(param, value)}"
        else:
            yield f"# {flag} has a name that is no text: it must be typed"


def _said(param: click.Parameter, value: Any) -> str:
    from deploy.files import toml

    if isinstance(value, list | tuple):
        return toml.toml_value(map(str, value))
    return toml.toml_value(value if isinstance(value, bool) else _number(param, value))


def _number(param: click.Parameter, value: Any) -> str | float:
    """A number if the option takes a number, else the text."""
    kind = param.type
    if isinstance(value, str) and isinstance(kind, click.types.IntParamType):
        return int(value)
    return float(value) if isinstance(kind, click.types.FloatParamType) else value


def _options_by_name(command: click.Command) -> dict[str, click.Parameter]:
    """Key in the file -> parameter."""
    return {max(one.opts, key=len).lstrip("-"): one for one in command.params}


def options_in(command: click.Command, path: Path) -> dict[str, Any]:
    """Read parameter -> value from a file with the options of a command.

    Raises:
        ConfigError: the file cannot be read, has an unknown option, or a value of the wrong type.
    """
    from deploy.files import toml

    what = "a TOML file of the options of a command"
    data = toml.read_toml(path, what=what, way_out=f"take the {SETTINGS} of a build as a pattern")
    table = data.get(str(command.name), {})
    strange = next((name for name in data if name != command.name), None)
    if strange is not None or not isinstance(table, dict):
        raise ConfigError(
            f"{path} must have its options under [{command.name}], got {strange or command.name!r};"
            f" take the {SETTINGS} of a build as a pattern"
        )
    known = _options_by_name(command)
    found = {}
    for name, value in table.items():
        if name not in known or name in _APART:
            near = did_you_mean(name, known, f"`calib8 {command.name} --help` has them")
            raise ConfigError(f"{name!r} in {path} is no option of {command.name}; {near}")
        found[str(known[name].name)] = _checked(name, known[name], value, path)
    return found


def _checked(name: str, param: click.Parameter, value: Any, path: Path) -> Any:
    """A value of the option's type; a single value of a repeatable option becomes a list."""
    several, flag = getattr(param, "multiple", False), getattr(param, "is_flag", False)
    values = value if several and isinstance(value, list) else [value]
    plain = bool if flag else (str, int, float)
    right = all(isinstance(one, plain) and isinstance(one, bool) == flag for one in values)
    if not right:
        kind = "true or false" if flag else "texts or numbers" if several else "a text or number"
        raise ConfigError(f"{name} in {path} must be {kind}, got {value!r}")
    return [str(one) for one in values] if several else value if flag else str(value)


Command = Callable[..., None]


def tuning_options(command: Command) -> Command:
    """Add the options of the search and of acceptance; `tuning` and `gates`."""

    @wraps(command)
    def gathered(
        effort: int | None,
        plan: Path | None,
        max_loss: float | None,
        min_speedup: float | None,
        accept: bool,
        prefer: str,
        cpu: str,
        **words: Any,
    ) -> None:
        from deploy.report.verdict import Gates
        from deploy.tuning.search_options import Tuning

        if plan is not None and effort is not None:
            raise ConfigError(
                f"--plan is obeyed and nothing is searched, got --effort {effort} too; leave one"
                " of them out"
            )
        search = Tuning(effort=effort, plan=plan, max_loss=max_loss, prefer=prefer, cpu=cpu)
        gates = Gates(max_loss=max_loss, min_speedup=min_speedup, accept=accept)
        command(tuning=search, gates=gates, **words)

    wrapped: Command = gathered
    return base.add_options(wrapped, _options())


def _options() -> list[Callable[[Command], Command]]:
    return [
        base.search_option(
            "--effort",
            type=click.IntRange(0, 3),
            help="Search effort for what stays float and which method finds each range: 0 searches"
            " nothing, 3 goes on as long as it finds something.  [default: 1; 0 with"
            " --ascend-config]",
        ),
        base.search_option(
            "--plan",
            metavar="FILE",
            type=base.INPUT,
            help="Plan of an earlier build to follow.  [default: the one in --out, if it fits]",
        ),
        base.search_option(
            "--prefer",
            type=click.Choice(PREFERENCES),
            default=PREFERENCES[0],
            help="What decides between int8 and float where both are good: speed; accuracy, which"
            " weighs loss four times as much; size, which has most layers in int8.",
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
        base.search_option(
            "--max-loss",
            type=Real(0, 1),
            help="Largest loss of accuracy, or of agreement with FP32 (0.01 is one in a hundred);"
            " an engine that loses more is unusable (exit code 3).",
        ),
        base.search_option(
            "--min-speedup",
            type=Real(min=0),
            help="Least speed-up over FP32, on a GPU over its runtime's FP16; a slower engine is"
            " unusable (exit code 3).",
        ),
        base.search_option(
            "--accept", is_flag=True, help="Exit with code 0 even if an engine is unusable."
        ),
    ]
