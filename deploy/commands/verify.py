"""`calib8 verify`."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands.output import told
from deploy.terminal import say


@click.command()
@told
@click.argument("folder", type=click.Path(path_type=Path))
def verify(folder: Path) -> None:
    """Tell whether the files in FOLDER are those of one build, as it wrote them.

    A build that was killed while its files appeared is finished first. Its calibration cache is
    looked at too where --cache named one elsewhere. Exit code 1 where a file is missing or was
    changed.

    \b
    Example:
      calib8 verify build/
    """  # noqa: D301 (click reads the backspace)
    from deploy.files import manifest, staging

    staging.recover(folder)
    found = manifest.read(folder)
    wrong = manifest.changed(folder, found)
    for name in found.files:
        say(f"{name} {wrong.get(name, 'is as it was written')}")
    for name in found.earlier:
        say(f"{name} is of an earlier build")
    other = found.cache is not None and manifest.cache_changed(*found.cache)
    if found.cache is not None:
        path = found.cache[0]
        left = "was changed after it was written" if other else "is as the build left it"
        say(
            f"{path}, the cache, {left if path.is_file() else 'is not here: it was kept elsewhere'}"
        )
    model = found.made_from.get("model", {})
    say(
        f"{folder}: {len(found.files) - len(wrong)} of {len(found.files)} files are as the build of"
        f" {model.get('name')} wrote them"
    )
    if wrong or other:
        click.get_current_context().exit(1)
