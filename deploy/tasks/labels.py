"""Labels of taggers (several may hold per sample), and classes that the model has ranked.

`find_labels`: independent probabilities [N, C], nearly all near 0 or 1, or their logits, nearly all
below 0, whereas those of a Softmax are centred at 0. Some samples must have several above 0.5: with
one, classification covers it (`deploy.tasks.classes`).

`find_ranked`: TopK's values and indices, its indices alone, or ArgMax's index. The figure is the
top-1 agreement; words say how often FP32's class is among the candidate's best k, and how much of
the best k is the same. The last of k are near ties, so a set counts a fifth.

`find_integers`: other class numbers and indices, such as those that NonMaxSuppression selects. They
are equal or not, at the same place or, in lists of varying length, as rows in any order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.classes import are_raw_tracks, are_tracks, mean_best_probability
from deploy.tasks.evaluation_task import (
    EvaluationTask,
    FirstSamples,
    TaskFigure,
    TaskTally,
    ThresholdTally,
)
from deploy.tasks.rows import (
    Floats,
    Outputs,
    are_indices,
    are_sorted,
    find_indices,
    is_floating,
    sums_to_one,
    to_shares,
)
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_FEWEST = 4  # number of labels, at least
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_OFF = 0.5  # share of them below 0.1, at least
_BELOW = 0.75  # distance of the mean logit below 0, in standard deviations, at least
_ONE_CLASS = 0.8  # probability of the best of raw labels by a Softmax, at most
_SETS = 5.0  # a wrong share of the best k's set counts as much as a fifth of it in top-1
_USUAL = 0.75  # share of FP32's integers of one value above which only the others are counted
_BYTES = 4  # of an index, at least
_PADDED = -1  # integers that fill a list up


@dataclass(slots=True)
class _LabelTally(ThresholdTally["Labels"]):
    """Counts labels above each threshold: FP32's, the candidate's, both's."""

    thresholds = (0.5, 0.3, 0.1)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        rows = (_vector(one[self.task.output]) for one in (reference, candidate))
        none = np.full(self.task.count, -np.inf)
        left, right = (
            to_shares(none if row is None or row.shape != none.shape else row, raw=self.task.raw)
            for row in rows
        )
        for threshold in self.counts:
            on, other_on = left > threshold, right > threshold
            self.count(threshold, int(on.sum()), int(other_on.sum()), int((on & other_on).sum()))

    def result(self) -> TaskFigure | None:
        return self.share_kept("probability")


@dataclass(frozen=True, slots=True)
class Labels(EvaluationTask):
    """One probability per label."""

    output: str
    count: int
    raw: bool  # whether the output holds logits, before the Sigmoid
    name = "labels"
    tally_type = _LabelTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        raw = "raw scores" if self.raw else "probabilities"
        return f"{self.output}: {raw} of {self.count} labels, each its own"


def find_labels(first_samples: FirstSamples) -> Labels | None:
    """Recognise labels if the only output is such a vector."""
    if len(first_samples.names) != 1:
        return None
    (name,) = first_samples.names
    samples = first_samples.arrays(name)
    rows = [row for one in samples if (row := _vector(one)) is not None]
    if len(rows) != len(samples) or len({row.size for row in rows}) != 1 or are_sorted(rows):
        return None
    if not first_samples.of_pictures and (
        are_tracks(samples) or are_raw_tracks(samples)
    ):  # may be steps
        return None
    raw = min(float(row.min()) for row in rows) < 0
    return Labels(name, rows[0].size, raw) if _are_labels(rows, raw=raw) else None


def _vector(value: Array) -> Floats | None:
    """Return [1, C], with more dimensions of 1 or none, as [C]; None for other shapes."""
    if value.ndim < 2 or value.shape[1] != value.size or value.size < _FEWEST:
        return None
    if not is_floating(value):
        return None
    return value.reshape(-1).astype(np.float64)


def _are_labels(rows: Sequence[Floats], *, raw: bool) -> bool:
    shares = [to_shares(row, raw=raw) for row in rows]
    if max(float(share.max()) for share in shares) > 1 + 1e-6:
        return False
    if not raw and all(map(sums_to_one, shares)):
        return False
    if raw and max(float(row.mean() / max(row.std(), 1e-30)) for row in rows) > -_BELOW:
        return False
    if raw and mean_best_probability(np.stack(rows)) > _ONE_CLASS:
        return False
    values = np.stack(shares)
    on = np.count_nonzero(values > 0.5, axis=1)
    between = float(np.mean((values > 0.1) & (values < 0.9)))
    # a classifier's logits may well have two above 0 in one sample
    several = on.mean() >= 2 if raw else on.max() >= 2
    return bool(several and between < _BETWEEN and np.mean(values < 0.1) >= _OFF)


