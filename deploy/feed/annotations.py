"""Annotated objects of images: COCO json, YOLO's label files, Pascal VOC's XML.

::

    COCO json             boxes x y w h in pixels; images by file name
    YOLO    labels/0.txt  "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." of an outline, as
                          shares of width and height; a picture without a file has no objects
    VOC     0.xml         corners in pixels; classes by name, in the order of classes.txt

Sources: cocodataset.org, format-data, detection; docs.ultralytics.com, datasets/detect; Pascal
VOC's development kit.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from deploy.errors import FeedError, counted
from deploy.feed.images import printable_name, suffix_of, summarize_names, walk_files
from deploy.feed.paths import is_data_yaml, read_data_yaml, resolve_files
from deploy.feed.preprocess import Size
from deploy.files.reading import convert, read_json, read_text
from deploy.metrics.precision import Objects
from deploy.terminal import phase

CLASSES_FILE = "classes.txt"  # beside label files: the name of a class a line
_MAX_COCO_BYTES = 2 << 30  # the annotations of COCO's training images take 450 MB
_MAX_LABEL_BYTES = 16 << 20  # of one picture
_BOX_VALUES = 4
_MAX_CLASSES = 1 << 31
_MAX_FOLDERS = 32  # by which the images of a file name are told apart
_MAX_SHARE_BEYOND = 0.01  # of a side, by which rounding moves a corner out of the picture


@dataclass(frozen=True, slots=True)
class Annotations:
    """Annotated objects of many pictures.

    Attributes:
        pictures: path -> objects of an image. The path is that in the COCO json or of the label
            file, after `match_images` that of the image; without suffix if `are_label_files`.
        categories: category ids, ascending; None if these are the model's class numbers.
        category_names: category id -> name; empty without names.
        repeated_paths: paths that several images or label files have.
        are_label_files: whether each picture has a file of its own.
        unlabelled: an empty set of objects, which a picture without annotations has; None if every
            picture must have annotations.
    """

    pictures: Mapping[str, Objects]
    categories: tuple[int, ...] | None
    category_names: Mapping[int, str] = field(default_factory=dict)
    repeated_paths: frozenset[str] = frozenset()
    are_label_files: bool = False
    unlabelled: Objects | None = None

    def numbered_by_name(self, class_names: Mapping[int, str]) -> Annotations:
        """Return the annotations with the model's class numbers for categories of the same names.

        If the model has no class of the name of a category, all categories stay as they are.

        Args:
            class_names: class number of the model -> name.
        """
        class_by_name = {name: number for number, name in class_names.items()}
        unknown_names = set(self.category_names.values()).difference(class_by_name)
        if unknown_names or not self.category_names:
            return self
        class_by_category = {id: class_by_name[name] for id, name in self.category_names.items()}
        pictures = {}
        for name, objects in self.pictures.items():
            classes = [class_by_category[category] for category in objects.categories.tolist()]
            pictures[name] = replace(objects, categories=np.array(classes, np.int64))
        # None: the objects' `categories` are class numbers of the model, no ids any more
        return replace(self, pictures=pictures, categories=None)

    def match_images(self, names: Iterable[str], source_names: Iterable[str]) -> Annotations:
        """Return the annotations of images, by the images' paths.

        Annotations belong to the image of the same file name. If several images or annotations have
        this name, the end of an image's path must tell them apart, such as cam1/0.jpg.

        Args:
            names: paths of the images.
            source_names: paths of all images of the folder or list, from which `names` are chosen.

        Raises:
            FeedError: the paths do not show to which image annotations belong.
        """
        chosen_images = set(map(self._key, names))
        name_of_image = {self._key(name): name for name in source_names}
        images_by_file = _group_by_end(name_of_image, max_parts=1)
        # a repeated path is listed twice, so that it is never the only path that fits an image
        paths_by_file = _group_by_end([*self.pictures, *self.repeated_paths], max_parts=1)
        pictures = {}
        for file_name, images in images_by_file.items():
            # image -> (images, itself included, and paths of annotations) that share an end. The
            # match is certain if there is one of each
            matches = _match_paths(images, paths_by_file.get(file_name, []))
            for image in filter(chosen_images.__contains__, matches):
                similar_images, paths = matches[image]
                if len(similar_images) > 1 or len(paths) > 1:
                    similar_names = [name_of_image[similar] for similar in similar_images]
                    images_text = summarize_names(similar_names, 2)
                    raise FeedError(
                        "images and annotations of one file name must differ by their folders, got"
                        f" annotations of {summarize_names(paths, 2)} for {images_text}; name the"
                        " folders in both, or give each image a file name of its own"
                    )
                pictures[image] = self.pictures[paths[0]]
        return replace(self, pictures=pictures)

    def find_objects(self, name: str) -> Objects:
        """Return the objects of a picture, by its path.

        A picture without annotations has `unlabelled`, if that is set.

        Raises:
            FeedError: the picture must have annotations and has none.
        """
        objects = self.pictures.get(self._key(name), self.unlabelled)
        if objects is None:
            raise FeedError(
                f"every evaluation image must be in the annotations, {name[:200]!r} is not;"
                " images are matched by file name"
            )
        return objects

    def _key(self, name: str) -> str:
        """Return the path of an image as `pictures` has it."""
        path = _normalize(name)
        return os.path.splitext(path)[0] if self.are_label_files else path


def _normalize(path: str) -> str:
    """Return a path with / between folders, as programs on Windows do not write it."""
    return str(PurePosixPath(path.replace("\\", "/")))


# image -> (images, paths of annotations) that end alike: one of each if the match is certain
_Matches = dict[str, tuple[Sequence[str], Sequence[str]]]


def _match_paths(images: Sequence[str], paths: Sequence[str]) -> _Matches:
    """Return which paths of annotations may be of an image; all are of the same file name.

    An end of a path is its last parts, such as a/0.jpg of x/a/0.jpg. A path may be of the image
    with which it shares the longest end, if no other path shares a longer end with that image::

        images     a/0.jpg    b/0.jpg    c/0.jpg, which has no annotations
        paths    x/a/0.jpg  x/b/0.jpg

    Returns:
        image -> (all images, all paths with the end that it shares with a path): one of each if the
        match is certain, several if it is not. Images without a path are left out.
    """
    images_by_end = _group_by_end(images)
    paths_by_end = _group_by_end(paths)
    # the longest end that each path shares with an image
    path_ends = {_longest_end(path, images_by_end) for path in paths}
    path_counts = Counter(paths)
    matches: _Matches = {}
    for image in images:
        end = _longest_end(image, paths_by_end)
        if end not in path_ends:  # the paths with this end share longer ones with other images
            continue
        matches[image] = images_by_end[end], paths_by_end[end]
        if path_counts[image] == 1:  # an equal path is certain, although others may end in it
            matches[image] = [image], [image]
    return matches


def _group_by_end(paths: Iterable[str], max_parts: int = _MAX_FOLDERS) -> dict[str, list[str]]:
    """Return end -> paths with this end, for each end of each path.

    `max_parts`: maximum number of parts of an end; 1 for the file name alone.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        for end in _ends(path, max_parts):
            groups.setdefault(end, []).append(path)
    return groups


