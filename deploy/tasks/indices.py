"""Whole numbers: class numbers, and indices of what the model selects.

`find_integers`: class numbers and indices, such as those that NonMaxSuppression selects. They are
equal or not, at the same place or, in lists of varying length, as rows in any order.

`PlaceCounts` counts class numbers at places, here and for labels, steps and pixels.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from deploy.tasks.evaluation_task import EvaluationTask, Form, TaskFigure, TaskTally
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import Integers, Outputs, is_index_type
from deploy.tasks.thresholds import MOST_SHARE
from deploy.tensors import Array

NO_CLASS = np.iinfo(np.int64).min  # stands at places without a class, as of a score of NaN
_PADDING = -1  # integers that fill a list up


@dataclass(slots=True)
class PlaceCounts:
    """Numbers of places by class, among the places where FP32 has a class.

    Attributes:
        reference: class -> number of places by FP32.
        candidate: the same by the candidate; it has no class where its output has another shape.
        equal: class -> number of places where both have it.
    """

    reference: Counter[int] = field(default_factory=Counter)
    candidate: Counter[int] = field(default_factory=Counter)
    equal: Counter[int] = field(default_factory=Counter)

    def add(self, reference: Integers, candidate: Integers) -> int:
        """Add the class numbers of one sample; `NO_CLASS` marks a place without a class.

        Args:
            reference: FP32's, of any shape.
            candidate: the candidate's; of another shape, it has no class anywhere.

        Returns:
            Number of places where both have the same class.
        """
        if candidate.shape != reference.shape:
            candidate = np.full_like(reference, NO_CLASS)
        # where FP32 has no class, the candidate's does not count, so that both have as many places
        has_class = reference != NO_CLASS
        is_equal = has_class & (reference == candidate)
        self.reference += _count_values(reference[has_class])
        self.candidate += _count_values(candidate[has_class])
        self.equal += _count_values(reference[is_equal])
        return int(is_equal.sum())

    def count_agreement(self) -> tuple[int, int, str] | None:
        """Return (equal places that count, all that count, text on those that do not).

        Usually all places count, and the text is "". FP32 may have its most frequent class, such as
        silence or background, at most places. A constant candidate would be right there, so places
        where both models have that class do not count. None if FP32 has one class at all places.
        """
        total = self.reference.total()
        equal = self.equal.total()
        if len(self.reference) < 2:
            return None
        usual_class = max(sorted(self.reference), key=self.reference.__getitem__)
        if self.reference[usual_class] < MOST_SHARE * total:
            return equal, total, ""
        uncounted_places = self.equal[usual_class]
        exception = f", without {usual_class}, the usual one, where both have it"
        return equal - uncounted_places, total - uncounted_places, exception


def _count_values(values: Array) -> Counter[int]:
    """Return integer -> how often it occurs."""
    numbers, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


P = TypeVar("P", bound="PlaceTask")


@dataclass(slots=True)
class PlaceTally(TaskTally[P]):
    """Counts places by FP32's class and by the candidate's.

    Attributes:
        place_counts: the numbers of places by class.
    """

    place_counts: PlaceCounts = field(default_factory=PlaceCounts)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        self.place_counts.add(self.task.read_classes(reference), self.task.read_classes(candidate))

    def result(self) -> TaskFigure | None:
        """Return the share of equal places; None if FP32 gives all of them to one class."""
        agreement = self.place_counts.count_agreement()
        if agreement is None:
            return None
        self.kept, self.total, exception = agreement
        return self.share(self.task.figure_name, f"{self.task.agreement}{exception}")


@dataclass(frozen=True, slots=True)
class PlaceTask(EvaluationTask):
    """A class at each place of an output, such as a step or a pixel.

    Attributes:
        output: name of the output.
        classes: number of classes.
        axis: dimension of the classes, 1 or -1.
        figure_name: name of the share of places that agree.
        agreement: what agrees at them, as text.
    """

    output: str
    classes: int
    axis: int = 1
    figure_name: ClassVar[str]
    agreement: ClassVar[str]
    tally_type = PlaceTally

    def read_classes(self, outputs: Outputs) -> Integers:
        """Return the best class at each place of one sample, flat; none for another shape."""
        scores = outputs[self.output]
        if scores.ndim < 3 or scores.shape[self.axis] != self.classes:
            return np.zeros(0, np.int64)
        return best_classes(np.moveaxis(scores, self.axis, 1)).reshape(-1)


def best_classes(scores: Array) -> Integers:
    """Return the best class along axis 1 of scores [N, C, ...]; `NO_CLASS` where one is NaN."""
    classes = np.asarray(scores.argmax(axis=1), np.int64)
    classes[np.isnan(scores).any(axis=1)] = NO_CLASS
    return classes


@dataclass(slots=True)
class _IndexTally(TaskTally["Indices"]):
    """Counts integers at their places, and rows of lists in any order.

    Attributes:
        place_counts: of the outputs that are compared place by place.
        rows: number of FP32's rows, of all lists.
        common_rows: number of those rows that the candidate has too.
    """

    place_counts: PlaceCounts = field(default_factory=PlaceCounts)
    rows: int = 0
    common_rows: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name, is_list in self.task.outputs.items():
            numbers, candidate_numbers = np.atleast_1d(reference[name], candidate[name])
            if is_list:
                rows = Counter(map(str, numbers.tolist()))
                equal = (rows & Counter(map(str, candidate_numbers.tolist()))).total()
                self.rows += len(numbers)
                self.common_rows += equal
                self.new += len(candidate_numbers) - equal
            else:
                equal = self.place_counts.add(numbers.astype(np.int64), candidate_numbers)
                self.new += candidate_numbers.size - equal

    def result(self) -> TaskFigure | None:
        """Return the share kept; None if FP32 gives nothing, or one value at every place."""
        equal, total, exception = self.place_counts.count_agreement() or (0, 0, "")
        self.kept = equal + self.common_rows
        self.total = total + self.rows
        if not self.total:
            return None
        text = f"indices of FP32 kept, {self.new} new{exception}"
        return self.share("indices kept", text)


@dataclass(frozen=True, slots=True)
class Indices(EvaluationTask):
    """Class numbers, or indices of what is selected.

    Attributes:
        outputs: output -> whether its rows are in any order.
    """

    outputs: Mapping[str, bool]
    name = "indices"
    reads = "class numbers or indices"
    tally_type = _IndexTally


INDICES = Form(
    shape="int32 or int64 outputs",
    values="integers of 0 or more",
    figure="equal values at the same place; for lists, equal rows in any order",
    source="NonMaxSuppression",
)


def find_integers(samples: FirstSamples) -> Indices | None:
    """Return the outputs of class numbers or indices; None without such.

    The rows of lists of varying length, and of NonMaxSuppression's selections, are compared in any
    order; all other outputs place by place.
    """
    # outputs whose integers may be class numbers or indices
    names = [
        name for name in samples.output_names if all(map(_are_class_numbers, samples.arrays(name)))
    ]

    is_list_by_name = {}  # output -> whether its rows are in any order
    for name in names:
        arrays = samples.arrays(name)
        # integers that are equal in all samples may be a constant, unless they are all there is
        is_constant = len({value.tobytes() for value in arrays}) == 1
        if is_constant and len(names) < len(samples.output_names):
            continue
        is_selection = samples.declared.ends.get(name) == "selected"
        varies_in_shape = len({value.shape for value in arrays}) > 1
        is_list_by_name[name] = is_selection or varies_in_shape
    if not is_list_by_name:
        return None
    # no slices: integers are not compared by how far they are apart
    return Indices(is_list_by_name, parts=dict.fromkeys(is_list_by_name, ()))


def _are_class_numbers(value: Array) -> bool:
    """Whether it may hold class numbers or indices."""
    return is_index_type(value) and value.ndim > 0 and bool(value.min(initial=0) >= _PADDING)
