"""Classification: how often the candidate's top-1 class is the float model's.

`find_classes` recognises scores [N, C] per sample. Probabilities (rows that sum to 1) and their
logarithms are certain, also beside other numbers, which are judged as without a task. Logits are
accepted if the best one stands out as no direction of an embedding does; or if there are few, they
exceed a Tanh's range, and their mean hardly changes from sample to sample. Very few
(`_MAX_ANGLES`) may be angles of a pose: there one must stand off from the rest, or move against it.
Several outputs of
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
    are_ordered,
    are_probabilities_or_logs,
    are_sorted,
    are_two_sided,
    is_floating,
)
from deploy.tasks.slices import split_output
from deploy.tensors import Array

_MIN_STEPS = 4  # steps per sample, at least
_MIN_PROBABILITY_STEPS = 8  # steps of probabilities, at least: fewer are labels
_MIN_EMBEDDING_SIZE = 32  # embeddings have at least as many numbers
_MIN_STEP_CONFIDENCE = 0.8  # mean probability of the best class of few logits, at least
_MIN_HEAD_CONFIDENCE = 0.6  # the same of several outputs whose mean hardly changes
_MAX_STEP_DRIFT = 0.25  # deviation of a step's mean logit, relative to that of its logits, at most
_MAX_HEAD_DRIFT = 0.5  # the same of several outputs, which must all hold such scores
_MIN_SCORE_STEPS = 0.9  # share of steps that look like scores, at least
_MAX_CLASS_SHARE = 0.75  # of steps, at most: more may be a large dimension of a feature
_MIN_DECIDED = 0.75  # share of single probabilities near 0 or 1, at least
# the same of so many samples or more: a share of an even spread is seldom so high
_MANY_SAMPLES, _MIN_DECIDED_OF_MANY = 16, 0.5
_MIN_PER_SIDE = 2  # single logits on each side of 0, at least
_MAX_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_MAX_UNDECIDED = 0.05  # share of probabilities between 0.3 and 0.7, at most, in several outputs
_MAX_ON = 0.25  # share of them above 0.5, at most


def find_class_axis(samples: Sequence[Array], *, raw: bool) -> int | None:
    """Return the axis of classes, 1 or 2; None if neither or both fit.

    `samples`: of one output, with a batch of 1. `raw`: accept logits, too.
    """
    checks = [_are_all_probabilities]
    if raw:
        checks.append(_are_logits_of_classes)
    for check in checks:
        axes = [axis for axis in (1, 2) if _fit_steps(samples, axis, check)]
        if axes:
            return axes[0] if len(axes) == 1 else None
    return None


def are_heads(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, C] scores of classes of the same steps.

    An example is diacritics of a letter, one kind per output, as probabilities or logits. Since
    each output must be confident, the mean of logits may vary more than that of a single output.
    """
    if not _have_same_steps(outputs, 1):
        return False
    for samples in outputs:
        are_probabilities = _fit_steps(samples, 2, _are_all_probabilities)
        if not are_probabilities and not _fit_steps(samples, 2, _are_logits_of_head):
            return False
    return True


def _have_same_steps(outputs: Sequence[Sequence[Array]], min_steps: int) -> bool:
    """Whether several outputs are [1, T, C] of as many steps T, `min_steps` or more."""
    if len(outputs) < 2:
        return False
    for sample in zip(*outputs, strict=True):
        if any(value.ndim != 3 or len(value) != 1 for value in sample):
            return False
        step_counts = {value.shape[1] for value in sample}
        if len(step_counts) != 1 or min(step_counts) < min_steps:
            return False
    return True


def to_steps(value: Array, axis: int) -> Array | None:
    """Return [1, T, C], [T, 1, C] or [1, C, T] as [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size:
        return None
    if axis == 1:
        return value[0].T if value.shape[0] == 1 else None
    return value.reshape(-1, value.shape[2]) if 1 in value.shape[:2] else None


def are_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is an independent probability: near 0 or 1, and not always near 1."""
    for value in samples:
        if value.size < _MIN_PROBABILITY_STEPS or value.size != np.prod(value.shape[-2:]):
            return False
    values = _join_values(samples)
    high = float(np.mean(values >= 0.9))
    between = float(np.mean((values > 0.1) & (values < 0.9)))
    if not _are_in_unit_range(values) or values.min() >= 0.5:
        return False
    return between < min(_MAX_BETWEEN, high)


