"""Decoder of detectors with a row of numbers per anchor, cell or query.

Scores and boxes may share an output, or have one each, or one each per level.

============  ===================================================================================
coding        four numbers of a box, or more
============  ===================================================================================
corners       x1 y1 x2 y2
centre        cx cy w h
cell          the same relative to the cell, (x + column) stride, exp(w) stride: YOLOX (Ge et al.
              2021, `demo_postprocess`)
distribution  4 (m + 1) logits of the distances from the cell to the sides, in strides (Li et al.
              2020, Generalized Focal Loss): PicoDet, NanoDet, YOLO v6 and v8 before concatenation
(none)        not decoded: a detection is matched by its row and class
============  ===================================================================================

Columns after these may be key points (x, y or x, y, visibility), weights of prototype masks in
another output (YOLACT, Bolya et al. 2019), or an angle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.detections import (
    LOWEST,
    Detections,
    detections_by_anchor,
    detections_by_score,
    make_masks,
    rotate_boxes,
)
from deploy.tasks.rows import Floats, Outputs, activate, image_size
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

Layout = str
ROWS: Layout = "rows"  # [1, A, R] or [A, R]
COLUMNS: Layout = "columns"  # [1, R, A]; [1, A] of one column
MAP: Layout = "map"  # [1, R, H, W]
ANCHOR_MAP: Layout = "anchor map"  # [1, 3 R, H, W] or [1, k, H, W, R]
_LAYOUT_DIMENSIONS = {ROWS: (2, 3), COLUMNS: (2, 3), MAP: (4,), ANCHOR_MAP: (4, 5)}
ANCHORS_PER_CELL = 3  # of an anchor map whose shape does not show it: YOLO v3 to v7
CELL_CODINGS = ("cell", "distribution")  # relative to the cells of a grid
MAX_LOG_SIDE = 10.0  # logarithm of a side in cells; larger ones would overflow
STRIDES = (4, 8, 16, 32, 64, 128)  # pixels from cell to cell of a detector's levels


def to_table(value: Array | None, layout: Layout) -> Floats | None:
    """Return an output as [anchors, columns]; None if it does not have the layout."""
    if value is None or not value.size or value.ndim < 2 or value.dtype.kind != "f":
        return None
    shape = value.shape
    if layout == ROWS and len(shape) == 2:
        return np.asarray(value, np.float64)
    if shape[0] != 1 or len(shape) not in _LAYOUT_DIMENSIONS[layout]:
        return None
    if layout == ANCHOR_MAP and len(shape) == 4:
        if shape[1] % ANCHORS_PER_CELL:
            return None
        value = value.reshape(1, ANCHORS_PER_CELL, -1, *shape[2:]).transpose(0, 1, 3, 4, 2)
    if layout == MAP:
        value = value.reshape(1, shape[1], -1)
    table = value.reshape(-1, value.shape[-1])
    return np.asarray(table.T if layout in (COLUMNS, MAP) else table, np.float64)


@dataclass(frozen=True, slots=True)
class AnchorGrid:
    """Levels of cells over a picture, one anchor at each cell, level by level.

    Attributes:
        strides: pixels from cell to cell, per level.
        up: whether a level's last, incomplete cells count.
    """

    strides: tuple[int, ...]
    up: bool = False

    def sides(self, size: tuple[int, int], stride: int) -> tuple[int, int]:
        """Return (rows, columns) of a level."""
        height, width = size
        if self.up:
            return -(-height // stride), -(-width // stride)
        return height // stride, width // stride

    def count(self, size: tuple[int, int]) -> int:
        """Return the number of cells of a picture of `size` pixels (height, width)."""
        return sum(math.prod(self.sides(size, stride)) for stride in self.strides)

    def cells(self, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each cell [A, 2] as (column, row), and its stride in pixels [A]."""
        positions, strides = [], []
        for stride in self.strides:
            rows, columns = np.indices(self.sides(size, stride)).reshape(2, -1)
            positions.append(np.stack([columns, rows], axis=1).astype(np.float64))
            strides.append(np.full(len(rows), float(stride)))
        return np.concatenate(positions), np.concatenate(strides)


