"""Top-1 hits of both models by labels, and where both agree.

The class is read from the first output: a score per class [N, C], or the class itself [N] as from
ArgMax. Of TopK's pair of falling values and indices, the indices are read, the best one first. With
labels, a later output may be read, if it is the only one that holds classes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError
from deploy.tasks.rows import Outputs, are_indices, are_ranked, find_indices
from deploy.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Top1Figures:
    """Top-1 figures; see `deploy.metrics.accuracy.Accuracy`."""

    reference: float | None
    candidate: float | None
    agreement: float | None
    classes: int | None
    favourite: float | None
    label_shift: float | None


class Top1:
    """Counts top-1 hits of both models and where both agree."""

    def __init__(self, labels: Sequence[int] | None, name: str | None = None) -> None:
        """Start at 0 samples.

        `name`: output to read the class from; None derives it from the first batch.
        """
        self.labels = labels
        self.samples = self.reference_hits = self.candidate_hits = self.agreement_count = 0
        self.shifts = Counter[int]()  # 1, -1 -> labels above and below the reference's class
        self.name = name
        self.reads_indices = labels is not None  # whether rows of integers may be TopK's
        self.has_classes = True  # until the output turns out to hold no classes
        self.count: int | None = None
        self.class_counts: Counter[int] = Counter()  # class -> samples the reference gives to it
        self.is_ranked = True  # until a sample is not in descending order

    def add(self, reference: Outputs, candidate: Outputs, batch: int) -> None:
        """Add one batch.

        Raises:
            FeedError: labels that do not fit the samples or the classes.
        """
        start, self.samples = self.samples, self.samples + batch
        if self.name is None:
            self._choose(reference, batch)
        assert self.name is not None
        scores = reference[self.name]
        reference_classes = _read_classes(scores, batch, ranked=self.reads_indices)
        classes = _read_classes(candidate[self.name], batch, ranked=self.reads_indices)
        has_equal_shape = scores.shape == candidate[self.name].shape
        if reference_classes is None or classes is None or not has_equal_shape:
            self.has_classes = False
            return
        holds_class = scores.size == batch or are_indices(scores, batch)
        self.count = None if holds_class else scores.size // batch
        self.class_counts.update(reference_classes.tolist())
        self.is_ranked &= self.count is not None and are_ranked(scores, batch)
        # -1 marks a sample with NaN, which neither agrees with anything nor is right
        is_equal = (reference_classes == classes) & (reference_classes >= 0)
        self.agreement_count += int(is_equal.sum())
        if self.labels is not None:
            labels = self._batch_labels(start, batch)
            self.reference_hits += int((reference_classes == labels).sum())
            self.candidate_hits += int((classes == labels).sum())
            for shift in (1, -1):
                shifted = (reference_classes + shift) % (self.count or np.iinfo(np.int64).max)
                self.shifts[shift] += int((labels == shifted).sum())

    def _choose(self, outputs: Outputs, batch: int) -> None:
        """Choose the output to read the class from; the first one if none fits."""
        first = next(iter(outputs))
        indices = find_indices(outputs, first, batch)
        is_single = len(outputs) == 1 and are_indices(outputs[first], batch)
        self.reads_indices |= indices is not None or is_single
        self.name = indices or first
        if indices or self.labels is None:
            return
        fitting = []
        for name, value in outputs.items():
            if _read_classes(value, batch, ranked=True) is not None:
                fitting.append(name)
        if first not in fitting and len(fitting) == 1:
            self.name = fitting[0]

    def _batch_labels(self, start: int, batch: int) -> NDArray[np.int64]:
        assert self.labels is not None
        labels = np.asarray(self.labels[start : start + batch], np.int64)
        if len(labels) != batch:
            raise FeedError(
                f"there must be one label a sample, got {len(self.labels)} labels"
                f" for {start + batch} samples or more"
            )
        class_count = self.count or np.iinfo(np.int64).max
        wrong_labels = labels[(labels < 0) | (labels >= class_count)]
        if wrong_labels.size:
            raise FeedError(self._describe_wrong_label(int(wrong_labels[0])))
        return labels

    def _describe_wrong_label(self, label: int) -> str:
        """Return the message for a label out of range."""
        if label >= 0 and self.is_ranked:
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
        if self.labels is not None:
            self._check_labels(self.labels)
        counted = self.samples if self.has_classes and (labelled or kind == "classes") else 0
        # embeddings that all point one way are as doubtful as one class for all samples
        has_favourite = counted > 0 or (self.has_classes and kind == "embeddings")
        favourite = None
        if has_favourite:
            favourite = self.class_counts.most_common(1)[0][1] / self.samples
        return Top1Figures(
            reference=self.reference_hits / counted if labelled else None,
            candidate=self.candidate_hits / counted if labelled else None,
            agreement=self.agreement_count / counted if counted else None,
            classes=self._count_classes() if has_favourite else None,
            favourite=favourite,
            label_shift=max((self.shifts[k] * k / counted for k in (1, -1)), key=abs)
            if labelled
            else None,
        )

    def _count_classes(self) -> int | None:
        """Number of scores; for outputs of class numbers the highest number seen or labelled."""
        if self.count is not None or self.labels is None:
            return self.count
        return 1 + max(*self.class_counts, *self.labels, 1)

    def _check_labels(self, labels: Sequence[int]) -> None:
        if len(labels) != self.samples:
            raise FeedError(
                f"there must be one label a sample, got {len(labels)} labels"
                f" for {self.samples} samples"
            )
        if not self.has_classes:
            raise FeedError(
                "labels need an output of one score a class, [N, classes], or of the number of the"
                f" class, [N] or TopK's places; got {self.name!r} of another shape, so leave the"
                " labels out, or give a metric of your own"
            )


def _read_classes(output: Array, batch: int, *, ranked: bool) -> NDArray[np.int64] | None:
    """Return classes [N] of scores [N, C] (trailing 1s allowed) or integers [N], else None.

    With `ranked` integers [N, k] may be ranked classes too, the best one first.
    """
    if output.ndim == 0 or output.shape[0] != batch:
        return None
    if output.size == batch and np.issubdtype(output.dtype, np.integer):
        return np.asarray(output.reshape(batch), np.int64)
    if ranked and are_indices(output, batch):
        return np.asarray(output.reshape(batch, -1)[:, 0], np.int64)
    if output.ndim < 2 or output.shape[1] < 2 or output.size != batch * output.shape[1]:
        return None
    is_quantized = output.dtype.kind in "iu" and output.dtype.itemsize == 1
    if output.dtype.kind != "f" and not is_quantized:
        return None  # flags or counts
    scores = output.reshape(batch, -1)
    best = np.asarray(scores.argmax(axis=1), np.int64)
    best[np.isnan(scores.astype(np.float64)).any(axis=1)] = -1
    return best
