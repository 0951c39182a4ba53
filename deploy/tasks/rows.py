"""Rows of batches: splitting a batch into samples, tests on rows of values, and top-1.

Tests on values derive their meaning: probabilities that sum to 1, a regression's values, TopK's
falling values and their indices.

`Top1` counts whose class matches the label, and where both models agree. The class is read from the
first output: a score per class [N, C], or the class itself [N] as from ArgMax. Of TopK's pair of
falling values and indices, the indices are read, the best one first. With labels, a later output
may be read, if it is the only one that holds classes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.tensors import Array

Outputs = Mapping[str, Array]
Floats = NDArray[np.float64]
_VARIATION = 1e-3  # of an output, next to that of another sample


def batch_length(feed: Outputs) -> int:
    """Return the number of samples in a feed: the first dimension of its first input."""
    first = next(iter(feed.values()), None)
    return int(first.shape[0]) if first is not None and np.ndim(first) else 1


def split_batch(arrays: Outputs, batch: int) -> list[dict[str, Array]]:
    """Split arrays of a batch into arrays of one sample each, with a batch of 1.

    The batch is the first dimension, or the second of sequences [T, N, C]. Arrays without a batch
    dimension are left out, unless the batch is 1.
    """
    if batch == 1:
        return [{name: np.asarray(value) for name, value in arrays.items()}]
    samples: list[dict[str, Array]] = [{} for _ in range(batch)]
    for name, value in arrays.items():
        axis = next((a for a in (0, 1) if value.ndim > 2 * a and value.shape[a] == batch), None)
        for row, sample in enumerate(samples if axis is not None else ()):
            sample[name] = value[row : row + 1] if axis == 0 else value[:, row : row + 1]
    return samples


@dataclass(slots=True)
class AlikeOutputs:
    """Whether outputs, of which one is floating-point, hardly differ from the first sample's."""

    alike: bool = True
    _first: Outputs = field(default_factory=dict)

    def add(self, outputs: Outputs, batch: int) -> None:
        """Add one batch; nothing is computed once a sample differs."""
        for row in split_batch(outputs, batch) if self.alike else ():
            kept = {n: v for n, v in row.items() if v.dtype.kind in "iu" or is_floating(v)}
            self._first = self._first or kept
            pairs = [(self._first[n].astype(np.float64), kept[n]) for n in kept if n in self._first]
            differ = any(
                a.shape != b.shape or np.linalg.norm(a - b) > _VARIATION * np.linalg.norm(a)
                for a, b in pairs
            )
            floats = any(value.dtype.kind == "f" for value in kept.values())
            self.alike = self.alike and floats and not differ


def image_size(feed: Outputs) -> tuple[int, int] | None:
    """Return (height, width) in pixels of the first 4-D input; None without one."""
    for value in feed.values():
        if value.ndim == 4:
            last = value.shape[3] in (1, 3, 4) and value.shape[1] not in (1, 3, 4)
            height, width = value.shape[1:3] if last else value.shape[2:4]
            return int(height), int(width)
    return None


_ROUNDING = 1e-2  # error of a sum in float16 over thousands of classes
_LEAST = -1e-4  # error of a probability of 0 by rounding and resizing


def sums_to_one(values: Array, axis: int = -1) -> NDArray[np.bool_]:
    """Return where the sum along an axis is 1, within rounding."""
    return np.asarray(np.abs(values.sum(axis=axis, dtype=np.float64) - 1) < _ROUNDING)


def are_probabilities(values: Array, axis: int = -1) -> bool:
    """Whether values along an axis are probabilities that sum to 1, everywhere."""
    return bool(values.min() >= _LEAST and sums_to_one(values, axis).all())


def are_probabilities_or_logs(values: Array) -> bool:
    """Whether the last axis holds probabilities that sum to 1, or their logarithms."""
    logarithms = values.min() < _LEAST
    exact = values.astype(np.float64, copy=False)
    return are_probabilities(np.exp(np.minimum(exact, 1)) if logarithms else exact)


_MIN_ORDERED = 8  # classes in an order, such as ages, at least
_MIN_NEIGHBOURS = 0.5  # correlation of their probabilities with those of the next class, at least


def are_ordered(rows: Sequence[Array]) -> bool:
    """Whether probabilities spread over neighbouring classes, as those of an age in years do.

    Then the best of near ties says little. `rows`: one array a sample.
    """
    if rows[0].size < _MIN_ORDERED or any(row.size != rows[0].size for row in rows):
        return False
    shares = np.stack([row.reshape(-1) for row in rows]).astype(np.float64)
    if not are_probabilities(shares) or np.ptp(shares.argmax(axis=1)) == 0:
        return False
    correlations = [correlate(share[1:], share[:-1]) for share in shares]
    return bool(np.mean(correlations) > _MIN_NEIGHBOURS)


