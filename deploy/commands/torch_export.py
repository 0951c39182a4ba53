"""`calib8 export`: export a PyTorch model to ONNX, in float or with Q/DQ.

`calib8 qat`: train a PyTorch model for int8 and export it with Q/DQ.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.base import quietable
from deploy.commands.calibration_options import given_method_flags, method_options
from deploy.commands.image_options import (
    parse_preprocess,
    pop_source,
    preprocess_options,
    raw_options,
)
from deploy.commands.model_options import TorchArguments, one_target, torch_options
from deploy.errors import ConfigError
from deploy.files.manifest import write_model
from deploy.method import Method
from deploy.targets import TARGETS, Target
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    from deploy.fx.checked_export import QuantizedExport

QDQ = "Quantization"  # section of options that need --qdq
_qdq_option = partial(base.option, section=QDQ)


@base.sectioned_command()
@quietable()
@torch_options
@base.out_option(type=base.OutputFile("model"), help="ONNX file to write.")
@base.general_option("--opset", default=18, type=int, help="Opset of the ONNX domain.")
@base.general_option("--static-batch", is_flag=True, help="Keep the batch of --input fixed.")
@base.general_option(
    "--qdq", is_flag=True, help="Quantize, with QuantizeLinear and DequantizeLinear."
)
@one_target(QDQ)
@_qdq_option(
    "--mode",
    default="static",
    help="Kind of quantization: static, dynamic or weight-only.",
)
@base.image_option(
    "--images", type=base.IMAGE_SOURCE, metavar="PATH", help="Images to calibrate with."
)
@base.image_option("--limit", type=click.IntRange(min=1), help="Use at most so many images.")
@_qdq_option(
    "--leaf",
    "leaves",
    multiple=True,
    metavar="NAME|CLASS",
    help="Module to keep whole and in float, by its name or class.",
)
@_qdq_option(
    "--keep-float",
    "skip",
    multiple=True,
    metavar="LAYERS",
    help="Layers to leave in float: a module's name, a pattern such as 'layer1.*', op:Linear, or"
    " @FILE with one of these a line. May be repeated.",
)
@_qdq_option("--only", metavar="SUBMODULE", help="Quantize this part alone.")
@_qdq_option("--scales", is_flag=True, help="Print every activation's scale and zero point.")
@_qdq_option("--modes", "all_modes", is_flag=True, help="Compare all modes too.")
@preprocess_options
@raw_options
@method_options
def export(
    source: TorchArguments,
    out: Path,
    opset: int,
    static_batch: bool,
    qdq: bool,
    target: Target,
    mode: str,
    images: str | None,
    limit: int | None,
    leaves: tuple[str, ...],
    skip: tuple[str, ...],
    only: str | None,
    scales: bool,
    all_modes: bool,
    method: Method | None,
    **image_options: str | None,
) -> None:
    """Export MODEL (file.py:factory or timm:NAME), check it against torch, say how they agree."""
    from deploy.fx.checked_export import export_float, export_quantized
    from deploy.fx.model_inputs import convert_to_float32

    source.refuse_without_inputs("export")
    _refuse_unused_flags(qdq, images, mode)
    source.refuse_meta_device("an exported model")

    module = source.load()
    if note := convert_to_float32(module):
        say(note)
    inputs = source.inputs(module)
    dynamic_batch = not static_batch
    if not qdq:
        onnx_model, agreement = export_float(
            module, inputs, opset=opset, dynamic_batch=dynamic_batch
        )
        say(str(agreement))
    else:
        # this removes --raw-shape and --raw-dtype: only the options of preprocessing remain
        image_source = pop_source(image_options, images or "")
        preprocess = parse_preprocess(image_options)
        result = export_quantized(
            module,
            inputs,
            image_source or None,
            target=target,
            mode=mode,
            method=method,
            preprocess=preprocess,
            limit=limit,
            leaves=leaves,
            skip=skip,
            only=only,
            opset=opset,
            dynamic_batch=dynamic_batch,
            all_modes=all_modes,
        )
        _say_quantized(result, scales)
        onnx_model = result.model
    write_model(out, onnx_model)
    say(f"{out}: opset {opset}, {out.stat().st_size} bytes")


def _refuse_unused_flags(qdq: bool, images: str | None, mode: str) -> None:
    """Refuse flags that need --qdq, images, or fixed scales, where these are not given."""
    if not qdq:
        target_sections = [f"Target {name}" for name in TARGETS]
        qdq_flags = []
        for section in (QDQ, base.IMAGES, base.CALIBRATION, *target_sections):
            qdq_flags += base.given_flags_in(section)
        base.refuse_flags(qdq_flags, without="--qdq")
    elif not images:
        base.refuse_image_flags()
    if mode != "static":
        base.refuse_flags(given_method_flags(), without="--mode static")


@base.sectioned_command()
@quietable()
@click.argument("script")
@one_target(base.TARGETS)
@click.option(
    "--bits", default=8, show_default=True, type=int, help="Bits of weights and activations."
)
@click.option(
    "--ranges",
    type=click.Choice(["kept", "follow", "learned"]),
    help="How ranges change while training, in place of the task's own: kept as calibrated,"
    " following the data, or learned with the weights.",
)
@click.option(
    "--epochs", type=click.IntRange(min=0), help="Epochs to train, in place of the task's own."
)
@click.option("--teacher", metavar="FILE.PY:FACTORY", help="Float model to distil from.")
@click.option("--teacher-weights", type=base.FILE, help="State dict of the teacher.")
@click.option(
    "--distil", multiple=True, metavar="STUDENT=TEACHER", help="Modules whose outputs are compared."
)
@click.option(
    "--checkpoint", type=base.FILE, help="Checkpoint, written after each epoch and resumed from."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Device to train on: cpu, cuda or cuda:1; batches are moved there.",
)
@click.option("--amp", is_flag=True, help="Train with torch.autocast in bfloat16.")
@click.option("--scales", is_flag=True, help="Print every activation's scale and zero point.")
@base.out_option(type=base.OutputFile("model"), help="ONNX file to write.")
@method_options
def qat(
    script: str,
    target: Target,
    bits: int,
    ranges: str | None,
    epochs: int | None,
    teacher: str | None,
    teacher_weights: Path | None,
    distil: tuple[str, ...],
    checkpoint: Path | None,
    device: str,
    amp: bool,
    scales: bool,
    out: Path,
    method: Method | None,
) -> None:
    """Train the task that SCRIPT (train.py:setup) returns for TARGET's int8, and export it.

    \b
    from calib8.torch import Task
    def setup():
        return Task(model=..., inputs=[...], batches=..., loss=..., evaluate=...)

    --method with its parameters, --ranges and --epochs override those of the task.
    """  # noqa: D301 (click reads the backspace)
    from deploy.fx.checked_export import export_trained
    from deploy.fx.device import find_device, refuse_meta
    from deploy.fx.source import call_factory, load_module, wrap_user_errors
    from deploy.fx.task import Task

    if teacher is None:
        base.refuse_given("teacher_weights", without="--teacher")
    torch_device = find_device(device)
    refuse_meta(torch_device, "a training")
    task = call_factory(script)
    if not isinstance(task, Task):
        raise ConfigError(f"{script} must return a calib8.torch.Task, got {type(task).__name__}")
    typed_values: dict[str, Any] = {  # field of the task -> value; None if it was not typed
        "method": method,
        "ranges": ranges,
        "epochs": epochs,
        "amp": amp or None,
        "teacher": None if teacher is None else load_module(teacher, teacher_weights),
        "distil": list(map(_split_pair, distil)) or None,
    }
    changes = {name: value for name, value in typed_values.items() if value is not None}
    task = replace(task, **changes)

    with wrap_user_errors(script):
        result = export_trained(
            task,
            target=target,
            bits=bits,
            checkpoint=checkpoint,
            # without the flag, the model is trained on the device where the task made it
            device=torch_device if base.given_flags("device") else None,
            report=say,
        )
    _say_quantized(result, scales)
    write_model(out, result.model)
    say(f"{out}: {out.stat().st_size} bytes")


def _say_quantized(result: "QuantizedExport", scales: bool) -> None:
    """Print the result of a quantized export; with `scales` that of every activation too."""
    from deploy.fx.modes import format_scales

    say_lines(result.to_screen())
    if scales:
        say_lines(format_scales(result.module))


def _split_pair(text: str) -> tuple[str, str]:
    """Split `student=teacher`; a text without = is the name of both."""
    student, equals, teacher = text.partition("=")
    return student, teacher if equals else student
