"""Statistics and recorders of one tensor for AMCT's searches: IFMR, HFMG, DMQ and AdaRound.

AMCT defines its numbers by consecutive batches, so all of these statistics are ordered.

AdaRound needs a layer's inputs and outputs at the same sampled positions, which the number of the
sample decides. They are held until the layer is rounded; only the result is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.adaround import AdaParams
from calibrators.amct.arq import channel_max, check_values
from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import FINE_BINS, AscendScale, IfmrHistogram, IfmrParams, ifmr
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.rounding import ConvWindow, extract_patches, sample_positions
from calibrators.statistics import Arrays, Recorder, Statistic, read_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordered:
    """Base of the ordered statistics without a lead."""

    samples: int | None = None  # number of samples to record, AMCT's `batch_num`; None for all
    ordered: ClassVar[bool] = True  # AMCT's batches are consecutive
    lead: ClassVar[Statistic | None] = None

    def _key(self, name: str) -> str:
        return name if self.samples is None else f"{name}, first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class IfmrOf(_Ordered):
    """An `IfmrHistogram`: IFMR in constant memory."""

    @property
    def key(self) -> str:
        """Name with the number of batches."""
        return self._key("ifmr histogram")

    def recorder(self, lead: Recorder | None) -> IfmrHistogram:
        """Return an empty histogram."""
        return IfmrHistogram()

    def restore(self, arrays: Arrays) -> IfmrHistogram:
        """Return a stored histogram."""
        made = IfmrHistogram()
        (made.minimum, made.maximum, made.full_range), (made.total,) = read_numbers(arrays, 3, 1)
        kept, bins = arrays["kept"], arrays["bins"]
        if kept.size:
            made.keep(np.array(kept, np.float32))
        elif bins.size:
            made.counts = np.zeros(2 * FINE_BINS + 1, np.int64)
            made.sums = np.zeros(2 * FINE_BINS + 1)
            if bins.min() < 0 or bins.max() > 2 * FINE_BINS:
                raise CalibrationError("stored bins must lie within the histogram and do not")
            made.counts[bins], made.sums[bins] = arrays["counts"], arrays["sums"]
        if kept.size + int(made.counts.sum()) != made.total:
            raise CalibrationError("stored counts must add up to their total and do not")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class AllValuesOf(_Ordered):
    """All values, as in AMCT's IFMR: memory grows with the samples; never stored."""

    @property
    def key(self) -> str:
        """Name with the number of batches."""
        return self._key("all values")

    def recorder(self, lead: Recorder | None) -> AllValues:
        """Return an empty recorder."""
        return AllValues()

    def restore(self, arrays: Arrays) -> AllValues:
        """Raise CalibrationError: the values are too many for a cache."""
        raise CalibrationError("values that are kept whole are not stored")


