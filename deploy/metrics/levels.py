"""How much an engine may lose: good, doubtful or unusable, by its figures against the float model.

What is judged is the task, where the outputs' form tells it, or the labels; else the worst part of
the outputs. A limit that the user gives decides before those that stand here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.output_errors import LEFT_DB
from deploy.metrics.truth import PartAccuracy

GOOD, DOUBTFUL, UNUSABLE, FLOAT = "good", "doubtful", "unusable", "stay in float"
LEVELS = (GOOD, FLOAT, DOUBTFUL, UNUSABLE)  # the best first

_LABELLED = 0.01, 0.05  # points of accuracy lost: more is doubtful, more is unusable
_TASK = 0.05, 0.25  # share of what the float model says that int8 does not
_PART_DB = 15.0, 5.0  # SQNR of the worst part, where the task is not known
_LOST_DB = 0.0  # a part that is more noise than signal is never good
_ROUNDING = 1e-9  # 1 - 0.99 is more than 0.01, to a computer
_ENOUGH = 20  # samples to tell accuracy from chance
_ALIKE = 0.95  # of the samples in one class, by the float model's own word
_SELDOM = 0.25  # of labelled images: a float model that is right in fewer is weak, or fed wrongly
_FINDS = 0.01  # mean average precision of boxes: with less, next to nothing is found


@dataclass(frozen=True, slots=True)
class Lost:
    """What an engine loses of the task, by labels or by the outputs' form.

    Attributes:
        share: 0 is nothing, 1 is everything; or of what `max_loss` is held against.
        level: GOOD, DOUBTFUL or UNUSABLE.
        words: the counts, as a person would say them.
        sure: whether more samples would hardly change the level: one that is good would be with
            twice the loss, and one that is unusable with half of it.
    """

    share: float
    level: str
    words: str
    sure: bool = True


def lost_of(accuracy: Accuracy, max_loss: float | None) -> Lost | None:
    """What is lost of the task; None where nothing tells, and no limit is given.

    Args:
        accuracy: against the float model.
        max_loss: as in `of_accuracy`.
    """
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        share = accuracy.top1_reference - accuracy.top1_candidate
        words = f"{100 * share:.2f} points of top-1 lost"
        return _lost(share, max_loss, _LABELLED, words)
    own = accuracy.task is not None and accuracy.task.task == "metric"
    if accuracy.precision is not None and finds(accuracy) and not own:
        share = accuracy.precision.reference - accuracy.precision.candidate
        words = f"{100 * share:.2f} points of mAP .50:.95 lost"
        return _lost(share, max_loss, _LABELLED, words)
    if accuracy.task is not None:
        return _lost(accuracy.task.lost, max_loss, _TASK, accuracy.task.words)
    if max_loss is None:
        return None
    share = 1 - min((part.cosine_mean for part in accuracy.parts), default=math.nan)
    words = f"1 - cosine is {share:.4f} in the worst part"
    return _lost(share, max_loss, _TASK, words)


def _lost(share: float, max_loss: float | None, limits: tuple[float, float], words: str) -> Lost:
    level = _level(share, max_loss, limits)
    nearer = {GOOD: 2 * share, UNUSABLE: share / 2}.get(level)
    sure = nearer is not None and _level(nearer, max_loss, limits) == level
    return Lost(share, level, words, sure)


def finds(accuracy: Accuracy) -> bool:
    """Whether the float model finds objects that are annotated; False where none are."""
    return accuracy.precision is not None and accuracy.precision.reference_50 >= _FINDS


def of_accuracy(accuracy: Accuracy, max_loss: float | None) -> Iterator[tuple[str, str]]:
    """(level, why) of all that an engine's figures say.

    Args:
        accuracy: against the float model.
        max_loss: of accuracy, or of the share of the task, that the user allows; None leaves it to
            the limits here.
    """
    yield from ((UNUSABLE, problem) for problem in accuracy.problems)
    if accuracy.outputs and all(output.zeros for output in accuracy.outputs):
        why = "the outputs are 0 in every sample, so equal ones prove nothing; load trained weights"
        yield DOUBTFUL, why
    yield from _by_chance(accuracy)
    yield from _blind(accuracy)
    lost = lost_of(accuracy, max_loss)
    if lost is not None:
        yield lost.level, lost.words
    else:
        yield from ((DOUBTFUL, doubt) for doubt in accuracy.doubts)
        yield from _silent(accuracy)
    worst, beside = accuracy.worst, _beside(accuracy)
    if beside is not None:
        yield _of_part(beside, judged=False)
    if worst is not None and worst is not beside:
        judged = accuracy.task is not None or accuracy.top1_reference is not None
        yield _of_part(worst, judged=judged or (worst.less != "" and max_loss is not None))
        if worst.less:
            (whole,) = (one for one in accuracy.outputs if one.name == worst.output)
            yield _of_db(whole.sqnr_db, f"{whole.sqnr_db:.1f} dB in {whole.name}", judged=judged)


def _beside(accuracy: Accuracy) -> PartAccuracy | None:
    """The worst part of the outputs that the task tells nothing of."""
    names = () if accuracy.task is None else accuracy.task.beside
    return next((part for part in accuracy.parts if part.output in names), None)


def _of_part(part: PartAccuracy, *, judged: bool) -> tuple[str, str]:
    words = f"{part.sqnr_db:.1f} dB in the worst part, {part.label}"
    if part.less and not judged:
        return (GOOD if part.sqnr_db >= LEFT_DB else DOUBTFUL), words
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
    """A float model that is no better than guessing was fed something else than it learned.

    Better is what guessing reaches once in a thousand times: three deviations of the binomial
    distribution over chance. Where a fair model would not either, the samples are too few to tell.
    """
    right, classes = accuracy.top1_reference, accuracy.classes
    if not classes or accuracy.samples < _ENOUGH:
        return
    usual = accuracy.favourite
    if right is None:
        if usual is not None and usual >= _ALIKE:
            yield (
                DOUBTFUL,
                f"the float model gives one class to {100 * usual:.0f} % of its images; check the"
                " preprocessing, or judge on images of more classes",
            )
        return
    chance = 1 / classes
    spread = 3 * math.sqrt(chance * (1 - chance) / accuracy.samples)
    if spread <= (1 - chance) / 2 and right <= chance + spread:
        yield (
            UNUSABLE,
            f"the float model itself is wrong on its own images: top-1 {100 * right:.2f} % of"
            f" {classes} classes, chance is {100 * chance:.3g} %; check --preprocess, --mean,"
            " --std, --color and the labels",
        )
    elif right < _SELDOM and chance < _SELDOM / 2:
        yield (
            DOUBTFUL,
            f"the float model itself is seldom right on its own images: top-1 {100 * right:.2f} %"
            f" of {classes} classes; check --preprocess, --mean, --std, --color and the labels",
        )


def _silent(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """A detector that finds nothing, or a tagger that gives one class to all, shows no loss."""
    exact = all(output.sqnr_db == math.inf for output in accuracy.outputs)
    if accuracy.silent and not exact:
        yield (
            DOUBTFUL,
            f"the float model finds nothing, or the same everywhere, in all {accuracy.samples}"
            " samples, so that what int8 loses of it is not seen; check what is fed, or judge on"
            " samples that hold what it finds",
        )


def _blind(accuracy: Accuracy) -> Iterator[tuple[str, str]]:
    """A detector that finds nothing of what is annotated, or annotations of other pictures."""
    found = accuracy.precision
    if found is None or finds(accuracy) or accuracy.samples < _ENOUGH:
        return
    yield (
        UNUSABLE,
        f"the float model itself finds next to none of the {found.objects} objects: mAP .50"
        f" {100 * found.reference_50:.2f} %; check --preprocess, --mean, --std, --color, and the"
        " boxes and categories of the labels",
    )
