"""What a command shows: progress, and its text or JSON in its place; `--quiet`, `--verbose`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import click

from deploy.commands import base, given
from deploy.progress import telling
from deploy.terminal import say_data, without_text

_SCREEN = Path("-")

Command = Callable[..., None]

verbose_option = base.option(
    "-v",
    "--verbose",
    section=base.GENERAL,
    is_flag=True,
    help="Print what was counted: images decoded, inferences run.",
)
json_option = base.option(
    "--json",
    "json_path",
    section=base.GENERAL,
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write what was found as JSON; - prints it in place of the text.",
)
html_option = base.option(
    "--html",
    "html_path",
    section=base.GENERAL,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what was found as a page.",
)
_quiet_option = base.option(
    "-q",
    "--quiet",
    section=base.GENERAL,
    is_flag=True,
    help="No progress and no text: errors and warnings alone, beside what is written.",
)


def told(command: Command) -> Command:
    """A command that tells on stderr what is going on, for what has no `--quiet`."""

    @wraps(command)
    def telling_it(**words: Any) -> None:
        with telling():
            command(**words)

    return telling_it


def quietable(*files: str) -> Callable[[Command], Command]:
    """Add `--quiet` to a command, which tells what is going on without it.

    Stdout gets no text either where JSON goes there.

    Args:
        files: flags of which one must be given too, where a command writes nothing else.
    """

    def added(command: Command) -> Command:
        @wraps(command)
        def gathered(quiet: bool, **words: Any) -> None:
            if quiet and words.get("verbose"):
                raise click.UsageError("--quiet and --verbose exclude each other")
            if quiet and files and not set(files) & set(given.typed()):
                given.refuse_without(" or ".join(files), ["--quiet"])
            with ExitStack() as stack:
                stack.enter_context(without_text(quiet or words.get("json_path") == _SCREEN))
                stack.enter_context(telling(not quiet))
                command(**words)

        return _quiet_option(gathered)

    return added


def put_json(path: Path | None, make: Callable[[], object]) -> None:
    """Write what `--json` asks for; nothing where it was not given.

    Raises:
        ExportError: the file cannot be written, or is an input.
    """
    if path is None:
        return
    import json

    from deploy.files.atomic import write_text

    text = json.dumps(make(), indent=1, allow_nan=False) + "\n"
    if path == _SCREEN:
        say_data(text)
    else:
        write_text(path, text)
