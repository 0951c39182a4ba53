"""Slices of an output: rows or channels with a unit of their own, derived from the data.

A detector may put boxes of 0..640 and scores of 0..1 into one tensor; an SQNR over both is that of
the boxes. `split_output` splits such a tensor where its unit changes::

    [1, 22, 2100]   rows 0..3    0..640     boxes    ->  output0[0:4]
                    rows 4..21   0..1       scores   ->  output0[4:22]

Rows of one unit differ in magnitude too: the probability of an absent class is 1e-6, that of a
present one 0.5. So a gap in magnitude alone is no border; see `_gap`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import (
    Arrays,
    Flags,
    Floats,
    Outputs,
    activate,
    is_floating,
)
from deploy.tasks.thresholds import (
    MAX_FORM_SAMPLES,
    MAX_SILENT_PEAK,
    MIN_FORM_SAMPLES,
    MIN_ROW_VALUES,
    MIN_UNIT_RATIO,
    UNIT_TOLERANCE,
)
from deploy.tensors import Array

_MAX_SAMPLE_VALUES = 1 << 26  # values of the first samples together, 256 MiB of float32
_MAX_ROWS = 1024  # of an output that is split


def count_form_samples(inputs: Outputs, outputs: Outputs) -> int:
    """Return from how many samples the form of outputs is derived, by the arrays of one sample.

    Outputs of few values need more samples, and so does a single value beside larger outputs: few
    samples do not show that a value is a probability, near 0 in some and near 1 in others. All
    samples are in memory at once, so there are fewer of large arrays.
    """
    has_single = any(value.size <= 1 and value.dtype.kind == "f" for value in outputs.values())
    max_size = max((value.size for value in outputs.values()), default=0)
    if not has_single and max_size > MIN_ROW_VALUES:
        return MIN_FORM_SAMPLES
    total = sum(value.size for value in (*inputs.values(), *outputs.values()))
    max_count = _MAX_SAMPLE_VALUES // max(total, 1)
    return max(MIN_FORM_SAMPLES, min(MAX_FORM_SAMPLES, max_count))


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """A slice of an output, the complete output, or its difference from an input or its mean.

    Attributes:
        output: name of the output.
        axis: 1 or -1, the dimension of the rows; None for the complete output.
        start, stop: the rows, half open; stop 0 for all from start on.
        subtracted: what is subtracted from the output first: an input, by its name, or
            `SAMPLE_MEAN`.
        resize: interpolation that makes that input as large as the output; "" if it is.
        cell_scores: scores of the same cells. Each cell is weighted by its best score, since values
            of cells without an object are not used.
        activation: missing activation of scores: "", "sigmoid" or "softmax".
    """

    output: str
    axis: int | None = None
    start: int = 0
    stop: int = 0
    subtracted: str = ""
    resize: str = ""
    cell_scores: "OutputSlice | None" = None
    activation: str = ""

    @property
    def label(self) -> str:
        """Such as output0[4:22], or output0[..., 4:22] if the rows are the last dimension."""
        rows = ""
        if self.axis is not None and self.stop:
            rows = f"[{'..., ' * (self.axis == -1)}{self.start}:{self.stop}]"
        subtracted = f" - {self.subtracted}" if self.subtracted else ""
        if self.resize:
            subtracted += " resized"
        weight = "" if self.cell_scores is None else f" weighted by {self.cell_scores.label}"
        return f"{self.output}{rows}{subtracted}{weight}"

    def of(self, value: Array) -> Array:
        """Return the slice of an array of the output, with all its dimensions, as a view."""
        if self.axis is None or value.ndim < 2:
            return value
        rows = slice(self.start, self.stop or None)
        if self.axis == -1:
            return value[..., rows]
        return value[:, rows]

    def best_scores(self, outputs: Outputs) -> Array:
        """Return the probability of each cell, the best of the slice's rows."""
        shares = self.of(activate(outputs[self.output], self.activation, self.axis or -1))
        if self.axis is None:
            return shares
        return np.asarray(shares.max(axis=self.axis, keepdims=True))

    def weigh(self, values: Array, reference: Outputs) -> Array:
        """Return values of the slice times the float model's scores of their cells.

        They are unchanged without scores, or if these are not of its cells; see `_broadcast_shape`.
        """
        if self.cell_scores is None:
            return values
        scores = self.cell_scores.best_scores(reference)
        score_shape = _broadcast_shape(scores.shape, values.shape)
        if score_shape is None:
            return values
        return np.multiply(values, scores.reshape(score_shape)).astype(values.dtype)


SlicesByOutput = dict[str, tuple[OutputSlice, ...]]


