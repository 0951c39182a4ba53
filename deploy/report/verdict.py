"""The verdict on each engine: good, doubtful, unusable, or "stay in float", and why.

What is judged is the task, where the outputs' form tells it, or the labels; else the worst part of
the outputs. Limits that the user gives decide before those that stand here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import OVERHEAD_MS

GOOD, DOUBTFUL, UNUSABLE, FLOAT = "good", "doubtful", "unusable", "stay in float"
LEVELS = (GOOD, FLOAT, DOUBTFUL, UNUSABLE)  # the best first

_LABELLED = 0.01, 0.05  # points of accuracy lost: more is doubtful, more is unusable
_TASK = 0.05, 0.25  # share of what the float model says that int8 does not
_PART_DB = 15.0, 5.0  # SQNR of the worst part, where the task is not known
_LOST_DB = 0.0  # a part that is more noise than signal is never good
_ROUNDING = 1e-9  # 1 - 0.99 is more than 0.01, to a computer
_ENOUGH = 20  # samples to tell accuracy from chance
_AS_FAST = 0.95  # of FP32's speed: less is slower, and not chance
_ALIKE = 0.95  # of the samples in one class, by the float model's own word


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """What the user demands.

    Attributes:
        max_loss: of accuracy, or of the share of the task, 0 to 1; None leaves it to the verdict.
        min_speedup: over what `deploy.report.speed.rivals` names; None demands nothing.
        accept: an unusable engine does not fail the command.
    """

    max_loss: float | None = None
    min_speedup: float | None = None
    accept: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is thought of one engine.

    Attributes:
        level: GOOD, DOUBTFUL, UNUSABLE or FLOAT.
        reasons: in sentences, the gravest first.
    """

    level: str
    reasons: tuple[str, ...]

    @property
    def words(self) -> str:
        """Level and reasons."""
        return f"{self.level}: {'; '.join(self.reasons)}" if self.reasons else self.level


def verdict(
    *,
    accuracy: Accuracy | None,
    speed_up: float | None,
    int8: bool,
    gates: Gates,
    slower_ms: float = math.inf,
    rival: str = "FP32",
) -> Verdict:
    """Judge one engine.

    Args:
        accuracy: against the float model; None where it was not measured.
        speed_up: over its rival, by p50; None where one of them was not measured.
        int8: whether any of its nodes left float.
        gates: what the user demands.
        slower_ms: than its rival, by p50; infinite where it was not measured, or without
            what the runtime itself takes.
        rival: the float engine that its speed is held against, in words.
    """
    found = [*_of_accuracy(accuracy, gates)]
    if int8 or gates.min_speedup is not None:  # float beside float differs by chance alone
        found += _of_speed(speed_up, slower_ms, gates, rival)
    if not int8:
        why = "int8 wins nothing here that is worth its loss, so the float model was written"
        found.append((FLOAT, why))
    if not found:
        return Verdict(DOUBTFUL, ("nothing was measured of it",))
    level = max((level for level, _ in found), key=LEVELS.index)
    ordered = sorted(found, key=lambda entry: -LEVELS.index(entry[0]))
    said = [why for at, why in ordered if at == level or at != GOOD]
    return Verdict(level, tuple(dict.fromkeys(said)))


def _of_accuracy(accuracy: Accuracy | None, gates: Gates) -> Iterator[tuple[str, str]]:
    if accuracy is None:
        return
    yield from ((UNUSABLE, problem) for problem in accuracy.problems)
    if accuracy.outputs and all(output.zeros for output in accuracy.outputs):
        why = "the outputs are 0 in every sample, so equal ones prove nothing; load trained weights"
        yield DOUBTFUL, why
    yield from _by_chance(accuracy)
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        lost = accuracy.top1_reference - accuracy.top1_candidate
        words = f"{100 * lost:.2f} points of top-1 lost"
        yield _level(lost, gates.max_loss, _LABELLED), words
    elif accuracy.task is not None:
        lost = accuracy.task.reference - accuracy.task.value
        yield _level(lost, gates.max_loss, _TASK), accuracy.task.words
    elif gates.max_loss is not None:
        lost = 1 - min((part.cosine_mean for part in accuracy.parts), default=math.nan)
        words = f"1 - cosine is {lost:.4f} in the worst part"
        yield _level(lost, gates.max_loss, _TASK), words
    worst = accuracy.worst
    if worst is not None:
        yield _of_part(worst.sqnr_db, worst.label, judged=accuracy.task is not None)


def _of_part(db: float, label: str, *, judged: bool) -> tuple[str, str]:
    words = f"{db:.1f} dB in the worst part, {label}"
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


def _of_speed(
    ratio: float | None, slower_ms: float, gates: Gates, rival: str
) -> Iterator[tuple[str, str]]:
    if ratio is None:
        if gates.min_speedup is not None:
            yield (
                DOUBTFUL,
                f"its speed, {gates.min_speedup:g} times that of {rival} at least, is not measured",
            )
        return
    words = f"{ratio:.2f} times as fast as {rival}"
    if gates.min_speedup is not None:
        yield (GOOD if ratio >= gates.min_speedup else UNUSABLE), words
    else:
        fast = ratio >= _AS_FAST or slower_ms < OVERHEAD_MS
        yield (GOOD if fast else DOUBTFUL), words
