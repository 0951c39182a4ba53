"""Boxes and scores side by side in one tensor, one row an anchor or a query, [N, A, R].

========================  ======================================================================
[N, Q, 4 + C]             centre and size of a few queries in shares of the picture, and a
                          probability a class: RT-DETR (Zhao et al. 2023) as it is exported whole
[N, A, C + 4 (m + 1)]     a probability a class, and distributions of the four distances from an
                          anchor's cell: NanoDet (as `deploy.metrics.tasks.anchors` has them apart)
========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.anchors import distances
from deploy.metrics.tasks.detections import LOWEST, Detections, Floats, by_score
from deploy.metrics.tasks.grid import Grid, grids
from deploy.metrics.tasks.tables import table
from deploy.metrics.tasks.task import Seen
from deploy.metrics.tasks.yolo import corners
from deploy.metrics.whole import add_up

_QUERIES = (100, 1000)  # of a DETR, at least and at most
_BINS = 4  # of a distribution, at least
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


def find(seen: Seen) -> Joined | None:
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
    if not _QUERIES[0] <= count <= _QUERIES[1] or columns < 5:
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
