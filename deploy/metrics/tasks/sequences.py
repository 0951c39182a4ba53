"""A class for each step of a sequence: voice activity, taggers, classes of frames.

[N, T, C] or [N, C, T] shares of classes (those of each step sum to 1, or their logarithms do), or
raw scores where they are as a classifier's are: sure of their best class, with a mean that hardly
changes from step to step. Or probabilities that are each their own, [N, T], [N, T, 1] or [N, T, C],
which the labels of a picture are as well: there, sides of 0.5 are counted; also of several outputs
of as many steps, [N, T, K], as of notes and their beginnings, and of one step alone, [N, 1], as of
a wake word; and sides of 0 of raw scores, [N, T] or [N, T, 1]. Several outputs may each have a
class for the same steps, as of the marks that a letter bears. What CTC reads as text is found
before (`deploy.metrics.tasks.sequences`).

Text by CTC (Graves et al. 2006): a symbol or the blank a step, [N, T, C] or [T, N, C].

The blank is the first or the last symbol and the one that most steps have, and it stands between
the symbols: where it is away for long, as silence is while somebody speaks, or where numbers of
tokens were fed or a vector for each step, these are classes of steps
(`deploy.metrics.tasks.sequences`). Texts are decoded greedily: the best symbol of each step,
repeats merged, blanks dropped. Where in every sample blanks only follow the last symbol, each step
is the slot of a symbol, as of a number plate's, and repeats stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, are_shares_or_logarithms, image_size, is_floating
from deploy.metrics.tasks.classes import (
    are_decisions,
    are_heads,
    are_raw_tracks,
    are_switches,
    are_tracks,
    laid_out,
    layout_of,
)
from deploy.metrics.tasks.task import Seen, TaskFigure, carried
from deploy.tensors import Array

_USUAL = 0.75  # of FP32's steps in one class: the others alone are counted


@dataclass(frozen=True, slots=True)
class Steps:
    """Classes of steps.

    Attributes:
        outputs: their names.
        classes: how many each has; 2 of a probability of its own, which side of 0.5 it is on.
        axis: of the classes, 1 or 2; None of probabilities that are each their own.
        raw: whether these are still to go through a Sigmoid.
    """

    outputs: tuple[str, ...]
    classes: tuple[int, ...]
    axis: int | None
    raw: bool = False
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "steps"

    @property
    def form(self) -> str:
        """How the output is read."""
        names = ", ".join(self.outputs)
        if self.axis is None:
            scores = "raw scores" if self.raw else "probabilities"
            return f"{names}: {scores} of steps or labels, each its own"
        return f"{names}: {', '.join(map(str, self.classes))} classes a step"

    @property
    def said(self) -> str:
        """What two models are to have alike."""
        if self.axis is not None:
            return "steps of FP32's class"
        return "scores on FP32's side of 0" if self.raw else "probabilities on FP32's side of 0.5"

    def tally(self) -> StepTally:
        """A new comparison."""
        return StepTally(self)


def find_steps(seen: Seen) -> Steps | None:
    """The task, where one output alone is such a sequence, or all of them are."""
    floating = [n for n in seen.names if all(map(is_floating, seen.arrays(n)))]
    states = carried(seen)
    said = [name for name in floating if name not in states]
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if not pictures and are_decisions([seen.arrays(name) for name in floating]):
        return Steps(tuple(floating), (2,) * len(floating), None)
    if not pictures and are_heads([seen.arrays(name) for name in said]):
        return Steps(tuple(said), tuple(seen.arrays(name)[0].shape[2] for name in said), 2)
    if len(said) == 1 and are_switches(seen.arrays(said[0])):
        return Steps(tuple(said), (2,), None)
    found = [task for name in floating if (task := _read(name, seen, alone=len(floating) == 1))]
    if len(found) != 1 or _has_beside(found[0], floating, seen):
        return None
    return found[0]


def _read(name: str, seen: Seen, *, alone: bool) -> Steps | None:
    samples = seen.arrays(name)
    axis = layout_of(samples, raw=alone)
    if axis is not None:
        return Steps((name,), (samples[0].shape[axis],), axis)
    flat = all(max(one.shape, default=0) == one.size for one in samples)
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    tracks = alone and (flat or not pictures) and are_tracks(samples)  # others are maps of pictures
    raw = alone and not pictures and are_raw_tracks(samples)
    return Steps((name,), (2,), None, raw) if tracks or raw else None


def _has_beside(task: Steps, names: Sequence[str], seen: Seen) -> bool:
    """Whether another output has as many steps: places of what is found at each of them, maybe."""
    counts = [classes_of(one, task, 0).size for one in seen.arrays(task.outputs[0])]
    others = (seen.arrays(name) for name in names if name not in task.outputs)
    return any(
        all(one.ndim <= 3 and n in one.shape for one, n in zip(values, counts, strict=True))
        for values in others
    )


def classes_of(value: Array, task: Steps, number: int) -> NDArray[np.int64]:
    """The class of each step of one output; as many as it has where a step is NaN.

    None where the form is another.
    """
    none = task.classes[number]
    if task.axis is None:
        sides = (value.reshape(-1) > (0 if task.raw else 0.5)).astype(np.int64)
        return np.where(np.isnan(value.reshape(-1)), none, sides)
    steps = laid_out(value, task.axis)
    if steps is None or steps.shape[1] != none:
        return np.zeros(0, np.int64)
    best = np.asarray(steps.argmax(axis=1), np.int64)
    best[np.isnan(steps).any(axis=1)] = none
    return best


@dataclass(slots=True)
class StepTally:
    """Steps by class, of each output: FP32's, both's; and the worst sample."""

    task: Steps
    samples: int = 0
    worst: float = 1.0
    own: list[NDArray[np.int64]] = field(init=False)
    both: list[NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [np.zeros(count, np.int64) for count in self.task.classes]
        self.both = [np.zeros_like(one) for one in self.own]

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; steps of NaN or of another shape are of no class."""
        self.samples += 1
        counted = [
            self._add(number, reference[name], candidate[name])
            for number, name in enumerate(self.task.outputs)
        ]
        known, alike = (sum(side) for side in zip(*counted, strict=True))
        if known:
            self.worst = min(self.worst, alike / known)

    def _add(self, number: int, reference: Array, candidate: Array) -> tuple[int, int]:
        """Steps of one output whose class is known, and those alike."""
        none = self.task.classes[number]
        left, right = (classes_of(one, self.task, number) for one in (reference, candidate))
        right = right if right.shape == left.shape else np.full_like(left, none)
        known = left < none
        alike = known & (left == right)
        self.own[number] += np.bincount(left[known], minlength=none)
        self.both[number] += np.bincount(left[alike], minlength=none)
        return int(known.sum()), int(alike.sum())

    def result(self) -> TaskFigure | None:
        """The share of steps alike.

        Where FP32 gives nearly all steps to one class, as silence, a candidate that says nothing
        else has most of them: there, steps count that either model gives to another class. None
        where FP32 does so with all of them.
        """
        total, alike = (sum(int(one.sum()) for one in side) for side in (self.own, self.both))
        usual = [int(one.argmax()) for one in self.own]
        rest = total - sum(int(one[k]) for one, k in zip(self.own, usual, strict=True))
        if not rest:
            return None
        words, worst = f"{alike} of {total} {self.task.said}", ""
        if total > self.samples:
            worst = f", {100 * self.worst:.1f} % in the worst sample"
        figure, value, count = "steps alike", alike / total, f"{alike} of {total}"
        if rest < (1 - _USUAL) * total:
            shared = sum(int(one[k]) for one, k in zip(self.both, usual, strict=True))
            kept, seen = alike - shared, total - shared
            figure, value, count = "steps alike but the usual", kept / seen, f"{kept} of {seen}"
            words += f", {count} of those that are not in both models of {_usual(usual)}"
        return TaskFigure(
            task="steps",
            figure=figure,
            value=value,
            count=count,
            words=words + worst,
            samples=self.samples,
            form=self.task.form,
        )


