"""Figures of pairs of tensors, sample by sample, in flat memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deploy.metrics.accuracy import OutputAccuracy, TensorComparison
from deploy.tensors import Array

Figures = dict[str, OutputAccuracy]


class Sums:
    """Figures of the pairs that hold floats, sample by sample."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = dict(pairs)
        self._sums: TensorComparison | None = None

    def add(
        self, sample: Mapping[str, Array], left: Mapping[str, Array], right: Mapping[str, Array]
    ) -> None:
        """Add one sample: tensors of the first model and of the second by their own names."""
        if self._sums is None:
            floats = {
                name: other
                for name, other in self._pairs.items()
                if np.issubdtype(left[name].dtype, np.floating)
            }
            self._pairs = floats
            if floats:
                self._sums = TensorComparison(floats)
        if self._sums is not None:
            self._sums.add(sample, left, right)

    def result(self) -> Figures:
        """The figures of every pair that holds floats."""
        if self._sums is None:
            return {}
        return dict(zip(self._pairs, self._sums.result(), strict=True))
