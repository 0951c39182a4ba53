"""`calib8 calibrate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

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
@feed_options
def calibrate(model: Path, out: Path | None, targets: tuple[str, ...], feed: FeedOptions) -> None:
    r"""Calibrate MODEL on images and write the calibration cache.

    \b
    calib8 calibrate model.onnx --images photos/ --preprocess imagenet -o model.cache

    The cache is TensorRT's text format; beside it stand its fingerprint (.json) and the
    statistics (.npz), with which another --method needs no second run.
    """
    from deploy.pipeline import calibrate as run

    path = out or Path(f"{model.stem}.cache")
    found = run(
        model,
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
        f"{len(found.calibration.scales)} tensors, {feed.method.label}, {found.feed.count} images"
    )
    for name, why in found.calibration.troubles.items():
        click.echo(f"no scale for {name}: it {why}")
    for note in found.feed.notes:
        click.echo(note)
