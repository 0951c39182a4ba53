"""AIPP (preprocessing inside the .om): its configuration file, and what is left to the host.

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

Source: hicann/ge, docs of atc, AIPP (configuration template, CSC, crop); ITU-R BT.601 and BT.709;
CANN's docs of acldvppVpcResizeAsync, hi_vpc_crop_resize_paste_region and of VPC's alignment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import ExportError
from deploy.feed.pixels import resized_geometry
from deploy.feed.preprocess import Preprocess, Size, format_size, with_image_size
from deploy.targets.ascend.atc import AippSource
from deploy.targets.ascend.proto import message_class, print_text
from deploy.targets.base import BuildRequest

Matrix = tuple[tuple[int, int, int], ...]

_LUMA_WEIGHTS = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}  # of red and blue in Y
_MIN_SIDE, _MAX_SIDE = 2, 4096  # pixels of an image

_MIN_FLOAT16, _MAX_FLOAT16 = 2.0**-14, 65504  # the range of normal float16 numbers

# AippOpParams.input_format
_YUV420SP, _RGB888, _YUV400 = 1, 3, 4


def yuv_to_rgb_matrix(standard: str, color: str) -> tuple[Matrix, tuple[int, int, int]]:
    """Return AIPP's conversion of YUV: ``color = matrix @ (yuv - bias) / 256``.

    Args:
        standard: color standard of the YUV pictures, one of `deploy.targets.ascend.atc.STANDARDS`.
        color: the model's color, "rgb", "bgr" or "grey".

    Returns:
        The integer matrix, whose rows are the model's channels in the order of `color`, and whose
        columns are Y, U, V (for "grey" only the first row is not 0); the bias of Y, U, V.
    """
    red_weight, blue_weight = _LUMA_WEIGHTS[standard.partition("-")[0]]
    green_weight = 1 - red_weight - blue_weight
    # U is (blue - Y) / u_factor and V is (red - Y) / v_factor, from -0.5 to 0.5
    u_factor = 2 * (1 - blue_weight)
    v_factor = 2 * (1 - red_weight)
    # red, green and blue, each as the sum of Y, U and V times these factors
    rows = [
        (1.0, 0.0, v_factor),
        (1.0, -u_factor * blue_weight / green_weight, -v_factor * red_weight / green_weight),
        (1.0, u_factor, 0.0),
    ]
    if color == "grey":
        rows = [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
    if color == "bgr":
        rows.reverse()

    # the shares of 0..255 that the values of Y, and those of U and V, span; the lowest Y
    y_span, uv_span, y_bias = 1.0, 1.0, 0
    if standard.endswith("narrow"):
        y_span, uv_span, y_bias = 219 / 255, 224 / 255, 16
    integers = tuple(
        (round(256 * y / y_span), round(256 * u / uv_span), round(256 * v / uv_span))
        for y, u, v in rows
    )
    return integers, (y_bias, 128, 128)


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Sizes before AIPP, as (height, width).

    Attributes:
        frame_size: size of the source's frames.
        resized_size: size after the resizing on the host or in DVPP.
        corner: (row, column) of the resized frame in the model's input, negative where it is
            cropped.
        picture_size: size of AIPP's picture in memory; the model's input is its upper left part.
    """

    frame_size: Size
    resized_size: Size
    corner: Size
    picture_size: Size


def write_aipp(
    preprocess: Preprocess, source: AippSource, input_index: int = 0
) -> tuple[str, list[str]]:
    """Return the text of the AIPP configuration, and notes on what is left to the host.

    The notes are sentences on the steps before AIPP, its input, and the error of its factors.

    Args:
        preprocess: the calibration's preprocessing, resolved: size, color and layout are set.
        source: format of the .om's input images.
        input_index: index of the model's input that takes the images, from 0.

    Raises:
        ExportError: AIPP cannot express the preprocessing.
    """
    if preprocess.layout == "nhwc":
        raise ExportError("AIPP feeds NCHW models, got layout nhwc; preprocess on the host")

    parameters = message_class("AippOpParams")()
    parameters.aipp_mode = 1
    parameters.related_input_rank = input_index
    _set_color(parameters, preprocess, source)
    frame_plan = _plan_frame(preprocess, source)
    _set_sizes(parameters, preprocess, source, frame_plan)
    max_error = _set_normalization(parameters, preprocess)
    host_notes = [
        _describe_host_steps(parameters, preprocess, source, frame_plan),
        _describe_input(parameters, preprocess, source),
        f"AIPP holds its factors in float16: inputs differ by at most {max_error:.2g} of full"
        " scale.",
    ]

    message = message_class("InsertNewOps")()
    message.aipp_op.append(parameters)
    return print_text(message), host_notes


