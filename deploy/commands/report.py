"""`calib8 report`."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base, given
from deploy.commands.output import html_option, json_option, put_json, quietable
from deploy.terminal import say_lines


@click.command(cls=base.SectionedCommand)
@quietable("--html", "--json")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@html_option
@json_option
def report(folders: tuple[Path, ...], html_path: Path | None, json_path: Path | None) -> None:
    """Hold the builds in FOLDERS side by side: verdict, speed, size, accuracy, and what differs.

    Of one folder alone its own screen is shown again. Nothing is run or measured; each speed-up is
    over the float model of the same build.

    \b
    Examples:
      calib8 report build/
      calib8 report a/ b/ --html both.html
    """  # noqa: D301 (click reads the backspace)
    from deploy import report as one
    from deploy.builds import compare, read_build, to_html, to_json, to_screen
    from deploy.files.atomic import write_text

    builds = [read_build(folder) for folder in folders]
    if len(builds) == 1:
        given.refuse_without("a second folder", given.typed("html_path", "json_path"))
        say_lines(one.to_screen(builds[0].report))
        return
    found = compare(builds)
    if html_path is not None:
        write_text(html_path, to_html(found))
    say_lines(to_screen(found))
    put_json(json_path, lambda: to_json(found))
