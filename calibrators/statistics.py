"""Statistics of a tensor and their recorders; the search of a clip range in them.

::

    Statistic     a plain value: which numbers to record, by which rule     HistogramOf()
       |  .recorder(lead)
       v
    Recorder      the numbers of one tensor so far: observe(x), observe(x), ... to_arrays()

Statistics with equal keys record equal numbers from the same data, so that a key identifies them in
a cache. An `ordered` statistic must see the data in feed order; any other takes it in any order,
also in parts that are merged. A statistic with a `lead` needs that other statistic, of the first
samples, before it can start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import RealArray
from calibrators.histogram import Histogram
from calibrators.percentile import extend_by_tail
from calibrators.scales import Scale

FORMAT = 2  # version of the recorders' arrays; part of every fingerprint

Arrays = dict[str, NDArray[Any]]


class Recorder(Protocol):
    """Records the statistic of one tensor over all batches so far."""

    def observe(self, x: RealArray) -> None:
        """Add a batch of any shape.

        Raises:
            CalibrationError: the statistic does not allow a value, such as NaN.
        """

    def to_arrays(self) -> Arrays:
        """Return plain 1-D arrays from which `Statistic.restore` makes an equal recorder."""


@runtime_checkable
class HasExtremes(Protocol):
    """A recorder that holds the least and the greatest value."""

    @property
    def extremes(self) -> tuple[float, float]:
        """(least, greatest) value in real units."""


@runtime_checkable
class BatchRecorder(Protocol):
    """A recorder that joins samples to batches."""

    samples_per_batch: int  # `to_arrays` is complete only after a full batch

    def end(self) -> None:
        """Record the waiting samples as the last batch, which may be smaller.

        Raises:
            CalibrationError: as `Recorder.observe`.
        """


class Statistic(Protocol):
    """Which numbers to record of a tensor; a frozen value."""

    @property
    def key(self) -> str:
        """Name with all parameters; equal keys record equal numbers."""

    @property
    def ordered(self) -> bool:
        """Whether the numbers depend on the order of the data."""

    @property
    def samples(self) -> int | None:
        """Number of samples to record, from the first; None for all."""

    @property
    def lead(self) -> Statistic | None:
        """Statistic of the first samples that this one needs before it starts, or None."""

    def recorder(self, lead: Recorder | None) -> Recorder:
        """Return an empty recorder; `lead` is the recorder of the statistic `lead`."""

    def restore(self, arrays: Arrays) -> Recorder:
        """Invert `to_arrays`.

        Raises:
            CalibrationError: arrays are missing, of a wrong shape, or inconsistent.
        """


@dataclass(frozen=True, slots=True)
class HistogramOf:
    """A `Histogram`: order-independent, or by TensorRT's rule, whose first batch sets the range.

    Attributes:
        first_batch: number of samples in that batch; 0 for the order-independent range.
        samples: number of samples to record, those in full batches; None for all.
    """

    first_batch: int = 0
    samples: int | None = None

    @property
    def key(self) -> str:
        """Rule and parameters."""
        if not self.first_batch:
            return "histogram"
        limit_text = f" of {self.samples} samples" if self.samples else ""
        return f"histogram{limit_text}, first batch of {self.first_batch}"

    @property
    def ordered(self) -> bool:
        """True for TensorRT's rule."""
        return bool(self.first_batch)

    @property
    def lead(self) -> Statistic | None:
        """Largest |x| of the first batch, for TensorRT's rule."""
        return AmaxOf(self.first_batch) if self.first_batch else None

    def recorder(self, lead: Recorder | None) -> Histogram:
        """Return an empty histogram; an infinite first batch sets no range."""
        if not isinstance(lead, Amax):
            return Histogram()
        return Histogram(initial_range=lead.amax if np.isfinite(lead.amax) else 0.0)

    def restore(self, arrays: Arrays) -> Histogram:
        """Return a stored histogram."""
        reals, integers = read_numbers(arrays, reals=4, wholes=2)
        histogram = Histogram(initial_range=reals[0])
        histogram.full_range, histogram.minimum, histogram.maximum = reals[1:]
        histogram.total, histogram.infinite = integers
        counts = np.asarray(arrays["counts"], np.int64)
        are_counts = counts.shape == histogram.counts.shape and counts.min() >= 0
        if not are_counts or counts.sum() != histogram.total:
            raise CalibrationError("stored counts must add up to their total and do not")
        histogram.counts[:] = counts
        return histogram


@dataclass(frozen=True, slots=True)
class AmaxOf:
    """The largest |x| of the first samples."""

    samples: int
    ordered: ClassVar[bool] = False
    lead: ClassVar[Statistic | None] = None

    @property
    def key(self) -> str:
        """Name with the number of samples."""
        return f"largest |x| of the first {self.samples}"

    def recorder(self, lead: Recorder | None) -> Amax:
        """Return an empty recorder."""
        return Amax()

    def restore(self, arrays: Arrays) -> Amax:
        """Return a stored maximum."""
        recorder = Amax()
        reals, _ = read_numbers(arrays, reals=1, wholes=0)
        recorder.amax = reals[0]
        return recorder


class Amax:
    """Recorder of the largest |x|.

    Attributes:
        amax: largest |x| so far, in real units; infinite if a value is.
    """

    def __init__(self) -> None:
        self.amax = 0.0

    def observe(self, x: RealArray) -> None:
        """Add a batch; ignores NaN, which the following statistic reports."""
        self.amax = max(self.amax, float(np.abs(x).max(initial=0)))

    def to_arrays(self) -> Arrays:
        """Return the maximum."""
        return {"reals": np.array([self.amax])}


def read_numbers(arrays: Arrays, *, reals: int, wholes: int) -> tuple[list[float], list[int]]:
    """Return the arrays "reals" (float64) and "wholes" (int64) as lists of a given length.

    Raises:
        CalibrationError: an array is missing or of another length.
    """
    empty = np.zeros(0)
    floats = arrays.get("reals", empty)
    integers = arrays.get("wholes", empty)
    if floats.shape != (reals,) or integers.shape != (wholes,):
        raise CalibrationError(
            f"stored statistics need {reals} reals and {wholes} wholes, got {floats.shape} and"
            f" {integers.shape}"
        )
    return floats.astype(float).tolist(), integers.astype(int).tolist()


def find_trouble(histogram: Histogram) -> str | None:
    """Return why a tensor gets no scale, or None if it gets one."""
    if histogram.infinite:
        noun = "value" if histogram.infinite == 1 else "values"
        return f"held {histogram.infinite} infinite {noun}"
    if histogram.total == 0:
        return "was empty in every sample"
    if histogram.amax == 0:
        return "was 0 in every sample"
    return None


def search_scale(
    histogram: Histogram,
    search: Callable[[Histogram], Scale],
    bounds: tuple[float, float, float] | None,
) -> Scale:
    """Search the clip range of a tensor, within bounds that the nodes which read it set.

    Args:
        histogram: statistics of the tensor, in which a range can be found (see `find_trouble`).
        search: histogram -> range.
        bounds: (floor, ceiling, limit) in real units. Values beyond floor and ceiling make no
            difference to the readers, and are clamped before the search. Then the range is extended
            for rare large values, up to the limit. None to search the values as they are.
    """
    if bounds is None:
        return search(histogram)
    floor, ceiling, limit = bounds
    scale = search(histogram.clamped(floor, ceiling))
    # the extremes are those of the values before clamping
    scale = replace(scale, observed_min=histogram.minimum, observed_max=histogram.maximum)
    return extend_by_tail(scale, histogram, limit)
