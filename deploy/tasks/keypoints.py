"""Key points of faces, hands and bodies as coordinates, or as distributions over two axes.

`find_keypoints` (MediaPipe, MoveNet, PFLD): [N, K p], or [N, K, p] with more dimensions of 1. Each
point has two coordinates, in pixels or relative to the picture, and up to three more numbers. In a
flat output each point is near the one before, or another output has a score a point; coordinates of
-1 to 1 (InsightFace) are near the ones before in any output. So are points of [N, p, K], which are
alone or beside flags.

Flags are other outputs of one probability, such as whether an object is present, or which hand it
is. If int8 decides differently, all points of the sample are lost. A single flag tells whether
there is an object: without one, points do not count. Points that are not visible, by the last of
their numbers or by another output, do not count either.

`find_simcc`: SimCC (Li et al. 2022), RTMPose. Two outputs [N, K, r W] and [N, K, r H] for a picture
of W x H pixels: the likelihood of each column and each row, in steps of 1 / r pixels.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deploy.tasks import thresholds
from deploy.tasks.evaluation_task import EvaluationTask, TaskFigure, TaskTally
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import (
    Floats,
    Outputs,
    are_shares,
    are_two_sided,
    correlate,
    is_floating,
    to_shares,
)
from deploy.tasks.slices import OutputSlice, find_scores
from deploy.tensors import Array

_NUMBERS = (2, 3, 4, 5)  # numbers per point


@dataclass(slots=True)
class _PointTally(TaskTally["Points"]):
    """Counts points near FP32's, relative to the extent of each sample's points."""

    points: int = 0
    matches: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_flags = [_is_on(flag, reference) for flag in self.task.flags]
        candidate_flags = [_is_on(flag, candidate) for flag in self.task.flags]
        has_presence = len(self.task.flags) == 1
        if has_presence and not (reference_flags[0] or candidate_flags[0]):
            return
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
        is_present = self._confidences(name, count, reference) > thresholds.MIN_VISIBLE
        present_count = int(is_present.sum())
        has_equal_shape = candidate[name].shape == reference[name].shape
        if not has_equal_shape or not np.isfinite(candidate[name]).all():
            return present_count, 0

        points = _to_points(candidate[name]).reshape(count, numbers).astype(np.float64)
        positions = reference_points[:, :2]
        distance = np.linalg.norm(positions - points[:, :2], axis=1)
        # a few points do not show how large the object is
        has_extent = present_count >= thresholds.MIN_POINTS
        extent_points = positions[is_present] if has_extent else positions
        extent = float(np.ptp(extent_points, axis=0).max())
        is_match = is_present & (distance <= thresholds.MAX_POINT_DISTANCE * extent)
        is_match &= self._confidences(name, count, candidate) > thresholds.MIN_VISIBLE / 2
        return present_count, int(is_match.sum())

    def _confidences(self, name: str, count: int, outputs: Outputs) -> Floats:
        """Return the confidence of each point; 1 for all if there is not one for each point."""
        scores = next((part.at for part in self.task.parts.get(name, ())), None)
        if scores is None:
            return np.ones(count)
        confidences = scores.best_scores(outputs).reshape(-1)
        return confidences if confidences.size == count else np.ones(count)

    def result(self) -> TaskFigure | None:
        condition = f"within {100 * thresholds.MAX_POINT_DISTANCE:g} % of their extent"
        return self.figure_of_kept("key points", self.matches, self.points, condition)


@dataclass(frozen=True, slots=True)
class Points(EvaluationTask):
    """Key points as coordinates.

    Attributes:
        outputs: output of points -> numbers per point.
        flags: outputs of one probability; a single one says whether there are points.
        count: number of points of all outputs.
    """

    outputs: Mapping[str, int]
    flags: tuple[OutputSlice, ...]
    count: int
    name = "key points"
    reads = "{0.count} key points"
    tally_type = _PointTally


def fit_keypoints(name: str, samples: FirstSamples) -> Points | None:
    """Return the key points of an output that the user or the file says to hold such."""
    value = samples.outputs[0][name]
    numbers = value.shape[1] if is_transposed(value.shape) else value.shape[-1]
    if numbers not in _NUMBERS:
        numbers = 2
    is_divisible = value.ndim in (2, 3, 4) and value.size % numbers == 0
    return Points({name: numbers}, (), value.size // numbers) if is_divisible else None


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Recognise outputs of points in the input's picture."""
    size = samples.picture_size
    if size is None:
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
        if numbers := _find_numbers(samples.arrays(name), size, width, has_flags_only):
            points[name] = numbers
    if not points:
        return None

    parts: dict[str, tuple[OutputSlice, ...]] = {flag.output: () for flag in flags}
    count = 0
    for name, numbers in points.items():
        scores = flags[0] if len(flags) == 1 else None
        if name in layout_by_output:
            scores = scores_by_layout[layout_by_output[name]]
        values = samples.arrays(name)
        parts |= _slice_points(name, values, numbers, scores)
        count += values[0].size // numbers
    return Points(points, flags, count, parts=parts)


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


