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
    rounded = true                   weights rounded by output error
    float = { "/model.1/conv/Conv" = "alone in int8 it leaves 4.4 dB of output0[4:22]" }
    methods = { "tensor" = "mse" }

    [[onnxruntime.front]]            what else could be built: --split 2
    number = 2
    float_layers = 3
    time = 0.44                      share of the float model's
    sqnr_db = 27.0
    float = ["/model.1/conv/Conv"]

A choice by time would differ on a busier day; with the file, the same bytes are built again.

Also here: the reason why each node stays float, in a sentence for the report and the plan.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from deploy.errors import ConfigError, did_you_mean
from deploy.files import atomic, toml
from deploy.files.reading import convert
from deploy.method import NO_CHOICES, Choices, Method
from deploy.tuning.prices import Prices, Units
from deploy.tuning.search_options import Trial
from deploy.tuning.sensitivity import Sensitivity

SCHEMA = "calib8-plan/1"
_AGAIN = "build again without it"
_TEXTS = ("precision", "timed_on", "settled", "failed")
_FIGURES = ("number", "float_layers", "layers", "time", "size", "sqnr_db")
_SPLIT_FIELDS = (*_FIGURES, "is_timed", "taken", "figure", "level")

# why a node is float
NOISE, TIME, CONSEQUENCE, RULE = "noise", "time", "consequence", "rule"
BETWEEN = "converting to float and back would cost more than int8 saves"
NO_ADDS: Mapping[str, str] = MappingProxyType({})
_NOISY, _SLOWER = "alone in ", "slower in int8"
_DECIBEL = re.compile(r"leaves (-?(?:[0-9.]+|inf)) dB of")
_MIN_NOISE_SHARE = 0.02  # of all noise: a layer with less is not float for its noise
_NO_NOISE_DB = 60.0  # nor is one that leaves more, whatever its share


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """A split of the front; its figures are those of the report's `SplitRow`."""

    number: int  # what --split takes
    float_layers: int
    layers: int
    time: float
    size: float
    sqnr_db: float
    is_timed: bool = False
    figure: str = ""
    level: str = ""
    taken: bool = False
    choices: Choices = NO_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """What was chosen for one target."""

    choices: Choices
    made_from: str = ""  # digest of all that the choice depends on; "" for a plan written by hand
    precision: str = ""  # "int8" or "fp8", the grid it was chosen for; "" if unknown
    settled: str = ""  # description of the trial that was built
    interrupted: bool = False  # whether the user ended the search; not in the file
    timed_on: str = ""  # CPU whose times decided; "" where no time did
    # number of trials that could not run and why the first could not; "" where all ran
    failed: str = ""
    front: tuple[PlannedSplit, ...] = ()  # what can be built, the fastest first

    def with_split(self, number: int) -> "TargetPlan":
        """Return the plan that builds another split of the front.

        Raises:
            ConfigError: the front has no such split.
        """
        split = next((split for split in self.front if split.number == number), None)
        if split is None:
            numbers = ", ".join(str(split.number) for split in self.front) or "none"
            raise ConfigError(f"a split must be one of the plan's, {numbers}, got {number}")
        reason = f"split {number} of the plan keeps it in float"
        known_reasons = self.choices.float_nodes
        float_nodes = {name: known_reasons.get(name, reason) for name in split.choices.float_nodes}
        return replace(
            self,
            choices=replace(split.choices, float_nodes=float_nodes),
            settled=f"split {number}: {split.float_layers} of {split.layers} layers in float,"
            f" {split.sqnr_db:.1f} dB",
            front=tuple(replace(one, taken=one.number == number) for one in self.front),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Content of a plan file."""

    model: str = ""  # digest of the model; "" if the file has none
    float_nodes: tuple[str, ...] = ()  # patterns of nodes to keep in float on every target
    targets: Mapping[str, TargetPlan] = field(default_factory=dict)  # target -> its plan


def write_plan(path: Path, plan: PlanFile) -> Path:
    """Write a plan file."""
    return atomic.write_text(path, "\n".join(_lines(plan)) + "\n")


def _lines(plan: PlanFile) -> Iterator[str]:
    yield "# What calib8 chose, and why. A build obeys this file where it finds it in its folder,"
    yield "# or gets it with --plan; what you change in it is obeyed too."
    yield f"schema = {toml.toml_value(SCHEMA)}"
    yield f"model = {toml.toml_value(plan.model)}"
    yield f"float = {toml.toml_value(plan.float_nodes)}  # on every target"
    for name, target in plan.targets.items():
        table, choices = toml.toml_key(name), target.choices
        yield from ("", f"[{table}]", f"made_from = {toml.toml_value(target.made_from)}")
        yield from _pairs({key: text for key in _TEXTS if (text := getattr(target, key))})
        yield from _method_lines(choices)
        yield from ("", f"[{table}.float]")
        yield from _pairs(choices.float_nodes)
        yield from ("", f"[{table}.methods]")
        yield from _pairs({tensor: method.label for tensor, method in choices.methods.items()})
        for split in target.front:
            yield from ("", f"[[{table}.front]]")
            yield from _split_lines(split)


def _method_lines(choices: Choices) -> Iterator[str]:
    if choices.method is not None:
        yield from _pairs({"method": choices.method.label})
    if choices.rounded is not None:
        yield from _pairs({"rounded": choices.rounded})


def _split_lines(split: PlannedSplit) -> Iterator[str]:
    yield from _pairs({key: getattr(split, key) for key in _FIGURES})
    for key in _SPLIT_FIELDS[len(_FIGURES) :]:
        if getattr(split, key):
            yield from _pairs({key: getattr(split, key)})
    yield from _method_lines(split.choices)
    yield f"float = {toml.toml_value(split.choices.float_nodes)}"
    methods = [
        f"{toml.toml_key(tensor)} = {toml.toml_value(method.label)}"
        for tensor, method in split.choices.methods.items()
    ]
    yield f"methods = {{ {', '.join(methods)} }}" if methods else "methods = {}"


def _pairs(table: Mapping[str, str | float]) -> Iterator[str]:
    return (f"{toml.toml_key(name)} = {toml.toml_value(value)}" for name, value in table.items())


def read_plan(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        ConfigError: it cannot be read, or is not a plan.
    """
    what = "a TOML file that calib8 wrote as a plan"
    data = toml.read_toml(path, what=what, way_out=_AGAIN)
    if data.get("schema") != SCHEMA:
        raise ConfigError(
            f"a plan must begin with schema = {toml.toml_value(SCHEMA)}, got {path} with"
            f" {data.get('schema')!r}; {_AGAIN} to have one made"
        )
    head = convert(data, _Head, rule=f"{path} must be {what}", error=ConfigError, way_out=_AGAIN)
    known = {"schema", *_Head.__struct_encode_fields__}
    tables = {name: table for name, table in data.items() if name not in known}
    return PlanFile(
        model=head.model,
        float_nodes=head.float_nodes,
        targets={name: _target(path, name, table) for name, table in tables.items()},
    )


class _Head(msgspec.Struct):
    model: str = ""
    float_nodes: tuple[str, ...] = msgspec.field(name="float", default=())


class _Choices(msgspec.Struct):
    """The choices in a table."""

    method: str = ""
    rounded: bool | None = None
    methods: dict[str, str] = msgspec.field(default_factory=dict)

    def choices(self, float_nodes: Mapping[str, str]) -> Choices:
        """Return them with these nodes in float."""
        methods = {tensor: Method.from_label(label) for tensor, label in self.methods.items()}
        return Choices(
            float_nodes=float_nodes,
            method=Method.from_label(self.method) if self.method else None,
            rounded=self.rounded,
            methods=methods,
        )


class _Split(_Choices):
    """A table of the front."""

    number: int = 0
    float_layers: int = 0
    layers: int = 0
    time: float = 1.0
    size: float = 1.0
    sqnr_db: float = 0.0
    is_timed: bool = False
    figure: str = ""
    level: str = ""
    taken: bool = False
    float_nodes: tuple[str, ...] = msgspec.field(name="float", default=())


class _Table(_Choices):
    """The table of a target."""

    made_from: str = ""
    precision: str = ""
    timed_on: str = ""
    settled: str = ""
    failed: str = ""
    float_nodes: dict[str, str] = msgspec.field(name="float", default_factory=dict)
    front: tuple[_Split, ...] = ()
    # of earlier versions, not used any more
    unusable: str = ""
    doubtful: str = ""
    tried: tuple[dict[str, Any], ...] = ()


def _target(path: Path, name: str, table: object) -> TargetPlan:
    known_keys = _Table.__struct_encode_fields__
    for key in table if isinstance(table, dict) else ():
        if key not in known_keys:
            remedy = did_you_mean(key, known_keys, f"it has {', '.join(known_keys)}")
            raise ConfigError(f"[{name}] of a plan has no {key!r}, got one in {path}; {remedy}")
    rule = f"[{name}] of {path} must be the plan of a target"
    target = convert(table, _Table, rule=rule, error=ConfigError, way_out=_AGAIN)
    front = []
    for split in target.front:
        choices = split.choices(dict.fromkeys(split.float_nodes, ""))
        figures = {key: getattr(split, key) for key in _SPLIT_FIELDS}
        front.append(PlannedSplit(choices=choices, **figures))
    return TargetPlan(
        choices=target.choices(target.float_nodes),
        made_from=target.made_from,
        front=tuple(front),
        **{key: getattr(target, key) for key in _TEXTS},
    )


def float_reasons(
    built: Trial,
    units: Units,
    prices: Prices,
    sensitivity: Sensitivity | None,
    precision: str,
    refused: Collection[str] = (),
    *,
    adds: Mapping[str, str] = NO_ADDS,
) -> dict[str, str]:
    """Return node in float -> reason, in the model's order.

    Args:
        built: the trial that is built.
        units: of the model.
        prices: of the units.
        sensitivity: noise of the groups, each alone in int8.
        precision: of the nodes that are not float.
        refused: units that cannot run in it.
        adds: units of Adds that stay float for their common loss -> the reason.
    """
    reasons: dict[str, str] = {}
    for unit, nodes in units.members.items():
        if unit not in built.in_float:
            continue
        reason = (
            adds.get(unit)
            or _noise_reason(unit, sensitivity, precision)
            or _time_reason(unit, prices)
            or BETWEEN
        )
        if unit in refused:
            reason = f"it cannot be run in {precision}"
        reasons.update(dict.fromkeys(nodes, reason))
    return reasons


def reason_kind(reason: str) -> str:
    """Return the kind of a reason: NOISE, TIME or CONSEQUENCE by the search, else RULE."""
    if reason.startswith(_NOISY):
        return NOISE
    if reason.startswith(_SLOWER):
        return TIME
    return CONSEQUENCE if reason == BETWEEN else RULE


def reason_sqnr_db(reason: str) -> float:
    """Return the SQNR in dB in a reason of kind NOISE; inf where there is none."""
    match = _DECIBEL.search(reason)
    try:
        return float(match[1]) if match else math.inf
    except ValueError:  # edited by hand
        return math.inf


def _noise_reason(unit: str, sensitivity: Sensitivity | None, precision: str) -> str:
    """Return the reason by the noise of the unit, or of its group; "" where it is small."""
    if sensitivity is None:
        return ""
    total = sum(noise.worst for noise in sensitivity.groups.values())
    for group, noise in sensitivity.groups.items():
        is_noisy = noise.worst > _MIN_NOISE_SHARE * total and noise.db < _NO_NOISE_DB
        if unit in group and is_noisy:
            subject = "it" if len(group) == 1 else f"its group of {len(group)} layers"
            sqnr_db = round(noise.db, 1) + 0.0  # never -0.0
            return f"{_NOISY}{precision} {subject} leaves {sqnr_db:.1f} dB of {noise.worst_slice}"
    return ""


def _time_reason(unit: str, prices: Prices) -> str:
    """Return the reason by the time of the unit; "" where int8 is no slower, or not timed."""
    int8, float32 = prices.units[unit]
    if not prices.measured or int8 <= float32:
        return ""
    return f"{_SLOWER}: {int8:.0f} us, {float32:.0f} us in float"
