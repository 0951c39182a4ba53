"""Preprocessing of images: options, presets by model family, and defaults from the model's input.

The arithmetic is in `deploy.feed.pixels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from deploy.errors import ConfigError, FeedError, counted, did_you_mean
from deploy.feed.batch_axis import Dimension
from deploy.tensors import TensorSpec

RESIZES = ("stretch", "letterbox", "short-side", "fit-height")
_RESIZES_BY_OPTION = {  # option -> the resizes that use it
    "short_side": ("short-side",),
    "pad": ("letterbox", "fit-height"),
}
INTERPOLATIONS = ("nearest", "linear", "cubic", "area", "lanczos")
COLORS = {"rgb": 3, "bgr": 3, "grey": 1}
LAYOUTS = ("nchw", "nhwc")
ANCHORS = ("centre", "top-left")
_CHOICES = {
    "resize": RESIZES,
    "interpolation": INTERPOLATIONS,
    "anchor": ANCHORS,
    "color": tuple(COLORS),
    "layout": LAYOUTS,
}
MAX_SIDE = 16384
INTEGER_DTYPES = ("uint8", "int32")  # integer inputs that accept images
_UNIT_PIXELS_TEXT = "pixels / 255 (preset 'unit')"

Size = tuple[int, int]
Sides = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Preprocessing of an image to one input. `None` means: take it from the model's input.

    Attributes:
        size: (height, width) in pixels of the model's input. A side that is None depends on each
            image: it follows from the aspect if the other side is set, else it is the image's own.
            Inputs then differ in size.
        multiple: sides that depend on the image are rounded to a multiple of this number.
        default_size: size if the model's is dynamic; set by presets.
        resize: "stretch"; "letterbox" keeps the aspect and pads; "short-side" resizes the short
            side to `short_side` and crops the center; "fit-height" keeps the aspect up to the
            full width and pads on the right, as text recognizers do.
        short_side: pixels; None is the longer side of `size` times 8/7 (256 for 224).
        interpolation: OpenCV's. "area" is used if both sides shrink, else "linear".
        color: "rgb", "bgr" or "grey"; None is grey for one channel and rgb for three.
        scale: multiplier of a pixel of 0..255. A 16-bit image in grey has pixels of 0..65535,
            unless `scale` is 1/255.
        mean, std: in scaled units, one value, or one per channel in the order of `color`.
        pad: the border, in pixel units (may be a fraction), one value or one per channel.
        anchor: where letterbox puts the image, "centre" or "top-left".
        layout: "nchw" or "nhwc".
    """

    size: Sides | None = None
    multiple: int = 1
    default_size: Size | None = None
    resize: str = "stretch"
    short_side: int | None = None
    interpolation: str = "linear"
    color: str | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    pad: tuple[float, ...] = (0.0,)
    anchor: str = "centre"
    layout: str | None = None

    def __post_init__(self) -> None:
        """Check every option, and store it in one form: tuples of floats, sides as a tuple.

        The class is frozen, so values are stored by `object.__setattr__`.

        Raises:
            ConfigError: an option has an impossible value.
        """
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            is_open = value is None and name in ("color", "layout")  # the model decides
            if value not in choices and not is_open:
                suggestion = did_you_mean(value, choices, "take one of these")
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}, got {value!r}; {suggestion}"
                )
        # a side that depends on the image may be None in `size`, but not in `default_size`
        object.__setattr__(self, "size", _check_size("size", self.size, may_be_open=True))
        object.__setattr__(self, "default_size", _check_size("default_size", self.default_size))
        _check_side("multiple", self.multiple)
        if self.short_side is not None:
            _check_side("short_side", self.short_side)
        scales = _check_numbers("scale", self.scale)
        if isinstance(self.scale, Sequence) or len(scales) != 1:  # (1,) is refused too
            raise ConfigError(f"scale must be one number, got {self.scale!r}")
        object.__setattr__(self, "scale", scales[0])
        for name in ("mean", "std", "pad"):
            object.__setattr__(self, name, _check_numbers(name, getattr(self, name)))
            self._check_channels(name)
        # pixels are computed in float32, in which a tiny value is 0
        if not all(np.float32(value) > 0 for value in (self.scale, *self.std)):
            raise ConfigError(
                f"scale and std must be above 0, got scale={self.scale} std={list(self.std)};"
                " std is what the scaled pixel is divided by"
            )

    def _check_channels(self, name: str) -> None:
        """Refuse a number of values that is neither one nor one per channel."""
        count = len(getattr(self, name))
        allowed = {1, COLORS[self.color]} if self.color else {1, 3}
        if count not in allowed:
            raise ConfigError(
                f"{name} must have one value or one per channel of {self.color or 'rgb'},"
                f" got {counted(count, 'value')}; give {' or '.join(map(str, sorted(allowed)))}"
            )

    @property
    def channels(self) -> int:
        """1 or 3; 3 while `color` is None."""
        return COLORS[self.color or "rgb"]

    @property
    def input_size(self) -> Size:
        """`size`, (height, width), whose sides must both be set: call `with_image_size` first."""
        height, width = self.size or (None, None)
        assert height is not None and width is not None
        return height, width

    @property
    def resized_short_side(self) -> int:
        """Short side in pixels for the resize "short-side"; `size` must be set."""
        if self.short_side is None and self.size is None:
            raise ConfigError("short_side follows from size, got neither; give one of them")
        return self.short_side or (max(self.input_size) * 8 + 3) // 7

    @property
    def deep(self) -> bool:
        """Whether 16-bit images keep their 16 bits: grey ones that are not divided by 255."""
        return self.color == "grey" and abs(self.scale * 255 - 1) > 1e-3

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; floats survive exactly (repr round trip).

        A `multiple` of 1 is left out, so that older caches, written before it, stay equal.
        """
        data = asdict(self)
        if self.multiple == 1:
            del data["multiple"]
        for name, value in data.items():
            if isinstance(value, tuple):
                data[name] = list(value)
        return data

    @classmethod
    def from_json(cls, data: object) -> Preprocess:
        """Inverse of `to_json`; a missing field has its default.

        Raises:
            ConfigError: an unknown field or an invalid value.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"preprocess must be a JSON object, got {type(data).__name__}")
        return with_options(cls(), data)


