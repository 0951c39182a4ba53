"""Options of the search: its effort, its budget of samples, and the cost that it minimizes.

The cost of a trial is log(time) + 3.5 * loss, with the time as a share of the float model's and the
loss of the worst output slice, 0 to 1. A loss of 0.1 is worth 30 % of the time; a slice that
is all noise costs 3.5, more than int8 ever wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrators.searches import COMPARABLE, DEFAULT_METHOD
from deploy.errors import ConfigError
from deploy.method import Choices, Method
from deploy.metrics.levels import check_max_loss
from deploy.runtimes.ort import cpu_kind
from deploy.targets.base import Target
from deploy.tasks import Metric
from deploy.tuning import CPU_NAMES, PREFERENCES, THIS_CPU
from deploy.tuning.probe import Noise
from deploy.tuning.search_samples import ExpectedVerdict
from deploy.tuning.sensitivity import QUIET_LOSS

TRIAL_SAMPLES = 8  # samples of each trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the search tries, for one value of `--effort`.

    Attributes:
        isolated_samples: those of `TRIAL_SAMPLES` on which a group runs alone in int8.
        first_groups: groups of layers to begin with.
        isolated_trials: groups to run alone in int8, at most.
        split_trials: splits to try, at most.
        calibrations: budget in samples run, as a number of calibrations.
    """

    isolated_samples: int
    first_groups: int
    isolated_trials: int
    split_trials: int
    calibrations: float

    @property
    def trials(self) -> int:
        """Trials of a search, about."""
        return self.isolated_trials + self.split_trials + len(COMPARABLE)


EFFORTS: dict[int, Effort] = {
    1: Effort(
        isolated_samples=4,
        first_groups=8,
        isolated_trials=40,
        split_trials=4,
        calibrations=6,
    ),
    2: Effort(
        isolated_samples=4,
        first_groups=16,
        isolated_trials=80,
        split_trials=8,
        calibrations=25,
    ),
    3: Effort(
        isolated_samples=8,
        first_groups=64,
        isolated_trials=400,
        split_trials=16,
        calibrations=math.inf,
    ),
}

_MIN_IMAGES = 100  # with fewer, the budget is that of so many
_SMALL_MODEL_PRODUCTS = 4e10  # products that any search may compute, in a few seconds
_MAX_FACTOR = 4.0  # by which this enlarges the budget of a small model


@dataclass(slots=True)
class SearchBudget:
    """Budget of a search, in samples run.

    Attributes:
        limit: samples that may be run; the trials alone need far less.
        spent: samples run so far, each counted once per model that ran it.
    """

    limit: float
    spent: int = 0

    @classmethod
    def for_feed(cls, calibrations: float, samples: int, products: float) -> SearchBudget:
        """Return the budget of a number of calibrations, which is larger for a small model.

        Args:
            calibrations: how often all samples may be run.
            samples: of the feed.
            products: of the float model in one sample.
        """
        limit = calibrations * max(samples, _MIN_IMAGES)
        factor = _SMALL_MODEL_PRODUCTS / max(limit * products, 1.0)
        return cls(limit * min(max(factor, 1.0), _MAX_FACTOR))

    def spend(self, samples: int) -> None:
        """Count samples as run."""
        self.spent += samples

    def holds(self, samples: int) -> bool:
        """Return whether so many more samples may be run."""
        return self.spent + samples <= self.limit


COMMON_WEIGHT = 3.5  # default weight of loss against log(time)
_ACCURATE_WEIGHT = 14.0  # the same where accuracy is preferred
_MIN_SHARE = 1e-6  # of the time or size, whose logarithm must be finite
_CLIPS_LITTLE = ("lp 3", "minmax")


