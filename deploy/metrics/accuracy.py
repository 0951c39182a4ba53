"""Accuracy of an engine against the float model, in one pass and constant memory.

NaN and Inf are never averaged away: they are reported in `Accuracy.problems`. Formulas:
`deploy.metrics.output_errors`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.graph.index import strip_padded_channels
from deploy.metrics.output_errors import (
    OutputAccuracy,
    RunningError,
    plain_json,
)
from deploy.metrics.output_form import OutputForm, OutputTally, SliceAccuracy, derive_form
from deploy.metrics.precision import GroundTruth, MeanPrecision
from deploy.tasks import EvaluationTask, Metric, TaskFigure
from deploy.tasks.evaluation_task import Example, ThresholdTally
from deploy.tasks.rows import AlikeOutputs, batch_length, split_batch
from deploy.tasks.slices import form_samples
from deploy.tasks.top1 import Top1
from deploy.tasks.vectors import Classes
from deploy.tensors import Array, HasOutputs, TensorSpec

# fields of `Accuracy` that JSON leaves out
_NOT_WRITTEN = ("alike", "silent", "carried", "label_shift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of a `Comparison`.

    Attributes:
        samples: samples compared (rows, not batches).
        outputs: one entry per output, in the reference's order.
        top1_reference, top1_candidate: share of samples whose top-1 class is the label.
        top1_agreement: share of samples where both models have the same top-1 class. Without
            labels it is None for regression values, for outputs ranked by TopK and for tasks other
            than classification.
        problems: sentences on NaN, Inf and differing shapes; empty if there are none.
        classes: number of classes of the classification output. An output of class numbers without
            scores counts the distinct ones seen, labels included.
        favourite: share of the samples that the reference gives to its most frequent class.
        label_shift: share of samples whose label is the class above the reference's; if more are
            the class below, minus their share.
        reading: how the outputs were interpreted, or that they were not recognised.
        why: the task, and the shapes and values of the outputs that show it.
        set_task: name of the task that the user set.
        carried: state outputs -> the inputs of the next call that take them.
        parts: one entry per output slice, the worst (lowest SQNR) first.
        precision: mean average precision of both models, if annotated objects were given.
        task: agreement of both models on the task; None if the task was not recognised or the
            reference predicts next to nothing.
        silent: whether the task was recognised, but the reference predicts next to nothing.
        alike: whether the reference's floating-point outputs hardly differ between samples.
    """

    samples: int
    outputs: tuple[OutputAccuracy, ...]
    top1_reference: float | None = None
    top1_candidate: float | None = None
    top1_agreement: float | None = None
    problems: tuple[str, ...] = ()
    classes: int | None = None
    favourite: float | None = None
    label_shift: float | None = None
    parts: tuple[SliceAccuracy, ...] = ()
    task: TaskFigure | None = None
    precision: MeanPrecision | None = None
    reading: str = ""
    why: str = ""
    set_task: str = ""
    silent: bool = False
    alike: bool = False
    carried: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> SliceAccuracy | None:
        """The slice with the lowest SQNR; the output itself if it is not sliced."""
        return self.parts[0] if self.parts else None

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; numbers JSON has no word for become "inf" or "nan"."""
        names = (one.name for one in fields(self) if one.name not in _NOT_WRITTEN)
        return {name: plain_json(getattr(self, name)) for name in names}


class Comparison:
    """Accumulates one candidate's figures against the reference, batch by batch."""

    def __init__(
        self,
        reference: HasOutputs,
        candidate: HasOutputs,
        *,
        labels: Sequence[int] | GroundTruth | None = None,
        form: OutputForm | None = None,
        metric: Metric | None = None,
    ) -> None:
        """Start with no samples.

        `labels`: classes of the samples, or annotated objects for a detector. `form`: slices and
        task of the outputs; None derives them from the first samples. `metric`: what the user set
        in place of the task's figure or of the task; class labels are passed to it.

        Raises:
            ConfigError: outputs whose names differ.
        """
        names = [spec.name for spec in reference.outputs if spec.dtype != "str"]
        others = {spec.name for spec in candidate.outputs}
        if not names or set(names) - others:
            raise ConfigError(
                f"both models must have the same outputs, got {names} and {sorted(others)};"
                " compare an engine with the model it was built from"
            )
        self._names = names
        self._batch_inputs = None
        if form is not None:
            self._batch_inputs = form.batch_inputs
        elif metric is not None:
            self._batch_inputs = metric.declared.batch_inputs
        self._errors = {name: RunningError(name) for name in self._names}
        objects = labels if isinstance(labels, GroundTruth) else None
        classes = None if isinstance(labels, GroundTruth) else labels
        top1_labels = classes if metric is None or metric.function is None else None
        self._top1 = Top1(top1_labels)
        several = len(self._names) > 1 and top1_labels is not None
        self._heads = {name: Top1(top1_labels, name) for name in self._names if several}
        self._alike = AlikeOutputs()
        self._truth = OutputTally(form, metric=metric, labels=classes, objects=objects)

    def add(
        self,
        feed: Mapping[str, Array],
        reference: Mapping[str, Array],
        candidate: Mapping[str, Array],
        *,
        count: int | None = None,
    ) -> None:
        """Add one batch's outputs.

        Args:
            feed: the inputs.
            reference: outputs of the float model.
            candidate: outputs of the engine.
            count: number of samples of all batches, if the last one was padded with others.

        Raises:
            FeedError: labels that do not fit the samples or the classes.
        """
        batch = batch_length(feed, self._batch_inputs)
        inputs: Mapping[str, Array] = feed
        left = {name: reference[name] for name in self._names}
        right = {name: candidate[name] for name in self._names}
        if count is not None and self._top1.samples + batch > count:
            rows = count - self._top1.samples
            inputs, left, right = (_first(arrays, rows, batch) for arrays in (feed, left, right))
            batch = rows
        for name, error in self._errors.items():
            error.add(left[name], right[name], batch)
        self._top1.add(left, right, batch, at_once=not self._heads)
        for head in self._heads.values():
            head.add(left, right, batch, at_once=False)
        self._alike.add(left, batch)
        self._truth.add(inputs, left, right, batch)

    @property
    def watched(self) -> frozenset[int]:
        """Indices of the samples whose pictures `shown` may need."""
        return self._truth.watched

    def shown(self) -> tuple[Example, ...]:
        """Return a few samples where both models differ most, the worst first."""
        return self._truth.shown()

    def result(self) -> Accuracy:
        """Return the figures so far.

        Raises:
            FeedError: no sample, or labels that do not fit.
        """
        if self._top1.samples == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        outputs = tuple(error.result() for error in self._errors.values())
        figure, form = self._truth.task(), self._truth.form
        task = form.task
        kind = (
            "beside others" if figure is not None and figure.beside else task.name if task else ""
        )
        first = task.outputs[0] if isinstance(task, Classes) else ""
        top1 = self._heads.get(first, self._top1).result(kind)
        lists = frozenset[str]() if task is None else task.lists
        return Accuracy(
            samples=self._top1.samples,
            outputs=outputs,
            top1_reference=top1.reference,
            top1_candidate=top1.candidate,
            top1_agreement=top1.agreement,
            classes=top1.classes,
            favourite=top1.favourite,
            label_shift=top1.label_shift,
            parts=self._truth.parts(outputs),
            task=figure,
            precision=self._truth.precision(),
            reading=self._truth.reading(),
            why=form.reason,
            set_task=form.set_task,
            silent=self._truth.silent,
            alike=self._alike.alike,
            carried=form.states,
            problems=tuple(_problems(outputs, self._top1.samples, lists)),
        )