def _longest_end(path: str, ends: Container[str]) -> str:
    """Return the longest end of a path that is one of `ends`; "" if none is."""
    return next((end for end in _ends(path) if end in ends), "")


def _ends(path: str, max_parts: int = _MAX_FOLDERS) -> Sequence[str]:
    """Return the ends of a path, the longest first: a/b/c, b/c and c for a/b/c."""
    parts = path.split("/")[-max_parts:]
    return ["/".join(parts[start:]) for start in range(len(parts))]


def read_annotations(path: Path) -> Annotations | None:
    """Return the annotations of a COCO json, a data.yaml, or a folder of label files; else None.

    Raises:
        FeedError: they cannot be read, or are in another format.
    """
    if path.is_dir():
        return _read_label_folder(path)
    if is_data_yaml(path):
        return _read_yaml_labels(path)
    return read_coco(path) if suffix_of(path) == ".json" else None


@dataclass(frozen=True, slots=True)
class _CocoImage:
    id: int | float | str
    file_name: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class _CocoAnnotation:
    image_id: int | float | str
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: Any = 0


@dataclass(frozen=True, slots=True)
class _CocoCategory:
    id: int
    name: Any = None


@dataclass(frozen=True, slots=True)
class _CocoFile:
    images: list[_CocoImage]
    annotations: list[_CocoAnnotation]
    categories: list[_CocoCategory]