@dataclass(slots=True, kw_only=True, eq=False)
class Trial:
    """One split with its range methods, run on the samples of the search.

    Attributes:
        in_float: units in float.
        choices: nodes in float and range methods.
        noise: of the outputs.
        predicted_time: as a share of the float model's.
        measured_time: the same; None where it is not measured.
        verdict: expected for its engine; None until it is judged.
    """

    in_float: frozenset[str]
    choices: Choices
    noise: Noise
    predicted_time: float
    measured_time: float | None = None
    verdict: ExpectedVerdict | None = None

    @property
    def time(self) -> float:
        """Time as a share of the float model's, measured if possible."""
        return self.predicted_time if self.measured_time is None else self.measured_time

    @property
    def loss(self) -> float:
        """Loss of the worst output slice."""
        return self.noise.worst


def split_cost(share: float, loss: float, weight: float) -> float:
    """Return log(share) + weight * loss; `share` is of the float model's time, or of its size.

    Losses below `QUIET_LOSS` are equal, so that no time is given for what nobody notices. Where
    accuracy is preferred, this limit is lower as the weight is higher.
    """
    quiet_loss = QUIET_LOSS * min(1.0, COMMON_WEIGHT / weight)
    return math.log(max(share, _MIN_SHARE)) + weight * max(loss, quiet_loss)


def clips(method: Method | None) -> bool:
    """Return whether a range method clips more than a few values; None is the default method."""
    return (method.label if method else DEFAULT_METHOD) not in _CLIPS_LITTLE


DEFAULT_EFFORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options of the search.

    Attributes:
        effort: 0 does not search, 3 tries most. None is 1, or 0
            for a target whose configuration the user gives (`Target.configured`).
        plan: a plan to follow instead of a search; None uses the one in the output folder, if it
            fits.
        max_loss: largest loss of the task on the samples of the search; None sets no limit.
        prefer: "speed"; "accuracy" weighs loss four times as much; "size" counts the bytes of the
            weights in place of time.
        cpu: CPU that will run ONNX Runtime's engine: "this", or, without measuring time, "any",
            "vnni", "avx2" or "arm".
        timed: whether time measured on this machine may decide.
        fresh: search again even if there is a plan.
        metric: the user's metric or task; None uses the task of the outputs.
        split: number of a split in the plan's front, to build it without a search.

    Raises:
        ConfigError: an unknown effort, preference or CPU.
    """

    effort: int | None = None
    plan: Path | None = None
    max_loss: float | None = None
    prefer: str = "speed"
    cpu: str = THIS_CPU
    timed: bool = True
    fresh: bool = False
    metric: Metric | None = None
    split: int | None = None

    def __post_init__(self) -> None:
        check_max_loss(self.max_loss)
        _check_choice("an effort", self.level, (0, *EFFORTS))
        _check_choice("a preference", self.prefer, PREFERENCES)
        _check_choice("a CPU", self.cpu, CPU_NAMES)

    @property
    def level(self) -> int:
        """The effort, or its default."""
        return DEFAULT_EFFORT if self.effort is None else self.effort

    def for_target(self, target: Target) -> Tuning:
        """Return the options for one target: nothing is searched beyond its configuration."""
        if target.configured and self.effort is None and self.plan is None:
            return replace(self, effort=0)
        return self

    @property
    def weight(self) -> float:
        """Weight of loss against time, see `COMMON_WEIGHT`."""
        return _ACCURATE_WEIGHT if self.prefer == "accuracy" else COMMON_WEIGHT

    @property
    def cpu_kind(self) -> str:
        """A key of `deploy.tuning.prices.CPUS`; another text where no CPU's prices count."""
        return cpu_kind() if self.cpu == THIS_CPU else self.cpu

    @property
    def is_timed(self) -> bool:
        """Whether time on this machine decides, where the target runs on it."""
        return self.timed and self.cpu == THIS_CPU and self.prefer != "size"


def _check_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value of an option that is none of its choices."""
    if value not in choices:
        raise ConfigError(f"{option} is one of {', '.join(map(str, choices))}, got {value!r}")
