"""The parts of a report: plain frozen values, read by the output formats, without any logic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.calibration.sample_checks import HalvesAgreement
from deploy.graph.index import module_paths
from deploy.graph.plan import FLOATS, Decision
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import KernelTime
from deploy.metrics.latency import Latency, SpeedUp
from deploy.metrics.output_errors import OutputAccuracy
from deploy.report.figures import EngineLayersPart
from deploy.report.previews import BoxRow, ClassRow, PicturesPart
from deploy.report.verdict import Verdict
from deploy.tuning.plan_file import SplitRow

if TYPE_CHECKING:
    from onnx import ModelProto

_FLOATS = FLOATS | {"float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The input model.

    Attributes:
        path: of its file; its name if it was in memory.
        shapes: given to its inputs in place of the file's, as --input takes them.
        opset: of the ONNX domain.
        nodes: number of nodes.
        inputs, outputs: as text, such as "image float32 [N,1,28,28]".
        notes: sentences on the model.
    """

    path: str
    shapes: tuple[str, ...] = ()
    opset: int | None = None
    nodes: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPart:
    """The calibration data.

    Attributes:
        source: folder, list, pattern or function that it came from.
        samples: number of samples.
        preprocess: option -> its value.
        prepared: the preprocessing as text.
        skipped: unreadable files, each with the reason.
        evaluation_skipped: likewise, of the evaluation images of a build.
        digest: of the samples, hexadecimal.
        pictures: a few samples as pictures.
    """

    source: str
    samples: int
    preprocess: Mapping[str, object] = field(default_factory=dict)
    prepared: str = ""
    skipped: tuple[str, ...] = ()
    evaluation_skipped: tuple[str, ...] = ()
    digest: str | None = None
    pictures: PicturesPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Observations of one kind: a statistic of some tensors of one variant of the model.

    Attributes:
        variant: model that ran, such as "folded" or "unfolded".
        statistic: statistic of each tensor, such as "histogram".
        tensors: number of tensors.
        reused: True if read from a cache, False if observed in this run.
    """

    variant: str
    statistic: str
    tensors: int
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPart:
    """How the scales were determined.

    Attributes:
        method: requested calibration method; "" if no target used it. The methods actually used
            are in the `TargetPart`s.
        reused: True if the cache was used and nothing was run.
        reason: why it was reused, or why not, in one sentence.
        seconds: duration of observing and searching; None if reused.
        cache: path of the calibration cache.
        groups: what was observed.
        by_model: whether the ranges are those of a quantized model, and nothing was observed.
        agreement: agreement of halves of the samples; None if unknown.
    """

    method: str = ""
    reused: bool = False
    reason: str = ""
    seconds: float | None = None
    cache: str | None = None
    groups: tuple[GroupRow, ...] = ()
    by_model: bool = False
    agreement: HalvesAgreement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPart:
    """Cost of a run in inferences and decoded images, which can be compared between machines.

    Attributes:
        decodes: number of decoded images.
        calibration_runs: variant of the model -> inferences for its statistics.
        reference_runs: further inferences of the float model, to judge engines.
        engine_runs: target -> inferences of its engine, or of the model that replaces it.
    """

    decodes: int = 0
    calibration_runs: Mapping[str, int] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of the model on a target.

    Attributes:
        name: of the node.
        op: its operator.
        precision: its type, such as "int8" or "float32".
        reason: why it is float; "" if it is quantized.
        module: path of its PyTorch module; "" if the file does not say.
    """

    name: str
    op: str
    precision: str = "int8"
    reason: str = ""
    module: str = ""

    @property
    def quantized(self) -> bool:
        """Whether its precision is no float of 16 bits or more."""
        return self.precision not in _FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One calibrated tensor, in real units.

    Attributes:
        name: of the tensor.
        observed_min: smallest observed value.
        observed_max: largest observed value.
        lo: lower end of the clip range.
        hi: upper end of the clip range.
        amax: largest magnitude that its scale represents.
        method: calibration method that found the range.
        clipped: share of values outside [lo, hi], 0 to 1; None if unknown.
        sqnr_db: of the tensor in the engine, against the float model's; None if not measured.
    """

    name: str
    observed_min: float
    observed_max: float
    lo: float
    hi: float
    amax: float
    method: str
    clipped: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """An engine's measurement at one batch.

    Attributes:
        batch: number of items.
        items_qps: items per second: the batch over the p50 of `Latency.run_time`.
        latency: of one inference.
    """

    batch: int
    items_qps: float
    latency: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One model or engine that was measured.

    Attributes:
        label: column head: "FP32", "int8", or the target's name if there are several.
        reference: True for the float model that the others are compared with.
        baseline: True for a float engine built for the target, to compare speeds.
        target: name of the target that it was built for.
        path: of its file; None if there is none.
        size_bytes: size of the file and its external data.
        load_ms: time from the file to a session ready to run.
        threads: number of threads on the CPU.
        latency: of one inference; None if not timed.
        speed: speed-up over the float engine that it is compared with.
        sweep: measurements by ascending batch; `latency` is that of the first.
        kernels: time of each kernel, the slowest first.
        accuracy: against the float model; None if not measured.
        verdict: None for the float model and for baselines.
        ran: its layers compared with the plan; None if its runtime does not report them.
        notes: sentences on this engine.
        boxes: samples whose boxes differ most from the float model's.
        changed: samples of another class than FP32's, FP32's largest margin first.
    """

    label: str
    reference: bool = False
    baseline: bool = False
    target: str = "onnxruntime"
    path: str | None = None
    size_bytes: int | None = None
    load_ms: float | None = None
    threads: int | None = None
    latency: Latency | None = None
    speed: SpeedUp | None = None
    sweep: tuple[BatchRow, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    accuracy: Accuracy | None = None
    verdict: Verdict | None = None
    ran: EngineLayersPart | None = None
    notes: tuple[str, ...] = ()
    boxes: tuple[BoxRow, ...] = ()
    changed: tuple[ClassRow, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether it is the float model, or a float engine built for a target."""
        return self.reference or self.baseline

    @property
    def p50_ms(self) -> float:
        """The median latency; the engine must have been timed."""
        assert self.latency is not None
        return self.latency.latency.p50

    @property
    def on_device(self) -> bool:
        """Whether it was timed by an accelerator's clock."""
        return self.latency is not None and self.latency.gpu_compute is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file that was written.

    Attributes:
        role: its purpose.
        path: of the file.
        size_bytes: its size.
        sha256: of its bytes, hexadecimal.
    """

    role: str
    path: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierPart:
    """A better engine that the build before this one had put into the same folder.

    Attributes:
        target: name of its target.
        text: its verdict.
        split: number of its split in the front of this build; None if it is not there.
    """

    target: str
    text: str
    split: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPart:
    """What the user asked for, as far as the next step depends on it.

    Attributes:
        effort: target -> effort of its search, 0 to 3.
        prefer: "speed", "accuracy" or "size".
        max_loss: largest loss that the user accepts; None without a limit.
        min_speedup: least speed-up that the user accepts; None without a limit.
        has_method: whether the user set the calibration method.
        has_evaluation: whether evaluation images were given.
        is_module: whether the model came from PyTorch.
        is_quantized: whether it is a Q/DQ model, of which nothing is calibrated or searched.
        followed: names of next steps that builds of this model in the same folder have followed.
    """

    effort: Mapping[str, int] = field(default_factory=dict)
    prefer: str = "speed"
    max_loss: float | None = None
    min_speedup: float | None = None
    has_method: bool = False
    has_evaluation: bool = False
    is_module: bool = False
    is_quantized: bool = False
    followed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPart:
    """The search before a target was built.

    Attributes:
        reused: whether the result came from the plan and nothing was tried.
        probes: number of trials.
        settled: description of what was built; "" if the plan has none.
        front: splits that can be built with `--split`, the fastest first.
    """

    reused: bool
    probes: int
    settled: str
    front: tuple[SplitRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPart:
    """Results of one target.

    Attributes:
        name: of the target, such as "tensorrt".
        method: calibration method of its ranges, such as "mse" or "ARQ and IFMR"; "" if unknown.
        options: flag -> its value as text.
        reused: True if everything it needed was in the cache.
        nodes: every node of the model.
        tensors: its ranges.
        layers: inner tensors of its engine against the float model's, in the model's order.
        modules: tensor -> path of the PyTorch module that makes it, where the model's file says it.
        files: files written for it.
        runnable: file that computes the same in ONNX Runtime; None without.
        shipped: files from which the device builds its engine.
        search: the search before it was built; None without.
        alerts: notes that need an action.
        notes: sentences on what was left out, with the command that does it.
        error: why it failed, in one sentence; "" on success.
    """

    name: str
    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    reused: bool = False
    nodes: tuple[NodeRow, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    layers: tuple[OutputAccuracy, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileRow, ...] = ()
    runnable: str | None = None
    shipped: tuple[str, ...] = ()
    search: SearchPart | None = None
    alerts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def front(self) -> tuple[SplitRow, ...]:
        """Splits that can be built with `--split`, the fastest first; empty without a search."""
        return self.search.front if self.search else ()

    @property
    def built_split(self) -> SplitRow | None:
        """The split of its front that was built; None without a front."""
        return next((split for split in self.front if split.taken and split.time > 0), None)

    @property
    def options_text(self) -> str:
        """Its options as typed on the command line."""
        return " ".join(f"{flag} {value}".strip() for flag, value in self.options.items())


def node_rows(decisions: Iterable[Decision], model: ModelProto) -> tuple[NodeRow, ...]:
    """Return a row for each node of a model.

    `decisions`: a target's decisions: the precision of each node, and why it is float.
    """
    path_by_node = module_paths(model)
    return tuple(
        NodeRow(
            name=decision.node,
            op=decision.op_type,
            precision=decision.precision,
            reason=decision.reason,
            module=path_by_node.get(decision.node, ""),
        )
        for decision in decisions
    )
