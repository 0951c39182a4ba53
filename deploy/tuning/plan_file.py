"""`<name>.plan.toml`: what was chosen for each target and why, to be read, edited, and obeyed.

::

    schema = "calib8-plan/1"
    model = "sha256 of graph and weights"
    float = ["/model.22/*"]          on every target; patterns as --keep-float takes them

    [onnxruntime]
    made_from = "..."                what the choice depends on; equal ones are not searched again
    precision = "int8"               grid that it was chosen for; --plan obeys it on no other
    method = "minmax"
    rounded = true                   weights rounded by output error
    float = { "/model.1/conv/Conv" = "alone in int8 it leaves 4.4 dB of output0[4:22]" }
    methods = { "tensor" = "mse" }

A choice by time would come out differently on a busier day; with the file, the same bytes are built
again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy import atomic
from deploy.calibration.choices import Choices
from deploy.calibration.search import Method
from deploy.errors import ConfigError
from deploy.reading import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = "calib8-plan/1"
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SETTLED = re.compile(r"(.*): (-?(?:[0-9]+[.][0-9]+|inf)) dB(?: in .*)?")  # as `tuned` writes it
TIMED = "timed: "  # before the words of what was timed beside the float model
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*')
_MOST_DOTS = 64
_ROUNDED = 0.06  # dB between a figure of one decimal and the same of two


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """What was chosen for one target.

    Attributes:
        choices: nodes in float, methods.
        made_from: digest of all that the choice depends on; "" for one that was written by hand.
        precision: "int8" or "fp8", what it was chosen for; "" where that is not said.
        settled: what came of it, in words.
        tried: what was tried, in words and figures.
    """

    choices: Choices
    made_from: str = ""
    precision: str = ""
    settled: str = ""
    tried: tuple[Mapping[str, str | float], ...] = ()

    @property
    def taken(self) -> int | None:
        """Place in `tried` of what was built; None where it is the float model, or not told.

        Of equal words the last is meant: what was timed stands behind what was predicted.
        """
        said = _SETTLED.fullmatch(self.settled)
        if said is None:
            return None
        places = [place for place, one in enumerate(self.tried) if _is(one, said[1], said[2])]
        return places[-1] if places else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A whole file.

    Attributes:
        model: digest of the model; "" where the file names none.
        float_nodes: patterns of nodes to keep in float on every target.
        targets: target -> what was chosen for it.
    """

    model: str = ""
    float_nodes: tuple[str, ...] = ()
    targets: Mapping[str, TargetPlan] = field(default_factory=dict)


def write_plan(path: Path, plan: PlanFile) -> Path:
    """Write the file."""
    return atomic.write_text(path, "\n".join(_lines(plan)) + "\n")


def _lines(plan: PlanFile) -> Iterator[str]:
    yield "# What calib8 chose, and why. A build obeys this file where it finds it in its folder,"
    yield "# or gets it with --plan; what you change in it is obeyed too."
    yield f"schema = {_word(SCHEMA)}"
    yield f"model = {_word(plan.model)}"
    yield f"float = [{', '.join(map(_word, plan.float_nodes))}]  # on every target"
    for name, target in plan.targets.items():
        table = _key(name)
        yield from ("", f"[{table}]", f"made_from = {_word(target.made_from)}")
        if target.precision:
            yield f"precision = {_word(target.precision)}"
        if target.settled:
            yield f"settled = {_word(target.settled)}"
        if target.choices.method is not None:
            yield f"method = {_word(target.choices.method.label)}"
        if target.choices.rounded is not None:
            yield f"rounded = {str(target.choices.rounded).lower()}"
        yield from ("", f"[{table}.float]")
        yield from (f"{_key(n)} = {_word(why)}" for n, why in target.choices.float_nodes.items())
        yield from ("", f"[{table}.methods]")
        yield from (f"{_key(t)} = {_word(m.label)}" for t, m in target.choices.methods.items())
        for trial in target.tried:
            yield from ("", f"[[{table}.tried]]")
            yield from (f"{_key(key)} = {_word(value)}" for key, value in trial.items())


def _word(value: str | float) -> str:
    """A string of TOML, which is one of JSON, or a number."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _word(name)


def read_plan(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        ConfigError: it cannot be read, or is no plan.
    """
    what = "a TOML file that calib8 wrote as a plan"
    text = read_text(path, what=what, error=ConfigError, own=True)
    if _tangled(text):
        raise ConfigError(f"{path} must be {what}, got keys of over {_MOST_DOTS} dots; build again")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be {what}, got: {error}; build again without it") from error
    if data.get("schema") != SCHEMA:
        raise ConfigError(
            f"a plan must begin with schema = {_word(SCHEMA)}, got {path} with"
            f" {data.get('schema')!r}; build again without it to have one made"
        )
    known = {"schema", "model", "float"}
    tables = {name: table for name, table in data.items() if name not in known}
    return PlanFile(
        model=_text(path, data, "model"),
        float_nodes=tuple(_texts(path, data, "float")),
        targets={name: _target(path, name, table) for name, table in tables.items()},
    )


def _tangled(text: str) -> bool:
    """Whether a line has a dotted key of a depth that takes Python's reader of TOML minutes.

    Strings that go over several lines, which calib8 does not write, could hide one.
    """
    plain = _QUOTED.sub("k", text)
    return '"""' in text or any(line.count(".") > _MOST_DOTS for line in plain.split("\n"))


def _target(path: Path, name: str, table: object) -> TargetPlan:
    held = _table(path, name, table)
    method = _text(path, held, "method")
    floats = _table(path, f"{name}.float", held.get("float", {}))
    methods = _table(path, f"{name}.methods", held.get("methods", {}))
    return TargetPlan(
        choices=Choices(
            float_nodes={str(node): str(why) for node, why in floats.items()},
            method=Method.labelled(method) if method else None,
            rounded=_flag(path, held, "rounded"),
            methods={str(tensor): Method.labelled(str(m)) for tensor, m in methods.items()},
        ),
        made_from=_text(path, held, "made_from"),
        precision=_text(path, held, "precision"),
        settled=_text(path, held, "settled"),
        tried=tuple(_rows(path, held)),
    )


def _rows(path: Path, table: Mapping[str, Any]) -> Iterator[dict[str, str | float]]:
    """What was tried; values of other kinds than calib8 writes are left out."""
    rows = table.get("tried", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"tried of a plan must be a list of tables, got {rows!r} in {path}")
    for row in rows:
        yield {key: kept for key, value in row.items() if (kept := _figure(value)) is not None}


def _figure(value: object) -> str | float | None:
    """Words or a number; None of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is(tried: Mapping[str, str | float], what: str, db: str) -> bool:
    """Whether a row is the one that these words tell of."""
    words, figure = tried.get("what"), tried.get("sqnr_db")
    if not isinstance(words, str) or not isinstance(figure, float):
        return False
    near = figure == float(db) or abs(figure - float(db)) <= _ROUNDED
    return words.removeprefix(TIMED) == what and near


def _table(path: Path, name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"[{name}] of a plan must be a table, got {value!r} in {path}")
    return value


def _text(path: Path, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key} of a plan must be a string, got {value!r} in {path}")
    return value


def _flag(path: Path, table: Mapping[str, Any], key: str) -> bool | None:
    value = table.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{key} of a plan must be true or false, got {value!r} in {path}")
    return value


def _texts(path: Path, table: Mapping[str, Any], key: str) -> list[str]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{key} of a plan must be a list of strings, got {value!r} in {path}")
    return value
