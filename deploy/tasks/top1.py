"""Top-1 hits of both models by labels, and where both agree.

The class is read from the output of the recognised task, else from the only output that holds
classes: a score per class [1, C], or class numbers, the best one first, as of ArgMax and TopK.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.tasks.rows import Outputs, is_index_type, is_vector
from deploy.tensors import Array

_MAX_CLASS = np.iinfo(np.int64).max
# labels have another order than the model's classes if each has its own class, in so large a share
# of the samples; with fewer samples of a label, chance would give it one too
_MIN_ORDER_SHARE = 0.75
_MIN_LABEL_SAMPLES = 5  # on average
_MIN_LABELS = 3  # wrong inputs may move one or two labels to other classes


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

        Args:
            labels: classes of the samples; None without.
            output_name: output to read the class from; None derives it from the first sample.
        """
        self.labels = labels
        self.samples = self.equal = self.reference_hits = self.candidate_hits = 0
        # (label, class by the reference) -> samples; for labels that do not fit the classes
        self.samples_by_pair = Counter[tuple[int, int | None]]()
        self.output_name = output_name
        self.score_count: int | None = None  # scores of a sample; None for class numbers
        self.samples_by_class = Counter[int]()  # class -> samples that the reference gives to it

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add the outputs of one sample; a candidate's output of another shape has no class.

        Raises:
            FeedError: the output holds no classes, or a label does not fit samples or classes.
        """
        self.samples += 1
        if self.output_name is None:
            self.output_name = _choose_output(reference)
        output = reference[self.output_name]  # scores of classes, or class numbers
        reference_class, candidate_class = read_classes(output, candidate[self.output_name])
        self.score_count = None if _holds_class_numbers(output) else output.size
        if reference_class is not None:
            self.samples_by_class[reference_class] += 1
            self.equal += int(reference_class == candidate_class)
        if self.labels is None:
            return
        label = self._read_label(self.labels)
        self.reference_hits += int(label == reference_class)
        self.candidate_hits += int(label == candidate_class)
        self.samples_by_pair[label, reference_class] += 1

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
            f" classes, got {label}; labels that start at 1 must be lowered by one, and with"
            " `folders` every folder is a class"
        )

    @property
    def _class_limit(self) -> int:
        """Number of classes; the largest integer if outputs of class numbers do not show it."""
        return self.score_count or _MAX_CLASS

    def result(self) -> dict[str, Any]:
        """Return the figures, by their fields of `deploy.metrics.accuracy.Accuracy`.

        Raises:
            FeedError: there are more or fewer labels than samples.
        """
        # samples of the class that the reference gives to most
        favourite_count = max(self.samples_by_class.values(), default=0)
        figures: dict[str, Any] = {
            "top1_agreement": self.equal / self.samples,
            "classes": self.score_count,
            "favourite": favourite_count / self.samples,
        }
        if self.labels is None:
            return figures

        if len(self.labels) != self.samples:
            raise FeedError(
                f"there must be one label a sample, got {len(self.labels)} labels"
                f" for {self.samples} samples"
            )
        # labels may be the class above the float model's (1) or the class below it (-1). The share
        # of the more frequent case is reported, with the sign of the case
        shift = 1 if self._count_shifted(1) >= self._count_shifted(-1) else -1
        # class numbers do not show how many classes there are: two at least, and up to the highest
        # number that the reference (a key here) or the labels have
        highest_class = max(*self.samples_by_class, *self.labels, 1)
        return figures | {
            "top1_reference": self.reference_hits / self.samples,
            "top1_candidate": self.candidate_hits / self.samples,
            "label_shift": shift * self._count_shifted(shift) / self.samples,
            "label_order": self._find_label_order(),
            "classes": self.score_count or highest_class + 1,
        }

    def _count_shifted(self, shift: int) -> int:
        """Return how many samples are hits once their label is lowered by `shift`.

        It is 1 for labels from 1, and -1 for a model with a background class 0. The last class and
        the first are neighbours, too.
        """
        return sum(
            count
            for (label, reference_class), count in self.samples_by_pair.items()
            if (label - shift) % self._class_limit == reference_class
        )

    def _find_label_order(self) -> tuple[int, int] | None:
        """Return a (label, class by the reference) that shows another order of the classes.

        None if the labels have the model's order, or are shifted by one, or too few samples of a
        label share one class, or two labels do.
        """
        class_by_label: dict[int, int] = {}  # label -> its most frequent class
        sample_count = 0  # samples of these classes
        for (label, reference_class), count in self.samples_by_pair.most_common():
            if label not in class_by_label and reference_class is not None:
                class_by_label[label] = reference_class
                sample_count += count
        label_count = len(class_by_label)
        has_enough_labels = _MIN_LABELS <= label_count <= self.samples / _MIN_LABEL_SAMPLES
        is_one_to_one = len({*class_by_label.values()}) == label_count
        is_frequent = sample_count >= _MIN_ORDER_SHARE * self.samples
        is_shifted = max(map(self._count_shifted, (1, -1))) == sample_count
        if is_shifted or not (has_enough_labels and is_one_to_one and is_frequent):
            return None
        return min((pair for pair in class_by_label.items() if pair[0] != pair[1]), default=None)


def _choose_output(outputs: Outputs) -> str:
    """Return the only output of class numbers, else the first one of classes.

    Raises:
        FeedError: no output holds classes.
    """
    # outputs of a score for each class, or of class numbers, such as TopK's
    class_outputs = [
        name for name, value in outputs.items() if value.shape[:1] == (1,) and _holds_classes(value)
    ]
    class_number_outputs = [name for name in class_outputs if _holds_class_numbers(outputs[name])]
    if len(class_number_outputs) == 1:
        return class_number_outputs[0]
    if class_outputs:
        return class_outputs[0]
    raise FeedError(
        "labels need an output of one score a class, [N, classes], or of the number of the class,"
        f" [N] or TopK's places; got {next(iter(outputs))!r} of another shape, so leave the labels"
        " out, or give a metric of your own"
    )


def _holds_class_numbers(value: Array) -> bool:
    """Whether an output of classes holds their numbers, and not their scores."""
    return is_index_type(value) or (value.dtype.kind in "iu" and value.size == 1)


def _holds_classes(value: Array) -> bool:
    """Whether a sample has scores [1, C], with any further sides of 1, or class numbers."""
    if not value.size or not is_vector(value):
        return False
    has_scores = value.size > 1 and value.dtype.kind in "fiu"  # no single number, no flags
    return has_scores or _holds_class_numbers(value)


def read_classes(reference: Array, candidate: Array) -> tuple[int | None, int | None]:
    """Return the best class of one sample by each model.

    It is None without classes or with NaN or Inf, and for a candidate's output of another shape.
    """
    reference_class = _read_class(reference)
    if candidate.shape != reference.shape:
        return reference_class, None
    return reference_class, _read_class(candidate)


def _read_class(value: Array) -> int | None:
    """Return the best class of a sample's scores, or the first of its class numbers, if any."""
    if not _holds_classes(value) or not np.isfinite(value).all():
        return None
    if _holds_class_numbers(value):
        return int(value.reshape(-1)[0])
    return int(value.argmax())
