"""`calib8 calibrate` and `calib8 merge`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.base import json_option, quietable
from deploy.commands.calibration_options import (
    calibration_options,
    cluster_options,
    print_calibration,
    resume_option,
)
from deploy.commands.image_options import ImageArguments, feed_options
from deploy.commands.model_options import model_options, resolve_model, target_options
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.calibration.cluster_jobs import Cluster
    from deploy.pipeline.build_options import CalibrationOptions
    from deploy.targets import Target

_CACHE_OUT = base.general_option(
    "-o", "--out", type=base.FILE, help="Cache file.  [default: MODEL.cache]"
)


@base.sectioned_command()
@quietable()
@base.model_argument
@_CACHE_OUT
@base.image_option(
    "--shard",
    metavar="I/N",
    help="Observe the I-th of N parts of the images, for calib8 merge; -o names the shard's file."
    "  [default of -o: MODEL.I-of-N.shard]",
)
@target_options(lambda option: option.changes_observations)
@model_options
@feed_options
@calibration_options
@cluster_options
@resume_option
@json_option
def calibrate(
    model: Path,
    out: Path | None,
    shard: str | None,
    targets: list[Target],
    input_texts: tuple[str, ...],
    weights: Path | None,
    images: ImageArguments,
    calibration: CalibrationOptions,
    verbose: bool,
    scheduler: Cluster | None,
    resume: bool,
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
      calib8 calibrate model.onnx --images photos/ --shard 2/3 -o b.shard
      calib8 calibrate model.onnx --images /mnt/photos --scheduler tcp://host:8786

    The cache is TensorRT's text format. The fingerprint (.json) and the statistics (.npz) are
    written next to it. `build --cache` with the same targets reuses all three, also with another
    --method.
    """  # noqa: D301 (click reads the backspace)
    from deploy.calibration.checkpoint import checkpoint_path
    from deploy.calibration.shards import write_shard
    from deploy.feed.sampling import to_choice
    from deploy.files.manifest import name_output
    from deploy.pipeline.calibration_setup import calibrate_with

    dataset = images.calibration()
    if shard is None:
        path = out or Path(f"{model.stem}.cache")
    else:
        number, count = _parse_shard(shard)
        # --limit and --stride choose the images of all shards together. `to_choice` makes a
        # `Choice` of a plain number, since the shard is a field of it
        all_shards = to_choice(dataset.limit)
        dataset = replace(dataset, limit=replace(all_shards, shard=(number, count)))
        path = out or Path(f"{model.stem}.{number}-of-{count}.shard")
        # refuses to replace a file that is no shard, unless the user forces it
        name_output(path, "shard", force=calibration.cache.force)
    cache_path = path if shard is None else None  # `calib8 merge` writes the cache of all shards
    options = replace(
        calibration,
        cache=replace(calibration.cache, path=cache_path),
        until_stable=images.until_stable,
        threads=images.threads,
        scheduler=scheduler,
        resume=resume,
        checkpoint=checkpoint_path(path),  # beside the file that is written
    )
    resolved_model = resolve_model(model, input_texts, weights)
    result = calibrate_with(resolved_model, dataset, options, targets=targets)
    if shard is not None:
        write_shard(result, path)
    print_calibration(result, path, verbose=verbose, json_path=json_path)


def _parse_shard(text: str) -> tuple[int, int]:
    """Return (number of the shard, from 1, number of all shards) from the text I/N of --shard.

    Raises:
        ConfigError: another text, or a flag that uses a cache.
    """
    number, _, count = text.partition("/")
    is_short = len(text) < 16  # numbers of any shard, not of thousands of digits
    if not (number.isdecimal() and count.isdecimal() and is_short):
        raise ConfigError(f"--shard must read I/N, such as 2/3, got {text!r}")
    base.refuse_beside("--shard", "require_cache", "trust_cache", "refresh")
    return int(number), int(count)


@base.sectioned_command()
@quietable()
@base.model_argument
@click.argument("shards", nargs=-1, required=True, type=base.INPUT)
@_CACHE_OUT
@target_options(lambda option: option.changes_observations)
@model_options
@calibration_options
@json_option
def merge(
    model: Path,
    shards: tuple[Path, ...],
    out: Path | None,
    targets: list[Target],
    input_texts: tuple[str, ...],
    weights: Path | None,
    calibration: CalibrationOptions,
    verbose: bool,
    json_path: Path | None,
) -> None:
    """Merge all SHARDS of a calibration of MODEL into one cache.

    \b
    Examples:
      calib8 calibrate model.onnx --images photos/ --shard 1/2 -o a.shard    # here
      calib8 calibrate model.onnx --images photos/ --shard 2/2 -o b.shard    # there
      calib8 merge model.onnx a.shard b.shard -o model.cache

    The cache is the one that a single run over all images writes, byte for byte, whatever the order
    of the shards. Neither the images nor another run of the model are needed. Give --target and
    --keep-float as for the shards.
    """  # noqa: D301 (click reads the backspace)
    from deploy.pipeline.calibration_setup import merge_with

    cache_path = out or Path(f"{model.stem}.cache")
    cache = replace(calibration.cache, path=cache_path)
    options = replace(calibration, cache=cache, threads=1)  # no sample is run
    resolved_model = resolve_model(model, input_texts, weights)
    result = merge_with(resolved_model, shards, options, targets=targets)
    print_calibration(result, cache_path, verbose=verbose, json_path=json_path)
