"""Preprocessing of images: options, presets by model family, and defaults from the model's input.

The arithmetic is in `deploy.feed.pixels`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.errors import ConfigError, FeedError, did_you_mean
from deploy.tensors import TensorSpec

RESIZES = ("stretch", "letterbox", "short-side", "fit-height")
_RESIZES_OF = {  # option -> the resizes that use it
    "short_side": ("short-side",),
    "pad": ("letterbox", "fit-height"),
}
INTERPOLATIONS = ("nearest", "linear", "cubic", "area", "lanczos")
COLORS = {"rgb": 3, "bgr": 3, "grey": 1}
LAYOUTS = ("nchw", "nhwc")
ANCHORS = ("centre", "top-left")
LARGEST_SIDE = 16384
INTEGER_DTYPES = ("uint8", "int32")  # integer inputs that accept images
_UNIT = "pixels / 255 (preset 'unit')"

Size = tuple[int, int]
Sides = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Preprocessing of an image to one input. `None` means: take it from the model's input.

    Attributes:
        size: (height, width) in pixels of the model's input. A side that is None depends on each
            image: it follows from the aspect if the other side is set, else it is the image's own.
            Inputs then differ in size.
        multiple: sides that depend on the image are rounded to multiples of it.
        default_size: size if the model leaves its own open; a preset's usual size.
        resize: "stretch"; "letterbox" keeps the aspect and pads; "short-side" resizes the short
            side to `short_side` and crops the center; "fit-height" keeps the aspect up to the
            full width and pads on the right, as text recognizers do.
        short_side: pixels; None is the longer side of `size` times 8/7 (256 for 224).
        interpolation: OpenCV's. "area" is used if both sides shrink, else "linear".
        color: "rgb", "bgr" or "grey"; None is grey for one channel and rgb for three.
        scale: multiplier of a pixel of 0..255; of 0..65535 in a 16-bit image that is fed as grey
            with another scale than 1/255.
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
        _one_of("resize", self.resize, RESIZES)
        _one_of("interpolation", self.interpolation, INTERPOLATIONS)
        _one_of("anchor", self.anchor, ANCHORS)
        if self.color is not None:
            _one_of("color", self.color, tuple(COLORS))
        if self.layout is not None:
            _one_of("layout", self.layout, LAYOUTS)
        object.__setattr__(self, "size", _size("size", self.size, may_be_open=True))
        object.__setattr__(self, "default_size", _size("default_size", self.default_size))
        _side("multiple", self.multiple)
        if self.short_side is not None:
            _side("short_side", self.short_side)
        object.__setattr__(self, "scale", _number("scale", self.scale))
        for name in ("mean", "std", "pad"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
            self._check_channels(name)
        if not all(np.float32(v) > 0 for v in self.std) or not np.float32(self.scale) > 0:
            raise ConfigError(
                f"scale and std must be above 0, got scale={self.scale} std={list(self.std)};"
                " std is what the scaled pixel is divided by"
            )

    def _check_channels(self, name: str) -> None:
        got = len(getattr(self, name))
        allowed = {1, COLORS[self.color]} if self.color else {1, 3}
        if got not in allowed:
            raise ConfigError(
                f"{name} must have one value or one per channel of {self.color or 'rgb'},"
                f" got {got} values; give {' or '.join(map(str, sorted(allowed)))}"
            )

    @property
    def channels(self) -> int:
        """1 or 3; 3 while `color` is None."""
        return COLORS[self.color or "rgb"]

    @property
    def box(self) -> Size:
        """`size`, if both sides are set; call `with_image_size` first."""
        height, width = self.size or (None, None)
        assert height is not None and width is not None
        return height, width

    @property
    def short(self) -> int:
        """Short side in pixels for the resize "short-side"; `size` must be set."""
        if self.short_side is None and self.size is None:
            raise ConfigError("short_side follows from size, got neither; give one of them")
        return self.short_side or (max(self.box) * 8 + 3) // 7

    @property
    def deep(self) -> bool:
        """Whether 16-bit images keep their 16 bits: grey ones that are not divided by 255."""
        return self.color == "grey" and abs(self.scale * 255 - 1) > 1e-3

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; floats survive exactly (repr round trip).

        A `multiple` of 1 is left out, so that older caches, written before it, stay equal.
        """
        data = dataclasses.asdict(self)
        if self.multiple == 1:
            del data["multiple"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}

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


