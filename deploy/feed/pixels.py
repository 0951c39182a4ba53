"""Convert decoded images to a model's input and back, and check the decoder.

The steps of `preprocess_image` have a fixed order, so that another program can repeat them bit for
bit:

1. decode to uint8 [H, W, C] (`deploy.feed.decoding`); resize and crop in uint8;
2. ``y = ((float32(pixel) * scale) - mean) / std``: three separate float32 roundings, no fused
   multiply-add; scale, mean and std are rounded to float32 first;
3. fill a letterbox's border with the pad value, in pixel units, after the same arithmetic;
4. reorder the channels, then NCHW or NHWC.

::

    stretch        letterbox (centre)   letterbox (top-left)   short-side + crop   fit-height
    +--------+     +--------+           +--------+             +--+------+--+      +------+--+
    |xxxxxxxx|     |  pad   |           |xxxxxxxx|             |  |xxxxxx|  |      |xxxxxx|  |
    |xxxxxxxx|     |xxxxxxxx|           |xxxxxxxx|             |  |xxxxxx|  |      |xxxxxx|p |
    |xxxxxxxx|     |  pad   |           |  pad   |             |  |xxxxxx|  |      |xxxxxx|  |
    +--------+     +--------+           +--------+             +--+------+--+      +------+--+

`input_to_image` converts an input back to an image for display::

    pixel = (value * std + mean) / scale,  rounded, clipped to 0..255,  as RGB

Without known preprocessing the smallest value becomes black and the largest white.

`decoder_digests` identifies the decoder: digests of a few small images, decoded and resized.
Another version of OpenCV, or C++ with its own libraries (cpp/src/probe.cpp has the same images), is
the same decoder if it gives the same pixels.

`Previews` keeps two small images, before and after preprocessing, of samples chosen in advance.
They are made during a pass, so that nothing is decoded twice.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.feed.decoding import decode_image, opencv
from deploy.feed.file_list import RawSample
from deploy.feed.preprocess import Preprocess, Size, short_side_size, with_image_size
from deploy.files.manifest import sha256
from deploy.tensors import Array


def image_size(pixels: Array) -> Size:
    """Return (height, width) of an image, [H, W, C]."""
    return pixels.shape[0], pixels.shape[1]


def preprocess_image(pixels: Array, preprocess: Preprocess, dtype: str = "float32") -> Array:
    """Convert uint8 or uint16 [H, W, C] in BGR or grey to an input, [1, C, h, w] or [1, h, w, C].

    The result does not depend on the number of threads.

    Args:
        pixels: the image.
        preprocess: complete: size, color and layout are set; a side of None depends on the image.
        dtype: of the input; all is computed in float32.

    Raises:
        FeedError: a side would be too long, see `with_image_size`.
    """
    assert preprocess.color is not None
    preprocess = with_image_size(preprocess, image_size(pixels))
    resized, (top, left) = resize_to_input(pixels, preprocess)
    if preprocess.color == "rgb":  # from BGR
        resized = resized[:, :, ::-1]
    # `channels_first` and `image_region` are views: what is written to them is in `input_values`
    if preprocess.layout == "nhwc":
        input_values = np.empty((1, *preprocess.input_size, preprocess.channels), np.float32)
        channels_first = input_values[0].transpose(2, 0, 1)
    else:
        input_values = np.empty((1, preprocess.channels, *preprocess.input_size), np.float32)
        channels_first = input_values[0]

    height, width = resized.shape[:2]
    if (height, width) != preprocess.input_size:  # a border, filled first and normalised likewise
        channels_first[:] = _per_channel(preprocess.pad)
        _scale_and_normalise(channels_first, preprocess, out=channels_first)
    image_region = channels_first[:, top : top + height, left : left + width]
    _scale_and_normalise(resized.transpose(2, 0, 1), preprocess, out=image_region)
    return input_values.astype(dtype, copy=False)


def resize_to_input(pixels: Array, preprocess: Preprocess) -> tuple[Array, tuple[int, int]]:
    """Resize and crop uint8 [H, W, C]; return (the image, its (top, left) corner in the input).

    `preprocess` must have both sides of the input set, as by `with_image_size`.
    """
    size, (top, left) = resized_geometry(image_size(pixels), preprocess)
    resized = _resize(pixels, size, preprocess)
    # a corner above or left of the input, at negative coordinates, is cropped
    input_height, input_width = preprocess.input_size
    visible = resized[max(-top, 0) :, max(-left, 0) :][:input_height, :input_width]
    return visible, (max(top, 0), max(left, 0))


def letterbox_size(size: Size, box: Size) -> Size:
    """Return (h, w) of the largest image of the same aspect in `box`.

    It is rounded as Ultralytics' `LetterBox` does: half a pixel becomes the even number.
    """
    ratio = min(box[0] / size[0], box[1] / size[1])
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


_INTERPOLATION_FLAGS = {
    "nearest": "INTER_NEAREST",
    "linear": "INTER_LINEAR",
    "cubic": "INTER_CUBIC",
    "area": "INTER_AREA",
    "lanczos": "INTER_LANCZOS4",
}


def _resize(pixels: Array, size: Size, preprocess: Preprocess) -> Array:
    """Resize [H, W, C] to [h, w, C], `size` being (h, w)."""
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels
    interpolation = preprocess.interpolation
    if interpolation == "area" and (size[0] > height or size[1] > width):
        interpolation = "linear"  # "area" is for images that shrink
    cv2 = opencv()
    flag = getattr(cv2, _INTERPOLATION_FLAGS[interpolation])
    resized: Array = cv2.resize(pixels, (size[1], size[0]), interpolation=flag)
    return resized.reshape(*size, pixels.shape[2])  # OpenCV drops a single channel


def _scale_and_normalise(pixels: Array, preprocess: Preprocess, *, out: Array) -> None:
    """Write ((pixels * scale) - mean) / std into `out`; both are [C, h, w]."""
    np.multiply(pixels, np.float32(preprocess.scale), out=out, dtype=np.float32)
    np.subtract(out, _per_channel(preprocess.mean), out=out)
    np.divide(out, _per_channel(preprocess.std), out=out)


def _per_channel(values: tuple[float, ...]) -> Array:
    return np.asarray(values, np.float32).reshape(-1, 1, 1)


PREVIEW_SIDE = 160  # pixels: longer side of a preview


def input_to_image(values: Array, preprocess: Preprocess | None) -> Array | None:
    """Convert one sample's array back to an image.

    Args:
        values: [1, C, H, W] or [1, H, W, C] with 1 or 3 channels.
        preprocess: the resolved preprocessing that made it; None if unknown.

    Returns:
        uint8 [H, W, 3] RGB; None if the array is no image.
    """
    layout = layout_of(values) if preprocess is None else preprocess.layout
    if layout is None or values.ndim != 4 or len(values) != 1 or not values.size:
        return None
    channels_last = values[0].transpose(1, 2, 0) if layout == "nchw" else values[0]
    if channels_last.shape[2] not in (1, 3):
        return None
    floats = channels_last.astype(np.float64)
    if preprocess is None:
        return _to_uint8_image(_stretch_contrast(floats))

    # the inverse of `preprocess_image`
    scaled_pixels = floats * np.asarray(preprocess.std) + np.asarray(preprocess.mean)
    pixels = np.nan_to_num(scaled_pixels / preprocess.scale)
    if preprocess.deep:  # the file may have had 16 bits; pixels beyond 255 are scaled down to 8
        pixels *= 255 / max(255, pixels.max())
    image = _to_uint8_image(pixels)
    return image[:, :, ::-1] if preprocess.color == "bgr" else image


def _to_uint8_image(pixels: Array) -> Array:
    """Round and clip floats [H, W, C] to uint8 [H, W, 3]; the order of the colors is kept."""
    rounded: Array = np.clip(np.rint(np.nan_to_num(pixels)), 0, 255).astype(np.uint8)
    if rounded.shape[2] == 1:
        rounded = np.repeat(rounded, 3, axis=2)
    return rounded


def find_image(sample: Mapping[str, Array], preprocess: Preprocess | None) -> Array | None:
    """Return the sample's first input that is an image, as `input_to_image`; None without one."""
    for values in sample.values():
        image = input_to_image(values, preprocess)
        if image is not None:
            return image
    return None


