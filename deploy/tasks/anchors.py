"""Detectors whose scores and boxes have one row per anchor or query: SSD, DETR, PicoDet, ...

`AnchorDecoder`: scores and boxes in separate outputs (also RetinaFace), one pair in all or one pair
per level. Either may be transposed, [C, A]. A third output of one column, an objectness or
centreness (YuNet, FCOS), multiplies the scores.

======================  ========================================================================
scores [A, C]           probabilities; one is the background (first or last) if they sum to 1.
                        Logits: of a Softmax if one background wins nearly everywhere, of a
                        Sigmoid if nearly all are below 0
boxes [A, 4]            corners; centre and size, at their anchors or of a few queries (DETR,
                        Carion et al. 2020); offsets from anchors that the outputs do not contain
boxes [A, 4 (m + 1)]    distributions of the four distances from an anchor's cell, in strides
                        (Li et al. 2020, Generalized Focal Loss): PicoDet, NanoDet, and the heads of
                        YOLO v6 and v8 before concatenation; both may be maps [C, H, W]
boxes [A, 4 + 2 K]      offsets of boxes and their key points from anchors that the outputs do not
                        contain (Bazarevsky et al. 2019, BlazeFace), with one score [A, 1] or [A].
                        With positive sizes they are pixels, centre and size: an anchor moves the
                        boxes of both models alike, so those of one anchor are compared
======================  ========================================================================

If boxes cannot be decoded, a detection is matched by its anchor and class.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.detections import (
    LOWEST,
    Detections,
    detections_by_anchor,
    detections_by_score,
)
from deploy.tasks.evaluation_task import FirstSamples
from deploy.tasks.rows import (
    Floats,
    Outputs,
    activate,
    are_shares,
    correlate,
    image_size,
    sums_to_one,
)
from deploy.tasks.slices import OutputSlice
from deploy.tasks.yolo import STRIDES, AnchorGrid, find_box_coding, find_grids, to_corners
from deploy.tensors import Array

_MAX_CELLS = 1 << 16  # cells of a level, at most


def arrange_anchors(
    outputs: Outputs, *, are_maps: bool, transposed: frozenset[str]
) -> dict[str, Array]:
    """Bring all outputs into the layout of one row per anchor."""
    rows = _flatten_maps(outputs) if are_maps else dict(outputs)
    for name in transposed:
        if rows[name].ndim == 3:
            rows[name] = rows[name].swapaxes(1, 2)
        elif rows[name].ndim == 2:
            rows[name] = rows[name][..., None]
    return rows


def find_transposed(samples: FirstSamples) -> frozenset[str]:
    """Return outputs [1, C, A] that accompany boxes [1, A, 4] or [1, 4, A], and [1, A] of those."""
    shapes = {name: samples.outputs[0][name].shape for name in samples.names}
    tables = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[0] == 1}
    box_counts = {max(shape) for shape in tables.values() if 4 in shape[1:]}
    transposed = set()
    table_sides = set()
    for name, (_, rows, columns) in tables.items():
        table_sides |= {rows, max(1, rows, columns)}
        if columns in box_counts and rows < columns:
            transposed.add(name)

    # scores [1, A] belong to boxes if there are as many outputs of both kinds
    if len(tables) * 2 != len(shapes):
        table_sides = set()
    for name, shape in shapes.items():
        if len(shape) == 2 and {*shape} - {1} <= table_sides:
            transposed.add(name)
    return frozenset(transposed)


def are_cells(samples: FirstSamples) -> bool:
    """Whether all maps have the size of the picture over a stride, in every sample."""
    for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
        size = image_size(inputs)
        for value in outputs.values():
            if value.ndim == 4 and (size is None or not _has_stride(value.shape[2:], size)):
                return False
    return True


def _has_stride(map_size: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether a map has the size of the picture over a stride."""
    high, wide = size
    return map_size in [(-(-high // stride), -(-wide // stride)) for stride in STRIDES]


def _flatten_maps(outputs: Outputs) -> dict[str, Array]:
    """Reshape maps [1, C, H, W] of limited size to [1, H W, C]; others stay unchanged."""
    rows = {}
    for name, value in outputs.items():
        if value.ndim == 4 and len(value) == 1 and math.prod(value.shape[2:]) <= _MAX_CELLS:
            columns = value.reshape(1, value.shape[1], math.prod(value.shape[2:]))
            value = columns.transpose(0, 2, 1)
        rows[name] = value
    return rows


def to_table(value: Array) -> Floats | None:
    """Return [1, A, C] or [A, C] as [A, C]; None for other shapes."""
    if value.ndim not in (2, 3) or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 3 and len(value) != 1:
        return None
    return value.reshape(value.shape[-2:]).astype(np.float64)


_MIN_ANCHORS = 10  # of all levels, at least
_MIN_MAPS = 4  # outputs of two levels, at least
MAX_QUERIES = 1000  # of a DETR, at most
MIN_BINS = 4  # of a distribution, at least
_BACKGROUND_SHARE = 0.8  # share of anchors won by the background, at least
_MAX_EMPTY_SCORE = 0.1  # best probability of an anchor without an object, at most
_EMPTY_SHARE = 0.9  # share of anchors without an object (best logit below 0), at least
_OFFSET = "offset"  # coding of a centre and a size in pixels, relative to an anchor
_DETECTION_SHARE = 1e-3  # share of anchors that see an object, at most
_MIN_CORNER_CORRELATION = 0.3  # of two corners of the boxes, at least
_MIN_BOX_PIXELS = 4  # of a box's sides, at least, where columns may be logits of a distribution
_MAX_POINT_COLUMNS = 64  # numbers of a box with its key points, at most


@dataclass(frozen=True, slots=True)
class LevelOutputs:
    """Outputs of one level.

    Attributes:
        scores, boxes: names of the outputs.
        grid: set if boxes are distributions.
        gate: output that multiplies the scores, or "".
    """

    scores: str
    boxes: str
    grid: AnchorGrid | None = None
    gate: str = ""


LevelTables = tuple[Floats, Floats]  # (scores, boxes) of one level, [A, C] and [A, 4 ...]


@dataclass(frozen=True, slots=True)
class AnchorDecoder:
    """Decoder of separate scores and boxes.

    Attributes:
        levels: one pair of outputs per level.
        activation: missing activation of the scores: "", "sigmoid" or "softmax".
        background: class of the background; None without.
        coding: "corners", "centre", "distribution", "offset", or "" if boxes cannot be decoded.
        classes: number of classes without the background.
        maps: whether the outputs are maps, one cell per anchor.
        transposed: outputs whose last dimension is the anchors.
        gate_raw: whether the gates are logits.
        parts: slices of each output.
    """

    levels: tuple[LevelOutputs, ...]
    activation: str
    background: int | None
    coding: str
    classes: int
    maps: bool = False
    transposed: frozenset[str] = frozenset()
    gate_raw: bool = False
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether the boxes' coding is known, and no anchor is missing."""
        return self.coding not in ("", _OFFSET)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        names = ", ".join(level.scores for level in self.levels)
        boxes = {"": "boxes matched by anchor", "centre": "boxes by centre"}
        coding = boxes.get(self.coding, f"boxes by {self.coding}")
        return f"{names}: {self.activation or 'scores'} of anchors, {coding}"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample, of all levels."""
        outputs = arrange_anchors(outputs, are_maps=self.maps, transposed=self.transposed)
        tables = self._level_tables(outputs)
        if tables is None:
            return None
        probabilities = self._probabilities(tables, outputs)
        if probabilities is None:
            return None

        if self.coding == _OFFSET:
            rows = np.concatenate([boxes for _, boxes in tables])
            points = rows[:, 4:].reshape(len(rows), -1, 2)
            anchors = np.arange(len(rows), dtype=np.int64)
            # each anchor is a class of its own
            return Detections.of(to_corners(rows[:, :4]), probabilities[:, 0], anchors, points)
        if not self.coding:
            return detections_by_anchor(probabilities)

        is_likely = probabilities.max(axis=1) > LOWEST  # few: the others are not decoded
        corners = self._decode_boxes(tables, is_likely, image_size(inputs))
        if corners is None:
            return None
        return detections_by_score(corners, probabilities[is_likely])

    def _level_tables(self, outputs: Outputs) -> list[LevelTables] | None:
        """Return the tables of all levels; None if one has another shape than expected."""
        columns = self.classes
        if self.background is not None:
            columns += 1
        tables = []
        for level in self.levels:
            scores, boxes = to_table(outputs[level.scores]), to_table(outputs[level.boxes])
            if scores is None or boxes is None or not boxes.shape[1]:
                return None
            if self.placed and boxes.shape[1] % 4 != 0:
                return None
            if len(scores) != len(boxes) or scores.shape[1] != columns:
                return None
            tables.append((scores, boxes))
        return tables

    def _probabilities(self, tables: Sequence[LevelTables], outputs: Outputs) -> Floats | None:
        """Return the probabilities [A, classes] of all levels; None if their gates do not fit."""
        rows = activate(np.concatenate([scores for scores, _ in tables]), self.activation)
        if self.background is not None:
            rows = np.delete(rows, self.background, axis=1)
        if not self.levels[0].gate:
            return rows

        gates = []
        for level in self.levels:
            gate = to_table(outputs[level.gate])
            if gate is None:
                return None
            gates.append(gate)
        factors = activate(np.concatenate(gates), "sigmoid" if self.gate_raw else "")
        if factors.shape != (len(rows), 1):
            return None
        return rows * factors

    def _decode_boxes(
        self,
        tables: Sequence[LevelTables],
        is_likely: NDArray[np.bool_],
        size: tuple[int, int] | None,
    ) -> Floats | None:
        """Return the corners of the likely anchors' boxes; None if a grid does not fit."""
        corners, start = [], 0
        for level, (_, rows) in zip(self.levels, tables, strict=True):
            if level.grid is not None and (size is None or level.grid.count(size) != len(rows)):
                return None
            indices = np.flatnonzero(is_likely[start : start + len(rows)])
            corners.append(_corners(rows, indices, self.coding, level.grid, size))
            start += len(rows)
        return np.concatenate(corners)


def find_anchors(samples: FirstSamples) -> AnchorDecoder | None:
    """Recognise outputs where every level has scores and boxes."""
    are_maps = sum(samples.outputs[0][name].ndim == 4 for name in samples.names) >= _MIN_MAPS
    transposed = find_transposed(samples)
    rows = _arrange_samples(samples, are_maps=are_maps, transposed=transposed)

    names_by_count = _group_by_anchors(rows)
    levels = []
    for names in names_by_count.values():
        level = _pair_outputs(names, rows)
        if level is None:
            return None
        levels.append(level)
    gates = [level.gate for level in levels if level.gate]
    has_gates_of_some_levels = bool(gates) and len(gates) != len(levels)
    if sum(names_by_count) < _MIN_ANCHORS or has_gates_of_some_levels:
        return None

    scoring = _find_activation([_stack(level.scores, rows) for level in levels])
    coding = _find_coding(levels, rows)
    if scoring is None or coding is None:
        return None
    activation, background = scoring
    if are_maps and coding != "distribution":  # boxes that cannot be decoded
        if background is not None or not are_cells(samples):
            return None
        coding = ""

    class_count = rows.outputs[0][levels[0].scores].shape[-1]
    if background is not None:
        class_count -= 1
    # the columns of the classes, without the background; 0, 0 for all
    start, stop = 0, 0
    if background is not None:
        start = 1 if background == 0 else 0
        stop = start + class_count
    are_raw_gates = not all(are_shares(_stack(name, rows)) for name in gates)
    parts: dict[str, tuple[OutputSlice, ...]] = {}
    for names, level in zip(names_by_count.values(), levels, strict=True):
        slices = [OutputSlice(output=level.scores, start=start, stop=stop, activation=activation)]
        if level.gate:
            slices.append(
                OutputSlice(output=level.gate, activation="sigmoid" if are_raw_gates else "")
            )
        columns_second = transposed | frozenset(names) if are_maps else transposed
        parts |= _slice_level(names, slices, columns_second, samples)
    return AnchorDecoder(
        levels=tuple(levels),
        activation=activation,
        background=background,
        coding=coding,
        classes=class_count,
        maps=are_maps,
        transposed=transposed,
        gate_raw=are_raw_gates,
        parts=parts,
    )


def _arrange_samples(
    samples: FirstSamples, *, are_maps: bool, transposed: frozenset[str]
) -> FirstSamples:
    """Return the samples with outputs of one row per anchor."""
    outputs = []
    for sample in samples.outputs:
        outputs.append(arrange_anchors(sample, are_maps=are_maps, transposed=transposed))
    return FirstSamples(samples.inputs, outputs)


def _group_by_anchors(samples: FirstSamples) -> dict[int, list[str]]:
    """Return number of anchors -> outputs that have a row for each in every sample."""
    names_by_count: dict[int, list[str]] = {}
    for name in samples.names:
        tables = [to_table(value) for value in samples.arrays(name)]
        columns = {None if table is None else table.shape[1] for table in tables}
        if tables[0] is not None and len(tables[0]) > 1 and len(columns) == 1:
            names_by_count.setdefault(len(tables[0]), []).append(name)
    return names_by_count


def _slice_level(
    names: Sequence[str],
    scores: Sequence[OutputSlice],
    columns_second: frozenset[str],
    samples: FirstSamples,
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of a level's outputs; boxes are weighted by the scores of their anchors.

    `scores`: slices of the scores and the gate, if there is one. The one with the lower mean is the
    weight, since the other may be arbitrary without an object. `columns_second`: outputs whose
    columns are the second dimension.
    """
    mean_score, weight = math.inf, scores[0]
    for part in scores:
        axis = 1 if part.output in columns_second else -1
        has_axis = samples.outputs[0][part.output].ndim != axis + 1
        part = replace(part, axis=axis if has_axis else None)
        mean = float(np.mean([part.best_scores(outputs).mean() for outputs in samples.outputs]))
        if mean < mean_score:
            mean_score, weight = mean, part
    score_names = [part.output for part in scores]
    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for name in names:
        at = None if name in score_names else weight
        slices[name] = (OutputSlice(output=name, at=at),)
    return slices


def fit_anchors(samples: FirstSamples) -> AnchorDecoder | None:
    """Return boxes matched by anchor of two outputs with equally many rows; None without such."""
    transposed = find_transposed(samples)
    rows = _arrange_samples(samples, are_maps=False, transposed=transposed)
    shapes = {}
    for name in rows.names:
        table = to_table(rows.outputs[0][name])
        if table is not None:
            shapes[name] = table.shape
    has_shares = {name: are_shares(_stack(name, rows)) for name in shapes}
    names = sorted(shapes, key=lambda name: has_shares[name])
    for boxes, scores in itertools.permutations(names, 2):
        if shapes[boxes][0] == shapes[scores][0] and shapes[boxes][1] >= 4:
            return AnchorDecoder(
                levels=(LevelOutputs(scores, boxes),),
                activation="" if has_shares[scores] else "sigmoid",
                background=None,
                coding="",
                classes=shapes[scores][1],
                transposed=transposed,
            )
    return None


def _stack(name: str, samples: FirstSamples) -> Floats:
    """Return the rows of an output, of all samples."""
    tables = [to_table(value) for value in samples.arrays(name)]
    return np.concatenate([table for table in tables if table is not None])


def _pair_outputs(names: Sequence[str], samples: FirstSamples) -> LevelOutputs | None:
    """Choose one output of boxes and one of scores among outputs with equally many anchors."""
    boxes, grid = _find_boxes(names, samples)
    if len(boxes) != 1:
        return None
    columns = {name: samples.outputs[0][name].shape[-1] for name in names}
    candidates = [name for name in names if name != boxes[0]]
    scores = [name for name in candidates if are_shares(_stack(name, samples))]
    if not scores:
        scores = [name for name in candidates if columns[name] == 2] or candidates
    if len(scores) == 1:
        return LevelOutputs(scores[0], boxes[0], grid)

    gates = [name for name in scores if columns[name] == 1]
    if len(scores) != 2 or not gates:
        return None
    gate = gates[-1]
    (class_scores,) = [name for name in scores if name != gate]
    return LevelOutputs(class_scores, boxes[0], grid, gate)


def _find_boxes(names: Sequence[str], samples: FirstSamples) -> tuple[list[str], AnchorGrid | None]:
    """Return the outputs that may be boxes, and their grid if they are distributions."""
    columns = {name: samples.outputs[0][name].shape[-1] for name in names}
    boxes = []
    for name in names:
        if columns[name] == 4 and not sums_to_one(_stack(name, samples)).all():
            boxes.append(name)
    if len(boxes) > 1:  # one may be the scores of four classes
        boxes = [name for name in boxes if not _are_scores(_stack(name, samples))]
    if boxes:
        return boxes, None

    boxes_with_points = _find_boxes_with_points(names, samples)
    size = samples.picture_size
    if size is None:
        return boxes_with_points, None
    grid = _find_cell_grid(samples.outputs[0][names[0]].shape[-2], size)
    distributions = []
    for name in names:
        has_bins = columns[name] % 4 == 0 and columns[name] >= 4 * MIN_BINS
        if has_bins and not are_shares(_stack(name, samples)):
            distributions.append(name)
    if grid is None or not distributions:
        return boxes_with_points, None

    if boxes_with_points:  # logits of a distribution give no sizes in pixels
        (scores,) = [name for name in names if name not in boxes_with_points]
        rows = _stack(boxes_with_points[0], samples)
        if _min_box_size(rows, _stack(scores, samples)) > _MIN_BOX_PIXELS:
            return boxes_with_points, None
    return distributions, grid


def _find_cell_grid(count: int, size: tuple[int, int]) -> AnchorGrid | None:
    """Return the grid of one anchor per cell that has so many anchors, of one level."""
    return next((grid for grid in find_grids(count, size, 1) if grid.anchors == 1), None)


def _find_boxes_with_points(names: Sequence[str], samples: FirstSamples) -> list[str]:
    """Return the output of boxes with key points, if the only other one is a score per anchor."""
    columns = {name: samples.outputs[0][name].shape[-1] for name in names}
    boxes = [name for name in names if 4 < columns[name] <= _MAX_POINT_COLUMNS]
    boxes = [name for name in boxes if columns[name] % 2 == 0]
    scores = [name for name in names if name not in boxes]
    if len(boxes) != 1 or len(scores) != 1 or columns[scores[0]] != 1:
        return []
    if any(image_size(inputs) is None for inputs in samples.inputs):
        return []
    rows = _stack(scores[0], samples)
    are_scores = are_shares(rows) or rows.min() < 0
    return boxes if are_scores and _detects_little(rows) else []


def _detects_little(rows: Floats) -> bool:
    """Whether nearly all rows, probabilities or logits, detect nothing."""
    best = rows.max(axis=1)
    if np.mean(best < _MAX_EMPTY_SCORE) < _EMPTY_SHARE:
        return False
    return are_shares(rows) or bool(np.mean(best < 0) >= _EMPTY_SHARE)


def _are_scores(rows: Floats) -> bool:
    """Whether rows are scores of classes, or logits of a Softmax that is sure of its background."""
    if _detects_little(rows):
        return True
    mean_best = activate(rows, "softmax").max(axis=1).mean()
    return bool(mean_best > _BACKGROUND_SHARE and _find_activation([rows]))


def _find_activation(levels: list[Floats]) -> tuple[str, int | None] | None:
    """Return (missing activation, class of the background); None if the values fit neither."""
    if len({rows.shape[1] for rows in levels}) != 1:
        return None
    rows = np.concatenate(levels)
    if not np.isfinite(rows).all():
        return None

    last = rows.shape[1] - 1
    wins = np.bincount(rows.argmax(axis=1), minlength=last + 1)
    winner = int(wins.argmax())
    is_background = last > 0 and winner in (0, last)
    if wins.max() < _BACKGROUND_SHARE * wins.sum():
        is_background = False
    if are_shares(rows):
        if last == 0 or not sums_to_one(rows).all():
            return "", None
        return ("", winner) if is_background else None
    if np.mean(rows.max(axis=1) < 0) >= _EMPTY_SHARE:
        return "sigmoid", None
    return ("softmax", winner) if is_background else None


def _find_coding(levels: Sequence[LevelOutputs], samples: FirstSamples) -> str | None:
    """Return the coding of the boxes, as in `AnchorDecoder`; None if they are no boxes."""
    with_grid = [level for level in levels if level.grid is not None]
    if with_grid:
        return "distribution" if len(with_grid) == len(levels) else None
    rows = np.concatenate([_stack(level.boxes, samples) for level in levels])
    if not np.isfinite(rows).all():
        return None

    if rows.shape[1] != 4:  # boxes and key points
        scores = np.concatenate([_stack(level.scores, samples) for level in levels])
        has_sizes = _min_box_size(rows, scores) > 1
        return _OFFSET if has_sizes and scores.shape[1] == 1 else ""

    # corners move together, offsets from an anchor and sizes do not
    correlations = [correlate(rows[:, k], rows[:, k + 2]) for k in (0, 1)]
    are_ordered = np.mean(np.all(rows[:, 2:] >= rows[:, :2], axis=1)) > 0.99
    if min(correlations) > _MIN_CORNER_CORRELATION and are_ordered:
        return "corners"
    if len(levels) > 1:
        return ""
    are_relative = rows.min() >= -0.05 and rows.max() <= 1.05
    if are_relative and len(rows) <= 4 * MAX_QUERIES:
        return "centre"
    return "centre" if _are_at_anchors(rows, samples) else ""


def _min_box_size(boxes: Floats, scores: Floats) -> float:
    """Return the least width or height of the boxes [A, 4 + 2 K] with the highest scores."""
    min_score = np.quantile(scores[:, 0], 1 - _DETECTION_SHARE)
    return float(boxes[scores[:, 0] >= min_score, 2:4].min())


def _are_at_anchors(rows: Floats, samples: FirstSamples) -> bool:
    """Whether the boxes of all samples are centred at the anchors of a grid."""
    size = samples.picture_size
    if size is None:
        return False
    sizes = [size] * len(samples.inputs)
    grids = find_grids(len(rows) // len(samples.inputs), size)
    return any(find_box_coding(rows.T, sizes, grid) == "centre" for grid in grids)


def _corners(
    rows: Floats,
    indices: NDArray[np.int64],
    coding: str,
    grid: AnchorGrid | None,
    size: tuple[int, int] | None,
) -> Floats:
    """Decode the boxes of some rows of a level."""
    if coding == "corners":
        return rows[indices]
    if grid is None or size is None:
        return to_corners(rows[indices])
    return decode_distances(rows, indices, grid, size)


def decode_distances(
    rows: Floats, indices: NDArray[np.int64], grid: AnchorGrid, size: tuple[int, int]
) -> Floats:
    """Decode corners of some rows of distributions [A, 4 (m + 1)], a row per cell of the grid."""
    rows = rows[indices]
    cells, strides = grid.cells(size)
    bins = rows.reshape(len(rows), 4, rows.shape[1] // 4)
    with np.errstate(invalid="ignore"):
        distance = activate(bins, "softmax") @ np.arange(bins.shape[2])  # left, top, right, bottom
    centre = cells[indices] + 0.5
    corners = np.concatenate([centre - distance[:, :2], centre + distance[:, 2:]], axis=1)
    return corners * strides[indices, None]
