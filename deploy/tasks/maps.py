"""Maps over a picture: a class per pixel, masks of single things, or a peak per key point.

`find_segmentation`: [N, C, H, W] or [N, H, W, C] scores, or class numbers. Probabilities that sum
to 1 per pixel are certain. Logits are accepted if neighbours share their best class, in a picture
not much smaller than the input, and the pixels' mean hardly changes: training moves one score up
and others down, channels of an optical flow or a picture change independently. If all pixels have
one class, other outputs take precedence: a detector's map of kinds is mostly background.

`find_masks`: values of 0 to 1 per pixel, such as masks, text regions or saliency, in a few channels
that do not sum to 1: most near 0 or 1, some well above 0, and unlike the input picture. Several
outputs of one shape are masks together, such as U2-Net's supervised stages (Qin et al. 2020).

`find_heatmaps`: maps of key points [N, K, H, W] or [N, H, W, K], one narrow peak per channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from deploy.tasks import thresholds
from deploy.tasks.evaluation_task import EvaluationTask, TaskFigure, TaskTally, ThresholdTally
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import Outputs, are_probabilities, are_shares, image_size, sums_to_one
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_MAX_CLASSES = 1024


@dataclass(slots=True)
class _PixelTally(TaskTally["Pixels"]):
    """Confusion matrix of pixels: FP32's class by the candidate's."""

    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros((self.task.classes, self.task.classes + 1), np.int64)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_classes = self._classes(reference[self.task.output])
        classes = self._classes(candidate[self.task.output])
        if classes.shape != reference_classes.shape:
            classes = np.full_like(reference_classes, self.task.classes)
        is_valid = reference_classes < self.task.classes
        cell = reference_classes[is_valid] * (self.task.classes + 1) + classes[is_valid]
        self.counts += np.bincount(cell, minlength=self.counts.size).reshape(self.counts.shape)

    def _classes(self, value: Array) -> NDArray[np.int64]:
        """Return the class of each pixel; the number of classes stands for none."""
        no_class = self.task.classes
        if value.dtype.kind in "iu" or value.ndim == 3 or value.shape[1:2] == (1,):
            numbers = np.nan_to_num(value.reshape(-1), nan=-1).astype(np.int64)
            return np.where((numbers < 0) | (numbers > no_class), no_class, numbers)

        if self.task.last:
            value = to_channels_first(value)
        if value.ndim != 4 or value.shape[1] != no_class:
            return np.zeros(0, np.int64)
        classes = np.asarray(value.argmax(axis=1), np.int64)
        classes[np.isnan(value).any(axis=1)] = no_class
        return classes.reshape(-1)

    def result(self) -> TaskFigure | None:
        """Return the mean IoU of FP32's classes, with the share of equal pixels as text.

        None if FP32 sees fewer than two: agreement on background alone means nothing.
        """
        total = int(self.counts.sum())
        equal = np.diagonal(self.counts).astype(np.float64)
        reference, candidate = self.counts.sum(axis=1), self.counts.sum(axis=0)[:-1]
        is_counted = reference > thresholds.MAX_RARE_SHARE * total
        if is_counted.sum() < 2:
            is_counted = reference >= thresholds.MIN_CLASS_PIXELS
        if is_counted.sum() < 2:
            return None

        ious = equal[is_counted] / (reference + candidate - equal)[is_counted]
        mean = ious.mean()
        equal_percent = 100 * equal.sum() / total
        text = (
            f"mIoU {mean:.3f} of {ious.size} classes, {equal_percent:.1f} % of pixels of"
            " FP32's class"
        )
        return self.figure("mIoU with FP32", float(mean), f"{mean:.3f}", text)


@dataclass(frozen=True, slots=True)
class Pixels(EvaluationTask):
    """A class per pixel, in one output.

    Attributes:
        output: name of the output.
        classes: number of classes.
        last: whether classes are the last dimension.
    """

    output: str
    classes: int
    last: bool = False
    name = "segmentation"
    reads = "{0.classes} classes a pixel"
    tally_type = _PixelTally


def find_segmentation(first_samples: FirstSamples) -> Pixels | None:
    """Recognise the first output that holds a class per pixel."""
    is_single = len(first_samples.names) == 1
    if _has_detection_map(first_samples):
        return None  # the classes are those of its objects, and of a background nearly everywhere
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if all(map(_are_class_numbers, samples)) and _fit_pictures(samples, first_samples.inputs):
            count = int(max(value.max() for value in samples)) + 1
            # floats of 0 and 1 may be a picture
            min_count = 3 if samples[0].dtype.kind == "f" else 2
            if min_count <= count <= _MAX_CLASSES:
                return Pixels(name, count, parts={name: ()})

        if _are_classes(samples, first_samples.inputs, is_single=is_single):
            return Pixels(name, samples[0].shape[1])
        maps = [to_channels_first(value) for value in samples]
        are_classes = _are_classes(maps, first_samples.inputs, is_single=is_single)
        if are_classes and _fit_pictures(maps, first_samples.inputs):
            return Pixels(name, maps[0].shape[1], last=True)
    return None


def fit_segmentation(name: str, samples: FirstSamples) -> Pixels | None:
    """Return the pixels of an output that the user or the file says to hold scores of classes."""
    shape = samples.outputs[0][name].shape
    if len(shape) != 4:
        return None
    return Pixels(name, min(shape[1], shape[3]), last=shape[3] < shape[1])


def to_channels_first(value: Array) -> Array:
    """Return [1, H, W, C] as [1, C, H, W]; other shapes stay unchanged."""
    return np.moveaxis(value, 3, 1) if value.ndim == 4 else value


def _are_classes(samples: Sequence[Array], inputs: Sequence[Outputs], *, is_single: bool) -> bool:
    """Whether [1, C, H, W] are scores of classes; `is_single`: whether of the only output."""
    if not all(map(_are_score_maps, samples)) or len({value.shape[1] for value in samples}) != 1:
        return False
    are_all_probabilities = all(are_probabilities(value, 1) for value in samples)
    if not are_all_probabilities and not _are_logits(samples, inputs):
        return False
    return is_single or _has_several_classes(samples)


def _has_detection_map(samples: FirstSamples) -> bool:
    """Whether one map of probabilities says where objects are, and another how large they are."""
    maps = {name: samples.arrays(name) for name in samples.names}
    maps = {name: values for name, values in maps.items() if values[0].ndim == 4}
    if not any(_are_class_probabilities(values) for values in maps.values()):
        return False
    for name, values in maps.items():
        cell_count = values[0].size
        if min(values[0].shape[1], values[0].shape[3]) != 1 or not all(map(are_shares, values)):
            continue
        if np.median(np.concatenate([value.reshape(-1) for value in values])) > 0.1:
            continue
        for other, sizes in maps.items():
            has_cells = cell_count > 1 and sizes[0].size % cell_count == 0
            if other != name and has_cells and not all(map(are_shares, sizes)):
                return True
    return False


def _are_class_probabilities(samples: Sequence[Array]) -> bool:
    """Whether maps are probabilities of classes, after a Softmax."""
    return all(value.shape[1] > 1 and are_probabilities(value, 1) for value in samples)


def _are_class_numbers(value: Array) -> bool:
    """Whether it is class numbers [1, H, W] or [1, 1, H, W], of integers or cast to floats."""
    is_map = value.ndim == 3 or (value.ndim == 4 and value.shape[1] == 1)
    if (
        not is_map
        or min(value.shape[-2:]) < thresholds.MIN_MAP_SIDE
        or value.dtype.kind not in "iuf"
    ):
        return False
    if not (value >= 0).all():
        return False
    return value.dtype.kind != "f" or bool((value == np.rint(value)).all())


def _are_score_maps(value: Array) -> bool:
    """Whether it is finite floating-point numbers [N, C, H, W] of several large channels."""
    if value.ndim != 4 or not np.issubdtype(value.dtype, np.floating):
        return False
    if not 2 <= value.shape[1] <= _MAX_CLASSES or min(value.shape[2:]) < thresholds.MIN_MAP_SIDE:
        return False
    return bool(np.isfinite(value).all())


def _has_several_classes(samples: Sequence[Array]) -> bool:
    """Whether different pixels have different best classes."""
    first_class = int(samples[0][:, :, 0, 0].argmax())
    return any((value.argmax(axis=1) != first_class).any() for value in samples)


def _fit_pictures(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    """Whether the output is as large as the input picture, or not much smaller, in each sample."""
    for value, sample_inputs in zip(samples, inputs, strict=True):
        size = image_size(sample_inputs)
        if size is None or value.shape[0] != 1:
            return False
        if not _has_scale(value.shape[-2:], size, thresholds.MAX_CLASS_SCALE):
            return False
    return True


def _has_scale(sides: Sequence[int], size: tuple[int, int], max_scale: int) -> bool:
    """Whether the picture is as large as the sides of a map, or at most `max_scale` times so."""
    return all(
        side <= picture_side <= max_scale * side
        for side, picture_side in zip(sides, size, strict=True)
    )


def _are_logits(samples: Sequence[Array], inputs: Sequence[Outputs]) -> bool:
    """Whether they are logits of classes that neighbouring pixels share."""
    if not _fit_pictures(samples, inputs):
        return False
    classes: set[int] = set()
    for value in samples:
        negative_share = np.mean(value < 0)
        if negative_share < thresholds.MIN_NEGATIVE_SHARE:  # a picture or probabilities
            return False
        if np.abs(value).max() <= thresholds.MAX_TANH or not _are_about_zero(value[0]):
            return False
        best = value[0].argmax(axis=0)
        equal_share = min(np.mean(best[1:] == best[:-1]), np.mean(best[:, 1:] == best[:, :-1]))
        if equal_share < thresholds.MIN_EQUAL_NEIGHBOURS:
            return False
        pixel_counts = np.bincount(best.ravel())
        is_large = pixel_counts > thresholds.MAX_RARE_SHARE * best.size
        classes |= {*np.flatnonzero(is_large).tolist()}
    return len(classes) > 1


def _are_about_zero(scores: Array) -> bool:
    """Whether pixels differ in their logits, not in their mean, and most have one above 0."""
    mean = scores.mean(axis=0, dtype=np.float64)
    spread = scores.std(axis=0, dtype=np.float64)
    positive_share = np.mean(scores.max(axis=0) > 0)
    is_steady = mean.std() < thresholds.MAX_LOGIT_DRIFT * spread.mean()
    return bool(is_steady and positive_share >= thresholds.MOST_SHARE)


@dataclass(slots=True)
class _MaskTally(ThresholdTally["MaskMaps"]):
    """Counts pixels above each threshold: FP32's, the candidate's, both's."""

    pixels: int = 0
    thresholds = tuple(thresholds.PIXEL_SHARES)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name, threshold in product(self.task.outputs, self.counts):
            reference_mask = reference[name] > threshold
            candidate_mask = candidate[name] > threshold
            common_pixels = 0
            if reference_mask.shape == candidate_mask.shape:
                common_pixels = int((reference_mask & candidate_mask).sum())
            counts = int(reference_mask.sum()), int(candidate_mask.sum()), common_pixels
            self.count(threshold, *counts)
            if threshold == self.thresholds[0]:
                self.pixels += reference_mask.size

    def result(self) -> TaskFigure | None:
        """Return the IoU above the threshold."""
        if self.threshold is None:
            return None
        reference, candidate, common = self.counts[self.threshold]
        iou = common / (reference + candidate - common)
        text = f"IoU {iou:.3f} of the pixels above {self.threshold:g}"
        return self.figure("IoU with FP32", iou, f"{iou:.3f}", text)

    def has_enough(self, threshold: float) -> bool:
        """Whether FP32 has enough pixels above a threshold."""
        return self.counts[threshold][0] > thresholds.PIXEL_SHARES[threshold] * self.pixels


