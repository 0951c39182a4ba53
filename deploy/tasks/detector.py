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
offset        cx cy w h in pixels, without an anchor that the outputs do not contain: it moves the
              boxes of both models alike, so those of one row are compared
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
    InstanceMasks,
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
ANCHORS_PER_CELL = 3  # of an anchor map whose shape does not show it: YOLO v3 to v7
CODINGS = ("corners", "centre", "cell", "distribution")  # whose places in the picture are known


def to_table(value: Array | None, layout: Layout) -> Floats | None:
    """Return an output as [anchors, columns]; None if it does not have the layout."""
    if value is None or not value.size or not np.issubdtype(value.dtype, np.floating):
        return None
    if layout == ROWS and value.ndim == 2:
        return np.asarray(value, np.float64)
    if value.ndim < 2 or len(value) != 1:
        return None
    if layout == ROWS and value.ndim == 3:
        return np.asarray(value[0], np.float64)
    if layout == COLUMNS and value.ndim in (2, 3):
        return np.asarray(value.reshape(-1, value.shape[-1]).T, np.float64)
    if layout == MAP and value.ndim == 4:
        return np.asarray(value.reshape(value.shape[1], -1).T, np.float64)
    if layout == ANCHOR_MAP and value.ndim == 5:
        return np.asarray(value.reshape(-1, value.shape[4]), np.float64)
    if layout == ANCHOR_MAP and value.ndim == 4 and value.shape[1] % ANCHORS_PER_CELL == 0:
        maps = value.reshape(ANCHORS_PER_CELL, value.shape[1] // ANCHORS_PER_CELL, -1)
        return np.asarray(maps.transpose(0, 2, 1).reshape(-1, maps.shape[1]), np.float64)
    return None


STRIDES = (4, 8, 16, 32, 64, 128)  # pixels from cell to cell of a detector's levels


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
        total = 0
        for stride in self.strides:
            rows, columns = self.sides(size, stride)
            total += rows * columns
        return total

    def cells(self, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each cell [A, 2] as (column, row), and its stride in pixels [A]."""
        positions, strides = [], []
        for stride in self.strides:
            row_count, column_count = self.sides(size, stride)
            cell_count = row_count * column_count
            rows, columns = np.divmod(np.arange(cell_count), max(column_count, 1))
            positions.append(np.stack([columns, rows], axis=1).astype(np.float64))
            strides.append(np.full(cell_count, float(stride)))
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
    height, width = size
    return any(sides == (-(-height // stride), -(-width // stride)) for stride in STRIDES)


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
        grid: the cells, where the coding needs them.
    """

    scores: Columns
    boxes: Columns | None = None
    gate: Columns | None = None
    extra: Columns | None = None
    grid: AnchorGrid | None = None


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
    coding: str
    classes: int
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
        return self.coding in CODINGS

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

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample, of all levels; None for other shapes."""
        scores = self._read_scores(outputs)
        if scores is None:
            return None
        if not self.coding:
            return detections_by_anchor(scores)

        size = image_size(inputs)
        likely = np.flatnonzero(scores.max(axis=1) > LOWEST)  # few: the others are not decoded
        boxes = self._read_boxes(outputs, likely, len(scores), size)
        if boxes is None:
            return None
        corners = boxes if self.coding in ("corners", "distribution") else to_corners(boxes)
        points = masks = None
        if self.point_numbers:
            points = self._read_points(outputs, likely)
            if points is None:
                return None
        if self.coding == "offset":  # each row is a class of its own
            return Detections.of(corners, scores[likely].max(axis=1), likely, points)
        if self.has_angle:
            angles = self._read_extra(outputs, likely)
            points = None if angles is None else rotate_boxes(boxes, angles[:, 0])
        elif self.mask_maps:
            masks = self._read_masks(outputs, likely, size)
            if masks is None:
                return None
        return detections_by_score(corners, scores[likely], points, masks)

    def _read_scores(self, outputs: Outputs) -> Floats | None:
        """Return the probabilities [A, classes] of all levels; None for other shapes."""
        levels = []
        for level in self.levels:
            scores = level.scores.of(outputs)
            column_count = self.classes + (self.background is not None)
            if scores is None or scores.shape[1] != column_count:
                return None
            scores = activate(scores, self.activation)
            if self.background is not None:
                scores = np.delete(scores, self.background, axis=1)
            if level.gate is not None:
                gate = level.gate.of(outputs)
                if gate is None or len(gate) != len(scores):
                    return None
                scores = scores * activate(gate, self.gate_activation)
            levels.append(scores)
        return np.concatenate(levels)

    def _read_boxes(
        self,
        outputs: Outputs,
        likely: NDArray[np.int64],
        anchor_count: int,
        size: tuple[int, int] | None,
    ) -> Floats | None:
        """Return the boxes [n, 4] of some rows of all levels; None for other shapes."""
        boxes, start = [], 0
        for level in self.levels:
            rows = None if level.boxes is None else level.boxes.of(outputs)
            if rows is None or (level.grid is not None and size is None):
                return None
            if level.grid is not None and level.grid.count(size or (0, 0)) != len(rows):
                return None
            indices = likely[(likely >= start) & (likely < start + len(rows))] - start
            start += len(rows)
            if level.grid is None or size is None:
                boxes.append(rows[indices, :4])
            elif self.coding == "cell":
                boxes.append(decode_cells(rows[indices], indices, level.grid, size))
            else:
                boxes.append(decode_distances(rows[indices], indices, level.grid, size))
        return np.concatenate(boxes) if start == anchor_count else None

    def _read_extra(self, outputs: Outputs, likely: NDArray[np.int64]) -> Floats | None:
        """Return the extra columns of some rows; None without."""
        parts = []
        for level in self.levels:
            if level.extra is None:
                return None
            rows = level.extra.of(outputs)
            if rows is None:
                return None
            parts.append(rows)
        return np.concatenate(parts)[likely]

    def _read_points(self, outputs: Outputs, likely: NDArray[np.int64]) -> Floats | None:
        """Return the key points [n, K, 2 or 3] of some rows; None for another shape."""
        rows = self._read_extra(outputs, likely)
        if rows is None or rows.shape[1] % self.point_numbers:
            return None
        point_count = rows.shape[1] // self.point_numbers
        return rows.reshape(len(rows), point_count, self.point_numbers)

    def _read_masks(
        self, outputs: Outputs, likely: NDArray[np.int64], size: tuple[int, int] | None
    ) -> InstanceMasks | None:
        weights = self._read_extra(outputs, likely)
        if weights is None:
            return None
        return make_masks(weights, outputs.get(self.mask_maps), size)


def to_corners(boxes: Floats) -> Floats:
    """Convert boxes [n, 4] from centre and size (cx cy w h) to corners (x1 y1 x2 y2)."""
    half = boxes[:, 2:4] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def decode_cells(
    rows: Floats, indices: NDArray[np.int64], grid: AnchorGrid, size: tuple[int, int]
) -> Floats:
    """Return cx cy w h in pixels of some rows of YOLOX's boxes."""
    cells, strides = grid.cells(size)
    sides = np.exp(np.minimum(rows[:, 2:4], math.log(max(size)) + 1))
    positions = rows[:, :2] + cells[indices]
    return np.concatenate([positions, sides], axis=1) * strides[indices, None]


def decode_distances(
    rows: Floats, indices: NDArray[np.int64], grid: AnchorGrid, size: tuple[int, int]
) -> Floats:
    """Return corners in pixels of some rows of distributions [n, 4 (m + 1)]."""
    cells, strides = grid.cells(size)
    bins = rows.reshape(len(rows), 4, rows.shape[1] // 4)
    with np.errstate(invalid="ignore"):
        distance = activate(bins, "softmax") @ np.arange(bins.shape[2])  # left, top, right, bottom
    centre = cells[indices] + 0.5
    corners = np.concatenate([centre - distance[:, :2], centre + distance[:, 2:]], axis=1)
    return corners * strides[indices, None]


def slice_columns(
    columns: Sequence[Columns], weight: OutputSlice | None = None
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of columns; `weight`: scores of the rows, by which they are weighted."""
    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for part in columns:
        axis = -1 if part.layout == ROWS else 1
        whole = part.start == 0 and part.stop is None
        own = OutputSlice(output=part.output, at=weight)
        if not whole:
            own = OutputSlice(
                output=part.output, axis=axis, start=part.start, stop=part.stop or 0, at=weight
            )
        slices[part.output] = (*slices.get(part.output, ()), own)
    return slices
