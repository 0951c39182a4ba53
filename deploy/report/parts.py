"""The parts of a report: plain frozen values, read by the output formats, without any logic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from calibrators.scales import Scale
from deploy.calibration.sample_checks import HalvesAgreement
from deploy.graph.plan import Decision
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.kernels import KernelTime
from deploy.metrics.latency import Latency, SpeedUp
from deploy.metrics.output_errors import OutputAccuracy
from deploy.report.figures import EngineLayersPart
from deploy.report.previews import BoxRow, ClassRow, PicturesPart
from deploy.report.verdict import Verdict

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The input model. `inputs` and `outputs` are texts: "image float32 [N,1,28,28]"."""

    path: str
    size_bytes: int | None = None
    opset: int | None = None
    nodes: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPart:
    """The calibration data: source, number of samples, preprocessing (also as text), skipped."""

    source: str
    samples: int
    preprocess: Mapping[str, object] = field(default_factory=dict)
    prepared: str = ""
    skipped: tuple[str, ...] = ()
    digest: str | None = None
    pictures: PicturesPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Observations of one kind: a statistic of some tensors of one variant of the model."""

    variant: str  # model that ran, such as "folded" or "unfolded"
    statistic: str  # statistic of each tensor, such as "histogram"
    tensors: int
    reused: bool  # True if read from a cache, False if observed in this run


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPart:
    """How the scales were determined."""

    # requested calibration method; "" if no target used it. The methods actually used are in the
    # `TargetPart`s
    method: str = ""
    reused: bool = False  # True if the cache was used and nothing was run
    reason: str = ""  # why it was reused, or why not, in one sentence
    seconds: float | None = None  # duration of observing and searching; None if reused
    cache: str | None = None
    groups: tuple[GroupRow, ...] = ()
    # whether the ranges are those of a quantized model, and nothing was observed
    by_model: bool = False
    agreement: HalvesAgreement | None = None  # agreement of halves of the samples; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPart:
    """Cost of a run in inferences and decoded images, which can be compared between machines."""

    decodes: int = 0
    # variant of the model -> inferences for its statistics
    calibration_runs: Mapping[str, int] = field(default_factory=dict)
    reference_runs: int = 0  # further inferences of the float model, to judge engines
    # target -> inferences of its engine, or of the model that replaces it
    engine_runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of the model: its precision on a target, and the reason if it is float."""

    name: str
    op: str
    precision: str = "int8"
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether its precision is no float of 16 bits or more."""
        return self.precision not in _FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """Clip range that another calibration method finds for a tensor, in real units."""

    method: str
    lo: float
    hi: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramPart:
    """Histogram of a tensor in adjacent bars."""

    start: float  # lower edge of the first bar, in real units
    width: float  # width of every bar; 0 if all values equal `start`
    counts: tuple[int, ...]  # number of values per bar
    others: tuple[RangeRow, ...] = ()  # ranges that other methods find on the same histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One calibrated tensor, in real units; `clipped` is the share of values outside [lo, hi].

    Only a target's worst tensors have a histogram.
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
    """One quantized weight, by its output channels."""

    node: str
    op: str
    channels: int
    scales: int  # number of scales: one per channel, or one
    # least, median, largest: of the channels' largest |w|, in real units
    least: float
    median: float
    largest: float
    ratio: float  # the largest over the least
    used: float  # least share of the quantization grid that a channel uses, 0 to 1
    # number of channels whose largest |w| is below a millionth of the weight's, or stored as 0;
    # they are left out of the other figures
    dead: int = 0
    # indices of the channels that use least of the grid, the worst first
    worst: tuple[int, ...] = ()
    # for the worst weights, largest |w| along the channels, or the least of each run of channels
    strip: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """An engine's measurement at one batch."""

    batch: int
    items_qps: float  # items per second: the batch over the host's p50
    latency: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One model or engine that was measured."""

    label: str  # column head: "FP32", "int8", or the target's name if there are several
    reference: bool = False  # True for the float model that the others are compared with
    baseline: bool = False  # True for a float engine built for the target, to compare speeds
    target: str = "onnxruntime"
    path: str | None = None
    size_bytes: int | None = None  # size of the file and its external data
    load_ms: float | None = None  # time from the file to a session ready to run
    threads: int | None = None
    latency: Latency | None = None
    speed: SpeedUp | None = None  # beside the float engine that it is compared with
    # measurements by ascending batch; `latency` is that of the first
    sweep: tuple[BatchRow, ...] = ()
    kernels: tuple[KernelTime, ...] = ()  # time of each kernel, the slowest first
    accuracy: Accuracy | None = None
    verdict: Verdict | None = None  # None for the float model and for baselines
    # its layers compared with the plan; None if its runtime does not report them
    ran: EngineLayersPart | None = None
    notes: tuple[str, ...] = ()
    # samples whose boxes differ most from the float model's, and one that agrees
    boxes: tuple[BoxRow, ...] = ()
    # samples of another class than FP32's, FP32's largest margin first
    changed: tuple[ClassRow, ...] = ()

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
    """A file that was written, and its purpose; `sha256` is hexadecimal."""

    role: str
    path: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One candidate that the search ran as a complete model."""

    what: str
    sqnr_db: float  # of the worst output slice, over the few samples of the search
    time: float  # relative to the float model's, predicted or measured
    taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPart:
    """The search before a target was built."""

    reused: bool  # whether the result came from the plan and nothing was tried
    probes: int
    settled: str  # description of what was built; "" if the plan has none
    tried: tuple[TrialRow, ...]  # candidates run as complete models, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPart:
    """Results of one target."""

    name: str
    # calibration method of its ranges, such as "mse" or "ARQ and IFMR"; "" if unknown
    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)  # flag -> its value as text
    reused: bool = False  # True if everything it needed was in the cache
    nodes: tuple[NodeRow, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    weights: tuple[WeightRow, ...] = ()
    # inner tensors of its engine against the float model's, in the model's order
    layers: tuple[OutputAccuracy, ...] = ()
    files: tuple[FileRow, ...] = ()
    runnable: str | None = None  # file with its numerics that ONNX Runtime can run; None without
    search: SearchPart | None = None  # the search before it was built; None without
    alerts: tuple[str, ...] = ()  # notes that need an action
    notes: tuple[str, ...] = ()  # sentences on what was left out, with the command that does it
    error: str = ""  # why it failed, in one sentence; "" on success

    @property
    def options_text(self) -> str:
        """Its options as typed on the command line."""
        return " ".join(f"{flag} {value}".strip() for flag, value in self.options.items())


def node_rows(decisions: Iterable[Decision]) -> tuple[NodeRow, ...]:
    """Return a row for each of a target's decisions."""
    return tuple(
        NodeRow(
            name=decision.node,
            op=decision.op_type,
            precision=decision.precision,
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
    """Return a row for each of a target's ranges."""
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