@dataclass(frozen=True, slots=True)
class MaskMaps(EvaluationTask):
    """One or a few masks, in one output or several.

    Attributes:
        outputs: names of the outputs.
    """

    outputs: tuple[str, ...]
    name = "masks"
    tally_type = _MaskTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        kind = "maps" if len(self.outputs) > 1 else "a map"
        return f"{', '.join(self.outputs)}: {kind} of 0 to 1"


def fit_masks(name: str, samples: FirstSamples) -> MaskMaps | None:
    """Return the masks of an output that the user or the file says to hold such."""
    return MaskMaps((name,)) if samples.outputs[0][name].ndim == 4 else None


def find_masks(first_samples: FirstSamples) -> MaskMaps | None:
    """Recognise outputs of masks, all of one shape."""
    sizes = [image_size(inputs) for inputs in first_samples.inputs]
    names = []
    for name in first_samples.names:
        samples = first_samples.arrays(name)
        if not all(map(_is_mask_map, samples, sizes)):
            continue
        if all(map(_is_picture, samples, first_samples.inputs)):
            continue
        between = [np.mean((value > 0.1) & (value < 0.9)) for value in samples]
        peak = max(float(value.max()) for value in samples)
        if np.mean(between) < thresholds.MAX_BETWEEN_SHARE and peak >= thresholds.MIN_MASK_PEAK:
            names.append(name)
    shapes = {first_samples.outputs[0][name].shape for name in names}
    return MaskMaps(tuple(names)) if len(shapes) == 1 else None


