"""Values of the report's dataclasses out of JSON that anybody may have written, by their types.

::

    {"label": "FP32", "reference": true}      ->  EngineRow(label="FP32", reference=True)
    {"label": 3}                              ->  engines[0].label of a report must be a string, ...

What a dataclass does not know is left out; what it must have and the JSON lacks is an error.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from deploy.errors import ConfigError

_MOST = 1 << 63  # of a whole number

Value = TypeVar("Value")


def decoded(kind: type[Value], value: object, path: Path) -> Value:
    """A dataclass out of an object of JSON.

    Args:
        kind: the dataclass.
        value: of JSON.
        path: the file, for sentences.

    Raises:
        ConfigError: something is missing, or of another type.
    """
    found: Value = _of(kind, value, "", path)
    return found


def _of(kind: Any, value: object, place: str, path: Path) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, place, path)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (one,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _of(one, value, place, path)
    if origin is tuple:
        return _tuple(get_args(kind), value, place, path)
    if origin in (dict, Mapping):
        return _mapping(get_args(kind)[1], value, place, path)
    return _plain(kind, value, place, path)


def _dataclass(kind: Any, value: object, place: str, path: Path) -> Any:
    if not isinstance(value, dict):
        _refuse("an object", value, place, path)
    held = {}
    for field, hint in _fields(kind):
        at = f"{place}.{field.name}" if place else field.name
        if field.name in value:
            held[field.name] = _of(hint, value[field.name], at, path)
        elif field.default is MISSING and field.default_factory is MISSING:
            if type(None) not in get_args(hint):  # a report leaves out what is None
                _refuse("given", None, at, path)
            held[field.name] = None
    return kind(**held)


@cache
def _fields(kind: Any) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _tuple(kinds: tuple[Any, ...], value: object, place: str, path: Path) -> tuple[Any, ...]:
    several = len(kinds) == 2 and kinds[1] is Ellipsis
    if not isinstance(value, list):
        _refuse("a list", value, place, path)
    if not several and len(value) != len(kinds):
        _refuse(f"a list of {len(kinds)}", value, place, path)
    each = [kinds[0]] * len(value) if several else kinds
    return tuple(
        _of(kind, one, f"{place}[{at}]", path)
        for at, (kind, one) in enumerate(zip(each, value, strict=True))
    )


def _mapping(kind: Any, value: object, place: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse("an object", value, place, path)
    return {key: _of(kind, one, f"{place}.{key}", path) for key, one in value.items()}


def _plain(kind: Any, value: object, place: str, path: Path) -> Any:
    if kind is object:
        return value
    if kind is float:
        return _number(value, place, path)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < _MOST else _refuse("a number of 64 bits", value, place, path)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    words = {str: "a string", bool: "true or false", int: "a whole number"}
    return _refuse(words[kind], value, place, path)


def _number(value: object, place: str, path: Path) -> float:
    """A number, or one of the words for those that JSON has none for."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    return _refuse("a number", value, place, path)


def _refuse(rule: str, value: object, place: str, path: Path) -> NoReturn:
    got = "nothing" if value is None else repr(value)
    got = got if len(got) <= 60 else f"{got[:60]}..."
    raise ConfigError(
        f"{place or 'what stands in it'} of a report must be {rule}, got {got} in {path}; build"
        " again"
    )
