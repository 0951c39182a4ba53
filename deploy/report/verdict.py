"""The verdict on each engine: good, doubtful, unusable or "stay in float", with reasons.

Limits of the loss are in `deploy.metrics.levels`, which the search uses too; those of the speed are
here. The user's limits (`Gates`) override both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import OVERHEAD_MS
from deploy.metrics.levels import (
    DOUBTFUL,
    FLOAT,
    GOOD,
    LEVELS,
    UNUSABLE,
    finds_objects,
    judge_accuracy,
)

_AS_FAST = 0.95  # speed-up over FP32 below which an engine counts as slower, not as noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The user's limits.

    Attributes:
        max_loss: lost accuracy or share of the task, 0 to 1; None uses the default limits.
        min_speedup: over the rival (`deploy.report.model.find_rivals`); None requires nothing.
        accept: whether the command succeeds even if an engine is unusable.
    """

    max_loss: float | None = None
    min_speedup: float | None = None
    accept: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Level of one engine, and why."""

    level: str  # GOOD, DOUBTFUL, UNUSABLE or FLOAT
    reasons: tuple[str, ...]  # sentences, the most serious first

    @property
    def words(self) -> str:
        """Level and reasons as text."""
        return f"{self.level}: {'; '.join(self.reasons)}" if self.reasons else self.level


def verdict(
    *,
    accuracy: Accuracy | None,
    speed_up: float | None,
    int8: bool,
    gates: Gates,
    slower_ms: float = math.inf,
    by_fastest: float | None = None,
    rival: str = "FP32",
    fed_wrong: bool = False,
) -> Verdict:
    """Judge one engine.

    Args:
        accuracy: against the float model; None if not measured.
        speed_up: over its rival, by p50; None if one of them was not measured.
        int8: whether any of its nodes is quantized.
        gates: the user's limits.
        slower_ms: difference to its rival's p50 in ms; infinite if not measured.
        by_fastest: speed-up of the fastest runs if it disagrees with p50; else None.
        rival: name of the float engine that its speed is compared with.
        fed_wrong: whether the images seem not to match the model's training data; ignored if
            there are labels.
    """
    findings = [] if accuracy is None else [*judge_accuracy(accuracy, gates.max_loss)]
    if fed_wrong and not _labelled(accuracy):
        findings.append(
            (DOUBTFUL, "the model seems to be fed what it did not learn from, see the notes")
        )
    if int8 or gates.min_speedup is not None:  # two float engines differ only by noise
        findings += _of_speed(speed_up, slower_ms, by_fastest, gates, rival)
    if not int8:
        why = "int8 wins nothing here that is worth its loss, so the float model was written"
        findings.append((FLOAT, why))
    if not findings:
        return Verdict(DOUBTFUL, ("nothing was measured of it",))
    level = max((level for level, _ in findings), key=LEVELS.index)
    ordered = sorted(findings, key=lambda entry: -LEVELS.index(entry[0]))
    reasons = [why for at, why in ordered if at == level or at != GOOD]
    return Verdict(level, tuple(dict.fromkeys(reasons)))


def _labelled(accuracy: Accuracy | None) -> bool:
    """Whether labels show how often the float model is right."""
    if accuracy is None:
        return False
    return accuracy.top1_reference is not None or finds_objects(accuracy)


def _of_speed(
    ratio: float | None, slower_ms: float, best: float | None, gates: Gates, rival: str
) -> Iterator[tuple[str, str]]:
    if ratio is None:
        if gates.min_speedup is not None:
            yield (
                DOUBTFUL,
                f"its speed, {gates.min_speedup:g} times that of {rival} at least, is not measured",
            )
        return
    words = f"{ratio:.2f} times as fast as {rival}"
    if best is not None:
        words += f" by p50, {best:.2f} times by the fastest runs"
    if gates.min_speedup is not None:
        yield (GOOD if ratio >= gates.min_speedup else UNUSABLE), words
    else:
        slower = min(ratio, ratio if best is None else best)
        fast = slower >= _AS_FAST or 0 < slower_ms < OVERHEAD_MS
        yield (GOOD if fast else DOUBTFUL), words


__all__ = ["DOUBTFUL", "FLOAT", "GOOD", "LEVELS", "UNUSABLE", "Gates", "Verdict", "verdict"]
