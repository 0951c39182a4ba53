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
_MAX_VALUES = 4  # maximum length of a list: channels, or a size
_MAX_SHOWN = 40  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model.

    Attributes:
        properties: metadata in the model; values longer than `LONGEST` are cut after one more
            character.
        folder: that contains the model, None for a model in memory.
        shape: of the model's first input; None for open sizes.
        is_classifier: whether the only output is one score for each of the class names.
    """

    properties: Mapping[str, str]
    folder: Path | None = None
    shape: tuple[int | None, ...] = ()
    is_classifier: bool = False

    def text(self, key: str) -> str | None:
        """Return a value of the model's metadata; None without one.

        Raises:
            ConfigError: the value is too long.
        """
        value = self.properties.get(key)
        if value is not None and len(value) > LONGEST:
            raise ConfigError(f"its {key} must have at most {LONGEST:,} characters, got more")
        return value

    def read_sibling(self, name: str) -> str | None:
        """Return the text of a file in the folder; None if there is none.

        Raises:
            ConfigError: the file is too large, or not text.
        """
        if self.folder is None or not os.path.isfile(self.folder / name):
            return None
        path = self.folder / name
        return read_text(path, what="text", error=ConfigError, max_bytes=_LARGEST)

    def read_exported(self, name: str) -> str | None:
        """Return the text of a file in the folder, or in the one above a folder `onnx`.

        optimum and transformers.js put models into such a folder.

        Raises:
            ConfigError: the file is too large, or not text.
        """
        text = self.read_sibling(name)
        is_below = self.folder is not None and self.folder.absolute().name == "onnx"
        if text is None and is_below:
            return self.read_sibling(f"../{name}")
        return text


class StoredPreprocess(NamedTuple):
    """Preprocessing read from metadata.

    Attributes:
        preprocess: the steps.
        detail: text that messages append to the writer's name, such as " 8.3" or ", imgsz 640".
    """

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
    """Return one number, or one per channel; a text may be "[0.5, 0.5]" or "127.5 127.5".

    Raises:
        ConfigError: not numbers, or too many.
    """
    if isinstance(value, str):
        value = re.split(r"[,\s]+", value.strip().strip("[]()").strip())
    items = value if isinstance(value, list | tuple) else [value]
    numbers = []
    for item in items[: _MAX_VALUES + 1]:  # a longer list is refused without reading all of it
        number = _parse_finite(item)
        if number is not None:
            numbers.append(number)
    if not 1 <= len(items) <= _MAX_VALUES or len(numbers) < len(items):
        raise ConfigError(f"its {name} must be numbers, got {short_text(value)}")
    return tuple(numbers)


def parse_integers(value: object, name: str) -> tuple[int, ...]:
    """Return `parse_numbers` as integers.

    Raises:
        ConfigError: they are no whole numbers.
    """
    values = parse_numbers(value, name)
    if not all(number.is_integer() and abs(number) < 1 << 31 for number in values):
        raise ConfigError(f"its {name} must be whole numbers, got {short_text(value)}")
    return tuple(map(int, values))


def parse_number(value: object, name: str, *, default: float | None = None) -> float:
    """Return one number; `default`, if there is one, for None.

    Raises:
        ConfigError: not a single number.
    """
    if value is None and default is not None:
        return default
    values = parse_numbers(value, name)
    if len(values) > 1:
        raise ConfigError(f"its {name} must be one number, got {short_text(value)}")
    return values[0]


def plain_word(value: object) -> str:
    """Return a version or name if it is plain text, else ""."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,32}", value)
    return str(value) if is_plain else ""


def short_text(value: object) -> str:
    """Return a value for a message: short and printable."""
    if isinstance(value, list):
        value = value[: _MAX_VALUES + 1]
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _parse_finite(value: object) -> float | None:
    """Return a finite number, also from text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
