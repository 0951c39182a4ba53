"""One sample at a time out of a batch's arrays.

Shares of a whole: probabilities of which one alone is true.

Rows of values that are no scores of classes: a regression's, or the best few of some.

Whether rows of numbers lie higher in one sample and lower in another, as no scores do.

Which class each sample gets, of both models, and whether a label says the same.

Told by the first output: one score a class [N, C], or the class itself [N] as ArgMax gives it. Of
TopK's pair, values that fall and the places they come from, the places tell, the best one first.
With labels, an output behind the first may tell too, where it alone can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.tensors import Array

Outputs = Mapping[str, Array]


def batch_length(feed: Outputs) -> int:
    """Samples in a feed: as many as its first input is long."""
    first = next(iter(feed.values()), None)
    return int(first.shape[0]) if first is not None and np.ndim(first) else 1


def split(arrays: Outputs, batch: int) -> list[dict[str, Array]]:
    """Arrays of a batch as arrays of one sample each, with a batch of 1.

    The batch is the first dimension, or the second of sequences [T, N, C]; what has it nowhere is
    left out, but of a batch of 1, which is one sample as it stands.
    """
    if batch == 1:
        return [{name: np.asarray(value) for name, value in arrays.items()}]
    found: list[dict[str, Array]] = [{} for _ in range(batch)]
    for name, value in arrays.items():
        axis = next((a for a in (0, 1) if value.ndim > 2 * a and value.shape[a] == batch), None)
        for row, own in enumerate(found if axis is not None else ()):
            own[name] = value[row : row + 1] if axis == 0 else value[:, row : row + 1]
    return found


def image_size(feed: Outputs) -> tuple[int, int] | None:
    """(height, width) in pixels of the first input that is a picture; None without one."""
    for value in feed.values():
        if value.ndim == 4:
            last = value.shape[3] in (1, 3, 4) and value.shape[1] not in (1, 3, 4)
            height, width = value.shape[1:3] if last else value.shape[2:4]
            return int(height), int(width)
    return None


_ROUNDING = 1e-2  # what float16 and thousands of classes take from a sum
_LEAST = -1e-4  # what rounding and resizing take from a share of 0


def add_up(values: Array, axis: int = -1) -> NDArray[np.bool_]:
    """Where the sum along an axis is 1, but for rounding."""
    return np.asarray(np.abs(values.sum(axis=axis, dtype=np.float64) - 1) < _ROUNDING)


def are_shares(values: Array, axis: int = -1) -> bool:
    """Whether values along an axis are shares of a whole, wherever it is looked."""
    return bool(values.min() >= _LEAST and add_up(values, axis).all())


def are_shares_or_logarithms(values: Array) -> bool:
    """Whether the last axis holds shares of a whole, or their logarithms."""
    logarithms = values.min() < _LEAST
    exact = values.astype(np.float64, copy=False)
    return are_shares(np.exp(np.minimum(exact, 1)) if logarithms else exact)


_SHARE = 1.01  # a share is not above 1, but for rounding
_PLACE = 4  # bytes, at least, of a place
_BETWEEN = 0.5  # share of values between 0.1 and 0.9, at least, of places in a picture


def are_values(scores: Array, batch: int) -> bool:
    """Whether [N, C] may be a regression's: all above 0, and in each row one above 1.

    Or all from 0 to 1, as places in shares of a picture: of no sum of 1, and most not near 0 or 1.
    Scores of classes have both signs, logarithms of shares are below 0, and shares are not above 1.
    """
    rows = scores.reshape(batch, -1)
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return False
    if rows.min() > 0 and rows.max(axis=1).min() > _SHARE:
        return True
    between = np.mean((rows > 0.1) & (rows < 0.9), axis=1).min() >= _BETWEEN
    whole = add_up(rows).any()
    return bool(rows.min() >= 0 and rows.max() <= _SHARE and between and not whole)


def is_floating(value: Array) -> bool:
    """Whether it holds finite numbers of a float type."""
    return bool(np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())


def are_ranked(scores: Array, batch: int) -> bool:
    """Whether each row of [N, C], three or more, falls from its first to its last, as TopK's do."""
    rows = scores.reshape(batch, -1)
    return bool(rows.shape[1] > 2 and (np.diff(rows, axis=1) <= 0).all())


def are_places(numbers: Array, batch: int) -> bool:
    """Whether each row of [N, k] whole numbers may be TopK's places: none below 0, none twice."""
    if numbers.dtype.kind not in "iu" or numbers.dtype.itemsize < _PLACE or numbers.ndim < 2:
        return False
    if numbers.shape[0] != batch or not 0 < numbers.size == batch * numbers.shape[1]:
        return False
    rows = np.sort(numbers.reshape(batch, -1), axis=1)
    return bool(rows.min() >= 0 and (np.diff(rows, axis=1) > 0).all())


