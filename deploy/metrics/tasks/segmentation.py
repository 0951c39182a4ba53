"""Segmentation: a class a pixel, [N, C, H, W] or [N, H, W, C] scores, or the class numbers.

Probabilities of C classes (each pixel's sum to 1) are that for sure. Raw scores are where their
best class is the same for nearly all neighbours, over a picture not much smaller than the input's;
the channels of a feature map are not. Training moves one score of a pixel up and others down, so
that their mean hardly changes from pixel to pixel, and the best one is above 0: the channels of an
optical flow or of a picture change each for itself, and where nothing is seen, all scores of masks
or peaks that are each their own are below 0. Where all pixels are of one class, other outputs, if
any, tell more: a detector's map of kinds, say, is background wherever nothing is for sure.

Maps of one thing each, 0 to 1 a pixel: masks, text regions, saliency.

[N, 1, H, W], [N, H, W, 1] or a few channels of either, most of whose values are near 0 or 1 (a
picture or a depth map has them in between), and some are no share of nothing. What is like the
picture that was fed is a picture, as of a page that was made sharper. Channels [N, C, H, W] that
sum to 1 are classes, and another task's.

Several outputs of one shape are masks together, as where each stage of a network has one that it
was trained by (U2-Net, Qin et al. 2020). The figure is the IoU of what lies above a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, add_up, are_shares, image_size
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.tensors import Array

_SIDE = 16  # pixels that a picture has at least
_SMALLER = 4  # times that raw scores may be smaller than the input
_SMOOTH = 0.9  # share of neighbours of one class
_STEADY = 0.5  # what the mean of a pixel's raw scores varies by, of what its scores do
_ABOVE = 0.75  # share of pixels whose best raw score is above 0
_RARE = 1e-3  # of all pixels: classes seen less are not counted by mIoU, where two are seen more
_FEW = 16  # pixels of a rare class, at least
_MOST = 1024


@dataclass(frozen=True, slots=True)
class Pixels:
    """Classes of pixels."""

    output: str
    classes: int
    last: bool = False  # whether classes are the last dimension
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "segmentation"

    @property
    def form(self) -> str:
        """How the output is read."""
        return f"{self.output}: {self.classes} classes a pixel"

    def tally(self) -> PixelTally:
        """A new comparison."""
        return PixelTally(self)


def find_segmentation(seen: Seen) -> Pixels | None:
    """The first output that is such a picture."""
    for name in seen.names:
        samples = seen.arrays(name)
        if all(map(_is_numbers, samples)) and all(map(_fits, samples, seen.inputs)):
            count = int(max(one.max() for one in samples)) + 1
            if 2 <= count <= _MOST:
                return Pixels(name, count)
        if _are_classes(samples, seen.inputs) and (len(seen.names) == 1 or _several(samples)):
            return Pixels(name, samples[0].shape[1])
        turned = [_channels_first(one) for one in samples if one.ndim == 4]
        if (
            len(turned) == len(samples)
            and all(map(_fits, turned, seen.inputs))
            and _are_classes(turned, seen.inputs)
            and (len(seen.names) == 1 or _several(turned))
        ):
            return Pixels(name, turned[0].shape[1], last=True)
    return None


def _channels_first(value: Array) -> Array:
    """[1, H, W, C] -> [1, C, H, W]; what has other dimensions stays."""
    return np.moveaxis(value, 3, 1) if value.ndim == 4 else value


def _are_classes(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    """Whether they are scores of classes, raw or not."""
    if not all(map(_is_scores, samples)) or len({one.shape[1] for one in samples}) != 1:
        return False
    return all(are_shares(one, 1) for one in samples) or _raw(samples, inputs)


def _is_numbers(value: Array) -> bool:
    """Class numbers [1, H, W] or [1, 1, H, W]."""
    flat = value.ndim == 3 or (value.ndim == 4 and value.shape[1] == 1)
    whole = np.issubdtype(value.dtype, np.integer)
    return bool(flat and whole and min(value.shape[-2:]) >= _SIDE and value.min() >= 0)


def _is_scores(value: Array) -> bool:
    floating = np.issubdtype(value.dtype, np.floating)
    return bool(
        floating
        and value.ndim == 4
        and 2 <= value.shape[1] <= _MOST
        and min(value.shape[2:]) >= _SIDE
        and np.isfinite(value).all()
    )


def _several(samples: Sequence[Array]) -> bool:
    """Whether more than one class is the best of some pixel."""
    best = [one.argmax(axis=1) for one in samples]
    return len({int(one.min()) for one in best} | {int(one.max()) for one in best}) > 1


def _fits(value: Array, fed: Outputs) -> bool:
    """Whether the picture is as large as the input's, or not much smaller."""
    size = image_size(fed)
    if size is None or value.shape[0] != 1:
        return False
    return all(s <= own <= _SMALLER * s for s, own in zip(value.shape[-2:], size, strict=True))


