"""`calib8 ascend`: Ascend's own files, made, checked, and the search for what stays in float.

What `calib8 ascend deploy` and `calib8 ascend convert` share: where files go, and a trial.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.base import (
    FILE,
    CommandArguments,
    Real,
    json_option,
    quietable,
    shows_progress,
)
from deploy.commands.build import end_with_verdicts, labels_option
from deploy.commands.calibration_options import (
    keep_float_option,
    refresh_option,
    require_cache_option,
)
from deploy.commands.image_options import (
    ImageArguments,
    image_options,
    input_options,
    parse_shape,
    shape_option,
)
from deploy.commands.model_options import target_field_options
from deploy.errors import ConfigError, counted
from deploy.files import atomic
from deploy.targets import Ascend
from deploy.targets.ascend.preparation import prepare_model
from deploy.targets.options import declared_options
from deploy.terminal import say, say_screen

if TYPE_CHECKING:
    from deploy.pipeline.ascend_auto import AutoCalibration
    from deploy.report import Report

_FILE_FLAGS = frozenset(
    option.flag for option in declared_options(Ascend) if not option.changes_observations
)


def _gather_deployment(arguments: CommandArguments) -> None:
    """Put Ascend's options in as `target`, and a `TrialInputs` as `inputs`."""
    from deploy.pipeline.deployment import TrialInputs

    dataset = arguments.pop("dataset")
    if dataset is not None:
        base.refuse_beside("--images", "shapes")
    shapes = dict(map(parse_shape, arguments.pop("shapes")))
    arguments["inputs"] = TrialInputs(dataset=dataset, shapes=shapes)
    arguments["target"] = Ascend(**arguments.pop("target_values").get("ascend", {}))


# the output folder, trial inputs, and Ascend's options that do not affect calibration
deployment_options = base.gathered_options(
    _gather_deployment,
    (
        base.general_option("-o", "--out", type=FILE, required=True, help="Output folder."),
        shape_option(),
        input_options("Compare the outputs with the model's on these"),
        target_field_options(lambda option: option.flag in _FILE_FLAGS),
        base.threads_option(section=base.GENERAL),
        base.general_option(
            "--force", is_flag=True, help="Overwrite files that calib8 did not write."
        ),
        json_option,
    ),
)


def _print_deployment(report: Report, json_path: Path | None) -> None:
    """Print the report on written files; an unusable engine is no failure here."""
    from deploy.report import to_screen

    say_screen(to_screen(report))
    end_with_verdicts(report, json_path, accept=True)


@click.group()
def ascend() -> None:
    """Make and check the files of an Ascend deployment.

    \b
    Examples:
      calib8 ascend config model.onnx -o quant.json
      calib8 ascend check model_record.txt --model model.onnx
      calib8 ascend auto model.onnx --images photos/ --max-loss 0.02
      calib8 ascend deploy model.onnx edited_record.txt -o build/
      calib8 ascend convert net.qdq.onnx -o build/ --images photos/
    """  # noqa: D301 (click reads the backspace)


@ascend.command(short_help="The default configuration of a model, to be edited.")
@shows_progress
@click.argument("model", type=FILE)
@base.out_option(type=base.OutputFile("configuration"), help="File to write, such as quant.json.")
@click.option(
    "--batch-num",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Batches that AMCT calibrates with.",
)
@click.option("--symmetric", is_flag=True, help="Activations without offset.")
@click.option(
    "--from", "source", type=FILE, help="Configuration to convert (.cfg or JSON), not the default."
)
def config(model: Path, out: Path, batch_num: int, symmetric: bool, source: Path | None) -> None:
    """Write the quant config of MODEL, which is JSON."""
    from deploy.frontends import load
    from deploy.targets.ascend.config import default_config, write_config
    from deploy.targets.ascend.existing_files import read_any_config

    if out.suffix == ".cfg":  # the suffix of the simplified form
        raise ConfigError(f"a quant config is JSON, got {out}; name it quant.json")
    if source is not None:
        base.refuse_given("batch_num", "symmetric", without="the default configuration")
    _, graph = prepare_model(load(model).model)  # the layers as Ascend quantizes them
    if source is None:
        quant_config = default_config(graph, batch_num=batch_num, activation_offset=not symmetric)
    else:
        quant_config = read_any_config(source, graph)
    atomic.write_text(out, write_config(quant_config))

    int8_layers = quant_config.enabled_layers()
    summary = f"{len(int8_layers)} of {counted(len(quant_config.layers), 'layer')} in int8"
    if quant_config.tensors:
        summary += f", {counted(len(quant_config.tensors), 'input')} moved in int8"
    say(f"{out}: {summary}")
    for note in quant_config.notes:
        say(f"  {note}")
    for name, reason in graph.float_reasons.items():
        if name not in int8_layers:
            say(f"  float  {name}: {reason}")


