"""What feeds a calibration: images, or the calibrator of a user's script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.calibration_options import CalibrationOptions
from deploy.commands.image_options import ImageOptions

if TYPE_CHECKING:
    from deploy.feed.calibrator import CalibratorScript
    from deploy.feed.paths import RawFiles
    from deploy.method import Method
    from deploy.targets import Target


def fed(
    images: ImageOptions, calibration: CalibrationOptions, targets: Sequence[Target]
) -> tuple[str | RawFiles | CalibratorScript, Method | None]:
    """(source of the feed, the method to search by; None where nothing names one).

    Raises:
        ConfigError, FeedError: as `CalibratorScript`.
    """
    asked = calibration.method if calibration.asked else None
    if not images.script:
        return images.source, asked
    from deploy.feed.calibrator import CalibratorScript
    from deploy.targets.tensorrt.migrated import method_of

    script = CalibratorScript(images.script)
    named = method_of(script)
    idle = all(target.own_method for target in targets) or calibration.cache.trust
    if asked is not None or idle or named is None:
        return script, asked
    method, why = named
    script.notes = (why,)
    return script, method


def compared(source: str | RawFiles | CalibratorScript, path: Path) -> list[str]:
    """What is told of the cache that a script has of its own, beside the one that was written."""
    from deploy.feed.calibrator import CalibratorScript

    known = source.known if isinstance(source, CalibratorScript) else None
    if known is None:
        return []
    from deploy.targets.tensorrt.cache_tools import read_cache
    from deploy.targets.tensorrt.migrated import agreement

    return [agreement(known, read_cache(path))]
