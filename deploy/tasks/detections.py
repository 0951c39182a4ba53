"""Detections of one image: boxes, key points, masks; suppression, and matching of two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.rows import Flags, Floats, ImageSize, Integers
from deploy.tasks.thresholds import (
    IOU,
    MAX_BOX_POINT_DISTANCE,
    MAX_RELATIVE_CORNER,
    MIN_BOX_SCORE,
    MIN_MASK_IOU,
    MIN_VISIBILITY,
)
from deploy.tensors import Array

_MAX_BOXES = 1000  # boxes of an image before suppression, the best by score
_MASK_STRIDES = (2, 4, 8)  # pixels per cell of a mask
Indices = Flags | Integers | list[int]


@dataclass(frozen=True, slots=True, eq=False)
class BoxPoints:
    """Key points of an image's boxes.

    Attributes:
        positions: [n, K, 2] in the boxes' unit, or [n, K, 3] with their visibility.
    """

    positions: Floats

    def at(self, indices: Indices) -> BoxPoints:
        """Return the points of some boxes."""
        return BoxPoints(self.positions[indices])

    def is_like(self, candidate: Any, box: Floats, candidate_box: Floats) -> bool:
        """Whether the first box's visible points are near the candidate's, relative to its size."""
        distances = np.hypot(*(self.positions - candidate.positions)[0, :, :2].T)
        if self.positions.shape[2] > 2:
            distances = distances[self.positions[0, :, 2] > MIN_VISIBILITY]
        size = np.sqrt(box_areas(box[None])[0])
        return not distances.size or (distances.mean() <= MAX_BOX_POINT_DISTANCE * size)


@dataclass(frozen=True, slots=True, eq=False)
class InstanceMasks:
    """Masks of an image's boxes: where a weighted sum of prototype maps is above 0 (YOLACT).

    Attributes:
        weights: weights [n, m] of the maps, a row per box.
        maps: prototypes [m, h, w].
        stride: side of a cell in the boxes' unit.
    """

    weights: Floats
    maps: NDArray[np.floating]
    stride: float

    def at(self, indices: Indices) -> InstanceMasks:
        """Return the masks of some boxes."""
        return InstanceMasks(self.weights[indices], self.maps, self.stride)

    def is_like(self, candidate: Any, box: Floats, candidate_box: Floats) -> bool:
        """Whether the first box's mask overlaps enough with the candidate's."""
        mask = self.first_mask(box)
        candidate_mask = candidate.first_mask(candidate_box)
        union = int((mask | candidate_mask).sum())
        return not union or int((mask & candidate_mask).sum()) > MIN_MASK_IOU * union

    def first_mask(self, box: Floats) -> Flags:
        """Return the first box's mask [h, w], clipped to the box."""
        rows, columns = (np.indices(self.maps.shape[1:]) + 0.5) * self.stride
        in_columns = (columns > box[0]) & (columns < box[2])
        in_rows = (rows > box[1]) & (rows < box[3])
        is_object = np.tensordot(self.weights[0], self.maps, 1) > 0
        return np.asarray(is_object & in_columns & in_rows)


# what is known of the objects in boxes, beyond the boxes: `is_like` compares two of one kind
BoxShapes = BoxPoints | InstanceMasks


def make_masks(weights: Array, maps: Array | None, size: ImageSize | None) -> InstanceMasks | None:
    """Return the masks of boxes in pixels; None if the maps do not match the picture's size.

    Args:
        weights: [n, m], of n boxes, a weight for each of m prototype maps.
        maps: prototypes [1, m, h, w]; None without.
        size: (height, width) of the picture in pixels: 2, 4 or 8 times that of the maps.
    """
    if maps is None or size is None:
        return None
    if maps.ndim != 4 or not maps.size or maps.dtype.kind != "f":  # no maps
        return None
    stride = size[0] / maps.shape[2]  # of both sides
    expected_shape = (1, weights.shape[1], maps.shape[2], size[1] / stride)
    if stride not in _MASK_STRIDES or maps.shape != expected_shape:
        return None
    return InstanceMasks(weights.astype(np.float64), maps[0], stride)


def are_angles(values: Floats) -> bool:
    """Whether numbers may be rotation angles of boxes, in radians."""
    limit = np.pi + 1e-3
    return bool(0 < np.ptp(values) <= limit and np.abs(values).max() <= limit)


