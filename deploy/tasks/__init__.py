"""Recognition of a model's task from its outputs; one module per family of tasks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from deploy.errors import ConfigError
from deploy.tasks import (
    boxes,
    classes,
    embeddings,
    evaluation_task,
    keypoints,
    labels,
    maps,
    sequences,
)
from deploy.tasks.declarations import Declaration
from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure
from deploy.tasks.metric import Function, Metric, metric_of
from deploy.tasks.rows import is_floating

_MOST_OUTPUTS = 64  # of a model with a task: outputs are compared with each other
NO_TASK = ("none", "values")  # names that leave the task out, so that values are compared
_VECTORS, _MAPS = (2, 3, 4), (4,)  # numbers of dimensions; of a vector all but the second are 1


class TaskRow(NamedTuple):
    """How a task is recognised, and how it is made where the user sets it.

    `finders`: recognise the task from the values; each returns None unless it is certain. `wants`:
    the outputs that the task needs, as text. `ranks`: numbers of dimensions of an output that may
    be of the task. `make`: name and shape of a floating-point output, and whether it has values
    outside 0..1 -> the task; a false value if the shape does not fit.
    """

    finders: Sequence[Callable[[FirstSamples], EvaluationTask | None]]
    wants: str
    ranks: Sequence[int] = ()
    make: Callable[[str, tuple[int, ...], bool], EvaluationTask | bool] = lambda n, s, raw: False


def _fit_points(name: str, shape: tuple[int, ...], raw: bool) -> EvaluationTask | bool:
    numbers = shape[1] if keypoints.is_turned(shape) else shape[-1]
    numbers = numbers if 2 <= numbers <= 5 else 2
    count, left = divmod(math.prod(shape), numbers)
    return left == 0 and keypoints.Points({name: numbers}, (), count)


def _fit_steps(name: str, shape: tuple[int, ...], raw: bool) -> EvaluationTask:
    if len(shape) == 3 and min(shape[1:]) > 1:
        return sequences.Steps((name,), (shape[2],), 2)
    return sequences.Steps((name,), (2,), None, raw)


# Task, as the user may set it -> its row. Recognisers are tried in this order.
TASKS: dict[str, TaskRow] = {
    "boxes": TaskRow([boxes.find_boxes], "[N, A, 4] or wider beside scores [N, A, C]"),
    "text": TaskRow(
        [sequences.find_text], "[N, T, C] scores of 11 symbols or more", (3,),
        lambda n, s, raw: 1 in s[:2] and s[2] > 10 and sequences.Text(n, s[2], 0),
    ),
    "segmentation": TaskRow(
        [maps.find_segmentation], "[N, C, H, W] or [N, H, W, C] scores, or class numbers",
        _MAPS, lambda n, s, raw: maps.Pixels(n, min(s[1], s[3]), last=s[3] < s[1]),
    ),
    "masks": TaskRow(
        [maps.find_masks], "maps [N, K, H, W]", _MAPS,
        lambda n, s, raw: maps.MaskMaps((n,)),
    ),
    "heatmaps": TaskRow(
        [maps.find_heatmaps], "heat maps [N, K, H, W]", _MAPS,
        lambda n, s, raw: maps.HeatMaps(n, min(s[1], s[3]), last=s[3] < s[1]),
    ),
    "keypoints": TaskRow(
        [keypoints.find_simcc, keypoints.find_keypoints], "points [N, K, 2], [N, 2, K] or [N, K p]",
        _VECTORS, _fit_points,
    ),
    "labels": TaskRow(
        [labels.find_labels], "a score a label, [N, C] of 4 or more", _VECTORS,
        lambda n, s, raw: s[1] == math.prod(s) > 3 and labels.Labels(n, s[1], raw),
    ),
    "classes": TaskRow(
        [labels.find_ranked, classes.find_classes],
        "a score a class, [N, C], or indices of the best classes", _VECTORS,
        lambda n, s, raw: s[1] == math.prod(s) > 1 and classes.Classes((n,), (s[1],)),
    ),
    "embeddings": TaskRow(
        [embeddings.find_embeddings], "a vector [N, D]", _VECTORS,
        lambda n, s, raw: s[1] == math.prod(s) > 1 and embeddings.Embeddings(n, s[1]),
    ),
    "steps": TaskRow(
        [sequences.find_steps], "[N, T, C] scores, or one a step, [N, T]", (2, 3), _fit_steps
    ),
    "indices": TaskRow([labels.find_integers], "int32 or int64 outputs"),
}  # fmt: skip


def judge_of(
    metric: str | Function | None, task: str | None, declared: Declaration | None = None
) -> Metric:
    """Return what outputs are judged by: what the user set, and what the model's file declares.

    Raises:
        ConfigError: no such metric or task.
    """
    if task is not None and task not in (*TASKS, *NO_TASK):
        raise ConfigError(f"a task is one of {', '.join((*TASKS, NO_TASK[0]))}, got {task!r}")
    user_metric = Metric(None) if metric is None else metric_of(metric)
    return replace(user_metric, task=task or "", declared=declared or Declaration())


def recognise_task(samples: FirstSamples, task: str = "") -> EvaluationTask | None:
    """Return the task of the outputs; None if no recogniser is certain, or of over 64 outputs.

    Outputs that repeat others are left out. If no task fits the rest, states for the next call are
    left out too. `task`: a name of `TASKS` or `NO_TASK` that the user set.

    Raises:
        ConfigError: the outputs do not fit the user's task.
    """
    if not samples.outputs or task in NO_TASK or (not task and len(samples.names) > _MOST_OUTPUTS):
        return None
    distinct = evaluation_task.drop_outputs(samples, evaluation_task.find_logits(samples))
    declared_task = samples.declared.task
    if task or declared_task in TASKS:
        row = TASKS[task or declared_task]
        fitting = _recognise(distinct, [row]) or _fitted(row, distinct)
        if fitting is not None:
            return fitting
        if task:
            got = [f"{name} {[*samples.outputs[0][name].shape]}" for name in samples.every[:4]]
            raise ConfigError(
                f"the task {task} needs {row.wants}, got {', '.join(got)}; set another, or none to"
                " compare values"
            )
    if declared_task in NO_TASK:
        return None

    rows = [row for name, row in TASKS.items() if name != "indices"]
    return _recognise(distinct, rows) or labels.find_integers(distinct)


def _recognise(samples: FirstSamples, rows: Sequence[TaskRow]) -> EvaluationTask | None:
    """Return the first task that fits all outputs, or those that are no states."""
    recognised = _by_best_class(samples, rows)
    if recognised is None and (states_out := evaluation_task.find_states(samples)):
        return _by_best_class(evaluation_task.drop_outputs(samples, states_out), rows)
    return recognised


def _fitted(row: TaskRow, samples: FirstSamples) -> EvaluationTask | None:
    """Return the task of the largest output that fits; of classes, of all that do."""
    if row is TASKS["boxes"]:
        return boxes.fit_boxes(samples)
    fitted = []
    for name in sorted(samples.names, key=lambda name: -samples.outputs[0][name].size):
        values = samples.arrays(name)
        if all(map(is_floating, values)):
            raw = any(one.min() < 0 or one.max() > 1 for one in values)
            fits = values[0].ndim in row.ranks and row.make(name, values[0].shape, raw)
            fitted += [fits] if isinstance(fits, EvaluationTask) else []
    heads = [task for task in fitted if isinstance(task, classes.Classes)]
    if heads:
        names, counts = zip(*((task.outputs[0], task.counts[0]) for task in heads), strict=True)
        return classes.Classes(names, counts)
    return fitted[0] if fitted else None


def _by_best_class(samples: FirstSamples, rows: Iterable[TaskRow]) -> EvaluationTask | None:
    """Try the scores without their ArgMax outputs, then all outputs, then the ArgMax alone."""
    best = evaluation_task.find_argmax_outputs(samples)
    drops = (best, (), set(best.values())) if best else ((),)
    for dropped in drops:
        left = evaluation_task.drop_outputs(samples, dropped)
        for find in (find for row in rows for find in row.finders):
            if (task := find(left)) is not None:
                return task
    return None


__all__ = ["TASKS", "EvaluationTask", "FirstSamples", "Metric", "TaskFigure", "judge_of"]
