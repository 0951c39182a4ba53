"""Shares of a whole: probabilities of which one alone is true."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deploy.tensors import Array

_ROUNDING = 1e-2  # what float16 and thousands of classes take from a sum
_LEAST = -1e-4  # what rounding and resizing take from a share of 0


def add_up(values: Array, axis: int = -1) -> NDArray[np.bool_]:
    """Where the sum along an axis is 1, but for rounding."""
    return np.asarray(np.abs(values.sum(axis=axis, dtype=np.float64) - 1) < _ROUNDING)


def are_shares(values: Array, axis: int = -1) -> bool:
    """Whether values along an axis are shares of a whole, wherever it is looked."""
    return bool(values.min() >= _LEAST and add_up(values, axis).all())


def are_shares_or_logarithms(values: Array) -> bool:
    """Whether the last axis holds shares of a whole, or their logarithms."""
    logarithms = values.min() < _LEAST
    exact = values.astype(np.float64, copy=False)
    return are_shares(np.exp(np.minimum(exact, 1)) if logarithms else exact)
