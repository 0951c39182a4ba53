"""What AMCT's searches are made from, as statistics of one tensor.

AMCT's numbers are defined by its batches, one after the other, so all of these are ordered.

What AdaRound looks at, as statistics: a layer's inputs and outputs at some places.

The same places of both, drawn by the number of the sample. They are kept only until the layer is
rounded; a store gets what it was rounded to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.adaround import AdaParams
from calibrators.amct.arq import channel_max, checked
from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import FINE_BINS, AscendScale, IfmrHistogram, IfmrParams, ifmr
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.rounding import Window, patches, places
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


FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Common to both.

    Attributes:
        samples: how many are looked at.
        most: places of a sample.
    """

    samples: int
    most: int

    @property
    def ordered(self) -> bool:
        """Places are drawn by the number of the sample."""
        return True

    @property
    def lead(self) -> Statistic | None:
        """Nothing."""
        return None

    @property
    def _where(self) -> str:
        return f"up to {self.most} places of the first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsOf(_Places):
    """What the float layer gives there; never stored.

    Attributes:
        last: the output channels are the last axis, else the second.
    """

    last: bool

    @property
    def key(self) -> str:
        """The places, and where channels are."""
        return f"outputs at {self._where}{', channels last' if self.last else ''}"

    def recorder(self, lead: Recorder | None) -> Targets:
        """Nothing seen yet."""
        return Targets(self.most, last=self.last)

    def restore(self, arrays: Arrays) -> Targets:
        """Refuse: they are too many for a cache.

        Raises:
            CalibrationError: always.
        """
        raise CalibrationError("outputs that are kept are not stored")


class Targets:
    """Outputs of a layer at some places."""

    def __init__(self, most: int, *, last: bool) -> None:
        self.share = 1.0  # AMCT sums the squares along axis 1, whatever that is, and takes means
        self._most, self._last, self._number = most, last, 0
        self._kept: list[FloatArray] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Keep places of a sample, [N, C, ...] or [..., C]."""
        value = checked(x, "output of a layer that AdaRound rounds")
        self._number += 1
        if self._last and value.ndim > 2:
            self.share = value.shape[1] / value.shape[-1]
        wide = value if self._last else np.moveaxis(value, 1, -1)
        rows = wide.reshape(-1, wide.shape[-1])
        self._kept.append(rows[places(self._number, len(rows), self._most)].copy())

    def taken(self) -> FloatArray:
        """All of them, [P, C]; they are not kept any longer."""
        kept, self._kept = self._kept, []
        return np.concatenate(kept)

    def to_arrays(self) -> Arrays:
        """Nothing: see `TargetsOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedOf(_Places):
    """What the weights are rounded to; until then the layer's inputs.

    Attributes:
        window: of a convolution; None for a matrix product.
        shape: of the integers, groups, output channels of a group, values of a patch.
        scales: how many the weight has.
        params: of the search.
    """

    window: Window | None
    shape: tuple[int, int, int]
    scales: int
    params: AdaParams

    @property
    def key(self) -> str:
        """The places and the parameters."""
        found = self.params
        first, last = found.beta_range
        return (
            f"AdaRound by {self._where}, {found.num_iteration} iterations, reg_param"
            f" {found.reg_param}, beta {first} to {last}, warm_start {found.warm_start}"
        )

    def recorder(self, lead: Recorder | None) -> Rounded:
        """Nothing seen yet."""
        return Rounded(self.window, self.most)

    def restore(self, arrays: Arrays) -> Rounded:
        """What was found.

        Raises:
            CalibrationError: another number of integers or scales.
        """
        made = Rounded(None, 0)
        errors, _ = numbers(arrays, 2, 0)
        integers, scale = arrays["integers"], arrays["scale"]
        if integers.shape != (np.prod(self.shape),) or scale.shape != (self.scales,):
            raise CalibrationError("stored integers must be as many as the weights and are not")
        found = np.array(integers, np.int8).reshape(self.shape)
        made.keep(found, np.array(scale, np.float32), (errors[0], errors[1]))
        return made


class Rounded:
    """A layer's inputs at some places, then the integers that they led to.

    Attributes:
        integers: of the weight, int8 [G, M, K]; None until they are found.
        scale: their scales, float32 [C] or [1].
        errors: the output's mean squared error, by the nearest integers and by these.
    """

    def __init__(self, window: Window | None, most: int) -> None:
        self.integers: NDArray[np.int8] | None = None
        self.scale: FloatArray = np.zeros(0, np.float32)
        self.errors = (0.0, 0.0)
        self._window, self._most, self._number = window, most, 0
        self._kept: list[FloatArray] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Keep the patches of some places of a sample."""
        value = checked(x, "input of a layer that AdaRound rounds")
        self._number += 1
        self._kept.append(patches(value, self._window, self._number, self._most))

    def taken(self) -> FloatArray:
        """All of them, [P, G, K]; they are not kept any longer."""
        kept, self._kept = self._kept, []
        return np.ascontiguousarray(np.concatenate(kept, axis=2).transpose(2, 0, 1))

    def keep(
        self, integers: NDArray[np.int8], scale: FloatArray, errors: tuple[float, float]
    ) -> None:
        """Take what was found."""
        self.integers, self.scale, self.errors = integers, scale, errors

    def to_arrays(self) -> Arrays:
        """What was found; nothing before."""
        if self.integers is None:
            return {}
        return {
            "integers": self.integers.reshape(-1),
            "scale": self.scale,
            "reals": np.array(self.errors, np.float64),
            "wholes": np.zeros(0, np.int64),
        }
