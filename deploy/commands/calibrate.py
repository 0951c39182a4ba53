"""`calib8 calibrate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import sections
from deploy.commands.feeding import compared, fed
from deploy.commands.model import model_from, model_options
from deploy.commands.options import (
    CalibrationOptions,
    ImageOptions,
    calibration_options,
    feed_options,
)
from deploy.commands.output import json_option, put_json, quietable
from deploy.commands.targets import target_options
from deploy.terminal import say, textless

if TYPE_CHECKING:
    from deploy.targets import Target


@click.command(cls=sections.SectionedCommand)
@quietable()
@click.argument("model", type=click.Path(path_type=Path))
@sections.option(
    "-o",
    "--out",
    section=sections.GENERAL,
    type=click.Path(path_type=Path),
    help="Cache file.  [default: MODEL.cache]",
)
@sections.retired(
    "--calibrator",
    "TensorRT's calibrators are methods: --method entropy-tensorrt (with --batch-size),"
    " --method minmax or --method legacy",
)
@sections.retired(
    "--order-independent", "it is what --method entropy does with every target", is_flag=True
)
@target_options(lambda option: option.observes)
@model_options
@feed_options
@calibration_options
@json_option
def calibrate(
    model: Path,
    out: Path | None,
    targets: list[Target],
    shapes: tuple[str, ...],
    weights: Path | None,
    images: ImageOptions,
    calibration: CalibrationOptions,
    json_path: Path | None,
) -> None:
    """Calibrate MODEL on images and write the calibration cache.

    \b
    Examples:
      calib8 calibrate model.onnx --images photos/ --preprocess imagenet -o model.cache
      calib8 calibrate model.onnx --images photos/ --target onnxruntime,ascend
      calib8 calibrate model.onnx --images photos/ --target tensorrt
        --method entropy-tensorrt --batch-size 8
      calib8 calibrate model.onnx --calibrator-script old.py:make_calibrator --target tensorrt

    The cache is TensorRT's text format; beside it stand its fingerprint (.json) and the
    statistics (.npz), with which another --method needs no second run. `build` with the same
    targets takes it with --cache.
    """  # noqa: D301 (click reads the backspace)
    from deploy.feed.told import as_read
    from deploy.pipeline import calibrate as run

    calibration.refuse_ignored(targets)
    source, method = fed(images, calibration, targets)
    path = out or Path(f"{model.stem}.cache")
    found = run(
        model_from(model, shapes, weights),
        source,
        targets=targets,
        method=method,
        preprocess=images.preprocess,
        cache=replace(calibration.cache, path=path),
        skip_bad=images.skip_bad,
        limit=images.limit,
        threads=images.threads,
        float_nodes=calibration.keep_float,
    )
    how = "reused" if found.reused else f"written in {found.seconds:.1f} s"
    say(f"{path}: {how} ({found.reason})")
    say(f"{len(found.ranges.observed)} observations of {found.feed.count} images")
    for name, own in found.wanted.items():
        by = "" if not set(own) & set(found.searched) else f", searched by {found.method.label}"
        say(f"  {name}: {len(own)}{by}")
    if calibration.verbose:
        say(found.cost)
    for name, why in found.found.reasons.items():
        say(f"no scale for {name}: it {why}")
    for warning in found.warnings:
        say(warning, err=textless())
    for note in (*found.notes, *as_read(found.feed), *compared(source, path)):
        say(note)
    for name, why in found.failed.items():
        say(f"calib8: {name} failed: {why}", err=True)
    put_json(json_path, found.to_json)
    if found.failed:
        click.get_current_context().exit(1)
