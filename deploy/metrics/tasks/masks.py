"""Maps of one thing each, 0 to 1 a pixel: masks, text regions, saliency.

[N, 1, H, W], [N, H, W, 1] or a few channels of either, most of whose values are near 0 or 1 (a
picture or a depth map has them in between), and some are no share of nothing. What is like the
picture that was fed is a picture, as of a page that was made sharper. Channels [N, C, H, W] that
sum to 1 are classes, and another task's.

Several outputs of one shape are masks together, as where each stage of a network has one that it
was trained by (U2-Net, Qin et al. 2020). The figure is the IoU of what lies above a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.metrics.whole import add_up
from deploy.tensors import Array

_SIDE = 16
_CHANNELS = 4
_SMALLER = 8
_BETWEEN = 0.25  # share of values between 0.1 and 0.9, at most
_HIGH = 0.3  # the largest value, at least
_ALIKE = 0.9  # correlation with the picture that was fed
_BEYOND = 0.15  # what maps that end in no Sigmoid leave [0, 1] by
_THRESHOLDS = ((0.5, 2e-3), (0.3, 1e-3), (0.1, 5e-4))  # and the share of pixels that it takes


@dataclass(frozen=True, slots=True)
class Masks:
    """One or a few masks, in one output or several."""

    outputs: tuple[str, ...]
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "masks"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        several = len(self.outputs) > 1
        return f"{', '.join(self.outputs)}: {'maps' if several else 'a map'} of 0 to 1"

    def tally(self) -> MaskTally:
        """A new comparison."""
        return MaskTally(self)


def find(seen: Seen) -> Masks | None:
    """The outputs that are such maps, all of one shape."""
    sizes = [image_size(inputs) for inputs in seen.inputs]
    found = []
    for name in seen.names:
        samples = seen.arrays(name)
        if all(_is_map(one, size) for one, size in zip(samples, sizes, strict=True)):
            between = [np.mean((one > 0.1) & (one < 0.9)) for one in samples]
            high = max(float(one.max()) for one in samples) >= _HIGH
            pictures = all(map(_is_picture, samples, seen.inputs))
            if np.mean(between) < _BETWEEN and high and not pictures:
                found.append(name)
    shapes = {seen.outputs[0][name].shape for name in found}
    return Masks(tuple(found)) if len(shapes) == 1 else None


def _is_map(value: Array, size: tuple[int, int] | None) -> bool:
    if size is None or value.ndim != 4 or not np.issubdtype(value.dtype, np.floating):
        return False
    first = value.shape[1] <= _CHANNELS
    if not first and value.shape[3] > _CHANNELS:
        return False
    sides = value.shape[2:] if first else value.shape[1:3]
    fits = (s <= whole <= _SMALLER * s for s, whole in zip(sides, size, strict=True))
    if first and value.shape[1] > 1 and add_up(value, 1).all():
        return False
    low, high = float(value.min()), float(value.max())
    return min(sides) >= _SIDE and all(fits) and low >= -_BEYOND and high <= 1 + _BEYOND


def _is_picture(value: Array, fed: Outputs) -> bool:
    """Whether it is like what was fed, value by value."""
    for own in fed.values():
        if own.shape == value.shape and own.std() > 0 and value.std() > 0:
            along = np.corrcoef(own.reshape(-1).astype(np.float64), value.reshape(-1))
            if float(along[0, 1]) > _ALIKE:
                return True
    return False


@dataclass(slots=True)
class MaskTally:
    """Pixels above each threshold: FP32's, the candidate's, both's."""

    task: Masks
    samples: int = 0
    pixels: int = 0
    counts: dict[float, list[int]] = field(
        default_factory=lambda: {threshold: [0, 0, 0] for threshold, _ in _THRESHOLDS}
    )

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of another shape has no pixel in common."""
        self.samples += 1
        for name in self.task.outputs:
            self._count(reference[name], candidate[name])

    def _count(self, left: Array, right: Array) -> None:
        self.pixels += left.size
        for threshold, count in self.counts.items():
            one, other = left > threshold, right > threshold
            count[0] += int(one.sum())
            count[1] += int(other.sum())
            count[2] += int((one & other).sum()) if one.shape == other.shape else 0

    def result(self) -> TaskFigure | None:
        """The IoU at the highest threshold that FP32 has pixels enough above."""
        for threshold, share in _THRESHOLDS:
            own, others, both = self.counts[threshold]
            if own > share * self.pixels:
                iou = both / (own + others - both)
                return TaskFigure(
                    task="masks",
                    figure="IoU with FP32",
                    value=iou,
                    count=f"{iou:.3f}",
                    words=f"IoU {iou:.3f} of the pixels above {threshold:g}",
                    samples=self.samples,
                    form=self.task.form,
                )
        return None
