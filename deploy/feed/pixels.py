"""From a decoded picture to a model's input: geometry in uint8, then float32 arithmetic.

The order is fixed, so that another program can repeat it bit for bit:

1. decode to uint8 [H, W, C] (`deploy.feed.images`), resize and crop while still uint8;
2. ``y = ((float32(pixel) * scale) - mean) / std``: three separate float32 roundings, no fused
   multiply-add; scale, mean and std are rounded to float32 first;
3. the border of a letterbox is the pad value, in pixel units, taken through the same arithmetic;
4. channels in the order asked for, then NCHW or NHWC.

::

    stretch        letterbox (centre)   letterbox (top-left)   short-side + crop   fit-height
    +--------+     +--------+           +--------+             +--+------+--+      +------+--+
    |xxxxxxxx|     |  pad   |           |xxxxxxxx|             |  |xxxxxx|  |      |xxxxxx|  |
    |xxxxxxxx|     |xxxxxxxx|           |xxxxxxxx|             |  |xxxxxx|  |      |xxxxxx|p |
    |xxxxxxxx|     |  pad   |           |  pad   |             |  |xxxxxx|  |      |xxxxxx|  |
    +--------+     +--------+           +--------+             +--+------+--+      +------+--+
"""

from __future__ import annotations

import numpy as np

from deploy.feed.images import opencv
from deploy.feed.preprocess import Preprocess, Size, sized
from deploy.tensors import Array


def apply(pixels: Array, how: Preprocess) -> Array:
    """uint8 [H, W, C] in OpenCV's channel order (BGR or grey) -> float32 [1, C, h, w] or NHWC.

    `how` must be resolved; where it leaves a side to the picture, h and w are what `sized` gives.
    The result does not depend on threads.

    Raises:
        FeedError: as `sized`.
    """
    assert how.color is not None
    how = sized(how, (pixels.shape[0], pixels.shape[1]))
    placed, (top, left) = fit(pixels, how)
    if how.color == "rgb":
        placed = placed[:, :, ::-1]
    height, width = placed.shape[:2]
    chw = how.layout != "nhwc"
    box = (slice(top, top + height), slice(left, left + width))
    if (height, width) == how.box:
        shape = (how.channels, height, width) if chw else (height, width, how.channels)
        out = np.empty((1, *shape), np.float32)
    else:
        out = _border(how, chw)
    target = out[0][(slice(None), *box)] if chw else out[0][box]
    source = placed.transpose(2, 0, 1) if chw else placed
    np.multiply(source, np.float32(how.scale), out=target, dtype=np.float32)
    _normalise(target, how, chw)
    return out


def fit(pixels: Array, how: Preprocess) -> tuple[Array, tuple[int, int]]:
    """uint8 [H, W, C] -> uint8 picture at its place's size, and its (top, left) in the input.

    `how` must be `sized`.
    """
    height, width = pixels.shape[:2]
    out_h, out_w = how.box
    if how.resize == "short-side":
        resized = _resize(pixels, short_side_size((height, width), how.short), how)
        top, left = (resized.shape[0] - out_h) // 2, (resized.shape[1] - out_w) // 2
        return resized[top : top + out_h, left : left + out_w], (0, 0)
    if how.resize == "letterbox":
        inner_h, inner_w = letterbox_size((height, width), how.box)
        free = (out_h - inner_h, out_w - inner_w)
        corner = (free[0] // 2, free[1] // 2) if how.anchor == "centre" else (0, 0)
        return _resize(pixels, (inner_h, inner_w), how), corner
    if how.resize == "fit-height":
        inner_w = min(out_w, -(-out_h * width // height))
        return _resize(pixels, (out_h, inner_w), how), (0, 0)
    return _resize(pixels, how.box, how), (0, 0)


def short_side_size(size: Size, short: int) -> Size:
    """(h, w) with the short side made `short` and the long one scaled alike, rounded down."""
    height, width = size
    if height <= width:
        return short, width * short // height
    return height * short // width, short


def letterbox_size(size: Size, box: Size) -> Size:
    """(h, w) of the largest picture of the same aspect inside `box`, rounded to the nearest."""
    (height, width), (box_h, box_w) = size, box
    if box_w * height <= box_h * width:
        return max(1, min(box_h, (2 * height * box_w + width) // (2 * width))), box_w
    return box_h, max(1, min(box_w, (2 * width * box_h + height) // (2 * height)))


def _resize(pixels: Array, size: Size, how: Preprocess) -> Array:
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels
    cv2 = opencv()
    enlarges = size[0] > height or size[1] > width
    kind = "linear" if how.interpolation == "area" and enlarges else how.interpolation
    flag = {
        "nearest": cv2.INTER_NEAREST,
        "linear": cv2.INTER_LINEAR,
        "cubic": cv2.INTER_CUBIC,
        "area": cv2.INTER_AREA,
        "lanczos": cv2.INTER_LANCZOS4,
    }[kind]
    resized: Array = cv2.resize(pixels, (size[1], size[0]), interpolation=flag)
    return resized.reshape(size[0], size[1], pixels.shape[2])


def _border(how: Preprocess, chw: bool) -> Array:
    shape = (how.channels, *how.box) if chw else (*how.box, how.channels)
    out = np.empty((1, *shape), np.float32)
    out[0] = _per_channel(how.pad, chw)
    np.multiply(out, np.float32(how.scale), out=out)
    _normalise(out[0], how, chw)
    return out


def _normalise(target: Array, how: Preprocess, chw: bool) -> None:
    np.subtract(target, _per_channel(how.mean, chw), out=target)
    np.divide(target, _per_channel(how.std, chw), out=target)


def _per_channel(values: tuple[float, ...], chw: bool) -> Array:
    array = np.asarray(values, np.float32)
    return array.reshape(-1, 1, 1) if chw else array
