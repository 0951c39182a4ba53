"""Fake quantizers of activations, and learned step sizes.

A fake quantizer rounds values to a grid and back::

    x --> round(x / scale) + zero_point, clipped to qmin..qmax --> back to real --> y
          gradient: 1 inside the clip range, 0 outside (straight-through estimator)

Scale and zero point come from calibration (`deploy.fx.convert`, `deploy.fx.range_search`). In
training they stay fixed, follow moving averages of minimum and maximum (`observe`), or the scale
is trained (`learn`).
`observe` and `enabled` are Python bools, so that a traced graph has no data-dependent branch.

Learned step size quantization (LSQ) trains the scale s::

    v = x / s         n = qmin - zero_point      p = qmax - zero_point
    y = s * round(clip(v, n, p))

    dy/ds =   n  |  round(v) - v  |  p
    dy/dx =   0  |       1        |  0
          v <= n      between      p <= v

The gradient of a step is a sum over all N values that share it (for activations, those of one
sample), so it is divided by sqrt(N * p); then the step changes, relative to its size, about as fast
as the weights. For a range mostly below 0, -n replaces p. The zero point stays fixed, so a real 0
stays exact.

Sources: B. Jacob et al., 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3; S. Esser et al., 2020, "Learned Step Size
Quantization", arXiv:1902.08153, equations 1 to 3 and 5, section 2.2.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from calibrators.grids import UINT8, Grid
from deploy.errors import CalibrationError
from deploy.fx.range_search import representable_range, scale_on_grid
from deploy.graph.bounds import RangeLimits


def lsq_round(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    limits: tuple[float, float],
    *,
    shared: int,
) -> torch.Tensor:
    """Round x to a grid, with the gradients of learned step sizes (LSQ); float32, same shape.

    Args:
        x: real values.
        scale: step size, or one per channel in a shape that broadcasts to that of x.
        zero: zero point, scalar.
        limits: qmin and qmax.
        shared: number of values that share a step size.
    """
    result: torch.Tensor = _LsqRound.apply(x.float(), scale, zero, limits, shared)
    return result


class _LsqRound(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        limits: tuple[float, float],
        shared: int,
    ) -> torch.Tensor:
        """Return x rounded to multiples of `scale`, within the limits; arguments as `lsq_round`."""
        # n and p of the formulas in the module's docstring: the clip range in steps from a real 0
        low, high = (limit - zero.to(x.dtype) for limit in limits)
        # p of the gradient's factor is `high`; or, for a range mostly below 0, -n. The division
        # rounds down, so that -128 to 127 is not mostly below 0
        is_mostly_below = high < (limits[1] - limits[0]) // 2
        step_count = torch.where(is_mostly_below, -low, high)
        scale_grad_factor = torch.rsqrt(shared * step_count)  # 1 / sqrt(N * p) of the formulas
        ctx.save_for_backward(x, scale, low, high, scale_grad_factor)
        return torch.round(x / scale).clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of forward's arguments, from that of its output."""
        x, scale, low, high, scale_grad_factor = ctx.saved_tensors
        (output_grad,) = grads
        steps = x / scale
        is_below = steps <= low
        is_above = steps >= high
        scale_slope = torch.round(steps) - steps  # dy/ds of the formulas
        scale_slope = torch.where(is_above, high, scale_slope)
        scale_slope = torch.where(is_below, low, scale_slope)
        scale_grad = (output_grad * scale_slope).sum_to_size(scale.shape) * scale_grad_factor
        x_grad = output_grad.masked_fill(is_below | is_above, 0.0)
        return x_grad, scale_grad, None, None, None  # zero, limits and shared have no gradient


_MOMENTUM = 0.05  # weight of a new batch in the moving averages of minimum and maximum


def no_range_error(name: str) -> CalibrationError:
    """Return the error for a tensor without a range."""
    return CalibrationError(
        f"every quantized tensor needs data, and none went through {name};"
        " calibrate first, with the inputs that reach it"
    )


