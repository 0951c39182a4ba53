"""What the user wants of the search.

How much a search tries, for each `--effort`.

What a search may cost, in samples that it runs: so many calibrations, whatever it finds.

One thing that a search tried, and what it costs.

Cost weighs both: the logarithm of the time, and 2.5 times what the worst part of the outputs loses
to noise. A tenth lost is worth a quarter of the time; a part that is all noise costs nearly 2.5,
more than any int8 wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.searches import COMPARABLE, DEFAULT_METHOD
from deploy.errors import ConfigError
from deploy.method import Choices
from deploy.tuning.probe import Noise

if TYPE_CHECKING:
    from deploy.metrics.tasks import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried.

    Attributes:
        samples: that every trial runs.
        few: of them, those that say most, which a group alone runs.
        groups: of layers, to begin with.
        alone: groups to try alone in int8, at most.
        whole: splits to try whole, at most.
        again: splits to try whole once more, where other methods were found, at most.
        others: methods that are tried again on the best split, those that lose least whole.
        swaps: noisy groups for which these methods are tried.
        rounds: how often the search begins again from what it found, while that finds something.
        calibrations: that all of it may cost, in samples run.
    """

    samples: int
    few: int
    groups: int
    alone: int
    whole: int
    again: int
    others: int
    swaps: int
    rounds: int
    calibrations: float

    @property
    def most(self) -> int:
        """Trials of one round, about."""
        splits = self.whole + self.again
        return self.alone + splits + self.others * (1 + self.swaps) + len(COMPARABLE)


EFFORTS: dict[int, Effort] = {
    1: Effort(
        samples=8, few=2, groups=8, alone=24, whole=4, again=2, others=2, swaps=2, rounds=1,
        calibrations=5,
    ),
    2: Effort(
        samples=8, few=4, groups=16, alone=80, whole=8, again=8, others=4, swaps=8, rounds=2,
        calibrations=25,
    ),
    3: Effort(
        samples=8, few=8, groups=64, alone=400, whole=16, again=16, others=4, swaps=32, rounds=8,
        calibrations=math.inf,
    ),
}  # fmt: skip

_USUAL = 100  # images: of fewer, the search may cost more calibrations


@dataclass(slots=True)
class Allowance:
    """Samples that a search may run, and those that it has run.

    Attributes:
        most: samples; what the trials themselves need is far less.
        ran: samples, each as often as some model ran it.
    """

    most: float
    ran: int = 0

    @classmethod
    def of(cls, calibrations: float, samples: int) -> Allowance:
        """So many calibrations of a feed."""
        return cls(calibrations * max(samples, _USUAL))

    def spend(self, samples: int) -> None:
        """They are run."""
        self.ran += samples

    def holds(self, samples: int) -> bool:
        """Whether so many more may be run."""
        return self.ran + samples <= self.most


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


DEFAULT_EFFORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the user wants of the search.

    Attributes:
        effort: 0 looks for nothing, 3 as long as it finds something.
        plan: a plan to obey instead of searching; None looks beside the output.
        min_speedup: less than this, and the target gets its float model.
        max_loss: of the task, over the samples of the search: noise is made to cost more until it
            holds; None leaves it at the common cost.
        weight: what noise costs beside time, see `deploy.tuning.search_options`.
        timed: whether time of this machine may decide.
        fresh: search again though there is a plan.
        metric: the user's figure, which judges choices in the task's place; None leaves them to
            the outputs' form.

    Raises:
        ConfigError: an effort that is not in the table, a speed-up that is no positive number.
    """

    effort: int = DEFAULT_EFFORT
    plan: Path | None = None
    min_speedup: float = 1.0
    max_loss: float | None = None
    weight: float = COMMON_WEIGHT
    timed: bool = True
    fresh: bool = False
    metric: Metric | None = None

    def __post_init__(self) -> None:
        if self.effort not in (0, *EFFORTS):
            raise ConfigError(f"an effort is 0 to {max(EFFORTS)}, got {self.effort}")
        if not (math.isfinite(self.min_speedup) and self.min_speedup >= 0):
            raise ConfigError(f"a speed-up must be 0 or more, got {self.min_speedup}")
