"""Levels of an engine's accuracy: good, doubtful or unusable compared with the float model.

The task's figures or the labels decide where there are any; else the worst output slice does. The
user's `max_loss` overrides the limits below.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.output_errors import LEFT_DB, USUAL
from deploy.metrics.output_form import SliceAccuracy

GOOD, DOUBTFUL, UNUSABLE, FLOAT = "good", "doubtful", "unusable", "keep FP32"
FLOAT_MODEL = "the float model"  # subject of a reason that does not blame int8
LEVELS = (GOOD, FLOAT, DOUBTFUL, UNUSABLE)  # the best first

# (good up to, doubtful up to)
_LABELLED = 0.01, 0.05  # lost top-1 or mAP, 1 = 100 points
GOOD_LOSS = 0.05  # share of the float model's predictions that a good engine may lose
_TASK = GOOD_LOSS, 0.25
_NEW = 0.1  # boxes or labels that FP32 lacks, at most, as a share of FP32's
_PART_DB = 15.0, 5.0  # SQNR of the worst slice, if the task is unknown (at least)
_LOST_DB = 0.0  # a slice with more noise than signal is never good
_ROUNDING = 1e-9  # in floating point 1 - 0.99 is more than 0.01
_FEW = 4  # samples that can be judged, at least
_ENOUGH = 20  # samples needed to tell accuracy from chance
_ALIKE = (
    0.95  # share of samples in one class, by the float model, from which the inputs are suspect
)
_SELDOM = 0.5  # top-1 of the float model below which the model is weak or its inputs are wrong
_FINDS = 0.01  # mAP .50 of the float model below which it finds next to nothing


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """Loss of an engine on the task, by labels or by agreement with the float model."""

    share: float  # lost share from 0 to 1, which `max_loss` limits
    level: str  # GOOD, DOUBTFUL or UNUSABLE
    words: str
    # whether more samples would hardly change the level: twice the loss would still be good, or
    # half of it still unusable
    sure: bool = True
    found: int | None = None  # number of boxes or labels of the float model; None for other tasks


def measure_loss(accuracy: Accuracy, max_loss: float | None) -> TaskLoss | None:
    """Return the loss on the task; None if nothing measures it and no limit is given."""
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        share = accuracy.top1_reference - accuracy.top1_candidate
        words = f"top-1 {0.0 - 100 * share:+.2f} points"
        return _lost(share, max_loss, _LABELLED, words)
    is_user_metric = accuracy.task is not None and accuracy.task.task == "metric"
    if accuracy.precision is not None and finds_objects(accuracy) and not is_user_metric:
        share = accuracy.precision.reference - accuracy.precision.candidate
        words = f"mAP .50:.95 {0.0 - 100 * share:+.2f} points"
        return _lost(share, max_loss, _LABELLED, words)
    if accuracy.task is not None:
        task = accuracy.task
        lost = _lost(task.lost, max_loss, _TASK, task.text, found=task.found)
        has_many_new = task.new > _NEW * task.counted
        if lost.level == GOOD and max_loss is None and has_many_new:
            return replace(lost, level=DOUBTFUL, sure=False)
        return lost
    if max_loss is None:
        return None
    share = 1 - min((part.cosine_mean for part in accuracy.parts), default=math.nan)
    words = f"1 - cosine is {share:.4f} in the worst part"
    return _lost(share, max_loss, _TASK, words)


def _lost(
    share: float,
    max_loss: float | None,
    limits: tuple[float, float],
    words: str,
    *,
    found: int | None = None,
) -> TaskLoss:
    level = _level(share, max_loss, limits)
    nearer = {GOOD: 2 * share, UNUSABLE: share / 2}.get(level)
    sure = nearer is not None and _level(nearer, max_loss, limits) == level
    return TaskLoss(share, level, words, sure, found)


def finds_objects(accuracy: Accuracy) -> bool:
    """Whether the float model finds any annotated objects; False without annotations."""
    return accuracy.precision is not None and accuracy.precision.reference_50 >= _FINDS


def judge_accuracy(accuracy: Accuracy, max_loss: float | None) -> Iterator[tuple[str, str]]:
    """Yield (level, reason) for everything the figures show of int8.

    `max_loss`: lost accuracy or share of the task that the user allows; None uses the limits above.
    """
    yield from ((UNUSABLE, problem) for problem in accuracy.problems)
    lost = measure_loss(accuracy, max_loss)
    if lost is not None:
        yield lost.level, lost.words
    else:
        yield from _silent(accuracy)
    worst, uncovered = accuracy.worst, _worst_uncovered(accuracy)
    if uncovered is not None:
        yield _of_part(uncovered, judged=False)
    if worst is not None and worst is not uncovered:
        judged = accuracy.task is not None or accuracy.top1_reference is not None
        yield _of_part(worst, judged=judged or (worst.less != "" and max_loss is not None))
        if worst.less:
            (output,) = (one for one in accuracy.outputs if one.name == worst.output)
            yield _of_db(output.sqnr_db, f"{output.sqnr_db:.1f} dB in {output.name}", judged=judged)


def question_reference(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """Yield (level, reason) for all that puts the float model or its inputs in question."""
    if accuracy.outputs and all(output.zeros for output in accuracy.outputs):
        why = "the outputs are 0 in every sample, so equal ones prove nothing; load trained weights"
        yield DOUBTFUL, why
    elif accuracy.samples < _FEW:
        yield DOUBTFUL, f"samples compared: {accuracy.samples}, at least {_FEW} are needed"
    elif accuracy.alike:
        why = f"{FLOAT_MODEL} gives nearly the same outputs for all {accuracy.samples} samples"
        yield DOUBTFUL, f"{why}; check the inputs, or judge on samples that differ"
    yield from _by_chance(accuracy)
    yield from _blind(accuracy)


def _worst_uncovered(accuracy: Accuracy) -> SliceAccuracy | None:
    """Return the worst slice of the outputs that the task does not cover."""
    names = () if accuracy.task is None else accuracy.task.beside
    return next((part for part in accuracy.parts if part.output in names), None)


def _of_part(part: SliceAccuracy, *, judged: bool) -> tuple[str, str]:
    words = f"{part.sqnr_db:.1f} dB in the worst part, {part.label}"
    if part.less and not judged:
        # numbers say as much with an offset as without
        least = _PART_DB[0] if part.less == USUAL else LEFT_DB
        return (GOOD if part.sqnr_db >= least else DOUBTFUL), words
    return _of_db(part.sqnr_db, words, judged=judged)


def _of_db(db: float, words: str, *, judged: bool) -> tuple[str, str]:
    if judged:
        return (GOOD if db >= _LOST_DB else DOUBTFUL), words
    good, bad = _PART_DB
    return (GOOD if db >= good else DOUBTFUL if db >= bad else UNUSABLE), words


def _level(lost: float, most: float | None, limits: tuple[float, float]) -> str:
    lost -= _ROUNDING
    if most is not None:
        return GOOD if lost <= most else UNUSABLE
    good, bad = limits
    return GOOD if lost <= good else DOUBTFUL if lost <= bad else UNUSABLE


def _by_chance(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """Check that the float model beats chance; if not, its inputs are probably wrong.

    It must exceed chance by three standard deviations of the binomial distribution, which guessing
    does once in a thousand times. With too few samples for that nothing is reported.
    """
    right, classes = accuracy.top1_reference, accuracy.classes
    if not classes or accuracy.samples < _ENOUGH:
        return
    usual = accuracy.favourite
    if right is None:
        if usual is not None and usual >= _ALIKE:
            yield (
                DOUBTFUL,
                f"{FLOAT_MODEL} gives one class to {100 * usual:.0f} % of its images; check the"
                " preprocessing, or judge on images of more classes",
            )
        return
    shift = accuracy.label_shift or 0.0
    if abs(shift) > _SELDOM:
        side = "above" if shift > 0 else "below"
        yield (
            UNUSABLE,
            f"{FLOAT_MODEL} itself is wrong on its own images: top-1 {100 * right:.2f} %, but"
            f" {100 * abs(shift):.0f} % of the labels are the class {side}; shift the labels"
            " by one",
        )
        return
    chance = 1 / classes
    spread = 3 * math.sqrt(chance * (1 - chance) / accuracy.samples)
    if spread <= (1 - chance) / 2 and right <= chance + spread:
        yield (
            UNUSABLE,
            f"{FLOAT_MODEL} itself is wrong on its own images: top-1 {100 * right:.2f} % of"
            f" {classes} classes, chance is {100 * chance:.3g} %; check --preprocess, --mean,"
            " --std, --color and the labels",
        )
    elif right < _SELDOM and chance < _SELDOM / 2:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} itself is mostly wrong on its own images: top-1 {100 * right:.2f} %"
            f" of {classes} classes; check --preprocess, --mean, --std, --color and the labels",
        )


def _silent(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """Doubt a float model that detects nothing, or the same everywhere: no loss would show."""
    exact = all(output.sqnr_db == math.inf for output in accuracy.outputs)
    if accuracy.silent and not exact:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} finds nothing, or the same everywhere, in all {accuracy.samples}"
            " samples, so that a loss by int8 would not show; check the inputs, or judge on"
            " samples that hold what it finds",
        )


def _blind(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """Reject a detector that finds none of the annotated objects."""
    precision = accuracy.precision
    if precision is None or finds_objects(accuracy) or accuracy.samples < _ENOUGH:
        return
    yield (
        UNUSABLE,
        f"{FLOAT_MODEL} itself finds next to none of the {precision.objects} objects:"
        f" mAP .50 {100 * precision.reference_50:.2f} %; check --preprocess, --mean, --std,"
        " --color, and the boxes and categories of the labels",
    )
