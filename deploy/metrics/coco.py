"""Objects of pictures from a COCO annotation file (cocodataset.org, format-data, detection)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.reading import read_json

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
    """A file's pictures by name, and its categories' numbers in order."""

    pictures: Mapping[str, Objects]
    categories: tuple[int, ...]

    def of(self, name: str) -> Objects:
        """Objects of a picture by its file's name.

        Raises:
            FeedError: the file tells nothing of it.
        """
        found = self.pictures.get(PurePosixPath(name.replace("\\", "/")).name)
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
    for annotation in data["annotations"]:
        own[annotation["image_id"]].append(annotation)
    pictures = {
        PurePosixPath(str(image["file_name"])).name: _objects(image, own[image["id"]])
        for image in data["images"]
    }
    return Annotations(pictures, tuple(sorted(_whole(one["id"]) for one in data["categories"])))


def _objects(image: dict[str, object], annotations: list[dict[str, object]]) -> Objects:
    boxes = np.array([one["bbox"] for one in annotations], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # COCO's are x y w h
    return Objects(
        (_whole(image["height"]), _whole(image["width"])),
        boxes,
        np.array([_whole(one["category_id"]) for one in annotations], np.int64),
        np.array([bool(one.get("iscrowd", 0)) for one in annotations], np.bool_),
    )


def _whole(value: object) -> int:
    return int(str(value))
