"""Objects of pictures from a COCO annotation file (cocodataset.org, format-data, detection)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.files.reading import read_json

_MOST = 2 << 30  # bytes; those of all training pictures of COCO are 450 MB


@dataclass(frozen=True, slots=True)
class Objects:
    """What one picture shows.

    Attributes:
        size: (height, width) of the picture that the boxes are in, in pixels.
        boxes: [n, 4] corners x1 y1 x2 y2 in pixels.
        categories: [n] as numbered in the file.
        crowds: [n] whether a box holds many that are not told apart.
    """

    size: tuple[int, int]
    boxes: NDArray[np.float64]
    categories: NDArray[np.int64]
    crowds: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Annotations:
    """A file's pictures by name, and its categories' numbers in order.

    Attributes:
        pictures: name of the file, without folders -> what it shows.
        categories: numbers.
        twice: names that pictures of several folders have.
    """

    pictures: Mapping[str, Objects]
    categories: tuple[int, ...]
    twice: frozenset[str] = frozenset()

    def of(self, name: str) -> Objects:
        """Objects of a picture by its file's name.

        Raises:
            FeedError: the file tells nothing of it.
        """
        own = PurePosixPath(name.replace("\\", "/")).name
        found = self.pictures.get(own)
        if own in self.twice:
            raise FeedError(
                f"images are matched with annotations by file name, {own[:200]!r} is several images"
                " there; give them names of their own"
            )
        if found is None:
            raise FeedError(
                f"every evaluation image must be in the annotations, {name[:200]!r} is not;"
                " images are matched by file name"
            )
        return found


def read_coco(path: Path) -> Annotations:
    """The annotations of a file.

    Raises:
        FeedError: it cannot be read, or is no such file.
    """
    data = read_json(path, what="a COCO json", error=FeedError, most=_MOST)
    try:
        return _annotations(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise FeedError(
            f"a COCO json has images, annotations with boxes, and categories; {path} breaks it at"
            f" {str(error)[:100]}"
        ) from error


def _annotations(data: dict[str, list[dict[str, object]]]) -> Annotations:
    own: dict[object, list[dict[str, object]]] = {image["id"]: [] for image in data["images"]}
    categories = sorted(_whole(one["id"]) for one in data["categories"])
    for annotation in data["annotations"]:
        if annotation["image_id"] not in own:
            raise ValueError(f"an image_id that no image has, {annotation['image_id']!r}")
        if _whole(annotation["category_id"]) not in categories:
            raise ValueError(f"a category_id that no category has, {annotation['category_id']!r}")
        own[annotation["image_id"]].append(annotation)
    names = {image["id"]: _name(image) for image in data["images"]}
    counts = Counter(names.values())
    return Annotations(
        {_name(image): _objects(image, own[image["id"]]) for image in data["images"]},
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
    size = _whole(image["height"]), _whole(image["width"])
    if min(size) < 1:
        raise ValueError(f"a width or height of {_name(image)!r} below 1")
    return Objects(
        size,
        boxes,
        np.array([_whole(one["category_id"]) for one in annotations], np.int64),
        np.array([bool(one.get("iscrowd", 0)) for one in annotations], np.bool_),
    )


def _whole(value: object) -> int:
    return int(str(value))
