"""Export a PyTorch model given as module, `file.py:factory` or name, or write its fused form.

A fused model is written as ONNX, or as a .pt2 file for torch.export.load.
"""

import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from deploy.errors import ConfigError, ExportError, FeedError, ModelError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import FeedSource
from deploy.feed.paths import RawFiles
from deploy.files.atomic import write_bytes
from deploy.files.manifest import write_model
from deploy.frontends.base import LoadedModel
from deploy.frontends.input_shapes import missing_shape_error
from deploy.frontends.onnx_file import load_onnx
from deploy.fx.capture import (
    CAPTURE_TOLERANCE,
    as_inputs,
    check_capture,
    repeat_single_sample,
    run_model,
)
from deploy.fx.device import quiet
from deploy.fx.export import OPSET, check_float_export, explain_export_failure, to_onnx
from deploy.fx.fakequant import ExportedModule
from deploy.fx.fuse import fuse_for_export
from deploy.fx.model_inputs import (
    accept_named_inputs,
    convert_to_float32,
    dict_input_note,
    example_inputs,
    first_item,
    floats_to_float32,
    return_dict,
    split_item,
)
from deploy.fx.plain_copy import plain_copy
from deploy.fx.source import load_module, random_weights_note
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
        inputs: example inputs, positional, or a loader whose first item holds them; with
            dynamic_batch dimension 0 is the batch.
        opset: of the default domain; all targets read 18.
        dynamic_batch: make the batch dynamic, named "batch".

    Raises:
        ModelError: torch.export cannot follow the model, or the model fixes the batch.
        ExportError: a prepared model, another opset, or outputs that differ from torch's.
        FeedError: inputs that are no tensors.
    """
    copied = plain_copy(model).eval()
    inputs = as_inputs(inputs, copied)
    convert_to_float32(copied)
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            raise FeedError(
                "example inputs are tensors, in the order of forward's arguments, got"
                f" {type(value).__name__}; give [x, ...], or a loader"
            )
    exported, _ = _export_checked(
        copied, floats_to_float32(inputs), opset=opset, dynamic_batch=dynamic_batch
    )
    return exported


def _export_checked(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    opset: int = OPSET,
    dynamic_batch: bool = True,
) -> tuple[onnx.ModelProto, str | None]:
    """Return the export of a float32 or converted model in eval mode, and a warning or None.

    A float export is checked; the warning says that this proves nothing. The graph's name, which is
    that of the files of `build`, is the class in snake case.
    """
    warning = None
    if _is_converted(model):
        exported = to_onnx(model, inputs, opset=opset, dynamic_batch=dynamic_batch)
    else:
        fused = fuse_for_export(model, inputs)
        exported = to_onnx(fused, inputs, opset=opset, dynamic_batch=dynamic_batch)
        warning = check_float_export(exported, model, inputs).warning
    snake_case_name = _WORD_START.sub("_", type(model).__name__)
    exported.graph.name = snake_case_name.lower().strip("_") or "model"
    return exported, warning


_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # in CamelCase


def _is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, ExportedModule) for module in model.modules())


@phase("exporting the PyTorch model")
def open_module(
    model: nn.Module, images: FeedSource | None
) -> tuple[LoadedModel | onnx.ModelProto, Any]:
    """Export a module in memory by its first calibration sample; return it and all the samples.

    A module that `convert` made is returned with its Q/DQ pairs, not loaded.

    Args:
        model: any mode and device, not changed; float16 and the like become float32.
        images: a DataLoader, a dataset, a batch, a list of tensors or any other iterable, as
            `deploy.fx.model_inputs.split_item` reads its first item. The batch is dynamic, or, if
            the model fixes it, that of this item.

    Raises:
        ConfigError: files, or other samples from which the inputs do not follow.
        FeedError: no samples, or without the inputs.
        ModelError: the module does not run on the sample, or torch.export cannot follow it.
        ExportError: the outputs of ONNX Runtime and torch differ.
    """
    if images is None or isinstance(images, str | os.PathLike | RawFiles | CalibratorScript):
        raise ConfigError(
            "a PyTorch module is exported by a DataLoader, a batch or a list of tensors, got"
            f" {'none' if images is None else 'files'}; give one after the module, or the model"
            " that calib8.torch.export(module, [example_input]) makes"
        )
    copied = plain_copy(model).eval().cpu()
    item, images = first_item(images)
    tensors, names = split_item(copied, item)
    order = accept_named_inputs(copied, names or [None] * len(tensors))
    messages = [convert_to_float32(copied), dict_input_note(copied)]
    item_inputs = floats_to_float32(tensors[index] for index in order)
    inputs, output = _runnable_inputs(copied, item_inputs)
    return_dict(copied, output)
    try:
        exported, message = _export_checked(copied, inputs)
    except (ModelError, ExportError):  # perhaps the model fixes its batch
        if item_inputs[0].ndim == inputs[0].ndim:
            inputs = item_inputs  # the batch of the item, not a small one
        exported, message = _export_checked(copied, inputs, dynamic_batch=False)
        messages.append(
            f"the model fixes its batch, here to the {len(inputs[0])} of the first item"
        )
    if _is_converted(copied):
        return exported, images
    return _load_model(exported, type(copied).__name__, [*messages, message]), images


_DIMENSIONS: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def _runnable_inputs(
    model: nn.Module, item_inputs: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return the inputs with a small batch, and the model's output for them.

    They are a batch, or a single sample: a convolution takes both, so its dimensions decide.
    """
    small_batch = tuple(map(_first_two_samples, item_inputs))
    batch_of_one = tuple(x[None] for x in item_inputs)
    convolved_dims = {_DIMENSIONS.get(type(module)) for module in model.modules()}
    candidates = [small_batch, item_inputs, batch_of_one]
    if item_inputs[0].ndim - 1 in convolved_dims:  # a single sample
        candidates = [batch_of_one, small_batch, item_inputs]

    reported: ModelError | None = None  # that of the item itself, if it was tried
    for inputs in candidates:
        try:
            return inputs, run_model(model, inputs)
        except ModelError as error:
            if reported is None or inputs is item_inputs:
                reported = error
    assert reported is not None
    if (note := dict_input_note(model)) is None:
        raise reported
    raise ModelError(f"{reported}; {note}: name its keys as the arguments of forward") from reported


