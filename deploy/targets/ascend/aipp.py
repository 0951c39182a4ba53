"""AIPP configuration: preprocessing inside the .om, from the same options that fed calibration.

AIPP computes, per channel of a uint8 picture, after an optional swap of R and B::

    (pixel - mean_chn - min_chn) * var_reci_chn

and calibration computed ``(pixel * scale - mean) / std``, so mean_chn + min_chn = mean / scale and
var_reci_chn = scale / std. mean_chn is whole; min_chn takes the fraction, which float16 holds well.
AIPP cannot resize nor letterbox: those stay on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deploy.errors import ConfigError, ExportError
from deploy.feed.preprocess import Preprocess
from deploy.targets.ascend.proto import message_class, parse_text, print_text

_CHANNELS = 3
_SIDES = (2, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aipp:
    """What goes into the .om, and what the host still has to do.

    Attributes:
        text: the configuration file.
        host: sentences: the steps that stay on the host, and how exact the arithmetic is.
    """

    text: str
    host: tuple[str, ...]


def write_aipp(
    how: Preprocess, *, source_color: str = "rgb", source_size: tuple[int, int] | None = None
) -> Aipp:
    """Static AIPP of a resolved `Preprocess` (size, color and layout set).

    Args:
        how: the preprocessing that fed the calibration.
        source_color: order of the picture that the .om gets, "rgb" or "bgr".
        source_size: (height, width) of that picture where AIPP is to crop its centre.

    Raises:
        ExportError: AIPP cannot express the arithmetic, the layout or the crop.
    """
    if how.size is None or None in how.size or how.color is None:
        raise ExportError("AIPP needs the input's size and color, got a preprocessing without")
    if how.layout == "nhwc":
        raise ExportError("AIPP feeds NCHW models, got layout nhwc; preprocess on the host")
    if source_color not in ("rgb", "bgr"):
        raise ConfigError(f"the source color must be rgb or bgr, got {source_color!r}")
    message = message_class("AippOpParams")()
    message.aipp_mode = 1
    message.related_input_rank = 0
    grey = how.color == "grey"
    message.input_format = 4 if grey else 3
    message.csc_switch = False
    message.rbuv_swap_switch = not grey and source_color != how.color
    host = [*_place(message, how, source_size), _input_words(how, source_color, grey)]
    host += _arithmetic(message, how, 1 if grey else _CHANNELS)
    whole = message_class("InsertNewOps")()
    whole.aipp_op.append(message)
    text = print_text(whole)
    parse_text("InsertNewOps", text, "the AIPP configuration")
    return Aipp(text=text, host=tuple(host))


def _place(message: object, how: Preprocess, source: tuple[int, int] | None) -> list[str]:
    """Sizes and crop; gives what is left to the host."""
    height, width = source or how.box
    for word, side in (("width", width), ("height", height)):
        if not _SIDES[0] <= side <= _SIDES[1]:
            raise ExportError(f"AIPP takes sides of {_SIDES[0]} to {_SIDES[1]}, got {word} {side}")
    fields = {"src_image_size_w": width, "src_image_size_h": height}
    if source is not None and source != how.box:
        top, left = (height - how.box[0]) // 2, (width - how.box[1]) // 2
        if top < 0 or left < 0:
            raise ExportError(
                f"AIPP crops but does not enlarge, got a source of {height}x{width} for an input"
                f" of {how.box[0]}x{how.box[1]}"
            )
        fields |= {"crop": True, "load_start_pos_w": left, "load_start_pos_h": top}
        fields |= {"crop_size_w": how.box[1], "crop_size_h": how.box[0]}
    for name, value in fields.items():
        setattr(message, name, value)
    step = {
        "stretch": "stretch the picture",
        "letterbox": f"letterbox the picture (border {how.pad[0]:g})",
        "short-side": "resize the short side and crop the centre",
        "fit-height": f"fit the height and pad on the right ({how.pad[0]:g})",
    }[how.resize]
    return [f"On the host: {step} to {height}x{width}, {how.interpolation}; AIPP cannot resize."]


def _input_words(how: Preprocess, source_color: str, grey: bool) -> str:
    kind = "grey (YUV400_U8)" if grey else f"{source_color.upper()} packed, height x width x 3"
    return f"The .om's input becomes uint8, {kind}."


def _arithmetic(message: object, how: Preprocess, channels: int) -> list[str]:
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
        setattr(message, f"mean_chn_{channel}", whole)
        setattr(message, f"min_chn_{channel}", rest)
        getattr(message, f"var_reci_chn_{channel}").append(held)
        ends = np.array([0.0, 255.0])
        error = np.abs((ends - whole - rest) * held - (ends - centre) * factor).max()
        worst = max(worst, float(error / max(np.abs((ends - centre) * factor).max(), 1e-9)))
    return [
        f"AIPP holds its factors in float16: inputs differ by at most {worst:.2g} of full scale."
    ]
