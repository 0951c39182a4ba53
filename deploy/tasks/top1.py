"""Top-1 hits of both models by labels, and where both agree.

The class is read from the output of the recognised task, else from the only output that holds
classes: a score per class [1, C], or class numbers, the best one first, as of ArgMax and TopK.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.tasks.indices import PlaceCounts, best_classes
from deploy.tasks.rows import Integers, Outputs, is_index_type, is_vector
from deploy.tensors import Array

_MAX_CLASS = np.iinfo(np.int64).max


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

        `output_name`: output to read the class from; None derives it from the first sample.
        """
        self.labels = labels
        self.samples = self.reference_hits = self.candidate_hits = 0
        self.shifts = Counter[int]()  # 1, -1 -> labels above and below the reference's class
        self.output_name = output_name
        self.has_classes = True  # until the output turns out to hold no classes
        self.score_count: int | None = None  # scores of a sample; None for class numbers
        self.classes = PlaceCounts()  # classes of the samples

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add the outputs of one sample.

        Raises:
            FeedError: a label that does not fit the samples or the classes.
        """
        self.samples += 1
        if self.output_name is None:
            self.output_name = _choose_output(reference)
        scores = reference[self.output_name]
        candidate_scores = candidate[self.output_name]
        reference_class = _read_class(scores)
        candidate_class = _read_class(candidate_scores)
        has_equal_shape = scores.shape == candidate_scores.shape
        if reference_class is None or candidate_class is None or not has_equal_shape:
            self.has_classes = False  # from now on there are no figures
            return

        self.score_count = None if _holds_numbers(scores) else scores.size
        self.classes.add(reference_class, candidate_class)
        if self.labels is None:
            return
        label = self._read_label(self.labels)
        self.reference_hits += int(reference_class[0] == label)
        self.candidate_hits += int(candidate_class[0] == label)
        # hits if the labels were numbered one higher or lower: from 1, or with a background class
        for shift in (1, -1):
            shifted_class = (int(reference_class[0]) + shift) % self._class_limit
            self.shifts[shift] += int(label == shifted_class)

    def _read_label(self, labels: Sequence[int]) -> int:
        """Return the label of the sample that was counted last."""
        check_label_count(labels, self.samples)
        label = labels[self.samples - 1]
        if 0 <= label < self._class_limit:
            return label
        if self.score_count is None:
            raise FeedError(
                f"labels must be 0 or more, got {label}; leave out samples that are of no class"
            )
        raise FeedError(
            f"labels must be 0 to {self.score_count - 1} for the model's {self.score_count}"
            f" classes, got {label}; labels that start at 1 must be lowered by one"
        )

    @property
    def _class_limit(self) -> int:
        """Number of classes; the largest integer if outputs of class numbers do not show it."""
        return self.score_count or _MAX_CLASS

    def result(self, task_name: str) -> dict[str, Any]:
        """Return the figures, by their fields of `deploy.metrics.accuracy.Accuracy`.

        `task_name`: name of the task that the outputs have; "" for none. Without labels only
        classes and embeddings have figures.

        Raises:
            FeedError: labels that do not fit.
        """
        figures: dict[str, Any] = {}
        is_counted = self.has_classes and (self.labels is not None or task_name == "classes")
        if is_counted:
            figures["top1_agreement"] = self.classes.equal.total() / self.samples
        # embeddings that all point one way are as doubtful as one class for all samples
        if is_counted or (self.has_classes and task_name == "embeddings"):
            favourite_count = max(self.classes.reference.values(), default=0)
            figures["classes"] = self.score_count
            figures["favourite"] = favourite_count / self.samples
        if self.labels is not None:
            self._check_labels(self.labels)
            figures |= self._label_figures(self.labels)
        return figures

    def _label_figures(self, labels: Sequence[int]) -> dict[str, Any]:
        """Return the figures that compare with the labels of all samples."""
        # share of labels that are one above the float model's class, or below it if that is more
        # frequent: then it is negative
        shift = 1 if self.shifts[1] >= self.shifts[-1] else -1
        # class numbers do not show how many classes there are: up to the highest one
        highest_class = max(*self.classes.reference, *labels, 1)
        return {
            "top1_reference": self.reference_hits / self.samples,
            "top1_candidate": self.candidate_hits / self.samples,
            "label_shift": shift * self.shifts[shift] / self.samples,
            "classes": self.score_count or highest_class + 1,
        }

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


def _choose_output(outputs: Outputs) -> str:
    """Return the only output of class numbers, else the only one of classes, else the first."""
    names = [name for name, value in outputs.items() if _read_class(value) is not None]
    number_names = [name for name in names if _holds_numbers(outputs[name])]
    for choice in (number_names, names):
        if len(choice) == 1:
            return choice[0]
    return next(iter(outputs))


def _holds_numbers(value: Array) -> bool:
    """Whether an output of classes holds their numbers, and not their scores."""
    return is_index_type(value) or (value.dtype.kind in "iu" and value.size == 1)


def _read_class(value: Array) -> Integers | None:
    """Return the best class of a sample, [1]; None for an output that holds no classes.

    It holds scores [1, C], with any further sides of 1, or class numbers [1] or [1, k], the best
    one first. A sample of NaN has no class.
    """
    if not value.ndim or not value.size or value.shape[0] != 1 or not is_vector(value):
        return None
    row = value.reshape(1, -1)
    if _holds_numbers(value):
        return np.asarray(row[:, 0], np.int64)
    if row.size < 2 or value.dtype.kind not in "fiu":
        return None  # a single number, flags
    return best_classes(row.astype(np.float64))
