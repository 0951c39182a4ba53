"""Reads a stored build: its report, its options, and its plan for an `Explanation`.

The JSON may have been edited: msgspec checks every value by its type in the report's dataclasses.
Unknown keys are ignored.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.analysis.explanation import (
    ClippedRange,
    Explanation,
    FloatNodeGroup,
    TargetExplanation,
    TensorAccuracy,
)
from deploy.errors import CacheError, ConfigError
from deploy.files import atomic, manifest, staging, toml
from deploy.files.manifest import PAGES, RECORDS, SETTINGS, Manifest
from deploy.files.reading import convert, read_json
from deploy.method import NO_CHOICES
from deploy.metrics.levels import LEVELS
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.pipeline.results import trial_rows
from deploy.report import Report
from deploy.report.model import SCHEMA
from deploy.report.parts import EngineRow, NodeRow, TargetPart, TrialRow
from deploy.report.tables import PLAN
from deploy.terminal import join_visible
from deploy.tuning.plan_file import (
    CONSEQUENCE,
    NOISE,
    RULE,
    TIME,
    PlanFile,
    TargetPlan,
    read_plan,
    reason_kind,
    reason_sqnr_db,
)
from deploy.tuning.repairs import REPAIRS

_MOST_BYTES = 1 << 30  # of a report, which has a row for every tensor
_LARGEST_SIZE = 1 << 63  # bytes of a file
_AGAIN = "build again with this calib8"
_WIDE = 60  # characters of a value in a message, and of an option's value
_KEPT_ELSEWHERE = "is not here: it was kept elsewhere"
_ORDER = (NOISE, TIME, CONSEQUENCE, RULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBuild:
    """A build that was read back."""

    name: str
    path: Path
    report: Report  # its report, without the latency samples, which no file stores
    # flag without dashes -> value as text, from `calib8.toml`; None without that file
    options: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """The files of a build beside its manifest; `repr` lists them."""

    folder: Path
    manifest: Manifest
    changed: Mapping[str, str]  # name -> "is missing" or "was changed after it was written"
    cache_changed: bool  # of a cache outside the folder

    @property
    def passed(self) -> bool:
        """Whether every file is there, as the build wrote it."""
        return not self.changed and not self.cache_changed

    def __repr__(self) -> str:
        files, cache = self.manifest.files, self.manifest.cache
        lines = [f"{name} {self.changed.get(name, 'is as it was written')}" for name in files]
        lines += [f"{name} is of an earlier build" for name in self.manifest.earlier]
        if cache is not None:
            left = "is as the build left it" if cache[0].is_file() else _KEPT_ELSEWHERE
            left = "was changed after it was written" if self.cache_changed else left
            lines.append(f"{cache[0]}, the cache, {left}")
        sound, model = len(files) - len(self.changed), self.manifest.made_from.get("model", {})
        lines.append(
            f"{self.folder}: {sound} of {len(files)} files are as the build of {model.get('name')}"
            " wrote them"
        )
        return join_visible(lines)


def verify(folder: Path | str) -> Verification:
    """Compare the files in a build's folder with its manifest; nothing is changed there.

    Raises:
        CacheError: the folder has no manifest, this version cannot read it, or a run was killed
            while it put its files there.
    """
    where = Path(folder)
    try:
        with atomic.lock_folder(where):  # a run that puts its files there is waited for
            if staging.has_unfinished_publication(where):
                raise CacheError(
                    f"{where} must hold one build, got files of two: a run was killed while it put"
                    " its files there; the next build into it finishes that"
                )
            written = manifest.read_manifest(where)
            other = written.cache is not None and manifest.cache_changed(*written.cache)
            return Verification(where, written, manifest.find_changed_files(where, written), other)
    except OSError as error:
        raise CacheError(
            f"{where} must be the folder of a build, got: {error.strerror or error}; check the path"
        ) from error


def read_stored_build(folder: Path | str) -> StoredBuild:
    """Read a build.

    `folder`: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or one that is broken or of another version.
    """
    named = Path(folder)
    path = named if named.suffix == ".json" else named / PAGES[0]
    if not os.path.isfile(path):
        raise ConfigError(
            f"a build must be a folder that `calib8 build` wrote, got {named} without a {PAGES[0]};"
            " build first, or name the folder that --out named"
        )
    options = _options(path.with_name(SETTINGS))
    return StoredBuild(name=str(folder), path=path, report=_report(path), options=options)


def _report(path: Path) -> Report:
    what = "the report of a build, as calib8 wrote it"
    held = read_json(path, what=what, error=ConfigError, max_bytes=_MOST_BYTES)
    schema = held.get("schema") if isinstance(held, dict) else None
    if schema != SCHEMA:
        raise _broken(path, f"a report must be of schema {SCHEMA}, got {repr(schema)[:_WIDE]}")
    report = convert(
        held,
        Report,
        rule=f"{path} must be {what}",
        error=ConfigError,
        way_out=_AGAIN,
        strict=False,  # numbers may be "inf" or "nan"
    )
    sizes = (*(e.size_bytes for e in report.engines), *(f.size_bytes for f in report.written))
    for size in sizes:
        if abs(size or 0) >= _LARGEST_SIZE:
            got = repr(size)[:_WIDE]
            raise _broken(path, f"size_bytes of a report must be a number of 64 bits, got {got}")
    for engine in report.engines:
        if engine.latency is not None and not 0 < engine.latency.latency.p50 < math.inf:
            raise _broken(path, f"latencies must be over 0, got {engine.latency.latency.p50}")
        if engine.verdict is not None and engine.verdict.level not in LEVELS:
            got = repr(engine.verdict.level)[:_WIDE]
            raise _broken(path, f"a verdict must be one of {', '.join(LEVELS)}, got {got}")
    return report


def _broken(path: Path, message: str) -> ConfigError:
    return ConfigError(f"{message} in {path}; {_AGAIN}")


def _options(path: Path) -> dict[str, str] | None:
    """Read the options file next to a report; None if there is none."""
    if not os.path.isfile(path):
        return None
    what = "the options of a build, as calib8 wrote them"
    table = toml.read_toml(path, what=what, way_out="build again").get("build", {})
    return (
        {name: _as_text(value) for name, value in table.items()} if isinstance(table, dict) else {}
    )


def _as_text(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= _WIDE else f"{said[:_WIDE]}..."


def read_explanation(folder: Path) -> Explanation:
    """Read the report and the plan of a build.

    `folder`: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or a broken report or plan.
    """
    build = read_stored_build(folder)
    report = build.report
    named = [file.path for file in report.files if file.role == PLAN]
    plan_path = path_in_build(named[0], build.path) if named else None
    if plan_path is not None and not os.path.isfile(plan_path):
        plan_path = None
    plan = PlanFile() if plan_path is None else read_plan(plan_path)
    engines = {e.target: e for e in report.engines if not (e.reference or e.baseline)}
    return Explanation(
        title=report.title,
        report=str(build.path),
        plan=str(plan_path) if plan_path else None,
        model=report.model.path if report.model else "",
        preprocess=report.feed.preprocess if report.feed else {},
        targets=tuple(
            _target(target, engines.get(target.name), plan, report.notes)
            for target in report.targets
        ),
    )


def path_in_build(written: str, report: Path) -> Path:
    """Return the path of a file of the build, in the report's folder even if that was moved.

    Another build may be at the path in the report by now.
    """
    record = report.parent / RECORDS / Path(written).name
    return record if os.path.isfile(record) else report.parent / Path(written).name


def path_near_report(written: str, report: Path) -> Path:
    """Return the path of a file outside the build: as in the report, or in the report's folder."""
    path = Path(written)
    return path if os.path.exists(path) else report.parent / path.name


