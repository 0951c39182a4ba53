"""Ranges that have not seen the samples which judge them.

What a range clips is rare in the images that calibrate, and a search that judges it by these very
images finds that clipping costs nothing. So where the images are few, the search tries ranges that
were found without its own samples::

    calibration images  o o x o o o x o ...      x: tell the noise of every trial
                        o o   o o o   o          what the trial's ranges were found in

What is built has the ranges of all of them. Among many images a few make no difference. A histogram
that no order decides is what was counted of all, less what the judges add to it, so that these few
alone are run again; any other statistic is made anew of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import Key, Observation, Observed, each_once
from deploy.calibration.observe import observe
from deploy.calibration.ranges import Ranges
from deploy.errors import Calib8Error
from deploy.feed.manifest import Changed
from deploy.progress import phase

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest, Target
    from deploy.tensors import Array

MANY = 128  # samples from which on a few make no difference

Sample = Mapping[str, "Array"]


def unseen(
    target: Target,
    request: BuildRequest,
    judges: Sequence[Sample],
    ran: Callable[[int], None] = lambda _: None,
) -> BuildRequest:
    """The request with ranges of all samples but these; as it is where that cannot be.

    Args:
        target: whose observations are made anew.
        request: what it would be built from.
        judges: samples of the request's feed.
        ran: called with the number of samples that are run for it.
    """
    count, ranges = len(request.feed), request.ranges
    left = count - len(judges)
    if ranges.trusted is not None or not 0 < left < MANY:
        return request
    subject = replace(request.subject, samples=left)
    seen = ranges.once("without the judges", lambda: [Observed({})])  # shared by the targets
    try:
        wanted = seen[0].missing(each_once({target.name: target.demand(subject)}))
        counted = [o for o in wanted if _counted(ranges.observed, o)]
        ran(len(judges) if counted else 0)
        seen[0] = seen[0].and_also(_less(request, counted, judges))
        ran(left if len(counted) < len(wanted) else 0)
        with phase("observing without the judges", left, "samples") as step:
            seen[0] = seen[0].and_also(
                observe(
                    wanted,
                    _others(request, judges),
                    known=seen[0],
                    threads=request.threads,
                    progress=step,
                )
            )
    except Changed:
        raise
    except Calib8Error:  # a configuration that wants all samples, a tensor of these alone
        return request
    found = Ranges(seen[0], ranges.method, ranges.reaches)
    return replace(request, subject=subject, ranges=found)


def _counted(observed: Observed, observation: Observation) -> bool:
    """Whether what was observed is a histogram that judges can be taken from."""
    known = observation.key in observed and not observation.variant.needs
    return known and observation.statistic == HistogramOf()


def _less(
    request: BuildRequest, counted: Sequence[Observation], judges: Sequence[Sample]
) -> dict[Key, Recorder]:
    """What was counted of all samples, less what these add to it."""
    if not counted:
        return {}
    own = observe(counted, judges, threads=request.threads)
    ranges = request.ranges
    return {o.key: ranges.histogram(o).without(_histogram(own, o)) for o in counted}


def _histogram(observed: Observed, observation: Observation) -> Histogram:
    found = observed.of(observation)
    assert isinstance(found, Histogram)
    return found


def _others(request: BuildRequest, judges: Sequence[Sample]) -> Iterator[Sample]:
    known = {_digest(sample) for sample in judges}
    with request.feed.samples() as samples:
        yield from (sample for sample in samples if _digest(sample) not in known)


def _digest(sample: Sample) -> bytes:
    total = hashlib.sha256()
    for name in sorted(sample):
        total.update(name.encode() + sample[name].tobytes())
    return total.digest()
