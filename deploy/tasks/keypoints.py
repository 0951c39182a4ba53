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

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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

_MIN_POINTS, _MAX_POINTS = 4, 600
_MIN_FLAT_POINTS = 8  # points of a flat output, at least
_NUMBERS = (2, 3, 4, 5)  # numbers per point
_MIN_ORDER = 0.6  # correlation of coordinates with those of the previous points, at least
_MIN_ORDER_LEAD = 0.2  # the same of known numbers per point, above that of any neighbours, at least
_MAX_ORDER_LOSS = 0.1  # loss of correlation accepted for fewer numbers per point
_MEAN_RANGE = 0.15, 0.85  # range of the mean coordinate, relative to the picture's side
_MAX_OUTSIDE = 0.5  # distance that some points may lie outside the picture, relative to its side
_DEVIATION_RANGE = 0.01, 0.5  # of the standard deviation of a sample's coordinates, relative
_MAX_RELATIVE = 1.5  # largest relative coordinate
_END_WIDTH = 0.02  # values so near 0 or 1 are probabilities
_MIN_DECIDED = 0.75  # share of scores near 0 or 1, at least
_MIN_CONFIDENCE = 0.2  # confidence of a point that is present
_MIN_LOGIT_SAMPLES = 8  # samples whose logits are two groups, at least
_MAX_IDLE_SPREAD = 0.25  # spread of points without an object, relative to those of objects, at most
_MAX_IDLE_SURE = 0.25  # share of sure flags without an object, at most; half of those with one
_PICTURE_RANK = 4  # dimensions of a picture
_SPREAD_VALUES = 1000  # values of a sample that show how it varies
_MATCH_DISTANCE = 0.03  # of matching points, at most, relative to the extent of a sample's points


@dataclass(slots=True)
class _PointTally(TaskTally["Points"]):
    """Counts points near FP32's, relative to the extent of each sample's points."""

    points: int = 0
    matches: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        presence = self.task.presence
        if presence is not None and not (
            _is_on(presence, reference) or _is_on(presence, candidate)
        ):
            return
        reference_flags = [_is_on(flag, reference) for flag in self.task.flags]
        candidate_flags = [_is_on(flag, candidate) for flag in self.task.flags]
        for name, numbers in self.task.outputs.items():
            count, matches = self._match_points(name, numbers, reference, candidate)
            self.points += count
            if reference_flags == candidate_flags:
                self.matches += matches

    def _match_points(
        self, name: str, numbers: int, reference: Outputs, candidate: Outputs
    ) -> tuple[int, int]:
        """Return the number of FP32's present points, and of the candidate's near them."""
        reference_points = _to_points(reference[name]).reshape(-1, numbers).astype(np.float64)
        count = len(reference_points)
        is_present = self._confidences(name, count, reference) > _MIN_CONFIDENCE
        present_count = int(is_present.sum())
        has_equal_shape = candidate[name].shape == reference[name].shape
        if not has_equal_shape or not np.isfinite(candidate[name]).all():
            return present_count, 0

        points = _to_points(candidate[name]).reshape(count, numbers).astype(np.float64)
        positions = reference_points[:, :2]
        distance = np.linalg.norm(positions - points[:, :2], axis=1)
        # a few points do not show how large the object is
        extent_points = positions[is_present] if present_count >= _MIN_POINTS else positions
        extent = float(np.ptp(extent_points, axis=0).max())
        is_match = is_present & (distance <= _MATCH_DISTANCE * extent)
        is_match &= self._confidences(name, count, candidate) > _MIN_CONFIDENCE / 2
        return present_count, int(is_match.sum())

    def _confidences(self, name: str, count: int, outputs: Outputs) -> Floats:
        """Return the confidence of each point; 1 for all if there is not one for each point."""
        scores = next((part.at for part in self.task.parts.get(name, ())), None)
        if scores is None:
            return np.ones(count)
        confidences = scores.best_scores(outputs).reshape(-1)
        return confidences if confidences.size == count else np.ones(count)

    def result(self) -> TaskFigure | None:
        condition = f"within {100 * _MATCH_DISTANCE:g} % of their extent"
        return self.figure_of_kept("key points", self.matches, self.points, condition)


