"""What a training script says: a model, its data, and how it is to be trained for int8.

A task whose samples are dicts, as one of tensors in the order in which its model takes them.

::

    inputs      [{"mask": ., "ids": .}]                       [ids, mask]
    batches     {"mask": ., "ids": .}, label                  (ids, mask), label
    evaluate    model(batch), model(**batch), model(ids, mask=mask)      as they are

Names are the arguments of forward, or the keys of a dict that is its only one, as
`deploy.fx.model_inputs` has them.

The package's own feed as torch batches: the same bytes as every other path calibrates with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from deploy.errors import ConfigError, FeedError
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.preprocess import Asked
from deploy.feed.sampling import Limit
from deploy.fx.convert import CustomClasses, as_inputs
from deploy.fx.model_inputs import named_class, taken
from deploy.fx.source import unwrapped
from deploy.method import Method
from deploy.tensors import TensorSpec

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
            trained by their gradients (`deploy.fx.fakequant`).
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


Tensors = tuple[torch.Tensor, ...]


def in_order(task: Task) -> Task:
    """The task with tensors in order where its inputs are a dict; itself where they are tensors.

    Its models are copies that share their modules with the task's own. What `evaluate` gets is
    called as the task's model is.

    Raises:
        ConfigError: other inputs than these, or names that the forward of a model does not take.
    """
    inputs = list(task.inputs)
    if all(isinstance(one, torch.Tensor) for one in inputs):
        return task
    if len(inputs) != 1 or not _is_dict(inputs[0]):
        kinds = ", ".join(type(one).__name__ for one in inputs)
        raise ConfigError(
            f"the inputs of a task are tensors, or one dict of tensors, got {kinds}; name what lies"
            " in another container by a key of its own, and put it together in the model's forward"
        )
    arguments = Arguments.of(task.model, inputs[0])
    return replace(
        task,
        model=arguments.taken_by(task.model),
        teacher=None if task.teacher is None else arguments.taken_by(task.teacher),
        inputs=list(arguments.tensors(inputs[0])),
        batches=lambda epoch: arguments.pairs(task.batches(epoch)),
        calibration=_each(task.calibration, arguments),
        evaluate=_called(task.evaluate, arguments),
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a forward takes, by name.

    Attributes:
        names: of its tensors, in order.
        into: the argument that takes a dict of them; None where they are arguments themselves.
        signature: of the forward.
    """

    names: tuple[str, ...]
    into: str | None
    signature: inspect.Signature

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> Arguments:
        """Those of a model that is given tensors for `names`.

        Raises:
            ConfigError: the forward does not take them.
        """
        model = unwrapped(model)
        ordered, into = taken(model, list(names))
        return cls(tuple(ordered), into, inspect.signature(model.forward))

    def taken_by(self, model: nn.Module) -> nn.Module:
        """A model that takes the tensors in this order, and shares its modules with `model`.

        Raises:
            ConfigError: its forward has other names.
        """
        model = unwrapped(model)
        _, into = taken(model, self.names)
        own = copy.copy(model)
        own.__class__ = named_class(type(model), self.names, into=into)
        return own

    def tensors(self, *args: Any, **kwargs: Any) -> Tensors:
        """The tensors of one call, in order.

        Raises:
            FeedError: others than those of the names.
        """
        found = self._named(args, kwargs)
        if found.keys() != set(self.names):
            raise FeedError(
                f"each batch of a task has what its inputs have, {', '.join(self.names)}, got"
                f" {', '.join(map(str, found)) or 'nothing'}; leave out of the batch what the model"
                " is not to take, and name in the inputs what it is"
            )
        return tuple(found[name] for name in self.names)

    def pairs(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Tensors, Any]]:
        """Batches of samples and labels, the samples' tensors in order."""
        return ((self.tensors(*as_inputs(samples)), labels) for samples, labels in batches)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a call gives by name; of arguments, all that are not their defaults."""
        if len(args) == 1 and not kwargs and _is_dict(args[0]):
            return dict(args[0])
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise FeedError(
                f"a model is called as its forward{self.signature} says, got: {error}"
            ) from error
        found: dict[str, Any] = {}
        for name, value in bound.items():
            parameter = self.signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD or name == self.into:
                found |= value
            elif value is not parameter.default:
                found[name] = value
        return found


class Called(nn.Module):
    """A model that takes tensors in order, called as the user's own.

    Args:
        model: which takes them.
        arguments: of the user's model.
    """

    def __init__(self, model: nn.Module, arguments: Arguments):
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.model(*self.arguments.tensors(*args, **kwargs))


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def _each(
    calibration: Callable[[], Iterable[Any]] | None, arguments: Arguments
) -> Callable[[], Iterable[Tensors]] | None:
    if calibration is None:
        return None
    return lambda: (arguments.tensors(*as_inputs(samples)) for samples in calibration())


def _called(
    evaluate: Callable[[nn.Module], float] | None, arguments: Arguments
) -> Callable[[nn.Module], float] | None:
    if evaluate is None:
        return None
    return lambda model: evaluate(Called(model, arguments).eval())


def batches_of(
    images: FeedSource,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    preprocess: Asked = None,
    limit: Limit = None,
) -> list[tuple[torch.Tensor, ...]]:
    """Batches of the size of the example inputs, from a folder, list, image, .npy or .npz file.

    All are held in memory, as a comparison and a calibration both read them.

    Args:
        images: a folder, list, image, .npy or .npz file.
        inputs: examples, whose shapes and dtypes are taken.
        names: of the inputs, as an .npz file has them.
        preprocess: of images.
        limit: how many to take.

    Raises:
        FeedError, ConfigError: as `open_feed`.
    """
    specs = [
        TensorSpec(name, str(x.dtype).removeprefix("torch."), (None, *x.shape[1:]))
        for name, x in zip(names, inputs, strict=True)
    ]
    feed = open_feed(images, specs, preprocess=preprocess, limit=limit)
    samples = [
        tuple(torch.from_numpy(np.array(s[spec.name])) for spec in specs) for s in feed.samples()
    ]
    size = len(inputs[0])
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [tuple(torch.cat(parts) for parts in zip(*group, strict=True)) for group in groups]
