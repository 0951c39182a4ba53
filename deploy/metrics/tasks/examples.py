"""The few samples to look at: those where two models differ most, and one where they agree.

Numbers and boxes are kept, no arrays of the model, and of a few samples only: memory stays flat.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deploy.metrics.tasks.detections import Detections

MOST = 4  # samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxExample:
    """One sample's boxes of both models above a threshold, in pixels of the model's input.

    Attributes:
        number: of the sample, from 0.
        size: (height, width) of the model's input.
        threshold: of the score.
        kept: boxes of FP32 that the candidate finds too.
        found: the candidate's own boxes for them, in the same order.
        lost: boxes of FP32 alone.
        new: boxes of the candidate alone.
    """

    number: int
    size: tuple[int, int]
    threshold: float
    kept: Detections
    found: Detections
    lost: Detections
    new: Detections


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassExample:
    """One sample that the two models give to different classes.

    Attributes:
        number: of the sample, from 0.
        output: which tells the class.
        reference, candidate: class and its value of FP32 and of the candidate.
    """

    number: int
    output: str
    reference: tuple[int, float]
    candidate: tuple[int, float]


Example = BoxExample | ClassExample
E = TypeVar("E", bound=Example)


@dataclass(slots=True)
class Foremost(Generic[E]):
    """Of all samples that are offered, at most `MOST` that differ most and as many that agree."""

    differing: list[tuple[float, int, E]] = field(default_factory=list)
    agreeing: list[tuple[float, int, E]] = field(default_factory=list)

    def offer(self, example: E, *, differs: float, says: float) -> None:
        """Look at a sample: how much the models differ in it, and how much FP32 says at all."""
        if differs > 0:
            _insert(self.differing, (-differs, example.number, example))
        elif says > 0:
            _insert(self.agreeing, (-says, example.number, example))

    @property
    def numbers(self) -> frozenset[int]:
        """Of the samples that are kept."""
        return frozenset(number for _, number, _ in (*self.differing, *self.agreeing))

    def result(self) -> tuple[E, ...]:
        """Those that differ, the most first, and at least one that agrees where there is one."""
        room = MOST - 1 if self.agreeing else MOST
        first = self.differing[:room]
        rest = self.agreeing[: MOST - len(first)]
        return tuple(example for _, _, example in [*first, *rest])


def _insert(row: list[tuple[float, int, E]], entry: tuple[float, int, E]) -> None:
    bisect.insort(row, entry, key=lambda one: one[:2])
    del row[MOST:]
