"""Levels of an engine's accuracy: good, doubtful or unusable compared with the float model.

The task's figures or the labels decide where there are any; else the worst output slice does. The
user's `max_loss` overrides the limits below.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.errors import ConfigError, too_few
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.output_errors import LEFT_DB, SAMPLE_MEAN
from deploy.metrics.output_form import SliceAccuracy

# FLOAT: int8 loses little but gains no speed, so the float model is the better engine
GOOD, DOUBTFUL, UNUSABLE, FLOAT = "good", "doubtful", "unusable", "keep FP32"
FLOAT_MODEL = "the float model"  # subject of a reason that does not blame int8
# ends of reasons that blame the labels
SHIFT_LABELS = "shift the labels by one"
ORDER_LABELS = "number the labels in the order of the model's outputs"
LEVELS = (GOOD, FLOAT, DOUBTFUL, UNUSABLE)  # the best first

LevelReasons = Iterator[tuple[str, str]]  # (level, reason for it)

# (good up to, doubtful up to)
_LABEL_LIMITS = 0.01, 0.05  # lost top-1 or mAP, 1 = 100 points
GOOD_LOSS = 0.05  # share of the float model's predictions that a good engine may lose
_TASK_LIMITS = GOOD_LOSS, 0.25
# the same of minus the SQNR in dB
_SLICE_LIMITS = -15.0, -5.0  # of the worst slice, if the task is unknown
# with ten times as much noise as signal, the complete output has little left too
_VARYING_LIMITS = -15.0, 10.0  # of what varies: numbers say as much without their mean
_CHANGE_LIMITS = -LEFT_DB, 10.0  # of the change of an input
_TASK_SLICE_LIMITS = 0.0, math.inf  # beside a task: more noise than signal is never good

MIN_OBJECTS = 40  # fewer boxes, labels or points hide a loss of 0.025
_MAX_NEW_SHARE = 0.1  # boxes that FP32 lacks, as a share of FP32's
_ROUNDING = 1e-9  # in floating point 1 - 0.99 is more than 0.01
_MIN_SAMPLES = 4  # samples that can be judged
_MIN_CHANCE_SAMPLES = 20  # samples needed to tell accuracy from chance
_MAX_FAVOURITE = 0.95  # share of samples in one class, by FP32, from which inputs are suspect
_MIN_TOP1 = 0.5  # top-1 of the float model below which the model is weak or its inputs are wrong
# mAP .50 of the float model below which it finds next to nothing, and below which it is suspect
_MIN_MAP50, _WEAK_MAP50 = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """Loss of an engine on the task, by labels or by agreement with the float model.

    Attributes:
        share: lost share from 0 to 1, which `max_loss` limits.
        level: GOOD, DOUBTFUL or UNUSABLE.
        words: the loss as text.
        sure: whether more samples would hardly change the level: twice the loss would still be
            good, or half of it still unusable.
        found: number of boxes that the float model finds; None for other tasks.
    """

    share: float
    level: str
    words: str
    sure: bool = True
    found: int | None = None


def check_max_loss(max_loss: float | None) -> None:
    """Refuse a limit that no engine would exceed, such as 1 for one point; None is no limit.

    Raises:
        ConfigError: it is not from 0 up to 1.
    """
    if max_loss is not None and not 0 <= max_loss < 1:
        raise ConfigError(
            f"the largest loss is a share, 0 or more and below 1, got {max_loss:g}; one point is"
            " 0.01"
        )


def measure_loss(accuracy: Accuracy, max_loss: float | None) -> TaskLoss | None:
    """Return how much of the task the engine loses; None if no figure shows it.

    The first of these figures that there is: top-1 by labels, the user's metric, mAP by annotated
    boxes, the task's agreement, and, if the user set a limit, the worst cosine of a slice.

    `max_loss`: loss up to which an engine is good, and above which it is unusable. None uses the
    limits of this file.
    """
    task = accuracy.task  # agreement on the task; a user's metric stands here in its place
    precision = accuracy.precision
    is_user_metric = task is not None and task.task == "metric"
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        lost_share = accuracy.top1_reference - accuracy.top1_candidate
        return _rate_lost_points("top-1", lost_share, max_loss)
    if precision is not None and finds_objects(accuracy) and not is_user_metric:
        lost_share = precision.reference - precision.candidate
        return _rate_lost_points("mAP .50:.95", lost_share, max_loss)
    if task is not None:
        # boxes that the float model lacks are no loss, but no good sign either
        loss = _rate_loss(task.lost, max_loss, _TASK_LIMITS, task.text)
        has_many_new = max_loss is None and task.new > _MAX_NEW_SHARE * task.counted
        if loss.level == GOOD and has_many_new:
            # not sure: on more samples the share of new boxes may fall below the limit
            loss = replace(loss, level=DOUBTFUL, sure=False)
        return replace(loss, found=task.found)
    if max_loss is not None:
        worst_cosine = min([figures.cosine_mean for figures in accuracy.parts], default=math.nan)
        lost_share = 1 - worst_cosine
        text = f"1 - cosine is {lost_share:.4f} at worst"
        return _rate_loss(lost_share, max_loss, _TASK_LIMITS, text)
    return None


def _rate_lost_points(figure: str, lost_share: float, max_loss: float | None) -> TaskLoss:
    """Return the loss of a figure by labels, with text such as "top-1 -0.37 points".

    No change is "+0.00 points".
    """
    text = f"{figure} {100 * -lost_share + 0.0:+.2f} points"
    return _rate_loss(lost_share, max_loss, _LABEL_LIMITS, text)


def _rate_loss(
    lost_share: float, max_loss: float | None, limits: tuple[float, float], text: str
) -> TaskLoss:
    """Return the loss with its level, and whether more samples would hardly change that level.

    Args:
        lost_share: lost share of the predictions, 0 to 1.
        max_loss: the user's limit; None uses `limits`.
        limits: (good up to, doubtful up to).
        text: the loss as text.
    """
    if max_loss is not None:
        limits = max_loss, max_loss
    is_surely_good = _level(2 * lost_share, limits) == GOOD
    is_surely_unusable = _level(lost_share / 2, limits) == UNUSABLE
    level = _level(lost_share, limits)
    return TaskLoss(lost_share, level, text, sure=is_surely_good or is_surely_unusable)


def _level(loss: float, limits: tuple[float, float]) -> str:
    """Return the level of a loss, or of minus an SQNR; UNUSABLE for NaN.

    `limits`: (good up to, doubtful up to).
    """
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
    """Yield (level, reason) for everything that the figures show of int8, in this order.

    NaN, Inf and differing shapes; the loss of the task or of labels; the worst slice of the outputs
    that the task does not cover; and the worst slice of all.

    `max_loss`: lost accuracy or share of the task that the user allows; None uses the limits of
    this file.
    """
    for problem in accuracy.problems:
        yield UNUSABLE, problem
    loss = measure_loss(accuracy, max_loss)
    if loss is None:
        yield from _doubt_silent_model(accuracy)
    elif max_loss is None or math.isnan(loss.share):
        yield loss.level, loss.words
    else:
        yield loss.level, f"{loss.words}, {_limit_text(loss, max_loss)}"

    # no task judges an output that it does not cover, nor does the user's limit of its loss: only
    # the SQNR does
    uncovered_outputs = () if accuracy.task is None else accuracy.task.beside
    uncovered_figures = (
        figures for figures in accuracy.parts if figures.output in uncovered_outputs
    )
    worst_uncovered_slice = next(uncovered_figures, None)  # slices come in ascending order of SQNR
    if worst_uncovered_slice is not None:
        yield _rate_slice(worst_uncovered_slice, has_task=False, has_limit=False)

    worst_slice = accuracy.worst
    if worst_slice is None or worst_slice == worst_uncovered_slice:  # rated above
        return
    has_task = accuracy.task is not None or accuracy.top1_reference is not None
    yield _rate_slice(worst_slice, has_task=has_task, has_limit=max_loss is not None)


def _limit_text(loss: TaskLoss, max_loss: float) -> str:
    """Return whether a loss is within the user's limit, as text; the loss too if it is not."""
    limit_text = f"the limit of {100 * max_loss:g} %"
    if loss.level == GOOD:
        return f"within {limit_text}"
    return f"a loss of {100 * loss.share:.4g} %, above {limit_text}"


