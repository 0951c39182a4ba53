"""The verdict on each engine: good, doubtful, unusable, or "stay in float", and why.

How much may be lost is told in `deploy.metrics.levels`, since the search asks for it too; how slow
it may be, here. Limits that the user gives decide before either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import OVERHEAD_MS
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, LEVELS, UNUSABLE, finds, of_accuracy

_AS_FAST = 0.95  # of FP32's speed: less is slower, and not chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """What the user demands.

    Attributes:
        max_loss: of accuracy, or of the share of the task, 0 to 1; None leaves it to the verdict.
        min_speedup: over what `deploy.report.model.rivals` names; None demands nothing.
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
    by_fastest: float | None = None,
    rival: str = "FP32",
    fed_wrong: bool = False,
) -> Verdict:
    """Judge one engine.

    Args:
        accuracy: against the float model; None where it was not measured.
        speed_up: over its rival, by p50; None where one of them was not measured.
        int8: whether any of its nodes left float.
        gates: what the user demands.
        slower_ms: than its rival, by p50; infinite where it was not measured, or without
            what the runtime itself takes.
        by_fastest: its speed by the fastest runs, where that is another; None where it is not.
        rival: the float engine that its speed is held against, in words.
        fed_wrong: whether the images seem not to be what the model learned from; labels that it
            gets right prove that they are.
    """
    found = [] if accuracy is None else [*of_accuracy(accuracy, gates.max_loss)]
    if fed_wrong and not _labelled(accuracy):
        found.append(
            (DOUBTFUL, "the model seems to be fed what it did not learn from, see the notes")
        )
    if int8 or gates.min_speedup is not None:  # float beside float differs by chance alone
        found += _of_speed(speed_up, slower_ms, by_fastest, gates, rival)
    if not int8:
        why = "int8 wins nothing here that is worth its loss, so the float model was written"
        found.append((FLOAT, why))
    if not found:
        return Verdict(DOUBTFUL, ("nothing was measured of it",))
    level = max((level for level, _ in found), key=LEVELS.index)
    ordered = sorted(found, key=lambda entry: -LEVELS.index(entry[0]))
    said = [why for at, why in ordered if at == level or at != GOOD]
    return Verdict(level, tuple(dict.fromkeys(said)))


def _labelled(accuracy: Accuracy | None) -> bool:
    """Whether labels tell what the float model gets right."""
    if accuracy is None:
        return False
    return accuracy.top1_reference is not None or finds(accuracy)


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
        both = min(ratio, ratio if best is None else best)
        fast = both >= _AS_FAST or 0 < slower_ms < OVERHEAD_MS
        yield (GOOD if fast else DOUBTFUL), words


__all__ = ["DOUBTFUL", "FLOAT", "GOOD", "LEVELS", "UNUSABLE", "Gates", "Verdict", "verdict"]
