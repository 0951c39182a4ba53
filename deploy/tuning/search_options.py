"""Options of the search: its effort, its budget of samples, and the cost that it minimizes.

The cost of a trial is log(time) + 3.5 * loss, with the time as a share of the float model's and the
loss of the worst output slice, 0 to 1. A loss of 0.1 is worth 30 % of the time; a slice that
is all noise costs 3.5, more than int8 ever wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from calibrators.searches import COMPARABLE, DEFAULT_METHOD
from deploy.errors import ConfigError
from deploy.method import Choices, Method
from deploy.runtimes.ort import cpu_kind
from deploy.targets.base import Target
from deploy.tasks import Metric
from deploy.tuning import CPU_NAMES, PREFERENCES, THIS_CPU
from deploy.tuning.probe import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the search tries, for one value of `--effort`."""

    samples: int  # samples of each trial
    few: int  # the most active of them, on which a group runs alone
    groups: int  # groups of layers to begin with
    alone: int  # most groups to run alone in int8
    whole: int  # most splits to try
    again: int  # most splits to try again after another range method was found
    others: int  # range methods to try again on the best split, those of least loss
    swaps: int  # noisy groups to try these methods on
    rounds: int  # most rounds; a round starts from the best trial of the one before
    calibrations: float  # budget in samples run, as a number of calibrations

    @property
    def most(self) -> int:
        """Trials of one round, about."""
        return self.alone + self._complete + self.others * self.swaps + len(COMPARABLE)

    @property
    def round_samples(self) -> int:
        """Samples that one round runs, at most."""
        return self.few * (self.alone + self.others * self.swaps) + self.samples * self._complete

    @property
    def _complete(self) -> int:
        return self.whole + self.again + self.others


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

_USUAL = 100  # images: with fewer, the budget is that of so many
_PRODUCTS = 4e10  # products that any search may compute, in a few seconds
_LARGER = 4.0  # factor by which this enlarges the budget of a small model, at most


@dataclass(slots=True)
class SearchBudget:
    """Budget of a search, in samples run."""

    most: float  # samples that may be run; the trials alone need far less
    ran: int = 0  # samples run so far, each counted once per model that ran it
    # counts the float model's products of one sample, once the budget is spent
    products: Callable[[], float] | None = None

    @classmethod
    def of(
        cls, calibrations: float, samples: int, products: Callable[[], float] | None = None
    ) -> SearchBudget:
        """Return the budget of a number of calibrations on a feed of `samples`."""
        return cls(calibrations * max(samples, _USUAL), products=products)

    def spend(self, samples: int) -> None:
        """Count samples as run."""
        self.ran += samples

    def holds(self, samples: int) -> bool:
        """Whether so many more samples may be run."""
        if self.ran + samples > self.most and self.products is not None:
            larger = _PRODUCTS / max(self.most * self.products(), 1.0)
            self.most *= min(max(larger, 1.0), _LARGER)
            self.products = None
        return self.ran + samples <= self.most


COMMON_WEIGHT = 3.5  # default weight of loss against log(time)
_ACCURATE_WEIGHT = 14.0  # the same where accuracy is preferred
_LITTLE_CLIPPING = ("lp 3", "minmax")
# loss added for other methods, until held-back samples decide: new inputs are clipped more
_UNSEEN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One split with its range methods, run on the samples of the search."""

    what: str
    in_float: frozenset[str]
    choices: Choices
    noise: Noise
    time: float  # predicted time, as a share of the float model's

    @property
    def clipping_loss(self) -> float:
        """Loss expected on inputs that did not calibrate."""
        return _UNSEEN if clips(self.choices.method) else 0.0

    @property
    def mean_loss(self) -> float:
        """Loss averaged over the output slices, with that of clipping."""
        return self.noise.mean + self.clipping_loss

    @property
    def worst_loss(self) -> float:
        """Loss of the worst output slice, with that of clipping."""
        return self.noise.worst + self.clipping_loss

    def cost(self, weight: float) -> float:
        """Return log(time) + weight * loss of the worst slice."""
        return math.log(max(self.time, 1e-6)) + weight * self.worst_loss


def clips(method: Method | None) -> bool:
    """Whether a range method clips more than a few values."""
    return (method.label if method else DEFAULT_METHOD) not in _LITTLE_CLIPPING


DEFAULT_EFFORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options of the search.

    Attributes:
        effort: 0 does not search, 3 searches as long as it finds something better. None is 1, or 0
            for a target whose configuration the user gives (`Target.configured`).
        plan: a plan to obey instead of searching; None looks in the output folder.
        max_loss: largest loss of the task on the samples of the search; None sets no limit.
        prefer: one of `PREFERENCES`. "accuracy" weighs loss four times as much against time; "size"
            has most layers in int8 whatever their time.
        cpu: one of `CPU_NAMES`, the CPU that will run ONNX Runtime's engine. Time is measured for
            "this" alone.
        timed: whether time measured on this machine may decide.
        fresh: search again even if there is a plan.
        metric: the user's metric or task; None uses the task of the outputs.
        split: number of a split of the plan's front, to be built without a search.

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
        if self.level not in (0, *EFFORTS):
            raise ConfigError(f"an effort is 0 to {max(EFFORTS)}, got {self.effort}")
        if self.max_loss is not None and not 0 <= self.max_loss <= 1:
            raise ConfigError(f"the largest loss is a share, 0 to 1, got {self.max_loss}")
        for what, value, known in (
            ("a preference", self.prefer, PREFERENCES),
            ("a CPU", self.cpu, CPU_NAMES),
        ):
            if value not in known:
                raise ConfigError(f"{what} is one of {', '.join(known)}, got {value!r}")

    @property
    def level(self) -> int:
        """The effort, or its default."""
        return DEFAULT_EFFORT if self.effort is None else self.effort

    def for_target(self, target: Target) -> Tuning:
        """Return the options for one target: nothing is searched beyond its configuration."""
        obeys = target.configured and self.effort is None and self.plan is None
        return replace(self, effort=0) if obeys else self

    @property
    def weight(self) -> float:
        """Weight of loss against time, see `COMMON_WEIGHT`."""
        return _ACCURATE_WEIGHT if self.prefer == "accuracy" else COMMON_WEIGHT

    @property
    def cpu_kind(self) -> str:
        """A key of `deploy.tuning.prices.CPUS`; another text where no CPU's prices count."""
        if self.prefer == "size":
            return "any"
        return cpu_kind() if self.cpu == THIS_CPU else self.cpu

    @property
    def is_timed(self) -> bool:
        """Whether time on this machine decides, where the target runs on it."""
        return self.timed and self.cpu == THIS_CPU and self.prefer != "size"