def _is_mask_map(value: Array, size: tuple[int, int] | None) -> bool:
    """Whether it is values of about 0 to 1 in a few channels, for a picture of this size."""
    if size is None or value.ndim != 4 or not np.issubdtype(value.dtype, np.floating):
        return False
    has_channels_first = value.shape[1] <= thresholds.MAX_MASKS
    if not has_channels_first and value.shape[3] > thresholds.MAX_MASKS:
        return False
    sides = value.shape[2:] if has_channels_first else value.shape[1:3]
    if min(sides) < thresholds.MIN_MAP_SIDE or not _has_scale(
        sides, size, thresholds.MAX_MASK_SCALE
    ):
        return False
    if has_channels_first and value.shape[1] > 1 and sums_to_one(value, 1).all():
        return False
    return bool(
        value.min() >= -thresholds.MAX_MASK_EXCESS and value.max() <= 1 + thresholds.MAX_MASK_EXCESS
    )


def _is_picture(value: Array, inputs: Outputs) -> bool:
    """Whether an output correlates with the input picture."""
    for picture in inputs.values():
        if picture.shape == value.shape and picture.std() > 0 and value.std() > 0:
            correlations = np.corrcoef(picture.reshape(-1).astype(np.float64), value.reshape(-1))
            if float(correlations[0, 1]) > thresholds.MAX_PICTURE_CORRELATION:
                return True
    return False


