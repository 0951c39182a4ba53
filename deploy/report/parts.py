"""The parts of a report: plain frozen values; forms read them, and nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from calibrators.scales import Scale
from deploy.calibration.sample_checks import Agreement
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import Kernel
from deploy.metrics.latency import Latency
from deploy.metrics.output_errors import OutputAccuracy
from deploy.report.figures import RanPart
from deploy.report.previews import BoxRow, ClassRow, PicturesPart
from deploy.report.verdict import Verdict

if TYPE_CHECKING:
    from deploy.graph.plan import Decision

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The model that was given. `inputs` and `outputs` are words: "image float32 [N,1,28,28]"."""

    path: str
    size_bytes: int | None = None
    opset: int | None = None
    nodes: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPart:
    """What was fed: where from, how many, prepared how (in words too), what was left out."""

    source: str
    samples: int
    preprocess: Mapping[str, object] = field(default_factory=dict)
    prepared: str = ""
    skipped: tuple[str, ...] = ()
    digest: str | None = None
    pictures: PicturesPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Observations of one kind: a statistic of some tensors of one variant of the model.

    Attributes:
        variant: what ran, such as "folded" or "unfolded".
        statistic: what was kept of each tensor, such as "histogram".
        tensors: how many there are.
        reused: True where they came from a cache, False where they were observed anew.
    """

    variant: str
    statistic: str
    tensors: int
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPart:
    """How the scales came about.

    Attributes:
        method: name of the search that was asked for; "" where no target used it. What each
            target's ranges were really chosen by is told by its `TargetPart`.
        reused: True where a cache was taken over and nothing was run.
        reason: why it was reused, or why not, in one sentence.
        seconds: time of observing and searching; None where reused.
        cache: path of the cache.
        groups: what was observed, and which of it was reused.
        by_model: whether the pairs of a quantized model say the ranges, and nothing was observed.
        agreement: how far halves of the samples agree; None where nothing told it.
    """

    method: str = ""
    reused: bool = False
    reason: str = ""
    seconds: float | None = None
    cache: str | None = None
    groups: tuple[GroupRow, ...] = ()
    by_model: bool = False
    agreement: Agreement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPart:
    """What a run cost, counted in inferences and decoded images, so that it can be compared.

    Attributes:
        decodes: images that were read and decoded.
        calibration_runs: variant of the model -> inferences for its statistics.
        reference_runs: further inferences of the float model, to judge engines by.
        engine_runs: target -> inferences of its engine, or of the model that stands in for it.
    """

    decodes: int = 0
    calibration_runs: Mapping[str, int] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of the model: the precision it runs in on a target, and why where it is float."""

    name: str
    op: str
    precision: str = "int8"
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether it runs on a grid, and not in a float of 16 bits or more."""
        return self.precision not in _FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """The clip range that another search finds for a tensor, in real units."""

    method: str
    lo: float
    hi: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramPart:
    """What was seen of a tensor, in bars side by side.

    Attributes:
        start: where the first bar begins, in real units.
        width: of every bar; 0 where all values are `start`.
        counts: values in each of them.
        others: what other searches of the same histogram find.
    """

    start: float
    width: float
    counts: tuple[int, ...]
    others: tuple[RangeRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One calibrated tensor, in real units; `clipped` is the share of values outside [lo, hi].

    The worst of a target's have the histogram that the range was found on.
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
    histogram: HistogramPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One weight that left float, by its output channels.

    Attributes:
        node: the node that reads it.
        op: its operator.
        channels: how many there are.
        scales: how many scales it has: one a channel, or one.
        least, median, largest: of the channels' largest |w|, in real units.
        ratio: the largest over the least.
        used: the least share of the grid that a channel uses, 0 to 1.
        dead: channels whose largest |w| is less than a millionth of the weight's, or stored as 0;
            they are left out of the other figures.
        worst: places of the channels that use least of it, the worst first.
        strip: of the worst weights, largest |w| along the channels; of runs of channels, where
            they are many, the least of each.
    """

    node: str
    op: str
    channels: int
    scales: int
    least: float
    median: float
    largest: float
    ratio: float
    used: float
    dead: int = 0
    worst: tuple[int, ...] = ()
    strip: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """An engine at one batch.

    Attributes:
        batch: first dimension of its inputs.
        items_qps: items a second: the batch over the host's p50.
        latency: what was measured.
    """

    batch: int
    items_qps: float
    latency: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One model or engine that was measured.

    Attributes:
        label: head of its column: "FP32", "int8", or the target's name where there are several.
        reference: True for the float model that the others are compared with.
        baseline: True for a float engine that was built beside its target's own, to hold its speed
            against.
        size_bytes: file and external data together.
        load_ms: time from the file to a session ready to run.
        sweep: what was measured at each batch, the smallest first, which `latency` is of.
        kernels: what each takes, the slowest first.
        verdict: what is thought of it; None for the float model and for baselines.
        ran: what it is made of; None where its runtime does not tell.
        boxes: samples where its boxes and the float model's differ most, and one where they agree.
        changed: samples that it gives to another class, those first of which FP32 was surest.
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
    sweep: tuple[BatchRow, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    accuracy: Accuracy | None = None
    verdict: Verdict | None = None
    ran: RanPart | None = None
    notes: tuple[str, ...] = ()
    boxes: tuple[BoxRow, ...] = ()
    changed: tuple[ClassRow, ...] = ()

    @property
    def on_device(self) -> bool:
        """Whether an accelerator's clock timed it."""
        return self.latency is not None and self.latency.gpu_compute is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file that was written, and what it is for; the sha256 in hexadecimal digits."""

    role: str
    path: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One choice that was tried whole.

    Attributes:
        what: in words.
        sqnr_db: of the worst part of the outputs, over the few samples of the search.
        time: as a share of the float model's, predicted or timed.
        taken: whether it is what was built.
    """

    what: str
    sqnr_db: float
    time: float
    taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPart:
    """What was tried before a target was built.

    Attributes:
        reused: whether it stood in the plan, and nothing was tried now.
        probes: trial models that were run now.
        settled: what was built, in words; "" where the plan does not say.
        tried: those that were tried whole, in order.
    """

    reused: bool
    probes: int
    settled: str
    tried: tuple[TrialRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPart:
    """What one target got.

    Attributes:
        name: of the target.
        method: what chose its ranges, such as "mse" or "ARQ and IFMR"; "" where it is not known.
        options: its flags that were given -> their values in words.
        reused: True where everything it needed was in the cache.
        nodes: every node, as this target runs it.
        tensors: the ranges that this target's files hold.
        weights: the weights that they hold on a grid.
        layers: inner tensors of its engine against the float model's, in the model's order.
        files: what was written for it.
        runnable: the file that ONNX Runtime runs with its numerics; None where there is none.
        search: what was tried before it was built; None where nothing was.
        notes: what was not done, and the command that does it, in sentences.
        error: why it failed, in one sentence; "" where it did not.
    """

    name: str
    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    reused: bool = False
    nodes: tuple[NodeRow, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    weights: tuple[WeightRow, ...] = ()
    layers: tuple[OutputAccuracy, ...] = ()
    files: tuple[FileRow, ...] = ()
    runnable: str | None = None
    search: SearchPart | None = None
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def typed(self) -> str:
        """Its options as a user types them."""
        return " ".join(f"{flag} {value}".strip() for flag, value in self.options.items())


def node_rows(decisions: Iterable[Decision]) -> tuple[NodeRow, ...]:
    """The rows of what a target decided for each node."""
    return tuple(
        NodeRow(
            name=decision.node,
            op=decision.op_type,
            precision=getattr(decision, "precision", "int8" if decision.int8 else "float32"),
            reason=decision.reason,
        )
        for decision in decisions
    )


def tensor_rows(
    ranges: Mapping[str, Scale],
    *,
    clipped: Mapping[str, float] | None = None,
    layers: Sequence[OutputAccuracy] = (),
) -> tuple[TensorRow, ...]:
    """The rows of a target's ranges, with what is known of each tensor."""
    sqnr = {layer.name: layer.sqnr_db for layer in layers}
    return tuple(
        TensorRow(
            name=name,
            observed_min=scale.observed_min,
            observed_max=scale.observed_max,
            lo=scale.lo,
            hi=scale.hi,
            amax=scale.amax,
            method=scale.method,
            clipped=(clipped or {}).get(name),
            sqnr_db=sqnr.get(name),
        )
        for name, scale in ranges.items()
    )
