"""Types of the repairs: their inputs, their signatures and their results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx

from deploy.feed.parallel import Sample
from deploy.frontends import LoadedModel
from deploy.frontends.base import model_digest
from deploy.targets.base import BuildRequest, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairInput:
    """Input of an after-repair."""

    target: Target  # target whose int8 model is repaired
    reference: onnx.ModelProto  # float model before any repair; its outputs are the reference
    samples: Sequence[Sample]
    # held-out samples that accept or reject each change of a layer; empty where there are too few
    # samples
    held_out: Sequence[Sample]
    threads: int
    progress: Callable[[], None] = lambda: None


# (model, a few samples, threads) -> candidate models; none where there is nothing to repair
ModelRepair = Callable[["onnx.ModelProto", Sequence[Sample], int], Iterable["onnx.ModelProto"]]
# (build request, ...) -> candidate requests, of which at most one is kept
RequestRepair = Callable[["BuildRequest", RepairInput], Iterable["BuildRequest"]]
# (the same) -> (repaired request, text for the report); None where there is nothing to repair
LayerwiseRepair = Callable[["BuildRequest", RepairInput], "tuple[BuildRequest, str] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """Result of one repair on one target."""

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


def with_new_digest(loaded: LoadedModel) -> LoadedModel:
    """Return a loaded model whose constants were changed, with a new digest."""
    return replace(loaded, digest=model_digest(loaded.model))
