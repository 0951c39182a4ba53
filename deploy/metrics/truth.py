"""What a user loses: the parts of the outputs, and what the outputs are for.

One SQNR an output lets boxes of 0..640 hide scores of 0..1; and no SQNR tells how many boxes are
left. Both are found from the outputs' form (`deploy.metrics.truth`), which is known once the first
four samples have been seen; until then they wait.

The form of a model's outputs: their parts and their task, from the float model's values.

It is decided from the first four samples, whatever the batch, and holds for every candidate: what
is compared must not depend on what the candidate says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from deploy.errors import FeedError
from deploy.metrics.output_errors import (
    USUAL,
    OutputAccuracy,
    RunningError,
    given_back,
    less,
    less_usual,
    number,
    usual_of,
)
from deploy.metrics.parts import SAMPLES, Part, at_objects, parts_of
from deploy.metrics.precision import GroundTruth, MeanPrecision, PrecisionTally
from deploy.metrics.rows import Outputs, batch_length, split
from deploy.metrics.tasks import Metric, Seen, Tally, Task, TaskFigure, recognised
from deploy.metrics.tasks.boxes import Boxes
from deploy.metrics.tasks.classes import Classes
from deploy.metrics.tasks.task import Example, Showing, carried
from deploy.tensors import Array


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of the outputs.

    Attributes:
        parts: parts of all outputs, in the outputs' order.
        task: what they are for; None where their form does not tell.
        carried: outputs that the next call is fed -> the inputs that take them.
        usual: outputs that hardly vary beside what they usually are -> that.
    """

    parts: tuple[Part, ...] = ()
    task: Task | None = None
    carried: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, Array] = field(default_factory=dict)

    def told(self, outputs: Outputs, inputs: Outputs, said: Outputs) -> Outputs:
        """Outputs as their parts are measured: what moves an input or a mean, where objects are.

        Args:
            outputs: of either model.
            inputs: that were fed.
            said: what the float model gives for them.
        """
        own = {
            part.output: self._of_part(part, outputs[part.output], inputs, said)
            for part in self.parts
            if part.less or part.at
        }
        return {**outputs, **own} if own else outputs

    def _of_part(self, part: Part, value: Array, inputs: Outputs, said: Outputs) -> Array:
        if part.at:
            return at_objects(value, said[part.at], raw=part.raw)
        if part.output in self.usual:
            return less_usual(value, self.usual[part.output])
        return less(value, inputs[part.less])


def form_of(reference_outputs: Sequence[Outputs], *, inputs: Sequence[Outputs] = ()) -> Form:
    """The form, from the first samples.

    Args:
        reference_outputs: the float model's outputs, one mapping a sample or batch.
        inputs: what was fed for each of them; without it, each mapping is one sample, and forms
            that need the picture's size are not recognised.
    """
    every = _seen(reference_outputs, inputs)
    seen = Seen(every.inputs[:SAMPLES], every.outputs[:SAMPLES])
    if not seen.outputs:
        return Form()
    task = recognised(seen)
    known: Mapping[str, tuple[Part, ...]] = {} if task is None else task.parts
    names = list(reference_outputs[0])
    usual = dict(_usual(every, task))
    found = {
        name: (Part(output=name, less=USUAL),)
        if name in usual
        else known[name]
        if name in known
        else _parts(name, seen)
        for name in names
    }
    parts = tuple(part for name in names for part in found[name])
    if not parts and task is None:
        parts = tuple(Part(output=name) for name in names)
    return Form(parts, task, carried(seen), usual)


def _usual(seen: Seen, task: Task | None) -> Iterator[tuple[str, Array]]:
    """Outputs that no task tells of, and that hardly vary in any sample -> what they usually are.

    In all samples that are there: a search looks at those that say most, which are alike in that.
    """
    for name in seen.names:
        told = task is not None and name not in getattr(task, "beside", ())
        mean = None if told else usual_of(seen.arrays(name))
        if mean is not None:
            yield name, mean


def _parts(name: str, seen: Seen) -> tuple[Part, ...]:
    if name not in seen.every:
        return (Part(output=name),)
    samples = seen.arrays(name)
    fed = given_back(samples, seen.inputs)
    if fed:
        return (Part(output=name, less=fed),)
    if not np.issubdtype(samples[0].dtype, np.floating):  # numbers of classes, counts: no signal
        return ()
    return parts_of(name, samples)


