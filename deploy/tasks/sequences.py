"""Sequences: a class per step (voice activity, taggers), or text by CTC.

`find_steps`: [N, T, C] or [N, C, T] probabilities or log-probabilities that sum to 1 per step, or
logits that are confident of their best class, with a mean that hardly changes from step to step.
Also independent probabilities [N, T], [N, T, 1] or [N, T, C], several outputs [N, T, K] of them,
such as notes and their onsets, and a single step [N, 1], such as a wake word: all count as classes
by the side of 0.5, and logits [N, T] or [N, T, 1] by the side of 0. Several outputs may each have a
class for the same steps, such as the diacritics of a letter.

`find_text`: CTC (Graves et al. 2006), a symbol or the blank per step, [N, T, C] or [T, N, C]; of
pictures also [N, C, T], and of a height of 1, [N, C, 1, T] or [N, T, 1, C]. The blank is the first
or the last symbol, the most frequent one, and stands between symbols: if it is absent for long, if
a symbol lasts for more than three steps on average, or if the inputs are token ids or one vector
per step, these are steps. Texts are decoded greedily: repeats merged, blanks dropped. If blanks
only follow the last symbol in every sample, each step is the slot of a symbol, as in number plates,
and repeats stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.classes import (
    are_decisions,
    are_heads,
    are_raw_tracks,
    are_switches,
    are_tracks,
    find_class_axis,
    to_steps,
)
from deploy.tasks.evaluation_task import (
    EvaluationTask,
    FirstSamples,
    TaskFigure,
    TaskTally,
    find_states,
)
from deploy.tasks.rows import Outputs, are_probabilities_or_logs, is_floating
from deploy.tensors import Array

_USUAL = 0.75  # share of FP32's steps in one class above which only the others are counted


@dataclass(slots=True)
class _StepTally(TaskTally["Steps"]):
    """Counts steps by class and output: FP32's, both's; and the worst sample."""

    worst: float = 1.0
    own: list[NDArray[np.int64]] = field(init=False)
    both: list[NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [np.zeros(count, np.int64) for count in self.task.classes]
        self.both = [np.zeros_like(one) for one in self.own]

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        counted = [
            self._add_output(number, reference[name], candidate[name])
            for number, name in enumerate(self.task.outputs)
        ]
        valid, alike = (sum(side) for side in zip(*counted, strict=True))
        if valid:
            self.worst = min(self.worst, alike / valid)

    def _add_output(self, number: int, reference: Array, candidate: Array) -> tuple[int, int]:
        """Return the number of steps of one output with a valid class, and of equal ones."""
        none = self.task.classes[number]
        left, right = (step_classes(one, self.task, number) for one in (reference, candidate))
        right = right if right.shape == left.shape else np.full_like(left, none)
        valid = left < none
        alike = valid & (left == right)
        self.own[number] += np.bincount(left[valid], minlength=none)
        self.both[number] += np.bincount(left[alike], minlength=none)
        return int(valid.sum()), int(alike.sum())

    def result(self) -> TaskFigure | None:
        """Return the share of equal steps.

        If FP32 gives nearly all steps to one class, such as silence, a constant candidate would
        have most of them: then only steps that either model gives to another class count. None if
        FP32 gives all of them to one class.
        """
        total, alike = (sum(int(one.sum()) for one in side) for side in (self.own, self.both))
        usual = [int(one.argmax()) for one in self.own]
        rest = total - sum(int(one[k]) for one, k in zip(self.own, usual, strict=True))
        if not rest:
            return None
        words, worst = f"{alike} of {total} {self.task.agreement}", ""
        if total > self.samples:
            worst = f", {100 * self.worst:.1f} % in the worst sample"
        figure, value, count = "steps alike", alike / total, f"{alike} of {total}"
        if rest < (1 - _USUAL) * total:
            shared = sum(int(one[k]) for one, k in zip(self.both, usual, strict=True))
            others, counted = alike - shared, total - shared
            figure, value, count = (
                "steps alike but the usual",
                others / counted,
                f"{others} of {counted}",
            )
            words += f", {count} of those that are not in both models of {_usual(usual)}"
        return self.figure(figure, value, count, words + worst)


@dataclass(frozen=True, slots=True)
class Steps(EvaluationTask):
    """Classes of steps."""

    outputs: tuple[str, ...]
    # number of classes of each; 2 for independent probabilities, the sides of 0.5
    classes: tuple[int, ...]
    axis: int | None  # dimension of the classes, 1 or 2; None for independent probabilities
    raw: bool = False  # whether these are logits, before the Sigmoid
    name = "steps"
    tally_type = _StepTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        names = ", ".join(self.outputs)
        if self.axis is None:
            scores = "raw scores" if self.raw else "probabilities"
            return f"{names}: {scores} of steps or labels, each its own"
        return f"{names}: {', '.join(map(str, self.classes))} classes a step"

    @property
    def agreement(self) -> str:
        """What the two models are compared by, as text."""
        if self.axis is not None:
            return "steps of FP32's class"
        return "scores on FP32's side of 0" if self.raw else "probabilities on FP32's side of 0.5"


def find_steps(samples: FirstSamples) -> Steps | None:
    """Recognise one output of steps, or several of the same steps."""
    floating = [n for n in samples.names if all(map(is_floating, samples.arrays(n)))]
    states = find_states(samples)
    non_states = [name for name in floating if name not in states]
    if not samples.of_pictures and are_decisions([samples.arrays(name) for name in floating]):
        return Steps(tuple(floating), (2,) * len(floating), None)
    if not samples.of_pictures and are_heads([samples.arrays(name) for name in non_states]):
        return Steps(
            tuple(non_states), tuple(samples.arrays(name)[0].shape[2] for name in non_states), 2
        )
    for raw in (False, True):
        switches = tuple(n for n in non_states if are_switches(samples.arrays(n), raw=raw))
        numbers = tuple(name for name in non_states if name not in switches)
        others = [one for name in numbers for one in samples.arrays(name)]
        if switches and all(one.size == max(one.shape, default=1) for one in others):
            return Steps(switches, (2,) * len(switches), None, raw)
    tasks = [task for name in floating if (task := _read(name, samples, alone=len(floating) == 1))]
    if not tasks and (symbols := _find_symbols(samples)):  # runs of one class are too long for text
        text = symbols[0]
        if samples.outputs[0][text.output].ndim == 3:
            return Steps((text.output,), (text.symbols,), 1 if text.first else 2)
    return None if len(tasks) != 1 or _has_companion(tasks[0], floating, samples) else tasks[0]


def _read(name: str, first_samples: FirstSamples, *, alone: bool) -> Steps | None:
    samples = first_samples.arrays(name)
    axis = find_class_axis(samples, raw=alone)
    if axis is not None:
        return Steps((name,), (samples[0].shape[axis],), axis)
    flat = all(max(one.shape, default=0) == one.size for one in samples)
    # beside a class number for each step it is how sure that one is
    others = (
        first_samples.outputs[0][other].size for other in first_samples.names if other != name
    )
    alone = alone and samples[0].size not in others
    tracks = (
        alone and (flat or not first_samples.of_pictures) and are_tracks(samples)
    )  # others may be masks
    raw = alone and not first_samples.of_pictures and are_raw_tracks(samples)
    return Steps((name,), (2,), None, raw) if tracks or raw else None


def _has_companion(task: Steps, names: Sequence[str], samples: FirstSamples) -> bool:
    """Whether another output has as many steps, such as places of what is found at each."""
    counts = [step_classes(one, task, 0).size for one in samples.arrays(task.outputs[0])]
    others = (samples.arrays(name) for name in names if name not in task.outputs)
    return any(
        all(one.ndim <= 3 and n in one.shape for one, n in zip(values, counts, strict=True))
        for values in others
    )


def step_classes(value: Array, task: Steps, number: int) -> NDArray[np.int64]:
    """Return the class of each step of one output; its number of classes for a step of NaN.

    Empty for another form.
    """
    none = task.classes[number]
    if task.axis is None:
        sides = (value.reshape(-1) > (0 if task.raw else 0.5)).astype(np.int64)
        return np.where(np.isnan(value.reshape(-1)), none, sides)
    steps = to_steps(value, task.axis)
    if steps is None or steps.shape[1] != none:
        return np.zeros(0, np.int64)
    best = np.asarray(steps.argmax(axis=1), np.int64)
    best[np.isnan(steps).any(axis=1)] = none
    return best


def _usual(classes: Sequence[int]) -> str:
    """Return the most frequent class, or that of each output, as text."""
    if len(set(classes)) == 1:
        return f"the usual class {classes[0]}"
    return f"their output's usual class, {', '.join(map(str, classes))}"


_STEPS = 4  # at least
_SYMBOLS = 11  # at least
_BLANKS = 0.2  # share of blank steps, at least
_TOKENS = 4  # token ids of an input, at least
_AWAY = 16  # mean length of runs without the blank, at most
_LONGEST = 3  # mean length of runs of one symbol, at most: CTC's symbols are peaks


@dataclass(slots=True)
class _TextTally(TaskTally["Text"]):
    """Counts equal texts, FP32's symbols and edits."""

    alike: int = 0
    symbols: int = 0
    edits: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        outputs = (one[self.task.output] for one in (reference, candidate))
        left, right = (_steps(one, first=self.task.first) for one in outputs)
        reference_text, candidate_text = (
            [] if one is None else decode_greedily(one, self.task.blank, merged=self.task.merged)
            for one in (left, right)
        )
        self.alike += int(reference_text == candidate_text and right is not None)
        self.symbols += len(reference_text)
        self.edits += edit_distance(reference_text, candidate_text)

    def result(self) -> TaskFigure | None:
        if not self.symbols:
            return None
        count = f"{self.alike} of {self.samples}"
        edits = f"{self.edits} edit{'s' * (self.edits != 1)}"
        words = f"{count} texts as FP32's, {edits} in {self.symbols} symbols"
        figure = self.figure("texts alike", self.alike / self.samples, count, words)
        return replace(figure, kept=self.alike, counted=self.samples)


