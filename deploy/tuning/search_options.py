"""One thing that a search tried, and what it costs.

Cost weighs both: the logarithm of the time, and 2.5 times what the worst part of the outputs loses
to noise. A tenth lost is worth a quarter of the time; a part that is all noise costs nearly 2.5,
more than any int8 wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from calibrators.searches import DEFAULT_METHOD
from deploy.calibration.choices import Choices
from deploy.tuning.probe import Noise

COMMON_WEIGHT = 2.5  # weight of noise that is usual
_KEEPING = ("lp 3", "minmax")  # searches that clip little
_UNSEEN = 0.02  # more is lost by others: what they clip is more in inputs that did not calibrate


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One thing that was tried whole.

    Attributes:
        what: in words.
        in_float: units in float.
        choices: what it was built with.
        noise: what it lost.
        time: predicted, as a share of the float model's.
        is_float: whether it is the float model, which clips nothing.
    """

    what: str
    in_float: frozenset[str]
    choices: Choices
    noise: Noise
    time: float
    is_float: bool = False

    @property
    def loss(self) -> float:
        """Of the task, where the outputs' form tells it; else of the worst part's cosine."""
        accuracy = self.noise.accuracy
        if accuracy is None or accuracy.worst is None:
            return 1.0
        if accuracy.task is not None:
            return accuracy.task.lost
        return 1 - accuracy.worst.cosine_mean

    @property
    def _caution(self) -> float:
        """What is lost beside what the samples show."""
        method = self.choices.method.label if self.choices.method else DEFAULT_METHOD
        return 0.0 if self.is_float or method in _KEEPING else _UNSEEN

    @property
    def mean(self) -> float:
        """What the parts lose in the mean, with caution."""
        return self.noise.mean + self._caution

    def cost(self, weight: float) -> float:
        """What the search makes least."""
        return math.log(max(self.time, 1e-6)) + weight * (self.noise.worst + self._caution)
