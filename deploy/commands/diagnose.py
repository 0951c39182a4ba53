"""`calib8 inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base, given
from deploy.commands.calibration_options import keep_float_option
from deploy.commands.model import model_from, model_options
from deploy.commands.model_options import target_options
from deploy.commands.output import json_option, put_json, quietable
from deploy.errors import ConfigError
from deploy.files.reading import opened
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    from deploy.targets import Target


@click.command(cls=base.SectionedCommand)
@quietable("--json")
@click.argument("path", type=click.Path(path_type=Path))
@base.option(
    "--all",
    "everything",
    section=base.GENERAL,
    is_flag=True,
    help="List every node of a model, not only how many of each kind.",
)
@target_options(lambda option: option.places)
@model_options
@keep_float_option
@json_option
def inspect(
    path: Path,
    targets: list[Target],
    everything: bool,
    shapes: tuple[str, ...],
    weights: Path | None,
    keep_float: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """What would be quantized in a model (.onnx) and why not; or what a cache holds.

    \b
    Examples:
      calib8 inspect model.onnx
      calib8 inspect model.onnx --target tensorrt,ascend --keep-float op:Sigmoid
      calib8 inspect model.onnx --json - | jq '.[0].tensors'
      calib8 inspect model.cache
    """  # noqa: D301 (click reads the backspace)
    model = model_from(path, shapes, weights)
    if model is path and path.suffix not in {".onnx", ".py"} and not _looks_like_onnx(path):
        given.refuse_without("a model", given.typed())
        _inspect_cache(path)
        return
    from deploy.analysis.inspection import inspect as judge
    from deploy.frontends import LoadedModel, load

    loaded = model if isinstance(model, LoadedModel) else load(model)
    found = [judge(loaded, target=target, float_nodes=keep_float) for target in targets]
    for judged in found:
        say_lines(judged.text(everything=everything))
    put_json(json_path, lambda: [judged.to_json() for judged in found])


def _inspect_cache(path: Path) -> None:
    from deploy.calibration import store, trt_cache
    from deploy.errors import CacheError

    cache = trt_cache.parse(store.read(path), origin=str(path))
    say(f"{path}: {cache.header.text}, {len(cache.entries)} tensors")
    try:
        _, mark = store.text_of(path)
    except CacheError as error:
        say(f"no fitting fingerprint: {error}")
    else:
        model = next(iter(mark.model.values()), "unknown")
        say(f"model {model[:12]}, {mark.images.get('count')} images, made by {mark.by}")
    for entry in cache.entries:
        flaw = f"  ({entry.flaw})" if entry.flaw else ""
        scale = f"{entry.scale:.6g}"
        say(f"  {entry.name}: amax {float(entry.scale) * 127:.6g}, scale {scale}{flaw}")


def _looks_like_onnx(path: Path) -> bool:
    """Anything that does not start as text is taken for a model, which then says what it is."""
    try:
        with opened(path, what="a model or a cache", error=ConfigError, own=True) as file:
            head = file.read(64)
    except ConfigError:
        return path.suffix != ".cache"
    return b"\0" in head or head[:1] == b"\x08"