def find_grid(count: int, size: tuple[int, int] | None) -> AnchorGrid | None:
    """Return the grid of adjacent strides with exactly so many cells, of most levels; or None.

    `size`: (height, width) of the picture in pixels; None if it is unknown.
    """
    if size is None:
        return None
    for level_count in range(len(STRIDES), 0, -1):
        for start in range(len(STRIDES) - level_count + 1):
            for up in (False, True):
                grid = AnchorGrid(STRIDES[start : start + level_count], up)
                if grid.count(size) == count:
                    return grid
    return None


def fits_stride(sides: tuple[int, ...], size: tuple[int, int] | None) -> bool:
    """Whether a map has the sides of the picture over a stride."""
    if size is None:
        return False
    return any(sides == AnchorGrid((), up=True).sides(size, stride) for stride in STRIDES)


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of an output's table.

    Attributes:
        output: name of the output.
        layout: how the output becomes a table.
        start, stop: the columns, half open; stop None for all from start on.
    """

    output: str
    layout: Layout
    start: int = 0
    stop: int | None = None

    def of(self, outputs: Outputs) -> Floats | None:
        """Return the columns [A, n] of one sample; None for an output of another shape."""
        table = to_table(outputs.get(self.output), self.layout)
        if table is None or table.shape[1] < (self.stop or self.start):
            return None
        return table[:, self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLevel:
    """Columns of one level, or of all levels together.

    Attributes:
        scores: scores of the classes.
        boxes: None if boxes are not decoded.
        gate: one column that multiplies the scores, such as an objectness; None without.
        extra: key points, mask weights or an angle; None without.
        grid: the cells of the rows; None if they are not one cell each.
    """

    scores: Columns
    boxes: Columns | None = None
    gate: Columns | None = None
    extra: Columns | None = None
    grid: AnchorGrid | None = None


def read_levels(columns: Sequence[Columns | None], outputs: Outputs) -> Floats | None:
    """Return columns of all levels [A, n] of one sample; None for other shapes, or without."""
    tables: list[Floats] = []
    for level_columns in columns:
        table = None if level_columns is None else level_columns.of(outputs)
        if table is None or (tables and table.shape[1] != tables[0].shape[1]):
            return None
        tables.append(table)
    return np.concatenate(tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecoder:
    """Decoder of a detector with a row per anchor, cell or query.

    Attributes:
        levels: columns of each level.
        coding: how the boxes are coded; "" if they are not decoded.
        classes: number of classes, without the background.
        activation: missing activation of the scores: "", "sigmoid" or "softmax".
        gate_activation: the same of the gates.
        background: class of the background, which is left out; None without.
        point_numbers: numbers per key point of the extra columns, 2 or 3; 0 without.
        mask_maps: output of the masks' prototypes; "" without.
        has_angle: whether the extra column is an angle.
        parts: slices of the outputs; see `EvaluationTask`.
    """

    levels: tuple[RowLevel, ...]
    classes: int
    coding: str = ""
    activation: str = ""
    gate_activation: str = ""
    background: int | None = None
    point_numbers: int = 0
    mask_maps: str = ""
    has_angle: bool = False
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether boxes are decoded to places in the picture."""
        return bool(self.coding)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        names = dict.fromkeys(level.scores.output for level in self.levels)
        objectness = "objectness and " if self.levels[0].gate else ""
        scores = self.activation or "scores"
        boxes = f"boxes by {self.coding}" if self.coding else "boxes matched by anchor"
        text = f"{', '.join(names)}: {objectness}{scores} of {self.classes} classes, {boxes}"
        if self.has_angle:
            return f"{text}, an angle"
        if self.mask_maps:
            return f"{text}, a mask"
        return f"{text}, key points" if self.point_numbers else text

    def scores(self, outputs: Outputs) -> Floats | None:
        """Return the probabilities [A, classes] of all levels; None for other shapes."""
        scores = read_levels([level.scores for level in self.levels], outputs)
        column_count = self.classes + (self.background is not None)
        if scores is None or scores.shape[1] != column_count:
            return None
        scores = activate(scores, self.activation)
        if self.background is not None:
            scores = np.delete(scores, self.background, axis=1)
        if self.levels[0].gate is None:
            return scores
        gates = read_levels([level.gate for level in self.levels], outputs)
        if gates is None or len(gates) != len(scores):
            return None
        return scores * activate(gates, self.gate_activation)

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample, of all levels; None for other shapes."""
        scores = self.scores(outputs)
        if scores is None:
            return None
        if not self.coding:
            return detections_by_anchor(scores)

        boxes = read_levels([level.boxes for level in self.levels], outputs)
        size = image_size(inputs)
        likely = np.flatnonzero(scores.max(axis=1) > LOWEST)  # few: the others are not decoded
        cells = self._cells(size, likely, len(scores))
        if boxes is None or len(boxes) != len(scores) or cells is None:
            return None
        boxes = boxes[likely]
        corners = decode_boxes(boxes, self.coding, *cells)
        points = masks = None
        if self.point_numbers or self.mask_maps or self.has_angle:
            extra = read_levels([level.extra for level in self.levels], outputs)
            if extra is None:
                return None
            extra = extra[likely]
            if self.mask_maps:
                masks = make_masks(extra, outputs.get(self.mask_maps), size)
            elif self.has_angle:
                points = rotate_boxes(boxes, extra[:, 0])
            elif extra.shape[1] % self.point_numbers == 0:
                point_count = extra.shape[1] // self.point_numbers
                points = extra.reshape(len(extra), point_count, self.point_numbers)
            if points is None and masks is None:
                return None
        return detections_by_score(corners, scores[likely], points, masks)

    def _cells(
        self, size: tuple[int, int] | None, rows: NDArray[np.int64], row_count: int
    ) -> tuple[Floats, Floats] | None:
        """Return the cells [n, 2] of some rows and their strides [n]; None for another picture.

        Boxes that are not relative to cells have cells of no size.
        """
        if self.coding not in CELL_CODINGS:
            return np.zeros((len(rows), 2)), np.zeros(len(rows))
        grids = [level.grid for level in self.levels if level.grid is not None]
        if size is None or sum(grid.count(size) for grid in grids) != row_count:
            return None
        cells, strides = zip(*(grid.cells(size) for grid in grids), strict=True)
        return np.concatenate(cells)[rows], np.concatenate(strides)[rows]


def decode_boxes(rows: Floats, coding: str, cells: Floats, strides: Floats) -> Floats:
    """Return boxes as corners (x1 y1 x2 y2) [n, 4].

    Args:
        rows: coded boxes [n, 4 or more].
        coding: as in the table above.
        cells: (column, row) of the cell of each row [n, 2].
        strides: its side in pixels [n].
    """
    if coding == "corners":
        return rows
    if coding == "distribution":
        bins = rows.reshape(len(rows), 4, rows.shape[1] // 4)
        with np.errstate(invalid="ignore"):
            # left, top, right, bottom
            distances = activate(bins, "softmax") @ np.arange(bins.shape[2])
        centres = cells + 0.5
        corners = [centres - distances[:, :2], centres + distances[:, 2:]]
        return np.asarray(np.concatenate(corners, axis=1) * strides[:, None])

    centres, sides = rows[:, :2], rows[:, 2:4]
    if coding == "cell":
        centres = (centres + cells) * strides[:, None]
        sides = np.exp(np.minimum(sides, MAX_LOG_SIDE)) * strides[:, None]
    return np.concatenate([centres - sides / 2, centres + sides / 2], axis=1)
