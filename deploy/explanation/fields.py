"""Values of a JSON file that anybody may have written: each is checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.errors import ConfigError
from deploy.files.reading import read_json

_MOST = 1 << 30  # bytes; a report has a row for every tensor


@dataclass(frozen=True, slots=True)
class Fields:
    """One object of a JSON file.

    Attributes:
        held: what stands in it.
        place: where, as in targets[0].nodes[3].
        path: the file.
    """

    held: dict[str, object]
    place: str
    path: Path

    def text(self, key: str, default: str = "") -> str:
        """A string; the default where it is missing.

        Raises:
            ConfigError: it is something else, as everywhere here.
        """
        value = self.held.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def number(self, key: str) -> float | None:
        """A number, or one of the words for those that JSON has none for."""
        value = self.held.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._wrong(key, "a number", value)
        try:
            return float(value)
        except (ValueError, OverflowError) as error:
            raise self._wrong(key, "a number", value) from error

    def flag(self, key: str) -> bool:
        """True or false; false where it is missing."""
        value = self.held.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self.held.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def part(self, key: str) -> Fields | None:
        """An object; None where it is missing."""
        value = self.held.get(key)
        return None if value is None else self._object(value, self._at(key))

    def rows(self, key: str) -> list[Fields]:
        """A list of objects."""
        value = self.held.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return [self._object(one, f"{self._at(key)}[{i}]") for i, one in enumerate(value)]

    def _object(self, value: object, place: str) -> Fields:
        if not isinstance(value, dict):
            raise ConfigError(_sentence(place, "an object", value, self.path))
        return Fields(value, place, self.path)

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _wrong(self, key: str, rule: str, value: object) -> ConfigError:
        return ConfigError(_sentence(self._at(key), rule, value, self.path))


def read_fields(path: Path, schema: str) -> Fields:
    """A JSON file of a schema.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or of another schema.
    """
    what = "the report of a build to explain, as calib8 wrote it"
    held = read_json(path, what=what, error=ConfigError, most=_MOST)
    found = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(held, dict) or found != schema:
        raise ConfigError(
            f"a report must be of schema {schema}, got {_short(found)} in {path}; build again with"
            " this calib8"
        )
    return Fields(held, "", path)


def _sentence(place: str, rule: str, value: object, path: Path) -> str:
    return f"{place} of a report must be {rule}, got {_short(value)} in {path}; build again"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
