"""What a repair gets and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.feed.parallel import Sample
from deploy.frontends.base import model_digest
from deploy.graph.plan import FLOATS

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel
    from deploy.targets.base import BuildRequest, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What an after-repair is made from.

    Attributes:
        target: whose int8 model is to be repaired.
        reference: the float model before any repair, which the int8 one should equal.
        samples: a few, which do not judge the result where there are enough.
        apart: others, which judge what a repair does to a layer; none where there are not enough.
        threads: samples that run beside each other.
        progress: called after each layer, where a repair goes layer by layer.
    """

    target: Target
    reference: onnx.ModelProto
    samples: Sequence[Sample]
    apart: Sequence[Sample]
    threads: int
    progress: Callable[[], None] = lambda: None

    def int8_nodes(self, request: BuildRequest) -> frozenset[str]:
        """Nodes that the target runs in integers, as far as the model alone tells."""
        decisions = self.target.plan(request.model, request.float_nodes).decisions
        return frozenset(d.node for d in decisions if d.precision not in FLOATS)


# (model, a few samples, threads) -> the model in other forms; none where there is nothing to do
Before = Callable[["onnx.ModelProto", Sequence[Sample], int], Iterable["onnx.ModelProto"]]
# (what the target would be built from, ...) -> the same, repaired in ways of which one is kept
After = Callable[["BuildRequest", Making], Iterable["BuildRequest"]]
# (the same) -> it repaired, and what that gave in words; None where there was nothing to do
ByLayers = Callable[["BuildRequest", Making], "tuple[BuildRequest, str] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One repair that was tried for one target.

    Attributes:
        name: the repair.
        target: the target.
        kept: whether the build has it.
        sentence: all that in words.
        before_db, after_db: SQNR of the worst output without and with it; None where there was
            nothing to do, or its outputs do not judge.
    """

    name: str
    target: str
    kept: bool
    sentence: str
    before_db: float | None = None
    after_db: float | None = None


def with_model(request: BuildRequest, model: onnx.ModelProto) -> BuildRequest:
    """The request for a model of other constants, not known by its digest yet (see `settled`).

    What a target makes of the observations is made anew, since weights enter it.
    """
    loaded = replace(request.subject.loaded, model=model)
    return replace(
        request,
        subject=replace(request.subject, loaded=loaded),
        ranges=request.ranges.choosing(request.choices),
    )


def settled(loaded: LoadedModel) -> LoadedModel:
    """A loaded model whose constants were changed, known by its own digest."""
    return replace(loaded, digest=model_digest(loaded.model))
