"""What Python hands over as a feed -> an iterable of items.

Everything is known by what it can do, so that no framework is imported: torch's and polygraphy's
loaders, TensorFlow's and Hugging Face's datasets iterate; ONNX Runtime's calibration readers have
`get_next`; a function is called and gives one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.feed.arrays import as_array
from deploy.feed.pixels import apply
from deploy.feed.preprocess import Preprocess
from deploy.files.usercode import load_function, users_errors
from deploy.tensors import Array

_FORM = "loader.py:function"


def items_of(source: object) -> Iterable[Any]:
    """The items of whatever a user calls a feed.

    Raises:
        FeedError: it is nothing that gives items.
    """
    if isinstance(source, type):  # of loaders: one is made
        with users_errors(f"making a {source.__name__}", error=FeedError):
            return items_of(source())
    if isinstance(source, Mapping):  # {input: all samples of it}
        return [source]
    if hasattr(source, "__array__"):
        return [as_array(source, "the feed")]
    if callable(getattr(source, "get_next", None)):
        return _until_none(source.get_next, "get_next of the reader")  # type: ignore[attr-defined]
    if callable(getattr(source, "get_batch", None)):
        raise FeedError(
            f"a feed must give arrays, got the TensorRT calibrator {type(source).__name__}, which"
            " gives addresses; give what it reads, or its script (--calibrator-script)"
        )
    if isinstance(source, bytes) or not hasattr(source, "__iter__"):
        if callable(source):
            with users_errors("what gives the feed", error=FeedError):
                return items_of(source())
        raise FeedError(
            f"a feed must be a path, an array, a mapping of arrays or something to iterate over,"
            f" got {type(source).__name__}"
        )
    return _iterated(source) if not isinstance(source, list | tuple) else source


def called(path: str) -> object | None:
    """What the function of `loader.py:function` gives; None where the path is none of these.

    Raises:
        ConfigError: there is no such file or function.
        FeedError: it failed.
    """
    if not names_loader(path):
        return None
    function = load_function(path, what="a loader", form=_FORM, error=FeedError)
    with users_errors(f"the loader {path}", error=FeedError):
        return _not_none(function(), path)


def names_loader(path: str) -> bool:
    """Whether a path is of the form `loader.py:function`."""
    file, _, name = path.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and not Path(path).exists()


def _not_none(given: object, path: str) -> object:
    if given is None:
        raise FeedError(f"the loader {path} must return a feed, got None; return or yield arrays")
    return given


def _until_none(get_next: Callable[[], object], what: str) -> Iterator[object]:
    while True:
        with users_errors(what, error=FeedError):
            item = get_next()
        if item is None:
            return
        yield item


def _iterated(source: Iterable[Any]) -> Iterator[Any]:
    with users_errors("the feed", error=FeedError):
        items = iter(source)
    while True:
        with users_errors("the feed", error=FeedError):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def pictured(items: Iterable[Any], how: Preprocess) -> Iterator[Array]:
    """Pictures in memory, as `how` makes inputs of them; (picture, label) leaves out the label.

    Args:
        items: uint8 [H, W, 3] in the order red, green, blue, or [H, W] or [H, W, 1] grey; or
            something numpy makes such an array of, as Pillow's images; several as [N, H, W, C].
        how: resolved.

    Raises:
        FeedError: an item that is no picture.
    """
    for number, item in enumerate(items):
        where = f"item {number} of the feed"
        array = as_array(_picture_in(item), where)
        if array.dtype != np.uint8 or array.ndim not in (2, 3, 4) or not array.size:
            raise FeedError(
                f"{where} must be a picture to be preprocessed, uint8 [H, W, 3] or [H, W], got"
                f" {array.dtype} {list(array.shape)}; leave the preprocessing away where arrays are"
                " ready to be fed"
            )
        for one in array if array.ndim == 4 else [array]:
            yield apply(channels(one, how, where), how)


def _picture_in(item: Any) -> object:
    if isinstance(item, Mapping):
        held = [one for one in item.values() if np.ndim(one) >= 2]
        return held[0] if len(held) == 1 else item
    return item[0] if isinstance(item, tuple) and item else item


def channels(picture: Array, how: Preprocess, where: str) -> Array:
    """[H, W, 3] RGB or grey -> what OpenCV would have decoded, BGR or grey.

    Raises:
        FeedError: a picture of other channels.
    """
    import cv2

    flat = picture if picture.ndim == 3 else picture[:, :, None]
    depth = flat.shape[2]
    if depth not in (1, 3):
        raise FeedError(
            f"{where} must have 1 or 3 channels, last, got {list(picture.shape)};"
            " turn it with .transpose(1, 2, 0) where they are first"
        )
    if how.channels == 1:
        grey = flat if depth == 1 else cv2.cvtColor(flat, cv2.COLOR_RGB2GRAY)[:, :, None]
        return np.ascontiguousarray(grey)
    wide = np.repeat(flat, 3, axis=2) if depth == 1 else flat[:, :, ::-1]
    return np.ascontiguousarray(wide)


__all__ = ["called", "channels", "items_of", "pictured"]
