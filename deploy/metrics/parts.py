"""Parts of an output: rows or channels with a unit of their own, found from the data.

A detector may put boxes of 0..640 and scores of 0..1 into one tensor; one figure over both is the
boxes' alone. `parts_of` splits such a tensor where its unit changes::

    [1, 22, 2100]   rows 0..3    0..640     boxes    ->  output0[0:4]
                    rows 4..21   0..1       scores   ->  output0[4:22]

Rows of one unit differ in size too: the probability of a class that is never there is 1e-6 beside
one of 0.5. So a gap in magnitude alone is no border; `_gap` says what is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.tensors import Array

SAMPLES = 4  # samples that the form of the outputs is found from, whatever the batch
_FACTOR = 8.0  # between every row of the larger unit and any of the smaller
_SILENT = 0.01  # rows that never reach it have no unit to be told by
_VALUES = 16  # a row of fewer values (as of [N, classes]) shows no range of its own
_MOST_ROWS = 1024
_TOLERANCE = 1e-3  # what rounding adds to a probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some rows of an output, or all of it, or all that it changes of an input.

    Attributes:
        output: its name.
        axis: 1 or -1, the dimension of the rows; None for the whole output.
        start, stop: the rows, half open.
        less: input that the output gives back but for a small change, which is the part then; or
            that it is the mean which it hardly leaves.
        at: output of scores on the same cells, that says where objects are: each cell counts by its
            best score, since nobody reads what else stands for an object that is not there.
        raw: whether a Sigmoid of these scores is still to come.
    """

    output: str
    axis: int | None = None
    start: int = 0
    stop: int = 0
    less: str = ""
    at: str = ""
    raw: bool = False

    @property
    def label(self) -> str:
        """As in output0[4:22], or output0[..., 4:22] where the rows are the last dimension."""
        if self.less:
            return f"{self.output} - {self.less}"
        if self.at:
            return f"{self.output} where {self.at} is high"
        if self.axis is None:
            return self.output
        dots = "..., " if self.axis == -1 else ""
        return f"{self.output}[{dots}{self.start}:{self.stop}]"

    def of(self, value: Array) -> Array:
        """Its values in an array of the output, with every dimension kept."""
        if self.axis is None or value.ndim < 2:
            return value
        rows = slice(self.start, self.stop)
        return value[..., rows] if self.axis == -1 else value[:, rows]


def at_objects(value: Array, scores: Array, *, raw: bool) -> Array:
    """Values of cells, [N, C, H, W], each times the best of its cell's scores, [N, K, H, W].

    Args:
        value: as it is where its cells are others.
        scores: of the float model, whichever model the values are of.
        raw: whether a Sigmoid of the scores is still to come.
    """
    best = scores.max(axis=1, keepdims=True)
    if value.shape[:1] + value.shape[2:] != best.shape[:1] + best.shape[2:]:
        return value
    with np.errstate(over="ignore"):
        return np.asarray(value * (1 / (1 + np.exp(-best)) if raw else best))


def parts_of(output: str, samples: Sequence[Array]) -> tuple[Part, ...]:
    """The parts of one output, from the reference's values alone; the whole where it has one unit.

    Args:
        output: its name.
        samples: its arrays for the first few samples, each [1, ...] or without a batch.
    """
    found: list[tuple[float, tuple[Part, ...]]] = []
    for axis in (1, -1):
        rows = _rows(samples, axis)
        if rows is None or (axis == -1 and samples[0].ndim == 2 and found):
            continue
        spans = list(_spans(rows, 0, len(rows.peak)))
        if len(spans) > 1:
            cut = tuple(Part(output=output, axis=axis, start=a, stop=b) for a, b in spans)
            found.append((_gap(rows, spans[0][0], spans[0][1], spans[1][1]), cut))
    if not found:
        return (Part(output=output),)
    return max(found, key=lambda one: one[0])[1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Largest magnitude of each row; whether it is a share (within [0, 1]) or whole numbers."""

    peak: NDArray[np.float64]
    share: NDArray[np.bool_]
    number: NDArray[np.bool_]

    def top(self, rows: slice) -> float:
        """Largest magnitude of these rows; class numbers count only where no other row is loud."""
        peaks = self.peak[rows]
        others = float(peaks[~self.number[rows]].max(initial=0.0))
        return others if others >= _SILENT else float(peaks.max())


def _rows(samples: Sequence[Array], axis: int) -> _Rows | None:
    """Peaks and units along an axis; None where it has no rows that could be told apart."""
    peaks: list[NDArray[np.float64]] = []
    shares: list[NDArray[np.bool_]] = []
    numbers: list[NDArray[np.bool_]] = []
    values = 0
    for sample in samples:
        if sample.ndim < 2 or not np.issubdtype(sample.dtype, np.floating) or sample.size == 0:
            return None
        rows = np.moveaxis(sample, axis, 0).reshape(sample.shape[axis], -1)
        if not 2 <= len(rows) <= _MOST_ROWS or (peaks and len(rows) != len(peaks[0])):
            return None
        low, high = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
        if not np.isfinite(low + high).all():
            return None
        values += rows.shape[1]
        peaks.append(np.maximum(np.abs(low), np.abs(high)))
        shares.append((low >= -_TOLERANCE) & (high <= 1 + _TOLERANCE))
        numbers.append((rows == np.rint(rows)).all(axis=1))
    if not peaks or values < _VALUES:
        return None
    share = np.all(shares, axis=0)
    return _Rows(np.max(peaks, axis=0), share, np.all(numbers, axis=0) & ~share)


def _spans(rows: _Rows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at its widest gap, and both sides again; as it is where there is none."""
    gaps = [_gap(rows, start, at, stop) for at in range(start + 1, stop)]
    widest = max(gaps, default=0.0)
    if widest < _FACTOR:
        yield start, stop
        return
    at = start + 1 + gaps.index(widest)
    yield from _spans(rows, start, at)
    yield from _spans(rows, at, stop)


def _gap(rows: _Rows, start: int, at: int, stop: int) -> float:
    """Least of the larger unit's rows over the largest of the smaller's; 0 where units are alike.

    Every row of the larger side must leave [0, 1]. The smaller side must be shares that are seen
    to be more than silence; or, of another unit than shares, both sides must have two rows or
    more, since a single channel of a feature map may well stand out. Class numbers on the smaller
    side do not count in its magnitude: boxes of 0..320 may stand beside a score and 0..79.
    """
    left, right = slice(start, at), slice(at, stop)
    large, small = (left, right) if rows.peak[left].min() > rows.top(right) else (right, left)
    top = rows.top(small)
    if top < _SILENT or bool(rows.share[large].any()):
        return 0.0
    alone = min(at - start, stop - at) < 2
    if alone and not bool(rows.share[small].all()):
        return 0.0
    return float(rows.peak[large].min()) / top
