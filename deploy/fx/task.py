"""What a training script says: a model, its data, and how it is to be trained for int8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deploy.fx.convert import CustomClasses
from deploy.method import Method

RANGES = ("kept", "follow", "learned")

Batches = Callable[[int], Iterable[tuple[Any, Any]]]


@dataclass(kw_only=True)
class Task:
    """What `setup()` of a training script returns.

    Attributes:
        model: trained in float.
        inputs: example inputs, batch first; or one dict of them, by the names of forward's
            arguments, or by the keys of the dict that is its only one.
        batches: epoch -> (input, tuple or dict of inputs; label) batches; the same for the same
            epoch.
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
        method: search of the first ranges, by its name in `build`, with parameters behind it
            ("percentile 99.9"); None for what `build` takes for the target.
        ranges: "kept" as they were found; "follow", moving averages of minimum and maximum of the
            training data for half of the epochs; or "learned", scales of activations and weights
            trained by their gradients (`deploy.fx.lsq`).
        only: submodule to quantize; the rest is trained with it, in float.
        amp: compute forward and loss in bfloat16 where torch.autocast does; ranges, weights and
            what is exported stay float32.
        convert: observed class -> quantized class, as `deploy.fx.convert.convert`.
    """

    model: nn.Module
    inputs: Sequence[Any]
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
    share: Sequence[str] = ()
    custom: CustomClasses | None = None
    convert: CustomClasses | None = None
    norms: str = "fold"
    only: str | None = None
    method: Method | str | None = None
    ranges: str = "kept"
    amp: bool = False
