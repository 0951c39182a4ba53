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
second. They are enough once all but a twentieth of the ranges agreed twice in a row. These checks
count samples, and the statistics are those of exactly that many, whatever the number of threads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from calibrators.scales import Scale
from deploy.calibration.observation import (
    FOLDED,
    Key,
    Observation,
    ObservedStatistics,
    group_by_variant,
    order_dependent_keys,
)
from deploy.calibration.ranges import Ranges
from deploy.calibration.sample_checks import STABLE_SHARE, HalvesAgreement, StabilityRule
from deploy.errors import ConfigError
from deploy.feed.samples import Feed

_AGREEMENTS_TO_STOP = 2  # checks in a row at which the halves must agree

ScaleByKey = Mapping[Key, Scale]


def range_difference(first_scale: Scale | None, second_scale: Scale | None) -> float:
    """Return the difference as a share of the wider range; 1 if a half has no range."""
    if first_scale is None or second_scale is None:
        return 1.0
    end_shift = max(abs(first_scale.lo - second_scale.lo), abs(first_scale.hi - second_scale.hi))
    width = max(first_scale.hi - first_scale.lo, second_scale.hi - second_scale.lo)
    threshold_shift = abs(first_scale.amax - second_scale.amax)
    threshold = max(first_scale.amax, second_scale.amax)
    return max(end_shift / (width or 1.0), threshold_shift / (threshold or 1.0))


def compare_halves(
    first_half: ScaleByKey, second_half: ScaleByKey, *, sample_count: int, within: float
) -> HalvesAgreement:
    """Return the agreement of the ranges of two halves of the samples.

    Args:
        first_half: (model variant, tensor, statistic) -> range in the first half.
        second_half: the same of the second half.
        sample_count: number of samples in both halves.
        within: share of a range by which the two may differ.
    """
    # all keys are of the one statistic that the method searches ranges in, so names differ
    difference_by_name = {}
    for key in {**first_half, **second_half}:
        variant, tensor, _ = key
        name = tensor if variant == FOLDED else f"{tensor} ({variant})"
        difference_by_name[name] = range_difference(first_half.get(key), second_half.get(key))
    differences = {}  # of the tensors whose halves disagree, largest first
    for name in sorted(difference_by_name, key=lambda name: (-difference_by_name[name], name)):
        if difference_by_name[name] >= within:
            differences[name] = difference_by_name[name]
    return HalvesAgreement(
        samples=sample_count,
        within=within,
        tensors=len(difference_by_name),
        differences=differences,
    )


