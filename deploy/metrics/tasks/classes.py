"""Classes: how often the candidate's best class is the float model's.

[N, C] scores. Probabilities (each row sums to 1) are classes for sure, as are their logarithms; raw
numbers are where the best stands out as no direction of an embedding does, or where they are few,
beyond what a Tanh gives, and of a mean that hardly changes from sample to sample, as training moves
one score up and others down. The fewest may be angles, which have each a usual value: there one
must stand off from the rest, or what is usual counts for nothing. Of several outputs that are few
raw scores each, as of the characters of a plate, all have to be surer of their class than numbers
of another kind are. Other vectors (a place, an embedding, the features of a picture) are not, nor
are probabilities of steps, of which several are near 1 at once, or [N, T, 1].

Beside probabilities there may be such, as a face's box or its age: the figure is of the classes
alone, and what it does not tell is judged as where there is no task.

Which outputs hold a class for each step, from their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, are_shares_or_logarithms, image_size
from deploy.metrics.tasks.embeddings import are_features, of_unit_length
from deploy.metrics.tasks.task import ClassExample, Foremost, Seen, TaskFigure, classes_figure
from deploy.tensors import Array

_STEPS = 4  # a sample, at least
_LONG = 8  # steps of probabilities, at least: fewer are labels
_FEW = 32  # numbers that no embedding makes do with
_SURE_STEPS = 0.8  # mean share of the best class, of few raw scores
_RATHER = 0.6  # the same of several outputs whose mean hardly changes
_STEADY_STEPS = 0.25  # what the mean of a step's raw scores varies by, of what its scores do
_HEADS = 0.5  # the same of several outputs, which all have to be such scores
_CLEAR = 0.9  # share of steps that are as scores are
_USUAL = 0.75  # of steps in one class: a dimension of a feature that is always large, maybe
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_UNDECIDED = 0.05  # share of probabilities between 0.3 and 0.7, at most, in several outputs
_ON = 0.25  # share of them above 0.5, at most
_APART = 5.0  # distance of the two sides of raw scores, in their own deviations
_RAW = 40.0  # beyond it raw scores are another unit

Floats = NDArray[np.float64]


def layout_of(samples: Sequence[Array], *, raw: bool) -> int | None:
    """The one axis of classes, 1 or 2; None where neither or both may be.

    Args:
        samples: of one output, with a batch of 1.
        raw: raw scores may be classes too.
    """
    for fits in (_all_shares, _all_raw) if raw else (_all_shares,):
        axes = [axis for axis in (1, 2) if _fits(samples, axis, fits)]
        if axes:
            return axes[0] if len(axes) == 1 else None
    return None


def are_heads(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, C] scores of classes of the same steps.

    As of marks that a letter may bear, one kind an output. Shares or raw: since each of them has to
    be sure of its best class, the mean of raw scores may vary more than that of one output alone.
    """
    if len(outputs) < 2 or any(one.ndim != 3 or len(one) != 1 for own in outputs for one in own):
        return False
    if any(len({one.shape[1] for one in same}) != 1 for same in zip(*outputs, strict=True)):
        return False
    return all(_fits(own, 2, _all_shares) or _fits(own, 2, _all_sure) for own in outputs)


