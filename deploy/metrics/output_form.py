"""Form of a model's outputs: their slices, what is measured of these, and the task.

One SQNR per output lets boxes of 0..640 hide scores of 0..1, and no SQNR says how many boxes are
lost. So each output is split into slices, and its task is recognised. Three kinds of slices are
measured by what they say::

    the change of an input       y - x, where the output repeats an input
    what varies                  y - its mean, of a few numbers that deviate little from it
    what a gate says             y weighted by score, of values beside scores

The form is derived from the float model's first samples (`count_form_samples`), and holds for
every candidate: the figures must not depend on the candidate's values.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from deploy.errors import FeedError
from deploy.metrics.output_errors import (
    FEW,
    SAMPLE_MEAN,
    find_change,
    find_large_mean,
    find_usual_values,
    subtract_input,
    subtract_mean,
)
from deploy.tasks import EvaluationTask, FirstSamples, Metric, recognise_task
from deploy.tasks.declarations import Declaration
from deploy.tasks.rows import (
    Outputs,
    batch_length,
    split_batches,
)
from deploy.tasks.slices import (
    OutputSlice,
    count_form_samples,
    find_cell_scores,
    split_output,
)
from deploy.tensors import Array

BY_VALUES = "by the shapes and values of the outputs"


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Slices and task of a model's outputs, and what these are judged by.

    Attributes:
        complete_outputs: each output as one slice, those of text left out.
        metric: the task or the function that the user set, and what the model's file declares.
        parts: slices of all outputs, in the outputs' order.
        task: None without one.
        means: slices that are measured about their mean -> that mean.
        uncovered: outputs that the task does not cover.
        lists: outputs whose length, or the order of whose rows, may differ between two models.
        reason: the task, and what shows it.
    """

    complete_outputs: tuple[OutputSlice, ...]
    metric: Metric
    parts: tuple[OutputSlice, ...] = ()
    task: EvaluationTask | None = None
    means: Mapping[OutputSlice, Array] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    lists: frozenset[str] = frozenset()
    reason: str = ""

    def slice_values(
        self, part: OutputSlice, outputs: Outputs, inputs: Outputs, reference: Outputs
    ) -> Array:
        """Return a slice's values to compare: minus an input or mean, and weighted by scores.

        Args:
            part: the slice.
            outputs: the outputs of either model.
            inputs: its inputs.
            reference: the float model's outputs. Its scores weight the values of both models, so
                that both are measured in the same cells.
        """
        values = part.of(outputs[part.output])
        if part in self.means:
            values = subtract_mean(values, self.means[part])
        elif part.subtracted:
            values = subtract_input(values, inputs[part.subtracted], part.resize)
        return part.weigh(values, reference)


def derive_form(
    reference_outputs: Sequence[Outputs],
    *,
    inputs: Sequence[Outputs] = (),
    metric: Metric | None = None,
) -> OutputForm:
    """Return the form of a model's outputs: their task, and the slices of them that are measured.

    A slice is a part of an output that is compared by itself, such as the scores of a detector.
    The first samples show the task and the slices; the means to subtract are those of all samples.

    Args:
        reference_outputs: the float model's outputs, one mapping per sample or batch.
        inputs: their inputs; without them each mapping is one sample, and tasks that need the
            picture's size are not recognised.
        metric: the task that the user set, and what the model's file declares.

    Raises:
        ConfigError: the outputs do not fit the user's task.
    """
    metric = metric or Metric(None)
    reference_outputs = [drop_text(outputs) for outputs in reference_outputs]
    samples = _split_samples(reference_outputs, inputs, metric.declared)
    # the size of the arrays decides how many samples show the task and the slices
    count = count_form_samples(samples.inputs[0], samples.outputs[0])
    first_samples = replace(samples, inputs=samples.inputs[:count], outputs=samples.outputs[:count])
    task, declared_by = recognise_task(first_samples, metric.task)
    # outputs that the figure of the task says nothing of
    uncovered = () if task is None else _find_uncovered(task, first_samples)

    # slice that is measured -> the mean that is subtracted from it first, if any
    mean_by_slice = _choose_slices(task, uncovered, first_samples, samples)
    parts = tuple(mean_by_slice)
    complete_outputs = tuple(OutputSlice(name) for name in reference_outputs[0])
    if not parts and task is None:  # all outputs are integers: complete outputs, equal or not
        parts = complete_outputs
    return OutputForm(
        complete_outputs=complete_outputs,
        metric=metric,
        parts=parts,
        task=task,
        means={part: mean for part, mean in mean_by_slice.items() if mean is not None},
        uncovered=uncovered,
        # outputs whose number or order of rows may differ between two models
        lists=frozenset() if task is None else _find_lists(task, first_samples),
        reason=_describe_task(task, declared_by),
    )


