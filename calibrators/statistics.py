"""What is to be recorded of a tensor, as a value, and what records it.

::

    Statistic     a plain value: which numbers to keep, under which rule     HistogramOf()
       |  .recorder(lead)
       v
    Recorder      the numbers of one tensor so far: observe(x), observe(x), ... to_arrays()

Two statistics with one `key` record the same numbers from the same data, so a key names them in a
cache. A statistic that is not `ordered` may see its data in any order and in parts that are merged;
one that is sees them in the feed's order. One with a `lead` needs that other statistic, of the
first samples alone, before it can begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.percentile import with_room
from calibrators.scales import Scale

FORMAT = 2  # of the recorders' arrays; part of every fingerprint

Arrays = dict[str, NDArray[Any]]


class Recorder(Protocol):
    """The statistic of one tensor, over the batches seen so far."""

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add a batch of any shape.

        Raises:
            CalibrationError: values that have no place in this statistic, NaN first of all.
        """
        ...

    def to_arrays(self) -> Arrays:
        """Plain 1-D arrays from which `Statistic.restore` makes an equal recorder."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """A recorder that knows the least and the greatest value."""

    @property
    def extremes(self) -> tuple[float, float]:
        """In real units."""
        ...


@runtime_checkable
class Batched(Protocol):
    """A recorder that joins samples to batches.

    Attributes:
        together: samples that make a batch; after whole ones none waits, and `to_arrays` has all.
    """

    together: int

    def end(self) -> None:
        """Take what waits as the last batch, which may be smaller: no more comes.

        Raises:
            CalibrationError: as `Recorder.observe`.
        """
        ...


class Statistic(Protocol):
    """Which numbers to record; a frozen value."""

    @property
    def key(self) -> str:
        """Name with every parameter; equal keys record equal numbers."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether the order of the data shows in the numbers."""
        ...

    @property
    def samples(self) -> int | None:
        """How many samples it looks at, from the first; None for all."""
        ...

    @property
    def lead(self) -> Statistic | None:
        """What must be known of the first samples before this can begin."""
        ...

    def recorder(self, lead: Recorder | None) -> Recorder:
        """An empty recorder; `lead` is that of the statistic of the same name."""
        ...

    def restore(self, arrays: Arrays) -> Recorder:
        """Inverse of `to_arrays`.

        Raises:
            CalibrationError: arrays missing, of another shape, or at odds with each other.
        """
        ...


@dataclass(frozen=True, slots=True)
class HistogramOf:
    """A `Histogram`: in any order, or by TensorRT's rule, whose first batch sets the range.

    Attributes:
        first: samples of that batch; 0 for the range that no order and no batch can change.
        most: samples that it looks at, those of whole batches; 0 for all.
    """

    first: int = 0
    most: int = 0

    @property
    def key(self) -> str:
        """The rule and its parameter."""
        if not self.first:
            return "histogram"
        only = f" of {self.most} samples" if self.most else ""
        return f"histogram{only}, first batch of {self.first}"

    @property
    def ordered(self) -> bool:
        """TensorRT's rule shows the order."""
        return bool(self.first)

    @property
    def samples(self) -> int | None:
        """All, or those of whole batches."""
        return self.most or None

    @property
    def lead(self) -> Statistic | None:
        """The largest |x| of the first batch."""
        return AmaxOf(self.first) if self.first else None

    def recorder(self, lead: Recorder | None) -> Histogram:
        """An empty histogram; an infinite first batch sets no range."""
        if not isinstance(lead, Amax):
            return Histogram()
        return Histogram(base=lead.amax if np.isfinite(lead.amax) else 0.0)

    def restore(self, arrays: Arrays) -> Histogram:
        """A histogram that was stored."""
        reals, wholes = numbers(arrays, 4, 2)
        histogram = Histogram(base=reals[0])
        histogram.full_range, histogram.minimum, histogram.maximum = reals[1:]
        histogram.total, histogram.infinite = wholes
        counts = np.asarray(arrays["counts"], np.int64)
        sound = counts.shape == histogram.counts.shape and counts.min() >= 0
        if not sound or counts.sum() != histogram.total:
            raise CalibrationError("stored counts must add up to their total and do not")
        histogram.counts[:] = counts
        return histogram


@dataclass(frozen=True, slots=True)
class AmaxOf:
    """The largest |x| of the first samples."""

    samples: int

    @property
    def key(self) -> str:
        """How many samples."""
        return f"largest |x| of the first {self.samples}"

    @property
    def ordered(self) -> bool:
        """A maximum has no order."""
        return False

    @property
    def lead(self) -> Statistic | None:
        """Nothing."""
        return None

    def recorder(self, lead: Recorder | None) -> Amax:
        """Nothing seen yet."""
        return Amax()

    def restore(self, arrays: Arrays) -> Amax:
        """A maximum that was stored."""
        found = Amax()
        (found.amax,) = numbers(arrays, 1, 0)[0]
        return found


class Amax:
    """The largest |x| so far, in real units; infinite where a value was."""

    def __init__(self) -> None:
        self.amax = 0.0

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add a batch; NaN counts as nothing, since whoever follows names it."""
        self.amax = max(self.amax, float(np.abs(x).max(initial=0)))

    def to_arrays(self) -> Arrays:
        """One number."""
        return {"reals": np.array([self.amax])}


def numbers(arrays: Arrays, reals: int, wholes: int) -> tuple[list[float], list[int]]:
    """The arrays "reals" (float64) and "wholes" (int64), each of a fixed length.

    Raises:
        CalibrationError: one is missing or of another length.
    """
    empty = np.zeros(0)
    first, second = arrays.get("reals", empty), arrays.get("wholes", empty)
    if first.shape != (reals,) or second.shape != (wholes,):
        raise CalibrationError(
            f"stored statistics need {reals} reals and {wholes} wholes, got {first.shape} and"
            f" {second.shape}"
        )
    return [float(v) for v in first], [int(v) for v in second]


def trouble(histogram: Histogram) -> str | None:
    """Why a tensor gets no scale, or None where it does."""
    if histogram.infinite:
        return f"held {histogram.infinite} infinite values"
    if histogram.total == 0:
        return "was empty in every sample"
    if histogram.amax == 0:
        return "was 0 in every sample"
    return None


def troubles(histograms: Mapping[str, Histogram]) -> dict[str, str]:
    """Tensor name -> why it gets no scale, as the end of a sentence."""
    found = {name: trouble(histogram) for name, histogram in histograms.items()}
    return {name: why for name, why in found.items() if why is not None}


def searched(
    histogram: Histogram,
    search: Any,
    reach: tuple[float, float, float] | None = None,
) -> Scale:
    """The clip range of one sound tensor.

    Args:
        histogram: its statistics.
        search: histogram -> range.
        reach: (floor, ceiling, followed) in real units: as if the values were clamped to the first
            two, and with room for rare large ones up to the third (`calibrators.percentile`).
    """
    if reach is None:
        found: Scale = search(histogram)
        return found
    floor, ceiling, followed = reach
    scale: Scale = search(histogram.clamped(floor, ceiling))
    scale = replace(scale, observed_min=histogram.minimum, observed_max=histogram.maximum)
    return with_room(scale, histogram, followed)
