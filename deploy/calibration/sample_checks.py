"""Samples that stand far above all others: named, since one of them can spoil every range.

::

    largest |x| of each sample, one tensor     9800  1.3  1.2  1.2  1.1 ...
                                               |---| more than 8 times the next: an outlier

A range that holds such a sample leaves three of int8's eight bits, or fewer, to all the others; one
that clips it gets that sample wrong. Over the benchmarks' models and feeds (`docs/accuracy.md`) no
sample is over twice the next, so an ordinary feed hears nothing.

Of every tensor only the few largest samples are kept, with their numbers: memory is flat, and the
outcome is the same for any number of threads.

When samples are enough, and how far their halves agree, as plain values.

`deploy.calibration.stability` makes them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError

FAR = 8.0  # times the next largest sample: three bits
_FEWEST = 5  # samples below which "all others" means little
_SHARE = 20  # of so many samples one may be an outlier, and of fewer one
_KEPT = 9  # largest samples of a tensor: at most 8 outliers and the next

Place = tuple[str, str]  # variant, tensor
Row = tuple[str, str, int, tuple[tuple[float, int], ...]]
"""Variant, tensor, samples seen, (largest |x|, place of the sample in the whole) of the largest."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A sample that stands out in a tensor.

    Attributes:
        variant: form of the model, by its key.
        tensor: the tensor's name.
        digests: sha256 (hex) of each of the sample's images or rows.
        times: its largest |x| over that of the largest of the others.
    """

    variant: str
    tensor: str
    digests: tuple[str, ...]
    times: float


def largest(value: NDArray[np.floating]) -> float:
    """Largest |x| of an array of any shape, in real units; 0 of an empty one."""
    return max(float(value.max()), -float(value.min())) if value.size else 0.0


class Peaks:
    """The largest samples of every tensor, in one pass or a part of it."""

    def __init__(self) -> None:
        self._largest: dict[Place, list[tuple[float, int]]] = {}
        self._seen: dict[Place, int] = {}

    def add(self, place: Place, number: int, amax: float) -> None:
        """Take the largest |x| of a tensor of sample `number`; of Inf is told elsewhere."""
        if math.isfinite(amax):
            self._seen[place] = self._seen.get(place, 0) + 1
            self._keep(place, (amax, -number))

    def merge(self, other: Peaks) -> None:
        """Add another part of the pass."""
        for place, listed in other._largest.items():
            self._seen[place] = self._seen.get(place, 0) + other._seen[place]
            for one in listed:
                self._keep(place, one)

    def rows(self, places: Sequence[int]) -> list[Row]:
        """What was seen of every tensor.

        Args:
            places: of the samples in the whole, the first one's first.
        """
        return [
            (*key, self._seen[key], tuple(sorted((x, places[-n - 1]) for x, n in listed)))
            for key, listed in sorted(self._largest.items())
        ]

    def add_rows(self, rows: Iterable[Row], numbers: Mapping[int, int]) -> None:
        """Add what `rows` gave elsewhere.

        Args:
            rows: of a part of the samples.
            numbers: place -> number of the sample here.
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
        """(place, number of the sample, how many times the largest of the others it is)."""
        for place in sorted(self._largest):
            listed = sorted(self._largest[place], reverse=True)
            most = min(max(1, self._seen[place] // _SHARE), len(listed) - 1)
            if self._seen[place] < _FEWEST:
                continue
            for count in range(most, 0, -1):
                base = listed[count][0]
                if 0 < FAR * base < listed[count - 1][0]:
                    yield from ((place, -number, amax / base) for amax, number in listed[:count])
                    break


def identified(peaks: Peaks, digests: Callable[[int], tuple[str, ...]]) -> tuple[Outlier, ...]:
    """The outliers of a pass, known by what they are instead of by their number.

    Args:
        peaks: of the pass.
        digests: number of a sample -> sha256 (hex) of each of its images or rows.
    """
    return tuple(
        Outlier(*place, digests(number), times) for place, number, times in peaks.outliers()
    )


def standing_out(outliers: Iterable[Outlier], names: Mapping[str, str]) -> str:
    """One sentence for the report, the worst sample first.

    Args:
        outliers: of all tensors; one at least.
        names: digest -> what the image or row is called.
    """
    found: dict[tuple[str, ...], _Sample] = {}
    for one in outliers:
        found.setdefault(one.digests, _Sample()).add(one)
    ranked = sorted(found.items(), key=lambda item: (-item[1].worst.times, item[0]))
    said = [f"{_name(digests, names)}, {sample.words}" for digests, sample in ranked[:_NAMED]]
    more = f"; and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    stand, it = ("stands", "it") if len(ranked) == 1 else ("stand", "them")
    return (
        f"{len(ranked)} of the calibration samples {stand} far above the others, which costs the"
        f" others int8 steps: {'; '.join(said)}{more}; check {it}, or leave {it} out"
    )


_NAMED = 3  # outliers that are told one by one


@dataclass(slots=True)
class _Sample:
    """One sample's tensors in which it stands out."""

    tensors: int = 0
    worst: Outlier = field(default=Outlier("", "", (), 0.0))

    def add(self, one: Outlier) -> None:
        self.tensors += 1
        self.worst = max(self.worst, one, key=lambda o: o.times)

    @property
    def words(self) -> str:
        others = self.tensors - 1
        beside = f" (and far off in {others} other tensor{'s' * (others > 1)})" if others else ""
        return (
            f"whose largest |x| in {self.worst.tensor!r} is {self.worst.times:,.0f} times the"
            f" others'{beside}"
        )


def _name(digests: tuple[str, ...], names: Mapping[str, str]) -> str:
    known = dict.fromkeys(names[one] for one in digests if one in names)
    return " with ".join(known) or "a sample"


WITHIN = 0.2  # what all samples give is then off by about a tenth: less than 1 dB of a step
_FEW = 20  # one tensor of so many may differ


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
