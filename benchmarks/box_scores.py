"""Boxes of detectors, drawn out of their raw outputs, and how many of the float model's are kept.

Written for the benchmarks alone and on purpose without `deploy`: a figure that judges the product
is worth more where it shares no code with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from model_feeds import Sample
from numpy.typing import NDArray

Float = NDArray[np.float64]


class Boxes(NamedTuple):
    """Boxes of one picture: [n, 4] as x1, y1, x2, y2 in pixels, their classes and scores [n]."""

    corners: Float
    classes: NDArray[np.int64]
    scores: Float


def yolo(output: NDArray[Any], *, least: float = 0.15, iou: float = 0.45) -> Boxes:
    """Boxes of a YOLOv8 output [4 + classes, n]: centre, size, one score a class; NMS by class."""
    table = output.astype(np.float64)
    scores, classes = table[4:].max(axis=0), table[4:].argmax(axis=0)
    chosen = np.flatnonzero(scores > least)
    x, y, width, height = table[:4, chosen]
    corners = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    found = Boxes(corners, classes[chosen], scores[chosen])
    kept = _suppressed(found, iou)
    return Boxes(found.corners[kept], found.classes[kept], found.scores[kept])


def _suppressed(boxes: Boxes, limit: float) -> list[int]:
    """Greedy non-maximum suppression within each class, best score first."""
    kept: list[int] = []
    for at in np.argsort(-boxes.scores, kind="stable"):
        rivals = [k for k in kept if boxes.classes[k] == boxes.classes[at]]
        if not rivals or _iou(boxes.corners[at], boxes.corners[rivals]).max() <= limit:
            kept.append(int(at))
    return kept


def _iou(box: Float, others: Float) -> Float:
    """Intersection over union of one box [4] with others [n, 4]."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2], axis=1)
    own = float(np.prod(box[2:] - box[:2]))
    return np.asarray(shared / np.maximum(own + areas - shared, 1e-12))


def kept(own: Sequence[Boxes], reference: Sequence[Boxes], *, iou: float = 0.5) -> tuple[int, int]:
    """(the reference's boxes that were found again, all of them); a box answers for one other.

    Found again: the same class, intersection over union above `iou`; best scores choose first.
    """
    found = sum(_matched(a, b, iou) for a, b in zip(own, reference, strict=True))
    return found, sum(len(boxes.scores) for boxes in reference)


def _matched(own: Boxes, reference: Boxes, limit: float) -> int:
    free = np.ones(len(own.scores), bool)
    hits = 0
    for at in np.argsort(-reference.scores, kind="stable"):
        overlap = _iou(reference.corners[at], own.corners)
        overlap[~free | (own.classes != reference.classes[at])] = 0
        if overlap.size and overlap.max() > limit:
            free[overlap.argmax()] = False
            hits += 1
    return hits


def yolo_boxes(samples: Sequence[Sample]) -> list[Boxes]:
    """Boxes of every sample; a model with one output [1, 4 + classes, n]."""
    return [yolo(next(iter(outputs.values()))[0]) for outputs in samples]