def with_options(base: Preprocess, options: Mapping[str, object]) -> Preprocess:
    """Return `base` with every option that is not None replaced.

    Raises:
        ConfigError: an unknown name or an invalid value.
    """
    names = [f.name for f in dataclasses.fields(Preprocess)]
    for name in options:
        if name not in names:
            raise ConfigError(
                f"{name!r} is no preprocessing option;"
                f" {did_you_mean(name, names, 'there are ' + ', '.join(names))}"
            )
    set_options: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    return dataclasses.replace(base, **set_options)


def apply_user_options(base: Preprocess, options: Mapping[str, object]) -> Preprocess:
    """Return `with_options` of the user's options, none of which may be without effect.

    Raises:
        ConfigError: see `with_options`; or an option that the chosen resize does not use.
    """
    how = with_options(base, options)
    for name, ways in _RESIZES_OF.items():
        if options.get(name) is not None and how.resize not in ways:
            raise ConfigError(
                f"{name} is for resize {' and '.join(ways)}, got it with resize {how.resize}; give"
                f" resize {' or '.join(ways)}, or leave {name} out"
            )
    return how


def default_preprocess(spec: TensorSpec) -> Preprocess:
    """Return the default preprocessing: an integer input gets the pixels unchanged."""
    return Preprocess(scale=1.0) if spec.dtype in INTEGER_DTYPES else Preprocess()


def complete_preprocess(
    asked: Preprocess | None, spec: TensorSpec
) -> tuple[Preprocess, tuple[str, ...]]:
    """Complete preprocessing from the model's input: size, color and layout are set. Add notes.

    Raises:
        FeedError: the input is no image, or contradicts `asked`.
        ConfigError: a side depends on the image, but the resize does not allow that.
    """
    chosen = asked if asked is not None else default_preprocess(spec)
    if len(spec.shape) != 4:
        raise FeedError(
            f"images need an input of 4 dimensions, got {describe(spec)};"
            " feed this model arrays from an .npy or .npz file"
        )
    last = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    layout = chosen.layout or ("nhwc" if last else "nchw")
    order = (1, 2, 3) if layout == "nchw" else (3, 1, 2)
    channels, height, width = (spec.shape[place] for place in order)
    color = chosen.color or ("grey" if channels == 1 else "rgb")
    if isinstance(channels, int) and channels != COLORS[color]:
        if channels in COLORS.values():
            remedy = "give another color or layout, or feed arrays from an .npy file"
        else:
            remedy = "images have 1 or 3, so feed this model arrays from .npy files, or a layout"
        raise FeedError(
            f"{color} images have {COLORS[color]} channels, the input is {describe(spec)} with"
            f" {channels} in {layout.upper()}; {remedy}"
        )
    size = _resolve_size(chosen, (height, width), spec)
    try:
        resolved = dataclasses.replace(chosen, size=size, color=color, layout=layout)
    except ConfigError as error:
        raise FeedError(f"{error} (the input is {describe(spec)})") from error
    _check_open_sides(resolved)
    if resolved.resize == "short-side" and resolved.short < max(resolved.box):
        raise ConfigError(
            f"short_side must reach the crop of {format_size(resolved.box)},"
            f" got {resolved.short_side}; give {max(resolved.box)} or more"
        )
    _check_mean(resolved)
    if asked is not None:
        return resolved, ()
    is_integer = spec.dtype in INTEGER_DTYPES
    values = f"pixels as they are, for {spec.dtype} (preset 'raw')" if is_integer else _UNIT
    return resolved, (
        f"no preprocessing was given: {color} images stretched to {format_size(size)}, {values}",
    )


