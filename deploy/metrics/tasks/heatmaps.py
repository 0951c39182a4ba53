"""Heat maps: one peak a channel, as of key points, [N, K, H, W].

Objects as peaks of a heat map: CenterNet (Zhou et al. 2019), CenterFace, TTFNet.

A map of the centres, [1, C, H, W], a channel a class, behind a Sigmoid or before it; and on the
same cells maps of numbers, two channels each, which an object's size and its place in the cell
stand in. An object is a cell that is the largest of its 3 x 3 neighbours, as these models take it.

Where one map of two channels holds sizes for sure, in cells or in pixels, boxes are told. Else an
object is kept where the same class has a peak in the same cell or one beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks import segmentation
from deploy.metrics.tasks.detections import LOWEST, Detections, Floats
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


def find_heatmaps(seen: Seen) -> HeatMaps | None:
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


_CENTER_SIDE = 8  # cells that a map has at least
_STRIDES = (2, 4, 8)  # pixels of a cell
_QUIET = 0.1  # mean of all scores, at most
_SEEN = 0.25  # score of a peak that stands for an object
_WIDE = 0.25  # share of the cells above it, at most
_LARGE = 8.0  # cells that the largest object has at least
_AROUND = 3.0  # cells to each side of a peak whose size is not told: its neighbours overlap by half


@dataclass(frozen=True, slots=True)
class Centres:
    """A map of centres and what else is told of them.

    Attributes:
        heat: the map of centres.
        beside: the other maps.
        classes: its channels.
        raw: whether a Sigmoid is still to come.
        sizes: the map of widths and heights; "" where none is that for sure.
        unit: of the sizes: cells that one of them is long.
        parts: as of a task; what stands beside the centres is read where there are any.
    """

    heat: str
    beside: tuple[str, ...]
    classes: int
    raw: bool
    sizes: str
    unit: float
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Whether sizes are known."""
        return bool(self.sizes)

    @property
    def form(self) -> str:
        """How the outputs are read."""
        told = f"sizes in {self.sizes}" if self.sizes else "matched by place"
        return f"{self.heat}: centres of {self.classes} classes, {told}"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """The peaks of one sample."""
        maps = [_map(outputs[name]) for name in (self.heat, *self.beside)]
        size = image_size(inputs)
        if size is None or maps[0] is None or len(maps[0]) != self.classes:
            return None
        cells = maps[0].shape[1:]
        if any(one is None or one.shape[1:] != cells for one in maps):
            return None
        kinds, rows, columns, scores = peaks(_shares(maps[0], raw=self.raw))
        half = np.full((len(rows), 2), _AROUND)
        if self.sizes:
            wide = _map(outputs[self.sizes])
            assert wide is not None
            half = np.abs(wide[:2, rows, columns].T) * self.unit / 2
        middle = np.stack([columns, rows], axis=1) + 0.5
        boxes = np.concatenate([middle - half, middle + half], axis=1)
        return Detections.of(boxes * (size[0] / cells[0]), scores, kinds)


def find_centers(seen: Seen) -> Centres | None:
    """The maps, where all are on the same cells and one alone is of centres."""
    maps = {name: [_map(value) for value in seen.arrays(name)] for name in seen.every}
    if len(maps) < 2 or not _same_cells(list(maps.values()), seen):
        return None
    known = {n: [one for one in maps[n] if one is not None] for n in maps}
    heats = [(n, raw) for n in maps for raw in (False, True) if _is_center_heat(known[n], raw=raw)]
    if len(heats) != 1:
        return None
    heat, raw = heats[0]
    beside = tuple(name for name in maps if name != heat)
    if not any(len(known[name][0]) == 2 for name in beside) or _are_classes(beside, seen):
        return None
    sizes, unit = _sizes({n: known[n] for n in beside}, known[heat], seen, raw=raw)
    parts = {heat: (Part(output=heat),)} | {
        name: (Part(output=name, at=heat, raw=raw),) for name in beside
    }
    return Centres(heat, beside, len(known[heat][0]), raw, sizes, unit, parts)


