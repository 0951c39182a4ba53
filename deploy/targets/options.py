"""Target options: dataclass fields with type and help, which also define command-line flags.

A target is a dataclass; the fields declared by `option` are its options::

    @dataclass(frozen=True, kw_only=True)
    class Toy:
        steps: int = option(4, help="Steps of the toy.", minimum=1)             # --steps N
        tags: tuple[str, ...] = option((), help="A tag.", flag="--tag")       # --tag T --tag U
        fast: bool = option(True, help="Run fast.")                           # --fast/--no-fast

The annotation gives the type of a value (bool, int, float, str, Path), whether it may be None
(`| None`) and whether the flag may be repeated (`tuple[..., ...]`).
"""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from deploy.errors import ConfigError

Value = TypeVar("Value")

_KEY = "calib8 option"  # key in a field's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a target.

    Attributes:
        name: field name.
        flag: command-line flag, "--soc", or "--fp16/--no-fp16" for one that is on by default.
        help: one sentence.
        kind: type of a value, or of each value of a repeated flag: bool, int, float, str or Path.
        default: default of the field.
        choices: the allowed values; empty if any value is allowed.
        metavar: placeholder of the value in the help; None for the default of `kind`.
        minimum: least value of a number.
        repeat: whether the flag may be repeated; the field is then a tuple.
        changes_observations: changes which tensors are observed, or how; `calibrate` has the
            option too.
        changes_placement: changes which nodes run in int8; `inspect` has the option too.
        changes_runs: changes how a built engine runs; `bench` has the option too.
        writes: kind, in `deploy.files.manifest.MARKS`, of the file that is written there; "" for a
            path that is only read.
    """

    name: str = ""
    flag: str = ""
    help: str
    kind: type = str
    default: object = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    minimum: int | None = None
    repeat: bool = False
    changes_observations: bool = False
    changes_placement: bool = False
    changes_runs: bool = False
    writes: str = ""

    def find_flaw(self, value: object) -> str:
        """Return the rule that a single value breaks, or ""."""
        if self.choices and value not in self.choices:
            return f"is one of {', '.join(self.choices)}"
        if self.minimum is not None and isinstance(value, int | float) and value < self.minimum:
            return f"is {self.minimum} or more"
        return ""


def option(default: Value, *, help: str, **declared: Any) -> Value:
    """Declare a dataclass field that is an option; for the arguments see `Option`.

    The default `flag` is made of the field's name; a bool whose default is True also gets --no-.
    """
    metadata = {_KEY: Option(help=help, **declared)}
    return dataclasses.field(default=default, metadata=metadata)


def declared_options(target: type) -> tuple[Option, ...]:
    """Return the options that a target class declares, in field order."""
    if not dataclasses.is_dataclass(target):
        return ()
    annotations = get_type_hints(target)
    return tuple(
        _complete_option(field, annotations[field.name])
        for field in dataclasses.fields(target)
        if _KEY in field.metadata
    )


def changed_options(target: object) -> dict[str, str]:
    """Return flag -> value as text, for the options of a target that differ from their default."""
    changed = {}
    for declared in declared_options(type(target)):
        value = getattr(target, declared.name)
        if value == declared.default:
            continue
        flag, _, off_flag = declared.flag.partition("/")  # "--x/--no-x", or one flag alone
        if isinstance(value, bool):  # a switch, which has no value
            # a flag alone sets the value that is not the default, True or False
            if off_flag and not value:
                flag = off_flag
            changed[flag] = ""
        elif declared.repeat:
            changed[flag] = " ".join(map(str, value))
        else:
            changed[flag] = str(value)
    return changed


def check_options(target: object) -> None:
    """Check the values of a target's options; text of an option of type Path becomes a Path.

    A target calls it in its `__post_init__`.
    """
    for declared in declared_options(type(target)):
        value = getattr(target, declared.name)
        if declared.kind is Path and value is not None:
            value = tuple(map(Path, value)) if declared.repeat else Path(value)
            object.__setattr__(target, declared.name, value)  # the dataclass is frozen
        values = value if declared.repeat else (value,)
        for single in values:
            flaw = "" if single is None else declared.find_flaw(single)  # the rule that it breaks
            if flaw:
                name = f"{declared.name} of {type(target).__name__}"
                raise ConfigError(f"{name} {flaw}, got {single!r}")


def _complete_option(field: dataclasses.Field[Any], annotation: Any) -> Option:
    """Return the option that a dataclass field declares, completed by what follows from the field.

    That is its name, flag, kind, default and whether it may be repeated. A flag that the option
    declares itself stays.

    `annotation`: type of the field, such as `int`, `Path | None` or `tuple[str, ...]`.
    """
    declared: Option = field.metadata[_KEY]
    # T of `T | None` and of `tuple[T, ...]`; a plain type has no arguments
    value_types = [kind for kind in get_args(annotation) if kind is not type(None)]
    dashed_name = field.name.replace("_", "-")
    flag = f"--{dashed_name}"
    if field.default is True:
        flag += f"/--no-{dashed_name}"
    return replace(
        declared,
        name=field.name,
        flag=declared.flag or flag,
        kind=value_types[0] if value_types else annotation,
        default=field.default,
        repeat=get_origin(annotation) is tuple,
    )
