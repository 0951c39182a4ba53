"""One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

Each variant is tapped: the wanted tensors become outputs of it, and ONNX Runtime still optimises
the rest (`deploy.calibration.blocked`). Each worker takes one sample at a time and runs it with one
thread inside. What no order can change is recorded in parts, by one worker at a time, merged at the
end; what is defined by the order waits for its turn, while the others go on inferring. So neither
the number of workers nor any batch size can change a bit.

Where it is asked whether the samples are enough, all workers come to rest at 8, 16, 32 ... of them,
so that what is looked at is the statistics of just so many.

Where something must be known of the first samples (TensorRT's range rule, AMCT's DMQ and AdaRound),
these few are run beforehand, kept, and run again in their place; more than once where what must be
known needs something itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from deploy.calibration.lines import Keep
from deploy.calibration.observation import Observation, Observed, with_needs
from deploy.calibration.one_pass import Enough, Keeper, Progress, one_pass
from deploy.calibration.sample_checks import Peaks
from deploy.feed.parallel import Sample
from deploy.progress import phase


def observe(
    wanted: Iterable[Observation],
    samples: Iterable[Sample],
    *,
    known: Observed | None = None,
    threads: int = 2,
    progress: Progress = lambda: None,
    runs: Counter[str] | None = None,
    peaks: Peaks | None = None,
    keeper: Keeper | None = None,
    keep: Keep | None = None,
    halves: list[Observed] | None = None,
    enough: Enough | None = None,
) -> Observed:
    """Record every wanted observation in one pass.

    Args:
        wanted: the observations; those that their variants need are found too.
        samples: {input: array} of one inference each, in the feed's order; drawn once. Where a
            keeper has counted some, these are not among them, but for those that `planned` says.
        known: what a cache holds already; a variant is made from it where it has what it needs.
        threads: worker threads, each running whole samples.
        progress: called after every sample.
        runs: raised by one for each inference, by the variant's key.
        peaks: is told the largest |x| of every tensor that is observed, sample by sample.
        keeper: keeps the state; the peaks that it knows are told already.
        keep: is given (number of the sample, all that the cleaned model gave for it).
        halves: gets what the first, third, fifth ... sample gave, and what the others gave, of
            observations that any order gives.
        enough: (samples so far, what those since it was asked last gave, what all gave) -> whether
            no more are to be looked at; asked at 8, 16, 32 ... samples, of such observations.

    Returns:
        What was wanted and what that needed.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN, named with its sample; or a variant cannot be made.
        BackendError: ONNX Runtime refused a model or a sample.
    """
    before = known or Observed({})
    counted: Counter[str] = Counter() if runs is None else runs
    plan = planned(wanted, before)
    feed = iter(samples)
    first = list(islice(feed, plan.first))
    if plan.early:
        before = _prepared(plan.early, before, first, max(1, threads), counted)
    counted_before = 0 if keeper is None else keeper.counted
    found = one_pass(
        plan.late,
        before,
        chain(first[counted_before:], feed),
        threads=max(1, threads),
        progress=progress,
        runs=counted,
        peaks=peaks,
        keeper=keeper,
        keep=keep,
        halves=halves,
        enough=enough,
    )
    keys = [o.key for o in plan.listed]
    return Observed({key: found[key] if key in found else before[key] for key in keys})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is recorded when.

    Attributes:
        listed: all that is missing, needs first.
        early: what must be known of the first samples before the pass.
        late: what is recorded in the pass.
        first: how many samples are run beforehand.
    """

    listed: tuple[Observation, ...]
    early: tuple[Observation, ...]
    late: tuple[Observation, ...]
    first: int


def planned(wanted: Iterable[Observation], known: Observed) -> Plan:
    """What `observe` records when; what is known is recorded no more."""
    listed = known.missing(with_needs(wanted, known))
    early = _early(listed, known)
    return Plan(
        listed=listed,
        early=early,
        late=tuple(o for o in listed if o not in early),
        first=max((o.statistic.samples or 0 for o in early), default=0),
    )


def _early(listed: Iterable[Observation], known: Observed) -> tuple[Observation, ...]:
    """What must be recorded of the first samples before the pass, needs first."""
    needs = [need for o in listed for need in o.variant.needs]
    leads = [o.lead for o in listed if o.lead is not None]
    return known.missing(with_needs((*needs, *leads), known))


def _prepared(
    early: Sequence[Observation],
    known: Observed,
    first: Sequence[Sample],
    threads: int,
    runs: Counter[str],
) -> Observed:
    """What is known after these too, in as many passes over the first samples as it takes."""
    left = list(early)
    with phase("what it is made from"):
        while left:
            ready = [o for o in left if all(need.key in known for need in o.variant.needs)]
            able = threads if all(o.statistic.ordered for o in ready) else 1  # none can be merged
            known = known.and_also(one_pass(ready, known, first, threads=able, runs=runs))
            left = [o for o in left if o.key not in known]
    return known
