"""AIPP (preprocessing inside the .om): its configuration file, and its arithmetic in numpy.

AIPP takes a uint8 image from a camera or DVPP, and computes, in this order::

    swap of R and B (U and V) -> crop -> (YUV -> RGB) -> (pixel - mean_chn - min_chn) * var_reci_chn

Calibration computed ``(pixel * scale - mean) / std``, so mean_chn + min_chn = mean / scale and
var_reci_chn = scale / std. mean_chn is an integer; min_chn holds the fraction in float16. AIPP
cannot resize or letterbox: that is left to the host, or to DVPP's VPC on the device. VPC resizes by
1/32 to 16, writes YUV420SP of even sides in rows of a multiple of 16 pixels, and pastes at even
rows and at columns that are multiples of 16.

YUV to RGB uses integer factors of 1/256::

    R   | m00 m01 m02 |   | Y - b0 |        BT.601: SD video and JPEG
    G = | m10 m11 m12 | x | U - b1 | >> 8   BT.709: HD video
    B   | m20 m21 m22 |   | V - b2 |        narrow: Y 16..235, U and V 16..240; full: 0..255

The factors follow from the standard's weights of red and blue in Y. (CANN's docs call full "wide";
JPEG is BT.601 full.)

`run_aipp` follows the documented arithmetic of the hardware: integers up to the conversion, whose
products are shifted right by 8 and clipped to 0..255, then float16. With it a build measures how
far the .om's input is from the calibration's.

Source: hicann/ge, docs of atc, AIPP (configuration template, CSC, crop); ITU-R BT.601 and BT.709;
CANN's docs of acldvppVpcResizeAsync, hi_vpc_crop_resize_paste_region and of VPC's alignment.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ExportError
from deploy.feed.pixels import input_to_image, layout_of, resized_geometry
from deploy.feed.preprocess import Preprocess, Size, format_size
from deploy.files import atomic
from deploy.targets.ascend.atc import AippSource, write_compression_options
from deploy.targets.ascend.proto import message_class, parse_text, print_text
from deploy.targets.base import BuildRequest

Bytes = NDArray[np.uint8]
Matrix = tuple[tuple[int, int, int], ...]

_WEIGHTS = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}  # weights of red and blue in Y
_CHANNELS = 3
_SIDES = (2, 4096)  # limits of an image's sides in pixels
_BYTES = {"rgb": 3.0, "bgr": 3.0, "nv12": 1.5, "nv21": 1.5}  # bytes per pixel
_CHECKED = 2  # samples on which a build measures AIPP's error


def csc_matrix(standard: str, color: str) -> tuple[Matrix, tuple[int, int, int]]:
    """Return the YUV conversion matrix in 1/256, and the biases subtracted from Y, U, V.

    Args:
        standard: one of `deploy.targets.ascend.atc.STANDARDS`.
        color: "rgb", "bgr" or "grey"; it orders the rows. For "grey" only the first row counts.
    """
    red, blue = _WEIGHTS[standard.partition("-")[0]]
    luma, chroma, bias = _ranges(standard)
    green = 1 - red - blue
    rows = [
        (1.0, 0.0, 2 * (1 - red)),
        (1.0, -2 * (1 - blue) * blue / green, -2 * (1 - red) * red / green),
        (1.0, 2 * (1 - blue), 0.0),
    ]
    if color == "grey":
        rows = [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
    if color == "bgr":
        rows.reverse()
    integers = tuple(
        (round(256 * y / luma), round(256 * u / chroma), round(256 * v / chroma))
        for y, u, v in rows
    )
    return integers, (bias, 128, 128)


def to_yuv(rgb: Bytes, standard: str) -> Bytes:
    """Convert RGB [H, W, 3] of even sides to NV12 [H * 3 / 2, W]; U and V average four pixels."""
    red, blue = _WEIGHTS[standard.partition("-")[0]]
    luma, chroma, bias = _ranges(standard)
    r, g, b = (rgb[..., c].astype(np.float64) for c in range(3))
    y = red * r + (1 - red - blue) * g + blue * b
    height, width = y.shape
    four = (height // 2, 2, width // 2, 2)
    u, v = (
        chroma_plane.reshape(four).mean(axis=(1, 3))
        for chroma_plane in ((b - y) / (2 * (1 - blue)), (r - y) / (2 * (1 - red)))
    )
    planes = np.stack([u, v], axis=-1).reshape(height // 2, width) * chroma + 128
    out = np.concatenate([y * luma + bias, planes])
    return np.asarray(np.clip(np.rint(out), 0, 255), np.uint8)


def _ranges(standard: str) -> tuple[float, float, int]:
    """Return the shares of 255 that Y, and that U and V, span, and the lowest Y."""
    narrow = standard.endswith("narrow")
    return (219 / 255, 224 / 255, 16) if narrow else (1.0, 1.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AippConfig:
    """An AIPP configuration, and the preprocessing left to the host.

    Attributes:
        parameters: an AippOpParams; for dynamic AIPP, those that the host has to set.
        host_notes: sentences on the steps left to the host, and the error of AIPP's arithmetic.
        frame_plan: how a frame of the source size becomes AIPP's picture, if AIPP cannot crop it.
    """

    text: str
    parameters: Any
    host_notes: tuple[str, ...]
    frame_plan: "FramePlan | None" = None


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Sizes before AIPP, as (height, width)."""

    frame: Size
    resized: Size
    corner: Size  # (row, column) in the model's input where it is pasted, or cropped if negative
    stored: Size  # in memory; the model's input is the upper left part


