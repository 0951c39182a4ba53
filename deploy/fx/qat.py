"""Training for int8: a user's task, its schedule, and what came of it.

::

    epoch      0 .............. half .......... last third ...... end
    ranges     follow the data  fixed
    norms      follow the batch                  frozen (where trained)
    rate       cosine, from the optimizer's own down to 1 / 100
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import CalibrationError, ConfigError, FeedError
from deploy.fx import checkpoint as checkpoints
from deploy.fx.calibrate import as_inputs, calibrate, freeze_norms, set_phase
from deploy.fx.convert import CustomClasses, convert
from deploy.fx.distill import Distiller
from deploy.fx.placement import SHARED
from deploy.fx.prepare import prepare, prepare_only
from deploy.fx.ranges import search_ranges
from deploy.progress import phase

Batches = Callable[[int], Iterable[tuple[Any, Any]]]


@dataclass(kw_only=True)
class Task:
    """What `setup()` of a training script returns.

    Attributes:
        model: trained in float.
        inputs: example inputs, batch first.
        batches: epoch -> (input or tuple of inputs, label) batches; the same for the same epoch.
        loss: (output, label) -> scalar.
        evaluate: model -> a figure to report, larger is better.
        calibration: () -> inputs to find the first ranges with; by default the first
            `calibration_batches` of epoch 0.
        optimizer: parameters -> optimizer.
        epochs: how many.
        teacher: float model to distil from.
        distil: (student's, teacher's) modules whose maps are compared.
        distil_weight: weight of the distillation loss.
        clip_gradient: largest norm of all gradients together.
        leaves, skip, share, custom, norms: as `deploy.fx.prepare.prepare`.
        ranges: "ema", moving averages of minimum and maximum that follow the training data; or
            "mse", searched once after calibration and then kept, better at few bits.
        only: submodule to quantize; the rest is trained with it, in float.
        convert: observed class -> quantized class, as `deploy.fx.convert.convert`.
    """

    model: nn.Module
    inputs: Sequence[torch.Tensor]
    batches: Batches
    loss: Callable[[Any, Any], torch.Tensor]
    evaluate: Callable[[nn.Module], float] | None = None
    calibration: Callable[[], Iterable[Any]] | None = None
    calibration_batches: int = 8
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.SGD(parameters, 0.01, 0.9, nesterov=True)
    )
    epochs: int = 3
    teacher: nn.Module | None = None
    distil: Sequence[tuple[str, str]] = ()
    distil_weight: float = 1.0
    clip_gradient: float = 1.0
    leaves: Sequence[str | type[nn.Module]] = ()
    skip: Sequence[str] = ()
    share: Sequence[str] = SHARED
    custom: CustomClasses | None = None
    convert: CustomClasses | None = None
    norms: str = "fold"
    only: str | None = None
    ranges: str = "ema"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training for int8 gave.

    Attributes:
        prepared: the trained model with fake quantizers.
        converted: its int8 form, for export.
        losses: mean loss of each epoch.
        start: figure of `evaluate` after calibration, before training (that is, PTQ), or None.
        end: the same of `converted`.
    """

    prepared: nn.Module
    converted: nn.Module
    losses: tuple[float, ...]
    start: float | None
    end: float | None


