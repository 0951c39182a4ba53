"""TOML that calib8 writes and reads: plans, and the settings of a build."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from deploy.errors import ConfigError
from deploy.files.reading import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*')
_MOST_DOTS = 64


def word(value: str | float) -> str:
    """A string of TOML, which is one of JSON, or a number."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, int) else repr(float(value))


def key(name: str) -> str:
    """A name as it stands before an equals sign."""
    return name if _BARE.fullmatch(name) else word(name)


def read(path: Path, *, what: str, way_out: str) -> dict[str, Any]:
    """The tables of a file.

    Args:
        path: of the file, which a run may write anew.
        what: it must be, such as "a TOML file of settings".
        way_out: what to do where it is not.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    text = read_text(path, what=what, error=ConfigError, own=True)
    if _tangled(text):
        raise ConfigError(f"{path} must be {what}, got keys of over {_MOST_DOTS} dots; {way_out}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be {what}, got: {error}; {way_out}") from error


def _tangled(text: str) -> bool:
    """Whether a line has a dotted key of a depth that takes Python's reader of TOML minutes.

    Strings that go over several lines, which calib8 does not write, could hide one.
    """
    plain = _QUOTED.sub("k", text)
    return '"""' in text or any(line.count(".") > _MOST_DOTS for line in plain.split("\n"))
