"""Reads a stored build: its report, options, float model, and its plan for an `Explanation`.

The JSON may have been edited: msgspec checks every value by its type in the report's dataclasses.
Unknown keys are ignored.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from deploy.feed.feed import Dataset, is_array_dataset
from deploy.feed.paths import resolve_path_list
from deploy.feed.preprocess import Preprocess, apply_user_options
from deploy.files import atomic, manifest, staging, toml
from deploy.files.manifest import RECORDS, REPORT_JSON, SETTINGS, Manifest
from deploy.frontends import LoadedModel, load_float_or_qdq
from deploy.frontends.input_shapes import open_with_shapes, parse_input
from deploy.metrics.output_errors import OutputAccuracy, sqnr_sort_key
from deploy.metrics.output_form import SliceAccuracy
from deploy.pipeline.build_options import ModelSource
from deploy.pipeline.results import split_rows
from deploy.report.documents import Report, read_report
from deploy.report.parts import EngineRow, NodeRow, TargetPart, TensorRow
from deploy.report.tables import PLAN, path_of
from deploy.terminal import PrintedResult, join_visible
from deploy.tuning.plan_file import PlanFile, TargetPlan, read_plan
from deploy.tuning.reasons import (
    CONSEQUENCE,
    NOISE,
    RULE,
    TIME,
    reason_kind,
    reason_sqnr_db,
)
from deploy.tuning.repairs import TITLE

_CHANGED = "was changed after it was written"
_KIND_ORDER = (NOISE, TIME, CONSEQUENCE, RULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBuild:
    """A build that was read back.

    Attributes:
        name: the folder or file that the user named.
        path: its report.json.
        report: its report, without the latency samples, which no file stores.
        options: flag without dashes -> value as text, from `calib8.toml`; None without that file.
    """

    name: str
    path: Path
    report: Report
    options: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, repr=False)
class Verification(PrintedResult):
    """The files of a build compared with its manifest; `repr` lists them.

    Attributes:
        folder: output folder of the build.
        manifest: its manifest.
        changed: name -> "is missing" or "was changed after it was written".
        cache_changed: whether a cache outside the folder was changed.
    """

    folder: Path
    manifest: Manifest
    changed: Mapping[str, str]
    cache_changed: bool

    @property
    def passed(self) -> bool:
        """Whether every file is there, as the build wrote it."""
        return not self.changed and not self.cache_changed

    def to_screen(self) -> str:
        """Return a line for each file and for the cache, and how many files are unchanged."""
        files = self.manifest.files
        # `changed` has the second half of the line, such as "is missing"
        lines = [f"{name} {self.changed.get(name, 'is as it was written')}" for name in files]
        lines += [f"{name} is of an earlier build" for name in self.manifest.earlier]
        if self.manifest.cache is not None:
            cache_path, _digest = self.manifest.cache
            # the cache may lie outside of the build's folder, and so be missing on this machine
            state = "is not here: it was kept elsewhere"
            if self.cache_changed:
                state = _CHANGED
            elif cache_path.is_file():
                state = "is as the build left it"
            lines.append(f"{cache_path}, the cache, {state}")
        unchanged_count = len(files) - len(self.changed)
        model = self.manifest.made_from.get("model", {})
        lines.append(
            f"{self.folder}: {unchanged_count} of {len(files)} files are as the build of"
            f" {model.get('name')} wrote them"
        )
        return join_visible(lines)


def verify(folder: Path | str) -> Verification:
    """Compare the files in a build's folder with its manifest; nothing is changed there.

    Raises:
        CacheError: the folder has no manifest, this version cannot read it, or a run was killed
            while it put its files there.
    """
    path = Path(folder)
    try:
        with atomic.lock_folder(path):  # waits for a run that is putting its files there
            if staging.has_unfinished_publication(path):
                raise CacheError(
                    f"{path} must hold one build, got files of two: a run was killed while it put"
                    " its files there; the next build into it finishes that"
                )
            stored = manifest.read_manifest(path)
            # `stored.cache`: (path, sha256) of a cache outside the folder
            cache_changed = stored.cache is not None and manifest.cache_changed(*stored.cache)
            changed = manifest.find_changed_files(path, stored)
            return Verification(path, stored, changed, cache_changed)
    except OSError as error:
        raise CacheError(
            f"{path} must be the folder of a build, got: {error.strerror or error}; check the path"
        ) from error


def read_stored_build(folder: Path | str) -> StoredBuild:
    """Read the report of a build, and the options that it was made with.

    `folder`: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or one that is broken or of another version.
    """
    path = Path(folder)
    if path.suffix != ".json":
        path = path / REPORT_JSON
    if not os.path.isfile(path):
        raise ConfigError(
            f"a build must be a folder that `calib8 build` wrote, got {Path(folder)} without a"
            f" {REPORT_JSON}; build first, or name the folder that --out named"
        )
    options = _read_options(path.with_name(SETTINGS))
    return StoredBuild(name=str(folder), path=path, report=read_report(path), options=options)


def _read_options(path: Path) -> dict[str, str] | None:
    """Read the options file next to a report; None if there is none."""
    if not os.path.isfile(path):
        return None
    what = "the options of a build, as calib8 wrote them"
    table = toml.read_toml(path, what=what, way_out="build again").get("build", {})
    if not isinstance(table, dict):
        return {}
    return {name: _format_option(value) for name, value in table.items()}


def _format_option(value: Any) -> str:
    """Return the value of an option as text; a list with commas."""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return str(value)


def read_explanation(folder: Path) -> Explanation:
    """Explain a build by its report and its plan, without running it.

    `folder`: output folder of the build, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or a broken report or plan.
    """
    build = read_stored_build(folder)
    report = build.report
    plan, plan_path = _read_plan(build)
    return Explanation(
        title=report.title,
        report=str(build.path),
        plan=plan_path,
        model=report.model.path if report.model else "",
        shapes=report.model.shapes if report.model else (),
        preprocess=report.feed.preprocess if report.feed else {},
        targets=tuple(_explain_target(target, report, plan) for target in report.targets),
    )


def _read_plan(build: StoredBuild) -> tuple[PlanFile, str | None]:
    """Return a build's plan and its path; an empty plan and None without one."""
    reported_path = path_of(build.report.files, PLAN)
    path = path_in_build(reported_path, build.path)
    if reported_path and os.path.isfile(path):
        return read_plan(path), str(path)
    return PlanFile(), None


