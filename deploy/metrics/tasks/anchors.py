"""Boxes and scores in outputs of their own, one row an anchor: SSD, RetinaFace, DETR, PicoDet.

All anchors (or queries) may be in one pair of outputs, or each level of them in a pair of its own.
Either may be turned, [C, A]. A third output of one column, an objectness or centreness (YuNet,
FCOS), multiplies the scores.

======================  ========================================================================
scores [A, C]           probabilities; a background among them (first or last) where they sum to
                        1; raw, by Softmax where one background wins nearly everywhere, by
                        Sigmoid where nearly all are below 0
boxes [A, 4]            corners; centre and size, at their anchors or of a few queries (DETR,
                        Carion et al. 2020); offsets from anchors that the outputs do not tell
boxes [A, 4 (m + 1)]    distributions of the four distances from an anchor's cell, in strides
                        (Li et al. 2020, Generalized Focal Loss): PicoDet, NanoDet, and the heads of
                        YOLO v6 and v8 before they are joined, where both may be maps [C, H, W]
boxes [A, 4 + 2 K]      offsets of boxes and of their key points from anchors that the outputs do
                        not tell (Bazarevsky et al. 2019, BlazeFace), beside one raw score
======================  ========================================================================

Where boxes cannot be told, an anchor counts as kept where the same one finds the same class.

Outputs of a detector as tables, one row an anchor, whichever way they lie.

Boxes and scores side by side in one tensor, one row an anchor or a query, [N, A, R].

========================  ======================================================================
[N, Q, 4 + C]             centre and size of a few queries in shares of the picture, and a
                          probability a class: RT-DETR (Zhao et al. 2023) as it is exported whole
[N, A, C + 4 (m + 1)]     a probability a class, and distributions of the four distances from an
                          anchor's cell: NanoDet (as `deploy.metrics.tasks.anchors` has them apart)
========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, add_up, image_size
from deploy.metrics.tasks.detections import LOWEST, Detections, Floats, by_place, by_score
from deploy.metrics.tasks.task import Seen
from deploy.metrics.tasks.yolo import STRIDES, Grid, at_anchors, corners, grids
from deploy.tensors import Array

_LARGEST = 1 << 16  # cells of a level


def laid(outputs: Outputs, *, maps: bool, turned: frozenset[str]) -> dict[str, Array]:
    """Anchors as rows in all outputs."""
    rows = _unrolled(outputs) if maps else dict(outputs)
    own = {name: rows[name].swapaxes(1, 2) for name in turned if rows[name].ndim == 3}
    return {**rows, **own}


def turned_of(seen: Seen) -> frozenset[str]:
    """Outputs [1, C, A] beside boxes [1, A, 4] or [1, 4, A]."""
    shapes = {name: seen.outputs[0][name].shape for name in seen.names}
    flat = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[0] == 1}
    lengths = {max(shape) for shape in flat.values() if 4 in shape[1:]}
    return frozenset(n for n, (_, rows, last) in flat.items() if last in lengths and rows < last)


def are_cells(seen: Seen) -> bool:
    """Whether all maps are of the cells of strides, in every sample."""
    return all(
        size is not None
        and value.shape[2:] in [(-(-size[0] // s), -(-size[1] // s)) for s in STRIDES]
        for one, size in zip(seen.outputs, map(image_size, seen.inputs), strict=True)
        for value in one.values()
        if value.ndim == 4
    )


def _unrolled(outputs: Outputs) -> dict[str, Array]:
    """Maps [1, C, H, W] of no great size become [1, H W, C]; the rest stays as it is."""
    return {
        name: value.reshape(*value.shape[:2], value.shape[2] * value.shape[3]).transpose(0, 2, 1)
        if value.ndim == 4 and len(value) == 1 and value.shape[2] * value.shape[3] <= _LARGEST
        else value
        for name, value in outputs.items()
    }


def table(value: Array) -> Floats | None:
    """[1, A, C] or [A, C] -> [A, C]; None for other shapes."""
    if value.ndim not in (2, 3) or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 3 and len(value) != 1:
        return None
    return value.reshape(value.shape[-2:]).astype(np.float64)


_ANCHORS = 10  # of all levels, at least
_MAPS = 4  # outputs of two levels: fewer are no heads of a detector
_QUERIES = 1000  # of a DETR, at most
_BINS = 4  # of a distribution, at least
_WINS = 0.8  # share of anchors that see the background
_IDLE = 0.1  # share that an anchor which sees nothing gives to any class
_BELOW = 0.9  # share of anchors whose best raw score is below 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Names of a level's scores and boxes, and its grid where boxes are distributions.

    `gate` is the output that multiplies the scores; "" without.
    """

    scores: str
    boxes: str
    grid: Grid | None = None
    gate: str = ""


