"""The preprocessing that well-known families of models were trained with, by name."""

from __future__ import annotations

import dataclasses

from deploy.errors import ConfigError, did_you_mean
from deploy.feed.preprocess import Preprocess, by

_IMAGENET = Preprocess(color="rgb", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_CROP = Preprocess(
    default_size=(224, 224), resize="short-side", interpolation="area", color="rgb", scale=1.0
)
# PaddleOCR reads with OpenCV and keeps BGR; it pads text lines with 0 after the arithmetic,
# which is pixel 127.5
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


def preset(name: str) -> Preprocess:
    """The preset of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"{name!r} is no preset;"
            f" {did_you_mean(name, PRESETS, 'there are ' + ', '.join(sorted(PRESETS)))}"
        )
    return PRESETS[name]


def in_words(how: Preprocess) -> str:
    """What is done to a picture, its preset first where it is one's, as on a report's first screen.

    Args:
        how: resolved.
    """
    known = [name for name, one in PRESETS.items() if _same(one, how)]
    size = by(how.size) if how.size else ""
    size += f" in multiples of {how.multiple}" if how.multiple > 1 else ""
    factor = f"/ {1 / how.scale:g}" if how.scale != 1 else "as they are"
    return (
        f"{f'{known[0]}: ' if known else ''}{how.color} {size}, {how.resize} ({how.interpolation}),"
        f" pixels {factor}, mean {_listed(how.mean)}, std {_listed(how.std)}, {how.layout}"
    )


def _same(one: Preprocess, how: Preprocess) -> bool:
    """Whether a preset, completed from the model's input, is this."""
    completed = dataclasses.replace(
        one,
        size=how.size,
        multiple=how.multiple,
        default_size=how.default_size,
        layout=how.layout,
        color=one.color or how.color,
    )
    return completed == how


def _listed(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
