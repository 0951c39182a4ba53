"""Classification: how often the candidate's top-1 class is the float model's.

`find_classes` recognises scores [N, C] per sample. Probabilities (rows that sum to 1) and their
logarithms are certain, also beside other numbers, which are judged as without a task. Logits are
accepted if the best one stands out as no direction of an embedding does; or if there are few, they
exceed a Tanh's range, and their mean hardly changes from sample to sample. Very few (`_ANGLES`) may
be angles of a pose: there one must stand off from the rest, or move against it. Several outputs of
few logits each, such as the characters of a licence plate, must all be confident of their class.

The first half of the file recognises outputs that hold classes per step, for sequence tasks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.embeddings import are_features, of_unit_length
from deploy.tasks.evaluation_task import (
    ClassExample,
    EvaluationTask,
    ExampleSelection,
    FirstSamples,
    TaskFigure,
    TaskTally,
)
from deploy.tasks.rows import (
    Floats,
    Outputs,
    activate,
    are_probabilities_or_logs,
    are_sorted,
    are_two_sided,
    find_order,
    is_floating,
)
from deploy.tasks.slices import split_output
from deploy.tensors import Array

_STEPS = 4  # steps per sample, at least
_LONG = 8  # steps of probabilities, at least: fewer are labels
_FEW = 32  # embeddings have at least as many numbers
_SURE_STEPS = 0.8  # mean probability of the best class of few logits, at least
_RATHER = 0.6  # the same of several outputs whose mean hardly changes
_STEADY_STEPS = 0.25  # deviation of a step's mean logit, relative to that of its logits, at most
_HEADS = 0.5  # the same of several outputs, which must all hold such scores
_CLEAR = 0.9  # share of steps that look like scores, at least
_USUAL = 0.75  # share of steps in one class, at most: more may be a large dimension of a feature
_DECIDED = 0.75  # share of single probabilities near 0 or 1, at least
_MANY, _HALF = 16, 0.5  # the same of so many or more: a share of an even spread is seldom so high
_BOTH = 2  # single logits on each side of 0, at least
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_UNDECIDED = 0.05  # share of probabilities between 0.3 and 0.7, at most, in several outputs
_ON = 0.25  # share of them above 0.5, at most


def find_class_axis(samples: Sequence[Array], *, raw: bool) -> int | None:
    """Return the axis of classes, 1 or 2; None if neither or both fit.

    `samples`: of one output, with a batch of 1. `raw`: accept logits, too.
    """
    for fits in (_all_shares, _all_raw) if raw else (_all_shares,):
        axes = [axis for axis in (1, 2) if _fits(samples, axis, fits)]
        if axes:
            return axes[0] if len(axes) == 1 else None
    return None


def are_heads(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, C] scores of classes of the same steps.

    Such as diacritics of a letter, one kind per output, as probabilities or logits. Since each
    output must be confident, the mean of logits may vary more than that of a single output.
    """
    sure = (_fits(own, 2, _all_shares) or _fits(own, 2, _all_sure) for own in outputs)
    return _have_same_steps(outputs, 1) and all(sure)


def _have_same_steps(outputs: Sequence[Sequence[Array]], least: int) -> bool:
    """Whether several outputs are [1, T, C] of as many steps T, `least` or more."""
    rows = [{(one.ndim, *one.shape[:2]) for one in sample} for sample in zip(*outputs, strict=True)]
    same = (len(row) == 1 and (3, 1, least) <= min(row) < (3, 2) for row in rows)
    return len(outputs) > 1 and all(same)


