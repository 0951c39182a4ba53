"""The cells that a detector's anchors stand in: where each anchor is, told from their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRIDES = (4, 8, 16, 32, 64, 128)
_MOST_ANCHORS = 9  # at one cell


@dataclass(frozen=True, slots=True)
class Grid:
    """Levels of cells over an image, `anchors` at each cell, level by level.

    Attributes:
        strides: pixels from cell to cell, level by level.
        anchors: anchors a cell; each stands for all cells of its level before the next one does.
        up: whether a level's last, incomplete cells count.
    """

    strides: tuple[int, ...]
    anchors: int
    up: bool

    def sides(self, size: tuple[int, int], stride: int) -> tuple[int, int]:
        """Cells of a level: (rows, columns)."""
        height, width = (-(-s // stride) if self.up else s // stride for s in size)
        return height, width

    def count(self, size: tuple[int, int]) -> int:
        """Anchors in an image of `size` pixels (height, width)."""
        sides = (self.sides(size, stride) for stride in self.strides)
        return self.anchors * sum(height * width for height, width in sides)

    def cells(self, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Each anchor's cell [A, 2] as (column, row), and its stride in pixels [A]."""
        places, strides = [], []
        for stride in self.strides:
            height, width = self.sides(size, stride)
            rows, columns = np.divmod(np.arange(height * width), max(width, 1))
            one = np.stack([columns, rows], axis=1).astype(np.float64)
            places.append(np.tile(one, (self.anchors, 1)))
            strides.append(np.full(len(one) * self.anchors, float(stride)))
        return np.concatenate(places), np.concatenate(strides)


def grids(anchors: int, size: tuple[int, int], levels: int | None = None) -> Iterator[Grid]:
    """Grids of neighbouring strides with exactly so many anchors, fewest a cell first.

    Args:
        anchors: how many there are in all.
        size: (height, width) of the image in pixels.
        levels: how many strides; None for two or more.
    """
    lengths = range(2, len(STRIDES) + 1) if levels is None else (levels,)
    runs = [
        STRIDES[start : start + length]
        for length in lengths
        for start in range(len(STRIDES) - length + 1)
    ]
    found: dict[tuple[tuple[int, ...], int], Grid] = {}
    for up in (False, True):
        for strides in runs:
            cells = Grid(strides, 1, up).count(size)
            if cells and anchors % cells == 0 and anchors // cells <= _MOST_ANCHORS:
                found.setdefault((strides, anchors // cells), Grid(strides, anchors // cells, up))
    yield from sorted(found.values(), key=lambda grid: grid.anchors)
