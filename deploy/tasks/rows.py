"""Rows of batches: splitting a batch into samples, and tests on rows of values.

The tests derive what values mean: probabilities that sum to 1, raw scores.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.thresholds import (
    HIGH,
    LOW,
    MAX_LOGIT_DRIFT,
    MAX_TANH,
    MIN_VARIATION,
    SUM_ROUNDING,
    UNIT_TOLERANCE,
)
from deploy.tensors import Array

Outputs = Mapping[str, Array]
Arrays = Sequence[Array]  # of one output, one a sample
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
ImageSize = tuple[int, int]  # height and width in pixels
_MIN_INDEX_BYTES = 4
# columns of a list of boxes with the number of the image, and of NonMaxSuppression's indices
_NUMBERED_WIDTHS = 7, 3


def batch_length(feed: Outputs, batch_inputs: Collection[str] | None) -> int:
    """Return the number of samples in a feed: the rows of its first input that has some.

    `batch_inputs`: inputs each of whose rows is one sample; None takes the first input.
    """
    names = feed if batch_inputs is None else [name for name in feed if name in batch_inputs]
    first = next((feed[name] for name in names), None)
    if first is not None and np.ndim(first):
        return int(first.shape[0])
    return 1


def split_batch(arrays: Outputs, batch: int) -> list[dict[str, Array]]:
    """Split arrays of a batch into arrays of one sample each, with a batch of 1.

    The batch is the first dimension, or the second of sequences [T, N, C]. A list may have the
    number of the sample in its first column. Any other array belongs to every sample as a whole.
    """
    samples = []
    for index in range(batch):
        rows = {name: _take_row(np.asarray(value), index, batch) for name, value in arrays.items()}
        samples.append(rows)
    return samples


def split_batches(batch: int, *arrays: Outputs) -> Iterator[tuple[dict[str, Array], ...]]:
    """Yield what several mappings of arrays of a batch hold for each sample; see `split_batch`."""
    samples_by_mapping = [split_batch(mapping, batch) for mapping in arrays]
    return zip(*samples_by_mapping, strict=True)


def _take_row(value: Array, index: int, batch: int) -> Array:
    """Return what an array of a batch holds for one sample; all of it if it has no batch."""
    if value.ndim > 0 and value.shape[0] == batch:
        return value[index : index + 1]
    if value.ndim > 2 and value.shape[1] == batch:
        return value[:, index : index + 1]
    if value.ndim == 2 and value.shape[1] in _NUMBERED_WIDTHS:
        sample_numbers = value[:, 0]
        if np.isin(sample_numbers, range(batch)).all():
            return np.asarray(value[sample_numbers == index])
    return value


@dataclass(slots=True)
class AlikeOutputs:
    """Whether FP32's outputs hardly differ from the first sample's.

    Attributes:
        alike: whether they do so far.
        has_floats: whether one of them is floating-point.
    """

    alike: bool = True
    has_floats: bool = False
    _first_sample: Outputs = field(default_factory=dict)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; nothing is computed once a sample differs."""
        if not self.alike:
            return
        self._first_sample = self._first_sample or reference
        for name, value in reference.items():
            self.has_floats |= is_floating(value)
            self.alike &= _is_alike(self._first_sample[name], value)


def _is_alike(first_value: Array, value: Array) -> bool:
    """Whether an output hardly differs from the first sample's; False for NaN and Inf."""
    if first_value.shape != value.shape:
        return False
    exact = first_value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        change = np.linalg.norm(exact - value)
    return bool(change <= MIN_VARIATION * np.linalg.norm(exact))


def image_size(feed: Outputs) -> ImageSize | None:
    """Return (height, width) in pixels of the first 4-D input; None without one."""
    for value in feed.values():
        if value.ndim == 4:
            channels_last = value.shape[3] in (1, 3, 4) and value.shape[1] not in (1, 3, 4)
            height, width = value.shape[1:3] if channels_last else value.shape[2:4]
            return int(height), int(width)
    return None