class FakeQuant(nn.Module):
    """Fake quantizer of an activation.

    Attributes:
        grid: grid of the integers.
        name: name of the tensor.
        saturation_limits: values beyond which all readers of the tensor saturate, so that lo and hi
            need not lie outside them (`deploy.graph.bounds`); None without such limits.
        range_monitors: the `RangeMonitor` modules that observe, in its place, the tensors from
            which its range comes; empty if it observes its own input.
        observe: whether a forward updates the moving averages.
        enabled: whether a forward rounds.
        calls_per_batch: number of tensors that share this range.
        has_range: whether `set_range` was called; a range that was loaded has `seen` > 0 instead.
        calls_in_batch: number of calls in the present batch.
        batch_extremes: (minimum, maximum) of these calls.
        lo: lower end of the range.
        hi: upper end of the range.
        scale: float32, the real value of a step.
        zero_point: int32, the integer that stands for 0.0.
        seen: number of batches in the moving averages.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    seen: torch.Tensor

    def __init__(self, grid: Grid, name: str):
        super().__init__()
        self.grid = grid
        self.name = name
        self.observe = False  # whether a forward updates the moving averages
        self.enabled = False  # whether a forward rounds
        # where the range, lo to hi, comes from: `deploy.fx.prepare` and `convert` set it
        self.saturation_limits: RangeLimits | None = None
        self.range_monitors: list[nn.Module] = []
        self.has_range = False
        # for the moving averages, see `update`
        self.calls_per_batch = 1
        self.calls_in_batch = 0
        self.batch_extremes: tuple[torch.Tensor, torch.Tensor] | None = None
        # stored in checkpoints, in this order
        self.register_buffer("lo", torch.zeros(()))
        self.register_buffer("hi", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))  # number of batches

    def set_range(self, scale: np.float32, zero_point: int) -> None:
        """Set scale and zero point; moving averages start from them."""
        lo, hi = representable_range(self.grid, scale, zero_point)
        with torch.no_grad():
            self.lo.fill_(-hi if self.grid.symmetric else lo)
            self.hi.fill_(hi)
            self.scale.fill_(float(scale))
            self.zero_point.fill_(zero_point)
            self.seen.clamp_(min=1)
        self.has_range = True

    def learn(self) -> nn.Parameter:
        """Make the scale a trainable parameter and return it."""
        if not isinstance(self.scale, nn.Parameter):
            scale = self.scale_and_zero()[0]
            del self.scale
            self.scale = nn.Parameter(scale.clone())
        return self.scale

    def scale_and_zero(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scale, zero_point): float32 and int32 scalars.

        Raises:
            CalibrationError: there is no range.
        """
        if not self.has_range and not self.calls_in_batch and not int(self.seen):
            raise no_range_error(self.name)
        return self.scale, self.zero_point

    calculate_qparams = scale_and_zero  # the name that torch's custom modules expect

    def update(self, x: torch.Tensor) -> None:
        """Update the moving averages of minimum and maximum (`lo`, `hi`) with one tensor.

        `calls_per_batch` tensors share the range, and arrive one after the other in each batch. The
        extremes of all of them are collected in `batch_extremes`; the averages are updated at the
        last one. Scale and zero point are set anew from the range.

        Raises:
            CalibrationError: the tensor has NaN or Inf.
        """
        lo, hi = torch.aminmax(x.detach().float())
        if not bool(torch.isfinite(lo) & torch.isfinite(hi)):
            raise CalibrationError(
                f"calibration needs finite values, got NaN or Inf in {self.name}"
            )
        if self.saturation_limits is not None:  # the range need not go beyond them
            limits = (self.saturation_limits.floor, self.saturation_limits.ceiling)
            lo = lo.clamp(*limits)
            hi = hi.clamp(*limits)
        if self.batch_extremes is not None:
            lo = torch.minimum(lo, self.batch_extremes[0])
            hi = torch.maximum(hi, self.batch_extremes[1])
        self.batch_extremes = (lo, hi)
        self.calls_in_batch += 1

        is_first_batch = int(self.seen) == 0
        is_batch_complete = self.calls_in_batch == self.calls_per_batch
        if is_first_batch:  # there is no average yet: take the extremes so far
            self.lo.copy_(lo)
            self.hi.copy_(hi)
        elif is_batch_complete:
            self.lo.lerp_(lo, _MOMENTUM)
            self.hi.lerp_(hi, _MOMENTUM)
        if is_batch_complete:
            self.seen += 1
            self.start_batch()
        scale, zero_point = scale_on_grid(float(self.lo), float(self.hi), self.grid)
        self.scale.fill_(float(scale))
        self.zero_point.fill_(zero_point)

    def start_batch(self) -> None:
        """Start a new batch, also after one that was interrupted."""
        self.calls_in_batch = 0
        self.batch_extremes = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, or if enabled x rounded to the grid (float32); same shape."""
        if self.observe:
            self.update(x)
        return self.rounded(x) if self.enabled else x

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Round x to the grid of the present range."""
        scale, zero_point = self.scale_and_zero()
        limits = self.grid.qmin, self.grid.qmax
        if scale.requires_grad:
            shared = x[0].numel() if x.dim() > 1 else x.numel()
            return lsq_round(x, scale, zero_point, limits, shared=shared)
        # float32: bfloat16 (torch.autocast) has fewer significant bits than the grid
        return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero_point, *limits)


