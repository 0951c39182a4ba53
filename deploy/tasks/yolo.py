"""YOLO's outputs: boxes and scores in one tensor, or one map per level.

`DenseDecoder`: one tensor with a column (or row) per anchor, YOLO v5 to v11 and YOLOX.

====================  ==========================================================================
[N, 4+C, A]           boxes cx cy w h (or corners) and a probability per class: v8, v9, v11
[N, A, 5+C]           boxes, objectness, classes: v5, v6, v7
[N, A, 5+C]           the same with boxes relative to their cells, (x + column) stride,
                      exp(w) stride: YOLOX (Ge et al. 2021, its demo's `demo_postprocess`)
====================  ==========================================================================

Such a tensor must have as many anchors as the input picture has cells, and boxes near their
anchors. Rows after the classes are key points if they lie there as well, x and y or x, y and
visibility. They are mask weights if another output has as many prototype maps
[N, m, H / s, W / s], of which each mask is a weighted sum (YOLACT, Bolya et al. 2019). A single row
in the range of an angle rotates the box about its centre; other rows are ignored.

`LevelMapDecoder`: heads of YOLO v3 to v7 before decoding, one map per level with several anchors
per cell: [N, 3 (5 + C), H, W] or [N, k, H, W, 5 + C], boxes, objectness and classes, before or
after a Sigmoid. The model does not contain the sizes of the anchors, so boxes cannot be decoded: a
detection is matched by its anchor and class.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.detections import (
    LOWEST,
    Detections,
    are_angles,
    detections_by_anchor,
    detections_by_score,
    make_masks,
    rotate_boxes,
)
from deploy.tasks.evaluation_task import FirstSamples
from deploy.tasks.rows import Floats, Outputs, correlate, image_size, to_shares
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

STRIDES = (4, 8, 16, 32, 64, 128)
_MAX_ANCHORS_PER_CELL = 9  # per cell


@dataclass(frozen=True, slots=True)
class AnchorGrid:
    """Levels of cells over an image, `anchors` at each cell, level by level."""

    strides: tuple[int, ...]  # pixels from cell to cell, per level
    anchors: int  # anchors per cell; the order is anchor, then cell, within a level
    up: bool  # whether a level's last, incomplete cells count

    def sides(self, size: tuple[int, int], stride: int) -> tuple[int, int]:
        """Return (rows, columns) of a level."""
        height, width = (-(-s // stride) if self.up else s // stride for s in size)
        return height, width

    def count(self, size: tuple[int, int]) -> int:
        """Return the number of anchors in an image of `size` pixels (height, width)."""
        sides = (self.sides(size, stride) for stride in self.strides)
        return self.anchors * sum(height * width for height, width in sides)

    def cells(self, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each anchor's cell [A, 2] as (column, row), and its stride in pixels [A]."""
        positions, strides = [], []
        for stride in self.strides:
            height, width = self.sides(size, stride)
            rows, columns = np.divmod(np.arange(height * width), max(width, 1))
            level_cells = np.stack([columns, rows], axis=1).astype(np.float64)
            positions.append(np.tile(level_cells, (self.anchors, 1)))
            strides.append(np.full(len(level_cells) * self.anchors, float(stride)))
        return np.concatenate(positions), np.concatenate(strides)


def find_grids(
    anchors: int, size: tuple[int, int], levels: int | None = None
) -> Iterator[AnchorGrid]:
    """Yield grids of adjacent strides with exactly this many anchors, fewest per cell first.

    `size`: (height, width) of the image in pixels. `levels`: number of strides; None for two or
    more.
    """
    lengths = range(2, len(STRIDES) + 1) if levels is None else (levels,)
    stride_runs = []
    for length in lengths:
        for start in range(len(STRIDES) - length + 1):
            stride_runs.append(STRIDES[start : start + length])

    grid_by_shape: dict[tuple[tuple[int, ...], int], AnchorGrid] = {}
    for up in (False, True):
        for strides in stride_runs:
            cells = AnchorGrid(strides, 1, up).count(size)
            if not cells or anchors % cells:
                continue
            anchors_per_cell = anchors // cells
            if anchors_per_cell <= _MAX_ANCHORS_PER_CELL:
                grid = AnchorGrid(strides, anchors_per_cell, up)
                grid_by_shape.setdefault((strides, anchors_per_cell), grid)
    yield from sorted(grid_by_shape.values(), key=lambda grid: grid.anchors)


