"""Key points of faces, hands and bodies as coordinates, or as distributions over two axes.

`find_keypoints` (MediaPipe, MoveNet, PFLD): [N, K p], or [N, K, p] with more dimensions of 1. Each
point has two coordinates, in pixels or relative to the picture, and up to three more numbers. In a
flat output each point is near the one before, or another output has a score a point; coordinates of
-1 to 1 (InsightFace) are near the ones before in any output. So are points of [N, p, K], which are
alone or beside flags.

Flags are other outputs of one probability, or of one logit in two groups: whether an object is
present, or which hand it is. If int8 decides differently, all points of the sample are lost. Where
there is no object, points do not count. A single flag tells whether there is one. Of several flags
it is the one that, where it is low, comes with other flags that are unsure, or with points that
hardly vary although the pictures do. Points that are not visible, by the last of their numbers or
by another output, do not count either.

`find_simcc`: SimCC (Li et al. 2022), RTMPose. Two outputs [N, K, r W] and [N, K, r H] for a picture
of W x H pixels: the likelihood of each column and each row, in steps of 1 / r pixels. Their peaks
are the same before and after a Softmax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.classes import are_switches
from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure, TaskTally
from deploy.tasks.rows import (
    Floats,
    Outputs,
    are_two_sided,
    correlate,
    image_size,
    is_floating,
    to_shares,
)
from deploy.tasks.slices import OutputSlice, find_scores
from deploy.tensors import Array

_FEWEST, _MOST = 4, 600  # points
_FLAT = 8  # points of a flat output, at least
_NUMBERS = (2, 3, 4, 5)  # numbers per point
_IN_ORDER = 0.6  # correlation of coordinates with those of the points before, at least
_APART = 0.2  # the same of known numbers per point, above that of any neighbours, at least
_ALIKE = 0.1  # loss of correlation accepted for fewer numbers per point
_INSIDE = 0.15, 0.85  # range of the mean coordinate, relative to the picture's side
_AROUND = 0.5  # distance that some points may lie outside the picture, relative to its side
_SPREAD = 0.01, 0.5  # range of the standard deviation of a sample's coordinates, relative
_SHARES = 1.5  # largest relative coordinate
_ENDS = 0.02  # values so near 0 or 1 are probabilities
_DECIDED = 0.75  # share of scores near 0 or 1, at least
_SURE = 0.2  # confidence of a point that is present
_ENOUGH = 8  # samples whose logits are two groups, at least
_STILL = 0.25  # spread of points without an object, relative to those of objects, at most
_UNSURE = 0.25  # share of sure flags without an object, at most; half of those with one
_PICTURE = 4  # dimensions of a picture
_SHOWN = 1000  # values of a sample that show how it varies
_NEAR = 0.03  # distance of matching points, at most, relative to the extent of a sample's points


@dataclass(slots=True)
class _PointTally(TaskTally["Points"]):
    """Counts points near FP32's, relative to the extent of each sample's points."""

    points: int = 0
    kept: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        both, there = (reference, candidate), self.task.presence
        if there is not None and not any(_is_on(there, one) for one in both):
            return
        own, others = ([_is_on(flag, one) for flag in self.task.flags] for one in both)
        for name, numbers in self.task.outputs.items():
            count, near = self._near(name, numbers, reference, candidate)
            self.points += count
            self.kept += near if own == others else 0

    def _near(self, name: str, numbers: int, own: Outputs, other: Outputs) -> tuple[int, int]:
        """Return the number of FP32's present points, and of the candidate's near them."""
        left = _to_points(own[name]).reshape(-1, numbers).astype(np.float64)
        present = self._scores(name, len(left), own) > _SURE
        if other[name].shape != own[name].shape or not np.isfinite(other[name]).all():
            return int(present.sum()), 0
        right = _to_points(other[name]).reshape(left.shape).astype(np.float64)
        places = left[:, :2]
        # a few do not show how large the object is
        spanned = places[present] if present.sum() >= _FEWEST else places
        extent = float(np.ptp(spanned, axis=0).max())
        distance = np.linalg.norm(places - right[:, :2], axis=1)
        also = self._scores(name, len(left), other) > _SURE / 2
        return int(present.sum()), int((present & also & (distance <= _NEAR * extent)).sum())

    def _scores(self, name: str, count: int, outputs: Outputs) -> Floats:
        """Return the confidence of each point, 1 for all without one a point."""
        at = next((one.at for one in self.task.parts.get(name, ())), None)
        scores = np.ones(count) if at is None else at.best_scores(outputs).reshape(-1)
        return scores if scores.size == count else np.ones(count)

    def result(self) -> TaskFigure | None:
        within = f"within {100 * _NEAR:g} % of their extent"
        return self.figure_of_kept("key points", self.kept, self.points, within)


@dataclass(frozen=True, slots=True)
class Points(EvaluationTask):
    """Key points as coordinates."""

    outputs: Mapping[str, int]  # output of points -> numbers per point
    flags: tuple[OutputSlice, ...]  # outputs of one probability, or its logit
    count: int
    presence: OutputSlice | None = None  # the flag that says whether there are points
    name = "key points"
    reads = "{0.count} key points"
    tally_type = _PointTally


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Recognise outputs of points in the input's picture."""
    sizes = [size for fed in samples.inputs if (size := image_size(fed)) is not None]
    if not sizes or len(sizes) != len(samples.outputs):
        return None
    flat = {
        n
        for n in samples.names
        if all(v.size == max(v.shape, default=1) for v in samples.arrays(n))
    }
    layouts = [OutputSlice(output=n) for n in samples.names]
    layouts += [OutputSlice(output=n, width=k) for n in flat for k in _NUMBERS]
    visible = find_scores({one: [*map(one.of, samples.arrays(one.output))] for one in layouts})
    beside = {one.output: one for one in reversed(visible)}
    scores = {one.output for one in visible.values()}
    flags = _flags(samples)
    alone = len(samples.names) == len(flags) + 1
    points: dict[str, int] = {}
    for name in (name for name in samples.names if name not in scores):
        width = beside[name].width if name in beside else 0
        if numbers := _numbers(samples.arrays(name), sizes, width, alone=alone):
            points[name] = numbers
    if not points:
        return None
    flag = _presence(flags, [*points], samples)
    parts: dict[str, tuple[OutputSlice, ...]] = {one.output: () for one in flags}
    for name, numbers in points.items():
        at = visible[beside[name]] if name in beside else flag
        parts |= _parts(name, samples.arrays(name), numbers, at)
    count = sum(samples.arrays(name)[0].size // numbers for name, numbers in points.items())
    return Points(points, flags, count, flag, parts=parts)


def _flags(first_samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return outputs of one probability, or of one logit in two groups, as probabilities."""
    flags = []
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if not all(map(is_floating, samples)):
            continue
        raw = len(samples) >= _ENOUGH and are_switches(samples, raw=True)
        if raw or all(map(_is_share, samples)):
            flags.append(OutputSlice(output=name, activation="sigmoid" if raw else ""))
    return tuple(flags)


def _presence(
    flags: Sequence[OutputSlice], points: Sequence[str], samples: FirstSamples
) -> OutputSlice | None:
    """Return the flag that says whether there are points; None if that is not certain.

    It is the single one. Of several it is the one that, where it is low, leaves the others unsure,
    which are sure elsewhere; or points that hardly vary, though pictures do.
    """
    if len(flags) == 1:
        return flags[0]
    pictures = [next(v for v in fed.values() if v.ndim == _PICTURE) for fed in samples.inputs]
    places = [np.concatenate([one[n].reshape(-1) for n in points]) for one in samples.outputs]
    shares = np.array([[one.best_scores(v).item() for one in flags] for v in samples.outputs])
    found = []
    for number, flag in enumerate(flags):
        on = shares[:, number] > 0.5
        if min(np.sum(on), np.sum(~on)) < _FEWEST:
            continue
        others = np.abs(np.delete(shares, number, axis=1) - 0.5) > 0.4
        unsure = (others[~on].mean(axis=0) <= _UNSURE).all()
        still = _spread(places, on) < _STILL < _spread(pictures, on) / 2
        if still or (unsure and (others[on].mean(axis=0) >= 2 * _UNSURE).all()):
            found.append(flag)
    return found[0] if len(found) == 1 else None


def _spread(samples: Sequence[Array], on: NDArray[np.bool_]) -> float:
    """Return the spread of samples where a flag is low, relative to that where it is high."""
    if len({one.shape for one in samples}) > 1:
        return 1.0
    rows = np.stack([one.reshape(-1)[:: one.size // _SHOWN + 1] for one in samples])
    low, high = (np.std(rows[which], axis=0, dtype=np.float64).mean() for which in (~on, on))
    return float(low / max(high, 1e-30))


def _parts(
    name: str, samples: Sequence[Array], numbers: int, at: OutputSlice | None
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of points that scores weight: the last of their numbers, or `at`."""
    turned = is_turned(samples[0].shape)
    flat = not turned and samples[0].shape[-1] != numbers
    every = OutputSlice(output=name, axis=1 if turned else -1, width=numbers if flat else 0)
    activation = _last_are_scores(_rows(samples, numbers), flat=flat)
    if activation is None:
        return {} if at is None else {name: (replace(every, at=at),)}
    scores = replace(every, start=numbers - 1, stop=numbers, activation=activation)
    stop = min(numbers - 1, 3)
    return {
        name: (replace(every, stop=stop, at=scores), replace(scores, start=stop, activation=""))
    }


def _last_are_scores(rows: Floats, *, flat: bool) -> str | None:
    """Return the missing activation if the last number of points is a score, else None.

    The last of three may be a depth, of four a box's height, of more an angle: so logits are two
    groups, or in a flat output the fifth number; four or five shares are mostly near 0 or 1.
    """
    numbers, last = rows.shape[2], rows[:, :, -1].reshape(-1)
    unit = bool(last.min() >= 0 and 0 < last.max() <= 1)
    shares = to_shares(last, raw=not unit)
    decided = np.mean((shares < 0.1) | (shares > 0.9)) >= _DECIDED
    fifth = flat and numbers == _NUMBERS[-1] and decided and last.min() < 0 < last.max()
    fits = numbers == 3 or decided if unit else fifth or are_two_sided(last, 1)
    return ("" if unit else "sigmoid") if numbers > 2 and fits else None


def _numbers(
    samples: Sequence[Array], sizes: Sequence[tuple[int, int]], width: int, *, alone: bool
) -> int | None:
    """Return the numbers per point; None if the output is no points.

    `width`: these numbers, if other outputs' scores show them; else 0. `alone`: whether all other
    outputs are flags.
    """
    turned, samples = is_turned(samples[0].shape), [*map(_to_points, samples)]
    first = samples[0]
    long = [side for side in first.shape if side != 1]
    if any(one.shape != first.shape or not is_floating(one) for one in samples):
        return None
    if first.ndim < 2 or first.shape[0] != 1 or len({*sizes}) != 1:
        return None
    flat, numbers = len(long) == 1, first.shape[-1]
    if flat:
        numbers = _of_flat(samples, width)
    if len(long) > 2 or numbers not in _NUMBERS:
        return None
    rows = _rows(samples, numbers)
    fits = (
        flat or numbers < 4 or _last_are_scores(rows, flat=False) is not None
    )  # four may be a box
    in_order = flat or _of_flat(samples, numbers if turned else 0) == numbers
    fits = fits and (not turned or (alone and in_order))  # else channels of cells, or of steps
    return numbers if fits and _lie_inside(rows, sizes[0], flat=flat, in_order=in_order) else None


def _of_flat(samples: Sequence[Array], width: int) -> int:
    """Return the least numbers per point at which a flat output is in order; 0 without."""
    vectors = [one.reshape(-1).astype(np.float64) for one in samples]
    length, counts = vectors[0].size, (width,) if width else _NUMBERS
    fitting = [n for n in counts if length % n == 0 and length >= n * _FLAT]
    step = width or 1
    if not fitting or all((one[step:] <= one[:-step]).all() for one in vectors):  # sorted scores
        return 0
    order = {n: float(np.mean([correlate(v[n:], v[:-n]) for v in vectors])) for n in fitting}
    best = max(order.values())
    numbers = next(n for n in fitting if order[n] >= best - _ALIKE)
    next_to = np.mean([correlate(v[1:], v[:-1]) for v in vectors])  # x and y are not alike
    return numbers if best > (next_to + _APART if width else _IN_ORDER) else 0


def _rows(samples: Sequence[Array], numbers: int) -> Floats:
    """Return the samples as [samples, K, numbers]."""
    return np.stack([_to_points(one).reshape(-1, numbers).astype(np.float64) for one in samples])


def _to_points(value: Array) -> Array:
    """Return [N, p, K], with a row for each number, as [N, K, p]; other arrays unchanged."""
    return value.swapaxes(1, 2) if is_turned(value.shape) else value


def is_turned(shape: Sequence[int]) -> bool:
    """Whether it is [N, p, K], with a row for each of a point's numbers."""
    return len(shape) == 3 and shape[1] in _NUMBERS and shape[2] >= _FLAT


def _lie_inside(rows: Floats, size: tuple[int, int], *, flat: bool, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates in the picture.

    They are in pixels, or relative to its side: 0 to 1 or, if `in_order`, -1 to 1.
    """
    places = rows[:, :, :2]
    if not (_FLAT if flat else _FEWEST) <= places.shape[1] <= _MOST:
        return False
    if np.abs(places).max() > _SHARES:
        return _are_central(places / max(size))
    if np.ptp(rows.sum(axis=2)) < _ENDS:
        return False  # class probabilities
    for one in [places, (places + 1) / 2] if in_order else [places]:
        are_probabilities = np.mean((one < _ENDS) | (one > 1 - _ENDS)) > 0.25
        if _are_central(one) and not are_probabilities:
            return True
    return False


def _are_central(places: Floats) -> bool:
    """Whether relative coordinates lie about the middle of the picture."""
    inside = np.mean((places > -_AROUND) & (places < 1 + _AROUND)) > 0.99
    middles, spread = places.mean(axis=(0, 1)), places.std(axis=1).mean(axis=0)
    low, high = _INSIDE
    least, most = _SPREAD
    central = (middles > low).all() and (middles < high).all()
    return bool(inside and central and (spread > least).all() and (spread < most).all())


def _is_share(value: Array) -> bool:
    return value.size == 1 and 0 <= float(value.reshape(())) <= 1


def _is_on(flag: OutputSlice, outputs: Outputs) -> bool:
    return bool(np.all(flag.best_scores(outputs) > 0.5))


_POINTS = 4  # at least
_FINEST = 4  # steps per pixel, at most
_NARROW = 0.1  # share of a row's steps above half of its peak, at most
_THERE = 0.25  # peak of a point that is present, relative to the sample's highest, at least
_NEAR_BINS = 2  # distance of matching points in pixels, at most


@dataclass(slots=True)
class _AxisTally(TaskTally["SimccPoints"]):
    """Counts points at the same place, within two pixels."""

    points: int = 0
    kept: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left, right = ([one[name] for name in self.task.outputs] for one in (reference, candidate))
        peaks = sum(_above_median(one).max(axis=1) for one in left)
        present = peaks > _THERE * np.max(peaks)
        self.points += int(present.sum())
        for own, other in zip(left, right, strict=True):
            if own.shape != other.shape or not np.isfinite(other).all():
                return
            distance = np.abs(own[0].argmax(axis=1) - other[0].argmax(axis=1))
            present = present & (distance <= _NEAR_BINS * self.task.fine)
        self.kept += int(present.sum())

    def result(self) -> TaskFigure | None:
        within = f"within {_NEAR_BINS} pixels"
        return self.figure_of_kept("key points", self.kept, self.points, within)


@dataclass(frozen=True, slots=True)
class SimccPoints(EvaluationTask):
    """Key points as distributions over columns and rows."""

    outputs: tuple[str, str]  # of the columns, and of the rows
    count: int
    fine: float  # steps per pixel
    name = "key points"
    reads = "columns and rows of {0.count} key points"
    tally_type = _AxisTally


def find_simcc(samples: FirstSamples) -> SimccPoints | None:
    """Recognise two outputs whose lengths are multiples of the picture's width and height."""
    if len(samples.names) != 2:
        return None
    one, other = samples.names
    for names in ((one, other), (other, one)):
        fine = {
            _fine(fed, out, names) for fed, out in zip(samples.inputs, samples.outputs, strict=True)
        }
        steps = next(iter(fine))
        if len(fine) == 1 and steps is not None and all(_peaked(n, samples) for n in names):
            return SimccPoints(names, samples.arrays(names[0])[0].shape[1], steps)
    return None


def _fine(fed: Outputs, outputs: Outputs, names: tuple[str, str]) -> float | None:
    """Return the steps per pixel, equal on both axes; None if shapes do not fit the picture."""
    size = image_size(fed)
    wide, high = (outputs[name] for name in names)
    flat = wide.ndim == high.ndim == 3 and wide.shape[:2] == high.shape[:2]
    if size is None or not flat or len(wide) != 1 or wide.shape[1] < _POINTS:
        return None
    fine = wide.shape[2] / size[1]
    return fine if 1 <= fine <= _FINEST and high.shape[2] == fine * size[0] else None


def _peaked(name: str, first_samples: FirstSamples) -> bool:
    """Whether most points have one narrow peak."""
    samples = first_samples.arrays(name)
    if not all(map(is_floating, samples)):
        return False
    rows = np.concatenate([_above_median(one) for one in samples])
    half = rows.max(axis=1, keepdims=True) / 2
    return bool(half.min() > 0 and np.mean(np.mean(rows > half, axis=1) < _NARROW) > 0.5)


def _above_median(value: Array) -> Floats:
    """Subtract the median of each row: [1, K, L] -> [K, L]."""
    rows = value[0].astype(np.float64)
    return np.asarray(rows - np.median(rows, axis=1, keepdims=True))
