"""Maps over a picture: a class per pixel, masks of single things, or a peak per key point.

All are [N, C, H, W] or [N, H, W, C], or class numbers [N, H, W].

`find_segmentation`: scores, or class numbers. Probabilities that sum to 1 per pixel are certain.
Logits are accepted if neighbours share their best class, in a picture not much smaller than the
input, and the pixels' mean hardly changes: training moves one score up and others down, channels of
an optical flow or a picture change independently. If all pixels have one class, other outputs take
precedence: a detector's map of kinds is mostly background.

`find_masks`: values of 0 to 1 per pixel, such as masks, text regions or saliency, in a few channels
that do not sum to 1: most near 0 or 1, some well above 0, and unlike the input picture. Several
outputs of one shape are masks together, such as U2-Net's supervised stages (Qin et al. 2020).

`find_heatmaps`: maps of key points, one narrow peak per channel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.tasks.evaluation_task import (
    EvaluationTask,
    Form,
    PointTask,
    TaskFigure,
    TaskTally,
)
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.indices import NO_CLASS, PlaceTally, PlaceTask
from deploy.tasks.rows import (
    Arrays,
    Flags,
    Integers,
    Outputs,
    are_comparable,
    are_probabilities,
    are_undecided,
    correlate,
    image_size,
    is_floating,
    may_be_logits,
    sums_to_one,
)
from deploy.tasks.thresholds import (
    HEAT_RANGE,
    MAX_CLASS_SCALE,
    MAX_MASK_EXCESS,
    MAX_MASK_SCALE,
    MAX_MASKS,
    MAX_PEAK_SHARE,
    MAX_PICTURE_CORRELATION,
    MAX_RARE_SHARE,
    MAX_UNDECIDED_SHARE,
    MIN_CLASS_PIXELS,
    MIN_COUNT,
    MIN_EQUAL_NEIGHBOURS,
    MIN_MAP_SIDE,
    MIN_MASK_SHARE,
    MIN_NEGATIVE_SHARE,
    MIN_VISIBLE,
    MOST_SHARE,
)
from deploy.tensors import Array

_MAX_CLASSES = 1024


def _read_layouts(values: Arrays) -> Iterator[tuple[int, list[Array]]]:
    """Yield (axis of the channels, an output's maps [1, C, H, W]) for each layout that fits.

    Maps are finite floating-point numbers of one number of channels, with large sides.
    """
    if not all(value.ndim == 4 and is_floating(value) for value in values):
        return
    for axis in (1, -1):
        maps = [np.moveaxis(value, axis, 1) for value in values]
        min_side = min(min(value.shape[2:]) for value in maps)
        if min_side >= MIN_MAP_SIDE and len({value.shape[1] for value in maps}) == 1:
            yield axis, maps


def _fit_pictures(samples: Arrays, inputs: Sequence[Outputs], max_scale: int) -> bool:
    """Whether each map [1, C, H, W] is as large as its picture, or at most that much smaller."""
    for value, sample_inputs in zip(samples, inputs, strict=True):
        size = image_size(sample_inputs)
        if size is None or len(value) != 1:
            return False
        for side, picture_side in zip(value.shape[-2:], size, strict=True):
            if not side <= picture_side <= max_scale * side:
                return False
    return True


@dataclass(slots=True)
class _PixelTally(PlaceTally["Pixels"]):
    """Counts pixels by FP32's class and by the candidate's."""

    def result(self) -> TaskFigure | None:
        """Return the mean IoU of FP32's classes, with the share of equal pixels as text.

        None if FP32 sees fewer than two: agreement on background alone means nothing.
        """
        counts = self.place_counts  # pixels by class; the reference is FP32
        pixel_count = counts.reference.total()
        # a class of a few pixels would weigh as much in the mean as a large one, so rare classes
        # are left out; unless all but the background are rare
        max_rare_pixels = int(MAX_RARE_SHARE * pixel_count)
        classes = self._frequent_classes(max_rare_pixels + 1)
        if len(classes) < 2:
            classes = self._frequent_classes(MIN_CLASS_PIXELS)
        if len(classes) < 2:
            return None

        ious = []
        for number in classes:
            intersection = counts.equal[number]
            union = counts.reference[number] + counts.candidate[number] - intersection
            ious.append(intersection / union)
        mean = float(np.mean(ious))
        equal_percent = 100 * counts.equal.total() / pixel_count
        text = (
            f"mIoU {mean:.3f} of {len(classes)} classes, {equal_percent:.1f} % of pixels of FP32's"
            " class"
        )
        return self.figure("mIoU with FP32", mean, f"{mean:.3f}", text)

    def _frequent_classes(self, min_pixels: int) -> list[int]:
        """Return the classes that FP32 sees in at least that many pixels."""
        counts = self.place_counts.reference
        return sorted(number for number in counts if counts[number] >= min_pixels)


@dataclass(frozen=True, slots=True)
class Pixels(PlaceTask):
    """A class per pixel, in one output: scores of the classes, or class numbers."""

    name = "segmentation"
    reads = "{0.classes} classes a pixel"
    tally_type = _PixelTally

    def read_classes(self, outputs: Outputs) -> Integers:
        """Return the class of each pixel of one sample, flat; none for another shape."""
        value = outputs[self.output]
        if value.dtype.kind in "iu" or value.ndim == 3 or value.shape[1:2] == (1,):
            numbers = np.nan_to_num(value.reshape(-1), nan=-1).astype(np.int64)
            return np.where(numbers < 0, NO_CLASS, numbers)
        return PlaceTask.read_classes(self, outputs)


SEGMENTATION = Form(
    shape="[N, C, H, W], [N, H, W, C] or [N, H, W]",
    values="scores of classes, or class numbers of an ArgMax",
    figure="mean IoU; pixels of the same class",
    source="DeepLab (Chen et al. 2017), SegFormer (Xie et al. 2021)",
)


def find_segmentation(samples: FirstSamples) -> Pixels | None:
    """Return the first output that holds a class per pixel; None if there is none."""
    for name in samples.names:
        values = samples.arrays(name)
        shape = values[0].shape
        is_map = len(shape) > 2 and min(shape[-2:]) >= MIN_MAP_SIDE
        if is_map and samples.declared.ends.get(name) == "classes":  # numbers of an ArgMax
            class_count = 1 + int(max(value.max() for value in values))
            # no slices: class numbers are not compared by how far they are apart
            return Pixels(name, class_count, parts={name: ()})

        for axis, maps in _read_layouts(values):
            # the last dimension may be the width of maps, unless the others are a picture's sides
            if not _are_class_scores(maps, samples.inputs, fits_picture=axis == -1):
                continue
            # beside other outputs, a map of one class may be the background of a detector
            if len(samples.names) == 1 or _have_several_classes(maps):
                return Pixels(name, maps[0].shape[1], axis)
    return None


def fit_segmentation(name: str, samples: FirstSamples) -> Pixels | None:
    """Return the pixels of an output that the user or the file says to hold scores of classes."""
    shape = samples.outputs[0][name].shape
    if len(shape) != 4:
        return None
    axis = -1 if shape[-1] < shape[1] else 1
    return Pixels(name, shape[axis], axis)


def _are_class_scores(maps: Arrays, inputs: Sequence[Outputs], *, fits_picture: bool) -> bool:
    """Whether [1, C, H, W] are probabilities of classes, or their logits.

    `fits_picture`: whether probabilities must be about as large as the picture, too.
    """
    if not 2 <= maps[0].shape[1] <= _MAX_CLASSES:
        return False
    are_shares = all(are_probabilities(value, 1) for value in maps)
    if (fits_picture or not are_shares) and not _fit_pictures(maps, inputs, MAX_CLASS_SCALE):
        return False
    return are_shares or (all(map(_are_logits, maps)) and _have_several_classes(maps))


def _have_several_classes(maps: Arrays) -> bool:
    """Whether pixels differ in their best class."""
    classes = [np.unique(value.argmax(axis=1)) for value in maps]
    return len(np.unique(np.concatenate(classes))) > 1


def _are_logits(value: Array) -> bool:
    """Whether [1, C, H, W] are logits of classes that neighbouring pixels share.

    Most pixels have a logit above 0, since training raises that of their class. The logits of a
    pixel differ more among themselves than their mean does from pixel to pixel.
    """
    negative_share = np.mean(value < 0)
    if negative_share < MIN_NEGATIVE_SHARE:  # a picture or probabilities
        return False
    class_maps = value[0]  # [C, H, W]
    if not may_be_logits(class_maps, axis=0):
        return False
    positive_share = np.mean(class_maps.max(axis=0) > 0)
    best_class = class_maps.argmax(axis=0)
    equal_share = min(
        np.mean(best_class[1:] == best_class[:-1]), np.mean(best_class[:, 1:] == best_class[:, :-1])
    )
    return bool(equal_share >= MIN_EQUAL_NEIGHBOURS and positive_share >= MOST_SHARE)


@dataclass(slots=True)
class _MaskTally(TaskTally["MaskMaps"]):
    """Counts pixels above 0.5, for the IoU of both models' masks.

    Attributes:
        pixels: number of all pixels; `total` is that of FP32's pixels above 0.5.
    """

    pixels: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name in self.task.outputs:
            reference_mask = reference[name] > 0.5
            candidate_mask = candidate[name] > 0.5
            if candidate_mask.shape != reference_mask.shape:
                candidate_mask = np.zeros_like(reference_mask)
            self.pixels += reference_mask.size
            self.total += int(reference_mask.sum())
            self.kept += int((reference_mask & candidate_mask).sum())
            self.new += int((candidate_mask & ~reference_mask).sum())

    def result(self) -> TaskFigure | None:
        """Return the IoU of the pixels above 0.5; None if FP32 has hardly any."""
        if self.total <= MIN_MASK_SHARE * self.pixels:
            return None
        iou = self.kept / (self.total + self.new)
        text = f"IoU {iou:.3f} of the pixels above 0.5"
        return self.figure("IoU with FP32", iou, f"{iou:.3f}", text)


@dataclass(frozen=True, slots=True)
class MaskMaps(EvaluationTask):
    """One or a few masks, in one output or several.

    Attributes:
        outputs: names of the outputs.
    """

    outputs: tuple[str, ...]
    name = "masks"
    reads = "masks of 0 to 1"
    tally_type = _MaskTally


MASKS = Form(
    shape="[N, K, H, W] or [N, H, W, K] with K up to 4; one output, or several of one shape",
    values="0 to 1, most near 0 or 1",
    figure="IoU of the pixels above 0.5",
    source="saliency (U2-Net, Qin et al. 2020), text regions",
)


def fit_masks(name: str, samples: FirstSamples) -> MaskMaps | None:
    """Return the masks of an output that the user or the file says to hold such."""
    if samples.outputs[0][name].ndim != 4:
        return None
    return MaskMaps((name,))


def find_masks(samples: FirstSamples) -> MaskMaps | None:
    """Return all outputs of masks, if these have one shape; else None."""
    names = []
    for name in samples.names:
        values = samples.arrays(name)
        are_masks = any(_are_masks(maps, samples.inputs) for _, maps in _read_layouts(values))
        if are_masks and not all(map(_is_like_picture, values, samples.inputs)):
            names.append(name)
    shapes = {samples.outputs[0][name].shape for name in names}
    if len(shapes) != 1:
        return None
    return MaskMaps(tuple(names))


def _are_masks(maps: Arrays, inputs: Sequence[Outputs]) -> bool:
    """Whether [1, C, H, W] are values of about 0 to 1 in a few channels, few of them in between."""
    if maps[0].shape[1] > MAX_MASKS or not _fit_pictures(maps, inputs, MAX_MASK_SCALE):
        return False
    for value in maps:
        if max(-value.min(), value.max() - 1) > MAX_MASK_EXCESS:
            return False
        if value.shape[1] > 1 and sums_to_one(value, 1).all():
            return False  # classes
    undecided_share = np.mean([are_undecided(value).mean() for value in maps])
    is_decided = undecided_share < MAX_UNDECIDED_SHARE
    return bool(is_decided and max(map(np.max, maps)) > 0.5)


def _is_like_picture(value: Array, inputs: Outputs) -> bool:
    """Whether an output correlates with the input picture."""
    for picture in inputs.values():
        if picture.shape == value.shape:
            correlation = correlate(picture.reshape(-1), value.reshape(-1))
            if correlation > MAX_PICTURE_CORRELATION:
                return True
    return False


@dataclass(frozen=True, slots=True)
class HeatMaps(PointTask):
    """One key point per channel, where its map has a peak.

    Attributes:
        outputs: names of the outputs, such as one of the columns and one of the rows of points.
        count: number of channels.
        axis: dimension of the channels, 1 or -1.
        max_distance: cells between peaks that match.
    """

    outputs: tuple[str, ...]
    count: int
    axis: int = 1
    max_distance: float = 1
    name = "heat maps"
    reads = "{0.count} heat maps"
    things = "peaks"
    condition = "within a pixel"

    def match_points(self, reference: Outputs, candidate: Outputs) -> tuple[Flags, Flags]:
        """Match peaks as near to FP32's as `max_distance` in each direction."""
        reference_maps = self._read_maps(reference)
        is_present = self.find_present(reference_maps)
        if not all(are_comparable(reference[name], candidate[name]) for name in self.outputs):
            return is_present, np.zeros_like(is_present)
        is_match = np.ones_like(is_present)
        for maps, candidate_maps in zip(reference_maps, self._read_maps(candidate), strict=True):
            distance = np.abs(_peak_cells(maps) - _peak_cells(candidate_maps))
            is_match &= distance.max(axis=1) <= self.max_distance
        return is_present, is_match

    def _read_maps(self, outputs: Outputs) -> list[Array]:
        """Return the outputs with the channels first, [1, K, ...]."""
        return [np.moveaxis(outputs[name], self.axis, 1) for name in self.outputs]

    def find_present(self, maps: Arrays) -> Flags:
        """Return which points [K] FP32 sees: those of a high peak."""
        return np.asarray(maps[0][0].max(axis=(1, 2)) > MIN_VISIBLE)


def _peak_cells(value: Array) -> Integers:
    """Return the indices of each channel's peak: [1, K, ...] -> [K, dimensions]."""
    indices = value[0].reshape(value.shape[1], -1).argmax(axis=1)
    return np.stack(np.unravel_index(indices, value.shape[2:]), axis=1)


HEATMAPS = Form(
    shape="a map for each point, with the aspect ratio of the picture: [N, K, H, W] or"
    " [N, H, W, K]",
    values="about 0 to 1, with one narrow peak in each map",
    figure="peaks at most one pixel of the map apart",
    source="HRNet, CenterNet's key points",
)


def fit_heatmaps(name: str, samples: FirstSamples) -> HeatMaps | None:
    """Return the heat maps of an output that the user or the file says to hold such."""
    pixels = fit_segmentation(name, samples)
    if pixels is None:
        return None
    return HeatMaps((name,), pixels.classes, pixels.axis)


def find_heatmaps(samples: FirstSamples) -> HeatMaps | None:
    """Return the output of heat maps, if there is exactly one; else None.

    The layout is the first in which the maps have the aspect ratio of the picture.
    """
    size = samples.picture_size
    tasks: dict[str, HeatMaps] = {}  # by output
    for name in samples.names:
        for axis, maps in _read_layouts(samples.arrays(name)):
            rows, columns = maps[0].shape[2:]
            has_aspect = size is not None and rows * size[1] == columns * size[0]
            if has_aspect and _are_heat_maps(maps):
                tasks.setdefault(name, HeatMaps((name,), maps[0].shape[1], axis))
    return tasks.popitem()[1] if len(tasks) == 1 else None


def _are_heat_maps(samples: Arrays) -> bool:
    """Whether values [1, C, H, W] are about 0 to 1, and most channels have one narrow peak."""
    low, high = HEAT_RANGE
    clear_shares = []
    for value in samples:
        if not MIN_COUNT <= value.shape[1] <= _MAX_CLASSES:
            return False
        if value.min() < low or value.max() > high:
            return False
        maps = value[0].reshape(value.shape[1], -1)
        peaks = maps.max(axis=1)
        is_narrow = np.mean(maps > peaks[:, None] / 2, axis=1) < MAX_PEAK_SHARE
        clear_shares.append(np.mean(is_narrow & (peaks > MIN_VISIBLE)))
    return bool(np.mean(clear_shares) > 0.5)