@dataclass(frozen=True, slots=True)
class Text(EvaluationTask):
    """One text per sample."""

    output: str
    symbols: int  # number of symbols with the blank
    blank: int
    merged: bool = True  # whether repeated symbols are merged
    first: bool = False  # whether the scores of a step are the first dimension, not the last
    name = "text"
    tally_type = _TextTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        slots = "" if self.merged else ", one a slot"
        return f"{self.output}: text of {self.symbols - 1} symbols, blank {self.blank}{slots}"


def find_text(samples: FirstSamples) -> Text | None:
    """Recognise text if the only output is such a sequence."""
    text, longest = _find_symbols(samples) or (None, 0)
    return text if longest <= _LONGEST else None


def _find_symbols(samples: FirstSamples) -> tuple[Text, float] | None:
    """Return the text, and the mean length of runs of one symbol, if steps have a blank."""
    if len(samples.names) != 1:
        return None
    orders = (False, True) if samples.of_pictures else (False,)
    return next(filter(None, (_read_symbols(samples, first=first) for first in orders)), None)


def _read_symbols(samples: FirstSamples, *, first: bool) -> tuple[Text, float] | None:
    (name,) = samples.names
    steps = [_steps(value, first=first) for value in samples.arrays(name)]
    valid = [one for one in steps if one is not None]
    if len(valid) != len(steps) or len({one.shape[1] for one in valid}) != 1:
        return None
    if not all(map(are_probabilities_or_logs, valid)) and not all(map(_are_logits, valid)):
        return None
    counts = np.bincount(np.concatenate([one.argmax(axis=1) for one in valid]))
    blank, symbols = int(counts.argmax()), valid[0].shape[1]
    if blank not in (0, symbols - 1) or counts[blank] < _BLANKS * counts.sum():
        return None
    away, longest = _symbol_runs(valid, blank)
    few = np.count_nonzero(counts) < 2 or away > _AWAY
    if few or _are_tokens(samples) or _has_input_per_step(valid, samples):
        return None
    merged = not all(_ends(one, blank) for one in valid)
    return Text(name, symbols, blank, merged, first), longest