def _find_flags(samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return outputs of one probability."""
    flags = []
    for name in samples.names:
        values = samples.arrays(name)
        if all(value.size == 1 and is_floating(value) and are_shares(value) for value in values):
            flags.append(OutputSlice(output=name))
    return tuple(flags)


def _slice_points(
    name: str, samples: Sequence[Array], numbers: int, at: OutputSlice | None
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of points that scores weight: the last of their numbers, or `at`."""
    transposed = is_transposed(samples[0].shape)
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

    The last of three may be a depth, of four a box's height, of more an angle: so raw scores are
    two groups, or in a flat output the fifth number; four or five shares are mostly near 0 or 1.
    """
    numbers, last = rows.shape[2], rows[:, :, -1].reshape(-1)
    if numbers < 3:
        return None
    has_shares = bool(last.min() >= 0 and 0 < last.max() <= 1)
    shares = to_shares(last, raw=not has_shares)
    decided_share = np.mean((shares < 0.1) | (shares > 0.9))
    is_decided = decided_share >= thresholds.MOST_SHARE
    if has_shares:
        return "" if numbers == 3 or is_decided else None
    if are_two_sided(last, 1):
        return "sigmoid"
    is_fifth = is_flat and numbers == _NUMBERS[-1]
    return "sigmoid" if is_fifth and is_decided and last.min() < 0 < last.max() else None


def _find_numbers(
    values: Sequence[Array], size: tuple[int, int], width: int, has_flags_only: bool
) -> int | None:
    """Return the numbers per point; None if the output is no points.

    `size`: (height, width) of the picture. `width`: these numbers, if scores in another output show
    them; else 0. `has_flags_only`: whether all other outputs are flags.
    """
    transposed = is_transposed(values[0].shape)
    samples = [_to_points(value) for value in values]
    shape = samples[0].shape
    if any(value.shape != shape or not is_floating(value) for value in samples):
        return None
    long_sides = [side for side in shape if side != 1]
    if len(shape) < 2 or shape[0] != 1 or len(long_sides) > 2:
        return None
    is_flat = len(long_sides) == 1
    numbers = _find_flat_numbers(samples, width) if is_flat else shape[-1]
    if numbers not in _NUMBERS:
        return None

    rows = _rows(values, numbers)
    in_order = True
    if not is_flat:
        if numbers >= 4 and _find_last_activation(rows, is_flat=False) is None:
            return None  # four may be a box
        in_order = _find_flat_numbers(samples, numbers if transposed else 0) == numbers
    if transposed and not (has_flags_only and in_order):
        return None  # channels of cells, or of steps
    min_points = thresholds.MIN_FLAT_POINTS if is_flat else thresholds.MIN_POINTS
    if not min_points <= rows.shape[1] <= thresholds.MAX_POINTS:
        return None
    return numbers if _lie_inside(rows, size, in_order=in_order) else None


def _find_flat_numbers(samples: Sequence[Array], width: int) -> int:
    """Return the least numbers per point at which a flat output is in order; 0 without."""
    vectors = [value.reshape(-1).astype(np.float64) for value in samples]
    length = vectors[0].size
    step = width or 1
    if all((vector[step:] <= vector[:-step]).all() for vector in vectors):  # sorted scores
        return 0
    order = {}
    for numbers in (width,) if width else _NUMBERS:
        if length % numbers == 0 and length >= numbers * thresholds.MIN_FLAT_POINTS:
            order[numbers] = _order(vectors, numbers)
    min_order = thresholds.MIN_ORDER
    if width:
        min_order = _order(vectors, 1) + thresholds.MIN_ORDER_LEAD
    best = max(order.values(), default=0.0)
    if not best > min_order:
        return 0
    return next(n for n in order if order[n] >= best - thresholds.MAX_ORDER_LOSS)


def _order(vectors: Sequence[Floats], step: int) -> float:
    """Return the mean correlation of the numbers with those `step` later."""
    return float(np.mean([correlate(vector[step:], vector[:-step]) for vector in vectors]))


def _rows(samples: Sequence[Array], numbers: int) -> Floats:
    """Return the samples as [samples, K, numbers]."""
    rows = [_to_points(value).reshape(-1, numbers) for value in samples]
    return np.stack(rows).astype(np.float64)


def _to_points(value: Array) -> Array:
    """Return [N, p, K], with a row for each number, as [N, K, p]; other arrays unchanged."""
    return value.swapaxes(1, 2) if is_transposed(value.shape) else value


def is_transposed(shape: Sequence[int]) -> bool:
    """Whether it is [N, p, K], with a row for each of a point's numbers."""
    has_rows = len(shape) == 3 and shape[1] in _NUMBERS
    return has_rows and shape[2] >= thresholds.MIN_FLAT_POINTS


def _lie_inside(rows: Floats, size: tuple[int, int], *, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates in the picture.

    They are in pixels, or relative to its side: 0 to 1 or, if `in_order`, -1 to 1.
    """
    positions = rows[:, :, :2]
    if np.abs(positions).max() > thresholds.MAX_RELATIVE_COORDINATE:
        return _are_central(positions / max(size))
    if np.ptp(rows.sum(axis=2)) < thresholds.MAX_END_DISTANCE:
        return False  # class probabilities
    return _are_relative(positions) or (in_order and _are_relative((positions + 1) / 2))


def _are_relative(positions: Floats) -> bool:
    """Whether coordinates of 0 to 1 lie in the picture and are no probabilities."""
    end = thresholds.MAX_END_DISTANCE
    is_end = (positions < end) | (positions > 1 - end)
    return bool(is_end.mean() <= thresholds.MAX_END_SHARE) and _are_central(positions)


def _are_central(positions: Floats) -> bool:
    """Whether relative coordinates lie about the middle of the picture."""
    margin = thresholds.MAX_POINT_OUTSIDE
    is_inside = (positions > -margin) & (positions < 1 + margin)
    if is_inside.mean() < thresholds.MIN_CODED_SHARE:
        return False
    means, deviations = positions.mean(axis=(0, 1)), positions.std(axis=1).mean(axis=0)
    has_mean = _are_between(means, thresholds.MEAN_COORDINATE)
    return has_mean and _are_between(deviations, thresholds.COORDINATE_SPREAD)


def _are_between(values: Floats, limits: tuple[float, float]) -> bool:
    low, high = limits
    return bool(((values > low) & (values < high)).all())


def _is_on(flag: OutputSlice, outputs: Outputs) -> bool:
    return bool(np.all(flag.best_scores(outputs) > 0.5))


@dataclass(slots=True)
class _AxisTally(TaskTally["SimccPoints"]):
    """Counts points at the same place, within two pixels."""

    points: int = 0
    matches: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        peaks = sum(_above_median(reference[name]).max(axis=1) for name in self.task.outputs)
        is_match = peaks > thresholds.MIN_VISIBLE * np.max(peaks)
        self.points += int(is_match.sum())
        for name in self.task.outputs:
            scores = candidate[name]
            if scores.shape != reference[name].shape or not np.isfinite(scores).all():
                return
            distance = np.abs(reference[name][0].argmax(axis=1) - scores[0].argmax(axis=1))
            is_near = distance <= thresholds.MAX_SIMCC_PIXELS * self.task.steps_per_pixel
            is_match = is_match & is_near
        self.matches += int(is_match.sum())

    def result(self) -> TaskFigure | None:
        condition = f"within {thresholds.MAX_SIMCC_PIXELS} pixels"
        return self.figure_of_kept("key points", self.matches, self.points, condition)


def _above_median(value: Array) -> Floats:
    """Subtract the median of each row: [1, K, L] -> [K, L]."""
    rows = value[0].astype(np.float64)
    return np.asarray(rows - np.median(rows, axis=1, keepdims=True))


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
    """Recognise two outputs whose lengths are the same multiple of the picture's two sides."""
    size = samples.picture_size
    if len(samples.names) != 2 or size is None:
        return None
    for columns, rows in itertools.permutations(samples.names):
        steps = _steps_per_pixel(size, samples.outputs[0][columns], samples.outputs[0][rows])
        if steps is not None:
            return SimccPoints((columns, rows), samples.outputs[0][columns].shape[1], steps)
    return None


def _steps_per_pixel(size: tuple[int, int], columns: Array, rows: Array) -> float | None:
    """Return the steps per pixel, equal on both axes; None if shapes do not fit the picture."""
    are_distributions = columns.ndim == rows.ndim == 3 and columns.shape[:2] == rows.shape[:2]
    if not are_distributions or len(columns) != 1 or columns.shape[1] < thresholds.MIN_POINTS:
        return None
    height, width = size
    steps = columns.shape[2] / width
    if rows.shape[2] != steps * height or not (is_floating(columns) and is_floating(rows)):
        return None
    return steps if steps >= 1 else None
