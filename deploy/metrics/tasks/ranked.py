"""Classes that the model itself has ranked: TopK's values and places, or ArgMax's one place.

How often the candidate's best class is the float model's, and how often it is among its best k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.task import Seen, TaskFigure, classes_figure
from deploy.metrics.values import places_of
from deploy.tensors import Array


@dataclass(frozen=True, slots=True)
class Ranked:
    """Numbers of classes, the best first.

    Attributes:
        output: that holds them.
        count: of a sample.
        parts: as of a task.
    """

    output: str
    count: int
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "classes"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        best = "the best class" if self.count == 1 else f"the best {self.count} classes"
        return f"{self.output}: {best}"

    def tally(self) -> RankedTally:
        """A new comparison."""
        return RankedTally(self)


def find(seen: Seen) -> Ranked | None:
    """The task, where the outputs are TopK's two, or of a picture one class or its score too."""
    names = seen.names
    places = _places(seen, names)
    if places is None:
        return None
    count = seen.arrays(places)[0].size
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if count == 1 and not (pictures and all(map(_is_one, seen.arrays(places)))):
        return None
    others = {name: (Part(output=name),) for name in names if name != places}
    return Ranked(
        places, count, {places: (), **others} if others else {places: (Part(output=places),)}
    )


def _places(seen: Seen, names: Sequence[str]) -> str | None:
    """The output of numbers: the only one, of one number; or in each sample TopK's places."""
    if len(names) == 1 and all(value.size == 1 for value in seen.arrays(names[0])):
        return names[0]
    if len(names) != 2:
        return None
    found = {places_of(one, names[0], 1) for one in seen.outputs}
    return found.pop() if len(found) == 1 else None


def _is_one(value: Array) -> bool:
    """[1] or [1, 1] of one whole number that may be a class's."""
    whole = value.dtype.kind in "iu" and value.ndim > 0
    return whole and value.size == 1 and int(value.reshape(-1)[0]) >= 0


@dataclass(slots=True)
class RankedTally:
    """Counts of equal classes."""

    task: Ranked
    samples: int = 0
    first: int = 0
    among: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample."""
        self.samples += 1
        own, others = (_numbers(one[self.task.output]) for one in (reference, candidate))
        if own.size and others.size:
            self.first += int(own[0] == others[0])
            self.among += int(own[0] in others)

    def result(self) -> TaskFigure | None:
        """Top-1 agreement."""
        if not self.samples:
            return None
        few = self.task.count
        among = f"{self.among} among the best {few}" if few > 1 else ""
        return classes_figure(
            self.first, self.samples, among, compared=self.samples, form=self.task.form
        )


def _numbers(value: Array) -> NDArray[np.int64]:
    return np.asarray(value, np.int64).reshape(-1)
