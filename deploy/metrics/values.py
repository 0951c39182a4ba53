"""Rows of a few values that are no scores of classes: a regression's, or the best few of some."""

from __future__ import annotations

import numpy as np

from deploy.tensors import Array

_FEW = 32  # as of `deploy.metrics.tasks.classes`
_SHARE = 1.01  # a share is not above 1, but for rounding


def are_values(scores: Array, batch: int) -> bool:
    """Whether [N, C] may be a regression's: few, all above 0, and in each row one above 1.

    Scores of classes have both signs, logarithms of shares are below 0, and shares are not above 1.
    """
    rows = scores.reshape(batch, -1)
    if not 2 <= rows.shape[1] < _FEW or not np.isfinite(rows).all():
        return False
    return bool(rows.min() > 0 and rows.max(axis=1).min() > _SHARE)


def are_ranked(scores: Array, batch: int) -> bool:
    """Whether each row of [N, C], three or more, falls from its first to its last, as TopK's do."""
    rows = scores.reshape(batch, -1)
    return bool(rows.shape[1] > 2 and (np.diff(rows, axis=1) <= 0).all())
