"""Labels of taggers (several may hold per sample), and classes that the model has ranked.

`find_labels`: independent probabilities [N, C], nearly all near 0 or 1, or their logits, nearly all
below 0, whereas those of a Softmax are centred at 0. Some samples must have several above 0.5: with
one, classification covers it (`deploy.metrics.tasks.classes`).

`find_ranked`: TopK's values and indices, or ArgMax's index. The figure is the top-1 agreement, and
how often FP32's class is among the candidate's best k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deploy.metrics.rows import Floats, Outputs, find_indices, image_size, sums_to_one, to_shares
from deploy.metrics.slices import OutputSlice
from deploy.metrics.tasks.classes import are_raw_tracks, are_tracks
from deploy.metrics.tasks.evaluation_task import (
    EvaluationTask,
    FirstSamples,
    TaskFigure,
    TaskTally,
    ThresholdTally,
)
from deploy.tensors import Array

_FEWEST = 4  # number of labels, at least
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_OFF = 0.5  # share of them below 0.1, at least
_BELOW = 0.75  # distance of the mean logit below 0, in standard deviations, at least
_ENOUGH = ((0.5, 20), (0.3, 5), (0.1, 5))  # threshold, FP32 labels required to use it


@dataclass(slots=True)
class _LabelTally(ThresholdTally["Labels"]):
    """Counts labels above each threshold: FP32's, the candidate's, both's."""

    enough = _ENOUGH

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
        return self.dice("probability")


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


def find_labels(seen: FirstSamples) -> Labels | None:
    """Recognise labels if the only output is such a vector."""
    if len(seen.names) != 1:
        return None
    (name,) = seen.names
    samples = seen.arrays(name)
    rows = [row for one in samples if (row := _vector(one)) is not None]
    if len(rows) != len(samples) or len({row.size for row in rows}) != 1:
        return None
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if not pictures and (are_tracks(samples) or are_raw_tracks(samples)):  # may be steps
        return None
    raw = min(float(row.min()) for row in rows) < 0
    return Labels(name, rows[0].size, raw) if _are_labels(rows, raw=raw) else None


def _vector(value: Array) -> Floats | None:
    """Return [1, C], with more dimensions of 1 or none, as [C]; None for other shapes."""
    if value.ndim < 2 or value.shape[1] != value.size or value.size < _FEWEST:
        return None
    if not np.issubdtype(value.dtype, np.floating) or not np.isfinite(value).all():
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

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_classes, candidate_classes = (
            np.asarray(one[self.task.output], np.int64).reshape(-1)
            for one in (reference, candidate)
        )
        if reference_classes.size and candidate_classes.size:
            self.first += int(reference_classes[0] == candidate_classes[0])
            self.among += int(reference_classes[0] in candidate_classes)

    def result(self) -> TaskFigure | None:
        k = self.task.count
        among = f"{self.among} among the best {k}" if k > 1 else ""
        return self.top1(self.first, self.samples, among)


@dataclass(frozen=True, slots=True)
class Ranked(EvaluationTask):
    """Class numbers, the best first."""

    output: str
    count: int
    name = "classes"
    tally_type = _RankedTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        best = "the best class" if self.count == 1 else f"the best {self.count} classes"
        return f"{self.output}: {best}"


def find_ranked(seen: FirstSamples) -> Ranked | None:
    """Recognise TopK's two outputs; for pictures also one class, with or without its score."""
    names = seen.names
    places = _places(seen, names)
    if places is None:
        return None
    count = seen.arrays(places)[0].size
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if count == 1 and not (pictures and all(map(_is_one, seen.arrays(places)))):
        return None
    others = {name: (OutputSlice(output=name),) for name in names if name != places}
    parts = {places: (), **others} if others else {places: (OutputSlice(output=places),)}
    return Ranked(places, count, parts=parts)


def _places(seen: FirstSamples, names: Sequence[str]) -> str | None:
    """Return the output of indices: TopK's in each sample, or the only output if of one number."""
    if len(names) == 1 and all(value.size == 1 for value in seen.arrays(names[0])):
        return names[0]
    if len(names) != 2:
        return None
    outputs = {find_indices(one, names[0], 1) for one in seen.outputs}
    return outputs.pop() if len(outputs) == 1 else None


def _is_one(value: Array) -> bool:
    """Whether it is one integer, [1] or [1, 1], that may be a class."""
    whole = value.dtype.kind in "iu" and value.ndim > 0
    return whole and value.size == 1 and int(value.reshape(-1)[0]) >= 0