def with_image_size(how: Preprocess, picture: Size, where: str = "a picture") -> Preprocess:
    """Return `how` with the input size for an image of (height, width); `how` must be resolved.

    A side that depends on the image is rounded to the nearest multiple; for "fit-height" it is
    rounded up, as the rest is padded.

    Raises:
        FeedError: a side would be longer than `LARGEST_SIDE`; the message calls the image `where`.
    """
    height, width = how.size or (None, None)
    if height is not None and width is not None:
        return how
    rows, columns = picture
    if height is not None:
        width = _round_to_multiple(height * columns, rows, how)
    elif width is not None:
        height = _round_to_multiple(width * rows, columns, how)
    else:
        height, width = _round_to_multiple(rows, 1, how), _round_to_multiple(columns, 1, how)
    if max(height, width) > LARGEST_SIDE:
        raise FeedError(
            f"a side of an input must have at most {LARGEST_SIDE} pixels, got {height}x{width} for"
            f" {where} of {rows}x{columns}; give a size for all"
        )
    return dataclasses.replace(how, size=(height, width))


def format_size(size: Sides) -> str:
    """Return `HxW`, with * for a side that depends on the image."""
    return "x".join("*" if side is None else str(side) for side in size)


def _round_to_multiple(above: int, below: int, how: Preprocess) -> int:
    """Round `above / below` to a multiple, at least one."""
    unit = how.multiple * below
    times = -(-above // unit) if how.resize == "fit-height" else (2 * above + unit) // (2 * unit)
    return max(times, 1) * how.multiple


def describe(spec: TensorSpec) -> str:
    """Return 'name' dtype [dims] of an input, for messages."""
    dims = ", ".join("?" if d is None else str(d) for d in spec.shape)
    return f"{spec.name!r} {spec.dtype} [{dims}]"


def _check_open_sides(how: Preprocess) -> None:
    """Refuse image-dependent sides with a resize that needs a size, and `multiple` without them."""
    height, width = how.size or (None, None)
    if height is not None and width is not None:
        if how.multiple != 1:
            raise ConfigError(
                f"a multiple is for sides that depend on the image, got {how.multiple} for"
                f" {height}x{width}; give a size such as {height}x*, or leave the multiple out"
            )
    elif not (how.resize == "stretch" or (how.resize == "fit-height" and height is not None)):
        raise ConfigError(
            "sizes that depend on the image go with resize stretch, or with fit-height and a"
            f" height, got {how.resize} to {format_size((height, width))}; give another resize or"
            " both sides"
        )


def _check_mean(how: Preprocess) -> None:
    """Refuse a mean of raw pixels if scaled pixels are fed: all inputs would be nearly equal."""
    is_deep = how.deep and (how.scale == 1 or how.scale < 0.5 / 255)
    top = (65535 if is_deep else 255) * how.scale
    if max(how.mean) > top * (1 + 1e-6):
        scaled_mean = ",".join(f"{value * how.scale:.4g}" for value in how.mean)
        raise ConfigError(
            f"mean is taken from scaled pixels, which go from 0 to {top:.4g},"
            f" got {','.join(f'{value:.6g}' for value in how.mean)}; give scale 1 if it is a mean"
            f" of raw pixels, or the mean of scaled ones, such as {scaled_mean}"
        )


def _resolve_size(
    how: Preprocess, model_sides: tuple[int | str | None, int | str | None], spec: TensorSpec
) -> Sides:
    size = how.size
    if size is None:
        fallback = how.default_size or (None, None)
        sides = [o if isinstance(o, int) else f for o, f in zip(model_sides, fallback, strict=True)]
        if None in sides:
            raise FeedError(
                f"the input {describe(spec)} leaves its size open; give a size, such as"
                f" {_examples(model_sides)} for sizes that depend on the image"
            )
        size = _size("size", sides)
    for got, wanted in zip(size, model_sides, strict=True):
        if isinstance(wanted, int) and got != wanted:
            raise FeedError(
                f"the size must fit the input {describe(spec)}, which accepts no other, got"
                f" {format_size(size)}; leave the size out to use the model's own, or, if the"
                " model is fully"
                " convolutional, declare the sides of its inputs and outputs open (dim_param)"
            )
    return size


def _examples(model_sides: tuple[int | str | None, int | str | None]) -> str:
    fixed_sides = [side if isinstance(side, int) else None for side in model_sides]
    example = format_size((fixed_sides[0] or 224, fixed_sides[1] or 224))
    if fixed_sides == [None, None]:
        return f"{example}, or 224x* or native"
    return f"{example}, or {format_size((fixed_sides[0], fixed_sides[1]))}"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = did_you_mean(str(value), allowed)
        hint = f"; {near}" if near else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")


def _side(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIDE:
        raise ConfigError(f"{name} must be whole pixels, 1 to {LARGEST_SIDE}, got {value!r}")
    return value


def _size(name: str, value: Any, *, may_be_open: bool = False) -> Any:
    """Return (height, width), or None; a side may be open, which is None too."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{name} must be (height, width), got {value!r}")
    return tuple(None if one is None and may_be_open else _side(name, one) for one in value)


def _number(name: str, value: Any) -> float:
    numbers = _numbers(name, value)
    if isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be one number, got {value!r}")
    return numbers[0]


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    listed = list(values) if isinstance(values, list | tuple) else [values]
    for value in listed:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or abs(value) > 1e30:
            raise ConfigError(f"{name} must be finite numbers, got {values!r}")
    return tuple(float(v) for v in listed)


_IMAGENET = Preprocess(color="rgb", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_CROP = Preprocess(
    default_size=(224, 224), resize="short-side", interpolation="area", color="rgb", scale=1.0
)
# PaddleOCR reads BGR with OpenCV; it pads text lines with 0 after the arithmetic: pixel 127.5
_TEXT_LINE = Preprocess(resize="fit-height", color="bgr", mean=(0.5,), std=(0.5,), pad=(127.5,))
_with = dataclasses.replace

PRESETS: dict[str, Preprocess] = {
    "raw": Preprocess(scale=1.0),
    "unit": Preprocess(),
    "grey-half": Preprocess(color="grey", mean=(0.5,), std=(0.5,)),
    # torchvision and timm classifiers
    "imagenet": _with(_CROP, scale=1 / 255, mean=_IMAGENET.mean, std=_IMAGENET.std),
    # Keras' "tf" mode: MobileNet, Inception
    "minus-one-to-one": _with(_CROP, mean=(127.5,), std=(127.5,)),
    "imagenet-tf": _with(_CROP, mean=(127.5,), std=(127.5,)),
    "efficientnet-lite": _with(_CROP, interpolation="cubic", mean=(127.0,), std=(128.0,)),
    "yolo": Preprocess(default_size=(640, 640), resize="letterbox", color="rgb", pad=(114.0,)),
    "picodet": _with(_IMAGENET, default_size=(640, 640), interpolation="cubic"),
    "ppocr-det": _with(
        _IMAGENET, default_size=(736, 736), resize="letterbox", anchor="top-left", color="bgr"
    ),
    "ppocr-rec": _with(_TEXT_LINE, default_size=(48, 320)),
    "ppocr-cls": _with(_TEXT_LINE, default_size=(48, 192)),
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


def describe_preprocess(how: Preprocess) -> str:
    """Describe preprocessing in one line, for the top of a report; a preset's name comes first."""
    presets = [name for name, one in PRESETS.items() if _equals_preset(one, how)]
    size = format_size(how.size) if how.size else ""
    size += f" in multiples of {how.multiple}" if how.multiple > 1 else ""
    title = f"{presets[0]}: " if presets else ""
    factor = f"/ {1 / how.scale:g}" if how.scale != 1 else "as they are"
    return (
        f"{title}{how.color} {size}, {how.resize} ({how.interpolation}), pixels {factor}, mean"
        f" {_join_numbers(how.mean)}, std {_join_numbers(how.std)}, {how.layout}"
    )


def _equals_preset(preset_how: Preprocess, how: Preprocess) -> bool:
    completed = dataclasses.replace(
        preset_how,
        size=how.size,
        multiple=how.multiple,
        default_size=how.default_size,
        layout=how.layout,
        color=preset_how.color or how.color,
    )
    return completed == how


def _join_numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
