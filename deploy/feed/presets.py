"""The preprocessing that well-known families of models were trained with, by name."""

from __future__ import annotations

import dataclasses

from deploy.errors import ConfigError, did_you_mean
from deploy.feed.preprocess import Preprocess

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
