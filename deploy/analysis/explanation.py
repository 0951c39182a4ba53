"""The explanation of a build (`explain`) as plain values, with its text and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from deploy.errors import counted, list_first
from deploy.report import figures
from deploy.report.model import to_plain_object
from deploy.report.screen import entries, entry, labelled_table
from deploy.report.tables import FRONT_HEADS, split_row
from deploy.terminal import PrintedResult, join_visible
from deploy.tuning.plan_file import SplitRow
from deploy.tuning.reasons import CONSEQUENCE, NOISE, NOISE_NOTE, RULE, TIME

SCHEMA = "calib8-explanation/1"
_MAX_ROWS = 10  # rows of a table unless all are asked for
_MAX_NAMES = 3  # nodes listed for one reason
_LABEL_BY_KIND = {
    NOISE: "  by noise",
    TIME: "  by time",
    CONSEQUENCE: "  in between",
    RULE: "  by rule",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccuracy:
    """Accuracy of an output slice or an inner tensor against the float model.

    Attributes:
        name: label of the slice, or name of the tensor.
        sqnr_db: signal to quantization noise ratio.
        cosine_mean: mean cosine similarity of the samples.
        cosine_min: least cosine similarity of a sample.
    """

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatNodeGroup:
    """Nodes that stay float for one reason.

    Attributes:
        kind: kind of the reason, see `deploy.tuning.reasons`.
        reason: the reason, "" if none is known.
        operators: operators of the nodes.
        nodes: names of the nodes.
    """

    kind: str
    reason: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedRange:
    """A range that clips observed values.

    Attributes:
        tensor: name of the tensor.
        share: share of its values that are clipped, 0 to 1.
        seen: lowest and highest value that were observed.
        kept: lowest and highest value that int8 represents.
    """

    tensor: str
    share: float
    seen: tuple[float, float]
    kept: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoss:
    """Loss on one image.

    Attributes:
        name: file name, or index in an array.
        part: output slice of lowest SQNR; "" if no slice can be compared.
        sqnr_db: SQNR of that slice.
        task: agreement of int8 with FP32 on the task, such as "3 of 4"; "" without a task.
    """

    name: str
    part: str
    sqnr_db: float
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResults:
    """Results of running images on one target.

    Attributes:
        samples: number of images.
        images: the images of lowest SQNR, the worst first.
        notes: sentences on what could not be compared.
    """

    samples: int
    images: tuple[ImageLoss, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExplanation:
    """Explanation of one target.

    Attributes:
        name: name of the target.
        error: why it could not be built; "" if it was.
        level: level of the verdict; "" without one.
        reasons: reasons of the verdict.
        parts: output slices, the worst first.
        task: figure of the task as text; "" without one.
        set_task: name of the task that the user set for the build.
        nodes: number of nodes of the model as this target runs it.
        kept: groups of float nodes: by noise, then time, consequence, rules.
        layers: inner tensors, the worst first.
        modules: tensor -> path of the PyTorch module that makes it, where it is known.
        repairs: notes on repairs of the model.
        settled: description of the split that was built.
        front: splits that can be built, the fastest first.
        methods: tensor -> range method, where it differs from the others.
        clipped: ranges that clip values, the largest share first.
        runnable: file that ONNX Runtime can run with the target's numerics.
        native: whether ONNX Runtime is the target.
        held: results of the user's images; None without images.
    """

    name: str
    error: str
    level: str = ""
    reasons: tuple[str, ...] = ()
    parts: tuple[TensorAccuracy, ...] = ()
    task: str = ""
    set_task: str = ""
    nodes: int
    kept: tuple[FloatNodeGroup, ...]
    layers: tuple[TensorAccuracy, ...]
    repairs: tuple[str, ...]
    settled: str
    front: tuple[SplitRow, ...]
    methods: Mapping[str, str]
    clipped: tuple[ClippedRange, ...]
    modules: Mapping[str, str]
    runnable: str | None
    native: bool = False
    held: ImageResults | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(PrintedResult):
    """Explanation of a build; `repr` is its text for a screen.

    Attributes:
        title: title of the report.
        report: path of the report.
        plan: path of the plan; None without one.
        model: path of the float model.
        shapes: of its inputs in place of the file's.
        preprocess: how the images of the build became inputs.
        targets: one entry per target.
    """

    title: str
    report: str
    plan: str | None
    model: str
    shapes: tuple[str, ...]
    preprocess: Mapping[str, object]
    targets: tuple[TargetExplanation, ...]

    def to_screen(self, *, everything: bool = False) -> str:
        """Return the explanation as plain text, with the worst rows of each table or all rows."""
        max_rows = None if everything else _MAX_ROWS
        head = [
            self.title,
            *entry("Report", self.report),
            *entry("Plan", self.plan or "none"),
        ]
        targets = [list(_target_lines(target, max_rows)) for target in self.targets]
        return "\n\n".join(map(join_visible, [head, *targets])) + "\n"

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
        return to_plain_object({"schema": SCHEMA, **asdict(self)})


def _target_lines(target: TargetExplanation, max_rows: int | None) -> Iterator[str]:
    """Yield the lines that explain one target; `max_rows`: rows of each table, None for all."""
    if target.error:
        yield f"{target.name}: {target.level or 'failed'}"
        yield from entry("Why", target.error)
        return
    yield f"{target.name}: {target.level or 'no verdict'}"
    yield from entries("Why", target.reasons)
    if target.task and target.task not in target.reasons:  # else it is shown as a reason
        yield from entry("Task", target.task)
    yield from _accuracy_lines("Parts", "part of the outputs", target.parts, max_rows, modules={})
    yield from _float_node_lines(target, max_rows)
    tensor_head = "inner tensor, the worst first"
    yield from _accuracy_lines(
        "Layers", tensor_head, target.layers, max_rows, modules=target.modules
    )
    yield from _search_lines(target)
    yield from _clipping_lines(target, max_rows)
    if target.held is not None:  # the results of the user's images
        yield from _image_lines(target.held)


def _accuracy_lines(
    label: str,
    name_head: str,
    tensors: Sequence[TensorAccuracy],
    max_rows: int | None,
    *,
    modules: Mapping[str, str],
) -> Iterator[str]:
    """Yield a table of SQNR and cosine of output slices or inner tensors.

    Args:
        label: text in the margin, next to the table.
        name_head: head of the column of names.
        tensors: the rows, the worst first.
        max_rows: number of rows; None for all.
        modules: tensor -> path of the PyTorch module that makes it.
    """
    rows = []
    for tensor in tensors:
        cosine = figures.cosine(tensor.cosine_mean)
        name = _with_module(tensor.name, modules)
        rows.append([name, figures.decibels(tensor.sqnr_db), cosine])
    yield from _table(label, [name_head, "SQNR", "cosine"], rows, max_rows)


def _float_node_lines(target: TargetExplanation, max_rows: int | None) -> Iterator[str]:
    """Yield how many nodes stay float, and why, by kind of reason."""
    count = sum(len(group.nodes) for group in target.kept)
    yield from entry("Float", f"{count} of {counted(target.nodes, 'node')}")
    max_groups = None if max_rows is None else max_rows // 2
    for kind, label in _LABEL_BY_KIND.items():
        groups = [group for group in target.kept if group.kind == kind]
        lines = [_describe_group(group, max_rows) for group in groups[:max_groups]]
        yield from entries(label, lines)
        yield from _count_hidden(groups, max_groups)
        if groups and kind == NOISE:
            yield from entry("", f"({NOISE_NOTE})")


def _describe_group(group: FloatNodeGroup, max_rows: int | None) -> str:
    """Return operators, names and reason of nodes that stay float; without limit all names."""
    max_names = _MAX_NAMES
    if max_rows is None:
        max_names = len(group.nodes)
    names = list_first(group.nodes, max_names)
    return f"{', '.join(group.operators)} {names}: {group.reason or 'no reason given'}"


def _search_lines(target: TargetExplanation) -> Iterator[str]:
    """Yield the splits that can be built, the one that was, and methods and repairs it needs."""
    rows = [split_row(split) for split in target.front]
    yield from _table("Splits", FRONT_HEADS, rows, None)
    if target.settled:
        yield from entry("Built", target.settled)
    if target.methods:
        names = ", ".join(f"{tensor} by {method}" for tensor, method in target.methods.items())
        yield from entry("", f"ranges by methods of their own: {names}")
    yield from entries("Repairs", target.repairs)


def _clipping_lines(target: TargetExplanation, max_rows: int | None) -> Iterator[str]:
    """Yield a table of the ranges that clip values."""
    rows = []
    for clipped in target.clipped:
        ranges = [_describe_range(clipped.kept), _describe_range(clipped.seen)]
        name = _with_module(clipped.tensor, target.modules)
        rows.append([name, figures.percent(clipped.share), *ranges])
    yield from _table("Clipped", ["tensor", "values", "range kept", "range seen"], rows, max_rows)


def _with_module(tensor: str, modules: Mapping[str, str]) -> str:
    """Return the name of a tensor, followed by the path of the module that makes it."""
    return f"{tensor} ({modules[tensor]})" if tensor in modules else tensor


def _describe_range(ends: tuple[float, float]) -> str:
    """Return a range as text, such as "[-1, 3.5]"."""
    low, high = ends
    return f"[{figures.real(low)}, {figures.real(high)}]"


def _image_lines(results: ImageResults) -> Iterator[str]:
    """Yield a table of the worst of the user's images."""
    image_rows = []
    for image in results.images:
        # boxes in a list, for example, are compared by the task alone
        sqnr = figures.decibels(image.sqnr_db) if image.part else ""
        image_rows.append([image.name, sqnr, image.part, image.task])
    heads = [f"image, the worst of {results.samples}", "SQNR", "in", "as FP32"]
    yield from _table("Images", heads, image_rows, None)
    yield from entries("", results.notes)


def _table(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]], max_rows: int | None
) -> Iterator[str]:
    """Yield a table next to its label, and the number of rows left out."""
    yield from labelled_table(label, heads, rows[:max_rows])
    yield from _count_hidden(rows, max_rows)


def _count_hidden(rows: Sequence[object], max_rows: int | None) -> Iterator[str]:
    """Yield how many rows the limit left out, if any."""
    if max_rows is not None and len(rows) > max_rows:
        yield from entry("", f"and {len(rows) - max_rows} more; --all shows them")
