"""The plan file `<name>.plan.toml`: the choices for each target and the reasons, to edit and obey.

::

    schema = "calib8-plan/1"
    model = "sha256 of graph and weights"
    float = ["/model.22/*"]          on every target; patterns as --keep-float takes them

    [onnxruntime]
    made_from = "..."                what the choice depends on; equal ones are not searched again
    precision = "int8"               grid that it was chosen for; --plan obeys it on no other
    timed_on = "AMD EPYC ..."        CPU whose times decided; the plan is searched anew on another
    method = "minmax"
    rounded = true                   weights rounded by output error
    float = { "/model.1/conv/Conv" = "alone in int8 it leaves 4.4 dB of output0[4:22]" }
    methods = { "tensor" = "mse" }

A choice by time would differ on a busier day; with the file, the same bytes are built again.

Also here: the reason why each node stays float, in a sentence for the report and the plan.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from deploy.errors import ConfigError, did_you_mean
from deploy.files import atomic, toml
from deploy.files.reading import convert
from deploy.method import Choices, Method
from deploy.tuning.prices import Prices, Units
from deploy.tuning.search import Sensitivity
from deploy.tuning.search_options import Trial

SCHEMA = "calib8-plan/1"
_SETTLED = re.compile(r"(.*): (-?(?:[0-9]+[.][0-9]+|inf)) dB(?: in .*)?")  # `settled`
TIMED = "timed: "  # prefix of the trials that were timed next to the float model
_AGAIN = "build again without it"
_TEXTS = ("precision", "timed_on", "settled", "unusable", "doubtful", "failed")
_ROUNDED = 0.06  # dB, largest difference of a figure with one decimal and the same with two

# why a node is float
NOISE, TIME, CONSEQUENCE, RULE = "noise", "time", "consequence", "rule"
BETWEEN = "to and fro would cost more than it wins"
NO_SUMS: Mapping[str, str] = MappingProxyType({})
_NOISY, _SLOWER = "alone in ", "slower in int8"
_DECIBEL = re.compile(r"leaves (-?(?:[0-9.]+|inf)) dB of")
_SHARE = 0.02  # of all noise: a layer with less is not float for its noise
_NOTHING_DB = 60.0  # nor is one that leaves more, whatever its share


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """What was chosen for one target."""

    choices: Choices
    made_from: str = ""  # digest of all that the choice depends on; "" for a plan written by hand
    precision: str = ""  # "int8" or "fp8", the grid it was chosen for; "" if unknown
    settled: str = ""  # description of the trial that was built
    unusable: str = ""  # why the trial of least cost was not built; "" where it was
    doubtful: str = ""  # why the trial of least cost, though usable, was not built; "" where it was
    interrupted: bool = False  # whether the user ended the search; not in the file
    timed_on: str = ""  # CPU whose times decided; "" where no time did
    # number of trials that could not run and why the first could not; "" where all ran
    failed: str = ""
    tried: tuple[Mapping[str, str | float], ...] = ()
    # splits that can be built, the fastest first; keys are the fields of the report's `SplitRow`
    front: tuple[Mapping[str, str | float], ...] = ()

    @property
    def taken(self) -> int | None:
        """Index in `tried` of the trial that was built; None if unknown.

        Of equal descriptions the last is taken: timed trials come after predicted ones.
        """
        said = _SETTLED.fullmatch(self.settled)
        if said is None:
            return None
        places = [place for place, one in enumerate(self.tried) if _matches(one, said[1], said[2])]
        return places[-1] if places else None


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
        if choices.method is not None:
            yield from _pairs({"method": choices.method.label})
        if choices.rounded is not None:
            yield from _pairs({"rounded": choices.rounded})
        yield from ("", f"[{table}.float]")
        yield from _pairs(choices.float_nodes)
        yield from ("", f"[{table}.methods]")
        yield from _pairs({tensor: method.label for tensor, method in choices.methods.items()})
        for trial in target.tried:
            yield from ("", f"[[{table}.tried]]")
            yield from _pairs(trial)


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


class _Table(msgspec.Struct):
    """The table of a target."""

    made_from: str = ""
    precision: str = ""
    timed_on: str = ""
    settled: str = ""
    unusable: str = ""
    doubtful: str = ""
    failed: str = ""
    method: str = ""
    rounded: bool | None = None
    float_nodes: dict[str, str] = msgspec.field(name="float", default_factory=dict)
    methods: dict[str, str] = msgspec.field(default_factory=dict)
    tried: tuple[dict[str, Any], ...] = ()


def _target(path: Path, name: str, table: object) -> TargetPlan:
    known = _Table.__struct_encode_fields__
    for key in table if isinstance(table, dict) else ():
        if key not in known:
            way = did_you_mean(key, known, f"it has {', '.join(known)}")
            raise ConfigError(f"[{name}] of a plan has no {key!r}, got one in {path}; {way}")
    rule = f"[{name}] of {path} must be the plan of a target"
    held = convert(table, _Table, rule=rule, error=ConfigError, way_out=_AGAIN)
    return TargetPlan(
        choices=Choices(
            float_nodes=held.float_nodes,
            method=Method.from_label(held.method) if held.method else None,
            rounded=held.rounded,
            methods={tensor: Method.from_label(label) for tensor, label in held.methods.items()},
        ),
        made_from=held.made_from,
        tried=tuple(  # without values of types that calib8 does not write
            {key: kept for key, value in row.items() if (kept := _figure(value)) is not None}
            for row in held.tried
        ),
        **{key: getattr(held, key) for key in _TEXTS},
    )


def _figure(value: object) -> str | float | None:
    """Return a text or a number as it is; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _matches(tried: Mapping[str, str | float], what: str, db: str) -> bool:
    """Whether a row of `tried` has this description and SQNR."""
    words, figure = tried.get("what"), tried.get("sqnr_db")
    if not isinstance(words, str) or not isinstance(figure, float):
        return False
    near = figure == float(db) or abs(figure - float(db)) <= _ROUNDED
    return words.removeprefix(TIMED) == what and near


