"""Export a PyTorch model given as module, `file.py:factory` or name."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from deploy.errors import ConfigError, ExportError, ModelError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import FeedSource
from deploy.feed.paths import RawFiles
from deploy.frontends.base import LoadedModel
from deploy.frontends.input_shapes import missing_shape_error
from deploy.frontends.onnx_file import load_onnx
from deploy.fx.capture import (
    example_tensors,
    run_model,
)
from deploy.fx.device import CPU, move_model
from deploy.fx.export import OPSET, check_float_export, to_onnx
from deploy.fx.fakequant import ExportedModule
from deploy.fx.fuse import fuse_for_export
from deploy.fx.model_inputs import (
    accept_named_inputs,
    cast_floats,
    convert_to_float32,
    dict_input_note,
    example_inputs,
    first_item,
    split_item,
)
from deploy.fx.plain_copy import plain_copy
from deploy.fx.source import load_module, random_weights_note
from deploy.terminal import phase


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
        ExportError: the model is prepared but not converted, the opset cannot be written, or the
            outputs differ from torch's.
        FeedError: inputs that are no tensors.
    """
    model_copy = plain_copy(model).eval()
    convert_to_float32(model_copy)
    tensors = example_tensors(inputs, model_copy)
    exported, _warning = _export_checked(
        model_copy, tensors, opset=opset, dynamic_batch=dynamic_batch
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

    A float model is exported in fused form and compared with torch; the warning is that its outputs
    do not depend on the input, so that the comparison proves nothing. The graph's name, which is
    that of the files of `build`, is the class in snake case.
    """
    warning = None
    if _is_converted(model):
        exported = to_onnx(model, inputs, opset=opset, dynamic_batch=dynamic_batch)
    else:
        fused_model = fuse_for_export(model, inputs)
        exported = to_onnx(fused_model, inputs, opset=opset, dynamic_batch=dynamic_batch)
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
    """Export a module in memory by its first calibration sample; return (model, all samples).

    The model is a `LoadedModel`; for a module that `convert` made, which is not a float model, it
    is the ONNX model with its Q/DQ pairs.

    Args:
        model: any mode and device, not changed; float16 and the like become float32.
        images: a DataLoader, a dataset, a batch, a list of tensors or any other iterable, as
            `deploy.fx.model_inputs.split_item` reads its first item. The batch is dynamic, or, if
            the model fixes it, that of this item.

    Raises:
        ConfigError: `images` is None or files, or its first item has names that forward does not
            take.
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
    model_copy = move_model(plain_copy(model).eval(), CPU)
    item, samples = first_item(images)
    tensors, names = split_item(model_copy, item)

    # change the copy so that torch.export can follow it: inputs by position, float32
    order = accept_named_inputs(model_copy, names or [None] * len(tensors))
    dtype_note = convert_to_float32(model_copy)
    item_inputs = cast_floats((tensors[index] for index in order), torch.float32)
    batch_inputs = _find_batch_inputs(model_copy, item_inputs)

    exported, export_notes = _export_batched(model_copy, item_inputs, batch_inputs)
    if _is_converted(model_copy):
        return exported, samples
    notes = [dtype_note, dict_input_note(model_copy), *export_notes]
    return _load_model(exported, type(model_copy).__name__, notes), samples


def _export_batched(
    model: nn.Module,
    item_inputs: tuple[torch.Tensor, ...],
    batch_inputs: tuple[torch.Tensor, ...],
) -> tuple[onnx.ModelProto, list[str | None]]:
    """Return (ONNX model, notes); its batch is dynamic, or fixed if the model fixes it.

    A note of the list is a sentence for the user, or None.

    Args:
        model: as for `_export_checked`.
        item_inputs: the inputs in the first item of the user's data.
        batch_inputs: inputs with a batch axis, made from them by `_find_batch_inputs`.
    """
    try:
        exported, warning = _export_checked(model, batch_inputs)
        return exported, [warning]
    except (ModelError, ExportError):  # perhaps the model fixes its batch
        is_item_batch = item_inputs[0].ndim == batch_inputs[0].ndim  # else it is a single sample
        if is_item_batch:  # take all of it: `batch_inputs` may have two of its samples only
            batch_inputs = item_inputs
        exported, warning = _export_checked(model, batch_inputs, dynamic_batch=False)
        batch_size = len(batch_inputs[0])
        note = f"the model fixes its batch, here to the {batch_size} of the first item"
        return exported, [note, warning]


_SAMPLE_RANK_BY_LAYER: dict[type, int] = {nn.Conv1d: 2, nn.Conv2d: 3, nn.Conv3d: 4}  # [C, ...]


def _find_batch_inputs(
    model: nn.Module, item_inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Return inputs with a batch axis that the model runs for.

    `item_inputs`: the inputs in the first item of the user's data. They are a batch, or a single
    sample without a batch axis; which of the two is found by running the model.

    Raises:
        ModelError: the model runs for none of these; the message is that of the run for
            `item_inputs`.
    """
    # Candidates, in order: the first one for which the model runs is returned. Two samples of a
    # batch run faster than all of it, but a model that fixes its batch runs only for all of it.
    two_samples = tuple(map(_first_two_samples, item_inputs))
    batch_of_one = tuple(x[None] for x in item_inputs)  # if the item is a single sample
    candidates = [two_samples, item_inputs, batch_of_one]
    # A convolution runs for a sample as well as for a batch. So if the inputs have the rank of a
    # sample of one of the model's convolutions, they are tried as a sample first.
    sample_ranks = {_SAMPLE_RANK_BY_LAYER.get(type(module)) for module in model.modules()}
    if item_inputs[0].ndim in sample_ranks:
        candidates = [batch_of_one, two_samples, item_inputs]

    item_error: ModelError | None = None
    for inputs in candidates:
        try:
            run_model(model, inputs)
            return inputs
        except ModelError as error:
            if inputs is item_inputs:
                item_error = error
    assert item_error is not None  # since item_inputs are a candidate
    dict_note = dict_input_note(model)  # None unless forward takes its inputs in a dict
    if dict_note is None:
        raise item_error
    message = f"{item_error}; {dict_note}: name its keys as the arguments of forward"
    raise ModelError(message) from item_error


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
    """Export the float model of `file.py:factory` to ONNX, compare it with torch, and load it.

    Args:
        spec: file and function, whose code is run; or a named model.
        inputs: shape of each input of forward, batch first.
        dtypes: dtype of each input; None for the model's floating dtype.
        names: name of each input for `deploy.fx.model_inputs.accept_named_inputs`; empty for
            positional.
        weights: a state dict to load, tensors only; None for the weights that the factory sets.

    Raises:
        SdkMissingError: torch, or the package of a named model, is not installed.
        ConfigError: the spec or a shape is not valid.
        ModelError: the file, the factory, the weights or the export failed.
        ExportError: the outputs of ONNX Runtime and torch differ.
    """
    if not inputs:
        raise missing_shape_error(spec)
    model = load_module(spec, weights)
    # for each argument of the model's forward, the index of its input
    order = accept_named_inputs(model, names or [None] * len(inputs))
    notes = [
        random_weights_note(spec, weights),
        convert_to_float32(model),
        dict_input_note(model),
    ]
    tensors = example_inputs(inputs, dtypes)
    ordered_tensors = cast_floats((tensors[index] for index in order), torch.float32)
    exported, warning = _export_checked(model, ordered_tensors)

    file, _, factory = spec.rpartition(":")
    shown_spec = f"{Path(file).name}:{factory}"  # without folders
    loaded_model = _load_model(exported, shown_spec, [*notes, warning])
    factory_name = Path(factory).stem  # a named model may be a file, such as yolov8n.yaml
    return replace(loaded_model, name=f"{Path(file).stem}-{factory_name}")


def _load_model(exported: onnx.ModelProto, source: str, notes: Sequence[str | None]) -> LoadedModel:
    """Load an exported model with notes, None for no note; a new first one names `source`."""
    loaded_model = load_onnx(exported, fold_batchnorm=True)
    origin = f"Exported by torch from {source} and checked against it."
    sentences = [f"{note[0].upper()}{note[1:]}." for note in notes if note]
    return replace(loaded_model, exported=exported, notes=(origin, *sentences, *loaded_model.notes))