def train(
    task: Task,
    *,
    target: str = "onnxruntime",
    bits: int = 8,
    checkpoint: Path | None = None,
    report: Callable[[str], object] = lambda line: None,
) -> Trained:
    """Calibrate the task's model, train it on the target's grid, convert it.

    Args:
        task: the user's model and data.
        target: onnxruntime, tensorrt or ascend.
        bits: of activations and weights, 2 to 8.
        checkpoint: written after each epoch; where it exists, training goes on from it and ends
            as it would have without the break.
        report: called with one line on each epoch.

    Raises:
        ConfigError, ModelError, FeedError, CalibrationError: as prepare, calibrate and convert;
            or the loss is no longer a finite number.
        CacheError: a checkpoint that is broken or of another training.
    """
    prepared = _prepared(task, target, bits)
    batches = task.calibration or (lambda: _first_inputs(task))
    calibrate(prepared, batches())
    if task.ranges == "mse":
        search_ranges(prepared, batches())
    start = _figure(task, prepared)
    if start is not None:
        report(f"before training (PTQ, {bits} bits): {start:.4f}")
    optimizer = task.optimizer([p for p in prepared.parameters() if p.requires_grad])
    rates = [group["lr"] for group in optimizer.param_groups]
    mark = checkpoints.fingerprint(prepared, target, bits, task.epochs, task.norms, task.ranges)
    first, losses = 0, list[float]()
    if checkpoint is not None and checkpoint.exists():
        first, losses = checkpoints.resume(checkpoint, mark, prepared, optimizer)
        report(f"going on after epoch {first} of {checkpoint}")
    distiller = None
    if task.teacher is not None:
        distiller = Distiller(prepared, task.teacher, task.distil, inputs=task.inputs)
    try:
        with phase("training", task.epochs - first, "epochs") as step:
            for epoch in range(first, task.epochs):
                _begin(epoch, task, prepared, optimizer, rates)
                losses.append(_epoch(task, epoch, prepared, optimizer, distiller))
                report(f"epoch {epoch + 1}/{task.epochs}: loss {losses[-1]:.4f}")
                if checkpoint is not None:
                    checkpoints.save(checkpoint, mark, epoch + 1, prepared, optimizer, losses)
                step()
    finally:
        if distiller is not None:
            distiller.close()
    set_phase(prepared.eval(), observe=False, quantize=True)
    converted = convert(prepared, task.convert)
    return Trained(prepared, converted, tuple(losses), start, _figure(task, converted))


def first_batches(task: Task) -> list[tuple[Any, ...]]:
    """The inputs of the first batches of epoch 0, to calibrate or to compare with."""
    return [as_inputs(x) for x in _first_inputs(task)]


def _prepared(task: Task, target: str, bits: int) -> nn.Module:
    if task.ranges not in ("ema", "mse"):
        raise ConfigError(f"ranges are 'ema' or 'mse', got {task.ranges!r}")
    if task.epochs < 0:
        raise ConfigError(f"epochs must be 0 or more, got {task.epochs}")
    model = task.model if task.norms == "train" else task.model.eval()
    options: dict[str, Any] = {
        "target": target,
        "bits": bits,
        "norms": task.norms,
        "leaves": task.leaves,
        "skip": task.skip,
        "share": task.share,
        "custom": task.custom,
    }
    if task.only is not None:
        return prepare_only(model, task.only, task.inputs, **options)
    return prepare(model, task.inputs, **options)


def _first_inputs(task: Task) -> Iterable[Any]:
    return (inputs for inputs, _ in islice(iter(task.batches(0)), task.calibration_batches))


def _figure(task: Task, model: nn.Module) -> float | None:
    if task.evaluate is None:
        return None
    with torch.no_grad():
        return float(task.evaluate(model.eval()))


def _begin(
    epoch: int,
    task: Task,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    rates: Sequence[float],
) -> None:
    """Set the phase and the rates of an epoch, from its number alone, so that resuming is exact."""
    epochs = task.epochs
    prepared.train()
    following = task.ranges == "ema" and epoch < (epochs + 1) // 2
    set_phase(prepared, observe=following, quantize=True)
    if epoch >= epochs - epochs // 3:
        freeze_norms(prepared)
    cosine = 0.5 * (1 + math.cos(math.pi * epoch / max(epochs, 1)))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * (0.01 + 0.99 * cosine)


def _epoch(
    task: Task,
    epoch: int,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    distiller: Distiller | None,
) -> float:
    total, count = 0.0, 0
    for inputs, labels in task.batches(epoch):
        arguments = as_inputs(inputs)
        output = prepared(*arguments)
        loss = task.loss(output, labels)
        if distiller is not None:
            loss = loss + task.distil_weight * distiller.loss(arguments, output)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise CalibrationError(
                f"the loss must stay finite, got {value} in epoch {epoch + 1}; train slower"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(prepared.parameters(), task.clip_gradient)
        optimizer.step()
        total, count = total + value, count + 1
    if not count:
        raise FeedError(f"an epoch needs at least one batch, got none in epoch {epoch + 1}")
    return total / count
