"""The least scales of a layer's weight with which no x86 CPU saturates, in PyTorch.

As `calibrators.weights` has them, for weights that are still trained, on any device.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from calibrators.weights import FIT, ROUNDED, is_depthwise, step_of


def least_scales(
    weight: torch.Tensor, *, transposed: bool = False, groups: int = 1
) -> torch.Tensor | None:
    """What the scales of a weight must not fall below; None where any will do.

    Args:
        weight: of a Conv, ConvTranspose or Linear, in real units.
        transposed: whether it is a ConvTranspose's.
        groups: of the layer.

    Returns:
        float32 [C_out].
    """
    if is_depthwise(groups, *weight.shape[:2]) or (transposed and groups > 1):
        return None  # the latter stays in float
    rows = weight.transpose(0, 1) if transposed else weight
    step = step_of(rows.shape)
    flat = rows.detach().float().movedim(1, -1).flatten(1)
    wide = functional.pad(flat, (0, 2))
    left, right = wide[:, 0:-2:step], wide[:, 1:-1:step]
    one_sign = (left > 0) == (right > 0)
    left, right = left.abs(), right.abs()
    both = (left + right).clamp(max=torch.finfo(torch.float32).max)
    sums = torch.where(one_sign, both, torch.maximum(left, right))
    return sums.amax(1) / (FIT - ROUNDED)
