"""What is told of a build, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.report import TrialRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How far something is from the float model's: a part of the outputs, or an inner tensor."""

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Nodes that stay float for one reason.

    Attributes:
        kind: of `deploy.tuning.reasons`.
        reason: in words.
        operators: their types.
        nodes: their names.
    """

    kind: str
    reason: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """A range that leaves values out: a share of them, 0 to 1, of those seen."""

    tensor: str
    share: float
    seen: tuple[float, float]
    kept: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoss:
    """One image.

    Attributes:
        name: of its file, or its place among arrays.
        part: of the outputs that loses most on it; "" where no part can be compared.
        sqnr_db: of that part.
        task: what int8 says of what FP32 says, as "3 of 4"; "" where the task is not known.
    """

    name: str
    part: str
    sqnr_db: float
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLoss:
    """One channel, index of axis 1, of an inner tensor.

    Attributes:
        tensor, channel: which.
        sqnr_db: of the channel alone.
        noise: its share of the tensor's noise, 0 to 1.
    """

    tensor: str
    channel: int
    sqnr_db: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What images that were run now tell, of one target.

    Attributes:
        samples: how many were run.
        images: those that lose most, the worst first.
        channels: those that lose most, by tensor.
        notes: what could not be told, in sentences.
    """

    samples: int
    images: tuple[ImageLoss, ...] = ()
    channels: tuple[ChannelLoss, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWhy:
    """One target.

    Attributes:
        name: of it.
        error: why it could not be built; "" where it was.
        level, reasons: of the verdict; "" where there is none.
        parts: of the outputs, the worst first.
        task: the task's figure in words; "" where it is not known.
        nodes: of the model as this target runs it.
        kept: what stays float: noise first, then time, consequence, rules.
        layers: inner tensors, the worst first.
        repairs: what was tried on the constants, in sentences.
        settled: what the search settled on, in words.
        tried: what it tried whole.
        methods: tensors whose range is found by another method than the rest.
        clipped: ranges that leave values out, the most first.
        runnable: the file that ONNX Runtime runs with its numerics.
        native: whether ONNX Runtime is the target.
        held: what the images told.
    """

    name: str
    error: str = ""
    level: str = ""
    reasons: tuple[str, ...] = ()
    parts: tuple[Loss, ...] = ()
    task: str = ""
    nodes: int = 0
    kept: tuple[Kept, ...] = ()
    layers: tuple[Loss, ...] = ()
    repairs: tuple[str, ...] = ()
    settled: str = ""
    tried: tuple[TrialRow, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    clipped: tuple[Clipped, ...] = ()
    runnable: str | None = None
    native: bool = False
    held: Held | None = None

    def on(self, held: Held) -> TargetWhy:
        """The same with what the images told."""
        return replace(self, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a build is as it is.

    Attributes:
        title: of the report.
        report: its path.
        plan: path of the plan; None where there is none.
        model: path of the float model, as the report has it.
        preprocess: how images became inputs, as the report has it.
        targets: one entry a target.
    """

    title: str
    report: str
    plan: str | None = None
    model: str = ""
    preprocess: Mapping[str, object] = field(default_factory=dict)
    targets: tuple[TargetWhy, ...] = ()
