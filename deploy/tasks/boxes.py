"""Boxes: how many of the float model's detections the candidate reproduces.

Boxes match by class and IoU > 0.5, after non-maximum suppression per class in both models. The
figure is the share of FP32's boxes that are kept; new boxes are counted beside it. Counts are made
at three score thresholds. The one reported is kept with the calibration; it is the highest above
which the float model has enough boxes.

`EndToEndDecoder` decodes boxes that the model has suppressed itself, lists of corners, score and
class: end- to-end models such as YOLO v10, TensorRT's NMS, Paddle's, SSD's DetectionOutput, and
MMDetection's exports (corners with score, and classes). Such lists are sorted by score, so equal
rows of two models are different boxes: only the column of scores is compared by value, and nothing
if the length of the list varies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import ClassVar, Protocol

import numpy as np

from deploy.tasks import anchors, single_tensor, yolo
from deploy.tasks.detections import (
    NOTHING,
    Detections,
    match_detections,
    scale_to_pixels,
    suppress_overlaps,
)
from deploy.tasks.evaluation_task import (
    BoxExample,
    EvaluationTask,
    ExampleSelection,
    FirstSamples,
    TaskFigure,
    ThresholdTally,
)
from deploy.tasks.rows import Floats, Outputs, image_size
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_ROWS = 3  # rows of all samples, at least, to be certain of the columns

# columns of a row -> (first of the corners, score, class)
_LAYOUTS: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    6: ((0, 4, 5), (0, 5, 4), (2, 1, 0)),
    7: ((1, 6, 5), (1, 5, 6), (3, 2, 1)),  # the first column is the number of the image
}


@dataclass(frozen=True, slots=True)
class EndToEndDecoder:
    """Decoder of end-to-end lists, in one, two or three outputs."""

    outputs: tuple[str, ...]  # (rows), (boxes with scores, classes) or (boxes, scores, classes)
    columns: tuple[int, int, int] = (0, 4, 5)  # columns of a single output, as in `_LAYOUTS`
    parts: Mapping[str, tuple[OutputSlice, ...]] = field(default_factory=dict)
    placed: ClassVar[bool] = True

    @property
    def classes(self) -> None:
        """Number of classes: a list does not contain it."""
        return None

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        return f"{', '.join(self.outputs)}: a list of boxes, scores and classes"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return the boxes of one sample."""
        rows = _joined([outputs[name] for name in self.outputs])
        if rows is None:
            return None
        corner, score, kind = self.columns
        numbers = np.nan_to_num(rows[:, kind], nan=-1, posinf=-1, neginf=-1)
        boxes = rows[:, corner : corner + 4]
        return Detections.of(boxes, rows[:, score], numbers.round().astype(np.int64))


def find_end_to_end(samples: FirstSamples) -> EndToEndDecoder | None:
    """Recognise a list in one, two or three outputs."""
    if (several := _find_several(samples)) is not None:
        return several
    for name in samples.every:
        rows = [_joined([value]) for value in samples.arrays(name)]
        columns = _columns(rows)
        five = samples.outputs[0][name].shape[-1:] == (
            5,
        )  # then scores, of several boxes, must fall
        falling = all(len(r) > 1 and (np.diff(r[:, 4]) <= 0).all() for r in rows if r is not None)
        if columns is not None and (falling or not five):
            return EndToEndDecoder((name,), columns, {name: _scores(name, columns[1], samples)})
    return None


def _find_several(samples: FirstSamples) -> EndToEndDecoder | None:
    """Recognise boxes with scores [.., K, 5] and classes, or boxes [.., K, 4], scores, classes."""
    first = samples.outputs[0]
    flat = [name for name in samples.every if max(first[name].shape, default=0)]
    for width, rest in ((5, 1), (4, 2)):
        heads = [name for name in samples.every if first[name].shape[-1:] == (width,)]
        for names in ((head, *more) for head in heads for more in permutations(flat, rest)):
            if _fits(
                [_joined([one[name] for name in names]) for one in samples.outputs], (0, 4, 5)
            ):
                score = names[-2]
                varies = len({one[score].shape for one in samples.outputs}) > 1
                whole = () if varies else (OutputSlice(output=score),)
                own = _scores(score, 4, samples) if rest == 1 else whole
                parts = {**dict.fromkeys(names, ()), score: own}
                return EndToEndDecoder(names, (0, 4, 5), parts)
    return None


def _scores(name: str, column: int, samples: FirstSamples) -> tuple[OutputSlice, ...]:
    shapes = {one.shape for one in samples.arrays(name)}
    fixed = len(shapes) == 1 and len(next(iter(shapes))) > 2
    return (OutputSlice(output=name, axis=-1, start=column, stop=column + 1),) if fixed else ()