_MIN_AGREEMENT = 0.99  # share of boxes that fit a coding, at least
_MIN_ANCHOR_CORRELATION = 0.8  # correlation of a box's place with its anchor's, at least
_MAX_IDLE_SCORE = (
    0.1  # mean best class of all anchors, at most, unless an objectness suppresses boxes
)
_MAX_QUIET_SCORE = 0.02  # mean scores, at most, that do not show an objectness


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDecoder:
    """Decoder of one tensor of all anchors.

    Attributes:
        output: name of the output.
        axis: dimension of its rows, 1 or -1.
        coding: "centre" cx cy w h, "corners" x1 y1 x2 y2, or "cell" (YOLOX).
        objectness: whether row 4 multiplies all classes.
        scores: number of rows of scores from row 4 on, objectness included.
        rows: number of rows.
        grid: the anchors.
        point: rows per key point, 2 or 3, which come last; 0 without.
        maps: output of the masks' prototypes; "" without.
        rotated: whether the last row is an angle.
    """

    output: str
    axis: int
    coding: str
    objectness: bool
    scores: int
    rows: int
    grid: AnchorGrid
    point: int = 0
    maps: str = ""
    rotated: bool = False
    placed: ClassVar[bool] = True

    @property
    def classes(self) -> int:
        """Number of classes; a sole objectness is one."""
        return max(self.scores - self.objectness, 1)

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        box_texts = {
            "centre": "boxes by centre",
            "corners": "boxes by corners",
            "cell": "raw boxes",
        }
        objectness = ", objectness" if self.objectness else ""
        extra = ""
        if self.rotated:
            extra = ", an angle"
        elif self.point and self._extra_rows >= self.point:
            extra = f", {self._extra_rows // self.point} key points"
        elif self.maps:
            extra = ", a mask"
        scores = f"{objectness} and {self.classes} classes"
        return f"{self.output}: {box_texts[self.coding]}{scores}{extra} an anchor"

    @property
    def _extra_rows(self) -> int:
        """Number of rows after boxes and scores."""
        return self.rows - 4 - self.scores

    @property
    def parts(self) -> Mapping[str, tuple[OutputSlice, ...]]:
        """Boxes, scores, and the rows after them."""
        slices = []
        for start, stop in itertools.pairwise((0, 4, 4 + self.scores, self.rows)):
            if stop > start:
                part = OutputSlice(output=self.output, axis=self.axis, start=start, stop=stop)
                slices.append(part)
        return {self.output: tuple(slices)}

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return all boxes of one sample."""
        rows = _to_rows(outputs.get(self.output), self.axis)
        if rows is None or len(rows) != self.rows:
            return None
        scores = rows[4 : 4 + self.scores]
        if self.objectness and self.scores > 1:
            scores = scores[1:] * scores[:1]
        likely = np.flatnonzero(scores.max(axis=0) > LOWEST)  # few: the others are not decoded
        scores = scores[:, likely].T.astype(np.float64)
        boxes = rows[:4, likely].T.astype(np.float64)
        extra_rows = rows[4 + self.scores :, likely]

        size = image_size(inputs)
        if self.coding == "cell":
            if size is None or self.grid.count(size) != rows.shape[1]:
                return None
            cells, strides = self.grid.cells(size)
            boxes = _decode_cells(boxes, cells[likely], strides[likely])
        corners = boxes if self.coding == "corners" else to_corners(boxes)

        if self.rotated:
            rotated_boxes = rotate_boxes(boxes, extra_rows[0].astype(np.float64))
            return detections_by_score(corners, scores, rotated_boxes)
        if self.maps:
            masks = make_masks(extra_rows.T, outputs.get(self.maps), size)
            return None if masks is None else detections_by_score(corners, scores, masks=masks)
        if not self.point:
            return detections_by_score(corners, scores)
        points = extra_rows.T.reshape(len(likely), len(extra_rows) // self.point, self.point)
        return detections_by_score(corners, scores, points.astype(np.float64))


def find_yolo(samples: FirstSamples) -> DenseDecoder | None:
    """Recognise such a tensor if exactly one output is one."""
    decoders = [_find_dense(name, samples) for name in samples.names]
    candidates = [decoder for decoder in decoders if decoder is not None]
    if len(candidates) != 1:
        return None
    (decoder,) = candidates
    mask_rows = decoder.rows - 4 - decoder.scores
    if decoder.point or not mask_rows:
        return decoder
    maps = [name for name in samples.names if _are_maps(name, mask_rows, samples)]
    return replace(decoder, maps=maps[0]) if len(maps) == 1 else decoder


def _are_maps(name: str, count: int, samples: FirstSamples) -> bool:
    """Whether an output holds `count` prototype maps of masks, in every sample."""
    rows = np.zeros((1, count))
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=True):
        if value.shape[1:2] != (count,) or make_masks(rows, value, image_size(inputs)) is None:
            return False
    return True


def to_corners(boxes: Floats) -> Floats:
    """Convert boxes [n, 4] from centre and size (cx cy w h) to corners (x1 y1 x2 y2)."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _find_dense(name: str, samples: FirstSamples) -> DenseDecoder | None:
    """Recognise an output whose rows are of either dimension."""
    sizes = [size for inputs in samples.inputs if (size := image_size(inputs)) is not None]
    values = samples.arrays(name)
    if len(sizes) != len(values):
        return None
    for axis in (1, -1):
        oriented = [_to_rows(value, axis) for value in values]
        rows = [
            sample_rows.astype(np.float64) for sample_rows in oriented if sample_rows is not None
        ]
        if len(rows) != len(values) or len({len(sample_rows) for sample_rows in rows}) != 1:
            continue
        decoder = _read_rows(name, axis, rows, sizes)
        if decoder is not None:
            return decoder
    return None