def float_reasons(
    best: Trial,
    units: Units,
    prices: Prices,
    found: Sensitivity | None,
    word: str,
    refused: Collection[str] = (),
    *,
    sums: Mapping[str, str] = NO_SUMS,
) -> dict[str, str]:
    """Return node in float -> reason, in the model's order.

    `best`: the trial that is built. `found`: noise of the groups, each alone in int8. `word`:
    precision of the nodes that are not float. `refused`: units that cannot run in it. `sums`: units
    of Adds that stay float for their common loss -> the reason.
    """
    why = {
        unit: f"it cannot be run in {word}"
        if unit in refused
        else sums.get(unit) or _noise(unit, found, word) or _time(unit, prices) or BETWEEN
        for unit in units.members
        if unit in best.in_float
    }
    return {node: why[unit] for unit in why for node in units.members[unit]}


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


def _noise(unit: str, found: Sensitivity | None, word: str) -> str:
    """Return the reason by the noise of the unit, or of its group; "" where it is small."""
    if found is None:
        return ""
    total = sum(noise.worst for noise in found.groups.values())
    for group, noise in found.groups.items():
        if unit in group and noise.worst > _SHARE * total and noise.db < _NOTHING_DB:
            whose = "it" if len(group) == 1 else f"its group of {len(group)} layers"
            left = round(noise.db, 1) + 0.0  # never -0.0
            return f"{_NOISY}{word} {whose} leaves {left:.1f} dB of {noise.worst_slice}"
    return ""


def _time(unit: str, prices: Prices) -> str:
    int8, float32 = prices.units[unit]
    if not prices.measured or int8 <= float32:
        return ""
    return f"{_SLOWER}: {int8:.0f} us, {float32:.0f} us in float"
