"""Rounding to a grid whose step is learned with the weights (LSQ).

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
"""

from __future__ import annotations

from typing import Any

import torch


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
