"""AIPP configuration: preprocessing inside the .om, from the same options that fed calibration.

AIPP takes a uint8 picture as a camera or DVPP gives it, and computes, in this order::

    swap of R and B (U and V) -> crop -> (YUV -> RGB) -> (pixel - mean_chn - min_chn) * var_reci_chn

Calibration computed ``(pixel * scale - mean) / std``, so mean_chn + min_chn = mean / scale and
var_reci_chn = scale / std. mean_chn is whole; min_chn takes the fraction, which float16 holds well.
AIPP cannot resize nor letterbox: those stay with the host, or with DVPP's VPC on the device.

Source: hicann/ge, docs of atc, AIPP (configuration template, CSC, crop).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.errors import ExportError
from deploy.feed.preprocess import Preprocess
from deploy.targets.ascend.csc import matrix
from deploy.targets.ascend.proto import message_class, parse_text, print_text
from deploy.targets.ascend.source import Source

_CHANNELS = 3
_SIDES = (2, 4096)
_BYTES = {"rgb": 3.0, "bgr": 3.0, "nv12": 1.5, "nv21": 1.5}  # a pixel


@dataclass(frozen=True, slots=True, kw_only=True)
class Aipp:
    """What goes into the .om, and what the host still has to do.

    Attributes:
        text: the configuration file.
        op: what AIPP computes, an AippOpParams; where it is dynamic, what the host has to set.
        host: sentences: the steps that stay on the host, and how exact the arithmetic is.
    """

    text: str
    op: Any
    host: tuple[str, ...]


def write_aipp(how: Preprocess, source: Source | None = None) -> Aipp:
    """AIPP of a resolved `Preprocess` (size, color and layout set).

    Args:
        how: the preprocessing that fed the calibration.
        source: the pictures that the .om gets; None is RGB of the model's size.

    Raises:
        ExportError: AIPP cannot express the arithmetic, the layout or the crop.
    """
    source = source or Source()
    if how.size is None or None in how.size or how.color is None:
        raise ExportError("AIPP needs the input's size and color, got a preprocessing without")
    if how.layout == "nhwc":
        raise ExportError("AIPP feeds NCHW models, got layout nhwc; preprocess on the host")
    op = message_class("AippOpParams")()
    op.aipp_mode = 1
    op.related_input_rank = 0
    _color(op, how, source)
    host = [*_place(op, how, source), _input_words(how, source)]
    host += _arithmetic(op, how, 1 if how.color == "grey" else _CHANNELS)
    written = op
    if source.dynamic:
        written = _dynamic(op, source)
        host.append(f"Dynamic AIPP: the host sets, by aclmdlSetAIPP..., {_one_line(op)}.")
    whole = message_class("InsertNewOps")()
    whole.aipp_op.append(written)
    text = print_text(whole)
    parse_text("InsertNewOps", text, "the AIPP configuration")
    return Aipp(text=text, op=op, host=tuple(host))


def _color(op: Any, how: Preprocess, source: Source) -> None:
    """Format of the picture, swap and conversion."""
    assert how.color is not None
    grey = how.color == "grey"
    if grey and source.color == "bgr":
        raise ExportError("AIPP makes grey of grey pictures, nv12 and nv21, got source color bgr")
    op.csc_switch = source.yuv
    if source.yuv:
        op.input_format = 1
        op.rbuv_swap_switch = source.color == "nv21"
        _conversion(op, source.standard, how.color)
        return
    op.input_format = 4 if grey else 3
    op.rbuv_swap_switch = not grey and source.color != how.color


def _conversion(op: Any, standard: str, color: str) -> None:
    rows, bias = matrix(standard, color)
    for r, row in enumerate(rows):
        for c, value in enumerate(row):
            getattr(op, f"matrix_r{r}c{c}").append(value)
    for c, value in enumerate(bias):
        getattr(op, f"input_bias_{c}").append(value)


def _dynamic(op: Any, source: Source) -> Any:
    """The file of dynamic AIPP: how much a picture may hold."""
    made = message_class("AippOpParams")()
    made.aipp_mode = 2
    made.related_input_rank = 0
    grey = op.input_format == 4
    pixels = op.src_image_size_w * op.src_image_size_h
    made.max_src_image_size = int(pixels * (1 if grey else _BYTES[source.color]))
    return made


def _one_line(op: Any) -> str:
    words = print_text(op).replace("\n", ", ").strip(", ")
    return words.removeprefix("aipp_mode: static, ")


def _place(op: Any, how: Preprocess, source: Source) -> list[str]:
    """Sizes and crop; gives what is left to the host."""
    height, width = source.size or how.box
    for word, side in (("width", width), ("height", height)):
        if not _SIDES[0] <= side <= _SIDES[1]:
            raise ExportError(f"AIPP takes sides of {_SIDES[0]} to {_SIDES[1]}, got {word} {side}")
        if source.yuv and side % 2:
            raise ExportError(f"AIPP takes YUV pictures of even sides, got {word} {side}")
    fields = {"src_image_size_w": width, "src_image_size_h": height}
    if (height, width) != how.box:
        top, left = (height - how.box[0]) // 2, (width - how.box[1]) // 2
        if top < 0 or left < 0:
            raise ExportError(
                f"AIPP crops but does not enlarge, got a source of {height}x{width} for an input"
                f" of {how.box[0]}x{how.box[1]}"
            )
        if source.yuv:  # whose U and V stand for two rows and columns
            top, left = top // 2 * 2, left // 2 * 2
        fields |= {"crop": True, "load_start_pos_w": left, "load_start_pos_h": top}
        fields |= {"crop_size_w": how.box[1], "crop_size_h": how.box[0]}
    for name, value in fields.items():
        setattr(op, name, value)
    step = {
        "stretch": "stretch the picture",
        "letterbox": f"letterbox the picture (border {how.pad[0]:g})",
        "short-side": "resize the short side and crop the centre",
        "fit-height": f"fit the height and pad on the right ({how.pad[0]:g})",
    }[how.resize]
    return [
        f"On the host, or in DVPP: {step} to {height}x{width}, {how.interpolation}; AIPP cannot"
        " resize."
    ]


def _input_words(how: Preprocess, source: Source) -> str:
    if source.yuv:
        order = "U before V" if source.color == "nv12" else "V before U"
        kind = (
            f"YUV420SP ({source.color.upper()}, {order}), {source.standard}, height x 1.5 x width"
        )
    elif how.color == "grey":
        kind = "grey (YUV400_U8)"
    else:
        kind = f"{source.color.upper()} packed, height x width x 3"
    return f"The .om's input becomes uint8, {kind}."


def _arithmetic(op: Any, how: Preprocess, channels: int) -> list[str]:
    worst = 0.0
    for channel in range(channels):
        mean, std = (float(v[channel if len(v) > 1 else 0]) for v in (how.mean, how.std))
        centre, factor = mean / how.scale, how.scale / std
        if not 0 <= centre <= 255:
            raise ExportError(
                f"AIPP takes means of 0 to 255 pixel units, got {centre:g} for channel {channel};"
                " preprocess on the host"
            )
        whole = min(int(centre), 255)
        rest, held = float(np.float16(centre - whole)), float(np.float16(factor))
        if not 2.0**-14 <= held <= 65504:
            raise ExportError(
                f"AIPP holds 1 / std in float16, got {factor:g} for channel {channel};"
                " preprocess on the host"
            )
        setattr(op, f"mean_chn_{channel}", whole)
        setattr(op, f"min_chn_{channel}", rest)
        getattr(op, f"var_reci_chn_{channel}").append(held)
        ends = np.array([0.0, 255.0])
        error = np.abs((ends - whole - rest) * held - (ends - centre) * factor).max()
        worst = max(worst, float(error / max(np.abs((ends - centre) * factor).max(), 1e-9)))
    return [
        f"AIPP holds its factors in float16: inputs differ by at most {worst:.2g} of full scale."
    ]