def _rate_slice(worst: SliceAccuracy, *, has_task: bool, has_limit: bool) -> tuple[str, str]:
    """Return (level, reason) by the SQNR of the worst slice.

    Args:
        worst: figures of the slice.
        has_task: whether a task or labels judge the engine too.
        has_limit: whether the user set a limit.
    """
    subtracted = worst.less  # name of an input, or `SAMPLE_MEAN`; "" for nothing
    # the task or the user's limit judges the engine already, so the SQNR only has to exceed 0 dB
    if has_task or (subtracted and has_limit):
        limits = _TASK_SLICE_LIMITS
    elif subtracted:
        limits = _VARYING_LIMITS if subtracted == SAMPLE_MEAN else _CHANGE_LIMITS
    else:
        limits = _SLICE_LIMITS
    sqnr = "exact" if worst.sqnr_db == math.inf else f"{worst.sqnr_db:.1f} dB"
    # the limits are of minus the SQNR, which rises with the error as a loss does
    return _level(-worst.sqnr_db, limits), f"{sqnr} (worst: {worst.label})"


def question_reference(accuracy: Accuracy) -> LevelReasons:
    """Yield (level, reason) for all that puts the float model or its inputs in question.

    Examples are outputs of zeros, too few samples, and labels that do not fit.
    """
    yield from _doubt_outputs(accuracy)
    if accuracy.samples < _MIN_CHANCE_SAMPLES:
        return  # neither classes nor boxes can be told from chance

    favourite_share = accuracy.favourite or 0.0
    if accuracy.top1_reference is not None and accuracy.classes:
        yield from _doubt_top1(accuracy, accuracy.top1_reference, accuracy.classes)
    elif accuracy.classes and favourite_share >= _MAX_FAVOURITE:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} gives one class to {100 * favourite_share:.0f} % of its"
            " images; check the preprocessing, or judge on images of more classes",
        )
    precision = accuracy.precision
    if precision is not None and precision.reference_50 < _WEAK_MAP50:
        level, found_text = (
            (DOUBTFUL, "few") if finds_objects(accuracy) else (UNUSABLE, "next to none")
        )
        yield (
            level,
            f"{FLOAT_MODEL} itself finds {found_text} of the {precision.objects} objects:"
            f" mAP .50 {100 * precision.reference_50:.2f} %; check --preprocess, --mean, --std,"
            " --color, and the boxes and categories of the labels",
        )


