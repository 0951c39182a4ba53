"""Boxes: how many of the float model's detections the candidate finds too.

Boxes match by class and IoU > 0.5 after each class's own suppression in both models. The figure is
Dice's, 2 kept / (boxes of FP32 + boxes of the candidate), so that boxes which the candidate alone
sees count as well as those it lost. Counts are kept for three thresholds of the score at once, and
the highest at which FP32 has enough boxes is told; so the figure is the float model's choice and
the same for every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks import anchors, centres, ended, joined, maps, yolo
from deploy.metrics.tasks.detections import NOTHING, Detections, in_pixels, matched, suppressed
from deploy.metrics.tasks.examples import BoxExample, Foremost
from deploy.metrics.tasks.task import Seen, TaskFigure, kept_figure

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
    yolo.find,
    ended.find,
    anchors.find,
    maps.find,
    centres.find,
    joined.find,
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


def find(seen: Seen) -> Boxes | None:
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
