"""Whether the samples are enough: whether two halves of them give the same ranges.

Each half is searched by itself, and how far the farther end of a range lies from the other half's
is told as a share of the range (of the symmetric threshold, of that threshold). What both halves
give together lies between, so that more samples would move it by about half as much::

    one half      |--------------------|
    the other     |-----------------------|       3 / 24 of the range apart

The halves are one of every two samples and the other, so that a feed in the order of its classes
or of time is seen whole by both; which of the two changes (`in_turns`), so that one whose classes
take turns is as well. `--until-stable` looks at halves as it goes: samples come spread over all
(`deploy.feed.sampling`), and at 16, 32, 64 ... of them the first half is held against the second.
Where all ranges but a twentieth agreed twice in a row, they are enough. The points are counted in
samples, and what is searched are the statistics of just so many, whatever the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from calibrators.scales import Scale
from deploy.calibration.observation import FOLDED, Key, Observation, Observed
from deploy.calibration.ranges import Ranges
from deploy.calibration.sample_checks import WITHIN, Agreement, Until
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.feed.samples import Feed

_QUIET = 2  # points in a row

Found = Mapping[Key, Scale]


def found_in(ranges: Ranges, observations: Iterable[Observation]) -> Found:
    """The ranges of what has one."""
    listed = list(observations)
    found: dict[Key, Scale] = {}
    for variant in dict.fromkeys(o.variant for o in listed):
        own = {o.tensor: o for o in listed if o.variant == variant}
        scales = ranges.of(own.values()).scales
        found |= {own[tensor].key: scale for tensor, scale in scales.items()}
    return found


def apart(one: Scale | None, other: Scale | None) -> float:
    """By which share of the wider range the two differ; 1 where only one half has a range."""
    if one is None or other is None:
        return float(one is not other)
    ends = max(abs(one.lo - other.lo), abs(one.hi - other.hi))
    width = max(one.hi - one.lo, other.hi - other.lo)
    amax = max(one.amax, other.amax)
    return max(ends / (width or 1.0), abs(one.amax - other.amax) / (amax or 1.0))


def agreement(one: Found, other: Found, *, samples: int, within: float) -> Agreement:
    """How far the ranges of two halves agree; the arguments are as `Agreement`."""
    far = {_called(key): apart(one.get(key), other.get(key)) for key in {**one, **other}}
    ranked = sorted(far.items(), key=lambda entry: (-entry[1], entry[0]))
    return Agreement(
        samples=samples,
        within=within,
        tensors=len(far),
        apart={name: share for name, share in ranked if share >= within},
    )


class Watch:
    """What is looked at while observing, to tell whether the samples are enough.

    Attributes:
        halves: what both halves gave, as `observe` fills it; None where they tell nothing.
        decides: whether points are looked at, and may end the observing.
        samples: how many there were at the last point.
        stopped: whether no more were looked at.
    """

    def __init__(
        self,
        searched: Iterable[Observation],
        ranges: Callable[[Observed], Ranges],
        until: Until | None = None,
    ) -> None:
        """Begin with no sample.

        Args:
            searched: the observations whose ranges are looked at, of any order alone.
            ranges: makes them of what was observed.
            until: when to stop; None looks at all samples.
        """
        self._searched = tuple(searched)
        self._ranges = ranges
        self._within = WITHIN if until is None else until.within
        self.decides = until is not None
        self.halves: list[Observed] | None = [] if self._searched and until is None else None
        self.samples = 0
        self.stopped = False
        self._before: Found = {}
        self._last: Agreement | None = None
        self._quiet = 0

    def enough(self, samples: int, new: Observed, whole: Observed) -> bool:
        """Whether no more samples need be looked at.

        Args:
            samples: how many there were so far; half of them before the last point.
            new: what those since then gave.
            whole: what all gave.
        """
        if self._before:
            self._last = self._between(self._before, self._in(new), samples)
            self._quiet = self._quiet + 1 if self._last.enough else 0
            self.stopped = self._quiet >= _QUIET
        self.samples = samples
        self._before = {} if self.stopped else self._in(whole)
        return self.stopped

    def end(self, samples: int) -> Agreement | None:
        """What is told of so many samples; None where too few or no observations tell anything."""
        if self.halves is None:
            return None if self._last is None else replace(self._last, stopped=self.stopped)
        if not self.halves or samples < 2:
            return None
        one, other = map(self._in, self.halves)
        return self._between(one, other, samples)

    def _in(self, observed: Observed) -> Found:
        known = [o for o in self._searched if o.key in observed]
        return found_in(self._ranges(observed), known)

    def _between(self, one: Found, other: Found, samples: int) -> Agreement:
        return agreement(one, other, samples=samples, within=self._within)


def refuse(
    feed: Feed,
    wanted: Iterable[Observation],
    searched: Iterable[Observation],
    *,
    trusted: bool,
) -> None:
    """Refuse what cannot be observed until it is stable.

    Args:
        feed: the samples.
        wanted: all that is to be observed.
        searched: those whose ranges are looked at.
        trusted: whether the ranges are those of a cache that is taken as it is.

    Raises:
        ConfigError: such a cache, parts of a feed, samples of several images, statistics that the
            order shows in, or nothing that is searched.
    """
    if trusted:
        got = "--trust-cache, with which none is observed; leave one of them away"
    elif feed.share is not None:
        got = f"shard {feed.share}; leave one of them away"
    elif feed.batch > 1:
        got = f"a model with a fixed batch of {feed.batch}; export it with a batch that is open"
    elif ordered := dict.fromkeys(o.statistic.key for o in wanted if o.by_order):
        got = (
            f"{', '.join(ordered)}, which is defined by the order of all images; take a target and"
            " a method without it"
        )
    elif not list(searched):
        got = "none whose ranges a method searches; take a target that follows --method"
    else:
        return
    raise ConfigError(
        "--until-stable stops where single samples, spread evenly over all of them, move no range"
        f" any more, got {got}"
    )


def _called(key: Key) -> str:
    variant, tensor, _ = key
    return tensor if variant == FOLDED else f"{tensor} ({variant})"
