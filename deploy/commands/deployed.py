"""What `calib8 ascend deploy` and `calib8 ascend convert` share: where files go, and a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands import given as given_flags
from deploy.commands.inputs import Inputs, input_options, shape, shape_option
from deploy.commands.model_options import Given, own_options
from deploy.commands.numbers import THREADS
from deploy.errors import ConfigError
from deploy.targets import Ascend
from deploy.targets.options import options_of

if TYPE_CHECKING:
    from deploy.pipeline.deployment import Tried

FILE = click.Path(path_type=Path)
_FILES = frozenset(option.flag for option in options_of(Ascend) if not option.observes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What both commands take beside the scales."""

    out: Path
    target: Ascend
    tried: Tried
    threads: int | None
    force: bool


def where_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add where files go, what they are tried on, and Ascend's own options that do not calibrate.

    The command gets them as `where`.
    """

    @wraps(command)
    def gathered(given: Given, inputs: Inputs, shapes: tuple[str, ...], **words: Any) -> None:
        from deploy.pipeline.deployment import Tried

        if inputs.source is not None and (idle := given_flags.typed("shapes")):
            raise ConfigError(
                f"{idle[0]} shapes made-up samples, and --images gives others; leave one of them"
                " away"
            )
        tried = Tried(
            images=inputs.source,
            preprocess=inputs.preprocess,
            limit=inputs.limit,
            skip_bad=inputs.skip_bad,
            shapes=dict(map(shape, shapes)),
        )
        where = Where(
            out=words.pop("out"),
            target=Ascend(**given.get("ascend", {})),
            tried=tried,
            threads=words.pop("threads"),
            force=words.pop("force"),
        )
        command(where=where, **words)

    wrapped: Callable[..., None] = gathered
    return base.added(wrapped, _OPTIONS)


_OPTIONS: Sequence[Callable[[Callable[..., None]], Callable[..., None]]] = (
    base.option(
        "-o",
        "--out",
        section=base.GENERAL,
        type=FILE,
        required=True,
        help="Folder of everything that is written.",
    ),
    shape_option(),
    input_options("Run on these, and tell how far the outputs are from the model's"),
    own_options(lambda option: option.flag in _FILES),
    base.option(
        "--threads",
        section=base.GENERAL,
        type=THREADS,
        metavar="N",
        help="Worker threads; the files do not depend on it.  [default: up to 4 cores]",
    ),
    base.option(
        "--force",
        section=base.GENERAL,
        is_flag=True,
        help="Write over files that calib8 did not write.",
    ),
)
