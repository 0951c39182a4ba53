"""Turn Python objects into an iterable of items: arrays, loaders, datasets, readers, functions.

Objects are recognized by duck typing, so no framework is imported: loaders of torch and polygraphy
and datasets of TensorFlow and Hugging Face are iterable, datasets of torch have a length and
indices, ONNX Runtime's calibration readers have `get_next`, and a function is called and returns
one of these.
"""

import ast
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import as_array
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.files.reading import read_bytes
from deploy.files.usercode import load_function, wrap_user_errors
from deploy.tensors import Array

_FORM = "loader.py:function"
_LARGEST = 1 << 24  # bytes of a Python file


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
        return _until_none(source.get_next), False  # type: ignore[attr-defined]
    if callable(getattr(source, "get_batch", None)):
        raise FeedError(
            f"a feed must give arrays, got the TensorRT calibrator {type(source).__name__}, which"
            " gives addresses; give the arrays it reads, or its script (--calibrator-script)"
        )
    count = _length(source)
    if not hasattr(source, "__iter__") and count is not None and hasattr(source, "__getitem__"):
        return _iterate(map(source.__getitem__, range(count))), True  # a dataset of torch
    if isinstance(source, bytes) or not hasattr(source, "__iter__"):
        if callable(source):
            with wrap_user_errors("what gives the feed", error=FeedError):
                return iterate_items(source())
        raise FeedError(
            f"a feed must be a path, an array, a mapping of arrays or something to iterate over,"
            f" got {type(source).__name__}"
        )
    items = source if isinstance(source, list | tuple) else _iterate(source)
    return items, count is not None


def _length(source: object) -> int | None:
    """Return the length of an object; None if it has none, as a loader over a stream."""
    try:
        return len(source)  # type: ignore[arg-type]
    except Exception:  # the user's code
        return None


def call_loader(path: str) -> object | None:
    """Return what the function of `loader.py:function` returns; None for any other path.

    A file that defines one public function or class needs no `:function`.

    Raises:
        ConfigError: there is no such file or function, or the file has several.
        FeedError: the function failed.
    """
    if not is_loader_spec(path):
        return None
    path = path if is_function_spec(path) else f"{path}:{_only_definition(path)}"
    function = load_function(path, what="a loader", form=_FORM, error=FeedError)
    with wrap_user_errors(f"the loader {path}", error=FeedError):
        result: object = function()
    if result is None:
        raise FeedError(f"the loader {path} must return a feed, got None; return or yield arrays")
    return result


def is_loader_spec(path: str) -> bool:
    """Return whether a path is a Python file, with or without `:function`."""
    return is_function_spec(path) or (path.endswith(".py") and os.path.isfile(path))


def is_function_spec(path: str) -> bool:
    """Return whether a path is of the form `loader.py:function`."""
    file, _, name = path.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and not Path(path).exists()


def _only_definition(path: str) -> str:
    """Return the name of the only public function or class that a Python file defines."""
    source = read_bytes(Path(path), what="a loader", error=FeedError, max_bytes=_LARGEST)
    with wrap_user_errors(path, error=FeedError):
        body = ast.parse(source, path).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [one.name for one in body if isinstance(one, kinds) and one.name[0] != "_"]
    if len(names) != 1:
        raise ConfigError(
            f"a loader is given as {_FORM}, got {path} alone; it has"
            f" {', '.join(names) or 'no function'}"
        )
    return names[0]


def _until_none(get_next: Callable[[], object]) -> Iterator[object]:
    while True:
        with wrap_user_errors("get_next of the reader", error=FeedError):
            item = get_next()
        if item is None:
            return
        yield item


def _iterate(source: Iterable[Any]) -> Iterator[Any]:
    with wrap_user_errors("the feed", error=FeedError):
        items = iter(source)
    while True:
        with wrap_user_errors("the feed", error=FeedError):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def preprocess_items(items: Iterable[Any], how: Preprocess) -> Iterator[Array]:
    """Preprocess images in memory; the label of an (image, label) pair is ignored.

    Args:
        items: uint8 [H, W, 3] RGB, or [H, W] or [H, W, 1] grey; anything numpy converts to such an
            array, such as a Pillow image; or several as [N, H, W, C].
        how: resolved.

    Raises:
        FeedError: an item is no image.
    """
    for number, item in enumerate(items):
        where = f"item {number} of the feed"
        array = as_array(_image_of(item), where)
        if array.dtype != np.uint8 or array.ndim not in (2, 3, 4) or not array.size:
            raise FeedError(
                f"{where} must be an image to be preprocessed, uint8 [H, W, 3] or [H, W], got"
                f" {array.dtype} {list(array.shape)}; leave the preprocessing out if the arrays"
                " are ready to be fed"
            )
        for one in array if array.ndim == 4 else [array]:
            yield preprocess_image(to_opencv_channels(one, how, where), how)


def _image_of(item: Any) -> object:
    if isinstance(item, Mapping):
        images = [one for one in item.values() if np.ndim(one) >= 2]
        return images[0] if len(images) == 1 else item
    return item[0] if isinstance(item, tuple) and item else item


def to_opencv_channels(picture: Array, how: Preprocess, where: str) -> Array:
    """Convert [H, W, 3] RGB or grey to what OpenCV decodes, BGR or grey.

    Raises:
        FeedError: the image has another number of channels.
    """
    import cv2

    image = picture if picture.ndim == 3 else picture[:, :, None]
    channel_count = image.shape[2]
    if channel_count not in (1, 3):
        raise FeedError(
            f"{where} must have 1 or 3 channels, last, got {list(picture.shape)};"
            " move them with .transpose(1, 2, 0) if they are first"
        )
    if how.channels == 1:
        grey = image if channel_count == 1 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None]
        return np.ascontiguousarray(grey)
    bgr = np.repeat(image, 3, axis=2) if channel_count == 1 else image[:, :, ::-1]
    return np.ascontiguousarray(bgr)
