"""Form of a model's outputs (slices and task), and the running figures of both.

One SQNR per output lets boxes of 0..640 hide scores of 0..1, and no SQNR says how many boxes are
lost. So each output is split into slices, and its task is recognised.

The form is derived from the float model's first samples (`form_samples`), and holds for
every candidate: the figures must not depend on the candidate's values.
Until then samples are buffered.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.metrics.output_errors import (
    FEW,
    USUAL,
    OutputAccuracy,
    RunningError,
    find_repeated_input,
    find_step_mean,
    find_usual_values,
    subtract_input,
    subtract_usual,
)
from deploy.metrics.precision import GroundTruth, MeanPrecision, PrecisionTally
from deploy.tasks import EvaluationTask, FirstSamples, Metric, TaskFigure, recognise_task
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.evaluation_task import Example, TaskTally, ThresholdTally
from deploy.tasks.first_samples import find_logits, find_states
from deploy.tasks.keypoints import Points
from deploy.tasks.metric import MetricTally
from deploy.tasks.rows import Outputs, are_shares, batch_length, is_floating, split_batch
from deploy.tasks.slices import OutputSlice, find_scores, form_samples, split_output
from deploy.tensors import Array

_LISTED_SLICES = 4  # slices that a sentence lists
_MAP = 4  # dimensions of maps


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Slices and task of a model's outputs.

    Attributes:
        parts: slices of all outputs, in the outputs' order.
        task: None without one.
        states: state outputs -> the inputs of the next call that take them.
        means: slices that are measured about their mean -> that mean.
        uncovered: outputs that the task does not cover.
        reason: the task, and the shapes and values of the outputs that show it.
        set_task: name of the task that the user set.
        batch_inputs: inputs each of whose rows is one sample; None for the first input.
    """

    parts: tuple[OutputSlice, ...] = ()
    task: EvaluationTask | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[OutputSlice, Array] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    reason: str = ""
    set_task: str = ""
    batch_inputs: Collection[str] | None = None

    def prepare(self, outputs: Outputs, inputs: Outputs, reference: Outputs) -> Outputs:
        """Return outputs ready to be sliced: minus an input or mean, and weighted by scores.

        `reference`: the float model's outputs, whose scores weight those of both models.
        """
        changed = {part.output for part in self.parts if part.at or part in self.means}
        prepared = {name: np.array(outputs[name]) for name in changed}
        for part in self.parts:
            value = prepared.get(part.output, outputs[part.output])
            if part in self.means:
                subtract_usual(part.of(value), self.means[part])
            elif part.less:
                source = inputs[part.less]
                prepared[part.output] = subtract_input(value, source, part.resize)
            if part.at:
                part.weight(value, reference)
        return {**outputs, **prepared}


def derive_form(
    reference_outputs: Sequence[Outputs],
    *,
    inputs: Sequence[Outputs] = (),
    metric: Metric | None = None,
) -> OutputForm:
    """Return the form, derived from the first samples.

    `reference_outputs`: the float model's outputs, one mapping per sample or batch. `inputs`: their
    inputs; without them each mapping is one sample, and tasks that need the picture's size are not
    recognised. `metric`: the task that the user set, and what the model's file declares.

    Raises:
        ConfigError: the outputs do not fit the user's task.
    """
    metric = metric or Metric(None)
    rows = metric.declared.batch_inputs
    samples = replace(_split_samples(reference_outputs, inputs, rows), declared=metric.declared)
    if not samples.outputs:
        return OutputForm(batch_inputs=rows)
    count = form_samples(samples.inputs[0], samples.outputs[0])
    first = FirstSamples(samples.inputs[:count], samples.outputs[:count], metric.declared)
    task, source = recognise_task(first, metric.task)
    uncovered = () if task is None else _find_uncovered(task, first)

    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for name in reference_outputs[0]:
        if task is not None and name in task.parts:
            slices[name] = task.parts[name]
        else:
            slices[name] = _slice_output(name, first)
    slices, means = _weight_and_centre(slices, task, uncovered, samples, first)

    parts = [part for name in reference_outputs[0] for part in slices[name]]
    if not parts and task is None:
        parts = [OutputSlice(output=name) for name in reference_outputs[0]]
    reason = _describe_task(task, first, slices, source)
    states = find_states(first)
    return OutputForm(tuple(parts), task, states, means, uncovered, reason, metric.task, rows)


