"""Types of the repairs: their input and their signature, and a request with other constants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from deploy.calibration.observation import CalibrationSubject
from deploy.feed.parallel import Sample
from deploy.frontends.base import model_digest
from deploy.targets.base import BuildRequest, Target
from deploy.tasks.rows import Outputs

# a sample and the float model's outputs on it
EvaluationSample = tuple[Sample, Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairInput:
    """Input of a repair that follows calibration.

    Attributes:
        target: target whose int8 model is repaired.
        reference: float model before any repair; its outputs are the reference.
        samples: samples that compute the repair.
        held_out: samples that accept or reject each change of a layer; empty where there are too
            few samples.
        evaluation: samples that accept or reject the change of all layers together.
        threads: samples that run in parallel.
        progress: called after each layer.
    """

    target: Target
    reference: onnx.ModelProto
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    evaluation: Sequence[EvaluationSample]
    threads: int
    progress: Callable[[], None] = lambda: None


# (build request, input) -> (the request to build, text for the report); the request is the given
# one where the repair did not help. None where there is nothing to repair.
RepairFunction = Callable[["BuildRequest", RepairInput], "tuple[BuildRequest, str] | None"]


def with_model(request: BuildRequest, model: onnx.ModelProto) -> BuildRequest:
    """Return the request with a model of other constants; the digest is still the old one.

    Ranges that a target computed from the observations are dropped, since weights enter them.
    """
    loaded = replace(request.subject.loaded, model=model)
    return replace(
        request,
        subject=replace(request.subject, loaded=loaded),
        ranges=request.ranges.with_choices(request.choices),
        is_repaired=True,
    )


def with_new_digest(subject: CalibrationSubject) -> CalibrationSubject:
    """Return a subject whose model has changed constants, with a new digest of the model."""
    return replace(subject, loaded=replace(subject.loaded, digest=model_digest(subject.model)))
