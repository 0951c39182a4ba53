"""Options of the images that are fed: which, how they are read, and in how many threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.choosing import (
    STABLE,
    limit_from,
    limit_options,
    raw_from,
    raw_options,
    stable_from,
)
from deploy.commands.numbers import THREADS
from deploy.commands.preprocessing import PREPROCESS, preprocess_from, preprocess_options
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.feed.choice import Limit
    from deploy.feed.paths import RawFiles
    from deploy.feed.preprocess import Asked

SOURCES = (
    "Folder, pattern, list file (path, or path and label) or COCO json of images, or of .npy, .npz"
    " or .bin files; a video; or loader.py:function"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """What `image_options` and `feed_options` gather from the command line.

    Attributes:
        source: of the images, with the form of raw files where it is said; "" where a script feeds.
        script: `file.py:function` of a TensorRT calibrator; "" where images do.
        limit: which samples are used.
        skip_bad: whether to go on without unreadable images.
        until_stable: share of a range by which halves may differ; None looks at all images.
        preprocess: how images become inputs; None without an option of it.
        threads: worker threads.
    """

    source: str | RawFiles
    script: str
    limit: Limit
    skip_bad: bool
    until_stable: float | None
    preprocess: Asked
    threads: int

    def alike(self, path: str | None) -> str | RawFiles | None:
        """Images of another option, as `deploy.feed.paths.alike`."""
        from deploy.feed.paths import alike

        return path if path is None or isinstance(self.source, str) else alike(self.source, path)


skip_bad_option = base.option(
    "--skip-bad",
    section=base.IMAGES,
    is_flag=True,
    help="Go on without unreadable images.",
)


calibrator_script_option = base.option(
    "--calibrator-script",
    section=base.IMAGES,
    metavar="FILE.py:FUNCTION",
    help="In place of --images: a function that gives your TensorRT calibrator (IInt8...), whose"
    " batches are taken without TensorRT and a GPU.",
)


def image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how images are chosen and read; the command gets them as `images`."""
    return _image_options(command, scripts=False)


def feed_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same, with a calibrator's script in place of images."""
    return _image_options(command, scripts=True)


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same, where a model may need neither; `refuse_unfed` is asked of others."""
    return _image_options(command, scripts=True, needed=False)


def _image_options(
    command: Callable[..., None], *, scripts: bool, needed: bool = True
) -> Callable[..., None]:
    @wraps(command)
    def gathered(**words: Any) -> None:
        from deploy.machine import default_threads

        source, script = words.pop("images"), words.pop("calibrator_script", None)
        _refuse_feeds(source, script)
        if needed and not source and not script:
            refuse_unfed()
        images = ImageOptions(
            source=raw_from(words, source or ""),
            script=script or "",
            limit=limit_from(words),
            skip_bad=words.pop("skip_bad"),
            until_stable=stable_from(words),
            preprocess=preprocess_from({name: words.pop(name) for _, name, _ in PREPROCESS}),
            threads=words.pop("threads") or default_threads(),
        )
        command(images=images, **words)

    options = (
        base.option(
            "--images",
            section=base.IMAGES,
            required=not scripts,
            metavar="PATH",
            help=f"{SOURCES}.",
        ),
        *((calibrator_script_option,) if scripts else ()),
        preprocess_options,
        raw_options,
        limit_options,
        *(STABLE if scripts else ()),
        skip_bad_option,
        base.option(
            "--threads",
            section=base.GENERAL,
            type=THREADS,
            help="Worker threads; results do not depend on it.  [default: up to 4 cores]",
        ),
    )
    return base.added(gathered, options)


def _refuse_feeds(source: str | None, script: str | None) -> None:
    """Refuse two feeds."""
    if source and script:
        raise ConfigError(
            f"samples come from --images or from --calibrator-script, got {source} and {script};"
            " leave one of them away"
        )


def refuse_unfed() -> None:
    """Refuse a command that has nothing to feed."""
    raise click.UsageError("Missing option '--images' or '--calibrator-script'")
