"""Scales that are trained with the weights, of activations and of weights: one option of QAT.

They start where calibration left them, and their gradient is that of `deploy.fx.lsq`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deploy.errors import CalibrationError
from deploy.fx.fakequant import FakeQuant
from deploy.fx.int8_layers import QatLayer

Scales = Mapping[str, nn.Parameter]


def learn(prepared: nn.Module) -> Scales:
    """Make all scales of a calibrated model parameters; gives them by the names of their owners.

    Raises:
        CalibrationError: a tensor without a range.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in prepared.named_modules():
        if isinstance(module, FakeQuant):
            found[module.name] = module.learn()
        elif isinstance(module, QatLayer):
            found[f"the weight of {name}"] = module.weight_quant.learn(module.folded()[0])
    return found


def values_of(scales: Scales) -> list[torch.Tensor]:
    """What the scales are now, for `hold`."""
    return [scale.detach().clone() for scale in scales.values()]


def hold(scales: Scales, before: list[torch.Tensor]) -> None:
    """Keep scales positive after a step of the optimizer: a step at most halves one.

    Args:
        scales: after the step.
        before: `values_of` them before it.

    Raises:
        CalibrationError: one is no finite number, or nothing is left of it.
    """
    with torch.no_grad():
        for (name, scale), old in zip(scales.items(), before, strict=True):
            scale.copy_(torch.maximum(scale, old / 2))
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise CalibrationError(
                    f"a learned scale must stay a positive number, got {scale.min():g} of {name};"
                    " train slower, or keep the ranges of calibration"
                )