@dataclass(frozen=True, slots=True)
class Anchors:
    """All levels.

    Attributes:
        levels: one pair a level.
        activation: of the scores: "", "sigmoid" or "softmax".
        background: its class; None without.
        coding: "corners", "centre", "distribution" or "" where boxes cannot be told.
        classes: how many there are, without the background.
        maps: whether the outputs are maps, one cell an anchor.
        turned: outputs whose anchors are the last dimension.
        gate_raw: whether a Sigmoid is still to come over the gates.
        parts: as of a task.
    """

    levels: tuple[Pair, ...]
    activation: str
    background: int | None
    coding: str
    classes: int
    maps: bool = False
    turned: frozenset[str] = frozenset()
    gate_raw: bool = False
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether the boxes' coding is known."""
        return bool(self.coding)

    @property
    def form(self) -> str:
        """How the outputs are read."""
        names = ", ".join(pair.scores for pair in self.levels)
        boxes = {"": "boxes matched by anchor", "centre": "boxes by centre"}
        own = boxes.get(self.coding, f"boxes by {self.coding}")
        return f"{names}: {self.activation or 'scores'} of anchors, {own}"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """The boxes of one sample, of all levels together."""
        outputs = laid(outputs, maps=self.maps, turned=self.turned)
        scores = [table(outputs[pair.scores]) for pair in self.levels]
        boxes = [table(outputs[pair.boxes]) for pair in self.levels]
        columns = self.classes + (self.background is not None)
        known = [
            (a, b)
            for a, b in zip(scores, boxes, strict=True)
            if _paired(a, b, columns, bins=bool(self.coding))
        ]
        if len(known) != len(self.levels):
            return None
        shares = _shares(np.concatenate([a for a, _ in known if a is not None]), self)
        if self.levels[0].gate:
            gates = _gates(self.levels, outputs, raw=self.gate_raw)
            if gates is None or gates.shape != (len(shares), 1):
                return None
            shares = shares * gates
        if not self.coding:
            return by_place(shares)
        size = image_size(inputs)
        seen = shares.max(axis=1) > LOWEST  # few: the rest is not decoded
        places, start = [], 0
        for pair, (_, own) in zip(self.levels, known, strict=True):
            assert own is not None
            if pair.grid is not None and (size is None or pair.grid.count(size) != len(own)):
                return None
            here = np.flatnonzero(seen[start : start + len(own)])
            places.append(_corners(own, here, self.coding, pair.grid, size))
            start += len(own)
        return by_score(np.concatenate(places), shares[seen])


def find_anchors(seen: Seen) -> Anchors | None:
    """The levels, where every one has scores and boxes."""
    maps = sum(seen.outputs[0][name].ndim == 4 for name in seen.names) >= _MAPS
    cells = maps and are_cells(seen)
    turned = turned_of(seen)
    seen = Seen(seen.inputs, [laid(one, maps=maps, turned=turned) for one in seen.outputs])
    groups: dict[int, list[str]] = {}
    for name in seen.names:
        tables = [table(value) for value in seen.arrays(name)]
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
    raw = not all(_is_share(_stacked(name, seen)) for name in gated)
    return Anchors(levels, *activation, coding, count, maps, turned, raw)


def _gates(levels: Sequence[Pair], outputs: Outputs, *, raw: bool) -> Floats | None:
    """What multiplies the scores of all anchors, [A, 1]; None where a level has none that fits."""
    columns = [table(outputs[pair.gate]) for pair in levels]
    known = [one for one in columns if one is not None]
    if len(known) != len(columns):
        return None
    with np.errstate(over="ignore"):
        values = np.concatenate(known)
        return np.asarray(1 / (1 + np.exp(-values))) if raw else values


def _stacked(name: str, seen: Seen) -> Floats:
    tables = [table(value) for value in seen.arrays(name)]
    return np.concatenate([one for one in tables if one is not None])


def _paired(scores: Floats | None, boxes: Floats | None, columns: int, *, bins: bool) -> bool:
    if scores is None or boxes is None:
        return False
    four = boxes.shape[1] > 0 and (boxes.shape[1] % 4 == 0 or not bins)
    return four and len(scores) == len(boxes) and scores.shape[1] == columns