def _to_rows(value: Array | None, axis: int) -> Array | None:
    """Return [1, R, A] or [1, A, R] as [R, A]; None for other shapes or too few rows for boxes."""
    if value is None or value.ndim != 3 or len(value) != 1:
        return None
    if not np.issubdtype(value.dtype, np.floating):
        return None
    rows = value[0] if axis == 1 else value[0].T
    return rows if len(rows) >= 5 and rows.shape[1] >= 2 * len(rows) else None


def _read_rows(
    name: str, axis: int, rows: list[Floats], sizes: list[tuple[int, int]]
) -> DenseDecoder | None:
    """Recognise boxes, scores and extra rows, [R, A] of each sample."""
    low = np.min([sample_rows.min(axis=1) for sample_rows in rows], axis=0)
    high = np.max([sample_rows.max(axis=1) for sample_rows in rows], axis=0)
    are_shares = (low >= -1e-3) & (high <= 1 + 1e-3)
    scores = int(np.cumprod(are_shares[4:]).sum())  # rows of probabilities from row 4 on
    if not scores:
        return None
    objectness = _has_objectness(rows, scores, axis)
    for grid in find_grids(rows[0].shape[1], sizes[0]):
        anchor_counts = [grid.count(size) for size in sizes]
        if anchor_counts != [sample_rows.shape[1] for sample_rows in rows]:
            continue
        coding = _coding(rows, sizes, grid, objectness)
        if coding is not None:
            extra_rows = np.concatenate([sample_rows[4 + scores :] for sample_rows in rows], axis=1)
            return DenseDecoder(
                output=name,
                axis=axis,
                coding=coding,
                objectness=objectness,
                scores=scores,
                rows=len(rows[0]),
                grid=grid,
                point=0 if coding == "cell" else _point_length(extra_rows, sizes, grid),
                rotated=coding == "centre" and len(extra_rows) == 1 and are_angles(extra_rows),
            )
    return None


