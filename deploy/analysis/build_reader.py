"""Reads a build's report and plan into an `Explanation`; every JSON value is checked when read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.analysis.explanation import (
    ClippedRange,
    Explanation,
    FloatNodeGroup,
    TargetExplanation,
    TensorAccuracy,
)
from deploy.errors import ConfigError
from deploy.files.reading import read_json
from deploy.method import NO_CHOICES
from deploy.pipeline.results import trial_rows
from deploy.report import NodeRow, TrialRow
from deploy.report.model import SCHEMA
from deploy.report.tables import PLAN
from deploy.tuning.plan_file import (
    CONSEQUENCE,
    NOISE,
    RULE,
    TIME,
    WHOLE,
    PlanFile,
    TargetPlan,
    read_plan,
    reason_kind,
    reason_sqnr_db,
)
from deploy.tuning.repairs import REPAIRS

_MOST = 1 << 30  # bytes of a report, which has a row for every tensor
_ORDER = (NOISE, TIME, CONSEQUENCE, WHOLE, RULE)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """One object of a JSON file.

    Attributes:
        held: its keys and values.
        place: its path in the file, such as targets[0].nodes[3].
        path: the file.
    """

    held: dict[str, object]
    place: str
    path: Path

    def text(self, key: str, default: str = "") -> str:
        """Return a string, or the default if it is missing.

        Raises:
            ConfigError: it has another type, as in the other methods.
        """
        value = self.held.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._error(key, "a string", value)
        return value

    def number(self, key: str) -> float | None:
        """Return a float, also for the strings of inf and NaN in JSON; None if it is missing."""
        value = self.held.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._error(key, "a number", value)
        try:
            return float(value)
        except (ValueError, OverflowError) as error:
            raise self._error(key, "a number", value) from error

    def flag(self, key: str) -> bool:
        """Return a boolean, False if it is missing."""
        value = self.held.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self.held.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._error(key, "a list of strings", value)
        return tuple(value)

    def part(self, key: str) -> JsonObject | None:
        """Return an object; None if it is missing."""
        value = self.held.get(key)
        return None if value is None else self._fields(value, self._place_of(key))

    def rows(self, key: str) -> list[JsonObject]:
        """Return a list of objects."""
        value = self.held.get(key, [])
        if not isinstance(value, list):
            raise self._error(key, "a list", value)
        return [self._fields(one, f"{self._place_of(key)}[{i}]") for i, one in enumerate(value)]

    def _fields(self, value: object, place: str) -> JsonObject:
        if not isinstance(value, dict):
            raise ConfigError(_message(place, "an object", value, self.path))
        return JsonObject(value, place, self.path)

    def _place_of(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _error(self, key: str, rule: str, value: object) -> ConfigError:
        return ConfigError(_message(self._place_of(key), rule, value, self.path))


def read_json_object(path: Path, schema: str) -> JsonObject:
    """Read a JSON file of this schema.

    Raises:
        ConfigError: it cannot be read, or has another schema.
    """
    what = "the report of a build to explain, as calib8 wrote it"
    held = read_json(path, what=what, error=ConfigError, most=_MOST)
    found = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(held, dict) or found != schema:
        raise ConfigError(
            f"a report must be of schema {schema}, got {_short(found)} in {path}; build again with"
            " this calib8"
        )
    return JsonObject(held, "", path)


def _message(place: str, rule: str, value: object, path: Path) -> str:
    return f"{place} of a report must be {rule}, got {_short(value)} in {path}; build again"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_explanation(folder: Path) -> Explanation:
    """Read the report and the plan of a build.

    Args:
        folder: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or a broken report or plan.
    """
    path = folder if folder.suffix == ".json" else folder / "report.json"
    if not is_file(path):
        raise ConfigError(
            f"a build to explain must be a folder that `calib8 build` wrote, got {folder} without"
            " a report.json; build first, or name the folder that --out named"
        )
    report = read_json_object(path, SCHEMA)
    plan_path = _plan_path(report)
    plan = PlanFile() if plan_path is None else read_plan(plan_path)
    model, feed = report.part("model"), report.part("feed")
    preprocess = feed.part("preprocess") if feed else None
    notes = report.texts("notes")
    int8 = [e for e in report.rows("engines") if not (e.flag("reference") or e.flag("baseline"))]
    engines = {e.text("target"): e for e in int8}
    return Explanation(
        title=report.text("title"),
        report=str(path),
        plan=str(plan_path) if plan_path else None,
        model=model.text("path") if model else "",
        preprocess=preprocess.held if preprocess else {},
        targets=tuple(
            _target(row, engines.get(row.text("name")), plan, notes)
            for row in report.rows("targets")
        ),
    )


def path_in_build(written: str, report: Path) -> Path:
    """Return the path of a file of the build, in the report's folder even if that was moved.

    Another build may be at the path in the report by now.
    """
    return report.parent / Path(written).name


def path_near_report(written: str, report: Path) -> Path:
    """Return the path of a file outside the build: as in the report, or in the report's folder."""
    path = Path(written)
    return path if os.path.exists(path) else report.parent / path.name