def _pair(names: Sequence[str], seen: Seen) -> Pair | None:
    """The one output of boxes and the one of scores, of those with equally many anchors."""
    shapes = {name: seen.outputs[0][name].shape for name in names}
    boxes = [
        name for name in names if shapes[name][-1] == 4 and not add_up(_stacked(name, seen)).all()
    ]
    grid = None
    if len(boxes) > 1:  # one is the scores of four classes
        boxes = [name for name in boxes if not _sees_little(_stacked(name, seen))]
    if not boxes:
        sizes = {image_size(inputs) for inputs in seen.inputs}
        size = next(iter(sizes)) if len(sizes) == 1 else None
        boxes = [n for n in names if shapes[n][-1] % 4 == 0 and shapes[n][-1] >= 4 * _BINS]
        found = [] if size is None else list(grids(shapes[names[0]][-2], size, 1))
        grid = next((one for one in found if one.anchors == 1), None)
        boxes = [name for name in boxes if not _is_share(_stacked(name, seen))]
        if grid is None:
            boxes = _with_points(names, seen)
    if len(boxes) != 1:
        return None
    others = [name for name in names if name != boxes[0]]
    scores = [name for name in others if _is_share(_stacked(name, seen))]
    if not scores and len(others) <= 2:
        scores = others
    if len(scores) == 2:
        gates = [name for name in scores if shapes[name][-1] == 1][-1:]
        kinds = [name for name in scores if name not in gates]
        return Pair(kinds[0], boxes[0], grid, gates[0]) if gates else None
    return Pair(scores[0], boxes[0], grid) if len(scores) == 1 else None


def _with_points(names: Sequence[str], seen: Seen) -> list[str]:
    """The output of boxes and key points in one, beside one raw score of every anchor."""
    wide = [n for n in names if (size := seen.outputs[0][n].shape[-1]) > 4 and not size % 2]
    others = [name for name in names if name not in wide]
    pictures = all(image_size(fed) is not None for fed in seen.inputs)
    if not pictures or len(wide) != 1 or len(others) != 1 or len(names) != len(seen.names):
        return []
    scores = _stacked(others[0], seen)
    return wide if scores.shape[1] == 1 and scores.min() < 0 and _sees_little(scores) else []


def _is_share(rows: Floats) -> bool:
    return bool(rows.size and rows.min() >= -1e-3 and rows.max() <= 1 + 1e-3)


def _sees_little(rows: Floats) -> bool:
    """Whether rows of shares, or of raw scores, are sure of nothing nearly everywhere."""
    best = rows.max(axis=1)
    return bool(
        np.mean(best < _IDLE) >= _BELOW and (_is_share(rows) or np.mean(best < 0) >= _BELOW)
    )


def _activation(levels: list[Floats]) -> tuple[str, int | None] | None:
    """How scores become probabilities, and the background's class; None where nothing tells."""
    if len({rows.shape[1] for rows in levels}) != 1:
        return None
    rows = np.concatenate(levels)
    if not np.isfinite(rows).all():
        return None
    last = rows.shape[1] - 1
    wins = np.bincount(rows.argmax(axis=1), minlength=last + 1)
    ground = int(wins.argmax()) if wins.max() >= _WINS * wins.sum() and last else None
    ground = ground if ground in (0, last) else None
    if _is_share(rows):
        whole = last > 0 and add_up(rows).all()
        return ("", None) if not whole else None if ground is None else ("", ground)
    if np.mean(rows.max(axis=1) < 0) >= _BELOW:
        return "sigmoid", None
    return None if ground is None else ("softmax", ground)


def _coding(levels: list[Floats], pairs: Sequence[Pair], seen: Seen) -> str | None:
    if any(pair.grid is not None for pair in pairs):
        return "distribution" if all(pair.grid is not None for pair in pairs) else None
    rows = np.concatenate(levels)
    if not np.isfinite(rows).all():
        return None
    if rows.shape[1] != 4:  # boxes and key points
        return ""
    if np.mean(np.all(rows[:, 2:] >= rows[:, :2], axis=1)) > 0.99:
        return "corners"
    inside = rows.min() >= -0.05 and rows.max() <= 1.05
    if len(pairs) == 1 and inside and len(rows) <= 4 * _QUERIES:
        return "centre"
    return "centre" if len(pairs) == 1 and _at_anchors(rows, seen) else ""