def _doubt_outputs(accuracy: Accuracy) -> LevelReasons:
    """Doubt outputs of only zeros, too few samples, or outputs nearly the same in all samples."""
    samples = accuracy.samples
    if accuracy.outputs and all(output.zeros for output in accuracy.outputs):
        yield (
            DOUBTFUL,
            "the outputs are 0 in every sample, so equal ones prove nothing; load trained weights",
        )
    elif samples < _MIN_SAMPLES:
        yield DOUBTFUL, f"{too_few(samples, 'samples')}; {_MIN_SAMPLES - samples} more would do"
    elif accuracy.alike:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} gives nearly the same outputs for all {samples} samples; check the"
            " inputs, or judge on samples that differ",
        )


def _doubt_top1(accuracy: Accuracy, top1: float, classes: int) -> LevelReasons:
    """Doubt a float model that is mostly wrong by its labels: then its inputs or labels are wrong.

    To beat chance, top-1 must exceed it by three standard deviations of the binomial distribution,
    which guessing does once in a thousand times. With too few samples for that, only top-1 itself
    is judged.

    Args:
        accuracy: figures with the labels' shift and the number of samples.
        top1: share of samples whose label is the float model's class.
        classes: number of classes.
    """
    shift = accuracy.label_shift or 0.0
    chance = 1 / classes
    # how far guessing may exceed chance: three standard deviations
    chance_margin = 3 * math.sqrt(chance * (1 - chance) / accuracy.samples)
    # with too few samples even a good model would hardly exceed chance by so much
    has_enough_samples = chance_margin <= (1 - chance) / 2
    wrong_text = f"{FLOAT_MODEL} is mostly wrong: top-1 {100 * top1:.2f} %"
    if accuracy.label_order is not None and top1 < _MIN_TOP1:
        label, model_class = accuracy.label_order
        yield (
            UNUSABLE,
            f"{wrong_text}, but only the order of the labels differs: most images of label {label}"
            f" get class {model_class}; {ORDER_LABELS}",
        )
    elif abs(shift) > _MIN_TOP1:
        side = "above" if shift > 0 else "below"
        yield (
            UNUSABLE,
            f"{wrong_text}, but {100 * abs(shift):.0f} % of the labels are the class {side};"
            f" {SHIFT_LABELS}",
        )
    elif has_enough_samples and top1 <= chance + chance_margin:
        yield (
            UNUSABLE,
            f"{FLOAT_MODEL} is no better than chance: top-1 {100 * top1:.2f} %, and"
            f" chance is {100 * chance:.3g} % with {classes} classes; check --preprocess, --mean,"
            " --std, --color and the labels",
        )
    elif top1 < _MIN_TOP1 and chance < _MIN_TOP1 / 2:
        yield (
            DOUBTFUL,
            f"{wrong_text} with {classes} classes; check --preprocess, --mean, --std, --color and"
            " the labels",
        )


def _doubt_silent_model(accuracy: Accuracy) -> LevelReasons:
    """Doubt a float model that detects nothing, or the same everywhere: no loss would show.

    Exactly equal outputs leave no doubt.
    """
    exact = all(output.sqnr_db == math.inf for output in accuracy.outputs)
    if accuracy.silent and not exact:
        yield (
            DOUBTFUL,
            f"{FLOAT_MODEL} finds nothing, or the same everywhere, in all {accuracy.samples}"
            " samples, so that a loss by int8 would not show; check the inputs, or judge on"
            " samples that hold what it finds",
        )