@dataclass(slots=True)
class _RankedTally(TaskTally["Ranked"]):
    """Counts samples with equal classes."""

    first: int = 0
    among: int = 0
    shared: float = 0.0  # sum over the samples of the share of FP32's best k

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left, right = (one[self.task.output].reshape(-1) for one in (reference, candidate))
        if left.size and right.size:
            self.first += int(left[0] == right[0])
            self.among += int(left[0] in right)
            self.shared += len({*left.tolist()} & {*right.tolist()}) / left.size

    def result(self) -> TaskFigure | None:
        k, shared = self.task.count, self.shared / max(self.samples, 1)
        among = f"{self.among} among the best {k}, {100 * shared:.1f} % of these the same"
        found = self.top1(self.first, self.samples, among if k > 1 else "")
        if found is None or k == 1:
            return found
        return replace(found, value=min(found.value, 1 - (1 - shared) / _SETS))


@dataclass(frozen=True, slots=True)
class Ranked(EvaluationTask):
    """Class numbers, the best first."""

    output: str
    count: int
    name = "classes"
    tally_type = _RankedTally

    @property
    def covered(self) -> tuple[str, ...]:
        """The classes and their scores."""
        return (self.output, *self.parts)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        best = "the best class" if self.count == 1 else f"the best {self.count} classes"
        return f"{self.output}: {best}"


def find_ranked(samples: FirstSamples) -> Ranked | None:
    """Recognise TopK's outputs, or one class, with or without its score."""
    names = samples.names
    places = (
        {find_indices(one, names[0], 1) for one in samples.outputs} if len(names) == 2 else {*names}
    )
    name = places.pop() if len(places) == 1 else None
    if name is None or not all(_is_one(one) or are_indices(one, 1) for one in samples.arrays(name)):
        return None
    others = {other: (OutputSlice(output=other),) for other in names if other != name}
    return Ranked(name, samples.arrays(name)[0].size, parts={name: (), **others})


def _is_one(value: Array) -> bool:
    """Whether it is one integer, [1] or [1, 1], that may be a class."""
    whole = value.dtype.kind in "iu" and value.ndim > 0
    return whole and value.size == 1 and int(value.reshape(-1)[0]) >= 0


@dataclass(slots=True)
class _IndexTally(TaskTally["Indices"]):
    """Counts integers: FP32's, the candidate's, both's; of places FP32's and both's by value."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))
    own: Counter[int] = field(default_factory=Counter)
    both: Counter[int] = field(default_factory=Counter)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name, listed in self.task.outputs.items():
            left, right = (np.atleast_1d(one[name]) for one in (reference, candidate))
            if listed:
                rows, others = (Counter(map(str, one.tolist())) for one in (left, right))
                self.counts += np.array([len(left), len(right), (rows & others).total()])
                continue
            alike = left == right if left.shape == right.shape else np.zeros(left.shape, bool)
            self.counts += np.array([left.size, right.size, np.count_nonzero(alike)])
            self.own.update(left.ravel().tolist())
            self.both.update(left[alike].tolist())

    def result(self) -> TaskFigure | None:
        """Return the share kept; None if FP32 gives nothing, or one value at every place."""
        ((usual, most),) = self.own.most_common(1) or [(0, 0)]
        if self.counts[0] == most:
            return None
        often = most > _USUAL * self.counts[0]
        left, right, both = (int(n) for n in self.counts - often * self.both[usual])
        but = f", without {usual}, the usual one, where both have it" if often else ""
        new = right - both
        return self.figure_of_kept("indices", both, left, f"kept, {new} new{but}", new)


@dataclass(frozen=True, slots=True)
class Indices(EvaluationTask):
    """Class numbers, or indices of what is selected."""

    outputs: Mapping[str, bool]  # output -> whether its rows are in any order
    name = "indices"
    reads = "class numbers or indices"
    tally_type = _IndexTally


def find_integers(samples: FirstSamples) -> Indices | None:
    """Recognise integers from 0 on; beside other outputs they must differ from sample to sample."""
    whole = {name: samples.arrays(name) for name in samples.every}
    whole = {name: values for name, values in whole.items() if all(map(_are_whole, values))}
    outputs = {
        # of several shapes, or [n, 3] as NonMaxSuppression gives image, class and box
        name: len({one.shape for one in values}) > 1
        or all(one.ndim == 2 and one.shape[1] == 3 and len(one) != 1 for one in values)
        for name, values in whole.items()
        if len(whole) == len(samples.every) or len({one.tobytes() for one in values}) > 1
    }
    return Indices(outputs, parts=dict.fromkeys(outputs, ())) if outputs else None


def _are_whole(value: Array) -> bool:
    """Whether it may hold class numbers or indices."""
    whole = value.dtype.kind in "iu" and value.dtype.itemsize >= _BYTES and value.ndim > 0
    return bool(whole and (not value.size or value.min() >= _PADDED))