def _raw(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    """Whether raw scores are a picture of classes."""
    seen: set[int] = set()
    if not all(map(_fits, samples, inputs)):
        return False
    for value in samples:
        if np.mean(value < 0) < 0.2 or np.abs(value).max() < 1.5:  # a picture, or a map of shares
            return False
        if not _about_zero(value[0]):
            return False
        best = value[0].argmax(axis=0)
        if min(np.mean(best[1:] == best[:-1]), np.mean(best[:, 1:] == best[:, :-1])) < _SMOOTH:
            return False
        seen |= set(np.flatnonzero(np.bincount(best.ravel()) > 0.002 * best.size).tolist())
    return len(seen) > 1


def _about_zero(scores: Array) -> bool:
    """Whether pixels differ in their scores, not in their mean, and each has one above 0."""
    mean, spread = scores.mean(axis=0, dtype=np.float64), scores.std(axis=0, dtype=np.float64)
    above = np.mean(scores.max(axis=0) > 0)
    return bool(mean.std() < _STEADY * spread.mean() and above >= _ABOVE)


@dataclass(slots=True)
class PixelTally:
    """Pixels by the class that either model gives them."""

    task: Pixels
    samples: int = 0
    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros((self.task.classes, self.task.classes + 1), np.int64)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; pixels of NaN, of a new class or of another shape are none's."""
        self.samples += 1
        left = self._classes(reference[self.task.output])
        right = self._classes(candidate[self.task.output])
        if right.shape != left.shape:
            right = np.full_like(left, self.task.classes)
        known = left < self.task.classes
        place = left[known] * (self.task.classes + 1) + right[known]
        self.counts += np.bincount(place, minlength=self.counts.size).reshape(self.counts.shape)

    def _classes(self, value: Array) -> NDArray[np.int64]:
        none = self.task.classes
        if np.issubdtype(value.dtype, np.integer):
            numbers = value.reshape(-1).astype(np.int64)
            return np.where((numbers < 0) | (numbers > none), none, numbers)
        value = _channels_first(value) if self.task.last else value
        if value.ndim != 4 or value.shape[1] != none:
            return np.zeros(0, np.int64)
        best = np.asarray(value.argmax(axis=1), np.int64)
        best[np.isnan(value).any(axis=1)] = none
        return best.reshape(-1)

    def result(self) -> TaskFigure | None:
        """Mean IoU of the classes that FP32 sees, and the share of pixels alike.

        None where it sees one: to agree on nothing but background is no merit.
        """
        total = int(self.counts.sum())
        both = np.diagonal(self.counts).astype(np.float64)
        own, others = self.counts.sum(axis=1), self.counts.sum(axis=0)[:-1]
        seen = own > _RARE * total
        if seen.sum() < 2:
            seen = own >= _FEW
        if seen.sum() < 2:
            return None
        ious = both[seen] / (own + others - both)[seen]
        return TaskFigure(
            task="segmentation",
            figure="mIoU with FP32",
            value=float(ious.mean()),
            count=f"{ious.mean():.3f}",
            words=f"mIoU {ious.mean():.3f} of {int(seen.sum())} classes,"
            f" {100 * both.sum() / total:.1f} % of pixels of FP32's class",
            samples=self.samples,
            form=self.task.form,
        )


_CHANNELS = 4
_MASK_SMALLER = 8
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


def find_masks(seen: Seen) -> Masks | None:
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
    fits = (s <= whole <= _MASK_SMALLER * s for s, whole in zip(sides, size, strict=True))
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