def peaks(
    shares: Floats,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats]:
    """Class, row, column and score of each cell that none of its 3 x 3 neighbours is above."""
    best = shares.copy()
    for axis in (1, 2):
        own, to, back = best.copy(), [slice(None)] * 3, [slice(None)] * 3
        to[axis], back[axis] = slice(1, None), slice(None, -1)
        for here, there in ((to, back), (back, to)):
            best[tuple(here)] = np.maximum(best[tuple(here)], own[tuple(there)])
    kinds, rows, columns = np.nonzero((shares >= best) & (shares > LOWEST))
    return kinds, rows, columns, shares[kinds, rows, columns]


def _map(value: Array) -> Floats | None:
    """[1, C, H, W] -> [C, H, W]; None for other shapes."""
    if value.ndim != 4 or len(value) != 1 or not np.issubdtype(value.dtype, np.floating):
        return None
    return value[0].astype(np.float64) if min(value.shape) else None


def _same_cells(maps: Sequence[Sequence[Floats | None]], seen: Seen) -> bool:
    """Whether all maps of a sample have the same sides, those of the picture's cells."""
    for sample, fed in zip(zip(*maps, strict=True), seen.inputs, strict=True):
        sides = {None if one is None else one.shape[1:] for one in sample}
        size, cells = image_size(fed), next(iter(sides))
        if len(sides) != 1 or size is None or cells is None or min(cells) < _CENTER_SIDE:
            return False
        if not any(cells == tuple(-(-s // stride) for s in size) for stride in _STRIDES):
            return False
    return bool(maps[0])


def _shares(scores: Floats, *, raw: bool) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-scores))) if raw else scores


def _is_center_heat(samples: Sequence[Floats], *, raw: bool) -> bool:
    """Whether values are near 0 nearly everywhere, but for narrow peaks that some samples have."""
    tops = []
    for one in samples:
        within = one.min() >= -1e-3 and one.max() <= 1 + 1e-3
        if not np.isfinite(one).all() or (within == raw) or len(one) != len(samples[0]):
            return False
        shares = _shares(one, raw=raw)
        if shares.mean() > _QUIET or np.mean(shares.max(axis=0) > _SEEN) > _WIDE:
            return False
        tops.append(float(shares.max()))
    return max(tops) > _SEEN


def _are_classes(names: Sequence[str], seen: Seen) -> bool:
    """Whether one of them is a class a pixel, as of panoptic segmentation."""
    rest = [{name: one[name] for name in names} for one in seen.outputs]
    return segmentation.find_segmentation(Seen(seen.inputs, rest)) is not None


def _sizes(
    beside: Mapping[str, Sequence[Floats]], heats: Sequence[Floats], seen: Seen, *, raw: bool
) -> tuple[str, float]:
    """The one map of two channels that are sizes at the peaks, and its unit in cells.

    A place in the cell is hardly above 1, and a logarithm of a size not above `_LARGE`.
    """
    found: dict[str, Floats] = {}
    for name, maps in beside.items():
        here = [_at_peaks(one, heat, raw=raw) for one, heat in zip(maps, heats, strict=True)]
        values = np.concatenate(here, axis=1)
        whole = values.size and np.isfinite(values).all()
        if len(maps[0]) == 2 and whole and values.min() > 0 and values.max() > _LARGE:
            found[name] = values
    if len(found) != 1:
        return "", 1.0
    name, values = next(iter(found.items()))
    cells = [one.shape[:0:-1] for one in heats]  # width, height
    in_cells = all((values.max(axis=1) <= own).all() for own in cells)
    size = image_size(seen.inputs[0])
    assert size is not None
    return name, 1.0 if in_cells else heats[0].shape[1] / size[0]


def _at_peaks(one: Floats, heat: Floats, *, raw: bool) -> Floats:
    _, rows, columns, scores = peaks(_shares(heat, raw=raw))
    clear = scores > _SEEN
    return one[:, rows[clear], columns[clear]]