def _point_length(rows: Floats, sizes: list[tuple[int, int]], grid: AnchorGrid) -> int:
    """Return the rows per key point if all points lie at their anchors; else 0."""
    for length in (3, 2):
        if not len(rows) or len(rows) % length:
            continue
        points = rows.reshape(-1, length, rows.shape[1])
        visibility = points[:, 2:]
        are_probabilities = bool(((visibility >= -1e-3) & (visibility <= 1 + 1e-3)).all())
        if are_probabilities and all(_lie_at_anchors(point[:2], sizes, grid) for point in points):
            return length
    return 0


def _lie_at_anchors(positions: Floats, sizes: Sequence[tuple[int, int]], grid: AnchorGrid) -> bool:
    """Whether x and y [2, A] of all samples correlate with their anchors'."""
    sample_centres = []
    for size in sizes:
        cells, strides = grid.cells(size)
        sample_centres.append((cells + 0.5) * strides[:, None])
    centres = np.concatenate(sample_centres).T
    x, y = positions
    correlations = correlate(x, centres[0]), correlate(y, centres[1])
    return min(correlations) > _MIN_ANCHOR_CORRELATION


def _has_objectness(rows: list[Floats], scores: int, axis: int) -> bool:
    """Whether row 4 is objectness: then class scores are arbitrary where there is no object.

    If the data do not show it, tensors with the anchors first have it, as v5 and v7 do.
    """
    if scores < 2:
        return False
    best_class = float(
        np.mean([sample_rows[5 : 4 + scores].max(axis=0).mean() for sample_rows in rows])
    )
    objectness = float(np.mean([sample_rows[4].mean() for sample_rows in rows]))
    if best_class > _MAX_IDLE_SCORE and objectness < best_class:
        return True
    return axis == -1 and max(best_class, objectness) > _MAX_QUIET_SCORE


def find_box_coding(
    boxes: Floats, sizes: Sequence[tuple[int, int]], grid: AnchorGrid
) -> str | None:
    """Return "corners" or "centre" for boxes [4, A] of all samples; "" if not at their anchors.

    None if they are at their anchors, but neither.
    """
    if not _lie_at_anchors(boxes[:2], sizes, grid):
        return ""
    are_ordered = _holds_mostly(np.all(boxes[2:] > boxes[:2], axis=0))
    if are_ordered and _lie_at_anchors(boxes[2:], sizes, grid):
        return "corners"
    return "centre" if _holds_mostly(np.all(boxes[2:] >= 0, axis=0)) else None


def _coding(
    rows: list[Floats], sizes: list[tuple[int, int]], grid: AnchorGrid, objectness: bool
) -> str | None:
    """Return the coding of rows 0 to 3; None if they do not lie at their anchors."""
    boxes = np.concatenate([sample_rows[:4] for sample_rows in rows], axis=1)
    coding = find_box_coding(boxes, sizes, grid)
    if coding != "":
        return coding
    if (
        not objectness
        or grid.anchors != 1
        or np.mean([sample_rows[4].mean() for sample_rows in rows]) > _MAX_IDLE_SCORE
    ):
        return None
    # logarithms of sizes have both signs, relative and pixel sizes one; letters may all be taller
    # than their cells, so that one dimension suffices
    if boxes[2:].min() >= 0:
        return None
    is_small = np.abs(boxes[:2]).max(axis=0) < 16
    return "cell" if _holds_mostly(is_small & (boxes[2:].max(axis=0) < 8)) else None


