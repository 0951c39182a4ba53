"""`calib8 bench` and `calib8 check`: measure files as they are; `check` judges them too."""

from __future__ import annotations

from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.base import (
    THREADS,
    Real,
    html_option,
    json_option,
    parse_batches,
    put_json,
    quietable,
)
from deploy.commands.build import end_with_verdicts, labels_option, metric_option
from deploy.commands.image_options import (
    ImageArguments,
    image_options,
    input_options,
    parse_shape,
    shape_option,
)
from deploy.commands.model_options import TargetValues, make_target, target_field_options
from deploy.commands.settings import max_loss_option, min_speedup_option
from deploy.files.atomic import write_text
from deploy.metrics import DURATION_S
from deploy.terminal import say_screen

if TYPE_CHECKING:
    from deploy.feed.feed import Dataset


@base.sectioned_command(short_help="Latency of one or two models, side by side.")
@quietable("--json", "--html")
@click.argument("engine", type=base.InputPath("a model"))
@base.model_option(
    "--against",
    type=base.InputPath("a model"),
    metavar="MODEL",
    help="A second model, timed in turns with ENGINE; usually the float model that ENGINE was"
    " built from.",
)
@base.model_option(
    "--runtime",
    type=click.Choice(["onnxruntime", "openvino"]),
    default="onnxruntime",
    help="With openvino, ENGINE runs there too, beside ONNX Runtime.",
)
@base.measuring_option(
    "--threads", type=THREADS, help="Threads of an engine on the CPU.  [default: every core]"
)
@base.measuring_option(
    "--warm-up",
    "warmup_ms",
    type=Real(min=0),
    default=200,
    metavar="MS",
    help="Untimed runs before the timed ones, in milliseconds, for each model.",
)
@base.measuring_option(
    "--duration",
    type=Real(min=0),
    default=DURATION_S,
    metavar="S",
    help="Time measured, in seconds, for each model; 10 runs at the least.",
)
@shape_option("  [default: what the build beside ENGINE calibrated with]")
@base.measuring_option(
    "--seed", type=click.IntRange(min=0), default=0, help="Seed of the random inputs."
)
@base.measuring_option(
    "--batch",
    "batches",
    callback=parse_batches,
    metavar="N,N,...",
    help="Measure at each of these batches, such as 1,2,4,8; the model's batch must be dynamic. All"
    " other figures are those of the smallest batch.",
)
@base.measuring_option(
    "--profile",
    is_flag=True,
    help="Also list the time of each kernel, the slowest first, and for two models of each kind of"
    " kernel; measured in separate runs.",
)
@base.task_option
@json_option
@html_option
@input_options("Run on these in place of random inputs, and report how far the outputs differ")
@target_field_options(lambda option: option.changes_runs)
def bench(
    engine: Path,
    against: Path | None,
    runtime: str,
    threads: int | None,
    warmup_ms: float,
    duration: float,
    shapes: tuple[str, ...],
    seed: int,
    target_values: TargetValues,
    batches: tuple[int, ...],
    profile: bool,
    task: str | None,
    dataset: Dataset | None,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Measure the latency of ENGINE: an ONNX model on the CPU, or a target's engine on its device.

    Inputs are random. With --images they are real, and the outputs are compared too. Metrics and
    percentiles are trtexec's.

    \b
    Examples:
      calib8 bench build/model.int8.onnx --against model.onnx
      calib8 bench build/model.int8.onnx --runtime openvino --images held/
      calib8 bench build/model.int8.onnx --batch 1,2,4,8 --html batches.html
      calib8 bench build/model.int8.onnx --against model.onnx --profile
      calib8 bench model.onnx --shape images:1x3x640x640 --threads 1 --html latency.html
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.benchmark import bench as run_benchmark
    from deploy.report import to_html, to_json, to_screen

    if dataset is not None:
        base.refuse_beside("--images", "shapes", "seed")
    report = run_benchmark(
        engine,
        against=against,
        threads=threads,
        warmup_ms=warmup_ms,
        duration_s=duration,
        shapes=dict(map(parse_shape, shapes)),
        seed=seed,
        targets=list(starmap(make_target, target_values.items())),
        batches=batches,
        profile=profile,
        task=task,
        runtime=runtime,
        images=dataset,
    )
    if html_path is not None:
        write_text(html_path, to_html(report))
    say_screen(to_screen(report))
    put_json(json_path, lambda: to_json(report))


@base.sectioned_command()
@quietable()
@click.argument("path", type=base.InputPath("the folder of a build, or an engine"))
@base.model_option(
    "--against",
    type=base.InputPath("a model"),
    metavar="MODEL",
    help="The float model.  [default: the one that the build names]",
)
@image_options
@labels_option
@metric_option
@base.task_option
@max_loss_option
@min_speedup_option
@base.measuring_option(
    "--duration",
    type=Real(min=0),
    default=DURATION_S,
    help="Seconds of latency runs for each model; 0 skips them.",
)
@target_field_options(lambda option: option.changes_runs)
@json_option
def check(
    path: Path,
    against: Path | None,
    images: ImageArguments,
    labels: Path | None,
    metric: str | None,
    task: str | None,
    max_loss: float | None,
    min_speedup: float | None,
    duration: float,
    target_values: TargetValues,
    json_path: Path | None,
) -> None:
    """Check the files of a build, or one engine, on new images; nothing is built or written.

    The verdicts are those of a build. Preprocessing, task and limits are the build's, unless the
    options set others. The exit code is 3 if an engine is unusable, and 1 if a file of a target is
    missing, cannot be run, or was changed and is not run. A script that is missing or was changed
    gives a warning.

    \b
    Examples:
      calib8 check build/ --images held/ --labels held.json --max-loss 0.01 --min-speedup 1.2
      calib8 check build/ --images held.txt --quiet --json -
      calib8 check model.int8.onnx --against model.onnx --images held/ --preprocess imagenet
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.build_check import check as run_check
    from deploy.report import to_screen
    from deploy.report.verdict import Gates

    report = run_check(
        path,
        images.dataset,
        against=against,
        labels=labels,
        metric=metric,
        task=task,
        gates=Gates(max_loss=max_loss, min_speedup=min_speedup),
        targets=list(starmap(make_target, target_values.items())),
        duration_s=duration,
        threads=images.threads,
    )
    say_screen(to_screen(report))
    end_with_verdicts(report, json_path)
