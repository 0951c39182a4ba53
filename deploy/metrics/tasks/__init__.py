"""Tasks that outputs are recognised for, one file each; the first that is sure wins."""

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

# Task -> its recogniser. Each must be sure of the form alone; none knows a model by its name.
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
    """What the outputs are for; None where no form fits for sure.

    An output that says again what another says is left out. Where no form fits all that is left,
    one may fit those that are not just fed to the next call.
    """
    if not seen.outputs:
        return None
    once = states.without(seen, states.unrolled(seen))
    found = _said_twice(once)
    if found is None and (fed := states.carried(seen)):
        return _said_twice(states.without(once, fed))
    return found


def _said_twice(seen: Seen) -> Task | None:
    """The task of scores without their best class, which tell more, or of it without them."""
    best = states.best_of(seen)
    ways = (best, (), set(best.values())) if best else ((),)
    found = (_recognised(states.without(seen, left)) for left in ways)
    return next((task for task in found if task is not None), None)


def _recognised(seen: Seen) -> Task | None:
    return next((task for find in TASKS.values() if (task := find(seen)) is not None), None)


__all__ = ["TASKS", "Metric", "Seen", "Tally", "Task", "TaskFigure", "metric_of", "recognised"]