def is_floating(value: Array) -> bool:
    """Whether an array is floating-point and finite."""
    return bool(np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())


def is_vector(value: Array) -> bool:
    """Whether a sample has one vector, or a scalar: at most one dimension is longer than 1."""
    return value.size == max(value.shape, default=1)


def are_comparable(reference: Array, candidate: Array) -> bool:
    """Whether the candidate's array has the reference's shape, and finite numbers."""
    return reference.shape == candidate.shape and bool(np.isfinite(candidate).all())


def are_in_unit_range(values: Array) -> bool:
    """Whether there are values, and all lie from 0 to 1 but for rounding."""
    return bool(
        values.size and values.min() >= -UNIT_TOLERANCE and values.max() <= 1 + UNIT_TOLERANCE
    )


def sums_to_one(values: Array, axis: int = -1) -> Flags:
    """Return where the sum along an axis is 1, within rounding."""
    sums = values.sum(axis=axis, dtype=np.float64)
    return np.asarray(np.abs(sums - 1) < SUM_ROUNDING)


def are_probabilities(values: Array, axis: int = -1) -> bool:
    """Whether values along an axis are probabilities that sum to 1, everywhere."""
    is_positive = values.min() >= -UNIT_TOLERANCE
    return bool(is_positive and sums_to_one(values, axis).all())


def are_probabilities_or_logs(values: Array) -> bool:
    """Whether the last axis holds probabilities that sum to 1, or their logarithms."""
    if are_probabilities(values):
        return True
    exact = values.astype(np.float64, copy=False)
    return (values.min() < 0) and are_probabilities(np.exp(np.minimum(exact, 1)))


def may_be_logits(scores: Array, axis: int) -> bool:
    """Whether scores may be in front of a Softmax: they differ among themselves, not in their mean.

    Training raises one of them and lowers the others. They exceed the range of a Tanh, [-1, 1].

    `axis`: dimension of the classes.
    """
    leaves_tanh = np.abs(scores).max() > MAX_TANH
    if not leaves_tanh or not scores.min() < 0 < scores.max():
        return False
    mean = scores.mean(axis=axis, dtype=np.float64)
    spread = scores.std(axis=axis, dtype=np.float64)
    return bool(mean.std() < MAX_LOGIT_DRIFT * spread.mean())


def are_undecided(shares: Array) -> Flags:
    """Return where probabilities are near neither 0 nor 1."""
    return (shares > LOW) & (shares < HIGH)


def correlate(x_values: Array, y_values: Array) -> float:
    """Return the correlation of two vectors, in float64; 0 if one is constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.corrcoef(x_values, y_values)[0, 1]
    return float(np.nan_to_num(correlation))


def order_by_step(rows: Array, step: int) -> float:
    """Return the mean correlation of the numbers of vectors [n, D] with those `step` places before.

    Neighbours of a signal are alike (1 place), and so are those of points in an order (2 or 3).
    """
    return float(np.mean([correlate(row[step:], row[:-step]) for row in rows]))


def missing_sigmoid(scores: Array) -> str:
    """Return "sigmoid" for scores that leave 0 to 1, and so lack it; else ""."""
    return "" if are_in_unit_range(scores) else "sigmoid"


def activate(scores: Array, activation: str, axis: int = -1) -> Array:
    """Return probabilities: scores after "sigmoid" or, along an axis, "softmax"; "" for as is."""
    with np.errstate(invalid="ignore", over="ignore"):
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-scores))
        if activation == "softmax":
            power = np.exp(scores - scores.max(axis=axis, keepdims=True))
            return np.asarray(power / power.sum(axis=axis, keepdims=True))
    return scores


def is_index_type(numbers: Array) -> bool:
    """Whether it is of int32, int64 or the like: smaller types are quantized values."""
    return numbers.dtype.kind in "iu" and numbers.dtype.itemsize >= _MIN_INDEX_BYTES
