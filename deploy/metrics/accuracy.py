"""Accuracy of an engine against the float model, in one pass and constant memory.

NaN and Inf are never averaged away: they are reported in `Accuracy.problems`. Formulas:
`deploy.metrics.output_errors`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.graph.index import strip_padded_channels
from deploy.metrics.output_errors import OutputAccuracy, RunningError, plain_json, sqnr_sort_key
from deploy.metrics.output_form import OutputForm, SliceAccuracy
from deploy.metrics.precision import GroundTruth, MeanPrecision, PrecisionTally
from deploy.tasks import TaskFigure
from deploy.tasks.boxes import BoxDetection, BoxTally
from deploy.tasks.detector import RowDecoder
from deploy.tasks.evaluation_task import Example
from deploy.tasks.rows import AlikeOutputs, Outputs, batch_length, split_batches
from deploy.tasks.slices import OutputSlice
from deploy.tasks.top1 import Top1
from deploy.tasks.vectors import Classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of a `Comparison`.

    Attributes:
        samples: samples compared (rows, not batches).
        outputs: one entry per output, in the reference's order.
        top1_reference: share of samples whose label is the reference's top-1 class.
        top1_candidate: share of samples whose label is the candidate's top-1 class.
        top1_agreement: share of samples where both models have the same top-1 class. Without
            labels it is None for regression values, for outputs ranked by TopK, for classes in
            several outputs and for tasks other than classification.
        problems: sentences on NaN, Inf and differing shapes; empty if there are none.
        classes: number of classes of the classification output. An output of class numbers without
            scores counts up to the highest one seen, labels included.
        favourite: share of the samples that the reference gives to its most frequent class.
        label_shift: share of samples whose label is the class above the reference's; if more are
            the class below, minus their share.
        label_order: (label, class), if the reference gives each label another class, most often the
            same one, so that the labels have another order than the classes; an example.
        reading: how the outputs were interpreted, or that they were not recognised.
        why: the task, and what shows it.
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
    label_order: tuple[int, int] | None = None
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
        return next(iter(self.parts), None)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types, with infinity and NaN as the texts "inf" and "nan"."""
        values = plain_json(self)
        assert isinstance(values, dict)
        return values


def _start_error(part: OutputSlice, form: OutputForm) -> RunningError:
    """Return the error of a slice, of no sample yet.

    If a mean is subtracted, the signal is the deviation from the mean of all samples, which needs
    the sum of their values. Values that scores weight (`cell_scores`) are a signal as they are.
    """
    is_deviation = part in form.means and part.cell_scores is None
    return RunningError(part.label, reference_sum=np.zeros(1) if is_deviation else None)