def _usual(classes: Sequence[int]) -> str:
    """The class that is given most, or that of each output."""
    if len(set(classes)) == 1:
        return f"the usual class {classes[0]}"
    return f"their output's usual class, {', '.join(map(str, classes))}"


_STEPS = 4
_SYMBOLS = 11
_BLANKS = 0.2  # share of steps, at least
_TOKENS = 4  # numbers that were fed, at least
_AWAY = 16  # steps in a row without the blank, at most, in the mean


@dataclass(frozen=True, slots=True)
class Text:
    """A text a sample.

    Attributes:
        output: its name.
        symbols: how many there are, the blank among them.
        blank: its number.
        merged: whether a symbol that is repeated stands once.
        parts: as of a task.
    """

    output: str
    symbols: int
    blank: int
    merged: bool = True
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "text"

    @property
    def form(self) -> str:
        """How the output is read."""
        slots = "" if self.merged else ", one a slot"
        return f"{self.output}: text of {self.symbols - 1} symbols, blank {self.blank}{slots}"

    def tally(self) -> TextTally:
        """A new comparison."""
        return TextTally(self)


def find_text(seen: Seen) -> Text | None:
    """The task, where the only output is such a sequence."""
    if len(seen.names) != 1:
        return None
    (name,) = seen.names
    steps = [_steps(value) for value in seen.arrays(name)]
    known = [one for one in steps if one is not None]
    if len(known) != len(steps) or len({one.shape[1] for one in known}) != 1:
        return None
    if not all(map(are_shares_or_logarithms, known)) and not all(_raw(one) for one in known):
        return None
    counts = np.bincount(np.concatenate([one.argmax(axis=1) for one in known]))
    blank, symbols = int(counts.argmax()), known[0].shape[1]
    if blank not in (0, symbols - 1) or counts[blank] < _BLANKS * counts.sum():
        return None
    if (
        np.count_nonzero(counts) < 2
        or _away(known, blank) > _AWAY
        or _are_tokens(seen)
        or _one_each(known, seen)
    ):
        return None
    return Text(name, symbols, blank, not all(_ends(one, blank) for one in known))


