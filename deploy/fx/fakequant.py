"""Fake quantization: values rounded to a grid and back, while gradients pass straight through.

::

    x --> round(x / scale) + zero_point, clipped to qmin..qmax --> back to real --> y
          gradient: 1 inside the clip range, 0 outside (straight-through estimator)

Scale and zero point come from calibration (`deploy.fx.convert`). While training they stay, or
follow moving averages of minimum and maximum (`observe`), or the scale is trained (`learn`).

`observe` and `enabled` are Python bools, never tensors: a traced or exported graph has no branch on
data. Source: B. Jacob et al., 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.

Rounding to a grid whose step is learned with the weights (LSQ).

::

    v = x / s         n = qmin - zero_point      p = qmax - zero_point
    y = s * round(clip(v, n, p))

    dy/ds =   n  |  round(v) - v  |  p
    dy/dx =   0  |       1        |  0
          v <= n      between      p <= v

A step has far fewer values than what it rounds and feels the sum over all of them, so its gradient
is divided by sqrt(N * p), N the number of values that share it (of activations those of one
sample): then it moves, relative to its size, about as fast as they do. Of a range that lies mostly
below 0, -n stands for p. The zero point stays what calibration gave: the step widens or narrows the
range around 0, and a real 0 stays exact.

Source: S. Esser et al., 2020, "Learned Step Size Quantization", arXiv:1902.08153, equations 1 to 3
and 5, section 2.2.

The searches of `calibrators` on the grids of PyTorch models: what to observe, what it becomes.

They are those of `calib8 build`, on the same statistics, so that the same values give the same
scale and zero point to the bit::

    tensor --> statistic (calibrators.statistics) --> search (calibrators.searches) --> range
           --> calibrators.grids: scale and zero point on the target's grid, of its bits

Where `build` does not follow a method but finds a target's ranges itself, that is the default here
too: AMCT's IFMR for ascend, of activations that come from rounded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from calibrators.amct.ifmr import IfmrHistogram, IfmrParams, ifmr_streaming
from calibrators.amct.recorders import IfmrOf
from calibrators.grids import UINT8, Grid, affine_params, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.statistics import Recorder, Statistic, searched
from deploy.errors import CalibrationError, ConfigError
from deploy.graph.bounds import Reach
from deploy.method import Method
from deploy.targets import Target, named
from deploy.targets.tensorrt.naming import AS_PARSED


def rounded(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    ends: tuple[float, float],
    *,
    shared: int,
) -> torch.Tensor:
    """X on the grid, float32, same shape, with the gradients of LSQ.

    Args:
        x: real values.
        scale: one step, or one a channel in a shape that broadcasts to that of x.
        zero: integer of a real 0, scalar.
        ends: qmin and qmax.
        shared: how many values share a step.
    """
    made: torch.Tensor = _Rounded.apply(x.float(), scale, zero, ends, shared)
    return made


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        ends: tuple[float, float],
        shared: int,
    ) -> torch.Tensor:
        low, high = (end - zero.to(x.dtype) for end in ends)
        wider = torch.where(high >= (ends[1] - ends[0]) // 2, high, -low)
        ctx.save_for_backward(x, scale, low, high, torch.rsqrt(shared * wider))
        return torch.round(x / scale).clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, scale, low, high, factor = ctx.saved_tensors
        (grad,) = grads
        v = x / scale
        under, over = v <= low, v >= high
        slope = torch.where(under, low, torch.where(over, high, torch.round(v) - v))
        to_scale = (grad * slope).sum_to_size(scale.shape) * factor
        return grad.masked_fill(under | over, 0.0), to_scale, None, None, None


OnGrid = tuple[np.float32, int]


class Search(Protocol):
    """A way from the statistics of a tensor to its scale and zero point."""

    @property
    def label(self) -> str:
        """Its name with its parameters, as `build` reports it."""
        ...

    @property
    def statistic(self) -> Statistic:
        """What is to be observed of every tensor."""
        ...

    @property
    def rounded_weights(self) -> bool:
        """Whether it is to see what layers with rounded weights make."""
        ...

    def check(self, grid: Grid) -> None:
        """Refuse a grid that it is not defined for."""
        ...

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point) of a tensor that was observed, within its reach as a build has it."""
        ...


