"""AIPP in numpy: what the .om computes of a picture before its first layer, to be judged by.

The arithmetic of the hardware as its documents give it: whole numbers up to the conversion, whose
products are shifted right by 8 and clipped to 0..255, then float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.feed.denormalise import layout_of, pixels_of
from deploy.feed.preprocess import Preprocess
from deploy.targets.ascend.aipp import Aipp
from deploy.targets.ascend.csc import to_yuv
from deploy.targets.ascend.source import Source

Bytes = NDArray[np.uint8]


def run_aipp(op: Any, picture: Bytes) -> NDArray[np.float32]:
    """One picture as the .om gets it -> the model's input [C, H, W].

    Args:
        op: an AippOpParams.
        picture: [H, W, 3] packed, [H, W] grey, or [H * 3 / 2, W] YUV420SP.
    """
    pixels = _unpacked(op, picture)
    if op.rbuv_swap_switch:
        pixels = _swapped(pixels, yuv=op.input_format == 1)
    if op.crop:
        top, left = op.load_start_pos_h, op.load_start_pos_w
        pixels = pixels[top : top + op.crop_size_h, left : left + op.crop_size_w]
    if op.csc_switch:
        pixels = _converted(op, pixels)
    channels = [
        ((pixels[..., c] - mean).astype(np.float16) - np.float16(least)) * np.float16(factor)
        for c, (mean, least, factor) in enumerate(_norms(op, pixels.shape[-1]))
    ]
    return np.stack(channels).astype(np.float32)


def judged(
    made: Aipp, how: Preprocess, source: Source, sample: Mapping[str, NDArray[Any]]
) -> float | None:
    """How far AIPP's input is from the calibration's, as a share of its full scale.

    The picture is taken back from the calibration's input, exactly, and given as the .om gets it.

    Args:
        made: from `write_aipp`.
        how: the preprocessing that fed the calibration.
        source: the pictures that the .om gets.
        sample: input name -> array; the first one is AIPP's.

    Returns:
        The largest mean absolute error of a picture of the batch; None where `sample` holds no
        pictures.
    """
    batch = next(iter(sample.values()))
    if layout_of(batch) != "nchw" or not np.issubdtype(batch.dtype, np.floating):
        return None
    return max(_error(made, how, source, picture) for picture in batch)


def _error(made: Aipp, how: Preprocess, source: Source, wanted: NDArray[Any]) -> float:
    pixels = pixels_of(wanted[None], how)
    assert pixels is not None
    got = run_aipp(made.op, _given(_framed(pixels, made.op), how, source))
    full = 255 * how.scale / min(how.std)
    return float(np.abs(got - wanted).mean() / full)


def _framed(pixels: Bytes, op: Any) -> Bytes:
    """The picture in the middle of one of the source's size, its edges continued."""
    height, width = pixels.shape[:2]
    top, left = (op.load_start_pos_h, op.load_start_pos_w) if op.crop else (0, 0)
    below, right = op.src_image_size_h - height - top, op.src_image_size_w - width - left
    return np.pad(pixels, ((top, below), (left, right), (0, 0)), mode="edge")


def _given(rgb: Bytes, how: Preprocess, source: Source) -> Bytes:
    """Red, green, blue [H, W, 3] -> the picture as the .om gets it."""
    if how.color == "grey" and not source.yuv:
        return rgb[..., 0]
    if not source.yuv:
        return rgb if source.color == "rgb" else rgb[..., ::-1]
    picture = to_yuv(rgb, source.standard)
    height = rgb.shape[0]
    if source.color == "nv21":
        pairs = picture[height:].reshape(height // 2, -1, 2)
        picture = np.concatenate([picture[:height], pairs[..., ::-1].reshape(height // 2, -1)])
    return picture


def _unpacked(op: Any, picture: Bytes) -> NDArray[np.int32]:
    """[H, W, C] in whole numbers; each U and V stands for four pixels."""
    if op.input_format == 1:
        height = picture.shape[0] * 2 // 3
        pairs = picture[height:].reshape(height // 2, -1, 2)
        planes = pairs.repeat(2, axis=0).repeat(2, axis=1)
        return np.concatenate([picture[:height, :, None], planes], axis=-1).astype(np.int32)
    return (picture[..., None] if picture.ndim == 2 else picture).astype(np.int32)


def _swapped(pixels: NDArray[np.int32], *, yuv: bool) -> NDArray[np.int32]:
    return pixels[..., [0, 2, 1]] if yuv else pixels[..., ::-1]


def _converted(op: Any, pixels: NDArray[np.int32]) -> NDArray[np.int32]:
    rows = np.array([[getattr(op, f"matrix_r{r}c{c}")[0] for c in range(3)] for r in range(3)])
    bias = np.array([getattr(op, f"input_bias_{c}")[0] for c in range(3)])
    out = np.asarray(np.clip((pixels - bias) @ rows.T >> 8, 0, 255), np.int32)
    return out[..., :1] if not rows[1:].any() else out


def _norms(op: Any, channels: int) -> list[tuple[int, float, float]]:
    return [
        (
            getattr(op, f"mean_chn_{c}"),
            getattr(op, f"min_chn_{c}"),
            getattr(op, f"var_reci_chn_{c}")[0],
        )
        for c in range(channels)
    ]
