"""Values out of metadata: bounded, checked, and refused in a sentence's end."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deploy.errors import ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.files.reading import from_json, read_text

LONGEST = 1 << 12  # characters of a value that is read
_LARGEST = 1 << 18  # bytes of a file beside the model
_MOST = 4  # numbers of a list: channels, or a size
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to read.

    Attributes:
        properties: metadata of the model; a value longer than `LONGEST` is cut behind it.
        folder: that the model stands in, None for a model in memory.
        shape: of the model's first input.
    """

    properties: Mapping[str, str]
    folder: Path | None = None
    shape: tuple[int | None, ...] = ()

    def text(self, key: str) -> str | None:
        """A value of the metadata; None where there is none.

        Raises:
            ConfigError: it is too long to be what it should be.
        """
        value = self.properties.get(key)
        if value is not None and len(value) > LONGEST:
            raise ConfigError(f"its {key} must have at most {LONGEST:,} characters, got more")
        return value

    def beside(self, *names: str) -> str | None:
        """The text of the first of these files in the model's folder; None where there is none.

        Raises:
            ConfigError: it is too large, or no text.
        """
        for path in (self.folder / name for name in names) if self.folder else ():
            if _is_file(path):
                return read_text(path, what="text", error=ConfigError, most=_LARGEST)
        return None


class Said(NamedTuple):
    """What was understood: the preprocessing, and what tells of it in words, after the writer."""

    how: Preprocess
    detail: str = ""


def table(text: str, name: str) -> dict[str, Any]:
    """The keys and values of a JSON text.

    Raises:
        ConfigError: it is none.
    """
    data = from_json(text, rule=f"its {name} must be JSON", error=ConfigError)
    if not isinstance(data, dict):
        raise ConfigError(f"its {name} must hold names and values, got {shown(data)}")
    return data


def numbers(value: object, name: str) -> tuple[float, ...]:
    """One number, or one a channel; of a list, or of a text such as "[0.5, 0.5]" or "127.5 127.5".

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, str):
        value = re.split(r"[,\s]+", value.strip().strip("[]()").strip())
    listed = list(value) if isinstance(value, list | tuple) else [value]
    found = tuple(map(_finite, listed[: _MOST + 1]))
    if not 1 <= len(found) <= _MOST or None in found:
        raise ConfigError(f"its {name} must be numbers, got {shown(value)}")
    return tuple(one for one in found if one is not None)


def whole(value: object, name: str) -> tuple[int, ...]:
    """The same of whole numbers.

    Raises:
        ConfigError: they are not.
    """
    found = numbers(value, name)
    if not all(one.is_integer() and abs(one) < 1 << 31 for one in found):
        raise ConfigError(f"its {name} must be whole numbers, got {shown(value)}")
    return tuple(map(int, found))


def single(value: object, name: str) -> float:
    """One number.

    Raises:
        ConfigError: it is not.
    """
    found = numbers(value, name)
    if len(found) > 1:
        raise ConfigError(f"its {name} must be one number, got {shown(value)}")
    return found[0]


def word(value: object) -> str:
    """A version or a name where it is a plain one, else nothing."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,32}", value) else ""


def shown(value: object) -> str:
    """A value in a message: short, and printable."""
    text = ascii(value) if not isinstance(value, list) else ascii(value[: _MOST + 1])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _finite(value: object) -> float | None:
    """A number, or the text of one, that is finite; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
