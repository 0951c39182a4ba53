"""Export a model and measure what was exported: `calib8 export` and `calib8 qat` in Python.

::

    export_float        export, compare with torch
    export_quantized    quantize, export, compare with torch, measure size and error
    export_trained      train for int8, then as export_quantized
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import nn

from deploy.errors import ConfigError
from deploy.feed.feed import FeedSource
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.sampling import Limit
from deploy.fx.capture import example_tensors
from deploy.fx.convert import float_form
from deploy.fx.coverage import LayerCoverage, measure_coverage, refuse_unquantized
from deploy.fx.device import CPU, move_tensors
from deploy.fx.export import (
    OPSET,
    ExportAgreement,
    check_float_export,
    compare_with_torch,
    to_onnx,
)
from deploy.fx.fuse import norms_in_float
from deploy.fx.int8_layers import find_weighted_layers
from deploy.fx.model_inputs import argument_names
from deploy.fx.modes import (
    ModeResult,
    compare_modes,
    format_modes,
    measure_mode,
    quantize_model,
)
from deploy.fx.plain_copy import plain_copy
from deploy.fx.qat import TrainingResult, first_batches, train
from deploy.fx.range_search import resolve_target, search_for
from deploy.fx.task import Task, check_task, read_batches
from deploy.fx.trace import check_names, submodule
from deploy.graph.index import match_patterns
from deploy.method import Method
from deploy.targets import Target
from deploy.terminal import PrintedResult, join_visible


@dataclass(frozen=True, slots=True, repr=False)
class QuantizedExport(PrintedResult):
    """A model exported with Q/DQ, and what was measured of it.

    Attributes:
        model: the ONNX model.
        module: the converted module that was exported.
        coverage: its layers in int8 and in float.
        agreement: outputs of ONNX Runtime against those of torch.
        modes: size and error of the module, or of every mode.
        search_label: range search of the activations; None if their ranges are not calibrated.
        training: result of the training; None if there was none.
    """

    model: onnx.ModelProto
    module: nn.Module
    coverage: LayerCoverage
    agreement: ExportAgreement
    modes: Sequence[ModeResult]
    search_label: str | None = None
    training: TrainingResult | None = None

    def to_screen(self) -> str:
        """Return the layers in int8, how the ranges were found, the agreement, and the modes."""
        range_line = ""
        if self.training is not None:
            range_line = self.training.score_text  # "" if the task has no `evaluate`
        elif self.search_label is not None:
            range_line = f"ranges by {self.search_label}"

        lines = [str(self.coverage), range_line, str(self.agreement), norms_in_float(self.module)]
        lines += format_modes(self.modes).splitlines()
        if self.training is not None:
            lines.append(
                "error and SQNR are of the trained model: its int8 form against its own weights in"
                " float"
            )
        return join_visible(filter(None, lines))


def export_float(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    opset: int = OPSET,
    dynamic_batch: bool = True,
) -> tuple[onnx.ModelProto, ExportAgreement]:
    """Export a float model as it is, not fused, and compare it with torch.

    Args:
        model: in float32, in any mode.
        inputs: example inputs; with dynamic_batch dimension 0 is the batch.
        opset: of the default domain; all targets read 18.
        dynamic_batch: make the batch dynamic, named "batch".

    Raises:
        ModelError: torch.export cannot follow the model, or the model fixes the batch.
        ExportError: the opset cannot be written, or the outputs differ.
    """
    model = plain_copy(model).eval()  # a run may change its buffers
    inputs = example_tensors(inputs, model)
    exported = to_onnx(model, inputs, opset=opset, dynamic_batch=dynamic_batch)
    return exported, check_float_export(exported, model, inputs)


def export_quantized(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    images: FeedSource | None = None,
    *,
    target: str | Target = "onnxruntime",
    mode: str = "static",
    method: Method | str | None = None,
    preprocess: PreprocessRequest = None,
    limit: Limit = None,
    leaves: Sequence[str] = (),
    skip: Sequence[str] = (),
    only: str | None = None,
    opset: int = OPSET,
    dynamic_batch: bool = True,
    all_modes: bool = False,
) -> QuantizedExport:
    """Quantize a model, export it with Q/DQ, compare it with torch, and measure size and error.

    Args:
        model: in float32, in any mode; not changed.
        inputs: example inputs on the model's device; the batch size of the calibration is theirs.
        images: a folder, list, image, .npy or .npz file to calibrate with; None for `inputs`.
        target: target whose plan and grid are used.
        mode: "static", "dynamic" or "weight-only".
        method: range search of static mode; None for the default of `build` for the target.
        preprocess: preprocessing of the images, as in `build`.
        limit: use at most so many images.
        leaves: modules to keep whole and in float, by name or class name.
        skip: layers to leave in float: names, patterns such as "layer1.*", or "op:Linear".
        only: submodule to quantize; None for the entire model.
        opset: of the default domain; all targets read 18.
        dynamic_batch: make the batch dynamic, named "batch".
        all_modes: measure every mode, not only this one.

    Raises:
        ConfigError: an option has an unknown value or name, or static mode has no images.
        FeedError, CalibrationError: the images cannot be read, or do not fit the model.
        ModelError: the model cannot be followed or run.
        ExportError: nothing was quantized, or the opset cannot be written.
    """
    if mode == "static" and images is None:
        raise ConfigError("static ranges come from data: give --images, or another --mode")
    check_names(skip=skip)
    target = resolve_target(target)
    model = plain_copy(model).eval()  # a run may change its buffers
    inputs = example_tensors(inputs, model)
    batches: list[tuple[torch.Tensor, ...]] = [inputs]
    if images is not None:
        names = argument_names(model, len(inputs))
        batches = read_batches(images, inputs, names, preprocess, limit)
        batches = move_tensors(batches, inputs[0].device)

    quantized_part = submodule(model, only) if only else model
    skipped_layers = match_patterns(find_weighted_layers(quantized_part), skip)
    search = search_for(target, method)
    converted = quantize_model(
        model,
        inputs,
        batches,
        mode=mode,
        target=target,
        only=only,
        search=search,
        leaves=leaves,
        skip=skipped_layers,
    )
    coverage = measure_coverage(converted, model)
    refuse_unquantized(coverage)
    exported = to_onnx(converted, inputs, opset=opset, dynamic_batch=dynamic_batch)
    # weights for other runtimes may saturate the int8 kernels of this machine's CPU
    agreement = compare_with_torch(exported, converted, batches, int8_kernels=target.runs_here)
    if all_modes:
        modes = compare_modes(model, inputs, batches, target=target, search=search)
    else:
        modes = [measure_mode(mode, model, converted, batches)]
    search_label = search.label if mode == "static" else None
    return QuantizedExport(exported, converted, coverage, agreement, modes, search_label)


def export_trained(
    task: Task,
    *,
    target: str | Target = "onnxruntime",
    bits: int = 8,
    checkpoint: Path | None = None,
    device: torch.device | str | None = None,
    report: Callable[[str], object] = lambda line: None,
) -> QuantizedExport:
    """Train a task for int8, export the result with Q/DQ, and measure it.

    Error and SQNR are those of the trained model: its int8 form against its own weights in float.

    The arguments are those of `calib8.torch.qat`.

    Raises:
        ConfigError, ModelError, FeedError, CalibrationError, CacheError: as `calib8.torch.qat`.
        ExportError: nothing was quantized, or the outputs have other shapes.
    """
    task = check_task(task)
    target = resolve_target(target)
    training = train(
        task, target=target, bits=bits, checkpoint=checkpoint, device=device, report=report
    )
    batches = first_batches(task)
    custom_classes = task.convert or {}  # user's class -> its quantized class
    coverage = measure_coverage(training.converted, task.model, list(custom_classes.values()))
    refuse_unquantized(coverage)
    exported = to_onnx(training.converted, move_tensors(list(task.inputs), CPU))
    agreement = compare_with_torch(
        exported, training.converted, batches, int8_kernels=target.runs_here
    )
    trained_in_float = float_form(training.prepared)
    mode_result = measure_mode("qat", trained_in_float, training.converted, batches)
    return QuantizedExport(
        exported, training.converted, coverage, agreement, [mode_result], training=training
    )
