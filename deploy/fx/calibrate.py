"""The phases of a prepared model: observing ranges, quantizing with them, freezing its norms."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deploy.errors import FeedError
from deploy.fx.device import device_of, moved
from deploy.fx.fakequant import FakeQuant
from deploy.fx.layers import QatConvBn, WeightQuant


def set_phase(prepared: nn.Module, *, observe: bool, quantize: bool) -> None:
    """Switch all observers and all fake quantizers of a prepared model on or off."""
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.observe, module.enabled = observe, quantize
            module.start_batch()
        elif isinstance(module, WeightQuant):
            module.enabled = quantize


def calibrate(prepared: nn.Module, batches: Iterable[Any]) -> int:
    """Run batches (a tensor, or a tuple of inputs) through the observers; gives how many.

    Afterwards the fake quantizers are on and the observers off.

    Raises:
        FeedError: no batch.
        CalibrationError: NaN or Inf in a tensor, or a tensor that no data reached.
    """
    set_phase(prepared, observe=True, quantize=False)
    training = prepared.training
    prepared.eval()
    count = 0
    with torch.no_grad():
        for batch in batches:
            prepared(*moved(as_inputs(batch), device_of(prepared)))
            count += 1
    if not count:
        raise FeedError("calibration needs at least one batch, got none")
    prepared.train(training)
    for quant in observers_of(prepared).values():
        quant.parameters_of_grid()  # says which tensor saw no data
    set_phase(prepared, observe=False, quantize=True)
    return count


def float_form(prepared: nn.Module) -> nn.Module:
    """A copy of a prepared model that computes in float with the weights it has by now."""
    form = copy.deepcopy(prepared).eval()
    set_phase(form, observe=False, quantize=False)
    return form


def freeze_norms(prepared: nn.Module) -> int:
    """Stop all BatchNorms trained with their layers from following the batch; gives how many."""
    layers = [module for module in prepared.modules() if isinstance(module, QatConvBn)]
    for layer in layers:
        layer.frozen = True
    return len(layers)


def observers_of(prepared: nn.Module) -> dict[str, FakeQuant]:
    """Tensor name -> its `FakeQuant`, in the model's order."""
    found = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    return {quant.name: quant for quant in found}


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """A batch as the arguments of a forward."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