PreprocessRequest = Preprocess | str | Mapping[str, object] | None
"""What functions that open a feed accept: complete preprocessing; a preset's name; some options by
name (the model gives the others); or nothing."""


def with_options(preprocess: Preprocess, options: Mapping[str, object]) -> Preprocess:
    """Return `preprocess` with these options by name; an option that is None changes nothing.

    Raises:
        ConfigError: an unknown name or an invalid value.
    """
    all_names = [field.name for field in fields(Preprocess)]
    for name in options:
        if name not in all_names:
            raise ConfigError(
                f"{name!r} is no preprocessing option;"
                f" {did_you_mean(name, all_names, 'there are ' + ', '.join(all_names))}"
            )
    set_options: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    return replace(preprocess, **set_options)


def apply_user_options(preprocess: Preprocess, options: Mapping[str, object]) -> Preprocess:
    """Return `with_options` of the user's options, none of which may be without effect.

    Raises:
        ConfigError: see `with_options`; or an option that the chosen resize does not use.
    """
    preprocess = with_options(preprocess, options)
    for name, resizes in _RESIZES_BY_OPTION.items():
        if options.get(name) is not None and preprocess.resize not in resizes:
            raise ConfigError(
                f"{name} is for resize {' and '.join(resizes)}, got it with resize"
                f" {preprocess.resize}; give resize {' or '.join(resizes)}, or leave {name} out"
            )
    return preprocess


def default_preprocess(spec: TensorSpec) -> Preprocess:
    """Return the default preprocessing: an integer input gets the pixels unchanged."""
    if spec.dtype in INTEGER_DTYPES:
        return Preprocess(scale=1.0)
    return Preprocess()


def complete_preprocess(
    requested: Preprocess | None, spec: TensorSpec
) -> tuple[Preprocess, tuple[str, ...]]:
    """Return (preprocessing whose size, color and layout are set, notes).

    What is not requested follows from the model's input. There is a single note, which describes
    the default, if nothing is requested; else there is none.

    Args:
        requested: what the user or the model's metadata asks for; None for the default.
        spec: the model's input.

    Raises:
        FeedError: the input is no image, or contradicts `requested`.
        ConfigError: a side depends on the image, but the resize does not allow that.
    """
    unresolved = default_preprocess(spec) if requested is None else requested
    if len(spec.shape) != 4:
        raise FeedError(
            f"images need an input of 4 dimensions, got {describe(spec)};"
            " feed this model arrays from an .npy or .npz file"
        )

    layout = unresolved.layout or _find_layout(spec)
    _, channels, height, width = spec.shape
    if layout == "nhwc":
        _, height, width, channels = spec.shape
    color = _resolve_color(unresolved.color, channels, spec)
    size = _resolve_size(unresolved, (height, width), spec)
    try:
        resolved = replace(unresolved, size=size, color=color, layout=layout)
    except ConfigError as error:
        raise FeedError(f"{error} (the input is {describe(spec)})") from error
    _check_sides(resolved)
    _refuse_mean_of_raw_pixels(resolved)
    if requested is not None:
        return resolved, ()

    pixel_text = _UNIT_PIXELS_TEXT
    if spec.dtype in INTEGER_DTYPES:  # see `default_preprocess`
        pixel_text = f"pixels as they are, for {spec.dtype} (preset 'raw')"
    size_text = f"{color} images stretched to {format_size(size)}"
    return resolved, (f"no preprocessing was given: {size_text}, {pixel_text}",)