@dataclass(frozen=True, slots=True)
class Points(EvaluationTask):
    """Key points as coordinates.

    Attributes:
        outputs: output of points -> numbers per point.
        flags: outputs of one probability, or its logit.
        count: number of points of all outputs.
        presence: the flag that says whether there are points.
    """

    outputs: Mapping[str, int]
    flags: tuple[OutputSlice, ...]
    count: int
    presence: OutputSlice | None = None
    name = "key points"
    reads = "{0.count} key points"
    tally_type = _PointTally


def fit_keypoints(name: str, samples: FirstSamples) -> Points | None:
    """Return the key points of an output that the user or the file says to hold such."""
    value = samples.outputs[0][name]
    numbers = value.shape[1] if is_turned(value.shape) else value.shape[-1]
    if numbers not in _NUMBERS:
        numbers = 2
    is_divisible = value.ndim in (2, 3, 4) and value.size % numbers == 0
    return Points({name: numbers}, (), value.size // numbers) if is_divisible else None


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Recognise outputs of points in the input's picture."""
    sizes = [size for inputs in samples.inputs if (size := image_size(inputs)) is not None]
    if not sizes or len(sizes) != len(samples.outputs):
        return None

    scores_by_layout = _find_point_scores(samples)
    layout_by_output = {layout.output: layout for layout in reversed(scores_by_layout)}
    score_outputs = {scores.output for scores in scores_by_layout.values()}
    flags = _find_flags(samples)
    has_flags_only = len(samples.names) == len(flags) + 1  # beside the points
    points: dict[str, int] = {}
    for name in samples.names:
        if name in score_outputs:
            continue
        width = layout_by_output[name].width if name in layout_by_output else 0
        if numbers := _find_numbers(samples.arrays(name), sizes, width, has_flags_only):
            points[name] = numbers
    if not points:
        return None

    presence = _find_presence(flags, [*points], samples)
    parts: dict[str, tuple[OutputSlice, ...]] = {flag.output: () for flag in flags}
    count = 0
    for name, numbers in points.items():
        scores = presence
        if name in layout_by_output:
            scores = scores_by_layout[layout_by_output[name]]
        values = samples.arrays(name)
        parts |= _slice_points(name, values, numbers, scores)
        count += values[0].size // numbers
    return Points(points, flags, count, presence, parts=parts)


def _find_point_scores(samples: FirstSamples) -> dict[OutputSlice, OutputSlice]:
    """Return layouts of outputs -> scores of their points in another output."""
    layouts = [OutputSlice(output=name) for name in samples.names]
    for name in samples.names:
        if all(value.size == max(value.shape, default=1) for value in samples.arrays(name)):
            layouts += [OutputSlice(output=name, width=numbers) for numbers in _NUMBERS]
    values = {}
    for layout in layouts:
        values[layout] = [layout.of(value) for value in samples.arrays(layout.output)]
    return find_scores(values)


def _find_flags(first_samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return outputs of one probability, or of one logit in two groups, as probabilities."""
    flags = []
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if not all(map(is_floating, samples)):
            continue
        if all(map(_is_share, samples)):
            flags.append(OutputSlice(output=name))
    return tuple(flags)


def _find_presence(
    flags: Sequence[OutputSlice], points: Sequence[str], samples: FirstSamples
) -> OutputSlice | None:
    """Return the flag that says whether there are points; None if that is not certain.

    It is the single one. Of several it is the one that, where it is low, leaves the others unsure,
    which are sure elsewhere; or points that hardly vary, though pictures do.
    """
    if len(flags) == 1:
        return flags[0]
    pictures, positions, flag_rows = [], [], []
    for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
        pictures.append(next(v for v in inputs.values() if v.ndim == _PICTURE_RANK))
        positions.append(np.concatenate([outputs[name].reshape(-1) for name in points]))
        flag_rows.append([flag.best_scores(outputs).item() for flag in flags])
    probabilities = np.array(flag_rows)

    presences = []
    for index, flag in enumerate(flags):
        is_on = probabilities[:, index] > 0.5
        if min(np.sum(is_on), np.sum(~is_on)) < _MIN_POINTS:
            continue
        are_sure = np.abs(np.delete(probabilities, index, axis=1) - 0.5) > 0.4
        are_unsure_without = (are_sure[~is_on].mean(axis=0) <= _MAX_IDLE_SURE).all()
        are_sure_with = (are_sure[is_on].mean(axis=0) >= 2 * _MAX_IDLE_SURE).all()
        picture_spread = _relative_spread(pictures, is_on)
        are_still = _relative_spread(positions, is_on) < _MAX_IDLE_SPREAD < picture_spread / 2
        if are_still or (are_unsure_without and are_sure_with):
            presences.append(flag)
    return presences[0] if len(presences) == 1 else None


def _relative_spread(samples: Sequence[Array], is_on: NDArray[np.bool_]) -> float:
    """Return the spread of samples where a flag is low, relative to that where it is high."""
    if len({value.shape for value in samples}) > 1:
        return 1.0
    rows = np.stack([value.reshape(-1)[:: value.size // _SPREAD_VALUES + 1] for value in samples])
    low = np.std(rows[~is_on], axis=0, dtype=np.float64).mean()
    high = np.std(rows[is_on], axis=0, dtype=np.float64).mean()
    return float(low / max(high, 1e-30))


def _slice_points(
    name: str, samples: Sequence[Array], numbers: int, at: OutputSlice | None
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of points that scores weight: the last of their numbers, or `at`."""
    transposed = is_turned(samples[0].shape)
    is_flat = not transposed and samples[0].shape[-1] != numbers
    complete = OutputSlice(
        output=name, axis=1 if transposed else -1, width=numbers if is_flat else 0
    )
    activation = _find_last_activation(_rows(samples, numbers), is_flat=is_flat)
    if activation is None:
        return {} if at is None else {name: (replace(complete, at=at),)}
    scores = replace(complete, start=numbers - 1, stop=numbers, activation=activation)
    stop = min(numbers - 1, 3)
    coordinates = replace(complete, stop=stop, at=scores)
    return {name: (coordinates, replace(scores, start=stop, activation=""))}


def _find_last_activation(rows: Floats, *, is_flat: bool) -> str | None:
    """Return the missing activation if the last number of points is a score, else None.

    The last of three may be a depth, of four a box's height, of more an angle: so logits are two
    groups, or in a flat output the fifth number; four or five shares are mostly near 0 or 1.
    """
    numbers, last = rows.shape[2], rows[:, :, -1].reshape(-1)
    if numbers < 3:
        return None
    are_shares = bool(last.min() >= 0 and 0 < last.max() <= 1)
    shares = to_shares(last, raw=not are_shares)
    are_decided = np.mean((shares < 0.1) | (shares > 0.9)) >= _MIN_DECIDED
    if are_shares:
        return "" if numbers == 3 or are_decided else None
    if are_two_sided(last, 1):
        return "sigmoid"
    are_fifth = is_flat and numbers == _NUMBERS[-1]
    return "sigmoid" if are_fifth and are_decided and last.min() < 0 < last.max() else None


def _find_numbers(
    samples: Sequence[Array],
    sizes: Sequence[tuple[int, int]],
    width: int,
    has_flags_only: bool,
) -> int | None:
    """Return the numbers per point; None if the output is no points.

    `width`: these numbers, if scores in another output show them; else 0. `has_flags_only`: whether
    all other outputs are flags.
    """
    transposed = is_turned(samples[0].shape)
    samples = [_to_points(value) for value in samples]
    shape = samples[0].shape
    if any(value.shape != shape or not is_floating(value) for value in samples):
        return None
    if len(shape) < 2 or shape[0] != 1 or len({*sizes}) != 1:
        return None
    long_sides = [side for side in shape if side != 1]
    is_flat = len(long_sides) == 1
    numbers = _find_flat_numbers(samples, width) if is_flat else shape[-1]
    if len(long_sides) > 2 or numbers not in _NUMBERS:
        return None

    rows = _rows(samples, numbers)
    in_order = True
    if not is_flat:
        if numbers >= 4 and _find_last_activation(rows, is_flat=False) is None:
            return None  # four may be a box
        in_order = _find_flat_numbers(samples, numbers if transposed else 0) == numbers
    if transposed and not (has_flags_only and in_order):
        return None  # channels of cells, or of steps
    min_points = _MIN_FLAT_POINTS if is_flat else _MIN_POINTS
    if not min_points <= rows.shape[1] <= _MAX_POINTS:
        return None
    return numbers if _lie_inside(rows, sizes[0], in_order=in_order) else None


def _find_flat_numbers(samples: Sequence[Array], width: int) -> int:
    """Return the least numbers per point at which a flat output is in order; 0 without."""
    vectors = [value.reshape(-1).astype(np.float64) for value in samples]
    length = vectors[0].size
    widths: tuple[int, ...] = (width,) if width else _NUMBERS
    candidates = [n for n in widths if length % n == 0 and length >= n * _MIN_FLAT_POINTS]
    step = width or 1
    are_sorted_scores = all((vector[step:] <= vector[:-step]).all() for vector in vectors)
    if not candidates or are_sorted_scores:
        return 0

    order = {n: _autocorrelation(vectors, n) for n in candidates}
    best = max(order.values())
    min_order = _autocorrelation(vectors, 1) + _MIN_ORDER_LEAD if width else _MIN_ORDER
    if not best > min_order:
        return 0
    return next(n for n in candidates if order[n] >= best - _MAX_ORDER_LOSS)


def _autocorrelation(vectors: Sequence[Floats], step: int) -> float:
    """Return the mean correlation of the numbers with those `step` later."""
    return float(np.mean([correlate(vector[step:], vector[:-step]) for vector in vectors]))


def _rows(samples: Sequence[Array], numbers: int) -> Floats:
    """Return the samples as [samples, K, numbers]."""
    rows = [_to_points(value).reshape(-1, numbers) for value in samples]
    return np.stack(rows).astype(np.float64)


def _to_points(value: Array) -> Array:
    """Return [N, p, K], with a row for each number, as [N, K, p]; other arrays unchanged."""
    return value.swapaxes(1, 2) if is_turned(value.shape) else value


def is_turned(shape: Sequence[int]) -> bool:
    """Whether it is [N, p, K], with a row for each of a point's numbers."""
    return len(shape) == 3 and shape[1] in _NUMBERS and shape[2] >= _MIN_FLAT_POINTS


def _lie_inside(rows: Floats, size: tuple[int, int], *, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates in the picture.

    They are in pixels, or relative to its side: 0 to 1 or, if `in_order`, -1 to 1.
    """
    positions = rows[:, :, :2]
    if np.abs(positions).max() > _MAX_RELATIVE:
        return _are_central(positions / max(size))
    if np.ptp(rows.sum(axis=2)) < _END_WIDTH:
        return False  # class probabilities
    return _are_relative(positions) or (in_order and _are_relative((positions + 1) / 2))


def _are_relative(positions: Floats) -> bool:
    """Whether coordinates of 0 to 1 lie in the picture and are no probabilities."""
    is_end = (positions < _END_WIDTH) | (positions > 1 - _END_WIDTH)
    return bool(np.mean(is_end) <= 0.25) and _are_central(positions)


def _are_central(positions: Floats) -> bool:
    """Whether relative coordinates lie about the middle of the picture."""
    is_inside = (positions > -_MAX_OUTSIDE) & (positions < 1 + _MAX_OUTSIDE)
    if np.mean(is_inside) <= 0.99:
        return False
    means, deviations = positions.mean(axis=(0, 1)), positions.std(axis=1).mean(axis=0)
    return _are_between(means, _MEAN_RANGE) and _are_between(deviations, _DEVIATION_RANGE)


def _are_between(values: Floats, limits: tuple[float, float]) -> bool:
    low, high = limits
    return bool(((values > low) & (values < high)).all())


def _is_share(value: Array) -> bool:
    return value.size == 1 and 0 <= float(value.reshape(())) <= 1


def _is_on(flag: OutputSlice, outputs: Outputs) -> bool:
    return bool(np.all(flag.best_scores(outputs) > 0.5))


_MAX_STEPS_PER_PIXEL = 4
_MAX_PEAK_WIDTH = 0.1  # share of a row's steps above half of its peak, at most
_MIN_PEAK = 0.25  # peak of a point that is present, relative to the sample's highest, at least
_MATCH_PIXELS = 2  # distance of matching points in pixels, at most


@dataclass(slots=True)
class _AxisTally(TaskTally["SimccPoints"]):
    """Counts points at the same place, within two pixels."""

    points: int = 0
    matches: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        peaks = sum(_above_median(reference[name]).max(axis=1) for name in self.task.outputs)
        is_match = peaks > _MIN_PEAK * np.max(peaks)
        self.points += int(is_match.sum())
        for name in self.task.outputs:
            scores = candidate[name]
            if scores.shape != reference[name].shape or not np.isfinite(scores).all():
                return
            distance = np.abs(reference[name][0].argmax(axis=1) - scores[0].argmax(axis=1))
            is_match = is_match & (distance <= _MATCH_PIXELS * self.task.steps_per_pixel)
        self.matches += int(is_match.sum())

    def result(self) -> TaskFigure | None:
        condition = f"within {_MATCH_PIXELS} pixels"
        return self.figure_of_kept("key points", self.matches, self.points, condition)


@dataclass(frozen=True, slots=True)
class SimccPoints(EvaluationTask):
    """Key points as distributions over columns and rows.

    Attributes:
        outputs: of the columns, and of the rows.
        count: number of points.
        steps_per_pixel: steps of a distribution per pixel.
    """

    outputs: tuple[str, str]
    count: int
    steps_per_pixel: float
    name = "key points"
    reads = "columns and rows of {0.count} key points"
    tally_type = _AxisTally


def find_simcc(samples: FirstSamples) -> SimccPoints | None:
    """Recognise two outputs whose lengths are multiples of the picture's width and height."""
    if len(samples.names) != 2:
        return None
    for columns, rows in itertools.permutations(samples.names):
        step_counts = set()
        for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
            step_counts.add(_steps_per_pixel(image_size(inputs), outputs[columns], outputs[rows]))
        steps = next(iter(step_counts))
        if len(step_counts) != 1 or steps is None:
            continue
        if _has_peaks(samples.arrays(columns)) and _has_peaks(samples.arrays(rows)):
            return SimccPoints((columns, rows), samples.arrays(columns)[0].shape[1], steps)
    return None


def _steps_per_pixel(size: tuple[int, int] | None, columns: Array, rows: Array) -> float | None:
    """Return the steps per pixel, equal on both axes; None if shapes do not fit the picture."""
    are_distributions = columns.ndim == rows.ndim == 3 and columns.shape[:2] == rows.shape[:2]
    if size is None or not are_distributions:
        return None
    if len(columns) != 1 or columns.shape[1] < _MIN_POINTS:
        return None
    steps = columns.shape[2] / size[1]
    if rows.shape[2] != steps * size[0]:
        return None
    return steps if 1 <= steps <= _MAX_STEPS_PER_PIXEL else None


def _has_peaks(samples: Sequence[Array]) -> bool:
    """Whether most points have one narrow peak."""
    if not all(map(is_floating, samples)):
        return False
    rows = np.concatenate([_above_median(value) for value in samples])
    half = rows.max(axis=1, keepdims=True) / 2
    if not half.min() > 0:
        return False
    return bool(np.mean(np.mean(rows > half, axis=1) < _MAX_PEAK_WIDTH) > 0.5)


def _above_median(value: Array) -> Floats:
    """Subtract the median of each row: [1, K, L] -> [K, L]."""
    rows = value[0].astype(np.float64)
    return np.asarray(rows - np.median(rows, axis=1, keepdims=True))
