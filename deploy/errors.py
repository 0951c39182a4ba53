"""The tree of errors.

::

    Calib8Error                 (calibrators.errors, so that calibrators/ is self-contained)
    |-- CalibrationError        statistics or a search gave no valid scale
    |-- ModelError              a model that cannot be read, analysed or lifted
    |   `-- QuantizedError      a model that is quantized already
    |-- FeedError               images or arrays that cannot be fed to the model
    |-- CacheError              a cache that is broken, foreign or stale
    |-- ConfigError             options or configuration files that are invalid or contradictory
    |-- ExportError             a file format that cannot express the request
    `-- BackendError            a runtime refused to build or to run
        `-- SdkMissingError     the SDK or the device is not on this machine

Every message states the rule, the value that breaks it, and the remedy. `Terminated` stands apart.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral

from calibrators.errors import Calib8Error, CalibrationError

__all__ = [
    "BackendError", "CacheError", "Calib8Error", "CalibrationError", "ConfigError", "ExportError",
    "FeedError", "ModelError", "QuantizedError", "SdkMissingError",
]  # fmt: skip


class ModelError(Calib8Error):
    """A model that cannot be read, analysed or lifted to the opset that quantization needs."""


class QuantizedError(ModelError):
    """A model that is quantized already, although a float model is needed."""


class FeedError(Calib8Error):
    """Images or arrays that cannot be fed to the model."""


class CacheError(Calib8Error):
    """A calibration cache that is broken, foreign or stale."""


class ConfigError(Calib8Error):
    """Options or configuration files that are invalid or contradict each other."""


class ExportError(Calib8Error):
    """A file format that cannot express the request."""


class BackendError(Calib8Error):
    """A runtime refused to build or to run a model."""


def extra_hint(extra: str) -> str:
    """Return how to install an optional part; its name at a package index is anybody's."""
    return f"pip install '.[{extra}]' in a clone of calib8"


class SdkMissingError(BackendError):
    """The SDK or the device that this step needs is not on this machine."""


class Terminated(BaseException):
    """Raised on SIGTERM; ends a run like the user's interrupt."""


def check_whole_number(name: str, value: object, minimum: int, remedy: str = "") -> None:
    """Raise `ConfigError` unless an argument, which may be of numpy, is a number >= `minimum`."""
    if not isinstance(value, Integral) or value < minimum:
        raise ConfigError(
            f"{name} must be a whole number, {minimum} or more, got {value!r}{remedy}"
        )


def did_you_mean(word: object, choices: Iterable[str], otherwise: str = "") -> str:
    """Return the remedy for an unknown word: "did you mean 'x'?", or `otherwise`."""
    matches = get_close_matches(str(word), list(choices), n=1)
    return f"did you mean {matches[0]!r}?" if matches else otherwise


def list_first(texts: Sequence[str], max_count: int) -> str:
    """Return the first texts and the number of the others: "a, b, c and 4 more"."""
    text = ", ".join(texts[:max_count])
    if len(texts) > max_count:
        text += f" and {len(texts) - max_count} more"
    return text


_PLURALS = {
    "batch": "batches",
    "box": "boxes",
    "class": "classes",
    "entry": "entries",
    "index": "indices",
}


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    return f"1 {noun}" if number == 1 else f"{number} {_PLURALS.get(noun, f'{noun}s')}"


def too_few(number: int, plural: str) -> str:
    """Return the sentence "1 box is too few" or "2 boxes are too few"; `plural`: "boxes"."""
    if number != 1:
        return f"{number} {plural} are too few"
    singular_by_plural = {_PLURALS[noun]: noun for noun in _PLURALS}
    return f"1 {singular_by_plural.get(plural, plural.removesuffix('s'))} is too few"


def first_line(error: BaseException) -> str:
    """Return the first line with text of an error's message, at most 300 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip()[:300].rstrip(" .;:")
