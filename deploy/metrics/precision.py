"""Mean average precision of boxes against COCO annotations.

It equals COCO's evaluation (Lin et al. 2014; pycocotools' COCOeval, all areas, 100 boxes a class
and image): at each IoU of .50, .55, ... .95 boxes are matched in descending order of score, each
with the unmatched object of its class that it overlaps most; precision is made monotonic over
recall and sampled at 101 recalls. Boxes with a score of 0.05 or less are ignored.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.tasks.detections import (
    Detections,
    box_areas,
    box_intersections,
    box_ious,
    scale_to_pixels,
    suppress_overlaps,
)
from deploy.tasks.detector import RowDecoder
from deploy.tasks.rows import Flags, Floats, ImageSize, Integers, Outputs, image_size

IOUS = np.linspace(0.5, 0.95, 10)  # overlaps from which a box is a hit, each evaluated by itself
_RECALLS = np.linspace(0, 1, 101)  # at which precision is sampled
_MAX_BOXES = 100  # per class and image, the best by score
_SUPPRESSION_IOU = 0.65  # of two boxes of a class that overlap more, the better one stays
_HIT, _MISS, _CROWD = 1, 0, -1  # outcomes of a detected box; one in a crowd is ignored


@dataclass(frozen=True, slots=True)
class Objects:
    """Annotated objects of one picture.

    Attributes:
        size: (height, width) of the picture in pixels; None if it is not known.
        boxes: [n, 4] corners x1 y1 x2 y2 in pixels; without a size as shares of width and height.
        categories: [n] category ids of the file.
        crowds: [n] whether a box is a crowd (iscrowd).
    """

    size: ImageSize | None
    boxes: Floats
    categories: Integers
    crowds: Flags


@dataclass(frozen=True, slots=True)
class MeanPrecision:
    """Mean average precision (mAP) of both models, 0 to 1.

    Attributes:
        reference: the float model's, over IoU .50:.95.
        candidate: the int8 model's, over IoU .50:.95.
        reference_50: the float model's at IoU .50.
        candidate_50: the int8 model's at IoU .50.
        objects: number of annotated objects, without crowds.
    """

    reference: float
    candidate: float
    reference_50: float
    candidate_50: float
    objects: int


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Annotated objects of all samples.

    Attributes:
        objects: number of a sample, from 0 -> its objects, in pixels of the input.
        categories: category ids, ascending; None if these are the model's class numbers.
        notes: sentences on how they were read.
    """

    objects: Callable[[int], Objects]
    categories: tuple[int, ...] | None
    notes: tuple[str, ...] = ()


class AveragePrecision:
    """The boxes that one model detects, by class, and whether each one is a hit."""

    def __init__(self) -> None:
        # class -> (scores [n], outcomes [IoUs, n]) of every image, 18 bytes a box
        self._outcomes: defaultdict[int, list[tuple[Floats, NDArray[np.int8]]]] = defaultdict(list)
        self._object_counts: Counter[int] = Counter()

    def add(
        self,
        detections: Detections,
        boxes: Floats,
        classes: Integers,
        crowds: Flags,
    ) -> None:
        """Add one image.

        Args:
            detections: boxes that the model detects, the best score first.
            boxes: [n, 4] corners of the annotated objects.
            classes: [n] their classes.
            crowds: [n] whether each is a crowd, in which detected boxes are ignored.
        """
        for class_number in np.union1d(detections.classes, classes).tolist():
            detected_indices = np.flatnonzero(detections.classes == class_number)
            best_detections = detections.at(detected_indices[:_MAX_BOXES])
            is_of_class = classes == class_number
            class_boxes = boxes[is_of_class]
            class_crowds = crowds[is_of_class]

            overlaps = box_ious(best_detections.boxes, class_boxes)
            overlaps[:, class_crowds] = _shares_inside(
                best_detections.boxes, class_boxes[class_crowds]
            )
            outcomes = [_find_outcomes(overlaps, class_crowds, iou) for iou in IOUS.tolist()]
            self._outcomes[class_number].append((best_detections.scores, np.stack(outcomes)))
            self._object_counts[class_number] += int((~class_crowds).sum())

    @property
    def objects(self) -> int:
        """Number of annotated objects, without crowds."""
        return self._object_counts.total()

    def result(self) -> tuple[float, float]:
        """Return (mAP over all IoUs, mAP at IoU .50), means over the annotated classes."""
        precisions = []  # of each class, [IoUs]
        for class_number, object_count in self._object_counts.items():
            if object_count == 0:
                continue
            scores, outcomes = zip(*self._outcomes[class_number], strict=True)
            order = np.argsort(-np.concatenate(scores), kind="stable")
            sorted_outcomes = np.concatenate(outcomes, axis=1)[:, order]
            precisions.append([_average_precision(row, object_count) for row in sorted_outcomes])
        if not precisions:
            return 0.0, 0.0
        return float(np.mean(precisions)), float(np.mean(precisions, axis=0)[0])