@ascend.command(short_help="Whether a file is what ATC and AMCT take.")
@shows_progress
@click.argument("path", type=FILE, metavar="FILE")
@click.option("--model", type=FILE, help="The float model that it is for.")
def check(path: Path, model: Path | None) -> None:
    """Check FILE: a record, a quant config, a simplified .cfg, an AIPP file or a deploy model."""
    from deploy.calibration.observation import CalibrationSubject
    from deploy.frontends import load
    from deploy.targets.ascend.existing_files import check_file

    subject = None
    if model is not None:
        subject = CalibrationSubject(loaded=load(model), sample_count=0, user_model=model)
    say(f"{path}: {check_file(path, subject)}")


@ascend.command(
    cls=base.SectionedCommand,
    short_help="Leave the worst layers in float until a loss budget holds.",
)
@quietable()
@base.model_argument
@base.general_option("-o", "--out", type=FILE, default=Path("build"), help="Output folder.")
@base.calibration_option(
    "--ascend-config", type=base.INPUT, help="AMCT's simplified .cfg, or its quant config JSON."
)
@base.calibration_option(
    "--amct-batch",
    type=click.IntRange(min=1),
    help="Images in a batch of HFMG, DMQ and batch_num.",
)
@base.measuring_option(
    "--eval-images", type=base.IMAGE_SOURCE, help="Evaluation images; a list file may hold labels."
)
@labels_option
@base.measuring_option(
    "--max-loss",
    type=Real(0, 1),
    default=0.01,
    help="Loss that is allowed: of top-1 accuracy with labels, else of mean cosine of the outputs.",
)
@base.calibration_option(
    "--strategy",
    type=click.Choice(["gain", "binary-search"]),
    default="gain",
    help="How layers are chosen: gain, by the loss at the outputs, after other searches, DMQ and"
    " adaptive rounding were tried; binary-search, the first layers of AMCT's ranking.",
)
@image_options
@keep_float_option
@require_cache_option
@refresh_option
@base.verbose_option
def auto(
    model: Path,
    out: Path,
    ascend_config: Path | None,
    amct_batch: int | None,
    eval_images: str | None,
    labels: Path | None,
    max_loss: float,
    strategy: str,
    images: ImageArguments,
    keep_float: tuple[str, ...],
    require_cache: bool,
    refresh: bool,
    verbose: bool,
) -> None:
    """Leave as few layers of MODEL in float as --max-loss allows, and write the files.

    If no split holds it, no model is written, and the exit code is 1.
    """
    from deploy.calibration.reuse import CachePolicy
    from deploy.feed.annotations import Annotations
    from deploy.feed.evaluation import BY_FOLDER, apply_labels, read_labels
    from deploy.files.manifest import RECORDS
    from deploy.pipeline import ascend_auto
    from deploy.pipeline.build_options import CalibrationOptions
    from deploy.pipeline.calibration_setup import calibrate_with

    evaluation = images.evaluation(eval_images)
    if labels is not None and evaluation is None:
        raise ConfigError("labels are of evaluation images, got none; give --eval-images")
    label_values = read_labels(labels) if labels else None
    if isinstance(label_values, Annotations):
        raise ConfigError(
            f"the loss here is of classes or cosines, got objects in {labels}; calib8 build"
            " --ascend-config judges objects"
        )
    target = ascend_auto.AscendAutoTarget(
        config=ascend_config,
        amct_batch=amct_batch,
        has_all_searches=strategy == ascend_auto.GAIN,
    )
    cache_path = out / RECORDS / f"{model.stem}.cache"
    policy = CachePolicy(path=cache_path, require=require_cache, refresh=refresh)
    ascend_auto.refuse_foreign_files(target, out, model.stem)
    options = CalibrationOptions(cache=policy, threads=images.threads, float_nodes=keep_float)
    calibration = calibrate_with(model, images.dataset, options, targets=[target])
    if verbose:
        say(calibration.cost)

    evaluation_feed = calibration.feed  # evaluated on if there are no evaluation images
    if evaluation is not None:
        evaluation_feed = calibration.loaded.open_samples(
            evaluation, labels_by_folder=label_values == BY_FOLDER
        )
        apply_labels(label_values, evaluation_feed)  # those of a file: a class number a line
    result = ascend_auto.auto_calibrate(
        target,
        calibration,
        evaluation_feed,
        folder=out,
        max_loss=max_loss,
        strategy=strategy,
        threads=images.threads,
        say=say,
    )

    _say_result(result, model)