def write_aipp(how: Preprocess, source: AippSource | None = None) -> AippConfig:
    """Return the AIPP configuration of a resolved `Preprocess` (size, color and layout set).

    `source`: format of the .om's input images; None for RGB of the model's size.
    """
    source = source or AippSource()
    if how.size is None or None in how.size or how.color is None:
        raise ExportError("AIPP needs the input's size and color, got a preprocessing without")
    if how.layout == "nhwc":
        raise ExportError("AIPP feeds NCHW models, got layout nhwc; preprocess on the host")
    op = message_class("AippOpParams")()
    op.aipp_mode = 1
    op.related_input_rank = 0
    _color(op, how, source)
    plan = _plan(how, source)
    channels = 1 if how.color == "grey" else _CHANNELS
    host = [_place(op, how, source, plan), _input_words(op, how, source)]
    host.append(_arithmetic(op, how, channels))
    written = op
    if source.dynamic:
        written = _dynamic(op, source)
        words = print_text(op).replace("\n", ", ").strip(", ").removeprefix("aipp_mode: static, ")
        host.append(f"Dynamic AIPP: the host sets, by aclmdlSetAIPP..., {words}.")
    message = message_class("InsertNewOps")()
    message.aipp_op.append(written)
    text = print_text(message)
    parse_text("InsertNewOps", text, "the AIPP configuration")
    return AippConfig(text=text, parameters=op, host_notes=tuple(host), frame_plan=plan)


def _color(op: Any, how: Preprocess, source: AippSource) -> None:
    """Set input format, channel swap and color conversion."""
    assert how.color is not None
    grey = how.color == "grey"
    if grey and source.color == "bgr":
        raise ExportError("AIPP makes grey of grey pictures, nv12 and nv21, got source color bgr")
    op.csc_switch = source.is_yuv
    if source.is_yuv:
        op.input_format = 1
        op.rbuv_swap_switch = source.color == "nv21"
        rows, bias = csc_matrix(source.standard, how.color)
        for r, row in enumerate(rows):
            for c, value in enumerate(row):
                getattr(op, f"matrix_r{r}c{c}").append(value)
        for c, value in enumerate(bias):
            getattr(op, f"input_bias_{c}").append(value)
        return
    op.input_format = 4 if grey else 3
    op.rbuv_swap_switch = not grey and source.color != how.color


def _dynamic(op: Any, source: AippSource) -> Any:
    """Return the parameters of dynamic AIPP: only the largest image size in bytes."""
    dynamic = message_class("AippOpParams")()
    dynamic.aipp_mode = 2
    dynamic.related_input_rank = 0
    grey = op.input_format == 4
    pixels = op.src_image_size_w * op.src_image_size_h
    dynamic.max_src_image_size = int(pixels * (1 if grey else _BYTES[source.color]))
    return dynamic