def _join_values(samples: Sequence[Array]) -> Floats:
    """Return the values of all samples in one vector."""
    return np.concatenate([value.reshape(-1) for value in samples]).astype(np.float64)


def _are_in_unit_range(values: Floats) -> bool:
    """Whether all values lie from 0 to 1 but for rounding."""
    return bool(values.min() >= -1e-6 and values.max() <= 1 + 1e-6)


def are_switches(samples: Sequence[Array], *, raw: bool = False) -> bool:
    """Whether each sample's single value is a probability, mostly near 0 or 1, on both sides.

    With `raw`, whether the values are logits in two groups, one on each side of 0.
    """
    if any(value.size != 1 or not value.ndim for value in samples):
        return False
    values = _join_values(samples)
    if raw:
        return are_two_sided(values, _MIN_PER_SIDE)
    is_high, is_low = values > 0.9, values < 0.1
    if not _are_in_unit_range(values) or not is_high.any() or not is_low.any():
        return False
    min_decided = _MIN_DECIDED if len(samples) < _MANY_SAMPLES else _MIN_DECIDED_OF_MANY
    return bool((is_high | is_low).mean() >= min_decided)


def are_decisions(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, K] probabilities of the same steps, few above 0.5.

    An example is notes and their onsets, whose probabilities in silence may be well above 0.
    """
    if not _have_same_steps(outputs, _MIN_PROBABILITY_STEPS):
        return False
    return all(_decide(samples) for samples in outputs)


def _decide(samples: Sequence[Array]) -> bool:
    """Whether an output's values are decided probabilities, few of them above 0.5."""
    values = np.concatenate([value.reshape(-1) for value in samples])
    undecided = np.mean((values > 0.3) & (values < 0.7))
    if not _are_in_unit_range(values) or undecided >= _MAX_UNDECIDED:
        return False
    return bool(0 < np.mean(values > 0.5) < _MAX_ON)


def are_raw_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is a logit of a step: some on each side of 0, and far from it."""
    for value in samples:
        if value.size < _MIN_PROBABILITY_STEPS or value.size != max(value.shape):
            return False
    return are_two_sided(_join_values(samples), 2 * len(samples))


def _fit_steps(
    samples: Sequence[Array], axis: int, check: Callable[[Sequence[Floats]], bool]
) -> bool:
    """Whether all samples are enough steps of as many classes along `axis`, and pass the check."""
    all_steps = []
    for value in samples:
        steps = to_steps(value, axis)
        if steps is None or len(steps) < _MIN_STEPS or steps.shape[1] < 2:
            return False
        all_steps.append(steps.astype(np.float64))
    class_counts = {steps.shape[1] for steps in all_steps}
    return len(class_counts) == 1 and check(all_steps)


def _are_all_probabilities(samples: Sequence[Floats]) -> bool:
    return all(map(are_probabilities_or_logs, samples))


def _are_logits_of_classes(samples: Sequence[Floats]) -> bool:
    """Whether steps are logits of classes, not features or regression values."""
    steps = np.concatenate(samples)
    counts = np.bincount(steps.argmax(axis=1))
    if np.count_nonzero(counts) < 2 or not _are_steps_about_zero(steps):
        return False
    if steps.shape[1] < _MIN_EMBEDDING_SIZE:
        return mean_best_probability(steps) > _MIN_STEP_CONFIDENCE
    if counts.max() >= _MAX_CLASS_SHARE * counts.sum():
        return False
    return float(np.mean(_stand_out(steps))) > _MIN_SCORE_STEPS


def _are_logits_of_head(samples: Sequence[Floats]) -> bool:
    """Whether steps are logits of a Softmax, one of several outputs.

    Their mean hardly changes, or it changes little and steps are confident of their class.
    """
    steps = np.concatenate(samples)
    if np.count_nonzero(np.bincount(steps.argmax(axis=1))) < 2:
        return False
    confidence = mean_best_probability(steps)
    if confidence > _MIN_STEP_CONFIDENCE and _are_steps_about_zero(steps, _MAX_HEAD_DRIFT):
        return True
    return confidence > _MIN_HEAD_CONFIDENCE and _are_steps_about_zero(steps)


def mean_best_probability(steps: Floats) -> float:
    """Return the mean probability of each row's best class, after a Softmax of the logits."""
    return float(np.mean(activate(steps, "softmax").max(axis=1)))