def read_coco(path: Path) -> Annotations:
    """Return the annotations of a COCO file.

    Raises:
        FeedError: it cannot be read, or is no COCO annotation file.
    """
    values = read_json(path, what="a COCO json", error=FeedError, max_bytes=_MAX_COCO_BYTES)
    rule = f"{path} must be a COCO json with images, annotations with boxes, and categories"
    data = convert(values, _CocoFile, rule=rule, error=FeedError, strict=False)
    try:
        return _group_by_image(data)
    except (ValueError, OverflowError) as error:  # an overflow: an id of more than 64 bits
        raise FeedError(f"{rule}, got {str(error)[:100]}; write it again") from error


def _group_by_image(data: _CocoFile) -> Annotations:
    """Return the annotated objects in a COCO file for each of its images, by path.

    Raises:
        ValueError: ids that do not go together; the message ends the sentence "..., got".
    """
    annotations_by_image: dict[int | float | str, list[_CocoAnnotation]] = {}
    for image in data.images:
        if image.id in annotations_by_image:
            raise ValueError(f"an id that two images have, {image.id!r}")
        annotations_by_image[image.id] = []
    categories = {category.id: str(category.name) for category in data.categories}
    for annotation in data.annotations:
        if annotation.image_id not in annotations_by_image:
            raise ValueError(f"an image_id that no image has, {annotation.image_id!r}")
        if annotation.category_id not in categories:
            raise ValueError(f"a category_id that no category has, {annotation.category_id!r}")
        annotations_by_image[annotation.image_id].append(annotation)

    objects_by_path: dict[str, Objects] = {}
    repeated_paths = set()
    for image in data.images:
        path = _normalize(image.file_name)
        if path in objects_by_path:
            repeated_paths.add(path)
        objects_by_path[path] = _coco_objects(image, annotations_by_image[image.id])
    return Annotations(
        objects_by_path, tuple(sorted(categories)), categories, frozenset(repeated_paths)
    )


def _coco_objects(image: _CocoImage, annotations: list[_CocoAnnotation]) -> Objects:
    """Return the objects of an image, their boxes as corners x1 y1 x2 y2 in pixels.

    Raises:
        ValueError: a size or a box is impossible; the message ends the sentence "..., got".
    """
    if min(image.height, image.width) < 1:
        raise ValueError(f"a width or height of {image.file_name!r} below 1")
    categories = [annotation.category_id for annotation in annotations]
    crowds = [bool(annotation.iscrowd) for annotation in annotations]
    corners_and_sides = [annotation.bbox for annotation in annotations]  # x y w h
    objects = _make_objects((image.height, image.width), corners_and_sides, categories, crowds)
    boxes = objects.boxes  # [n, 4]; changed below from x y w h to corners
    if not np.isfinite(boxes).all() or (boxes[:, 2:] < 0).any():
        raise ValueError(f"a bbox of {image.file_name!r} that is no x, y, width and height")
    boxes[:, 2:] += boxes[:, :2]
    return objects


def _read_yaml_labels(path: Path) -> Annotations:
    """Return the labels of the pictures that a data.yaml names as `val`, from YOLO's label files.

    Raises:
        FeedError: the labels are of key points, or no picture has a label file.
    """
    data = read_data_yaml(path)
    if data.kpt_shape is not None:
        raise FeedError(
            f"labels must be of boxes or outlines, {printable_name(path)} has key points"
            " (kpt_shape); leave the labels out"
        )
    files = resolve_files(path, split="val").file_list
    image_paths = [os.path.abspath(file.path) for file in files]
    label_paths = list(map(_label_path, image_paths))
    # label file -> its image; an image that the list names twice is one entry
    image_of_label = dict(zip(label_paths, image_paths, strict=True))
    labelled_images = {
        path: image_of_label[path] for path in filter(os.path.exists, image_of_label)
    }
    if not labelled_images:
        raise FeedError(
            f"the pictures of `val` in {printable_name(path)} must have label files, such as"
            f" {printable_name(label_paths[0])}, got none; put them into a folder `labels` beside"
            " `images`"
        )
    return _read_yolo(labelled_images, data.class_count)


