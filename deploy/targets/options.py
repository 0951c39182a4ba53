"""The options of a target: typed fields with help, from which its part of the command line is made.

A target is a dataclass, and its options are the fields that `option` declares::

    @dataclass(frozen=True, kw_only=True)
    class Toy:
        steps: int = option(4, help="Steps of the toy.", least=1)             # --steps N
        tags: tuple[str, ...] = option((), help="A tag.", flag="--tag")       # --tag T --tag U
        fast: bool = option(True, help="Run fast.")                           # --fast/--no-fast

The annotation says what a value is (bool, int, float, str, Path), whether it may be missing
(`| None`) and whether the flag may be repeated (`tuple[..., ...]`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from deploy.errors import ConfigError

Value = TypeVar("Value")

_KEY = "calib8 option"  # of a field's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a target.

    Attributes:
        name: the field.
        flag: on the command line, "--soc", or "--fp16/--no-fp16" where it can be switched off.
        help: one sentence.
        kind: bool, int, float, str or Path: a value, or each of a repeated one.
        default: the field's.
        choices: the values that there are; empty where any is taken.
        metavar: what stands for the value in the help; None leaves it to the kind.
        least, most: limits of a number, both included.
        repeat: whether the flag may be repeated; the field is then a tuple.
        observes: it decides which tensors are observed, or how: an option of `calibrate` too.
        places: it decides which nodes run in int8: an option of `inspect` too.
        runs: it decides how a built engine runs: an option of `bench` too.
    """

    name: str = ""
    flag: str = ""
    help: str
    kind: type = str
    default: object = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    repeat: bool = False
    observes: bool = False
    places: bool = False
    runs: bool = False

    def flaw(self, value: object) -> str:
        """The rule that one value breaks, or nothing."""
        if self.choices and value not in self.choices:
            return f"is one of {', '.join(self.choices)}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                return f"is {self.least} or more"
            if self.most is not None and value > self.most:
                return f"is {self.most} or less"
        return ""


def option(
    default: Value,
    *,
    help: str,
    flag: str | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    least: float | None = None,
    most: float | None = None,
    observes: bool = False,
    places: bool = False,
    runs: bool = False,
) -> Value:
    """A dataclass field that is an option; the words are those of `Option`.

    Without `flag` it is that of the field's name, and a bool that is True can be switched off.
    """
    declared = Option(
        flag=flag or "",
        help=help,
        choices=choices,
        metavar=metavar,
        least=least,
        most=most,
        observes=observes,
        places=places,
        runs=runs,
    )
    return dataclasses.field(default=default, metadata={_KEY: declared})


def options_of(target: type) -> tuple[Option, ...]:
    """The options that a target's class declares, in the order of its fields."""
    if not dataclasses.is_dataclass(target):
        return ()
    hints = get_type_hints(target)
    return tuple(
        _of(field, hints[field.name], field.metadata[_KEY])
        for field in dataclasses.fields(target)
        if _KEY in field.metadata
    )


def given(target: object) -> dict[str, str]:
    """Flag -> value in words, of the options of a target that are not the default's."""
    found = {}
    for declared in options_of(type(target)):
        value = getattr(target, declared.name)
        if value != declared.default:
            flag, _, switched_off = declared.flag.partition("/")
            off = value is False and bool(switched_off)
            words = " ".join(map(str, value)) if declared.repeat else str(value)
            found[switched_off if off else flag] = "" if isinstance(value, bool) else words
    return found


def check(target: object) -> None:
    """Hold a target's values to what its options declare; for its `__post_init__`.

    Raises:
        ConfigError: a value that is no choice or outside the limits.
    """
    for declared in options_of(type(target)):
        value = getattr(target, declared.name)
        for one in value if declared.repeat else () if value is None else (value,):
            if flaw := declared.flaw(one):
                kind = type(target).__name__
                raise ConfigError(f"{declared.name} of {kind} {flaw}, got {one!r}")


def _of(field: dataclasses.Field[Any], hint: Any, declared: Option) -> Option:
    held = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    repeat = get_origin(hint) is tuple
    dashed = f"--{field.name.replace('_', '-')}"
    usual = f"{dashed}/--no-{dashed[2:]}" if field.default is True else dashed
    return replace(
        declared,
        name=field.name,
        flag=declared.flag or usual,
        kind=held[0],
        default=field.default,
        repeat=repeat,
    )
