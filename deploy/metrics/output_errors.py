"""Errors of one output: running sums over pairs of arrays.

Over all samples of an output, with r the reference and c the candidate, in float64::

    SQNR dB = 10 log10(sum r^2 / sum (r - c)^2)       cosine = <r, c> / (|r| |c|), per sample

A single value has only a sign for a direction, so an output with one value per sample gets one
cosine over all samples' values. NaN and Inf are never averaged away: an output that holds one, or
whose shape differs, has NaN for SQNR, cosine and error.

Two kinds of outputs have a good SQNR even if the candidate computes nothing.

An image filter's output (denoising, watermark, super resolution) is its input, perhaps resized,
plus a small change. Returning the input x would have a good SQNR, so the change is measured::

    input given back, dB     10 log10(sum r^2 / sum (r - x)^2)          if good, then
    left of the change, dB   10 log10(sum (r - x)^2 / sum (r - c)^2)

A regression's output (age, temperature, quality score) is its mean plus a small deviation.
Returning the mean would have a good SQNR, so the deviation is measured too::

    mean only, dB            10 log10(sum r^2 / sum (r - mean)^2)       from 3 dB on
    left of what varies, dB  10 log10(sum (r - mean)^2 / sum (r - c)^2)

The mean is only used for outputs of a few numbers, each meaningful by itself. Scores or features
that hardly vary come from a network that is not trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import NamedTuple

import cv2
import numpy as np

from deploy.tasks.rows import Outputs, are_relative, is_floating
from deploy.tensors import Array

_NOT_WRITTEN = ("zeros", "empty")  # fields that JSON leaves out
_BLOCK = 1 << 13  # values of a row summed at a time; for more, BLAS wakes its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAccuracy:
    """Errors of one output (or inner tensor) of the candidate against the reference's."""

    name: str
    sqnr_db: float  # signal to quantization noise ratio; inf if both are equal, NaN if not finite
    # cosine_mean, cosine_min: mean and minimum of the samples' cosines; the cosine over all samples
    # if each has one value
    cosine_mean: float
    cosine_min: float
    max_abs_error: float  # largest absolute difference of any element, in the tensor's own unit
    # number of samples with NaN or Inf (in the reference, in the candidate)
    not_finite: tuple[int, int] = (0, 0)
    other_shape: int = 0  # number of samples whose shapes differ (such as the number of detections)
    zeros: bool = False  # whether all values of both are 0, so that equality means nothing
    empty: bool = False  # whether neither had a value in any sample


@dataclass(slots=True)
class RunningError:
    """Running sums of one output, in O(1) memory."""

    name: str
    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    longest: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = math.inf
    samples: int = 0
    max_abs: float = 0.0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    other_shape: int = 0
    empty: int = 0
    # sum of the rows, where only what deviates from their mean is signal
    total: Array | None = None

    def add(self, reference: Array, candidate: Array, batch: int) -> None:
        """Add one batch, row by row."""
        left, right = np.asarray(reference), np.asarray(candidate)
        if left.shape != right.shape:
            self.other_shape += batch
            return
        if left.size == 0:  # nothing detected in this sample, by both
            self.empty += batch
            return
        for one, other in zip(_rows(left, batch), _rows(right, batch), strict=True):
            self._add_row(one, other)

    def _add_row(self, left: Array, right: Array) -> None:
        sums = _Sums.of(left, right)
        if not sums.finite:
            self.not_finite[0] += not np.isfinite(left).all()
            self.not_finite[1] += not np.isfinite(right).all()
            if not (np.isfinite(left).all() and np.isfinite(right).all()):
                return
        self.signal += sums.left
        if self.total is not None and self.total.size in (1, left.size):
            self.total = self.total + left.astype(np.float64)
        self.other += sums.right
        self.product += sums.product
        self.longest = max(self.longest, left.size)
        self.noise += sums.difference
        self.max_abs = max(self.max_abs, sums.largest)
        self.cosine_sum += sums.cosine
        self.cosine_min = min(self.cosine_min, sums.cosine)
        self.samples += 1

    def result(self) -> OutputAccuracy:
        """Return the figures so far."""
        nothing = self.samples == 0 and self.empty == 0
        broken = any(self.not_finite) or self.other_shape > 0 or nothing
        mean, minimum = (math.nan, math.nan) if broken else self._cosines()
        usual = 0.0 if self.total is None else float(np.square(self.total).sum())
        signal = self.signal - usual / max(self.samples, 1)
        return OutputAccuracy(
            name=self.name,
            sqnr_db=math.nan if broken else sqnr_db(signal, self.noise),
            cosine_mean=mean,
            cosine_min=minimum,
            max_abs_error=math.nan if broken else self.max_abs,
            not_finite=(self.not_finite[0], self.not_finite[1]),
            other_shape=self.other_shape,
            zeros=not broken and self.signal == self.noise == 0,
            empty=not broken and self.samples == 0,
        )

    def _cosines(self) -> tuple[float, float]:
        """Return their mean and minimum; of single values only the sign would count."""
        if self.longest > 1:
            return self.cosine_sum / self.samples, self.cosine_min
        overall = _cosine(self.signal, self.other, self.product)
        return overall, overall


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf for noise on a signal of zeros."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine(left: Array, right: Array) -> float:
    """Cosine of two tensors of one size, in float64; 1 if both are zero, 0 if only one is."""
    return _Sums.of(np.asarray(left).reshape(-1), np.asarray(right).reshape(-1)).cosine


