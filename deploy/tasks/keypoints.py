"""Key points of faces, hands and bodies: coordinates (`POINTS`), or likelihoods (`SIMCC`).

In a flat output each point is near the one before; so are coordinates of -1 to 1 (InsightFace) in
any output.

Points that are not visible do not count: by their third number, or by another output of a score
for each of them.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.tasks.evaluation_task import Form, PointTask
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.maps import HeatMaps
from deploy.tasks.rows import (
    Arrays,
    Flags,
    Floats,
    ImageSize,
    Outputs,
    are_comparable,
    are_in_unit_range,
    is_vector,
    order_by_step,
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

_POINT_WIDTHS = (2, 3)  # numbers per point that are recognised
_ANY_POINT_WIDTHS = (2, 3, 4, 5)  # numbers per point of outputs that a user sets


@dataclass(frozen=True, slots=True)
class Points(PointTask):
    """Key points as coordinates.

    Attributes:
        outputs: output of points -> numbers per point.
        count: number of points of all outputs.
    """

    outputs: Mapping[str, int]
    count: int
    name = "key points"
    reads = "{0.count} key points"
    condition = f"within {100 * MAX_POINT_DISTANCE:g} % of their extent"

    def match_points(self, reference: Outputs, candidate: Outputs) -> tuple[Flags, Flags]:
        """Match points near FP32's, relative to the extent of each output's points."""
        present = [np.zeros(0, np.bool_)]
        matching = [np.zeros(0, np.bool_)]  # of each output, [K]
        for name, point_width in self.outputs.items():
            if reference[name].size % point_width:
                continue  # a flat output of varying length may hold no whole points
            is_present = self._confidences(name, reference) > MIN_VISIBLE
            is_match = np.zeros_like(is_present)
            if are_comparable(reference[name], candidate[name]):
                is_match = self._are_near_and_visible(name, is_present, reference, candidate)
            present.append(is_present)
            matching.append(is_match)
        return np.concatenate(present), np.concatenate(matching)

    def _are_near_and_visible(
        self, name: str, is_present: Flags, reference: Outputs, candidate: Outputs
    ) -> Flags:
        """Return which of the candidate's points [K] are near FP32's, and visible.

        Args:
            name: output of the points.
            is_present: which points FP32 sees, [K].
            reference: FP32's outputs of the sample.
            candidate: the candidate's, of the same shapes.
        """
        point_width = self.outputs[name]
        reference_positions = _to_rows(reference[name], point_width)[:, :2]
        candidate_positions = _to_rows(candidate[name], point_width)[:, :2]
        distances = np.linalg.norm(reference_positions - candidate_positions, axis=1)
        # the extent of the object: of the points that FP32 sees or, if these are too few to show
        # it, of all points
        object_positions = reference_positions
        if is_present.sum() >= MIN_COUNT:
            object_positions = reference_positions[is_present]
        extent = np.ptp(object_positions, axis=0).max()
        is_near = distances <= MAX_POINT_DISTANCE * extent
        # half of the limit: a point at the limit itself may fall below it by int8's noise
        is_visible = self._confidences(name, candidate) > MIN_VISIBLE / 2
        return np.asarray(is_near & is_visible)

    def _confidences(self, name: str, outputs: Outputs) -> Floats:
        """Return the confidence of each point [K]; 1 for all if no scores tell it."""
        point_count = outputs[name].size // self.outputs[name]
        parts = self.parts.get(name, ())
        if parts and parts[0].cell_scores is not None:
            confidences = parts[0].cell_scores.best_scores(outputs).reshape(-1)
            if confidences.size == point_count:
                return confidences
        return np.ones(point_count)


POINTS = Form(
    shape="[N, K, p] or [N, K p] with p values per point: 2 or 3, with `--task` up to 5",
    values="positions in pixels, [0, 1] or [-1, 1], perhaps with a depth or a score",
    figure="visible points closer than 3 % of the extent of all points",
    source="MediaPipe's hands and faces, MoveNet, PFLD, InsightFace",
)


def fit_keypoints(name: str, samples: FirstSamples) -> Points | None:
    """Return the key points of an output that the user or the file says to hold such; else None.

    The last dimension is the numbers per point, 2 to 5. In a flat output it is the number of 2 to 5
    by which each point is nearest to the one before, or 2 if points are not in such an order.
    """
    values = samples.arrays(name)
    point_width = values[0].shape[-1] if values[0].ndim in (2, 3, 4) else 0
    if point_width not in _ANY_POINT_WIDTHS:
        if not is_vector(values[0]):
            return None
        # of the first sample only, since others may have more points or fewer
        point_width = _find_width_by_order(values[:1], _ANY_POINT_WIDTHS) or 2
    if any(value.size % point_width for value in values):
        return None
    return Points({name: point_width}, values[0].size // point_width)


def find_keypoints(samples: FirstSamples) -> Points | None:
    """Return the key points of outputs that are coordinates in the picture; None without such.

    Whether a point is visible is shown by its third number, or by scores in another output.
    """
    size = samples.picture_size
    if size is None:
        return None
    outputs = [OutputSlice(name) for name in samples.float_outputs]
    # slice of points -> slice of another output with a score for each of them
    scores_by_slice = find_cell_scores(outputs, samples)

    widths: dict[str, int] = {}  # output -> numbers per point
    slices: SlicesByOutput = {}
    point_count = 0
    for output_slice in outputs:
        if output_slice in scores_by_slice.values():
            continue  # scores of points are no points
        name = output_slice.output
        arrays = samples.arrays(name)
        point_width = _find_point_width(arrays, size)
        if not point_width:
            continue
        widths[name] = point_width
        point_count += arrays[0].size // point_width
        slices |= _slice_points(name, arrays, scores_by_slice.get(output_slice))
    if not widths:
        return None
    return Points(widths, point_count, parts=slices)


def _slice_points(name: str, values: Arrays, scores: OutputSlice | None) -> SlicesByOutput:
    """Return the slices of points that scores weight: the third of their numbers, or `scores`."""
    third_numbers = np.concatenate([value[..., 2:3].reshape(-1) for value in values])
    are_scores = are_in_unit_range(third_numbers) and third_numbers.max() > 0
    if are_scores and not is_vector(values[0]):
        own_scores = OutputSlice(name, axis=-1, start=2, stop=3)
        return {name: (OutputSlice(name, axis=-1, stop=2, cell_scores=own_scores), own_scores)}
    if scores is None:
        return {}
    return {name: (OutputSlice(name, cell_scores=scores),)}


def _find_point_width(values: Arrays, size: ImageSize) -> int:
    """Return how many numbers a key point has, 2 (x, y) or 3; 0 if an output holds no key points.

    An output [1, K, p] of K points shows that number as its last dimension. A flat output [1, K p]
    does not: there it is the number by which each point is near the one before.

    Args:
        values: the output's arrays for the first few samples.
        size: (height, width) of the picture in pixels.
    """
    # [1, K, p] or [1, K p], perhaps with dimensions of 1 in between
    shape = values[0].shape
    if len(shape) < 2 or shape[0] != 1 or sum(side > 1 for side in shape) > 2:
        return 0
    if any(value.shape != shape for value in values):
        return 0
    if is_vector(values[0]):  # flat
        point_width = _find_width_by_order(values, _POINT_WIDTHS)
        is_ordered = True
        min_points = MIN_ORDERED
    else:
        point_width = shape[-1]
        is_ordered = _find_width_by_order(values, (point_width,)) > 0
        min_points = MIN_COUNT
    if point_width not in _POINT_WIDTHS:
        return 0

    points = np.stack(values).reshape(len(values), -1, point_width).astype(np.float64)
    has_count = min_points <= points.shape[1] <= MAX_POINTS
    if has_count and _lie_inside(points, size, in_order=is_ordered):
        return point_width
    return 0


def _find_width_by_order(values: Arrays, widths: Sequence[int]) -> int:
    """Return how many numbers of a flat output are one point; 0 if they are no points in order.

    Points of a contour or a face are near the point before. So each coordinate correlates with the
    same coordinate of the point before: in points of two numbers, with the one two places earlier.

    Args:
        values: an output's arrays for the first few samples, of equal size.
        widths: numbers per point that are tried.
    """
    vectors = np.stack(values).reshape(len(values), -1)
    length = vectors.shape[1]
    best_width = 0
    best_correlation = MIN_ORDER  # mean correlation with the point before; the minimum at first
    for width in (1, *widths):  # 1: a signal, each of whose numbers is near the one before
        if length % width == 0 and length >= width * MIN_ORDERED:  # whole points, and enough
            correlation = order_by_step(vectors, width)
            if correlation > best_correlation:
                best_width = width
                best_correlation = correlation
    return 0 if best_width == 1 else best_width  # 1: a signal


def _to_rows(value: Array, point_width: int) -> Floats:
    """Return points as [K, point_width]."""
    return value.reshape(-1, point_width).astype(np.float64)


def _lie_inside(rows: Floats, size: ImageSize, *, in_order: bool) -> bool:
    """Whether the first two numbers of each point are coordinates spread over the picture.

    Args:
        rows: points [samples, K, numbers], in pixels or relative to the picture's side: 0 to 1, or
            -1 to 1.
        size: (height, width) of the picture in pixels.
        in_order: whether neighbouring points are near each other; other numbers from -1 to 1 may be
            anything.
    """
    positions = rows[:, :, :2]
    if np.abs(positions).max() > MAX_RELATIVE_COORDINATE:  # in pixels
        return _are_central(positions / max(size))
    if np.ptp(rows.sum(axis=2)) < MAX_END_DISTANCE:
        return False  # numbers with the same sum everywhere are probabilities of classes
    readings = [positions]
    if in_order:
        readings.append((positions + 1) / 2)  # if they are from -1 to 1
    for relative_positions in readings:
        # many values near 0 or 1 are probabilities
        end_distances = np.minimum(relative_positions, 1 - relative_positions)
        end_share = np.mean(end_distances < MAX_END_DISTANCE)
        if end_share <= MAX_END_SHARE and _are_central(relative_positions):
            return True
    return False


def _are_central(positions: Floats) -> bool:
    """Whether relative coordinates [samples, K, 2] lie about the middle of the picture."""
    is_inside = (positions > -MAX_POINT_OUTSIDE) & (positions < 1 + MAX_POINT_OUTSIDE)
    if is_inside.mean() < MIN_CODED_SHARE:
        return False
    means = positions.mean(axis=(0, 1))
    deviations = positions.std(axis=1).mean(axis=0)
    has_mean = _are_between(means, MEAN_COORDINATE)
    return has_mean and _are_between(deviations, COORDINATE_SPREAD)


def _are_between(values: Floats, limits: tuple[float, float]) -> bool:
    low, high = limits
    return bool(((values > low) & (values < high)).all())


class SimccPoints(HeatMaps):
    """Key points as likelihoods of each column and of each row of the picture (SimCC)."""

    name = "key points"
    reads = "columns and rows of {0.count} key points"
    things = "key points"
    condition = f"within {MAX_SIMCC_PIXELS} pixels"

    def find_present(self, maps: Arrays) -> Flags:
        """Return which points [K] FP32 sees: those with a high peak, relative to the other's."""
        heights = [value[0].max(axis=1) - np.median(value[0], axis=1) for value in maps]
        peaks = np.sum(heights, axis=0, dtype=np.float64)
        return np.asarray(peaks > MIN_VISIBLE * peaks.max())


