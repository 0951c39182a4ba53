"""Detections of one image: suppressing overlaps, and matching two models' boxes.

What outlines a found object beside the four sides of its box: a mask, or an angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.tensors import Array

_STRIDES = (2, 4, 8)  # pixels of a mask's cell
_WIDE, _HIGH = np.array([-1, 1, 1, -1]), np.array([-1, -1, 1, 1])  # corners, in half sides

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Masks of an image's boxes: above 0 in sums of maps that all boxes share.

    Attributes:
        weights: [n, m] of the maps, a row a box.
        maps: [m, h, w].
        stride: length of their cells in the boxes' unit.
    """

    weights: Floats
    maps: NDArray[np.floating]
    stride: float

    def at(self, keep: NDArray[np.bool_] | NDArray[np.int64] | list[int]) -> Masks:
        """Of some of the boxes."""
        return Masks(self.weights[keep], self.maps, self.stride)

    def first(self, box: Floats) -> NDArray[np.bool_]:
        """The first box's mask [h, w], which ends where the box does."""
        rows, columns = ((np.arange(side) + 0.5) * self.stride for side in self.maps.shape[1:])
        wide = (columns > box[0]) & (columns < box[2])
        high = (rows > box[1]) & (rows < box[3])
        return np.asarray((np.tensordot(self.weights[0], self.maps, 1) > 0) & wide & high[:, None])


