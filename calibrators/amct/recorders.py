"""Statistics and recorders of one tensor for AMCT's searches: IFMR, HFMG, DMQ and AdaRound.

AMCT defines its numbers by consecutive batches, so all of these statistics are ordered.

AdaRound needs a layer's inputs and outputs at the same sampled positions, which the number of the
sample decides. They are held until the layer is rounded; only the result is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from calibrators.amct.adaround import AdaParams
from calibrators.amct.arq import channel_max, check_values
from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import FINE_BINS, IfmrHistogram
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array, Int8Array, RealArray
from calibrators.rounding import ConvWindow, extract_patches, sample_positions
from calibrators.statistics import Arrays, Recorder, Statistic, read_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordered:
    """Base of the ordered statistics without a lead."""

    samples: int | None = None  # number of samples to record, AMCT's `batch_num`; None for all
    ordered: ClassVar[bool] = True  # AMCT's batches are consecutive
    lead: ClassVar[Statistic | None] = None

    def _key(self, name: str) -> str:
        """Return a statistic's name with the number of samples, if it is limited."""
        return name if self.samples is None else f"{name}, first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class IfmrOf(_Ordered):
    """An `IfmrHistogram`: in constant memory, or `exact` of all values, which no cache stores."""

    exact: bool = False

    @property
    def key(self) -> str:
        """Name with the number of batches."""
        return self._key("all values" if self.exact else "ifmr histogram")

    def recorder(self, lead: Recorder | None) -> IfmrHistogram:
        """Return an empty histogram."""
        return IfmrHistogram(exact=self.exact)

    def restore(self, arrays: Arrays) -> IfmrHistogram:
        """Return a stored histogram, which has either few values as they are, or counts of bins.

        Raises:
            CalibrationError: the arrays contradict each other.
        """
        histogram = IfmrHistogram()
        reals, (histogram.total,) = read_numbers(arrays, reals=3, wholes=1)
        minimum, maximum, full_range = reals
        histogram.minimum = minimum
        histogram.maximum = maximum
        histogram.full_range = full_range
        stored_values = arrays["kept"]
        bins = arrays["bins"]
        # the kernel writes beyond its arrays if a later value lies outside `full_range`
        has_valid_range = bool(np.isfinite(reals).all()) and full_range >= 0
        if stored_values.size:
            values = np.array(stored_values, np.float32)
            histogram.set_values(values)
            has_valid_range &= minimum <= values.min() <= values.max() <= maximum
        elif bins.size:
            histogram.start_counting()
            if bins.min() < 0 or bins.max() > 2 * FINE_BINS:  # the bin around 0 and both sides
                raise CalibrationError("stored bins must lie within the histogram and do not")
            histogram.counts[bins] = arrays["counts"]
            histogram.sums[bins] = arrays["sums"]
            has_valid_range &= -full_range <= minimum <= maximum <= full_range
        if stored_values.size + int(histogram.counts.sum()) != histogram.total:
            raise CalibrationError("stored counts must add up to their total and do not")
        if histogram.total and not has_valid_range:
            raise CalibrationError("stored values must lie within their stored range and do not")
        return histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class HfmgOf(_Ordered):
    """An `HfmgHistogram`."""

    nbins: int = 4096  # 1024, 2048, 4096 or 8192
    samples_per_batch: int = 1  # samples per batch

    @property
    def key(self) -> str:
        """Name with bins and batches."""
        name = f"hfmg histogram of {self.nbins} bins"
        if self.samples_per_batch > 1:
            name += f", {self.samples_per_batch} samples a batch"
        return self._key(name)

    def recorder(self, lead: Recorder | None) -> HfmgHistogram:
        """Return an empty histogram."""
        return HfmgHistogram(self.nbins, samples_per_batch=self.samples_per_batch)

    def restore(self, arrays: Arrays) -> HfmgHistogram:
        """Return a stored histogram."""
        recorder = self.recorder(None)
        (lo, hi), _ = read_numbers(arrays, reals=2, wholes=0)
        counts = np.array(arrays["counts"], np.int32)
        if counts.shape != (self.nbins,) or counts.min() < 0:
            raise CalibrationError(f"a stored histogram must have {self.nbins} counts of 0 or more")
        recorder.counts = counts
        recorder.lo = np.float32(lo)
        recorder.hi = np.float32(hi)
        return recorder


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
        recorder = ChannelMax(self.axis)
        recorder.values = np.array(arrays["values"], np.float32)
        return recorder


