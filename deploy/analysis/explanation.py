"""The explanation of a build (`explain`) as plain values, with its text and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from deploy.report import figures
from deploy.report.model import to_plain_object
from deploy.report.parts import TrialRow
from deploy.report.screen import entries, entry, labelled_table
from deploy.report.tables import TRIAL_HEADS, trial_row
from deploy.terminal import join_visible
from deploy.tuning.plan_file import CONSEQUENCE, NOISE, RULE, TIME

SCHEMA = "calib8-explanation/1"
FEW = 10  # rows of a table unless all are asked for
_NAMES = 3  # nodes listed for one reason
_KINDS = {NOISE: "  by noise", TIME: "  by time", CONSEQUENCE: "  in between", RULE: "  by rule"}
_ALL = "--all shows them"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccuracy:
    """Accuracy of an output slice or an inner tensor against the float model."""

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatNodeGroup:
    """Nodes that stay float for one reason."""

    kind: str  # kind of the reason, see `deploy.tuning.plan_file`
    reason: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedRange:
    """A range that clips observed values: their share, 0 to 1, and both ranges."""

    tensor: str
    share: float
    seen: tuple[float, float]
    kept: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoss:
    """Loss on one image."""

    name: str  # file name, or index in an array
    part: str  # output slice of lowest SQNR; "" where no slice can be compared
    sqnr_db: float  # SQNR of that slice
    task: str  # agreement of int8 with FP32 on the task, such as "3 of 4"; "" without a task


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLoss:
    """Loss of one channel (axis 1) of an inner tensor."""

    tensor: str
    channel: int
    sqnr_db: float  # SQNR of the channel alone
    noise: float  # its share of the tensor's noise, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResults:
    """Results of running images on one target."""

    samples: int
    images: tuple[ImageLoss, ...] = ()  # the images of lowest SQNR, the worst first
    channels: tuple[ChannelLoss, ...] = ()  # the channels of lowest SQNR, by tensor
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExplanation:
    """Explanation of one target."""

    name: str
    error: str = ""  # why it could not be built; "" where it was
    # level, reasons: level and reasons of the verdict; "" without one
    level: str = ""
    reasons: tuple[str, ...] = ()
    parts: tuple[TensorAccuracy, ...] = ()  # output slices, the worst first
    task: str = ""  # figure of the task as text; "" without one
    set_task: str = ""  # name of the task that the user set for the build
    nodes: int = 0  # number of nodes of the model as this target runs it
    # groups of float nodes: by noise, then time, consequence, rules
    kept: tuple[FloatNodeGroup, ...] = ()
    layers: tuple[TensorAccuracy, ...] = ()  # inner tensors, the worst first
    repairs: tuple[str, ...] = ()
    settled: str = ""  # description of the trial that was built
    tried: tuple[TrialRow, ...] = ()
    # tensor -> range method, where it differs from the others
    methods: Mapping[str, str] = field(default_factory=dict)
    clipped: tuple[ClippedRange, ...] = ()  # ranges that clip values, the largest share first
    runnable: str | None = None  # file that ONNX Runtime can run with the target's numerics
    native: bool = False  # whether ONNX Runtime is the target
    held: ImageResults | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """Explanation of a build; `repr` is its text for a screen."""

    title: str
    report: str
    plan: str | None = None  # path of the plan; None without one
    model: str = ""
    preprocess: Mapping[str, object] = field(default_factory=dict)
    targets: tuple[TargetExplanation, ...] = ()  # one entry per target

    def __repr__(self) -> str:
        return to_screen(self)


def to_screen(explanation: Explanation, *, everything: bool = False) -> str:
    """Return the explanation as plain text, without colours."""
    most = None if everything else FEW
    blocks = [
        [
            explanation.title,
            *entry("Report", explanation.report),
            *entry("Plan", explanation.plan or "none"),
        ],
        *(list(_target(one, most)) for one in explanation.targets),
    ]
    return "\n\n".join(map(join_visible, blocks)) + "\n"


def to_json(explanation: Explanation) -> dict[str, object]:
    """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
    return to_plain_object({"schema": SCHEMA, **asdict(explanation)})