def shrink_image(image: Array, side: int = PREVIEW_SIDE) -> Array:
    """Shrink uint8 [H, W, 3] until no side is longer than `side`."""
    height, width = image.shape[:2]
    longer_side = max(height, width)
    if longer_side <= side:
        return np.ascontiguousarray(image)
    size = (max(1, round(width * side / longer_side)), max(1, round(height * side / longer_side)))
    cv2 = opencv()
    resized: Array = cv2.resize(np.ascontiguousarray(image), size, interpolation=cv2.INTER_AREA)
    return resized


def describe_display(preprocess: Preprocess | None) -> str:
    """Describe how displayed images were made, as a sentence without a period."""
    if preprocess is None:
        return (
            "arrays as they are fed, their smallest value black and their largest white, since"
            " their preprocessing is not known"
        )
    return (
        "what the model is fed, taken back to pixels by the preprocessing's own scale, mean, std"
        " and order of channels"
    )


def layout_of(values: Array) -> str | None:
    """Return the layout of an array; None if no dimension can hold 1 or 3 channels."""
    if values.ndim != 4:
        return None
    if values.shape[1] in (1, 3):
        return "nchw"
    return "nhwc" if values.shape[3] in (1, 3) else None


def _stretch_contrast(values: Array) -> Array:
    """Map the smallest finite value to 0 and the largest to 255; all to 127 if they are equal."""
    finite_values = values[np.isfinite(values)]
    low = finite_values.min(initial=np.inf)
    high = finite_values.max(initial=-np.inf)
    if low >= high:
        return np.full(values.shape, 127.0)
    return np.asarray((values - low) * (255 / (high - low)))


