"""`calib8 build`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands.model import model_from, model_options
from deploy.commands.options import FeedOptions, feed_options
from deploy.commands.targets import target_options

if TYPE_CHECKING:
    from deploy.targets.base import Target


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build"),
    show_default=True,
    help="Folder of everything that is written.",
)
@click.option("--cache", type=click.Path(path_type=Path), help="Calibration cache [in --out].")
@click.option(
    "--eval-images",
    metavar="PATH",
    help="Images for the accuracy figures; a list file may hold labels.",
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="One class number a line, for the evaluation images in order.",
)
@click.option(
    "--duration",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    help="Seconds of latency runs a model; 0 leaves them out.",
)
@target_options
@model_options
@feed_options
def build(
    model: Path,
    out: Path,
    cache: Path | None,
    eval_images: str | None,
    labels: Path | None,
    duration: float,
    backends: list[Target],
    shapes: tuple[str, ...],
    weights: Path | None,
    feed: FeedOptions,
) -> None:
    """Calibrate MODEL (or reuse its calibration), build int8 engines, measure, report.

    \b
    calib8 build model.onnx --images photos/ --preprocess imagenet
    calib8 build model.onnx --images list.txt --target onnxruntime --target tensorrt
    calib8 build model.onnx --images photos/ --target ascend --soc Ascend310P3
    calib8 build net.py:make --input 1x3x224x224 --images photos/
    """  # noqa: D301 (click reads the backspace)
    from deploy.commands.labels import read_labels
    from deploy.pipeline import build as run
    from deploy.report import to_screen

    report = run(
        model_from(model, shapes, weights),
        feed.images,
        out=out,
        targets=backends,
        method=feed.method,
        preprocess=feed.preprocess,
        cache=replace(feed.cache, path=cache),
        eval_images=eval_images,
        labels=read_labels(labels) if labels else None,
        skip_bad=feed.skip_bad,
        limit=feed.limit,
        threads=feed.threads,
        float_nodes=feed.keep_float,
        duration_s=duration,
        progress=True,
    )
    click.echo(to_screen(report), nl=False)
