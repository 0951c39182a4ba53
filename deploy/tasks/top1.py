"""Top-1 hits of both models by labels, and where both agree.

The class is read from the output of the recognised task, else from the first output: a score per
class [N, C], or the class itself [N] as from ArgMax, or TopK's indices, the best one first, also
beside its values. With labels, a later output may be read, if only that one holds classes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deploy.errors import FeedError
from deploy.tasks.indices import PlaceCounts, best_classes
from deploy.tasks.rows import Integers, Outputs, are_indices, find_indices
from deploy.tensors import Array

_MAX_CLASS = np.iinfo(np.int64).max


@dataclass(slots=True)
class Top1Figures:
    """Top-1 figures; the fields are those of `deploy.metrics.accuracy.Accuracy`."""

    top1_reference: float | None = None
    top1_candidate: float | None = None
    top1_agreement: float | None = None
    classes: int | None = None
    favourite: float | None = None
    label_shift: float | None = None


def check_label_count(labels: Sequence[int], samples: int) -> None:
    """Check that there is a label for each of the first samples.

    Raises:
        FeedError: there are fewer.
    """
    if len(labels) < samples:
        raise FeedError(
            f"there must be one label a sample, got {len(labels)} labels for {samples} samples or"
            " more"
        )


class Top1:
    """Counts top-1 hits of both models and where both agree."""

    def __init__(self, labels: Sequence[int] | None, output_name: str | None = None) -> None:
        """Start at 0 samples.

        `output_name`: output to read the class from; None derives it from the first batch.
        """
        self.labels = labels
        self.samples = self.reference_hits = self.candidate_hits = 0
        self.shifts = Counter[int]()  # 1, -1 -> labels above and below the reference's class
        self.output_name = output_name
        self.has_classes = True  # until the output turns out to hold no classes
        self.score_count: int | None = None  # scores of a sample; None for class numbers
        self.classes = PlaceCounts()  # classes of the samples

    def add(self, reference: Outputs, candidate: Outputs, batch: int) -> None:
        """Add the outputs of one batch of `batch` samples.

        Raises:
            FeedError: labels that do not fit the samples or the classes.
        """
        first_sample = self.samples
        self.samples += batch
        if self.output_name is None:
            self.output_name = self._choose(reference, batch)
        scores, candidate_scores = reference[self.output_name], candidate[self.output_name]
        reference_classes = _read_classes(scores, batch)
        classes = _read_classes(candidate_scores, batch)
        has_equal_shape = scores.shape == candidate_scores.shape
        if reference_classes is None or classes is None or not has_equal_shape:
            self.has_classes = False  # from now on there are no figures
            return

        # in place of scores the output may hold class numbers: ArgMax's one, or TopK's best ones
        holds_numbers = scores.size == batch or are_indices(scores, batch)
        self.score_count = None if holds_numbers else scores.size // batch
        self.classes.add(reference_classes, classes)
        if self.labels is None:
            return

        labels = self._batch_labels(self.labels, first_sample, batch)
        self.reference_hits += int((reference_classes == labels).sum())
        self.candidate_hits += int((classes == labels).sum())
        # hits if the labels were numbered one higher or lower: from 1, or with a background class
        for shift in (1, -1):
            shifted_classes = (reference_classes + shift) % self._class_limit
            self.shifts[shift] += int((labels == shifted_classes).sum())

    def _choose(self, outputs: Outputs, batch: int) -> str:
        """Return the output to read the class from; the first one if none fits.

        With labels, it is the indices of TopK, or else the only output that holds classes.
        """
        first = next(iter(outputs))
        if self.labels is None:
            return first
        indices = find_indices(outputs, first, batch)
        if indices is not None:
            return indices
        fitting = [name for name in outputs if _read_classes(outputs[name], batch) is not None]
        return fitting[0] if len(fitting) == 1 else first

    def _batch_labels(self, labels: Sequence[int], start: int, batch: int) -> Integers:
        """Return the labels of one batch, whose samples begin at `start`."""
        check_label_count(labels, start + batch)
        batch_labels = np.asarray(labels[start : start + batch], np.int64)
        wrong_labels = batch_labels[(batch_labels < 0) | (batch_labels >= self._class_limit)]
        if not wrong_labels.size:
            return batch_labels
        if self.score_count is None:
            raise FeedError(
                f"labels must be 0 or more, got {wrong_labels[0]}; leave out samples that are of no"
                " class"
            )
        raise FeedError(
            f"labels must be 0 to {self.score_count - 1} for the model's {self.score_count}"
            f" classes, got {wrong_labels[0]}; labels that start at 1 must be lowered by one"
        )

    @property
    def _class_limit(self) -> int:
        """Number of classes; the largest integer if outputs of class numbers do not show it."""
        return self.score_count or _MAX_CLASS

    def result(self, task_name: str) -> Top1Figures:
        """Return the figures; those that the task or the lack of labels leaves open are None.

        `task_name`: name of the task that the outputs have; "" for none. Without labels only
        classes and embeddings have figures.

        Raises:
            FeedError: labels that do not fit.
        """
        figures = Top1Figures()
        is_counted = self.has_classes and (self.labels is not None or task_name == "classes")
        if is_counted:
            figures.top1_agreement = self.classes.equal.total() / self.samples
        # embeddings that all point one way are as doubtful as one class for all samples
        if is_counted or (self.has_classes and task_name == "embeddings"):
            figures.classes = self.score_count
            figures.favourite = max(self.classes.reference.values(), default=0) / self.samples
        if self.labels is not None:
            self._check_labels(self.labels)
            self._add_label_figures(figures, self.labels)
        return figures

    def _add_label_figures(self, figures: Top1Figures, labels: Sequence[int]) -> None:
        """Fill in the figures that compare with the labels of all samples."""
        figures.top1_reference = self.reference_hits / self.samples
        figures.top1_candidate = self.candidate_hits / self.samples
        # share of labels that are one above the float model's class, or below it if that is more
        # frequent: then it is negative
        shift = 1 if self.shifts[1] >= self.shifts[-1] else -1
        figures.label_shift = shift * self.shifts[shift] / self.samples
        if figures.classes is None:
            # class numbers do not show how many classes there are: up to the highest one
            figures.classes = 1 + max(*self.classes.reference, *labels, 1)

    def _check_labels(self, labels: Sequence[int]) -> None:
        """Check that each sample has a label, and that an output holds classes."""
        if len(labels) != self.samples:
            raise FeedError(
                f"there must be one label a sample, got {len(labels)} labels"
                f" for {self.samples} samples"
            )
        if not self.has_classes:
            raise FeedError(
                "labels need an output of one score a class, [N, classes], or of the number of the"
                f" class, [N] or TopK's places; got {self.output_name!r} of another shape, so leave"
                " the labels out, or give a metric of your own"
            )


def _read_classes(output: Array, batch: int) -> Integers | None:
    """Return the best class of each sample [N]; None for outputs that hold no classes.

    An output holds scores [N, C] (trailing 1s allowed), class numbers [N], or ranked classes [N, k]
    as TopK's indices, the best one first. A sample of NaN has no class.
    """
    if output.ndim == 0 or output.shape[0] != batch:
        return None
    is_integer = np.issubdtype(output.dtype, np.integer)
    if (is_integer and output.size == batch) or are_indices(output, batch):
        return np.asarray(output.reshape(batch, -1)[:, 0], np.int64)
    if output.ndim < 2 or output.shape[1] < 2 or output.size != batch * output.shape[1]:
        return None
    is_quantized = is_integer and output.dtype.itemsize == 1
    if output.dtype.kind != "f" and not is_quantized:
        return None  # flags or counts
    return best_classes(output.reshape(batch, -1).astype(np.float64))