def _label_path(image_path: str) -> str:
    """Return the label file of an image: in `labels` instead of the last folder `images`."""
    images = f"{os.sep}images{os.sep}"
    labels = f"{os.sep}labels{os.sep}"
    return os.path.splitext(labels.join(image_path.rsplit(images, 1)))[0] + ".txt"


def _read_label_folder(folder: Path) -> Annotations:
    """Return the annotated objects in a folder of label files: YOLO's .txt or VOC's .xml.

    Raises:
        FeedError: it has both, or neither.
    """
    names = walk_files(folder, lambda name: suffix_of(name) in (".txt", ".xml"))
    label_names = [name for name in names if PurePosixPath(name).name != CLASSES_FILE]
    suffixes = set(map(suffix_of, label_names))
    if len(suffixes) != 1:
        raise FeedError(
            f"a folder of labels must hold YOLO's .txt or VOC's .xml, got"
            f" {' and '.join(sorted(suffixes)) or 'neither'} in {printable_name(folder)};"
            " give the folder of one of them, or `folders` if each class has a folder of images"
        )
    picture_path_by_file = {str(folder / name): name for name in label_names}
    if suffixes == {".txt"}:
        return _read_yolo(picture_path_by_file, class_count=None)
    number_by_class = {name: number for number, name in enumerate(_read_classes(folder))}
    return _read_label_files(
        picture_path_by_file, lambda path: _read_voc_file(path, number_by_class)
    )


def _read_yolo(picture_path_by_file: Mapping[str, str], class_count: int | None) -> Annotations:
    annotations = _read_label_files(
        picture_path_by_file, lambda path: _read_yolo_file(path, class_count)
    )
    return replace(annotations, unlabelled=_make_objects(size=None, boxes=[], classes=[]))


def _read_label_files(
    picture_path_by_file: Mapping[str, str], read_file: Callable[[str], Objects]
) -> Annotations:
    """Return the objects of label files, one file a picture, by paths without suffix.

    Args:
        picture_path_by_file: label file -> path that tells its picture. It is the path of the image
            or, where label files lie in a folder of their own, that of the label file in it.
        read_file: label file -> objects.
    """
    pictures: dict[str, Objects] = {}
    repeated_paths = set()
    with phase("label files", len(picture_path_by_file), "files") as step:
        for label_file, picture_path in picture_path_by_file.items():
            path = os.path.splitext(_normalize(picture_path))[0]
            if path in pictures:
                repeated_paths.add(path)
            pictures[path] = read_file(label_file)
            step()
    return Annotations(
        pictures,
        categories=None,  # the files have class numbers
        repeated_paths=frozenset(repeated_paths),
        are_label_files=True,
    )


def _read_yolo_file(path: str, class_count: int | None) -> Objects:
    """Return the objects of YOLO's label file of one image, as shares of its sides.

    Raises:
        FeedError: a line is none of YOLO's, or a class is not below `class_count`.
    """
    text = read_text(path, what="a label file", error=FeedError, max_bytes=_MAX_LABEL_BYTES)
    boxes = []
    classes = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        class_number, box = _parse_yolo_line(line, f"line {number} of {printable_name(path)}")
        if class_count is not None and class_number >= class_count:
            raise FeedError(
                f"a class must be below the {class_count} of the data.yaml, line {number} of"
                f" {printable_name(path)} has {class_number}; correct `names` or the label"
            )
        classes.append(class_number)
        boxes.append(box)
    return _make_objects(size=None, boxes=boxes, classes=classes)


