"""What the user wants of the search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError
from deploy.tuning.effort import EFFORTS
from deploy.tuning.search_options import COMMON_WEIGHT

if TYPE_CHECKING:
    from deploy.metrics.tasks import Metric

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
