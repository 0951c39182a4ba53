"""Base classes and helpers shared by all tasks.

A module of this package provides an `EvaluationTask`, a form of outputs, and its `TaskTally`, a
running comparison of two models. Only numbers and boxes of a few samples are stored, so memory
stays constant.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from deploy.tasks.detections import Detections
from deploy.tasks.rows import Flags, ImageSize, Outputs
from deploy.tasks.slices import SlicesByOutput

MAX_SHOWN = 4  # samples shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxExample:
    """Boxes of both models in one sample, in pixels of the model's input.

    Attributes:
        number: index of the sample, from 0.
        size: (height, width) of the model's input.
        kept: FP32's boxes that the candidate finds too.
        found: the candidate's boxes that match them, in the same order.
        lost: boxes of FP32 only.
        new: boxes of the candidate only.
    """

    number: int
    size: ImageSize
    kept: Detections
    found: Detections
    lost: Detections
    new: Detections


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassExample:
    """One sample to which the two models assign different classes.

    Attributes:
        number: index of the sample, from 0.
        output: name of the output.
        reference: (class, its score) by FP32.
        candidate: the same by the candidate.
    """

    number: int
    output: str
    reference: tuple[int, float]
    candidate: tuple[int, float]


Example = BoxExample | ClassExample
FEW_COUNTED = 100  # things of FP32 below which the interval of their share is shown
_NORMAL_95 = 1.96  # quantile of the normal distribution for an interval of 95 %


def share_interval(kept: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, 0 to 1 (JASA 22, 1927, p. 209)."""
    share = kept / total
    scale = 1 + _NORMAL_95**2 / total
    center = share + _NORMAL_95**2 / (2 * total)
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / total + (_NORMAL_95 / (2 * total)) ** 2)
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """Figure of a task: how much of the float model's predictions the candidate reproduces.

    Attributes:
        task: name of the task, such as "boxes" or "classes".
        figure: name of the figure, such as "boxes kept".
        value: more is better; 1 for full agreement, any scale for a user's metric.
        words: the figure as text.
        count: the figure in short, such as "84 of 88".
        samples: number of samples.
        found: number of boxes of the float model; None for other tasks.
        new: boxes or indices of the candidate only.
        kept: boxes, points or samples that the candidate reproduces; 0 where there are none.
        counted: number of boxes, points or samples that `kept` is counted among.
        reference: the float model's own value.
        form: how the outputs are interpreted.
        beside: outputs that the task does not cover.
    """

    task: str
    figure: str
    value: float
    words: str
    count: str
    samples: int
    found: int | None = None
    new: int = 0
    kept: int = 0
    counted: int = 0
    reference: float = 1.0
    form: str = ""
    beside: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The words, with the interval of the share where FP32 has few."""
        if not 0 < self.counted < FEW_COUNTED:
            return self.words
        low, high = share_interval(self.kept, self.counted)
        share, comma, others = self.words.partition(",")
        return f"{share} ({100 * low:.0f} to {100 * high:.0f} %){comma}{others}"

    @property
    def lost(self) -> float:
        """The loss: reference - value, relative to the reference if that exceeds 1."""
        return (self.reference - self.value) / max(1.0, abs(self.reference))


class Form(NamedTuple):
    """A form of outputs that is recognised, as text: a row of docs/forms.md (`scripts/forms.py`).

    Attributes:
        shape: shapes of the outputs.
        values: what their values are.
        figure: what is compared with FP32.
        source: models and papers that have it.
    """

    shape: str
    values: str
    figure: str
    source: str


@dataclass(frozen=True, slots=True)
class EvaluationTask(ABC):
    """A recognised task: a form of outputs.

    Attributes:
        name: name of the task.
        tally_type: class of its tally.
        reads: how the outputs are interpreted, with fields of the task.
        parts: output -> its slices, if the task knows them better than the data shows. An output
            without slices is not compared value by value, such as a list of detections in varying
            order.
    """

    name: ClassVar[str]
    tally_type: ClassVar[type[TaskTally[Any]]]
    reads: ClassVar[str] = ""
    parts: SlicesByOutput = field(default_factory=dict, kw_only=True)

    @property
    def covered(self) -> tuple[str, ...]:
        """The outputs of the task, and those that it slices."""
        names = (self.output,) if hasattr(self, "output") else getattr(self, "outputs", ())
        return tuple(dict.fromkeys((*names, *self.parts)))

    @property
    def form(self) -> str:
        """How the outputs are interpreted, as text."""
        return f"{', '.join(self.covered)}: {self.reads.format(self)}"

    @property
    def lists(self) -> frozenset[str]:
        """Outputs whose length, or the order of whose rows, may differ between two models."""
        return frozenset(name for name, slices in self.parts.items() if not slices)

    def tally(self) -> TaskTally[Any]:
        """Return a new, empty tally."""
        return self.tally_type(self)


T = TypeVar("T", bound=EvaluationTask)


@dataclass(slots=True)
class TaskTally(ABC, Generic[T]):
    """A running comparison in constant memory.

    In outputs with NaN or of another shape the candidate has nothing.

    Attributes:
        task: the task.
        samples: number of samples so far.
        total: number of FP32's things, such as boxes, points or texts, if the task counts any.
        kept: number of those that the candidate has too.
        new: number of things that only the candidate has.
        ranked_examples: (sort key, example) of the samples to show, the most different first; empty
            if the task shows none.
    """

    task: T
    samples: int = 0
    total: int = 0
    kept: int = 0
    new: int = 0
    ranked_examples: list[tuple[tuple[float, float, int], Example]] = field(default_factory=list)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample: arrays with a batch of 1 (or none)."""
        self.samples += 1
        self._add(inputs, reference, candidate)

    @abstractmethod
    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None: ...

    @abstractmethod
    def result(self) -> TaskFigure | None:
        """Return the figure; None if the float model predicted nothing to compare with."""

    def offer(self, example: Example, *, difference: float, predictions: float) -> None:
        """Consider a sample to show.

        The `MAX_SHOWN` samples that differ most are kept; of equal ones, those with most
        predictions.

        Args:
            example: the sample.
            difference: by how much the two models differ; 0 if they agree.
            predictions: how much FP32 predicts, such as its number of boxes; a sample in which
                it predicts nothing, and the candidate agrees, shows nothing.
        """
        if difference > 0 or predictions > 0:
            sort_key = (-difference, -predictions, example.number)
            bisect.insort(self.ranked_examples, (sort_key, example), key=itemgetter(0))
            del self.ranked_examples[MAX_SHOWN:]

    def shown(self) -> tuple[Example, ...]:
        """Return a few samples to show, those where both models differ most first."""
        return tuple(example for _, example in self.ranked_examples)

    def figure(self, figure: str, value: float, count: str, text: str) -> TaskFigure:
        """Return a figure of the task; the arguments are those of `TaskFigure`.

        `text`: the figure as text.
        """
        return TaskFigure(
            task=self.task.name,
            figure=figure,
            value=value,
            count=count,
            words=text,
            samples=self.samples,
            form=self.task.form,
        )

    def share(self, figure: str, text: str) -> TaskFigure:
        """Return a figure that is the share of FP32's things or samples that the candidate keeps.

        Args:
            figure: name of the figure.
            text: what is kept, such as "boxes of FP32 kept".
        """
        count = f"{self.kept} of {self.total}"
        share = self.figure(figure, self.kept / self.total, count, f"{count} {text}")
        return replace(share, kept=self.kept, counted=self.total, new=self.new)


@dataclass(slots=True)
class PointTally(TaskTally["PointTask"]):
    """Counts FP32's points, such as key points or peaks, that the candidate has too."""

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        is_present, is_match = self.task.match_points(reference, candidate)
        self.total += int(is_present.sum())
        self.kept += int((is_present & is_match).sum())

    def result(self) -> TaskFigure | None:
        """Return the share of the points; None if FP32 has none."""
        if not self.total:
            return None
        things = self.task.things
        text = f"{things} of FP32 {self.task.condition}"
        return self.share(f"{things} kept", text)


@dataclass(frozen=True, slots=True)
class PointTask(EvaluationTask):
    """Points in a picture.

    Attributes:
        things: what the points are, as text.
        condition: when the candidate has one too, as text.
    """

    things: ClassVar[str] = "key points"
    condition: ClassVar[str]
    tally_type = PointTally

    @abstractmethod
    def match_points(self, reference: Outputs, candidate: Outputs) -> tuple[Flags, Flags]:
        """Return which points [K] FP32 sees in a sample, and which of them the candidate has."""