def find_rotated_ends(boxes: Floats, angles: Floats) -> Floats:
    """Return the middle of a side, [n, 1, 2], of boxes cx cy w h rotated about their centres."""
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.asarray(boxes[:, :2] + boxes[:, 2:3] / 2 * directions)[:, None]


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image, the best score first.

    Attributes:
        boxes: corners x1 y1 x2 y2 [n, 4], in pixels or relative to the picture.
        scores: 0 to 1, [n].
        classes: class numbers [n].
        shapes: key points or masks, one per box; None without.
    """

    boxes: Floats
    scores: Floats
    classes: Integers
    shapes: BoxShapes | None = None

    @classmethod
    def of(
        cls,
        boxes: Floats,
        scores: Floats,
        classes: Integers,
        shapes: BoxShapes | None = None,
    ) -> Detections:
        """Return the best by score, above `MIN_BOX_SCORE`; boxes with NaN or Inf are left out."""
        valid_indices = np.flatnonzero((scores > MIN_BOX_SCORE) & np.isfinite(boxes).all(axis=1))
        best_indices = valid_indices[np.argsort(-scores[valid_indices], kind="stable")][:_MAX_BOXES]
        return cls(boxes, scores, classes, shapes).at(best_indices)

    def above(self, threshold: float) -> Detections:
        """Return the boxes with a score above the threshold."""
        return self.at(self.scores > threshold)

    def at(self, indices: Indices) -> Detections:
        """Return some of the boxes, by mask or indices."""
        shapes = None if self.shapes is None else self.shapes.at(indices)
        return Detections(self.boxes[indices], self.scores[indices], self.classes[indices], shapes)


NO_DETECTIONS = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))


def anchor_squares(anchors: Integers) -> Floats:
    """Return unit squares [n, 4] for anchors [n] whose boxes cannot be decoded.

    They are disjoint, so that a square overlaps only with that of the same anchor.
    """
    low_corners = 2.0 * anchors
    return low_corners[:, None] + [0, 0, 1, 1]


def box_intersections(boxes: Floats, candidates: Floats) -> Floats:
    """Return the area that boxes [n, 4] and [m, 4] share, as [n, m]."""
    low = np.maximum(boxes[:, None, :2], candidates[:, :2])
    high = np.minimum(boxes[:, None, 2:], candidates[:, 2:])
    return np.asarray(np.clip(high - low, 0, None).prod(axis=2))


def box_ious(boxes: Floats, candidates: Floats) -> Floats:
    """Return the IoU of boxes [n, 4] and [m, 4] as [n, m]; 0 for boxes without area."""
    shared_areas = box_intersections(boxes, candidates)
    union = box_areas(boxes)[:, None] + box_areas(candidates) - shared_areas
    return np.divide(shared_areas, union, out=np.zeros_like(shared_areas), where=union > 0)


def box_areas(boxes: Floats) -> Floats:
    """Return the areas of boxes [n, 4]; 0 of those whose corners are not ordered."""
    return np.asarray(np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1))


def suppress_overlaps(detections: Detections, iou: float = IOU) -> Detections:
    """Return the boxes that are left by greedy non-maximum suppression, per class.

    The best box is kept, and those of its class that overlap it by more than `iou` are dropped.
    This is repeated with the boxes that remain.

    Args:
        detections: of one sample, the best score first.
        iou: intersection over union.
    """
    kept_indices = []
    remaining_indices = np.arange(len(detections.scores))  # indices of boxes, the best first
    while remaining_indices.size:
        best_index = int(remaining_indices[0])
        remaining_indices = remaining_indices[1:]
        kept_indices.append(best_index)
        best_box = detections.boxes[[best_index]]
        ious = box_ious(best_box, detections.boxes[remaining_indices])[0]
        is_same_class = detections.classes[remaining_indices] == detections.classes[best_index]
        remaining_indices = remaining_indices[~((ious > iou) & is_same_class)]
    return detections.at(np.array(kept_indices, np.int64))


def match_detections(reference: Detections, candidate: Detections) -> list[tuple[int, int]]:
    """Return the pairs of boxes that match, as indices of the reference's and the candidate's.

    Boxes match if they have the same class, an IoU above `IOU`, and similar key points or masks.
    A box is in one pair at most; the reference's boxes choose theirs in descending order of score.
    """
    # [reference's boxes, candidate's boxes]; 0 for pairs that differ in class, key points or mask
    ious = box_ious(reference.boxes, candidate.boxes)
    ious[reference.classes[:, None] != candidate.classes] = 0
    if reference.shapes is not None and candidate.shapes is not None:
        for index, candidate_index in np.argwhere(ious > IOU):  # the other pairs never match
            shape = reference.shapes.at([index])
            candidate_shape = candidate.shapes.at([candidate_index])
            boxes = reference.boxes[index], candidate.boxes[candidate_index]
            if not shape.is_like(candidate_shape, *boxes):
                ious[index, candidate_index] = 0

    pairs = []
    for index, candidate_ious in enumerate(ious):
        if candidate_ious.max(initial=0) > IOU:
            candidate_index = int(candidate_ious.argmax())
            ious[:, candidate_index] = 0  # no other box may choose it
            pairs.append((index, candidate_index))
    return pairs


def are_relative(boxes: Array) -> bool:
    """Whether numbers of boxes are relative to the picture, and not pixels."""
    return bool(boxes.max(initial=0) <= MAX_RELATIVE_CORNER)


def scale_to_pixels(detections: Detections, size: ImageSize) -> Detections:
    """Convert boxes relative to the picture into pixels of `size` (height, width).

    Key points and masks are left out, since boxes are matched before.
    """
    if not are_relative(detections.boxes):
        return detections
    boxes = detections.boxes * np.tile(size[::-1], 2)  # width, height, width, height
    return Detections(boxes, detections.scores, detections.classes)