def masks_of(weights: Array, maps: Array | None, size: tuple[int, int] | None) -> Masks | None:
    """Masks of boxes in pixels; None where the maps are not of the picture's cells."""
    if maps is None or size is None or maps.ndim != 4 or maps.shape[:2] != (1, weights.shape[1]):
        return None
    stride = next((s for s in _STRIDES if maps.shape[2:] == (size[0] // s, size[1] // s)), None)
    floating = np.issubdtype(maps.dtype, np.floating)
    if stride is None or not floating:
        return None
    return Masks(weights.astype(np.float64), maps[0], float(stride))


def are_angles(rest: Floats) -> bool:
    """Whether numbers are angles of half a turn."""
    return bool(0 < np.ptp(rest) <= np.pi + 1e-3 and np.abs(rest).max() <= np.pi + 1e-3)


def turned(boxes: Floats, angles: Floats) -> Floats:
    """Corners [n, 4, 2] of boxes cx cy w h that are turned about their centres."""
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    wide, high = (boxes[:, side, None] / 2 * ends for side, ends in ((2, _WIDE), (3, _HIGH)))
    out = np.stack([wide * cosine - high * sine, wide * sine + high * cosine], axis=2)
    return np.asarray(boxes[:, None, :2] + out)


LOWEST = 0.05  # scores below it are never looked at
_OFF = 0.1  # of a box's size, that its key points may lie elsewhere in the mean
_COVERED = 0.75  # IoU that the masks of one box have in both models, at least
_VISIBLE = 0.5  # of a key point that tells whether it is seen
IOU = 0.5  # above it two boxes are one, for suppression and for matching
_MOST = 1000  # boxes of an image before suppression, the best by score


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image, the best score first.

    Attributes:
        boxes: [n, 4] corners x1 y1 x2 y2, in any one unit.
        scores: [n] 0 to 1.
        classes: [n] class numbers.
        points: [n, K, 2] places of key points in the same unit, or [n, K, 3] with how visible each
            is; None without.
        masks: of each box; None without.
    """

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]
    points: Floats | None = None
    masks: Masks | None = None

    @classmethod
    def of(
        cls,
        boxes: Floats,
        scores: Floats,
        classes: NDArray[np.int64],
        points: Floats | None = None,
        masks: Masks | None = None,
    ) -> Detections:
        """The best by score, above `LOWEST`; what holds NaN or Inf is no detection."""
        good = np.flatnonzero((scores > LOWEST) & np.isfinite(boxes).all(axis=1))
        best = good[np.argsort(-scores[good], kind="stable")][:_MOST]
        return cls(boxes, scores, classes, points, masks).at(best)

    def above(self, threshold: float) -> Detections:
        """Those of a greater score."""
        return self.at(self.scores > threshold)

    def at(self, keep: NDArray[np.bool_] | NDArray[np.int64] | list[int]) -> Detections:
        """Some of them."""
        points = None if self.points is None else self.points[keep]
        masks = None if self.masks is None else self.masks.at(keep)
        return Detections(self.boxes[keep], self.scores[keep], self.classes[keep], points, masks)


NOTHING = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))


def by_score(
    boxes: Floats, scores: Floats, points: Floats | None = None, masks: Masks | None = None
) -> Detections:
    """Boxes [A, 4] and scores [A, C] of which each box's best class counts."""
    with np.errstate(invalid="ignore"):
        classes = np.asarray(np.nan_to_num(scores, nan=-1.0).argmax(axis=1), np.int64)
    best = np.take_along_axis(scores, classes[:, None], axis=1)[:, 0]
    return Detections.of(boxes, best, classes, points, masks)


def by_place(scores: Floats) -> Detections:
    """Scores [A, C] of anchors whose boxes cannot be told: the anchor's number is its box.

    Each stands as a unit square of its own, so that only the same anchor overlaps with it.
    """
    left = 2.0 * np.arange(len(scores))
    zero, one = np.zeros(len(scores)), np.ones(len(scores))
    return by_score(np.stack([left, zero, left + 1, one], axis=1), scores)


def overlaps(left: Floats, right: Floats) -> Floats:
    """Intersection over union of boxes [n, 4] and [m, 4] -> [n, m]; 0 for boxes without area."""
    low = np.maximum(left[:, None, :2], right[None, :, :2])
    high = np.minimum(left[:, None, 2:], right[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    areas = [np.clip(b[:, 2:] - b[:, :2], 0, None).prod(axis=1) for b in (left, right)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared), where=union > 0))


def suppressed(found: Detections, iou: float = IOU) -> Detections:
    """Greedy non-maximum suppression of boxes that overlap more, each class by itself."""
    keep: list[int] = []
    left = np.arange(len(found.scores))
    while left.size:
        best, left = left[0], left[1:]
        keep.append(int(best))
        near = overlaps(found.boxes[best : best + 1], found.boxes[left])[0] > iou
        left = left[~(near & (found.classes[left] == found.classes[best]))]
    return found.at(np.array(keep, np.int64))


def matched(
    reference: Detections, candidate: Detections, thresholds: Sequence[float] = (LOWEST,)
) -> list[list[tuple[int, int]]]:
    """Which of the reference's boxes the candidate has too, at each threshold of the score.

    The numbers of both, counted among those above the threshold. Boxes match by class, IoU above
    `IOU`, key points and masks, where both have such; each of the candidate stands for one, and
    the reference's best scores choose first.
    """
    iou = overlaps(reference.boxes, candidate.boxes)
    iou[reference.classes[:, None] != candidate.classes[None, :]] = 0
    more = reference.points is not None or reference.masks is not None
    for row, column in np.argwhere(iou > IOU) if more else ():
        one, other = reference.at([row]), candidate.at([column])
        iou[row, column] *= _same_points(one, other) and _same_mask(one, other)
    return [
        _pairs(iou[np.ix_(reference.scores > low, candidate.scores > low)]) for low in thresholds
    ]


def in_pixels(found: Detections, size: tuple[int, int]) -> Detections:
    """Boxes of shares of the picture become pixels of one of `size` (height, width)."""
    if not len(found.boxes) or found.boxes.max() > 2:
        return found
    height, width = size
    scale = np.array([width, height, width, height], np.float64)
    points = None if found.points is None else found.points.copy()
    if points is not None:
        points[..., :2] *= scale[:2]
    return Detections(found.boxes * scale, found.scores, found.classes, points)


def _same_points(one: Detections, other: Detections) -> bool:
    """Whether one box's visible key points are near another's; so where either has none."""
    if one.points is None or other.points is None:
        return True
    far = np.hypot(*(one.points - other.points)[0, :, :2].T)
    if one.points.shape[2] > 2:
        far = far[one.points[0, :, 2] > _VISIBLE]
    size = float(np.sqrt(np.clip(one.boxes[0, 2:] - one.boxes[0, :2], 0, None).prod()))
    return not far.size or bool(far.mean() <= _OFF * size)


def _same_mask(one: Detections, other: Detections) -> bool:
    """Whether one box's mask covers what another's does; so where either has none."""
    if one.masks is None or other.masks is None:
        return True
    left, right = one.masks.first(one.boxes[0]), other.masks.first(other.boxes[0])
    either = int((left | right).sum())
    return not either or int((left & right).sum()) > _COVERED * either


def _pairs(iou: Floats) -> list[tuple[int, int]]:
    """(row, column) of [n, m] for rows that find a column of their own, in order."""
    found = []
    for row in np.flatnonzero(iou.max(axis=1, initial=0) > IOU).tolist():
        best = int(iou[row].argmax())
        if iou[row, best] > IOU:
            iou[:, best] = 0
            found.append((row, best))
    return found
