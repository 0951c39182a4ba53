"""Export a PyTorch model given as `file.py:factory` or by name, or write its fused form to a file.

A fused model is written as ONNX, or as a .pt2 file for torch.export.load.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import torch
from torch import nn

from deploy.errors import ConfigError, ExportError, ModelError, first_line
from deploy.files.atomic import write_bytes
from deploy.files.manifest import write_model
from deploy.frontends.base import LoadedModel
from deploy.frontends.onnx_file import load_onnx
from deploy.frontends.torch_model import missing_shape_error
from deploy.fx.capture import as_inputs, at_least_two
from deploy.fx.device import quiet
from deploy.fx.export import OPSET, check_float_export, to_onnx
from deploy.fx.fakequant import ExportedModule
from deploy.fx.fuse import fuse_for_export
from deploy.fx.model_inputs import (
    accept_named_inputs,
    convert_to_float32,
    dict_input_note,
    example_inputs,
)
from deploy.fx.profile import NEAR, largest_difference, largest_magnitude
from deploy.fx.source import load_module, plain_copy, random_weights_note, user_code_line
from deploy.terminal import phase
from deploy.version import __version__


def export(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    opset: int = OPSET,
    dynamic_batch: bool = True,
) -> onnx.ModelProto:
    """Export a float module, fused and checked against torch, or a module that `convert` made.

    Args:
        model: any mode, not changed; float16 and the like become float32.
        inputs: example inputs, positional; with dynamic_batch dimension 0 is the batch.
        opset: of the default domain; all targets read 18.
        dynamic_batch: make the batch dynamic, named "batch".

    Raises:
        ModelError: torch.export cannot follow the model, or the model fixes the batch.
        ExportError: a prepared model, another opset, or outputs that differ from torch's.
    """
    own = plain_copy(model).eval()
    inputs = as_inputs(inputs)
    if any(isinstance(module, ExportedModule) for module in own.modules()):
        return to_onnx(own, inputs, opset=opset, dynamic_batch=dynamic_batch)
    convert_to_float32(own)
    tensors = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    fused = fuse_for_export(own, tensors)
    exported = to_onnx(fused, tensors, opset=opset, dynamic_batch=dynamic_batch)
    check_float_export(exported, own, tensors)
    exported.graph.name = type(own).__name__  # that of the files of `build`
    return exported


@phase("exporting the PyTorch model")
def export_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str | None] = (),
    names: Sequence[str | None] = (),
    weights: Path | None = None,
    notes: list[str] | None = None,
) -> onnx.ModelProto:
    """Export the float model of `file.py:factory` to ONNX, fused, and check it against torch.

    Args:
        spec: file and function, whose code is run; or a named model.
        inputs: shape of each input of forward, batch first.
        dtypes: dtype of each input; None for the model's floating dtype.
        names: name of each input for `deploy.fx.model_inputs.accept_named_inputs`; empty for
        positional.
        weights: a state dict to load, tensors only.
        notes: list to which notes for the user are appended.

    Raises:
        SdkMissingError: torch, or the package of a named model, is not installed.
        ConfigError: the spec or a shape is not valid.
        ModelError: the file, the factory, the weights or the export failed.
        ExportError: the outputs of ONNX Runtime and torch differ.
    """
    if not inputs:
        raise missing_shape_error(spec)
    model = load_module(spec, weights)
    order = accept_named_inputs(model, names or [None] * len(inputs))
    messages = [
        random_weights_note(spec, weights),
        convert_to_float32(model),
        dict_input_note(model),
    ]
    examples = example_inputs(inputs, dtypes)
    ordered = (examples[i] for i in order)
    tensors = tuple(x.float() if x.is_floating_point() else x for x in ordered)
    exported = to_onnx(fuse_for_export(model, tensors), tensors)
    messages.append(check_float_export(exported, model, tensors).untold)
    if notes is not None:
        notes += [message for message in messages if message]
    return exported


def open_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str | None] = (),
    names: Sequence[str | None] = (),
    weights: Path | None = None,
) -> LoadedModel:
    """Export with `export_torch` and load the result like any other ONNX model.

    Raises:
        SdkMissingError, ConfigError, ModelError, ExportError: as `export_torch`.
    """
    file, _, factory = spec.rpartition(":")
    notes = list[str]()
    exported = export_torch(spec, inputs, dtypes=dtypes, names=names, weights=weights, notes=notes)
    loaded = load_onnx(exported, True)
    origin = f"Exported by torch from {Path(file).name}:{factory} and checked against it."
    name = f"{Path(file).stem}-{Path(factory).stem}"
    sentences = (f"{note[0].upper()}{note[1:]}." for note in notes)
    return replace(loaded, name=name, notes=(origin, *sentences, *loaded.notes))


SUFFIXES = (".onnx", ".pt2")


def check_suffix(path: Path) -> None:
    """Raise `ConfigError` if the suffix is not in `SUFFIXES`."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"a fused model is written as {' or '.join(SUFFIXES)}, got {path}; a state dict alone"
            " would not fit your model, since fusing changes its modules"
        )


def write_fused(
    path: Path, fused: nn.Module, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> str:
    """Write a fused model with a dynamic batch; return a sentence on its agreement with the model.

    Raises:
        ModelError: torch.export cannot follow it.
        ExportError: its outputs differ from the model's, or the file cannot be written.
    """
    if path.suffix.lower() == ".onnx":
        exported = to_onnx(fused, inputs)
        sentence = str(check_float_export(exported, model, inputs))
        write_model(path, exported)
        return sentence
    program = _export_program(fused, inputs)
    largest = _check_difference(program, model, inputs)
    data = io.BytesIO()
    torch.export.save(program, data, extra_files={"calib8": __version__})
    write_bytes(path, data.getvalue())
    return f"the program against the model: largest difference {largest:.3g}"


def _export_program(
    fused: nn.Module, inputs: Sequence[torch.Tensor]
) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    repeated = tuple(map(at_least_two, inputs))
    shapes = tuple({0: batch} for _ in repeated)
    try:
        with quiet():
            program = torch.export.export(fused, repeated, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has no error class of its own
        where = user_code_line(error)
        raise ModelError(
            f"torch.export must be able to follow the model, got {type(error).__name__}:"
            f" {first_line(error)}" + (f" at {where}" if where else "") + "; write .onnx with a"
            " batch that the model does not fix, or rewrite what depends on data"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # has paths of this machine
    return program


def _check_difference(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> float:
    with torch.no_grad():
        expected, got = model(*inputs), program.module()(*inputs)
    largest = largest_difference(expected, got)
    if not largest <= NEAR * largest_magnitude(expected):
        raise ExportError(
            "an exported model must compute what torch computes, got a largest difference of"
            f" {largest:.3g} (largest output {largest_magnitude(expected):.3g}); report it with"
            " the model"
        )
    return largest
