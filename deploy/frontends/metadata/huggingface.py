"""Read Hugging Face's `preprocessor_config.json`, and timm's data configuration.

`preprocessor_config.json` is next to the model, or in the folder above a folder `onnx`, where
`optimum` and transformers.js put models.

Source: the image processors of `transformers` (`models/*/image_processing_*.py`) save their
arguments under their own names: resize, crop the center, times rescale_factor, minus image_mean,
divided by image_std, in this order.

timm's data configuration is in the `config.json` of its models, or in metadata.

Source: `timm/data/config.py` and `timm/data/transforms_factory.py` (`transforms_imagenet_eval`):
the short side becomes floor(size / crop_pct), the center is cropped, pixels / 255 are normalized.
`timm/models/_hub.py` writes `pretrained_cfg` into `config.json`. No exporter of timm or
torchvision writes metadata itself; metadata is read in case a script wrote the same names.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deploy.errors import ConfigError
from deploy.feed.preprocess import Preprocess, Size
from deploy.frontends.metadata.values import (
    ModelMetadata,
    StoredPreprocess,
    parse_integers,
    parse_number,
    parse_numbers,
    parse_object,
    plain_word,
    short_text,
)

TIMM_FILE = "config.json"
# Pillow smooths when it shrinks, like OpenCV's area and unlike its linear and cubic
INTERPOLATIONS = {"bilinear": "area", "bicubic": "area", "lanczos": "lanczos", "nearest": "nearest"}
_CFG = "pretrained_cfg"
_DEFAULT_CROP_SHARE = 0.875  # of the short side that timm crops
_MIN_CROP_SHARE = 1e-6  # a smaller one would resize a picture to sides beyond all limits
_VALUE_NAMES = ("mean", "std", "input_size", "crop_pct", "crop_mode", "interpolation")


def read_timm(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Read `pretrained_cfg`, or `mean`, `std` and related metadata; None without these.

    Raises:
        ConfigError: unsupported preprocessing, or invalid values.
    """
    if (text := metadata.text(_CFG)) is not None:
        return StoredPreprocess(timm_preprocess(parse_object(text, _CFG)))
    values = {name: metadata.text(name) for name in _VALUE_NAMES}
    if not values["mean"] or not values["std"]:
        return None
    return StoredPreprocess(timm_preprocess(values))


