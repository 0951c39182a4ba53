"""Figures of pairs of tensors, sample by sample, in flat memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from deploy.metrics.accuracy import TensorComparison
from deploy.metrics.output_errors import OutputAccuracy
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
                if name in left
                and other in right  # a sequence or a map is in neither
                and np.issubdtype(left[name].dtype, np.floating)
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
        figures = zip(self._pairs, self._sums.result(), strict=True)
        return {name: one for name, one in figures if not _empty(one)}


def _empty(one: OutputAccuracy) -> bool:
    """Whether a tensor held no value in any sample, so that it cannot differ."""
    return math.isnan(one.sqnr_db) and not any(one.not_finite) and not one.other_shape
