"""The error of one output (or of a part of it): running sums of pairs of arrays.

Over all samples of an output, with r the reference and c the candidate, in float64::

    SQNR dB = 10 log10(sum r^2 / sum (r - c)^2)       cosine = <r, c> / (|r| |c|), per sample

A single value has no direction but its sign: of an output of one value a sample the cosine is that
of all samples' values together.
NaN and Inf are never averaged away: an output that holds one, or whose shape differs, has no
SQNR, cosine or error (NaN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from deploy.tensors import Array

_BLOCK = 1 << 13  # values of a row that are summed at a time; for more, BLAS wakes its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAccuracy:
    """One output (or inner tensor) of the candidate against the reference's.

    Attributes:
        sqnr_db: signal to quantization noise; inf where both are equal, NaN where not finite.
        cosine_mean, cosine_min: cosine of each sample's values, over the samples; both that of all
            samples' values where each has one.
        max_abs_error: largest absolute difference of any element, in the tensor's own unit.
        not_finite: samples with NaN or Inf in the reference, in the candidate.
        other_shape: samples whose shapes differ (e.g. another number of detections).
        zeros: whether all values of both are 0, so that being equal says nothing.
    """

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    not_finite: tuple[int, int] = (0, 0)
    other_shape: int = 0
    zeros: bool = False


@dataclass(slots=True)
class RunningError:
    """Running sums of one output: O(1) memory, whatever the number of samples."""

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

    def add(self, reference: Array, candidate: Array, batch: int) -> None:
        """Add one batch, row by row."""
        left, right = np.asarray(reference), np.asarray(candidate)
        if left.shape != right.shape:
            self.other_shape += batch
            return
        if left.size == 0:  # nothing detected in this sample, by both
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
        self.other += sums.right
        self.product += sums.product
        self.longest = max(self.longest, left.size)
        self.noise += sums.difference
        self.max_abs = max(self.max_abs, sums.largest)
        self.cosine_sum += sums.cosine
        self.cosine_min = min(self.cosine_min, sums.cosine)
        self.samples += 1

    def result(self) -> OutputAccuracy:
        """The figures so far."""
        broken = any(self.not_finite) or self.other_shape > 0 or self.samples == 0
        mean, least = (math.nan, math.nan) if broken else self._cosines()
        return OutputAccuracy(
            name=self.name,
            sqnr_db=math.nan if broken else sqnr_db(self.signal, self.noise),
            cosine_mean=mean,
            cosine_min=least,
            max_abs_error=math.nan if broken else self.max_abs,
            not_finite=(self.not_finite[0], self.not_finite[1]),
            other_shape=self.other_shape,
            zeros=not broken and self.signal == self.noise == 0,
        )

    def _cosines(self) -> tuple[float, float]:
        """Their mean and the least; a single value's would be 1, however wrong it is."""
        if self.longest > 1:
            return self.cosine_sum / self.samples, self.cosine_min
        together = _cosine(self.signal, self.other, self.product)
        return together, together


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
        """A block of both at a time, while it is in a core's cache."""
        sums, largest = np.zeros(4), 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, left.size, _BLOCK):
                one = left[start : start + _BLOCK].astype(np.float64)
                other = right[start : start + _BLOCK].astype(np.float64)
                apart = one - other
                sums += (one @ one, other @ other, one @ other, apart @ apart)
                largest = max(largest, float(np.abs(apart, out=apart).max()))
        left_sum, right_sum, product, difference = (float(total) for total in sums)
        return cls(left_sum, right_sum, product, difference, largest)

    @property
    def finite(self) -> bool:
        """Whether neither row held NaN or Inf, nor overflowed."""
        return math.isfinite(self.left + self.right + self.difference)

    @property
    def cosine(self) -> float:
        """Of these rows."""
        return _cosine(self.left, self.right, self.product)


def _cosine(left: float, right: float, product: float) -> float:
    """From the sums of squares and products; 1 if both are zero, 0 if only one is."""
    norms = math.sqrt(left) * math.sqrt(right)
    if norms == 0:
        return float(left == right)
    return min(max(product / norms, -1.0), 1.0)


def _rows(value: Array, batch: int) -> Array:
    """[N, ...] -> [N, values]; one row where the first dimension is not the batch."""
    rows = batch if value.ndim > 0 and value.shape[0] == batch else 1
    return value.reshape(rows, -1)


def output_json(output: OutputAccuracy) -> dict[str, object]:
    """Plain JSON types."""
    return {
        "name": output.name,
        "sqnr_db": number(output.sqnr_db),
        "cosine_mean": number(output.cosine_mean),
        "cosine_min": number(output.cosine_min),
        "max_abs_error": number(output.max_abs_error),
        "not_finite": list(output.not_finite),
        "other_shape": output.other_shape,
    }


def number(value: float) -> float | str:
    """A number, or the word for one that JSON has none for."""
    return value if math.isfinite(value) else str(value)
