"""Some samples from all over a feed, as a feed of their own: those that engines are judged by.

::

    feed    0 1 2 3 4 5 6 7 8 9 ...     each with a key
    part    0   2 3   5 6   8   ...     the same keys, whichever others turn out to be bad

Labels of a feed: given, by folder, or annotated objects in pixels of the model's input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.parallel import Stream
from deploy.feed.pixels import placed
from deploy.feed.preprocess import Size, sized
from deploy.feed.samples import Feed
from deploy.feed.sampling import some
from deploy.feed.sources import Sample
from deploy.metrics.precision import Annotations, GroundTruth, Objects
from deploy.tensors import Array
from deploy.terminal import phase


class Part:
    """At most so many images of a feed; of a model with a fixed batch the first batches of it."""

    labels: Sequence[int] | None = None

    def __init__(self, feed: Feed, most: int) -> None:
        """Args: feed: the whole; most: images."""
        self._feed = feed
        self._most = most
        self._given: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def labelled(self) -> bool:
        """Whether the whole feed has labels; the part has none, since it judges by FP32's word."""
        return self._feed.labels is not None

    @property
    def keys(self) -> tuple[int, ...]:
        """Of its samples in the feed, as far as it is known which are bad."""
        return self._feed.spread_keys(-(-self._most // self._feed.batch))

    @property
    def count(self) -> int:
        """How many images it holds; the feed's last batch may be filled up with others."""
        return min(len(self) * self._feed.batch, self._feed.count)

    @property
    def names(self) -> Sequence[str]:
        """One name per image."""
        whole = self._feed.names
        if self._feed.batch > 1:
            return whole[: self.count]
        place = {key: at for at, key in enumerate(self._feed.spread_keys(self._feed.count))}
        return tuple(whole[place[key]] for key in self._given or self.keys)

    @property
    def decodes(self) -> int:
        """How many images of the whole feed were read, so far."""
        return self._feed.decodes

    @property
    def one_size(self) -> bool:
        """As of the whole feed."""
        return self._feed.one_size

    def samples(self) -> Stream[Sample]:
        """A stream of them, in the feed's order."""
        return Stream(self._walk)

    def spread(self, most: int) -> Iterator[Sample]:
        """At most so many, from all over it."""
        return (sample for _, sample in self.spread_with_keys(most))

    def spread_with_keys(
        self, most: int, *, without: Collection[int] = ()
    ) -> Iterator[tuple[int, Sample]]:
        """(key, sample) of at most so many, from all over it; those without are not read."""
        chosen = some(self.keys, most)
        return self._feed.keyed([key for key in chosen if key not in without])

    def first(self, most: int) -> Sequence[Sample]:
        """The first of the whole feed."""
        return self._feed.first(most)

    def picture(self, sample: Mapping[str, Array]) -> Array | None:
        """What the model sees of one sample, uint8 [H, W, 3]; None where it is no picture."""
        return self._feed.picture(sample)

    def key(self, number: int) -> int:
        """Key of sample `number`, from 1, of the latest walk over `samples`."""
        return self._given[number - 1]

    def _walk(self) -> Iterator[Sample]:
        self._given = []
        for key, sample in self._feed.keyed(self.keys):
            self._given.append(key)
            yield sample


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
            " with deploy.metrics.precision.read_coco, or give the numbers"
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
