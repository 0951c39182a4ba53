"""Combine the user's preprocessing, that of the model's metadata, and the defaults, in that order.

Notes tell the user where they differ.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.errors import ConfigError, FeedError
from deploy.feed.preprocess import (
    Preprocess,
    PreprocessRequest,
    apply_user_options,
    complete_preprocess,
    default_preprocess,
    find_preset,
    format_size,
)
from deploy.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class MetadataPreprocess:
    """Preprocessing from the metadata in a model's file, or in a file next to it.

    Attributes:
        source: for messages, in the middle of a sentence: "the model's metadata (Ultralytics
            8.2.46)".
        preprocess: the preprocessing; None if it was not understood.
        reason: why it was not, as the end of a sentence.
    """

    source: str
    preprocess: Preprocess | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedPreprocess:
    """Preprocessing that is complete.

    Attributes:
        origin: source of the preprocessing if it is the model.
    """

    preprocess: Preprocess
    origin: str = ""
    notes: tuple[str, ...] = ()


def resolve_preprocess(
    asked: PreprocessRequest, metadata_preprocess: MetadataPreprocess | None, spec: TensorSpec
) -> ResolvedPreprocess:
    """Apply the user's options to the model's preprocessing, and complete it from the input.

    Raises:
        ConfigError, FeedError: see `apply_user_options` and `complete_preprocess`.
    """
    model_how, notes = _resolve_metadata(metadata_preprocess, spec)
    if isinstance(asked, str):
        asked = find_preset(asked)
    if isinstance(asked, Preprocess):
        how, notes_added = complete_preprocess(asked, spec)
        return ResolvedPreprocess(
            how, notes=(*_difference_note(how, model_how, metadata_preprocess), *notes_added)
        )
    options = {name: value for name, value in _options(asked) if value is not None}
    if model_how is None or metadata_preprocess is None:
        how, notes_added = complete_preprocess(
            apply_user_options(default_preprocess(spec), options) if options else None, spec
        )
        return ResolvedPreprocess(how, notes=(*notes, *notes_added))
    if "size" in options:  # the model's short side is of its own size
        model_how = dataclasses.replace(model_how, short_side=None)
    how, _ = complete_preprocess(apply_user_options(model_how, options), spec)
    but = f", but for {join_words(list(options))}" if options else ""
    return ResolvedPreprocess(how, origin=f"{metadata_preprocess.source}{but}", notes=notes)


def _options(asked: object) -> Iterable[tuple[str, object]]:
    """Return the user's options by name."""
    if asked is None:
        return ()
    if not isinstance(asked, Mapping):
        raise ConfigError(
            "preprocessing is a Preprocess, a preset's name, or options by name such as"
            f" {{'size': (224, 224)}}, got {type(asked).__name__}"
        )
    return asked.items()


def _resolve_metadata(
    metadata_preprocess: MetadataPreprocess | None, spec: TensorSpec
) -> tuple[Preprocess | None, tuple[str, ...]]:
    """Return the model's preprocessing, resolved, or None if it is unusable; and notes."""
    if metadata_preprocess is None:
        return None, ()
    if metadata_preprocess.preprocess is None:
        return None, (
            f"{metadata_preprocess.source} is not followed: {metadata_preprocess.reason}",
        )
    stated_size = metadata_preprocess.preprocess.default_size
    try:
        how, _ = complete_preprocess(metadata_preprocess.preprocess, spec)
    except (ConfigError, FeedError) as error:
        return None, (f"{metadata_preprocess.source} is not followed: {error}",)
    if stated_size is None or how.size is None or stated_size == how.size:
        return how, ()
    sizes = f"it says {format_size(stated_size)} pixels, the input is of {format_size(how.size)}"
    if how.resize == "short-side":  # its crop is a fraction of its own size
        return None, (f"{metadata_preprocess.source} is not followed: {sizes}",)
    return how, (f"{metadata_preprocess.source} is followed but for its size: {sizes}",)


def _difference_note(
    how: Preprocess, model_how: Preprocess | None, metadata_preprocess: MetadataPreprocess | None
) -> tuple[str, ...]:
    """Return a note if the user's preprocessing gives other values than the model's."""
    if model_how is None or metadata_preprocess is None:
        return ()
    form, model_form = _normal_form(how), _normal_form(model_how)
    words = [
        f"{name} {_format(value)}" for name, value in model_form.items() if form.get(name) != value
    ]
    if not words:
        return ()
    return (
        f"{metadata_preprocess.source} says {join_words(words)} although other options were"
        " given, which are used",
    )


def _normal_form(how: Preprocess) -> dict[str, object]:
    """Return what affects the values, in a normal form; without sizes and interpolation."""
    endpoints = [
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
        "a black pixel as": tuple(endpoints[:3]),
        "a white one as": tuple(endpoints[3:]),
    }


def _three(values: tuple[float, ...]) -> tuple[float, ...]:
    return values * 3 if len(values) == 1 else values


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_format, value[:1] if len(set(value)) == 1 else value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def join_words(words: Sequence[str]) -> str:
    """Join words as in "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
