"""Key points as numbers: of faces, hands and bodies, as MediaPipe's, MoveNet and PFLD tell them.

[N, K p], or [N, K, p] with more dimensions of 1: of each point its two places in the picture, in
pixels or in shares of its sides, and up to three numbers more: a depth, or how sure it is. In a
flat output points are told from other numbers by their order: each lies near the one before it.

Other outputs of one probability say whether there is anything, or which hand it is: where int8
says another, a sample's points are lost, and values near 0 are not compared beyond that. Of one
alone, points of samples below 0.5 do not count.

Key points by their two axes: SimCC (Li et al. 2022), RTMPose.

Two outputs [N, K, r W] and [N, K, r H] of a picture of W x H pixels: how likely each column and
each row is to hold a point, in steps of 1 / r pixels. Raw or behind a Softmax, their peaks are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size, is_floating
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.tensors import Array

_FEWEST, _MOST = 4, 600  # points
_FLAT = 8  # points of a flat output, at least
_NUMBERS = (2, 3, 4, 5)  # of a point
_IN_ORDER = 0.6  # correlation of places with those of the points before
_ALIKE = 0.1  # correlation less, of fewer numbers a point
_INSIDE = 0.15, 0.85  # share of the picture's side that points lie at in the mean
_AROUND = 0.5  # shares beyond the sides that some may lie at
_SPREAD = 0.01, 0.5  # deviation of one sample's places, in shares
_SHARES = 1.5  # no place is above it in shares of a side
_ENDS = 0.02  # shares so near 0 or 1 are probabilities
_SURE = 0.2  # of a point that is there
_NEAR = 0.03  # of the extent of a sample's points

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Points:
    """Places as numbers.

    Attributes:
        outputs: name -> numbers of each point.
        scored: of these, whose third number says how sure a point is.
        flags: outputs of one probability.
        count: of all points.
        parts: as of a task.
    """

    outputs: Mapping[str, int]
    scored: frozenset[str]
    flags: tuple[str, ...]
    count: int
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "key points"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        return f"{', '.join(self.outputs)}: {self.count} key points"

    def tally(self) -> PointTally:
        """A new comparison."""
        return PointTally(self)


def find_keypoints(seen: Seen) -> Points | None:
    """The task, where some output is points in the picture that was fed."""
    sizes = [size for fed in seen.inputs if (size := image_size(fed)) is not None]
    if not sizes or len(sizes) != len(seen.outputs):
        return None
    read = {name: _numbers(seen.arrays(name), sizes) for name in seen.names}
    found = {name: numbers for name, numbers in read.items() if numbers}
    if not found:
        return None
    scored = frozenset(name for name in found if _has_scores(seen.arrays(name), found[name]))
    flags = tuple(name for name in seen.names if all(map(_is_share, seen.arrays(name))))
    count = sum(seen.arrays(name)[0].size // numbers for name, numbers in found.items())
    return Points(found, scored, flags, count, dict.fromkeys(flags, ()))


def _numbers(samples: Sequence[Array], sizes: Sequence[tuple[int, int]]) -> int | None:
    """How many numbers of each point there are; None of an output that is no points."""
    first = samples[0]
    long = [side for side in first.shape if side != 1]
    if any(one.shape != first.shape or not is_floating(one) for one in samples):
        return None
    if first.ndim < 2 or first.shape[0] != 1 or len({*sizes}) != 1:
        return None
    if len(long) == 2 and first.shape[-1] in _NUMBERS[:2]:
        numbers = first.shape[-1]
        return numbers if _lie_inside(_rows(samples, numbers), sizes[0], flat=False) else None
    return _of_flat(samples, sizes[0]) if len(long) == 1 else None


def _of_flat(samples: Sequence[Array], size: tuple[int, int]) -> int | None:
    """The least of the numbers that bring a flat output into its order."""
    vectors = [one.reshape(-1).astype(np.float64) for one in samples]
    fitting = [n for n in _NUMBERS if vectors[0].size % n == 0 and vectors[0].size >= n * _FLAT]
    if not fitting:
        return None
    order = {n: float(np.mean([_alike(v[n:], v[:-n]) for v in vectors])) for n in fitting}
    best = max(order.values())
    numbers = next(n for n in fitting if order[n] >= best - _ALIKE)
    inside = best > _IN_ORDER and _lie_inside(_rows(samples, numbers), size, flat=True)
    return numbers if inside else None


def _alike(one: Floats, other: Floats) -> float:
    """Their correlation; 0 where one does not vary."""
    one, other = one - one.mean(), other - other.mean()
    return float(one @ other) / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-30)


def _rows(samples: Sequence[Array], numbers: int) -> Floats:
    """[samples, K, numbers]."""
    return np.stack([one.reshape(-1, numbers).astype(np.float64) for one in samples])


def _lie_inside(rows: Floats, size: tuple[int, int], *, flat: bool) -> bool:
    """Whether the first two numbers of each point are a place in the picture."""
    places = rows[:, :, :2]
    if not (_FLAT if flat else _FEWEST) <= places.shape[1] <= _MOST:
        return False
    shares = bool(np.abs(places).max() <= _SHARES)
    if shares and (np.ptp(rows.sum(axis=2)) < _ENDS or _at_ends(places)):
        return False  # shares of classes, or probabilities
    places = places if shares else places / max(size)
    inside = np.mean((places > -_AROUND) & (places < 1 + _AROUND)) > 0.99
    middles, spread = places.mean(axis=(0, 1)), places.std(axis=1).mean(axis=0)
    low, high = _INSIDE
    least, most = _SPREAD
    central = (middles > low).all() and (middles < high).all()
    return bool(inside and central and (spread > least).all() and (spread < most).all())


def _at_ends(places: Floats) -> bool:
    return bool(np.mean((places < _ENDS) | (places > 1 - _ENDS)) > 0.25)


def _has_scores(samples: Sequence[Array], numbers: int) -> bool:
    """Whether a point's third number is a probability."""
    if numbers < 3:
        return False
    third = _rows(samples, numbers)[:, :, 2]
    return bool(third.min() >= 0 and 0 < third.max() <= 1)


