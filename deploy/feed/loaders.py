"""Turn Python objects into an iterable of items: arrays, loaders, datasets, readers, functions.

Objects are recognized by duck typing, so no framework is imported: loaders of torch and polygraphy
and datasets of TensorFlow and Hugging Face are iterable, datasets of torch have a length and
indices, ONNX Runtime's calibration readers have `get_next`, and a function is called and returns
one of these.
"""

import ast
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import LABEL_KEYS, as_array, read_item_labels
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.files.reading import read_bytes
from deploy.files.usercode import load_function, wrap_user_errors
from deploy.tensors import Array, TensorSpec

_LOADER_FORM = "loader.py:function"
_MAX_SCRIPT_BYTES = 1 << 24


def peek_names(source: Any, specs: Sequence[TensorSpec]) -> tuple[Collection[str], Any]:
    """Return the inputs in the first item of a source, and the source with that item back in it.

    An item without names holds the first input, or as many inputs as it has arrays of their rank.
    """
    if isinstance(source, list | tuple | Mapping) or hasattr(source, "__array__"):
        first = source[0] if isinstance(source, list | tuple) and source else source
    else:
        items = iter(iterate_items(source)[0])
        first_items = list(islice(items, 1))
        if not first_items:
            return (), []
        first, source = first_items[0], chain(first_items, items)
    if isinstance(first, tuple | list) and first and isinstance(first[0], Mapping):
        first = first[0]
    if isinstance(first, Mapping):
        return tuple(map(str, first)), source
    if not isinstance(first, tuple | list):
        return (), source
    fitting = [
        spec.name
        for spec, value in zip(specs, first, strict=False)
        if 0 < len(spec.shape) - 1 <= np.ndim(value)
    ]
    return fitting, source


def iterate_items(source: object) -> tuple[Iterable[Any], bool]:
    """Return the items of a Python object that serves as calibration data; and whether they end.

    Items of an object without a length, such as a generator, may not end.

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
        return _iterate_until_none(source.get_next), False  # type: ignore[attr-defined]
    if callable(getattr(source, "get_batch", None)):
        raise FeedError(
            f"a feed must give arrays, got the TensorRT calibrator {type(source).__name__}, which"
            " gives addresses; give the arrays it reads, or its script (--calibrator-script)"
        )

    count = _length(source)
    if isinstance(source, list | tuple):
        return source, True
    if hasattr(source, "__iter__") and not isinstance(source, bytes):
        return _iterate(source), count is not None
    if count is not None and hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
        return _iterate(map(source.__getitem__, range(count))), True  # a dataset of torch
    if callable(source):
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


def _iterate_until_none(get_next: Callable[[], object]) -> Iterator[object]:
    while True:
        with wrap_user_errors("get_next of the reader", error=FeedError):
            item = get_next()
        if item is None:
            return
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


def is_loader_spec(path: str) -> bool:
    """Return whether a path is a Python file, with or without `:function`."""
    return _is_function_spec(path) or (path.endswith(".py") and os.path.isfile(path))


def _is_function_spec(path: str) -> bool:
    """Return whether a path is of the form `loader.py:function`."""
    file, _, name = path.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and not Path(path).exists()


def call_loader(spec: str) -> object:
    """Return what the function of `loader.py:function` returns; see `is_loader_spec`.

    A file that defines one public function or class needs no `:function`.

    Raises:
        ConfigError: there is no such file or function, or the file has several.
        FeedError: the function failed.
    """
    if not _is_function_spec(spec):
        spec = f"{spec}:{_find_only_definition(spec)}"
    function = load_function(spec, what="a loader", form=_LOADER_FORM, error=FeedError)
    with wrap_user_errors(f"the loader {spec}", error=FeedError):
        result: object = function()
    if result is None:
        raise FeedError(f"the loader {spec} must return a feed, got None; return or yield arrays")
    return result


def _find_only_definition(path: str) -> str:
    """Return the name of the only public function or class that a Python file defines."""
    source = read_bytes(Path(path), what="a loader", error=FeedError, max_bytes=_MAX_SCRIPT_BYTES)
    with wrap_user_errors(path, error=FeedError):
        statements = ast.parse(source, path).body
    names = []
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name[0] != "_":
            names.append(statement.name)
    if len(names) != 1:
        raise ConfigError(
            f"a loader is given as {_LOADER_FORM}, got {path} alone; it has"
            f" {', '.join(names) or 'no function'}"
        )
    return names[0]


def preprocess_items(
    items: Iterable[Any], preprocess: Preprocess, dtype: str
) -> Iterator[Array | tuple[Array, int]]:
    """Preprocess images in memory; yield each with its label if it has one.

    Args:
        items: uint8 [H, W, 3] RGB, or [H, W] or [H, W, 1] grey; anything numpy converts to such an
            array, such as a Pillow image; or several as [N, H, W, C]. A pair of these and labels,
            or a mapping with a single image.
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
        images = array if array.ndim == 4 else array[None]
        labels = read_item_labels(label_value, len(images))
        for position, image in enumerate(images):
            pixels = preprocess_image(to_opencv_channels(image, preprocess, title), preprocess)
            values = pixels.astype(dtype, copy=False)
            yield values if labels is None else (values, labels[position])


def _split_labelled_image(item: Any) -> tuple[object, object]:
    """Return (image, label) of a pair, or of a mapping with a single image; None for no label."""
    if isinstance(item, tuple) and item:
        return item[0], item[1] if len(item) == 2 else None
    if isinstance(item, Mapping):
        images = [value for value in item.values() if np.ndim(value) >= 2]
        labels = [item[key] for key in LABEL_KEYS if key in item]
        if len(images) == 1:
            return images[0], labels[0] if labels else None
    return item, None


def to_opencv_channels(image: Array, preprocess: Preprocess, title: str) -> Array:
    """Convert [H, W, 3] RGB or grey to what OpenCV decodes, BGR or grey.

    Raises:
        FeedError: the image has another number of channels.
    """
    import cv2

    if image.ndim == 2:
        image = image[:, :, None]
    is_grey = image.shape[2] == 1
    if not is_grey and image.shape[2] != 3:
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
