"""`calib8 calibrate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from calibrators.searches import DEFAULT_PERCENT
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
    if set(targets) == {"tensorrt"}:
        if shapes or weights:
            raise click.UsageError(
                "a TensorRT cache names the tensors of an ONNX file: make one with calib8 export"
            )
        _for_tensorrt(model, out, calibrator, order_independent, parser, feed)
        return
    if calibrator or order_independent or parser:
        raise click.UsageError(
            "--calibrator, --order-independent and --parser go with --target tensorrt alone"
        )
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
        f"{len(found.calibration.scales)} tensors, {feed.method.label}, {found.feed.count} images"
    )
    for name, why in found.calibration.troubles.items():
        click.echo(f"no scale for {name}: it {why}")
    for note in found.feed.notes:
        click.echo(note)


def _for_tensorrt(
    model: Path,
    out: Path | None,
    calibrator: str | None,
    order_independent: bool,
    parser: str | None,
    feed: FeedOptions,
) -> None:
    from click.core import ParameterSource

    from deploy.targets.tensorrt.pipeline import calibrate_to

    if feed.keep_float or feed.cache.trust:
        raise click.UsageError(
            "--keep-float and --trust-cache are for builds; a cache for TensorRT lists every tensor"
        )
    given = (
        click.get_current_context().get_parameter_source("method") is not ParameterSource.DEFAULT
    )
    method = feed.method_name.removesuffix("-tensorrt") if given else "entropy"
    if calibrator is not None:
        method = calibrator.removesuffix("2")
    path = out or Path(f"{model.stem}.cache")
    found = calibrate_to(
        path,
        model,
        feed.images,
        version=feed.cache.trt_version,
        method=method,
        batch_size=None if order_independent else feed.method_given.get("batch_size", 1),
        parser=parser,
        percent=feed.method_given.get("percent", DEFAULT_PERCENT),
        preprocess=feed.preprocess,
        skip_bad=feed.skip_bad,
        limit=feed.limit,
        threads=feed.threads,
        require=feed.cache.require,
        refresh=feed.cache.refresh,
        progress=True,
    )
    how = "reused" if found.reused else f"written in {found.seconds:.1f} s"
    click.echo(f"{path}: {how} ({found.reason})")
    click.echo(
        f"{len(found.cache.entries)} entries under {found.cache.header.text},"
        f" {found.feed.count} images"
    )
    for note in (*found.notes, *found.feed.notes):
        click.echo(note)
