"""`file.py:factory`, or a named model -> the ONNX model that every target builds from.

A fused model as a file: ONNX for every runtime, or a .pt2 that torch.export.load gives back.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from deploy.errors import ConfigError, ExportError, ModelError, first_line
from deploy.files.atomic import write_bytes
from deploy.frontends.base import LoadedModel
from deploy.frontends.onnx_file import load_onnx
from deploy.frontends.torch_model import shapeless
from deploy.fx.device import quiet
from deploy.fx.export import check_float, to_onnx
from deploy.fx.fuse import for_runtimes
from deploy.fx.model_inputs import as_dict, example_inputs, in_float32, take_named
from deploy.fx.profile import NEAR, difference, largest_of, tensors_of
from deploy.fx.source import load_module, note, users_line
from deploy.terminal import phase

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


SUFFIXES = (".onnx", ".pt2")


def check_suffix(path: Path) -> None:
    """Raise `ConfigError` where a fused model cannot be written under that name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"a fused model is written as {' or '.join(SUFFIXES)}, got {path}; weights alone are"
            " the state of another model than yours"
        )


def write_fused(
    path: Path, fused: nn.Module, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> str:
    """Write the fused form of a model, with an open batch, and say how it agrees with the model.

    Args:
        path: of one of `SUFFIXES`.
        fused: what `deploy.fx.fuse.fuse` gave.
        model: the user's.
        inputs: of one run, batch first.

    Raises:
        ModelError: torch.export cannot follow it.
        ExportError: the file computes something else than the model, or cannot be written.
    """
    if path.suffix.lower() == ".onnx":
        exported = to_onnx(fused, inputs)
        said = str(check_float(exported, model, inputs))
        write_bytes(path, exported.SerializeToString(deterministic=True))
        return said
    program = _program(fused, inputs)
    found = _difference(program, model, inputs)
    data = io.BytesIO()
    torch.export.save(program, data)
    write_bytes(path, data.getvalue())
    return f"the program against the model: largest difference {found:.3g}"


def _program(fused: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    two = tuple(x if len(x) > 1 else torch.cat([x, x]) for x in inputs)  # 1 would be a constant
    shapes = tuple({0: batch} for _ in two)
    try:
        with quiet():
            program = torch.export.export(fused, two, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has no error class of its own
        where = users_line(error)
        raise ModelError(
            f"torch.export must be able to follow the model, got {type(error).__name__}:"
            f" {first_line(error)}" + (f" at {where}" if where else "") + "; write .onnx with a"
            " batch that the model does not fix, or rewrite what depends on data"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _difference(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> float:
    with torch.no_grad():
        wanted, got = model(*inputs), program.module()(*inputs)
    pairs = zip(tensors_of(wanted), tensors_of(got), strict=True)
    found = max((difference(a, b) for a, b in pairs), default=0.0)
    if not found <= NEAR * largest_of(wanted):
        raise ExportError(
            "an exported model must compute what torch computes, got a largest difference of"
            f" {found:.3g} (largest output {largest_of(wanted):.3g}); report it with the model"
        )
    return found
