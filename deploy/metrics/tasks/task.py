"""What a task is: outputs recognised by their form, and a figure of two models' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs
from deploy.metrics.tasks.examples import Example
from deploy.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """How much of what the float model says the candidate says too.

    Attributes:
        task: what the outputs are: "boxes", "classes", ...
        figure: what is counted, such as "boxes kept".
        value: more is better; a share that is 1 where both say the same, but of a user's metric.
        reference: what the float model itself reaches.
        count: the figure in a few characters, such as "84 of 88".
        words: the counts, as a person would say them.
        samples: samples it was counted over.
        form: how the outputs were read, in words.
        beside: outputs that it tells nothing of.
    """

    task: str
    figure: str
    value: float
    words: str
    count: str
    samples: int
    reference: float = 1.0
    form: str = ""
    beside: tuple[str, ...] = ()

    @property
    def lost(self) -> float:
        """What the candidate lacks; of a figure above 1, such as percent, as a share of it."""
        return (self.reference - self.value) / max(1.0, abs(self.reference))


def kept_figure(
    task: str, counts: Sequence[int], *, above: str, samples: int, form: str
) -> TaskFigure:
    """Dice's figure of things that are found: boxes, labels.

    Args:
        task: what is found, in the plural.
        counts: FP32's, the candidate's, both's.
        above: what a thing counts from, in words.
        samples: samples it was counted over.
        form: how the outputs were read, in words.
    """
    own, others, kept = counts
    return TaskFigure(
        task=task,
        figure=f"{task} kept",
        value=2 * kept / (own + others),
        count=f"{kept} of {own}",
        words=f"{kept} of {own} {task} of FP32 kept, {others - kept} new ({above})",
        samples=samples,
        form=form,
    )


def classes_figure(
    same: int, samples: int, among: str, *, compared: int, form: str, beside: tuple[str, ...] = ()
) -> TaskFigure:
    """The share of best classes that stayed.

    Args:
        same: how many did.
        samples: samples they were counted over.
        among: how many are among the best few, in words; "" where there are not more.
        compared: how many classes of FP32 there were.
        form: how the outputs were read, in words.
        beside: as of `TaskFigure`.
    """
    return TaskFigure(
        task="classes",
        figure="top-1 agreement",
        value=same / compared,
        count=f"{same} of {compared}",
        words=f"{same} of {compared} best classes as FP32's{among and f', {among}'}",
        samples=samples,
        form=form,
        beside=beside,
    )


class Tally(Protocol):
    """A running comparison in flat memory."""

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample: arrays with a batch of 1 (or none)."""
        ...

    def result(self) -> TaskFigure | None:
        """The figure; None where the float model said nothing to be compared with."""
        ...


@runtime_checkable
class Showing(Protocol):
    """A tally that keeps a few samples to be looked at."""

    @property
    def watched(self) -> frozenset[int]:
        """Numbers, from 0, of the samples that may still be among those to be shown."""
        ...

    def shown(self) -> tuple[Example, ...]:
        """The samples, those where both models differ most first."""
        ...


class Task(Protocol):
    """A recognised task: a frozen value."""

    @property
    def name(self) -> str:
        """What the outputs are, in one word."""
        ...

    @property
    def form(self) -> str:
        """How the outputs are read, in words."""
        ...

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """Output -> its parts, where the task knows them better than the data.

        An output without any is not to be compared value by value, as a list of detections
        whose order changes.
        """
        ...

    def tally(self) -> Tally:
        """A new comparison."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """The float model's first samples, which a task is recognised from.

    Attributes:
        inputs: one mapping a sample, with a batch of 1.
        outputs: the same, floating-point and integer outputs alike.
    """

    inputs: Sequence[Outputs]
    outputs: Sequence[Outputs] = field(default_factory=tuple)

    def arrays(self, name: str) -> list[Array]:
        """One output over the samples."""
        return [one[name] for one in self.outputs]

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that hold values in every sample."""
        return tuple(n for n in self.every if all(np.size(one[n]) for one in self.outputs))

    @property
    def every(self) -> tuple[str, ...]:
        """Outputs that every sample has, if only as an empty list."""
        first = self.outputs[0] if self.outputs else {}
        return tuple(name for name in first if all(name in one for one in self.outputs))
