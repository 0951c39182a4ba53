"""Heat maps: one key point per channel, or centres of objects.

`find_heatmaps`: maps of key points [N, K, H, W], one peak per channel.

`find_centers`: objects as peaks, as in CenterNet (Zhou et al. 2019), CenterFace and TTFNet. A map
of centres [1, C, H, W], a channel per class, before or after a Sigmoid, and on the same cells maps
of numbers, two channels each, such as an object's size and its offset in the cell. An object is a
cell that is the largest of its 3 x 3 neighbours, as in these models. If exactly one map of two
channels certainly holds sizes, in cells or in pixels, boxes are decoded; else an object is kept if
the same class has a peak in the same cell or a neighbour of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks import segmentation
from deploy.tasks.detections import LOWEST, Detections
from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure, TaskTally
from deploy.tasks.rows import Floats, Outputs, are_shares, image_size, to_shares
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


_CENTER_SIDE = 8  # cells of a map, at least
_STRIDES = (2, 4, 8)  # pixels per cell
_QUIET = 0.1  # mean of all scores, at most
_SEEN = 0.25  # score of an object's peak, at least
_WIDE = 0.25  # share of the cells above it, at most
_LARGE = 8.0  # size of the largest object in cells, at least
_AROUND = 3.0  # half side in cells of an object of unknown size: neighbours overlap by half


@dataclass(frozen=True, slots=True)
class CenterDecoder:
    """Decoder of a map of centres and its accompanying maps."""

    heat: str
    beside: tuple[str, ...]
    classes: int  # number of classes, the channels of `heat`
    raw: bool  # whether `heat` holds logits, before the Sigmoid
    sizes: str  # output of widths and heights; "" if unknown
    unit: float  # cells per unit of the sizes
    # see `EvaluationTask`; the other maps count only at objects
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether sizes are known, so that boxes are decoded."""
        return bool(self.sizes)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        matching = f"sizes in {self.sizes}" if self.sizes else "matched by place"
        return f"{self.heat}: centres of {self.classes} classes, {matching}"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the peaks of one sample as boxes."""
        maps = [_map(outputs[name]) for name in (self.heat, *self.beside)]
        size = image_size(inputs)
        if size is None or maps[0] is None or len(maps[0]) != self.classes:
            return None
        cells = maps[0].shape[1:]
        if any(one is None or one.shape[1:] != cells for one in maps):
            return None
        kinds, rows, columns, scores = find_peaks(to_shares(maps[0], raw=self.raw))
        half = np.full((len(rows), 2), _AROUND)
        if self.sizes:
            size_map = _map(outputs[self.sizes])
            assert size_map is not None
            half = np.abs(size_map[:2, rows, columns].T) * self.unit / 2
        centre = np.stack([columns, rows], axis=1) + 0.5
        boxes = np.concatenate([centre - half, centre + half], axis=1)
        return Detections.of(boxes * (size[0] / cells[0]), scores, kinds)


def find_centers(samples: FirstSamples) -> CenterDecoder | None:
    """Recognise maps on the same cells of which exactly one holds centres."""
    maps = {name: [_map(value) for value in samples.arrays(name)] for name in samples.every}
    if len(maps) < 2 or not _same_cells(list(maps.values()), samples):
        return None
    floats = {n: [one for one in maps[n] if one is not None] for n in maps}
    heats = [(n, raw) for n in maps for raw in (False, True) if _is_center_heat(floats[n], raw=raw)]
    if len(heats) != 1:
        return None
    heat, raw = heats[0]
    beside = tuple(name for name in maps if name != heat)
    if not any(len(floats[name][0]) == 2 for name in beside) or _are_classes(beside, samples):
        return None
    sizes, unit = _sizes({n: floats[n] for n in beside}, floats[heat], samples, raw=raw)
    at = OutputSlice(output=heat, axis=1, activation="sigmoid" if raw else "")
    parts = {heat: (OutputSlice(output=heat),)}
    parts |= {name: (OutputSlice(output=name, at=at),) for name in beside}
    return CenterDecoder(heat, beside, len(floats[heat][0]), raw, sizes, unit, parts)


def find_peaks(
    shares: Floats,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return class, row, column and score of each cell that is a maximum of its 3 x 3 cells."""
    best = shares.copy()
    for axis in (1, 2):
        before, upper, lower = best.copy(), [slice(None)] * 3, [slice(None)] * 3
        upper[axis], lower[axis] = slice(1, None), slice(None, -1)
        for target, source in ((upper, lower), (lower, upper)):
            best[tuple(target)] = np.maximum(best[tuple(target)], before[tuple(source)])
    kinds, rows, columns = np.nonzero((shares >= best) & (shares > LOWEST))
    return kinds, rows, columns, shares[kinds, rows, columns]


