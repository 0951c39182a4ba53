"""Key points of faces, hands and bodies: coordinates (`POINTS`), or likelihoods (`SIMCC`).

In a flat output each point is near the one before; so are coordinates of -1 to 1 (InsightFace) in
any output.

If one other output is a single probability, it says whether there is an object: without one, points
do not count, and if int8 decides differently, all points of the sample are lost. Points that are
not visible, by a third number or by another output, do not count either.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.tasks.evaluation_task import Form, PointTask
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import (
    Arrays,
    Flags,
    Floats,
    ImageSize,
    Outputs,
    are_comparable,
    are_in_unit_range,
    correlate,
    is_floating,
    is_vector,
)
from deploy.tasks.slices import OutputSlice, SlicesByOutput, find_cell_scores
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
    MIN_ORDERED,
    MIN_VISIBLE,
)
from deploy.tensors import Array

_NUMBERS = (2, 3)  # numbers per point that are recognised
_ANY_NUMBERS = (2, 3, 4, 5)  # numbers per point of outputs that a user sets


@dataclass(frozen=True, slots=True)
class Points(PointTask):
    """Key points as coordinates.

    Attributes:
        outputs: output of points -> numbers per point.
        presence: output of one probability, whether there is an object; "" without.
        count: number of points of all outputs.
    """

    outputs: Mapping[str, int]
    presence: str
    count: int
    name = "key points"
    reads = "{0.count} key points"
    condition = f"within {100 * MAX_POINT_DISTANCE:g} % of their extent"

    def match_points(self, reference: Outputs, candidate: Outputs) -> tuple[Flags, Flags]:
        """Match points near FP32's, relative to the extent of each output's points.

        If only one of the models sees an object, none of the sample's points match; if neither
        does, the sample has no points.
        """
        has_object = self._has_object(reference)
        is_equal = has_object == self._has_object(candidate)
        present, matching = [np.zeros(0, np.bool_)], [np.zeros(0, np.bool_)]
        for name, numbers in self.outputs.items():
            # a flat output of varying length may hold no whole points
            if (is_equal and not has_object) or reference[name].size % numbers:
                continue
            is_present = self._confidences(name, reference) > MIN_VISIBLE  # [K] points
            is_match = np.zeros_like(is_present)
            if is_equal and are_comparable(reference[name], candidate[name]):
                is_match = self._are_near(name, is_present, reference, candidate)
            present.append(is_present)
            matching.append(is_match)
        return np.concatenate(present), np.concatenate(matching)

    def _has_object(self, outputs: Outputs) -> bool:
        """Whether a model sees an object in a sample, and so whether its points mean anything."""
        return not self.presence or bool(np.all(outputs[self.presence] > 0.5))

    def _are_near(
        self, name: str, is_present: Flags, reference: Outputs, candidate: Outputs
    ) -> Flags:
        """Return which of the candidate's points [K] are near FP32's, and visible.

        Args:
            name: output of the points.
            is_present: which points FP32 sees, [K].
            reference: FP32's outputs of the sample.
            candidate: the candidate's, of the same shapes.
        """
        numbers = self.outputs[name]
        positions = _to_rows(reference[name], numbers)[:, :2]
        offsets = positions - _to_rows(candidate[name], numbers)[:, :2]
        # a few points do not show how large the object is
        if is_present.sum() >= MIN_COUNT:
            positions = positions[is_present]
        max_distance = MAX_POINT_DISTANCE * np.ptp(positions, axis=0).max()
        is_near = np.linalg.norm(offsets, axis=1) <= max_distance
        # half of the limit: a point at the limit itself may fall below it by int8's noise
        is_visible = self._confidences(name, candidate) > MIN_VISIBLE / 2
        return np.asarray(is_near & is_visible)

    def _confidences(self, name: str, outputs: Outputs) -> Floats:
        """Return the confidence of each point [K]; 1 for all if there is not one for each point."""
        point_count = outputs[name].size // self.outputs[name]
        parts = self.parts.get(name, ())
        if parts and parts[0].at is not None:
            confidences = parts[0].at.best_scores(outputs).reshape(-1)
            if confidences.size == point_count:
                return confidences
        return np.ones(point_count)


POINTS = Form(
    shape="points [N, K, p] or [N, K p] of 2 or 3 numbers, by `--task` up to 5",
    values="positions in pixels, as a fraction of the picture, or from -1 to 1, and perhaps a depth"
    " or a score; a single probability in another output",
    figure="points within 3 % of their extent that are visible, in samples in which both models see"
    " an object by that probability",
    source="MediaPipe's hands and faces, MoveNet, PFLD, InsightFace",
)


def fit_keypoints(name: str, samples: FirstSamples) -> Points | None:
    """Return the key points of an output that the user or the file says to hold such; else None.

    The last dimension is the numbers per point, 2 to 5. In a flat output it is the number at which
    points are nearest to the ones before, or 2.
    """
    values = samples.arrays(name)
    numbers = values[0].shape[-1] if values[0].ndim in (2, 3, 4) else 0
    if numbers not in _ANY_NUMBERS:
        if not is_vector(values[0]):
            return None
        numbers = _find_ordered_numbers(values[:1], _ANY_NUMBERS) or 2
    if any(value.size % numbers for value in values):
        return None
    return Points({name: numbers}, "", values[0].size // numbers)


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Return the key points of outputs that are coordinates in the picture; None without such.

    A point is visible by its third number, by the scores in another output, or by the only output
    of a single probability: whether there is an object (`presence`).
    """
    size = samples.picture_size
    if size is None:
        return None
    presence = _find_presence(samples)
    arrays_by_output = {OutputSlice(output=name): samples.arrays(name) for name in samples.names}
    scores_by_output = find_cell_scores(arrays_by_output)

    numbers_by_name: dict[str, int] = {}  # output -> numbers per point
    slices: SlicesByOutput = {presence: ()} if presence else {}
    for output, arrays in arrays_by_output.items():
        if output in scores_by_output.values():
            continue  # scores of points are no points
        numbers = _find_numbers(arrays, size)
        if numbers:
            numbers_by_name[output.output] = numbers
            scores = scores_by_output.get(output)
            if scores is None and presence:
                scores = OutputSlice(output=presence)
            slices |= _slice_points(output.output, arrays, scores)
    if not numbers_by_name:
        return None
    point_count = 0
    for name, numbers in numbers_by_name.items():
        point_count += samples.outputs[0][name].size // numbers
    return Points(numbers_by_name, presence, point_count, parts=slices)


