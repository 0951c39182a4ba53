"""timm's data configuration: in the `config.json` of its models, or in metadata.

Source: `timm/data/config.py` and `timm/data/transforms_factory.py` (`transforms_imagenet_eval`):
the short side becomes floor(size / crop_pct), the centre is cropped, pixels / 255 are normalised.
`timm/models/_hub.py` writes `pretrained_cfg` into `config.json`. No exporter of timm or
torchvision writes metadata of its own; here it is read where a script put the same names there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deploy.errors import ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.frontends.metadata.values import Found, Said, numbers, shown, single, table, whole, word

FILE = "config.json"
# Pillow smooths when it shrinks, as OpenCV's area does and its linear and cubic do not
INTERPOLATIONS = {"bilinear": "area", "bicubic": "area", "lanczos": "lanczos", "nearest": "nearest"}
_CFG = "pretrained_cfg"
_NAMES = ("mean", "std", "input_size", "crop_pct", "crop_mode", "interpolation")


def read(found: Found) -> Said | None:
    """Out of `pretrained_cfg`, or `mean` and `std` and their like; None without these.

    Raises:
        ConfigError: what calib8 does not do, or values that are none.
    """
    if (text := found.text(_CFG)) is not None:
        return Said(how_of(table(text, _CFG)))
    held = {name: found.text(name) for name in _NAMES}
    return Said(how_of(held)) if held["mean"] and held["std"] else None


def read_beside(found: Found) -> Said | None:
    """Out of a `config.json` that has `pretrained_cfg`; None without one.

    Raises:
        ConfigError: as `read`.
    """
    text = found.beside(FILE)
    data = {} if text is None or _CFG not in text else table(text, FILE)
    if not isinstance(data.get(_CFG), dict):
        return None
    name = word(data.get("architecture"))
    return Said(how_of(data[_CFG]), f", {name}" if name else "")


def how_of(data: Mapping[str, Any]) -> Preprocess:
    """A data configuration as a preprocessing; what it leaves out has timm's default.

    Raises:
        ConfigError: as `read`.
    """
    mean, std = numbers(data.get("mean"), "mean"), numbers(data.get("std"), "std")
    if max(map(abs, mean)) > 1 or max(std) > 1:
        raise ConfigError(f"its mean and std must be those of pixels / 255, got {shown(mean)}")
    depth, side = _input(data.get("input_size"))
    share = 0.875 if data.get("crop_pct") is None else single(data["crop_pct"], "crop_pct")
    mode, kind = data.get("crop_mode") or "center", word(data.get("interpolation") or "bicubic")
    squashed = mode == "squash" and share == 1
    if kind not in INTERPOLATIONS or not 0 < share <= 1 or not (mode == "center" or squashed):
        raise ConfigError(
            f"its crop must be of the centre, by a share up to 1, and its interpolation one of"
            f" {', '.join(INTERPOLATIONS)}, got {shown(mode)}, {share:g} and {shown(kind)}"
        )
    if side is None and share != 0.875:
        raise ConfigError(f"its crop_pct is a share of an input_size, got {share:g} and no size")
    return Preprocess(
        default_size=None if side is None else (side, side),
        resize="stretch" if squashed else "short-side",
        short_side=None if squashed or side is None else math.floor(side / share),
        interpolation=INTERPOLATIONS[kind],
        color="grey" if depth == 1 else "rgb",
        mean=mean,
        std=std,
    )


def _input(value: object) -> tuple[int, int | None]:
    """(channels, the side of the square input) of [3, 224, 224]."""
    if value is None:
        return 3, None
    size = whole(value, "input_size")
    if len(size) != 3 or size[0] not in (1, 3) or size[1] != size[2]:
        raise ConfigError(f"its input_size must be channels and a square, got {shown(value)}")
    return size[0], size[1]
