"""An input at the size of a larger output, as any program makes it, whatever the model is."""

from __future__ import annotations

import cv2
import numpy as np

from deploy.tensors import Array

_PICTURE = 4  # dimensions
_FACTORS = [(k, 0) for k in range(2, 17)]  # times the size that super resolution makes a picture


def resized(value: Array, fed: Array) -> Array | None:
    """The input at the output's size; None where that is not 2 to 16 times its own."""
    floating = all(np.issubdtype(one.dtype, np.floating) for one in (value, fed))
    axes = _larger(value.shape, fed.shape) if floating else None
    return None if axes is None else _bicubic(fed, value.shape, last=axes == (1, 2))


def _larger(value: tuple[int, ...], fed: tuple[int, ...]) -> tuple[int, int] | None:
    """Which two dimensions of four are so many times as large, height and width alike."""
    if len(value) != len(fed) or len(value) != _PICTURE or 0 in fed:
        return None
    for axes in ((2, 3), (1, 2)):
        others = [value[k] == fed[k] for k in range(_PICTURE) if k not in axes]
        factors = {divmod(value[k], fed[k]) for k in axes}
        if all(others) and len(factors) == 1 and next(iter(factors)) in _FACTORS:
            return axes
    return None


def _bicubic(fed: Array, shape: tuple[int, ...], *, last: bool) -> Array:
    """Every channel by bicubic interpolation, as a program does that knows nothing of the model."""
    first = np.moveaxis(fed, 3, 1) if last else fed
    height, width = shape[1:3] if last else shape[2:]
    planes = first.reshape(-1, *first.shape[2:]).astype(np.float64)
    larger = [cv2.resize(one, (width, height), interpolation=cv2.INTER_CUBIC) for one in planes]
    found = np.stack(larger).reshape(*first.shape[:2], height, width)
    return np.moveaxis(found, 1, 3) if last else found