def _first_two_samples(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:2] if tensor.ndim else tensor


@phase("exporting the PyTorch model")
def open_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str | None] = (),
    names: Sequence[str | None] = (),
    weights: Path | None = None,
) -> LoadedModel:
    """Export the float model of `file.py:factory`, fused and checked against torch, and load it.

    Args:
        spec: file and function, whose code is run; or a named model.
        inputs: shape of each input of forward, batch first.
        dtypes: dtype of each input; None for the model's floating dtype.
        names: name of each input for `deploy.fx.model_inputs.accept_named_inputs`; empty for
            positional.
        weights: a state dict to load, tensors only.

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
    exported, message = _export_checked(
        model, floats_to_float32(examples[index] for index in order)
    )

    file, _, factory = spec.rpartition(":")
    loaded = _load_model(exported, f"{Path(file).name}:{factory}", [*messages, message])
    return replace(loaded, name=f"{Path(file).stem}-{Path(factory).stem}")


def _load_model(exported: onnx.ModelProto, source: str, notes: Sequence[str | None]) -> LoadedModel:
    loaded = load_onnx(exported, True)
    origin = f"Exported by torch from {source} and checked against it."
    sentences = [f"{note[0].upper()}{note[1:]}." for note in notes if note]
    return replace(loaded, exported=exported, notes=(origin, *sentences, *loaded.notes))


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
        ModelError: torch.export cannot follow it, or the program's outputs differ.
        ExportError: the outputs of the .onnx file differ, or the file cannot be written.
    """
    if path.suffix.lower() == ".onnx":
        exported = to_onnx(fused, inputs)
        sentence = str(check_float_export(exported, model, inputs))
        write_model(path, exported)
        return sentence
    batch = torch.export.Dim("batch")
    repeated = tuple(map(repeat_single_sample, inputs))
    shapes = ({0: batch},) * len(repeated)
    try:
        with quiet():
            program = torch.export.export(fused, repeated, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has no error class of its own
        raise ModelError(explain_export_failure(error, dynamic_batch=True)) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # has paths of this machine
    check_capture(program.module(), fused, inputs)
    data = io.BytesIO()
    torch.export.save(program, data, extra_files={"calib8": __version__})
    write_bytes(path, data.getvalue())
    return f"the program against the fused model: equal within {CAPTURE_TOLERANCE:g} of the output"
