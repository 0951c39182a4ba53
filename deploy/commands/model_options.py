"""`--target` and every target's own options, made from what the rows of `TARGETS` declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from deploy.commands import base
from deploy.commands.completion import among
from deploy.commands.numbers import Real
from deploy.errors import ConfigError
from deploy.targets import TARGETS, Target, named
from deploy.targets.options import Option, options_of

Command = Callable[..., None]
_NOT_OF_TORCH = ("dynamic_matmul", "precision")  # PyTorch models get fixed scales and integers
Given = Mapping[str, Mapping[str, Any]]  # target -> field -> the value that was typed


def target_options(wanted: Callable[[Option], bool]) -> Callable[[Command], Command]:
    """Add `--target` and those of the targets' options that are `wanted`.

    The command gets the targets, made with what was given, as `targets`.
    """

    def add(command: Command) -> Command:
        @wraps(command)
        def gathered(names: tuple[str, ...], given: Given, **words: Any) -> None:
            command(targets=_made(names, given), **words)

        return base.option(
            "--target",
            "names",
            section=base.TARGETS,
            multiple=True,
            metavar="NAME,...",
            default=("onnxruntime",),
            show_default=True,
            callback=_names,
            shell_complete=among(lambda: TARGETS),
            help=f"Any of {', '.join(TARGETS)}, by commas or repeated: one calibration serves all.",
        )(own_options(wanted)(gathered))

    return add


def one_target(section: str) -> Callable[[Command], Command]:
    """Add `--target` for one target and its options that place pairs in a model of PyTorch.

    The command gets the target, made with what was given, as `target`.
    """

    def add(command: Command) -> Command:
        @wraps(command)
        def gathered(name: str, given: Given, **words: Any) -> None:
            (target,) = _made((name,), given)
            command(target=target, **words)

        return base.option(
            "--target",
            "name",
            section=section,
            metavar="NAME",
            default="onnxruntime",
            show_default=True,
            callback=lambda context, param, name: named(name) and name,
            shell_complete=among(lambda: TARGETS),
            help=f"Target whose plan and grid are taken: {', '.join(TARGETS)}.",
        )(own_options(lambda o: o.places and o.name not in _NOT_OF_TORCH)(gathered))

    return add


def own_options(wanted: Callable[[Option], bool]) -> Callable[[Command], Command]:
    """Add those of the targets' options that are `wanted`; the command gets them as `given`."""

    def add(command: Command) -> Command:
        declared = {
            f"{target}_{option.name}".replace("-", "_"): (target, option)
            for target, kind in TARGETS.items()
            for option in options_of(kind)
            if wanted(option)
        }

        @wraps(command)
        def gathered(**words: Any) -> None:
            given: dict[str, dict[str, Any]] = {}
            for word, (target, option) in declared.items():
                if (value := words.pop(word)) not in (None, ()):
                    given.setdefault(target, {})[option.name] = value
            command(given=given, **words)

        wrapped: Command = gathered
        for word, (target, option) in reversed(declared.items()):
            wrapped = _option(word, target, option)(wrapped)
        return wrapped

    return add


def flags(target: str, fields: Mapping[str, Any]) -> str:
    """The flags of a target's fields, as a user types them."""
    own = {option.name: option.flag.partition("/")[0] for option in options_of(named(target))}
    return " and ".join(own[name] for name in fields)


def made(target: str, fields: Mapping[str, Any]) -> Target:
    """A target with these values in its fields."""
    kind: Callable[..., Target] = named(target)
    return kind(**fields)


def _made(names: tuple[str, ...], given: Given) -> list[Target]:
    for target, fields in given.items():
        if target not in names:
            raise ConfigError(
                f"{flags(target, fields)} {'belong' if len(fields) > 1 else 'belongs'} to --target"
                f" {target}, got --target {','.join(names)}"
            )
    return [made(name, given.get(name, {})) for name in names]


def _names(context: click.Context, param: click.Parameter, words: tuple[str, ...]) -> Any:
    """Names by commas or one a flag, each once."""
    names = [name.strip() for word in words for name in word.split(",")]
    for name in names:
        named(name)
    return tuple(dict.fromkeys(names))


def _option(word: str, target: str, option: Option) -> Callable[[Command], Command]:
    """The click option of a declared one; what was not typed comes as None, or as ()."""
    flag = option.kind is bool
    return base.option(
        option.flag,
        word,
        section=f"Target {target}",
        type=None if flag else _type(option),
        is_flag=flag,
        default=None,
        multiple=option.repeat,
        metavar=option.metavar,
        help=option.help + _ending(option),
    )


def _type(option: Option) -> click.ParamType[Any]:
    from pathlib import Path

    if option.choices:
        return click.Choice(option.choices)
    if option.kind is int:
        return click.IntRange(_whole(option.least), _whole(option.most))
    if option.kind is float:
        return Real(option.least, option.most)
    return click.Path(path_type=Path) if option.kind is Path else click.STRING


def _whole(limit: float | None) -> int | None:
    return None if limit is None else int(limit)


def _ending(option: Option) -> str:
    """What the help says after the sentence: repetition, the default."""
    if option.repeat:
        return " May be repeated."
    if option.kind is bool:
        on, _, off = option.flag.partition("/")
        return f"  [default: {(on if option.default else off).lstrip('-')}]" if off else ""
    return "" if option.default is None else f"  [default: {option.default}]"