@dataclass(frozen=True, slots=True)
class _Sums:
    """Products of two rows, summed in float64: each with itself, with the other, the difference."""

    left: float
    right: float
    product: float
    difference: float
    largest: float

    @classmethod
    def of(cls, left: Array, right: Array) -> _Sums:
        """Sum block by block, each of which fits a core's cache."""
        sums, largest = np.zeros(4), 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, left.size, _BLOCK):
                one = left[start : start + _BLOCK].astype(np.float64)
                other = right[start : start + _BLOCK].astype(np.float64)
                difference = one - other
                sums += (one @ one, other @ other, one @ other, difference @ difference)
                largest = max(largest, float(np.abs(difference, out=difference).max()))
        left_sum, right_sum, product, noise = (float(total) for total in sums)
        return cls(left_sum, right_sum, product, noise, largest)

    @property
    def finite(self) -> bool:
        """Whether neither row held NaN or Inf, nor overflowed."""
        return math.isfinite(self.left + self.right + self.difference)

    @property
    def cosine(self) -> float:
        return _cosine(self.left, self.right, self.product)


def _cosine(left: float, right: float, product: float) -> float:
    """Cosine from the sums of squares and products; 1 if both are zero, 0 if only one is."""
    norms = math.sqrt(left) * math.sqrt(right)
    return float(left == right) if norms == 0 else min(max(product / norms, -1.0), 1.0)


def _rows(value: Array, batch: int) -> Array:
    """Reshape [N, ...] to [N, values]; to one row if the first dimension is not the batch."""
    rows = batch if value.ndim > 0 and value.shape[0] == batch else 1
    return value.reshape(rows, -1)


