"""Samples of Python objects: arrays, loaders, datasets, readers, functions, and their labels.

Objects are recognized by duck typing, so no framework is imported: loaders of torch and polygraphy
and datasets of TensorFlow and Hugging Face are iterable, datasets of torch have a length and
indices, ONNX Runtime's calibration readers have `get_next`, and a function is called and returns
one of these.

An item of an iterable holds one array per input: an array, a tensor, a tuple with labels, or a
mapping. Whatever numpy converts to an array is one, also a torch tensor that requires a gradient.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import FeedError, counted
from deploy.feed.arrays import (
    LABEL_KEYS,
    ArraySource,
    SampleCounter,
    add_missing_batch,
    as_array,
    count_samples,
)
from deploy.feed.batch_axis import Specs
from deploy.feed.file_list import Labels
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.feed.temporary_arrays import Item, ItemStore
from deploy.files.usercode import load_function, wrap_user_errors
from deploy.tensors import Array

_MAX_IGNORED_NAMES = 5  # values of an item that a note names


def first_item_fits(source: Any, specs: Specs) -> tuple[bool, Any]:
    """Return (whether the first item of a source holds all inputs, an iterable of all items)."""
    items, _ = iterate_items(source)
    first_items = list(islice(items, 1))  # none, or one
    if not isinstance(items, list | tuple):  # it is read once: put the first item back
        items = chain(first_items, items)
    if not first_items:
        return False, items
    try:
        matched = match_inputs(first_items[0], specs, "the first item")
        # a mapping that names all inputs holds them: if their shapes do not fit, that is an error,
        # which reading all items reports. Arrays without names are these inputs only if they fit
        if not matched.is_named:
            count_samples(matched.arrays, specs, "the first item")
    except FeedError:
        return False, items
    return True, items


def iterate_items(source: object) -> tuple[Iterable[Any], bool]:
    """Return (items of a Python object that serves as calibration data, whether they surely end).

    Items of an object without a length, such as a generator, may not end. Items that the user's
    code makes are read through `_iterate`, which reports an error of that code.

    Raises:
        FeedError: the object yields no items.
    """
    if isinstance(source, type):  # a loader's class: create one
        with wrap_user_errors(f"making a {source.__name__}", error=FeedError):
            return iterate_items(source())
    if isinstance(source, Mapping):  # {input: all samples of it}
        return [source], True
    if hasattr(source, "__array__"):
        return [as_array(source, "the feed")], True
    if callable(getattr(source, "get_next", None)):
        return _iterate(_read_until_none(source)), False
    if callable(getattr(source, "get_batch", None)):  # a TensorRT calibrator
        raise FeedError(
            f"a feed must give arrays, got the TensorRT calibrator {type(source).__name__}, which"
            " gives addresses; give the arrays it reads, or its script (--calibrator-script)"
        )

    if isinstance(source, list | tuple):
        return source, True
    if not isinstance(source, bytes):  # they have a length and elements, but are no data
        count = _length(source)
        if hasattr(source, "__iter__"):
            return _iterate(source), count is not None
        if count is not None and hasattr(source, "__getitem__"):  # a dataset of torch
            return _iterate(map(source.__getitem__, range(count))), True
    if callable(source):  # a function that returns one of these
        with wrap_user_errors("what gives the feed", error=FeedError):
            return iterate_items(source())
    raise FeedError(
        f"a feed must be a path, an array, a mapping of arrays or something to iterate over,"
        f" got {type(source).__name__}"
    )


def _length(source: object) -> int | None:
    """Return the length of an object; None if it has none, as a loader over a stream."""
    try:
        return len(source)  # type: ignore[arg-type]
    except Exception:  # the user's code
        return None


def _read_until_none(reader: Any) -> Iterator[object]:
    """Yield the items of ONNX Runtime's calibration reader, which ends with None."""
    while (item := reader.get_next()) is not None:
        yield item


def _iterate(source: Iterable[Any]) -> Iterator[Any]:
    """Yield the items; an error of the user's code becomes a FeedError."""
    with wrap_user_errors("the feed", error=FeedError):
        iterator = iter(source)
    while True:
        with wrap_user_errors("the feed", error=FeedError):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def is_loader_spec(source: object) -> bool:
    """Return whether a source is a Python file, which is given as `loader.py:function`."""
    if not isinstance(source, str | os.PathLike):
        return False
    path = str(source)
    file, _, name = path.rpartition(":")
    is_function = file.endswith(".py") and name.isidentifier() and not Path(path).exists()
    return is_function or (path.endswith(".py") and os.path.isfile(path))


