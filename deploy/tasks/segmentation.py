"""Segmentation: a class per pixel, or masks of single things.

`find_segmentation`: [N, C, H, W] or [N, H, W, C] scores, or class numbers. Probabilities that sum
to 1 per pixel are certain. Logits are accepted if neighbours share their best class, in a picture
not much smaller than the input, and the pixels' mean hardly changes: training moves one score up
and others down, channels of an optical flow or a picture change independently. If all pixels have
one class, other outputs take precedence: a detector's map of kinds is mostly background.

`find_masks`: values of 0 to 1 per pixel, such as masks, text regions or saliency, in a few channels
that do not sum to 1: most near 0 or 1, some well above 0, and unlike the input picture. Several
outputs of one shape are masks together, such as U2-Net's supervised stages (Qin et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.evaluation_task import (
    EvaluationTask,
    FirstSamples,
    TaskFigure,
    TaskTally,
    ThresholdTally,
)
from deploy.tasks.rows import Outputs, are_probabilities, image_size, sums_to_one
from deploy.tensors import Array

_SIDE = 16  # pixels of a side, at least
_SMALLER = 4  # scale of the input to the logits, at most
_SMOOTH = 0.9  # share of neighbours of one class, at least
_STEADY = 0.5  # deviation of a pixel's mean logit, relative to that of its logits, at most
_ABOVE = 0.75  # share of pixels whose best logit is above 0, at least
_RARE = 1e-3  # share of pixels up to which a class is left out of mIoU, if two exceed it
_FEW = 16  # pixels of a class, at least, if fewer than two exceed it
_MOST = 1024  # classes


@dataclass(slots=True)
class _PixelTally(TaskTally["Pixels"]):
    """Confusion matrix of pixels: FP32's class by the candidate's."""

    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros((self.task.classes, self.task.classes + 1), np.int64)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left = self._classes(reference[self.task.output])
        right = self._classes(candidate[self.task.output])
        if right.shape != left.shape:
            right = np.full_like(left, self.task.classes)
        valid = left < self.task.classes
        place = left[valid] * (self.task.classes + 1) + right[valid]
        self.counts += np.bincount(place, minlength=self.counts.size).reshape(self.counts.shape)

    def _classes(self, value: Array) -> NDArray[np.int64]:
        none = self.task.classes
        if value.dtype.kind in "iu" or value.ndim == 3 or value.shape[1:2] == (1,):
            numbers = np.nan_to_num(value.reshape(-1), nan=-1).astype(np.int64)
            return np.where((numbers < 0) | (numbers > none), none, numbers)
        value = to_channels_first(value) if self.task.last else value
        if value.ndim != 4 or value.shape[1] != none:
            return np.zeros(0, np.int64)
        best = np.asarray(value.argmax(axis=1), np.int64)
        best[np.isnan(value).any(axis=1)] = none
        return best.reshape(-1)

    def result(self) -> TaskFigure | None:
        """Return the mean IoU of FP32's classes, with the share of equal pixels as text.

        None if FP32 sees fewer than two: agreement on background alone means nothing.
        """
        total = int(self.counts.sum())
        both = np.diagonal(self.counts).astype(np.float64)
        reference, candidate = self.counts.sum(axis=1), self.counts.sum(axis=0)[:-1]
        counted = reference > _RARE * total
        if counted.sum() < 2:
            counted = reference >= _FEW
        if counted.sum() < 2:
            return None
        ious = both[counted] / (reference + candidate - both)[counted]
        mean, equal = ious.mean(), 100 * both.sum() / total
        words = f"mIoU {mean:.3f} of {int(counted.sum())} classes, {equal:.1f} % of pixels of"
        return self.figure("mIoU with FP32", float(mean), f"{mean:.3f}", f"{words} FP32's class")


@dataclass(frozen=True, slots=True)
class Pixels(EvaluationTask):
    """A class per pixel, in one output."""

    output: str
    classes: int
    last: bool = False  # whether classes are the last dimension
    name = "segmentation"
    reads = "{0.classes} classes a pixel"
    tally_type = _PixelTally


def find_segmentation(first_samples: FirstSamples) -> Pixels | None:
    """Recognise the first output that holds a class per pixel."""
    alone = len(first_samples.names) == 1
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if all(map(_is_numbers, samples)) and all(map(_fits, samples, first_samples.inputs)):
            count = int(max(one.max() for one in samples)) + 1
            fewest = 3 if samples[0].dtype.kind == "f" else 2  # floats of 0 and 1 may be a picture
            if fewest <= count <= _MOST:
                return Pixels(name, count, parts={name: ()})
        for last in (False, True):
            maps = [*map(to_channels_first, samples)] if last else samples
            are_classes = _are_classes(maps, first_samples.inputs) and (alone or _several(maps))
            if are_classes and (not last or all(map(_fits, maps, first_samples.inputs))):
                return Pixels(name, maps[0].shape[1], last=last)
    return None


def to_channels_first(value: Array) -> Array:
    """Return [1, H, W, C] as [1, C, H, W]; other shapes stay unchanged."""
    return np.moveaxis(value, 3, 1) if value.ndim == 4 else value


def _are_classes(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    if not all(map(_is_scores, samples)) or len({one.shape[1] for one in samples}) != 1:
        return False
    return all(are_probabilities(one, 1) for one in samples) or _are_logits(samples, inputs)


def _is_numbers(value: Array) -> bool:
    """Whether it is class numbers [1, H, W] or [1, 1, H, W], of integers or cast to floats."""
    flat = value.ndim == 3 or (value.ndim == 4 and value.shape[1] == 1)
    if not flat or min(value.shape[-2:]) < _SIDE or value.dtype.kind not in "iuf":
        return False
    return bool(value.min() >= 0 and (value.dtype.kind != "f" or (value == np.rint(value)).all()))


def _is_scores(value: Array) -> bool:
    floating = np.issubdtype(value.dtype, np.floating)
    fits = floating and value.ndim == 4 and 2 <= value.shape[1] <= _MOST
    return bool(fits and min(value.shape[2:]) >= _SIDE and np.isfinite(value).all())


def _several(samples: Sequence[Array]) -> bool:
    """Whether different pixels have different best classes."""
    best = [one.argmax(axis=1) for one in samples]
    return len({int(one.min()) for one in best} | {int(one.max()) for one in best}) > 1


def _fits(value: Array, fed: Outputs) -> bool:
    """Whether the output is as large as the input picture, or not much smaller."""
    size = image_size(fed)
    if size is None or value.shape[0] != 1:
        return False
    return all(s <= own <= _SMALLER * s for s, own in zip(value.shape[-2:], size, strict=True))


def _are_logits(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    classes: set[int] = set()
    if not all(map(_fits, samples, inputs)):
        return False
    for value in samples:
        if np.mean(value < 0) < 0.2 or np.abs(value).max() < 1.5:  # a picture or probabilities
            return False
        if not _about_zero(value[0]):
            return False
        best = value[0].argmax(axis=0)
        if min(np.mean(best[1:] == best[:-1]), np.mean(best[:, 1:] == best[:, :-1])) < _SMOOTH:
            return False
        classes |= set(np.flatnonzero(np.bincount(best.ravel()) > 0.002 * best.size).tolist())
    return len(classes) > 1


def _about_zero(scores: Array) -> bool:
    """Whether pixels differ in their logits, not in their mean, and each has one above 0."""
    mean, spread = scores.mean(axis=0, dtype=np.float64), scores.std(axis=0, dtype=np.float64)
    above = np.mean(scores.max(axis=0) > 0)
    return bool(mean.std() < _STEADY * spread.mean() and above >= _ABOVE)


_CHANNELS = 4  # at most
_MASK_SMALLER = 8  # scale of the input to the masks, at most
_BETWEEN = 0.25  # share of values between 0.1 and 0.9, at most
_HIGH = 0.3  # the largest value, at least
_ALIKE = 0.9  # correlation with the input picture, at most
_BEYOND = 0.15  # distance to [0, 1] of values without a final Sigmoid, at most
_THRESHOLDS = ((0.5, 2e-3), (0.3, 1e-3), (0.1, 5e-4))  # threshold, share of pixels required


@dataclass(slots=True)
class _MaskTally(ThresholdTally["MaskMaps"]):
    """Counts pixels above each threshold: FP32's, the candidate's, both's."""

    pixels: int = 0
    enough = _THRESHOLDS

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name, threshold in product(self.task.outputs, self.counts):
            one, other = reference[name] > threshold, candidate[name] > threshold
            both = int((one & other).sum()) if one.shape == other.shape else 0
            self.count(threshold, int(one.sum()), int(other.sum()), both)
            self.pixels += one.size if threshold == _THRESHOLDS[0][0] else 0

    def result(self) -> TaskFigure | None:
        """Return the IoU at the highest threshold with enough FP32 pixels."""
        for threshold, share in _THRESHOLDS:
            reference, candidate, both = self.counts[threshold]
            if reference > share * self.pixels:
                iou = both / (reference + candidate - both)
                words = f"IoU {iou:.3f} of the pixels above {threshold:g}"
                return self.figure("IoU with FP32", iou, f"{iou:.3f}", words)
        return None


