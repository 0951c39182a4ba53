"""The form of a model's outputs: their parts and their task, from the float model's values.

It is decided from the first four samples, whatever the batch, and holds for every candidate: what
is compared must not depend on what the candidate says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.changes import given_back, less
from deploy.metrics.parts import SAMPLES, Part, at_objects, parts_of
from deploy.metrics.rows import Outputs, batch_length, split
from deploy.metrics.tasks import Seen, Task, recognised
from deploy.metrics.tasks.states import carried
from deploy.metrics.usual import USUAL, less_usual, usual_of
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


__all__ = ["Form", "form_of"]
