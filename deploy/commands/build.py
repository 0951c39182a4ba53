"""`calib8 build`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands.model import model_from, model_options
from deploy.commands.options import FeedOptions, feed_options

if TYPE_CHECKING:
    from deploy.backends.base import Backend


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("onnxruntime",),
    show_default=True,
    help="onnxruntime, tensorrt or ascend; may be repeated: one calibration serves all.",
)
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
@click.option(
    "--weight-bits",
    type=click.IntRange(7, 8),
    default=8,
    show_default=True,
    help="onnxruntime: 7 for x86 CPUs without VNNI, whose int8 kernels can saturate.",
)
@click.option(
    "--soc", metavar="CHIP", help="ascend: chip for atc, such as Ascend310P3; without it no .om."
)
@click.option(
    "--ascend-config",
    type=click.Path(path_type=Path),
    help="ascend: AMCT's simplified .cfg, or its quant config JSON.",
)
@click.option(
    "--aipp/--no-aipp", default=False, help="ascend: preprocessing inside the .om (AIPP)."
)
@click.option(
    "--first-layer-int8",
    is_flag=True,
    help="ascend: AIPP and the first convolution fused in int8; brings --aipp.",
)
@click.option(
    "--atc-flag",
    "atc_flags",
    multiple=True,
    metavar="--NAME=VALUE",
    help="ascend: a further flag of atc; may be repeated.",
)
@model_options
@feed_options
def build(
    model: Path,
    targets: tuple[str, ...],
    out: Path,
    cache: Path | None,
    eval_images: str | None,
    labels: Path | None,
    duration: float,
    weight_bits: int,
    soc: str | None,
    ascend_config: Path | None,
    aipp: bool,
    first_layer_int8: bool,
    atc_flags: tuple[str, ...],
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
    from deploy.backends import Ascend
    from deploy.commands.labels import read_labels
    from deploy.errors import ConfigError
    from deploy.pipeline import build as run
    from deploy.report import to_screen

    if "ascend" not in targets and (soc or ascend_config or aipp or first_layer_int8 or atc_flags):
        raise ConfigError(
            "--soc, --ascend-config, --aipp, --first-layer-int8 and --atc-flag belong to"
            " --target ascend, got"
            f" {', '.join(targets)}"
        )
    own = Ascend(
        soc=soc,
        config=ascend_config,
        aipp=aipp,
        first_layer_int8=first_layer_int8,
        atc_flags=atc_flags,
        say=lambda sentence: click.echo(sentence, err=True),
    )
    report = run(
        model_from(model, shapes, weights),
        feed.images,
        out=out,
        targets=[own if name == "ascend" else _backend(name, weight_bits) for name in targets],
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


def _backend(name: str, weight_bits: int) -> str | Backend:
    """A target with the options that are its own; others by name."""
    from deploy.backends import OnnxRuntime

    return OnnxRuntime(weight_bits=weight_bits) if name == "onnxruntime" else name