def call_loader(spec: str) -> object:
    """Return what the function of `loader.py:function` returns.

    Raises:
        ConfigError: there is no such file or function, or the file is given without a function.
        FeedError: the function failed.
    """
    function = load_function(spec, what="a loader", form="loader.py:function", error=FeedError)
    with wrap_user_errors(f"the loader {spec}", error=FeedError):
        result: object = function()
    return result


MAX_SAMPLES = 100_000  # of an iterable without a length, unless the user sets a limit


def open_iterable(
    source: Iterable[object],
    specs: Specs,
    *,
    name: str = "the iterable",
    has_end: bool,
    limit: int | None,
    remedy: str = "",
) -> ArraySource:
    """Open an iterable of items with one or more samples each.

    An item is an array, a tuple that begins with arrays, or a mapping by input name. A list or a
    tuple is used directly. Anything else is read once, one item at a time, into a temporary file,
    since samples are needed twice: for their digest and for the run. Whole numbers beside the
    inputs are labels, see `match_inputs`; other values are ignored, and a note lists them.

    Args:
        source: the items.
        specs: the model's inputs.
        name: of the source in messages.
        has_end: whether it is known to end, as an object with a length does. Then it is read
            completely, and the caller chooses among all of its samples.
        limit: maximum number of samples of a source that is not known to end; None for all.
        remedy: end of the message if there are no samples: what to do about it.

    Raises:
        FeedError: an item does not fit the inputs, there are no samples, or over `MAX_SAMPLES` of
            a source that is not known to end.
    """
    is_in_memory = isinstance(source, list | tuple)
    items: list[Item] | ItemStore = [] if is_in_memory else ItemStore()
    counter = SampleCounter(specs)
    further_values = _FurtherValues()
    if has_end:
        limit = None  # from here on, None stands for all samples
    for index, value in enumerate(source):
        item_name = f"item {index} of {name}"
        matched = match_inputs(value, specs, item_name)
        sample_count = counter.add(matched.arrays, item_name)
        further_values.add(matched, sample_count)  # they may be labels
        items.append(matched.arrays)
        if not has_end and _is_enough(counter.total, limit, name):
            break

    # the last item may hold more samples than the limit allows: only its first ones are used
    used_count = counter.total if limit is None else min(counter.total, limit)
    if not used_count:
        raise FeedError(f"{name} must give samples, got none{remedy}")
    item_ends = (*counter.item_ends[:-1], used_count)
    # the labels are those of all samples that were read; unused ones are dropped below
    labels, notes = further_values.find_labels(counter.total)
    if not is_in_memory:
        first_text = "the first " if used_count == limit else ""
        notes.append(
            f"{name} was read once into a temporary file ({first_text}{used_count} samples)"
        )
    return ArraySource(
        specs=counter.specs,
        items=items,
        item_ends=item_ends,
        batch=counter.batch,
        name=name,
        labels=None if labels is None else labels[:used_count],
        notes=tuple(notes),
    )


def _is_enough(sample_count: int, limit: int | None, name: str) -> bool:
    """Return whether so many samples of a source that may not end reach the limit.

    `limit`: maximum number of samples; None for all up to the end of the source.

    Raises:
        FeedError: there is no limit, and they are more than `MAX_SAMPLES`.
    """
    if limit is not None:
        return sample_count >= limit
    if sample_count > MAX_SAMPLES:
        raise FeedError(
            f"{name} must end, got {sample_count:,} samples and no end; set a maximum number of"
            " samples (--limit), and the first ones are used"
        )
    return False


@dataclass(frozen=True, slots=True)
class MatchedItem:
    """An item of an iterable.

    Attributes:
        arrays: the inputs, with their batch dimension.
        is_named: whether a mapping names the inputs.
        further_values: name -> value that belongs to no input, such as "value 2"; the names of a
            mapping are quoted.
        label_name: which of these values may be labels; empty if none of them.
    """

    arrays: Item
    is_named: bool
    further_values: Mapping[str, object]
    label_name: str