def _steps(value: Array, *, first: bool) -> Array | None:
    """Return [1, T, C], [T, 1, C] or [1, T, 1, C] as [T, C]; None for other shapes.

    `first`: C is before T.
    """
    sides = [side for side in value.shape if side != 1]
    if value.ndim not in (3, 4) or len(sides) != 2 or (value.ndim == 4 and value.shape[1] == 1):
        return None
    if not is_floating(value):
        return None
    steps = value.reshape(sides).T if first else value.reshape(sides)
    return steps if len(steps) >= _STEPS and steps.shape[1] >= _SYMBOLS else None


def _are_logits(steps: Array) -> bool:
    """Whether steps may be logits: of both signs, and all of similar magnitude."""
    sizes = np.abs(steps).max(axis=1)
    mixed = np.mean(steps < 0, axis=1).min() > 0.1 and (steps.max(axis=1) > 0).all()
    return bool(mixed and sizes.max() < 8 * sizes.min())


def _symbol_runs(samples: Sequence[Array], blank: int) -> tuple[float, float]:
    """Return the mean length of runs of symbols between blanks, and of runs of one symbol."""
    best = np.concatenate([[blank, *one.argmax(axis=1)] for one in samples])
    symbol, begins = best[1:] != blank, best[1:] != best[:-1]
    spans, runs = ((symbol & begins & also).sum() for also in (best[:-1] == blank, True))
    return symbol.sum() / max(spans, 1), symbol.sum() / max(runs, 1)


def _are_tokens(samples: FirstSamples) -> bool:
    """Whether token ids are an input: CTC reads pictures and sound."""
    return any(
        one.dtype in (np.int32, np.int64) and one.ndim <= 3 and one.size >= _TOKENS
        for fed in samples.inputs
        for one in fed.values()
    )


def _has_input_per_step(samples: Sequence[Array], first_samples: FirstSamples) -> bool:
    """Whether there is an input vector per step, or a signal as long as a row of symbols.

    CTC has fewer steps than its input, and no symbol for each of its values.
    """
    return all(
        any(
            one.ndim == 3 and (one.shape[:2] == (1, len(steps)) or one.shape[2] == steps.shape[1])
            for one in fed.values()
        )
        for steps, fed in zip(samples, first_samples.inputs, strict=True)
    )


def _ends(steps: Array, blank: int) -> bool:
    """Whether no symbol follows a blank."""
    blanks = steps.argmax(axis=1) == blank
    return bool((blanks[1:] >= blanks[:-1]).all())


def decode_greedily(steps: Array, blank: int, *, merged: bool = True) -> list[int]:
    """Decode [T, C] scores greedily: best symbol of each step, repeats merged, blanks dropped."""
    best = steps.argmax(axis=1)
    first = np.concatenate([[True], (best[1:] != best[:-1]) | (not merged)])
    return [int(symbol) for symbol in best[first] if symbol != blank]


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the Levenshtein distance (Levenshtein 1965)."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]
