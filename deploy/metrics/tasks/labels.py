"""Labels: several may be true of a sample at once, as of taggers and attributes, [N, C].

Probabilities that are each their own, nearly all near 0 or 1, or raw scores of such: nearly all
below 0, where those of a classifier's Softmax lie about 0. Several of a sample must be above 0.5:
where one is, its class says as much (`deploy.metrics.tasks.classes`).

Classes that the model itself has ranked: TopK's values and places, or ArgMax's one place.

How often the candidate's best class is the float model's, and how often it is among its best k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, add_up, image_size, places_of
from deploy.metrics.tasks.classes import are_raw_tracks, are_tracks
from deploy.metrics.tasks.task import Seen, TaskFigure, classes_figure, kept_figure
from deploy.tensors import Array

_FEWEST = 4  # labels that a model knows
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_OFF = 0.5  # share of them below 0.1, at least
_BELOW = 0.75  # deviations that raw scores lie below 0 in the mean, at least
_ENOUGH = ((0.5, 20), (0.3, 5), (0.1, 5))  # threshold, labels of FP32 that it takes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Labels:
    """A probability a label.

    Attributes:
        output: its name.
        count: how many labels there are.
        raw: whether a Sigmoid is still to come.
        parts: as of a task.
    """

    output: str
    count: int
    raw: bool
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "labels"

    @property
    def form(self) -> str:
        """How the output is read."""
        raw = "raw scores" if self.raw else "probabilities"
        return f"{self.output}: {raw} of {self.count} labels, each its own"

    def tally(self) -> LabelTally:
        """A new comparison."""
        return LabelTally(self)


def find_labels(seen: Seen) -> Labels | None:
    """The task, where the only output is such a vector."""
    if len(seen.names) != 1:
        return None
    (name,) = seen.names
    samples = seen.arrays(name)
    rows = [row for one in samples if (row := _vector(one)) is not None]
    if len(rows) != len(samples) or len({row.size for row in rows}) != 1:
        return None
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if not pictures and (are_tracks(samples) or are_raw_tracks(samples)):  # of steps, as likely
        return None
    raw = min(float(row.min()) for row in rows) < 0
    return Labels(name, rows[0].size, raw) if _are_labels(rows, raw=raw) else None


def _vector(value: Array) -> Floats | None:
    """[1, C], with more dimensions of 1 or none -> [C]; None for other shapes."""
    if value.ndim < 2 or value.shape[1] != value.size or value.size < _FEWEST:
        return None
    if not np.issubdtype(value.dtype, np.floating) or not np.isfinite(value).all():
        return None
    return value.reshape(-1).astype(np.float64)


def _are_labels(rows: Sequence[Floats], *, raw: bool) -> bool:
    shares = [_shares(row, raw=raw) for row in rows]
    if max(float(share.max()) for share in shares) > 1 + 1e-6:
        return False
    if not raw and all(map(add_up, shares)):
        return False
    if raw and max(float(row.mean() / max(row.std(), 1e-30)) for row in rows) > -_BELOW:
        return False
    values = np.stack(shares)
    on = np.count_nonzero(values > 0.5, axis=1)
    between = float(np.mean((values > 0.1) & (values < 0.9)))
    # a classifier's raw scores may well have two above 0 in one sample
    several = on.mean() >= 2 if raw else on.max() >= 2
    return bool(several and between < _BETWEEN and np.mean(values < 0.1) >= _OFF)


def _shares(scores: Floats, *, raw: bool) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-scores))) if raw else scores


@dataclass(slots=True)
class LabelTally:
    """Labels above each threshold: FP32's, the candidate's, both's."""

    task: Labels
    samples: int = 0
    counts: dict[float, list[int]] = field(
        default_factory=lambda: {threshold: [0, 0, 0] for threshold, _ in _ENOUGH}
    )

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of NaN or of another shape has no label."""
        self.samples += 1
        rows = (_vector(one[self.task.output]) for one in (reference, candidate))
        none = np.full(self.task.count, -np.inf)
        left, right = (
            _shares(none if row is None or row.shape != none.shape else row, raw=self.task.raw)
            for row in rows
        )
        for threshold, count in self.counts.items():
            own, others = left > threshold, right > threshold
            count[0] += int(own.sum())
            count[1] += int(others.sum())
            count[2] += int((own & others).sum())

    def result(self) -> TaskFigure | None:
        """Dice's of the labels, at the highest threshold with labels of FP32 enough."""
        enough = (low for low, most in _ENOUGH if self.counts[low][0] >= most)
        threshold = next(enough, None)
        if threshold is None:
            return None
        return kept_figure(
            "labels",
            self.counts[threshold],
            above=f"probability above {threshold:g}",
            samples=self.samples,
            form=self.task.form,
        )


@dataclass(frozen=True, slots=True)
class Ranked:
    """Numbers of classes, the best first.

    Attributes:
        output: that holds them.
        count: of a sample.
        parts: as of a task.
    """

    output: str
    count: int
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "classes"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        best = "the best class" if self.count == 1 else f"the best {self.count} classes"
        return f"{self.output}: {best}"

    def tally(self) -> RankedTally:
        """A new comparison."""
        return RankedTally(self)


def find_ranked(seen: Seen) -> Ranked | None:
    """The task, where the outputs are TopK's two, or of a picture one class or its score too."""
    names = seen.names
    places = _places(seen, names)
    if places is None:
        return None
    count = seen.arrays(places)[0].size
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if count == 1 and not (pictures and all(map(_is_one, seen.arrays(places)))):
        return None
    others = {name: (Part(output=name),) for name in names if name != places}
    return Ranked(
        places, count, {places: (), **others} if others else {places: (Part(output=places),)}
    )


def _places(seen: Seen, names: Sequence[str]) -> str | None:
    """The output of numbers: the only one, of one number; or in each sample TopK's places."""
    if len(names) == 1 and all(value.size == 1 for value in seen.arrays(names[0])):
        return names[0]
    if len(names) != 2:
        return None
    found = {places_of(one, names[0], 1) for one in seen.outputs}
    return found.pop() if len(found) == 1 else None


def _is_one(value: Array) -> bool:
    """[1] or [1, 1] of one whole number that may be a class's."""
    whole = value.dtype.kind in "iu" and value.ndim > 0
    return whole and value.size == 1 and int(value.reshape(-1)[0]) >= 0


@dataclass(slots=True)
class RankedTally:
    """Counts of equal classes."""

    task: Ranked
    samples: int = 0
    first: int = 0
    among: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample."""
        self.samples += 1
        own, others = (_numbers(one[self.task.output]) for one in (reference, candidate))
        if own.size and others.size:
            self.first += int(own[0] == others[0])
            self.among += int(own[0] in others)

    def result(self) -> TaskFigure | None:
        """Top-1 agreement."""
        if not self.samples:
            return None
        few = self.task.count
        among = f"{self.among} among the best {few}" if few > 1 else ""
        return classes_figure(
            self.first, self.samples, among, compared=self.samples, form=self.task.form
        )


def _numbers(value: Array) -> NDArray[np.int64]:
    return np.asarray(value, np.int64).reshape(-1)
