"""Detections of one image: boxes, masks, key points; suppression, and matching of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.rows import Floats
from deploy.tensors import Array

_STRIDES = (2, 4, 8)  # pixels per cell of a mask
_WIDE, _HIGH = np.array([-1, 1, 1, -1]), np.array([-1, -1, 1, 1])  # corners, in half sides


@dataclass(frozen=True, slots=True, eq=False)
class InstanceMasks:
    """Masks of an image's boxes: where a weighted sum of prototype maps is above 0 (YOLACT)."""

    weights: Floats  # [n, m] weights of the maps, a row per box
    maps: NDArray[np.floating]  # [m, h, w] prototypes
    stride: float  # side of a cell in the boxes' unit

    def at(self, keep: NDArray[np.bool_] | NDArray[np.int64] | list[int]) -> InstanceMasks:
        """Return the masks of some boxes."""
        return InstanceMasks(self.weights[keep], self.maps, self.stride)

    def first(self, box: Floats) -> NDArray[np.bool_]:
        """Return the first box's mask [h, w], clipped to the box."""
        rows, columns = ((np.arange(side) + 0.5) * self.stride for side in self.maps.shape[1:])
        wide = (columns > box[0]) & (columns < box[2])
        high = (rows > box[1]) & (rows < box[3])
        return np.asarray((np.tensordot(self.weights[0], self.maps, 1) > 0) & wide & high[:, None])


