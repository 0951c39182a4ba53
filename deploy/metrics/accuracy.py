"""Accuracy of an engine against the float model, in one pass and constant memory.

NaN and Inf are never averaged away: they are reported in `Accuracy.problems`. Formulas:
`deploy.metrics.output_errors`.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.graph.index import strip_padded_channels
from deploy.metrics.output_errors import OutputAccuracy, RunningError, plain_json
from deploy.metrics.output_form import OutputForm, SliceAccuracy, derive_form
from deploy.metrics.precision import GroundTruth, MeanPrecision, PrecisionTally
from deploy.tasks import EvaluationTask, Metric, TaskFigure
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.evaluation_task import Example, TaskTally, ThresholdTally
from deploy.tasks.indices import Ranked
from deploy.tasks.metric import MetricTally
from deploy.tasks.rows import AlikeOutputs, Outputs, batch_length, split_batches
from deploy.tasks.slices import OutputSlice, form_samples
from deploy.tasks.top1 import Top1
from deploy.tasks.vectors import Classes
from deploy.tensors import HasOutputs, TensorSpec

# fields of `Accuracy` that JSON leaves out
NOT_WRITTEN = ("alike", "silent", "carried", "label_shift")


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
        if not self.parts:
            return None
        return self.parts[0]

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; numbers JSON has no word for become "inf" or "nan"."""
        names = [item.name for item in fields(self) if item.name not in NOT_WRITTEN]
        return {name: plain_json(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class _Batch:
    """Arrays of one batch: inputs, the float model's outputs, the engine's; number of samples."""

    inputs: Outputs
    reference: Outputs
    candidate: Outputs
    length: int


class Comparison:
    """Accumulates one candidate's figures against the reference, batch by batch.

    The first samples are buffered until the form of the outputs can be derived from them.
    """

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
        candidate_names = {spec.name for spec in candidate.outputs}
        if not names or set(names) - candidate_names:
            raise ConfigError(
                f"both models must have the same outputs, got {names} and"
                f" {sorted(candidate_names)}; compare an engine with the model it was built from"
            )
        self._objects: GroundTruth | None = None
        if isinstance(labels, GroundTruth):
            self._objects, labels = labels, None
        self._metric = metric or Metric(None)
        self._metric_tally = self._metric.tally(labels)
        self._labels = labels
        if self._metric_tally is not None:
            self._labels = None
        self._batch_inputs = (form or self._metric.declared).batch_inputs
        self._alike = AlikeOutputs()
        self._samples = 0
        self._errors = {name: RunningError(name) for name in names}

        self._waiting: list[_Batch] = []
        self._top1 = Top1(self._labels)
        self._form: OutputForm | None = None
        self._slice_errors: dict[OutputSlice, RunningError] = {}
        self._task_tally: TaskTally[Any] | None = None
        self._precision: PrecisionTally | None = None
        self._tallies: list[TaskTally[Any] | MetricTally | PrecisionTally] = []
        if self._metric_tally is not None:
            self._tallies.append(self._metric_tally)
        if form is not None:
            self._begin(form)

    def add(
        self,
        feed: Outputs,
        reference: Outputs,
        candidate: Outputs,
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
        rows = length = batch_length(feed, self._batch_inputs)
        if count is not None:
            rows = min(length, count - self._samples)
        batch = _Batch(
            inputs=_first_rows(feed, feed, rows, length),
            reference=_first_rows(reference, self._errors, rows, length),
            candidate=_first_rows(candidate, self._errors, rows, length),
            length=rows,
        )
        for name, error in self._errors.items():
            error.add(batch.reference[name], batch.candidate[name], rows)
        self._alike.add(batch.reference, rows)

        self._samples += rows
        self._waiting.append(batch)
        if self._form is not None or self._samples >= form_samples(
            batch.inputs, batch.reference, rows
        ):
            self._settle()

    def _settle(self) -> OutputForm:
        """Derive the form if it is unknown, and count the buffered samples."""
        batches, self._waiting = self._waiting, []
        if self._form is None:
            reference_outputs = [batch.reference for batch in batches]
            inputs = [batch.inputs for batch in batches]
            self._begin(derive_form(reference_outputs, inputs=inputs, metric=self._metric))
        assert self._form is not None
        for batch in batches:
            self._count(self._form, batch)
        return self._form

    def _begin(self, form: OutputForm) -> None:
        """Start to count the slices and the task of a form."""
        self._form = form
        for part in form.parts:
            if part == OutputSlice(output=part.output):
                continue  # complete outputs are measured already
            error = self._slice_errors[part] = RunningError(part.label)
            if part in form.means and part.at is None:
                error.total = np.zeros(1)
        if isinstance(form.task, Classes | Ranked):
            self._top1 = Top1(self._labels, form.task.covered[0])
        if form.task is not None:
            self._task_tally = form.task.tally()
            self._tallies.append(self._task_tally)
        if isinstance(self._task_tally, ThresholdTally):
            self._task_tally.fixed_threshold = self._metric.threshold
        if self._objects is not None:
            if not isinstance(form.task, BoxDetection) or not form.task.decoder.placed:
                raise FeedError(
                    "annotations of boxes need a model whose boxes can be read from its outputs;"
                    " this one's cannot, so leave the labels out or give a metric of your own"
                )
            self._precision = PrecisionTally(form.task.decoder, self._objects)
            self._tallies.append(self._precision)

    def _count(self, form: OutputForm, batch: _Batch) -> None:
        self._top1.add(batch.reference, batch.candidate, batch.length)
        reference = form.prepare(batch.reference, batch.inputs, batch.reference)
        candidate = form.prepare(batch.candidate, batch.inputs, batch.reference)
        for part, error in self._slice_errors.items():
            values = part.of(reference[part.output])
            error.add(values, part.of(candidate[part.output]), batch.length)
        if not self._tallies:
            return
        arrays = batch.inputs, batch.reference, batch.candidate
        for sample in split_batches(batch.length, *arrays):
            for tally in self._tallies:
                tally.add(*sample)

    @property
    def watched(self) -> frozenset[int]:
        """Indices of the samples whose pictures `shown` may need."""
        if self._form is None:
            return frozenset(range(self._samples))
        if self._task_tally is None:
            return frozenset()
        return self._task_tally.watched

    def shown(self) -> tuple[Example, ...]:
        """Return a few samples where both models differ most, the worst first."""
        self._settle()
        if self._task_tally is None:
            return ()
        return self._task_tally.shown()

    def result(self) -> Accuracy:
        """Return the figures so far.

        Raises:
            FeedError: no sample, or labels that do not fit.
        """
        if self._samples == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        form = self._settle()
        outputs = tuple(error.result() for error in self._errors.values())
        figure, kind, precision = self._task_figure(form), "", None
        if form.task is not None and (figure is None or not figure.beside):
            kind = form.task.name
        if self._precision is not None:
            precision = self._precision.result()
        is_silent = form.task is not None and self._metric_tally is None and figure is None
        return Accuracy(
            samples=self._samples,
            outputs=outputs,
            **asdict(self._top1.result(kind)),
            parts=self._slice_figures(form, outputs),
            task=figure,
            precision=precision,
            reading=_describe_form(form.task, is_silent=is_silent),
            why=form.reason,
            set_task=form.set_task,
            silent=is_silent,
            alike=self._alike.alike,
            carried=form.states,
            problems=tuple(_problems(outputs, self._samples, form.lists)),
        )

    def _task_figure(self, form: OutputForm) -> TaskFigure | None:
        """Return the user metric's figure, else the task's; None if there is none."""
        if self._metric_tally is not None:
            return self._metric_tally.result()
        if self._task_tally is None:
            return None
        figure = self._task_tally.result()
        return figure and replace(figure, beside=form.uncovered)

    def _slice_figures(
        self, form: OutputForm, outputs: Sequence[OutputAccuracy]
    ) -> tuple[SliceAccuracy, ...]:
        """Return the slices' figures, the worst first; NaN is the worst of all.

        `outputs`: figures of the complete outputs, which are not computed twice.
        """
        figures_by_slice = {OutputSlice(output=output.name): output for output in outputs}
        for part, error in self._slice_errors.items():
            figures_by_slice[part] = error.result()
        slice_figures = []
        for part in form.parts:
            figures = figures_by_slice[part]
            if part.output in form.lists and figures.other_shape:
                continue  # rows of lists of different lengths are not the same boxes
            slice_figures.append(
                SliceAccuracy(
                    label=part.label,
                    output=part.output,
                    sqnr_db=figures.sqnr_db,
                    cosine_mean=figures.cosine_mean,
                    cosine_min=figures.cosine_min,
                    max_abs_error=figures.max_abs_error,
                    less="" if part.at else part.less,
                )
            )
        # NaN has no order: in a comparison with -inf it counts as such
        slice_figures.sort(key=lambda f: -math.inf if math.isnan(f.sqnr_db) else f.sqnr_db)
        return tuple(slice_figures)


def _describe_form(task: EvaluationTask | None, *, is_silent: bool) -> str:
    """Return how the outputs were interpreted, as text."""
    if task is None:
        return "the form of the outputs does not tell what they are for"
    silence = "; FP32 finds next to nothing on these samples"
    return f"{task.form}{silence * is_silent}"


SamplePairs = Iterable[tuple[Outputs, Outputs]]  # (inputs, FP32's outputs)


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
    tally = task and task.tally()
    if not isinstance(tally, ThresholdTally):
        return None
    for inputs, reference in pairs:
        batch = batch_length(inputs, metric.declared.batch_inputs)
        for input_row, reference_row in split_batches(batch, inputs, reference):
            tally.add(input_row, reference_row, reference_row)
    return tally.threshold


@dataclass(frozen=True, slots=True)
class StoredOutputs:
    """Stored outputs in place of the session that computed them.

    Attributes:
        values: output -> array.
    """

    values: Outputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs derived from the values."""
        specs = []
        for name, value in self.values.items():
            spec = TensorSpec(name, value.dtype.name, value.shape)
            if value.dtype.kind in "OSU":
                spec = replace(spec, dtype="str")
            specs.append(spec)
        return specs


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
        self._samples = 0

    def add(
        self,
        feed: Outputs,
        reference: Outputs,
        candidate: Outputs,
    ) -> None:
        """Add one batch's tensors."""
        batch = batch_length(feed, self._batch_inputs)
        for name, candidate_name in self.pairs.items():
            expected, actual = reference[name], candidate[candidate_name]
            self._errors[name].add(
                strip_padded_channels(name, expected, actual),
                strip_padded_channels(candidate_name, actual, expected),
                batch,
            )
        self._samples += batch

    def result(self) -> tuple[OutputAccuracy, ...]:
        """Return one entry per pair.

        Raises:
            FeedError: no sample.
        """
        if self._samples == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        return tuple(error.result() for error in self._errors.values())


def _problems(
    outputs: Iterable[OutputAccuracy], samples: int, lists: frozenset[str]
) -> Iterator[str]:
    """Yield sentences on NaN, Inf and differing shapes; outputs in `lists` may differ in length."""
    for output in outputs:
        for count, model in zip(output.not_finite, ("reference", "int8 engine"), strict=True):
            if count:
                yield (
                    f"output {output.name!r} of the {model} holds NaN or Inf"
                    f" in {count} of {samples} samples"
                )
        if output.other_shape and output.name not in lists:
            yield (
                f"output {output.name!r} has another shape in the int8 engine"
                f" in {output.other_shape} of {samples} samples"
            )


def _first_rows(arrays: Outputs, names: Iterable[str], rows: int, batch: int) -> Outputs:
    """Return the first `rows` rows of these arrays whose first dimension is the batch."""
    cut = {}
    for name in names:
        value = arrays[name]
        cut[name] = value
        if rows < batch and np.shape(value)[:1] == (batch,):
            cut[name] = value[:rows]
    return cut