class ChannelMax:
    """Recorder of the largest |x| of each channel, float32 [C]."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.values: Float32Array = np.zeros(0, np.float32)

    def observe(self, x: RealArray) -> None:
        """Add a sample of the first batch."""
        maxima = channel_max(x, self.axis)
        self.values = np.maximum(self.values, maxima) if self.values.size else maxima

    def to_arrays(self) -> Arrays:
        """Return the maxima."""
        return {"values": self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledPositions(_Ordered):
    """Base of the statistics at sampled positions."""

    samples: int  # number of samples to record; the number of each decides its positions
    max_positions: int  # largest number of positions per sample

    @property
    def _positions(self) -> str:
        """Text on the sampled positions, for the key."""
        return f"up to {self.max_positions} places of the first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsOf(_SampledPositions):
    """Outputs of the float layer at sampled positions; never stored."""

    channels_last: bool  # whether the output channels are the last axis, else the second

    @property
    def key(self) -> str:
        """Name with the positions and the channel axis."""
        layout = ", channels last" if self.channels_last else ""
        return f"outputs at {self._positions}{layout}"

    def recorder(self, lead: Recorder | None) -> Targets:
        """Return an empty recorder."""
        return Targets(self.max_positions, channels_last=self.channels_last)

    def restore(self, arrays: Arrays) -> Targets:
        """Raise CalibrationError: the values are too many for a cache."""
        raise CalibrationError("outputs that are kept are not stored")


class Targets:
    """Recorder of a layer's outputs at sampled positions.

    Attributes:
        error_factor: factor of the output's error. AMCT always sums the squares along axis 1, then
            averages, so the factor is not 1 if the channels are another axis.
    """

    def __init__(self, max_positions: int, *, channels_last: bool) -> None:
        self.error_factor = 1.0
        self._max_positions = max_positions
        self._channels_last = channels_last
        self._sample_number = 0
        self._chunks: list[Float32Array] = []

    def observe(self, x: RealArray) -> None:
        """Add sampled positions of a sample, [N, C, ...] or [..., C]."""
        value = check_values(x, "output of a layer that AdaRound rounds")
        self._sample_number += 1
        if self._channels_last and value.ndim > 2:
            self.error_factor = value.shape[1] / value.shape[-1]
        if not self._channels_last:
            value = np.moveaxis(value, 1, -1)
        rows = value.reshape(-1, value.shape[-1])
        positions = sample_positions(self._sample_number, len(rows), self._max_positions)
        self._chunks.append(rows[positions].copy())

    def take_outputs(self) -> Float32Array:
        """Return all outputs, [P, C], and drop them here."""
        chunks = self._chunks
        self._chunks = []
        return np.concatenate(chunks)

    def to_arrays(self) -> Arrays:
        """Return {}: see `TargetsOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeightsOf(_SampledPositions):
    """A layer's inputs at sampled positions, then its rounded weights."""

    window: ConvWindow | None  # window of a convolution; None for a matrix product
    # shape of the integers: groups, output channels of a group, values of a patch
    shape: tuple[int, int, int]
    scale_count: int
    params: AdaParams

    @property
    def key(self) -> str:
        """Name with the positions and the parameters."""
        params = self.params
        first_beta, last_beta = params.beta_range
        return (
            f"AdaRound by {self._positions}, {params.num_iteration} iterations, reg_param"
            f" {params.reg_param}, beta {first_beta} to {last_beta}, warm_start {params.warm_start}"
        )

    def recorder(self, lead: Recorder | None) -> RoundedWeights:
        """Return an empty recorder."""
        return RoundedWeights(self.window, self.max_positions)

    def restore(self, arrays: Arrays) -> RoundedWeights:
        """Return stored integers.

        Raises:
            CalibrationError: another number of integers or scales.
        """
        recorder = RoundedWeights(None, 0)
        integers = arrays["integers"]
        scale = arrays["scale"]
        if integers.shape != (np.prod(self.shape),) or scale.shape != (self.scale_count,):
            raise CalibrationError("stored integers must be as many as the weights and are not")
        recorder.integers = np.array(integers, np.int8).reshape(self.shape)
        recorder.scale = np.array(scale, np.float32)
        return recorder


class RoundedWeights:
    """Recorder of a layer's inputs at sampled positions, then of its rounded weights.

    Attributes:
        integers: the weights, int8 [G, M, K]; None until they are rounded.
        scale: their scales, float32 [C] or [1].
    """

    def __init__(self, window: ConvWindow | None, max_positions: int) -> None:
        self.integers: Int8Array | None = None
        self.scale: Float32Array = np.zeros(0, np.float32)
        self._window = window
        self._max_positions = max_positions
        self._sample_number = 0
        self._chunks: list[Float32Array] = []

    def observe(self, x: RealArray) -> None:
        """Add the patches at sampled positions of a sample."""
        value = check_values(x, "input of a layer that AdaRound rounds")
        self._sample_number += 1
        patches = extract_patches(value, self._window, self._sample_number, self._max_positions)
        self._chunks.append(patches)

    def take_patches(self) -> Float32Array:
        """Return all patches, [P, G, K], and drop them here."""
        chunks = self._chunks
        self._chunks = []
        return np.ascontiguousarray(np.concatenate(chunks, axis=2).transpose(2, 0, 1))

    def to_arrays(self) -> Arrays:
        """Return the integers and scales; {} before there are any."""
        if self.integers is None:
            return {}
        return {"integers": self.integers.reshape(-1), "scale": self.scale}
