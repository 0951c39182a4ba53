"""How much a search tries, for each `--effort`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from calibrators.searches import COMPARABLE


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
