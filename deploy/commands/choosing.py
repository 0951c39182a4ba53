"""Options of which images are used, and of files that do not say what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deploy.commands import base
from deploy.commands.completion import among_those_of
from deploy.commands.numbers import Real
from deploy.commands.preprocessing import whole
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.feed.choice import Limit
    from deploy.feed.paths import RawFiles

Command = TypeVar("Command", bound=Callable[..., Any])

_RAW = (
    base.option(
        "--raw-shape",
        section=base.IMAGES,
        metavar="DIMS",
        help="Shape of a sample in .bin and .raw files, such as 1x3x224x224; of pictures 480x640x3."
        "  [default: the input's]",
    ),
    base.option(
        "--raw-dtype",
        section=base.IMAGES,
        metavar="NAME",
        shell_complete=among_those_of("deploy.feed.paths", "DTYPES"),
        help="Their dtype, little-endian, such as float16; uint8 are pictures, unless the input is"
        " of uint8 and no preprocessing is asked for.  [default: the input's]",
    ),
)


def raw_options(command: Command) -> Command:
    """Add the form of files without a header; `raw_from` gathers it."""
    return base.added(command, _RAW)


def raw_from(words: dict[str, Any], source: str) -> str | RawFiles:
    """Take the words of `raw_options` out of a command's; the source in the form that they say.

    Raises:
        ConfigError: as `RawFiles`, or a shape that does not read as one.
    """
    shape, dtype = words.pop("raw_shape"), words.pop("raw_dtype")
    if shape is None and dtype is None:
        return source
    if not source:
        raise ConfigError(
            "--raw-shape and --raw-dtype are of the files of --images, which was not given; leave"
            " them away"
        )
    from deploy.feed.paths import RawFiles

    sides = None if shape is None else tuple(whole("--raw-shape", s) for s in shape.split("x"))
    return RawFiles(source, shape=sides, dtype=dtype)


_CHOICE = (
    base.option(
        "--limit",
        section=base.IMAGES,
        type=click.IntRange(min=1),
        help="Use at most so many images, spread evenly over all.",
    ),
    base.option(
        "--sample",
        section=base.IMAGES,
        type=click.IntRange(min=1),
        help="Use at most so many images, drawn by lot.",
    ),
    base.option(
        "--sample-seed",
        section=base.IMAGES,
        type=click.IntRange(min=0),
        help="Of the lot of --sample.  [default: 0]",
    ),
    base.option(
        "--stride",
        section=base.IMAGES,
        type=click.IntRange(min=1),
        help="Use every so-manieth image or frame only.  [default: 1; of a video, one a second]",
    ),
)


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add which of the images are used; `limit_from` gathers them."""
    return base.added(command, _CHOICE)


def limit_from(words: dict[str, Any]) -> Limit:
    """Take the words of `limit_options` out of a command's.

    Raises:
        ConfigError: a seed without a lot; or as `Choice`.
    """
    from deploy.feed.choice import Choice

    seed, sample = words.pop("sample_seed"), words.pop("sample")
    if seed is not None and sample is None:
        raise ConfigError(f"--sample-seed is of --sample, got {seed} alone; give --sample too")
    most, every = words.pop("limit"), words.pop("stride")
    if most is sample is every is None:
        return None
    return Choice(most=most, sample=sample, seed=seed or 0, every=every)


STABLE = (
    base.option(
        "--until-stable",
        section=base.IMAGES,
        is_flag=True,
        help="Look at 16, 32, 64 ... images, spread evenly over all, until both halves of them give"
        " the same ranges.",
    ),
    base.option(
        "--stable-within",
        section=base.IMAGES,
        type=Real(),
        help="Of --until-stable: the share of its range by which halves may differ."
        "  [default: 0.2]",
    ),
)


def stable_from(words: dict[str, Any]) -> float | None:
    """Take the words of `STABLE` out of a command's.

    Raises:
        ConfigError: a share without what it is of.
    """
    from deploy.calibration.until import WITHIN

    asked, within = words.pop("until_stable", False), words.pop("stable_within", None)
    if within is not None and not asked:
        raise ConfigError(
            f"--stable-within is of --until-stable, got {within:g} alone; give --until-stable too"
        )
    return None if not asked else WITHIN if within is None else within
