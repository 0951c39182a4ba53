"""A class for each step of a sequence: voice activity, taggers, classes of frames.

[N, T, C] or [N, C, T] shares of classes (those of each step sum to 1, or their logarithms do), or
raw scores where they are as a classifier's are: sure of their best class, with a mean that hardly
changes from step to step. Or probabilities that are each their own, [N, T], [N, T, 1] or [N, T, C],
which the labels of a picture are as well: there, sides of 0.5 are counted; also of several outputs
of as many steps, [N, T, K], as of notes and their beginnings, and of one step alone, [N, 1], as of
a wake word; and sides of 0 of raw scores, [N, T] or [N, T, 1]. Several outputs may each have a
class for the same steps, as of the marks that a letter bears. What CTC reads as text is found
before (`deploy.metrics.tasks.text`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.shares import (
    are_decisions,
    are_heads,
    are_raw_tracks,
    are_switches,
    are_tracks,
    laid_out,
    layout_of,
)
from deploy.metrics.tasks.states import carried
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.metrics.values import is_floating
from deploy.tensors import Array

_USUAL = 0.75  # of FP32's steps in one class: the others alone are counted


@dataclass(frozen=True, slots=True)
class Steps:
    """Classes of steps.

    Attributes:
        outputs: their names.
        classes: how many each has; 2 of a probability of its own, which side of 0.5 it is on.
        axis: of the classes, 1 or 2; None of probabilities that are each their own.
        raw: whether these are still to go through a Sigmoid.
    """

    outputs: tuple[str, ...]
    classes: tuple[int, ...]
    axis: int | None
    raw: bool = False
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "steps"

    @property
    def form(self) -> str:
        """How the output is read."""
        names = ", ".join(self.outputs)
        if self.axis is None:
            scores = "raw scores" if self.raw else "probabilities"
            return f"{names}: {scores} of steps or labels, each its own"
        return f"{names}: {', '.join(map(str, self.classes))} classes a step"

    @property
    def said(self) -> str:
        """What two models are to have alike."""
        if self.axis is not None:
            return "steps of FP32's class"
        return "scores on FP32's side of 0" if self.raw else "probabilities on FP32's side of 0.5"

    def tally(self) -> StepTally:
        """A new comparison."""
        return StepTally(self)


def find(seen: Seen) -> Steps | None:
    """The task, where one output alone is such a sequence, or all of them are."""
    floating = [n for n in seen.names if all(map(is_floating, seen.arrays(n)))]
    states = carried(seen)
    said = [name for name in floating if name not in states]
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if not pictures and are_decisions([seen.arrays(name) for name in floating]):
        return Steps(tuple(floating), (2,) * len(floating), None)
    if not pictures and are_heads([seen.arrays(name) for name in said]):
        return Steps(tuple(said), tuple(seen.arrays(name)[0].shape[2] for name in said), 2)
    if len(said) == 1 and are_switches(seen.arrays(said[0])):
        return Steps(tuple(said), (2,), None)
    found = [task for name in floating if (task := _read(name, seen, alone=len(floating) == 1))]
    if len(found) != 1 or _has_beside(found[0], floating, seen):
        return None
    return found[0]


def _read(name: str, seen: Seen, *, alone: bool) -> Steps | None:
    samples = seen.arrays(name)
    axis = layout_of(samples, raw=alone)
    if axis is not None:
        return Steps((name,), (samples[0].shape[axis],), axis)
    flat = all(max(one.shape, default=0) == one.size for one in samples)
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    tracks = alone and (flat or not pictures) and are_tracks(samples)  # others are maps of pictures
    raw = alone and not pictures and are_raw_tracks(samples)
    return Steps((name,), (2,), None, raw) if tracks or raw else None


def _has_beside(task: Steps, names: Sequence[str], seen: Seen) -> bool:
    """Whether another output has as many steps: places of what is found at each of them, maybe."""
    counts = [classes_of(one, task, 0).size for one in seen.arrays(task.outputs[0])]
    others = (seen.arrays(name) for name in names if name not in task.outputs)
    return any(
        all(one.ndim <= 3 and n in one.shape for one, n in zip(values, counts, strict=True))
        for values in others
    )


def classes_of(value: Array, task: Steps, number: int) -> NDArray[np.int64]:
    """The class of each step of one output; as many as it has where a step is NaN.

    None where the form is another.
    """
    none = task.classes[number]
    if task.axis is None:
        sides = (value.reshape(-1) > (0 if task.raw else 0.5)).astype(np.int64)
        return np.where(np.isnan(value.reshape(-1)), none, sides)
    steps = laid_out(value, task.axis)
    if steps is None or steps.shape[1] != none:
        return np.zeros(0, np.int64)
    best = np.asarray(steps.argmax(axis=1), np.int64)
    best[np.isnan(steps).any(axis=1)] = none
    return best


@dataclass(slots=True)
class StepTally:
    """Steps by class, of each output: FP32's, both's; and the worst sample."""

    task: Steps
    samples: int = 0
    worst: float = 1.0
    own: list[NDArray[np.int64]] = field(init=False)
    both: list[NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [np.zeros(count, np.int64) for count in self.task.classes]
        self.both = [np.zeros_like(one) for one in self.own]

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; steps of NaN or of another shape are of no class."""
        self.samples += 1
        counted = [
            self._add(number, reference[name], candidate[name])
            for number, name in enumerate(self.task.outputs)
        ]
        known, alike = (sum(side) for side in zip(*counted, strict=True))
        if known:
            self.worst = min(self.worst, alike / known)

    def _add(self, number: int, reference: Array, candidate: Array) -> tuple[int, int]:
        """Steps of one output whose class is known, and those alike."""
        none = self.task.classes[number]
        left, right = (classes_of(one, self.task, number) for one in (reference, candidate))
        right = right if right.shape == left.shape else np.full_like(left, none)
        known = left < none
        alike = known & (left == right)
        self.own[number] += np.bincount(left[known], minlength=none)
        self.both[number] += np.bincount(left[alike], minlength=none)
        return int(known.sum()), int(alike.sum())

    def result(self) -> TaskFigure | None:
        """The share of steps alike.

        Where FP32 gives nearly all steps to one class, as silence, a candidate that says nothing
        else has most of them: there, steps count that either model gives to another class. None
        where FP32 does so with all of them.
        """
        total, alike = (sum(int(one.sum()) for one in side) for side in (self.own, self.both))
        usual = [int(one.argmax()) for one in self.own]
        rest = total - sum(int(one[k]) for one, k in zip(self.own, usual, strict=True))
        if not rest:
            return None
        words, worst = f"{alike} of {total} {self.task.said}", ""
        if total > self.samples:
            worst = f", {100 * self.worst:.1f} % in the worst sample"
        figure, value, count = "steps alike", alike / total, f"{alike} of {total}"
        if rest < (1 - _USUAL) * total:
            shared = sum(int(one[k]) for one, k in zip(self.both, usual, strict=True))
            kept, seen = alike - shared, total - shared
            figure, value, count = "steps alike but the usual", kept / seen, f"{kept} of {seen}"
            words += f", {count} of those that are not in both models of {_usual(usual)}"
        return TaskFigure(
            task="steps",
            figure=figure,
            value=value,
            count=count,
            words=words + worst,
            samples=self.samples,
            form=self.task.form,
        )


def _usual(classes: Sequence[int]) -> str:
    """The class that is given most, or that of each output."""
    if len(set(classes)) == 1:
        return f"the usual class {classes[0]}"
    return f"their output's usual class, {', '.join(map(str, classes))}"
