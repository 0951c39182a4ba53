"""Quantization-aware training (QAT) of a user's task.

::

    epoch      0 .............. half .......... last third ...... end
    ranges     fixed; or learned; or moving averages, then fixed
    norms      statistics of the batch           frozen (if trained)
    rate       cosine, from the optimizer's own down to 1 / 100

Learned scales, of activations and weights, start from calibration; their gradient is that of
`deploy.fx.fakequant`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import CalibrationError, ConfigError, FeedError, check_whole_number
from deploy.files.guard import refuse_unwritable
from deploy.fx.capture import select_arguments
from deploy.fx.comparison import check_same_outputs
from deploy.fx.convert import (
    calibrate,
    check_quantized_classes,
    convert,
    freeze_norms,
    set_phase,
)
from deploy.fx.device import (
    CPU,
    DeviceAdapter,
    device_of,
    find_device,
    move_tensors,
    refuse_meta,
)
from deploy.fx.distill import Distiller
from deploy.fx.fakequant import FakeQuant
from deploy.fx.int8_layers import QatLayer, WeightQuant
from deploy.fx.model_inputs import floating_dtype
from deploy.fx.plain_copy import computed_weights, plain_copy
from deploy.fx.prepare import prepare_part
from deploy.fx.qat_checkpoint import load_checkpoint, save_checkpoint, training_fingerprint
from deploy.fx.range_search import resolve_target, search_for
from deploy.fx.source import wrap_user_errors
from deploy.fx.task import RANGES, check_task
from deploy.fx.task import Task as Task
from deploy.fx.trace import check_names
from deploy.targets import Target
from deploy.targets.options import changed_options
from deploy.terminal import PrintedResult, phase

Scales = Mapping[str, nn.Parameter]


def learn_scales(prepared: nn.Module) -> Scales:
    """Make all scales of a calibrated model trainable; return them by the name of their tensor.

    Raises:
        CalibrationError: a tensor has no range.
    """
    scales: dict[str, nn.Parameter] = {}
    for name, module in prepared.named_modules():
        if isinstance(module, FakeQuant):
            scales[module.name] = module.learn()
        elif isinstance(module, QatLayer) and isinstance(module.weight_quant, WeightQuant):
            scales[f"the weight of {name}"] = module.weight_quant.learn(module.folded()[0])
    return scales


def copy_scales(scales: Scales) -> list[torch.Tensor]:
    """Return copies of the scales, for `clamp_scales`."""
    return [scale.detach().clone() for scale in scales.values()]


def clamp_scales(scales: Scales, previous_scales: list[torch.Tensor]) -> None:
    """Clamp scales after an optimizer step to at least half of their previous value.

    Raises:
        CalibrationError: a scale is not finite or not positive.
    """
    with torch.no_grad():
        for (name, scale), previous in zip(scales.items(), previous_scales, strict=True):
            scale.copy_(torch.maximum(scale, previous / 2))
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise CalibrationError(
                    f"a learned scale must stay a positive number, got {scale.min():g} of {name};"
                    " train slower, or keep the ranges of calibration"
                )


@dataclass(frozen=True, slots=True, repr=False)
class TrainingResult(PrintedResult):
    """Result of `train`.

    Attributes:
        prepared: the trained model with its fake quantizers.
        converted: its int8 form, for export.
        losses: mean loss of each epoch.
        score_before: result of `evaluate` after calibration and before training (PTQ), or None.
        score_after: result of `evaluate` for `converted`, or None.
    """

    prepared: nn.Module
    converted: nn.Module
    losses: tuple[float, ...]
    score_before: float | None
    score_after: float | None

    @property
    def score_text(self) -> str:
        """Score after training, beside that of calibration alone; "" without `evaluate`."""
        if self.score_after is None:
            return ""
        text = f"after training: {self.score_after:.4f}"
        return text if self.score_before is None else f"{text}, before {self.score_before:.4f}"

    def to_screen(self) -> str:
        """Return the mean loss of each epoch, and the score."""
        lines = [f"epoch {number}: loss {loss:.4f}" for number, loss in enumerate(self.losses, 1)]
        if self.score_text:
            lines.append(self.score_text)
        return "\n".join(lines or ["no epoch was trained"])


def train(
    task: Task,
    *,
    target: str | Target = "onnxruntime",
    bits: int = 8,
    checkpoint: Path | None = None,
    device: torch.device | str | None = None,
    report: Callable[[str], object] = lambda line: None,
) -> TrainingResult:
    """Calibrate the task's model, train it on the target's grid, and convert it.

    Args:
        task: the user's model and data.
        target: as for `deploy.fx.prepare.prepare`.
        bits: of activations and weights, 2 to 8.
        checkpoint: file written after each epoch; if it exists, training resumes from it, with the
            same result as without the interruption.
        device: device to train on; None for that of the task's model. Batches are moved there;
            the returned models are on the CPU.
        report: called with one line per epoch.

    Raises:
        ConfigError, ModelError, FeedError, CalibrationError: as prepare, calibrate and convert;
            or the loss is not finite.
        CacheError: the checkpoint is broken or of another training.
    """
    if not callable(report):
        raise ConfigError(f"report takes a function of one line, got {report!r}")
    if not isinstance(checkpoint, str | PathLike | None):
        raise ConfigError(f"checkpoint takes the path of a file, got {checkpoint!r}")
    task = check_task(task)
    for name in computed_weights(task.model):  # such as by weight norm
        report(f"{name} is computed from other tensors in the model; it is trained directly")
    if device is not None:
        device = find_device(device)
        refuse_meta(device, "a training")
    task = _move_task(task, device)
    target = resolve_target(target)
    prepared = _prepare_task(task, target, bits)

    search = search_for(target, task.method)
    calibrate(prepared, task.calibration or _first_inputs(task), search=search)
    report(f"ranges by {search.label}, {task.ranges}")  # such as "mse, learned"
    score_before = _evaluate(task, prepared)
    if score_before is not None:
        report(f"before training (PTQ, {bits} bits): {score_before:.4f}")

    trainer = _Trainer(task, prepared)
    # a checkpoint with other settings is refused
    settings = _training_settings(task, target, bits, search.label)
    losses = _train_epochs(trainer, settings, checkpoint, report)
    if trainer.distiller is not None:
        trainer.distiller.close()  # its hooks must not be converted

    set_phase(prepared.eval(), observe=False, quantize=True)
    converted = convert(prepared, task.convert)
    score_after = _evaluate(task, converted)
    return TrainingResult(prepared.cpu(), converted.cpu(), tuple(losses), score_before, score_after)


def _train_epochs(
    trainer: "_Trainer",
    settings: Mapping[str, object],
    checkpoint: Path | None,
    report: Callable[[str], object],
) -> list[float]:
    """Train all epochs, or those that a checkpoint lacks; return the mean loss of every epoch.

    Args:
        trainer: trains an epoch.
        settings: `_training_settings`: a checkpoint with other settings is refused.
        checkpoint: as for `train`.
        report: called with one line per epoch.
    """
    task = trainer.task
    prepared = trainer.prepared
    optimizer = trainer.optimizer
    # of the models and settings, not of the data: a checkpoint must have equal ones
    fingerprints = training_fingerprint(
        task.model, prepared, optimizer, teacher=task.teacher, settings=settings
    )
    losses: list[float] = []
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        refuse_unwritable(checkpoint)
        if checkpoint.exists():
            losses = load_checkpoint(checkpoint, fingerprints, prepared, optimizer)
            report(f"going on after epoch {len(losses)} of {checkpoint}")

    remaining_epochs = range(len(losses), task.epochs)
    with phase("training", len(remaining_epochs), "epochs") as show_progress:
        for epoch in remaining_epochs:
            losses.append(trainer.run_epoch(epoch))
            report(f"epoch {epoch + 1}/{task.epochs}: loss {losses[-1]:.4f}")
            if checkpoint is not None:
                save_checkpoint(checkpoint, fingerprints, prepared, optimizer, losses)
            show_progress()
    return losses


def _training_settings(task: Task, target: Target, bits: int, search_label: str) -> dict[str, Any]:
    """Return the settings on which a training depends, in the words of a message about them."""
    return {
        "target": (target.name, changed_options(target)),
        "number of bits": bits,
        "number of epochs": task.epochs,
        "handling of norms": task.norms,
        "kind of ranges": task.ranges,
        "method of ranges": search_label,
        "distillation": (list(task.distil), task.distil_weight),
        "limit of gradients": task.clip_gradient,
        "precision": task.amp,
    }


def first_batches(task: Task) -> list[tuple[Any, ...]]:
    """Return the inputs of the first batches of epoch 0 on the CPU."""
    batches = _first_inputs(task)
    return [move_tensors(select_arguments(inputs, task.model), CPU) for inputs in batches]


def _move_task(task: Task, device: torch.device | None) -> Task:
    """Return the task with copies of its models and its inputs on a device.

    `device`: None for that of the model, which is not copied then.
    """
    inputs = move_tensors(list(task.inputs), device or device_of(task.model))
    moved_task = replace(task, inputs=inputs)
    if device is not None:
        moved_task.model = plain_copy(task.model).to(device)
        if task.teacher is not None:
            moved_task.teacher = plain_copy(task.teacher).to(device)
    return moved_task


def _prepare_task(task: Task, target: Target, bits: int) -> nn.Module:
    """Return a copy of the task's model with fake quantizers, after a check of the task's options.

    Raises:
        ConfigError, ModelError: see `train`; or preparing changes the outputs of the model.
    """
    _check_options(task)
    prepared = prepare_part(
        task.model,
        task.only,
        task.inputs,
        target=target,
        bits=bits,
        norms=task.norms,
        leaves=task.leaves,
        skip=task.skip,
        custom=task.custom,
    )
    # the user's quantized classes; without this check, refused only after the training
    check_quantized_classes(task.convert, prepared)
    if not task.custom:  # observed classes of the user's may compute anything
        original = plain_copy(task.model)  # a run may change its buffers
        check_same_outputs(original, prepared, task.inputs, "tracing and folding BatchNorm")
    return prepared


def _check_options(task: Task) -> None:
    """Raise `ConfigError` for an option of a task that has another type or an unknown value."""
    if task.ranges not in RANGES:
        raise ConfigError(
            f"ranges of a training are one of {', '.join(RANGES)}, got {task.ranges!r};"
            " what finds them first is named by method"
        )
    check_whole_number("epochs", task.epochs, 0)
    check_whole_number("calibration_batches", task.calibration_batches, 0)
    for name in ("distil_weight", "clip_gradient"):
        value = getattr(task, name)
        is_number = isinstance(value, Real)
        if not is_number or not value >= 0:  # nor NaN
            raise ConfigError(f"{name} must be a number, 0 or more, got {value!r}")
    if not isinstance(task.amp, bool):
        raise ConfigError(f"amp must be True or False, got {task.amp!r}")
    check_names(distil=task.distil)  # refuses what is no list; the entries must be pairs besides
    for pair in task.distil:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"distil takes pairs (student's, teacher's), got {pair!r}")
    dtype = floating_dtype(task.model)
    if dtype != torch.float32:
        raise ConfigError(
            f"a model is trained in float32, got {str(dtype).removeprefix('torch.')}; give"
            " model.float() and float32 batches"
        )


def _first_inputs(task: Task) -> Iterable[Any]:
    return (inputs for inputs, _ in islice(task.batches_of(0), task.calibration_batches))


@phase("evaluating")
def _evaluate(task: Task, model: nn.Module) -> float | None:
    if task.evaluate is None:
        return None
    if device_of(model).type != "cpu":
        model = DeviceAdapter(model)
    with torch.no_grad(), wrap_user_errors("evaluate of the task"):
        return float(task.evaluate(model.eval()))


class _Trainer:
    """Trains a prepared and calibrated model, one epoch after the other.

    Attributes:
        optimizer: the task's, of all parameters that are trained.
        initial_rates: learning rate of each group of parameters before the first epoch.
        scales: those that are trained, by the name of their tensor; none unless ranges are learned.
        distiller: adds the teacher's loss; None without a teacher.
    """

    def __init__(self, task: Task, prepared: nn.Module):
        self.task = task
        self.prepared = prepared
        self.scales: Scales = learn_scales(prepared) if task.ranges == "learned" else {}
        trained = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigError(
                "training changes the weights with requires_grad, and the model has none; thaw some"
            )
        with wrap_user_errors("optimizer of the task"):
            self.optimizer = task.optimizer(trained)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            kind = type(self.optimizer).__name__
            raise ConfigError(f"optimizer of the task must return a torch optimizer, got {kind}")
        self.initial_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.distiller: Distiller | None = None
        if task.teacher is not None:
            self.distiller = Distiller(prepared, task.teacher, task.distil, inputs=task.inputs)

    def run_epoch(self, epoch: int) -> float:
        """Train one epoch; return the mean loss of its batches.

        Raises:
            CalibrationError: a loss or a learned scale is not finite.
            FeedError: the epoch has no batch.
        """
        self._begin_epoch(epoch)
        losses = []
        for samples, labels in self.task.batches_of(epoch):
            loss = self._compute_loss(samples, labels)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise CalibrationError(
                    f"the loss must stay finite, got {losses[-1]} in epoch {epoch + 1};"
                    " train slower"
                )
            self.optimizer.zero_grad()
            loss.backward()
            limit = self.task.clip_gradient or math.inf  # 0 is no limit
            nn.utils.clip_grad_norm_(self.prepared.parameters(), limit)
            previous_scales = copy_scales(self.scales)
            with wrap_user_errors("the optimizer's step"):  # LBFGS, for one, needs a closure
                self.optimizer.step()
            clamp_scales(self.scales, previous_scales)
        if not losses:
            raise FeedError(f"an epoch needs at least one batch, got none in epoch {epoch + 1}")
        return sum(losses) / len(losses)

    def _begin_epoch(self, epoch: int) -> None:
        """Set phase and learning rates from the epoch's number alone, for exact resuming."""
        epochs = self.task.epochs
        self.prepared.train()
        follows_data = self.task.ranges == "follow" and epoch < (epochs + 1) // 2
        set_phase(self.prepared, observe=follows_data, quantize=True)
        if epoch >= epochs - epochs // 3:  # the last third
            freeze_norms(self.prepared)
        cosine = 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for group, initial_rate in zip(
            self.optimizer.param_groups, self.initial_rates, strict=True
        ):
            group["lr"] = initial_rate * (0.01 + 0.99 * cosine)

    def _compute_loss(self, samples: Any, labels: Any) -> torch.Tensor:
        """Return the loss of one batch: the task's, and that of the distillation."""
        device = device_of(self.prepared)
        inputs = move_tensors(select_arguments(samples, self.prepared), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.task.amp):
            with wrap_user_errors("forward of the model"):
                output = self.prepared(*inputs)
            with wrap_user_errors("loss of the task"):
                loss = self.task.loss(output, move_tensors(labels, device))
                if self.distiller is not None:
                    loss = loss + self.task.distil_weight * self.distiller.loss(inputs, output)
        # only the sum is checked: with a teacher, the task's own loss may be a constant
        _check_loss(loss)
        return loss


def _check_loss(loss: Any) -> None:
    """Raise `ConfigError` unless a loss is one number with a gradient."""
    if not isinstance(loss, torch.Tensor):
        description = type(loss).__name__
    elif loss.numel() != 1:
        description = f"shape {list(loss.shape)}"
    elif not loss.requires_grad:
        description = "a tensor without gradient"
    else:
        return
    raise ConfigError(f"a loss is one number computed from the model's output, got {description}")
