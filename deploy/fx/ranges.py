"""Shorter ranges than minimum to maximum, where rounding costs more than clipping does.

For each tensor the factor on its calibrated range is searched that makes the mean squared error
of quantizing least, over all batches::

    error  |  *                     *
           |    *               *        left: few values are clipped off, but by much
           |       *        *            right: every value is rounded more coarsely
           |           **
           `---------------------------> factor 0.3 .. 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deploy.fx.calibrate import as_inputs, observers_of, set_phase
from deploy.fx.device import device_of, moved
from deploy.fx.fakequant import FakeQuant

FACTORS = tuple(i / 20 for i in range(20, 5, -1))  # ties go to the longer range


def search_ranges(prepared: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Shorten the ranges of a calibrated model; gives tensor name -> factor chosen.

    Args:
        prepared: after `calibrate`.
        batches: a tensor, or a tuple of inputs, each.
    """
    quants = observers_of(prepared)
    errors = {name: torch.zeros(len(FACTORS), dtype=torch.float64) for name in quants}
    hooks = [
        quant.register_forward_pre_hook(_measuring(errors[name])) for name, quant in quants.items()
    ]
    set_phase(prepared, observe=False, quantize=False)
    training = prepared.training
    prepared.eval()
    with torch.no_grad():
        for batch in batches:
            prepared(*moved(as_inputs(batch), device_of(prepared)))
    for hook in hooks:
        hook.remove()
    prepared.train(training)
    set_phase(prepared, observe=False, quantize=True)
    chosen = {name: FACTORS[int(errors[name].argmin())] for name in quants}
    for name, quant in quants.items():
        quant.lo *= chosen[name]
        quant.hi *= chosen[name]
    return chosen


def _measuring(errors: torch.Tensor) -> Callable[[FakeQuant, Any], None]:
    """A hook that adds each factor's squared error on one batch to `errors`."""

    def measure(quant: FakeQuant, inputs: Any) -> None:
        (x,) = inputs
        lo, hi = quant.lo.clone(), quant.hi.clone()
        for i, factor in enumerate(FACTORS):
            quant.lo.copy_(lo * factor)
            quant.hi.copy_(hi * factor)
            errors[i] += float((quant.rounded(x) - x).double().square().sum())
        quant.lo.copy_(lo)
        quant.hi.copy_(hi)

    return measure
