"""Options that several commands share, and how their words become values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from calibrators.searches import DEFAULT_METHOD, SEARCHES, parameters, takers
from deploy.calibration.search import Method
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.calibration.reuse import CachePolicy
    from deploy.feed.preprocess import Preprocess

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """What `feed_options` gathers from the command line."""

    images: str
    limit: int | None
    skip_bad: bool
    method_name: str
    method_given: Mapping[str, Any]  # parameter -> value, of those that were given
    threads: int
    keep_float: tuple[str, ...]
    preprocess: Preprocess | None
    cache: CachePolicy  # without its path, which each command names its own way

    @property
    def method(self) -> Method:
        """The search with its parameters; a ConfigError where they do not go together."""
        return Method.of(self.method_name, self.method_given)


_PREPROCESS = (
    ("--preprocess", "preset", "Preset: how images become inputs, such as imagenet or unit."),
    ("--size", "size", "Input size as HxW; the default is the model's."),
    ("--resize", "resize", "stretch, letterbox, short-side or fit-height."),
    ("--short-side", "short_side", "Short side in pixels before the centre crop."),
    ("--interpolation", "interpolation", "nearest, linear, cubic, area or lanczos."),
    ("--color", "color", "rgb, bgr or grey."),
    ("--scale", "scale", "Factor of a pixel of 0..255, such as 1/255."),
    ("--mean", "mean", "Mean after scaling: one value, or one a channel: 0.5,0.5,0.5."),
    ("--std", "std", "Standard deviation after scaling, like --mean."),
    ("--pad", "pad", "Border of letterbox in pixel units."),
    ("--layout", "layout", "nchw or nhwc."),
)


def preprocess_options(command: Command) -> Command:
    """Add the options of `preprocess`."""
    for flag, name, text in reversed(_PREPROCESS):
        command = click.option(flag, name, help=text)(command)
    return command


def method_options(command: Command) -> Command:
    """Add --method, and an option for each parameter of each search."""
    for name, parameter in parameters().items():
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=type(parameter.default),
            help=f"{parameter.metadata['help']}"
            f"  [--method {' or '.join(takers(name))}; default: {parameter.default}]",
        )(command)
    return click.option(
        "--method",
        type=click.Choice(tuple(SEARCHES)),
        default=DEFAULT_METHOD,
        show_default=True,
        help="How clip ranges are searched: "
        + "; ".join(f"{name} {search.help}" for name, search in SEARCHES.items())
        + ".",
    )(command)


def feed_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how images are chosen and calibrated with; the command gets them as `feed`."""

    @wraps(command)
    def gathered(**words: Any) -> None:
        command(feed=_gather(words), **words)

    wrapped: Callable[..., None] = gathered
    options = (
        click.option(
            "--images",
            required=True,
            metavar="PATH",
            help="Folder of images, list file (path, or path and label), .npy or .npz.",
        ),
        preprocess_options,
        click.option("--limit", type=click.IntRange(min=1), help="Use at most so many images."),
        click.option("--skip-bad", is_flag=True, help="Go on without unreadable images."),
        method_options,
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="Worker threads; results do not depend on it.  [default: up to 4 cores]",
        ),
        click.option(
            "--keep-float",
            multiple=True,
            metavar="NODE",
            help="Name of a node to keep in float; may be repeated.",
        ),
        click.option("--require-cache", is_flag=True, help="Fail where the cache does not fit."),
        click.option(
            "--trust-cache", is_flag=True, help="Use a cache that has no fingerprint, as it is."
        ),
        click.option("--refresh", is_flag=True, help="Calibrate even where the cache fits."),
        click.option(
            "--trt-version",
            metavar="X.Y.Z",
            default="8.5.3",
            show_default=True,
            help="TensorRT version in the first line of the cache.",
        ),
    )
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _gather(words: dict[str, Any]) -> FeedOptions:
    """Take the feed options out of the parsed words of a command."""
    from deploy.calibration.reuse import CachePolicy
    from deploy.machine import default_threads

    return FeedOptions(
        images=words.pop("images"),
        limit=words.pop("limit"),
        skip_bad=words.pop("skip_bad"),
        method_name=words.pop("method"),
        method_given={
            name: value for name in parameters() if (value := words.pop(name)) is not None
        },
        threads=words.pop("threads") or default_threads(),
        keep_float=words.pop("keep_float"),
        preprocess=preprocess_from({name: words.pop(name) for _, name, _ in _PREPROCESS}),
        cache=CachePolicy(
            require=words.pop("require_cache"),
            trust=words.pop("trust_cache"),
            refresh=words.pop("refresh"),
            trt_version=words.pop("trt_version"),
        ),
    )


def preprocess_from(words: dict[str, str | None]) -> Preprocess | None:
    """The preprocessing of a preset and the options that override it; None if none was given.

    Raises:
        ConfigError: an unknown preset, or a word that is not a value of its option.
    """
    if not any(words.values()):
        return None
    from deploy.feed.preprocess import Preprocess, with_options
    from deploy.feed.presets import preset

    base = preset(words["preset"]) if words["preset"] else Preprocess()
    given: dict[str, object] = {
        key: words[key] for key in ("resize", "interpolation", "color", "layout") if words[key]
    }
    if words["size"]:
        given["size"] = size(words["size"])
    if words["short_side"]:
        given["short_side"] = _whole("--short-side", words["short_side"])
    if words["scale"]:
        given["scale"] = _number("--scale", words["scale"])
    for key in ("mean", "std", "pad"):
        if text := words[key]:
            given[key] = tuple(_number(f"--{key}", part) for part in text.split(","))
    return with_options(base, given)


def size(text: str) -> tuple[int, int]:
    """`HxW` as (height, width)."""
    parts = text.lower().split("x")
    if len(parts) != 2:
        raise ConfigError(f"a size reads HxW, such as 224x224, got {text!r}")
    return _whole("--size", parts[0]), _whole("--size", parts[1])


def _whole(flag: str, text: str) -> int:
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
