"""What a user loses, in cells and rows: the task's figure, and the parts of the outputs."""

from __future__ import annotations

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.truth import PartAccuracy
from deploy.report import figures

PART_HEADS = ("part", "SQNR", "cosine", "worst cosine", "max abs error")


def parted(accuracy: Accuracy) -> bool:
    """Whether its parts say more than its outputs do."""
    return any(one.label != one.output for one in accuracy.parts)


def sqnr(accuracy: Accuracy) -> float | None:
    """Of the worst part; of the worst output where no parts are known; None for lists of boxes."""
    if accuracy.task and not accuracy.parts:
        return None
    if accuracy.worst is not None:
        return accuracy.worst.sqnr_db
    return figures.least(output.sqnr_db for output in accuracy.outputs)


def cosine(accuracy: Accuracy) -> float | None:
    """Mean cosine of the worst part, or of the worst output."""
    if accuracy.task and not accuracy.parts:
        return None
    if accuracy.worst is not None:
        return accuracy.worst.cosine_mean
    return figures.least(output.cosine_mean for output in accuracy.outputs)


def cosine_min(accuracy: Accuracy) -> float | None:
    """The same of the worst sample."""
    if accuracy.task and not accuracy.parts:
        return None
    if accuracy.worst is not None:
        return accuracy.worst.cosine_min
    return figures.least(output.cosine_min for output in accuracy.outputs)


def worst_label(accuracy: Accuracy) -> str:
    """Which part the worst figures are of; "" where there is one output that is one part."""
    worst = accuracy.worst
    return worst.label if worst and (len(accuracy.parts) > 1 or parted(accuracy)) else ""


def task_label(accuracy: Accuracy) -> str:
    """What the task's figure is, as a line's label; "" where top-1 says it, or there is none."""
    task = accuracy.task
    if task is None or (task.task == "classes" and accuracy.top1_agreement is not None):
        return ""
    return task.figure[:1].upper() + task.figure[1:]


def own_count(accuracy: Accuracy) -> str:
    """The float model's own figure by a user's metric; "" for shares of what FP32 says."""
    task = accuracy.task
    return f"{task.reference:.4g}" if task is not None and task.task == "metric" else ""


def part_row(part: PartAccuracy) -> list[str]:
    """One part under `PART_HEADS`."""
    return [
        part.label,
        figures.decibels(part.sqnr_db),
        figures.cosine(part.cosine_mean),
        figures.cosine(part.cosine_min),
        figures.real(part.max_abs_error),
    ]


def sentences(accuracy: Accuracy) -> tuple[str, ...]:
    """The task's figure, and what the outputs were read as."""
    return tuple(filter(None, (accuracy.task.words if accuracy.task else "", accuracy.reading)))