def _set_color(parameters: Any, preprocess: Preprocess, source: AippSource) -> None:
    """Set input format, channel swap and color conversion in `parameters`.

    For a model of grey pictures, the source's color "rgb", the default, stands for grey pictures:
    AIPP does not turn RGB into grey.

    `parameters`: the protobuf message of the AIPP configuration.

    Raises:
        ExportError: the model's pictures are grey, and the source's are BGR.
    """
    assert preprocess.color is not None
    is_grey = preprocess.color == "grey"
    if is_grey and source.color == "bgr":
        raise ExportError("AIPP makes grey of grey pictures, nv12 and nv21, got source color bgr")
    parameters.csc_switch = source.is_yuv  # conversion of YUV to RGB
    if not source.is_yuv:
        parameters.input_format = _YUV400 if is_grey else _RGB888
        # swaps R and B
        parameters.rbuv_swap_switch = not is_grey and source.color != preprocess.color
        return

    parameters.input_format = _YUV420SP
    parameters.rbuv_swap_switch = source.color == "nv21"  # swaps V and U: nv21 has V first
    matrix, biases = yuv_to_rgb_matrix(source.standard, preprocess.color)
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            getattr(parameters, f"matrix_r{row}c{column}").append(value)
    for channel, bias in enumerate(biases):
        getattr(parameters, f"input_bias_{channel}").append(bias)


def _plan_frame(preprocess: Preprocess, source: AippSource) -> FramePlan | None:
    """Return how a frame becomes AIPP's picture; None if it need not be resized.

    The camera gives frames. AIPP, the input stage of the .om, takes pictures and only crops them.
    Frames of another size are resized by the host, or by DVPP, the chip's image unit, whose
    pictures are YUV.
    """
    input_size = preprocess.input_size  # (height, width) of the model's input
    frame_size = source.size or input_size
    if frame_size == input_size:
        return None
    # a frame that is smaller than the crop is refused
    frame_preprocess = with_image_size(preprocess, frame_size, "a frame")
    # size of the resized frame, and its corner in the input, negative where it is cropped
    (height, width), (top, left) = resized_geometry(frame_size, frame_preprocess)
    if preprocess.resize == "short-side" and (height, width) == frame_size:
        return None  # it is only cropped

    picture_size = input_size
    if source.is_yuv:  # DVPP resizes it
        height = _round_up(height, 2)
        width = _round_up(width, 2)
        # It crops and pastes at even rows and columns. int() rounds towards 0, so that a crop,
        # whose corner is negative, stays inside the frame.
        top = int(top / 2) * 2
        # where it pastes, columns are multiples of 16
        left = left // 16 * 16 if left > 0 else int(left / 2) * 2
        picture_size = (_round_up(input_size[0], 2), _round_up(input_size[1], 16))
    return FramePlan(frame_size, (height, width), (top, left), picture_size)


