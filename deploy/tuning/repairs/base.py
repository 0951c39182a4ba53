"""The input of repairs, and a request with other constants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deploy.feed.parallel import Sample
from deploy.frontends.base import LoadedModel
from deploy.targets.base import BuildRequest, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairInput:
    """Input of a repair.

    Attributes:
        target: target whose int8 model is repaired.
        samples: samples that compute the repair.
        held_out: samples that accept or reject each change of a layer; empty where there are too
            few samples.
        progress: called after each layer.
    """

    target: Target
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    progress: Callable[[], None]


def with_repaired_model(request: BuildRequest, loaded: LoadedModel) -> BuildRequest:
    """Return the request with a model of other constants.

    Ranges that a target computed from the observations are dropped, since weights enter them.
    """
    return replace(
        request,
        subject=replace(request.subject, loaded=loaded),
        ranges=request.ranges.with_choices(request.choices),
        is_repaired=True,
    )
