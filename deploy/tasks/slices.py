"""Slices of an output: rows or channels with a unit of their own, derived from the data.

A detector may put boxes of 0..640 and scores of 0..1 into one tensor; an SQNR over both is that of
the boxes. `split_output` splits such a tensor where its unit changes::

    [1, 22, 2100]   rows 0..3    0..640     boxes    ->  output0[0:4]
                    rows 4..21   0..1       scores   ->  output0[4:22]

Rows of one unit differ in magnitude too: the probability of an absent class is 1e-6, that of a
present one 0.5. So a gap in magnitude alone is no border; see `_gap`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks import thresholds
from deploy.tasks.rows import activate, are_two_sided, is_floating, sums_to_one, to_shares
from deploy.tensors import Array

_SAMPLES, _MORE_SAMPLES = 4, 32  # see `form_samples`
_OF_FEW = 16  # values of an output, at most, that need more samples
_MOST_VALUES = 1 << 26  # values of these samples together, 256 MiB of float32
_FACTOR = 8.0  # least ratio between every row of the larger unit and any of the smaller
_SILENT = 0.01  # rows whose peak stays below it show no unit
_VALUES = 16  # fewer values per row (as in [N, classes]) do not show its range
_MOST_ROWS = 1024
_TOLERANCE = 1e-3  # rounding of a probability
_LOW = 0.2  # scores below it are low, above 1 - it high
_SOME = 0.1  # share of sure scores near 0, and near 1, at least
_DECIDED = 0.75  # share of scores near 0 or 1 in one output with values, or beside 0..1, at least
_HALF = 0.5  # the same beside as many other values


def form_samples(inputs: Mapping[str, Array], outputs: Mapping[str, Array], batch: int = 1) -> int:
    """Return how many samples the form of these outputs is derived from, whatever the batch.

    Outputs of few values need more samples, and so does a single value beside larger outputs: only
    these show that a value is a probability, near 0 in some samples and near 1 in others, or that
    values are sorted. Large arrays limit them, since all are in memory at once.
    """
    one_value = any(one.size <= batch and one.dtype.kind == "f" for one in outputs.values())
    few = one_value or all(one.size <= _OF_FEW * batch for one in outputs.values())
    values = sum(one.size for one in (*inputs.values(), *outputs.values())) // batch
    most = min(_MORE_SAMPLES, _MOST_VALUES // max(values, 1)) if few else 0
    return max(_SAMPLES, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSlice:
    """A slice of an output, the complete output, or its difference from an input or its mean."""

    output: str
    axis: int | None = None  # 1 or -1, the dimension of the rows; None for the complete output
    # start, stop: the rows, half open; stop 0 for all from start on
    start: int = 0
    stop: int = 0
    # numbers per cell of a flat output, whose rows are the last dimension of [N, cells, width]
    width: int = 0
    # name of the input, or `USUAL` for the mean, that is subtracted from the output first
    less: str = ""
    resize: str = ""  # interpolation that makes that input as large as the output; "" if it is
    # scores of the same cells. Each cell is weighted by its best score, since values of cells
    # without an object are not used
    at: "OutputSlice | None" = None
    activation: str = ""  # missing activation of scores: "", "sigmoid" or "softmax"

    @property
    def label(self) -> str:
        """Such as output0[4:22], or output0[..., 4:22] if the rows are the last dimension."""
        rows = ""
        if self.axis is not None and self.stop:
            every = f" of {self.width}" if self.width else ""
            rows = f"[{'..., ' * (self.axis == -1)}{self.start}:{self.stop}{every}]"
        less = f" - {self.less}" if self.less else ""
        if self.resize:
            less += " resized"
        where = "" if self.at is None else f" where {self.at.label} is high"
        return f"{self.output}{rows}{less}{where}"

    def of(self, value: Array) -> Array:
        """Return the slice of an array of the output, with all its dimensions, as a view."""
        if value.ndim > 1 and self.width and value.size and value[0].size % self.width == 0:
            value = value.reshape(len(value), -1, self.width)
        if self.axis is None or value.ndim < 2:
            return value
        rows = slice(self.start, self.stop or None)
        return value[..., rows] if self.axis == -1 else value[:, rows]

    def best_scores(self, outputs: Mapping[str, Array]) -> Array:
        """Return the probability of each cell, the best of the slice's rows."""
        shares = self.of(activate(outputs[self.output], self.activation, self.axis or -1))
        return shares if self.axis is None else shares.max(axis=self.axis, keepdims=True)

    def weights(self, outputs: Mapping[str, Array]) -> Array:
        """Return the score of each value of the slice."""
        ones = np.ones_like(outputs[self.output])
        self.weight(ones, outputs)
        return self.of(ones)

    def weight(self, value: Array, reference: Mapping[str, Array]) -> None:
        """Multiply the slice of an array of the output by the float model's scores, in place.

        Values of other cells stay unchanged, see `_cells`.
        """
        assert self.at is not None
        rows = self.of(value)
        scores = _enlarge(self.at.best_scores(reference), rows.shape)
        cells = _cells(scores.shape, rows.shape)
        if cells is not None:
            np.multiply(rows, scores.reshape(cells), out=rows, casting="unsafe")


