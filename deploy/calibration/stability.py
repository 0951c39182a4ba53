"""Range stability: test whether two halves of the samples give the same clip ranges.

Ranges are searched in each half. Their difference is that of the farther ends, as a share of the
range; for a symmetric threshold, as a share of the threshold. The range of all samples lies
between, so that more samples would move it by about half as much::

    one half      |--------------------|
    the other     |-----------------------|       3 / 24 of the range apart

The halves alternate, so that both cover a feed sorted by class or time; which of two neighbours
goes where varies (`alternate_halves`), so that both also cover a feed whose classes alternate.
`--until-stable` compares halves during the run: samples come spread over the feed
(`deploy.feed.sampling`), and after 16, 32, 64 ... of them the first half is compared with the
second. They are enough once all but a twentieth of the ranges agreed twice in a row. These points
count samples, and the statistics are those of exactly that many, whatever the number of threads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from calibrators.scales import Scale
from deploy.calibration.observation import FOLDED, Key, Observation, ObservedStatistics
from deploy.calibration.ranges import Ranges
from deploy.calibration.sample_checks import STABLE_SHARE, HalvesAgreement, StabilityRule
from deploy.errors import ConfigError
from deploy.feed.samples import Feed

_QUIET = 2  # points in a row at which the halves must agree

ScalesByKey = Mapping[Key, Scale]


def range_difference(one: Scale | None, other: Scale | None) -> float:
    """Return the difference as a share of the wider range; 1 if only one half has a range."""
    if one is None or other is None:
        return float(one is not other)
    ends = max(abs(one.lo - other.lo), abs(one.hi - other.hi))
    width = max(one.hi - one.lo, other.hi - other.lo)
    amax = max(one.amax, other.amax)
    return max(ends / (width or 1.0), abs(one.amax - other.amax) / (amax or 1.0))


def compare_halves(
    one: ScalesByKey, other: ScalesByKey, *, samples: int, within: float
) -> HalvesAgreement:
    """Return the agreement of the ranges of two halves; arguments as in `HalvesAgreement`."""
    shares = {
        _display_name(key): range_difference(one.get(key), other.get(key))
        for key in {**one, **other}
    }
    ranked = sorted(shares.items(), key=lambda entry: (-entry[1], entry[0]))
    return HalvesAgreement(
        samples=samples,
        within=within,
        tensors=len(shares),
        differences={name: share for name, share in ranked if share >= within},
    )


class StabilityMonitor:
    """Monitors during the pass whether the samples are enough.

    Attributes:
        halves: statistics of both halves, filled by `observe`; None if they are not needed.
        decides: whether `is_enough` is to be called, and may end the pass.
    """

    def __init__(
        self,
        searched: Iterable[Observation],
        ranges: Callable[[ObservedStatistics], Ranges],
        until: StabilityRule | None = None,
    ) -> None:
        """Start before the first sample.

        `until`: the stop rule; None for all samples.
        """
        self._searched = tuple(searched)
        self._ranges = ranges
        self._within = STABLE_SHARE if until is None else until.within
        self.decides = until is not None
        self.halves: list[ObservedStatistics] | None = (
            [] if self._searched and until is None else None
        )
        self.samples = 0
        self.stopped = False
        self._before: ScalesByKey = {}
        self._last: HalvesAgreement | None = None
        self._quiet = 0

    def is_enough(self, samples: int, new: ObservedStatistics, whole: ObservedStatistics) -> bool:
        """Return whether the samples are enough.

        `samples`: number of samples so far, twice that of the last point.
        `new`: statistics of the samples since the last point.
        """
        if self._before:
            self._last = self._between(self._before, self._in(new), samples)
            self._quiet = self._quiet + 1 if self._last.is_enough else 0
            self.stopped = self._quiet >= _QUIET
        self.samples = samples
        self._before = {} if self.stopped else self._in(whole)
        return self.stopped

    def end(self, samples: int) -> HalvesAgreement | None:
        """Return the final agreement; None with too few samples or no suitable observations."""
        if self.halves is None:
            return None if self._last is None else replace(self._last, stopped=self.stopped)
        if not self.halves or samples < 2:
            return None
        one, other = map(self._in, self.halves)
        return self._between(one, other, samples)

    def _in(self, observed: ObservedStatistics) -> ScalesByKey:
        known = [o for o in self._searched if o.key in observed]
        ranges, by_key = self._ranges(observed), dict[Key, Scale]()
        for variant in dict.fromkeys(o.variant for o in known):
            own = {o.tensor: o for o in known if o.variant == variant}
            scales = ranges.find(own.values()).scales
            by_key |= {own[tensor].key: scale for tensor, scale in scales.items()}
        return by_key

    def _between(self, one: ScalesByKey, other: ScalesByKey, samples: int) -> HalvesAgreement:
        return compare_halves(one, other, samples=samples, within=self._within)


def refuse_until_stable(
    feed: Feed, wanted: Iterable[Observation], searched: Iterable[Observation], *, trusted: bool
) -> None:
    """Refuse options that --until-stable cannot work with."""
    if trusted:
        got = "--trust-cache, with which none is observed; leave one of them out"
    elif feed.share is not None:
        got = f"shard {feed.share}; leave one of them out"
    elif feed.batch > 1:
        got = f"a model with a fixed batch of {feed.batch}; export it with a batch that is open"
    elif ordered := dict.fromkeys(o.statistic.key for o in wanted if o.is_order_dependent):
        got = (
            f"{', '.join(ordered)}, which is defined by the order of all images; take a target and"
            " a method without it"
        )
    elif not list(searched):
        got = "none whose ranges a method searches; take a target that follows --method"
    else:
        return
    raise ConfigError(
        "--until-stable compares the ranges of two halves of single samples, spread evenly over the"
        f" feed, got {got}"
    )


def _display_name(key: Key) -> str:
    variant, tensor, _ = key
    return tensor if variant == FOLDED else f"{tensor} ({variant})"