def _find_layout(spec: TensorSpec) -> str:
    """Return the layout of an input of images by where 1 or 3 channels are; "nchw" if unclear."""
    is_channels_last = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    return "nhwc" if is_channels_last else "nchw"


def with_image_size(
    preprocess: Preprocess, image_size: Size, title: str = "a picture"
) -> Preprocess:
    """Return preprocessing with both sides of the input set, for an image of this size.

    A side of None depends on the image: it keeps the image's aspect, or is the image's own if both
    are None. It is rounded to a multiple of `preprocess.multiple`.

    Args:
        preprocess: complete, but for such sides.
        image_size: (height, width).
        title: of the image in messages.

    Raises:
        FeedError: a side would be longer than `MAX_SIDE`, or the resized image is below the crop.
    """
    height, width = preprocess.size or (None, None)  # of the input
    image_height, image_width = image_size
    if height is not None and width is not None:
        _refuse_below_crop(preprocess, image_size, title)
        return preprocess
    if height is not None:
        width = _round_to_multiple(height * image_width, image_height, preprocess)
    elif width is not None:
        height = _round_to_multiple(width * image_height, image_width, preprocess)
    else:
        height = _round_to_multiple(image_height, 1, preprocess)
        width = _round_to_multiple(image_width, 1, preprocess)
    if max(height, width) > MAX_SIDE:
        raise FeedError(
            f"a side of an input must have at most {MAX_SIDE} pixels, got {height}x{width} for"
            f" {title} of {image_height}x{image_width}; give a size for all"
        )
    return replace(preprocess, size=(height, width))


def _refuse_below_crop(preprocess: Preprocess, image_size: Size, title: str) -> None:
    """Raise `FeedError` if an image, resized by its short side, is smaller than the crop."""
    if preprocess.resize != "short-side":
        return
    short_side = preprocess.resized_short_side
    height, width = preprocess.input_size
    resized_size = short_side_size(image_size, short_side)
    if resized_size[0] < height or resized_size[1] < width:
        raise FeedError(
            f"{title} of {format_size(image_size)} must reach the crop of {height}x{width}, got"
            f" {format_size(resized_size)} once its short side is {short_side}; give a larger"
            " --short-side"
        )


def short_side_size(size: Size, short: int) -> Size:
    """Return (h, w) with short side `short`; the long side keeps the aspect, rounded down."""
    height, width = size
    if height <= width:
        return short, width * short // height
    return height * short // width, short


def format_size(size: Sequence[int | None]) -> str:
    """Return `HxW`, with * for a side that depends on the image."""
    return "x".join(_format_side(side, "*") for side in size)


def _format_side(side: Dimension, if_open: str) -> str:
    """Return a side of a size or shape as text, `if_open` for None."""
    return if_open if side is None else str(side)


