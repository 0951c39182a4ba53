"""Recognition of a model's task from its outputs; one module per family of tasks.

What the user sets decides, then what the model's file declares (`declarations`), then the form of
the values. Thresholds of all forms: `thresholds`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from deploy.errors import ConfigError
from deploy.tasks import boxes, first_samples, indices, keypoints, maps, sequences, vectors
from deploy.tasks.declarations import Declaration
from deploy.tasks.detector_forms import PROPOSALS
from deploy.tasks.evaluation_task import EvaluationTask, Form, TaskFigure
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.metric import Function, Metric, metric_of

_MAX_OUTPUTS = 64  # of a model with a task: outputs are compared with each other
_MAX_NAMED_OUTPUTS = 4  # in a message
NO_TASK = "none"  # leaves the task out, so that values are compared


Finder = Callable[[FirstSamples], EvaluationTask | None]


class TaskRow(NamedTuple):
    """How a task is recognised, and how it is made where the user or the file says it.

    Attributes:
        finders: recognise the task from the values; each returns None unless it is certain.
        forms: what they recognise.
        fit: gives the task of outputs in any layout that fits, or None.
    """

    finders: Sequence[Finder]
    forms: Sequence[Form]
    fit: Finder = lambda samples: None


def _fit_largest(fit: Callable[[str, FirstSamples], EvaluationTask | None]) -> Finder:
    """Return a function that gives the task of the largest output that fits.

    `fit`: name of a floating-point output and the samples -> its task, or None.
    """

    def fit_samples(samples: FirstSamples) -> EvaluationTask | None:
        tasks = (fit(name, samples) for name in first_samples.sort_by_size(samples))
        return next(filter(None, tasks), None)

    return fit_samples


# Task, as the user may set it -> its row. Recognisers are tried in this order.
TASKS: dict[str, TaskRow] = {
    "boxes": TaskRow([boxes.find_boxes], [boxes.LISTS, *PROPOSALS.values()], boxes.fit_boxes),
    "text": TaskRow([sequences.find_text], [sequences.TEXT], _fit_largest(sequences.fit_text)),
    "segmentation": TaskRow(
        [maps.find_segmentation], [maps.SEGMENTATION], _fit_largest(maps.fit_segmentation)
    ),
    "masks": TaskRow([maps.find_masks], [maps.MASKS], _fit_largest(maps.fit_masks)),
    "heatmaps": TaskRow([maps.find_heatmaps], [maps.HEATMAPS], _fit_largest(maps.fit_heatmaps)),
    "keypoints": TaskRow(
        [keypoints.find_simcc, keypoints.find_keypoints],
        [keypoints.SIMCC, keypoints.POINTS],
        _fit_largest(keypoints.fit_keypoints),
    ),
    "classes": TaskRow(
        [vectors.find_ranked, vectors.find_classes],
        [vectors.RANKED, vectors.CLASSES],
        vectors.fit_classes,
    ),
    "embeddings": TaskRow(
        [vectors.find_embeddings], [vectors.EMBEDDINGS], _fit_largest(vectors.fit_embeddings)
    ),
    "labels": TaskRow([vectors.find_labels], [vectors.LABELS], _fit_largest(vectors.fit_labels)),
    "steps": TaskRow([sequences.find_steps], [sequences.STEPS], _fit_largest(sequences.fit_steps)),
    "indices": TaskRow([indices.find_integers], [indices.INDICES]),
}


def make_metric(
    metric: str | Function | None, task: str | None, declared: Declaration | None = None
) -> Metric:
    """Return what outputs are judged by: what the user set, and what the model's file declares.

    Args:
        metric: a function, `file.py:function`, or None for the figure of the outputs' task.
        task: name of a task that the user set; None for the one that the outputs have.
        declared: what the model's file declares; None for nothing.

    Raises:
        ConfigError: no such metric or task.
    """
    if task is not None and task not in (*TASKS, NO_TASK):
        raise ConfigError(f"a task is one of {', '.join((*TASKS, NO_TASK))}, got {task!r}")
    user_metric = Metric(None) if metric is None else metric_of(metric)
    return replace(user_metric, task=task or "", declared=declared or Declaration())


def recognise_task(samples: FirstSamples, task: str) -> tuple[EvaluationTask | None, str]:
    """Return (task of the outputs, who chose it).

    The user chose it ("as set by --task"), or the model's file ("by FILE"); "" if the values of the
    outputs show it, or if none is recognised. The task is None if no recogniser is certain, or
    there are over 64 outputs, or the user or the file says that there is none.

    Args:
        samples: the float model's first samples.
        task: a name of `TASKS`, or `NO_TASK`, that the user set; "" to recognise it.

    Raises:
        ConfigError: the outputs do not fit the user's task.
    """
    declared = samples.declared
    if task == NO_TASK:
        return None, "as set by --task"
    # raw scores say the same as their probabilities, and states are only for the next call
    unused_outputs = {*declared.probabilities, *declared.states.values()}
    samples = first_samples.drop_outputs(samples, unused_outputs)
    if task:
        return _fit_user_task(samples, task), "as set by --task"
    if len(samples.names) > _MAX_OUTPUTS:
        return None, ""
    if declared.task == NO_TASK:
        return None, f"by {declared.source}"

    if declared.task:
        declared_task = _fit_task(samples, TASKS[declared.task])
        if declared_task is not None:
            return declared_task, f"by {declared.source}"
    # indices may be an output of any task, so they are tried last
    other_rows = [row for name, row in TASKS.items() if name != "indices"]
    task_by_values = _recognise(samples, other_rows) or indices.find_integers(samples)
    return task_by_values, ""


def _fit_user_task(samples: FirstSamples, task: str) -> EvaluationTask:
    """Return the task that the user set, on these outputs.

    Raises:
        ConfigError: the outputs do not fit it.
    """
    row = TASKS[task]
    user_task = _fit_task(samples, row)
    if user_task is not None:
        return user_task
    needed_shapes = ", or ".join(form.shape for form in row.forms)
    outputs = samples.outputs[0]
    names = samples.output_names[:_MAX_NAMED_OUTPUTS]
    output_texts = [f"{name} {[*outputs[name].shape]}" for name in names]
    raise ConfigError(
        f"the task {task} needs {needed_shapes}, got {', '.join(output_texts)}; set another, or"
        " none to compare values"
    )


def _fit_task(samples: FirstSamples, row: TaskRow) -> EvaluationTask | None:
    """Return a task that is set or declared: recognised if possible, else in a layout that fits."""
    return _recognise(samples, [row]) or row.fit(samples)


def _recognise(samples: FirstSamples, rows: Sequence[TaskRow]) -> EvaluationTask | None:
    """Return the first task that fits the outputs; None if no task does.

    An ArgMax beside its scores says nothing new, and classifiers may also give an embedding beside
    their scores. So the outputs are tried without the ArgMax and the embedding, without the ArgMax,
    and all of them.

    `rows`: of `TASKS`, each the functions that find one task; tried in this order.
    """
    embeddings = vectors.find_embeddings_beside(samples)
    best_classes = frozenset(samples.declared.best_classes)
    # one set of outputs to leave out for each attempt; equal attempts are made once
    attempts = (best_classes | embeddings, best_classes, frozenset[str]())
    for dropped_outputs in dict.fromkeys(attempts):
        remaining_samples = first_samples.drop_outputs(samples, dropped_outputs)
        for row in rows:
            for find_task in row.finders:
                task = find_task(remaining_samples)
                if task is not None:
                    return task
    return None


__all__ = ["TASKS", "EvaluationTask", "FirstSamples", "Metric", "TaskFigure", "make_metric"]