def match_inputs(value: object, specs: Specs, item_name: str) -> MatchedItem:
    """Return the inputs in an item of an iterable, and everything else it holds.

    ::

        array                       the only input
        (array, ...), [array, ...]  the inputs in order; a single further element may be labels
        ({name: array}, ...)        a mapping, as below; a single further element may be labels
        {name: array, ...}          the inputs by name; the value of one of `LABEL_KEYS`, the first
                                    that is there, may be labels

    Args:
        value: the item; nested lists of numbers are an array.
        specs: the model's inputs.
        item_name: of the item in messages.

    Raises:
        FeedError: the item is none of these, or a tuple in which the inputs are ambiguous.
    """
    elements: Sequence[Any] = [value]
    if isinstance(value, tuple | list) and not _is_nested_numbers(value):
        elements = value
    # the values that are no inputs, by their names in messages: 'mask' of a mapping, with the
    # quotes, or value 2 of a tuple
    further_values: dict[str, object] = {}
    label_name = ""  # the name of that which may be labels
    is_named = bool(elements) and isinstance(elements[0], Mapping)
    if is_named:
        mapping = elements[0]
        arrays = _take_by_name(mapping, specs, item_name)
        for name, further_value in mapping.items():
            if name not in arrays:
                further_values[repr(str(name))] = further_value
        label_names = (repr(key) for key in LABEL_KEYS if repr(key) in further_values)
        label_name = next(label_names, "")
        input_elements = 1  # the mapping holds all inputs
    else:
        arrays = _take_in_order(elements, specs, item_name)
        input_elements = len(specs)

    for number, element in enumerate(elements[input_elements:], input_elements + 1):
        further_values[f"value {number}"] = element
    if len(elements) == input_elements + 1:  # has precedence over a value of the mapping
        label_name = f"value {len(elements)}"
    item = {spec.name: add_missing_batch(arrays[spec.name], spec) for spec in specs}
    return MatchedItem(item, is_named, further_values, label_name)


def _take_by_name(mapping: Mapping[Any, Any], specs: Specs, item_name: str) -> Item:
    """Return the inputs in a mapping by name.

    Raises:
        FeedError: it lacks an input.
    """
    input_names = [spec.name for spec in specs]
    if any(name not in mapping for name in input_names):
        raise FeedError(
            f"{item_name} must name the inputs {input_names}, got {sorted(map(str, mapping))};"
            " name its arrays as the model does"
        )
    return {name: as_array(mapping[name], item_name) for name in input_names}


def _take_in_order(elements: Sequence[Any], specs: Specs, item_name: str) -> Item:
    """Return the inputs that the first elements of a tuple or list are.

    Raises:
        FeedError: there are fewer elements than inputs, or they may be samples in place of inputs.
    """
    count_text = counted(len(elements), "value")
    input_names = [spec.name for spec in specs]
    if len(elements) < len(specs):
        raise FeedError(
            f"{item_name} must hold the inputs {input_names}, got {count_text}; give a dict of"
            " arrays by input name"
        )
    arrays = [as_array(element, item_name) for element in elements[: len(specs)]]
    # a further array of the first one's shape means a list of samples, not one sample with labels;
    # single numbers and vectors may be labels
    shape = arrays[0].shape
    other_shapes = [getattr(element, "shape", None) for element in elements[len(specs) :]]
    if len(shape) > 1 and shape in other_shapes:
        raise FeedError(
            f"{item_name} must distinguish its inputs from its other values, got {count_text},"
            f" several of the shape {list(shape)}; give one array per sample, or a dict of arrays"
            " by input name"
        )
    return dict(zip(input_names, arrays, strict=True))


def read_item_labels(value: object, count: int) -> list[int] | None:
    """Return the labels of an item of `count` samples; None if the value holds no labels.

    Labels are whole numbers from 0, one a sample: an array [count], or a number for one sample.
    """
    try:
        array = as_array(value, "the labels")
    except FeedError:
        return None
    is_labels = array.dtype.kind in "iu" and array.ndim <= 1 and array.size == count
    if not is_labels or (array < 0).any():
        return None
    return [int(label) for label in array.flat]