def _seen(outputs: Sequence[Outputs], inputs: Sequence[Outputs]) -> Seen:
    """The samples, one by one."""
    fed = list(inputs) or [{} for _ in outputs]
    batches = [batch_length(one) for one in fed[: len(outputs)]]
    rows = [row for one, n in zip(outputs, batches, strict=False) for row in split(one, n)]
    own = [row for one, n in zip(fed, batches, strict=False) for row in split(one, n)]
    return Seen(own, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAccuracy:
    """One part of an output, of the candidate against the reference's.

    Attributes:
        label: such as "scores" or "output0[4:22]".
        output: name of the output it is of.
        sqnr_db, cosine_mean, cosine_min, max_abs_error: as of an output.
        less: input whose change it is, or that it is that of its mean; "" where it is no change.
    """

    label: str
    output: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    less: str = ""


class Truth:
    """Running figures of all parts and of the task, in flat memory."""

    def __init__(
        self,
        form: Form | None = None,
        *,
        metric: Metric | None = None,
        labels: Sequence[int] | None = None,
        objects: GroundTruth | None = None,
    ) -> None:
        """Args as `deploy.metrics.accuracy.Comparison`.

        Args but those:
            labels: for the metric alone.
            objects: what detectors are to find.
        """
        self._objects = objects
        self._precision: PrecisionTally | None = None
        self._metric = None if metric is None else metric.tally(labels)
        self._waiting: list[tuple[Outputs, Outputs, Outputs, int]] = []
        self._form = form
        self._errors: dict[Part, RunningError] = {}
        self._tally: Tally | None = None
        self._own: Tally | None = None  # the task's, which shows samples, whoever counts
        if form is not None:
            self._begin(form)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs, batch: int) -> None:
        """Add one batch."""
        if self._form is not None:
            self._count(inputs, reference, candidate, batch)
            return
        self._waiting.append((inputs, reference, candidate, batch))
        if sum(one[3] for one in self._waiting) >= SAMPLES:
            self._settle()

    def parts(self, outputs: Sequence[OutputAccuracy]) -> tuple[PartAccuracy, ...]:
        """The parts' figures, the worst first; where it cannot be told (NaN) is worst of all.

        Args:
            outputs: figures of the whole outputs, which are not counted twice.
        """
        form = self._settle()
        known = {Part(output=output.name): output for output in outputs}
        known |= {part: error.result() for part, error in self._errors.items()}
        figures = [
            PartAccuracy(
                label=part.label,
                output=part.output,
                sqnr_db=known[part].sqnr_db,
                cosine_mean=known[part].cosine_mean,
                cosine_min=known[part].cosine_min,
                max_abs_error=known[part].max_abs_error,
                less=part.less,
            )
            for part in form.parts
        ]
        return tuple(sorted(figures, key=_badness))

    @property
    def lists(self) -> frozenset[str]:
        """Outputs whose rows are not to be compared, so that their length may differ."""
        task = self._settle().task
        return (
            frozenset()
            if task is None
            else frozenset(n for n, own in task.parts.items() if not own)
        )

    @property
    def carried(self) -> Mapping[str, str]:
        """Outputs that the next call is fed -> the inputs that take them."""
        return self._settle().carried

    @property
    def kind(self) -> str:
        """What the outputs are for, in a word; "" where their form does not tell."""
        task = self._settle().task
        return "" if task is None else task.name

    @property
    def classes(self) -> str:
        """The output that tells a class, the first of several; "" where none is known to."""
        task = self._settle().task
        return task.outputs[0] if isinstance(task, Classes) else ""

    def reading(self) -> str:
        """How the outputs were read, in words."""
        task = self._settle().task
        if task is None:
            return "the form of the outputs does not tell what they are for"
        nothing = "; FP32 finds next to nothing on these samples" if self.silent else ""
        return task.form + nothing

    @property
    def silent(self) -> bool:
        """Whether the form tells what the outputs are for, and FP32 said next to nothing."""
        known = self._settle().task is not None
        return known and self._metric is None and self.task() is None

    def task(self) -> TaskFigure | None:
        """The task's figure."""
        self._settle()
        return None if self._tally is None else self._tally.result()

    @property
    def watched(self) -> frozenset[int]:
        """Numbers, from 0, of samples whose pictures may be asked for in the end."""
        if self._form is None:
            return frozenset(range(sum(one[3] for one in self._waiting)))
        return self._own.watched if isinstance(self._own, Showing) else frozenset()

    def shown(self) -> tuple[Example, ...]:
        """A few samples where both models differ most, where the task knows how to tell."""
        self._settle()
        return self._own.shown() if isinstance(self._own, Showing) else ()

    def precision(self) -> MeanPrecision | None:
        """Mean average precision of both models, where objects are known."""
        self._settle()
        return None if self._precision is None else self._precision.result()

    def _settle(self) -> Form:
        """Find the form, and count what has waited for it."""
        if self._form is None:
            waiting, self._waiting = self._waiting, []
            self._form = form_of([one[1] for one in waiting], inputs=[one[0] for one in waiting])
            self._begin(self._form)
            for inputs, reference, candidate, batch in waiting:
                self._count(inputs, reference, candidate, batch)
        return self._form

    def _begin(self, form: Form) -> None:
        rows = [part for part in form.parts if part != Part(output=part.output)]
        self._errors = {part: RunningError(part.label) for part in rows}
        self._own = None if form.task is None else form.task.tally()
        self._tally = self._own if self._metric is None else self._metric
        if self._objects is not None:
            if not isinstance(form.task, Boxes) or not form.task.decoder.placed:
                raise FeedError(
                    "annotations of boxes need a model whose boxes can be read from its outputs;"
                    " this one's cannot, so leave the labels out or give a metric of your own"
                )
            self._precision = PrecisionTally(form.task.decoder, self._objects)

    def _count(self, inputs: Outputs, left: Outputs, right: Outputs, batch: int) -> None:
        assert self._form is not None
        own, others = (self._form.told(one, inputs, left) for one in (left, right))
        for part, error in self._errors.items():
            error.add(part.of(own[part.output]), part.of(others[part.output]), batch)
        counting = (self._metric, self._own, self._precision)
        tallies = [one for one in counting if one is not None]
        if tallies:
            rows = [split(one, batch) for one in (inputs, left, right)]
            for sample in zip(*rows, strict=True):
                for tally in tallies:
                    tally.add(*sample)


def _badness(part: PartAccuracy) -> float:
    return -math.inf if math.isnan(part.sqnr_db) else part.sqnr_db


def part_json(part: PartAccuracy) -> dict[str, object]:
    """Plain JSON types."""
    return _plain(asdict(part).items())


def task_json(task: TaskFigure) -> dict[str, object]:
    """Plain JSON types."""
    return _plain(asdict(task).items())


def _plain(items: Iterable[tuple[str, object]]) -> dict[str, object]:
    return {key: number(value) if isinstance(value, float) else value for key, value in items}
