"""`calib8 inspect`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import given, sections
from deploy.commands.model import model_from, model_options
from deploy.commands.options import keep_float_option
from deploy.commands.targets import target_options

if TYPE_CHECKING:
    from deploy.frontends import LoadedModel
    from deploy.targets import Target


@click.command(cls=sections.SectionedCommand)
@click.argument("path", type=click.Path(path_type=Path))
@sections.option(
    "--all",
    "everything",
    section=sections.GENERAL,
    is_flag=True,
    help="List every node of a model, not only how many of each kind.",
)
@target_options(lambda option: option.places)
@model_options
@keep_float_option
def inspect(
    path: Path,
    targets: list[Target],
    everything: bool,
    shapes: tuple[str, ...],
    weights: Path | None,
    keep_float: tuple[str, ...],
) -> None:
    """What would be quantized in a model (.onnx) and why not; or what a cache holds.

    \b
    Examples:
      calib8 inspect model.onnx
      calib8 inspect model.onnx --target tensorrt,ascend --keep-float op:Sigmoid
      calib8 inspect model.cache
    """  # noqa: D301 (click reads the backspace)
    model = model_from(path, shapes, weights)
    if model is not path or path.suffix in {".onnx", ".py"} or _looks_like_onnx(path):
        for target in targets:
            _inspect_model(model, path, target, keep_float, everything)
    else:
        given.refuse_without("a model", given.typed())
        _inspect_cache(path)


def _inspect_model(
    model: Path | LoadedModel,
    path: Path,
    target: Target,
    keep_float: tuple[str, ...],
    everything: bool,
) -> None:
    from deploy.frontends import LoadedModel, load
    from deploy.graph.selection import matching

    loaded = model if isinstance(model, LoadedModel) else load(model)
    kept = matching(loaded.model, keep_float)
    decisions = target.decisions(loaded.model, kept)
    int8 = sum(d.int8 for d in decisions)
    click.echo(f"{path}: {len(decisions)} nodes, {int8} in int8 on {target.name}")
    for spec in (*loaded.inputs, *loaded.outputs):
        click.echo(f"  {spec.name} {spec.dtype} {list(spec.shape)}")
    for note in loaded.notes:
        click.echo(f"  {note}")
    click.echo(f"{len(target.wanted(loaded.model, kept))} tensors need a scale")
    if everything:
        for decision in decisions:
            click.echo(f"  {'int8 ' if decision.int8 else 'float'} {decision.op_type:20}"
                       f" {decision.node}  {decision.reason}".rstrip())  # fmt: skip
        return
    for op_type, count in Counter(d.op_type for d in decisions if d.int8).most_common():
        click.echo(f"  int8   {count:4} {op_type}")
    reasons = Counter((d.op_type, d.reason) for d in decisions if not d.int8)
    for (op_type, reason), count in reasons.most_common():
        click.echo(f"  float  {count:4} {op_type}: {reason}")


def _inspect_cache(path: Path) -> None:
    from deploy.calibration import store as store
    from deploy.calibration import trt_cache
    from deploy.errors import CacheError

    cache = trt_cache.parse(store.read(path), origin=str(path))
    click.echo(f"{path}: {cache.header.text}, {len(cache.entries)} tensors")
    try:
        known = store.load(path, with_statistics=False)
    except CacheError as error:
        click.echo(f"no fitting fingerprint: {error}")
        known = None
    if known is not None and known.fingerprint is not None:
        mark = known.fingerprint
        click.echo(f"model {mark.model[:12]}, {mark.images.get('count')} images, {mark.method}")
    for entry in cache.entries:
        flaw = f"  ({entry.flaw})" if entry.flaw else ""
        scale = f"{entry.scale:.6g}"
        click.echo(f"  {entry.name}: amax {float(entry.scale) * 127:.6g}, scale {scale}{flaw}")


def _looks_like_onnx(path: Path) -> bool:
    """Anything that does not start as text is taken for a model, which then says what it is."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return path.suffix != ".cache"
    return b"\0" in head or head[:1] == b"\x08"