def _plan(how: Preprocess, source: AippSource) -> FramePlan | None:
    """Return the steps before AIPP; None if AIPP crops, or takes pictures of the input's size."""
    frame, box = source.size or how.box, how.box
    larger = frame[0] >= box[0] and frame[1] >= box[1]
    crops = how.resize == "short-side" and min(frame) <= how.short
    if frame == box or source.dynamic or (larger and crops):
        return None
    (height, width), (top, left) = resized_geometry(frame, how)
    if not source.is_yuv:
        return FramePlan(frame, (height, width), (top, left), box)
    column = left // 16 * 16 if left > 0 else int(left / 2) * 2
    even = (_round_up(height, 2), _round_up(width, 2))
    stored = (_round_up(box[0], 2), _round_up(box[1], 16))
    return FramePlan(frame, even, (int(top / 2) * 2, column), stored)


def _round_up(side: int, unit: int) -> int:
    return -(-side // unit) * unit


def _plan_words(plan: FramePlan, how: Preprocess, source: AippSource) -> str:
    """Return the plan, of the host or of DVPP, in words with all sizes."""
    frame, resized, stored = map(format_size, (plan.frame, plan.resized, plan.stored))
    (row, column), (size, place) = plan.corner, resized_geometry(plan.frame, how)
    unit = 2 if source.is_yuv else 1
    made = format_size((_round_up(how.box[0], unit), _round_up(how.box[1], unit)))
    words = f"resize {frame} to {resized} ({how.interpolation})"
    if min(place) < 0:
        words += f", crop {made} at row {-row}, column {-column}"
    elif how.resize in ("letterbox", "fit-height"):
        words += f", paste at row {row}, column {column} of {made} filled with"
        words += f" {_fill(how, source)}"
    words = f"{'DVPP' if source.is_yuv else 'The host'} (height x width): {words}."
    if plan.stored != how.box:
        words += f" It is {stored} in memory; AIPP crops the upper left {format_size(how.box)}."
    if (size, place) != (plan.resized, plan.corner):
        done = "cropped" if min(place) < 0 else "pasted"
        words += (
            f" The calibration resized to {format_size(size)} and {done} at row {abs(place[0])},"
            f" column {abs(place[1])}: DVPP needs even sides and rows, and columns of a multiple of"
            " 16 for pasting; undo DVPP's values in the results."
        )
    return words


def _fill(how: Preprocess, source: AippSource) -> str:
    """Return the border's color in the format of the .om's input."""
    border = np.asarray(np.rint(how.pad), np.uint8)
    if not source.is_yuv:
        return f"{how.color} {', '.join(map(str, border))}"
    rgb = np.broadcast_to(border[::-1] if how.color == "bgr" else border, (2, 2, 3))
    y, u, v = to_yuv(rgb, source.standard).ravel()[[0, 4, 5]]
    return f"Y {y}, U {u}, V {v}"


def _place(op: Any, how: Preprocess, source: AippSource, plan: FramePlan | None) -> str:
    """Set sizes and crop; return the steps that are left to the host."""
    height, width = plan.stored if plan else source.size or how.box
    for word, side in (("width", width), ("height", height)):
        if not _SIDES[0] <= side <= _SIDES[1]:
            raise ExportError(f"AIPP takes sides of {_SIDES[0]} to {_SIDES[1]}, got {word} {side}")
    odd = [side for side in (*(source.size or ()), height, width) if side % 2]
    if source.is_yuv and odd:
        raise ExportError(f"YUV pictures have even sides, got one of {odd[0]}")
    fields = {"src_image_size_w": width, "src_image_size_h": height}
    if (height, width) != how.box:
        top, left = (height - how.box[0]) // 2, (width - how.box[1]) // 2
        if plan:
            top = left = 0
        if top < 0 or left < 0:  # the program sets the crop of dynamic AIPP
            raise ExportError(
                f"AIPP crops but does not enlarge, got a source of {height}x{width} for an input"
                f" of {how.box[0]}x{how.box[1]}"
            )
        if source.is_yuv:  # U and V are shared by two rows and columns
            top, left = top // 2 * 2, left // 2 * 2
        fields |= {"crop": True, "load_start_pos_w": left, "load_start_pos_h": top}
        fields |= {"crop_size_w": how.box[1], "crop_size_h": how.box[0]}
    for name, value in fields.items():
        setattr(op, name, value)
    if plan:
        return _plan_words(plan, how, source)
    step = {
        "stretch": "stretch the picture",
        "letterbox": f"letterbox the picture (border {how.pad[0]:g})",
        "short-side": "resize the short side and crop the centre",
        "fit-height": f"fit the height and pad on the right ({how.pad[0]:g})",
    }[how.resize]
    return (
        f"On the host, or in DVPP: {step} to {height}x{width}, {how.interpolation}; AIPP cannot"
        " resize."
    )


def _input_words(op: Any, how: Preprocess, source: AippSource) -> str:
    if source.is_yuv:
        order = "U before V" if source.color == "nv12" else "V before U"
        kind = (
            f"YUV420SP ({source.color.upper()}, {order}), {source.standard}, height x 1.5 x width"
        )
    elif how.color == "grey":
        kind = "grey (YUV400_U8)"
    else:
        kind = f"{source.color.upper()} packed, height x width x 3"
    size = f"{op.src_image_size_h}x{op.src_image_size_w}"
    return f"The .om's input becomes uint8, {size} pixels, {kind}."


def _arithmetic(op: Any, how: Preprocess, channels: int) -> str:
    """Set means and factors of the channels; return a sentence on their float16 error."""
    worst = 0.0
    for channel in range(channels):
        mean, std = (float(v[channel if len(v) > 1 else 0]) for v in (how.mean, how.std))
        centre, factor = mean / how.scale, how.scale / std
        if not 0 <= centre <= 255:
            raise ExportError(
                f"AIPP takes means of 0 to 255 pixel units, got {centre:g} for channel {channel};"
                " preprocess on the host"
            )
        integer = min(int(centre), 255)
        fraction, factor16 = float(np.float16(centre - integer)), float(np.float16(factor))
        if not 2.0**-14 <= factor16 <= 65504:
            raise ExportError(
                f"AIPP holds 1 / std in float16, got {factor:g} for channel {channel};"
                " preprocess on the host"
            )
        setattr(op, f"mean_chn_{channel}", integer)
        setattr(op, f"min_chn_{channel}", fraction)
        getattr(op, f"var_reci_chn_{channel}").append(factor16)
        ends = np.array([0.0, 255.0])
        error = np.abs((ends - integer - fraction) * factor16 - (ends - centre) * factor).max()
        worst = max(worst, float(error / max(np.abs((ends - centre) * factor).max(), 1e-9)))
    return f"AIPP holds its factors in float16: inputs differ by at most {worst:.2g} of full scale."


def run_aipp(op: Any, picture: Bytes) -> NDArray[np.float32]:
    """Compute the model's input [C, H, W] from one input image of the .om.

    Args:
        op: an AippOpParams.
        picture: [H, W, 3] packed, [H, W] grey, or [H * 3 / 2, W] YUV420SP.
    """
    pixels = _unpacked(op, picture)
    if op.rbuv_swap_switch:
        pixels = pixels[..., [0, 2, 1]] if op.input_format == 1 else pixels[..., ::-1]
    if op.crop:
        top, left = op.load_start_pos_h, op.load_start_pos_w
        pixels = pixels[top : top + op.crop_size_h, left : left + op.crop_size_w]
    if op.csc_switch:
        pixels = _converted(op, pixels)
    channels = []
    for c in range(pixels.shape[-1]):
        mean, least = getattr(op, f"mean_chn_{c}"), getattr(op, f"min_chn_{c}")
        factor = np.float16(getattr(op, f"var_reci_chn_{c}")[0])
        channels.append(((pixels[..., c] - mean).astype(np.float16) - np.float16(least)) * factor)
    return np.stack(channels).astype(np.float32)


def measure_aipp_error(
    aipp: AippConfig, how: Preprocess, source: AippSource, sample: Mapping[str, NDArray[Any]]
) -> float | None:
    """Measure how far AIPP's input is from the calibration's, relative to full scale.

    The image is recovered exactly from the calibration sample and converted to the .om's format.

    `sample`: input name -> array; AIPP makes the first input.

    Returns:
        The largest mean absolute error of an image in the batch; None if `sample` has no images.
    """
    batch = next(iter(sample.values()))
    if layout_of(batch) != "nchw" or not np.issubdtype(batch.dtype, np.floating):
        return None
    return max(_error(aipp, how, source, picture) for picture in batch)


def _error(aipp: AippConfig, how: Preprocess, source: AippSource, expected: NDArray[Any]) -> float:
    pixels = input_to_image(expected[None], how)
    assert pixels is not None
    computed = run_aipp(aipp.parameters, _as_source(_framed(pixels, aipp.parameters), how, source))
    full = 255 * how.scale / min(how.std)
    return float(np.abs(computed - expected).mean() / full)


def _framed(pixels: Bytes, op: Any) -> Bytes:
    """Pad an image to the source size, at the place of the crop, by repeating its edges."""
    height, width = pixels.shape[:2]
    top, left = (op.load_start_pos_h, op.load_start_pos_w) if op.crop else (0, 0)
    below, right = op.src_image_size_h - height - top, op.src_image_size_w - width - left
    return np.pad(pixels, ((top, below), (left, right), (0, 0)), mode="edge")


def _as_source(rgb: Bytes, how: Preprocess, source: AippSource) -> Bytes:
    """Convert RGB [H, W, 3] to the format of the .om's input images."""
    if how.color == "grey" and not source.is_yuv:
        return rgb[..., 0]
    if not source.is_yuv:
        return rgb if source.color == "rgb" else rgb[..., ::-1]
    picture = to_yuv(rgb, source.standard)
    height = rgb.shape[0]
    if source.color == "nv21":
        pairs = picture[height:].reshape(height // 2, -1, 2)
        picture = np.concatenate([picture[:height], pairs[..., ::-1].reshape(height // 2, -1)])
    return picture


def _unpacked(op: Any, picture: Bytes) -> NDArray[np.int32]:
    """Return the pixels as int32 [H, W, C]; each U and V is repeated for its four pixels."""
    if op.input_format == 1:
        height = picture.shape[0] * 2 // 3
        pairs = picture[height:].reshape(height // 2, -1, 2)
        planes = pairs.repeat(2, axis=0).repeat(2, axis=1)
        return np.concatenate([picture[:height, :, None], planes], axis=-1).astype(np.int32)
    return (picture[..., None] if picture.ndim == 2 else picture).astype(np.int32)


def _converted(op: Any, pixels: NDArray[np.int32]) -> NDArray[np.int32]:
    rows = np.array([[getattr(op, f"matrix_r{r}c{c}")[0] for c in range(3)] for r in range(3)])
    bias = np.array([getattr(op, f"input_bias_{c}")[0] for c in range(3)])
    out = np.asarray(np.clip((pixels - bias) @ rows.T >> 8, 0, 255), np.int32)
    return out[..., :1] if not rows[1:].any() else out


def write_aipp_files(
    request: BuildRequest, files: dict[str, Path], source: AippSource, *, first_layer_int8: bool
) -> list[str]:
    """Write the AIPP file and, for an int8 first layer, the compression options; return notes."""
    preprocess = request.manifest.get("preprocess")
    if not preprocess:
        return ["No AIPP file: the calibration was fed arrays, not pictures."]
    how: Preprocess = Preprocess.from_json(preprocess)
    try:
        aipp = write_aipp(how, source)
    except ExportError as error:
        return [f"No AIPP file: {error}."]
    path = request.folder / f"{request.name}_aipp.cfg"
    files["AIPP configuration"] = atomic.write_text(path, aipp.text)
    if first_layer_int8:
        path = request.folder / f"{request.name}_compression.cfg"
        text = write_compression_options()
        files["compression options"] = atomic.write_text(path, text)
    return [*aipp.host_notes, *_error_note(aipp, how, source, request)]


def _error_note(
    aipp: AippConfig, how: Preprocess, source: AippSource, request: BuildRequest
) -> Iterator[str]:
    """Yield a sentence on the error of AIPP's input against the calibration's."""
    samples = request.feed.first(_CHECKED)
    errors = [measure_aipp_error(aipp, how, source, sample) for sample in samples]
    known = [error for error in errors if error is not None]
    if known:
        yield (
            f"AIPP's arithmetic on {len(known)} samples: the .om's input is {max(known):.2g} of"
            " full scale from the calibration's, on average over a picture."
        )