def _round_up(side: int, unit: int) -> int:
    """Return the next multiple of `unit` that is not below `side`."""
    return -(-side // unit) * unit


def _mapping_formula(axis: str, offset: int, size_ratio: float) -> str:
    """Return a formula, as text, that maps a coordinate of the model's input back to the frame.

    Args:
        axis: "x" or "y".
        offset: where the resized frame starts in the model's input, in pixels.
        size_ratio: size of the frame over that of the resized frame.
    """
    sign = "-" if offset >= 0 else "+"
    return f"{axis} = ({axis} {sign} {abs(offset)}) * {size_ratio:.6g}"


def _describe_frame_plan(plan: FramePlan, preprocess: Preprocess, source: AippSource) -> str:
    """Describe how the host or DVPP makes AIPP's picture from a frame, with all sizes.

    DVPP has limits for sizes and corners. If the calibration used others, the text says so.
    """
    # (row, column) of the resized frame in the picture, negative where it is cropped
    row, column = plan.corner
    # size and corner of the resized frame in the calibration; the plan may have rounded both
    calibrated_size, calibrated_corner = resized_geometry(plan.frame_size, preprocess)
    is_cropped = min(calibrated_corner) < 0
    height, width = preprocess.input_size
    # size of the picture that the host or DVPP makes, without the padding of its rows
    written_size = format_size((height, width))
    if source.is_yuv:  # DVPP writes even sides
        written_size = format_size((_round_up(height, 2), _round_up(width, 2)))

    device = "DVPP" if source.is_yuv else "The host"
    text = (
        f"{device} (height x width): resize {format_size(plan.frame_size)} to"
        f" {format_size(plan.resized_size)} ({preprocess.interpolation})"
    )
    if is_cropped:
        text += f", crop {written_size} at row {-row}, column {-column}"
    elif preprocess.resize in ("letterbox", "fit-height"):
        border = _describe_border(preprocess, source)
        text += f", paste at row {row}, column {column} of {written_size} filled with {border}"
    text += "."
    if plan.picture_size != preprocess.input_size:
        text += (
            f" It is {format_size(plan.picture_size)} in memory; AIPP crops the upper left"
            f" {format_size(preprocess.input_size)}."
        )
    if (calibrated_size, calibrated_corner) != (plan.resized_size, plan.corner):
        text += _describe_difference(plan, calibrated_size, calibrated_corner)
    return text


def _describe_difference(plan: FramePlan, calibrated_size: Size, calibrated_corner: Size) -> str:
    """Describe how the calibration differed from what DVPP can do, and how to map boxes back.

    The last two arguments are the calibration's values of `plan.resized_size` and `plan.corner`. A
    corner is (row, column) of the resized frame in the model's input, negative where it is cropped.
    """
    action = "cropped" if min(calibrated_corner) < 0 else "pasted"
    top, left = map(abs, calibrated_corner)
    row, column = plan.corner
    return (
        f" The calibration resized to {format_size(calibrated_size)} and {action} at row"
        f" {top}, column {left}: DVPP needs even sides and rows, and columns of a"
        " multiple of 16 for pasting. Map boxes back to the frame by"
        f" {_mapping_formula('x', column, plan.frame_size[1] / plan.resized_size[1])},"
        f" {_mapping_formula('y', row, plan.frame_size[0] / plan.resized_size[0])}."
    )


def _describe_border(preprocess: Preprocess, source: AippSource) -> str:
    """Return the border's color as text: Y, U, V for a YUV source, else the model's own channels.

    Y, U and V are those of which AIPP computes the border that calibration used.
    """
    border = np.asarray(np.rint(preprocess.pad), np.uint8)
    if not source.is_yuv:
        return f"{preprocess.color} {', '.join(map(str, border))}"
    assert preprocess.color is not None
    color = "rgb" if preprocess.color == "grey" else preprocess.color
    matrix, biases = yuv_to_rgb_matrix(source.standard, color)
    yuv = np.linalg.solve(np.array(matrix) / 256, np.broadcast_to(border, 3)) + biases
    y, u, v = np.clip(np.rint(yuv), 0, 255).astype(int)
    return f"Y {y}, U {u}, V {v}"


def _set_sizes(
    parameters: Any, preprocess: Preprocess, source: AippSource, plan: FramePlan | None
) -> None:
    """Set the picture's size and AIPP's crop in `parameters`.

    The camera gives frames, of which AIPP's pictures are made.

    `plan`: how a frame becomes a picture; None if the picture is the frame itself.
    """
    input_size = preprocess.input_size  # (height, width) of the model's input
    frame_size = source.size or input_size
    picture_size = frame_size if plan is None else plan.picture_size
    picture_height, picture_width = picture_size
    for name, side in (("width", picture_width), ("height", picture_height)):
        if not _MIN_SIDE <= side <= _MAX_SIDE:
            raise ExportError(f"AIPP takes sides of {_MIN_SIDE} to {_MAX_SIDE}, got {name} {side}")
    # a frame must have even sides too, before it is resized
    odd_sides = [side for side in (*frame_size, *picture_size) if side % 2]
    if source.is_yuv and odd_sides:
        raise ExportError(f"YUV pictures have even sides, got one of {odd_sides[0]}")
    parameters.src_image_size_w = picture_width
    parameters.src_image_size_h = picture_height

    if picture_size == input_size:
        return
    top = 0
    left = 0  # a planned picture has the model's input in its upper left corner
    if plan is None:  # a frame is cropped to its center, as by `resized_geometry`
        top = round((picture_height - input_size[0]) / 2)
        left = round((picture_width - input_size[1]) / 2)
    if source.is_yuv:  # U and V are shared by two rows and columns
        top = top // 2 * 2
        left = left // 2 * 2
    parameters.crop = True
    parameters.load_start_pos_w = left
    parameters.load_start_pos_h = top
    parameters.crop_size_w = input_size[1]
    parameters.crop_size_h = input_size[0]


def _describe_host_steps(
    parameters: Any, preprocess: Preprocess, source: AippSource, plan: FramePlan | None
) -> str:
    """Describe the steps before AIPP, which are left to the host or DVPP.

    `parameters`: the message of the AIPP configuration, which has the picture's size.
    `plan`: how a frame of the camera becomes AIPP's picture; None if it need not be resized.
    """
    if plan is not None:
        return _describe_frame_plan(plan, preprocess, source)
    height = parameters.src_image_size_h
    width = parameters.src_image_size_w
    step = {
        "stretch": "stretch the picture",
        "letterbox": f"letterbox the picture (border {preprocess.pad[0]:g})",
        "short-side": "resize the short side and crop the centre",
        "fit-height": f"fit the height and pad on the right ({preprocess.pad[0]:g})",
    }[preprocess.resize]
    return (
        f"On the host, or in DVPP: {step} to {height}x{width}, {preprocess.interpolation}; AIPP"
        " cannot resize."
    )


def _describe_input(parameters: Any, preprocess: Preprocess, source: AippSource) -> str:
    """Describe the pictures that the .om takes: size, format and color standard."""
    if source.is_yuv:
        order = "U before V" if source.color == "nv12" else "V before U"
        name = source.color.upper()
        form = f"YUV420SP ({name}, {order}), {source.standard}, height x 1.5 x width"
    elif preprocess.color == "grey":
        form = "grey (YUV400_U8)"
    else:
        form = f"{source.color.upper()} packed, height x width x 3"
    size = f"{parameters.src_image_size_h}x{parameters.src_image_size_w}"
    return f"The .om's input becomes uint8, {size} pixels, {form}."


def _set_normalization(parameters: Any, preprocess: Preprocess) -> float:
    """Set means and factors of the channels in `parameters`.

    `preprocess` computes ``(pixel * scale - mean) / std``, and AIPP the same as
    ``(pixel - mean_chn - min_chn) * var_reci_chn``. mean_chn is the integer part of mean / scale,
    min_chn its fraction. The fraction and the factor are float16.

    Returns:
        The largest error of AIPP's result, relative to the largest exact one.
    """
    pixels = np.array([0.0, 255.0])  # the error is linear in the pixel, so its ends show the most
    max_error = 0.0
    means = np.broadcast_to(preprocess.mean, 3) / preprocess.scale  # in pixel units
    factors = preprocess.scale / np.broadcast_to(preprocess.std, 3)
    for channel in range(1 if preprocess.color == "grey" else 3):
        mean = float(means[channel])
        factor = float(factors[channel])
        if not 0 <= mean <= 255:
            raise ExportError(
                f"AIPP takes means of 0 to 255 pixel units, got {mean:g} for channel {channel};"
                " preprocess on the host"
            )
        mean_integer = int(mean)
        mean_fraction = float(np.float16(mean - mean_integer))
        factor16 = float(np.float16(factor))
        if not _MIN_FLOAT16 <= factor16 <= _MAX_FLOAT16:
            raise ExportError(
                f"AIPP holds 1 / std in float16, got {factor:g} for channel {channel};"
                " preprocess on the host"
            )
        setattr(parameters, f"mean_chn_{channel}", mean_integer)
        setattr(parameters, f"min_chn_{channel}", mean_fraction)
        getattr(parameters, f"var_reci_chn_{channel}").append(factor16)

        exact = (pixels - mean) * factor
        computed = (pixels - mean_integer - mean_fraction) * factor16
        error = np.abs(computed - exact).max()
        full_scale = max(np.abs(exact).max(), 1e-9)
        max_error = max(max_error, float(error / full_scale))
    return max_error


def write_aipp_files(
    request: BuildRequest, files: dict[str, Path], source: AippSource, *, first_layer_int8: bool
) -> list[str]:
    """Write the AIPP file and, for an int8 first layer, the compression options.

    `files`: role -> path of the files of the build, to which these are added.

    Returns:
        Sentences for the user: what the host has to do, and how exact AIPP's factors are.

    Raises:
        ExportError: AIPP cannot express the preprocessing; no file is written.
    """
    settings = request.manifest.get("preprocess")
    if not settings:
        raise ExportError("the calibration was fed arrays, not pictures; AIPP takes pictures")
    preprocess = Preprocess.from_json(settings)
    inputs = [spec.name for spec in request.subject.loaded.inputs]
    # images feed one input; all other inputs are states
    image_input = next(name for name in inputs if name not in request.feed.states)
    text, host_notes = write_aipp(preprocess, source, inputs.index(image_input))
    files["AIPP configuration"] = request.write("_aipp.cfg", text)
    if first_layer_int8:
        options = message_class("CompressionOptions")()  # atc's --compression_optimize_conf
        options.enable_first_layer_quantization = True
        files["compression options"] = request.write("_compression.cfg", print_text(options))

    return host_notes
