"""What a model carries of how pictures become its input, and what is made of it.

What the user says stands before what the model carries, and that before the defaults; where two of
them differ, it is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.errors import ConfigError, FeedError
from deploy.feed.preprocess import Asked, Preprocess, asked_of, by, preset, resolve, usual
from deploy.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Carried:
    """What a model's file, or one beside it, says of pictures.

    Attributes:
        source: what says it, as a sentence goes on: "the model's metadata (Ultralytics 8.2.46)".
        how: the preprocessing; None where it was not understood.
        reason: why not, as a sentence's end.
    """

    source: str
    how: Preprocess | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """How pictures become an input.

    Attributes:
        how: resolved.
        origin: what said so, where it was the model.
        notes: what the user should know.
    """

    how: Preprocess
    origin: str = ""
    notes: tuple[str, ...] = ()


def settled(asked: Asked, carried: Carried | None, spec: TensorSpec) -> Settled:
    """What was asked, on what the model carries, completed from its input.

    Raises:
        ConfigError, FeedError: as `asked_of` and `resolve`.
    """
    theirs, notes = _understood(carried, spec)
    if isinstance(asked, str):
        asked = preset(asked)
    if isinstance(asked, Preprocess):
        how, said = resolve(asked, spec)
        return Settled(how, notes=(*_differing(how, theirs, carried), *said))
    options = {name: value for name, value in _named(asked) if value is not None}
    if theirs is None or carried is None:
        how, said = resolve(asked_of(usual(spec), options) if options else None, spec)
        return Settled(how, notes=(*notes, *said))
    how, _ = resolve(asked_of(_without(theirs, options), options), spec)
    but = f", but for {enumerated(list(options))}" if options else ""
    return Settled(how, origin=f"{carried.source}{but}", notes=notes)


def _named(asked: object) -> Iterable[tuple[str, object]]:
    """Options by name.

    Raises:
        ConfigError: it is no mapping of them.
    """
    if asked is None:
        return ()
    if not isinstance(asked, Mapping):
        raise ConfigError(
            "preprocessing is a Preprocess, a preset's name, or options by name such as"
            f" {{'size': (224, 224)}}, got {type(asked).__name__}"
        )
    return asked.items()


def _understood(
    carried: Carried | None, spec: TensorSpec
) -> tuple[Preprocess | None, tuple[str, ...]]:
    """What the model carries, resolved; None and why not, where it does not hold."""
    if carried is None:
        return None, ()
    if carried.how is None:
        return None, (f"{carried.source} is not followed: {carried.reason}",)
    said = carried.how.default_size
    try:
        how, _ = resolve(carried.how, spec)
    except (ConfigError, FeedError) as error:
        return None, (f"{carried.source} is not followed: {error}",)
    if said is None or how.size is None or said == how.size:
        return how, ()
    sizes = f"it says {by(said)} pixels, the input is of {by(how.size)}"
    if how.resize == "short-side":  # whose crop is a share of its own size
        return None, (f"{carried.source} is not followed: {sizes}",)
    return how, (f"{carried.source} is followed but for its size: {sizes}",)


def _without(theirs: Preprocess, options: Mapping[str, object]) -> Preprocess:
    """What the model carries, without the short side of a size that is not taken."""
    if "size" in options:
        return dataclasses.replace(theirs, short_side=None)
    return theirs


def _differing(
    how: Preprocess, theirs: Preprocess | None, carried: Carried | None
) -> tuple[str, ...]:
    """A sentence where what was asked makes other values of a picture than the model carries."""
    if theirs is None or carried is None:
        return ()
    ours, other = _meaning(how), _meaning(theirs)
    words = [f"{name} {_short(other[name])}" for name in other if ours.get(name) != other[name]]
    if not words:
        return ()
    return (
        f"{carried.source} says {enumerated(words)} where another was asked for, which is used",
    )


def _meaning(how: Preprocess) -> dict[str, object]:
    """What tells on the values, however it is written; sizes and interpolation are the user's."""
    ends = [
        round((pixel * how.scale - mean) / std, 3)
        for pixel in (0, 255)
        for mean, std in zip(_three(how.mean), _three(how.std), strict=True)
    ]
    padded = {"pad": _three(how.pad)} if how.resize in ("letterbox", "fit-height") else {}
    anchored = {"anchor": how.anchor} if how.resize == "letterbox" else {}
    return {
        "resize": how.resize,
        **anchored,
        "color": how.color,
        **padded,
        "a black pixel as": tuple(ends[:3]),
        "a white one as": tuple(ends[3:]),
    }


def _three(values: tuple[float, ...]) -> tuple[float, ...]:
    return values * 3 if len(values) == 1 else values


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_short, value[:1] if len(set(value)) == 1 else value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def enumerated(words: Sequence[str]) -> str:
    """Words as a sentence lists them: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
