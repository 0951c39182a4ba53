"""`calib8 doctor`."""

from __future__ import annotations

import click

from deploy.commands.output import told
from deploy.terminal import say, say_lines


@click.command()
@told
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell what is here: versions, int8 on this CPU, and what every target can do.

    What is missing is said with the command that brings it; the exit code is 0 all the same.
    """
    from deploy.analysis.environment import examine

    found = examine()
    if as_json:
        import json
        from dataclasses import asdict

        say_lines(json.dumps([asdict(one) for one in found], indent=1))
        return
    width = max(len(one.what) for one in found)
    for one in found:
        say(f"{'+' if one.there else '-'} {one.what:<{width}}  {one.words}")