_SHARE = 1.01  # upper limit of a probability, with rounding
_APART = 5.0  # distance of positive and negative logits, in their own deviations, at least
RAW = 40.0  # magnitude of a logit, at most: more is another unit
_PLACE = 4  # minimum bytes of an index
_MANY = 16  # samples whose single value is always small, so that it is no probability of an event
_BETWEEN, _MOSTLY = 0.5, 0.75  # least share of values in 0.1..0.9 among relative ones


def are_relative(rows: Array) -> bool:
    """Whether [N, C] lies in 0..1, most of it not near 0 or 1, and no row sums to 1.

    Of single values in 16 rows or more, such as a ratio, most may be near 0.
    """
    single = rows.shape[1] == 1
    middle = (rows < 0.9) & ((rows > 0.1) | (single and len(rows) >= _MANY))
    between = middle.mean() >= _MOSTLY if single else middle.mean(axis=1).min() >= _BETWEEN
    sums_to_1 = not single and sums_to_one(rows).any()
    return bool(rows.min() >= 0 and rows.max() <= _SHARE and between and not sums_to_1)


def is_floating(value: Array) -> bool:
    """Whether an array is floating-point and finite."""
    return bool(np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())


def are_shares(values: Array) -> bool:
    """Whether there are values, and all lie from 0 to 1 but for rounding."""
    return bool(values.size and values.min() >= -1e-3 and values.max() <= 1 + 1e-3)


def correlate(one: Floats, other: Floats) -> float:
    """Return the correlation of two vectors; 0 if one is constant."""
    one, other = one - one.mean(), other - other.mean()
    return float(one @ other) / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-30)


def are_two_sided(values: Floats, least: int) -> bool:
    """Whether logits are two groups apart, of `least` or more, one on each side of 0."""
    positive, negative = values[values > 0], values[values <= 0]
    few = min(positive.size, negative.size) < least
    if few or values.min() >= 0 or np.abs(values).max() > RAW:  # a Sigmoid may underflow to 0
        return False
    squares = positive.size * positive.var() + negative.size * negative.var()
    return bool(positive.mean() - negative.mean() > _APART * math.sqrt(squares / values.size))


def to_shares(scores: Array, *, raw: bool = True) -> Floats:
    """Return probabilities: of `raw` logits by the Sigmoid, of others unchanged."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-scores))) if raw else scores


def activate(scores: Array, activation: str, axis: int = -1) -> Array:
    """Return probabilities: scores after "sigmoid" or, along an axis, "softmax"; "" for as is."""
    if activation != "softmax":
        return to_shares(scores, raw=activation == "sigmoid")
    with np.errstate(invalid="ignore"):
        power = np.exp(scores - scores.max(axis=axis, keepdims=True))
        return np.asarray(power / power.sum(axis=axis, keepdims=True))


def are_ranked(scores: Array, batch: int) -> bool:
    """Whether all rows of [N, C >= 3] descend, or all ascend, as TopK's values do."""
    steps = np.diff(scores.reshape(batch, -1), axis=1)
    return bool(steps.shape[1] > 1 and ((steps <= 0).all() or (steps >= 0).all()))


_CHANCE = 1e4  # rows are sorted by chance once in so many times, at most
_LONG = 5  # values of a row that are hardly in order if the model sees the same in every sample


def are_sorted(rows: Sequence[Array]) -> bool:
    """Whether rows of one length are sorted, as TopK's values are, more than by chance.

    A few probabilities that sum to 1 may be in the same order in every sample.
    """
    stacked, size = np.stack(rows), rows[0].size
    by_chance = math.factorial(min(size, 20)) ** len(rows) <= _CHANCE
    return are_ranked(stacked, len(rows)) and not (
        by_chance or (size < _LONG and sums_to_one(stacked).all())
    )


def are_indices(numbers: Array, batch: int) -> bool:
    """Whether each row of integers [N, k] may be TopK's indices: not negative, all different."""
    if numbers.dtype.kind not in "iu" or numbers.dtype.itemsize < _PLACE or numbers.ndim < 2:
        return False
    if numbers.shape[0] != batch or not 0 < numbers.size == batch * numbers.shape[1]:
        return False
    rows = np.sort(numbers.reshape(batch, -1), axis=1)
    return bool(rows.min() >= 0 and (np.diff(rows, axis=1) > 0).all())


def find_indices(outputs: Outputs, name: str, batch: int) -> str | None:
    """Return the output that holds indices, of `name` and the output it forms a TopK pair with."""
    for other, value in outputs.items():
        for values, places in ((name, other), (other, name)):
            if value.shape == outputs[name].shape and _is_topk_pair(
                outputs[values], outputs[places], batch
            ):
                return places
    return None


