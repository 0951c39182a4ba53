"""What the float model says of the samples that judge: found once, whoever asks.

::

    observing        1 2 3 4 5 6 7 ...     every sample is run, and its inner tensors counted
    kept             o     o     o         outputs of those that will judge, on disk
    search, repairs, accuracy  <-- these; what is not there is run, and kept in its turn

So memory is flat, whatever the outputs' size and the number of samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deploy.feed.evaluation import Part
from deploy.feed.reader import Spool
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array, Session, TensorSpec

if TYPE_CHECKING:
    import onnx

    from deploy.feed.samples import Feed

MOST_BYTES = 1 << 30  # on disk; of larger outputs the rest is run again
_SAME = 1e-6  # noise over signal, 60 dB: what repairs of a float model may differ by
_NUMBERS = "biuf"  # kinds of arrays that are kept; of text there is no noise

Sample = Mapping[str, Array]


class FloatOutputs:
    """Outputs of one float model for the samples of one feed, by their keys.

    Attributes:
        runs: inferences that were made because nothing was kept.
    """

    def __init__(
        self, open_session: Callable[[], Session], names: Sequence[str], keys: Collection[int] = ()
    ) -> None:
        """What can be asked.

        Args:
            open_session: gives the model ready to run, in one thread; called when first needed.
            names: of its outputs.
            keys: of the samples to keep; the outputs of others are made anew each time.
        """
        self.runs = 0
        self._open = open_session
        self._names = tuple(names)
        self._wanted = frozenset(keys)
        self._spool = Spool(self._wanted, most_bytes=MOST_BYTES)
        self._session: Session | None = None
        self._specs: Sequence[TensorSpec] | None = None
        self._using = threading.Lock()

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs; of what was kept, those of one sample."""
        return self._specs if self._specs is not None else self._opened().outputs

    def add(self, key: int, values: Mapping[str, Array]) -> None:
        """Keep a sample's outputs, of all that a run of the model gave.

        Args:
            key: the sample's.
            values: name -> array; others than the outputs pass by.
        """
        own = {name: values[name] for name in self._names if name in values}
        plain = all(value.dtype.kind in _NUMBERS for value in own.values())
        if key in self._wanted and plain and len(own) == len(self._names):
            self._specs = [TensorSpec(n, str(v.dtype), v.shape) for n, v in own.items()]
            self._spool.add(key, own)

    def __contains__(self, key: object) -> bool:
        """Whether a sample's outputs are kept."""
        return key in self._spool

    def of(self, key: int, sample: Sample) -> Mapping[str, Array]:
        """A sample's outputs, from any thread.

        Raises:
            BackendError: ONNX Runtime refused the model or the sample.
        """
        known = self._spool.get(key)
        if known is not None:
            return known
        values = self._opened().run(sample)
        with self._using:
            self.runs += 1
        self.add(key, values)
        return values

    def _opened(self) -> Session:
        with self._using:
            if self._session is None:
                self._session = self._open()
            return self._session


@dataclass(frozen=True, slots=True)
class Judges:
    """The samples that judge, and what the float model says of them."""

    part: Part
    outputs: FloatOutputs

    def heard(self, most: int) -> Iterator[tuple[Sample, Mapping[str, Array]]]:
        """(sample, its float outputs) of at most so many, from all over them.

        Raises:
            FeedError: as the feed's samples.
            BackendError: ONNX Runtime refused the model or a sample.
        """
        return (
            (sample, self.outputs.of(key, sample))
            for key, sample in self.part.spread_with_keys(most)
        )


def judges_of(feed: Feed, model: onnx.ModelProto, most: int) -> Judges:
    """The samples of a feed that judge, at most so many images, and a float model's word on them.

    Nothing is read or run before it is asked for.
    """
    part = Part(feed, most)
    names = [value.name for value in model.graph.output]
    opened = partial(OrtSession.open, model, threads=1, spin=False)
    return Judges(part, FloatOutputs(opened, names, part.keys))


def alike(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether two models say the same of a sample, but for what float rounds."""
    return all(
        name in other
        and value.shape == other[name].shape
        and (value.dtype.kind != "f" or _near(value, other[name]))
        for name, value in one.items()
    )


def _near(one: Array, other: Array) -> bool:
    left, right = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(left - right)
    return float((apart * apart).sum()) <= _SAME * float((left * left).sum())
