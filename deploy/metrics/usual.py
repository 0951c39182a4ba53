"""What a model always says, where what it says of a sample is little beside that.

An age, a temperature or a score of quality is some usual number plus what the sample moves it by.
To say the usual number whatever is fed would be good by the output's SQNR, though nothing of the
model is left::

    said always, dB          10 log10(sum r^2 / sum (r - mean)^2)        where it is good, then
    left of what varies, dB  10 log10(sum (r - mean)^2 / sum (r - c)^2)

So it is of a few numbers, each of which is read. Many stand for something together; scores of
classes, or features, that hardly vary are those of a network that is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deploy.metrics.changes import GIVEN_BACK_DB, ROUNDING_DB
from deploy.metrics.output_errors import sqnr_db
from deploy.tensors import Array

USUAL = "its mean"
_FEW = 32  # numbers that are read one by one


def usual_of(samples: Sequence[Array]) -> Array | None:
    """The mean of a few numbers a sample that vary little beside it; None of other outputs."""
    first = samples[0]
    if len(samples) < 2 or not 0 < first.size <= _FEW or first.size != max(first.shape, default=0):
        return None
    if any(one.shape != first.shape or not _is_numbers(one) for one in samples):
        return None
    values = np.stack(samples).astype(np.float64)
    if values.min() >= 0 and values.max() <= 1:  # probabilities: near 1 nothing tells them apart
        return None
    mean = values.mean(axis=0)
    signal, varies = float(np.square(values).sum()), float(np.square(values - mean).sum())
    if varies > 0 and GIVEN_BACK_DB <= sqnr_db(signal, varies) <= ROUNDING_DB:
        return np.asarray(mean, np.float32)
    return None


def less_usual(value: Array, usual: Array) -> Array:
    """What a sample moves it by; a value of another shape as it is."""
    if value.shape[1:] != usual.shape[1:]:
        return value
    return np.asarray(np.subtract(value, usual, dtype=np.float32))


def _is_numbers(value: Array) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())
