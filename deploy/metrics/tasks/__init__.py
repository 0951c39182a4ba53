"""Recognition of a model's task from its outputs; one module per family of tasks."""

from collections.abc import Callable

from deploy.metrics.tasks import (
    boxes,
    classes,
    embeddings,
    evaluation_task,
    heatmaps,
    keypoints,
    labels,
    segmentation,
    sequences,
)
from deploy.metrics.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure
from deploy.metrics.tasks.metric import Metric, metric_of

_MOST_OUTPUTS = 64  # of a model with a task: outputs are compared with each other
# Task -> its recogniser, tried in this order. Each must be certain from the values alone.
TASKS: dict[str, Callable[[FirstSamples], EvaluationTask | None]] = {
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


def recognise_task(seen: FirstSamples) -> EvaluationTask | None:
    """Return the task of the outputs; None if no recogniser is certain, or of over 64 outputs.

    Outputs that repeat others are left out. If no task fits the rest, states for the next call are
    left out too.
    """
    if not seen.outputs or len(seen.names) > _MOST_OUTPUTS:
        return None
    distinct = evaluation_task.drop_outputs(seen, evaluation_task.find_logits(seen))
    task = _by_best_class(distinct)
    if task is None and (states_out := evaluation_task.find_states(seen)):
        task = _by_best_class(evaluation_task.drop_outputs(distinct, states_out))
    return task or labels.find_integers(distinct)


def _by_best_class(seen: FirstSamples) -> EvaluationTask | None:
    """Try the scores without their ArgMax outputs, then all outputs, then the ArgMax alone."""
    best = evaluation_task.find_argmax_outputs(seen)
    drops = (best, (), set(best.values())) if best else ((),)
    for dropped in drops:
        left = evaluation_task.drop_outputs(seen, dropped)
        for find in TASKS.values():
            if (task := find(left)) is not None:
                return task
    return None


__all__ = [
    "TASKS",
    "EvaluationTask",
    "FirstSamples",
    "Metric",
    "TaskFigure",
    "metric_of",
    "recognise_task",
]
