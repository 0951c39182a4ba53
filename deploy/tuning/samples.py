"""Which few samples a search looks at: those in which the float model says most, and some others.

Of a detector's photos most hold nothing, and noise on nothing is what a search over them would
mend. So half of the samples are those with the greatest signal in the parts of the outputs; the
other half are spread over the feed. What a Softmax gives says most where it is least sure
(`deploy.tuning.energy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.feed.strewn import order
from deploy.metrics.form import form_of
from deploy.metrics.parts import SAMPLES
from deploy.tuning.energy import energies

if TYPE_CHECKING:
    from deploy.calibration.reference import Judges
    from deploy.tensors import Array

_EVERY = 2  # of the strongest samples every second one: the very first would speak for all
CANDIDATES = 48  # samples of those that judge, to choose from

_VALUES = 5_000_000  # of the samples together: a large one holds as much to err in as some small

Sample = Mapping[str, "Array"]
Outputs = Mapping[str, "Array"]


def as_many(judges: Judges) -> int:
    """Samples that are enough for their size."""
    first, _ = next(iter(judges.heard(CANDIDATES)))
    return _VALUES // max(_size(first), 1)


def telling(judges: Judges, most: int) -> list[tuple[Sample, Outputs]]:
    """At most so many samples with what the float model says of them, in the feed's order.

    The candidates are read twice, so that only the chosen ones are in memory.
    """
    chosen = _places(_energies(judges.heard(CANDIDATES)), most)
    return [heard for place, heard in enumerate(judges.heard(CANDIDATES)) if place in chosen]


def alike(samples: Sequence[Sample]) -> list[Sample]:
    """Those that are timed: all of one shape, that of the middle one by size.

    The least time over samples of several sizes would be that of the smallest, in which int8 wins
    least.
    """
    middle = sorted(samples, key=_size)[len(samples) // 2]
    shapes = {name: value.shape for name, value in middle.items()}
    return [one for one in samples if {name: value.shape for name, value in one.items()} == shapes]


def _size(sample: Sample) -> int:
    return sum(value.size for value in sample.values())


def _energies(heard: Iterable[tuple[Sample, Outputs]]) -> NDArray[np.float64]:
    """[samples, parts]: what every part says, by its own measure."""
    left = iter(heard)
    first = list(islice(left, SAMPLES))
    form = form_of([said for _, said in first], inputs=[sample for sample, _ in first])
    return energies(form, (form.told(said, sample, said) for sample, said in chain(first, left)))


def _places(energies: NDArray[np.float64], most: int) -> frozenset[int]:
    """Half of them where the parts, each by its own measure, hold most; the rest from all over."""
    count = len(energies)
    if count <= most:
        return frozenset(range(count))
    largest = energies.max(axis=0)
    signal = (energies / np.where(largest > 0, largest, 1.0)).sum(axis=1)
    strongest = np.argsort(-signal, kind="stable")
    chosen = {int(place) for place in strongest[: _EVERY * (most // 2) : _EVERY]}
    for place in map(int, order(count)):
        if len(chosen) < most:
            chosen.add(place)
    return frozenset(chosen)