class AllValues:
    """Recorder of all values of a tensor."""

    def __init__(self) -> None:
        self._kept: list[Float32Array] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add a batch."""
        self._kept.append(np.array(x, copy=True).reshape(-1))

    @property
    def nbytes(self) -> int:
        """Memory of the values, in bytes."""
        return sum(part.nbytes for part in self._kept)

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        least = min((float(part.min()) for part in self._kept), default=math.inf)
        return least, max((float(part.max()) for part in self._kept), default=-math.inf)

    @property
    def dead(self) -> bool:
        """Whether every value was zero."""
        return not any(part.any() for part in self._kept)

    def search(self, params: IfmrParams) -> AscendScale:
        """Run AMCT's search."""
        return ifmr(np.concatenate([*self._kept, np.zeros(0, np.float32)]), params)

    def to_arrays(self) -> Arrays:
        """Return {}: see `AllValuesOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfmgOf(_Ordered):
    """An `HfmgHistogram`."""

    nbins: int = 4096  # 1024, 2048, 4096 or 8192
    together: int = 1  # samples per batch

    @property
    def key(self) -> str:
        """Name with bins and batches."""
        joined = f", {self.together} samples a batch" if self.together > 1 else ""
        return self._key(f"hfmg histogram of {self.nbins} bins{joined}")

    def recorder(self, lead: Recorder | None) -> HfmgHistogram:
        """Return an empty histogram."""
        return HfmgHistogram(self.nbins, together=self.together)

    def restore(self, arrays: Arrays) -> HfmgHistogram:
        """Return a stored histogram."""
        made = HfmgHistogram(self.nbins, together=self.together)
        (lo, hi), _ = read_numbers(arrays, 2, 0)
        counts = np.array(arrays["counts"], np.int32)
        if counts.shape != (self.nbins,) or counts.min() < 0:
            raise CalibrationError(f"a stored histogram must have {self.nbins} counts of 0 or more")
        made.counts, made.lo, made.hi = counts, np.float32(lo), np.float32(hi)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMaxOf(_Ordered):
    """The largest |x| of each channel of the first batch, for DMQ."""

    axis: int = 1  # axis of the channels
    samples: int | None = 1

    @property
    def key(self) -> str:
        """Name with the axis."""
        return self._key(f"largest |x| along axis {self.axis}")

    def recorder(self, lead: Recorder | None) -> ChannelMax:
        """Return an empty recorder."""
        return ChannelMax(self.axis)

    def restore(self, arrays: Arrays) -> ChannelMax:
        """Return a stored recorder."""
        made = ChannelMax(self.axis)
        made.values = np.array(arrays["values"], np.float32)
        return made


class ChannelMax:
    """Recorder of the largest |x| of each channel, float32 [C]."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.values: Float32Array = np.zeros(0, np.float32)

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add a sample of the first batch."""
        maxima = channel_max(x, self.axis)
        self.values = np.maximum(self.values, maxima) if self.values.size else maxima

    def to_arrays(self) -> Arrays:
        """Return the maxima."""
        return {"values": self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places(_Ordered):
    """Base of the statistics at sampled positions."""

    samples: int  # whose number decides the positions
    most: int  # largest number of positions per sample

    @property
    def _where(self) -> str:
        return f"up to {self.most} places of the first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsOf(_Places):
    """Outputs of the float layer at sampled positions; never stored."""

    last: bool  # whether the output channels are the last axis, else the second

    @property
    def key(self) -> str:
        """Name with the positions and the channel axis."""
        return f"outputs at {self._where}{', channels last' if self.last else ''}"

    def recorder(self, lead: Recorder | None) -> Targets:
        """Return an empty recorder."""
        return Targets(self.most, last=self.last)

    def restore(self, arrays: Arrays) -> Targets:
        """Raise CalibrationError: the values are too many for a cache."""
        raise CalibrationError("outputs that are kept are not stored")


class Targets:
    """Recorder of a layer's outputs at sampled positions."""

    def __init__(self, most: int, *, last: bool) -> None:
        self.share = 1.0  # AMCT always sums the squares along axis 1, then averages
        self._most, self._last, self._number = most, last, 0
        self._kept: list[Float32Array] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add sampled positions of a sample, [N, C, ...] or [..., C]."""
        value = check_values(x, "output of a layer that AdaRound rounds")
        self._number += 1
        if self._last and value.ndim > 2:
            self.share = value.shape[1] / value.shape[-1]
        wide = value if self._last else np.moveaxis(value, 1, -1)
        rows = wide.reshape(-1, wide.shape[-1])
        self._kept.append(rows[sample_positions(self._number, len(rows), self._most)].copy())

    def taken(self) -> Float32Array:
        """Return all outputs, [P, C], and drop them here."""
        kept, self._kept = self._kept, []
        return np.concatenate(kept)

    def to_arrays(self) -> Arrays:
        """Return {}: see `TargetsOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeightsOf(_Places):
    """A layer's inputs at sampled positions, then its rounded weights."""

    window: ConvWindow | None  # window of a convolution; None for a matrix product
    # shape of the integers: groups, output channels of a group, values of a patch
    shape: tuple[int, int, int]
    scales: int
    params: AdaParams

    @property
    def key(self) -> str:
        """Name with the positions and the parameters."""
        params = self.params
        first, last = params.beta_range
        return (
            f"AdaRound by {self._where}, {params.num_iteration} iterations, reg_param"
            f" {params.reg_param}, beta {first} to {last}, warm_start {params.warm_start}"
        )

    def recorder(self, lead: Recorder | None) -> RoundedWeights:
        """Return an empty recorder."""
        return RoundedWeights(self.window, self.most)

    def restore(self, arrays: Arrays) -> RoundedWeights:
        """Return stored integers.

        Raises:
            CalibrationError: another number of integers or scales.
        """
        made = RoundedWeights(None, 0)
        errors, _ = read_numbers(arrays, 2, 0)
        integers, scale = arrays["integers"], arrays["scale"]
        if integers.shape != (np.prod(self.shape),) or scale.shape != (self.scales,):
            raise CalibrationError("stored integers must be as many as the weights and are not")
        weights = np.array(integers, np.int8).reshape(self.shape)
        made.keep(weights, np.array(scale, np.float32), (errors[0], errors[1]))
        return made


class RoundedWeights:
    """Recorder of a layer's inputs at sampled positions, then of its rounded weights.

    Attributes:
        integers: the weights, int8 [G, M, K]; None until they are rounded.
        scale: their scales, float32 [C] or [1].
        errors: mean squared error of the output with nearest rounding and with these integers.
    """

    def __init__(self, window: ConvWindow | None, most: int) -> None:
        self.integers: NDArray[np.int8] | None = None
        self.scale: Float32Array = np.zeros(0, np.float32)
        self.errors = (0.0, 0.0)
        self._window, self._most, self._number = window, most, 0
        self._kept: list[Float32Array] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add the patches at sampled positions of a sample."""
        value = check_values(x, "input of a layer that AdaRound rounds")
        self._number += 1
        self._kept.append(extract_patches(value, self._window, self._number, self._most))

    def taken(self) -> Float32Array:
        """Return all patches, [P, G, K], and drop them here."""
        kept, self._kept = self._kept, []
        return np.ascontiguousarray(np.concatenate(kept, axis=2).transpose(2, 0, 1))

    def keep(
        self, integers: NDArray[np.int8], scale: Float32Array, errors: tuple[float, float]
    ) -> None:
        """Set the result."""
        self.integers, self.scale, self.errors = integers, scale, errors

    def to_arrays(self) -> Arrays:
        """Return the result; {} before there is one."""
        if self.integers is None:
            return {}
        return {
            "integers": self.integers.reshape(-1),
            "scale": self.scale,
            "reals": np.array(self.errors, np.float64),
            "wholes": np.zeros(0, np.int64),
        }
