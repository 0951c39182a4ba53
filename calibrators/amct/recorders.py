"""What AMCT's searches are made from, as statistics of one tensor.

AMCT's numbers are defined by its batches, one after the other, so all of these are ordered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.dmq import channel_max
from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import AscendScale, IfmrParams, ifmr
from calibrators.amct.ifmr_streaming import FINE_BINS, IfmrHistogram
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.statistics import Arrays, Recorder, Statistic, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordered:
    """Common to all: the order shows, and nothing must be known before.

    Attributes:
        samples: how many samples are looked at, AMCT's `batch_num`; None for all.
    """

    samples: int | None = None

    @property
    def ordered(self) -> bool:
        """AMCT's batches come one after the other."""
        return True

    @property
    def lead(self) -> Statistic | None:
        """Nothing."""
        return None

    def _key(self, name: str) -> str:
        return name if self.samples is None else f"{name}, first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class IfmrOf(_Ordered):
    """An `IfmrHistogram`: IFMR in flat memory."""

    @property
    def key(self) -> str:
        """No parameter but the batches."""
        return self._key("ifmr histogram")

    def recorder(self, lead: Recorder | None) -> IfmrHistogram:
        """An empty histogram."""
        return IfmrHistogram()

    def restore(self, arrays: Arrays) -> IfmrHistogram:
        """A histogram that was stored."""
        found = IfmrHistogram()
        (found.minimum, found.maximum, found.full_range), (found.total,) = numbers(arrays, 3, 1)
        kept, bins = arrays["kept"], arrays["bins"]
        if kept.size:
            found.keep(np.array(kept, np.float32))
        elif bins.size:
            found.counts = np.zeros(2 * FINE_BINS + 1, np.int64)
            found.sums = np.zeros(2 * FINE_BINS + 1)
            if bins.min() < 0 or bins.max() > 2 * FINE_BINS:
                raise CalibrationError("stored bins must lie within the histogram and do not")
            found.counts[bins], found.sums[bins] = arrays["counts"], arrays["sums"]
        if kept.size + int(found.counts.sum()) != found.total:
            raise CalibrationError("stored counts must add up to their total and do not")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOf(_Ordered):
    """Every value, as AMCT's IFMR keeps them: memory grows with the samples; never stored."""

    @property
    def key(self) -> str:
        """No parameter but the batches."""
        return self._key("all values")

    def recorder(self, lead: Recorder | None) -> Exact:
        """Nothing kept yet."""
        return Exact()

    def restore(self, arrays: Arrays) -> Exact:
        """Refuse: they are too many for a cache.

        Raises:
            CalibrationError: always.
        """
        raise CalibrationError("values that are kept whole are not stored")


class Exact:
    """All values of a tensor."""

    def __init__(self) -> None:
        self._kept: list[Float32Array] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Keep a batch."""
        self._kept.append(np.array(x, copy=True).reshape(-1))

    @property
    def nbytes(self) -> int:
        """Memory that the values take."""
        return sum(part.nbytes for part in self._kept)

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        return float(min(p.min() for p in self._kept)), float(max(p.max() for p in self._kept))

    @property
    def dead(self) -> bool:
        """Whether every value was zero."""
        return not any(part.any() for part in self._kept)

    def search(self, params: IfmrParams) -> AscendScale:
        """AMCT's own search."""
        return ifmr(np.concatenate(self._kept), params)

    def to_arrays(self) -> Arrays:
        """Nothing: see `ExactOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfmgOf(_Ordered):
    """An `HfmgHistogram`.

    Attributes:
        nbins: 1024, 2048, 4096 or 8192.
        together: samples that make a batch.
    """

    nbins: int = 4096
    together: int = 1

    @property
    def key(self) -> str:
        """With its bins and its batches."""
        joined = f", {self.together} samples a batch" if self.together > 1 else ""
        return self._key(f"hfmg histogram of {self.nbins} bins{joined}")

    def recorder(self, lead: Recorder | None) -> HfmgHistogram:
        """An empty histogram."""
        return HfmgHistogram(self.nbins, together=self.together)

    def restore(self, arrays: Arrays) -> HfmgHistogram:
        """A histogram that was stored."""
        found = HfmgHistogram(self.nbins, together=self.together)
        (lo, hi), _ = numbers(arrays, 2, 0)
        counts = np.array(arrays["counts"], np.int32)
        if counts.shape != (self.nbins,) or counts.min() < 0:
            raise CalibrationError(f"a stored histogram must have {self.nbins} counts of 0 or more")
        found.counts, found.lo, found.hi = counts, np.float32(lo), np.float32(hi)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMaxOf(_Ordered):
    """The largest |x| of each channel of the first batch: what DMQ balances by.

    Attributes:
        axis: of the channels.
        samples: in the batch.
    """

    axis: int = 1
    samples: int | None = 1

    @property
    def key(self) -> str:
        """With its axis."""
        return self._key(f"largest |x| along axis {self.axis}")

    def recorder(self, lead: Recorder | None) -> ChannelMax:
        """Nothing seen yet."""
        return ChannelMax(self.axis)

    def restore(self, arrays: Arrays) -> ChannelMax:
        """What was stored."""
        found = ChannelMax(self.axis)
        found.values = np.array(arrays["values"], np.float32)
        return found


class ChannelMax:
    """Largest |x| of each channel, float32 [C]."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.values: Float32Array = np.zeros(0, np.float32)

    def observe(self, x: NDArray[np.floating]) -> None:
        """Take a sample of the first batch."""
        found = channel_max(x, self.axis)
        self.values = np.maximum(self.values, found) if self.values.size else found

    def to_arrays(self) -> Arrays:
        """The maxima."""
        return {"values": self.values}