def _are_steps_about_zero(steps: Floats, max_drift: float = _MAX_STEP_DRIFT) -> bool:
    """Whether steps differ in their logits, not in their mean.

    Training moves one logit up and others down; a spectrum rises as one with its loudness.
    """
    has_both_signs = (steps.min(axis=1) < 0) & (steps.max(axis=1) > 0)
    if has_both_signs.mean() <= _MIN_SCORE_STEPS:
        return False
    spread = float(np.mean(steps.std(axis=1)))
    return bool(steps.mean(axis=1).std() < max_drift * spread)


def _stand_out(steps: Floats) -> NDArray[np.bool_]:
    """Return where the best exceeds the expected maximum of normal numbers, and the worst."""
    mean = steps.mean(axis=1)
    high, low = steps.max(axis=1) - mean, mean - steps.min(axis=1)
    expected = math.sqrt(2 * math.log(steps.shape[1])) * steps.std(axis=1)
    return np.asarray((high > 1.15 * expected) & (high > 1.2 * low))


_MAX_TANH = 1.05  # range of a Tanh, with rounding
_MAX_LOGIT_DRIFT = 0.5  # deviation of few logits' mean, relative to that of the logits, at most
_MAX_ANGLES = 6  # numbers of a pose: angles, a rotation, a direction
_MAX_COMMON_MOTION = 0.5  # variance of their mean, relative to independent numbers, at most
_MIN_LEAD = 1.5  # lead of the best, relative to the range of the others, at least
_MIN_CONFIDENCE = 0.5  # mean probability of the best of few logits in several outputs, at least
_MIN_DIFFERENCE = 1e-12  # another class is a difference, even if both scores are equal


@dataclass(slots=True)
class _ClassTally(TaskTally["Classes"]):
    """Counts samples with equal classes."""

    compared: int = 0
    top1_matches: int = 0
    top5_matches: int = 0
    examples: ExampleSelection[ClassExample] = field(default_factory=ExampleSelection)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        for name in self.task.outputs:
            reference_scores = np.asarray(reference[name], np.float64).reshape(-1)
            scores = np.asarray(candidate[name], np.float64).reshape(-1)
            self.compared += 1
            if reference_scores.shape != scores.shape:
                continue
            if not np.isfinite(reference_scores + scores).all():
                continue

            reference_class = int(reference_scores.argmax())
            best_classes = np.argsort(-scores, kind="stable")[:5].tolist()
            if reference_class in best_classes:
                self.top5_matches += 1
            if reference_class == best_classes[0]:
                self.top1_matches += 1
                continue
            self._offer_example(name, reference_scores, scores)

    def _offer_example(self, name: str, reference_scores: Array, scores: Array) -> None:
        """Offer a sample whose class changes; it differs by FP32's margin."""
        reference_class, changed_class = int(reference_scores.argmax()), int(scores.argmax())
        example = ClassExample(
            number=self.samples - 1,
            output=name,
            reference=(reference_class, float(reference_scores[reference_class])),
            candidate=(changed_class, float(scores[changed_class])),
        )
        margin = float(reference_scores[reference_class] - reference_scores[changed_class])
        self.examples.offer(example, differs=max(margin, _MIN_DIFFERENCE), says=0)

    @property
    def watched(self) -> frozenset[int]:
        """Indices of the samples that `shown` may still return."""
        return self.examples.numbers

    def shown(self) -> tuple[ClassExample, ...]:
        """Return samples whose class changes, FP32's largest margin first."""
        return self.examples.result()

    def result(self) -> TaskFigure | None:
        top5_text = ""
        if max(self.task.counts) > 10:
            top5_text = f"{self.top5_matches} among the best five"
        return self.top1(self.top1_matches, self.compared, top5_text)