def _enlarge(scores: Array, values: tuple[int, ...]) -> Array:
    """Return a map of scores [N, 1, h, w] as large as values, if these are k times its size."""
    if scores.ndim == len(values) == 4 and scores.shape[1] == 1:
        high, wide = (divmod(values[axis], scores.shape[axis]) for axis in (2, 3))
        if high == wide and high[1] == 0 < high[0]:
            return scores.repeat(high[0], 2).repeat(high[0], 3)
    return scores


def _cells(scores: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape in which scores broadcast to values of the same cells; None if none fits.

    Sides of 1 do not matter, and the values may have one more axis, their channels: [N, T] with
    [N, 1, T], [N, A, 4] with [N, A] or [N, A, 1], [N, C, H, W] with [N, 1, H, W] or [N, H, W].
    One score a sample fits all.
    """
    if scores[:1] != values[:1]:
        return None
    sides = [side for side in scores[1:] if side != 1]
    if not sides:
        return (*scores[:1], *(1 for _ in values[1:]))
    for channels in (None, *reversed(range(1, len(values)))):
        shape = (*(1 if axis == channels else side for axis, side in enumerate(values)),)
        if [side for side in shape[1:] if side != 1] == sides:
            return shape
    return None


def find_scores(samples: Mapping[OutputSlice, Sequence[Array]]) -> dict[OutputSlice, OutputSlice]:
    """Return slices of values that count in some cells -> the slice of these cells' scores.

    Such as a pitch -> its confidence, a landmark -> its visibility. Scores, one a cell, go from 0
    to 1, low in some cells and high in others; logits have two groups on both sides of 0. The
    values leave 0..1, so that it is clear which weights the other; or most are in between, and
    scores are fewer, or mostly near 0 or 1.

    `samples`: slice -> its arrays for the first few samples.
    """
    floating = {
        part: np.concatenate([one.reshape(-1) for one in arrays]).astype(np.float64)
        for part, arrays in samples.items()
        if all(one.size and is_floating(one) for one in arrays)
    }
    unit = [n for n, v in floating.items() if max(-v.min(), v.max() - 1) <= _TOLERANCE]
    raw = [n for n, v in floating.items() if n not in unit and are_two_sided(v, 1)]
    shares = {part: to_shares(floating[part], raw=part in raw) for part in (*unit, *raw)}
    ends = {n: float(np.mean((s < 0.1) | (s > 0.9))) for n, s in shares.items()}
    found: dict[OutputSlice, OutputSlice] = {}
    two = len({part.output for part in samples}) == 2  # of more, a small map may be another level's
    for part, values in floating.items():
        between = part in unit and ends[part] < 0.5
        for other, own in shares.items() if between or part not in unit else ():
            heads = (
                own.size == values.size and values.min() < 0 < values.max() <= thresholds.MAX_LOGIT
            )
            logits = part in raw or heads  # as many of both signs may be another head's
            apart = other not in (part, *(raw if logits else ())) and not other.width
            least = _DECIDED if between or other.axis else _HALF
            decided = ends[other] >= (0 if own.size < values.size and not other.axis else least)
            both = own.size >= _VALUES and max(own.min(), 1 - own.max()) <= _LOW
            if not (apart and decided and both):
                continue
            pairs = [*zip(samples[other], samples[part], strict=True)]
            pairs = [(_enlarge(a, b.shape) if two else a, b) for a, b in pairs]
            if _fit_cells(pairs):
                activation = "sigmoid" if other in raw else ""
                found.setdefault(part, replace(other, activation=activation))
    return found


def _fit_cells(pairs: Sequence[tuple[Array, Array]]) -> bool:
    """Whether there is one score for each cell of the values, not made of the value itself."""
    fit = all(own.size > 1 < value.ndim and _cells(own.shape, value.shape) for own, value in pairs)
    return fit and not all(_is_activation(*pair) for pair in pairs)


def _is_activation(own: Array, value: Array) -> bool:
    """Whether an output is a Softmax, or the Sigmoid of another of its size."""
    if any(sums_to_one(own, axis).all() for axis in range(1, own.ndim)):
        return True
    sigmoid = to_shares(value.astype(np.float64), raw=True)
    return own.size == value.size and np.allclose(own.reshape(value.shape), sigmoid, atol=0.01)


def split_output(output: str, samples: Sequence[Array]) -> tuple[OutputSlice, ...]:
    """Return the slices of one output, from the reference's values; the output itself if uniform.

    `samples`: its arrays for the first few samples, each [1, ...] or without a batch.
    """
    candidates: list[tuple[float, tuple[OutputSlice, ...]]] = []
    for axis in (1, -1):
        rows = _rows(samples, axis)
        if rows is None or (axis == -1 and samples[0].ndim == 2 and candidates):
            continue
        spans = list(_spans(rows, 0, len(rows.peak)))
        if len(spans) > 1:
            slices = tuple(OutputSlice(output=output, axis=axis, start=a, stop=b) for a, b in spans)
            candidates.append((_gap(rows, spans[0][0], spans[0][1], spans[1][1]), slices))
    if not candidates:
        return (OutputSlice(output=output),)
    return max(candidates, key=lambda one: one[0])[1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Peak magnitude of each row; whether all its values are in [0, 1], or integers beyond that.

    `sure`: whether they are in [0, 1], some near 0, some near 1, and few in between.
    """

    peak: NDArray[np.float64]
    share: NDArray[np.bool_]
    number: NDArray[np.bool_]
    sure: NDArray[np.bool_]

    def top(self, rows: slice) -> float:
        """Peak of these rows, without class numbers unless the other rows are silent."""
        peaks = self.peak[rows]
        others = float(peaks[~self.number[rows]].max(initial=0.0))
        return others if others >= _SILENT else float(peaks.max())


def _rows(samples: Sequence[Array], axis: int) -> _Rows | None:
    """Return peaks and units along an axis; None if its rows cannot be told apart."""
    peaks: list[NDArray[np.float64]] = []
    shares: list[NDArray[np.bool_]] = []
    numbers: list[NDArray[np.bool_]] = []
    ends: list[NDArray[np.float64]] = []  # share of values near 0, and near 1
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
        ends.append(np.stack([(rows < 0.1).mean(axis=1), (rows > 0.9).mean(axis=1)]))
    if not peaks or values < _VALUES:
        return None
    share, near = np.all(shares, axis=0), np.mean(ends, axis=0)
    sure = share & (near.sum(axis=0) >= _DECIDED) & (near.min(axis=0) >= _SOME)
    return _Rows(np.max(peaks, axis=0), share, np.all(numbers, axis=0) & ~share, sure)


def _spans(rows: _Rows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) split recursively at its widest gap; unsplit if there is none."""
    gaps = [_gap(rows, start, cut, stop) for cut in range(start + 1, stop)]
    widest = max(gaps, default=0.0)
    if widest < _FACTOR:
        yield start, stop
        return
    cut = start + 1 + gaps.index(widest)
    yield from _spans(rows, start, cut)
    yield from _spans(rows, cut, stop)


def _gap(rows: _Rows, start: int, cut: int, stop: int) -> float:
    """Return the least peak of the larger rows over the largest of the smaller; 0 if units match.

    Every row of the larger side must leave [0, 1]. The smaller side must be probabilities that are
    not silent; if it is of another unit, both sides must have two rows or more, since a single
    channel of a feature map may well stand out. Class numbers on the smaller side do not count in
    its magnitude: boxes of 0..320 may share a tensor with a score and classes 0..79. Beside sure
    probabilities other values need only leave [0, 1], such as the logarithm of a pitch.
    """
    left, right = slice(start, cut), slice(cut, stop)
    large, small = (left, right) if rows.peak[left].min() > rows.top(right) else (right, left)
    top = rows.top(small)
    if top < _SILENT or bool(rows.share[large].any()):
        return 0.0
    single_row = min(cut - start, stop - cut) < 2
    if single_row and not bool(rows.share[small].all()):
        return 0.0
    sure = bool(rows.sure[small].all())
    return float(rows.peak[large].min()) / top * (_FACTOR if sure else 1)