def _joined(values: list[Array]) -> Floats | None:
    """Return [1, K, n] or [K, n] as [K, n]; several outputs are concatenated to [K, 6].

    Boxes with a score [K, 5] are of class 0 without classes.
    """
    if len(values) < 3 and values[0].shape[-1:] == (5,):
        rows, *kinds = values
        values = [rows[..., :4], rows[..., 4], *(kinds or [np.zeros(rows.shape[:-1])])]
    if len(values) == 1:
        value = values[0]
        fits = value.ndim >= 2 and value.shape[-1] in _LAYOUTS
        if not fits or value.size != int(np.prod(value.shape[-2:])):
            return None
        return value.reshape(-1, value.shape[-1]).astype(np.float64)
    boxes, *rest = (value.astype(np.float64) for value in values)
    if boxes.shape[-1:] != (4,) or [one.size for one in rest] != 2 * [boxes.size // 4]:
        return None
    return np.concatenate([boxes.reshape(-1, 4), *(one.reshape(-1, 1) for one in rest)], axis=1)


def _columns(samples: list[Floats | None]) -> tuple[int, int, int] | None:
    """Return the only layout that fits all rows; None if there is none or several."""
    present = [one for one in samples if one is not None]
    if len(present) != len(samples) or len({one.shape[1] for one in present}) != 1:
        return None
    fitting = [one for one in _LAYOUTS[present[0].shape[1]] if _fits(samples, one)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(samples: list[Floats | None], columns: tuple[int, int, int]) -> bool:
    present = [one for one in samples if one is not None]
    if len(present) != len(samples):
        return False
    corner, score, kind = columns
    rows = np.concatenate(present)
    if not np.isfinite(rows).all():
        return False
    rows = rows[rows[:, score] > 0]  # lists of fixed length are padded
    if len(rows) < _ROWS:
        return False
    scores, kinds = rows[:, score], rows[:, kind]
    low, high = rows[:, corner : corner + 2], rows[:, corner + 2 : corner + 4]
    shares = scores.max() <= 1 + 1e-3 and bool((scores != scores.round()).any())
    numbers = kinds.min() >= 0 and bool((kinds == kinds.round()).all())
    return shares and numbers and bool(np.mean(np.all(high >= low, axis=1)) > 0.99)


_PICTURE = 4  # dimensions of pictures and feature maps
_THRESHOLDS = (0.25, 0.15, 0.05)  # scores


class Decoder(Protocol):
    """Decodes one sample's outputs to boxes."""

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""

    @property
    def parts(self) -> Mapping[str, tuple[OutputSlice, ...]]:
        """Output -> its slices; see `EvaluationTask`."""

    @property
    def placed(self) -> bool:
        """Whether boxes are decoded to places in the picture, not only matched by anchor."""

    @property
    def classes(self) -> int | None:
        """Number of classes; None if the outputs do not show it."""

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """Return all boxes above the lowest threshold; None for other shapes."""


# Tried in this order; each must be certain.
DECODERS: tuple[Callable[[FirstSamples], Decoder | None], ...] = (
    yolo.find_yolo,
    find_end_to_end,
    anchors.find_anchors,
    yolo.find_yolo_maps,
    single_tensor.find_single_tensor,
)


@dataclass(slots=True)
class _BoxTally(ThresholdTally["BoxDetection"]):
    """Counts of boxes at each threshold: FP32's, the candidate's, both's."""

    thresholds = _THRESHOLDS
    examples: dict[float, ExampleSelection[BoxExample]] = field(
        default_factory=lambda: {threshold: ExampleSelection() for threshold in _THRESHOLDS}
    )

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left = self.task.decoder.boxes(inputs, reference)
        right = self.task.decoder.boxes(inputs, candidate)
        left, right = (NOTHING if one is None else suppress_overlaps(one) for one in (left, right))
        both = match_detections(left, right, tuple(self.counts))
        size = image_size(inputs) if self.task.decoder.placed else None
        for threshold, pairs in zip(self.counts, both, strict=True):
            own, others = left.above(threshold), right.above(threshold)
            self.count(threshold, len(own.scores), len(others.scores), len(pairs))
            if size is not None:
                rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
                lost = np.setdiff1d(np.arange(len(own.scores)), rows)
                new = np.setdiff1d(np.arange(len(others.scores)), columns)
                own, others = scale_to_pixels(own, size), scale_to_pixels(others, size)
                example = BoxExample(
                    number=self.samples - 1,
                    size=size,
                    threshold=threshold,
                    kept=own.at(rows),
                    found=others.at(columns),
                    lost=own.at(lost),
                    new=others.at(new),
                )
                differs = len(example.lost.scores) + len(example.new.scores)
                self.examples[threshold].offer(example, differs=differs, says=len(pairs))

    @property
    def watched(self) -> frozenset[int]:
        """Indices of the samples that `shown` may still return."""
        return frozenset().union(*(one.numbers for one in self.examples.values()))

    def shown(self) -> tuple[BoxExample, ...]:
        """Return the samples at the figure's threshold."""
        threshold = self.threshold
        return () if threshold is None else self.examples[threshold].result()

    def result(self) -> TaskFigure | None:
        return self.share_kept("score")


@dataclass(frozen=True, slots=True)
class BoxDetection(EvaluationTask):
    """Object detection."""

    decoder: Decoder
    name = "boxes"
    tally_type = _BoxTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        return self.decoder.form


def fit_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Return boxes of outputs that need not be a detector's for certain."""
    decoder = anchors.fit_anchors(samples)
    return None if decoder is None else BoxDetection(decoder)


def find_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Recognise outputs that hold boxes in a known form.

    Inputs of text or sound are excluded: the scores of a token or frame may be four numbers, too.
    """
    fed = [value for one in samples.inputs for value in one.values()]
    if fed and max(value.ndim for value in fed) < _PICTURE:
        return None
    for decoder in DECODERS:
        recognised = decoder(samples)
        if recognised is not None:
            return BoxDetection(recognised, parts=recognised.parts)
    return None
