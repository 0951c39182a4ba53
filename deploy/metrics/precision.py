"""Mean average precision of boxes against COCO annotations, in constant memory.

As in COCO's evaluation (Lin et al. 2014; pycocotools' COCOeval, all areas, 100 boxes per image): at
each IoU of .50, .55, ... .95 boxes are matched in descending order of score, each with the
unmatched object of its class that it overlaps most; precision is made monotonic over recall and
sampled at 101 recalls. COCO sorts all boxes by score; here they are counted in bins of the score,
so that memory does not grow with the images. Boxes with a score of 0.05 or less are ignored.

Annotation files: cocodataset.org, format-data, detection.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.files.reading import read_json
from deploy.tasks.boxes import Decoder
from deploy.tasks.detections import (
    NOTHING,
    Detections,
    box_ious,
    scale_to_pixels,
    suppress_overlaps,
)
from deploy.tasks.rows import Floats, Outputs, image_size

_MOST_BYTES = 2 << 30  # the annotations of COCO's training images take 450 MB


@dataclass(frozen=True, slots=True)
class Objects:
    """Annotated objects of one picture."""

    size: tuple[int, int]  # (height, width) of the picture in pixels
    boxes: NDArray[np.float64]  # [n, 4] corners x1 y1 x2 y2 in pixels
    categories: NDArray[np.int64]  # [n] category ids of the file
    crowds: NDArray[np.bool_]  # [n] whether a box is a crowd (iscrowd)


@dataclass(frozen=True, slots=True)
class Annotations:
    """Contents of an annotation file."""

    pictures: Mapping[str, Objects]  # file name without folders -> its objects
    categories: tuple[int, ...]  # category ids, ascending
    ambiguous_names: frozenset[str] = frozenset()  # file names that occur in several folders

    def find_objects(self, name: str) -> Objects:
        """Return the objects of a picture, by its file name.

        Raises:
            FeedError: the picture is missing, or its name is ambiguous.
        """
        file_name = PurePosixPath(name.replace("\\", "/")).name
        objects = self.pictures.get(file_name)
        if file_name in self.ambiguous_names:
            raise FeedError(
                f"images are matched with annotations by file name, {file_name[:200]!r} is several"
                " images there; give them names of their own"
            )
        if objects is None:
            raise FeedError(
                f"every evaluation image must be in the annotations, {name[:200]!r} is not;"
                " images are matched by file name"
            )
        return objects


def read_coco(path: Path) -> Annotations:
    """Return the annotations of a COCO file.

    Raises:
        FeedError: it cannot be read, or is no COCO annotation file.
    """
    data = read_json(path, what="a COCO json", error=FeedError, max_bytes=_MOST_BYTES)
    try:
        return _annotations(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise FeedError(
            f"a COCO json has images, annotations with boxes, and categories; {path} breaks it at"
            f" {str(error)[:100]}"
        ) from error


def _annotations(data: dict[str, list[dict[str, object]]]) -> Annotations:
    by_image: dict[object, list[dict[str, object]]] = {image["id"]: [] for image in data["images"]}
    categories = sorted(_integer(one["id"]) for one in data["categories"])
    for annotation in data["annotations"]:
        if annotation["image_id"] not in by_image:
            raise ValueError(f"an image_id that no image has, {annotation['image_id']!r}")
        if _integer(annotation["category_id"]) not in categories:
            raise ValueError(f"a category_id that no category has, {annotation['category_id']!r}")
        by_image[annotation["image_id"]].append(annotation)
    names = {image["id"]: _name(image) for image in data["images"]}
    counts = Counter(names.values())
    return Annotations(
        {_name(image): _objects(image, by_image[image["id"]]) for image in data["images"]},
        tuple(categories),
        frozenset(name for name, count in counts.items() if count > 1),
    )


def _name(image: dict[str, object]) -> str:
    return PurePosixPath(str(image["file_name"])).name


def _objects(image: dict[str, object], annotations: list[dict[str, object]]) -> Objects:
    boxes = np.array([one["bbox"] for one in annotations], np.float64).reshape(-1, 4)
    if not np.isfinite(boxes).all() or (boxes[:, 2:] < 0).any():
        raise ValueError(f"a bbox of {_name(image)!r} that is no x, y, width and height")
    boxes[:, 2:] += boxes[:, :2]  # COCO's are x y w h
    size = _integer(image["height"]), _integer(image["width"])
    if min(size) < 1:
        raise ValueError(f"a width or height of {_name(image)!r} below 1")
    return Objects(
        size,
        boxes,
        np.array([_integer(one["category_id"]) for one in annotations], np.int64),
        np.array([bool(one.get("iscrowd", 0)) for one in annotations], np.bool_),
    )


def _integer(value: object) -> int:
    return int(str(value))


IOUS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_BINS = 2000  # bins of the score
_MOST = 100  # boxes per image
_SUPPRESS = 0.65  # IoU of non-maximum suppression


@dataclass(frozen=True, slots=True)
class MeanPrecision:
    """mAP of both models, 0 to 1, over IoU .50:.95 and at .50; `objects` is their number."""

    reference: float
    candidate: float
    reference_50: float
    candidate_50: float
    objects: int


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Annotated objects of all samples."""

    objects: Sequence[Objects]  # per sample in order, in pixels of the input
    categories: tuple[int, ...]  # category ids, ascending
    notes: tuple[str, ...] = ()


