"""PyTorch models, given as `file.py:factory`. Torch is imported only when one is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.errors import ConfigError, did_you_mean
from deploy.frontends.base import LoadedModel
from deploy.frontends.onnx import load_onnx
from deploy.progress import phase
from deploy.usercode import is_named

if TYPE_CHECKING:
    import onnx

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")
_FLOATS = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")


def is_torch_spec(source: object) -> bool:
    """Whether `source` reads as `file.py:factory`, or as a named model such as timm:resnet18."""
    path, _, name = str(source).rpartition(":")
    return (path.endswith(".py") and name.isidentifier()) or is_named(source)


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x3x224x224` -> (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


class Wanted(NamedTuple):
    """An input that was asked for: dtype None for the model's own, name None for the next one."""

    shape: tuple[int, ...]
    dtype: str | None = None
    name: str | None = None


def parse_input(text: str) -> Wanted:
    """`1x3x8x8`, `1x128:int64` or `ids=1x128:int64` -> the shape, its dtype and its name.

    Raises:
        ConfigError: no shape, or no dtype of `DTYPES`.
    """
    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.partition(":")
    if (equals and not name) or (colon and dtype not in DTYPES):
        raise ConfigError(
            "an input is like 1x3x224x224, 1x128:int64 or mask=1x128, of a dtype of"
            f" {', '.join(DTYPES)}, got {text!r}{_meant(dtype)}"
        )
    return Wanted(parse_shape(shape), dtype or None, name or None)


def _meant(dtype: str) -> str:
    way_out = did_you_mean(dtype, DTYPES)
    return f"; {way_out}" if way_out else ""


@phase("exporting the PyTorch model")
def export_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str | None] = (),
    names: Sequence[str | None] = (),
    weights: Path | None = None,
    dynamic_batch: bool = True,
    notes: list[str] | None = None,
) -> onnx.ModelProto:
    """Export the float model that `file.py:factory` makes, its branches merged, checked against it.

    Args:
        spec: the user's file and function, whose code is run; or a named model.
        inputs: shape of each input of forward, batch first.
        dtypes: of each input, None for the model's own floating dtype.
        names: of each input, as `deploy.fx.named.take_named` takes them; none for the order.
        weights: a state dict to load, tensors only.
        dynamic_batch: leave the batch open.
        notes: gets a sentence for each thing that the user should know.

    Raises:
        SdkMissingError: torch, or the package of a named model, is not installed.
        ConfigError: the spec or a shape is none.
        ModelError: the file, the factory, the weights or the export failed.
        ExportError: onnxruntime computes something else than torch.
    """
    if not inputs:
        raise ConfigError(
            f"{spec} needs the shape of its input: --input 1x3x224x224, once for each input"
        )
    from deploy.fx.export import check_float, to_onnx
    from deploy.fx.fuse import without_branches
    from deploy.fx.named import as_dict, take_named
    from deploy.fx.samples import example_inputs, in_float32
    from deploy.fx.source import load_module
    from deploy.fx.zoo import note

    model = load_module(spec, weights)
    order = take_named(model, names or [None] * len(inputs))
    told = [note(spec, weights), in_float32(model), as_dict(model)]
    made = example_inputs(inputs, dtypes)
    tensors = tuple(x.float() if x.is_floating_point() else x for x in (made[i] for i in order))
    merged, _ = without_branches(model, tensors)
    exported = to_onnx(merged, tensors, dynamic_batch=dynamic_batch)
    told.append(check_float(exported, model, tensors).untold)
    if notes is not None:
        notes += [sentence for sentence in told if sentence]
    return exported


def open_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str | None] = (),
    names: Sequence[str | None] = (),
    weights: Path | None = None,
) -> LoadedModel:
    """`export_torch`, cleaned and known by its digest like any other model.

    Raises:
        SdkMissingError, ConfigError, ModelError, ExportError: as `export_torch`.
    """
    file, _, factory = spec.rpartition(":")
    notes = list[str]()
    exported = export_torch(spec, inputs, dtypes=dtypes, names=names, weights=weights, notes=notes)
    loaded = load_onnx(exported, True)
    made = f"Exported by torch from {Path(file).name}:{factory} and checked against it."
    name = f"{Path(file).stem}-{Path(factory).stem}"
    told = (f"{sentence[0].upper()}{sentence[1:]}." for sentence in notes)
    return replace(loaded, name=name, notes=(made, *told, *loaded.notes))


def load_torch(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """The table's row: says that a PyTorch model needs the shapes of its inputs.

    Raises:
        ConfigError: always; `open_torch` takes the shapes.
    """
    if not is_torch_spec(source):
        raise ConfigError(f"a model in PyTorch is given as file.py:factory, got {str(source)!r}")
    return open_torch(str(source), ())
