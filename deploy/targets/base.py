"""What every target offers: what it wants observed, its files and engine, a session.

Shell scripts beside the files that they are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from deploy.files import atomic
from deploy.method import NO_CHOICES, Choices

if TYPE_CHECKING:
    import onnx

    from calibrators.grids import Grid
    from calibrators.scales import Scale
    from deploy.calibration.observation import Observation, Subject
    from deploy.calibration.ranges import Found, Ranges
    from deploy.calibration.reference import Judges
    from deploy.frontends.base import Trained
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.targets.stored import StoredWeight
    from deploy.tensors import Samples, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """All that a target may build from.

    Attributes:
        subject: the model, its forms, the method, what stays float.
        folder: where to write.
        earlier: where files of an earlier build may be; None where `folder` is the place.
        ranges: what was observed, and the clip ranges that the method finds in it.
        feed: the calibration samples, for an engine that calibrates by itself.
        threads: for what is run while building; the files do not depend on it.
        manifest: what the feed is made of, preprocessing included.
        choices: what was settled for the target beyond what the user asked for.
        judges: the calibration samples that judge what is tried, with the float model's outputs;
            None where nothing is tried.
        against: the cleaned float model without repairs, for float engines that the speed of what
            is built is held against; None where no speed is measured.
    """

    subject: Subject
    folder: Path
    ranges: Ranges
    feed: Samples
    manifest: Mapping[str, Any]
    earlier: Path | None = None
    threads: int = 1
    choices: Choices = NO_CHOICES
    judges: Judges | None = None
    against: onnx.ModelProto | None = None

    def choosing(self, choices: Choices) -> BuildRequest:
        """The same, with other choices."""
        return replace(self, choices=choices)

    def adding(self, choices: Choices) -> BuildRequest:
        """The same, with other choices, and in float what is float already."""
        kept = {**self.choices.float_nodes, **choices.float_nodes}
        return self.choosing(replace(choices, float_nodes=kept))

    @property
    def chosen(self) -> Ranges:
        """The clip ranges, each by the search that was chosen for it."""
        return self.ranges.choosing(self.choices)

    def ranges_of(self, target: Target, *, symmetric: Grid | None = None) -> Found:
        """What a target demands, as chosen; it is asked once, however many builds are tried.

        Args:
            target: whose tensors.
            symmetric: grid that the thresholds are for; None for int8.
        """
        subject = self.subject
        key = "demand", target.name, id(subject.model), subject.float_nodes, subject.method.label
        made = self.ranges.once(key, lambda: (subject, target.demand(subject)))
        return self.chosen.of(
            made[1], symmetric=symmetric
        )  # with its subject, whose model keeps its id

    @property
    def name(self) -> str:
        """Stem of the files to write."""
        return self.subject.loaded.name

    @property
    def model(self) -> onnx.ModelProto:
        """The cleaned float model."""
        return self.subject.model

    @property
    def trained(self) -> Trained | None:
        """What the model's own pairs say, where it is quantized already; None of a float one."""
        return self.subject.loaded.trained

    @property
    def source(self) -> Path | None:
        """The file the model came from; None for a model given in memory."""
        return self.subject.source

    @property
    def digest(self) -> str:
        """sha256 of the model's graph and weights."""
        return self.subject.loaded.digest

    def whole(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """What was made of the model, with the nodes put back that ONNX Runtime does not know.

        Raises:
            ExportError: they mean something else in the opset of `model`.
        """
        return self.subject.loaded.whole(model)

    @property
    def kept(self) -> tuple[Decision, ...]:
        """These nodes, and those behind them."""
        behind = self.subject.loaded.behind
        return () if behind is None else behind.decisions

    def built_before(self, name: str) -> Path:
        """Where an earlier build would have put this file."""
        return (self.earlier or self.folder) / name

    @property
    def float_nodes(self) -> Mapping[str, str]:
        """Nodes to keep in float -> why: the user asked for it, or it was chosen."""
        from deploy.graph.plan import reasons

        return {**self.choices.float_nodes, **reasons(self.subject.float_nodes)}


@dataclass(frozen=True, slots=True)
class CacheText:
    """A calibration cache in TensorRT's format, and what its reader should know."""

    text: bytes
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a target made.

    Attributes:
        target: the target's name.
        engine: the file that runs on the target; None where the SDK or device is missing.
        runnable: a model of the same numerics that ONNX Runtime runs, for accuracy and, where it
            is the engine itself, for latency; None where there is none.
        baselines: label -> float engine of the same runtime and device, that the engine's speed is
            held against; the one that counts last.
        files: role -> path of every file written, the engines included.
        decisions: every node, its precision or why it is float.
        options: flags of this target that were given -> their values in words.
        method: what chose the ranges in these files.
        ranges: tensor -> its range in these files.
        weights: the weights that left float, as these files hold them.
        notes: sentences for the user: what was not done, and the command that does it.
        error: why the target failed, as a sentence; "" where it did not.
    """

    target: str
    engine: Path | None = None
    runnable: Path | None = None
    baselines: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    method: str = ""
    ranges: Mapping[str, Scale] = field(default_factory=dict)
    weights: tuple[StoredWeight, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def word(self) -> str:
        """What its quantized nodes run in: "int8", whatever their zero point, or "fp8"."""
        from deploy.graph.plan import word_of

        return word_of(self.decisions)


class Target(Protocol):
    """One target: a dataclass whose options are fields declared by `deploy.targets.options`.

    Attributes:
        engines: suffixes of the engine files that `open` loads.
        writes: what the names of the files that `build` writes have after the model's name.
        runs_here: whether ONNX Runtime on this machine's CPU is what runs the engine, so that its
            time can be measured and decide.
        own_method: in words, what finds this target's ranges whatever method is asked for; empty
            where the method does.
        float_way: in words, how to build the float model where a build for this target must leave
            a layer in int8; empty where it need not.
    """

    engines: ClassVar[tuple[str, ...]]
    writes: ClassVar[tuple[str, ...]]
    runs_here: ClassVar[bool]
    own_method: ClassVar[str]
    float_way: ClassVar[str]

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Names of `SEARCHES` that may stand in for the own method; none where there is none."""
        ...

    @property
    def name(self) -> str:
        """Name in the `TARGETS` table and on the command line."""
        ...

    def wanted(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Tensors that need a scale for this target, as far as the model alone tells."""
        ...

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Every node, int8 or float with its reason, and where Q/DQ pairs stand for that.

        Args:
            model: cleaned.
            float_nodes: names of nodes to keep in float, with why where it is not the user's word.
        """
        ...

    def demand(self, subject: Subject) -> tuple[Observation, ...]:
        """What must be observed before `build`; options that cannot be met are told here.

        Raises:
            ConfigError: an option or configuration that contradicts the model or the method.
        """
        ...

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """The int8 model that ONNX Runtime runs with this target's numerics; nothing is written.

        Raises:
            ExportError, CalibrationError: as `build`.
        """
        ...

    def build(self, request: BuildRequest) -> Built:
        """Write every file that can be made here, and the engine where the SDK allows it.

        Raises:
            BackendError: the SDK is there and refused.
            ExportError: a format cannot express the model.
        """
        ...

    def at_hand(self) -> str:
        """What builds and runs engines on this machine, in words.

        Raises:
            SdkMissingError: it is missing; says what, and how to get it.
        """
        ...

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load a built engine.

        Raises:
            SdkMissingError: the runtime or device is not on this machine.
            BackendError: the runtime refused the engine.
        """
        ...


@runtime_checkable
class WritesCache(Protocol):
    """A target with a form of its own for the calibration cache."""

    def cache_version(self) -> str | None:
        """The TensorRT of this machine that is to read it, "X.Y.Z"; None where there is none."""
        ...

    def cache_text(self, subject: Subject, ranges: Ranges) -> CacheText:
        """The cache in TensorRT's format."""
        ...


def write_script(path: Path, body: str) -> Path:
    """Write a script that runs from any folder, in its own; names in it keep their own bytes.

    Args:
        path: of the script.
        body: lines of a shell, quoted.

    Raises:
        ExportError: the folder is not writable.
    """
    text = f'#!/bin/sh\ncd "$(dirname "$0")" || exit\n{body}\n'
    return atomic.write_bytes(path, text.encode("utf-8", "surrogateescape"))
