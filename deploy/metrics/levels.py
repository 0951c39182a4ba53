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

LevelReasons = Iterator[tuple[str, str]]  # (level, reason for it)

# (good up to, doubtful up to)
_LABEL_LIMITS = 0.01, 0.05  # lost top-1 or mAP, 1 = 100 points
GOOD_LOSS = 0.05  # share of the float model's predictions that a good engine may lose
_TASK_LIMITS = GOOD_LOSS, 0.25
# the same of minus the SQNR in dB
_PART_LIMITS = -15.0, -5.0  # of the worst slice, if the task is unknown
_VARYING_LIMITS = -15.0, math.inf  # of what varies: numbers say as much without their mean
_CHANGE_LIMITS = -LEFT_DB, math.inf  # of the change of an input
_TASK_PART_LIMITS = 0.0, math.inf  # beside a task: more noise than signal is never good

_MAX_NEW_SHARE = 0.1  # boxes or labels that FP32 lacks, as a share of FP32's
_ROUNDING = 1e-9  # in floating point 1 - 0.99 is more than 0.01
_MIN_SAMPLES = 4  # samples that can be judged
_MIN_CHANCE_SAMPLES = 20  # samples needed to tell accuracy from chance
_MAX_FAVOURITE = 0.95  # share of samples in one class, by FP32, from which inputs are suspect
_MIN_TOP1 = 0.5  # top-1 of the float model below which the model is weak or its inputs are wrong
_MIN_MAP50 = 0.01  # mAP .50 of the float model below which it finds next to nothing


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """Loss of an engine on the task, by labels or by agreement with the float model.

    Attributes:
        share: lost share from 0 to 1, which `max_loss` limits.
        level: GOOD, DOUBTFUL or UNUSABLE.
        words: the loss as text.
        sure: whether more samples would hardly change the level: twice the loss would still be
            good, or half of it still unusable.
        found: number of boxes or labels of the float model; None for other tasks.
    """

    share: float
    level: str
    words: str
    sure: bool = True
    found: int | None = None


def measure_loss(accuracy: Accuracy, max_loss: float | None) -> TaskLoss | None:
    """Return the loss on the task; None if nothing measures it and no limit is given."""
    task, precision = accuracy.task, accuracy.precision
    is_user_metric = task is not None and task.task == "metric"
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        share, limits = accuracy.top1_reference - accuracy.top1_candidate, _LABEL_LIMITS
        text = f"top-1 {0.0 - 100 * share:+.2f} points"
    elif precision is not None and finds_objects(accuracy) and not is_user_metric:
        share, limits = precision.reference - precision.candidate, _LABEL_LIMITS
        text = f"mAP .50:.95 {0.0 - 100 * share:+.2f} points"
    elif task is not None:
        loss = _rate_loss(task.lost, max_loss, _TASK_LIMITS, task.text, found=task.found)
        has_many_new = max_loss is None and task.new > _MAX_NEW_SHARE * task.counted
        if loss.level == GOOD and has_many_new:
            return replace(loss, level=DOUBTFUL, sure=False)
        return loss
    elif max_loss is not None:
        cosines = [part.cosine_mean for part in accuracy.parts]
        share, limits = 1 - min(cosines, default=math.nan), _TASK_LIMITS
        text = f"1 - cosine is {share:.4f} at worst"
    else:
        return None
    return _rate_loss(share, max_loss, limits, text)


def _rate_loss(
    share: float,
    max_loss: float | None,
    limits: tuple[float, float],
    text: str,
    *,
    found: int | None = None,
) -> TaskLoss:
    if max_loss is not None:
        limits = max_loss, max_loss
    level = _level(share, limits)
    nearer_share = {GOOD: 2 * share, UNUSABLE: share / 2}.get(level)
    is_sure = nearer_share is not None and _level(nearer_share, limits) == level
    return TaskLoss(share, level, text, is_sure, found)


def _level(loss: float, limits: tuple[float, float]) -> str:
    """Return the level of a loss, or of minus an SQNR; UNUSABLE for NaN."""
    good, doubtful = limits
    if loss - _ROUNDING <= good:
        return GOOD
    if loss - _ROUNDING <= doubtful:
        return DOUBTFUL
    return UNUSABLE


def finds_objects(accuracy: Accuracy) -> bool:
    """Whether the float model finds any annotated objects; False without annotations."""
    return accuracy.precision is not None and accuracy.precision.reference_50 >= _MIN_MAP50


def judge_accuracy(accuracy: Accuracy, max_loss: float | None) -> LevelReasons:
    """Yield (level, reason) for everything the figures show of int8.

    `max_loss`: lost accuracy or share of the task that the user allows; None uses the limits above.
    """
    for problem in accuracy.problems:
        yield UNUSABLE, problem
    loss = measure_loss(accuracy, max_loss)
    if loss is not None:
        yield loss.level, loss.words
    else:
        yield from _silent(accuracy)

    uncovered_names = () if accuracy.task is None else accuracy.task.beside
    uncovered = [part for part in accuracy.parts if part.output in uncovered_names]
    if uncovered:
        yield _rate_part(uncovered[0], has_task=False, has_limit=False)
    worst = accuracy.worst
    if worst is not None and worst not in uncovered[:1]:
        has_task = accuracy.task is not None or accuracy.top1_reference is not None
        yield _rate_part(worst, has_task=has_task, has_limit=max_loss is not None)
        if worst.less:
            (output,) = [output for output in accuracy.outputs if output.name == worst.output]
            limits = _TASK_PART_LIMITS if has_task else _PART_LIMITS
            db = output.sqnr_db
            yield _level(-db, limits), f"{db:.1f} dB in {output.name}"