def _parse_yolo_line(line: str, line_title: str) -> tuple[int, Sequence[float]]:
    """Return (class, corners x1 y1 x2 y2) of a line of YOLO's labels; of an outline, its box.

    Corners are shares of the image's width and height, from 0 to 1.

    Raises:
        FeedError: it is neither of a box nor of an outline.
    """
    try:
        class_number, *numbers = map(float, line.split())
    except ValueError:
        class_number = math.nan
        numbers = []
    shares = np.array(numbers)
    is_box = len(shares) == _BOX_VALUES
    is_outline = len(shares) > _BOX_VALUES and len(shares) % 2 == 0
    is_class = 0 <= class_number < _MAX_CLASSES and class_number.is_integer()
    if not is_class or not (is_box or is_outline):
        raise FeedError(
            "a line of labels reads class, x and y of the centre, width and height, or class and"
            f" points x y of an outline, got {line[:60]!r} as {line_title}; write them as YOLO does"
        )
    points = shares.reshape(-1, 2)  # of the outline
    if is_box:
        center, sides = points  # [x, y], [width, height]
        points = np.stack([center - sides / 2, center + sides / 2])
    is_inside = (shares >= -_MAX_SHARE_BEYOND) & (shares <= 1 + _MAX_SHARE_BEYOND)
    if not is_inside.all() or (is_box and (sides < 0).any()):
        raise FeedError(
            f"labels must be shares of width and height, 0 to 1, got {line[:60]!r} as {line_title};"
            " divide x by the picture's width and y by its height"
        )
    return int(class_number), [*points.min(axis=0), *points.max(axis=0)]


def _make_objects(
    size: Size | None,
    boxes: Sequence[Sequence[float]],
    classes: Sequence[int],
    crowds: Sequence[bool] = (),
) -> Objects:
    """Return the objects of one image; without `crowds`, none of them is a crowd."""
    return Objects(
        size,
        np.array(boxes, np.float64).reshape(-1, _BOX_VALUES),
        np.array(classes, np.int64),
        np.array(crowds or [False] * len(boxes), np.bool_),
    )


def _read_classes(folder: Path) -> list[str]:
    """Return the class names of `classes.txt`, in the folder of the labels or above it."""
    for path in (folder / CLASSES_FILE, folder.parent / CLASSES_FILE):
        if path.is_file():
            text = read_text(path, what="a list of class names", error=FeedError)
            return [line.strip() for line in text.splitlines() if line.strip()]
    raise FeedError(
        f"VOC's files name classes, which need numbers: write the names, one a line in the order"
        f" of the model's outputs, into {printable_name(folder / CLASSES_FILE)}"
    )


def _read_voc_file(path: str, number_by_class: Mapping[str, int]) -> Objects:
    """Return the objects of one image from Pascal VOC's XML file, their boxes in pixels.

    Objects marked as difficult become crowds, which count neither as hits nor as misses.

    Args:
        path: of the XML file.
        number_by_class: class name -> class number of the model.

    Raises:
        FeedError: it is no annotation of VOC, or names a class that `classes.txt` has not.
    """
    text = read_text(path, what="an XML file", error=FeedError, max_bytes=_MAX_LABEL_BYTES)
    title = printable_name(path)
    try:
        if "<!DOCTYPE" in text:  # its entities may grow without end
            raise ValueError("a DOCTYPE")
        root = ElementTree.fromstring(text)
        annotations = root.findall("object")
        height = _number(root, "size/height")
        width = _number(root, "size/width")
        boxes = []  # of each object: xmin, ymin, xmax, ymax
        for annotation in annotations:
            boxes.append([_number(annotation, f"bndbox/{key}") for key in _VOC_CORNERS])
        has_swapped_corners = any(x1 > x2 or y1 > y2 for x1, y1, x2, y2 in boxes)
        if min(height, width) < 1 or has_swapped_corners:
            raise ValueError("a size below 1 or corners in another order")
    except (ElementTree.ParseError, ValueError, OverflowError) as error:
        raise FeedError(
            "an XML file of labels has size, and objects with name and bndbox, as Pascal VOC's,"
            f" got {str(error)[:100]} in {title}; export the labels again"
        ) from error

    names = [_text(annotation, "name") for annotation in annotations]
    for name in names:
        if name not in number_by_class:
            raise FeedError(
                f"the classes of VOC's files must be in {CLASSES_FILE}, got {name[:60]!r} in"
                f" {title} and {counted(len(number_by_class), 'class')} there; add it"
            )
    classes = [number_by_class[name] for name in names]
    crowds = [_text(annotation, "difficult") == "1" for annotation in annotations]
    return _make_objects((int(height), int(width)), boxes, classes, crowds)


_VOC_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def _text(element: ElementTree.Element, path: str) -> str:
    """Return the text at a path of elements, without spaces around it; "" without one."""
    return (element.findtext(path) or "").strip()


def _number(element: ElementTree.Element, path: str) -> float:
    """Return the finite number at a path of elements."""
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"no {path}")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{path} {text!r}")
    return number