def _weight_and_centre(
    slices: Mapping[str, tuple[OutputSlice, ...]],
    task: EvaluationTask | None,
    uncovered: Collection[str],
    samples: FirstSamples,
    first: FirstSamples,
) -> tuple[dict[str, tuple[OutputSlice, ...]], dict[OutputSlice, Array]]:
    """Return the slices with the scores that weight them, and the means that they deviate from.

    What the task reads counts everywhere; key points alone are measured about their mean.
    """
    weighted: dict[OutputSlice, list[Array]] = {}
    for name in first.every:
        for part in slices[name]:
            if not part.less:
                weighted[part] = [part.of(value) for value in samples.arrays(name)]
    scores = find_scores(weighted)

    changed = dict(slices)
    means: dict[OutputSlice, Array] = {}
    for name, parts in slices.items():
        is_own = task is not None and (name in task.parts or name in task.covered)
        are_points = isinstance(task, Points) and name in task.outputs
        if is_own and not are_points:
            continue
        if task is None or name not in task.parts:
            parts = tuple(replace(part, at=part.at or scores.get(part)) for part in parts)
        max_values: float = FEW if task is None or name in uncovered else 0
        if are_points:
            max_values = math.inf
        new_parts = []
        for part, mean in _find_means(parts, samples, max_values):
            new_parts.append(part)
            if mean is not None:
                means[part] = mean
        changed[name] = tuple(new_parts)
    return changed, means


def _find_uncovered(task: EvaluationTask, samples: FirstSamples) -> tuple[str, ...]:
    """Return the outputs that the figure of a task says nothing of.

    Scores before an activation and states are left out, and maps of the same shape as the task's,
    which are stages of one thing. Empty where a decoder chooses the outputs.
    """
    if not task.covered:
        return ()
    covered = {*task.covered, *task.lists, *find_logits(samples), *find_states(samples)}
    map_shapes = set()
    for name in covered:
        map_shapes |= {value.shape for value in samples.arrays(name) if value.ndim == _MAP}
    uncovered = []
    for name in samples.names:
        values = samples.arrays(name)
        is_stage = any(value.shape in map_shapes for value in values)
        if name not in covered and not is_stage and all(map(is_floating, values)):
            uncovered.append(name)
    return tuple(uncovered)


def _describe_task(
    task: EvaluationTask | None,
    samples: FirstSamples,
    slices: Mapping[str, tuple[OutputSlice, ...]],
    source: str,
) -> str:
    """Return why outputs are of a task: who says so, and their shapes and values, as text."""
    said = f", {source}" if source else ""
    if task is None:
        return f"no task{said}" if said else ""
    names = [name for name in samples.every if name in (task.covered or samples.every)]
    texts = []
    for name in names:
        parts = [part for part in slices[name] if part.axis] or [OutputSlice(output=name)]
        for part in parts:
            texts.append(_describe_slice(replace(part, at=None), samples.arrays(name)))
    more = f" and {len(texts) - _LISTED_SLICES} more" if len(texts) > _LISTED_SLICES else ""
    other_names = [name for name in samples.every if name not in names]
    others = ""
    if other_names or len(names) == 1:
        others = f", beside {', '.join(other_names) or 'no other output'}"
    return f"{task.name}{said}: {', '.join(texts[:_LISTED_SLICES])}{more}{others}"


def _describe_slice(part: OutputSlice, values: Sequence[Array]) -> str:
    """Return a slice's label, shape and range of values, such as `scores [N, 896] in 0..1`."""
    rows = [part.of(value) for value in values]
    sides = []
    for lengths in zip(*(row.shape for row in rows), strict=False):
        sides.append(str(lengths[0]) if len({*lengths}) == 1 else "?")
    if sides and sides[0] == "1":
        sides[0] = "N"
    finite = np.concatenate([row[np.isfinite(row)].reshape(-1) for row in rows])
    text = f"{part.label} [{', '.join(sides)}]"
    if finite.dtype.kind in "iu":
        text += " whole numbers"
    if not finite.size or are_shares(finite):
        return f"{text} in 0..1"
    return f"{text} of {finite.min():.3g} to {finite.max():.3g}"


