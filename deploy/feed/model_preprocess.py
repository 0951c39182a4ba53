"""Combine the user's preprocessing, that of the model's metadata, and the defaults, in that order.

Notes tell the user where they differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import (
    Preprocess,
    PreprocessRequest,
    apply_user_options,
    complete_preprocess,
    default_preprocess,
    describe_preprocess,
    find_preset,
    format_size,
)
from deploy.tensors import TensorSpec

_SCALING = frozenset(("scale", "mean", "std"))


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
        origin: for messages: the model's metadata, with the user's changes to it, or the default as
            it is; "" if all of it is the user's.
        has_assumed_scale: whether neither the user nor the model says how pixels are scaled: then
            they are divided by 255.
    """

    preprocess: Preprocess
    origin: str = ""
    has_assumed_scale: bool = False
    notes: tuple[str, ...] = ()


def resolve_preprocess(
    requested: PreprocessRequest, metadata_preprocess: MetadataPreprocess | None, spec: TensorSpec
) -> ResolvedPreprocess:
    """Return the preprocessing to use: the user's, else the model's, else the default.

    Options by name change single values of the model's preprocessing, or of the default. The
    model's input completes what these leave open.

    Args:
        requested: complete preprocessing, a preset's name, some options by name, or None.
        metadata_preprocess: preprocessing from the model's metadata; None without any.
        spec: the model's input.

    Raises:
        ConfigError, FeedError: see `apply_user_options` and `complete_preprocess`.
    """
    # the preprocessing that the metadata state; None if they state none, or are not followed
    model_preprocess, metadata_notes = _resolve_metadata(metadata_preprocess, spec)
    metadata_title = "" if metadata_preprocess is None else metadata_preprocess.source

    # the user's own: the model's is only compared with it
    if isinstance(requested, str):
        requested = find_preset(requested)
    if isinstance(requested, Preprocess):
        preprocess, _ = complete_preprocess(requested, spec)  # its note is on the default alone
        notes: tuple[str, ...] = ()
        if model_preprocess and not _makes_equal_inputs(preprocess, model_preprocess):
            notes = (
                f"{metadata_title} says {describe_preprocess(model_preprocess)}, although other"
                " options were given, which are used",
            )
        return ResolvedPreprocess(preprocess, notes=notes)

    # the default, with the user's options
    options = _options(requested)
    if model_preprocess is None:
        changed_default = None  # without options, `complete_preprocess` takes the default itself
        origin = "calib8's default"
        if options:
            changed_default = apply_user_options(default_preprocess(spec), options)
            origin = ""  # the options count as the user's own preprocessing
        preprocess, default_notes = complete_preprocess(changed_default, spec)
        has_assumed_scale = preprocess.scale != 1 and _SCALING.isdisjoint(options)
        return ResolvedPreprocess(
            preprocess, origin, has_assumed_scale, notes=(*metadata_notes, *default_notes)
        )

    # the model's, with the user's options
    if "size" in options:  # the model's short side belongs to another size
        model_preprocess = replace(model_preprocess, short_side=None)
    preprocess, _ = complete_preprocess(apply_user_options(model_preprocess, options), spec)
    origin = f"{metadata_title}, but for {', '.join(options)}" if options else metadata_title
    return ResolvedPreprocess(preprocess, origin=origin, notes=metadata_notes)


def _options(requested: object) -> dict[str, object]:
    """Return the user's options by name, without those that are None."""
    if requested is None:
        return {}
    if not isinstance(requested, Mapping):
        raise ConfigError(
            "preprocessing is a Preprocess, a preset's name, or options by name such as"
            f" {{'size': (224, 224)}}, got {type(requested).__name__}"
        )
    return {name: value for name, value in requested.items() if value is not None}


def _resolve_metadata(
    metadata_preprocess: MetadataPreprocess | None, spec: TensorSpec
) -> tuple[Preprocess | None, tuple[str, ...]]:
    """Return (preprocessing of the metadata, completed from the model's input, or None; notes).

    It is None if there are no metadata, or if they are not followed, for which a note gives the
    reason.
    """
    if metadata_preprocess is None:
        return None, ()
    title = metadata_preprocess.source
    stated_preprocess = metadata_preprocess.preprocess
    if stated_preprocess is None:
        return None, (f"{title} is not followed: {metadata_preprocess.reason}",)
    try:
        preprocess, _ = complete_preprocess(stated_preprocess, spec)
    except (ConfigError, FeedError) as error:
        return None, (f"{title} is not followed: {error}",)

    # the input decides the size, and the metadata may have been written for another one
    stated_size = stated_preprocess.default_size
    size = preprocess.size
    if stated_size is None or size is None or stated_size == size:
        return preprocess, ()
    sizes = f"it says {format_size(stated_size)} pixels, the input is of {format_size(size)}"
    if preprocess.resize == "short-side":  # the short side was chosen for the stated size only
        return None, (f"{title} is not followed: {sizes}",)
    return preprocess, (f"{title} is followed but for its size: {sizes}",)


def _makes_equal_inputs(first: Preprocess, second: Preprocess) -> bool:
    """Return whether two preprocessings make the same input of an image, however they are written.

    Sizes and interpolation are left out: another size or filter is no other preprocessing.
    """
    if (first.channels, first.resize) != (second.channels, second.resize):
        return False
    # values that count up, from 0 again after 255; higher than wide, so that any border shows
    pattern = np.arange(16 * 8 * first.channels, dtype=np.uint16).astype(np.uint8)
    image = pattern.reshape(16, 8, first.channels)
    inputs = []
    for preprocess in (first, second):
        preprocess = replace(
            preprocess,
            size=(16, 16),
            multiple=1,
            short_side=None,
            interpolation="linear",
            layout="nchw",
        )
        inputs.append(preprocess_image(image, preprocess))
    first_input, second_input = inputs
    return np.allclose(first_input, second_input, rtol=0, atol=1e-3)