def plain_json(value: object) -> object:
    """Return plain JSON types of figures: dataclasses, sequences and numbers."""
    if is_dataclass(value):
        names = (one.name for one in fields(value) if one.name not in _NOT_WRITTEN)
        return {name: plain_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [plain_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_PICTURE = 4  # dimensions of a picture
_MAX_SCALE = 16  # of super resolution
GIVEN_BACK_DB = 15.0  # SQNR of the bare input or mean from which it would be judged good
ROUNDING_DB = 60.0  # from here on the change is only rounding
LEFT_DB = 5.0  # SQNR of the change below which it is mostly noise
_RESIZES = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "cubic": cv2.INTER_CUBIC,
}


class RepeatedInput(NamedTuple):
    """The input that an output repeats with a small change.

    Attributes:
        name: name of the input.
        resize: interpolation that makes it as large as the output, of `_RESIZES`; "" if it is.
    """

    name: str
    resize: str = ""


def find_repeated_input(
    samples: Sequence[Array], inputs: Sequence[Outputs]
) -> RepeatedInput | None:
    """Return the input that an output repeats with a small change in all samples; or None.

    Of several interpolations the one that leaves the smallest change is returned.
    """
    best_db, best = 0.0, None
    for name in inputs[0] if inputs else ():
        for resize in ("", *_RESIZES):
            db = _given_back_db(samples, [sample[name] for sample in inputs], resize)
            if db > best_db:
                best_db, best = db, RepeatedInput(name, resize)
    return best if GIVEN_BACK_DB <= best_db <= ROUNDING_DB else None


def _given_back_db(samples: Sequence[Array], sources: Sequence[Array], resize: str) -> float:
    """Return the SQNR in dB that the bare input would have as output; 0 where it does not fit."""
    signal = change = 0.0
    for value, source in zip(samples, sources, strict=False):
        if value.ndim < _PICTURE or not np.issubdtype(source.dtype, np.floating):
            return 0.0
        if not np.issubdtype(value.dtype, np.floating):
            return 0.0
        enlarged = enlarge_input(source, value.shape, resize)
        if enlarged is None:
            return 0.0
        signal += float(np.square(value, dtype=np.float64).sum())
        change += float(np.square(np.subtract(value, enlarged, dtype=np.float64)).sum())
    return sqnr_db(signal, change) if change > 0 else 0.0


def subtract_input(value: Array, source: Array, resize: str = "") -> Array:
    """Subtract the input from an output; an output of another shape is returned unchanged."""
    enlarged = enlarge_input(source, value.shape, resize)
    return value if enlarged is None else np.subtract(value, enlarged, dtype=np.float32)


def enlarge_input(source: Array, shape: tuple[int, ...], resize: str) -> Array | None:
    """Return the input as large as an output; None if no whole scale up to 16 makes it so."""
    if not resize:
        return source if source.shape == shape else None
    if len(shape) != _PICTURE or source.ndim != _PICTURE or not source.size:
        return None
    channels_last = source.shape[3] == shape[3] and source.shape[1] != shape[1]
    height_axis = 1 if channels_last else 2
    scale, remainder = divmod(shape[height_axis], source.shape[height_axis])
    scaled = [*source.shape]
    scaled[height_axis] *= scale
    scaled[height_axis + 1] *= scale
    if remainder or not 2 <= scale <= _MAX_SCALE or tuple(scaled) != shape:
        return None

    channels_first = np.moveaxis(source, 3, 1) if channels_last else source
    height, width = shape[height_axis : height_axis + 2]
    planes = []
    for plane in channels_first.reshape(-1, *channels_first.shape[2:]).astype(np.float64):
        planes.append(cv2.resize(plane, (width, height), interpolation=_RESIZES[resize]))
    enlarged = np.stack(planes).reshape(*channels_first.shape[:2], height, width)
    return np.moveaxis(enlarged, 1, 3) if channels_last else enlarged


USUAL = "its mean"
FEW = 32  # values per sample, at most, that are meaningful one by one
_MIN_MEAN_DB = 3.0  # SQNR of their mean from which only what deviates from it counts


def find_usual_values(
    samples: Sequence[Array], max_values: float = FEW, weights: Sequence[Array] | None = None
) -> Array | None:
    """Return the mean over samples of a few numbers that deviate little from it; or None.

    `max_values`: numbers of a sample, at most. `weights`: of each number of each sample; 0 for one
    that is not used.
    """
    shape = samples[0].shape
    if len(samples) < 2 or not 0 < samples[0].size <= max_values:
        return None
    if any(value.shape != shape or not is_floating(value) for value in samples):
        return None
    values = np.stack(samples).astype(np.float64)
    if weights is not None:
        return _find_large_mean(values, np.stack(weights).astype(np.float64))
    in_unit = values.min() >= 0 and values.max() <= 1
    if in_unit and not are_relative(values.reshape(len(samples), -1)):
        return None  # probabilities near 1 deviate little anyway
    return _find_large_mean(values, np.ones_like(values))


def find_step_mean(samples: Sequence[Array], scores: Sequence[Array]) -> Array | None:
    """Return the mean of one value a step where scores are high, if it is large; else None."""
    for value, score in zip(samples, scores, strict=True):
        if value.size != max(value.shape) or value.size != score.size:
            return None
    values = np.concatenate([value.reshape(-1, 1) for value in samples])
    weights = np.concatenate([score.reshape(-1, 1) for score in scores])
    return _find_large_mean(values.astype(np.float64), weights.astype(np.float64))


def _find_large_mean(values: Array, weights: Array) -> Array | None:
    """Return the weighted mean over the rows, if most of the signal is in it; else None."""
    mean = (weights * values).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-30)
    signal = float(np.vdot(weights, np.square(values)))
    deviation = float(np.vdot(weights, np.square(values - mean)))
    if deviation <= 0 or not _MIN_MEAN_DB <= sqnr_db(signal, deviation) <= ROUNDING_DB:
        return None
    return np.asarray(mean, np.float32)


def subtract_usual(value: Array, mean: Array) -> None:
    """Subtract the mean from an output in place; an output of another shape stays unchanged."""
    if value.shape[1:] == mean.shape[1:] or mean.size == 1:
        np.subtract(value, mean, out=value, casting="unsafe")
