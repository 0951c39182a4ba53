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

`SingleTensorDecoder`: scores and boxes in one tensor [N, A, R].

========================  ======================================================================
[N, Q, 4 + C]             centre and size of a few queries, relative to the picture, and a
                          probability per class: RT-DETR (Zhao et al. 2023), complete export
[N, A, C + 4 (m + 1)]     a probability per class, and distributions as above: NanoDet
========================  ======================================================================
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

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

_LARGEST = 1 << 16  # cells of a level, at most


def arrange_anchors(outputs: Outputs, *, maps: bool, turned: frozenset[str]) -> dict[str, Array]:
    """Bring all outputs into the layout of one row per anchor."""
    rows = _unrolled(outputs) if maps else dict(outputs)
    transposed = {
        name: rows[name].swapaxes(1, 2) if rows[name].ndim == 3 else rows[name][..., None]
        for name in turned
        if rows[name].ndim in (2, 3)
    }
    return {**rows, **transposed}


def find_transposed(seen: FirstSamples) -> frozenset[str]:
    """Return outputs [1, C, A] that accompany boxes [1, A, 4] or [1, 4, A], and [1, A] of those."""
    shapes = {name: seen.outputs[0][name].shape for name in seen.names}
    flat = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[0] == 1}
    lengths = {max(shape) for shape in flat.values() if 4 in shape[1:]}
    sides = {side for shape in flat.values() for side in (shape[1], max(shape))}
    rows = sides if len(flat) * 2 == len(shapes) else set()
    scores = (n for n, shape in shapes.items() if len(shape) == 2 and {*shape} - {1} <= rows)
    turned = (n for n, (_, high, last) in flat.items() if last in lengths and high < last)
    return frozenset((*turned, *scores))


