"""Evaluation samples: a subset spread evenly over a feed, and the labels of a feed.

::

    feed      0 1 2 3 4 5 6 7 8 9 ...     each sample has a key
    subset    0   2 3   5 6   8   ...     the same keys, whichever others turn out to be bad

Labels are given, numbered by folder, or annotated objects in pixels of the model's input.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

import numpy as np

from deploy.errors import ConfigError, FeedError, counted
from deploy.feed.annotations import Annotations, read_annotations
from deploy.feed.file_list import FileList
from deploy.feed.images import is_image, printable_name, summarize_names
from deploy.feed.loaders import read_item_labels
from deploy.feed.parallel import SampleStream
from deploy.feed.pixels import boxes_to_input
from deploy.feed.preprocess import Size, with_image_size
from deploy.feed.samples import Feed
from deploy.feed.sources import Sample
from deploy.files.reading import read_text, refuse_no_path
from deploy.metrics.precision import GroundTruth, Objects
from deploy.tensors import Array
from deploy.terminal import phase


class EvaluationSubset:
    """Some images of a feed, spread evenly; or its first ones, if the model fixes its batch.

    They are chosen anew when an image turns out to be bad, so that their number stays the same.
    """

    def __init__(self, feed: Feed, max_images: int) -> None:
        """Args: feed: all samples; max_images: at most so many images."""
        self._feed = feed
        self._max_images = max_images
        self._passed_keys: list[int] = []  # of the samples of the latest pass so far

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def has_labels(self) -> bool:
        """Whether the feed has labels; the subset has none: FP32 outputs are its reference."""
        return self._feed.labels is not None

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the subset's samples in the feed, without known bad ones."""
        max_samples = -(-self._max_images // self._feed.batch)  # a sample is `batch` images
        return self._feed.spread_keys(max_samples)

    @property
    def count(self) -> int:
        """Number of images; the feed's last batch may repeat others."""
        return min(len(self) * self._feed.batch, self._feed.count)

    @property
    def unpadded_count(self) -> int | None:
        """Number of images, if the last batch may repeat some to be full; else None."""
        return self.count if self._feed.batch > 1 else None

    @property
    def names(self) -> Sequence[str]:
        """One name per image: of those of the latest pass; before any pass, of all to be read."""
        if self._feed.batch > 1:
            return self._feed.names[: self.count]
        return tuple(map(self._feed.name_of_key, self._passed_keys or self.keys))

    @property
    def states(self) -> Mapping[str, str]:
        """See `Feed.states`."""
        return self._feed.states

    def sequence_of(self, key: int) -> int:
        """See `Feed.sequence_of`."""
        return self._feed.sequence_of(key)

    def samples(self) -> SampleStream[Sample]:
        """Return a stream of the samples, in feed order."""
        return SampleStream(self._walk())

    def spread_samples(self, max_samples: int) -> Iterator[Sample]:
        """Yield at most `max_samples` samples, spread evenly over the subset."""
        return (sample for _, sample in self.spread_with_keys(max_samples))

    def spread_with_keys(
        self,
        max_samples: int,
        *,
        added_keys: Collection[int] = (),
        skipped_keys: Collection[int] = (),
    ) -> Iterator[tuple[int, Sample]]:
        """Yield (key, sample) of at most `max_samples` spread samples and those of `added_keys`.

        Those of `skipped_keys` are left out.
        """
        chosen_keys = {*self._feed.spread(self.keys, max_samples), *added_keys}
        return self._feed.samples_by_key(chosen_keys.difference(skipped_keys))

    def first_samples(self, max_samples: int) -> Sequence[Sample]:
        """Return the first samples of the entire feed."""
        return self._feed.first_samples(max_samples)

    def to_image(self, sample: Mapping[str, Array]) -> Array | None:
        """Return the model's view of one sample, uint8 [H, W, 3]; None if it is no image."""
        return self._feed.to_image(sample)

    def sample_key(self, number: int) -> int:
        """Return the key of the n-th sample, from 1, of the latest pass over `samples`."""
        return self._passed_keys[number - 1]

    def _walk(self) -> Iterator[Sample]:
        self._passed_keys = []
        for key, sample in self._feed.samples_by_key(self.keys):
            self._passed_keys.append(key)
            yield sample


ImageLabels = Sequence[int] | FileList | Annotations | str
"""Labels of evaluation images: class numbers, the lines of a file, objects, or `BY_FOLDER`."""

BY_FOLDER = "folders"
# a line of labels: "photo.png 3", "photo.png,3" or "3"; its groups are the text before the class
# number, if any, the separator after that text, and the number
_LABELLED_LINE = re.compile(r"(?:(.*)([\s,]))?(\d{1,9})", re.ASCII)


def read_labels(path: Path | str) -> FileList | Annotations | str:
    """Read annotated objects, see `deploy.feed.annotations`, or a class number a line.

    The class number ends the line, after a space or a comma. Empty lines are skipped, and the
    header of a table: a first line of several words without a number. "folders" is no file: images
    are labelled by their folders.

    Returns:
        The annotated objects; the name and the class number of each line; or `BY_FOLDER`.

    Raises:
        ConfigError: the path is empty, or an address.
        FeedError: the file cannot be read, or a line does not end in one whole number >= 0.
    """
    if str(path) == BY_FOLDER:
        return BY_FOLDER
    refuse_no_path(path)
    path = Path(path)
    annotations = read_annotations(path)
    if annotations is not None:
        return annotations
    lines = read_text(path, what="a text file of labels", error=FeedError).splitlines()
    labelled_files = FileList(folder="")
    for number, line in enumerate(lines, 1):
        columns = line.replace(",", " ").split()
        labelled_line = _LABELLED_LINE.fullmatch(line.strip())
        if labelled_line is not None:
            text, separator, label = labelled_line.groups(default="")
            if _has_two_numbers(text):
                raise FeedError(
                    f"a label is one class number, line {number} of {path} has two after the name;"
                    " leave one, a whole number"
                )
            name = text.rstrip(" ,")  # may have spaces and commas in it
            if separator == ",":  # a table, which may have other columns before the name
                name = text.rpartition(",")[2]
            labelled_files.add(name.strip(' "'), int(label))
            continue
        # skipped: an empty line, and the header of a table (a first line of several words)
        is_header = number == 1 and len(columns) > 1
        if columns and not is_header:
            raise FeedError(
                f"a label is a class number after a space or a comma, line {number} of {path} ends"
                " in other text; number the classes from 0, as the model's outputs are"
            )
    return labelled_files


def _has_two_numbers(text: str) -> bool:
    """Whether the text before a class number is the name of an image and a number."""
    image_and_number = re.fullmatch(r"(.*?)[\s,]+\d+", text.rstrip(" ,"))
    return image_and_number is not None and is_image(image_and_number[1].strip(' "'))


def to_labels(labels: Iterable[int] | ImageLabels | Path | None) -> ImageLabels | None:
    """Return labels as `apply_labels` takes them: a path is read, class numbers become integers.

    None, for no labels, is returned as it is. Whether there is a number for each image is checked
    by `apply_labels`.

    Raises:
        FeedError: as `read_labels`, or the class numbers are no flat list of whole numbers.
    """
    if labels is None or isinstance(labels, Annotations | FileList):
        return labels
    if isinstance(labels, str | Path):
        return read_labels(labels)
    values = list(labels) if isinstance(labels, Iterable) else [labels]
    numbers = read_item_labels(values, count=len(values))
    if numbers is None:
        raise FeedError(
            f"labels must be whole numbers from 0, one an image, got {values!r:.60}; labels that"
            " start at 1 must be lowered by one"
        )
    return numbers


def apply_labels(
    labels: ImageLabels | None,
    evaluation: Feed | None,
    class_names: Mapping[int, str] | None = None,
) -> GroundTruth | None:
    """Give the evaluation images their labels: set class numbers on the feed, return objects.

    Args:
        labels: one of the forms of `ImageLabels`; None without labels. With `BY_FOLDER` the feed
            has its class numbers already, from `Dataset.open`.
        evaluation: the evaluation images; None without any.
        class_names: class number of the model -> name, by which categories are matched; None
            without names.

    Returns:
        The annotated objects, in pixels of the model's input; None for all other labels.

    Raises:
        ConfigError: there are no evaluation images, or they are no images.
        FeedError: an image is not annotated or has another shape, or the number of labels differs.
    """
    if labels is None:
        return None
    if evaluation is None:
        raise ConfigError("labels are of evaluation images, got none; give --eval-images")
    if isinstance(labels, str):  # `BY_FOLDER`
        return None
    if isinstance(labels, FileList):  # becomes class numbers, in the order of the images
        labels = _order_labels(labels, evaluation.entry_names, evaluation.source_names)
    if not isinstance(labels, Annotations):  # class numbers
        evaluation.set_labels(labels)
        return None

    if evaluation.preprocess is None:
        raise ConfigError("annotations of boxes are for pictures, got arrays; give image files")
    annotations = labels.match_images(evaluation.names, evaluation.source_names)
    annotations = annotations.numbered_by_name(class_names or {})
    # raises if an image is not annotated
    object_counts = [len(annotations.find_objects(name).boxes) for name in evaluation.names]
    sizes = _find_image_sizes(annotations, evaluation)
    note = _note_unlabelled(annotations, evaluation)
    if not any(object_counts):
        raise FeedError(
            "labels must have objects on the evaluation images, got none on all"
            f" {counted(len(object_counts), 'image')}; give annotations with boxes"
        )
    objects_of_image = partial(_objects_in_input, annotations, evaluation, sizes)
    return GroundTruth(objects_of_image, annotations.categories, (note,) if note else ())


def _order_labels(
    lines: FileList, image_names: Iterable[str], source_names: Iterable[str]
) -> Sequence[int]:
    """Return the class numbers of lines in the order of the images.

    A line belongs to the image that it names: by its file name, with the suffix in all lines or in
    none. If images in several folders have the same file name, names must start with the folders
    that tell them apart.

    If no line names an image, the n-th line belongs to the n-th image, unless all lines have names
    that differ: these are probably misspelt names of images, and refused. Other names may be those
    of classes.

    Args:
        lines: name (may be "") and class number of each line.
        image_names: paths of the images.
        source_names: paths of all images of the folder or list, from which the images are chosen.

    Raises:
        FeedError: lines name images, but an image is named by no line or by several.
    """
    # an image's key, by which lines name it, is the end of its path: its file name, with as many
    # folders before it as make the keys of all images differ
    source_paths = {PurePath(name).parts for name in source_names}
    part_count = 1
    while len({parts[-part_count:] for parts in source_paths}) < len(source_paths):
        part_count += 1
    image_keys = [PurePath(name).parts[-part_count:] for name in image_names]
    line_keys = [PurePath(name).parts[-part_count:] for name in lines.names]  # () without a name
    class_numbers = lines.labels or ()
    label_by_key = dict(zip(line_keys, class_numbers, strict=True))

    # if a line names an image without its suffix, all lines must
    stem_keys = [(*folders, PurePath(file_name).stem) for *folders, file_name in image_keys]
    if not label_by_key.keys().isdisjoint(stem_keys):
        image_keys = stem_keys

    if line_keys == image_keys:  # in one order, so that an image may even come twice
        return class_numbers
    # no line names an image: the lines are in the order of the images, see above
    has_distinct_names = () not in label_by_key and len(label_by_key) == len(line_keys)
    if label_by_key.keys().isdisjoint(image_keys) and not has_distinct_names:
        return class_numbers

    line_counts = Counter(line_keys)
    for key in image_keys:
        if line_counts[key] != 1:
            raise FeedError(
                f"labels that name images must name each of them once, got {line_counts[key]}"
                f" lines for {printable_name('/'.join(key))}; correct them, or write class numbers"
                " alone, in the order of the images"
            )
    return [label_by_key[key] for key in image_keys]


def _note_unlabelled(annotations: Annotations, evaluation: Feed) -> str:
    """Return a note on evaluation images without a label file; "" if all have one.

    Raises:
        FeedError: no image has one.
    """
    if annotations.unlabelled is None:  # so each image has annotations: `apply_labels` checked it
        return ""
    unlabelled_names = [
        name
        for name in evaluation.names
        if annotations.find_objects(name) is annotations.unlabelled
    ]
    if not unlabelled_names:
        return ""
    names_text = summarize_names(unlabelled_names, 3)
    if len(unlabelled_names) == evaluation.count:
        raise FeedError(
            f"label files must have the names of the evaluation images, got none for {names_text};"
            " give the labels of these images"
        )
    predicate = "have no label file and count as images"
    if len(unlabelled_names) == 1:
        predicate = "has no label file and counts as an image"
    return (
        f"{len(unlabelled_names)} of {evaluation.count} evaluation images {predicate} without"
        f" objects: {names_text}"
    )


def _find_image_sizes(annotations: Annotations, evaluation: Feed) -> dict[str, Size]:
    """Return name -> (height, width) of images whose size differs from their annotations'.

    They are scaled copies of the annotated images, or their annotations state no size.

    Raises:
        FeedError: an image has another ratio of width to height than the annotated one.
    """
    sizes: dict[str, Size] = {}
    with phase("sizes of the pictures", evaluation.count, "images") as step:
        for name, size in evaluation.sizes():
            step()
            annotated_size = annotations.find_objects(name).size
            if size is None or size == annotated_size:  # None: unreadable, reported when it is read
                continue
            if annotated_size is not None:
                _refuse_other_shape(name, size, annotated_size)
            sizes[name] = size
    return sizes


def _refuse_other_shape(name: str, size: Size, annotated_size: Size) -> None:
    """Raise `FeedError` if an image of `size` (h, w) is no scaled copy of the annotated one."""
    height, width = size
    annotated_height, annotated_width = annotated_size
    # sides are rounded to pixels, so equal shapes differ by less than this
    shape_difference = abs(height * annotated_width - width * annotated_height)
    if shape_difference > max(*size, *annotated_size):
        raise FeedError(
            f"an image must have the width and height that its annotations say, got {name[:200]!r}"
            f" of {width}x{height} and {annotated_width}x{annotated_height} in the annotations;"
            " give the images that were annotated, as displayed (without an EXIF rotation), or"
            " correct these"
        )


def _objects_in_input(
    annotations: Annotations, feed: Feed, sizes: Mapping[str, Size], number: int
) -> Objects:
    """Return the objects of an image, with boxes in pixels of the model's input.

    Args:
        annotations: of all images of the feed.
        feed: the images.
        sizes: name of an image -> its (height, width). It has every image whose annotation states
            another size, or none; all other images have the annotated size.
        number: of the image, from 0, among those that are not known to be bad.
    """
    name = feed.good_name(number)
    preprocess = feed.preprocess
    assert preprocess is not None  # `apply_labels` refuses annotations of arrays
    annotation = annotations.find_objects(name)
    # boxes are in pixels of the annotated image. An annotation without a size has shares of the
    # sides, which are pixels of an image of 1x1; then the size of the image is in `sizes`
    annotated_size = annotation.size or (1, 1)
    annotated_height, annotated_width = annotated_size
    size = sizes.get(name, annotated_size)
    height, width = size
    # to pixels of the image, then of the input
    x_scale = width / annotated_width
    y_scale = height / annotated_height
    boxes = annotation.boxes * np.array([x_scale, y_scale, x_scale, y_scale])
    return replace(
        annotation,
        boxes=boxes_to_input(boxes, size, preprocess),
        size=with_image_size(preprocess, size).input_size,
    )
