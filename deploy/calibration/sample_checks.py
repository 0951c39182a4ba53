"""Sample checks: outliers among the calibration samples; stop rule and agreement of halves.

An outlier is a sample far above all others, which can spoil every range::

    largest |x| of each sample, one tensor     9800  1.3  1.2  1.2  1.1 ...
                                               |---| more than 8 times the next: an outlier

A range that covers it costs all other samples three or more of int8's eight bits; a range that
clips it is wrong for it. In the benchmarks (`docs/accuracy.md`) no sample exceeds twice the next,
so ordinary feeds get no warning. Only the few largest samples of each tensor are stored, by number:
memory is constant, and the result does not depend on the number of threads.

`StabilityRule` and `HalvesAgreement` are plain values; `deploy.calibration.stability` computes
them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError

OUTLIER_RATIO = 8.0  # ratio to the next largest sample: three bits
_FEWEST = 5  # samples; with fewer, "all others" means little
_SHARE = 20  # at most one of so many samples is an outlier, but always one may be
_KEPT = 9  # largest samples stored per tensor: at most 8 outliers and the next

Place = tuple[str, str]  # variant, tensor
PeakRow = tuple[str, str, int, tuple[tuple[float, int], ...]]
"""Variant, tensor, number of samples, (|x|, place of the sample in the feed) of the largest."""

_NAMED = 3  # entries that a sentence lists
STABLE_SHARE = (
    0.2  # the range of all samples is then off by about a tenth: less than 1 dB of a step
)
_FEW = 20  # one of so many tensors may differ


@dataclass(frozen=True, slots=True)
class Outlier:
    """A sample that stands out in a tensor.

    Attributes:
        digests: sha256 (hex) of each of the sample's images or rows.
        ratio: ratio of its largest |x| to that of the largest other sample.
    """

    variant: str
    tensor: str
    digests: tuple[str, ...]
    ratio: float


def largest_magnitude(value: NDArray[np.floating]) -> float:
    """Return the largest |x| of an array of any shape, in real units; 0 if it is empty."""
    return max(float(value.max()), -float(value.min())) if value.size else 0.0


class Peaks:
    """The largest samples of every tensor, in one pass or a slice of it."""

    def __init__(self) -> None:
        self._largest: dict[Place, list[tuple[float, int]]] = {}
        self._seen: dict[Place, int] = {}

    def add(self, place: Place, number: int, amax: float) -> None:
        """Add the largest |x| of a tensor in sample `number`; ignores Inf, reported elsewhere."""
        if math.isfinite(amax):
            self._seen[place] = self._seen.get(place, 0) + 1
            self._keep(place, (amax, -number))

    def merge(self, other: Peaks) -> None:
        """Add the peaks of another slice of the pass."""
        for place, listed in other._largest.items():
            self._seen[place] = self._seen.get(place, 0) + other._seen[place]
            for one in listed:
                self._keep(place, one)

    def rows(self, places: Sequence[int]) -> list[PeakRow]:
        """Return one `PeakRow` per tensor.

        Args:
            places: place of each sample in the feed, in sample order.
        """
        return [
            (*key, self._seen[key], tuple(sorted((x, places[-n - 1]) for x, n in listed)))
            for key, listed in sorted(self._largest.items())
        ]

    def add_rows(self, rows: Iterable[PeakRow], numbers: Mapping[int, int]) -> None:
        """Add the `rows` of other peaks.

        `numbers`: place in the feed -> number of the sample here.
        """
        for variant, tensor, seen, listed in rows:
            key = (variant, tensor)
            self._seen[key] = self._seen.get(key, 0) + seen
            for amax, place in listed:
                self._keep(key, (amax, -numbers[place]))

    def _keep(self, place: Place, one: tuple[float, int]) -> None:
        listed = self._largest.setdefault(place, [])
        if len(listed) < _KEPT:
            heapq.heappush(listed, one)
        else:
            heapq.heappushpop(listed, one)

    def outliers(self) -> Iterator[tuple[Place, int, float]]:
        """Yield (place, number of the sample, ratio to the largest other sample)."""
        for place in sorted(self._largest):
            listed = sorted(self._largest[place], reverse=True)
            most = min(max(1, self._seen[place] // _SHARE), len(listed) - 1)
            if self._seen[place] < _FEWEST:
                continue
            for count in range(most, 0, -1):
                base = listed[count][0]
                if 0 < OUTLIER_RATIO * base < listed[count - 1][0]:
                    yield from ((place, -number, amax / base) for amax, number in listed[:count])
                    break


def identify_outliers(
    peaks: Peaks, digests: Callable[[int], tuple[str, ...]]
) -> tuple[Outlier, ...]:
    """Return the outliers of a pass, identified by digest instead of sample number.

    `digests`: number of a sample -> sha256 (hex) of each of its images or rows.
    """
    return tuple(
        Outlier(*place, digests(number), times) for place, number, times in peaks.outliers()
    )


def describe_outliers(outliers: Iterable[Outlier], names: Mapping[str, str]) -> str:
    """Return one sentence for the report, worst sample first.

    `names`: digest -> name of the image or row.
    """
    samples: dict[tuple[str, ...], _Sample] = {}
    for one in outliers:
        samples.setdefault(one.digests, _Sample()).add(one)
    ranked = sorted(samples.items(), key=lambda item: (-item[1].worst.ratio, item[0]))
    listed = [f"{_name(digests, names)}, {sample.words}" for digests, sample in ranked[:_NAMED]]
    more = f"; and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    stand, it = ("stands", "it") if len(ranked) == 1 else ("stand", "them")
    return (
        f"{len(ranked)} of the calibration samples {stand} far above the others, which costs the"
        f" others int8 steps: {'; '.join(listed)}{more}; check {it}, or leave {it} out"
    )


@dataclass(slots=True)
class _Sample:
    """The tensors in which one sample stands out."""

    tensors: int = 0
    worst: Outlier = field(default=Outlier("", "", (), 0.0))

    def add(self, one: Outlier) -> None:
        self.tensors += 1
        self.worst = max(self.worst, one, key=lambda o: o.ratio)

    @property
    def words(self) -> str:
        others = self.tensors - 1
        more = f" (and far off in {others} other tensor{'s' * (others > 1)})" if others else ""
        return (
            f"whose largest |x| in {self.worst.tensor!r} is {self.worst.ratio:,.0f} times the"
            f" others'{more}"
        )


def _name(digests: tuple[str, ...], names: Mapping[str, str]) -> str:
    known = dict.fromkeys(names[one] for one in digests if one in names)
    return " with ".join(known) or "a sample"


@dataclass(frozen=True, slots=True)
class StabilityRule:
    """Rule that ends the observation; stored in a cache to say how its samples were chosen.

    Attributes:
        within: share of the range by which two halves may differ.

    Raises:
        ConfigError: the share is not between 0 and 1.
    """

    within: float
    method: str

    def __post_init__(self) -> None:
        if not 0 < self.within < 1:
            raise ConfigError(
                "stable ranges differ by a share of the range, over 0 and below 1, got"
                f" {self.within:g}; give a share such as {STABLE_SHARE:g}"
            )

    def __str__(self) -> str:
        """Return the rule as text."""
        return f"until halves of the samples agreed within {_percent(self.within)} by {self.method}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesAgreement:
    """Agreement of the ranges of two halves of the samples.

    Attributes:
        samples: number of samples in both halves.
        within: share of a range by which they may differ.
        differences: tensor -> difference as a share of its range, for tensors that differ by
            `within` or more, largest first.
    """

    samples: int
    within: float
    tensors: int
    differences: Mapping[str, float] = field(default_factory=dict)
    stopped: bool = False

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {
            "samples": self.samples,
            "within": self.within,
            "tensors": self.tensors,
            "apart": dict(self.differences),
            "stopped": self.stopped,
        }

    @property
    def is_enough(self) -> bool:
        """Whether all but a twentieth of the tensors, rounded, agree."""
        return len(self.differences) <= (self.tensors + _FEW // 2) // _FEW

    @property
    def words(self) -> str:
        """The agreement in one sentence, with advice if more samples would help."""
        many = f"{len(self.differences) or 'none'} of {self.tensors} ranges"
        verb = "differs" if len(self.differences) == 1 else "differ"
        sentence = (
            f"{many} {verb} by {_percent(self.within)} or more between the halves of"
            f" {self.samples} samples{self._which}"
        )
        if self.stopped:
            return f"{sentence}; enough twice in a row, so no more were looked at"
        return sentence if self.is_enough else f"{sentence}; calibrate with more images"

    @property
    def _which(self) -> str:
        listed = [f"{name} by {_percent(share)}" for name, share in self.differences.items()]
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        return f": {', '.join(listed[:_NAMED])}{more}" if listed else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
