"""Boxes: how many of the float model's detections the candidate reproduces.

Boxes match by class and IoU > 0.5, after non-maximum suppression per class in both models. The
figure is the share of FP32's boxes that are kept; new boxes are counted beside it. Counts are made
at three score thresholds. The one reported is kept with the calibration; it is the highest above
which the float model has enough boxes.

`ListDecoder` decodes boxes that the model has suppressed itself, lists of corners, score and class:
end-to-end models such as YOLO v10, TensorRT's NMS, Paddle's, SSD's DetectionOutput, and
MMDetection's exports (corners with score, and classes). Such lists are sorted by score, so equal
rows of two models are different boxes: only the column of scores is compared by value, and nothing
if the length of the list varies. Other detectors: `detector_forms`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import ClassVar, Protocol

import numpy as np

from deploy.tasks import thresholds
from deploy.tasks.detections import (
    NOTHING,
    Detections,
    match_detections,
    scale_to_pixels,
    suppress_overlaps,
)
from deploy.tasks.detector_forms import find_detector
from deploy.tasks.evaluation_task import (
    BoxExample,
    EvaluationTask,
    ExampleSelection,
    TaskFigure,
    ThresholdTally,
)
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import Floats, Outputs, image_size
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

ListColumns = tuple[int, int, int]  # columns of the first corner, the score and the class
_JOINED: ListColumns = (0, 4, 5)  # of boxes, scores and classes that are put side by side

# columns of a row -> layouts
_LAYOUTS: Mapping[int, tuple[ListColumns, ...]] = {
    6: ((0, 4, 5), (0, 5, 4), (2, 1, 0)),
    7: ((1, 6, 5), (1, 5, 6), (3, 2, 1)),  # the first column is the number of the image
}


@dataclass(frozen=True, slots=True)
class ListDecoder:
    """Decoder of end-to-end lists, in one, two or three outputs.

    Attributes:
        outputs: (rows), (boxes with scores, classes), (boxes, scores) or (boxes, scores, classes).
        columns: columns of a single output.
        parts: slices of the outputs; see `EvaluationTask`.
    """

    outputs: tuple[str, ...]
    columns: ListColumns = _JOINED
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
        rows = _join_columns([outputs[name] for name in self.outputs])
        if rows is None:
            return None
        corner, score, class_column = self.columns
        numbers = np.nan_to_num(rows[:, class_column], nan=-1, posinf=-1, neginf=-1)
        boxes = rows[:, corner : corner + 4]
        return Detections.of(boxes, rows[:, score], numbers.round().astype(np.int64))


def find_list(samples: FirstSamples) -> ListDecoder | None:
    """Recognise a list in one, two or three outputs."""
    decoder = _find_several(samples)
    if decoder is not None:
        return decoder
    for name in samples.every:
        values = samples.arrays(name)
        columns = _find_columns([_join_columns([value]) for value in values])
        if columns is None:
            continue
        has_classes = values[0].shape[-1] != 5
        if has_classes or all(map(_are_falling, values)):
            parts = {name: _slice_scores(name, columns[1], samples)}
            return ListDecoder((name,), columns, parts)
    return None


def _are_falling(value: Array) -> bool:
    """Whether the scores of several boxes [.., K, 5] fall, as a list without classes has them."""
    scores = value.reshape(-1, 5)[:, 4]
    return len(scores) > 1 and bool((np.diff(scores) <= 0).all())


def _find_several(samples: FirstSamples) -> ListDecoder | None:
    """Recognise boxes with scores [.., K, 5] and classes, or boxes [.., K, 4], scores, classes."""
    shapes = {name: samples.outputs[0][name].shape for name in samples.every}
    for width, other_count in ((5, 1), (4, 2)):
        for boxes in [name for name in shapes if shapes[name][-1:] == (width,)]:
            for others in permutations(shapes, other_count):
                names = (boxes, *others)
                rows = [_join_columns([one[name] for name in names]) for one in samples.outputs]
                if not _are_list(rows, _JOINED):
                    continue
                scores = names[-2]
                parts: dict[str, tuple[OutputSlice, ...]] = dict.fromkeys(names, ())
                if other_count == 1:
                    parts[scores] = _slice_scores(scores, 4, samples)
                elif len({one[scores].shape for one in samples.outputs}) == 1:
                    parts[scores] = (OutputSlice(output=scores),)
                return ListDecoder(names, _JOINED, parts)
    return None


def _slice_scores(name: str, column: int, samples: FirstSamples) -> tuple[OutputSlice, ...]:
    """Return the slice of the scores in rows [1, K, n]; none if the length of the list varies."""
    shapes = {value.shape for value in samples.arrays(name)}
    if len(shapes) > 1 or len(shapes.pop()) < 3:
        return ()
    return (OutputSlice(output=name, axis=-1, start=column, stop=column + 1),)


def _join_columns(values: Sequence[Array]) -> Floats | None:
    """Return [1, K, n] or [K, n] as [K, n]; several outputs are concatenated to [K, 6].

    Boxes with a score [K, 5] are of class 0 without classes.
    """
    boxes, *others = values
    if len(values) == 1 and boxes.shape[-1:] != (5,):
        is_list = boxes.ndim >= 2 and boxes.shape[-1] in _LAYOUTS
        if not is_list or boxes.size != boxes.shape[-2] * boxes.shape[-1]:
            return None
        return boxes.reshape(-1, boxes.shape[-1]).astype(np.float64)
    if len(values) < 3 and boxes.shape[-1:] == (5,):
        scores = boxes[..., 4]
        classes = others[0] if others else np.zeros(scores.shape)
        boxes, others = boxes[..., :4], [scores, classes]
    count = boxes.size // 4
    if boxes.shape[-1:] != (4,) or [value.size for value in others] != [count, count]:
        return None
    columns = [boxes.reshape(-1, 4), *(value.reshape(-1, 1) for value in others)]
    return np.concatenate(columns, axis=1, dtype=np.float64)


def _find_columns(samples: Sequence[Floats | None]) -> ListColumns | None:
    """Return the only layout that fits all rows; None if there is none or several."""
    widths = {None if rows is None else rows.shape[1] for rows in samples}
    width = widths.pop()
    if widths or width is None:
        return None
    fitting = [layout for layout in _LAYOUTS[width] if _are_list(samples, layout)]
    return fitting[0] if len(fitting) == 1 else None


def _are_list(samples: Sequence[Floats | None], columns: ListColumns) -> bool:
    """Whether rows are boxes: ordered corners, a score of 0 to 1 and a whole class number."""
    tables = [rows for rows in samples if rows is not None]
    if not tables or len(tables) != len(samples):
        return False
    corner, score, class_column = columns
    rows = np.concatenate(tables)
    if not np.isfinite(rows).all():
        return False
    rows = rows[rows[:, score] > 0]  # lists of fixed length are padded
    if len(rows) < thresholds.MIN_LIST_ROWS:
        return False
    scores, classes = rows[:, score], rows[:, class_column]
    are_shares = scores.max() <= 1 + thresholds.UNIT_TOLERANCE and (scores != scores.round()).any()
    are_numbers = classes.min() >= 0 and (classes == classes.round()).all()
    low, high = rows[:, corner : corner + 2], rows[:, corner + 2 : corner + 4]
    are_ordered = np.mean(np.all(high >= low, axis=1)) >= thresholds.MIN_CODED_SHARE
    return bool(are_shares and are_numbers and are_ordered)


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
DECODERS: tuple[Callable[[FirstSamples], Decoder | None], ...] = (find_list, find_detector)


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

    @property
    def lists(self) -> frozenset[str]:
        """The outputs of lists of boxes."""
        return frozenset(self.decoder.outputs if isinstance(self.decoder, ListDecoder) else ())


def fit_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Return boxes of outputs that need not be a detector's for certain."""
    decoder = find_detector(samples, is_set=True)
    return None if decoder is None else BoxDetection(decoder, parts=decoder.parts)


def find_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Recognise outputs that hold boxes in a known form.

    Inputs of text or sound are excluded: the scores of a token or frame may be four numbers, too.
    """
    ranks = [value.ndim for inputs in samples.inputs for value in inputs.values()]
    if ranks and max(ranks) < _PICTURE:
        return None
    for find_decoder in DECODERS:
        decoder = find_decoder(samples)
        if decoder is not None:
            return BoxDetection(decoder, parts=decoder.parts)
    return None
