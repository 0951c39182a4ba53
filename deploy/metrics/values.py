"""Rows of values that are no scores of classes: a regression's, or the best few of some."""

from __future__ import annotations

import numpy as np

from deploy.metrics.rows import Outputs
from deploy.metrics.whole import add_up
from deploy.tensors import Array

_SHARE = 1.01  # a share is not above 1, but for rounding
_PLACE = 4  # bytes, at least, of a place
_BETWEEN = 0.5  # share of values between 0.1 and 0.9, at least, of places in a picture


def are_values(scores: Array, batch: int) -> bool:
    """Whether [N, C] may be a regression's: all above 0, and in each row one above 1.

    Or all from 0 to 1, as places in shares of a picture: of no sum of 1, and most not near 0 or 1.
    Scores of classes have both signs, logarithms of shares are below 0, and shares are not above 1.
    """
    rows = scores.reshape(batch, -1)
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return False
    if rows.min() > 0 and rows.max(axis=1).min() > _SHARE:
        return True
    between = np.mean((rows > 0.1) & (rows < 0.9), axis=1).min() >= _BETWEEN
    whole = add_up(rows).any()
    return bool(rows.min() >= 0 and rows.max() <= _SHARE and between and not whole)


def is_floating(value: Array) -> bool:
    """Whether it holds finite numbers of a float type."""
    return bool(np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())


def are_ranked(scores: Array, batch: int) -> bool:
    """Whether each row of [N, C], three or more, falls from its first to its last, as TopK's do."""
    rows = scores.reshape(batch, -1)
    return bool(rows.shape[1] > 2 and (np.diff(rows, axis=1) <= 0).all())


def are_places(numbers: Array, batch: int) -> bool:
    """Whether each row of [N, k] whole numbers may be TopK's places: none below 0, none twice."""
    if numbers.dtype.kind not in "iu" or numbers.dtype.itemsize < _PLACE or numbers.ndim < 2:
        return False
    if numbers.shape[0] != batch or not 0 < numbers.size == batch * numbers.shape[1]:
        return False
    rows = np.sort(numbers.reshape(batch, -1), axis=1)
    return bool(rows.min() >= 0 and (np.diff(rows, axis=1) > 0).all())


def places_of(outputs: Outputs, name: str, batch: int) -> str | None:
    """The one of an output and another that holds the places of the other's values, as TopK's."""
    for other, value in outputs.items():
        for values, places in ((name, other), (other, name)):
            if value.shape == outputs[name].shape and _pair(
                outputs[values], outputs[places], batch
            ):
                return places
    return None


def _pair(values: Array, places: Array, batch: int) -> bool:
    if values.dtype.kind != "f" or places.dtype.kind not in "iu" or 0 in (values.ndim, values.size):
        return False
    if values.size == batch == places.shape[0]:  # a maximum and its place
        return places.dtype.itemsize >= _PLACE
    falls = bool((np.diff(values.reshape(batch, -1), axis=1) <= 0).all())
    return falls and are_places(places, batch)
