"""Images as the inputs of a command that does without them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base, given
from deploy.commands.choosing import limit_from, limit_options, raw_from, raw_options
from deploy.commands.image_options import SOURCES, skip_bad_option
from deploy.commands.preprocessing import PREPROCESS, preprocess_from, preprocess_options

if TYPE_CHECKING:
    from deploy.feed.choice import Limit
    from deploy.feed.paths import RawFiles
    from deploy.feed.preprocess import Asked

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What `input_options` gathers from the command line; `source` is None without --images."""

    source: str | RawFiles | None
    limit: Limit
    skip_bad: bool
    preprocess: Asked


def shape_option(ending: str = "") -> Callable[[Command], Command]:
    """Add --shape, which may be repeated, as `shapes`; `ending` is said last in its help."""
    return base.option(
        "--shape",
        "shapes",
        section=base.MODEL,
        multiple=True,
        metavar="NAME:DIMS",
        help="Shape of an input that the model leaves open, e.g. images:1x3x224x224; may be"
        f" repeated. An open batch alone is taken as 1.{ending}",
    )


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Split "name:1x3x224x224" into name and dimensions; the name may itself hold colons.

    Raises:
        BadParameter: other text.
    """
    name, _, dims = text.rpartition(":")
    parts = dims.replace(",", "x").split("x")
    if not name or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(
            f"must look like name:1x3x224x224, got {text!r}", param_hint="--shape"
        )
    return name, tuple(map(int, parts))


def input_options(purpose: str) -> Callable[[Command], Command]:
    """Add how images are chosen and read, none of it required; the command gets `inputs`.

    Args:
        purpose: what the images are for, as the help of --images begins.
    """

    def added(command: Command) -> Command:
        @wraps(command)
        def gathered(**words: Any) -> None:
            source = words.pop("images")
            if source is None:
                given.refuse_without("--images", given.typed_in(base.IMAGES))
            raw = raw_from(words, source or "")
            inputs = Inputs(
                source=raw or None,
                limit=limit_from(words),
                skip_bad=words.pop("skip_bad"),
                preprocess=preprocess_from({name: words.pop(name) for _, name, _ in PREPROCESS}),
            )
            command(inputs=inputs, **words)

        wrapped: Command = gathered
        return base.added(wrapped, _options(purpose))

    return added


def _options(purpose: str) -> list[Callable[[Command], Command]]:
    return [
        base.option(
            "--images",
            section=base.IMAGES,
            metavar="PATH",
            help=f"{purpose}: {SOURCES[0].lower()}{SOURCES[1:]}.",
        ),
        preprocess_options,
        raw_options,
        limit_options,
        skip_bad_option,
    ]
