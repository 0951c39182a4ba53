"""`file.py:factory`, or a named model -> the ONNX model that every target builds from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.frontends.base import LoadedModel
from deploy.frontends.onnx_file import load_onnx
from deploy.frontends.torch_model import shapeless
from deploy.fx.export import check_float, to_onnx
from deploy.fx.fuse import for_runtimes
from deploy.fx.model_inputs import as_dict, take_named
from deploy.fx.samples import example_inputs, in_float32
from deploy.fx.source import load_module
from deploy.fx.zoo import note
from deploy.progress import phase

if TYPE_CHECKING:
    import onnx


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
    """Export the float model that `file.py:factory` makes, its branches and norms joined, checked.

    Args:
        spec: the user's file and function, whose code is run; or a named model.
        inputs: shape of each input of forward, batch first.
        dtypes: of each input, None for the model's own floating dtype.
        names: of each input, as `deploy.fx.model_inputs.take_named` takes them; none for the order.
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
        raise shapeless(spec)
    model = load_module(spec, weights)
    order = take_named(model, names or [None] * len(inputs))
    told = [note(spec, weights), in_float32(model), as_dict(model)]
    made = example_inputs(inputs, dtypes)
    tensors = tuple(x.float() if x.is_floating_point() else x for x in (made[i] for i in order))
    exported = to_onnx(for_runtimes(model, tensors), tensors, dynamic_batch=dynamic_batch)
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
