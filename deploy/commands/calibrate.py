"""`calib8 calibrate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from deploy.commands.model import model_from, model_options
from deploy.commands.options import FeedOptions, feed_options


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Cache file [MODEL.cache].")
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("onnxruntime",),
    show_default=True,
    help="Target whose tensors are calibrated; may be repeated.",
)
@click.option(
    "--calibrator",
    type=click.Choice(["entropy2", "minmax", "legacy"]),
    help="With --target tensorrt alone: TensorRT's calibrator to follow.  [default: entropy2]",
)
@click.option(
    "--order-independent",
    is_flag=True,
    help="With --target tensorrt alone: a range that no batch size or order of images changes,"
    " instead of TensorRT's own.",
)
@click.option(
    "--parser",
    type=click.Choice(["onnx", "caffe"]),
    help="With --target tensorrt alone: TensorRT's parser that names the tensors; by default"
    " judged from the model.",
)
@model_options
@feed_options
def calibrate(
    model: Path,
    out: Path | None,
    targets: tuple[str, ...],
    calibrator: str | None,
    order_independent: bool,
    parser: str | None,
    shapes: tuple[str, ...],
    weights: Path | None,
    feed: FeedOptions,
) -> None:
    """Calibrate MODEL on images and write the calibration cache.

    \b
    calib8 calibrate model.onnx --images photos/ --preprocess imagenet -o model.cache
    calib8 calibrate model.onnx --images photos/ --target tensorrt --batch-size 8

    The cache is TensorRT's text format; beside it stand its fingerprint (.json) and the
    statistics (.npz), with which another --method needs no second run. For --target tensorrt alone
    it is the cache that TensorRT's own calibrator would write: every tensor that its parser names,
    before any fusion.
    """  # noqa: D301 (click reads the backspace)
    from deploy.pipeline import calibrate as run

    path = out or Path(f"{model.stem}.cache")
    found = run(
        model_from(model, shapes, weights),
        feed.images,
        targets=targets,
        method=feed.method,
        preprocess=feed.preprocess,
        cache=replace(feed.cache, path=path),
        skip_bad=feed.skip_bad,
        limit=feed.limit,
        threads=feed.threads,
        float_nodes=feed.keep_float,
        progress=True,
    )
    how = "reused" if found.reused else f"written in {found.seconds:.1f} s"
    click.echo(f"{path}: {how} ({found.reason})")
    click.echo(
        f"{len(found.ranges.observed)} observations, {feed.method.label}, {found.feed.count} images"
    )
    for name, why in found.found.reasons.items():
        click.echo(f"no scale for {name}: it {why}")
    for note in (*found.notes, *found.feed.notes):
        click.echo(note)
