"""The task of a training script: a model, its data, and the options of its training.

`read_batches` reads calib8's calibration data as torch batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from deploy.errors import ConfigError, FeedError
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.loaders import iterate_items
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.sampling import Limit
from deploy.files.usercode import wrap_user_errors
from deploy.fx.capture import example_tensors
from deploy.fx.convert import CustomClasses
from deploy.fx.plain_copy import unwrap
from deploy.fx.trace import Leaves
from deploy.method import Method
from deploy.tensors import TensorSpec

RANGES = ("kept", "follow", "learned")

Batches = Iterable[tuple[Any, Any]]


@dataclass(kw_only=True)
class Task:
    """A training task, returned by `setup()` of a training script.

    Attributes:
        model: a model trained in float.
        inputs: example inputs, batch first, in the order of forward's arguments.
        batches: epoch -> iterable of (inputs, label), with the same batches each time; or a loader,
            read once an epoch. inputs is a tensor or a tuple of them.
        loss: (output, label) -> scalar.
        evaluate: model -> a number to report, larger is better.
        calibration: () -> inputs for the calibration; by default the first `calibration_batches`
            of epoch 0.
        optimizer: parameters -> optimizer.
        epochs: number of epochs.
        teacher: float model to distil from.
        distil: (student's, teacher's) modules whose maps are compared.
        distil_weight: weight of the distillation loss.
        clip_gradient: maximum norm of all gradients together; 0 for no limit.
        leaves: modules to keep as one node and in float, by name, class name or class.
        skip: names of layers to leave in float.
        custom: float class -> observed class with `from_float`.
        convert: observed class -> quantized class, as for `deploy.fx.convert.convert`.
        norms: "fold" BatchNorms first, or "train" them with their layers.
        only: submodule to quantize; the rest is trained with it, in float.
        method: range search of the calibration, as in `build`, with its parameters
            ("percentile 99.9"); None for the default of `build` for the target.
        ranges: "kept", fixed after calibration; "follow", moving averages of minimum and maximum
            during half of the epochs; or "learned", scales of activations and weights trained by
            gradient (`deploy.fx.fakequant`).
        amp: use torch.autocast with bfloat16 for forward and loss; ranges, weights and the
            exported model stay float32.
    """

    model: nn.Module
    inputs: Sequence[Any]
    batches: Callable[[int], Batches] | Batches
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
    leaves: Leaves = ()
    skip: Sequence[str] = ()
    custom: CustomClasses | None = None
    convert: CustomClasses | None = None
    norms: str = "fold"
    only: str | None = None
    method: Method | str | None = None
    ranges: str = "kept"
    amp: bool = False

    def batches_of(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of an epoch.

        Raises:
            FeedError: a batch is no pair of inputs and label, or the user's code failed.
        """
        batches = self.batches
        if callable(batches):
            with wrap_user_errors("batches of the task", error=FeedError):
                batches = batches(epoch)
        items, _has_end = iterate_items(batches)
        for batch in items:
            is_sequence = isinstance(batch, tuple | list)
            if not is_sequence or len(batch) != 2:
                size = f" of {len(batch)}" if is_sequence else ""
                raise FeedError(
                    "a batch of a task is a pair of inputs and label, got"
                    f" {type(batch).__name__}{size}; yield (inputs, label)"
                )
            yield batch


def check_task(task: Task) -> Task:
    """Return a task with its model without wrappers, and its example inputs in float32.

    Raises:
        ConfigError: no task.
        FeedError: an input is no tensor.
        ModelError: the model is no module.
    """
    if not isinstance(task, Task):
        raise ConfigError(f"a training is given as a calib8.torch.Task, got {type(task).__name__}")
    model = unwrap(task.model)
    return replace(task, model=model, inputs=example_tensors(task.inputs, model))


def read_batches(
    images: FeedSource,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    preprocess: PreprocessRequest,
    limit: Limit,
) -> list[tuple[torch.Tensor, ...]]:
    """Read batches of the size of the example inputs, all into memory.

    `images`: a folder, list, image, .npy or .npz file. `names`: of the inputs, as in an .npz file.
    """
    specs = []
    for name, example in zip(names, inputs, strict=True):
        dtype = str(example.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, (None, *example.shape[1:])))

    feed = open_feed(images, specs, preprocess=preprocess, limit=limit)
    samples = list(feed.samples())
    batch_size = len(inputs[0])
    batches = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        tensors = []
        for name in names:
            arrays = [sample[name] for sample in batch]
            tensors.append(torch.from_numpy(np.concatenate(arrays)))
        batches.append(tuple(tensors))
    return batches