def make_masks(
    weights: Array, maps: Array | None, size: tuple[int, int] | None
) -> InstanceMasks | None:
    """Return masks of boxes in pixels; None if the maps do not match the picture's size."""
    if maps is None or size is None or maps.ndim != 4 or maps.shape[:2] != (1, weights.shape[1]):
        return None
    stride = next((s for s in _STRIDES if maps.shape[2:] == (size[0] // s, size[1] // s)), None)
    floating = np.issubdtype(maps.dtype, np.floating)
    if stride is None or not floating:
        return None
    return InstanceMasks(weights.astype(np.float64), maps[0], float(stride))


def are_angles(rest: Floats) -> bool:
    """Whether numbers may be rotation angles of boxes, in radians."""
    return bool(0 < np.ptp(rest) <= np.pi + 1e-3 and np.abs(rest).max() <= np.pi + 1e-3)


def rotate_boxes(boxes: Floats, angles: Floats) -> Floats:
    """Return corners [n, 4, 2] of boxes cx cy w h rotated about their centres."""
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    wide, high = (boxes[:, side, None] / 2 * ends for side, ends in ((2, _WIDE), (3, _HIGH)))
    out = np.stack([wide * cosine - high * sine, wide * sine + high * cosine], axis=2)
    return np.asarray(boxes[:, None, :2] + out)


LOWEST = 0.05  # lower scores are ignored
_OFF = 0.1  # mean distance of matching key points, at most, relative to the box's size
_COVERED = 0.75  # IoU of matching masks, at least
_VISIBLE = 0.5  # visibility from which a key point counts
IOU = 0.5  # above it two boxes are the same, for suppression and for matching
_MOST = 1000  # boxes of an image before suppression, the best by score


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image, the best score first."""

    boxes: Floats  # [n, 4] corners x1 y1 x2 y2, in pixels or relative to the picture
    scores: Floats  # [n] 0 to 1
    classes: NDArray[np.int64]  # [n] class numbers
    # [n, K, 2] key points in the same unit, or [n, K, 3] with their visibility; None without
    points: Floats | None = None
    masks: InstanceMasks | None = None  # one per box; None without

    @classmethod
    def of(
        cls,
        boxes: Floats,
        scores: Floats,
        classes: NDArray[np.int64],
        points: Floats | None = None,
        masks: InstanceMasks | None = None,
    ) -> Detections:
        """Return the best by score, above `LOWEST`; boxes with NaN or Inf are left out."""
        good = np.flatnonzero((scores > LOWEST) & np.isfinite(boxes).all(axis=1))
        best = good[np.argsort(-scores[good], kind="stable")][:_MOST]
        return cls(boxes, scores, classes, points, masks).at(best)

    def above(self, threshold: float) -> Detections:
        """Return the boxes with a score above the threshold."""
        return self.at(self.scores > threshold)

    def at(self, keep: NDArray[np.bool_] | NDArray[np.int64] | list[int]) -> Detections:
        """Return some of the boxes, by mask or indices."""
        points = None if self.points is None else self.points[keep]
        masks = None if self.masks is None else self.masks.at(keep)
        return Detections(self.boxes[keep], self.scores[keep], self.classes[keep], points, masks)


NOTHING = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))


def detections_by_score(
    boxes: Floats, scores: Floats, points: Floats | None = None, masks: InstanceMasks | None = None
) -> Detections:
    """Return boxes [A, 4] with the best class of their scores [A, C]."""
    with np.errstate(invalid="ignore"):
        classes = np.asarray(np.nan_to_num(scores, nan=-1.0).argmax(axis=1), np.int64)
    best = np.take_along_axis(scores, classes[:, None], axis=1)[:, 0]
    return Detections.of(boxes, best, classes, points, masks)


def detections_by_anchor(scores: Floats) -> Detections:
    """Return anchors with scores [A, C] whose boxes cannot be decoded, as disjoint unit squares.

    So a square overlaps only with that of the same anchor.
    """
    left = 2.0 * np.arange(len(scores))
    zero, one = np.zeros(len(scores)), np.ones(len(scores))
    return detections_by_score(np.stack([left, zero, left + 1, one], axis=1), scores)


def box_intersections(left: Floats, right: Floats) -> Floats:
    """Return the area that boxes [n, 4] and [m, 4] share, as [n, m]."""
    low = np.maximum(left[:, None, :2], right[None, :, :2])
    high = np.minimum(left[:, None, 2:], right[None, :, 2:])
    return np.asarray(np.clip(high - low, 0, None).prod(axis=2))


def box_ious(left: Floats, right: Floats) -> Floats:
    """Return the IoU of boxes [n, 4] and [m, 4] as [n, m]; 0 for boxes without area."""
    shared = box_intersections(left, right)
    areas = [np.clip(b[:, 2:] - b[:, :2], 0, None).prod(axis=1) for b in (left, right)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared), where=union > 0))


def suppress_overlaps(found: Detections, iou: float = IOU) -> Detections:
    """Greedy non-maximum suppression per class of boxes that overlap by more than `iou`."""
    keep: list[int] = []
    remaining = np.arange(len(found.scores))
    while remaining.size:
        best, remaining = remaining[0], remaining[1:]
        keep.append(int(best))
        near = box_ious(found.boxes[best : best + 1], found.boxes[remaining])[0] > iou
        remaining = remaining[~(near & (found.classes[remaining] == found.classes[best]))]
    return found.at(np.array(keep, np.int64))


def match_detections(
    reference: Detections, candidate: Detections, thresholds: Sequence[float] = (LOWEST,)
) -> list[list[tuple[int, int]]]:
    """Match the reference's boxes with the candidate's, at each score threshold.

    Boxes match by class, IoU above `IOU`, and key points and masks if both have them. Each of the
    candidate's boxes matches one; the reference's boxes choose in descending order of score.

    Returns:
        For each threshold, pairs of indices among the boxes above it.
    """
    iou = box_ious(reference.boxes, candidate.boxes)
    iou[reference.classes[:, None] != candidate.classes[None, :]] = 0
    detailed = reference.points is not None or reference.masks is not None
    for row, column in np.argwhere(iou > IOU) if detailed else ():
        one, other = reference.at([row]), candidate.at([column])
        iou[row, column] *= _same_points(one, other) and _same_mask(one, other)
    return [
        _pairs(iou[np.ix_(reference.scores > low, candidate.scores > low)]) for low in thresholds
    ]


def scale_to_pixels(found: Detections, size: tuple[int, int]) -> Detections:
    """Convert boxes relative to the picture into pixels of `size` (height, width)."""
    if not len(found.boxes) or found.boxes.max() > 2:
        return found
    height, width = size
    scale = np.array([width, height, width, height], np.float64)
    points = None if found.points is None else found.points.copy()
    if points is not None:
        points[..., :2] *= scale[:2]
    return Detections(found.boxes * scale, found.scores, found.classes, points)


def _same_points(one: Detections, other: Detections) -> bool:
    """Whether the visible key points of two boxes are near; True if either has none."""
    if one.points is None or other.points is None:
        return True
    distance = np.hypot(*(one.points - other.points)[0, :, :2].T)
    if one.points.shape[2] > 2:
        distance = distance[one.points[0, :, 2] > _VISIBLE]
    size = float(np.sqrt(np.clip(one.boxes[0, 2:] - one.boxes[0, :2], 0, None).prod()))
    return not distance.size or bool(distance.mean() <= _OFF * size)


def _same_mask(one: Detections, other: Detections) -> bool:
    """Whether the masks of two boxes overlap enough; True if either has none."""
    if one.masks is None or other.masks is None:
        return True
    left, right = one.masks.first(one.boxes[0]), other.masks.first(other.boxes[0])
    union = int((left | right).sum())
    return not union or int((left & right).sum()) > _COVERED * union


def _pairs(iou: Floats) -> list[tuple[int, int]]:
    """Return (row, column) of [n, m], assigning a separate column to each row in order."""
    pairs = []
    for row in np.flatnonzero(iou.max(axis=1, initial=0) > IOU).tolist():
        best = int(iou[row].argmax())
        if iou[row, best] > IOU:
            iou[:, best] = 0
            pairs.append((row, best))
    return pairs