@dataclass(frozen=True, slots=True)
class Classes(EvaluationTask):
    """Classification in one output or several heads.

    Attributes:
        outputs: names of the outputs.
        counts: number of classes of each.
    """

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
    is_single = len(vectors) == 1
    scores = [name for name in vectors if _are_scores(vectors[name], is_single=is_single)]
    probabilities = [name for name in scores if _are_all_probabilities(_rows(vectors[name]))]
    if probabilities or len(scores) < len(vectors):  # then other vectors may be mere numbers
        scores = probabilities
    of_pictures = samples.of_pictures
    scores = [name for name in scores if not are_ordered(vectors[name])]
    numbers = [name for name in vectors if name not in scores]
    if not scores or not all(_are_numbers(vectors[name]) for name in numbers):
        return None

    if of_pictures:
        if any(are_features(vectors[name]) for name in scores):
            return None
    elif numbers or any(_may_be_steps(vector) for vector in vectors.values()):
        return None
    return Classes(tuple(scores), tuple(vectors[name][0].size for name in scores))


def _may_be_steps(samples: Sequence[Array]) -> bool:
    """Whether they may be steps: logits, or probabilities that do not sum to 1."""
    if _are_all_probabilities(_rows(samples)):
        return False
    if are_raw_tracks(samples):
        return True
    has_several = any(value.ndim == 3 or np.count_nonzero(value > 0.5) > 1 for value in samples)
    return has_several and are_tracks(samples)


def _are_numbers(samples: Sequence[Array]) -> bool:
    """Whether each sample has one vector (or scalar) of finite numbers."""
    return all(
        value.size == max(value.shape, default=1) and is_floating(value) for value in samples
    )


def _rows(samples: Sequence[Array]) -> list[Floats]:
    """Return the samples that are vectors."""
    return [np.asarray(value, np.float64).reshape(-1) for value in samples if _is_vector(value)]


def _are_scores(samples: Sequence[Array], *, is_single: bool) -> bool:
    """Whether an output holds scores of classes; `is_single`: whether it is the only output."""
    vectors = _rows(samples)
    if not vectors or len(vectors) != len(samples) or len({len(row) for row in vectors}) != 1:
        return False
    rows = np.stack(vectors)
    if not np.isfinite(rows).all() or are_sorted(vectors):
        return False
    if _are_all_probabilities(vectors):
        return True
    if len(vectors[0]) >= _MIN_EMBEDDING_SIZE:
        return bool(_stand_out(rows).all()) and not all(map(of_unit_length, vectors))
    # a few numbers of one sign may be a position or a size, or a position and a rotation
    if len(split_output("", samples)) > 1 or not _are_few_logits(rows):
        return False
    return is_single or mean_best_probability(rows) > _MIN_CONFIDENCE


def _are_few_logits(rows: Floats) -> bool:
    """Whether few logits differ among themselves, not in their mean, and leave [-1, 1]."""
    if not rows.min() < 0 < rows.max() or np.abs(rows).max() <= _MAX_TANH:
        return False
    spread = float(rows.std(axis=1).mean())
    if rows.mean(axis=1).std() >= _MAX_LOGIT_DRIFT * spread:
        return False
    return rows.shape[1] > _MAX_ANGLES or _move_against(rows) or _has_clear_best(rows)


def _move_against(rows: Floats) -> bool:
    """Whether some of the numbers fall while others rise, over the samples."""
    changes = rows - rows.mean(axis=0)
    independent = float(changes.var(axis=1).mean()) / (rows.shape[1] - 1)
    return bool(changes.mean(axis=1).var() < _MAX_COMMON_MOTION * independent)


def _has_clear_best(rows: Floats) -> bool:
    """Whether on average one number stands off from the others, as that of a confident class."""
    if rows.shape[1] < 3:
        return False
    ranked = np.sort(rows, axis=1).mean(axis=0)
    return bool(ranked[-1] - ranked[-2] > _MIN_LEAD * (ranked[-2] - ranked[0]))


def _is_vector(value: Array) -> bool:
    """Whether it is [1, C] or [1, C, 1, 1] of floating-point numbers."""
    if value.ndim < 2 or value.shape[1] < 2 or value.size != value.shape[1]:
        return False
    return np.issubdtype(value.dtype, np.floating)