SamplePairs = Iterable[tuple[Outputs, Outputs]]  # (inputs, FP32's outputs)


def derive_from_first(
    samples: SamplePairs, metric: Metric | None = None, min_count: int = 0
) -> tuple[OutputForm, SamplePairs]:
    """Return (the form that the first samples show, all samples).

    `samples` may be read only once, so the second value must be used in its place.

    Args:
        samples: batches of inputs, and the float model's outputs.
        metric: the task that the user set, and what the model's file declares.
        min_count: number of batches to read at least, for means of values that vary little.

    Raises:
        FeedError: no sample.
        ConfigError: the outputs do not fit the user's task.
    """
    metric = metric or Metric(None)
    pairs = iter(samples)
    first_pairs = [*islice(pairs, 1)]
    if not first_pairs:
        raise FeedError("a comparison needs at least one sample, got none")
    batch_count = max(count_form_batches(*first_pairs[0], metric), min_count)
    first_pairs += islice(pairs, batch_count - 1)
    inputs, outputs = zip(*first_pairs, strict=True)
    form = derive_form(outputs, inputs=inputs, metric=metric)
    return form, chain(first_pairs, pairs)


def count_form_batches(inputs: Outputs, outputs: Outputs, metric: Metric) -> int:
    """Return how many batches show the form of outputs, by the arrays of the first batch."""
    batch = batch_length(inputs, metric.declared.batch_inputs)
    first_sample = next(split_batches(batch, inputs, drop_text(outputs)))
    return math.ceil(count_form_samples(*first_sample) / batch)


def _choose_slices(
    task: EvaluationTask | None,
    uncovered: Collection[str],
    first_samples: FirstSamples,
    samples: FirstSamples,
) -> dict[OutputSlice, Array | None]:
    """Return the slices of all outputs -> the mean that is subtracted before they are compared.

    The mean is None for slices that are compared as they are: those of the task, and those that
    vary much.

    Args:
        task: of the outputs; None without one.
        uncovered: outputs whose error the figure of the task does not show.
        first_samples: those that show the slices.
        samples: all samples, whose means are taken.
    """
    slices_by_output = {}
    # slices that scores may weight: not the change of an input, which has it in `subtracted`
    weighable_slices = []
    for name in first_samples.output_names:
        slices_by_output[name] = _slice_output(name, task, first_samples)
        weighable_slices += [part for part in slices_by_output[name] if not part.subtracted]
    # slice -> the slice of its scores: where these are low (a hidden landmark) no error counts
    scores = find_cell_scores(weighable_slices, first_samples)

    mean_by_slice: dict[OutputSlice, Array | None] = {}
    for name, output_slices in slices_by_output.items():
        if task is not None and name in (*task.parts, *task.covered):
            mean_by_slice |= dict.fromkeys(output_slices)  # as the task slices and weights them
        else:
            is_uncovered = task is None or name in uncovered
            mean_by_slice |= _choose_means(output_slices, is_uncovered, samples, scores)
    return mean_by_slice


def _choose_means(
    slices: Sequence[OutputSlice],
    is_uncovered: bool,
    samples: FirstSamples,
    scores: Mapping[OutputSlice, OutputSlice],
) -> dict[OutputSlice, Array | None]:
    """Return the slices of an output, as they are measured -> mean to subtract first, or None.

    Slices that have scores of the same cells are weighted by these (`OutputSlice.cell_scores`).

    Args:
        slices: of an output that no task reads.
        is_uncovered: whether there is no task, or its figure does not show the output's error.
        samples: all samples, and not only the first few: those of a search (`deploy.tuning`)
            begin with similar ones, whose mean is not that of all.
        scores: slice -> the slice of its scores, which say in which cells it counts.
    """
    # each with the slice of its scores; None without
    slices_with_scores = [replace(part, cell_scores=scores.get(part)) for part in slices]
    # if any slice of the output is weighted, the other slices get no mean
    has_weighted = any(part.cell_scores for part in slices_with_scores)
    mean_by_slice = {}
    for part in slices_with_scores:
        mean = None
        if part.cell_scores is not None or (is_uncovered and not has_weighted):
            mean = _find_mean(part, samples)
        if mean is not None:
            part = replace(part, subtracted=SAMPLE_MEAN)
        mean_by_slice[part] = mean
    return mean_by_slice