class _FurtherValues:
    """The values of items that belong to no input: labels if all items have some, or ignored."""

    def __init__(self) -> None:
        # as in `MatchedItem.further_values`, in order of first use; items may have different ones
        self._names: dict[str, None] = {}
        self._label_names: dict[str, None] = {}  # of the values that were labels
        self._labels: list[int] = []  # one for each sample of the items that had labels
        self._is_labelled = True  # until an item has no labels

    def add(self, matched: MatchedItem, sample_count: int) -> None:
        """Add the values of an item."""
        self._names |= dict.fromkeys(matched.further_values)
        label_value = matched.further_values.get(matched.label_name)
        labels = read_item_labels(label_value, sample_count)
        if labels is None:
            self._is_labelled = False
        else:
            self._labels += labels
            self._label_names[matched.label_name] = None

    def find_labels(self, sample_count: int) -> tuple[Labels, list[str]]:
        """Return (the labels of all samples, None if they are not one for each; notes).

        The notes tell which values are labels and which are ignored.
        """
        labels: Labels = None
        label_names: Collection[str] = ()
        notes = []
        if self._is_labelled and len(self._labels) == sample_count:
            labels = tuple(self._labels)
            label_names = self._label_names
            notes.append(f"labels: {' or '.join(label_names)} of each item")
        ignored_names = [name for name in self._names if name not in label_names]
        if ignored_names:
            shown_names = ", ".join(ignored_names[:_MAX_IGNORED_NAMES])
            notes.append(
                f"ignored: {shown_names} of each item, which no input takes; labels"
                " are whole numbers, one a sample, or go into labels= (--labels)"
            )
        return labels, notes


def _is_nested_numbers(value: Sequence[Any]) -> bool:
    """Return whether a list is nested down to plain numbers, as from JSON or datasets."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def preprocess_items(
    items: Iterable[Any], preprocess: Preprocess, dtype: str
) -> Iterator[Array | tuple[Array, int]]:
    """Preprocess images in memory; yield each with its label if it has one.

    Args:
        items: uint8 [H, W, 3] RGB, or [H, W] or [H, W, 1] grey; anything numpy converts to such an
            array, such as a Pillow image; or several images as [N, H, W, C]. An item may also be a
            tuple (these, their labels), or a mapping with one such value and perhaps labels.
        preprocess: resolved.
        dtype: of the model's input.

    Raises:
        FeedError: an item is no image.
    """
    for number, item in enumerate(items):
        title = f"item {number} of the feed"
        image_value, label_value = _split_labelled_image(item)
        array = as_array(image_value, title)
        if array.dtype != np.uint8 or array.ndim not in (2, 3, 4) or not array.size:
            raise FeedError(
                f"{title} must be an image to be preprocessed, uint8 [H, W, 3] or [H, W], got"
                f" {array.dtype} {list(array.shape)}; leave the preprocessing out if the arrays"
                " are ready to be fed"
            )
        images = array if array.ndim == 4 else array[None]  # [N, ...]
        labels = read_item_labels(label_value, len(images))  # None unless one for each image
        for position, image in enumerate(images):
            pixels = to_opencv_channels(image, preprocess, title)
            values = preprocess_image(pixels, preprocess, dtype)
            yield values if labels is None else (values, labels[position])


def _split_labelled_image(item: Any) -> tuple[object, object]:
    """Return (image, label) of a pair, or of a mapping with a single image; None for no label."""
    if isinstance(item, tuple) and item:
        return item[0], item[1] if len(item) == 2 else None
    if isinstance(item, Mapping):
        images = [value for value in item.values() if np.ndim(value) >= 2]
        labels = (item[key] for key in LABEL_KEYS if key in item)
        if len(images) == 1:
            return images[0], next(labels, None)
    return item, None


def to_opencv_channels(image: Array, preprocess: Preprocess, title: str) -> Array:
    """Convert an image in memory to what decoding a file gives for the same preprocessing.

    Args:
        image: uint8 [H, W, 3] RGB, or [H, W] or [H, W, 1] grey.
        preprocess: resolved; it decides between BGR and grey.
        title: of the image in messages.

    Returns:
        uint8 [H, W, 3] BGR or [H, W, 1] grey.

    Raises:
        FeedError: the image has another number of channels.
    """
    import cv2

    if image.ndim == 2:
        image = image[:, :, None]
    is_grey = image.shape[2] == 1
    if image.shape[2] not in (1, 3):
        raise FeedError(
            f"{title} must have 1 or 3 channels, last, got {list(image.shape)};"
            " move them with .transpose(1, 2, 0) if they are first"
        )
    if preprocess.channels == 1 and not is_grey:
        image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None]
    elif preprocess.channels == 3 and is_grey:
        image = np.repeat(image, 3, axis=2)
    elif preprocess.channels == 3:
        image = image[:, :, ::-1]
    return np.ascontiguousarray(image)