def _map(value: Array) -> Floats | None:
    """Return [1, C, H, W] as [C, H, W]; None for other shapes."""
    if value.ndim != 4 or len(value) != 1 or not np.issubdtype(value.dtype, np.floating):
        return None
    return value[0].astype(np.float64) if min(value.shape) else None


def _same_cells(maps: Sequence[Sequence[Floats | None]], samples: FirstSamples) -> bool:
    """Whether all maps of a sample have one size, that of the picture over a stride."""
    for sample, fed in zip(zip(*maps, strict=True), samples.inputs, strict=True):
        sides = {None if one is None else one.shape[1:] for one in sample}
        size, cells = image_size(fed), next(iter(sides))
        if len(sides) != 1 or size is None or cells is None or min(cells) < _CENTER_SIDE:
            return False
        if not any(cells == tuple(-(-s // stride) for s in size) for stride in _STRIDES):
            return False
    return bool(maps[0])


def _is_center_heat(samples: Sequence[Floats], *, raw: bool) -> bool:
    """Whether values are near 0 except for narrow peaks, which some samples have."""
    tops = []
    for one in samples:
        if not np.isfinite(one).all() or (are_shares(one) == raw) or len(one) != len(samples[0]):
            return False
        shares = to_shares(one, raw=raw)
        if shares.mean() > _QUIET or np.mean(shares.max(axis=0) > _SEEN) > _WIDE:
            return False
        tops.append(float(shares.max()))
    return max(tops) > _SEEN


def _are_classes(names: Sequence[str], samples: FirstSamples) -> bool:
    """Whether one of the outputs is a segmentation, as in panoptic models."""
    others = [{name: one[name] for name in names} for one in samples.outputs]
    return segmentation.find_segmentation(FirstSamples(samples.inputs, others)) is not None


def _sizes(
    beside: Mapping[str, Sequence[Floats]],
    heats: Sequence[Floats],
    first_samples: FirstSamples,
    *,
    raw: bool,
) -> tuple[str, float]:
    """Return the only map of sizes (positive at the peaks), and its unit in cells.

    Offsets in a cell hardly exceed 1, and logarithms of sizes do not exceed `_LARGE`.
    """
    by_name: dict[str, Floats] = {}
    for name, maps in beside.items():
        samples = [_at_peaks(one, heat, raw=raw) for one, heat in zip(maps, heats, strict=True)]
        values = np.concatenate(samples, axis=1)
        finite = values.size and np.isfinite(values).all()
        if len(maps[0]) == 2 and finite and values.min() > 0 and values.max() > _LARGE:
            by_name[name] = values
    if len(by_name) != 1:
        return "", 1.0
    name, values = next(iter(by_name.items()))
    cells = [one.shape[:0:-1] for one in heats]  # width, height
    in_cells = all((values.max(axis=1) <= own).all() for own in cells)
    size = image_size(first_samples.inputs[0])
    assert size is not None
    return name, 1.0 if in_cells else heats[0].shape[1] / size[0]


def _at_peaks(one: Floats, heat: Floats, *, raw: bool) -> Floats:
    _, rows, columns, scores = find_peaks(to_shares(heat, raw=raw))
    clear = scores > _SEEN
    return one[:, rows[clear], columns[clear]]
