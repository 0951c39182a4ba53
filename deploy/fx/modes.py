"""Compare the quantization modes of a PyTorch model by size and error.

==============  ==================================  ===========================================
mode            weights                             activations
==============  ==================================  ===========================================
weight-only     int8                                float
dynamic         int8, of Linear layers              range of each batch, before Linear
static          int8                                fixed ranges from calibration
qat             int8, trained with fake quantizers  fixed ranges (`calib8 qat`)
==============  ==================================  ===========================================
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deploy.errors import ExportError
from deploy.fx.capture import run_model
from deploy.fx.comparison import check_same_outputs, largest_difference, tensors_of
from deploy.fx.convert import calibrate, convert, scale_table
from deploy.fx.graph_text import format_columns
from deploy.fx.prepare import MODES, prepare_part
from deploy.fx.range_search import ActivationSearch, search_for
from deploy.metrics.output_errors import sqnr_db
from deploy.targets import Target


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode's size and error against the float model.

    Attributes:
        mode: its name; "float" for the model itself.
        size: bytes of weights and constants.
        ratio: bytes of the float model divided by `size`.
        max_error: largest absolute difference of any output value; NaN if only one form has a NaN.
        sqnr_db: signal-to-quantization-noise ratio of the outputs in dB; inf if they are equal,
            NaN if all outputs are 0, or if some are NaN.
    """

    mode: str
    size: int
    ratio: float
    max_error: float
    sqnr_db: float


def quantize_model(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    mode: str,
    target: str | Target = "onnxruntime",
    only: str | None = None,
    search: ActivationSearch | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare, calibrate (static mode) and convert a model; return the converted model.

    Args:
        model: a float model.
        inputs: example inputs.
        batches: calibration data.
        mode: static, dynamic or weight-only.
        target: target whose grid is used.
        only: submodule to quantize; None for the entire model.
        search: range search of static mode; None for the default of `build` for the target.
        options: as for `prepare`.
    """
    options |= {"target": target, "mode": mode}
    prepared = prepare_part(model, only, inputs, **options)
    if mode != "dynamic":  # dynamic quantizers cannot be off, so there the outputs differ already
        check_same_outputs(model, prepared, inputs, "tracing and folding BatchNorm")
    if mode == "static":
        inputs_of_runs = [tuple(batch) for batch in batches]
        calibrate(prepared, inputs_of_runs, search=search or search_for(target))
    return convert(prepared)


def measure_mode(
    mode: str, model: nn.Module, converted: nn.Module, batches: Sequence[Sequence[torch.Tensor]]
) -> ModeResult:
    """Return size and error of a converted model against the float model, on `batches`.

    The float model's size is that of the modules that a run reads.

    For a trained model pass its own float form (`float_form`): a comparison with the model before
    training would measure what was learned.
    """
    signal_power = noise_power = 0.0
    errors = []
    with torch.no_grad():
        for batch in batches:
            outputs = tensors_of(run_model(converted, batch))
            references = tensors_of(run_model(model, batch))
            for output, reference in zip(outputs, references, strict=True):
                signal = reference.double()  # bools cannot be subtracted, and uint8 wraps around
                signal_power += float(signal.square().sum())
                noise_power += float((signal - output.double()).square().sum())
                errors.append(largest_difference(reference, output))
    size = stored_bytes(converted)
    size_ratio = used_bytes(model, batches[0]) / max(size, 1)
    sqnr = math.nan  # if all outputs are 0
    if signal_power or noise_power:
        sqnr = sqnr_db(signal_power, noise_power)
    max_error = float(np.max(errors, initial=0.0))  # NaN if any error is; `max` may lose it
    return ModeResult(mode, size, size_ratio, max_error, sqnr)


def compare_modes(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    target: str | Target = "onnxruntime",
    search: ActivationSearch | None = None,
) -> list[ModeResult]:
    """Measure the float model, then the modes weight-only, dynamic and static.

    A mode that quantizes none of the layers is measured as the float model.
    """
    results = [measure_mode("float", model, model, batches)]
    for mode in reversed(MODES):
        converted = model
        with suppress(ExportError):  # raised if this mode quantizes none of the layers
            converted = quantize_model(
                model, inputs, batches, mode=mode, target=target, search=search
            )
        results.append(measure_mode(mode, model, converted, batches))
    return results


def format_modes(results: Sequence[ModeResult]) -> str:
    """Format the results as a table."""
    rows = [("Mode", "Weight bytes", "Smaller", "Max error", "SQNR dB")]
    for result in results:
        quality = f"{result.sqnr_db:.1f}"
        if math.isnan(result.sqnr_db) and result.max_error == 0:
            quality = "all 0"
        numbers = (f"{result.ratio:.2f}x", f"{result.max_error:.4g}", quality)
        rows.append((result.mode, str(result.size), *numbers))
    return format_columns(rows)


def format_scales(model: nn.Module) -> str:
    """Format scale and zero point of every quantized activation as a table."""
    rows = [(name, f"{scale:.8g}", str(zero)) for name, scale, zero in scale_table(model)]
    return format_columns([("tensor", "scale", "zero_point"), *rows])


class _TensorRecorder(TorchFunctionMode):
    """Records the ids of all tensors that are passed to torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensor_ids |= {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


def used_bytes(model: nn.Module, batch: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the parameters and buffers that a run reads, each counted once.

    If a run reads one tensor of a module, all of the module count. Heads for training do not.
    """
    with _TensorRecorder() as recorder:
        run_model(model, batch)
    used_tensors: list[torch.Tensor] = []
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(id(tensor) in recorder.tensor_ids for tensor in tensors):
            used_tensors += tensors
    return _count_bytes(used_tensors)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, each counted once."""
    return _count_bytes([*model.parameters(), *model.buffers()])


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    tensor_by_id = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.nbytes for tensor in tensor_by_id.values())
