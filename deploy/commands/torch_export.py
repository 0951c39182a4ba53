"""`calib8 export`: export a PyTorch model to ONNX, in float or with Q/DQ.

`calib8 qat`: train a PyTorch model for int8 and export it with Q/DQ.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from deploy.commands import base
from deploy.commands.base import quietable
from deploy.commands.calibration_options import method_options
from deploy.commands.image_options import (
    parse_preprocess,
    preprocess_options,
    raw_options,
    take_source,
)
from deploy.commands.model_options import one_target, torch_inputs, torch_model, torch_options
from deploy.errors import ConfigError
from deploy.files.manifest import write_model
from deploy.graph.index import match_patterns
from deploy.method import Method
from deploy.targets import TARGETS, Target
from deploy.terminal import say, say_lines

QDQ = "Quantization"  # section of options that need --qdq


@click.command(cls=base.SectionedCommand)
@quietable()
@click.argument("model")
@torch_options
@base.out_option(type=base.OutputFile("model"), help="ONNX file to write.")
@base.general_option("--opset", default=18, type=int, help="Opset of the ONNX domain.")
@base.general_option("--static-batch", is_flag=True, help="Keep the batch of --input fixed.")
@base.general_option(
    "--qdq", is_flag=True, help="Quantize, with QuantizeLinear and DequantizeLinear."
)
@one_target(QDQ)
@base.option(
    "--mode",
    section=QDQ,
    default="static",
    help="Kind of quantization: static, dynamic or weight-only.",
)
@base.image_option(
    "--images", type=base.IMAGE_SOURCE, metavar="PATH", help="Images to calibrate with."
)
@base.image_option("--limit", type=click.IntRange(min=1), help="Use at most so many images.")
@base.option(
    "--leaf",
    "leaves",
    section=QDQ,
    multiple=True,
    metavar="NAME|CLASS",
    help="Module to keep whole and in float, by its name or class.",
)
@base.option(
    "--keep-float",
    "skip",
    section=QDQ,
    multiple=True,
    metavar="LAYERS",
    help="Layers to leave in float: a module's name, a pattern such as 'layer1.*', op:Linear, or"
    " @FILE with one of these a line. May be repeated.",
)
@base.option("--only", section=QDQ, metavar="SUBMODULE", help="Quantize this part alone.")
@base.option(
    "--scales", section=QDQ, is_flag=True, help="Print every activation's scale and zero point."
)
@base.option("--modes", "all_modes", section=QDQ, is_flag=True, help="Compare all modes too.")
@preprocess_options
@raw_options
@method_options
def export(
    model: str,
    shapes: tuple[str, ...],
    sample: Path | None,
    weights: Path | None,
    device: str,
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
    method: Method,
    method_flags: tuple[str, ...],
    **words: str | None,
) -> None:
    """Export MODEL (file.py:factory or timm:NAME), check it against torch, say how they agree."""
    from deploy.fx import export as exports
    from deploy.fx.coverage import measure_coverage, refuse_unquantized
    from deploy.fx.device import find_device, move_tensors, refuse_meta
    from deploy.fx.fuse import norms_in_float
    from deploy.fx.int8_layers import find_weighted_layers
    from deploy.fx.lift import argument_names
    from deploy.fx.model_inputs import convert_to_float32
    from deploy.fx.modes import (
        compare_modes,
        format_modes,
        format_scales,
        measure_mode,
        quantize_model,
    )
    from deploy.fx.range_search import search_for
    from deploy.fx.task import read_batches
    from deploy.fx.trace import submodule

    if not shapes and not sample:
        raise ConfigError("export runs the model and needs its --input shape, or a --sample")
    if not qdq:
        placing = [f"Target {name}" for name in TARGETS]
        alone = (QDQ, base.IMAGES, base.CALIBRATION, *placing)
        base.refuse_without("--qdq", [flag for part in alone for flag in base.given_flags_in(part)])
    elif not images:
        base.refuse_without("--images", base.given_flags_in(base.IMAGES))
    if mode != "static":
        base.refuse_without("--mode static", list(method_flags))
    place = find_device(device)
    refuse_meta(place, "an exported model")
    module = torch_model(model, weights, device)
    if sentence := convert_to_float32(module):
        say(sentence)
    inputs = tuple(
        x.float() if x.is_floating_point() else x for x in torch_inputs(module, shapes, sample)
    )
    if not qdq:
        exported = exports.to_onnx(module, inputs, opset=opset, dynamic_batch=not static_batch)
        say(str(exports.check_float_export(exported, module, inputs)))
    else:
        if mode == "static" and not images:
            raise ConfigError("static ranges come from data: give --images, or another --mode")
        source = take_source(words, images or "")
        how = parse_preprocess(words)
        names = argument_names(module, len(inputs))
        batches = read_batches(source, inputs, names, how, limit) if images else [inputs]
        batches = move_tensors(batches, place)
        part = submodule(module, only) if only else module
        kept = {"leaves": leaves, "skip": match_patterns(find_weighted_layers(part), skip)}
        search = search_for(target, method if method_flags else None)
        converted = quantize_model(
            module, inputs, batches, mode=mode, target=target, only=only, search=search, **kept
        )
        covered = measure_coverage(converted, module)
        refuse_unquantized(covered)
        exported = exports.to_onnx(converted, inputs, opset=opset, dynamic_batch=not static_batch)
        say(str(covered))
        if mode == "static":
            say(f"ranges by {search.label}")
        runs_here = target.runs_here
        say(str(exports.compare_with_torch(exported, converted, batches, kernels=runs_here)))
        if left := norms_in_float(converted):
            say(left)
        if all_modes:
            results = compare_modes(module, inputs, batches, target=target, search=search)
        else:
            results = [measure_mode(mode, module, converted, batches)]
        say_lines(format_modes(results))
        if scales:
            say_lines(format_scales(converted))
    write_model(out, exported)
    say(f"{out}: opset {opset}, {out.stat().st_size} bytes")


@click.command(cls=base.SectionedCommand)
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
    method: Method,
    method_flags: tuple[str, ...],
) -> None:
    """Train the task that SCRIPT (train.py:setup) returns for TARGET's int8, and export it.

    \b
    from calib8.torch import Task
    def setup():
        return Task(model=..., inputs=[...], batches=..., loss=..., evaluate=...)

    --method with its parameters, --ranges and --epochs override those of the task.
    """  # noqa: D301 (click reads the backspace)
    from deploy.fx import export as exports
    from deploy.fx.convert import float_form
    from deploy.fx.coverage import measure_coverage, refuse_unquantized
    from deploy.fx.device import CPU, find_device, move_tensors, refuse_meta
    from deploy.fx.fuse import norms_in_float
    from deploy.fx.model_inputs import dict_input_note
    from deploy.fx.modes import format_modes, format_scales, measure_mode
    from deploy.fx.qat import Task, first_batches, train
    from deploy.fx.source import call_factory, load_module, wrap_user_errors
    from deploy.fx.task import order_inputs

    if teacher is None:
        base.refuse_without("--teacher", base.given_flags("teacher_weights"))
    place = find_device(device)
    refuse_meta(place, "a training")
    task = call_factory(script)
    if not isinstance(task, Task):
        raise ConfigError(f"{script} must return a calib8.torch.Task, got {type(task).__name__}")
    typed: dict[str, Any] = {
        "method": method if method_flags else None,
        "ranges": ranges,
        "amp": amp or None,
        "epochs": epochs,
        "teacher": None if teacher is None else load_module(teacher, teacher_weights),
        "distil": [_pair(text) for text in distil] or None,
    }
    task = replace(task, **{name: value for name, value in typed.items() if value is not None})
    task = order_inputs(task)
    if note := dict_input_note(task.model):
        say(note)
    with wrap_user_errors(script):
        trained = train(
            task,
            target=target,
            bits=bits,
            checkpoint=checkpoint,
            device=place if base.given_flags("device") else None,
            report=say,
        )
        batches = first_batches(task)
    covered = measure_coverage(trained.converted, task.model, [*(task.convert or {}).values()])
    refuse_unquantized(covered)
    say(str(covered))
    if trained.score_after is not None:
        say(f"after training ({bits} bits): {trained.score_after:.4f}")
    exported = exports.to_onnx(trained.converted, move_tensors(list(task.inputs), CPU))
    runs_here = target.runs_here
    say(str(exports.compare_with_torch(exported, trained.converted, batches, kernels=runs_here)))
    if left := norms_in_float(trained.converted):
        say(left)
    result = measure_mode("qat", float_form(trained.prepared), trained.converted, batches)
    say_lines(format_modes([result]))
    say("error and SQNR are of the trained model: its int8 form against its own weights in float")
    if scales:
        say_lines(format_scales(trained.converted))
    write_model(out, exported)
    say(f"{out}: {out.stat().st_size} bytes")


def _pair(text: str) -> tuple[str, str]:
    """`student=teacher`, or one name for both."""
    student, equals, teacher = text.partition("=")
    return student, teacher if equals else student