class Comparison:
    """Accumulates one candidate's figures against the reference, sample by sample."""

    def __init__(
        self, form: OutputForm, *, labels: Sequence[int] | GroundTruth | None = None
    ) -> None:
        """Start with no samples.

        Args:
            form: slices and task of the outputs, and the user's metric, if any.
            labels: classes of the samples, or annotated objects for a detector.

        Raises:
            FeedError: annotated boxes for a model whose boxes cannot be read.
        """
        self._form = form
        self._samples = 0
        self._alike = AlikeOutputs()  # finds outputs that hardly change from sample to sample
        parts = (*form.complete_outputs, *form.parts)
        self._errors = {part: _start_error(part, form) for part in parts}

        # each tally counts what it compares, such as boxes that both models have
        self._task_tally = None if form.task is None else form.task.tally()
        self._average_precision: PrecisionTally | None = None
        class_labels = None
        if isinstance(labels, GroundTruth):
            self._average_precision = PrecisionTally(_find_box_decoder(form), labels)
        else:
            class_labels = labels
        self._metric_tally = form.metric.tally(class_labels)
        # a user's metric uses the labels in place of top-1
        top1_labels = class_labels if self._metric_tally is None else None
        self._top1: Top1 | None = None
        class_outputs = form.task.outputs if isinstance(form.task, Classes) else ()
        # without labels, top-1 is the agreement of both models: only where classes in one output
        # are all that the model says
        is_only_classes = len(class_outputs) == 1 and not form.uncovered
        if top1_labels is not None or is_only_classes:
            self._top1 = Top1(top1_labels, next(iter(class_outputs), None))

    def add(
        self,
        feed: Outputs,
        reference: Outputs,
        candidate: Outputs,
        *,
        count: int | None = None,
    ) -> None:
        """Add one batch's outputs, without those of text.

        Args:
            feed: the inputs.
            reference: outputs of the float model.
            candidate: outputs of the engine.
            count: number of samples of all batches together; rows beyond them only fill up the
                last batch and are not compared. None compares every row.

        Raises:
            ConfigError: the engine lacks an output.
            FeedError: labels that do not fit the samples or the classes.
        """
        names = [part.output for part in self._form.complete_outputs]
        _check_outputs(names, candidate)
        reference = {name: reference[name] for name in names}
        candidate = {name: candidate[name] for name in names}
        batch = batch_length(feed, self._form.metric.declared.batch_inputs)
        compared_count = batch if count is None else min(batch, count - self._samples)
        samples = split_batches(batch, feed, reference, candidate)
        for sample in islice(samples, compared_count):
            self._count(*sample)
        self._samples += compared_count

    def _count(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add a sample to the errors of outputs and slices, and to every tally."""
        for part, error in self._errors.items():
            expected = self._form.slice_values(part, reference, inputs, reference)
            actual = self._form.slice_values(part, candidate, inputs, reference)
            error.add(expected, actual)
        for tally in (
            self._alike,
            self._top1,
            self._metric_tally,
            self._task_tally,
            self._average_precision,
        ):
            if tally is not None:
                tally.add(inputs, reference, candidate)

    @property
    def box_count(self) -> int:
        """Number of boxes that the reference has found so far; 0 for other tasks."""
        return self._task_tally.total if isinstance(self._task_tally, BoxTally) else 0

    def shown(self) -> tuple[Example, ...]:
        """Return the few samples so far where both models differ most, the worst first."""
        return () if self._task_tally is None else self._task_tally.shown()

    def result(self) -> Accuracy:
        """Return the figures so far, of at least one sample.

        Raises:
            FeedError: there are more or fewer labels than samples.
        """
        form = self._form
        outputs = tuple(self._errors[part].result() for part in form.complete_outputs)
        figure = self._task_figure()
        precision = None
        if self._average_precision is not None:
            precision = self._average_precision.result()
        top1_figures = {} if self._top1 is None else self._top1.result()
        is_silent = form.task is not None and figure is None  # FP32 predicts next to nothing
        reading = "the form of the outputs does not tell what they are for"
        if form.task is not None:
            reading = form.task.form
        if is_silent:
            reading += "; FP32 finds next to nothing on these samples"
        return Accuracy(
            samples=self._samples,
            outputs=outputs,
            **top1_figures,
            parts=self._slice_figures(),
            task=figure,
            precision=precision,
            reading=reading,
            why=form.reason,
            set_task=form.metric.task,
            silent=is_silent,
            alike=self._alike.alike and self._alike.has_floats,
            # output of a state -> the input that takes it in the next call
            carried={output: state for state, output in form.metric.declared.states.items()},
            problems=tuple(_find_problems(outputs, self._samples, form.lists)),
        )

    def _task_figure(self) -> TaskFigure | None:
        """Return the figure of the user's metric, else the task's.

        None without a task, or if the float model predicts next to nothing.
        """
        if self._metric_tally is not None:
            return self._metric_tally.result()
        if self._task_tally is None:
            return None
        figure = self._task_tally.result()
        return figure and replace(figure, beside=self._form.uncovered)

    def _slice_figures(self) -> tuple[SliceAccuracy, ...]:
        """Return the slices' figures, the lowest SQNR first; NaN is lower than any number."""
        slice_figures = []
        for part in self._form.parts:
            figures = self._errors[part].result()
            if part.output in self._form.lists and figures.other_shape:
                continue  # rows of lists of different lengths are not the same boxes
            slice_figures.append(
                SliceAccuracy(
                    label=part.label,
                    output=part.output,
                    sqnr_db=figures.sqnr_db,
                    cosine_mean=figures.cosine_mean,
                    cosine_min=figures.cosine_min,
                    max_abs_error=figures.max_abs_error,
                    # a slice with `less` has limits of its own in `levels`. Values that scores
                    # weight have those of any other slice, though their mean was subtracted
                    less="" if part.cell_scores else part.subtracted,
                )
            )
        slice_figures.sort(key=lambda figures: sqnr_sort_key(figures.sqnr_db))
        return tuple(slice_figures)


def _find_box_decoder(form: OutputForm) -> RowDecoder:
    """Return what reads the boxes of a detector's outputs.

    Raises:
        FeedError: the outputs are none of a detector, or its boxes cannot be decoded.
    """
    if not isinstance(form.task, BoxDetection) or not form.task.decoder.coding:
        raise FeedError(
            "annotations of boxes need a model whose boxes can be read from its outputs;"
            " this one's cannot, so leave the labels out or give a metric of your own"
        )
    return form.task.decoder


def _check_outputs(names: list[str], candidate: Outputs) -> None:
    """Refuse an engine that lacks some of the float model's outputs.

    Raises:
        ConfigError: it lacks one, or the float model has none.
    """
    if not names or not candidate.keys() >= {*names}:
        raise ConfigError(
            f"both models must have the same outputs, got {names} and {sorted(candidate)};"
            " compare an engine with the model it was built from"
        )


class TensorComparison:
    """Accumulates errors of pairs of inner tensors, batch by batch.

    Attributes:
        pairs: name of a tensor of the reference -> name of the candidate's tensor.
    """

    def __init__(
        self, pairs: Mapping[str, str], batch_inputs: Collection[str] | None = None
    ) -> None:
        """Start with no samples.

        Args:
            pairs: name of a tensor of the reference -> name of the candidate's tensor.
            batch_inputs: inputs each of whose rows is one sample; None for the first input.
        """
        self.pairs = dict(pairs)
        self._batch_inputs = batch_inputs
        self._errors = {name: RunningError(name) for name in pairs}

    def add(self, feed: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one batch: its inputs, and the tensors of both models by name.

        Channels that only pad one of a pair's tensors are left out.
        """
        batch = batch_length(feed, self._batch_inputs)
        for sample_reference, sample_candidate in split_batches(batch, reference, candidate):
            for name, candidate_name in self.pairs.items():
                expected = sample_reference[name]
                actual = sample_candidate[candidate_name]
                self._errors[name].add(
                    strip_padded_channels(name, expected, actual),
                    strip_padded_channels(candidate_name, actual, expected),
                )

    def result(self) -> tuple[OutputAccuracy, ...]:
        """Return one entry per pair."""
        return tuple(error.result() for error in self._errors.values())


def _find_problems(
    outputs: Iterable[OutputAccuracy], samples: int, lists: frozenset[str]
) -> Iterator[str]:
    """Yield sentences on NaN, Inf and differing shapes.

    Args:
        outputs: figures of the complete outputs.
        samples: number of samples compared.
        lists: names of outputs whose length may differ, as the number of boxes does.
    """
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