def _steps(value: Array) -> Array | None:
    """[1, T, C] or [T, 1, C] -> [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size or 1 not in value.shape[:2]:
        return None
    if not np.issubdtype(value.dtype, np.floating):
        return None
    steps = value.reshape(-1, value.shape[2])
    fits = len(steps) >= _STEPS and steps.shape[1] >= _SYMBOLS and np.isfinite(steps).all()
    return steps if fits else None


def _raw(steps: Array) -> bool:
    """Whether each step's may be raw scores: of both signs, and all steps of one size."""
    sizes = np.abs(steps).max(axis=1)
    mixed = np.mean(steps < 0, axis=1).min() > 0.1 and (steps.max(axis=1) > 0).all()
    return bool(mixed and sizes.max() < 8 * sizes.min())


def _away(samples: Sequence[Array], blank: int) -> float:
    """Mean length of what stands between two blanks, of those that hold a symbol at all."""
    spans = steps = 0
    for sample in samples:
        symbol = np.concatenate([[False], sample.argmax(axis=1) != blank])
        steps += int(symbol.sum())
        spans += int((symbol[1:] & ~symbol[:-1]).sum())
    return steps / max(spans, 1)


def _are_tokens(seen: Seen) -> bool:
    """Whether numbers of tokens were fed: CTC reads pictures and sound."""
    return any(
        one.dtype in (np.int32, np.int64) and one.ndim <= 3 and one.size >= _TOKENS
        for fed in seen.inputs
        for one in fed.values()
    )


def _one_each(samples: Sequence[Array], seen: Seen) -> bool:
    """Whether a vector was fed for each step: CTC makes fewer steps of what it reads."""
    return all(
        any(one.ndim == 3 and one.shape[:2] == (1, len(steps)) for one in fed.values())
        for steps, fed in zip(samples, seen.inputs, strict=True)
    )


def _ends(steps: Array, blank: int) -> bool:
    """Whether no symbol stands behind a blank."""
    blanks = steps.argmax(axis=1) == blank
    return bool((blanks[1:] >= blanks[:-1]).all())


def decoded(steps: Array, blank: int, *, merged: bool = True) -> list[int]:
    """Symbols of [T, C] scores: best of each step, repeats merged if so, blanks dropped."""
    best = steps.argmax(axis=1)
    first = np.concatenate([[True], (best[1:] != best[:-1]) | (not merged)])
    return [int(symbol) for symbol in best[first] if symbol != blank]


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Insertions, deletions and exchanges from one to the other (Levenshtein 1965)."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


@dataclass(slots=True)
class TextTally:
    """Texts alike, symbols of FP32 and edits."""

    task: Text
    samples: int = 0
    alike: int = 0
    symbols: int = 0
    edits: int = 0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of another form or of NaN reads nothing."""
        self.samples += 1
        left, right = (_steps(one[self.task.output]) for one in (reference, candidate))
        own, others = (
            [] if one is None else decoded(one, self.task.blank, merged=self.task.merged)
            for one in (left, right)
        )
        self.alike += int(own == others and right is not None)
        self.symbols += len(own)
        self.edits += edit_distance(own, others)

    def result(self) -> TaskFigure | None:
        """The share of texts alike; None where FP32 read nothing at all."""
        if not self.symbols:
            return None
        return TaskFigure(
            task="text",
            figure="texts alike",
            value=self.alike / self.samples,
            count=f"{self.alike} of {self.samples}",
            words=f"{self.alike} of {self.samples} texts as FP32's,"
            f" {self.edits} edits in {self.symbols} symbols",
            samples=self.samples,
            form=self.task.form,
        )
