"""`calib8 explain`."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base, given
from deploy.commands.inputs import Inputs, input_options
from deploy.commands.numbers import THREADS
from deploy.commands.output import json_option, put_json, quietable
from deploy.terminal import say_lines


@click.command(cls=base.SectionedCommand)
@quietable("--json")
@click.argument("folder", type=click.Path(path_type=Path))
@base.option(
    "--target",
    section=base.GENERAL,
    metavar="NAME",
    help="Tell of this target alone.  [default: every target of the build]",
)
@base.option(
    "--all",
    "everything",
    section=base.GENERAL,
    is_flag=True,
    help="Every row of every table, not the worst ones alone.",
)
@base.option(
    "--model",
    section=base.IMAGES,
    type=click.Path(path_type=Path),
    help="The float model, where it is no longer where the report says.",
)
@input_options(
    "Run the float model and the int8 models on these, and tell the images and the channels that"
    " lose most"
)
@base.option(
    "--threads",
    section=base.IMAGES,
    type=THREADS,
    help="Worker threads; results do not depend on it.  [default: up to 4 cores]",
)
@json_option
def explain(
    folder: Path,
    target: str | None,
    everything: bool,
    model: Path | None,
    inputs: Inputs,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Tell why the build in FOLDER is as it is: what loses what where, and what was tried.

    It reads the report and the plan. Images become inputs as those of the build did, unless the
    options below say otherwise.

    \b
    Examples:
      calib8 explain build/
      calib8 explain build/ --target tensorrt --all
      calib8 explain build/ --images held/
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.explanation import to_json, to_screen
    from deploy.explanation.explain import explain as run

    if json_path == Path("-"):
        given.refuse_without("the text", given.typed("everything"))
    found = run(
        folder,
        target=target,
        images=inputs.source,
        model=model,
        preprocess=inputs.preprocess,
        limit=inputs.limit,
        skip_bad=inputs.skip_bad,
        threads=threads,
    )
    put_json(json_path, lambda: to_json(found))
    say_lines(to_screen(found, everything=everything))
