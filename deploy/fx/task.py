"""The task of a training script: a model, its data, and the options of its training.

`order_inputs` turns a task whose samples are dicts into one with tensors in the order of forward::

    inputs      [{"mask": ., "ids": .}]                       [ids, mask]
    batches     {"mask": ., "ids": .}, label                  (ids, mask), label
    evaluate    model(batch), model(**batch), model(ids, mask=mask)      unchanged

Names are the arguments of forward, or the keys of a dict that is its only argument
(`deploy.fx.model_inputs`). `read_batches` reads calib8's calibration data as torch batches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from deploy.errors import ConfigError, FeedError
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.loaders import iterate_items
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.sampling import Limit
from deploy.fx.capture import as_inputs
from deploy.fx.convert import CustomClasses
from deploy.fx.model_inputs import cast_floats, make_named_class, match_arguments
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
        inputs: example inputs, batch first; or one dict of them, by forward's arguments or by the
            keys of the dict that is its only argument.
        batches: epoch -> iterable of (inputs, label), with the same batches each time; or a loader,
            read once an epoch. inputs is a tensor, tuple or dict.
        loss: (output, label) -> scalar.
        evaluate: model -> a number to report, larger is better.
        calibration: () -> inputs for the calibration; by default the first `calibration_batches`
            of epoch 0.
        optimizer: parameters -> optimizer.
        epochs: number of epochs.
        teacher: float model to distil from.
        distil: (student's, teacher's) modules whose maps are compared.
        distil_weight: weight of the distillation loss.
        clip_gradient: maximum norm of all gradients together.
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
        batches = partial(self.batches, epoch) if callable(self.batches) else self.batches
        items: Batches = iterate_items(batches)[0]
        for batch in items:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
                raise FeedError(
                    "a batch of a task is a pair of inputs and label, got"
                    f" {type(batch).__name__}{size}; yield (inputs, label)"
                )
            yield batch


Tensors = tuple[torch.Tensor, ...]


def order_inputs(task: Task) -> Task:
    """Return a task with a dict of inputs as a task whose inputs are tensors in a fixed order.

    A task whose inputs are tensors already only gets them in float32. In the new task, models take
    the tensors in this order, and batches hold them so; the models share their modules with the old
    ones. Only the user's `evaluate` still gets a model that takes the inputs by name.

    Raises:
        ConfigError: no task; or the inputs are something else, or do not fit the model's forward.
        ModelError: the model is no module.
    """
    if not isinstance(task, Task):
        raise ConfigError(f"a training is given as a calib8.torch.Task, got {type(task).__name__}")
    model = unwrap(task.model)
    inputs = cast_floats(as_inputs(task.inputs, model), torch.float32)
    task = replace(task, model=model, inputs=inputs)
    if all(isinstance(value, torch.Tensor) for value in inputs):
        return task
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        kinds = ", ".join(type(value).__name__ for value in inputs)
        raise ConfigError(
            f"the inputs of a task are tensors, or one dict of tensors, got {kinds}; give each"
            " tensor its own key, and build other containers in the model's forward"
        )

    arguments = ForwardArguments.match(task.model, inputs[0])

    def ordered_batches(epoch: int) -> Batches:
        for samples, label in task.batches_of(epoch):
            yield arguments.tensors(*as_inputs(samples)), label

    ordered = replace(
        task,
        model=arguments.adapt(task.model),
        inputs=list(arguments.tensors(inputs[0])),
        batches=ordered_batches,
    )
    if task.teacher is not None:
        ordered.teacher = arguments.adapt(task.teacher)
    if (calibration := task.calibration) is not None:

        def ordered_calibration() -> Iterator[Tensors]:
            for batch in iterate_items(calibration)[0]:
                yield arguments.tensors(*as_inputs(batch))

        ordered.calibration = ordered_calibration
    if (evaluate := task.evaluate) is not None:
        ordered.evaluate = lambda model: evaluate(NamedInputsModel(model, arguments).eval())
    return ordered


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Named arguments of a forward.

    Attributes:
        names: of its tensors, in order.
        dict_argument: the argument that takes a dict of them; None if they are separate arguments.
        signature: of the forward.
    """

    names: tuple[str, ...]
    dict_argument: str | None
    signature: inspect.Signature

    @classmethod
    def match(cls, model: nn.Module, names: Iterable[str]) -> ForwardArguments:
        """Return the arguments of a model's forward for `names`.

        Raises:
            ConfigError: the forward does not take them.
        """
        model = unwrap(model)
        ordered, dict_argument = match_arguments(model, list(names))
        return cls(tuple(ordered), dict_argument, inspect.signature(model.forward))

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return a copy that takes the tensors in this order and shares the modules of `model`.

        Raises:
            ConfigError: its forward has other names.
        """
        model = unwrap(model)
        _, dict_argument = match_arguments(model, self.names)
        adapted = copy.copy(model)
        adapted.__class__ = make_named_class(type(model), self.names, dict_argument=dict_argument)
        return adapted

    def tensors(self, *args: Any, **kwargs: Any) -> Tensors:
        """Return the tensors of one call, in order.

        Raises:
            FeedError: the call has other names.
        """
        value_by_name = self._bind(args, kwargs)
        if value_by_name.keys() != set(self.names):
            raise FeedError(
                f"each batch of a task has the names of its inputs, {', '.join(self.names)}, got"
                f" {', '.join(map(str, value_by_name)) or 'nothing'}; leave other names out of the"
                " batch, or add them to the inputs"
            )
        return tuple(value_by_name[name] for name in self.names)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return input name -> value for a call of the forward with these arguments.

        The entries of a dict argument and of `**kwargs` are inputs. An argument with its default
        value, such as None, is no input.

        Raises:
            FeedError: the forward cannot be called so.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):  # a batch as a dict
            return dict(args[0])
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise FeedError(
                f"a model is called as its forward{self.signature} says, got: {error}"
            ) from error

        value_by_name: dict[str, Any] = {}
        for name, value in bound.items():
            parameter = self.signature.parameters[name]
            is_dict = name == self.dict_argument
            if is_dict or parameter.kind is inspect.Parameter.VAR_KEYWORD:
                value_by_name |= value
            elif value is not parameter.default:
                value_by_name[name] = value
        return value_by_name


class NamedInputsModel(nn.Module):
    """Wraps a model that takes tensors in order, to be called like the user's model."""

    def __init__(self, model: nn.Module, arguments: ForwardArguments):
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.model(*self.arguments.tensors(*args, **kwargs))


def read_batches(
    images: FeedSource,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    preprocess: PreprocessRequest,
    limit: Limit,
) -> list[Tensors]:
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
