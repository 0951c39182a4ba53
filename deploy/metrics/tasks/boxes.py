"""Boxes: how many of the float model's detections the candidate finds too.

Boxes match by class and IoU > 0.5 after each class's own suppression in both models. The figure is
Dice's, 2 kept / (boxes of FP32 + boxes of the candidate), so that boxes which the candidate alone
sees count as well as those it lost. Counts are kept for three thresholds of the score at once, and
the highest at which FP32 has enough boxes is told; so the figure is the float model's choice and
the same for every candidate.

Boxes after the model's own suppression: a list of corners, score and class.

YOLO v10 and others end to end, TensorRT's NMS behind a detector, Paddle's, DetectionOutput of SSD,
and the corners and score of MMDetection's exports beside classes.

Lists are in order of score, so a row of one model is no row of the other: values are compared in
the column of scores alone, and not at all where the length of the list varies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks import anchors, heatmaps, yolo
from deploy.metrics.tasks.detections import (
    NOTHING,
    Detections,
    Floats,
    in_pixels,
    matched,
    suppressed,
)
from deploy.metrics.tasks.task import BoxExample, Foremost, Seen, TaskFigure, kept_figure
from deploy.tensors import Array

_ROWS = 3  # of all samples, to be sure of the columns

# columns of a row -> (first of the corners, score, class)
_LAYOUTS: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    6: ((0, 4, 5), (0, 5, 4), (2, 1, 0)),
    7: ((1, 6, 5), (1, 5, 6), (3, 2, 1)),  # the first column is the number of the image
}


@dataclass(frozen=True, slots=True)
class Ended:
    """One list of rows, three outputs: boxes, scores, classes; or two: boxes with scores, classes.

    Attributes:
        outputs: one name, two or three.
        columns: as in `_LAYOUTS`, of one output.
        parts: as of a task.
    """

    outputs: tuple[str, ...]
    columns: tuple[int, int, int] = (0, 4, 5)
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def placed(self) -> bool:
        """Boxes are places."""
        return True

    @property
    def classes(self) -> None:
        """A list of boxes does not tell how many there are."""
        return None

    @property
    def form(self) -> str:
        """How the outputs are read."""
        return f"{', '.join(self.outputs)}: a list of boxes, scores and classes"

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """The boxes of one sample."""
        rows = _joined([outputs[name] for name in self.outputs])
        if rows is None:
            return None
        corner, score, kind = self.columns
        numbers = np.nan_to_num(rows[:, kind], nan=-1, posinf=-1, neginf=-1)
        boxes = rows[:, corner : corner + 4]
        return Detections.of(boxes, rows[:, score], numbers.round().astype(np.int64))


def find_end_to_end(seen: Seen) -> Ended | None:
    """The list, in one output, in two or in three."""
    for name in seen.every:
        columns = _columns([_joined([value]) for value in seen.arrays(name)])
        if columns is not None:
            return Ended((name,), columns, {name: _scores(name, columns[1], seen)})
    return _two(seen) or _three(seen)


def _two(seen: Seen) -> Ended | None:
    """Outputs of corners and score [.., K, 5] and classes [.., K]."""
    first = seen.outputs[0]
    for rows in (name for name in seen.every if first[name].shape[-1:] == (5,)):
        for kind in (name for name in seen.every if name != rows):
            samples = [_joined([one[rows], one[kind]]) for one in seen.outputs]
            if _fits(samples, (0, 4, 5)):
                return Ended((rows, kind), (0, 4, 5), {rows: _scores(rows, 4, seen), kind: ()})
    return None


def _three(seen: Seen) -> Ended | None:
    """Outputs of boxes [.., K, 4], scores [.., K] and classes [.., K]."""
    first = seen.outputs[0]
    boxes = [name for name in seen.every if first[name].shape[-1:] == (4,)]
    flat = [name for name in seen.every if name not in boxes and max(first[name].shape, default=0)]
    for box in boxes:
        for score in flat:
            for kind in flat:
                names = (box, score, kind)
                samples = [_joined([one[name] for name in names]) for one in seen.outputs]
                if score != kind and _fits(samples, (0, 4, 5)):
                    parts = dict.fromkeys((box, kind), ())
                    varies = len({one[score].shape for one in seen.outputs}) > 1
                    whole = () if varies else (Part(output=score),)
                    return Ended(names, (0, 4, 5), {**parts, score: whole})
    return None


def _scores(name: str, column: int, seen: Seen) -> tuple[Part, ...]:
    shapes = {one.shape for one in seen.arrays(name)}
    fixed = len(shapes) == 1 and len(next(iter(shapes))) > 2
    return (Part(output=name, axis=-1, start=column, stop=column + 1),) if fixed else ()


def _joined(values: list[Array]) -> Floats | None:
    """[1, K, n] or [K, n] -> [K, n]; of several outputs boxes [K, 4], scores and classes beside."""
    if len(values) == 1:
        value = values[0]
        alone = value.ndim >= 2 and value.shape[-1] in _LAYOUTS
        if not alone or value.size != int(np.prod(value.shape[-2:])):
            return None
        return value.reshape(-1, value.shape[-1]).astype(np.float64)
    if len(values) == 2:
        rows, kinds = values
        if rows.ndim < 2 or rows.shape[-1] != 5:
            return None
        values = [rows[..., :4], rows[..., 4], kinds]
    boxes, scores, kinds = (value.astype(np.float64) for value in values)
    if boxes.shape[-1:] != (4,) or not scores.size == kinds.size == boxes.size // 4:
        return None
    return np.concatenate(
        [boxes.reshape(-1, 4), scores.reshape(-1, 1), kinds.reshape(-1, 1)], axis=1
    )


def _columns(samples: list[Floats | None]) -> tuple[int, int, int] | None:
    """The one layout that all rows fit."""
    known = [one for one in samples if one is not None]
    if len(known) != len(samples) or len({one.shape[1] for one in known}) != 1:
        return None
    fitting = [one for one in _LAYOUTS[known[0].shape[1]] if _fits(samples, one)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(samples: list[Floats | None], columns: tuple[int, int, int]) -> bool:
    known = [one for one in samples if one is not None]
    if len(known) != len(samples):
        return False
    corner, score, kind = columns
    rows = np.concatenate(known)
    if not np.isfinite(rows).all():
        return False
    rows = rows[rows[:, score] > 0]  # the rest of a list of fixed length is filled up
    if len(rows) < _ROWS:
        return False
    scores, kinds = rows[:, score], rows[:, kind]
    low, high = rows[:, corner : corner + 2], rows[:, corner + 2 : corner + 4]
    shares = scores.max() <= 1 + 1e-3 and bool((scores != scores.round()).any())
    numbers = kinds.min() >= 0 and bool((kinds == kinds.round()).all())
    return shares and numbers and bool(np.mean(np.all(high >= low, axis=1)) > 0.99)


_PICTURE = 4  # dimensions of pictures, and of maps of them
_ENOUGH = ((0.25, 20), (0.15, 5), (0.05, 5))  # threshold, boxes of FP32 that it takes


class Decoder(Protocol):
    """Outputs of one sample to boxes."""

    @property
    def form(self) -> str:
        """How the outputs are read."""
        ...

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """As of a task."""
        ...

    @property
    def placed(self) -> bool:
        """Whether boxes are places in the picture, not numbers of anchors."""
        ...

    @property
    def classes(self) -> int | None:
        """How many classes there are; None where the form does not tell."""
        ...

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections | None:
        """All boxes above the lowest threshold; None where the shapes are others."""
        ...


# Tried in this order; each must be sure.
DECODERS: tuple[Callable[[Seen], Decoder | None], ...] = (
    yolo.find_yolo,
    find_end_to_end,
    anchors.find_anchors,
    yolo.find_yolo_maps,
    heatmaps.find_centers,
    anchors.find_joined,
)


@dataclass(frozen=True, slots=True)
class Boxes:
    """The task of a detector."""

    decoder: Decoder
    name: str = "boxes"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        return self.decoder.form

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """Boxes and scores apart."""
        return self.decoder.parts

    def tally(self) -> BoxTally:
        """A new comparison."""
        return BoxTally(self.decoder)


def find_boxes(seen: Seen) -> Boxes | None:
    """The task, where the outputs are boxes in a form that is known.

    Of text or sound they are not: a token's or a frame's scores may well be four numbers, too.
    """
    fed = [value for one in seen.inputs for value in one.values()]
    if fed and max(value.ndim for value in fed) < _PICTURE:
        return None
    for decoder in DECODERS:
        found = decoder(seen)
        if found is not None:
            return Boxes(found)
    return None


@dataclass(slots=True)
class BoxTally:
    """Counts of boxes at each threshold: FP32's, the candidate's, both's."""

    decoder: Decoder
    samples: int = 0
    counts: dict[float, list[int]] = field(
        default_factory=lambda: {threshold: [0, 0, 0] for threshold, _ in _ENOUGH}
    )
    examples: dict[float, Foremost[BoxExample]] = field(
        default_factory=lambda: {threshold: Foremost() for threshold, _ in _ENOUGH}
    )

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample."""
        self.samples += 1
        left = self.decoder.boxes(inputs, reference)
        right = self.decoder.boxes(inputs, candidate)
        left, right = (NOTHING if one is None else suppressed(one) for one in (left, right))
        both = matched(left, right, tuple(self.counts))
        size = image_size(inputs) if self.decoder.placed else None
        for (threshold, count), pairs in zip(self.counts.items(), both, strict=True):
            own, others = left.above(threshold), right.above(threshold)
            count[0] += len(own.scores)
            count[1] += len(others.scores)
            count[2] += len(pairs)
            if size is not None:
                example = _example(self.samples - 1, size, threshold, own, others, pairs)
                differs = len(example.lost.scores) + len(example.new.scores)
                self.examples[threshold].offer(example, differs=differs, says=len(pairs))

    @property
    def threshold(self) -> float | None:
        """The highest with boxes of FP32 enough; None without any such."""
        enough = (threshold for threshold, most in _ENOUGH if self.counts[threshold][0] >= most)
        return next(enough, None)

    @property
    def watched(self) -> frozenset[int]:
        """As of a tally."""
        return frozenset().union(*(one.numbers for one in self.examples.values()))

    def shown(self) -> tuple[BoxExample, ...]:
        """Samples at the threshold of the figure."""
        at = self.threshold
        return () if at is None else self.examples[at].result()

    def result(self) -> TaskFigure | None:
        """The figure at the threshold."""
        if self.threshold is None:
            return None
        return kept_figure(
            "boxes",
            self.counts[self.threshold],
            above=f"score above {self.threshold:g}",
            samples=self.samples,
            form=self.decoder.form,
        )


def _example(
    number: int,
    size: tuple[int, int],
    threshold: float,
    own: Detections,
    others: Detections,
    pairs: Sequence[tuple[int, int]],
) -> BoxExample:
    """One sample's boxes, told apart."""
    rows, columns = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    lost = np.setdiff1d(np.arange(len(own.scores)), rows)
    new = np.setdiff1d(np.arange(len(others.scores)), columns)
    own, others = in_pixels(own, size), in_pixels(others, size)
    return BoxExample(
        number=number,
        size=size,
        threshold=threshold,
        kept=own.at(rows),
        found=others.at(columns),
        lost=own.at(lost),
        new=others.at(new),
    )
