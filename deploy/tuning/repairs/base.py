"""Types of the repairs: their inputs, their signatures and their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from deploy.calibration.observation import CalibrationSubject
from deploy.feed.parallel import Sample
from deploy.frontends.base import model_digest
from deploy.targets.base import BuildRequest, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairInput:
    """Input of a repair that follows calibration.

    Attributes:
        target: target whose int8 model is repaired.
        reference: float model before any repair; its outputs are the reference.
        samples: samples that compute the repair.
        held_out: samples that accept or reject each change of a layer; empty where there are too
            few samples.
        threads: samples that run in parallel.
        progress: called after each layer.
    """

    target: Target
    reference: onnx.ModelProto
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    threads: int
    progress: Callable[[], None] = lambda: None


# each returns None where there is nothing to repair
# (build request, input) -> repaired request
RequestRepair = Callable[["BuildRequest", RepairInput], "BuildRequest | None"]
# (build request, input) -> (repaired request, text for the report)
LayerwiseRepair = Callable[["BuildRequest", RepairInput], "tuple[BuildRequest, str] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """Result of one repair on one target.

    Attributes:
        name: key of `REPAIRS`.
        target: name of the target; "" where the repair found nothing on any.
        kept: whether it helped.
        sentence: text for the report.
    """

    name: str
    target: str
    kept: bool
    sentence: str


def with_model(request: BuildRequest, model: onnx.ModelProto) -> BuildRequest:
    """Return the request with a model of other constants; the digest is still the old one.

    Ranges that a target computed from the observations are dropped, since weights enter them.
    """
    loaded = replace(request.subject.loaded, model=model)
    return replace(
        request,
        subject=replace(request.subject, loaded=loaded),
        ranges=request.ranges.with_choices(request.choices),
    )


def with_new_digest(subject: CalibrationSubject) -> CalibrationSubject:
    """Return a subject whose model has changed constants, with a new digest of the model."""
    return replace(subject, loaded=replace(subject.loaded, digest=model_digest(subject.model)))