def _at_anchors(rows: Floats, seen: Seen) -> bool:
    """Whether boxes of all samples have their centres at the anchors of a grid."""
    sizes = {image_size(inputs) for inputs in seen.inputs}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    found = [] if size is None else grids(len(rows) // len(seen.inputs), size)
    own = [size] * len(seen.inputs) if size is not None else []
    return any(at_anchors(rows.T, own, grid) == "centre" for grid in found)


def _shares(rows: Floats, how: Anchors) -> Floats:
    """Probabilities without the background's."""
    with np.errstate(over="ignore", invalid="ignore"):
        if how.activation == "sigmoid":
            rows = 1 / (1 + np.exp(-rows))
        elif how.activation == "softmax":
            rows = _softmax(rows)
    return rows if how.background is None else np.delete(rows, how.background, axis=1)


def _softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    power = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return np.asarray(power / power.sum(axis=-1, keepdims=True))


def _corners(
    rows: Floats,
    here: NDArray[np.int64],
    coding: str,
    grid: Grid | None,
    size: tuple[int, int] | None,
) -> Floats:
    """Boxes of the rows `here` of a level."""
    if coding == "corners":
        return rows[here]
    if grid is None or size is None:
        return corners(rows[here])
    return distances(rows, here, grid, size)


def distances(rows: Floats, here: NDArray[np.int64], grid: Grid, size: tuple[int, int]) -> Floats:
    """Corners of the rows `here` of distributions [A, 4 (m + 1)], a row a cell of the grid."""
    rows = rows[here]
    cells, strides = (one[here] for one in grid.cells(size))
    bins = rows.reshape(len(rows), 4, rows.shape[1] // 4)
    with np.errstate(invalid="ignore"):
        far = _softmax(bins) @ np.arange(bins.shape[2])  # left, top, right, bottom
    middle = cells + 0.5
    return np.concatenate([middle - far[:, :2], middle + far[:, 2:]], axis=1) * strides[:, None]


_QUERY_COUNTS = (100, 1000)  # of a DETR, at least and at most
_QUIET = 0.1  # median of what a row's best class is, at most
_OUTSIDE = 0.1  # of the picture, that a box of a query may lie
_NEARLY_ALL = 0.95


@dataclass(frozen=True, slots=True)
class Joined:
    """One tensor.

    Attributes:
        output: its name.
        classes: how many there are.
        rows: all columns.
        grid: of anchors whose boxes are distributions; None of queries, whose boxes come first.
        parts: as of a task.
    """

    output: str
    classes: int
    rows: int
    grid: Grid | None
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Boxes are places."""
        return True

    @property
    def form(self) -> str:
        """How the output is read."""
        coding = "centre" if self.grid is None else "distribution"
        return f"{self.output}: {self.classes} classes and boxes by {coding} in a row"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """All boxes of one sample."""
        rows, size = table(outputs[self.output]), image_size(inputs)
        if rows is None or rows.shape[1] != self.rows:
            return None
        if self.grid is None:
            return by_score(corners(rows[:, :4]), rows[:, 4:])
        if size is None or self.grid.count(size) != len(rows):
            return None
        here = np.flatnonzero(rows[:, : self.classes].max(axis=1) > LOWEST)
        boxes = distances(rows[:, self.classes :], here, self.grid, size)
        return by_score(boxes, rows[here, : self.classes])


def find_joined(seen: Seen) -> Joined | None:
    """The one output that is such a tensor."""
    if len(seen.names) != 1:
        return None
    (name,) = seen.names
    tables = [table(value) for value in seen.arrays(name)]
    sizes = {image_size(inputs) for inputs in seen.inputs}
    known = [one for one in tables if one is not None and np.isfinite(one).all()]
    if len(known) != len(tables) or len({one.shape for one in known}) != 1:
        return None
    size = next(iter(sizes)) if len(sizes) == 1 else None
    return None if size is None else _queries(name, known) or _cells(name, known, size)


def _queries(name: str, samples: list[Floats]) -> Joined | None:
    count, columns = samples[0].shape
    if not _QUERY_COUNTS[0] <= count <= _QUERY_COUNTS[1] or columns < 5:
        return None
    rows = np.concatenate(samples)
    if rows.min() < -1e-3 or rows.max() > 1 + 1e-3 or not _see_little(rows[:, 4:]):
        return None
    if add_up(rows).all():  # classes of steps
        return None
    places = corners(rows[:, :4])
    inside = (places > -_OUTSIDE).all(axis=1) & (places < 1 + _OUTSIDE).all(axis=1)
    spread = rows[:, :2].std(axis=0).min() > _OUTSIDE and rows[:, 2:4].min() > 0
    fits = spread and np.mean(inside) >= _NEARLY_ALL
    return Joined(name, columns - 4, columns, None, _parts(name, 4, columns)) if fits else None


def _cells(name: str, samples: list[Floats], size: tuple[int, int]) -> Joined | None:
    count, columns = samples[0].shape
    grid = next((one for one in grids(count, size) if one.anchors == 1), None)
    rows = np.concatenate(samples)
    shares = (rows.min(axis=0) >= -1e-3) & (rows.max(axis=0) <= 1 + 1e-3)
    classes = int(np.cumprod(shares).sum())
    bins, left = divmod(columns - classes, 4)
    if grid is None or not classes or left or bins < _BINS or shares[classes:].any():
        return None
    if not _see_little(rows[:, :classes]) or rows[:, classes:].min() >= 0:
        return None
    return Joined(name, classes, columns, grid, _parts(name, classes, columns))


def _see_little(scores: Floats) -> bool:
    """Whether most rows are sure of nothing."""
    return bool(np.median(scores.max(axis=1)) < _QUIET)


def _parts(name: str, border: int, columns: int) -> dict[str, tuple[Part, ...]]:
    spans = ((0, border), (border, columns))
    return {name: tuple(Part(output=name, axis=-1, start=a, stop=b) for a, b in spans)}
