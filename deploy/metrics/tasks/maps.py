"""Heads of YOLO v3 to v7 as they leave the last Conv: a map a level, several anchors a cell.

[N, 3 (5 + C), H, W] or [N, k, H, W, 5 + C], of every anchor the box, objectness and classes, raw or
behind a Sigmoid. The sizes of the anchors are not in the model, so boxes cannot be told: an anchor
counts as kept where the same one finds the same class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.detections import Detections, Floats, by_place
from deploy.metrics.tasks.grid import STRIDES
from deploy.metrics.tasks.task import Seen
from deploy.tensors import Array

_ANCHORS = 3  # a cell, where the shape does not tell
_LEVELS = 2  # at least
_NOTHING = 0.05  # mean objectness, at most


@dataclass(frozen=True, slots=True)
class Maps:
    """All levels.

    Attributes:
        levels: their names.
        classes: how many there are.
        raw: whether a Sigmoid is still to come.
        parts: as of a task.
    """

    levels: tuple[str, ...]
    classes: int
    raw: bool
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Boxes are numbers of anchors."""
        return False

    @property
    def form(self) -> str:
        """How the outputs are read."""
        names = ", ".join(self.levels)
        return f"{names}: objectness and {self.classes} classes of anchors, matched by anchor"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """The anchors of one sample that see something."""
        rows = [_anchors(outputs[name]) for name in self.levels]
        known = [one for one in rows if one is not None and one.shape[1] == 5 + self.classes]
        if len(known) != len(rows):
            return None
        scores = np.concatenate(known)[:, 4:]
        if self.raw:
            with np.errstate(over="ignore"):
                scores = 1 / (1 + np.exp(-scores))
        return by_place(scores[:, 1:] * scores[:, :1])


def find(seen: Seen) -> Maps | None:
    """The levels, where every output is one."""
    if len(seen.names) < _LEVELS or len(seen.names) != len(seen.every):
        return None
    fits = [_is_level(name, seen) for name in seen.names]
    rows = [_anchors(value) for name in seen.names for value in seen.arrays(name)]
    known = [one for one in rows if one is not None]
    if not all(fits) or len(known) != len(rows) or len({one.shape[1] for one in known}) != 1:
        return None
    for raw in (True, False):
        if all(_sees_little(one, raw=raw) for one in known):
            return Maps(tuple(seen.names), known[0].shape[1] - 5, raw)
    return None


def _is_level(name: str, seen: Seen) -> bool:
    """Whether its cells are those of a stride, in every sample."""
    return all(
        size is not None and _sides(value) in _cells(size)
        for value, size in zip(seen.arrays(name), map(image_size, seen.inputs), strict=True)
    )


def _sides(value: Array) -> tuple[int, ...]:
    return value.shape[2:4]


def _cells(size: tuple[int, int]) -> Sequence[tuple[int, int]]:
    height, width = size
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES[1:]]


def _anchors(value: Array) -> Floats | None:
    """A level -> [anchors, 5 + C]; None for other shapes."""
    if value.ndim not in (4, 5) or len(value) != 1 or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 5:
        rows = value.reshape(-1, value.shape[4])
    elif value.shape[1] % _ANCHORS:
        return None
    else:
        each = value.reshape(_ANCHORS, value.shape[1] // _ANCHORS, -1)
        rows = each.transpose(0, 2, 1).reshape(-1, each.shape[1])
    return rows.astype(np.float64) if rows.shape[1] >= 6 else None


def _sees_little(rows: Floats, *, raw: bool) -> bool:
    """Whether objectness is near 0 nearly everywhere, as nothing else than objectness is."""
    if not np.isfinite(rows).all():
        return False
    if not raw:
        return bool(rows.min() >= 0 and rows.max() <= 1 and rows[:, 4].mean() < _NOTHING)
    least = float(np.log(_NOTHING))
    others = float(np.median(rows[:, :4]))  # of the box, which are about 0
    return bool(rows[:, 4].mean() < least < others and rows[:, 4].min() < -1)
