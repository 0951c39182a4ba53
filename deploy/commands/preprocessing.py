"""Options of how images become inputs, and how their words become a preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.commands import base
from deploy.commands.completion import among_those_of
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.feed.preprocess import Asked, Sides

Command = TypeVar("Command", bound=Callable[..., Any])

PRESET_NAMES = (  # of `deploy.feed.presets`, said here so that --help imports nothing for it
    "raw, unit, grey-half, imagenet, minus-one-to-one, imagenet-tf, efficientnet-lite, yolo,"
    " picodet, ppocr-det, ppocr-rec or ppocr-cls"
)
PREPROCESS = (
    ("--preprocess", "preset", f"Preset: how images become inputs: {PRESET_NAMES}."),
    (
        "--size",
        "size",
        "Input size as HxW; 48x* and native leave sides to each image. The default is the model's.",
    ),
    ("--multiple", "multiple", "Round what --size leaves to the image to multiples of so many."),
    ("--resize", "resize", "Way to the size: stretch, letterbox, short-side or fit-height."),
    ("--short-side", "short_side", "Short side in pixels before the centre crop."),
    ("--interpolation", "interpolation", "OpenCV's: nearest, linear, cubic, area or lanczos."),
    ("--color", "color", "Order of the channels: rgb, bgr or grey."),
    ("--scale", "scale", "Factor of a pixel of 0..255, such as 1/255."),
    ("--mean", "mean", "Mean after scaling: one value, or one a channel: 0.5,0.5,0.5."),
    ("--std", "std", "Standard deviation after scaling, like --mean."),
    ("--pad", "pad", "Border of letterbox in pixel units."),
    ("--layout", "layout", "Order of the axes: nchw or nhwc."),
)


_NAMES = {
    "preset": among_those_of("deploy.feed.presets", "PRESETS"),
    "resize": among_those_of("deploy.feed.preprocess", "RESIZES"),
    "interpolation": among_those_of("deploy.feed.preprocess", "INTERPOLATIONS"),
    "color": among_those_of("deploy.feed.preprocess", "COLORS"),
    "layout": among_those_of("deploy.feed.preprocess", "LAYOUTS"),
}


def preprocess_options(command: Command) -> Command:
    """Add the options of `preprocess`."""
    for flag, name, text in reversed(PREPROCESS):
        command = base.option(
            flag,
            name,
            section=base.IMAGES,
            help=text,
            shell_complete=_NAMES.get(name),
        )(command)
    return command


def preprocess_from(words: dict[str, str | None]) -> Asked:
    """The preprocessing of a preset and the options that override it; None if none was given.

    Options without a preset are given alone: the rest is the model's own.

    Raises:
        ConfigError: an unknown preset, or a word that is not a value of its option.
    """
    if not any(words.values()):
        return None
    from deploy.feed.preprocess import Preprocess, asked_of, with_options
    from deploy.feed.presets import preset

    given: dict[str, object] = {
        key: words[key] for key in ("resize", "interpolation", "color", "layout") if words[key]
    }
    if words["size"]:
        given["size"] = size(words["size"])
    for key in ("short_side", "multiple"):
        if text := words[key]:
            given[key] = whole(f"--{key.replace('_', '-')}", text)
    if words["scale"]:
        given["scale"] = _number("--scale", words["scale"])
    for key in ("mean", "std", "pad"):
        if text := words[key]:
            given[key] = tuple(_number(f"--{key}", part) for part in text.split(","))
    if words["preset"]:
        return asked_of(preset(words["preset"]), given)
    with_options(Preprocess(), given)  # what breaks a rule is told before a model is read
    return given


def size(text: str) -> Sides:
    """`HxW` as (height, width); `*` and `native` as None."""
    parts = ["*", "*"] if text.lower() == "native" else text.lower().split("x")
    if len(parts) != 2:
        raise ConfigError(
            f"a size reads HxW, such as 224x224, 48x* or native, got {text!r}; * leaves a side to"
            " each image"
        )
    height, width = (None if part == "*" else whole("--size", part) for part in parts)
    return height, width


def whole(flag: str, text: str) -> int:
    """The number that a flag was given.

    Raises:
        ConfigError: it is none, or has a fraction.
    """
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes whole numbers, got {text!r}") from error


def _number(flag: str, text: str) -> float:
    """A number, or a fraction such as 1/255."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below) if below else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{flag} takes numbers such as 0.5 or 1/255, got {text!r}") from error