def _round_to_multiple(numerator: int, denominator: int, preprocess: Preprocess) -> int:
    """Return `numerator / denominator`, rounded to a multiple of `preprocess.multiple`, or one.

    It is the nearest; for "fit-height" the next higher one, since the rest is padded.
    """
    unit = preprocess.multiple * denominator
    if preprocess.resize == "fit-height":
        factor = -(-numerator // unit)
    else:
        factor = (2 * numerator + unit) // (2 * unit)
    return max(factor, 1) * preprocess.multiple


def describe(spec: TensorSpec) -> str:
    """Return 'name' dtype [dims] of an input, for messages."""
    return f"{spec.name!r} {spec.dtype} {shape_text(spec)}"


def shape_text(spec: TensorSpec) -> str:
    """Return the shape that a model declares, such as "[batch, 3, ?, ?]"."""
    dims = ", ".join(_format_side(side, "?") for side in spec.shape)
    return f"[{dims}]"


def _check_sides(preprocess: Preprocess) -> None:
    """Refuse a size that the other options do not go with; a side of None depends on each image.

    Such sides go with two resizes: with "stretch", one or both; with "fit-height", the width alone.

    Raises:
        ConfigError: a side depends on the image and the resize does not allow that; or none does,
            but there is a `multiple`, which is for such sides.
    """
    height, width = preprocess.size or (None, None)
    if height is not None and width is not None:
        if preprocess.multiple != 1:
            raise ConfigError(
                f"a multiple is for sides that depend on the image, got {preprocess.multiple} for"
                f" {height}x{width}; give a size such as {height}x*, or leave the multiple out"
            )
        return

    is_fit_to_height = preprocess.resize == "fit-height" and height is not None
    if preprocess.resize == "stretch" or is_fit_to_height:
        return
    raise ConfigError(
        "sizes that depend on the image go with resize stretch, or with fit-height and a"
        f" height, got {preprocess.resize} to {format_size((height, width))}; give another"
        " resize or both sides"
    )


def _refuse_mean_of_raw_pixels(preprocess: Preprocess) -> None:
    """Refuse a mean of raw pixels if scaled pixels are fed: all inputs would be nearly equal."""
    scale = preprocess.scale
    max_value = 255 * scale
    # grey pixels of 16 bits are probably meant if they stay as they are, or are divided by far
    # more than 255: by more than 510
    if preprocess.deep and (scale == 1 or scale < 0.5 / 255):
        max_value = 65535 * scale
    if max(preprocess.mean) > max_value * (1 + 1e-6):  # rounding may exceed it by less
        mean = ",".join(f"{value:.6g}" for value in preprocess.mean)
        scaled_mean = ",".join(f"{value * scale:.4g}" for value in preprocess.mean)
        raise ConfigError(
            f"mean is taken from scaled pixels, which go from 0 to {max_value:.4g}, got {mean};"
            " give scale 1 if it is a mean of raw pixels, or the mean of scaled ones, such as"
            f" {scaled_mean}"
        )


def _resolve_color(color: str | None, channels: Dimension, spec: TensorSpec) -> str:
    """Return the color of the images that an input with these channels takes.

    Args:
        color: as requested; None to take grey for one channel and rgb for others.
        channels: of the input; no integer if their number is open.
        spec: the input, for messages.

    Raises:
        FeedError: the requested color has another number of channels.
    """
    if color is None:
        color = "grey" if channels == 1 else "rgb"
    if isinstance(channels, int) and channels != COLORS[color]:
        raise FeedError(
            f"{color} images have {COLORS[color]} channels, the input is {describe(spec)} with"
            f" {channels}; give another color or layout, or feed arrays from .npy files"
        )
    return color


def _resolve_size(
    preprocess: Preprocess, model_sides: tuple[Dimension, Dimension], spec: TensorSpec
) -> Sides:
    """Return the (height, width) of the input in pixels; None for a side that each image decides.

    Args:
        preprocess: as requested; a `size` of its own comes first, then the sides that the model
            fixes, then its `default_size`.
        model_sides: height and width of the model's input; a fixed side is an integer.
        spec: the model's input, for messages.

    Raises:
        FeedError: nothing gives the size, or it does not fit the model.
    """
    # only a requested size may leave a side to each image (None); else both sides must be known
    size = preprocess.size
    if size is None:
        sides = list(preprocess.default_size or (None, None))
        for axis, model_side in enumerate(model_sides):
            if isinstance(model_side, int):
                sides[axis] = model_side
        if None in sides:
            example = format_size([side or 224 for side in sides])
            raise FeedError(
                f"the input {describe(spec)} leaves its size open; give a size, such as {example},"
                f" or {format_size(sides)} for sizes that depend on the image (--size)"
            )
        size = _check_size("size", sides)
    fixed_sides = [side if isinstance(side, int) else None for side in model_sides]
    for side, fixed_side in zip(size, fixed_sides, strict=True):
        if fixed_side not in (None, side):
            remedy = "leave the size out to use the model's own"
            if None in fixed_sides:  # the model has no size of its own: it fixes one side alone
                remedy = f"take the open side from each image with {format_size(fixed_sides)}"
            raise FeedError(
                f"the size must fit the input {describe(spec)}, which accepts no other, got"
                f" {format_size(size)}; {remedy}, or, if the"
                " model is fully convolutional, give it another one (--input 1x3x256x256)"
            )
    return size


def _check_side(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIDE:
        raise ConfigError(f"{name} must be whole pixels, 1 to {MAX_SIDE}, got {value!r}")


def _check_size(name: str, value: Any, *, may_be_open: bool = False) -> Any:
    """Return (height, width), or None; a side may be open, which is None too."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{name} must be (height, width), got {value!r}")
    for side in value:
        if side is not None or not may_be_open:
            _check_side(name, side)
    return tuple(value)


def _check_numbers(name: str, values: Any) -> tuple[float, ...]:
    """Return one number or several as floats; refuse anything else, whatever its type."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    items = values if isinstance(values, list | tuple) else [values]
    for value in items:
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or abs(value) > 1e30:
            raise ConfigError(f"{name} must be finite numbers, got {values!r}")
    return tuple(map(float, items))


_IMAGENET = Preprocess(color="rgb", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_CROP = Preprocess(
    default_size=(224, 224), resize="short-side", interpolation="area", color="rgb", scale=1.0
)
_MINUS_ONE_TO_ONE = replace(_CROP, mean=(127.5,), std=(127.5,))
# PaddleOCR reads BGR with OpenCV; it pads text lines with 0 after the arithmetic: pixel 127.5
_TEXT_LINE = Preprocess(resize="fit-height", color="bgr", mean=(0.5,), std=(0.5,), pad=(127.5,))

PRESETS: dict[str, Preprocess] = {
    "raw": Preprocess(scale=1.0),
    "unit": Preprocess(),
    "grey-half": Preprocess(color="grey", mean=(0.5,), std=(0.5,)),
    # torchvision and timm classifiers
    "imagenet": replace(_CROP, scale=1 / 255, mean=_IMAGENET.mean, std=_IMAGENET.std),
    # Keras' "tf" mode: MobileNet, Inception
    "minus-one-to-one": _MINUS_ONE_TO_ONE,
    "imagenet-tf": _MINUS_ONE_TO_ONE,
    "efficientnet-lite": replace(_CROP, interpolation="cubic", mean=(127.0,), std=(128.0,)),
    "yolo": Preprocess(default_size=(640, 640), resize="letterbox", color="rgb", pad=(114.0,)),
    "picodet": replace(_IMAGENET, default_size=(640, 640), interpolation="cubic"),
    "ppocr-det": replace(
        _IMAGENET, default_size=(736, 736), resize="letterbox", anchor="top-left", color="bgr"
    ),
    "ppocr-rec": replace(_TEXT_LINE, default_size=(48, 320)),
    "ppocr-cls": replace(_TEXT_LINE, default_size=(48, 192)),
}


def find_preset(name: str) -> Preprocess:
    """Return the preset of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"{name!r} is no preset;"
            f" {did_you_mean(name, PRESETS, 'there are ' + ', '.join(sorted(PRESETS)))}"
        )
    return PRESETS[name]


def describe_preprocess(preprocess: Preprocess) -> str:
    """Describe preprocessing in one line, for the top of a report; a preset's name comes first."""
    preset_names = [name for name in PRESETS if _equals_preset(PRESETS[name], preprocess)]
    # presets of one arithmetic, such as ppocr-rec and ppocr-cls, differ in their default size
    preset_names.sort(key=lambda name: PRESETS[name].default_size != preprocess.default_size)
    title = f"{preset_names[0]}: " if preset_names else ""
    size = format_size(preprocess.size) if preprocess.size else ""
    if preprocess.multiple > 1:
        size += f" in multiples of {preprocess.multiple}"
    factor = "as they are" if preprocess.scale == 1 else f"/ {1 / preprocess.scale:g}"
    return (
        f"{title}{preprocess.color} {size}, {preprocess.resize} ({preprocess.interpolation}),"
        f" pixels {factor}, mean {_join_numbers(preprocess.mean)},"
        f" std {_join_numbers(preprocess.std)}, {preprocess.layout}"
    )


def _equals_preset(preset: Preprocess, preprocess: Preprocess) -> bool:
    """Return whether preprocessing is a preset, completed from a model's input."""
    completed = replace(
        preset,
        size=preprocess.size,
        multiple=preprocess.multiple,
        default_size=preprocess.default_size,
        layout=preprocess.layout,
        color=preset.color or preprocess.color,
    )
    return completed == preprocess


def _join_numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
