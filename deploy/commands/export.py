"""`calib8 export`: a PyTorch model as ONNX, in float or with Q/DQ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base, given
from deploy.commands.choosing import raw_options
from deploy.commands.methods import method_options
from deploy.commands.model import torch_inputs, torch_model, torch_options
from deploy.commands.model_options import one_target
from deploy.commands.output import quietable
from deploy.commands.preprocessing import preprocess_options
from deploy.targets import TARGETS, Target
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    from deploy.method import Method

QDQ = "Quantization"  # with --qdq alone


@click.command(cls=base.SectionedCommand)
@quietable()
@click.argument("model")
@torch_options
@base.option(
    "-o",
    "--out",
    section=base.GENERAL,
    type=click.Path(path_type=Path),
    required=True,
    help="ONNX file to write.",
)
@base.option(
    "--opset",
    section=base.GENERAL,
    default=18,
    show_default=True,
    type=int,
    help="Opset of the ONNX domain.",
)
@base.option(
    "--static-batch",
    section=base.GENERAL,
    is_flag=True,
    help="Keep the batch of --input fixed.",
)
@base.option(
    "--qdq",
    section=base.GENERAL,
    is_flag=True,
    help="Quantize, with QuantizeLinear and DequantizeLinear.",
)
@one_target(QDQ)
@base.option(
    "--mode",
    section=QDQ,
    default="static",
    show_default=True,
    help="Kind of quantization: static, dynamic or weight-only.",
)
@base.option("--images", section=base.IMAGES, metavar="PATH", help="Images to calibrate with.")
@base.option(
    "--limit",
    section=base.IMAGES,
    type=click.IntRange(min=1),
    help="Use at most so many images.",
)
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
@base.retired("--ranges", "--method names the search, as for build")
@base.option("--only", section=QDQ, metavar="SUBMODULE", help="Quantize this part alone.")
@base.option(
    "--scales",
    section=QDQ,
    is_flag=True,
    help="Print every activation's scale and zero point.",
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
    raw_shape: str | None,
    raw_dtype: str | None,
    method: Method,
    asked: tuple[str, ...],
    **preprocess: str | None,
) -> None:
    """Export MODEL (file.py:factory or timm:NAME), check it against torch, say how they agree."""
    from deploy.commands.choosing import raw_from
    from deploy.commands.preprocessing import preprocess_from
    from deploy.errors import ConfigError
    from deploy.files.atomic import write_bytes
    from deploy.fx import export as exports
    from deploy.fx.coverage import coverage, refuse_float
    from deploy.fx.device import find_device, moved, refuse_meta
    from deploy.fx.fuse import norms_in_float
    from deploy.fx.images import batches_of
    from deploy.fx.int8_layers import weighted
    from deploy.fx.lift import argument_names
    from deploy.fx.modes import compare_modes, measure, quantized, report, scales_report
    from deploy.fx.prepare import target_of
    from deploy.fx.samples import in_float32
    from deploy.fx.search import search_for
    from deploy.fx.trace import submodule
    from deploy.graph.selection import select

    if not shapes and not sample:
        raise ConfigError("export runs the model and needs its --input shape, or a --sample")
    if not qdq:
        placing = [f"Target {name}" for name in TARGETS]
        alone = (QDQ, base.IMAGES, base.CALIBRATION, *placing)
        given.refuse_without("--qdq", [flag for part in alone for flag in given.typed_in(part)])
    elif not images:
        given.refuse_without("--images", given.typed_in(base.IMAGES))
    if mode != "static":
        given.refuse_without("--mode static", list(asked))
    place = find_device(device)
    refuse_meta(place, "an exported model")
    module = torch_model(model, weights, device)
    if sentence := in_float32(module):
        say(sentence)
    inputs = tuple(
        x.float() if x.is_floating_point() else x for x in torch_inputs(module, shapes, sample)
    )
    if not qdq:
        exported = exports.to_onnx(module, inputs, opset=opset, dynamic_batch=not static_batch)
        say(str(exports.check_float(exported, module, inputs)))
    else:
        if mode == "static" and not images:
            raise ConfigError("static ranges come from data: give --images, or another --mode")
        how = preprocess_from(preprocess)
        source = raw_from({"raw_shape": raw_shape, "raw_dtype": raw_dtype}, images or "")
        names = argument_names(module, len(inputs))
        batches = batches_of(source, inputs, names, how, limit) if images else [inputs]
        batches = moved(batches, place)
        part = submodule(module, only) if only else module
        kept = {"leaves": leaves, "skip": select(weighted(part), skip)}
        search = search_for(target, method if asked else None)
        converted = quantized(
            module, inputs, batches, mode=mode, target=target, only=only, search=search, **kept
        )
        covered = coverage(converted, module)
        refuse_float(covered)
        exported = exports.to_onnx(converted, inputs, opset=opset, dynamic_batch=not static_batch)
        say(str(covered))
        if mode == "static":
            say(f"ranges by {search.label}")
        kernels = target_of(target).runs_here
        say(str(exports.compare(exported, converted, batches, kernels=kernels)))
        if left := norms_in_float(converted):
            say(left)
        results = (
            compare_modes(module, inputs, batches, target=target, search=search)
            if all_modes
            else []
        )
        say_lines(report(results or [measure(mode, module, converted, batches)]))
        if scales:
            say_lines(scales_report(converted))
    write_bytes(out, exported.SerializeToString(deterministic=True))
    say(f"{out}: opset {opset}, {out.stat().st_size} bytes")