def places_of(outputs: Outputs, name: str, batch: int) -> str | None:
    """The one of an output and another that holds the places of the other's values, as TopK's."""
    for other, value in outputs.items():
        for values, places in ((name, other), (other, name)):
            if value.shape == outputs[name].shape and _pair(
                outputs[values], outputs[places], batch
            ):
                return places
    return None


def _pair(values: Array, places: Array, batch: int) -> bool:
    if values.dtype.kind != "f" or places.dtype.kind not in "iu" or 0 in (values.ndim, values.size):
        return False
    if values.size == batch == places.shape[0]:  # a maximum and its place
        return places.dtype.itemsize >= _PLACE
    falls = bool((np.diff(values.reshape(batch, -1), axis=1) <= 0).all())
    return falls and are_places(places, batch)


@dataclass(slots=True)
class Means:
    """Running sums of the means and the deviations of rows [N, C].

    Training moves some scores of classes up and others down, so that a row's mean hardly changes.
    What a series goes on with, or a place, lies higher in one sample and lower in another.
    """

    rows: int = 0
    mean: float = 0.0
    squares: float = 0.0
    within: float = 0.0

    def add(self, scores: Array, batch: int) -> None:
        """Add the rows of a batch; numbers of classes, and what is not finite, tell nothing."""
        rows = scores.reshape(batch, -1).astype(np.float64)
        if rows.shape[1] < 2 or not np.isfinite(rows).all():
            return
        means = rows.mean(axis=1)
        before, self.rows = self.rows, self.rows + batch
        moved = float(means.mean()) - self.mean
        self.mean += moved * batch / self.rows
        self.squares += float(means.var()) * batch + moved**2 * before * batch / self.rows
        self.within += float(rows.std(axis=1).sum())

    @property
    def wander(self) -> bool:
        """Whether rows differ in their mean more than values do within a row."""
        return self.rows > 0 and math.sqrt(self.squares / self.rows) > self.within / self.rows