def to_steps(value: Array, axis: int) -> Array | None:
    """Return [1, T, C], [T, 1, C] or [1, C, T] as [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size or 1 not in value.shape[: 2 if axis == 2 else 1]:
        return None
    return value[0].T if axis == 1 else value.reshape(-1, value.shape[2])


def are_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is an independent probability: near 0 or 1, and not always near 1."""
    if any(one.size < _LONG or one.size != np.prod(one.shape[-2:]) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    high, between = float(np.mean(values >= 0.9)), float(np.mean((values > 0.1) & (values < 0.9)))
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    return bool(within and between < min(_BETWEEN, high) and values.min() < 0.5)


def are_switches(samples: Sequence[Array], *, raw: bool = False) -> bool:
    """Whether each sample's single value is a probability, mostly near 0 or 1, on both sides.

    Of `raw` values, whether they are logits in two groups, one on each side of 0.
    """
    if any(one.size != 1 or not one.ndim for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    if raw:
        return are_two_sided(values, _BOTH)
    high, low = values > 0.9, values < 0.1
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    least = _DECIDED if len(samples) < _MANY else _HALF
    return bool(within and (high | low).mean() >= least and high.any() and low.any())


def are_decisions(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, K] probabilities of the same steps, few above 0.5.

    Such as notes and their onsets, whose probabilities in silence may be well above 0.
    """
    return _have_same_steps(outputs, _LONG) and all(map(_decide, outputs))


def _decide(samples: Sequence[Array]) -> bool:
    values = np.concatenate([one.reshape(-1) for one in samples])
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    undecided = np.mean((values > 0.3) & (values < 0.7))
    return bool(within and undecided < _UNDECIDED and 0 < np.mean(values > 0.5) < _ON)


def are_raw_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is a logit of a step: some on each side of 0, and far from it."""
    if any(one.size < _LONG or one.size != max(one.shape) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    return are_two_sided(values, 2 * len(samples))


def _fits(samples: Sequence[Array], axis: int, fits: Callable[[Sequence[Floats]], bool]) -> bool:
    laid_out_samples = [to_steps(one, axis) for one in samples]
    steps = [one.astype(np.float64) for one in laid_out_samples if one is not None]
    if len(steps) != len(laid_out_samples) or len({one.shape[1] for one in steps}) != 1:
        return False
    if any(len(one) < _STEPS or one.shape[1] < 2 for one in steps):
        return False
    return fits(steps)


def _all_shares(samples: Sequence[Floats]) -> bool:
    return all(map(are_probabilities_or_logs, samples))


def _all_raw(samples: Sequence[Floats]) -> bool:
    """Whether steps are logits of classes, not features or regression values."""
    steps = np.concatenate(samples)
    counts = np.bincount(steps.argmax(axis=1))
    if np.count_nonzero(counts) < 2 or not _steps_about_zero(steps):
        return False
    if steps.shape[1] < _FEW:
        return mean_best_probability(steps) > _SURE_STEPS
    clear = float(np.mean(_stand_out(steps)))
    return bool(clear > _CLEAR and counts.max() < _USUAL * counts.sum())


def _all_sure(samples: Sequence[Floats]) -> bool:
    """Whether steps are logits of a Softmax.

    Their mean hardly changes, or it changes little and steps are confident of their class.
    """
    steps = np.concatenate(samples)
    several = np.count_nonzero(np.bincount(steps.argmax(axis=1))) > 1
    sure = mean_best_probability(steps)
    steady = (sure > _SURE_STEPS and _steps_about_zero(steps, _HEADS)) or (
        sure > _RATHER and _steps_about_zero(steps)
    )
    return bool(several and steady)


def mean_best_probability(steps: Floats) -> float:
    """Return the mean probability of each row's best class, after a Softmax of the logits."""
    return float(np.mean(activate(steps, "softmax").max(axis=1)))


def _steps_about_zero(steps: Floats, steady: float = _STEADY_STEPS) -> bool:
    """Whether steps differ in their logits, not in their mean.

    Training moves one logit up and others down; a spectrum rises with its loudness as a whole.
    """
    signs = (steps.min(axis=1) < 0) & (steps.max(axis=1) > 0)
    spread = float(np.mean(steps.std(axis=1)))
    return bool(signs.mean() > _CLEAR and steps.mean(axis=1).std() < steady * spread)


def _stand_out(steps: Floats) -> NDArray[np.bool_]:
    """Where the best exceeds the expected maximum of normal numbers, and the worst's distance."""
    mean = steps.mean(axis=1)
    high, low = steps.max(axis=1) - mean, mean - steps.min(axis=1)
    expected = math.sqrt(2 * math.log(steps.shape[1])) * steps.std(axis=1)
    return np.asarray((high > 1.15 * expected) & (high > 1.2 * low))


_BOUND = 1.05  # range of a Tanh, with rounding
_STEADY = 0.5  # deviation of the mean of few logits, relative to that of the logits, at most
_ANGLES = 6  # numbers of a pose: angles, a rotation, a direction
_TOGETHER = 0.5  # variance of their mean, relative to that of independent numbers, at most
_OFF = 1.5  # lead of the best, relative to the range of the others, at least
_SURE = 0.5  # mean probability of the best class, of few logits in several outputs, at least
_LEAST = 1e-12  # another class is a difference, even if both scores are equal


@dataclass(slots=True)
class _ClassTally(TaskTally["Classes"]):
    """Counts samples with equal classes."""

    compared: int = 0
    first: int = 0
    five: int = 0
    examples: ExampleSelection[ClassExample] = field(default_factory=ExampleSelection)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
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
        """Offer a sample whose class changes; it differs by FP32's margin."""
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
        """Indices of the samples that `shown` may still return."""
        return self.examples.numbers

    def shown(self) -> tuple[ClassExample, ...]:
        """Return samples whose class changes, FP32's largest margin first."""
        return self.examples.result()

    def result(self) -> TaskFigure | None:
        among = f"{self.five} among the best five" if max(self.task.counts) > 10 else ""
        return self.top1(self.first, self.compared, among)


@dataclass(frozen=True, slots=True)
class Classes(EvaluationTask):
    """Classification in one output or several heads."""

    outputs: tuple[str, ...]
    counts: tuple[int, ...]
    name = "classes"
    tally_type = _ClassTally

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        counts = [str(count) for count in dict.fromkeys(self.counts)]
        return f"{', '.join(self.outputs)}: {' and '.join(counts)} classes"


def find_classes(samples: FirstSamples) -> Classes | None:
    """Recognise outputs of one score vector per sample; with probabilities others may exist."""
    vectors = {name: samples.arrays(name) for name in samples.names}
    scored = [name for name, values in vectors.items() if _scores(values, alone=len(vectors) == 1)]
    probabilities = [
        name for name in scored if all(map(are_probabilities_or_logs, _rows(vectors[name])))
    ]
    if probabilities or len(scored) < len(vectors):  # then other vectors may be mere numbers
        scored = probabilities
    raw = samples.of_pictures
    scored = [name for name in scored if find_order(vectors[name], raw=raw) is None]
    others = tuple(name for name in vectors if name not in scored)
    if not scored or not all(_are_numbers(vectors[name]) for name in others):
        return None
    if not samples.of_pictures and (others or any(map(_are_steps, vectors.values()))):
        return None
    if samples.of_pictures and any(are_features(vectors[name]) for name in scored):
        return None
    return Classes(tuple(scored), tuple(vectors[name][0].size for name in scored))


def _are_steps(samples: Sequence[Array]) -> bool:
    """Whether they may be steps: logits, or probabilities that do not sum to 1."""
    if all(map(are_probabilities_or_logs, _rows(samples))):
        return False
    several = any(one.ndim == 3 or np.count_nonzero(one > 0.5) > 1 for one in samples)
    return are_raw_tracks(samples) or (several and are_tracks(samples))


def _are_numbers(samples: Sequence[Array]) -> bool:
    """Whether each sample has one vector (or scalar) of finite numbers."""
    return all(one.size == max(one.shape, default=1) and is_floating(one) for one in samples)


def _rows(samples: Sequence[Array]) -> list[Floats]:
    return [np.asarray(one, np.float64).reshape(-1) for one in samples if _is_vector(one)]


def _scores(samples: Sequence[Array], *, alone: bool) -> bool:
    rows = _rows(samples)
    if not rows or len(rows) != len(samples) or not all(np.isfinite(r).all() for r in rows):
        return False
    if any(len(row) != len(rows[0]) for row in rows):
        return False
    if are_sorted(rows):
        return False
    if all(map(are_probabilities_or_logs, rows)):
        return True
    if len(rows[0]) < _FEW:  # a few numbers of one sign may be a place or a size
        if len(split_output("", samples)) > 1:  # a place and a turn
            return False
        return _about_zero(np.stack(rows)) and (
            alone or mean_best_probability(np.stack(rows)) > _SURE
        )
    return bool(_stand_out(np.stack(rows)).all()) and not all(map(of_unit_length, rows))


def _about_zero(rows: Floats) -> bool:
    """Whether few logits differ among themselves, not in their mean, and leave [-1, 1]."""
    spread = float(rows.std(axis=1).mean())
    wide = rows.min() < 0 < rows.max() and np.abs(rows).max() > _BOUND
    steady = rows.mean(axis=1).std() < _STEADY * spread
    sure = rows.shape[1] > _ANGLES or _move_against(rows) or _one_wins(rows)
    return bool(wide and steady and sure)


def _move_against(rows: Floats) -> bool:
    """Whether some of the numbers fall while others rise, over the samples."""
    moved = rows - rows.mean(axis=0)
    independent = float(moved.var(axis=1).mean()) / (rows.shape[1] - 1)
    return bool(moved.mean(axis=1).var() < _TOGETHER * independent)


def _one_wins(rows: Floats) -> bool:
    """Whether on average one number stands off from the rest, as that of a confident class."""
    if rows.shape[1] < 3:
        return False
    ranked = np.sort(rows, axis=1).mean(axis=0)
    return bool(ranked[-1] - ranked[-2] > _OFF * (ranked[-2] - ranked[0]))


def _is_vector(value: Array) -> bool:
    """Whether it is [1, C] or [1, C, 1, 1] of floating-point numbers."""
    floating = np.issubdtype(value.dtype, np.floating)
    return floating and value.ndim >= 2 and value.shape[1] >= 2 and value.size == value.shape[1]
