"""What is told of a calibration that was made, reused or merged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.terminal import say, textless

if TYPE_CHECKING:
    from deploy.calibration.calibrated import Calibrated


def tell(found: Calibrated, path: Path, *, verbose: bool) -> None:
    """Say what was observed, how it was searched, and what is to be known of it."""
    from deploy.feed.told import as_read

    how = "reused" if found.reused else f"written in {found.seconds:.1f} s"
    share = found.feed.share
    why = found.reason if share is None else f"shard {share} of {share.count} samples"
    say(f"{path}: {how} ({why})")
    say(f"{len(found.ranges.observed)} observations of {found.feed.count} images")
    for name, own in found.wanted.items():
        by = "" if not set(own) & set(found.searched) else f", searched by {found.method.label}"
        say(f"  {name}: {len(own)}{by}")
    if found.agreement is not None:
        say(found.agreement.words)
    if verbose:
        say(found.cost)
    for name, why in found.found.reasons.items():
        say(f"no scale for {name}: it {why}")
    for warning in (*found.doubts, *found.warnings):
        say(warning, err=textless())
    for note in (*found.resumed, *found.notes, *as_read(found.feed)):
        say(note)


def end(found: Calibrated) -> None:
    """Say which targets failed, and exit with 1 where one did."""
    for name, why in found.failed.items():
        say(f"calib8: {name} failed: {why}", err=True)
    if found.failed:
        click.get_current_context().exit(1)