def _target(one: TargetExplanation, most: int | None) -> Iterator[str]:
    yield f"{one.name}: {one.level or ('failed' if one.error else 'no verdict')}"
    if one.error:
        yield from entry("Why", one.error)
        return
    yield from entries("Why", one.reasons)
    if one.task and one.task not in one.reasons:
        yield from entry("Task", one.task)
    yield from _losses("Parts", "part of the outputs", one.parts, most)
    yield from _float(one, most)
    yield from _losses("Layers", "inner tensor, the worst first", one.layers, most)
    yield from _tried(one)
    yield from _clipping(one, most)
    if one.held is not None:
        yield from _held(one.held)


def _losses(
    label: str, name: str, rows: Sequence[TensorAccuracy], most: int | None
) -> Iterator[str]:
    cells = [[r.name, figures.decibels(r.sqnr_db), figures.cosine(r.cosine_mean)] for r in rows]
    yield from _table(label, [name, "SQNR", "cosine"], cells, most)


def _float(one: TargetExplanation, most: int | None) -> Iterator[str]:
    count = sum(len(group.nodes) for group in one.kept)
    yield from entry("Float", f"{count} of {figures.count(one.nodes, 'node')}")
    for kind, label in _KINDS.items():
        groups = [group for group in one.kept if group.kind == kind]
        few = None if most is None else most // 2
        yield from entries(label, (_kept(group, most) for group in groups[:few]))
        yield from _more(groups, few)


def _kept(group: FloatNodeGroup, most: int | None) -> str:
    shown = group.nodes if most is None else group.nodes[:_NAMES]
    more = len(group.nodes) - len(shown)
    rest = f" and {more} more" if more else ""
    types = ", ".join(group.operators)
    return f"{types} {', '.join(shown)}{rest}: {group.reason or 'no reason given'}"


def _tried(one: TargetExplanation) -> Iterator[str]:
    rows = [trial_row(trial) for trial in one.tried]
    yield from _table("Tried", TRIAL_HEADS, rows, None)
    if one.settled:
        yield from entry("" if rows else "Tried", f"settled on {one.settled}")
    if one.methods:
        names = ", ".join(f"{tensor} by {method}" for tensor, method in one.methods.items())
        yield from entry("", f"ranges by methods of their own: {names}")
    yield from entries("Repairs", one.repairs)


def _clipping(one: TargetExplanation, most: int | None) -> Iterator[str]:
    rows = [
        [row.tensor, figures.percent(row.share), _span(row.kept), _span(row.seen)]
        for row in one.clipped
    ]
    yield from _table("Clipped", ["tensor", "values", "range kept", "range seen"], rows, most)


def _span(ends: tuple[float, float]) -> str:
    return f"[{figures.real(ends[0])}, {figures.real(ends[1])}]"


def _held(held: ImageResults) -> Iterator[str]:
    rows = [[i.name, figures.decibels(i.sqnr_db), i.part, i.task] for i in held.images]
    heads = [f"image, the worst of {held.samples}", "SQNR", "in", "as FP32"]
    yield from _table("Images", heads, rows, None)
    channels = [
        [c.tensor, figures.decibels(c.sqnr_db), figures.percent(c.noise), str(c.channel)]
        for c in held.channels
    ]
    heads = ["inner tensor", "SQNR", "of its noise", "channel"]
    yield from _table("Channels", heads, channels, None)
    yield from entries("", held.notes)


def _table(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]], most: int | None
) -> Iterator[str]:
    """Yield a table next to its label, and the number of rows left out."""
    yield from labelled_table(label, heads, rows[:most])
    yield from _more(rows, most)


def _more(rows: Sequence[object], most: int | None) -> Iterator[str]:
    if most is not None and len(rows) > most:
        yield from entry("", f"and {len(rows) - most} more; {_ALL}")