def path_in_build(reported_path: str, report: Path) -> Path:
    """Return the path of a file of the build: next to the report, whatever folder the report names.

    The build may have been moved, and another one be at the path that the report names.
    """
    name = Path(reported_path).name
    record = report.parent / RECORDS / name
    if os.path.isfile(record):
        return record
    return report.parent / name


def path_near_report(reported_path: str, report: Path) -> Path:
    """Return the path of a model: as in the report, unless it lies in the report's folder.

    A relative path starts at the folder in which the build ran, mostly one above the report.
    """
    # in the folder of records lies what the build saved of a model in memory
    if Path(reported_path).parent.name != RECORDS:
        for folder in (*report.parents, *report.resolve().parents, Path()):
            if os.path.isfile(folder / reported_path):
                return folder / reported_path
    return path_in_build(reported_path, report)


def load_float_model(
    reported_path: str,
    report: Path,
    model: ModelSource | None,
    *,
    shapes: Sequence[str],
    flag: str,
) -> LoadedModel:
    """Load the float model of a build: the user's, else the one that its report names.

    Args:
        reported_path: the model's path as the report has it.
        report: path of the report.
        model: the user's model; None takes that of the report.
        shapes: texts such as "x=1x3x96x96", the input shapes that the build set in place of the
            file's. They are not set for a model in memory, which has them already.
        flag: the command's option that names the model, for errors.

    Raises:
        ConfigError: no ONNX file is at the path in the report.
        ModelError: the model cannot be read.
    """
    if model is None:
        model = path_near_report(reported_path, report)
        if not os.path.isfile(model) or model.suffix.lower() != ".onnx":
            raise ConfigError(
                f"images are run through the ONNX model of the build, got {reported_path!r} in"
                f" {report}, which is none here; name it with {flag}"
            )
    if shapes and isinstance(model, str | Path):
        return open_with_shapes(Path(model), [parse_input(text) for text in shapes])
    return load_float_or_qdq(model)


def model_notes(report: Path, loaded: LoadedModel) -> Iterator[str]:
    """Yield a note if the float model is not the one the build was made from."""
    try:
        origin = manifest.read_manifest(report.parent).made_from.get("model")
    except CacheError:  # reported by `verify`
        return
    if isinstance(origin, dict) and origin.get("sha256") != loaded.digest:
        yield (
            f"{loaded.source or loaded.name} is not the model that was built from, or was changed"
            " since: the figures include that difference"
        )


def with_stored_preprocess(dataset: Dataset, stored: Mapping[str, object], report: Path) -> Dataset:
    """Return images with the preprocessing of a build, changed by the options that the user set.

    A dataset of arrays is returned unchanged, since arrays are not preprocessed. So is one whose
    preprocessing the user set completely.

    Args:
        dataset: images with the user's preprocessing, or some options of it.
        stored: the build's preprocessing, as JSON from its report; {} if it has none.
        report: path of the report, for errors.

    Raises:
        ConfigError: the preprocessing in the report is not one that calib8 wrote.
    """
    user_options = {} if dataset.preprocess is None else dataset.preprocess
    if not isinstance(user_options, Mapping):  # a complete preprocessing
        return dataset
    if not stored or _has_arrays(dataset):
        return dataset
    try:
        preprocess = Preprocess.from_json(dict(stored))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the preprocessing of a report must be one that calib8 wrote, got {error} in"
            f" {report}; set it with options such as --mean"
        ) from error
    return replace(dataset, preprocess=apply_user_options(preprocess, user_options))


def _has_arrays(dataset: Dataset) -> bool:
    """Whether samples are arrays as the model takes them; items of a Python object count as such.

    Raises:
        FeedError: there are no files, or both images and arrays.
    """
    source = dataset.source
    is_path_list = isinstance(source, list | tuple) and resolve_path_list(source) is not None
    if is_path_list or isinstance(source, str | os.PathLike):
        return is_array_dataset(dataset)
    return True