def boxes_to_input(
    boxes: NDArray[np.float64], size: Size, preprocess: Preprocess
) -> NDArray[np.float64]:
    """Convert box corners [n, 4] from pixels of an image of `size` (h, w) to those of the input.

    `preprocess` must be resolved.
    """
    (rows, columns), (top, left) = resized_geometry(size, with_image_size(preprocess, size))
    scale = np.array([columns / size[1], rows / size[0]])  # of x and y
    shift = np.array([left, top], np.float64)
    return np.asarray(boxes * np.tile(scale, 2) + np.tile(shift, 2))


def resized_geometry(size: Size, preprocess: Preprocess) -> tuple[Size, tuple[int, int]]:
    """Return the image's size after resizing, and the (top, left) of its corner in the input.

    A coordinate of the corner is negative if the image is cropped there. A crop is placed as by
    torchvision's `center_crop`: half a pixel becomes the even number.
    """
    height, width = preprocess.input_size
    if preprocess.resize == "short-side":
        resized = short_side_size(size, preprocess.resized_short_side)
        return resized, (round((height - resized[0]) / 2), round((width - resized[1]) / 2))
    if preprocess.resize == "letterbox":
        fitted = letterbox_size(size, preprocess.input_size)
        if preprocess.anchor == "centre":
            return fitted, ((height - fitted[0]) // 2, (width - fitted[1]) // 2)
        return fitted, (0, 0)
    if preprocess.resize == "fit-height":
        scaled_width = -(-height * size[1] // size[0])  # keeps the aspect ratio, rounded up
        return (height, min(width, scaled_width)), (0, 0)
    return preprocess.input_size, (0, 0)


_DIGEST_DIGITS = 16  # hex digits of a digest
_RESIZE_CASES = (("linear", (11, 9)), ("linear", (40, 31)), ("area", (11, 9)), ("cubic", (11, 9)))
# JPEG of 21x18, chroma subsampled, rotated by EXIF; PNG with 16 bits and alpha; lossy WebP
_TEST_IMAGES = {
    "jpeg": (
        "ffd8ffe100224578696600004d4d002a00000008000101120003000000010006000000000000ffe000104a46494600010100000100010000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c1e17202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffdb0043010e0e0e131113261515264f352d354f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4fffc00011080012001503012200021101031101ffc4001a000100020301000000000000000000000000040601020305ffc4002410000104020005050000000000000000000100020405031106122231323335517172ffc4001801010003010000000000000000000000000502030406ffc4002411000103030109000000000000000000000100020304051132212233344142517181ffda000c03010002110311003f008d4b666e9c41672696d751dc3a5ad2575879e1623b82d0df9d2f6601c164c7b4805cd0a354678c3c3c640c6c5828e6963696c270d3dbd555f0c3de31b3a28b16520c79afc4decd28ba78295ae89aef21241d6dc6f34e544a4f172b47087ad23e8a223ae1aa7f88ba6e64aadddfba66fd2222729f84df4150ed457fffd9"
    ),
    "png": (
        "89504e470d0a1a0a0000000d4948445200000004000000031006000000e46472850000006e4944415408d70163009cff0305ccce14abb8ced59ff11ce223aae2c0f7fbcc58bebf3e0ffe7a622a15d8da850026180c7b0042ffcac010a70130e43c0843636f584840f964cc35e5ce2d7fd81f01a0c664741da07e3609ef49c78dd6915a3e97e1004b1136ed488c53f56705cbf395ed2fb48327b7480000000049454e44ae426082"
    ),
    "webp": (
        "52494646ce0000005745425056503820c20000003006009d012a150012003eb550a14c2724a322280aa8e016896c009d328478e2d42a33f6012ccdcf600216b556995e220e7ee1b1eff7586dbe0000de56eaccde59dfbfa35a72884c7c266b71de09c5348018ca1313a9b999316fc8359f3fa09c8d6c1c835c73d2fd9933bb781660ed7bd4c0f8ea18351bcf3a6cc434424e76ee0639b5cf55f3d69b96bf5ff5fb7d24a3e381404743d4d6be22bbad7c9c7d78c750134d78244010196d9bc865b6700777df19003e8950198032651d048873a0900000"
    ),
}


@lru_cache(maxsize=1)
def decoder_digests() -> dict[str, str]:
    """Return format -> digest of its test image's pixels, and "resize" -> of resized ones.

    Formats that this build of OpenCV does not read are left out.
    """
    digest_by_format = {}
    for format_name, digits in _TEST_IMAGES.items():
        with suppress(FeedError):
            pixels = decode_image(bytes.fromhex(digits), format_name, grey=False)
            digest_by_format[format_name] = _digest(pixels)
    digest_by_format["resize"] = _digest(*map(_resized_pattern, _RESIZE_CASES))
    return digest_by_format


def _resized_pattern(case: tuple[str, Size]) -> Array:
    """Return a fixed pattern as a model's input; `case`: (interpolation, size of the input)."""
    interpolation, size = case
    y, x, c = np.indices((23, 29, 3))
    pattern = ((y * 37 + x * 91 + c * 53 + y * x * 7) % 256).astype(np.uint8)
    preprocess = Preprocess(size=size, interpolation=interpolation, color="bgr", layout="nhwc")
    return preprocess_image(pattern, preprocess)


def _digest(*arrays: Array) -> str:
    data = b""
    for array in arrays:
        data += f"{array.shape[-3]}x{array.shape[-2]} ".encode() + array.tobytes()
    return sha256(data)[:_DIGEST_DIGITS]


PREVIEW_COUNT = 4  # samples of a feed that a report shows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """Preview of one sample.

    Attributes:
        name: of the file or sample.
        input_image: the model's input, uint8 [h, w, 3] RGB, no side longer than `PREVIEW_SIDE`.
        source_image: the image before preprocessing, likewise; None without one.
        input_size: (height, width) of `input_image` in pixels before it was shrunk.
        source_size: of `source_image`.
    """

    name: str
    input_image: Array
    source_image: Array | None
    input_size: Size
    source_size: Size | None = None


class Previews:
    """Previews of chosen samples."""

    def __init__(self, preprocess: Preprocess | None, indices: Collection[int] = ()) -> None:
        """Args: preprocess: the feed's; indices: of the samples to show."""
        self.indices = frozenset(indices)
        self._preprocess = preprocess
        self._preview_by_index: dict[int, Preview | None] = {}

    @property
    def missing(self) -> frozenset[int]:
        """Chosen samples that were not added yet."""
        return self.indices - self._preview_by_index.keys()

    def add(
        self, index: int, name: str, raw_sample: RawSample, sample: Mapping[str, Array]
    ) -> None:
        """Store a preview of a sample, two small images, if it was chosen and is an image."""
        if index not in self.indices or index in self._preview_by_index:
            return
        self._preview_by_index[index] = None  # until the sample proves to be an image
        input_image = find_image(sample, self._preprocess)
        if input_image is None:
            return
        source_size = None
        source_image = _decode_source_image(raw_sample)
        if source_image is not None:
            source_size = image_size(source_image)
            source_image = shrink_image(source_image)
        self._preview_by_index[index] = Preview(
            name=name,
            input_image=shrink_image(input_image),
            source_image=source_image,
            input_size=image_size(input_image),
            source_size=source_size,
        )

    def in_order(self) -> list[Preview]:
        """Return the previews of samples that are images, in feed order."""
        return [
            preview for _, preview in sorted(self._preview_by_index.items()) if preview is not None
        ]


def _decode_source_image(raw_sample: RawSample) -> Array | None:
    """Return the image before preprocessing as RGB; None without one."""
    if raw_sample.decode_source is None:
        return None
    try:
        return raw_sample.decode_source()[:, :, ::-1]
    except FeedError:
        return None