def laid_out(value: Array, axis: int) -> Array | None:
    """[1, T, C], [T, 1, C] or [1, C, T] -> [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size or 1 not in value.shape[: 2 if axis == 2 else 1]:
        return None
    return value[0].T if axis == 1 else value.reshape(-1, value.shape[2])


def are_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is a probability of its own: near 0 or 1, and not always of one side."""
    if any(one.size < _LONG or one.size != np.prod(one.shape[-2:]) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    high, between = float(np.mean(values >= 0.9)), float(np.mean((values > 0.1) & (values < 0.9)))
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    return bool(within and between < min(_BETWEEN, high) and values.min() < 0.5)


def are_switches(samples: Sequence[Array]) -> bool:
    """Whether the one value of a sample is a probability: near 0 or 1, and each in some sample."""
    if any(one.size != 1 or one.ndim < 2 for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    high, low = values > 0.9, values < 0.1
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    return bool(within and (high | low).all() and high.any() and low.any())


def are_decisions(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, K] probabilities of as many steps, few of them above 0.5.

    As of notes and their beginnings: where nothing sounds, these may be well above 0.
    """
    if len(outputs) < 2 or any(one.ndim != 3 or len(one) != 1 for own in outputs for one in own):
        return False
    for sample in zip(*outputs, strict=True):
        if len({one.shape[1] for one in sample}) != 1 or sample[0].shape[1] < _LONG:
            return False
    return all(map(_decide, outputs))


def _decide(samples: Sequence[Array]) -> bool:
    values = np.concatenate([one.reshape(-1) for one in samples])
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    undecided = np.mean((values > 0.3) & (values < 0.7))
    return bool(within and undecided < _UNDECIDED and 0 < np.mean(values > 0.5) < _ON)


def are_raw_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is the raw score of a step: some on each side of 0, and far from it."""
    if any(one.size < _LONG or one.size != max(one.shape) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    on, off = values[values > 0], values[values <= 0]
    if values.min() >= 0:  # a Sigmoid's, which is 0 to the runtime where it is next to it
        return False
    if min(on.size, off.size) < 2 * len(samples) or np.abs(values).max() > _RAW:
        return False
    inner = math.sqrt((on.size * on.var() + off.size * off.var()) / values.size)
    return bool(on.mean() - off.mean() > _APART * inner)


def _fits(samples: Sequence[Array], axis: int, fits: Callable[[Sequence[Floats]], bool]) -> bool:
    laid = [laid_out(one, axis) for one in samples]
    known = [one.astype(np.float64) for one in laid if one is not None]
    if len(known) != len(laid) or len({one.shape[1] for one in known}) != 1:
        return False
    if any(len(one) < _STEPS or one.shape[1] < 2 for one in known):
        return False
    return fits(known)


def _all_shares(samples: Sequence[Floats]) -> bool:
    return all(map(are_shares_or_logarithms, samples))


def _all_raw(samples: Sequence[Floats]) -> bool:
    """Whether they are raw scores of classes, not the features or the values of a regression."""
    steps = np.concatenate(samples)
    counts = np.bincount(steps.argmax(axis=1))
    if np.count_nonzero(counts) < 2 or not _steps_about_zero(steps):
        return False
    if steps.shape[1] < _FEW:
        return best_share(steps) > _SURE_STEPS
    clear = float(np.mean(_stand_out(steps)))
    return bool(clear > _CLEAR and counts.max() < _USUAL * counts.sum())


def _all_sure(samples: Sequence[Floats]) -> bool:
    """Whether they are raw scores as a Softmax takes them.

    Their mean hardly changes, or steps are sure of their class and it changes little.
    """
    steps = np.concatenate(samples)
    several = np.count_nonzero(np.bincount(steps.argmax(axis=1))) > 1
    sure = best_share(steps)
    steady = (sure > _SURE_STEPS and _steps_about_zero(steps, _HEADS)) or (
        sure > _RATHER and _steps_about_zero(steps)
    )
    return bool(several and steady)


def best_share(steps: Floats) -> float:
    """Mean share of the best class of each row of raw scores, behind a Softmax."""
    power = np.exp(steps - steps.max(axis=1, keepdims=True))
    return float(np.mean(1 / power.sum(axis=1)))


def _steps_about_zero(steps: Floats, steady: float = _STEADY_STEPS) -> bool:
    """Whether steps differ in their scores, not in their mean: training moves one up, others down.

    The values of a spectrum all rise with its loudness, and coordinates with the place.
    """
    signs = (steps.min(axis=1) < 0) & (steps.max(axis=1) > 0)
    spread = float(np.mean(steps.std(axis=1)))
    return bool(signs.mean() > _CLEAR and steps.mean(axis=1).std() < steady * spread)


def _stand_out(steps: Floats) -> NDArray[np.bool_]:
    """Where the best is further off than the best of so many normal numbers, and the worst."""
    mean = steps.mean(axis=1)
    high, low = steps.max(axis=1) - mean, mean - steps.min(axis=1)
    usual = math.sqrt(2 * math.log(steps.shape[1])) * steps.std(axis=1)
    return np.asarray((high > 1.15 * usual) & (high > 1.2 * low))


_BOUND = 1.05  # of a Tanh, and what rounding adds
_STEADY = 0.5  # what the mean of few raw scores varies by, of what they do
_ANGLES = 6  # numbers of a pose: angles, a rotation, a direction
_TOGETHER = 0.5  # variance of the mean of so few, of what it would be if each varied by itself
_OFF = 1.5  # times as far as the others are apart
_SURE = 0.5  # mean share of the best class, of few raw scores in several outputs
_LEAST = 1e-12  # another class is a difference, even of two equal values


@dataclass(frozen=True, slots=True)
class Classes:
    """One score a class, in one output or in several heads.

    Attributes:
        outputs: their names.
        counts: of the classes of each.
        beside: other outputs, of numbers.
        parts: as of a task.
    """

    outputs: tuple[str, ...]
    counts: tuple[int, ...]
    beside: tuple[str, ...] = ()
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "classes"

    @property
    def form(self) -> str:
        """How the outputs are read."""
        counts = [str(count) for count in dict.fromkeys(self.counts)]
        return f"{', '.join(self.outputs)}: {' and '.join(counts)} classes"

    def tally(self) -> ClassTally:
        """A new comparison."""
        return ClassTally(self)


def find_classes(seen: Seen) -> Classes | None:
    """The task, where every output is one vector of scores a sample, or some are of shares."""
    vectors = {name: seen.arrays(name) for name in seen.names}
    found = [name for name, values in vectors.items() if _scores(values, alone=len(vectors) == 1)]
    shares = [name for name in found if all(map(are_shares_or_logarithms, _rows(vectors[name])))]
    if shares or len(found) < len(vectors):  # beside shares raw scores are numbers as likely
        found = shares
    beside = tuple(name for name in vectors if name not in found)
    if not found or not all(_are_numbers(vectors[name]) for name in beside):
        return None
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    if not pictures and (beside or any(map(_are_steps, vectors.values()))):
        return None
    if pictures and any(are_features(vectors[name]) for name in found):
        return None
    return Classes(tuple(found), tuple(vectors[name][0].size for name in found), beside)


def _are_steps(samples: Sequence[Array]) -> bool:
    """Whether they are steps, as likely: raw scores, or probabilities that are not one class's."""
    if all(map(are_shares_or_logarithms, _rows(samples))):
        return False
    several = any(one.ndim == 3 or np.count_nonzero(one > 0.5) > 1 for one in samples)
    return are_raw_tracks(samples) or (several and are_tracks(samples))


def _are_numbers(samples: Sequence[Array]) -> bool:
    """Whether each sample has one vector of finite numbers, if only of one."""
    return all(
        np.issubdtype(one.dtype, np.floating)
        and one.size == max(one.shape, default=1)
        and np.isfinite(one).all()
        for one in samples
    )


def _rows(samples: Sequence[Array]) -> list[NDArray[np.float64]]:
    return [np.asarray(one, np.float64).reshape(-1) for one in samples if _is_vector(one)]


def _scores(samples: Sequence[Array], *, alone: bool) -> bool:
    rows = _rows(samples)
    if not rows or len(rows) != len(samples) or not all(np.isfinite(r).all() for r in rows):
        return False
    if any(len(row) != len(rows[0]) for row in rows):
        return False
    if all(map(are_shares_or_logarithms, rows)):
        return True
    if len(rows[0]) < _FEW:  # a few numbers of one sign are a place or a size as well
        return _about_zero(np.stack(rows)) and (alone or best_share(np.stack(rows)) > _SURE)
    return all(map(_stands_out, rows)) and not all(map(of_unit_length, rows))


def _about_zero(rows: NDArray[np.float64]) -> bool:
    """Whether few raw scores differ in themselves, not in their mean, and leave [-1, 1]."""
    spread = float(rows.std(axis=1).mean())
    wide = rows.min() < 0 < rows.max() and np.abs(rows).max() > _BOUND
    steady = rows.mean(axis=1).std() < _STEADY * spread
    sure = rows.shape[1] > _ANGLES or _move_against(rows) or _one_wins(rows)
    return bool(wide and steady and sure)


def _move_against(rows: NDArray[np.float64]) -> bool:
    """Whether some of the numbers fall where others rise, over the samples."""
    moved = rows - rows.mean(axis=0)
    alone = float(moved.var(axis=1).mean()) / (rows.shape[1] - 1)
    return bool(moved.mean(axis=1).var() < _TOGETHER * alone)


def _one_wins(rows: NDArray[np.float64]) -> bool:
    """Whether one number stands off and the rest are alike, as of a sure class, in the mean."""
    if rows.shape[1] < 3:
        return False
    ranked = np.sort(rows, axis=1).mean(axis=0)
    return bool(ranked[-1] - ranked[-2] > _OFF * (ranked[-2] - ranked[0]))


def _is_vector(value: Array) -> bool:
    """[1, C] or [1, C, 1, 1] of floating-point numbers."""
    floating = np.issubdtype(value.dtype, np.floating)
    return floating and value.ndim >= 2 and value.shape[1] >= 2 and value.size == value.shape[1]


def _stands_out(row: Array) -> bool:
    """Whether the best is further off than the best of so many normal numbers, and the worst."""
    spread = float(row.std())
    high, low = float(row.max() - row.mean()), float(row.mean() - row.min())
    return high > 1.15 * math.sqrt(2 * math.log(len(row))) * spread and high > 1.2 * low


@dataclass(slots=True)
class ClassTally:
    """Counts of equal classes."""

    task: Classes
    samples: int = 0
    compared: int = 0
    first: int = 0
    five: int = 0
    examples: Foremost[ClassExample] = field(default_factory=Foremost)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample."""
        self.samples += 1
        for name in self.task.outputs:
            left = np.asarray(reference[name], np.float64).reshape(-1)
            right = np.asarray(candidate[name], np.float64).reshape(-1)
            self.compared += 1
            if left.shape != right.shape or not np.isfinite(left + right).all():
                continue
            wanted = int(left.argmax())
            ranked = np.argsort(-right, kind="stable")[:5]
            self.first += int(ranked[0] == wanted)
            self.five += int(wanted in ranked)
            self._offer(name, left, right, int(ranked[0]))

    def _offer(self, name: str, left: Array, right: Array, other: int) -> None:
        """A sample whose class changes; the surer FP32 was, the more it differs."""
        own = int(left.argmax())
        if other != own:
            example = ClassExample(
                number=self.samples - 1,
                output=name,
                reference=(own, float(left[own])),
                candidate=(other, float(right[other])),
            )
            sure = float(left[own] - left[other])
            self.examples.offer(example, differs=max(sure, _LEAST), says=0)

    @property
    def watched(self) -> frozenset[int]:
        """As of a tally."""
        return self.examples.numbers

    def shown(self) -> tuple[ClassExample, ...]:
        """Samples that change their class."""
        return self.examples.result()

    def result(self) -> TaskFigure | None:
        """Top-1 agreement; top-5 in words where there are classes enough to tell."""
        if not self.compared:
            return None
        among = f"{self.five} among the best five" if max(self.task.counts) > 10 else ""
        return classes_figure(
            self.first,
            self.samples,
            among,
            compared=self.compared,
            form=self.task.form,
            beside=self.task.beside,
        )
