"""The plan file `<name>.plan.toml`: the choices for each target and the reasons, to edit and obey.

::

    schema = "calib8-plan/1"
    model = "sha256 of graph and weights"
    float = ["/model.22/*"]          on every target; patterns as --keep-float takes them

    [onnxruntime]
    made_from = "..."                what the choice depends on; equal ones are not searched again
    precision = "int8"               grid that it was chosen for; --plan obeys it on no other
    timed_on = "AMD EPYC ..."        CPU whose times decided; the plan is searched again on another
    method = "minmax"
    rounded = true                   adaptive rounding of weights
    float = { "/model.1/conv/Conv" = "alone in int8 it leaves 4.4 dB of output0[4:22]" }
    methods = { "tensor" = "mse" }

    [[onnxruntime.front]]            a split that can be built in its place: --split 2
    number = 2
    float_layers = 3
    time = 0.44                      share of the float model's
    sqnr_db = 27.0
    float = ["/model.1/conv/Conv"]

A split says which layers are in float. The front holds the splits that no other split of the search
beats in both time and accuracy. A choice by time would differ on a busier day; with the file, the
same bytes are built again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.errors import ConfigError
from deploy.files import atomic, toml
from deploy.files.reading import convert
from deploy.method import NO_CHOICES, Choices, Method

SCHEMA = "calib8-plan/1"
_UNTRIED = "a split that the search did not try"  # `settled` where the user edited the choices
_BUILD_AGAIN = "build again without it"
# fields of `TargetPlan` that are texts, each a key of the target's table under the same name
_TEXT_FIELDS = ("made_from", "precision", "timed_on", "settled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """Figures of one split of the front: no other that was tried is as fast and as near to FP32.

    Attributes:
        number: what `--split` takes, from 1, the fastest split first.
        float_layers: number of layers in float.
        layers: number of all layers with weights.
        time: as a share of the float model's.
        is_timed: whether the time was measured, and not predicted.
        size: predicted bytes of weights and constants, as a share of the float model's.
        sqnr_db: of the worst output slice, over the samples of the search.
        figure: the task's figure on the evaluation samples, such as "27 of 28 boxes"; "" if the
            split was not evaluated.
        level: expected verdict on its accuracy: "good", "doubtful" or "unusable"; "" if the
            split was not evaluated.
        taken: whether it was built.
    """

    number: int
    float_layers: int
    layers: int
    time: float
    is_timed: bool = False
    size: float
    sqnr_db: float
    figure: str = ""
    level: str = ""
    taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """A split of the front that `--split` can build.

    Attributes:
        row: its figures, as the report shows them.
        choices: what `--split` builds.
    """

    row: SplitRow
    choices: Choices = NO_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """The choices for one target, and what they were made from.

    Attributes:
        choices: layers in float, with reasons, and range methods.
        made_from: digest of all that the choices depend on; "" for a plan written by hand.
        precision: "int8" or "fp8", the grid that they were made for; "" if unknown.
        settled: description of the trial that was built.
        interrupted: whether the user ended the search; not in the file.
        timed_on: CPU whose times decided; "" where no time did.
        failed: number of trials that could not run and why the first could not; "" where all ran.
        front: splits that can be built, the fastest first.
    """

    choices: Choices = NO_CHOICES
    made_from: str = ""
    precision: str = ""
    settled: str = ""
    interrupted: bool = False
    timed_on: str = ""
    failed: str = ""
    front: tuple[PlannedSplit, ...] = ()

    def with_split(self, number: int) -> "TargetPlan":
        """Return the plan that builds another split of its front, which is `marked` there.

        A split says which layers are in float. The front holds those that the search found best
        between "fastest" and "most accurate", each with a number.

        Raises:
            ConfigError: the front has no such split.
        """
        split_by_number = {split.row.number: split for split in self.front}
        if number not in split_by_number:
            numbers = ", ".join(map(str, split_by_number)) or "none"
            raise ConfigError(f"a split must be one of the plan's ({numbers}), got {number}")

        choices = split_by_number[number].choices
        # a node that this plan has in float too keeps its reason, which says more
        reason = f"split {number} of the plan keeps it in float"
        own_reasons = self.choices.float_nodes
        float_nodes = {name: own_reasons.get(name, reason) for name in choices.float_nodes}
        return replace(self, choices=replace(choices, float_nodes=float_nodes)).marked(number)

    def marked(self, number: int | None) -> "TargetPlan":
        """Return the plan that says which split of its front is built.

        The row of that split alone has `taken` set, and the text `settled` describes it.

        `number`: of the split; None if the plan builds no split of its front. Then no row has
        `taken` set, and `settled` says so.
        """
        settled = _UNTRIED
        front = []
        for split in self.front:
            row = replace(split.row, taken=split.row.number == number)
            front.append(replace(split, row=row))
            if row.taken:
                layer_text = f"{row.float_layers} of {row.layers} layers in float"
                settled = f"split {number}: {layer_text}, {row.sqnr_db:.1f} dB"
        return replace(self, settled=settled, front=tuple(front))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Content of a plan file.

    Attributes:
        model: digest of the model; "" if the file has none.
        float_nodes: patterns of nodes to keep in float on every target.
        targets: target -> its plan.
    """

    model: str = ""
    float_nodes: tuple[str, ...] = ()
    targets: Mapping[str, TargetPlan] = field(default_factory=dict)


