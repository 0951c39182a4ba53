"""The phases of a prepared model: observing ranges, quantizing with them, freezing its norms."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from deploy.errors import FeedError
from deploy.fx.fakequant import FakeQuant, no_data
from deploy.fx.int8_layers import QatConvBn, WeightQuant
from deploy.fx.observe import Recorders, observed
from deploy.fx.search import BY_DEFAULT, OnGrid, Search, widest
from deploy.progress import phase


def set_phase(prepared: nn.Module, *, observe: bool, quantize: bool) -> None:
    """Switch all observers and all fake quantizers of a prepared model on or off."""
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.observe, module.enabled = observe, quantize
            module.start_batch()
        elif isinstance(module, WeightQuant):
            module.enabled = quantize


def calibrate(prepared: nn.Module, batches: Iterable[Any], *, search: Search = BY_DEFAULT) -> int:
    """Find the range of every fake quantizer from batches; gives how many runs that took.

    Afterwards the fake quantizers are on and follow nothing.

    Args:
        prepared: by `deploy.fx.prepare`.
        batches: a tensor, or a tuple of inputs, each; batch first. Their size changes nothing.
        search: of `deploy.fx.search.search_for`.

    Raises:
        ConfigError: the search is not defined for the grid.
        FeedError: no batch.
        CalibrationError: NaN or Inf in a tensor, or a tensor that no data reached.
    """
    quants = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    for quant in quants:
        search.check(quant.grid)
    set_phase(prepared, observe=False, quantize=False)
    _round_weights(prepared, search.rounded_weights)
    training = prepared.training
    prepared.eval()
    recorders, count = observed(prepared, batches, search.statistic)
    if not count:
        raise FeedError("calibration needs at least one batch, got none")
    prepared.train(training)
    with phase("ranges", len(quants), "tensors") as step:
        for quant in quants:
            quant.settle(*_range(quant, recorders, search))
            step()
    set_phase(prepared, observe=False, quantize=True)
    return count


def _range(quant: FakeQuant, recorders: Recorders, search: Search) -> OnGrid:
    """(scale, zero_point) of what a quantizer has its range of: itself, or what it watches."""
    found = []
    for source in quant.watches or [quant]:
        if source not in recorders:
            raise no_data(quant.name)
        found.append(search.on(recorders[source], quant.grid, source.reach))
    return widest(found, quant.grid)


def _round_weights(prepared: nn.Module, enabled: bool) -> None:
    for module in prepared.modules():
        if isinstance(module, WeightQuant):
            module.enabled = enabled


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
