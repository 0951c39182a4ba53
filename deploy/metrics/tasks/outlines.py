"""What outlines a found object beside the four sides of its box: a mask, or an angle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.tensors import Array

_STRIDES = (2, 4, 8)  # pixels of a mask's cell
_WIDE, _HIGH = np.array([-1, 1, 1, -1]), np.array([-1, -1, 1, 1])  # corners, in half sides

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Masks of an image's boxes: above 0 in sums of maps that all boxes share.

    Attributes:
        weights: [n, m] of the maps, a row a box.
        maps: [m, h, w].
        stride: length of their cells in the boxes' unit.
    """

    weights: Floats
    maps: NDArray[np.floating]
    stride: float

    def at(self, keep: NDArray[np.bool_] | NDArray[np.int64] | list[int]) -> Masks:
        """Of some of the boxes."""
        return Masks(self.weights[keep], self.maps, self.stride)

    def first(self, box: Floats) -> NDArray[np.bool_]:
        """The first box's mask [h, w], which ends where the box does."""
        rows, columns = ((np.arange(side) + 0.5) * self.stride for side in self.maps.shape[1:])
        wide = (columns > box[0]) & (columns < box[2])
        high = (rows > box[1]) & (rows < box[3])
        return np.asarray((np.tensordot(self.weights[0], self.maps, 1) > 0) & wide & high[:, None])


def masks_of(weights: Array, maps: Array | None, size: tuple[int, int] | None) -> Masks | None:
    """Masks of boxes in pixels; None where the maps are not of the picture's cells."""
    if maps is None or size is None or maps.ndim != 4 or maps.shape[:2] != (1, weights.shape[1]):
        return None
    stride = next((s for s in _STRIDES if maps.shape[2:] == (size[0] // s, size[1] // s)), None)
    floating = np.issubdtype(maps.dtype, np.floating)
    if stride is None or not floating:
        return None
    return Masks(weights.astype(np.float64), maps[0], float(stride))


def are_angles(rest: Floats) -> bool:
    """Whether numbers are angles of half a turn."""
    return bool(0 < np.ptp(rest) <= np.pi + 1e-3 and np.abs(rest).max() <= np.pi + 1e-3)


def turned(boxes: Floats, angles: Floats) -> Floats:
    """Corners [n, 4, 2] of boxes cx cy w h that are turned about their centres."""
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    wide, high = (boxes[:, side, None] / 2 * ends for side, ends in ((2, _WIDE), (3, _HIGH)))
    out = np.stack([wide * cosine - high * sine, wide * sine + high * cosine], axis=2)
    return np.asarray(boxes[:, None, :2] + out)
