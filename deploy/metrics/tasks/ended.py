"""Boxes after the model's own suppression: a list of corners, score and class.

YOLO v10 and others end to end, TensorRT's NMS behind a detector, Paddle's, DetectionOutput of SSD,
and the corners and score of MMDetection's exports beside classes.

Lists are in order of score, so a row of one model is no row of the other: values are compared in
the column of scores alone, and not at all where the length of the list varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs
from deploy.metrics.tasks.detections import Detections, Floats
from deploy.metrics.tasks.task import Seen
from deploy.tensors import Array

_ROWS = 3  # of all samples, to be sure of the columns

# columns of a row -> (first of the corners, score, class)
_LAYOUTS: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    6: ((0, 4, 5), (0, 5, 4), (2, 1, 0)),
    7: ((1, 6, 5), (1, 5, 6), (3, 2, 1)),  # the first column is the number of the image
}


@dataclass(frozen=True, slots=True)
class Ended:
    """One list of rows, three outputs: boxes, scores, classes; or two: boxes with scores, classes.

    Attributes:
        outputs: one name, two or three.
        columns: as in `_LAYOUTS`, of one output.
        parts: as of a task.
    """

    outputs: tuple[str, ...]
    columns: tuple[int, int, int] = (0, 4, 5)
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Boxes are places."""
        return True

    @property
    def classes(self) -> None:
        """A list of boxes does not tell how many there are."""
        return None

    @property
    def form(self) -> str:
        """How the outputs are read."""
        return f"{', '.join(self.outputs)}: a list of boxes, scores and classes"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """The boxes of one sample."""
        rows = _joined([outputs[name] for name in self.outputs])
        if rows is None:
            return None
        corner, score, kind = self.columns
        numbers = np.nan_to_num(rows[:, kind], nan=-1, posinf=-1, neginf=-1)
        boxes = rows[:, corner : corner + 4]
        return Detections.of(boxes, rows[:, score], numbers.round().astype(np.int64))


def find(seen: Seen) -> Ended | None:
    """The list, in one output, in two or in three."""
    for name in seen.every:
        columns = _columns([_joined([value]) for value in seen.arrays(name)])
        if columns is not None:
            return Ended((name,), columns, {name: _scores(name, columns[1], seen)})
    return _two(seen) or _three(seen)


def _two(seen: Seen) -> Ended | None:
    """Outputs of corners and score [.., K, 5] and classes [.., K]."""
    first = seen.outputs[0]
    for rows in (name for name in seen.every if first[name].shape[-1:] == (5,)):
        for kind in (name for name in seen.every if name != rows):
            samples = [_joined([one[rows], one[kind]]) for one in seen.outputs]
            if _fits(samples, (0, 4, 5)):
                return Ended((rows, kind), (0, 4, 5), {rows: _scores(rows, 4, seen), kind: ()})
    return None


def _three(seen: Seen) -> Ended | None:
    """Outputs of boxes [.., K, 4], scores [.., K] and classes [.., K]."""
    first = seen.outputs[0]
    boxes = [name for name in seen.every if first[name].shape[-1:] == (4,)]
    flat = [name for name in seen.every if name not in boxes and max(first[name].shape, default=0)]
    for box in boxes:
        for score in flat:
            for kind in flat:
                names = (box, score, kind)
                samples = [_joined([one[name] for name in names]) for one in seen.outputs]
                if score != kind and _fits(samples, (0, 4, 5)):
                    parts = dict.fromkeys((box, kind), ())
                    varies = len({one[score].shape for one in seen.outputs}) > 1
                    whole = () if varies else (Part(output=score),)
                    return Ended(names, (0, 4, 5), {**parts, score: whole})
    return None


def _scores(name: str, column: int, seen: Seen) -> tuple[Part, ...]:
    shapes = {one.shape for one in seen.arrays(name)}
    fixed = len(shapes) == 1 and len(next(iter(shapes))) > 2
    return (Part(output=name, axis=-1, start=column, stop=column + 1),) if fixed else ()


def _joined(values: list[Array]) -> Floats | None:
    """[1, K, n] or [K, n] -> [K, n]; of several outputs boxes [K, 4], scores and classes beside."""
    if len(values) == 1:
        value = values[0]
        alone = value.ndim >= 2 and value.shape[-1] in _LAYOUTS
        if not alone or value.size != int(np.prod(value.shape[-2:])):
            return None
        return value.reshape(-1, value.shape[-1]).astype(np.float64)
    if len(values) == 2:
        rows, kinds = values
        if rows.ndim < 2 or rows.shape[-1] != 5:
            return None
        values = [rows[..., :4], rows[..., 4], kinds]
    boxes, scores, kinds = (value.astype(np.float64) for value in values)
    if boxes.shape[-1:] != (4,) or not scores.size == kinds.size == boxes.size // 4:
        return None
    return np.concatenate(
        [boxes.reshape(-1, 4), scores.reshape(-1, 1), kinds.reshape(-1, 1)], axis=1
    )


def _columns(samples: list[Floats | None]) -> tuple[int, int, int] | None:
    """The one layout that all rows fit."""
    known = [one for one in samples if one is not None]
    if len(known) != len(samples) or len({one.shape[1] for one in known}) != 1:
        return None
    fitting = [one for one in _LAYOUTS[known[0].shape[1]] if _fits(samples, one)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(samples: list[Floats | None], columns: tuple[int, int, int]) -> bool:
    known = [one for one in samples if one is not None]
    if len(known) != len(samples):
        return False
    corner, score, kind = columns
    rows = np.concatenate(known)
    if not np.isfinite(rows).all():
        return False
    rows = rows[rows[:, score] > 0]  # the rest of a list of fixed length is filled up
    if len(rows) < _ROWS:
        return False
    scores, kinds = rows[:, score], rows[:, kind]
    low, high = rows[:, corner : corner + 2], rows[:, corner + 2 : corner + 4]
    shares = scores.max() <= 1 + 1e-3 and bool((scores != scores.round()).any())
    numbers = kinds.min() >= 0 and bool((kinds == kinds.round()).all())
    return shares and numbers and bool(np.mean(np.all(high >= low, axis=1)) > 0.99)