def _is_topk_pair(values: Array, places: Array, batch: int) -> bool:
    if values.dtype.kind != "f" or places.dtype.kind not in "iu" or 0 in (values.ndim, values.size):
        return False
    if values.size == batch == places.shape[0]:  # a maximum and its index
        return places.dtype.itemsize >= _PLACE
    falls = bool((np.diff(values.reshape(batch, -1), axis=1) <= 0).all())
    return falls and are_indices(places, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Top1Figures:
    """Top-1 figures; see `deploy.metrics.accuracy.Accuracy`."""

    reference: float | None
    candidate: float | None
    agreement: float | None
    classes: int | None
    favourite: float | None
    labels_above: float | None
    labels_below: float | None


class Top1:
    """Counts top-1 hits of both models and where both agree."""

    def __init__(self, labels: Sequence[int] | None, name: str | None = None) -> None:
        """Start at 0 samples.

        `name`: output to read the class from; None derives it from the first batch.
        """
        self.labels = labels
        self.trouble: FeedError | None = None  # not raised: labels may be for another output
        self.samples = self.right_reference = self.right_candidate = self.agreed = 0
        self.labels_above = self.labels_below = 0  # labels next to the reference's class
        self.name = name
        self.places = labels is not None  # whether rows of integers may be TopK's indices
        self.classes = True  # until the output turns out to hold no classes
        self.count: int | None = None
        self.given: Counter[int] = Counter()  # class -> samples the reference gives to it
        self.ranked = True  # until a sample is not in descending order

    def add(self, reference: Outputs, candidate: Outputs, batch: int, *, at_once: bool) -> None:
        """Add one batch; unless `at_once`, errors of labels are raised by `result`.

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
        holds_class = own.size == batch or are_indices(own, batch)
        self.count = None if holds_class else own.size // batch
        self.given.update(left.tolist())
        self.ranked = self.ranked and self.count is not None and are_ranked(own, batch)
        # -1 marks a sample with NaN, which neither agrees with anything nor is right.
        self.agreed += int(((left == right) & (left >= 0)).sum())
        if self.labels is not None:
            wanted = self._wanted(start, batch)
            self.right_reference += int((left == wanted).sum())
            self.right_candidate += int((right == wanted).sum())
            period = self.count or np.iinfo(np.int64).max
            self.labels_above += int((wanted == (left + 1) % period).sum())
            self.labels_below += int((wanted == (left - 1) % period).sum())

    def _choose(self, outputs: Outputs, batch: int) -> None:
        """Choose the output to read the class from; the first one if none fits."""
        first = next(iter(outputs))
        indices = find_indices(outputs, first, batch)
        lone = len(outputs) == 1 and are_indices(outputs[first], batch)
        self.places |= indices is not None or lone
        self.name = indices or first
        if (
            indices
            or self.labels is None
            or _classes(outputs[first], batch, places=True) is not None
        ):
            return
        fitting = [n for n, v in outputs.items() if _classes(v, batch, places=True) is not None]
        self.name = fitting[0] if len(fitting) == 1 else first

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
        """Return the message for a label out of range."""
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

    def result(self, kind: str) -> Top1Figures:
        """Return the shares.

        Raises:
            FeedError: labels that do not fit.
        """
        labelled = self.labels is not None
        if self.trouble is not None:
            raise self.trouble
        if self.labels is not None:
            self._check_labels(self.labels)
        has_classes = self.classes and (labelled or kind == "classes")
        counted = self.samples if has_classes else 0
        # embeddings that all point one way are as doubtful as one class for all samples
        total = counted or (self.samples if self.classes and kind == "embeddings" else 0)
        return Top1Figures(
            reference=self.right_reference / counted if labelled else None,
            candidate=self.right_candidate / counted if labelled else None,
            agreement=self.agreed / counted if counted else None,
            classes=self._count_of_classes() if total else None,
            favourite=self.given.most_common(1)[0][1] / total if total else None,
            labels_above=self.labels_above / counted if labelled else None,
            labels_below=self.labels_below / counted if labelled else None,
        )

    def _count_of_classes(self) -> int | None:
        """Number of scores; for outputs of class numbers the highest number seen or labelled."""
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


def _classes(output: Array, batch: int, *, places: bool) -> NDArray[np.int64] | None:
    """Return classes [N] of scores [N, C] (trailing 1s allowed) or integers [N], else None.

    With `places` integers [N, k] may be ranked classes too, the best one first.
    """
    if output.ndim == 0 or output.shape[0] != batch:
        return None
    if output.size == batch and np.issubdtype(output.dtype, np.integer):
        return np.asarray(output.reshape(batch), np.int64)
    if places and are_indices(output, batch):
        return np.asarray(output.reshape(batch, -1)[:, 0], np.int64)
    if output.ndim < 2 or output.shape[1] < 2 or output.size != batch * output.shape[1]:
        return None
    if output.dtype.kind not in "fiu" or (output.dtype.kind != "f" and output.dtype.itemsize > 1):
        return None  # flags or counts; quantized scores have one byte
    scores = output.reshape(batch, -1)
    best = np.asarray(scores.argmax(axis=1), np.int64)
    best[np.isnan(scores.astype(np.float64)).any(axis=1)] = -1
    return best