@dataclass(slots=True)
class _HeatTally(TaskTally["HeatMaps"]):
    """Counts peaks at the same place, within a pixel."""

    peaks: int = 0
    matches: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        maps, candidate_maps = reference[self.task.output], candidate[self.task.output]
        if self.task.last:
            maps, candidate_maps = to_channels_first(maps), to_channels_first(candidate_maps)
        is_present = maps[0].max(axis=(1, 2)) > thresholds.MIN_VISIBLE
        self.peaks += int(is_present.sum())
        if maps.shape == candidate_maps.shape and np.isfinite(candidate_maps).all():
            distance = np.abs(_peak_cells(maps) - _peak_cells(candidate_maps)).max(axis=1)
            self.matches += int((is_present & (distance <= 1)).sum())

    def result(self) -> TaskFigure | None:
        return self.figure_of_kept("peaks", self.matches, self.peaks, "within a pixel")


@dataclass(frozen=True, slots=True)
class HeatMaps(EvaluationTask):
    """One key point per channel.

    Attributes:
        output: name of the output.
        count: number of channels.
        last: whether the channels are the last dimension.
    """

    output: str
    count: int
    last: bool = False
    name = "heat maps"
    reads = "{0.count} heat maps"
    tally_type = _HeatTally


def fit_heatmaps(name: str, samples: FirstSamples) -> HeatMaps | None:
    """Return the heat maps of an output that the user or the file says to hold such."""
    shape = samples.outputs[0][name].shape
    if len(shape) != 4:
        return None
    return HeatMaps(name, min(shape[1], shape[3]), last=shape[3] < shape[1])


def find_heatmaps(samples: FirstSamples) -> HeatMaps | None:
    """Recognise heat maps if exactly one output holds such.

    Other outputs of the same cells, such as offsets, count where a map is high.
    """
    tasks = [task for name in samples.names if (task := _find_heat(name, samples)) is not None]
    if len(tasks) != 1:
        return None
    (heat,) = tasks
    axis, outputs = -1 if heat.last else 1, samples.outputs[0]
    weight = OutputSlice(output=heat.output, axis=axis)
    cell_count = outputs[heat.output].size // heat.count
    parts = {}
    for name in samples.names:
        value = outputs[name]
        if name != heat.output and value.ndim == 4 and value.size == cell_count * value.shape[axis]:
            parts[name] = (OutputSlice(output=name, at=weight),)
    return replace(heat, parts=parts)


def _find_heat(name: str, samples: FirstSamples) -> HeatMaps | None:
    """Return an output's heat maps; with channels last if only these have the picture's aspect."""
    size = image_size(samples.inputs[0])
    values = samples.arrays(name)
    fitting = None
    for last in (False, True):
        maps = [to_channels_first(value) for value in values] if last else values
        if not _are_heat_maps(maps):
            continue
        rows, columns = maps[0].shape[2:]
        if size is not None and rows * size[1] == columns * size[0]:
            return HeatMaps(name, maps[0].shape[1], last)
        if not last:
            fitting = HeatMaps(name, maps[0].shape[1])
    return fitting


def _are_heat_maps(samples: Sequence[Array]) -> bool:
    """Whether values are about 0 to 1, and most channels have one narrow peak."""
    clear_shares = []
    for value in samples:
        if not _are_score_maps(value) or value.shape[1] < thresholds.MIN_POINTS:
            return False
        low, high = thresholds.HEAT_RANGE
        if value.min() < low or value.max() > high:
            return False
        maps = value[0].reshape(value.shape[1], -1)
        peaks = maps.max(axis=1)
        is_narrow = np.mean(maps > peaks[:, None] / 2, axis=1) < thresholds.MAX_PEAK_SHARE
        clear_shares.append(float(np.mean(is_narrow & (peaks > thresholds.MIN_VISIBLE))))
    return bool(np.mean(clear_shares) > 0.5)


def _peak_cells(value: Array) -> NDArray[np.int64]:
    """Return row and column of each channel's peak: [1, K, H, W] -> [K, 2]."""
    indices = value[0].reshape(value.shape[1], -1).argmax(axis=1)
    return np.stack(np.divmod(indices, value.shape[3]), axis=1)