class StabilityMonitor:
    """Monitors during the pass whether the samples are enough.

    Attributes:
        halves: statistics of both halves, filled by `observe`; None if they are not needed.
        can_end_pass: whether `is_enough` is to be called, and may end the pass.
        sample_count: number of samples at the last check.
        stopped: whether the samples are enough.
    """

    def __init__(
        self,
        observations: Iterable[Observation],
        make_ranges: Callable[[ObservedStatistics], Ranges],
        stop_rule: StabilityRule | None = None,
    ) -> None:
        """Prepare to compare the ranges of two halves of the samples.

        With a stop rule, the pass calls `is_enough` after 8, 16, 32 ... samples, and ends early if
        it returns True. Without one, the pass observes all samples and fills `halves`, and
        `compare_finally` compares the ranges of the two.

        Args:
            observations: those whose ranges are compared.
            make_ranges: statistics -> object that searches their ranges.
            stop_rule: rule that ends the pass early; None to observe all samples.
        """
        self._observations = tuple(observations)
        self._make_ranges = make_ranges
        self._max_difference = STABLE_SHARE if stop_rule is None else stop_rule.within
        self.can_end_pass = stop_rule is not None
        self.halves: list[ObservedStatistics] | None = None
        if self._observations and not self.can_end_pass:
            self.halves = []  # the pass fills it, `compare_finally` compares the two
        self.sample_count = 0
        self.stopped = False
        self._scales_at_last_check: ScaleByKey = {}  # of all samples until then
        self._last_agreement: HalvesAgreement | None = None
        self._agreements_in_row = 0

    def is_enough(
        self,
        sample_count: int,
        second_half_statistics: ObservedStatistics,
        total_statistics: ObservedStatistics,
    ) -> bool:
        """Return whether the samples are enough: their halves agreed at two checks in a row.

        The first half are the samples up to the last check, the second half those since then.

        Args:
            sample_count: number of samples so far, twice that of the last check.
            second_half_statistics: statistics of the samples since the last check.
            total_statistics: statistics of all samples so far.
        """
        if self._scales_at_last_check:  # there was a check before
            second_half_scales = self._search_scales(second_half_statistics)
            self._last_agreement = compare_halves(
                self._scales_at_last_check,
                second_half_scales,
                sample_count=sample_count,
                within=self._max_difference,
            )
            self._agreements_in_row += 1
            if not self._last_agreement.is_enough:
                self._agreements_in_row = 0
            self.stopped = self._agreements_in_row >= _AGREEMENTS_TO_STOP
        self.sample_count = sample_count
        # all samples so far are the first half at the next check
        self._scales_at_last_check = {} if self.stopped else self._search_scales(total_statistics)
        return self.stopped

    def compare_finally(self, sample_count: int) -> HalvesAgreement | None:
        """Return the final agreement; None with too few samples or no suitable observations."""
        if self.halves is None:
            if self._last_agreement is None:
                return None
            return replace(self._last_agreement, stopped=self.stopped)
        if not self.halves or sample_count < 2:
            return None
        first_half, second_half = map(self._search_scales, self.halves)
        return compare_halves(
            first_half, second_half, sample_count=sample_count, within=self._max_difference
        )

    def _search_scales(self, observed: ObservedStatistics) -> ScaleByKey:
        """Return the ranges of the observations that are compared, without those that have none."""
        ranges = self._make_ranges(observed)
        usable = [observation for observation in self._observations if observation.key in observed]
        scale_by_key = {}
        for observations in group_by_variant(usable).values():
            scales = ranges.find(observations).scales
            for observation in observations:
                if observation.tensor in scales:
                    scale_by_key[observation.key] = scales[observation.tensor]
        return scale_by_key


def refuse_until_stable(
    feed: Feed,
    observations: Iterable[Observation],
    compared_observations: Sequence[Observation],
    *,
    is_trusted: bool,
) -> None:
    """Refuse --until-stable with samples, observations or options that it cannot work with.

    Args:
        feed: the samples.
        observations: everything that is observed.
        compared_observations: those whose ranges can be compared in two halves of the samples.
        is_trusted: whether the ranges of a cache are used unchecked (--trust-cache).

    Raises:
        ConfigError: --until-stable is not possible here (names the conflict).
    """
    ordered_statistics = order_dependent_keys(observations)
    # The message below ends in the conflict: "... compares the ranges ..., got {conflict}".
    # "Leave it out" is said of --until-stable.
    if is_trusted:
        conflict = "--trust-cache, with which none is observed; leave one of them out"
    elif feed.share is not None:  # this machine observes one shard only
        conflict = f"shard {feed.share}; leave one of them out"
    elif feed.batch > 1:
        conflict = (
            f"a model with a fixed batch of {feed.batch}; export it with a batch that is open"
        )
    elif feed.states:  # inputs that are outputs of the sample before, as in a recurrent model
        conflict = f"steps that need {', '.join(feed.states)} of the steps before; leave it out"
    elif ordered_statistics:
        conflict = (
            f"{', '.join(ordered_statistics)}, which is defined by the order of all images; take a"
            " target and a method without it"
        )
    elif not compared_observations:
        conflict = "none whose ranges a method searches; take a target that follows --method"
    else:
        return
    raise ConfigError(
        "--until-stable compares the ranges of two halves of single samples, spread evenly over the"
        f" feed, got {conflict}"
    )
