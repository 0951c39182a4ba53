"""Key points of faces, hands and bodies: coordinates (`POINTS`), or likelihoods (`SIMCC`).

In a flat output each point is near the one before, or another output has a score a point;
coordinates of -1 to 1 (InsightFace) are near the ones before in any output. So are points of
[N, p, K], which are alone or beside flags.

Flags are other outputs of one probability, such as whether an object is present, or which hand it
is. If int8 decides differently, all points of the sample are lost. A single flag tells whether
there is an object: without one, points do not count. Points that are not visible, by a third
number or by another output, do not count either.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deploy.tasks.evaluation_task import EvaluationTask, Form, PointTally
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import (
    Arrays,
    Floats,
    ImageSize,
    Outputs,
    are_comparable,
    are_shares,
    correlate,
    is_floating,
    is_vector,
)
from deploy.tasks.slices import OutputSlice, SlicesByOutput, find_scores
from deploy.tasks.thresholds import (
    COORDINATE_SPREAD,
    MAX_END_DISTANCE,
    MAX_END_SHARE,
    MAX_POINT_DISTANCE,
    MAX_POINT_OUTSIDE,
    MAX_POINTS,
    MAX_RELATIVE_COORDINATE,
    MAX_SIMCC_PIXELS,
    MEAN_COORDINATE,
    MIN_CODED_SHARE,
    MIN_COUNT,
    MIN_ORDER,
    MIN_ORDER_LEAD,
    MIN_ORDERED,
    MIN_VISIBLE,
)
from deploy.tensors import Array

_NUMBERS = (2, 3)  # numbers per point that are recognised
_ANY_NUMBERS = (2, 3, 4, 5)  # numbers per point of outputs that a user sets


@dataclass(slots=True)
class _CoordinateTally(PointTally["Points"]):
    """Counts points near FP32's, relative to the extent of each sample's points."""

    things = "key points"
    condition = f"within {100 * MAX_POINT_DISTANCE:g} % of their extent"

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
        if reference[name].size % numbers:  # a flat output of varying length
            return 0, 0
        positions = _to_rows(reference[name], numbers)[:, :2]
        confidences = self._confidences(name, len(positions), reference)
        is_present = confidences > MIN_VISIBLE
        present_count = int(is_present.sum())
        if not are_comparable(reference[name], candidate[name]):
            return present_count, 0

        offsets = positions - _to_rows(candidate[name], numbers)[:, :2]
        # a few points do not show how large the object is
        if present_count >= MIN_COUNT:
            positions = positions[is_present]
        max_distance = MAX_POINT_DISTANCE * np.ptp(positions, axis=0).max()
        is_match = is_present & (np.linalg.norm(offsets, axis=1) <= max_distance)
        confidences = self._confidences(name, len(offsets), candidate)
        is_match &= confidences > MIN_VISIBLE / 2
        return present_count, int(is_match.sum())

    def _confidences(self, name: str, count: int, outputs: Outputs) -> Floats:
        """Return the confidence of each point; 1 for all if there is not one for each point."""
        for part in self.task.parts.get(name, ())[:1]:
            if part.at is not None:
                confidences = part.at.best_scores(outputs).reshape(-1)
                if confidences.size == count:
                    return confidences
                return np.ones(count)
        return np.ones(count)


def _is_on(flag: OutputSlice, outputs: Outputs) -> bool:
    return bool(np.all(flag.best_scores(outputs) > 0.5))


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
    tally_type = _CoordinateTally


POINTS = Form(
    shape="points [N, K, p], [N, p, K] or [N, K p] of 2 or 3 numbers, by `--task` up to 5",
    values="positions in pixels, as a fraction of the picture, or from -1 to 1, and perhaps a depth"
    " or a score; single probabilities in other outputs",
    figure="points within 3 % of their extent that are visible, in samples whose probabilities stay"
    " on the same side of 0.5; none where a single one says that there is no object",
    source="MediaPipe's hands and faces, MoveNet, PFLD, InsightFace",
)


def fit_keypoints(name: str, samples: FirstSamples) -> Points | None:
    """Return the key points of an output that the user or the file says to hold such."""
    value = samples.outputs[0][name]
    if value.ndim not in (2, 3, 4):
        return None
    numbers = _to_points(value).shape[-1]
    if numbers not in _ANY_NUMBERS:
        vectors = value.reshape(1, -1).astype(np.float64)
        numbers = _find_ordered_numbers(vectors, _ANY_NUMBERS) or 2
    if any(value.size % numbers for value in samples.arrays(name)):
        return None
    return Points({name: numbers}, (), value.size // numbers)


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Recognise outputs of points in the input's picture."""
    flags = _find_flags(samples)
    presence = flags[0] if len(flags) == 1 else None
    scores_by_layout = _find_point_scores(samples)
    layout_by_output = {layout.output: layout for layout in reversed(scores_by_layout)}
    score_outputs = {scores.output for scores in scores_by_layout.values()}

    points: dict[str, int] = {}
    parts: SlicesByOutput = {flag.output: () for flag in flags}
    count = 0
    for name in samples.names:
        if name in score_outputs:
            continue
        layout = layout_by_output.get(name, OutputSlice(output=name))
        numbers = _find_numbers(name, samples, width=layout.width, flag_count=len(flags))
        if numbers:
            points[name] = numbers
            scores = scores_by_layout.get(layout, presence)
            parts |= _slice_points(samples.arrays(name), name, numbers, scores)
            count += samples.outputs[0][name].size // numbers
    if not points:
        return None
    return Points(points, flags, count, parts=parts)