def _explain_target(target: TargetPart, report: Report, plan: PlanFile) -> TargetExplanation:
    """Return the explanation of one target, without the user's images.

    Args:
        target: what the report says of the target.
        report: the report of the build.
        plan: the plan file of the build.
    """
    # a split says which nodes run in int8; the front has those that no other split beats in both
    # time and accuracy. They are those of the search, or without one, as for a plan of the user's,
    # those of the plan
    target_plan = plan.targets.get(target.name, TargetPlan())
    if target.search is not None:
        built_text = target.search.settled  # describes the split that was built
        front = target.search.front
    else:
        built_text = target_plan.settled
        front = tuple(split_rows(target_plan))
    # a note on a repair begins with its title, maybe after the target's name
    repair_notes = tuple(note for note in (*report.notes, *target.notes) if f"{TITLE}: " in note)
    explanation = TargetExplanation(
        name=target.name,
        error=target.error,
        nodes=len(target.nodes),
        kept=tuple(_float_groups(target.nodes)),
        layers=_sort_by_sqnr(target.layers),
        modules=target.modules,
        repairs=repair_notes,
        settled=built_text,
        front=front,
        methods={tensor: method.label for tensor, method in target_plan.choices.methods.items()},
        clipped=_clipped_ranges(target.tensors),
        runnable=target.runnable or None,
    )
    engine = report.engine_by_target.get(target.name)  # None if no engine was measured
    return explanation if engine is None else _add_engine(explanation, engine)


def _add_engine(explanation: TargetExplanation, engine: EngineRow) -> TargetExplanation:
    """Return the explanation of a target with the verdict and accuracy of its engine added."""
    # `runnable` is a file for ONNX Runtime that computes what the engine does. If it is the engine
    # itself, the target is ONNX Runtime: images are then run with its own int8 kernels
    is_native = explanation.runnable is not None and engine.path == explanation.runnable
    explanation = replace(explanation, native=is_native)
    if engine.verdict is not None:
        explanation = replace(
            explanation, level=engine.verdict.level, reasons=engine.verdict.reasons
        )
    accuracy = engine.accuracy
    if accuracy is None:
        return explanation
    return replace(
        explanation,
        parts=_sort_by_sqnr(accuracy.parts or accuracy.outputs),
        task=accuracy.task.words if accuracy.task else "",
        set_task=accuracy.set_task,  # the task that the user set for the build
    )


def _clipped_ranges(tensors: Iterable[TensorRow]) -> tuple[ClippedRange, ...]:
    """Return the ranges that clip values, the largest share first."""
    clipped = []
    for row in tensors:
        if row.clipped is not None and row.clipped > 0:
            clipped_range = ClippedRange(
                tensor=row.name,
                share=row.clipped,
                seen=(row.observed_min, row.observed_max),
                kept=(row.lo, row.hi),
            )
            clipped.append(clipped_range)
    return tuple(sorted(clipped, key=lambda entry: -entry.share))


def _sort_by_sqnr(
    rows: Iterable[OutputAccuracy | SliceAccuracy],
) -> tuple[TensorAccuracy, ...]:
    """Return names and figures of outputs, slices or inner tensors, the lowest SQNR first.

    NaN is lower than any number.
    """
    accuracies = []
    for row in rows:
        name = row.label if isinstance(row, SliceAccuracy) else row.name
        accuracy = TensorAccuracy(
            name=name,
            sqnr_db=row.sqnr_db,
            cosine_mean=row.cosine_mean,
            cosine_min=row.cosine_min,
        )
        accuracies.append(accuracy)
    return tuple(sorted(accuracies, key=lambda accuracy: sqnr_sort_key(accuracy.sqnr_db)))


def _float_groups(nodes: Iterable[NodeRow]) -> Iterator[FloatNodeGroup]:
    """Yield the nodes that stay float in groups with the same reason.

    The kind of a reason is noise (found by a search), time (also by a search), consequence, or
    rule. Groups come in this order, those by noise with the lowest SQNR first. Nodes that no search
    kept in float are grouped by operator too.
    """
    nodes_by_group: dict[tuple[str, str], list[NodeRow]] = {}  # (reason, operator) -> nodes
    for node in nodes:
        if node.quantized:
            continue
        group_key = (node.reason, node.op)
        if reason_kind(node.reason) in (NOISE, TIME):  # the search tried these nodes together
            group_key = (node.reason, "")
        nodes_by_group.setdefault(group_key, []).append(node)

    groups = []
    for (reason, _), group_nodes in nodes_by_group.items():
        group = FloatNodeGroup(
            kind=reason_kind(reason),
            reason=reason,
            operators=tuple(dict.fromkeys(node.op for node in group_nodes)),
            nodes=tuple(node.module or node.name for node in group_nodes),
        )
        groups.append(group)
    groups.sort(key=lambda group: (_KIND_ORDER.index(group.kind), reason_sqnr_db(group.reason)))
    yield from groups
