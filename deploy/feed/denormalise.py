"""A model's input back to a picture that can be looked at: `deploy.feed.pixels` backwards.

::

    pixel = (value * std + mean) / scale,  rounded, cut to 0..255,  channels as red, green, blue

Of arrays whose preprocessing is not known, the smallest value becomes black and the largest white.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deploy.feed.images import opencv
from deploy.feed.preprocess import Preprocess
from deploy.tensors import Array

SIDE = 160  # pixels of the longer side of a small picture


def pixels_of(values: Array, how: Preprocess | None) -> Array | None:
    """One sample's array as the picture that it is.

    Args:
        values: [1, C, H, W] or [1, H, W, C] of 1 or 3 channels.
        how: the resolved preprocessing that made it; None where it is not known.

    Returns:
        uint8 [H, W, 3], red, green, blue; None for an array that is no picture.
    """
    layout = layout_of(values) if how is None else how.layout
    if layout is None or values.ndim != 4 or len(values) != 1 or not values.size:
        return None
    placed = values[0].transpose(1, 2, 0) if layout == "nchw" else values[0]
    if placed.shape[2] not in (1, 3):
        return None
    plain = placed.astype(np.float64)
    found = _stretched(plain) if how is None else _pixels(plain, how)
    pixels = np.clip(np.rint(np.nan_to_num(found)), 0, 255).astype(np.uint8)
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    turned: Array = pixels[:, :, ::-1] if how is not None and how.color == "bgr" else pixels
    return turned


def picture_in(sample: Mapping[str, Array], how: Preprocess | None) -> Array | None:
    """The first input of a sample that is a picture, as `pixels_of`; None without one."""
    found = (pixels_of(values, how) for values in sample.values())
    return next((one for one in found if one is not None), None)


def small(picture: Array, side: int = SIDE) -> Array:
    """uint8 [H, W, 3] -> the same, made smaller until no side is longer than `side`."""
    height, width = picture.shape[:2]
    longer = max(height, width)
    if longer <= side:
        return np.ascontiguousarray(picture)
    size = (max(1, round(width * side / longer)), max(1, round(height * side / longer)))
    cv2 = opencv()
    made: Array = cv2.resize(np.ascontiguousarray(picture), size, interpolation=cv2.INTER_AREA)
    return made


def how_shown(how: Preprocess | None) -> str:
    """How pictures of inputs come about, in a sentence without its end."""
    if how is None:
        return (
            "arrays as they are fed, their smallest value black and their largest white, as no"
            " preprocessing of them is known"
        )
    return (
        "what the model is fed, taken back to pixels by the preprocessing's own scale, mean, std"
        " and order of channels"
    )


def layout_of(values: Array) -> str | None:
    """Where the channels of an array stand; None where none of its dimensions holds 1 or 3."""
    if values.ndim != 4:
        return None
    if values.shape[1] in (1, 3):
        return "nchw"
    return "nhwc" if values.shape[3] in (1, 3) else None


def _pixels(values: Array, how: Preprocess) -> Array:
    back = values * np.asarray(how.std) + np.asarray(how.mean)
    return np.asarray(back / how.scale)


def _stretched(values: Array) -> Array:
    good = values[np.isfinite(values)]
    low, high = (float(good.min()), float(good.max())) if good.size else (0.0, 0.0)
    if high <= low:
        return np.full(values.shape, 127.0)
    return np.asarray((values - low) * (255 / (high - low)))
