"""The user's own metric, `file.py:function`, which replaces the recognised task.

::

    def score(fp32, int8, label):      # {output: array [1, ...]} twice, and an int or None
        return float(int8["logits"].argmax() == label)

It is called once per sample, so that no outputs are stored, and averaged; more is better. To get
the float model's own score it is also called with the float outputs in both places. It receives
copies, so it cannot change what other engines are compared with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deploy.errors import ConfigError
from deploy.files import usercode
from deploy.files.reading import read_bytes
from deploy.tasks.declarations import Declaration
from deploy.tasks.evaluation_task import TaskFigure
from deploy.tasks.rows import Outputs
from deploy.tasks.top1 import check_label_count

Function = Callable[[Outputs, Outputs, int | None], float]


@dataclass(frozen=True, slots=True)
class Metric:
    """What outputs are judged by: what the user set, and what the model's file declares.

    Attributes:
        function: the user's function.
        name: `file.py:function` or the function's name.
        digest: SHA-256 of the file; "" for a function object.
        task: name of the user's task; "" for the task that is declared, or that the outputs show.
        declared: what the model's file declares.
    """

    function: Function | None
    name: str = ""
    digest: str = ""
    task: str = ""
    declared: Declaration = field(default_factory=Declaration)

    @property
    def is_set(self) -> bool:
        """Whether the user set a function or a task."""
        return self.function is not None or self.task != ""

    @property
    def without_function(self) -> Metric:
        """The same without the user's function."""
        return replace(self, function=None, name="", digest="")

    def tally(self, labels: Sequence[int] | None) -> MetricTally | None:
        """Return a new tally of the function; None without one."""
        if self.function is None:
            return None
        return MetricTally(self, labels)


def metric_of(metric: str | Function) -> Metric:
    """Return the metric of `file.py:function` or of a function.

    Raises:
        ConfigError: no such file or function, or importing the file failed.
    """
    if not isinstance(metric, str):
        return Metric(metric, getattr(metric, "__name__", "metric"))
    function = usercode.load_function(
        metric, what="a metric", form="file.py:function", error=ConfigError
    )
    path = metric.rpartition(":")[0]
    data = read_bytes(path, what="the file of a metric", error=ConfigError)
    return Metric(function, metric, hashlib.sha256(data).hexdigest())


@dataclass(slots=True)
class MetricTally:
    """Means of the metric for the candidate and for the float model itself."""

    metric: Metric
    labels: Sequence[int] | None
    samples: int = 0
    reference_sum: float = 0.0
    candidate_sum: float = 0.0

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample.

        Raises:
            ConfigError: the function failed, or returned no finite number.
            FeedError: there are fewer labels than samples.
        """
        label = None
        if self.labels is not None:
            check_label_count(self.labels, self.samples + 1)
            label = self.labels[self.samples]
        self.samples += 1
        self.reference_sum += self._number(reference, reference, label)
        self.candidate_sum += self._number(reference, candidate, label)

    def _number(self, reference: Outputs, candidate: Outputs, label: int | None) -> float:
        """Return what the function gives for one sample, checked to be a finite number."""
        assert self.metric.function is not None
        with usercode.wrap_user_errors(f"the metric {self.metric.name}", error=ConfigError):
            value: Any = self.metric.function(_copies(reference), _copies(candidate), label)
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if isinstance(value, str) or not math.isfinite(number):
                raise ConfigError(
                    f"a metric must return a finite number, got {value!r:.60} from"
                    f" {self.metric.name} for sample {self.samples}"
                )
        return number

    def result(self) -> TaskFigure:
        """Return the candidate's mean and the float model's."""
        value = self.candidate_sum / self.samples
        reference_value = self.reference_sum / self.samples
        return TaskFigure(
            task="metric",
            figure=self.metric.name.rpartition(":")[2],
            value=value,
            reference=reference_value,
            count=f"{value:.4g}",
            words=f"{self.metric.name}: {value:.4g}, the float model {reference_value:.4g}",
            samples=self.samples,
        )


def _copies(outputs: Outputs) -> Outputs:
    return {name: np.array(values) for name, values in outputs.items()}