UINT8_MAX = UINT8.qmax


class ExportedModule(nn.Module):
    """A module whose `forward` emits ONNX operators where it is `exporting`."""

    exporting = False


class DynamicQuant(ExportedModule):
    """Dynamic quantizer of an activation: uint8 with the range of each batch.

    Source: ONNX operator spec, DynamicQuantizeLinear.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round x to 256 levels between its extremes, with 0 in the range; same shape.

        In an export, emit the ONNX operators that do so.
        """
        if self.exporting:
            quantized, scale, zero_point = torch.onnx.ops.symbolic_multi_out(
                "DynamicQuantizeLinear",
                (x,),
                dtypes=(torch.uint8, torch.float32, torch.uint8),
                shapes=(x.shape, (), ()),
                version=18,
            )
            return _dequantize(quantized, scale, zero_point, x)
        lo, hi = torch.aminmax(x)
        lo = lo.clamp(max=0)
        hi = hi.clamp(min=0)
        scale = (hi - lo) / UINT8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        zero_point = torch.round(-lo / scale).clamp(0, UINT8_MAX)
        integers = torch.clamp(torch.round(x / scale) + zero_point, 0, UINT8_MAX)
        return (integers - zero_point) * scale


def _dequantize(
    quantized: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Emit DequantizeLinear, with the dtype and shape of x, the tensor that was quantized."""
    return torch.onnx.ops.symbolic(
        "DequantizeLinear",
        (quantized, scale, zero_point),
        dtype=x.dtype,
        shape=x.shape,
        version=18,
    )


class FixedQuant(ExportedModule):
    """Activation quantizer with constant scale and zero point.

    It divides by the scale as ONNX QuantizeLinear does, unlike torch's fake quantization, which
    multiplies by 1 / scale: so the integers equal those of a runtime.

    Attributes:
        grid: grid of the integers.
        name: name of the tensor.
        clip_limits: real values of qmin and qmax, which an export needs as constants.
        scale: float32, the real value of a step.
        zero_point: the integer that stands for 0.0, in the grid's dtype.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, grid: Grid, name: str, scale: torch.Tensor, zero_point: torch.Tensor):
        super().__init__()
        dtype = getattr(torch, grid.dtype)
        self.grid = grid
        self.name = name
        self.clip_limits = representable_range(grid, np.float32(scale.item()), int(zero_point))
        self.register_buffer("scale", scale.detach().float().clone())
        self.register_buffer("zero_point", zero_point.detach().to(dtype).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round x to the grid, in real units; same shape and dtype.

        In an export, emit the ONNX operators that do so.
        """
        if self.exporting:
            if self.grid.bits < 8:  # the 8-bit operator does not clip at fewer bits: Clip first
                x = torch.clamp(x, *self.clip_limits)
            quantized = torch.onnx.ops.symbolic(
                "QuantizeLinear",
                (x, self.scale, self.zero_point),
                dtype=self.zero_point.dtype,
                shape=x.shape,
                version=18,
            )
            return _dequantize(quantized, self.scale, self.zero_point, x)
        zero_point = self.zero_point.to(x.dtype)
        integers = torch.round(x / self.scale) + zero_point
        return (integers.clamp(self.grid.qmin, self.grid.qmax) - zero_point) * self.scale