def write_plan(path: Path, plan: PlanFile) -> Path:
    """Write a plan file."""
    return atomic.write_text(path, "\n".join(_plan_lines(plan)) + "\n")


def _plan_lines(plan: PlanFile) -> Iterator[str]:
    yield "# What calib8 chose, and why. A build obeys this file where it finds it in its folder,"
    yield "# or gets it with --plan; what you change in it is obeyed too."
    yield from _key_lines({"schema": SCHEMA, "model": plan.model})
    yield f"float = {toml.toml_value(plan.float_nodes)}  # on every target"
    for name, target in plan.targets.items():
        yield from _target_lines(toml.toml_key(name), target)


def _target_lines(table: str, target: TargetPlan) -> Iterator[str]:
    """Yield the TOML lines of a target's plan: its choices, then each split of its front.

    `table`: name of the target's table, quoted.
    """
    choices = target.choices
    texts = {key: getattr(target, key) for key in _TEXT_FIELDS}
    yield from ("", f"[{table}]")
    yield from _key_lines(_without_empty(texts))
    yield from _key_lines(_method_values(choices))
    yield from ("", f"[{table}.float]")
    yield from _key_lines(choices.float_nodes)
    yield from ("", f"[{table}.methods]")
    yield from _key_lines(_method_labels(choices))
    for split in target.front:
        yield from ("", f"[[{table}.front]]")
        yield from _key_lines(_without_empty(asdict(split.row)))
        yield from _key_lines(_method_values(split.choices))
        yield f"float = {toml.toml_value(split.choices.float_nodes)}"
        yield f"methods = {_inline_table(_method_labels(split.choices))}"


def _key_lines(values: Mapping[str, str | float]) -> Iterator[str]:
    """Yield a line "key = value" for each value."""
    for key, value in values.items():
        yield f"{toml.toml_key(key)} = {toml.toml_value(value)}"