class AveragePrecision:
    """Running counts of one model's hits and misses."""

    def __init__(self) -> None:
        self._hits: dict[int, NDArray[np.int32]] = {}  # class -> [IoUs, hit or miss, bins]
        self._objects: dict[int, int] = {}

    def add(
        self,
        found: Detections,
        boxes: Floats,
        classes: NDArray[np.int64],
        crowds: NDArray[np.bool_],
    ) -> None:
        """Add one image: its detections, and its objects' boxes [n, 4], classes and crowds."""
        found = found.at(np.arange(min(len(found.scores), _MOST)))
        for kind in np.union1d(found.classes, classes).tolist():
            own = found.at(found.classes == kind)
            of_class = classes == kind
            self._objects[kind] = self._objects.get(kind, 0) + int((of_class & ~crowds).sum())
            counts = self._hits.setdefault(kind, np.zeros((len(IOUS), 2, _BINS), np.int32))
            bins = np.clip((own.scores * _BINS).astype(np.int64), 0, _BINS - 1)
            for level, iou in enumerate(IOUS):
                hit = _hits(own.boxes, boxes[of_class], crowds[of_class], float(iou))
                np.add.at(counts[level, 0], bins[hit == 1], 1)
                np.add.at(counts[level, 1], bins[hit == 0], 1)

    @property
    def objects(self) -> int:
        """Number of annotated objects, without crowds."""
        return sum(self._objects.values())

    def result(self) -> tuple[float, float]:
        """Return the mean over the annotated classes: (mAP over all IoUs, mAP at .50)."""
        present = [kind for kind, count in self._objects.items() if count]
        if not present:
            return 0.0, 0.0
        by_class = [
            [_precision(level, self._objects[kind]) for level in self._hits[kind]]
            for kind in present
        ]
        return float(np.mean(by_class)), float(np.mean([one[0] for one in by_class]))


def _hits(found: Floats, boxes: Floats, crowds: NDArray[np.bool_], iou: float) -> NDArray[np.int64]:
    """Return for each box, the best first: 1 for a hit, 0 for a miss, -1 for a crowd (ignored)."""
    over = box_ious(found, boxes)
    over[:, crowds] = _inside(found, boxes[crowds])
    free = np.ones(len(boxes), np.bool_)
    result = np.zeros(len(found), np.int64)
    for row, near in enumerate(over):
        single = np.where(free & ~crowds & (near >= iou - 1e-10), near, 0)
        if single.size and single.max() > 0:
            free[single.argmax()] = False
            result[row] = 1
        elif (near[crowds] >= iou).any():
            result[row] = -1
    return result


def _inside(found: Floats, crowds: Floats) -> Floats:
    """Share of each box's area that lies in each crowd."""
    low = np.maximum(found[:, None, :2], crowds[None, :, :2])
    high = np.minimum(found[:, None, 2:], crowds[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    area = np.clip(found[:, 2:] - found[:, :2], 0, None).prod(axis=1)[:, None]
    return np.asarray(shared / np.maximum(area, 1e-12))


def _precision(counts: NDArray[np.int32], objects: int) -> float:
    """101-point average precision from hits and misses [2, bins], ascending in score."""
    hits, misses = np.cumsum(counts[:, ::-1], axis=1, dtype=np.int64)
    precision = hits / np.maximum(hits + misses, 1)
    falling = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(hits / objects, _RECALLS - 1e-12, side="left")
    return float(np.append(falling, 0.0)[place].mean())


@dataclass(slots=True)
class PrecisionTally:
    """Counts boxes of both models against the annotated objects."""

    decoder: Decoder
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
        classes = self._classes(objects.categories)
        size = image_size(inputs) or (1, 1)
        for counts, outputs in ((self.reference, reference), (self.candidate, candidate)):
            found = self.decoder.boxes(inputs, outputs)
            found = suppress_overlaps(
                scale_to_pixels(NOTHING if found is None else found, size), iou=_SUPPRESS
            )
            counts.add(found, objects.boxes, classes, objects.crowds)

    def _classes(self, categories: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the model's class of each category: by order, or by the category's id."""
        count, highest = self.decoder.classes, max(self.truth.categories, default=0)
        if count is None or count == len(self.truth.categories):
            return np.searchsorted(np.array(self.truth.categories, np.int64), categories)
        if count >= highest:  # ids start at 1 if class 0 was the background in training
            return categories - int(count == highest)
        raise FeedError(
            f"the annotations must have the model's classes, got {len(self.truth.categories)}"
            f" categories and {count} classes ({self.decoder.form}); list all that it learned as"
            " categories, or leave the labels out"
        )

    def result(self) -> MeanPrecision | None:
        """Return both models' figures; None if there are no objects."""
        if not self.reference.objects:
            return None
        (own, own_50), (other, other_50) = self.reference.result(), self.candidate.result()
        return MeanPrecision(own, other, own_50, other_50, self.reference.objects)