def _find_outcomes(overlaps: Floats, crowds: Flags, iou: float) -> NDArray[np.int8]:
    """Return the outcome of each detected box: _HIT, _MISS or _CROWD, [detected].

    Args:
        overlaps: [detected, objects], the best score first: the IoU, or the share of the box in a
            crowd.
        crowds: [objects] whether each is a crowd.
        iou: overlap with an object from which a box is a hit.
    """
    is_unmatched = ~crowds  # objects that no box has hit yet
    outcomes = np.full(len(overlaps), _MISS, np.int8)
    for index, box_overlaps in enumerate(overlaps):
        # the overlap with each object that the box may hit, and 0 with all others
        hit_overlaps = np.where(is_unmatched & (box_overlaps >= iou), box_overlaps, 0)
        if hit_overlaps.any():
            # COCOeval takes the last object of several with the same overlap
            matched_object = len(hit_overlaps) - 1 - hit_overlaps[::-1].argmax()
            is_unmatched[matched_object] = False
            outcomes[index] = _HIT
        elif (box_overlaps[crowds] >= iou).any():
            outcomes[index] = _CROWD
    return outcomes


def _shares_inside(boxes: Floats, crowds: Floats) -> Floats:
    """Return the share of each box's area that lies in each crowd, [boxes, crowds]."""
    areas = np.maximum(box_areas(boxes), 1e-12)
    return box_intersections(boxes, crowds) / areas[:, None]


def _average_precision(outcomes: NDArray[np.int8], object_count: int) -> float:
    """Return the average precision at 101 recalls.

    Args:
        outcomes: [n], `_HIT`, `_MISS` or `_CROWD` of the detected boxes of one class, the best
            score first.
        object_count: number of annotated objects of the class.
    """
    hits = np.cumsum(outcomes == _HIT)
    misses = np.cumsum(outcomes == _MISS)
    recall = hits / object_count
    precision = hits / np.maximum(hits + misses, 1)
    # the precision of a recall is the best one at this recall or a higher one
    monotonic_precision = np.maximum.accumulate(precision[::-1])[::-1]
    # index of the first box that reaches each recall; n if none does, where precision is 0
    reaching_indices = np.searchsorted(recall, _RECALLS, side="left")
    return float(np.append(monotonic_precision, 0.0)[reaching_indices].mean())


@dataclass(slots=True)
class PrecisionTally:
    """Counts boxes of both models against the annotated objects.

    Attributes:
        decoder: reads the boxes of a model's outputs.
        truth: the annotated objects.
        samples: number of samples so far.
        reference: counts of the float model.
        candidate: counts of the int8 model.
    """

    decoder: RowDecoder
    truth: GroundTruth
    samples: int = 0
    reference: AveragePrecision = field(default_factory=AveragePrecision)
    candidate: AveragePrecision = field(default_factory=AveragePrecision)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample.

        Raises:
            FeedError: the model's classes do not match the categories.
        """
        objects = self.truth.objects(self.samples)
        self.samples += 1
        classes = self._find_classes(objects.categories)
        size = image_size(inputs) or (1, 1)  # without a picture boxes stay shares of 1
        for precision, outputs in ((self.reference, reference), (self.candidate, candidate)):
            detections = scale_to_pixels(self.decoder.boxes(inputs, outputs), size)
            detections = suppress_overlaps(detections, iou=_SUPPRESSION_IOU)
            precision.add(detections, objects.boxes, classes, objects.crowds)

    def _find_classes(self, categories: Integers) -> Integers:
        """Return the model's class number of each category id.

        It depends on how many classes the model has. If there are as many as categories, they are
        numbered in the order of the ids. If there are more than the largest id, the id is the
        number; if as many as the largest id, the number is one less.

        Raises:
            FeedError: the model's classes do not match the categories.
        """
        category_ids = self.truth.categories
        class_count = self.decoder.class_count  # None if the outputs do not show it
        if category_ids is None:  # the categories are the model's class numbers already
            max_class = int(categories.max(initial=0))
            if class_count is not None and max_class >= class_count:
                raise FeedError(
                    f"the labels must have the model's classes, 0 to {class_count - 1}"
                    f" ({self.decoder.form}), got class {max_class}; give the labels that it was"
                    " trained with"
                )
            return categories
        if class_count is None or class_count == len(category_ids):
            return np.searchsorted(np.array(category_ids, np.int64), categories)
        max_id = max(category_ids, default=0)
        if class_count > max_id:
            return categories
        if class_count == max_id:  # ids start at 1, since class 0 was the background in training
            return categories - 1
        raise FeedError(
            f"the annotations must have the model's classes, got {len(category_ids)}"
            f" categories and {class_count} classes ({self.decoder.form}); list all that it learned"
            " as categories, or leave the labels out"
        )

    def result(self) -> MeanPrecision | None:
        """Return both models' figures; None if there are no objects."""
        object_count = self.reference.objects
        if object_count == 0:
            return None
        reference, reference_50 = self.reference.result()
        candidate, candidate_50 = self.candidate.result()
        return MeanPrecision(reference, candidate, reference_50, candidate_50, object_count)