@dataclass(frozen=True, slots=True)
class MaskMaps(EvaluationTask):
    """One or a few masks, in one output or several."""

    outputs: tuple[str, ...]
    name = "masks"
    tally_type = _MaskTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        several = len(self.outputs) > 1
        return f"{', '.join(self.outputs)}: {'maps' if several else 'a map'} of 0 to 1"


def find_masks(first_samples: FirstSamples) -> MaskMaps | None:
    """Recognise outputs of masks, all of one shape."""
    sizes = [image_size(inputs) for inputs in first_samples.inputs]
    names = []
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if all(_is_map(one, size) for one, size in zip(samples, sizes, strict=True)):
            between = [np.mean((one > 0.1) & (one < 0.9)) for one in samples]
            high = max(float(one.max()) for one in samples) >= _HIGH
            pictures = all(map(_is_picture, samples, first_samples.inputs))
            if np.mean(between) < _BETWEEN and high and not pictures:
                names.append(name)
    shapes = {first_samples.outputs[0][name].shape for name in names}
    return MaskMaps(tuple(names)) if len(shapes) == 1 else None


def _is_map(value: Array, size: tuple[int, int] | None) -> bool:
    if size is None or value.ndim != 4 or not np.issubdtype(value.dtype, np.floating):
        return False
    channels_first = value.shape[1] <= _CHANNELS
    if not channels_first and value.shape[3] > _CHANNELS:
        return False
    sides = value.shape[2:] if channels_first else value.shape[1:3]
    fits = (s <= side <= _MASK_SMALLER * s for s, side in zip(sides, size, strict=True))
    if channels_first and value.shape[1] > 1 and sums_to_one(value, 1).all():
        return False
    low, high = float(value.min()), float(value.max())
    return min(sides) >= _SIDE and all(fits) and low >= -_BEYOND and high <= 1 + _BEYOND


def _is_picture(value: Array, fed: Outputs) -> bool:
    """Whether an output correlates with the input picture."""
    for picture in fed.values():
        if picture.shape == value.shape and picture.std() > 0 and value.std() > 0:
            along = np.corrcoef(picture.reshape(-1).astype(np.float64), value.reshape(-1))
            if float(along[0, 1]) > _ALIKE:
                return True
    return False
