"""`--scheduler` and what goes with it: observing on the workers of a dask cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base, given
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.cluster.options import Cluster

SECTION = "Many machines"
SENDS = ("nothing", "model", "images", "all")  # of `deploy.cluster.options`, which --help spares

_OPTIONS = (
    base.option(
        "--scheduler",
        section=SECTION,
        metavar="ADDRESS",
        help="Observe on the workers of this dask scheduler, such as tcp://host:8786, which must be"
        " trusted; the result is the same. Needs the extra [dask].",
    ),
    base.option(
        "--send",
        section=SECTION,
        type=click.Choice(SENDS),
        help="What the workers are sent in place of reading it from the same path as here."
        "  [default: nothing]",
    ),
    base.option(
        "--pieces",
        section=SECTION,
        type=click.IntRange(min=1),
        help="Split the images into so many.  [default: 8 a thread of the workers, or more]",
    ),
    base.option(
        "--retries",
        section=SECTION,
        type=click.IntRange(min=0),
        help="Try a piece again so often where the system failed it.  [default: 2]",
    ),
)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add which scheduler observes; the command gets it as `scheduler`, None for this machine."""

    @wraps(command)
    def gathered(scheduler: str | None, **words: Any) -> None:
        asked = {name: words.pop(name) for name in ("send", "pieces", "retries")}
        if scheduler is None:
            given.refuse_without("--scheduler", given.typed(*asked))
        command(scheduler=None if scheduler is None else _cluster(scheduler, asked), **words)

    return base.added(gathered, _OPTIONS)


def _cluster(address: str, asked: dict[str, Any]) -> Cluster:
    """The scheduler, its options, and `--threads`, which is then of each piece.

    Raises:
        ConfigError: another option says that nothing is to be observed, or here.
    """
    from deploy.cluster.options import Cluster

    idle = given.typed("require_cache", "trust_cache", "shard")
    if idle:
        raise ConfigError(
            f"--scheduler has its workers observe, got {idle[0]}, which does not; leave one of them"
            " away"
        )
    threads = click.get_current_context().params.get("threads")
    known = {name: value for name, value in asked.items() if value is not None}
    return Cluster(address=address, threads=threads or 1, **known)