def are_cells(seen: FirstSamples) -> bool:
    """Whether all maps have the size of the picture over a stride, in every sample."""
    return all(
        size is not None
        and value.shape[2:] in [(-(-size[0] // s), -(-size[1] // s)) for s in STRIDES]
        for one, size in zip(seen.outputs, map(image_size, seen.inputs), strict=True)
        for value in one.values()
        if value.ndim == 4
    )


def _unrolled(outputs: Outputs) -> dict[str, Array]:
    """Reshape maps [1, C, H, W] of limited size to [1, H W, C]; others stay unchanged."""
    return {
        name: value.reshape(*value.shape[:2], value.shape[2] * value.shape[3]).transpose(0, 2, 1)
        if value.ndim == 4 and len(value) == 1 and value.shape[2] * value.shape[3] <= _LARGEST
        else value
        for name, value in outputs.items()
    }


def to_table(value: Array) -> Floats | None:
    """Return [1, A, C] or [A, C] as [A, C]; None for other shapes."""
    if value.ndim not in (2, 3) or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 3 and len(value) != 1:
        return None
    return value.reshape(value.shape[-2:]).astype(np.float64)


_ANCHORS = 10  # of all levels, at least
_MAPS = 4  # outputs of two levels, at least
_QUERIES = 1000  # of a DETR, at most
_BINS = 4  # of a distribution, at least
_WINS = 0.8  # share of anchors won by the background, at least
_IDLE = 0.1  # best probability of an anchor without an object, at most
_BELOW = 0.9  # share of anchors without an object (best logit below 0), at least
_OFFSET = "offset"  # coding of a centre and a size in pixels, relative to an anchor
_FIRING = 1e-3  # share of anchors that see an object, at most
_TOGETHER = 0.3  # correlation of two corners of the boxes, at least
_PIXELS = 4  # of a box's sides, at least, where columns may be logits of a distribution
_WIDEST = 64  # numbers of a box with its key points, at most


@dataclass(frozen=True, slots=True)
class LevelOutputs:
    """Outputs of one level.

    `scores` and `boxes` are names; `grid` is set if boxes are distributions; `gate` is the output
    that multiplies the scores, or "".
    """

    scores: str
    boxes: str
    grid: AnchorGrid | None = None
    gate: str = ""


@dataclass(frozen=True, slots=True)
class AnchorDecoder:
    """Decoder of separate scores and boxes."""

    levels: tuple[LevelOutputs, ...]  # one pair per level
    activation: str  # missing activation of the scores: "", "sigmoid" or "softmax"
    background: int | None  # class of the background; None without
    # "corners", "centre", "distribution", "offset", or "" if boxes cannot be decoded
    coding: str
    classes: int  # number of classes without the background
    maps: bool = False  # whether the outputs are maps, one cell per anchor
    turned: frozenset[str] = frozenset()  # outputs whose last dimension is the anchors
    gate_raw: bool = False  # whether the gates are logits
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether the boxes' coding is known, and no anchor is missing."""
        return self.coding not in ("", _OFFSET)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        names = ", ".join(pair.scores for pair in self.levels)
        boxes = {"": "boxes matched by anchor", "centre": "boxes by centre"}
        coding = boxes.get(self.coding, f"boxes by {self.coding}")
        return f"{names}: {self.activation or 'scores'} of anchors, {coding}"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample, of all levels."""
        outputs = arrange_anchors(outputs, maps=self.maps, turned=self.turned)
        scores = [to_table(outputs[pair.scores]) for pair in self.levels]
        boxes = [to_table(outputs[pair.boxes]) for pair in self.levels]
        columns = self.classes + (self.background is not None)
        tables = [
            (a, b)
            for a, b in zip(scores, boxes, strict=True)
            if _paired(a, b, columns, bins=self.placed)
        ]
        if len(tables) != len(self.levels):
            return None
        shares = _shares(np.concatenate([a for a, _ in tables if a is not None]), self)
        if self.levels[0].gate:
            gates = _gates(self.levels, outputs, raw=self.gate_raw)
            if gates is None or gates.shape != (len(shares), 1):
                return None
            shares = shares * gates
        if self.coding == _OFFSET:
            table = np.concatenate([rows for _, rows in tables if rows is not None])
            points = table[:, 4:].reshape(len(table), -1, 2)
            anchors = np.arange(len(table), dtype=np.int64)
            # each anchor is a class of its own
            return Detections.of(to_corners(table[:, :4]), shares[:, 0], anchors, points)
        if not self.coding:
            return detections_by_anchor(shares)
        size = image_size(inputs)
        likely = shares.max(axis=1) > LOWEST  # few: the others are not decoded
        places, start = [], 0
        for pair, (_, rows) in zip(self.levels, tables, strict=True):
            assert rows is not None
            if pair.grid is not None and (size is None or pair.grid.count(size) != len(rows)):
                return None
            indices = np.flatnonzero(likely[start : start + len(rows)])
            places.append(_corners(rows, indices, self.coding, pair.grid, size))
            start += len(rows)
        return detections_by_score(np.concatenate(places), shares[likely])


def find_anchors(seen: FirstSamples) -> AnchorDecoder | None:
    """Recognise outputs where every level has scores and boxes."""
    maps = sum(seen.outputs[0][name].ndim == 4 for name in seen.names) >= _MAPS
    cells = maps and are_cells(seen)
    turned = find_transposed(seen)
    given = seen.outputs
    seen = FirstSamples(
        seen.inputs, [arrange_anchors(one, maps=maps, turned=turned) for one in seen.outputs]
    )
    groups: dict[int, list[str]] = {}
    for name in seen.names:
        tables = [to_table(value) for value in seen.arrays(name)]
        columns = {None if one is None else one.shape[1] for one in tables}
        if tables[0] is not None and len(tables[0]) > 1 and len(columns) == 1:
            groups.setdefault(len(tables[0]), []).append(name)
    pairs = [_pair(names, seen) for names in groups.values()]
    levels = tuple(pair for pair in pairs if pair is not None)
    if len(levels) != len(pairs) or sum(groups) < _ANCHORS:
        return None
    gated = [name for pair in levels if (name := pair.gate)]
    if gated and len(gated) != len(levels):
        return None
    activation = _activation([_stacked(pair.scores, seen) for pair in levels])
    coding = _coding([_stacked(pair.boxes, seen) for pair in levels], levels, seen)
    if activation is None or coding is None:
        return None
    if maps and coding != "distribution" and not (cells and activation[1] is None):
        return None
    count = seen.outputs[0][levels[0].scores].shape[-1] - (activation[1] is not None)
    coding = "" if maps and coding != "distribution" else coding
    raw = not all(are_shares(_stacked(name, seen)) for name in gated)
    parts: dict[str, tuple[OutputSlice, ...]] = {}
    start, stop = {None: (0, 0), 0: (1, count + 1)}.get(activation[1], (0, count))
    for names, pair in zip(groups.values(), levels, strict=True):
        kinds = OutputSlice(output=pair.scores, start=start, stop=stop, activation=activation[0])
        gate = OutputSlice(output=pair.gate, activation="sigmoid" if raw else "")
        own = {}  # output -> its mean score, slice: one of them may be arbitrary without an object
        for one in (kinds, gate) if pair.gate else (kinds,):
            axis = 1 if maps or one.output in turned else -1
            one = replace(one, axis=None if given[0][one.output].ndim == axis + 1 else axis)
            own[one.output] = np.mean([one.best_scores(row).mean() for row in given]), one
        at = min(own.values(), key=lambda each: each[0])[1]
        parts |= {n: (OutputSlice(output=n, at=None if n in own else at),) for n in names}
    return AnchorDecoder(levels, *activation, coding, count, maps, turned, raw, parts)


def fit_anchors(seen: FirstSamples) -> AnchorDecoder | None:
    """Return boxes matched by anchor of two outputs with equally many rows; None without such."""
    turned = find_transposed(seen)
    tables = [arrange_anchors(one, maps=False, turned=turned) for one in seen.outputs]
    rows = FirstSamples(seen.inputs, tables)
    sides = {n: one.shape for n in rows.names if (one := to_table(tables[0][n])) is not None}
    shares = {name: are_shares(_stacked(name, rows)) for name in sides}
    for boxes, scores in itertools.permutations(sorted(sides, key=lambda name: shares[name]), 2):
        if sides[boxes][0] == sides[scores][0] and sides[boxes][1] >= 4:
            activation, count = "" if shares[scores] else "sigmoid", sides[scores][1]
            levels = (LevelOutputs(scores, boxes),)
            return AnchorDecoder(levels, activation, None, "", count, turned=turned)
    return None


def _gates(levels: Sequence[LevelOutputs], outputs: Outputs, *, raw: bool) -> Floats | None:
    """Return the factors of all anchors' scores, [A, 1]; None if a level has no fitting output."""
    columns = [to_table(outputs[pair.gate]) for pair in levels]
    gates = [one for one in columns if one is not None]
    activation = "sigmoid" if raw else ""
    return None if len(gates) != len(columns) else activate(np.concatenate(gates), activation)


def _stacked(name: str, seen: FirstSamples) -> Floats:
    tables = [to_table(value) for value in seen.arrays(name)]
    return np.concatenate([one for one in tables if one is not None])


def _paired(scores: Floats | None, boxes: Floats | None, columns: int, *, bins: bool) -> bool:
    if scores is None or boxes is None:
        return False
    four = boxes.shape[1] > 0 and (boxes.shape[1] % 4 == 0 or not bins)
    return four and len(scores) == len(boxes) and scores.shape[1] == columns


def _pair(names: Sequence[str], seen: FirstSamples) -> LevelOutputs | None:
    """Choose one output of boxes and one of scores among outputs with equally many anchors."""
    shapes = {name: seen.outputs[0][name].shape for name in names}
    four = [name for name in names if shapes[name][-1] == 4]
    boxes = [name for name in four if not sums_to_one(_stacked(name, seen)).all()]
    grid = None
    if len(boxes) > 1:  # one may be the scores of four classes
        boxes = [name for name in boxes if not _are_scores(_stacked(name, seen))]
    if not boxes:
        size = seen.picture_size
        boxes = [n for n in names if shapes[n][-1] % 4 == 0 and shapes[n][-1] >= 4 * _BINS]
        fitting = [] if size is None else list(find_grids(shapes[names[0]][-2], size, 1))
        grid = next((one for one in fitting if one.anchors == 1), None)
        boxes = [name for name in boxes if not are_shares(_stacked(name, seen))]
        points = _with_points(names, seen)
        tables = [_stacked(name, seen) for name in sorted(names, key=lambda name: name in points)]
        if grid is None or not boxes or (points and _least_size(*tables[::-1]) > _PIXELS):
            grid, boxes = None, points
    if len(boxes) != 1:
        return None
    others = [name for name in names if name != boxes[0]]
    scores = [name for name in others if are_shares(_stacked(name, seen))]
    scores = scores or [name for name in others if shapes[name][-1] == 2] or others
    if len(scores) == 2:
        gates = [name for name in scores if shapes[name][-1] == 1][-1:]
        kinds = [name for name in scores if name not in gates]
        return LevelOutputs(kinds[0], boxes[0], grid, gates[0]) if gates else None
    return LevelOutputs(scores[0], boxes[0], grid) if len(scores) == 1 else None


def _with_points(names: Sequence[str], seen: FirstSamples) -> list[str]:
    """Return the output of boxes with key points, if the only other one is a score per anchor."""
    sizes = {name: seen.outputs[0][name].shape[-1] for name in names}
    wide = [name for name, size in sizes.items() if 4 < size <= _WIDEST and not size % 2]
    others = [name for name in names if name not in wide]
    pictures = all(image_size(fed) is not None for fed in seen.inputs)
    if not pictures or len(wide) != 1 or [sizes[name] for name in others] != [1]:
        return []
    scores = _stacked(others[0], seen)
    return wide if (are_shares(scores) or scores.min() < 0) and _detects_little(scores) else []


def _detects_little(rows: Floats) -> bool:
    """Whether nearly all rows, probabilities or logits, detect nothing."""
    best = rows.max(axis=1)
    return bool(
        np.mean(best < _IDLE) >= _BELOW and (are_shares(rows) or np.mean(best < 0) >= _BELOW)
    )


def _are_scores(rows: Floats) -> bool:
    """Whether rows are scores of classes, or logits of a Softmax that is sure of its background."""
    sure = activate(rows, "softmax").max(axis=1).mean() > _WINS
    return _detects_little(rows) or bool(sure and _activation([rows]))


def _activation(levels: list[Floats]) -> tuple[str, int | None] | None:
    """Return (missing activation, class of the background); None if the values fit neither."""
    if len({rows.shape[1] for rows in levels}) != 1:
        return None
    rows = np.concatenate(levels)
    if not np.isfinite(rows).all():
        return None
    last = rows.shape[1] - 1
    wins = np.bincount(rows.argmax(axis=1), minlength=last + 1)
    background = int(wins.argmax()) if wins.max() >= _WINS * wins.sum() and last else None
    background = background if background in (0, last) else None
    if are_shares(rows):
        sums_to_1 = last > 0 and sums_to_one(rows).all()
        return ("", None) if not sums_to_1 else None if background is None else ("", background)
    if np.mean(rows.max(axis=1) < 0) >= _BELOW:
        return "sigmoid", None
    return None if background is None else ("softmax", background)


def _coding(levels: list[Floats], pairs: Sequence[LevelOutputs], seen: FirstSamples) -> str | None:
    if any(pair.grid is not None for pair in pairs):
        return "distribution" if all(pair.grid is not None for pair in pairs) else None
    rows = np.concatenate(levels)
    if not np.isfinite(rows).all():
        return None
    if rows.shape[1] != 4:  # boxes and key points
        scores = np.concatenate([_stacked(pair.scores, seen) for pair in pairs])
        return _OFFSET if _least_size(rows, scores) > 1 and scores.shape[1] == 1 else ""
    # corners move together, offsets from an anchor and sizes do not
    together = all(correlate(rows[:, k], rows[:, k + 2]) > _TOGETHER for k in (0, 1))
    if together and np.mean(np.all(rows[:, 2:] >= rows[:, :2], axis=1)) > 0.99:
        return "corners"
    inside = rows.min() >= -0.05 and rows.max() <= 1.05
    if len(pairs) == 1 and inside and len(rows) <= 4 * _QUERIES:
        return "centre"
    return "centre" if len(pairs) == 1 and _at_anchors(rows, seen) else ""


def _least_size(boxes: Floats, scores: Floats) -> float:
    """Return the least width or height of the boxes [A, 4 + 2 K] with the highest scores."""
    return float(boxes[scores[:, 0] >= np.quantile(scores[:, 0], 1 - _FIRING), 2:4].min())


def _at_anchors(rows: Floats, seen: FirstSamples) -> bool:
    """Whether the boxes of all samples are centred at the anchors of a grid."""
    size = seen.picture_size
    fitting = [] if size is None else find_grids(len(rows) // len(seen.inputs), size)
    repeated = [size] * len(seen.inputs) if size is not None else []
    return any(find_box_coding(rows.T, repeated, grid) == "centre" for grid in fitting)


def _shares(rows: Floats, how: AnchorDecoder) -> Floats:
    """Return probabilities without the background's."""
    rows = activate(rows, how.activation)
    return rows if how.background is None else np.delete(rows, how.background, axis=1)


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
    cells, strides = (one[indices] for one in grid.cells(size))
    bins = rows.reshape(len(rows), 4, rows.shape[1] // 4)
    with np.errstate(invalid="ignore"):
        distance = activate(bins, "softmax") @ np.arange(bins.shape[2])  # left, top, right, bottom
    centre = cells + 0.5
    corners = np.concatenate([centre - distance[:, :2], centre + distance[:, 2:]], axis=1)
    return corners * strides[:, None]


_QUERY_COUNTS = (100, 1000)  # of a DETR, at least and at most
_QUIET = 0.1  # median over rows of the best probability, at most
_OUTSIDE = 0.1  # distance that a query's box may leave the picture, relative to it
_NEARLY_ALL = 0.95


@dataclass(frozen=True, slots=True)
class SingleTensorDecoder:
    """Decoder of scores and boxes in one tensor."""

    output: str
    classes: int
    rows: int  # number of columns of a row
    # of anchors whose boxes are distributions; None for queries, whose boxes come first
    grid: AnchorGrid | None
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)
    placed: ClassVar[bool] = True

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        coding = "centre" if self.grid is None else "distribution"
        return f"{self.output}: {self.classes} classes and boxes by {coding} in a row"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample."""
        rows, size = to_table(outputs[self.output]), image_size(inputs)
        if rows is None or rows.shape[1] != self.rows:
            return None
        if self.grid is None:
            return detections_by_score(to_corners(rows[:, :4]), rows[:, 4:])
        if size is None or self.grid.count(size) != len(rows):
            return None
        indices = np.flatnonzero(rows[:, : self.classes].max(axis=1) > LOWEST)
        boxes = decode_distances(rows[:, self.classes :], indices, self.grid, size)
        return detections_by_score(boxes, rows[indices, : self.classes])


def find_single_tensor(seen: FirstSamples) -> SingleTensorDecoder | None:
    """Recognise a single output that holds scores and boxes."""
    if len(seen.names) != 1:
        return None
    (name,) = seen.names
    tables = [to_table(value) for value in seen.arrays(name)]
    finite = [one for one in tables if one is not None and np.isfinite(one).all()]
    if len(finite) != len(tables) or len({one.shape for one in finite}) != 1:
        return None
    size = seen.picture_size
    return None if size is None else _queries(name, finite) or _cells(name, finite, size)


def _queries(name: str, samples: list[Floats]) -> SingleTensorDecoder | None:
    count, columns = samples[0].shape
    if not _QUERY_COUNTS[0] <= count <= _QUERY_COUNTS[1] or columns < 5:
        return None
    rows = np.concatenate(samples)
    if not (are_shares(rows) and _rarely_detect(rows[:, 4:])):
        return None
    if sums_to_one(rows).all():  # a sequence's classes per step
        return None
    places = to_corners(rows[:, :4])
    inside = (places > -_OUTSIDE).all(axis=1) & (places < 1 + _OUTSIDE).all(axis=1)
    spread = rows[:, :2].std(axis=0).min() > _OUTSIDE and rows[:, 2:4].min() > 0
    fits, parts = spread and np.mean(inside) >= _NEARLY_ALL, _parts(name, 4, columns)
    return SingleTensorDecoder(name, columns - 4, columns, None, parts) if fits else None


def _cells(name: str, samples: list[Floats], size: tuple[int, int]) -> SingleTensorDecoder | None:
    count, columns = samples[0].shape
    grid = next((one for one in find_grids(count, size) if one.anchors == 1), None)
    rows = np.concatenate(samples)
    shares = (rows.min(axis=0) >= -1e-3) & (rows.max(axis=0) <= 1 + 1e-3)
    classes = int(np.cumprod(shares).sum())
    bins, left = divmod(columns - classes, 4)
    if grid is None or not classes or left or bins < _BINS or shares[classes:].any():
        return None
    if not _rarely_detect(rows[:, :classes]) or rows[:, classes:].min() >= 0:
        return None
    return SingleTensorDecoder(name, classes, columns, grid, _parts(name, classes, columns))


def _rarely_detect(scores: Floats) -> bool:
    return bool(np.median(scores.max(axis=1)) < _QUIET)


def _parts(name: str, border: int, columns: int) -> dict[str, tuple[OutputSlice, ...]]:
    spans = ((0, border), (border, columns))
    return {name: tuple(OutputSlice(output=name, axis=-1, start=a, stop=b) for a, b in spans)}