def _find_presence(samples: FirstSamples) -> str:
    """Return the only output of one probability a sample; "" if there is none, or several."""
    probabilities = []
    for name, arrays in samples.float_outputs.items():
        if all(value.size == 1 and are_in_unit_range(value) for value in arrays):
            probabilities.append(name)
    return probabilities[0] if len(probabilities) == 1 else ""


def _slice_points(name: str, values: Arrays, scores: OutputSlice | None) -> SlicesByOutput:
    """Return the slices of points that scores weight: the third of their numbers, or `scores`."""
    third = np.concatenate([value[..., 2:3].reshape(-1) for value in values])
    if not is_vector(values[0]) and are_in_unit_range(third) and third.max() > 0:
        own_scores = OutputSlice(output=name, axis=-1, start=2, stop=3)
        return {name: (OutputSlice(output=name, axis=-1, stop=2, at=own_scores), own_scores)}
    if scores is None:
        return {}
    return {name: (OutputSlice(output=name, at=scores),)}


def _find_numbers(values: Arrays, size: ImageSize) -> int:
    """Return how many numbers a key point has, 2 (x, y) or 3; 0 if an output holds no key points.

    The numbers of a point are the last dimension. A flat output, [1, K p], does not show them:
    there each point must be near the one before.

    Args:
        values: the output's arrays for the first few samples.
        size: (height, width) of the picture in pixels.
    """
    shape = values[0].shape
    if len(shape) < 2 or shape[0] != 1 or sum(side > 1 for side in shape) > 2:
        return 0
    if not all(value.shape == shape and is_floating(value) for value in values):
        return 0
    if is_vector(values[0]):
        numbers = ordered_numbers = _find_ordered_numbers(values, _NUMBERS)
        min_points = MIN_ORDERED
    else:
        numbers = shape[-1]
        ordered_numbers = _find_ordered_numbers(values, (numbers,))
        min_points = MIN_COUNT
    if numbers not in _NUMBERS:
        return 0

    points = np.stack(values).reshape(len(values), -1, numbers).astype(np.float64)
    has_count = min_points <= points.shape[1] <= MAX_POINTS
    if has_count and _lie_inside(points, size, in_order=ordered_numbers > 0):
        return numbers
    return 0


