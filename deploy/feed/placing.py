"""Where a point of a picture lands in the input that it becomes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deploy.feed.pixels import letterbox_size, short_side_size
from deploy.feed.preprocess import Preprocess, Size, sized


def placed(boxes: NDArray[np.float64], size: Size, how: Preprocess) -> NDArray[np.float64]:
    """Corners [n, 4] in pixels of a picture of `size` (h, w) -> in pixels of the model's input.

    `how` must be resolved.
    """
    (rows, columns), (top, left) = _scaled(size, sized(how, size))
    across, down = columns / size[1], rows / size[0]
    shift = np.array([left, top, left, top], np.float64)
    return np.asarray(boxes * np.array([across, down, across, down]) + shift)


def _scaled(size: Size, how: Preprocess) -> tuple[Size, tuple[int, int]]:
    """The picture's size after resizing, and where its corner comes to lie."""
    height, width = how.box
    if how.resize == "short-side":
        whole = short_side_size(size, how.short)
        return whole, (-((whole[0] - height) // 2), -((whole[1] - width) // 2))
    if how.resize == "letterbox":
        inner = letterbox_size(size, how.box)
        free = (height - inner[0], width - inner[1])
        return inner, (free[0] // 2, free[1] // 2) if how.anchor == "centre" else (0, 0)
    if how.resize == "fit-height":
        return (height, min(width, -(-height * size[1] // size[0]))), (0, 0)
    return how.box, (0, 0)
