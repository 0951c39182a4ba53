"""`calib8 compare`."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base, given
from deploy.commands.image_options import ImageOptions, image_options
from deploy.commands.numbers import Real
from deploy.commands.output import json_option, put_json, quietable
from deploy.terminal import say_lines

_IMAGES = 8  # where --limit says nothing: which tensor parts is plain after a few


@click.command(cls=base.SectionedCommand)
@quietable("--json")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path), required=False)
@image_options
@base.option(
    "--runtime",
    section=base.MODEL,
    type=click.Choice(["onnxruntime", "openvino"]),
    default="onnxruntime",
    show_default=True,
    help="What runs SECOND, or FIRST again where no SECOND is given; FIRST runs in ONNX Runtime.",
)
@base.option(
    "--min-sqnr",
    section=base.MEASURING,
    type=Real(),
    default=20.0,
    show_default=True,
    metavar="DB",
    help="The first tensor below so many dB is where the two part.",
)
@base.option(
    "--every",
    section=base.MEASURING,
    is_flag=True,
    help="With another runtime, look at every tensor, not only at as many as it takes.",
)
@json_option
def compare(
    first: Path,
    second: Path | None,
    images: ImageOptions,
    runtime: str,
    min_sqnr: float,
    every: bool,
    json_path: Path | None,
) -> None:
    """Find the tensor at which two ONNX models part, FIRST being the reference.

    Tensors that both have are compared in the order of the graph, outputs last; of a Q/DQ model
    the values count that its next layers read. In another runtime each tensor is computed by a
    model that is cut off behind it, as an added output would change what the runtime fuses; the
    place is found by halves. 8 images are run unless --limit says otherwise.

    \b
    Examples:
      calib8 compare model.onnx build/model.int8.onnx --images held/
      calib8 compare build/model.int8.onnx --runtime openvino --images held/ --limit 2
    """  # noqa: D301 (click reads the backspace)
    from deploy.analysis.comparison import compare as run

    if runtime == "onnxruntime":
        given.refuse_without("--runtime openvino", given.typed("every"))
    found = run(
        first,
        second,
        images.source,
        runtime=runtime,
        preprocess=images.preprocess,
        limit=images.limit or _IMAGES,
        skip_bad=images.skip_bad,
        min_sqnr_db=min_sqnr,
        every=every,
        threads=images.threads,
    )
    put_json(json_path, found.to_json)
    say_lines(repr(found))
