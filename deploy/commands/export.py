"""`calib8 export`: a PyTorch model as ONNX, in float or with Q/DQ."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands.options import preprocess_options


@click.command()
@click.argument("model")
@click.option("--input", "shapes", multiple=True, metavar="SHAPE", help="1x3x224x224, batch first")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="ONNX file")
@click.option("--weights", type=click.Path(path_type=Path), help="a state dict to load")
@click.option("--opset", default=18, show_default=True, type=int, help="of the ONNX domain")
@click.option("--static-batch", is_flag=True, help="keep the batch of --input fixed")
@click.option("--qdq", is_flag=True, help="quantize, with QuantizeLinear and DequantizeLinear")
@click.option("--target", default="onnxruntime", show_default=True, help="whose grid, for --qdq")
@click.option(
    "--mode", default="static", show_default=True, help="static, dynamic or weight-only, for --qdq"
)
@click.option("--images", metavar="PATH", help="what to calibrate with, for --qdq")
@click.option("--limit", type=click.IntRange(min=1), help="use at most so many images")
@click.option("--leaf", "leaves", multiple=True, metavar="NAME|CLASS", help="keep whole, in float")
@click.option("--keep-float", "skip", multiple=True, metavar="LAYER", help="leave in float")
@click.option(
    "--ranges",
    type=click.Choice(["ema", "mse"]),
    default="ema",
    show_default=True,
    help="moving averages of minimum and maximum, or shortened where that errs less",
)
@click.option("--only", metavar="SUBMODULE", help="quantize this part alone")
@click.option("--scales", is_flag=True, help="print every activation's scale and zero point")
@click.option("--modes", "all_modes", is_flag=True, help="also compare all modes")
@preprocess_options
def export(
    model: str,
    shapes: tuple[str, ...],
    out: Path,
    weights: Path | None,
    opset: int,
    static_batch: bool,
    qdq: bool,
    target: str,
    mode: str,
    images: str | None,
    limit: int | None,
    leaves: tuple[str, ...],
    skip: tuple[str, ...],
    ranges: str,
    only: str | None,
    scales: bool,
    all_modes: bool,
    **preprocess: str | None,
) -> None:
    """Export MODEL (file.py:factory), check it against torch, and say how well they agree."""
    from deploy.atomic import write_bytes
    from deploy.commands.options import preprocess_from
    from deploy.errors import ConfigError
    from deploy.frontends.torch import parse_shape
    from deploy.fx import export as exports
    from deploy.fx.images import batches_of
    from deploy.fx.modes import compare_modes, measure, quantized, report, scales_report
    from deploy.fx.source import example_inputs, load_module

    if not shapes:
        raise ConfigError("export runs the model and needs its --input shape")
    if (images or all_modes or leaves or skip or only) and not qdq:
        raise ConfigError("--images, --modes, --leaf, --keep-float and --only are for --qdq")
    module = load_module(model, weights)
    inputs = example_inputs([parse_shape(shape) for shape in shapes])
    if not qdq:
        exported = exports.to_onnx(module, inputs, opset=opset, dynamic_batch=not static_batch)
        click.echo(exports.check_float(exported, module, [inputs]))
    else:
        if mode == "static" and not images:
            raise ConfigError("static ranges come from data: give --images, or another --mode")
        how = preprocess_from(preprocess)
        batches = batches_of(images, inputs, how, limit) if images else [inputs]
        kept = {"leaves": leaves, "skip": skip}
        converted = quantized(
            module, inputs, batches, mode=mode, target=target, only=only, ranges=ranges, **kept
        )
        exported = exports.to_onnx(converted, inputs, opset=opset, dynamic_batch=not static_batch)
        click.echo(exports.compare(exported, converted, batches))
        results = compare_modes(module, inputs, batches, target=target) if all_modes else []
        click.echo(report(results or [measure(mode, module, converted, batches)]), nl=False)
        if scales:
            click.echo(scales_report(converted), nl=False)
    write_bytes(out, exported.SerializeToString(deterministic=True))
    click.echo(f"{out}: opset {opset}, {out.stat().st_size} bytes")
