"""Key points by their two axes: SimCC (Li et al. 2022), RTMPose.

Two outputs [N, K, r W] and [N, K, r H] of a picture of W x H pixels: how likely each column and
each row is to hold a point, in steps of 1 / r pixels. Raw or behind a Softmax, their peaks are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.tensors import Array

_POINTS = 4  # at least
_FINEST = 4  # steps a pixel, at most
_NARROW = 0.1  # share of a row's steps above half of its peak, at most
_THERE = 0.25  # of a sample's highest peak: below it a point is not there
_NEAR = 2  # pixels

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Axes:
    """Points whose columns and rows are told apart.

    Attributes:
        outputs: of the columns, and of the rows.
        count: of the points.
        fine: steps a pixel.
        parts: as of a task.
    """

    outputs: tuple[str, str]
    count: int
    fine: float
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "key points"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        return f"{', '.join(self.outputs)}: columns and rows of {self.count} key points"

    def tally(self) -> AxisTally:
        """A new comparison."""
        return AxisTally(self)


def find(seen: Seen) -> Axes | None:
    """The task, where the only two outputs are as long as the picture is wide and high."""
    if len(seen.names) != 2:
        return None
    one, other = seen.names
    for names in ((one, other), (other, one)):
        fine = {_fine(fed, out, names) for fed, out in zip(seen.inputs, seen.outputs, strict=True)}
        steps = next(iter(fine))
        if len(fine) == 1 and steps is not None and all(_peaked(n, seen) for n in names):
            return Axes(names, seen.arrays(names[0])[0].shape[1], steps)
    return None


def _fine(fed: Outputs, outputs: Outputs, names: tuple[str, str]) -> float | None:
    """Steps a pixel, the same along both sides; None where shapes do not fit the picture."""
    size = image_size(fed)
    wide, high = (outputs[name] for name in names)
    flat = wide.ndim == high.ndim == 3 and wide.shape[:2] == high.shape[:2]
    if size is None or not flat or len(wide) != 1 or wide.shape[1] < _POINTS:
        return None
    fine = wide.shape[2] / size[1]
    return fine if 1 <= fine <= _FINEST and high.shape[2] == fine * size[0] else None


def _peaked(name: str, seen: Seen) -> bool:
    """Whether most points have one narrow peak."""
    samples = seen.arrays(name)
    if not all(np.issubdtype(one.dtype, np.floating) and np.isfinite(one).all() for one in samples):
        return False
    rows = np.concatenate([_risen(one) for one in samples])
    half = rows.max(axis=1, keepdims=True) / 2
    return bool(half.min() > 0 and np.mean(np.mean(rows > half, axis=1) < _NARROW) > 0.5)


def _risen(value: Array) -> Floats:
    """[1, K, L] -> [K, L], less the median of each row."""
    rows = value[0].astype(np.float64)
    return np.asarray(rows - np.median(rows, axis=1, keepdims=True))


@dataclass(slots=True)
class AxisTally:
    """Points at the same place, within two pixels."""

    task: Axes
    samples: int = 0
    points: int = 0
    kept: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of NaN or of another shape has no point."""
        self.samples += 1
        left, right = ([one[name] for name in self.task.outputs] for one in (reference, candidate))
        peaks = sum(_risen(one).max(axis=1) for one in left)
        there = peaks > _THERE * np.max(peaks)
        self.points += int(there.sum())
        for own, others in zip(left, right, strict=True):
            if own.shape != others.shape or not np.isfinite(others).all():
                return
            far = np.abs(own[0].argmax(axis=1) - others[0].argmax(axis=1))
            there = there & (far <= _NEAR * self.task.fine)
        self.kept += int(there.sum())

    def result(self) -> TaskFigure | None:
        """The share of FP32's points that stayed."""
        if not self.points:
            return None
        return TaskFigure(
            task="key points",
            figure="key points kept",
            value=self.kept / self.points,
            count=f"{self.kept} of {self.points}",
            words=f"{self.kept} of {self.points} key points of FP32 within {_NEAR} pixels",
            samples=self.samples,
            form=self.task.form,
        )