def _target(
    target: TargetPart, engine: EngineRow | None, plan: PlanFile, notes: tuple[str, ...]
) -> TargetExplanation:
    verdict = engine.verdict if engine else None
    accuracy = engine.accuracy if engine else None
    own = plan.targets.get(target.name, TargetPlan(choices=NO_CHOICES))
    settled, tried = _chosen_and_tried(target, own)
    clipped = [
        ClippedRange(
            tensor=row.name,
            share=row.clipped,
            seen=(row.observed_min, row.observed_max),
            kept=(row.lo, row.hi),
        )
        for row in target.tensors
        if row.clipped is not None and row.clipped > 0
    ]
    return TargetExplanation(
        name=target.name,
        error=target.error,
        level=verdict.level if verdict else "",
        reasons=verdict.reasons if verdict else (),
        parts=_losses((accuracy.parts or accuracy.outputs) if accuracy else ()),
        task=accuracy.task.words if accuracy and accuracy.task else "",
        set_task=accuracy.set_task if accuracy else "",
        nodes=len(target.nodes),
        kept=tuple(_float_groups(target.nodes)),
        layers=_losses(target.layers),
        repairs=tuple(
            note
            for note in (*notes, *target.notes)
            if any(f"{repair.words}: " in note for repair in REPAIRS.values())
        ),
        settled=settled,
        tried=tried,
        methods={tensor: method.label for tensor, method in own.choices.methods.items()},
        clipped=tuple(sorted(clipped, key=lambda one: -one.share)),
        runnable=target.runnable or None,
        native=engine is not None and bool(target.runnable) and engine.path == target.runnable,
    )


def _chosen_and_tried(target: TargetPart, own: TargetPlan) -> tuple[str, tuple[TrialRow, ...]]:
    """Return the chosen trial and all trials, from the report or else from the plan."""
    if target.search is None:
        return own.settled, tuple(trial_rows(own))
    return target.search.settled, target.search.tried


def _losses(rows: Iterable[OutputAccuracy | SliceAccuracy]) -> tuple[TensorAccuracy, ...]:
    """Return the rows sorted by SQNR, lowest first; NaN comes before all."""
    losses = [
        TensorAccuracy(
            name=row.label if isinstance(row, SliceAccuracy) else row.name,
            sqnr_db=row.sqnr_db,
            cosine_mean=row.cosine_mean,
            cosine_min=row.cosine_min,
        )
        for row in rows
    ]
    return tuple(sorted(losses, key=lambda loss: by_sqnr(loss.sqnr_db)))


def by_sqnr(decibels: float) -> float:
    """Return a sort key: lowest SQNR first, NaN before all."""
    return -math.inf if math.isnan(decibels) else decibels


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
