"""Heat maps of key points [N, K, H, W], one peak per channel."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks import segmentation
from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure, TaskTally
from deploy.tasks.rows import Outputs, image_size
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_MAP = 4  # dimensions of a map
_SIDE = 16  # cells of a map, at least
_CHANNELS = 4  # at least
_PEAK = 0.2  # peak of a channel whose key point is present, at least
_NARROW = 0.05  # share of a channel's pixels above half of its peak, at most


@dataclass(slots=True)
class _HeatTally(TaskTally["HeatMaps"]):
    """Counts peaks at the same place, within a pixel."""

    peaks: int = 0
    kept: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left, right = (one[self.task.output] for one in (reference, candidate))
        if self.task.last:
            left, right = map(segmentation.to_channels_first, (left, right))
        present = left[0].max(axis=(1, 2)) > _PEAK
        self.peaks += int(present.sum())
        if left.shape == right.shape and np.isfinite(right).all():
            near = np.abs(_places(left) - _places(right)).max(axis=1) <= 1
            self.kept += int((near & present).sum())

    def result(self) -> TaskFigure | None:
        return self.figure_of_kept("peaks", self.kept, self.peaks, "within a pixel")


@dataclass(frozen=True, slots=True)
class HeatMaps(EvaluationTask):
    """One key point per channel."""

    output: str
    count: int
    last: bool = False  # whether the channels are the last dimension
    name = "heat maps"
    reads = "{0.count} heat maps"
    tally_type = _HeatTally


def find_heatmaps(samples: FirstSamples) -> HeatMaps | None:
    """Recognise heat maps if exactly one output holds such.

    Other outputs of the same cells, such as offsets, count where a map is high.
    """
    found = [task for name in samples.names if (task := _heat_of(name, samples))]
    if len(found) != 1:
        return None
    (heat,) = found
    axis, first = -1 if heat.last else 1, samples.outputs[0]
    at, cells = OutputSlice(output=heat.output, axis=axis), first[heat.output].size // heat.count
    beside = (name for name in samples.names if name != heat.output and first[name].ndim == _MAP)
    parts = {
        name: (OutputSlice(output=name, at=at),)
        for name in beside
        if first[name].size == cells * first[name].shape[axis]
    }
    return replace(heat, parts=parts)


def _heat_of(name: str, samples: FirstSamples) -> HeatMaps | None:
    """Return an output's heat maps; with channels last if these have the picture's aspect."""
    size, fitting = image_size(samples.inputs[0]), []
    for last in (False, True):
        maps = [
            segmentation.to_channels_first(one) if last else one for one in samples.arrays(name)
        ]
        if _is_heat(maps):
            high, wide = maps[0].shape[2:]
            alike = size is not None and high * size[1] == wide * size[0]
            fitting += [(not alike, last, maps[0].shape[1])] if alike or not last else []
    return HeatMaps(name, min(fitting)[2], min(fitting)[1]) if fitting else None


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


def _places(value: Array) -> NDArray[np.int64]:
    """Return row and column of each channel's peak: [1, K, H, W] -> [K, 2]."""
    flat = value[0].reshape(value.shape[1], -1).argmax(axis=1)
    return np.stack(np.divmod(flat, value.shape[3]), axis=1)