def _say_result(result: AutoCalibration, model: Path) -> None:
    """Print what was chosen, the files, and the build that goes on from them.

    `model`: the user's file.
    """
    from deploy.pipeline.ascend_auto import FINAL

    for note in result.config.notes:
        say(note)
    if result.int8_layers is not None:
        float_count = sum(not layer.quant_enable for layer in result.config.layers.values())
        say(f"{counted(result.int8_layers, 'layer')} in int8, {float_count} in float.")
        for note in result.notes:
            say(note)
    for path in result.paths:
        say(f"  {path}")
    if result.int8_layers is None:  # no model was written: end as a build whose target failed
        say(f"calib8: ascend failed: {result.failure} {quote(str(model))}", err=True)
        click.get_current_context().exit(1)

    # the repaired model, if there is one
    path_by_name = {path.name: path for path in result.paths}
    built_model = path_by_name.get(f"{model.stem}_modified_model.onnx", model)
    say(
        f"The report and the atc script: calib8 build {quote(str(built_model))} --target ascend"
        f" --ascend-config {quote(str(path_by_name[FINAL]))}, with the same options of the images"
        " (--images, --preprocess, --limit ...)."
    )


@ascend.command("deploy", cls=base.SectionedCommand, short_help="Files by a record's scales.")
@quietable()
@base.model_argument
@click.argument("record", type=base.INPUT, required=False)
@base.calibration_option(
    "--cache",
    type=base.INPUT,
    metavar="FILE",
    help="In place of RECORD: a TensorRT calibration cache with the scales of the layers' inputs;"
    " the scales of weights are those of ARQ.",
)
@base.calibration_option(
    "--ascend-config",
    type=base.INPUT,
    metavar="FILE",
    help="Configuration of RECORD, if it does not fold BatchNormalization.",
)
@deployment_options
def deploy_scales(
    model: Path,
    record: Path | None,
    cache: Path | None,
    ascend_config: Path | None,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Write deploy and fake-quant models of MODEL with the scales of RECORD, as AMCT's save_model.

    RECORD may be AMCT's or calib8's, edited or not; layers without an entry stay float. Nothing is
    calibrated. With --images the result is compared with MODEL.

    \b
    Examples:
      calib8 ascend deploy model.onnx edited_record.txt -o build/ --soc Ascend310P3
      calib8 ascend deploy model.onnx record.txt -o build/ --images photos/
      calib8 ascend deploy model.onnx --cache model.cache -o build/
    """  # noqa: D301 (click reads the backspace)
    from deploy.pipeline.deployment import deploy

    report = deploy(model, record, cache=cache, config=ascend_config, **options)
    _print_deployment(report, json_path)


@ascend.command("convert", cls=base.SectionedCommand, short_help="Files of a Q/DQ model.")
@quietable()
@click.argument("model", type=base.MODEL_FILE, metavar="MODEL.QDQ.ONNX")
@base.calibration_option(
    "--keep-rounding/--no-keep-rounding",
    default=True,
    help="Let float operators, such as an Add, read the values that the model's pairs round to."
    " This takes four operators for each such tensor; without them the result is less exact.",
)
@deployment_options
def convert_pairs(model: Path, keep_rounding: bool, json_path: Path | None, **options: Any) -> None:
    """Write deploy and fake-quant models of a Q/DQ model with its own scales.

    The model may be of calib8 qat or export --qdq, ONNX Runtime, ModelOpt or NNCF. Weights keep
    their integers. With --images the deploy model is run and compared with the model in ONNX
    Runtime. (AMCT: convert_qat_model.)

    \b
    Examples:
      calib8 ascend convert net.qdq.onnx -o build/ --soc Ascend310P3
      calib8 ascend convert net.qdq.onnx -o build/ --images photos/
    """  # noqa: D301 (click reads the backspace)
    from deploy.pipeline.deployment import convert

    _print_deployment(convert(model, keep_rounding=keep_rounding, **options), json_path)
