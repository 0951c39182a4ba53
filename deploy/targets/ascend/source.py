"""The pictures that an .om with AIPP gets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deploy.errors import ConfigError

_YUV = ("nv12", "nv21")  # 4:2:0, a plane of Y and one of U and V in turn; in nv21 V comes first
COLORS = ("rgb", "bgr", *_YUV)
STANDARDS = ("bt601-narrow", "bt601-full", "bt709-narrow", "bt709-full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The pictures that the .om gets.

    Attributes:
        color: one of `COLORS`.
        size: (height, width) where AIPP is to crop the centre; None is the model's own.
        standard: of nv12 and nv21, one of `STANDARDS`.
        dynamic: the program that runs the .om sets all of it at every inference.
    """

    color: str = "rgb"
    size: tuple[int, int] | None = None
    standard: str = "bt601-narrow"
    dynamic: bool = False

    def __post_init__(self) -> None:
        for word, value, known in (
            ("source color", self.color, COLORS),
            ("csc", self.standard, STANDARDS),
        ):
            if value not in known:
                raise ConfigError(f"a {word} is one of {', '.join(known)}, got {value!r}")

    @property
    def yuv(self) -> bool:
        """Whether it is YUV 4:2:0, of a camera, a video or DVPP."""
        return self.color in _YUV


def read_size(text: str) -> tuple[int, int]:
    """Text such as 720x1280 -> (height, width).

    Raises:
        ConfigError: it reads otherwise.
    """
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if not match:
        raise ConfigError(f"a source size reads HxW, such as 720x1280, got {text!r}")
    return int(match[1]), int(match[2])