def _rate_part(part: SliceAccuracy, *, has_task: bool, has_limit: bool) -> tuple[str, str]:
    """Return level and reason of the worst slice.

    `has_task`: whether a task or labels judge the engine too; `has_limit`: whether the user's limit
    does, which the change of an input and what varies are measured by.
    """
    limits = _PART_LIMITS
    if has_task or (part.less and has_limit):
        limits = _TASK_PART_LIMITS
    elif part.less:
        limits = _VARYING_LIMITS if part.less == USUAL else _CHANGE_LIMITS
    return _level(-part.sqnr_db, limits), f"{part.sqnr_db:.1f} dB (worst: {part.label})"


def question_reference(accuracy: Accuracy) -> LevelReasons:
    """Yield (level, reason) for all that puts the float model or its inputs in question."""
    samples = accuracy.samples
    if accuracy.outputs and all(output.zeros for output in accuracy.outputs):
        yield (
            DOUBTFUL,
            "the outputs are 0 in every sample, so equal ones prove nothing; load trained weights",
        )
    elif samples < _MIN_SAMPLES:
        samples_are = "sample is" if samples == 1 else "samples are"
        missing = _MIN_SAMPLES - samples
        yield DOUBTFUL, f"{samples} {samples_are} too few; {missing} more would do"
    elif accuracy.alike:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} gives nearly the same outputs for all {samples} samples; check the"
            " inputs, or judge on samples that differ",
        )
    yield from _by_chance(accuracy)
    yield from _blind(accuracy)


def _by_chance(accuracy: Accuracy) -> LevelReasons:
    """Check that the float model beats chance; if not, its inputs are probably wrong.

    It must exceed chance by three standard deviations of the binomial distribution, which guessing
    does once in a thousand times. With too few samples for that nothing is reported.
    """
    top1, classes, shift = accuracy.top1_reference, accuracy.classes, accuracy.label_shift or 0.0
    if not classes or accuracy.samples < _MIN_CHANCE_SAMPLES:
        return
    if top1 is None:
        if accuracy.favourite is not None and accuracy.favourite >= _MAX_FAVOURITE:
            yield (
                DOUBTFUL,
                f"{FLOAT_MODEL} gives one class to {100 * accuracy.favourite:.0f} % of its images;"
                " check the preprocessing, or judge on images of more classes",
            )
        return
    chance = 1 / classes
    spread = 3 * math.sqrt(chance * (1 - chance) / accuracy.samples)
    if abs(shift) > _MIN_TOP1:
        side = "above" if shift > 0 else "below"
        yield (
            UNUSABLE,
            f"{FLOAT_MODEL} itself is wrong on its own images: top-1 {100 * top1:.2f} %, but"
            f" {100 * abs(shift):.0f} % of the labels are the class {side}; shift the labels"
            " by one",
        )
    elif spread <= (1 - chance) / 2 and top1 <= chance + spread:
        yield (
            UNUSABLE,
            f"{FLOAT_MODEL} itself is wrong on its own images: top-1 {100 * top1:.2f} % of"
            f" {classes} classes, chance is {100 * chance:.3g} %; check --preprocess, --mean,"
            " --std, --color and the labels",
        )
    elif top1 < _MIN_TOP1 and chance < _MIN_TOP1 / 2:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} itself is mostly wrong on its own images: top-1 {100 * top1:.2f} %"
            f" of {classes} classes; check --preprocess, --mean, --std, --color and the labels",
        )


def _silent(accuracy: Accuracy) -> LevelReasons:
    """Doubt a float model that detects nothing, or the same everywhere: no loss would show."""
    exact = all(output.sqnr_db == math.inf for output in accuracy.outputs)
    if accuracy.silent and not exact:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} finds nothing, or the same everywhere, in all {accuracy.samples}"
            " samples, so that a loss by int8 would not show; check the inputs, or judge on"
            " samples that hold what it finds",
        )


def _blind(accuracy: Accuracy) -> LevelReasons:
    """Reject a detector that finds none of the annotated objects."""
    precision = accuracy.precision
    if precision is None or finds_objects(accuracy) or accuracy.samples < _MIN_CHANCE_SAMPLES:
        return
    yield (
        UNUSABLE,
        f"{FLOAT_MODEL} itself finds next to none of the {precision.objects} objects:"
        f" mAP .50 {100 * precision.reference_50:.2f} %; check --preprocess, --mean, --std,"
        " --color, and the boxes and categories of the labels",
    )
