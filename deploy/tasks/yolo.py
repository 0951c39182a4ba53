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
_MOST_ANCHORS = 9  # per cell


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
        places, strides = [], []
        for stride in self.strides:
            height, width = self.sides(size, stride)
            rows, columns = np.divmod(np.arange(height * width), max(width, 1))
            one = np.stack([columns, rows], axis=1).astype(np.float64)
            places.append(np.tile(one, (self.anchors, 1)))
            strides.append(np.full(len(one) * self.anchors, float(stride)))
        return np.concatenate(places), np.concatenate(strides)


def find_grids(
    anchors: int, size: tuple[int, int], levels: int | None = None
) -> Iterator[AnchorGrid]:
    """Yield grids of adjacent strides with exactly this many anchors, fewest per cell first.

    `size`: (height, width) of the image in pixels. `levels`: number of strides; None for two or
    more.
    """
    lengths = range(2, len(STRIDES) + 1) if levels is None else (levels,)
    runs = [
        STRIDES[start : start + length]
        for length in lengths
        for start in range(len(STRIDES) - length + 1)
    ]
    by_shape: dict[tuple[tuple[int, ...], int], AnchorGrid] = {}
    for up in (False, True):
        for strides in runs:
            cells = AnchorGrid(strides, 1, up).count(size)
            if cells and anchors % cells == 0 and anchors // cells <= _MOST_ANCHORS:
                by_shape.setdefault(
                    (strides, anchors // cells), AnchorGrid(strides, anchors // cells, up)
                )
    yield from sorted(by_shape.values(), key=lambda grid: grid.anchors)


_NEARLY_ALL = 0.99
_AT_ANCHORS = 0.8  # correlation of a box's place with its anchor's, at least
_IDLE = 0.1  # mean best class of all anchors, at most, unless an objectness suppresses boxes
_QUIET = 0.02  # mean scores, at most, that do not show an objectness


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDecoder:
    """Decoder of one tensor of all anchors."""

    output: str
    axis: int  # dimension of its rows, 1 or -1
    coding: str  # "centre" cx cy w h, "corners" x1 y1 x2 y2, or "cell" (YOLOX)
    objectness: bool  # whether row 4 multiplies all classes
    scores: int  # number of rows of scores from row 4 on, objectness included
    rows: int
    grid: AnchorGrid
    point: int = 0  # rows per key point, 2 or 3, which come last; 0 without
    maps: str = ""  # output of the masks' prototypes; "" without
    turned: bool = False  # whether the last row is an angle
    placed: ClassVar[bool] = True

    @property
    def classes(self) -> int:
        """Number of classes; a sole objectness is one."""
        return max(self.scores - self.objectness, 1)

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        words = {"centre": "boxes by centre", "corners": "boxes by corners", "cell": "raw boxes"}
        objectness = ", objectness" if self.objectness else ""
        points = (self.rows - 4 - self.scores) // self.point if self.point else 0
        extra = f", {points} key points" if points else ", a mask" if self.maps else ""
        extra = ", an angle" if self.turned else extra
        scores = f"{objectness} and {self.classes} classes"
        return f"{self.output}: {words[self.coding]}{scores}{extra} an anchor"

    @property
    def parts(self) -> Mapping[str, tuple[OutputSlice, ...]]:
        """Boxes, scores, and the rows after them."""
        spans = itertools.pairwise((0, 4, 4 + self.scores, self.rows))
        one = OutputSlice(output=self.output, axis=self.axis)
        return {self.output: tuple(replace(one, start=a, stop=b) for a, b in spans if b > a)}

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return all boxes of one sample."""
        rows = _oriented(outputs.get(self.output), self.axis)
        if rows is None or len(rows) != self.rows:
            return None
        scores = rows[4 : 4 + self.scores]
        if self.objectness and self.scores > 1:
            scores = scores[1:] * scores[:1]
        likely = np.flatnonzero(scores.max(axis=0) > LOWEST)  # few: the others are not decoded
        places, scores = (one[:, likely].T.astype(np.float64) for one in (rows[:4], scores))
        if self.coding == "cell":
            size = image_size(inputs)
            if size is None or self.grid.count(size) != rows.shape[1]:
                return None
            places = _out_of_cells(places, *(one[likely] for one in self.grid.cells(size)))
        rest = rows[4 + self.scores :, likely]
        if self.turned:
            return detections_by_score(
                to_corners(places), scores, rotate_boxes(places, rest[0].astype(np.float64))
            )
        places = places if self.coding == "corners" else to_corners(places)
        if self.maps:
            masks = make_masks(rest.T, outputs.get(self.maps), image_size(inputs))
            return None if masks is None else detections_by_score(places, scores, masks=masks)
        if not self.point:
            return detections_by_score(places, scores)
        points = rest.T.reshape(len(likely), len(rest) // self.point, self.point)
        return detections_by_score(places, scores, points.astype(np.float64))


def find_yolo(samples: FirstSamples) -> DenseDecoder | None:
    """Recognise such a tensor if exactly one output is one."""
    candidates = [dense for name in samples.names if (dense := _dense(name, samples)) is not None]
    if len(candidates) != 1:
        return None
    rest = 0 if candidates[0].point else candidates[0].rows - 4 - candidates[0].scores
    maps = [name for name in samples.names if rest and _are_maps(name, rest, samples)]
    return replace(candidates[0], maps=maps[0]) if len(maps) == 1 else candidates[0]


def _are_maps(name: str, count: int, samples: FirstSamples) -> bool:
    """Whether an output holds `count` prototype maps of masks, in every sample."""
    rows = np.zeros((1, count))
    return all(
        value.shape[1:2] == (count,) and make_masks(rows, value, image_size(fed)) is not None
        for value, fed in zip(samples.arrays(name), samples.inputs, strict=True)
    )


def to_corners(boxes: Floats) -> Floats:
    """Convert boxes [n, 4] from centre and size (cx cy w h) to corners (x1 y1 x2 y2)."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _dense(name: str, first_samples: FirstSamples) -> DenseDecoder | None:
    for axis in (1, -1):
        samples = [_oriented(value, axis) for value in first_samples.arrays(name)]
        sizes = [image_size(inputs) for inputs in first_samples.inputs]
        rows = [one.astype(np.float64) for one in samples if one is not None]
        known_sizes = [size for size in sizes if size is not None]
        if len(rows) != len(samples) or len(known_sizes) != len(samples) or not rows:
            continue
        if any(len(one) != len(rows[0]) for one in rows):
            continue
        dense = _read(name, axis, rows, known_sizes)
        if dense is not None:
            return dense
    return None


def _oriented(value: Array | None, axis: int) -> Array | None:
    """Return [1, R, A] or [1, A, R] as [R, A]; None for other shapes or too few rows for boxes."""
    if value is None or value.ndim != 3 or len(value) != 1:
        return None
    if not np.issubdtype(value.dtype, np.floating):
        return None
    rows = value[0] if axis == 1 else value[0].T
    return rows if len(rows) >= 5 and rows.shape[1] >= 2 * len(rows) else None


def _read(
    name: str, axis: int, rows: list[Floats], sizes: list[tuple[int, int]]
) -> DenseDecoder | None:
    low = np.min([one.min(axis=1) for one in rows], axis=0)
    high = np.max([one.max(axis=1) for one in rows], axis=0)
    share = (low >= -1e-3) & (high <= 1 + 1e-3)
    scores = int(np.cumprod(share[4:]).sum())  # rows of probabilities from row 4 on
    if not scores:
        return None
    objectness = _has_objectness(rows, scores, axis)
    for grid in find_grids(rows[0].shape[1], sizes[0]):
        if any(grid.count(size) != one.shape[1] for one, size in zip(rows, sizes, strict=True)):
            continue
        coding = _coding(rows, sizes, grid, objectness)
        if coding is not None:
            rest = np.concatenate([one[4 + scores :] for one in rows], axis=1)
            return DenseDecoder(
                output=name,
                axis=axis,
                coding=coding,
                objectness=objectness,
                scores=scores,
                rows=len(rows[0]),
                grid=grid,
                point=0 if coding == "cell" else _point(rest, sizes, grid),
                turned=coding == "centre" and len(rest) == 1 and are_angles(rest),
            )
    return None


def _point(rest: Floats, sizes: list[tuple[int, int]], grid: AnchorGrid) -> int:
    """Return the rows per key point if all points lie at their anchors; else 0."""
    for length in (3, 2):
        if not len(rest) or len(rest) % length:
            continue
        points = rest.reshape(-1, length, rest.shape[1])
        visible = points[:, 2:]
        shares = bool(((visible >= -1e-3) & (visible <= 1 + 1e-3)).all())
        if shares and all(_lie_at_anchors(one[:2], sizes, grid) for one in points):
            return length
    return 0


def _lie_at_anchors(places: Floats, sizes: Sequence[tuple[int, int]], grid: AnchorGrid) -> bool:
    """Whether x and y [2, A] of all samples correlate with their anchors'."""
    cells = [grid.cells(size) for size in sizes]
    centres = np.concatenate([(c + 0.5) * s[:, None] for c, s in cells]).T
    along = (correlate(one, other) for one, other in zip(places, centres, strict=True))
    return min(along) > _AT_ANCHORS


def _has_objectness(rows: list[Floats], scores: int, axis: int) -> bool:
    """Whether row 4 is objectness: then class scores are arbitrary where there is no object.

    If the data do not show it, tensors with the anchors first have it, as v5 and v7 do.
    """
    if scores < 2:
        return False
    classes = float(np.mean([one[5 : 4 + scores].max(axis=0).mean() for one in rows]))
    row_4 = float(np.mean([one[4].mean() for one in rows]))
    if classes > _IDLE and row_4 < classes:
        return True
    return axis == -1 and max(classes, row_4) > _QUIET


def find_box_coding(
    boxes: Floats, sizes: Sequence[tuple[int, int]], grid: AnchorGrid
) -> str | None:
    """Return "corners" or "centre" for boxes [4, A] of all samples; "" if not at their anchors.

    None if they are at their anchors, but neither.
    """
    if not _lie_at_anchors(boxes[:2], sizes, grid):
        return ""
    if _lie_at_anchors(boxes[2:], sizes, grid) and _mostly(np.all(boxes[2:] > boxes[:2], axis=0)):
        return "corners"
    return "centre" if _mostly(np.all(boxes[2:] >= 0, axis=0)) else None


def _coding(
    rows: list[Floats], sizes: list[tuple[int, int]], grid: AnchorGrid, objectness: bool
) -> str | None:
    """Return the coding of rows 0 to 3; None if they do not lie at their anchors."""
    boxes = np.concatenate([one[:4] for one in rows], axis=1)
    coding = find_box_coding(boxes, sizes, grid)
    if coding != "":
        return coding
    if not objectness or grid.anchors != 1 or np.mean([one[4].mean() for one in rows]) > _IDLE:
        return None
    # logarithms of sizes have both signs, relative and pixel sizes one; letters may all be taller
    # than their cells, so that one dimension suffices
    if boxes[2:].min() >= 0:
        return None
    small = np.abs(boxes[:2]).max(axis=0) < 16
    return "cell" if _mostly(small & (boxes[2:].max(axis=0) < 8)) else None


def _mostly(true: Array) -> bool:
    return bool(np.mean(true) >= _NEARLY_ALL)


def _out_of_cells(boxes: Floats, cells: Floats, stride: Floats) -> Floats:
    """Convert YOLOX's raw boxes to cx cy w h in pixels."""
    sizes = np.exp(np.minimum(boxes[:, 2:], 20))
    return np.concatenate([boxes[:, :2] + cells, sizes], axis=1) * stride[:, None]


_ANCHORS = 3  # per cell, if the shape does not show it
_LEVELS = 2  # at least
_NOTHING = 0.05  # mean objectness, at most


@dataclass(frozen=True, slots=True)
class LevelMapDecoder:
    """Decoder of one map per level."""

    levels: tuple[str, ...]
    classes: int
    raw: bool  # whether they hold logits, before the Sigmoid
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)
    placed: ClassVar[bool] = False

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        names = ", ".join(self.levels)
        return f"{names}: objectness and {self.classes} classes of anchors, matched by anchor"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the anchors of one sample with a detection."""
        rows = [_anchors(outputs[name]) for name in self.levels]
        fitting = [one for one in rows if one is not None and one.shape[1] == 5 + self.classes]
        if len(fitting) != len(rows):
            return None
        scores = np.concatenate(fitting)[:, 4:]
        scores = to_shares(scores, raw=self.raw)
        return detections_by_anchor(scores[:, 1:] * scores[:, :1])


def find_yolo_maps(samples: FirstSamples) -> LevelMapDecoder | None:
    """Recognise levels if every output is one."""
    if len(samples.names) < _LEVELS or len(samples.names) != len(samples.every):
        return None
    sizes = [*map(image_size, samples.inputs)]
    fits = [  # cells of a stride
        size is not None and value.shape[2:4] in _cells(size)
        for name in samples.names
        for value, size in zip(samples.arrays(name), sizes, strict=True)
    ]
    rows = [_anchors(value) for name in samples.names for value in samples.arrays(name)]
    levels = [one for one in rows if one is not None]
    if not all(fits) or len(levels) != len(rows) or len({one.shape[1] for one in levels}) != 1:
        return None
    for raw in (True, False):
        if all(_detects_little(one, raw=raw) for one in levels):
            return LevelMapDecoder(tuple(samples.names), levels[0].shape[1] - 5, raw)
    return None


def _cells(size: tuple[int, int]) -> Sequence[tuple[int, int]]:
    height, width = size
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES[1:]]


def _anchors(value: Array) -> Floats | None:
    """Return a level as [anchors, 5 + C]; None for other shapes."""
    if value.ndim not in (4, 5) or len(value) != 1 or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 5:
        rows = value.reshape(-1, value.shape[4])
    elif value.shape[1] % _ANCHORS:
        return None
    else:
        by_anchor = value.reshape(_ANCHORS, value.shape[1] // _ANCHORS, -1)
        rows = by_anchor.transpose(0, 2, 1).reshape(-1, by_anchor.shape[1])
    return rows.astype(np.float64) if rows.shape[1] >= 6 else None


def _detects_little(rows: Floats, *, raw: bool) -> bool:
    """Whether objectness is near 0 nearly everywhere, as no other row is."""
    if not np.isfinite(rows).all():
        return False
    if not raw:
        return bool(rows.min() >= 0 and rows.max() <= 1 and rows[:, 4].mean() < _NOTHING)
    limit = float(np.log(_NOTHING))
    box_median = float(np.median(rows[:, :4]))  # box logits are centred at 0
    return bool(rows[:, 4].mean() < limit < box_median and rows[:, 4].min() < -1)