_ENOUGH = 8  # samples to tell a regression's values, or ranked ones, from scores
_OF_CLASSES = ("", "classes")  # tasks whose largest output may be a class


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What was counted, as `deploy.metrics.accuracy.Accuracy` has it."""

    reference: float | None
    candidate: float | None
    agreement: float | None
    classes: int | None
    favourite: float | None


class Top1:
    """Counts whose class is right, and where both agree."""

    def __init__(self, labels: Sequence[int] | None, name: str | None = None) -> None:
        """What is counted.

        Args:
            labels: the class of each sample.
            name: of the output that tells the class; None finds it from the first batch.
        """
        self.labels = labels
        self.trouble: FeedError | None = None  # kept where another output may have the labels
        self.samples = self.right_reference = self.right_candidate = self.agreed = 0
        self.name = name
        self.places = labels is not None  # whether rows of whole numbers may be TopK's places
        self.classes = True  # until an output turns out to hold no classes
        self.count: int | None = None
        self.given: Counter[int] = Counter()  # class -> samples the reference gives to it
        self.values = True  # until a sample is no regression's
        self.ranked = True  # until a sample's best is not its first
        self.several = False  # outputs, of which another may be what the model is for
        self.means = Means()

    def add(self, reference: Outputs, candidate: Outputs, batch: int, *, at_once: bool) -> None:
        """Add one batch; without `at_once` it is the result that tells of labels that do not fit.

        Raises:
            FeedError: labels that do not fit the samples or the classes.
        """
        try:
            self._add(reference, candidate, batch)
        except FeedError as error:
            if at_once:
                raise
            self.trouble = self.trouble or error

    def _add(self, reference: Outputs, candidate: Outputs, batch: int) -> None:
        start, self.samples = self.samples, self.samples + batch
        if self.name is None:
            self._choose(reference, batch)
        assert self.name is not None
        own, other = reference[self.name], candidate[self.name]
        left, right = (_classes(one, batch, places=self.places) for one in (own, other))
        if left is None or right is None or own.shape != other.shape:
            self.classes = False
            return
        self.count = _class_count(own, batch)
        self.given.update(left.tolist())
        self.values = self.values and are_values(own, batch)
        self.ranked = self.ranked and self.count is not None and are_ranked(own, batch)
        if self.count is not None:
            self.means.add(own, batch)
        # -1 marks a sample with NaN, which neither agrees with anything nor is right.
        self.agreed += int(((left == right) & (left >= 0)).sum())
        if self.labels is not None:
            wanted = self._wanted(start, batch)
            self.right_reference += int((left == wanted).sum())
            self.right_candidate += int((right == wanted).sum())

    def _choose(self, outputs: Outputs, batch: int) -> None:
        """The output that tells the class; the first one, where none does."""
        first = next(iter(outputs))
        self.several = len(outputs) > 1
        found = places_of(outputs, first, batch)
        self.places |= found is not None
        self.name = found or first
        if found or self.labels is None or _classes(outputs[first], batch, places=True) is not None:
            return
        behind = [n for n, v in outputs.items() if _classes(v, batch, places=True) is not None]
        self.name = behind[0] if len(behind) == 1 else first

    def _wanted(self, start: int, batch: int) -> NDArray[np.int64]:
        assert self.labels is not None
        wanted = np.asarray(self.labels[start : start + batch], np.int64)
        if len(wanted) != batch:
            raise FeedError(
                f"there must be one label a sample, got {len(self.labels)} labels"
                f" for {start + batch} samples or more"
            )
        wrong = wanted[(wanted < 0) | (wanted >= (self.count or np.iinfo(np.int64).max))]
        if wrong.size:
            raise FeedError(self._beyond(int(wrong[0])))
        return wanted

    def _beyond(self, label: int) -> str:
        """That a label is of no class."""
        if label >= 0 and self.ranked:
            return (
                f"labels need to know which class a value is of, got {self.name!r} of"
                f" {self.count} values in falling order, as TopK's, without their places; let the"
                " model give TopK's second output too, or leave the labels out"
            )
        if self.count is None:
            return f"labels must be 0 or more, got {label}; leave out samples that are of no class"
        return (
            f"labels must be 0 to {self.count - 1} for the model's {self.count} classes, got"
            f" {label}; labels that start at 1 must be lowered by one"
        )

    def result(self, kind: str) -> Shares:
        """The shares.

        Args:
            kind: what the outputs are for, in a word.

        Raises:
            FeedError: labels that do not fit.
        """
        labelled = self.labels is not None
        if self.trouble is not None:
            raise self.trouble
        if self.labels is not None:
            self._check_labels(self.labels)
        values = self.values or self.ranked or self.means.wander
        others = not kind and values and self.samples >= _ENOUGH
        others = others or (not kind and self.several)
        told = labelled or (kind in _OF_CLASSES and not others)
        share = self.samples if self.classes and told else 0
        # an embedding that points one way in all samples is as doubtful as one class in all
        alike = share or (self.samples if self.classes and kind == "embeddings" else 0)
        return Shares(
            reference=self.right_reference / share if labelled else None,
            candidate=self.right_candidate / share if labelled else None,
            agreement=self.agreed / share if share else None,
            classes=self._count_of_classes() if alike else None,
            favourite=self.given.most_common(1)[0][1] / alike if alike else None,
        )

    def _count_of_classes(self) -> int | None:
        """As many as there are scores; of numbers of classes, as many as were seen or wanted."""
        if self.count is not None or self.labels is None:
            return self.count
        return 1 + max(*self.given, *self.labels, 1)

    def _check_labels(self, labels: Sequence[int]) -> None:
        if len(labels) != self.samples:
            raise FeedError(
                f"there must be one label a sample, got {len(labels)} labels"
                f" for {self.samples} samples"
            )
        if not self.classes:
            raise FeedError(
                "labels need an output of one score a class, [N, classes], or of the number of the"
                f" class, [N] or TopK's places; got {self.name!r} of another shape, so leave the"
                " labels out, or give a metric of your own"
            )


def _class_count(output: Array, batch: int) -> int | None:
    """Classes of a score output; None for an output that holds the class itself."""
    return None if output.size == batch or are_places(output, batch) else output.size // batch


def _classes(output: Array, batch: int, *, places: bool) -> NDArray[np.int64] | None:
    """[N, C] scores (trailing 1s allowed) or [N] integer classes -> [N]; None for other shapes.

    With `places` [N, k] integers may be classes too, the best one first.
    """
    if output.ndim == 0 or output.shape[0] != batch:
        return None
    if output.size == batch and np.issubdtype(output.dtype, np.integer):
        return np.asarray(output.reshape(batch), np.int64)
    if places and are_places(output, batch):
        return np.asarray(output.reshape(batch, -1)[:, 0], np.int64)
    if output.ndim < 2 or output.shape[1] < 2 or output.size != batch * output.shape[1]:
        return None
    if output.dtype.kind not in "fiu" or (output.dtype.kind != "f" and output.dtype.itemsize > 1):
        return None  # flags or counts; scores in integers have one byte
    scores = output.reshape(batch, -1)
    best = np.asarray(scores.argmax(axis=1), np.int64)
    best[np.isnan(scores.astype(np.float64)).any(axis=1)] = -1
    return best
