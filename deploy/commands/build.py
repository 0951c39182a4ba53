"""`calib8 build`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.base import Real, json_option, put_json, quietable
from deploy.commands.calibration_options import (
    calibration_options,
    cluster_options,
    resume_option,
)
from deploy.commands.image_options import ImageArguments, build_options, refuse_no_images
from deploy.commands.model_options import model_options, resolve_model, target_options
from deploy.commands.settings import (
    ConfiguredCommand,
    config_options,
    settings_text,
    tuning_options,
)
from deploy.metrics import DURATION_S
from deploy.terminal import is_text_suppressed, say, say_lines, say_screen
from deploy.tuning import REPAIRS

if TYPE_CHECKING:
    from deploy.calibration.cluster_jobs import Cluster
    from deploy.pipeline.build_options import CalibrationOptions
    from deploy.report import Report
    from deploy.report.verdict import Gates
    from deploy.targets import Target
    from deploy.tuning.search_options import Tuning


labels_option = base.measuring_option(
    "--labels",
    type=base.FILE,
    help="Labels of the evaluation images: a file with one class number a line, in order; objects"
    " by file name, as a COCO json, data.yaml or folder of YOLO's .txt or VOC's .xml; or the word"
    " folders, if each class has a folder.",
)
metric_option = base.measuring_option(
    "--metric",
    metavar="FILE.py:FUNCTION",
    help="Your own metric: (FP32 outputs, int8 outputs, label or None) of a sample -> number,"
    " more is better; the report shows the mean.",
)


@click.command(cls=ConfiguredCommand)
@quietable()
@base.model_argument
@base.general_option("--out", type=base.FILE, default=Path("build"), help="Output folder.")
@base.cache_option(
    "--cache", type=base.FILE, help="Calibration cache.  [default: in --out, folder calib8]"
)
@base.measuring_option(
    "--eval-images",
    type=base.IMAGE_SOURCE,
    help="Evaluation images, as --images; a list file may hold labels.",
)
@base.measuring_option(
    "--float",
    "float_model",
    type=base.INPUT,
    metavar="FILE",
    help="Float model to compare a Q/DQ model with.  [default: for accuracy the Q/DQ model itself;"
    " for speed and size the Q/DQ model without its pairs]",
)
@labels_option
@metric_option
@base.task_option
@base.measuring_option(
    "--duration",
    type=Real(min=0),
    help="Seconds of latency runs for each model; 0 skips them."
    f"  [default: {DURATION_S}, or 0 where --for names another CPU]",
)
@tuning_options
@base.calibration_option(
    "--repair",
    "repairs",
    type=click.Choice(REPAIRS),
    help="Repair to try, kept where it helps.  [default: adaround; none with --effort 0]",
)
@config_options
@target_options(lambda option: True)
@model_options
@build_options
@calibration_options
@cluster_options
@resume_option
@json_option
def build(
    model: Path,
    out: Path,
    cache: Path | None,
    eval_images: str | None,
    float_model: Path | None,
    labels: Path | None,
    metric: str | None,
    task: str | None,
    duration: float | None,
    tuning: Tuning,
    gates: Gates,
    repairs: str | None,
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
    """Calibrate MODEL (or reuse its calibration), build int8 engines, measure, report.

    A Q/DQ MODEL is built with its own scales; --images is then optional, and only for measuring.

    If a target fails, the report gives the reason, the others are built, and the exit code is 1. An
    engine whose verdict is "unusable" gives exit code 3, unless --accept is given.

    \b
    Examples:
      calib8 build model.onnx --images photos/ --preprocess imagenet
      calib8 build model.onnx --images list.txt --target onnxruntime,tensorrt
      calib8 build model.onnx --images photos/ --target ascend --soc Ascend310P3
      calib8 build net.py:make --input 1x3x224x224 --images photos/
      calib8 build net.qdq.onnx --float net.onnx --images photos/ --target onnxruntime,ascend
      calib8 build --config build/calib8.toml --target tensorrt
      calib8 build model.onnx --images photos/ --quiet --json - | jq .engines
    """  # noqa: D301 (click reads the backspace)
    from deploy.feed.evaluation import read_labels
    from deploy.frontends import is_quantized
    from deploy.pipeline.build import build_with
    from deploy.pipeline.build_options import BuildOptions
    from deploy.report import to_screen, to_text

    if not images.dataset.source and not images.script:
        if not is_quantized(model):
            refuse_no_images()  # only a Q/DQ model needs none
        if eval_images is None:
            base.refuse_image_flags()
    dataset = images.calibration()
    options = BuildOptions(
        calibration=replace(
            calibration,
            cache=replace(calibration.cache, path=cache),
            until_stable=images.until_stable,
            threads=images.threads,
            scheduler=scheduler,
            resume=resume,
        ),
        targets=targets,
        out=out,
        float_model=float_model,
        evaluation=images.evaluation(eval_images),
        labels=read_labels(labels) if labels else None,
        metric=metric,
        task=task,
        duration_s=duration,
        tuning=tuning,
        gates=gates,
        repairs=repairs,
        settings=settings_text(),
    )
    resolved_model = resolve_model(model, input_texts, weights)
    report = build_with(resolved_model, dataset if dataset.source else None, options)
    if verbose:
        say_lines(to_text(report))
    else:
        say_screen(to_screen(report))
    end_with_verdicts(report, json_path, accept=gates.accept)


def end_with_verdicts(report: Report, json_path: Path | None, *, accept: bool = False) -> None:
    """Write the JSON, and end with code 1 if a target failed, or 3 if an engine is unusable.

    `accept`: end with 0 even if an engine is unusable. Without text on stdout, failures, verdicts
    that are not good, and warnings are printed on stderr.
    """
    from deploy.report import to_json
    from deploy.report.screen import serious_findings

    if is_text_suppressed():
        for sentence in serious_findings(report):
            say(f"calib8: {sentence}", err=True)
    put_json(json_path, lambda: to_json(report))
    if report.failed:
        click.get_current_context().exit(1)
    if report.unusable and not accept:
        click.get_current_context().exit(3)
