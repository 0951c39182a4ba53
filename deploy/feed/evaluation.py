"""Labels of a feed: given, by folder, or annotated objects in pixels of the model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.placing import placed
from deploy.feed.preprocess import Size, sized
from deploy.feed.samples import Feed
from deploy.metrics.coco import Annotations, Objects
from deploy.metrics.precision import GroundTruth
from deploy.progress import phase

BY_FOLDER = "folders"
_SCALED = (
    "{} of {} evaluation images are larger or smaller than the COCO json says, of the same shape;"
    " their boxes were scaled with them"
)


def objects_of(
    labels: Sequence[int] | Annotations | str | None, evaluation: Feed | None
) -> GroundTruth | None:
    """The objects that are annotated; numbers of classes are given to the evaluation images.

    Raises:
        ConfigError: there are no evaluation images for them, or they are no pictures.
        FeedError: the annotations do not have one of them or call it another shape, or there are
            more or fewer labels.
    """
    if isinstance(labels, str) and labels != BY_FOLDER:
        raise ConfigError(
            f"labels are class numbers, annotations or {BY_FOLDER!r}, got {labels!r}; read a file"
            " with deploy.metrics.coco.read_coco, or give the numbers"
        )
    if labels is not None and evaluation is None:
        known = {Annotations: "annotations", str: "labels by folder"}
        raise ConfigError(
            f"{known.get(type(labels), 'labels')} are of evaluation images, got none; give"
            " --eval-images"
        )
    if evaluation is None or labels is None or isinstance(labels, str):
        return None
    if isinstance(labels, Annotations):
        return ground_truth(labels, evaluation)
    evaluation.label(labels)
    return None


def ground_truth(annotations: Annotations, feed: Feed) -> GroundTruth:
    """The objects of each sample.

    Raises:
        ConfigError: the feed is not of pictures.
        FeedError: a picture that the annotations tell nothing of, or call another shape.
    """
    if feed.preprocess is None:
        raise ConfigError("annotations of boxes are for pictures, got arrays; give image files")
    for name in feed.names:
        annotations.of(name)
    sizes = _others(annotations, feed)
    notes = (_SCALED.format(len(sizes), feed.count),) if sizes else ()
    return GroundTruth(PlacedObjects(annotations, feed, sizes), annotations.categories, notes)


def _others(annotations: Annotations, feed: Feed) -> dict[str, Size]:
    """Name -> size of the pictures that are not as large as their annotations say.

    Raises:
        FeedError: one has another shape, so that nobody knows where its boxes are.
    """
    found: dict[str, Size] = {}
    with phase("sizes of the pictures", feed.count, "images") as step:
        for name, size in feed.sizes():
            step()
            told = annotations.of(name).size
            if size is None or size == told:
                continue
            if abs(size[0] * told[1] - size[1] * told[0]) > max(*size, *told):
                raise FeedError(_other_shape(name, size, told))
            found[name] = size
    return found


def _other_shape(name: str, size: Size, told: Size) -> str:
    """That a picture is not the one that was annotated, or lies on its side."""
    turned = size == told[::-1]
    way = (
        "save it as it is to be seen, without a turn in its EXIF, or swap width, height and the"
        " boxes there"
        if turned
        else "give the images that were annotated, or correct the sizes and the boxes there"
    )
    return (
        f"an image must have the width and height that its annotations say, got {name[:200]!r} of"
        f" {size[1]}x{size[0]} and {told[1]}x{told[0]} in the COCO json; {way}"
    )


class PlacedObjects(Sequence[Objects]):
    """The objects of a feed's good pictures; which are bad shows only as they are read."""

    def __init__(self, annotations: Annotations, feed: Feed, sizes: Mapping[str, Size]) -> None:
        """Args: sizes: of pictures that are not as large as the annotations say, by name."""
        self._sizes = sizes
        self._annotations = annotations
        self._feed = feed
        self._names: tuple[int, tuple[str, ...]] = (-1, ())

    def __len__(self) -> int:
        return self._feed.count

    @overload
    def __getitem__(self, place: int) -> Objects: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Objects]: ...

    def __getitem__(self, place: int | slice) -> Objects | Sequence[Objects]:
        if self._names[0] != self._feed.count:
            self._names = self._feed.count, self._feed.names
        if isinstance(place, slice):
            return [self._placed(name) for name in self._names[1][place]]
        return self._placed(self._names[1][place])

    def _placed(self, name: str) -> Objects:
        found, how = self._annotations.of(name), self._feed.preprocess
        assert how is not None
        size = self._sizes.get(name, found.size)
        boxes = found.boxes * np.tile(np.divide(size, found.size)[::-1], 2)
        return replace(found, boxes=placed(boxes, size, how), size=sized(how, size).box)
