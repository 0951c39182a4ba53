"""The ways to quantize one model, side by side: how small, and how far from float.

==============  ==================================  ===========================================
mode            weights                             activations
==============  ==================================  ===========================================
weight-only     int8                                float
dynamic         int8, of Linear layers              by each batch's own range, before Linear
static          int8                                fixed ranges from calibration
qat             int8, trained on the grid           fixed ranges, trained with (`calib8 qat`)
==============  ==================================  ===========================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deploy.fx.convert import calibrate, convert, scale_table, set_phase
from deploy.fx.fakequant import Search, search_for
from deploy.fx.prepare import MODES, prepare, prepare_only
from deploy.fx.profile import check_same, columns, tensors_of
from deploy.metrics.output_errors import sqnr_db
from deploy.targets import Target


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode's size and error against the float model.

    Attributes:
        mode: its name; "float" for the model itself.
        size: bytes of weights and constants.
        ratio: the float model's bytes over these.
        max_error: largest absolute difference of any output.
        sqnr_db: signal to quantization noise of the outputs, in dB; inf where equal, NaN where all
            outputs are 0, which proves nothing.
    """

    mode: str
    size: int
    ratio: float
    max_error: float
    sqnr_db: float


def quantized(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    mode: str,
    target: str | Target = "onnxruntime",
    only: str | None = None,
    search: Search | None = None,
    **options: Any,
) -> nn.Module:
    """`model` prepared in that mode, calibrated on `batches` where it needs to be, converted.

    Args:
        model: a float model.
        inputs: example inputs.
        batches: to calibrate with.
        mode: static, dynamic or weight-only.
        target: whose grid.
        search: of static ranges; None for what `build` takes for the target.
        only: submodule to quantize, the rest being left as it is; None for the whole model.
        options: as `prepare`.

    Raises:
        ConfigError, ModelError, CalibrationError: as prepare, calibrate and convert.
    """
    options |= {"target": target, "mode": mode}
    prepared: nn.Module
    if only is None:
        prepared = prepare(model, inputs, **options)
    else:
        prepared = prepare_only(model, only, inputs, **options)
    if mode != "dynamic":  # whose activations are rounded from the start
        check_same(model, prepared, inputs, "tracing and folding BatchNorm")
    if mode == "static":
        chosen = search_for(target) if search is None else search
        calibrate(prepared, [tuple(batch) for batch in batches], search=chosen)
    else:
        set_phase(prepared, observe=False, quantize=True)
    return convert(prepared)


def measure(
    mode: str,
    model: nn.Module,
    converted: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
) -> ModeResult:
    """Size and error of a converted model against the float one, on `batches`.

    The error of a trained one is told against its own weights in float (`float_form`): against the
    model from before the training it would be what was learned.
    """
    signal = noise = worst = 0.0
    with torch.no_grad():
        for batch in batches:
            pairs = zip(tensors_of(model(*batch)), tensors_of(converted(*batch)), strict=True)
            for wanted, got in pairs:
                difference = (wanted - got).double()
                signal += float(wanted.double().square().sum())
                noise += float(difference.square().sum())
                worst = max(worst, float(difference.abs().max()))
    size = stored_bytes(converted)
    ratio = read_bytes(model, batches[0]) / max(size, 1)
    quality = sqnr_db(signal, noise) if signal or noise else math.nan
    return ModeResult(mode, size, ratio, worst, quality)


def compare_modes(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    target: str | Target = "onnxruntime",
    search: Search | None = None,
) -> list[ModeResult]:
    """Float and every mode that needs no training, in the table's order."""
    results = [measure("float", model, model, batches)]
    for mode in reversed(MODES):
        converted = quantized(model, inputs, batches, mode=mode, target=target, search=search)
        results.append(measure(mode, model, converted, batches))
    return results


def report(results: Sequence[ModeResult]) -> str:
    """The results as a table."""
    rows = [("Mode", "Bytes", "Smaller", "Max error", "SQNR dB")]
    for result in results:
        quality = "all 0" if math.isnan(result.sqnr_db) else f"{result.sqnr_db:.1f}"
        numbers = (f"{result.ratio:.2f}x", f"{result.max_error:.4g}", quality)
        rows.append((result.mode, str(result.size), *numbers))
    return columns(rows)


def scales_report(model: nn.Module) -> str:
    """Scale and zero point of every quantized activation, as a table."""
    rows = [(name, f"{scale:.8g}", str(zero)) for name, scale, zero in scale_table(model)]
    return columns([("tensor", "scale", "zero_point"), *rows])


class _Readings(TorchFunctionMode):
    """Notes which tensors are given to any function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arguments, and call the function."""
        self.read |= {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


def read_bytes(model: nn.Module, batch: Sequence[torch.Tensor]) -> int:
    """As `stored_bytes`, without modules that a run never reads: heads for training alone."""
    with torch.no_grad(), _Readings() as readings:
        model(*batch)
    tensors = {
        id(tensor): tensor
        for module in model.modules()
        for own in [[*module.parameters(recurse=False), *module.buffers(recurse=False)]]
        if any(id(tensor) in readings.read for tensor in own)
        for tensor in own
    }
    return sum(t.numel() * t.element_size() for t in tensors.values())


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
