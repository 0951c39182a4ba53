"""Models whose inner tensors can be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.together import Located
from deploy.calibration.again import Again
from deploy.calibration.blocked import Tapped, tapped
from deploy.errors import BackendError
from deploy.feed.parallel import Sample
from deploy.tensors import Array


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        tensors: list[str],
        *,
        threads: int | None = 1,
        in_any_order: Collection[str] = (),
    ) -> None:
        inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in inputs]
        self._made = [name for name in tensors if name not in inputs]
        self._open = tapped(model, self._made, threads=threads, in_any_order=in_any_order)

    def run(
        self, sample: Sample, keep: Callable[[Sample], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value, or its values in any order.

        `keep` gets the model's own outputs, and may get more.
        """
        try:
            values = self._open.session.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:  # let go of each tensor once it is counted
            yield name, values.pop(self._open.blocked.get(name, name))

    def reading(self, tensors: Sequence[str]) -> Reading:
        """What reads these of the tensors, sample after sample, in one thread."""
        return Reading(self._open, tensors, fed=self._fed)


class Reading:
    """Tensors of one sample after the other, in memory that is used again where it can be."""

    def __init__(self, opened: Tapped, tensors: Sequence[str], *, fed: Collection[str]) -> None:
        self._tensors = tuple(tensors)
        self._blocked = opened.blocked
        self._fed = frozenset(fed)
        self._again = Again(opened.session)
        self._located: Located | None = None
        self._moving: list[int] = []

    def run(self, sample: Sample, keep: Callable[[Sample], None] | None = None) -> Located:
        """Run one sample; gives each tensor's values in any order, until the next run.

        `keep` is as in `Tap.run`.
        """
        before, self._located = self._located, None
        if not self._again.lasting:
            before = None  # whose memory the run may have
        try:
            values = self._again.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        if before is None or not self._again.lasting:
            before = Located(self._values(name, sample, values) for name in self._tensors)
            self._moving = [k for k, name in enumerate(self._tensors) if self._moves(name, values)]
        else:
            for k in self._moving:
                before.put(k, self._values(self._tensors[k], sample, values))
        self._located = before
        return before

    def _values(
        self, name: str, sample: Sample, values: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        if name in self._fed:
            return np.asarray(sample[name], np.float32)
        return values[self._blocked.get(name, name)]

    def _moves(self, name: str, values: Mapping[str, Array]) -> bool:
        """Whether the values must be fetched anew after each run."""
        return name in self._fed or values[self._blocked.get(name, name)].dtype != np.float32


def _could_not(error: BackendError) -> BackendError:
    return BackendError(f"could not run a sample: {error}")
