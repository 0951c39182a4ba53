"""`calib8 merge`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.calibration_options import CalibrationOptions, calibration_options
from deploy.commands.model import model_from, model_options
from deploy.commands.model_options import target_options
from deploy.commands.observed import end, tell
from deploy.commands.output import json_option, put_json, quietable
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.targets import Target


@click.command(cls=base.SectionedCommand)
@quietable()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("shards", nargs=-1, required=True, type=click.Path(path_type=Path))
@base.option(
    "-o",
    "--out",
    section=base.GENERAL,
    type=click.Path(path_type=Path),
    help="Cache file.  [default: MODEL.cache]",
)
@target_options(lambda option: option.observes)
@model_options
@calibration_options
@json_option
def merge(
    model: Path,
    shards: tuple[Path, ...],
    out: Path | None,
    targets: list[Target],
    shapes: tuple[str, ...],
    weights: Path | None,
    calibration: CalibrationOptions,
    json_path: Path | None,
) -> None:
    """Merge all SHARDS of a calibration of MODEL into one cache.

    \b
    Examples:
      calib8 calibrate model.onnx --images photos/ --shard 1/2 -o a.shard    # here
      calib8 calibrate model.onnx --images photos/ --shard 2/2 -o b.shard    # there
      calib8 merge model.onnx a.shard b.shard -o model.cache

    The cache is the one that a single run over all images writes, byte for byte, whatever the order
    of the shards. Neither the images nor another run of the model are needed. Targets and nodes in
    float are those of the shards.
    """  # noqa: D301 (click reads the backspace)
    from deploy.pipeline import merge as run

    calibration.refuse_ignored(targets)
    if calibration.cache.trust:
        raise ConfigError(
            "--trust-cache takes a cache as it is, and shards make one; leave one of them away"
        )
    path = out or Path(f"{model.stem}.cache")
    found = run(
        model_from(model, shapes, weights),
        shards,
        targets=targets,
        method=calibration.method if calibration.asked else None,
        cache=replace(calibration.cache, path=path),
        float_nodes=calibration.keep_float,
    )
    tell(found, path, verbose=calibration.verbose)
    put_json(json_path, found.to_json)
    end(found)
