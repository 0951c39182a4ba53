"""Batches through a prepared model: all that reaches a fake quantizer, into its statistic.

Values are brought to the CPU as float32, whatever the model computes in and wherever it is. What no
order can change takes whole batches. What the order shows in (TensorRT's histogram, whose range
starts with the first batch) gets the samples one by one, as in `build`, and the first of them
twice: for what must be known before, and in their place::

    samples   1 2 3 4 | 5 6 7 8 | 9          batches of 4: the ninth fills none
              lead
              statistic ........
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from calibrators.statistics import Recorder, Statistic
from deploy.errors import Calib8Error, CalibrationError, FeedError, ModelError, first_line
from deploy.fx.device import device_of, mapped, moved
from deploy.fx.fakequant import FakeQuant
from deploy.fx.watched import Watch
from deploy.progress import phase

Recorders = dict[nn.Module, Recorder]


def observed(
    model: nn.Module, batches: Iterable[Any], statistic: Statistic
) -> tuple[Recorders, int]:
    """A recorder of each tensor that gives a range and was reached, and how many runs were made.

    Its key is the `Watch` on it, or else the fake quantizer that it goes through.

    Args:
        model: prepared, its quantizers off, in eval mode.
        batches: a tensor, or a tuple of inputs, each; batch first.
        statistic: what to observe.

    Raises:
        CalibrationError: NaN or Inf in a tensor.
        FeedError: fewer samples than the first batch of the statistic.
        ModelError: the model does not run for one sample, where they are taken one by one.
    """
    lead = statistic.lead
    if lead is None:
        return _pass(model, batches, lambda quant: statistic.recorder(None))
    size = lead.samples or 1
    samples = _in_whole_batches(chain.from_iterable(map(_samples, batches)), size)
    first = list(islice(samples, size))
    try:
        leads, _ = _pass(model, first, lambda quant: lead.recorder(None))
    except Calib8Error:
        raise
    except Exception as error:  # whatever a user's model raises
        raise ModelError(
            "a method that sees samples one by one needs a model that runs for a batch of 1,"
            f" got: {first_line(error)}; take another method"
        ) from error
    return _pass(model, chain(first, samples), lambda quant: statistic.recorder(leads.get(quant)))


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """A batch as the arguments of a forward."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _pass(
    model: nn.Module, batches: Iterable[Any], make: Callable[[nn.Module], Recorder]
) -> tuple[Recorders, int]:
    recorders: Recorders = {}
    looked_at = [module for module in model.modules() if _gives_range(module)]
    hook = partial(_record, recorders, make)
    hooks = [module.register_forward_pre_hook(hook) for module in looked_at]
    count, device = 0, device_of(model)
    total = len(batches) if isinstance(batches, Sized) else None
    try:
        with phase("calibration", total, "batches") as step, torch.no_grad():
            for batch in batches:
                model(*moved(as_inputs(batch), device))
                count += 1
                step()
    finally:
        for one in hooks:
            one.remove()
    return recorders, count


def _gives_range(module: nn.Module) -> bool:
    return isinstance(module, Watch) or (isinstance(module, FakeQuant) and not module.watches)


def _record(
    recorders: Recorders, make: Callable[[nn.Module], Recorder], quant: nn.Module, inputs: Any
) -> None:
    assert isinstance(quant, FakeQuant | Watch)
    values = inputs[0].detach().float()
    if not bool(torch.isfinite(values).all()):
        raise CalibrationError(f"calibration needs finite values, got NaN or Inf in {quant.name}")
    if values.numel():
        if quant not in recorders:
            recorders[quant] = make(quant)
        recorders[quant].observe(values.cpu().numpy())


def _samples(batch: Any) -> Iterator[tuple[Any, ...]]:
    """A batch as batches of one."""
    inputs = as_inputs(batch)
    sizes: list[int] = []
    mapped(inputs, lambda tensor: sizes.extend(tensor.shape[:1]))
    for at in range(sizes[0] if sizes else 1):
        yield mapped(inputs, partial(_sample, at))


def _sample(at: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[at : at + 1] if tensor.ndim else tensor


def _in_whole_batches(samples: Iterable[Any], size: int) -> Iterator[Any]:
    """The samples that fill batches of that size; the last few may fill none."""
    waiting: list[Any] = []
    whole = 0
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == size:
            yield from waiting
            whole += 1
            waiting = []
    if not whole:
        raise FeedError(
            f"TensorRT calibrates in whole batches, got {len(waiting)} samples for batches of"
            f" {size}; give more of them or a smaller batch"
        )
