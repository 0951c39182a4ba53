"""Whether rows of numbers lie higher in one sample and lower in another, as no scores do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deploy.tensors import Array


@dataclass(slots=True)
class Means:
    """Running sums of the means and the deviations of rows [N, C].

    Training moves some scores of classes up and others down, so that a row's mean hardly changes.
    What a series goes on with, or a place, lies higher in one sample and lower in another.
    """

    rows: int = 0
    mean: float = 0.0
    squares: float = 0.0
    within: float = 0.0

    def add(self, scores: Array, batch: int) -> None:
        """Add the rows of a batch; numbers of classes, and what is not finite, tell nothing."""
        rows = scores.reshape(batch, -1).astype(np.float64)
        if rows.shape[1] < 2 or not np.isfinite(rows).all():
            return
        means = rows.mean(axis=1)
        before, self.rows = self.rows, self.rows + batch
        moved = float(means.mean()) - self.mean
        self.mean += moved * batch / self.rows
        self.squares += float(means.var()) * batch + moved**2 * before * batch / self.rows
        self.within += float(rows.std(axis=1).sum())

    @property
    def wander(self) -> bool:
        """Whether rows differ in their mean more than values do within a row."""
        return self.rows > 0 and math.sqrt(self.squares / self.rows) > self.within / self.rows