def _inline_table(values: Mapping[str, str]) -> str:
    """Return a TOML table on one line."""
    return f"{{ {', '.join(_key_lines(values))} }}" if values else "{}"


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without empty texts and marks that are not set; a number 0 stays."""
    return {key: value for key, value in values.items() if value != "" and value is not False}


def _method_values(choices: Choices) -> dict[str, str | bool]:
    """Return the keys of a table that say how ranges are found by default and weights rounded."""
    values: dict[str, str | bool] = {}
    if choices.method is not None:
        values["method"] = choices.method.label
    if choices.rounded is not None:
        values["rounded"] = choices.rounded
    return values


def _method_labels(choices: Choices) -> dict[str, str]:
    """Return tensor -> label of its own method."""
    return {tensor: method.label for tensor, method in choices.methods.items()}


def read_plan(path: Path) -> PlanFile:
    """Read a plan: keys of the model, then a table for each target.

    Raises:
        ConfigError: it cannot be read, or is not a plan.
    """
    expected_file = "a TOML file that calib8 wrote as a plan"
    data = toml.read_toml(path, what=expected_file, way_out=_BUILD_AGAIN)
    schema = data.get("schema")
    if schema != SCHEMA:
        raise ConfigError(
            f"a plan must begin with schema = {toml.toml_value(SCHEMA)}, got {path} with"
            f" {schema!r}; {_BUILD_AGAIN} to have one made"
        )
    head = convert(
        data, _Head, rule=f"{path} must be {expected_file}", error=ConfigError, way_out=_BUILD_AGAIN
    )
    head_keys = {"schema", *_Head.__struct_encode_fields__}
    targets = {}
    for name, table in data.items():
        if name not in head_keys:
            targets[name] = _read_target(path, name, table)
    return PlanFile(model=head.model, float_nodes=head.float_nodes, targets=targets)


class _Head(msgspec.Struct):
    """The keys before the tables of the targets."""

    model: str = ""
    float_nodes: tuple[str, ...] = msgspec.field(name="float", default=())


class _ChoicesTable(msgspec.Struct):
    """The keys of a table that are choices, for a target and for a split alike."""

    method: str = ""
    rounded: bool | None = None
    methods: dict[str, str] = msgspec.field(default_factory=dict)

    def to_choices(self, float_nodes: Mapping[str, str]) -> Choices:
        """Return them with these nodes in float."""
        methods = {tensor: Method.from_label(label) for tensor, label in self.methods.items()}
        return Choices(
            float_nodes=float_nodes,
            method=Method.from_label(self.method) if self.method else None,
            rounded=self.rounded,
            methods=methods,
        )


class _SplitTable(_ChoicesTable):
    """The choices of a split; the other keys of its table are those of `SplitRow`."""

    float_nodes: tuple[str, ...] = msgspec.field(name="float", default=())


class _TargetTable(_ChoicesTable, forbid_unknown_fields=True):
    """The table of a target; an unknown key is a slip of the user's."""

    made_from: str = ""
    precision: str = ""
    timed_on: str = ""
    settled: str = ""
    failed: str = ""
    float_nodes: dict[str, str] = msgspec.field(name="float", default_factory=dict)
    front: tuple[_SplitTable, ...] = ()
    # of earlier versions, not used any more
    unusable: str = ""
    doubtful: str = ""
    tried: tuple[dict[str, Any], ...] = ()


class _RowsTable(msgspec.Struct):
    """The figures in the front of a target's table."""

    front: tuple[SplitRow, ...] = ()


def _read_target(path: Path, name: str, table: object) -> TargetPlan:
    """Return the plan of a target from its TOML table.

    `path`, `name`: file and name of the table, for messages.
    """
    # a table of the front holds both the choices of a split and its row of figures. Each of the two
    # classes reads its own keys of it and skips the others, so the table is read twice
    rule = f"[{name}] of {path} must be the plan of a target"
    target_table = convert(table, _TargetTable, rule=rule, error=ConfigError, way_out=_BUILD_AGAIN)
    rows = convert(table, _RowsTable, rule=rule, error=ConfigError, way_out=_BUILD_AGAIN).front

    front = []
    for row, split_table in zip(rows, target_table.front, strict=True):
        # the file has no reasons for the nodes of a split: `with_split` gives them
        choices = split_table.to_choices(dict.fromkeys(split_table.float_nodes, ""))
        front.append(PlannedSplit(row=row, choices=choices))
    texts = {key: getattr(target_table, key) for key in _TEXT_FIELDS}
    choices = target_table.to_choices(target_table.float_nodes)
    return TargetPlan(choices=choices, front=tuple(front), **texts)
