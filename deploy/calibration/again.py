"""A model's outputs in memory that is used again, where samples have one shape.

What a run gives is otherwise asked of the system, and given back, at every sample: for a small
network that takes as long as a third of its inference, and memory is in pieces afterwards.

::

    sample 1   [1, 3, 224, 224]    an ordinary run; shapes of the outputs are known now
    sample 2   [1, 3, 224, 224]    memory for them is taken
    sample 3   [1, 3, 224, 224]    the same memory
    sample 4   [1, 3, 224, 448]    an ordinary run; the memory is let go
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deploy.errors import BackendError
from deploy.feed.parallel import Sample
from deploy.machine import trim_memory
from deploy.runtimes.ort import Bound, OrtSession
from deploy.tensors import Array

MOST_BYTES = 1 << 26  # of more outputs the memory is let go after each sample

Form = dict[str, tuple[tuple[int, ...], np.dtype]]


class Again:
    """Runs of one session in one thread.

    Attributes:
        lasting: whether what `run` gave lies where it will lie the next time.
    """

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._fed: Form | None = None
        self._made: Form = {}
        self._bound: Bound | None = None
        self.lasting = False
        self._able = True
        self._trimmed = False

    def run(self, sample: Sample) -> Mapping[str, Array]:
        """The outputs; where they are lasting, only until the next run, whose they are then.

        Raises:
            BackendError: as `OrtSession.run`.
        """
        if not (self._able and _form(sample) == self._fed):
            return self._ordinary(sample)
        try:
            if self._bound is None:
                self._give_back()
                self._bound = self._session.bound(self._made)
            self._bound.run(sample)
        except BackendError:  # an output whose shape follows from values, not from shapes
            self._able = False
            return self._ordinary(sample)
        self.lasting = True
        return self._bound.outputs

    def _give_back(self) -> None:
        """What the first run took; once, since shapes may change at every other sample."""
        if not self._trimmed:
            trim_memory()
        self._trimmed = True

    def _ordinary(self, sample: Sample) -> Mapping[str, Array]:
        self._bound, self.lasting, self._fed = None, False, None
        values = self._session.run(sample)
        if sum(x.nbytes for x in values.values()) <= MOST_BYTES:
            self._fed, self._made = _form(sample), _form(values)
        return values


def _form(arrays: Mapping[str, Array]) -> Form:
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}
