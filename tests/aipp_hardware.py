"""AIPP's documented arithmetic in numpy, to compare its input with the calibration's.

Integers up to the color conversion, whose products are shifted right by 8 and clipped to 0..255,
then float16.
"""

import numpy as np

from deploy.feed.pixels import input_to_image

_YUV420SP = 1  # AippOpParams.input_format
LUMA_WEIGHTS = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}  # of red and blue in Y


def run_aipp(parameters, picture):
    """Compute the model's input [C, H, W] from one input image of the .om, as the hardware does.

    Args:
        parameters: an AippOpParams, the message of the configuration.
        picture: [H, W, 3] packed, [H, W] grey, or [H * 3 / 2, W] YUV420SP.
    """
    pixels = _unpack_pixels(parameters, picture)
    if parameters.rbuv_swap_switch and parameters.input_format == _YUV420SP:
        pixels = pixels[..., [0, 2, 1]]  # U and V
    elif parameters.rbuv_swap_switch:
        pixels = pixels[..., ::-1]  # R and B
    if parameters.crop:
        top = parameters.load_start_pos_h
        left = parameters.load_start_pos_w
        pixels = pixels[top : top + parameters.crop_size_h, left : left + parameters.crop_size_w]
    if parameters.csc_switch:
        pixels = _convert_color(parameters, pixels)

    # the mean's integer part is subtracted in integers, its fraction in float16
    channels = []
    for index, channel in enumerate(np.moveaxis(pixels, -1, 0)):
        mean = getattr(parameters, f"mean_chn_{index}")
        fraction = np.float16(getattr(parameters, f"min_chn_{index}"))
        factor = np.float16(getattr(parameters, f"var_reci_chn_{index}")[0])
        channels.append(((channel - mean).astype(np.float16) - fraction) * factor)
    return np.stack(channels).astype(np.float32)


def measure_aipp_error(parameters, preprocess, source, expected):
    """Return the mean error of AIPP's input, relative to full scale.

    `expected`: the calibration's input [C, H, W], from which the image is recovered exactly.
    """
    pixels = input_to_image(expected[None], preprocess)
    computed = run_aipp(parameters, to_source_format(pixels, preprocess, source))
    full_scale = 255 * preprocess.scale / min(preprocess.std)
    return float(np.abs(computed - expected).mean() / full_scale)


def to_source_format(rgb, preprocess, source):
    """Convert RGB [H, W, 3] to the format of the .om's input images."""
    if source.is_yuv:
        return to_yuv420(rgb, source.standard, v_first=source.color == "nv21")
    if preprocess.color == "grey":
        return rgb[..., 0]
    return rgb if source.color == "rgb" else rgb[..., ::-1]


def to_yuv420(rgb, standard, *, v_first=False):
    """Convert RGB [H, W, 3] of even sides to NV12 [H * 3 / 2, W], or with `v_first` to NV21.

    NV12 has H rows of Y, then H / 2 rows of U and V in turns, each the mean of 2 x 2 pixels.
    """
    height, width, _ = rgb.shape
    yuv = to_yuv(rgb, standard)
    blocks = yuv[..., 1:].reshape(height // 2, 2, width // 2, 2, 2)
    uv = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)
    if v_first:
        uv = uv[..., ::-1]
    return np.concatenate([yuv[..., 0], uv.reshape(height // 2, width)])


def to_yuv(rgb, standard):
    """Convert RGB pixels [..., 3] to Y, U, V [..., 3] by the color standard's own weights."""
    red_weight, blue_weight = LUMA_WEIGHTS[standard.partition("-")[0]]
    red, green, blue = np.moveaxis(rgb.astype(np.float64), -1, 0)
    y = red_weight * red + (1 - red_weight - blue_weight) * green + blue_weight * blue
    u = (blue - y) / (2 * (1 - blue_weight))  # -0.5 * 255 to 0.5 * 255, as V
    v = (red - y) / (2 * (1 - red_weight))
    y_span, uv_span, y_bias = (1, 1, 0)
    if standard.endswith("narrow"):
        y_span, uv_span, y_bias = (219 / 255, 224 / 255, 16)
    yuv = np.stack([y * y_span + y_bias, u * uv_span + 128, v * uv_span + 128], axis=-1)
    return np.clip(np.rint(yuv), 0, 255).astype(np.uint8)


def _unpack_pixels(parameters, picture):
    """Return the pixels as int32 [H, W, C]; each U and V is repeated for its four pixels."""
    if parameters.input_format == _YUV420SP:
        height = picture.shape[0] * 2 // 3
        uv_pairs = picture[height:].reshape(height // 2, -1, 2)
        uv_planes = uv_pairs.repeat(2, axis=0).repeat(2, axis=1)
        picture = np.concatenate([picture[:height, :, None], uv_planes], axis=-1)
    elif picture.ndim == 2:
        picture = picture[..., None]
    return picture.astype(np.int32)


def _convert_color(parameters, pixels):
    """Convert YUV to the model's color; with a matrix for grey only the first channel is left."""
    values = [getattr(parameters, f"matrix_r{r}c{c}")[0] for r in range(3) for c in range(3)]
    matrix = np.array(values).reshape(3, 3)
    bias = np.array([getattr(parameters, f"input_bias_{channel}")[0] for channel in range(3)])
    converted = np.clip((pixels - bias) @ matrix.T >> 8, 0, 255)
    return converted if matrix[1:].any() else converted[..., :1]