SIMCC = Form(
    shape="[N, K, r W] and [N, K, r H] with r bins per pixel of the picture",
    values="for each point, a score for every column and for every row",
    figure="points at most two pixels apart",
    source="SimCC (Li et al. 2022), RTMPose",
)


def find_simcc(samples: FirstSamples) -> SimccPoints | None:
    """Return the key points of two outputs, [1, K, r W] and [1, K, r H]; None for other outputs.

    They hold a likelihood for each column and row of a picture of W x H, in r steps per pixel.
    """
    size = samples.picture_size
    names = [*samples.float_outputs]
    if len(names) != 2 or len(samples.names) != 2 or size is None:
        return None
    height, width = size
    # either output may be that of the columns
    for column_output, row_output in itertools.permutations(names):
        shape = samples.outputs[0][column_output].shape
        row_shape = samples.outputs[0][row_output].shape
        if len(shape) != 3:
            continue
        count = shape[1]
        steps = shape[2] / width  # r, which must be equal on both axes
        has_equal_steps = row_shape == (shape[0], count, steps * height)
        if count >= MIN_COUNT and steps >= 1 and has_equal_steps:
            max_distance = MAX_SIMCC_PIXELS * steps
            return SimccPoints((column_output, row_output), count, max_distance=max_distance)
    return None