def _holds_mostly(condition: Array) -> bool:
    return bool(np.mean(condition) >= _MIN_AGREEMENT)


def _decode_cells(boxes: Floats, cells: Floats, stride: Floats) -> Floats:
    """Convert YOLOX's raw boxes to cx cy w h in pixels."""
    sizes = np.exp(np.minimum(boxes[:, 2:], 20))
    return np.concatenate([boxes[:, :2] + cells, sizes], axis=1) * stride[:, None]


_ANCHORS_PER_CELL = 3  # per cell, if the shape does not show it
_MIN_LEVELS = 2  # at least
_MAX_EMPTY_OBJECTNESS = 0.05  # mean objectness, at most


@dataclass(frozen=True, slots=True)
class LevelMapDecoder:
    """Decoder of one map per level.

    Attributes:
        levels: names of the outputs.
        classes: number of classes.
        raw: whether they hold logits, before the Sigmoid.
        parts: slices of each output.
    """

    levels: tuple[str, ...]
    classes: int
    raw: bool
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)
    placed: ClassVar[bool] = False

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        names = ", ".join(self.levels)
        return f"{names}: objectness and {self.classes} classes of anchors, matched by anchor"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the anchors of one sample with a detection."""
        level_scores = []
        for name in self.levels:
            rows = _to_anchors(outputs[name])
            if rows is None or rows.shape[1] != 5 + self.classes:
                return None
            level_scores.append(rows[:, 4:])
        scores = to_shares(np.concatenate(level_scores), raw=self.raw)
        return detections_by_anchor(scores[:, 1:] * scores[:, :1])


def find_yolo_maps(samples: FirstSamples) -> LevelMapDecoder | None:
    """Recognise levels if every output is one."""
    if len(samples.names) < _MIN_LEVELS or len(samples.names) != len(samples.every):
        return None
    levels = []
    for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
        size = image_size(inputs)
        for name in samples.names:
            rows = _to_anchors(outputs[name])
            if size is None or outputs[name].shape[2:4] not in _map_sizes(size) or rows is None:
                return None
            levels.append(rows)
    if len({rows.shape[1] for rows in levels}) != 1:
        return None
    for raw in (True, False):
        if all(_detects_little(rows, raw=raw) for rows in levels):
            return LevelMapDecoder(tuple(samples.names), levels[0].shape[1] - 5, raw)
    return None


def _map_sizes(size: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Return the sizes of a level's cells, by stride."""
    height, width = size
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES[1:]]


def _to_anchors(value: Array) -> Floats | None:
    """Return a level as [anchors, 5 + C]; None for other shapes."""
    if value.ndim not in (4, 5) or len(value) != 1 or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 5:
        rows = value.reshape(-1, value.shape[4])
    elif value.shape[1] % _ANCHORS_PER_CELL:
        return None
    else:
        by_anchor = value.reshape(_ANCHORS_PER_CELL, value.shape[1] // _ANCHORS_PER_CELL, -1)
        rows = by_anchor.transpose(0, 2, 1).reshape(-1, by_anchor.shape[1])
    return rows.astype(np.float64) if rows.shape[1] >= 6 else None


def _detects_little(rows: Floats, *, raw: bool) -> bool:
    """Whether objectness is near 0 nearly everywhere, as no other row is."""
    if not np.isfinite(rows).all():
        return False
    if not raw:
        return bool(
            rows.min() >= 0 and rows.max() <= 1 and rows[:, 4].mean() < _MAX_EMPTY_OBJECTNESS
        )
    limit = float(np.log(_MAX_EMPTY_OBJECTNESS))
    box_median = float(np.median(rows[:, :4]))  # box logits are centred at 0
    return bool(rows[:, 4].mean() < limit < box_median and rows[:, 4].min() < -1)
