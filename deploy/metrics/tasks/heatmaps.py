"""Heat maps: one peak a channel, as of key points, [N, K, H, W]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.tensors import Array

_SIDE = 16
_CHANNELS = 4  # at least
_PEAK = 0.2  # below it a channel's key point is not there
_NARROW = 0.05  # share of a channel's pixels above half of its peak, at most


@dataclass(frozen=True, slots=True)
class HeatMaps:
    """A peak a channel."""

    output: str
    count: int
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "heat maps"

    @property
    def form(self) -> str:
        """How the output is read."""
        return f"{self.output}: {self.count} heat maps"

    def tally(self) -> HeatTally:
        """A new comparison."""
        return HeatTally(self)


def find(seen: Seen) -> HeatMaps | None:
    """The one output that is such maps."""
    found = [name for name in seen.names if _is_heat(seen.arrays(name))]
    return HeatMaps(found[0], seen.arrays(found[0])[0].shape[1]) if len(found) == 1 else None


def _is_heat(samples: list[Array]) -> bool:
    clear = []
    for value in samples:
        if value.ndim != 4 or not np.issubdtype(value.dtype, np.floating):
            return False
        if value.shape[1] < _CHANNELS or min(value.shape[2:]) < _SIDE:
            return False
        maps = value[0].reshape(value.shape[1], -1)
        if not np.isfinite(maps).all() or maps.max() > 1.5 or maps.min() < -0.3:
            return False
        peaks = maps.max(axis=1)
        narrow = np.mean(maps > peaks[:, None] / 2, axis=1) < _NARROW
        clear.append(float(np.mean(narrow & (peaks > _PEAK))))
    return bool(np.mean(clear) > 0.5)


@dataclass(slots=True)
class HeatTally:
    """Peaks at the same place, within a pixel."""

    task: HeatMaps
    samples: int = 0
    peaks: int = 0
    kept: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample."""
        self.samples += 1
        left, right = reference[self.task.output], candidate[self.task.output]
        there = left[0].max(axis=(1, 2)) > _PEAK
        self.peaks += int(there.sum())
        if left.shape == right.shape and np.isfinite(right).all():
            near = np.abs(_places(left) - _places(right)).max(axis=1) <= 1
            self.kept += int((near & there).sum())

    def result(self) -> TaskFigure | None:
        """The share of FP32's peaks that stayed."""
        if not self.peaks:
            return None
        return TaskFigure(
            task="heat maps",
            figure="peaks kept",
            value=self.kept / self.peaks,
            count=f"{self.kept} of {self.peaks}",
            words=f"{self.kept} of {self.peaks} peaks of FP32 within a pixel",
            samples=self.samples,
            form=self.task.form,
        )


def _places(value: Array) -> NDArray[np.int64]:
    """[1, K, H, W] -> [K, 2], row and column of each channel's peak."""
    flat = value[0].reshape(value.shape[1], -1).argmax(axis=1)
    return np.stack(np.divmod(flat, value.shape[3]), axis=1)
