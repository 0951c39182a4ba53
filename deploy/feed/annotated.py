"""Labels of a feed: given, by folder, or annotated objects in pixels of the model's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from deploy.errors import ConfigError
from deploy.feed.feed import Feed
from deploy.feed.placing import placed
from deploy.feed.preprocess import sized
from deploy.metrics.coco import Annotations, Objects
from deploy.metrics.precision import GroundTruth

BY_FOLDER = "folders"


def objects_of(
    labels: Sequence[int] | Annotations | str | None, evaluation: Feed | None
) -> GroundTruth | None:
    """The objects that are annotated; numbers of classes are given to the evaluation images.

    Raises:
        ConfigError: there are no evaluation images for them, or they are no pictures.
        FeedError: the annotations do not have one of them, or there are more or fewer labels.
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
        FeedError: a picture that the annotations tell nothing of.
    """
    if feed.preprocess is None:
        raise ConfigError("annotations of boxes are for pictures, got arrays; give image files")
    for name in feed.names:
        annotations.of(name)
    return GroundTruth(PlacedObjects(annotations, feed), annotations.categories)


class PlacedObjects(Sequence[Objects]):
    """The objects of a feed's good pictures; which are bad shows only as they are read."""

    def __init__(self, annotations: Annotations, feed: Feed) -> None:
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
        return replace(
            found, boxes=placed(found.boxes, found.size, how), size=sized(how, found.size).box
        )
