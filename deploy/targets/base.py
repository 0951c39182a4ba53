"""The interface of a target: its observations, plan, build and engine session."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from deploy.files import atomic
from deploy.method import NO_CHOICES, Choices

if TYPE_CHECKING:
    import onnx

    from calibrators.grids import Grid
    from calibrators.scales import Scale
    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.calibration.ranges import Ranges, RangeSet
    from deploy.calibration.reference_outputs import EvaluationSet
    from deploy.feed.samples import Feed
    from deploy.frontends.base import QdqCalibration
    from deploy.graph.plan import Decision, FloatNodes, ModelAnalysis, Plan
    from deploy.tensors import Session

# roles of the files that the report's next steps name: scripts for the device, and a program
TRTEXEC_SCRIPT = "script of trtexec"
TRTEXEC_SCRIPT_WITH = "script of trtexec, with {} as argument"  # the name of a command
NEWER_TRTEXEC_SCRIPT = "script of trtexec, from TensorRT "  # the version that reads the model
RTX_SCRIPT = "script of TensorRT for RTX"
ATC_SCRIPT = "atc command"
CHIP_ATC_SCRIPT = "atc command, with the chip as argument"
DEVICE_SCRIPTS = (TRTEXEC_SCRIPT, RTX_SCRIPT, ATC_SCRIPT)  # how the role of a script begins
PROGRAM = "program that runs it"  # of ONNX Runtime's target


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """The input of `Target.build`.

    Attributes:
        subject: the model, its forms, the calibration method, the nodes to keep in float.
        folder: output folder.
        earlier_folder: folder of an earlier build's files; None means `folder`.
        ranges: the recorded statistics, and the clip ranges that the method computes from them.
        feed: the calibration samples, for an engine that calibrates by itself.
        threads: threads of the inferences made while building; the files do not depend on it.
        manifest: description of the calibration data, preprocessing included.
        choices: decisions for this target beyond what the user asked for.
        evaluation_set: evaluation samples of the search, with the float model's outputs; None
            without a search.
        cpu: one of `deploy.tuning.CPU_NAMES`, the CPU that will run ONNX Runtime's engine.
        companions: all targets of the build, which may share work.
        unrepaired_model: cleaned float model without repairs, for the float engines of the speed
            comparison; None where speed is not measured.
        is_repaired: whether a repair changed weights or biases of the model.
    """

    subject: CalibrationSubject
    folder: Path
    ranges: Ranges
    feed: Feed
    manifest: Mapping[str, Any]
    earlier_folder: Path | None = None
    threads: int = 1
    choices: Choices = NO_CHOICES
    evaluation_set: EvaluationSet | None = None
    cpu: str = "this"
    companions: tuple[Target, ...] = ()
    unrepaired_model: onnx.ModelProto | None = None
    is_repaired: bool = False

    def with_choices(self, choices: Choices) -> BuildRequest:
        """Return the request with other choices."""
        return replace(self, choices=choices)

    def with_added_choices(self, choices: Choices) -> BuildRequest:
        """Return the request with other choices; nodes already in float stay in float."""
        float_nodes = {**self.choices.float_nodes, **choices.float_nodes}
        return self.with_choices(replace(choices, float_nodes=float_nodes))

    @property
    def chosen_ranges(self) -> Ranges:
        """The clip ranges, each by the method chosen for its tensor."""
        return self.ranges.with_choices(self.choices)

    def ranges_of(self, target: Target, *, symmetric_grid: Grid | None = None) -> RangeSet:
        """Return the ranges of the tensors that a target demands, by the chosen methods.

        The demand is computed once, however many builds are tried.

        `symmetric_grid`: grid of the symmetric thresholds; None for int8.
        """
        subject = self.subject
        key = "demand", target.name, subject.float_nodes, subject.method.label
        demand = self.compute_once(key, lambda: target.demand(subject))
        return self.chosen_ranges.find(demand, symmetric_grid=symmetric_grid)

    def compute_once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, called once per key for all builds of this model by a search."""
        return self.ranges.compute_once(key, compute, of=self.model)

    @property
    def model_analysis(self) -> ModelAnalysis:
        """The analysis of the model's graph, made once for all builds of this model."""
        from deploy.graph.plan import ModelAnalysis

        analysis: ModelAnalysis = self.compute_once("analysis", lambda: ModelAnalysis(self.model))
        return analysis

    @property
    def name(self) -> str:
        """Stem of the written files."""
        return self.subject.loaded.name

    @property
    def model(self) -> onnx.ModelProto:
        """The cleaned float model."""
        return self.subject.model

    @property
    def batch_inputs(self) -> frozenset[str]:
        """Inputs whose first dimension is the batch."""
        from deploy.feed.batch_axis import batch_inputs

        return batch_inputs(self.subject.loaded.inputs)

    @property
    def trained(self) -> QdqCalibration | None:
        """The Q/DQ pairs of a model that is quantized already; None of a float model."""
        return self.subject.loaded.qdq

    def with_plugin_nodes(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return `model` with the nodes put back that ONNX Runtime does not know.

        Raises:
            ExportError: these nodes mean something else in the opset of `model`.
        """
        return self.subject.loaded.with_cut_off(model)

    @property
    def plugin_decisions(self) -> tuple[Decision, ...]:
        """Decisions for the nodes that ONNX Runtime does not know, and those downstream of them."""
        cut_off = self.subject.loaded.cut_off
        return () if cut_off is None else cut_off.decisions

    def file(self, ending: str) -> Path:
        """Return the path of an output file, whose name is the model's name and an ending."""
        return self.folder / f"{self.name}{ending}"

    def write(self, ending: str, content: onnx.ModelProto | bytes | str) -> Path:
        """Write the output file `file(ending)`, a model deterministically; return its path.

        In a text, file names that are no valid UTF-8 keep their bytes.

        Raises:
            ExportError: the folder is not writable.
        """
        if isinstance(content, str):
            data = content.encode("utf-8", "surrogateescape")
        elif isinstance(content, bytes):
            data = content
        else:
            data = content.SerializeToString(deterministic=True)
        return atomic.write_bytes(self.file(ending), data)

    def write_script(self, ending: str, commands: str) -> Path:
        """Write a shell script that changes to its own folder first; return its path.

        `commands`: shell commands, already quoted.

        Raises:
            ExportError: the folder is not writable.
        """
        return self.write(ending, f'#!/bin/sh\ncd "$(dirname "$0")" || exit\n{commands}\n')

    def earlier_file(self, name: str) -> Path:
        """Return the path that an earlier build would have written this file to."""
        return (self.earlier_folder or self.folder) / name

    @property
    def float_nodes(self) -> Mapping[str, str]:
        """Node to keep in float -> the reason: the user's request, or the search's."""
        from deploy.graph.plan import reasons_by_node

        return {**self.choices.float_nodes, **reasons_by_node(self.subject.float_nodes)}


@dataclass(frozen=True, slots=True)
class CacheText:
    """A calibration cache in TensorRT's format.

    Attributes:
        text: the bytes of the file.
        notes: sentences for the user.
    """

    text: bytes
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The result of `Target.build`.

    Attributes:
        target: the target's name.
        engine: the file that runs on the target; None where the SDK or device is missing.
        runnable: a model of the same numerics that ONNX Runtime runs, for accuracy and, if it is
            the engine itself, for latency; None if there is none.
        shipped: files from which the device builds its engine.
        baselines: label -> float engine of the same runtime and device for the speed comparison;
            the last one is the reference.
        files: role -> path of every file written, the engines included.
        decisions: precision of every node, and why it is float.
        options: flag of this target that was given -> its value as text.
        method: text: the method that chose the ranges in these files.
        ranges: tensor -> its range in these files.
        notes: sentences for the user: steps that were left out, and the command that does each.
        alerts: sentences on what may be wrong in the options.
        error: one sentence on why the target or only its engine failed; "" if it did not.
    """

    target: str
    engine: Path | None = None
    runnable: Path | None = None
    shipped: tuple[Path, ...] = ()
    baselines: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    method: str = ""
    ranges: Mapping[str, Scale] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    error: str = ""

    @property
    def precision(self) -> str:
        """Type of the quantized nodes: "int8", whatever the zero points, or "fp8"."""
        from deploy.graph.plan import quantized_precision

        return quantized_precision(self.decisions)


class Target(Protocol):
    """One target: a dataclass whose options are fields declared by `deploy.targets.options`.

    Attributes:
        engines: suffixes of the engine files that `open` loads. The longest suffix that fits a
            file names its target; ".onnx" is ONNX Runtime's.
        runs_here: whether ONNX Runtime runs the engine on this machine's CPU, so that the search
            can use its latency.
        own_method: text: the algorithms that find this target's ranges whatever --method says; ""
            if --method decides.
    """

    engines: ClassVar[tuple[str, ...]]
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = ""

    @property
    def writes(self) -> tuple[str, ...]:
        """Endings of the files that `build` writes, after the model's name."""

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Names of `SEARCHES` that may replace `own_method`."""
        return ()

    @property
    def name(self) -> str:
        """Name in the `TARGETS` table and on the command line."""

    @property
    def configured(self) -> bool:
        """Whether the user gave a configuration of the vendor, which is followed as it is."""
        return False

    @property
    def option_alerts(self) -> tuple[str, ...]:
        """Sentences on options that may be wrong, said before the calibration and in the report."""
        return ()

    def scaled_tensors(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the tensors that need a scale for this target, judged by the model alone.

        `float_nodes`: names of the nodes that stay in float.
        """
        return self.plan(model, float_nodes).activations

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Decide each node's precision, with a reason for float, and place the Q/DQ pairs.

        Args:
            model: cleaned model.
            float_nodes: nodes to keep in float, with a reason if the user did not ask for it.
        """

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations that `build` needs.

        Raises:
            ConfigError: an option or configuration contradicts the model or the method.
            ExportError: nodes that ONNX Runtime does not know were cut off the model
                (`subject.loaded.cut_off`), and `build` does not put them back
                (`BuildRequest.with_plugin_nodes`).
        """

    def cache_version(self) -> str | None:
        """Return "X.Y.Z" of the TensorRT installed here, if this target writes a cache for it."""
        return None

    def cache_text(self, subject: CalibrationSubject, ranges: Ranges) -> CacheText | None:
        """Return the cache in TensorRT's format, if this target writes one."""
        return None

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the int8 model with this target's numerics for ONNX Runtime; write nothing.

        Raises:
            ExportError, CalibrationError: as `build`.
        """

    def evaluated(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the model that is evaluated in place of the engine; write nothing.

        It differs from that of `trial` in the type of its float part alone. A target in which both
        are the same has one method for them.

        Raises:
            ExportError, CalibrationError: as `build`.
        """

    def build(self, request: BuildRequest) -> BuildResult:
        """Write all files that this machine can make, and the engine if the SDK is installed.

        Where the SDK fails, `error` says so and the other files stay.

        Raises:
            ExportError: a format cannot express the model.
        """

    def describe_sdk(self) -> str:
        """Describe the SDK that builds and runs engines on this machine.

        Raises:
            SdkMissingError: it is missing; the message says what, and how to get it.
        """

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load a built engine.

        Raises:
            SdkMissingError: the runtime or device is not on this machine.
            BackendError: the runtime refused the engine.
        """
