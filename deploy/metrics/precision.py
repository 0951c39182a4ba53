"""Mean average precision of boxes against COCO annotations.

It equals COCO's evaluation (Lin et al. 2014; pycocotools' COCOeval, all areas, 100 boxes a class
and image): at each IoU of .50, .55, ... .95 boxes are matched in descending order of score, each
with the unmatched object of its class that it overlaps most; precision is made monotonic over
recall and sampled at 101 recalls. Boxes with a score of 0.05 or less are ignored.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.tasks.detections import (
    NOTHING,
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
_HIT, _MISS, _CROWD = 1, 0, -1  # outcomes of a box; one in a crowd is ignored


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
        objects: those of each sample in order, in pixels of the input.
        categories: category ids, ascending; None if these are the model's class numbers.
        notes: sentences on how they were read.
    """

    objects: Sequence[Objects]
    categories: tuple[int, ...] | None
    notes: tuple[str, ...] = ()


class AveragePrecision:
    """The scored boxes of one model, and whether each is a hit."""

    def __init__(self) -> None:
        # class -> (scores [n], outcomes [IoUs, n]) of every image, 18 bytes a box
        self._boxes: defaultdict[int, list[tuple[Floats, NDArray[np.int8]]]] = defaultdict(list)
        self._object_counts: Counter[int] = Counter()

    def add(
        self,
        detections: Detections,
        boxes: Floats,
        classes: Integers,
        crowds: Flags,
    ) -> None:
        """Add one image: its detections, and its objects' boxes [n, 4], classes and crowds."""
        for class_number in np.union1d(detections.classes, classes).tolist():
            indices = np.flatnonzero(detections.classes == class_number)[:_MAX_BOXES]
            best, is_of_class = detections.at(indices), classes == class_number
            class_boxes, class_crowds = boxes[is_of_class], crowds[is_of_class]
            self._object_counts[class_number] += int((~class_crowds).sum())
            outcomes = []
            for iou in IOUS.tolist():
                outcomes.append(_find_outcomes(best.boxes, class_boxes, class_crowds, iou))
            self._boxes[class_number].append((best.scores, np.stack(outcomes)))

    @property
    def objects(self) -> int:
        """Number of annotated objects, without crowds."""
        return self._object_counts.total()

    def result(self) -> tuple[float, float]:
        """Return the mean over the annotated classes: (mAP over all IoUs, mAP at .50)."""
        by_class = []
        for class_number, object_count in self._object_counts.items():
            if object_count:
                scores, outcomes = zip(*self._boxes[class_number], strict=True)
                order = np.argsort(-np.concatenate(scores), kind="stable")
                levels = np.concatenate(outcomes, axis=1)[:, order]
                by_class.append([_average_precision(level, object_count) for level in levels])
        if not by_class:
            return 0.0, 0.0
        return float(np.mean(by_class)), float(np.mean([row[0] for row in by_class]))


def _find_outcomes(
    detected_boxes: Floats, boxes: Floats, crowds: Flags, iou: float
) -> NDArray[np.int8]:
    """Return the outcome of each detected box, the best score first."""
    overlaps = box_ious(detected_boxes, boxes)
    overlaps[:, crowds] = _shares_inside(detected_boxes, boxes[crowds])
    is_free = ~crowds  # objects that no box has hit yet
    outcomes = np.full(len(detected_boxes), _MISS, np.int8)
    for row, box_overlaps in enumerate(overlaps):
        free_overlaps = np.where(is_free & (box_overlaps >= iou), box_overlaps, 0)
        if free_overlaps.max(initial=0) > 0:
            is_free[len(boxes) - 1 - free_overlaps[::-1].argmax()] = False  # the last of equal ones
            outcomes[row] = _HIT
        elif (box_overlaps[crowds] >= iou).any():
            outcomes[row] = _CROWD
    return outcomes


def _shares_inside(boxes: Floats, crowds: Floats) -> Floats:
    """Return the share of each box's area that lies in each crowd, [boxes, crowds]."""
    areas = np.maximum(box_areas(boxes), 1e-12)
    return np.asarray(box_intersections(boxes, crowds) / areas[:, None])


def _average_precision(outcomes: NDArray[np.int8], object_count: int) -> float:
    """Return the 101-point average precision from outcomes [n], the best score first."""
    hits, misses = np.cumsum(outcomes == _HIT), np.cumsum(outcomes == _MISS)
    precision = hits / np.maximum(hits + misses, 1)
    falling_precision = np.maximum.accumulate(precision[::-1])[::-1]
    ranks = np.searchsorted(hits / object_count, _RECALLS, side="left")
    return float(np.append(falling_precision, 0.0)[ranks].mean())  # 0 at recalls beyond the last


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
        objects = self.truth.objects[self.samples]
        self.samples += 1
        classes = self._find_classes(objects.categories)
        size = image_size(inputs) or (1, 1)
        for counts, outputs in ((self.reference, reference), (self.candidate, candidate)):
            detections = self.decoder.boxes(inputs, outputs)
            if detections is None:
                detections = NOTHING
            detections = scale_to_pixels(detections, size)
            detections = suppress_overlaps(detections, iou=_SUPPRESSION_IOU)
            counts.add(detections, objects.boxes, classes, objects.crowds)

    def _find_classes(self, categories: Integers) -> Integers:
        """Return the model's class of each category: by order, or by the category's id."""
        category_ids = self.truth.categories
        class_count = self.decoder.classes
        if category_ids is None:
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
        if not self.reference.objects:
            return None
        reference, reference_50 = self.reference.result()
        candidate, candidate_50 = self.candidate.result()
        return MeanPrecision(
            reference, candidate, reference_50, candidate_50, self.reference.objects
        )
