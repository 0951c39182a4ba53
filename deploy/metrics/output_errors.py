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
from dataclasses import dataclass, field, fields, is_dataclass, replace

import cv2
import numpy as np

from deploy.tasks.rows import Arrays, Floats, Outputs, are_in_unit_range, are_undecided, is_floating
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

# fields of figures, here and in `deploy.metrics.accuracy`, that report.json leaves out
NOT_WRITTEN = ("zeros", "empty", "alike", "silent", "carried", "label_shift", "label_order")
_BLOCK = 1 << 13  # values of a row summed at a time; for more, BLAS wakes its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAccuracy:
    """Errors of one output (or inner tensor) of the candidate against the reference's.

    Attributes:
        name: name of the output.
        sqnr_db: signal to quantization noise ratio; inf if both are equal, NaN if not finite.
        cosine_mean: mean of the samples' cosines; if a sample has a single value, the cosine over
            all samples.
        cosine_min: minimum of the samples' cosines, or the cosine over all samples.
        max_abs_error: largest absolute difference of any element, in the tensor's own unit.
        not_finite: number of samples with NaN or Inf (in the reference, in the candidate).
        other_shape: number of samples whose shapes differ, as the number of detections may.
        zeros: whether all values of both are 0, so that equality means nothing.
        empty: whether neither model's output had a value in any sample.
    """

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    not_finite: tuple[int, int] = (0, 0)
    other_shape: int = 0
    zeros: bool = False
    empty: bool = False