def _find_flags(samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return outputs of one probability."""
    flags = []
    for name, values in samples.floats.items():
        if all(value.size == 1 and are_shares(value) for value in values):
            flags.append(OutputSlice(output=name))
    return tuple(flags)


def _find_point_scores(samples: FirstSamples) -> dict[OutputSlice, OutputSlice]:
    """Return layouts of outputs -> scores of their points in another output."""
    values = {}
    for name in samples.names:
        arrays = samples.arrays(name)
        widths = [0]
        if all(map(is_vector, arrays)):
            widths += _NUMBERS
        for width in widths:
            layout = OutputSlice(output=name, width=width)
            values[layout] = [layout.of(value) for value in arrays]
    return find_scores(values)


def _slice_points(
    values: Arrays, name: str, numbers: int, scores: OutputSlice | None
) -> SlicesByOutput:
    """Return the slices of points that scores weight: the third of their numbers, or `scores`."""
    points = _to_points(values[0])
    width = 0 if points.shape[-1] == numbers else numbers
    complete = OutputSlice(output=name, axis=1 if points is not values[0] else -1, width=width)
    third = np.concatenate([_to_rows(value, numbers)[:, 2:] for value in values])
    if are_shares(third) and third.max() > 0:
        own_scores = replace(complete, start=2, stop=3)
        return {name: (replace(complete, stop=2, at=own_scores), own_scores)}
    if scores is None:
        return {}
    return {name: (replace(complete, at=scores),)}


def _find_numbers(name: str, samples: FirstSamples, *, width: int, flag_count: int) -> int:
    """Return the numbers per point; 0 if the output is no points.

    `width`: these numbers, if scores in another output show them; else 0.
    """
    values, size = samples.arrays(name), samples.picture_size
    if size is None or not _have_point_shape(values):
        return 0
    points = np.stack([_to_points(value) for value in values]).astype(np.float64)
    vectors = points.reshape(len(points), -1)
    is_flat = is_vector(points[0])
    choices: Sequence[int] = _NUMBERS
    if not is_flat:
        choices = (points.shape[-1],)
    elif width:
        choices = (width,)
    ordered_numbers = _find_ordered_numbers(vectors, choices)
    in_order = ordered_numbers > 0
    numbers = ordered_numbers if is_flat else points.shape[-1]
    if numbers not in _NUMBERS:
        return 0

    # channels of cells, or of steps, are in rows as well
    has_flags_only = len(samples.names) == flag_count + 1
    if is_transposed(values[0].shape) and not (in_order and has_flags_only):
        return 0
    rows = vectors.reshape(len(vectors), -1, numbers)
    min_points = MIN_ORDERED if is_flat else MIN_COUNT
    has_count = min_points <= rows.shape[1] <= MAX_POINTS
    if has_count and _lie_inside(rows, size, in_order=in_order):
        return numbers
    return 0


def _have_point_shape(values: Arrays) -> bool:
    """Whether finite arrays of one shape [1, ...] have two dimensions longer than 1, at most."""
    shape = values[0].shape
    if len(shape) < 2 or shape[0] != 1 or sum(side > 1 for side in shape) > 2:
        return False
    if values[0].size > MAX_POINTS * _NUMBERS[-1]:
        return False
    return all(value.shape == shape and is_floating(value) for value in values)


def _find_ordered_numbers(vectors: Floats, choices: Sequence[int]) -> int:
    """Return the numbers per point at which vectors [samples, K p] are in order; 0 without.

    A single choice is known, and must only be in better order than any neighbours are.
    """
    length, step = vectors.shape[1], choices[0] if len(choices) == 1 else 1
    if (vectors[:, step:] <= vectors[:, :-step]).all():  # sorted scores
        return 0
    orders = {0: MIN_ORDER}
    if len(choices) == 1:
        orders[0] = _order(vectors, 1) + MIN_ORDER_LEAD
    for numbers in choices:
        if length % numbers == 0 and length >= numbers * MIN_ORDERED:
            orders[numbers] = _order(vectors, numbers)
    return max(orders, key=lambda numbers: orders[numbers])


def _order(vectors: Floats, step: int) -> float:
    """Return the mean correlation of the numbers with those `step` later."""
    return float(np.mean([correlate(vector[step:], vector[:-step]) for vector in vectors]))


def _to_rows(value: Array, numbers: int) -> Floats:
    """Return points as [K, numbers]."""
    return _to_points(value).reshape(-1, numbers).astype(np.float64)


def _to_points(value: Array) -> Array:
    """Return [N, p, K], with a row for each number, as [N, K, p]; other arrays unchanged."""
    if not is_transposed(value.shape):
        return value
    return value.swapaxes(1, 2)


def is_transposed(shape: Sequence[int]) -> bool:
    """Whether it is [N, p, K], with a row for each of a point's numbers."""
    has_rows = len(shape) == 3 and shape[1] in _NUMBERS
    return has_rows and shape[2] >= MIN_ORDERED


def _lie_inside(rows: Floats, size: ImageSize, *, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates about the picture's middle.

    They are in pixels, or relative to its side: 0 to 1 or, if `in_order`, -1 to 1.
    """
    positions = rows[:, :, :2]
    if np.abs(positions).max() > MAX_RELATIVE_COORDINATE:
        return _are_central(positions / max(size))
    end = MAX_END_DISTANCE
    if np.ptp(rows.sum(axis=2)) < end:
        return False  # class probabilities
    for shares in (positions, (positions + 1) / 2) if in_order else (positions,):
        is_end = (shares < end) | (shares > 1 - end)
        if is_end.mean() <= MAX_END_SHARE and _are_central(shares):
            return True
    return False


def _are_central(positions: Floats) -> bool:
    """Whether relative coordinates lie about the middle of the picture."""
    margin = MAX_POINT_OUTSIDE
    is_inside = (positions > -margin) & (positions < 1 + margin)
    if is_inside.mean() < MIN_CODED_SHARE:
        return False
    means, deviations = positions.mean(axis=(0, 1)), positions.std(axis=1).mean(axis=0)
    has_mean = _are_between(means, MEAN_COORDINATE)
    return has_mean and _are_between(deviations, COORDINATE_SPREAD)


def _are_between(values: Floats, limits: tuple[float, float]) -> bool:
    low, high = limits
    return bool(((values > low) & (values < high)).all())


@dataclass(slots=True)
class _AxisTally(PointTally["SimccPoints"]):
    """Counts points at the same place, within two pixels."""

    things = "key points"
    condition = f"within {MAX_SIMCC_PIXELS} pixels"

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        peaks = sum(_above_median(reference[name]).max(axis=1) for name in self.task.outputs)
        is_match = peaks > MIN_VISIBLE * np.max(peaks)
        self.points += int(is_match.sum())
        for name in self.task.outputs:
            scores = candidate[name]
            if not are_comparable(reference[name], scores):
                return
            distance = np.abs(reference[name][0].argmax(axis=1) - scores[0].argmax(axis=1))
            is_near = distance <= MAX_SIMCC_PIXELS * self.task.steps_per_pixel
            is_match = is_match & is_near
        self.matches += int(is_match.sum())


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


SIMCC = Form(
    shape="[N, K, r W] and [N, K, r H] for a picture of W x H",
    values="likelihoods of the columns and rows of each point",
    figure="points within two pixels",
    source="SimCC (Li et al. 2022), RTMPose",
)


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


def _steps_per_pixel(size: ImageSize, columns: Array, rows: Array) -> float | None:
    """Return the steps per pixel, equal on both axes; None if shapes do not fit the picture."""
    if not columns.ndim == rows.ndim == 3 or columns.shape[1] != rows.shape[1]:
        return None
    if columns.shape[1] < MIN_COUNT:
        return None
    height, width = size
    steps = float(columns.shape[2] / width)
    is_floating_pair = is_floating(columns) and is_floating(rows)
    if not is_floating_pair or steps < 1 or rows.shape[2] != steps * height:
        return None
    return steps
