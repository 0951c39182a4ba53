"""Read values from metadata: bounded and checked; errors are worded as the end of a sentence."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deploy.errors import ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.files.reading import from_json, read_text

LONGEST = 1 << 12  # maximum number of characters of a value
_LARGEST = 1 << 18  # maximum size in bytes of a file next to the model
_MOST = 4  # maximum length of a list: channels, or a size
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model.

    Attributes:
        properties: metadata in the model; values longer than `LONGEST` are cut after one more
            character.
        folder: that contains the model, None for a model in memory.
    """

    properties: Mapping[str, str]
    folder: Path | None = None
    shape: tuple[int | None, ...] = ()

    def text(self, key: str) -> str | None:
        """Return a value of the model's metadata; None without one.

        Raises:
            ConfigError: the value is too long.
        """
        value = self.properties.get(key)
        if value is not None and len(value) > LONGEST:
            raise ConfigError(f"its {key} must have at most {LONGEST:,} characters, got more")
        return value

    def read_sibling(self, *names: str) -> str | None:
        """Return the text of the first existing file of these names in the folder; else None.

        Raises:
            ConfigError: the file is too large, or not text.
        """
        for path in (self.folder / name for name in names) if self.folder else ():
            if os.path.isfile(path):
                return read_text(path, what="text", error=ConfigError, max_bytes=_LARGEST)
        return None


class StoredPreprocess(NamedTuple):
    """Preprocessing read from metadata, and details for messages, such as a version."""

    preprocess: Preprocess
    detail: str = ""


def parse_object(text: str, name: str) -> dict[str, Any]:
    """Return the object of a JSON text.

    Raises:
        ConfigError: it is no JSON object.
    """
    data = from_json(text, rule=f"its {name} must be JSON", error=ConfigError)
    if not isinstance(data, dict):
        raise ConfigError(f"its {name} must hold names and values, got {short_text(data)}")
    return data


def parse_numbers(value: object, name: str) -> tuple[float, ...]:
    """Return one number, or one per channel; `value` may be "[0.5, 0.5]" or "127.5 127.5".

    Raises:
        ConfigError: not numbers, or too many.
    """
    if isinstance(value, str):
        value = re.split(r"[,\s]+", value.strip().strip("[]()").strip())
    listed = list(value) if isinstance(value, list | tuple) else [value]
    values = tuple(map(_finite, listed[: _MOST + 1]))
    if not 1 <= len(values) <= _MOST or None in values:
        raise ConfigError(f"its {name} must be numbers, got {short_text(value)}")
    return tuple(one for one in values if one is not None)


def parse_integers(value: object, name: str) -> tuple[int, ...]:
    """Return `parse_numbers` as integers.

    Raises:
        ConfigError: they are no whole numbers.
    """
    values = parse_numbers(value, name)
    if not all(one.is_integer() and abs(one) < 1 << 31 for one in values):
        raise ConfigError(f"its {name} must be whole numbers, got {short_text(value)}")
    return tuple(map(int, values))


def parse_number(value: object, name: str) -> float:
    """Return one number.

    Raises:
        ConfigError: not a single number.
    """
    values = parse_numbers(value, name)
    if len(values) > 1:
        raise ConfigError(f"its {name} must be one number, got {short_text(value)}")
    return values[0]


def plain_word(value: object) -> str:
    """Return a version or name if it is plain text, else ""."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,32}", value) else ""


def short_text(value: object) -> str:
    """Return a value for a message: short and printable."""
    text = ascii(value) if not isinstance(value, list) else ascii(value[: _MOST + 1])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _finite(value: object) -> float | None:
    """Return a finite number, also from text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
