"""Read and write TOML: plans, and the settings of a build."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.errors import ConfigError
from deploy.files.reading import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*')
_MAX_DOTS = 64


def toml_value(value: str | float | Iterable[str]) -> str:
    """Return a TOML string (the same as in JSON), number, truth value or list of strings."""
    if isinstance(value, str):
        return "".join(map(_escape_hidden, json.dumps(value, ensure_ascii=False)))
    if isinstance(value, Iterable):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value).lower() if isinstance(value, int) else repr(float(value))


def _escape_hidden(character: str) -> str:
    """Return a character, escaped if an editor hides it or shows it elsewhere, such as U+202E."""
    if character.isprintable() or "\ud800" <= character <= "\udfff":  # a surrogate has no escape
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 1 << 16 else f"\\U{ord(character):08x}"


def toml_key(name: str) -> str:
    """Return a key, quoted if needed."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def read_toml(path: Path, *, what: str, way_out: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Args:
        path: path of the file; a run may overwrite it.
        what: what the file must be, for error messages, such as "a TOML file of settings".
        way_out: remedy for the error message.

    Raises:
        ConfigError: the file cannot be read, or is no TOML.
    """
    text = read_text(path, what=what, error=ConfigError, rewritable=True)
    # Python's TOML parser takes minutes for a key of very many dots. Dots in strings and comments
    # are not of keys, so these are replaced by a letter before dots are counted. The pattern does
    # not fit strings of several lines: they are refused, and calib8 never writes them
    without_strings = _STRING_OR_COMMENT.sub("k", text)
    has_long_string = '"""' in text or "'''" in text
    has_deep_key = any(line.count(".") > _MAX_DOTS for line in without_strings.split("\n"))
    if has_long_string or has_deep_key:
        raise ConfigError(
            f"{path} must be {what}, got a string in three quotes or keys of over {_MAX_DOTS} dots;"
            f" {way_out}"
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be {what}, got: {error}; {way_out}") from error
