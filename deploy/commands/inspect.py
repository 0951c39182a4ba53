"""`calib8 inspect`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands.model import model_from, model_options

if TYPE_CHECKING:
    from deploy.frontends import LoadedModel


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--target", default="onnxruntime", show_default=True, help="Rules to judge a model by."
)
@click.option("--all", "everything", is_flag=True, help="List every node or tensor.")
@model_options
def inspect(
    path: Path, target: str, everything: bool, shapes: tuple[str, ...], weights: Path | None
) -> None:
    """What would be quantized in a model (.onnx) and why not; or what a cache holds.

    \b
    calib8 inspect model.onnx
    calib8 inspect model.cache
    """  # noqa: D301 (click reads the backspace)
    model = model_from(path, shapes, weights)
    if model is not path or path.suffix in {".onnx", ".py"} or _looks_like_onnx(path):
        _inspect_model(model, path, target, everything)
    else:
        _inspect_cache(path)


def _inspect_model(model: Path | LoadedModel, path: Path, target: str, everything: bool) -> None:
    from deploy.frontends import LoadedModel, load
    from deploy.pipeline import targets_of

    (backend,) = targets_of([target])
    loaded = model if isinstance(model, LoadedModel) else load(model)
    decisions = backend.decisions(loaded.model)
    int8 = sum(d.int8 for d in decisions)
    click.echo(f"{path}: {len(decisions)} nodes, {int8} in int8 on {target}")
    for spec in (*loaded.inputs, *loaded.outputs):
        click.echo(f"  {spec.name} {spec.dtype} {list(spec.shape)}")
    for note in loaded.notes:
        click.echo(f"  {note}")
    click.echo(f"{len(backend.wanted(loaded.model, ()))} tensors need a scale")
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
        known = store.load(path)
    except CacheError as error:
        click.echo(f"no fitting fingerprint: {error}")
        known = None
    if known is not None:
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