SamplePairs = Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]]  # (inputs, FP32's outputs)


def recognise_first(
    samples: SamplePairs, metric: Metric
) -> tuple[EvaluationTask | None, SamplePairs]:
    """Return the task that the first samples show, and all samples.

    Raises:
        ConfigError: the outputs do not fit the user's task.
    """
    pairs = iter(samples)
    first = list(islice(pairs, 1))
    first += islice(pairs, max((form_samples(*pair) - 1 for pair in first), default=0))
    inputs, outputs = zip(*first, strict=True)
    return derive_form(outputs, inputs=inputs, metric=metric).task, chain(first, pairs)


def find_threshold(samples: SamplePairs, metric: Metric) -> float | None:
    """Return the score above which the float model's boxes, labels or masks count; None without.

    `metric`: what the user set.
    """
    task, pairs = recognise_first(samples, metric)
    tally = None if task is None else task.tally()
    if not isinstance(tally, ThresholdTally):
        return None
    for pair in pairs:
        batch = batch_length(pair[0], metric.declared.batch_inputs)
        for row, reference in zip(*(split_batch(side, batch) for side in pair), strict=True):
            tally.add(row, reference, reference)
    return tally.threshold


@dataclass(frozen=True, slots=True)
class StoredOutputs:
    """Stored outputs in place of the session that computed them."""

    values: Mapping[str, Array]

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs derived from the values."""
        kinds = {
            name: "str" if v.dtype.kind in "OSU" else v.dtype.name
            for name, v in self.values.items()
        }
        return [TensorSpec(name, kinds[name], v.shape) for name, v in self.values.items()]


class TensorComparison:
    """Accumulates figures of pairs of tensors, batch by batch.

    Attributes:
        pairs: the reference's tensor name -> the candidate's.
    """

    def __init__(
        self, pairs: Mapping[str, str], batch_inputs: Collection[str] | None = None
    ) -> None:
        """Start with no samples; `batch_inputs` as for `batch_length`."""
        if not pairs:
            raise ConfigError("a comparison of tensors needs at least one pair of names, got none")
        self.pairs = dict(pairs)
        self._batch_inputs = batch_inputs
        self._errors = {name: RunningError(name) for name in pairs}
        self._seen = 0

    def add(
        self,
        feed: Mapping[str, Array],
        reference: Mapping[str, Array],
        candidate: Mapping[str, Array],
    ) -> None:
        """Add one batch's tensors."""
        batch = batch_length(feed, self._batch_inputs)
        for name, other in self.pairs.items():
            left, right = reference[name], candidate[other]
            left, right = (
                strip_padded_channels(name, left, right),
                strip_padded_channels(other, right, left),
            )
            self._errors[name].add(left, right, batch)
        self._seen += batch

    def result(self) -> tuple[OutputAccuracy, ...]:
        """Return one entry per pair.

        Raises:
            FeedError: no sample.
        """
        if self._seen == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        return tuple(error.result() for error in self._errors.values())


def _problems(
    outputs: Iterable[OutputAccuracy], samples: int, lists: frozenset[str]
) -> Iterator[str]:
    """Yield sentences on NaN, Inf and differing shapes; outputs in `lists` may differ in length."""
    for output in outputs:
        for count, whose in zip(output.not_finite, ("reference", "int8 engine"), strict=True):
            if count:
                yield (
                    f"output {output.name!r} of the {whose} holds NaN or Inf"
                    f" in {count} of {samples} samples"
                )
        if output.other_shape and output.name not in lists:
            yield (
                f"output {output.name!r} has another shape in the int8 engine"
                f" in {output.other_shape} of {samples} samples"
            )


def _first(outputs: Mapping[str, Array], rows: int, batch: int) -> dict[str, Array]:
    """Return the first `rows` rows of every output whose first dimension is the batch."""
    return {
        name: value[:rows] if np.ndim(value) and value.shape[0] == batch else value
        for name, value in outputs.items()
    }