def read_timm_config(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Read a `config.json` with `pretrained_cfg`; None without one.

    Raises:
        ConfigError: unsupported preprocessing, or invalid values.
    """
    text = metadata.read_sibling(TIMM_FILE)
    if text is None or _CFG not in text:
        return None
    data = parse_object(text, TIMM_FILE)
    if not isinstance(data.get(_CFG), dict):
        return None
    architecture = plain_word(data.get("architecture"))
    # messages append the detail to the writer's name: "timm, resnet50"
    detail = f", {architecture}" if architecture else ""
    return StoredPreprocess(timm_preprocess(data[_CFG]), detail)


def timm_preprocess(data: Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing of timm's data configuration; a missing crop has timm's default.

    timm resizes the short side to input_size / crop_pct and crops the centre ("center"), or
    stretches the picture to the input ("squash").

    Raises:
        ConfigError: unsupported preprocessing, or invalid values.
    """
    mean = parse_numbers(data.get("mean"), "mean")
    std = parse_numbers(data.get("std"), "std")
    if max(map(abs, mean)) > 1 or max(std) > 1:
        raise ConfigError(f"its mean and std must be those of pixels / 255, got {short_text(mean)}")
    channels, side = _channels_and_side(data.get("input_size"))
    crop_share = parse_number(data.get("crop_pct"), "crop_pct", default=_DEFAULT_CROP_SHARE)
    crop_mode = data.get("crop_mode") or "center"
    interpolation = plain_word(data.get("interpolation") or "bicubic")
    # with a smaller share, timm also crops what it has stretched; this is not supported
    is_stretched = crop_mode == "squash" and crop_share == 1
    is_cropped = crop_mode == "center" and _MIN_CROP_SHARE <= crop_share <= 1
    if interpolation not in INTERPOLATIONS or not (is_stretched or is_cropped):
        raise ConfigError(
            f"its crop must be of the centre, by a share up to 1, and its interpolation one of"
            f" {', '.join(INTERPOLATIONS)}, got {short_text(crop_mode)}, {crop_share:g} and"
            f" {short_text(interpolation)}"
        )
    if side is None and crop_share != _DEFAULT_CROP_SHARE:
        raise ConfigError(
            f"its crop_pct is a share of an input_size, got {crop_share:g} and no size"
        )

    preprocess = Preprocess(
        resize="stretch" if is_stretched else "short-side",
        interpolation=INTERPOLATIONS[interpolation],
        color="grey" if channels == 1 else "rgb",
        mean=mean,
        std=std,
    )
    if side is None:
        return preprocess
    if is_cropped:
        preprocess = replace(preprocess, short_side=math.floor(side / crop_share))
    return replace(preprocess, default_size=(side, side))


def _channels_and_side(value: object) -> tuple[int, int | None]:
    """Return (channels, side of the square input) of [3, 224, 224]."""
    if value is None:
        return 3, None
    size = parse_integers(value, "input_size")
    if len(size) != 3 or size[0] not in (1, 3) or size[1] != size[2]:
        raise ConfigError(f"its input_size must be channels and a square, got {short_text(value)}")
    return size[0], size[1]


FILE = "preprocessor_config.json"
# of Pillow's numbers 0 to 5: nearest, lanczos, bilinear, bicubic, box, hamming
_INTERPOLATION_BY_RESAMPLE = ("nearest", "lanczos", "area", "area", "area", "area")
_BILINEAR = 2  # the default
# Keys that are read here, or that change no value of an image of the input's size.
_KNOWN_KEYS = frozenset(
    (
        "_processor_class", "_valid_processor_keys", "auto_map", "crop_pct", "crop_size",
        "data_format", "default_to_square", "device", "disable_grouping", "do_center_crop",
        "do_convert_annotations", "do_convert_rgb", "do_flip_channel_order", "do_normalize",
        "do_reduce_labels", "do_rescale", "do_resize", "feature_extractor_type", "format",
        "image_mean", "image_processor_type", "image_std", "input_data_format",
        "processor_class", "resample", "rescale_factor", "return_tensors", "size",
    )
)  # fmt: skip
_OTHER_RESIZES = ("Deit", "DeiT", "Levit", "PoolFormer")  # these resize by their own rules


def read_huggingface(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Read `preprocessor_config.json`; None without one, or if it is not for images.

    Raises:
        ConfigError: unsupported preprocessing, or invalid values.
    """
    text = metadata.read_exported(FILE)
    if text is None:
        return None
    data = parse_object(text, FILE)
    if isinstance(data.get("pretrained_cfg"), dict):  # TimmWrapperImageProcessor
        return StoredPreprocess(timm_preprocess(data["pretrained_cfg"]))
    if "size" not in data and "image_mean" not in data:
        return None
    kind = plain_word(data.get("image_processor_type"))
    kind = kind or plain_word(data.get("feature_extractor_type"))  # as older versions name it
    unknown_keys = [key for key, value in data.items() if value and key not in _KNOWN_KEYS]
    if unknown_keys:
        raise ConfigError(f"calib8 does not know its {short_text(unknown_keys[0])}")
    if kind.startswith(_OTHER_RESIZES):
        raise ConfigError(f"calib8 does not know its {kind}")
    preprocess = _add_arithmetic(_read_resize_and_crop(data, kind), data)
    return StoredPreprocess(preprocess, detail=f", {kind}" if kind else "")


def _add_arithmetic(preprocess: Preprocess, data: Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing with the order of channels, scale, mean and std of `data`."""
    is_rescaled = _read_flag(data, "do_rescale", True)
    is_normalized = _read_flag(data, "do_normalize", True)
    color = "bgr" if _read_flag(data, "do_flip_channel_order", False) else "rgb"
    preprocess = replace(preprocess, color=color, scale=1.0, mean=(0.0,), std=(1.0,))
    if is_rescaled:
        scale = parse_number(data.get("rescale_factor"), "rescale_factor", default=1 / 255)
        preprocess = replace(preprocess, scale=scale)
    if is_normalized:
        mean = parse_numbers(data.get("image_mean"), "image_mean")
        std = parse_numbers(data.get("image_std"), "image_std")
        preprocess = replace(preprocess, mean=mean, std=std)
    return preprocess


def _read_resize_and_crop(data: Mapping[str, Any], kind: str) -> Preprocess:
    """Return preprocessing with the size, crop and interpolation of a Hugging Face processor.

    The processor stretches the picture to a height and a width, or resizes the short side and crops
    the centre. ConvNext's processor does one or the other, depending on the size.

    Args:
        data: its configuration, `preprocessor_config.json`.
        kind: its class, such as "ViTImageProcessor".

    Raises:
        ConfigError: it resizes in another way.
    """
    if not _read_flag(data, "do_resize", True):
        raise ConfigError("it must resize the picture, got do_resize false")
    resample = parse_number(data.get("resample", _BILINEAR), "resample")
    if resample not in range(len(_INTERPOLATION_BY_RESAMPLE)):
        raise ConfigError(f"it must resize by one of Pillow's ways, got resample {resample:g}")
    preprocess = Preprocess(interpolation=_INTERPOLATION_BY_RESAMPLE[int(resample)])

    size = data.get("size")
    sides = _as_sides(size)  # "height", "width" or "shortest_edge" -> its length
    if kind.startswith("ConvNext"):
        # a single number is the short side here, although `_as_sides` gives it as height and width
        short_side = sides.get("shortest_edge", sides.get("height"))
        # this processor crops by the size, whatever `do_center_crop` says
        return _convnext_resize(preprocess, short_side, data.get("crop_pct"))
    is_cropped = _read_flag(data, "do_center_crop", False)
    if sides.keys() == {"height", "width"} and not is_cropped:
        return replace(preprocess, default_size=_parse_height_width(size, "size"))
    if sides.keys() == {"shortest_edge"} and is_cropped:
        short_side = int(parse_number(sides["shortest_edge"], "shortest_edge"))
        crop = _parse_height_width(data.get("crop_size"), "crop_size")
        return replace(preprocess, resize="short-side", short_side=short_side, default_size=crop)
    crop_text = " and a crop" if is_cropped else ""
    raise ConfigError(
        f"its size must be a height and a width, or a shortest_edge of which the centre is"
        f" cropped, got {short_text(size)}{crop_text}"
    )


def _convnext_resize(preprocess: Preprocess, size: object, crop_pct: object) -> Preprocess:
    """Apply `ConvNextImageProcessor`: stretch to 384 or more; below, crop by a share."""
    side = int(parse_number(size, "size"))
    if side >= 384:
        return replace(preprocess, default_size=(side, side))
    share = parse_number(crop_pct, "crop_pct", default=224 / 256)
    if not _MIN_CROP_SHARE <= share <= 1:
        raise ConfigError(f"its crop_pct must be a share up to 1, got {share:g}")
    return replace(
        preprocess,
        resize="short-side",
        short_side=int(side / share),
        default_size=(side, side),
    )


def _parse_height_width(value: object, name: str) -> Size:
    """Return (height, width) of a mapping or a single number."""
    sides = _as_sides(value)
    return int(parse_number(sides.get("height"), name)), int(parse_number(sides.get("width"), name))


def _as_sides(value: object) -> dict[str, object]:
    """Return lengths by the names of their sides; a single number is both height and width."""
    return value if isinstance(value, dict) else {"height": value, "width": value}


def _read_flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean of `data`, which may be missing."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"its {name} must be true or false, got {short_text(value)}")
    return value
