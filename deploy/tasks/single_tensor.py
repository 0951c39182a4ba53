"""Detectors with scores and boxes in one tensor [N, A, R] of queries or cells: RT-DETR, NanoDet.

========================  ======================================================================
[N, Q, 4 + C]             centre and size of a few queries, relative to the picture, and a
                          probability per class: RT-DETR (Zhao et al. 2023), complete export
[N, A, C + 4 (m + 1)]     a probability per class, and distributions as in `anchors`: NanoDet
========================  ======================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from deploy.tasks.anchors import MAX_QUERIES, MIN_BINS, decode_distances, to_table
from deploy.tasks.detections import LOWEST, Detections, detections_by_score
from deploy.tasks.evaluation_task import FirstSamples
from deploy.tasks.rows import Floats, Outputs, are_shares, image_size, sums_to_one
from deploy.tasks.slices import OutputSlice
from deploy.tasks.yolo import AnchorGrid, find_grids, to_corners

_MIN_QUERIES = 100  # of a DETR, at least
_MAX_MEDIAN_SCORE = 0.1  # median over rows of the best probability, at most
_MAX_OUTSIDE = 0.1  # distance that a query's box may leave the picture, relative to it
_MIN_INSIDE_SHARE = 0.95  # share of queries whose box lies in the picture, at least


@dataclass(frozen=True, slots=True)
class SingleTensorDecoder:
    """Decoder of scores and boxes in one tensor.

    Attributes:
        output: name of the output.
        classes: number of classes.
        rows: number of columns of a row.
        grid: of anchors whose boxes are distributions; None for queries, whose boxes come first.
        parts: slices of the output.
    """

    output: str
    classes: int
    rows: int
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


def find_single_tensor(samples: FirstSamples) -> SingleTensorDecoder | None:
    """Recognise a single output that holds scores and boxes."""
    if len(samples.names) != 1 or samples.picture_size is None:
        return None
    (name,) = samples.names
    tables = []
    for value in samples.arrays(name):
        table = to_table(value)
        if table is None or not np.isfinite(table).all():
            return None
        tables.append(table)
    if len({table.shape for table in tables}) != 1:
        return None
    return _find_queries(name, tables) or _find_cells(name, tables, samples.picture_size)


def _find_queries(name: str, samples: list[Floats]) -> SingleTensorDecoder | None:
    count, columns = samples[0].shape
    if not _MIN_QUERIES <= count <= MAX_QUERIES or columns < 5:
        return None
    rows = np.concatenate(samples)
    if not (are_shares(rows) and _rarely_detect(rows[:, 4:])):
        return None
    if sums_to_one(rows).all():  # a sequence's classes per step
        return None

    corners = to_corners(rows[:, :4])
    is_inside = (corners > -_MAX_OUTSIDE).all(axis=1) & (corners < 1 + _MAX_OUTSIDE).all(axis=1)
    are_spread = rows[:, :2].std(axis=0).min() > _MAX_OUTSIDE and rows[:, 2:4].min() > 0
    if not are_spread or np.mean(is_inside) < _MIN_INSIDE_SHARE:
        return None
    return SingleTensorDecoder(name, columns - 4, columns, None, _split_rows(name, 4, columns))


def _find_cells(
    name: str, samples: list[Floats], size: tuple[int, int]
) -> SingleTensorDecoder | None:
    count, columns = samples[0].shape
    grid = next((grid for grid in find_grids(count, size) if grid.anchors == 1), None)
    rows = np.concatenate(samples)
    has_shares = (rows.min(axis=0) >= -1e-3) & (rows.max(axis=0) <= 1 + 1e-3)
    classes = int(np.cumprod(has_shares).sum())  # the columns up to the first other one
    bins, remainder = divmod(columns - classes, 4)
    if grid is None or not classes or remainder or bins < MIN_BINS:
        return None
    if has_shares[classes:].any() or rows[:, classes:].min() >= 0:
        return None
    if not _rarely_detect(rows[:, :classes]):
        return None
    parts = _split_rows(name, classes, columns)
    return SingleTensorDecoder(name, classes, columns, grid, parts)


def _rarely_detect(scores: Floats) -> bool:
    return bool(np.median(scores.max(axis=1)) < _MAX_MEDIAN_SCORE)


def _split_rows(name: str, border: int, columns: int) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the two slices of an output's rows, up to a column and from there on."""
    before = OutputSlice(output=name, axis=-1, start=0, stop=border)
    return {name: (before, OutputSlice(output=name, axis=-1, start=border, stop=columns))}