def _broadcast_shape(
    score_shape: tuple[int, ...], value_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape in which scores broadcast to values of the same cells; None if none fits.

    Sides of 1 do not matter, and the values may have one axis that the scores lack, their channels.
    One score a sample fits all values. Examples::

        values [N, 1, T]      scores [N, T]
        values [N, A, 4]      scores [N, A] or [N, A, 1]
        values [N, C, H, W]   scores [N, H, W] or [N, 1, H, W]
    """
    if score_shape[:1] != value_shape[:1]:
        return None
    score_sides = [side for side in score_shape[1:] if side != 1]
    if not score_sides:
        return (score_shape[0], *[1] * (len(value_shape) - 1))
    candidates = [value_shape]  # without channels
    for axis in reversed(range(1, len(value_shape))):  # with channels along this axis
        candidates.append((*value_shape[:axis], 1, *value_shape[axis + 1 :]))
    for shape in candidates:
        if [side for side in shape[1:] if side != 1] == score_sides:
            return shape
    return None


def find_cell_scores(
    slices: Sequence[OutputSlice], samples: FirstSamples
) -> dict[OutputSlice, OutputSlice]:
    """Return slice of values -> slice of scores, by which the values of each cell are weighted.

    A cell is one place of both outputs, such as a time step. For example a pitch -> its
    confidence, or a landmark -> its visibility. A Sigmoid at the end of the graph computes the
    scores, which are probabilities of independent things.
    """
    sigmoid_outputs = samples.sigmoid_outputs
    scores_by_slice: dict[OutputSlice, OutputSlice] = {}
    for value_slice, score_slice in itertools.permutations(slices, 2):
        if score_slice.output not in sigmoid_outputs or value_slice.output in sigmoid_outputs:
            continue
        if all(_fit_cells(score_slice, value_slice, outputs) for outputs in samples.outputs):
            scores_by_slice.setdefault(value_slice, score_slice)  # the first that fit are taken
    return scores_by_slice


def _fit_cells(score_slice: OutputSlice, value_slice: OutputSlice, outputs: Outputs) -> bool:
    """Whether there is one score for each cell of the values, in one sample."""
    scores = score_slice.of(outputs[score_slice.output])
    value = value_slice.of(outputs[value_slice.output])
    if scores.size < 2 or value.ndim < 2 or not is_floating(value):
        return False
    return _broadcast_shape(scores.shape, value.shape) is not None


def split_output(output: str, samples: Arrays) -> tuple[OutputSlice, ...]:
    """Return the slices of one output, from the reference's values; the output itself if uniform.

    `samples`: its arrays for the first few samples, each [1, ...] or without a batch.
    """
    for axis in (1, -1):
        rows = _read_rows(samples, axis)
        if rows is None:
            continue
        spans = [*_split_spans(rows, 0, len(rows.peak))]
        if len(spans) > 1:
            return tuple(OutputSlice(output, axis, start, stop) for start, stop in spans)
    return (OutputSlice(output),)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the values of each row of an output are.

    Attributes:
        peak: largest magnitude.
        in_unit_range: whether all are in [0, 1].
    """

    peak: Floats
    in_unit_range: Flags


def _read_rows(samples: Arrays, axis: int) -> _Rows | None:
    """Return the largest magnitude in each row along an axis, and whether the row lies in [0, 1].

    A row is everything at one index of that axis, such as a channel, in all samples. None if the
    samples differ in their number of rows, or the rows have too few values.

    `samples`: an output's arrays for the first few samples. `axis`: 1 or -1.
    """
    tables = []  # of each sample, [rows, values of a row]
    for sample in samples:
        if sample.ndim < 2 or not sample.size or not is_floating(sample):
            return None
        tables.append(np.moveaxis(sample, axis, 0).reshape(sample.shape[axis], -1))
    row_counts = {len(table) for table in tables}
    if len(row_counts) > 1 or not 2 <= len(tables[0]) <= _MAX_ROWS:
        return None
    values = np.concatenate(tables, axis=1)
    if values.shape[1] < MIN_ROW_VALUES:
        return None
    in_unit_range = np.all((values >= -UNIT_TOLERANCE) & (values <= 1 + UNIT_TOLERANCE), axis=1)
    return _Rows(np.abs(values).max(axis=1).astype(np.float64), in_unit_range)


def _split_spans(rows: _Rows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the rows start to stop, split recursively where their unit changes most."""
    gaps = [_gap(rows, start, cut, stop) for cut in range(start + 1, stop)]
    widest = max(gaps, default=0.0)
    if widest < MIN_UNIT_RATIO:
        yield start, stop
        return
    cut = start + 1 + gaps.index(widest)
    yield from _split_spans(rows, start, cut)
    yield from _split_spans(rows, cut, stop)


def _gap(rows: _Rows, start: int, cut: int, stop: int) -> float:
    """Return how many times as large the values on one side of a cut are as those on the other.

    The sides are the rows [start, cut) and [cut, stop) of an output, such as boxes in pixels and
    scores of 0 to 1. The result is the smallest peak (largest magnitude in a row) of the side with
    the larger values, divided by the largest peak of the other side; 0 if nothing shows that the
    sides differ in their unit.
    """
    large = slice(start, cut)
    small = slice(cut, stop)
    if rows.peak[large].min() <= rows.peak[small].max():
        large, small = small, large  # where the ranges overlap, the result is at most 1
    small_peak = rows.peak[small].max()
    if small_peak < MAX_SILENT_PEAK:
        return 0.0  # rows near 0 show no unit
    if rows.in_unit_range[large].any():
        return 0.0  # rows of 0 to 1 on the large side: both sides may be probabilities
    has_single_row = min(cut - start, stop - cut) < 2
    if has_single_row and not rows.in_unit_range[small].all():
        return 0.0  # a single row that stands out may be a channel of a feature map
    return float(rows.peak[large].min() / small_peak)