def is_file(path: Path) -> bool:
    """Whether the file exists; False for names that no file can have, where pathlib raises."""
    return os.path.isfile(path)


def _plan_path(report: JsonObject) -> Path | None:
    named = [row.text("path") for row in report.rows("files") if row.text("role") == PLAN]
    path = path_in_build(named[0], report.path) if named else None
    return path if path is not None and is_file(path) else None


def _target(
    row: JsonObject, engine: JsonObject | None, plan: PlanFile, notes: tuple[str, ...]
) -> TargetExplanation:
    name = row.text("name")
    verdict = engine.part("verdict") if engine else None
    accuracy = engine.part("accuracy") if engine else None
    task = accuracy.part("task") if accuracy else None
    own = plan.targets.get(name, TargetPlan(choices=NO_CHOICES))
    settled, tried = _chosen_and_tried(row.part("search"), own)
    nodes = [_node(one) for one in row.rows("nodes")]
    runnable = row.text("runnable") or None
    return TargetExplanation(
        name=name,
        error=row.text("error"),
        level=verdict.text("level") if verdict else "",
        reasons=verdict.texts("reasons") if verdict else (),
        parts=_losses(accuracy, "parts", "label") or _losses(accuracy, "outputs", "name"),
        task=task.text("words") if task else "",
        nodes=len(nodes),
        kept=tuple(_float_groups(nodes)),
        layers=_losses(row, "layers", "name"),
        repairs=tuple(_repair_notes((*notes, *row.texts("notes")))),
        settled=settled,
        tried=tried,
        methods={tensor: method.label for tensor, method in own.choices.methods.items()},
        clipped=tuple(_clipped_ranges(row)),
        runnable=runnable,
        native=engine is not None and runnable is not None and engine.text("path") == runnable,
    )


def _node(row: JsonObject) -> NodeRow:
    return NodeRow(
        name=row.text("name"),
        op=row.text("op"),
        precision=row.text("precision", "int8"),
        reason=row.text("reason"),
    )


def _chosen_and_tried(
    search: JsonObject | None, own: TargetPlan
) -> tuple[str, tuple[TrialRow, ...]]:
    """Return the chosen trial and all trials, from the report or else from the plan."""
    if search is None:
        return own.settled, tuple(trial_rows(own))
    rows = tuple(
        TrialRow(
            what=one.text("what"),
            sqnr_db=_nan_if_none(one.number("sqnr_db")),
            time=_nan_if_none(one.number("time")),
            taken=one.flag("taken"),
        )
        for one in search.rows("tried")
    )
    return search.text("settled"), rows


def _losses(held: JsonObject | None, key: str, name: str) -> tuple[TensorAccuracy, ...]:
    """Return the rows sorted by SQNR, lowest first; NaN comes before all."""
    rows = [
        TensorAccuracy(
            name=row.text(name),
            sqnr_db=_nan_if_none(row.number("sqnr_db")),
            cosine_mean=_nan_if_none(row.number("cosine_mean")),
            cosine_min=_nan_if_none(row.number("cosine_min")),
        )
        for row in (held.rows(key) if held else ())
    ]
    return tuple(sorted(rows, key=lambda loss: by_sqnr(loss.sqnr_db)))


def by_sqnr(decibels: float) -> float:
    """Return a sort key: lowest SQNR first, NaN before all."""
    return -math.inf if math.isnan(decibels) else decibels


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value


def _float_groups(nodes: Iterable[NodeRow]) -> Iterator[FloatNodeGroup]:
    """Yield float nodes grouped by reason, those kept by a rule also by operator.

    Noise comes first, the lowest SQNR before the others; then time, then the rest.
    """
    groups: dict[tuple[str, str], list[NodeRow]] = {}
    for node in nodes:
        if not node.quantized:
            alone = reason_kind(node.reason) in (NOISE, TIME)  # such a reason belongs to one unit
            groups.setdefault((node.reason, "" if alone else node.op), []).append(node)
    order = sorted(
        groups, key=lambda key: (_ORDER.index(reason_kind(key[0])), reason_sqnr_db(key[0]))
    )
    for key in order:
        yield FloatNodeGroup(
            kind=reason_kind(key[0]),
            reason=key[0],
            operators=tuple(dict.fromkeys(node.op for node in groups[key])),
            nodes=tuple(node.name for node in groups[key]),
        )


def _repair_notes(notes: Iterable[str]) -> Iterator[str]:
    """Return the notes on repairs, which begin with the repair's words."""
    words = [repair.words for repair in REPAIRS.values()]
    return (note for note in notes if any(f"{one}: " in note for one in words))


def _clipped_ranges(row: JsonObject) -> Iterator[ClippedRange]:
    found = []
    for tensor in row.rows("tensors"):
        share = tensor.number("clipped")
        if share is not None and share > 0:
            ends = [
                _nan_if_none(tensor.number(key))
                for key in ("observed_min", "observed_max", "lo", "hi")
            ]
            found.append(
                ClippedRange(
                    tensor=tensor.text("name"),
                    share=share,
                    seen=(ends[0], ends[1]),
                    kept=(ends[2], ends[3]),
                )
            )
    return iter(sorted(found, key=lambda one: -one.share))