def search_for(target: str | Target, method: Method | str | None = None) -> Search:
    """The search of a target's ranges.

    Args:
        target: of `deploy.targets`, or its name.
        method: of `calibrators.searches`, as "mse" or "percentile 99.9"; None for what `build`
            takes for the target.

    Raises:
        ConfigError: there is no such target or method.
    """
    chosen = named(target) if isinstance(target, str) else target
    if method is None:
        return Ifmr() if chosen.own_method else BY_DEFAULT
    asked = Method.labelled(method) if isinstance(method, str) else method
    whole = chosen.name == "tensorrt" and asked.name in AS_PARSED  # as in the file, cut nowhere
    return ByMethod(asked, bounded=not whole)


@dataclass(frozen=True, slots=True)
class ByMethod:
    """A row of `calibrators.searches.SEARCHES`.

    Attributes:
        method: the row, with its parameters.
        bounded: whether a range keeps to what its readers tell apart.
    """

    method: Method
    bounded: bool = True

    @property
    def label(self) -> str:
        """Name and parameters."""
        return self.method.label

    @property
    def statistic(self) -> Statistic:
        """Of the row."""
        return self.method.statistic

    @property
    def rounded_weights(self) -> bool:
        """No: as in `build`."""
        return False

    def check(self, grid: Grid) -> None:
        """Refuse other bits than 8 where the row is defined for these alone.

        Raises:
            ConfigError: they are other.
        """
        if self.method.integer and grid.bits != 8:
            raise ConfigError(
                f"the method {self.method.name} is defined for 8 bits, got {grid.bits}; take mse,"
                " lp, percentile or minmax"
            )

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point); of a tensor that was always 0, scale 1."""
        assert isinstance(recorder, Histogram)
        if recorder.amax == 0:
            return on_grid(0.0, 0.0, grid)
        kinds = {"symmetric": grid} if grid.symmetric else {"affine": grid}
        search = self.method.search(**kinds)
        found = searched(recorder, search, reach if self.bounded else None)
        ends = (-found.amax, found.amax) if grid.symmetric else (found.lo, found.hi)
        return on_grid(*ends, grid)


BY_DEFAULT: Search = ByMethod(Method.of())


@dataclass(frozen=True, slots=True)
class Ifmr:
    """AMCT's search of activations with its own defaults."""

    @property
    def label(self) -> str:
        """As AMCT names it."""
        return "AMCT's IFMR"

    @property
    def statistic(self) -> Statistic:
        """Of flat memory."""
        return IfmrOf()

    @property
    def rounded_weights(self) -> bool:
        """AMCT calibrates after it has rounded the weights."""
        return True

    def check(self, grid: Grid) -> None:
        """It takes any grid."""

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point); of a tensor that is next to 0 throughout, scale 1.

        AMCT knows no reach.
        """
        assert isinstance(recorder, IfmrHistogram)
        params = IfmrParams(bits=grid.bits, with_offset=not grid.symmetric)
        found = ifmr_streaming(recorder, params)
        return found.scale, found.offset


def widest(found: Sequence[OnGrid], grid: Grid) -> OnGrid:
    """(scale, zero_point) of a range that holds those of several tensors."""
    if len(found) == 1:
        return found[0]
    if grid.symmetric:
        return max(scale for scale, _ in found), 0
    lows = [(grid.qmin - zero) * float(scale) for scale, zero in found]
    highs = [(grid.qmax - zero) * float(scale) for scale, zero in found]
    return on_grid(min(lows), max(highs), grid)


def on_grid(lo: float, hi: float, grid: Grid) -> OnGrid:
    """(scale, zero_point) of a clip range on a grid, as `build` has them; scale 1 of no width."""
    if not grid.symmetric:
        return affine_params(lo, hi, grid)
    scale = symmetric_scale(max(-lo, hi), grid)
    return (scale if scale > 0 else np.float32(1.0)), 0


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
        reach: how far its readers tell values apart (`deploy.graph.bounds`), so that no range goes
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
