"""When samples are enough, and how far their halves agree, as plain values.

`deploy.calibration.stability` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.errors import ConfigError

WITHIN = 0.2  # what all samples give is then off by about a tenth: less than 1 dB of a step
_FEW = 20  # one tensor of so many may differ
_NAMED = 3  # tensors that a sentence names


@dataclass(frozen=True, slots=True)
class Until:
    """When to stop observing; what a cache says of how its samples were chosen.

    Attributes:
        within: share of the range by which two halves may differ.
        method: the search, with its parameters.

    Raises:
        ConfigError: a share that is none.
    """

    within: float
    method: str

    def __post_init__(self) -> None:
        if not 0 < self.within < 1:
            raise ConfigError(
                "ranges are stable within a share of themselves, over 0 and below 1, got"
                f" {self.within:g}; give a share such as {WITHIN:g}"
            )

    def __str__(self) -> str:
        """In words."""
        return f"until halves of the samples agreed within {_percent(self.within)} by {self.method}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the ranges agree that two halves of some samples give.

    Attributes:
        samples: in both halves.
        within: share of a range by which they may differ.
        tensors: how many were looked at.
        apart: tensor -> share of its range, of those that differ by more, the farthest first.
        stopped: whether no more samples were looked at, since they agreed.
    """

    samples: int
    within: float
    tensors: int
    apart: Mapping[str, float] = field(default_factory=dict)
    stopped: bool = False

    @property
    def enough(self) -> bool:
        """Whether all but a twentieth of the tensors, rounded, agree."""
        return len(self.apart) <= (self.tensors + _FEW // 2) // _FEW

    @property
    def words(self) -> str:
        """In one sentence, with the advice where more samples would do good."""
        many = f"{len(self.apart) or 'none'} of {self.tensors} ranges"
        verb = "differs" if len(self.apart) == 1 else "differ"
        said = (
            f"{many} {verb} by {_percent(self.within)} or more between the halves of"
            f" {self.samples} samples{self._which}"
        )
        if self.stopped:
            return f"{said}; enough twice in a row, so no more were looked at"
        return said if self.enough else f"{said}; calibrate with more images"

    @property
    def _which(self) -> str:
        listed = [f"{name} by {_percent(share)}" for name, share in self.apart.items()]
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        return f": {', '.join(listed[:_NAMED])}{more}" if listed else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
