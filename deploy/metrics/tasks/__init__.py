"""Recognition of a model's task from its outputs; one module per family of tasks."""

from __future__ import annotations

from collections.abc import Callable

from deploy.metrics.tasks import (
    boxes,
    classes,
    embeddings,
    heatmaps,
    keypoints,
    labels,
    segmentation,
    sequences,
)
from deploy.metrics.tasks import task as states
from deploy.metrics.tasks.metric import Metric, metric_of
from deploy.metrics.tasks.task import Seen, Tally, Task, TaskFigure

# Task -> its recogniser, tried in this order. Each must be certain from the values alone.
TASKS: dict[str, Callable[[Seen], Task | None]] = {
    "boxes": boxes.find_boxes,
    "text": sequences.find_text,
    "segmentation": segmentation.find_segmentation,
    "masks": segmentation.find_masks,
    "heat maps": heatmaps.find_heatmaps,
    "key points by axes": keypoints.find_simcc,
    "key points": keypoints.find_keypoints,
    "labels": labels.find_labels,
    "ranked classes": labels.find_ranked,
    "classes": classes.find_classes,
    "embeddings": embeddings.find_embeddings,
    "steps": sequences.find_steps,
}


def recognised(seen: Seen) -> Task | None:
    """Return the task of the outputs; None if no recogniser is certain.

    Outputs that repeat others are left out. If no task fits the rest, states for the next call are
    left out too.
    """
    if not seen.outputs:
        return None
    distinct = states.without(seen, states.unrolled(seen))
    task = _by_best_class(distinct)
    if task is None and (states_out := states.carried(seen)):
        return _by_best_class(states.without(distinct, states_out))
    return task


def _by_best_class(seen: Seen) -> Task | None:
    """Try the scores without their ArgMax outputs, then all outputs, then the ArgMax alone."""
    best = states.best_of(seen)
    drops = (best, (), set(best.values())) if best else ((),)
    tasks = (_by_any(states.without(seen, dropped)) for dropped in drops)
    return next((task for task in tasks if task is not None), None)


def _by_any(seen: Seen) -> Task | None:
    return next((task for find in TASKS.values() if (task := find(seen)) is not None), None)


__all__ = ["TASKS", "Metric", "Seen", "Tally", "Task", "TaskFigure", "metric_of", "recognised"]