def _find_mean(part: OutputSlice, samples: FirstSamples) -> Array | None:
    """Return the mean over samples, if a slice deviates little from it; else None.

    Slices of a few numbers have a mean for each number. Values that scores weight, such as the
    pitch at each step, have one mean for all.
    """
    values = [part.of(outputs[part.output]) for outputs in samples.outputs]
    if part.cell_scores is not None:
        weights = []  # the score of each value
        for value, outputs in zip(values, samples.outputs, strict=True):
            weights.append(part.weigh(np.ones_like(value), outputs))
        return find_large_mean(_to_column(values), _to_column(weights))
    if values[0].size > FEW:
        return None  # such as a feature map, whose single numbers have no meaning
    return find_usual_values(values)


def _to_column(arrays: Sequence[Array]) -> Array:
    """Return the values of all arrays below each other, [n, 1]."""
    return np.concatenate([array.reshape(-1, 1) for array in arrays])


def drop_text(outputs: Outputs) -> Outputs:
    """Return the outputs that hold numbers: not the names of classes, for example."""
    return {name: value for name, value in outputs.items() if value.dtype.kind not in "OSU"}


def _find_lists(task: EvaluationTask, samples: FirstSamples) -> frozenset[str]:
    """Return the lists of a task, and integers beside it, which are not compared.

    Examples are the indices of the boxes that NonMaxSuppression selects.
    """
    integers = {name for name, value in samples.outputs[0].items() if value.dtype.kind != "f"}
    return task.lists | (integers - {*task.covered})


def _find_uncovered(task: EvaluationTask, samples: FirstSamples) -> tuple[str, ...]:
    """Return the outputs whose error the figure of a task does not show.

    Left out are outputs that the task reads, and those that only repeat what it reads: states, and
    scores before their activation.
    """
    states = samples.declared.states.values()  # inputs of the next call
    raw_scores = samples.declared.probabilities  # keys: outputs whose probabilities are one, too
    covered_outputs = {*task.covered, *task.lists, *states, *raw_scores}
    return tuple(name for name in samples.float_outputs if name not in covered_outputs)


def _describe_task(task: EvaluationTask | None, declared_by: str) -> str:
    """Return the task of the outputs and what shows it, as text; "" if nothing shows a task.

    `declared_by`: who set or declared the task, or that there is none; "" if the values show it.
    """
    if task is not None:
        return f"{task.name}, {declared_by or BY_VALUES}"
    return f"no task, {declared_by}" if declared_by else ""


def _slice_output(
    name: str, task: EvaluationTask | None, samples: FirstSamples
) -> tuple[OutputSlice, ...]:
    """Return the slices of an output, such as its boxes and its scores; none for integers.

    The values of a slice have one unit. The recognised task knows the slices of its outputs. An
    output that repeats an input with a small change is one slice: that change.
    """
    if task is not None and name in task.parts:
        return task.parts[name]
    values = samples.arrays(name)
    change = find_change(name, values, samples.inputs)
    if change is not None:
        return (change,)
    if values[0].dtype.kind != "f":  # class numbers or counts: no signal
        return ()
    return split_output(name, values)


def _split_samples(
    output_batches: Sequence[Outputs], input_batches: Sequence[Outputs], declared: Declaration
) -> FirstSamples:
    """Split batches into single samples; without inputs each batch is one sample.

    `declared`: what the model's file declares, such as the inputs whose rows are samples.
    """
    samples: list[tuple[Outputs, ...]] = []
    input_batches = input_batches or [{}] * len(output_batches)
    for inputs, outputs in zip(input_batches, output_batches, strict=False):
        length = batch_length(inputs, declared.batch_inputs)
        samples += split_batches(length, inputs, outputs)
    input_samples, output_samples = zip(*samples, strict=True)
    return FirstSamples(input_samples, output_samples, declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAccuracy:
    """Errors of one slice of an output.

    Attributes:
        label: text such as "scores" or "output0[4:22]".
        output: name of the output.
        sqnr_db: signal to quantization noise ratio, as in `OutputAccuracy`.
        cosine_mean: mean of the samples' cosines.
        cosine_min: minimum of the samples' cosines.
        max_abs_error: largest absolute difference.
        less: what was subtracted first: the name of an input, or "its mean"; "" for nothing.
    """

    label: str
    output: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    less: str = ""