def _find_means(
    parts: Sequence[OutputSlice], samples: FirstSamples, max_values: float
) -> Iterator[tuple[OutputSlice, Array | None]]:
    """Yield (slice, its mean if it is measured about it) of the slices of an output.

    All samples count, not only the first: a search puts similar ones first. `max_values`: values of
    a sample, at most, that are measured so if they deviate little from their mean; inf for key
    points. A value a step is measured so if scores say where it counts.
    """
    is_gated = any(part.at for part in parts)
    for part in parts:
        mean = None
        values = [part.of(outputs[part.output]) for outputs in samples.outputs]
        if part.at is not None and max_values == math.inf:
            weights = [part.weights(outputs) for outputs in samples.outputs]
            mean = find_usual_values(values, max_values, weights)
        elif part.at is not None:
            scores = [part.at.best_scores(outputs) for outputs in samples.outputs]
            mean = find_step_mean(values, scores)
        elif max_values and not is_gated:
            mean = find_usual_values(values, max_values)
        yield part if mean is None else replace(part, less=USUAL), mean


def _slice_output(name: str, samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return the slices of an output, each of a unit of its own."""
    if name not in samples.every:
        return (OutputSlice(output=name),)
    values = samples.arrays(name)
    source = find_repeated_input(values, samples.inputs)
    if source is not None:
        return (OutputSlice(output=name, less=source.name, resize=source.resize),)
    if not np.issubdtype(values[0].dtype, np.floating):  # class numbers or counts: no signal
        return ()
    return split_output(name, values)


def _split_samples(
    outputs: Sequence[Outputs], inputs: Sequence[Outputs], batch_inputs: Collection[str] | None
) -> FirstSamples:
    """Split batches into single samples."""
    input_samples: list[Outputs] = []
    output_samples: list[Outputs] = []
    for one_batch, batch_outputs in zip(inputs or [{}] * len(outputs), outputs, strict=False):
        length = batch_length(one_batch, batch_inputs)
        input_samples += split_batch(one_batch, length)
        output_samples += split_batch(batch_outputs, length)
    return FirstSamples(input_samples, output_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAccuracy:
    """Errors of one slice of an output."""

    label: str  # such as "scores" or "output0[4:22]"
    output: str
    # sqnr_db, cosine_mean, cosine_min, max_abs_error: as in `OutputAccuracy`
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    less: str = ""  # what was subtracted first: an input, or `USUAL` for the mean; "" for nothing


class OutputTally:
    """Running figures of all slices and of the task, in constant memory."""

    def __init__(
        self,
        form: OutputForm | None = None,
        *,
        metric: Metric | None = None,
        labels: Sequence[int] | None = None,
        objects: GroundTruth | None = None,
    ) -> None:
        """Start with no samples.

        `form`: slices and task; None derives them from the first samples. `labels`: class of each
        sample, for the metric only.
        """
        self._objects = objects
        self._precision: PrecisionTally | None = None
        self._metric = None if metric is None else metric.tally(labels)
        self._judge = metric
        self._waiting: list[tuple[Outputs, Outputs, Outputs, int]] = []
        self._form = form
        self._errors: dict[OutputSlice, RunningError] = {}
        self._tally: TaskTally[Any] | MetricTally | None = None
        # the task's, which selects examples; it counts if there is no metric
        self._own: TaskTally[Any] | None = None
        if form is not None:
            self._begin(form)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs, batch: int) -> None:
        """Add one batch."""
        if self._form is not None:
            self._count(inputs, reference, candidate, batch)
            return
        self._waiting.append((inputs, reference, candidate, batch))
        if sum(one[3] for one in self._waiting) >= form_samples(inputs, reference, batch):
            self._settle()

    def parts(self, outputs: Sequence[OutputAccuracy]) -> tuple[SliceAccuracy, ...]:
        """Return the slices' figures, the worst first; NaN is the worst of all.

        `outputs`: figures of the complete outputs, which are not computed twice.
        """
        form = self._settle()
        figures_of = {OutputSlice(output=output.name): output for output in outputs}
        figures_of |= {part: error.result() for part, error in self._errors.items()}
        # rows of lists of different lengths are not the same boxes
        lists = frozenset[str]() if form.task is None else form.task.lists
        compared = [
            part
            for part in form.parts
            if part.output not in lists or not figures_of[part].other_shape
        ]
        figures = [
            SliceAccuracy(
                label=part.label,
                output=part.output,
                sqnr_db=figures_of[part].sqnr_db,
                cosine_mean=figures_of[part].cosine_mean,
                cosine_min=figures_of[part].cosine_min,
                max_abs_error=figures_of[part].max_abs_error,
                less="" if part.at else part.less,
            )
            for part in compared
        ]
        return tuple(
            sorted(figures, key=lambda f: -math.inf if math.isnan(f.sqnr_db) else f.sqnr_db)
        )

    @property
    def form(self) -> OutputForm:
        """Slices and task of the outputs."""
        return self._settle()

    def reading(self) -> str:
        """Return how the outputs were interpreted, as text."""
        task = self._settle().task
        if task is None:
            return "the form of the outputs does not tell what they are for"
        nothing = "; FP32 finds next to nothing on these samples" if self.silent else ""
        return task.form + nothing

    @property
    def silent(self) -> bool:
        """Whether the task was recognised, but the float model predicts next to nothing."""
        known = self._settle().task is not None
        return known and self._metric is None and self.task() is None

    def task(self) -> TaskFigure | None:
        """Return the task's or the user metric's figure; None if there is none."""
        form = self._settle()
        figure = None if self._tally is None else self._tally.result()
        if figure is None or self._metric is not None:
            return figure
        return replace(figure, beside=form.uncovered)

    @property
    def watched(self) -> frozenset[int]:
        """Indices of the samples whose pictures `shown` may need."""
        if self._form is None:
            return frozenset(range(sum(one[3] for one in self._waiting)))
        return frozenset() if self._own is None else self._own.watched

    def shown(self) -> tuple[Example, ...]:
        """Return a few samples where both models differ most, if the task selects any."""
        self._settle()
        return () if self._own is None else self._own.shown()

    def precision(self) -> MeanPrecision | None:
        """Return mean average precision of both models, if annotated objects were given."""
        self._settle()
        return None if self._precision is None else self._precision.result()

    def _settle(self) -> OutputForm:
        """Derive the form if it is unknown, and count the buffered samples."""
        if self._form is None:
            batches, self._waiting = self._waiting, []
            self._form = derive_form(
                [reference for _, reference, _, _ in batches],
                inputs=[inputs for inputs, _, _, _ in batches],
                metric=self._judge,
            )
            self._begin(self._form)
            for inputs, reference, candidate, length in batches:
                self._count(inputs, reference, candidate, length)
        return self._form

    def _begin(self, form: OutputForm) -> None:
        for part in form.parts:
            if part == OutputSlice(output=part.output):  # the complete output is measured already
                continue
            self._errors[part] = RunningError(part.label)
            if part in form.means and part.at is None:
                self._errors[part].total = np.zeros(1)
        self._own = None if form.task is None else form.task.tally()
        if self._judge is not None and isinstance(self._own, ThresholdTally):
            self._own.fixed_threshold = self._judge.threshold
        self._tally = self._own if self._metric is None else self._metric
        if self._objects is not None:
            if not isinstance(form.task, BoxDetection) or not form.task.decoder.placed:
                raise FeedError(
                    "annotations of boxes need a model whose boxes can be read from its outputs;"
                    " this one's cannot, so leave the labels out or give a metric of your own"
                )
            self._precision = PrecisionTally(form.task.decoder, self._objects)

    def _count(self, inputs: Outputs, reference: Outputs, candidate: Outputs, batch: int) -> None:
        assert self._form is not None
        prepared = self._form.prepare(reference, inputs, reference)
        prepared_candidate = self._form.prepare(candidate, inputs, reference)
        for part, error in self._errors.items():
            values, others = prepared[part.output], prepared_candidate[part.output]
            error.add(part.of(values), part.of(others), batch)
        tallies = [
            tally for tally in (self._metric, self._own, self._precision) if tally is not None
        ]
        if not tallies:
            return
        rows = [split_batch(arrays, batch) for arrays in (inputs, reference, candidate)]
        for sample in zip(*rows, strict=True):
            for tally in tallies:
                tally.add(*sample)
