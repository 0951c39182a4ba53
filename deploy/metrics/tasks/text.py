"""Text by CTC (Graves et al. 2006): a symbol or the blank a step, [N, T, C] or [T, N, C].

The blank is the first or the last symbol and the one that most steps have, and it stands between
the symbols: where it is away for long, as silence is while somebody speaks, or where numbers of
tokens were fed or a vector for each step, these are classes of steps
(`deploy.metrics.tasks.sequences`). Texts are decoded greedily: the best symbol of each step, repeats
merged, blanks dropped. Where in every sample blanks only follow the last symbol, each step is the
slot of a symbol, as of a number plate's, and repeats stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.metrics.whole import are_shares_or_logarithms
from deploy.tensors import Array

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


def find(seen: Seen) -> Text | None:
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
