"""Fake quantization: values rounded to a grid and back, while gradients pass straight through.

::

    x --> round(x / scale) + zero_point, clipped to qmin..qmax --> back to real --> y
          gradient: 1 inside the clip range, 0 outside (straight-through estimator)

Scale and zero point come from calibration (`deploy.fx.calibrate`). While training they stay, or
follow moving averages of minimum and maximum (`observe`), or the scale is trained (`learn`).

`observe` and `enabled` are Python bools, never tensors: a traced or exported graph has no branch on
data. Source: B. Jacob et al., 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from calibrators.grids import UINT8, Grid
from deploy.errors import CalibrationError
from deploy.fx.lsq import rounded
from deploy.fx.search import on_grid
from deploy.graph.reach import Reach


def no_data(name: str) -> CalibrationError:
    """A tensor has no range yet."""
    return CalibrationError(
        f"every quantized tensor needs data, and none went through {name};"
        " calibrate first, with the inputs that reach it"
    )


class FakeQuant(nn.Module):
    """An activation's fake quantizer.

    Args:
        grid: the target's integers.
        name: the tensor's name, for messages.
        momentum: weight of a new batch in the moving average of min and max that `observe` follows;
            1 keeps the extremes of all batches instead.
        reach: how far its readers tell values apart (`deploy.graph.reach`), so that no range goes
            further; None for no end.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    seen: torch.Tensor

    def __init__(
        self, grid: Grid, name: str, *, momentum: float = 0.05, reach: Reach | None = None
    ):
        super().__init__()
        self.grid = grid
        self.name = name
        self.momentum = momentum
        self.reach = reach
        self.watches: list[nn.Module] = []  # whose values give the range; none for what goes in
        self.observe = False
        self.enabled = False
        self.members = 1  # tensors of a batch that share this range, which is that of them all
        self.known = False  # whether there is a range; `seen` says so of one that was loaded
        self.calls = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.register_buffer("lo", torch.zeros(()))
        self.register_buffer("hi", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))  # float32: the real value of one step
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))  # of a real 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def settle(self, scale: np.float32, zero: int) -> None:
        """Take a scale and a zero point, from which following goes on."""
        ends = ((end - zero) * float(scale) for end in (self.grid.qmin, self.grid.qmax))
        lo, hi = ends
        with torch.no_grad():
            self.lo.fill_(-hi if self.grid.symmetric else lo)
            self.hi.fill_(hi)
            self.scale.fill_(float(scale))
            self.zero_point.fill_(zero)
            self.seen.clamp_(min=1)
        self.known = True

    def learn(self) -> nn.Parameter:
        """Let the scale be trained from now on, as a parameter of the model."""
        if not isinstance(self.scale, nn.Parameter):
            scale = self.parameters_of_grid()[0]
            del self.scale
            self.scale = nn.Parameter(scale.clone())
        return self.scale

    def parameters_of_grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero_point): float32 and int32 scalars.

        Raises:
            CalibrationError: nothing was observed.
        """
        if not self.known and not self.calls and not int(self.seen):
            raise no_data(self.name)
        return self.scale, self.zero_point

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`parameters_of_grid` under the name that custom modules expect of an observer."""
        return self.parameters_of_grid()

    def update(self, x: torch.Tensor) -> None:
        """Take the extremes of one tensor of a batch into the range.

        Raises:
            CalibrationError: the batch holds NaN or Inf.
        """
        lo, hi = torch.aminmax(x.detach().float())
        if not bool(torch.isfinite(lo) & torch.isfinite(hi)):
            raise CalibrationError(
                f"calibration needs finite values, got NaN or Inf in {self.name}"
            )
        if self.reach is not None:
            lo, hi = (end.clamp(self.reach.floor, self.reach.ceiling) for end in (lo, hi))
        if self.pending is not None:
            lo, hi = torch.minimum(lo, self.pending[0]), torch.maximum(hi, self.pending[1])
        self.pending = (lo, hi)
        self.calls += 1
        if not int(self.seen):
            self.lo.copy_(lo)
            self.hi.copy_(hi)
        elif self.calls == self.members:
            self._move(lo, hi)
        if self.calls == self.members:
            self.seen += 1
            self.start_batch()
        scale, zero = on_grid(float(self.lo), float(self.hi), self.grid)
        self.scale.fill_(float(scale))
        self.zero_point.fill_(zero)

    def start_batch(self) -> None:
        """Forget what was seen of a batch that is over, or was broken off."""
        self.calls, self.pending = 0, None

    def _move(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        """Follow the extremes of one more batch."""
        if self.momentum == 1:
            self.lo.copy_(torch.minimum(self.lo, lo))
            self.hi.copy_(torch.maximum(self.hi, hi))
        else:
            self.lo.lerp_(lo, self.momentum)
            self.hi.lerp_(hi, self.momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X, or its rounding to the grid once enabled, float32; same shape."""
        if self.observe:
            self.update(x)
        return self.rounded(x) if self.enabled else x

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """X rounded to the grid of the present range."""
        scale, zero = self.parameters_of_grid()
        ends = self.grid.qmin, self.grid.qmax
        if scale.requires_grad:
            shared = x[0].numel() if x.dim() > 1 else x.numel()
            return rounded(x, scale, zero, ends, shared=shared)
        # float32: a value of bfloat16 (torch.autocast) has fewer digits than the grid has steps
        return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, *ends)


class DynamicQuant(nn.Module):
    """An activation quantized by each batch's own range, unsigned 8 bits, as DynamicQuantizeLinear.

    Source: ONNX operator spec, DynamicQuantizeLinear.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.exporting = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X rounded to 256 levels between its own extremes, 0 among them."""
        if self.exporting:
            return self.symbolic(x)
        lo, hi = torch.aminmax(x)
        lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        scale = (hi - lo) / UINT8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        zero = torch.round(-lo / scale).clamp(0, UINT8_MAX)
        return (torch.clamp(torch.round(x / scale) + zero, 0, UINT8_MAX) - zero) * scale

    def start_export(self) -> None:
        """From now on `forward` writes ONNX operators; not to be undone."""
        self.exporting = True

    def symbolic(self, x: torch.Tensor) -> torch.Tensor:
        """The ONNX form; only inside an export, where operators compute nothing."""
        q, scale, zero = torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear",
            (x,),
            dtypes=(torch.uint8, torch.float32, torch.uint8),
            shapes=(x.shape, (), ()),
            version=18,
        )
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (q, scale, zero), dtype=x.dtype, shape=x.shape, version=18
        )


class FixedQuant(nn.Module):
    """A trained or calibrated activation quantizer: scale and zero point are constants.

    Unlike torch's fake quantization, which multiplies by 1 / scale, it divides, as ONNX
    QuantizeLinear does, so that a runtime's integers are the same.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, grid: Grid, name: str, scale: torch.Tensor, zero: torch.Tensor):
        super().__init__()
        self.grid = grid
        self.name = name
        self.exporting = False
        self.ends = (0.0, 0.0)
        self.register_buffer("scale", scale.detach().float().clone())
        self.register_buffer("zero_point", zero.detach().to(getattr(torch, grid.dtype)).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X rounded to the grid, in real units; same shape and dtype."""
        if self.exporting:
            return self.symbolic(x)
        zero = self.zero_point.to(x.dtype)
        steps = torch.round(x / self.scale) + zero
        return (steps.clamp(self.grid.qmin, self.grid.qmax) - zero) * self.scale

    def start_export(self) -> None:
        """From now on `forward` writes ONNX operators; not to be undone."""
        self.exporting = True
        scale, zero = float(self.scale), int(self.zero_point)
        self.ends = ((self.grid.qmin - zero) * scale, (self.grid.qmax - zero) * scale)

    def symbolic(self, x: torch.Tensor) -> torch.Tensor:
        """The ONNX form; only inside an export, where operators compute nothing."""
        if self.grid.bits < 8:  # the 8-bit operator does not clip at fewer bits: Clip first
            x = torch.clamp(x, *self.ends)
        constants = (self.scale, self.zero_point)
        q = torch.onnx.ops.symbolic(
            "QuantizeLinear",
            (x, *constants),
            dtype=self.zero_point.dtype,
            shape=x.shape,
            version=18,
        )
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (q, *constants), dtype=x.dtype, shape=x.shape, version=18
        )


UINT8_MAX = UINT8.qmax