@dataclass(slots=True)
class RunningError:
    """Running sums of one output, in constant memory. A row is the values of one sample, flat.

    Attributes:
        name: name of the output.
        reference_sum: sum of the reference's rows, [1] or [values], if only what varies about their
            mean is signal; else None.
        sums: [4], the sums of `_pair_sums` over all rows.
        max_values: largest number of values of a row.
        cosine_sum: sum of the rows' cosines.
        cosine_min: least cosine of a row.
        samples: number of rows that were summed.
        max_error: largest absolute difference.
        not_finite: number of rows with NaN or Inf in the reference, in the candidate.
        other_shape: number of samples whose shapes differ.
        empty: number of samples without values.
    """

    name: str
    reference_sum: Floats | None = None
    sums: Floats = field(default_factory=lambda: np.zeros(4))
    max_values: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = math.inf
    samples: int = 0
    max_error: float = 0.0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    other_shape: int = 0
    empty: int = 0

    def add(self, reference: Array, candidate: Array) -> None:
        """Add a sample to the sums.

        A sample of two shapes, without values, or with NaN or Inf is not summed; it is only counted
        in `other_shape`, `empty` or `not_finite`.
        """
        if reference.shape != candidate.shape:
            self.other_shape += 1
            return
        if reference.size == 0:  # neither model detected anything
            self.empty += 1
            return
        reference = reference.reshape(-1)
        candidate = candidate.reshape(-1)
        sample_sums, max_error = _pair_sums(reference, candidate)
        if not np.isfinite(sample_sums).all():
            is_reference_finite = np.isfinite(reference).all()
            is_candidate_finite = np.isfinite(candidate).all()
            self.not_finite[0] += not is_reference_finite
            self.not_finite[1] += not is_candidate_finite
            if not is_reference_finite or not is_candidate_finite:
                return
            # else only squares of values overflow, so it is summed: figures become Inf or NaN
        self.sums += sample_sums
        # None: the sum is not wanted. It is a single 0 before the first sample, and has that
        # sample's size after it; samples of another size are left out of it
        if self.reference_sum is not None and self.reference_sum.size in (1, reference.size):
            self.reference_sum = self.reference_sum + reference.astype(np.float64)
        self.max_values = max(self.max_values, reference.size)
        self.max_error = max(self.max_error, max_error)
        sample_cosine = _cosine(sample_sums)
        self.cosine_sum += sample_cosine
        self.cosine_min = min(self.cosine_min, sample_cosine)
        self.samples += 1

    def result(self) -> OutputAccuracy:
        """Return the figures so far.

        They are NaN if any sample held NaN or Inf or differed in shape, and without any sample.
        """
        figures = OutputAccuracy(
            name=self.name,
            sqnr_db=math.nan,
            cosine_mean=math.nan,
            cosine_min=math.nan,
            max_abs_error=math.nan,
            not_finite=(self.not_finite[0], self.not_finite[1]),
            other_shape=self.other_shape,
        )
        has_samples = self.samples or self.empty  # a sample without values is only in `empty`
        if any(self.not_finite) or self.other_shape or not has_samples:
            return figures

        signal, _, _, noise = self.sums.tolist()  # of `_pair_sums`: of r^2 and of (r - c)^2
        is_zero = signal == noise == 0
        if self.reference_sum is not None:
            # sum r^2 - (sum r)^2 / n: only the deviation from the mean; n is 0 if all were empty
            signal -= float(np.square(self.reference_sum).sum()) / max(self.samples, 1)
        # if samples are single values, a cosine of each would only show its sign: then there is one
        # cosine over all samples
        cosine_mean = cosine_min = _cosine(self.sums)
        if self.max_values > 1:
            cosine_mean = self.cosine_sum / self.samples
            cosine_min = self.cosine_min
        return replace(
            figures,
            sqnr_db=sqnr_db(signal, noise),
            cosine_mean=cosine_mean,
            cosine_min=cosine_min,
            max_abs_error=self.max_error,
            zeros=is_zero,
            empty=self.samples == 0,
        )


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf for noise on a signal of zeros."""
    if noise == 0:
        return math.inf
    if signal > 0:
        return 10 * math.log10(signal / noise)
    return -math.inf


def sqnr_sort_key(decibels: float) -> float:
    """Return a sort key: the lowest SQNR first, NaN before all."""
    return -math.inf if math.isnan(decibels) else decibels


def cosine(reference: Array, candidate: Array) -> float:
    """Cosine of two tensors of one size, in float64; 1 if both are zero, 0 if only one is."""
    sums, _ = _pair_sums(np.asarray(reference).reshape(-1), np.asarray(candidate).reshape(-1))
    return _cosine(sums)


def _pair_sums(reference: Array, candidate: Array) -> tuple[Floats, float]:
    """Return (sums over two flat rows, their largest absolute difference), in float64.

    The sums, [4], are those of the reference's squares, the candidate's squares, the products, and
    the squared differences. They are added up block by block; a block fits a core's cache.
    """
    sums = np.zeros(4)
    max_error = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, reference.size, _BLOCK):
            expected = reference[start : start + _BLOCK].astype(np.float64)
            actual = candidate[start : start + _BLOCK].astype(np.float64)
            error = expected - actual
            sums += (expected @ expected, actual @ actual, expected @ actual, error @ error)
            max_error = max(max_error, float(np.abs(error, out=error).max()))
    return sums, max_error


def _cosine(sums: Floats) -> float:
    """Cosine from the sums of `_pair_sums`; 1 if both are zero, 0 if only one is."""
    reference, candidate, product, _ = map(float, sums)
    norms = math.sqrt(reference) * math.sqrt(candidate)
    if norms == 0:
        return float(reference == candidate)
    return min(max(product / norms, -1.0), 1.0)


def plain_json(value: object) -> object:
    """Return figures as plain JSON types.

    A dataclass becomes an object, without the fields that report.json leaves out; infinity and NaN
    become the texts "inf" and "nan".
    """
    if is_dataclass(value):
        names = [item.name for item in fields(value) if item.name not in NOT_WRITTEN]
        return {name: plain_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


_PICTURE_DIMENSIONS = 4
_MAX_SCALE = 16  # of super resolution
_MAX_CHANNELS = 512  # that cv2 resizes
GIVEN_BACK_DB = 15.0  # SQNR of the bare input or mean from which it would be judged good
ROUNDING_DB = 60.0  # from here on the change is only rounding
LEFT_DB = 5.0  # SQNR of the change below which it is mostly noise
_RESIZES = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "cubic": cv2.INTER_CUBIC,
}


def find_change(output: str, samples: Arrays, inputs: Sequence[Outputs]) -> OutputSlice | None:
    """Return the change of an input that an output repeats in all samples; None if it repeats none.

    A denoiser or an upscaler does so: its input, perhaps resized, has a good SQNR against the
    output already. Of several inputs and interpolations, the pair with the smallest change counts.

    Args:
        output: name of the output.
        samples: the output's array of each sample.
        inputs: the inputs of the same samples, by name.
    """
    best_db = 0.0
    change = None
    for name in inputs[0]:
        for resize in ("", *_RESIZES):
            db = _unchanged_input_db(samples, [sample[name] for sample in inputs], resize)
            if db > best_db:
                best_db = db
                change = OutputSlice(output, subtracted=name, resize=resize)
    # the input is another signal than the output, or differs from it by rounding alone
    if best_db < GIVEN_BACK_DB or best_db > ROUNDING_DB:
        return None
    return change


def _unchanged_input_db(outputs: Arrays, inputs: Arrays, resize: str) -> float:
    """Return the SQNR in dB of a model that would give its input back unchanged.

    0 for an input that does not fit the output, and for one that the output equals.

    Args:
        outputs: output of each sample.
        inputs: input of each sample.
        resize: interpolation, as for `enlarge_input`.
    """
    error = RunningError("unchanged input")
    for output, source in zip(outputs, inputs, strict=False):
        has_floats = output.dtype.kind == source.dtype.kind == "f"
        if output.ndim < _PICTURE_DIMENSIONS or not has_floats:
            return 0.0
        enlarged_input = enlarge_input(source, output.shape, resize)
        if enlarged_input is None:
            return 0.0
        error.add(output, enlarged_input)
    db = error.result().sqnr_db
    return 0.0 if db == math.inf else db


def subtract_input(value: Array, source: Array, resize: str) -> Array:
    """Subtract the input from an output; an output of another shape is returned unchanged."""
    enlarged_input = enlarge_input(source, value.shape, resize)
    if enlarged_input is None:
        return value
    return np.subtract(value, enlarged_input, dtype=np.float32)


def enlarge_input(source: Array, shape: tuple[int, ...], resize: str) -> Array | None:
    """Return the input resized to the shape of an output.

    Args:
        source: the input of one sample, [1, C, H, W] or [1, H, W, C].
        shape: shape of the output.
        resize: interpolation, of `_RESIZES`; "" for an input that already has the shape.

    Returns:
        The enlarged input; None if no whole scale from 2 to 16 gives the shape.
    """
    if not resize:
        return source if source.shape == shape else None
    are_pictures = source.ndim == len(shape) == _PICTURE_DIMENSIONS
    if not are_pictures or len(source) != 1 or not source.size:
        return None

    has_channels_last = source.shape[3] == shape[3] and source.shape[1] != shape[1]
    channel_axis = 3 if has_channels_last else 1
    channels = source.shape[channel_axis]
    scale = shape[2] // source.shape[2]  # of the height or the width
    expected_shape = [scale * side for side in source.shape]
    expected_shape[0] = 1
    expected_shape[channel_axis] = channels
    if [*shape] != expected_shape or not 2 <= scale <= _MAX_SCALE or channels > _MAX_CHANNELS:
        return None

    picture = np.moveaxis(source.astype(np.float64), channel_axis, 3)[0]
    enlarged_picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=_RESIZES[resize])
    # cv2 drops a single channel
    planes = enlarged_picture.reshape(1, *enlarged_picture.shape[:2], channels)
    return np.asarray(np.moveaxis(planes, 3, channel_axis))


SAMPLE_MEAN = "its mean"  # `OutputSlice.subtracted`: the mean over samples
FEW = 32  # values per sample, at most, that are meaningful one by one
_MIN_MEAN_DB = 3.0  # SQNR of their mean from which only what deviates from it counts


def find_usual_values(samples: Arrays) -> Array | None:
    """Return the mean over samples [1, ...], if the values vary little about it; else None.

    They vary little if the mean's squares are most of the sum of all squares, the signal. Then even
    a model that always gives the mean would have a good SQNR, so the caller measures the deviation
    from the mean. None for a single sample too: it does not deviate from its own mean.
    """
    shape = samples[0].shape
    if any(value.shape != shape or not is_floating(value) for value in samples):
        return None
    values = np.stack(samples)
    if are_in_unit_range(values) and not are_undecided(values).all():
        return None  # probabilities near 0 or 1 vary little too, but their value counts
    return find_large_mean(values, weights=np.ones_like(values))


def find_large_mean(values: Array, weights: Array) -> Array | None:
    """Return the weighted mean over the rows, if most of the signal is in it; else None.

    Both arrays are [rows, ...]; the mean is a float32 array of one row's shape.
    """
    exact_values = values.astype(np.float64)
    exact_weights = weights.astype(np.float64)
    # where all weights are 0, any mean will do
    mean = np.average(exact_values, axis=0, weights=exact_weights + 1e-30)
    signal = float(np.vdot(exact_weights, np.square(exact_values)))
    deviation = float(np.vdot(exact_weights, np.square(exact_values - mean)))
    if deviation <= 0 or not _MIN_MEAN_DB <= sqnr_db(signal, deviation) <= ROUNDING_DB:
        return None
    return np.asarray(mean, np.float32)


def subtract_mean(value: Array, mean: Array) -> Array:
    """Return values minus the mean, or unchanged if their shape differs from the mean's.

    `mean`: [1, ...] as of one sample, or a single number.
    """
    if value.shape[1:] != mean.shape[1:] and mean.size > 1:
        return value
    return np.subtract(value, mean).astype(value.dtype)
