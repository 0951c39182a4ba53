"""Commands that look at models and builds: inspect, compare, explain, report, verify and doctor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.base import Real, json_option, put_json, quietable, shows_progress
from deploy.commands.calibration_options import keep_float_option
from deploy.commands.image_options import ImageArguments, image_options, input_options
from deploy.commands.model_options import model_options, resolve_model, target_options
from deploy.terminal import say_lines, say_screen

if TYPE_CHECKING:
    from deploy.feed.feed import Dataset
    from deploy.targets import Target


@base.sectioned_command()
@quietable("--json")
@click.argument("model", type=base.InputPath("a model"))
@base.general_option(
    "--all",
    "everything",
    is_flag=True,
    help="List every node, not only how many of each kind.",
)
@target_options(lambda option: option.changes_placement)
@model_options
@keep_float_option
@json_option
def inspect(
    model: Path,
    targets: list[Target],
    everything: bool,
    input_texts: tuple[str, ...],
    weights: Path | None,
    keep_float: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Show what would be quantized in MODEL and why not; nothing is run or written.

    \b
    Examples:
      calib8 inspect model.onnx
      calib8 inspect model.onnx --target tensorrt,ascend --keep-float op:Sigmoid
      calib8 inspect model.onnx --json - | jq '.[0].tensors'
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.inspection import inspect as inspect_model
    from deploy.frontends import load

    loaded = load(resolve_model(model, input_texts, weights))
    inspection = inspect_model(loaded, targets=targets, float_nodes=keep_float)
    say_lines(inspection.to_screen(everything=everything))
    put_json(json_path, inspection.to_json)


_DEFAULT_IMAGES = 8  # without --limit; a few images are enough to find the tensor


@base.sectioned_command()
@quietable("--json")
@click.argument("first", type=base.MODEL_FILE)
@click.argument("second", type=base.MODEL_FILE)
@image_options
@base.measuring_option(
    "--min-sqnr",
    type=Real(),
    default=20.0,
    metavar="DB",
    help="SQNR in dB; the first tensor below it is where the two models differ.",
)
@json_option
def compare(
    first: Path,
    second: Path,
    images: ImageArguments,
    min_sqnr: float,
    json_path: Path | None,
) -> None:
    """Find the first tensor where two ONNX models differ; FIRST is the reference.

    Both run in ONNX Runtime. Tensors that both models have are compared in the order of the graph,
    outputs last. In a Q/DQ model, the values that the next layers read are compared. 8 images are
    run unless --limit is given.

    \b
    Example:
      calib8 compare model.onnx build/model.int8.onnx --images held/
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.comparison import compare as compare_models

    dataset = replace(images.dataset, limit=images.dataset.limit or _DEFAULT_IMAGES)
    comparison = compare_models(
        first,
        second,
        dataset,
        min_sqnr_db=min_sqnr,
        threads=images.threads,
    )
    put_json(json_path, comparison.to_json)
    say_screen(comparison.to_screen())


@base.sectioned_command()
@quietable("--json")
@click.argument("folder", type=base.BUILD_FOLDER)
@base.general_option(
    "--target",
    metavar="NAME",
    help="Explain this target only.  [default: every target of the build]",
)
@base.general_option(
    "--all",
    "everything",
    is_flag=True,
    help="Print every row of every table, not only the worst ones.",
)
@base.image_option(
    "--model", type=base.FILE, help="The float model, if it has moved since the build."
)
@input_options(
    "Run the float model and the int8 models on these, and list the images that lose most"
)
@base.threads_option(section=base.IMAGES)
@json_option
def explain(
    folder: Path,
    target: str | None,
    everything: bool,
    model: Path | None,
    dataset: Dataset | None,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Explain the build in FOLDER: which layers lose accuracy, why, and what was tried.

    It reads the report and the plan. Images are preprocessed as in the build, unless the
    options below say otherwise.

    \b
    Examples:
      calib8 explain build/
      calib8 explain build/ --target tensorrt --all
      calib8 explain build/ --images held/
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.explain_build import explain as explain_build

    if json_path == Path("-"):
        base.refuse_given("everything", without="the text")
    explanation = explain_build(
        folder, targets=target, images=dataset, model=model, threads=threads
    )
    put_json(json_path, explanation.to_json)
    say_screen(explanation.to_screen(everything=everything))


@base.sectioned_command()
@quietable("--json")
@click.argument("folders", nargs=-1, required=True, type=base.BUILD_FOLDER)
@json_option
def report(folders: tuple[Path, ...], json_path: Path | None) -> None:
    """Compare the builds in FOLDERS: verdict, speed, size, accuracy, and what differs.

    With one folder, its report is printed again. Nothing is run or measured; each speed-up is
    over the float model of the same build.

    \b
    Examples:
      calib8 report build/
      calib8 report a/ b/
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis import build_comparison
    from deploy.report import Report, to_screen

    comparison = build_comparison.report(*folders)  # the build's own report for a single folder
    if isinstance(comparison, Report):
        base.refuse_given("json_path", without="a second folder")
        say_screen(to_screen(comparison))
        return

    say_screen(comparison.to_screen())
    put_json(json_path, comparison.to_json)


@click.command()
@shows_progress
@click.argument("folder", type=base.BUILD_FOLDER)
def verify(folder: Path) -> None:
    """Check that the files in FOLDER are those of one build, complete and unchanged.

    Nothing is changed there. The calibration cache is checked too, also one that --cache named
    elsewhere. The exit code is 1 if a file is missing or was changed.

    \b
    Example:
      calib8 verify build/
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis import build_reader

    verification = build_reader.verify(folder)
    say_lines(verification.to_screen())
    if not verification.passed:
        click.get_current_context().exit(1)


@click.command()
@shows_progress
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show what is installed: versions, int8 on this CPU, and what every target can do.

    What is missing is listed with the command that installs it; the exit code is 0 even then.
    """
    from deploy.analysis import environment

    checks = environment.doctor()
    if as_json:
        import json

        say_lines(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        say_lines(checks.to_screen())
