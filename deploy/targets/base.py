"""What every target offers: which tensors it needs, how an engine is built, a session to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scales
    from deploy.graph.plan import Decision
    from deploy.tensors import Samples, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """All that a backend may build from.

    Attributes:
        name: stem of the files to write.
        folder: where to write them.
        model: cleaned float model.
        source: the file the model came from; None for a model given in memory.
        digest: sha256 of the model's graph and weights.
        scales: tensor -> clip range.
        troubles: tensor -> why it has no scale.
        feed: the calibration samples, for targets whose own algorithms want them.
        manifest: what the feed is made of, preprocessing included.
        float_nodes: nodes that the user keeps in float.
        cache: the TensorRT-format calibration cache that was written.
    """

    name: str
    folder: Path
    model: onnx.ModelProto
    source: Path | None
    digest: str
    scales: Scales
    troubles: Mapping[str, str]
    feed: Samples
    manifest: Mapping[str, Any]
    float_nodes: tuple[str, ...] = ()
    cache: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a backend made.

    Attributes:
        target: the backend's name.
        engine: the file that runs on the target; None where the SDK or device is missing.
        runnable: a model of the same numerics that ONNX Runtime runs, for accuracy and, where it
            is the engine itself, for latency; None where there is none.
        files: role -> path of every file written, the engine included.
        decisions: every node, int8 or float with its reason.
        notes: sentences for the user: what was not done, and the command that does it.
    """

    target: str
    engine: Path | None
    runnable: Path | None
    files: Mapping[str, Path]
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


class Target(Protocol):
    """One target: a dataclass whose options are fields declared by `deploy.targets.options`.

    Attributes:
        engines: suffixes of the engine files that `open` loads.
        own_method: in words, what finds this target's ranges whatever method is asked for; empty
            where the method does.
    """

    engines: ClassVar[tuple[str, ...]]
    own_method: ClassVar[str]

    @property
    def name(self) -> str:
        """Name in the `TARGETS` table and on the command line."""
        ...

    def wanted(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Tensors that need a scale for this target."""
        ...

    def decisions(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...] = ()
    ) -> tuple[Decision, ...]:
        """Every node, int8 or float with its reason, as far as the model alone tells."""
        ...

    def build(self, request: BuildRequest) -> Built:
        """Write every file that can be made here, and the engine where the SDK allows it.

        Raises:
            BackendError: the SDK is there and refused.
            ExportError: a format cannot express the model.
        """
        ...

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load a built engine.

        Raises:
            SdkMissingError: the runtime or device is not on this machine.
            BackendError: the runtime refused the engine.
        """
        ...