def _find_ordered_numbers(values: Arrays, choices: Sequence[int]) -> int:
    """Return how many numbers of a flat output are one point; 0 if they are no points in order.

    Points of a contour or a face are near the ones before: so the numbers correlate with those one
    point before them.

    Args:
        values: an output's arrays for the first few samples, of equal size.
        choices: numbers per point that are tried.
    """
    vectors = np.stack(values).reshape(len(values), -1).astype(np.float64)
    length = vectors.shape[1]
    if (vectors[:, 1:] <= vectors[:, :-1]).all():  # sorted scores
        return 0
    best_numbers, best_order = 1, MIN_ORDER
    for numbers in (1, *choices):
        if length % numbers or length < numbers * MIN_ORDERED:
            continue  # no whole points, or too few to show an order
        correlations = [correlate(vector[numbers:], vector[:-numbers]) for vector in vectors]
        order = float(np.mean(correlations))
        if order > best_order:
            best_numbers, best_order = numbers, order
    if best_numbers == 1:  # a signal, or no order at all
        return 0
    return best_numbers


def _to_rows(value: Array, numbers: int) -> Floats:
    """Return points as [K, numbers]."""
    return value.reshape(-1, numbers).astype(np.float64)


def _lie_inside(rows: Floats, size: ImageSize, *, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates about the picture's middle.

    Args:
        rows: points [samples, K, numbers], in pixels or relative to the picture's side: 0 to 1, or
            -1 to 1.
        size: (height, width) of the picture in pixels.
        in_order: whether neighbouring points are near each other; other numbers from -1 to 1 may be
            anything.
    """
    positions = rows[:, :, :2]
    if np.abs(positions).max() > MAX_RELATIVE_COORDINATE:
        return _are_central(positions / max(size))
    end = MAX_END_DISTANCE
    if np.ptp(rows.sum(axis=2)) < end:
        return False  # class probabilities
    candidates = [positions]
    if in_order:
        candidates.append((positions + 1) / 2)  # from -1 to 1
    for relative_positions in candidates:
        is_end = (relative_positions < end) | (relative_positions > 1 - end)
        if is_end.mean() <= MAX_END_SHARE and _are_central(relative_positions):
            return True
    return False


def _are_central(positions: Floats) -> bool:
    """Whether relative coordinates [samples, K, 2] lie about the middle of the picture."""
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


@dataclass(frozen=True, slots=True)
class SimccPoints(PointTask):
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
    condition = f"within {MAX_SIMCC_PIXELS} pixels"

    def match_points(self, reference: Outputs, candidate: Outputs) -> tuple[Flags, Flags]:
        """Match points whose most likely column and row are near FP32's.

        FP32 sees a point whose distributions have a high peak, relative to the other points'.
        """
        columns, rows = self.outputs
        peaks = _peak_heights(reference[columns]) + _peak_heights(reference[rows])
        is_present = peaks > MIN_VISIBLE * peaks.max()
        is_match = np.ones_like(is_present)
        for name in self.outputs:
            likelihoods, scores = reference[name], candidate[name]
            if are_comparable(likelihoods, scores):
                steps = np.abs(likelihoods[0].argmax(axis=1) - scores[0].argmax(axis=1))
                is_match &= steps <= MAX_SIMCC_PIXELS * self.steps_per_pixel
            else:
                is_match[:] = False
        return is_present, is_match


def _peak_heights(likelihoods: Array) -> Floats:
    """Return how far the peak of each point is above its median: [1, K, L] -> [K]."""
    rows = likelihoods[0].astype(np.float64)
    return np.asarray(rows.max(axis=1) - np.median(rows, axis=1))


SIMCC = Form(
    shape="[N, K, r W] and [N, K, r H] for a picture of W x H",
    values="likelihoods of the columns and rows of each point",
    figure="points within two pixels",
    source="SimCC (Li et al. 2022), RTMPose",
)


def find_simcc(samples: FirstSamples) -> SimccPoints | None:
    """Return the points of two outputs as long as the picture's sides, or a multiple; or None."""
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