def _is_share(value: Array) -> bool:
    """Whether it is one probability."""
    return value.size == 1 and is_floating(value) and 0 <= float(value.reshape(())) <= 1


@dataclass(slots=True)
class PointTally:
    """Points near FP32's, by the extent of each sample's."""

    task: Points
    samples: int = 0
    points: int = 0
    kept: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of NaN or of another shape has no point."""
        self.samples += 1
        own = [_on(reference[name]) for name in self.task.flags]
        others = [_on(candidate[name]) for name in self.task.flags]
        if len(own) == 1 and not own[0] and own == others:
            return
        for name, numbers in self.task.outputs.items():
            there, near = self._near(name, numbers, reference[name], candidate[name])
            self.points += there
            self.kept += near if own == others else 0

    def _near(self, name: str, numbers: int, own: Array, other: Array) -> tuple[int, int]:
        """Points of FP32 that are there, and those of the candidate near them."""
        left = own.reshape(-1, numbers).astype(np.float64)
        there = left[:, 2] > _SURE if name in self.task.scored else np.ones(len(left), bool)
        if not there.any() or other.shape != own.shape or not np.isfinite(other).all():
            return int(there.sum()), 0
        right = other.reshape(left.shape).astype(np.float64)
        places = left[there, :2]
        extent = float(np.ptp(places, axis=0).max())
        far = np.linalg.norm(places - right[there, :2], axis=1)
        return int(there.sum()), int((far <= _NEAR * extent).sum())

    def result(self) -> TaskFigure | None:
        """The share of FP32's points that stayed."""
        if not self.points:
            return None
        said = f"{self.kept} of {self.points} key points of FP32"
        return TaskFigure(
            task="key points",
            figure="key points kept",
            value=self.kept / self.points,
            count=f"{self.kept} of {self.points}",
            words=f"{said} within {100 * _NEAR:g} % of their extent",
            samples=self.samples,
            form=self.task.form,
        )


def _on(value: Array) -> bool:
    return bool(np.all(value > 0.5))


_POINTS = 4  # at least
_FINEST = 4  # steps a pixel, at most
_NARROW = 0.1  # share of a row's steps above half of its peak, at most
_THERE = 0.25  # of a sample's highest peak: below it a point is not there
_NEAR_BINS = 2  # pixels


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


def find_simcc(seen: Seen) -> Axes | None:
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
            there = there & (far <= _NEAR_BINS * self.task.fine)
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
            words=f"{self.kept} of {self.points} key points of FP32 within {_NEAR_BINS} pixels",
            samples=self.samples,
            form=self.task.form,
        )
