"""Gather everything a build found into a `Report`, and write its files."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.fingerprint import feed_versions
from deploy.errors import CacheError, ConfigError, list_first
from deploy.feed.feed import describe_preprocessing
from deploy.feed.samples import Feed
from deploy.files import atomic, manifest
from deploy.files.manifest import sha256
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel
from deploy.graph.index import module_paths
from deploy.graph.placement import WEIGHTED
from deploy.machine import this_machine
from deploy.metrics.levels import measure_loss
from deploy.pipeline.measure import Figures
from deploy.report import Report, to_html, to_json, to_markdown
from deploy.report import model as report_model
from deploy.report.documents import read_report
from deploy.report.parts import (
    CalibrationPart,
    EarlierPart,
    EngineRow,
    FeedPart,
    FileRow,
    GroupRow,
    ModelPart,
    NodeRow,
    RequestPart,
    SearchPart,
    TargetPart,
    WorkPart,
    node_rows,
)
from deploy.report.previews import example_rows, pictures_part
from deploy.report.report_rows import tensor_rows
from deploy.report.screen import EFFORT, IMAGES, rank_of, split_name
from deploy.report.tables import OPTIONS, PLAN, REPORT
from deploy.report.verdict import Gates, verdict
from deploy.targets import TARGETS, Target
from deploy.targets.base import BuildResult
from deploy.tensors import TensorSpec
from deploy.terminal import phase
from deploy.tuning.plan_file import SplitRow, TargetPlan
from deploy.tuning.tune import PlannedTarget
from deploy.version import __version__

_MAX_NAMES = 3  # tensors named for each reason
_COUNT = re.compile(r"\d+ of \d+ \w+")
_CLEAR_LOSS = 0.01  # of the task, by which one build of the same verdict is worse than another


@phase("report")
def write_report(
    calibration: CalibrationResult,
    results: Sequence[BuildResult],
    figures: Figures,
    stage: Stage,
    *,
    plans: Mapping[str, PlannedTarget],
    plan_path: Path | None,
    saved_model: Path | None,
    gates: Gates,
    has_settings: bool,
    request: RequestPart,
) -> Report:
    """Gather the report, write it as report.json, report.md and report.html, and return it.

    An alert asks the user to do something; a note only informs.

    Args:
        calibration: the calibration.
        results: files of each target.
        figures: speed and accuracy of the engines.
        stage: folder of the build.
        plans: target -> its plan.
        plan_path: the plan file; None without one.
        saved_model: file in which the build saved a model that was given in memory; None if the
            user gave a file.
        gates: demands on the engines.
        has_settings: whether the command's options are written too, as calib8.toml.
        request: what the user asked for.
    """
    loaded = calibration.loaded
    feed = calibration.feed
    # such as "int8", for the title
    precisions = sorted({result.precision for result in results}, reverse=True)
    target_names = ", ".join(result.target for result in results)
    targets = tuple(
        _target_part(calibration, figures, result, plans.get(result.target), stage)
        for result in results
    )
    report = Report(
        title=f"calib8: {loaded.name} in {' and '.join(precisions)} for {target_names}",
        model=model_part(loaded, path=_final_path(saved_model, stage)),
        feed=replace(feed_part(feed, calibration.images), evaluation_skipped=figures.skipped),
        calibration=_calibration_part(calibration, results),
        targets=targets,
        engines=engine_rows(
            figures,
            results,
            gates,
            stage,
            doubts=calibration.doubts,
            has_assumed_inputs=feed.has_assumed_scale,
            has_random_outputs=calibration.has_random_outputs,
            classes=loaded.classes,
        ),
        machine=replace(this_machine(), devices=figures.devices),
        files=tuple(_run_files(calibration, stage, plan_path, has_settings=has_settings)),
        work=WorkPart(
            decodes=feed.decodes + figures.decodes,
            calibration_runs=dict(calibration.runs),
            reference_runs=figures.evaluation.reference_runs,
            engine_runs=dict(figures.evaluation.engine_runs),
        ),
        request=request,
        alerts=(*calibration.doubts, *calibration.warnings, *_scale_alerts(calibration, results)),
        notes=(*calibration.resumed, *feed.notes, *figures.notes),
    )
    earlier_report = find_earlier_report(stage.folder, loaded.digest)
    report = compare_with_earlier(report, earlier_report)
    write_pages(report, stage)
    return report


def _run_files(
    calibration: CalibrationResult, stage: Stage, plan_path: Path | None, *, has_settings: bool
) -> Iterator[FileRow]:
    """Yield a row for each file that belongs to no single target: cache, plan, report and options.

    The report and the options are written after this, so their rows have no size.

    Args:
        calibration: the calibration, with the path of its cache.
        stage: folder of the files until the build is complete.
        plan_path: the plan file; None without one.
        has_settings: whether the options of the command are written.
    """
    files = {}
    cache = _staged_cache(calibration, stage)
    if cache is not None:
        files["calibration cache"] = cache
    if plan_path is not None:
        files[PLAN] = plan_path
    yield from file_rows(files, stage)
    yield FileRow(role=REPORT, path=str(stage.folder / "report.html"))
    if has_settings:
        yield FileRow(role=OPTIONS, path=str(stage.folder / manifest.SETTINGS))


def find_earlier_report(folder: Path, model_digest: str) -> Report | None:
    """Return the report of the build of the same model that is in a folder; None without."""
    with suppress(CacheError, ConfigError, KeyError, TypeError):
        if manifest.read_manifest(folder).made_from["model"]["sha256"] == model_digest:
            return read_report(folder / manifest.REPORT_JSON, rewritable=True)
    return None


def compare_with_earlier(report: Report, earlier: Report | None) -> Report:
    """Return the report of this build, with two fields filled by comparing it with the one before.

    `report.earlier` gets the engines that were better before. `report.request.followed` gets the
    names of advice that the user has followed, such as to use more images. It is not given again.

    `earlier`: report of the build of the same model that was in the folder before; None without.
    """
    request = report.request or RequestPart()
    followed_advice: list[str] = []
    better_engines: tuple[EarlierPart, ...] = ()
    if earlier is not None:
        if earlier.request:
            followed_advice += earlier.request.followed
        if _sample_count(report) > _sample_count(earlier):
            followed_advice.append(IMAGES)
        better_engines = tuple(_better_engines(report, earlier))
    # the options of this build follow advice too: to search longer, or to build another split
    if request.prefer == "accuracy" and max(request.effort.values(), default=0) > 1:
        followed_advice.append(EFFORT)
    for target in report.targets:
        if split := target.built_split:
            followed_advice.append(split_name(target, split))

    request = replace(request, followed=tuple(dict.fromkeys(followed_advice)))
    return replace(report, request=request, earlier=better_engines)


def _sample_count(report: Report) -> int:
    """Return the number of samples for calibration plus that of samples for evaluation."""
    evaluation_counts = [engine.accuracy.samples for engine in report.engines if engine.accuracy]
    calibration_count = report.feed.samples if report.feed else 0
    return calibration_count + max(evaluation_counts, default=0)


def _better_engines(report: Report, earlier: Report) -> Iterator[EarlierPart]:
    """Yield the engines of an earlier build that were better, with the splits that build them.

    A split is a choice of the layers that stay float. An engine is left out if this build has a
    faster split than the earlier one: a user may take a less accurate split on purpose.
    """
    earlier_target_by_name = {target.name: target for target in earlier.targets}
    for target in report.targets:
        engine = report.engine_by_target.get(target.name)
        earlier_engine = earlier.engine_by_target.get(target.name)
        if engine is None or earlier_engine is None or earlier_engine.verdict is None:
            continue
        split = target.built_split
        earlier_split = earlier_target_by_name[target.name].built_split
        has_faster_split = split and earlier_split and split.time < earlier_split.time
        if not has_faster_split and _is_worse(engine, earlier_engine):
            split_number = _number_in_front(target, earlier_split)
            yield EarlierPart(
                target=target.name, text=earlier_engine.verdict.text, split=split_number
            )


def _number_in_front(target: TargetPart, earlier_split: SplitRow | None) -> int | None:
    """Return the number in this build's front of a split that an earlier build took, if there."""
    if earlier_split is None:
        return None
    for split in target.front:
        # a split may have another number in each search, and be built (taken) in one alone
        comparable_split = replace(split, number=earlier_split.number, taken=True)
        if comparable_split == earlier_split and not split.taken:
            return split.number
    return None


def _is_worse(engine: EngineRow, earlier_engine: EngineRow) -> bool:
    """Whether an engine is worse than an earlier one that was judged on equal samples."""
    counts, rank, loss = _judgement(engine)
    earlier_counts, earlier_rank, earlier_loss = _judgement(earlier_engine)
    if counts != earlier_counts:
        return False
    if rank != earlier_rank:
        return rank > earlier_rank
    return loss > earlier_loss + _CLEAR_LOSS


def _judgement(engine: EngineRow) -> tuple[tuple[int, int], int, float]:
    """Return what engines of two builds are compared by; all 0 for an engine that was not judged.

    Returns:
        ((number of samples, number of boxes that the float model finds in them), rank of the
        verdict with 0 for the best, loss as a share of the task).
    """
    if engine.verdict is None or engine.accuracy is None:
        return (0, 0), 0, 0.0
    samples = engine.accuracy.samples
    rank = rank_of(engine.verdict.level)
    loss = measure_loss(engine.accuracy, max_loss=None)  # whatever limit the user set
    if loss is None:
        return (samples, 0), rank, 0.0
    return (samples, loss.found or 0), rank, loss.share


def write_pages(report: Report, stage: Stage) -> None:
    """Write a report as report.json, report.md and report.html."""
    json_text = json.dumps(to_json(report), indent=1, allow_nan=False) + "\n"
    pages = (json_text, to_markdown(report), to_html(report))
    for name, page in zip(manifest.PAGES, pages, strict=True):
        atomic.write_text(stage.temporary_folder / name, page)


def build_origin(
    calibration: CalibrationResult, targets: Sequence[Target], cache: Path | None
) -> dict[str, Any]:
    """Return the model, images and options that a build was made from, for its manifest.

    `cache`: the calibration cache, if it lies outside the build's folder.
    """
    images = calibration.feed.manifest()
    origin: dict[str, Any] = {}
    if cache is not None and cache.is_file():
        origin["cache"] = manifest.external_cache_entry(cache)
    return origin | {
        "versions": {"calib8": __version__, **feed_versions(images["kind"])},
        "model": {"name": calibration.loaded.name, "sha256": calibration.loaded.digest},
        "images": images,
        "shapes": sample_shapes(calibration.feed),
        "method": calibration.method.label,
        "targets": [target.name for target in targets],
    }


def sample_shapes(feed: Feed) -> dict[str, tuple[int, ...]]:
    """Return input -> shape of the first sample."""
    (sample,) = feed.first_samples(1)
    return {name: array.shape for name, array in sample.items()}


@phase("report")
def publish_build(
    origin: Mapping[str, Any], stage: Stage, *, replaceable: Collection[str] | None
) -> None:
    """Move a build into its folder, with its manifest: the list of its files.

    Files of an earlier build, which the manifest in the folder lists, are replaced; other files are
    not.

    Args:
        origin: what the build was made from, see `build_origin`; the manifest stores it.
        stage: the temporary folder with its files.
        replaceable: names of other files that are replaced too; None replaces every file.

    Raises:
        ExportError: another file would be replaced, or the disk refuses.
    """

    def write_manifest() -> None:
        """Write the list of the files; called while the folder is locked against other runs."""
        names = stage.file_names()
        if replaceable is not None:
            guarded_names = [name for name in names if name not in replaceable]
            manifest.refuse_foreign(stage.folder, guarded_names, force=False)
        manifest.write_manifest(stage.temporary_folder, stage.folder, names, origin)

    stage.publish(write_manifest)


def model_part(loaded: LoadedModel, *, path: str | None = None) -> ModelPart:
    """Return the float model's part of a report.

    `path`: file that the build saved it in. None names the file that was loaded, as it is
    (`source`) or with other input shapes (`resized_file`), or the model if it was given in memory.
    """
    version_by_domain = {item.domain: item.version for item in loaded.model.opset_import}
    return ModelPart(
        path=str(path or loaded.source or loaded.resized_file or loaded.name),
        shapes=loaded.given_shapes,
        opset=version_by_domain.get("", version_by_domain.get("ai.onnx")),
        nodes=len(loaded.model.graph.node),
        inputs=tuple(map(_describe, loaded.inputs)),
        outputs=tuple(map(_describe, loaded.outputs)),
        notes=loaded.notes,
    )


def feed_part(feed: Feed, source: str) -> FeedPart:
    """Return the images' part of a report; `source` is the path that the user gave."""
    images = feed.manifest()
    return FeedPart(
        source=source,
        samples=feed.count,
        preprocess=images.get("preprocess") or {},
        prepared=describe_preprocessing(feed),
        skipped=feed.skipped,
        digest=images.get("sha256"),
        pictures=pictures_part(feed.previews(), feed.preprocess),
    )


def engine_rows(
    figures: Figures,
    results: Sequence[BuildResult],
    gates: Gates,
    stage: Stage,
    *,
    classes: Mapping[int, str],
    doubts: Sequence[str] = (),
    has_assumed_inputs: bool = False,
    has_random_outputs: bool = False,
) -> tuple[EngineRow, ...]:
    """Return the report's rows of all engines; each int8 engine that did not fail has its verdict.

    Args:
        figures: speed and accuracy of the engines, the float model first.
        results: files of each target.
        gates: demands on the engines.
        stage: folder of the build.
        classes: class -> name, for the boxes that are drawn.
        doubts: signs that the images differ from the model's training data.
        has_assumed_inputs: whether the preprocessing is calib8's default.
        has_random_outputs: whether the float model itself gives other outputs at each run.
    """
    result_by_target = {result.target: result for result in results if not result.error}
    evaluation = figures.evaluation
    float_row, *other_rows = figures.engines
    rows = [float_row]
    for row in other_rows:
        row = replace(row, path=_final_path(row.path, stage))
        if row.baseline:  # a float engine built for the target, which gets no verdict
            rows.append(row)
            continue

        examples = evaluation.examples.get(row.target, ())
        box_rows, class_rows = example_rows(examples, evaluation.pictures, classes)
        row = replace(row, boxes=box_rows, changed=class_rows)
        result = result_by_target.get(row.target)
        if result is not None and row.target not in figures.failures:
            # the float engines that the int8 one replaces, the main one first
            rivals = report_model.find_rivals(figures.engines, row)
            row = report_model.with_speed(row, rivals)
            rival_name, size_ratio = _describe_rival(row, rivals)
            row_verdict = verdict(
                accuracy=row.accuracy,
                speed=row.speed,
                int8=any(decision.quantized for decision in result.decisions),
                gates=gates,
                size_ratio=size_ratio,
                rival=rival_name,
                device_kind="device" if row.on_device else "CPU",
                doubts=doubts,
                has_assumed_inputs=has_assumed_inputs,
                has_random_outputs=has_random_outputs,
                calibrated=figures.calibrated,
            )
            row = replace(row, verdict=row_verdict)
        rows.append(row)
    return tuple(rows)


def _describe_rival(row: EngineRow, rivals: Sequence[EngineRow]) -> tuple[str, float | None]:
    """Return (name of the float engine that an engine is compared with, ratio of their sizes).

    The ratio is the float engine's size over the other's. It is None if a size is unknown, or if no
    such float engine was measured; the name then says which one is missing.

    `rivals`: the measured float engines to compare `row` with, the main one first.
    """
    if not rivals:
        return "a float engine on its device" if row.on_device else "FP32", None
    rival = rivals[0]
    name = "FP32" if rival.reference else rival.label
    return name, report_model.size_over(rival, row)


def _calibration_part(
    calibration: CalibrationResult, results: Sequence[BuildResult]
) -> CalibrationPart:
    """Return how the scales were determined: the method, and what was observed for it.

    The ranges of a Q/DQ model are those of its pairs, so nothing was observed for it. The part's
    groups count tensors: a group for each variant of the model that was run (such as before folding
    BatchNormalization) and each statistic that was recorded of it.
    """
    method = calibration.ranges.chosen_by
    used_methods = {result.method for result in results if result.method}
    if used_methods and method not in used_methods:
        method = ""  # every target that was built finds its ranges in a way of its own
    is_qdq_model = calibration.loaded.qdq is not None
    observed_now = set(calibration.observed_now)
    tensor_counts = Counter[tuple[str, str, bool]]()  # by (variant, statistic, is reused)
    for observation in calibration.observations:
        is_reused = observation not in observed_now
        tensor_counts[observation.variant.key, observation.statistic.key, is_reused] += 1
    groups = tuple(
        GroupRow(variant=variant, statistic=statistic, tensors=count, reused=is_reused)
        for (variant, statistic, is_reused), count in tensor_counts.items()
    )
    return CalibrationPart(
        method=method,
        reused=calibration.reused,
        reason=calibration.reason,
        seconds=None if calibration.reused or is_qdq_model else calibration.seconds,
        cache=str(calibration.cache) if calibration.cache else None,
        groups=groups,
        by_model=is_qdq_model,
        agreement=calibration.agreement,
    )


def _target_part(
    calibration: CalibrationResult,
    figures: Figures,
    result: BuildResult,
    planned_target: PlannedTarget | None,
    stage: Stage,
) -> TargetPart:
    """Return the results of one target.

    Args:
        calibration: the calibration.
        figures: speed and accuracy of the engines.
        result: files of the target, or the error that it failed with.
        planned_target: its plan, and how the search came to it; None if it could not be planned.
        stage: folder of the files until the build is complete.
    """
    error = result.error or figures.failures.get(result.target, "")
    layers = figures.layers.get(result.target, ())
    observations = calibration.observations_by_target.get(result.target, ())
    # nothing that this target needs was observed in this run: the cache had all of it
    is_reused = not error and set(calibration.observed_now).isdisjoint(observations)
    part = files_part(result, calibration.loaded.model, stage)
    notes = result.notes
    search = None
    if planned_target is not None:
        search = _search_part(planned_target, part.nodes)
        if not result.error:
            notes = (*_search_notes(planned_target), *notes)
    return replace(
        part,
        reused=is_reused,
        tensors=tensor_rows(calibration, result, layers),
        layers=layers,
        modules=_modules_by_tensor(calibration.loaded.model),
        search=search,
        alerts=(
            *result.alerts,
            *_earlier_file_alerts(calibration.loaded.name, result.target, stage),
        ),
        notes=notes,
        error=error,
    )


def files_part(result: BuildResult, model: ModelProto, stage: Stage) -> TargetPart:
    """Return what a report says of the files of one target.

    Args:
        result: the files.
        model: the float model.
        stage: folder of the files until the build is complete.
    """
    return TargetPart(
        name=result.target,
        method=result.method,
        options=result.options,
        nodes=node_rows(result.decisions, model),
        files=file_rows(result.files, stage),
        runnable=_final_path(result.runnable, stage),
        shipped=tuple(str(stage.published_path(path)) for path in result.shipped),
        alerts=result.alerts,
        notes=result.notes,
        error=result.error,
    )


def _modules_by_tensor(model: ModelProto) -> dict[str, str]:
    """Return tensor -> path of the PyTorch module that computes it."""
    path_by_node = module_paths(model)
    modules: dict[str, str] = {}
    for node in model.graph.node:
        if node.name in path_by_node:
            modules |= dict.fromkeys(node.output, path_by_node[node.name])
    return modules


def _earlier_file_alerts(model_name: str, target: str, stage: Stage) -> Iterator[str]:
    """Yield a note on files of an earlier build of the same model that this one did not write."""
    endings = TARGETS[target]().writes if target in TARGETS else ()
    names = []
    for ending in endings:
        name = f"{model_name}{ending}"
        if (stage.folder / name).exists() and not (stage.temporary_folder / name).exists():
            names.append(name)
    if names:
        yield f"not of this build, but of an earlier one in {stage.folder}: {', '.join(names)}"


def _search_part(planned_target: PlannedTarget, nodes: Sequence[NodeRow]) -> SearchPart | None:
    """Return how a plan came about, with the front of its search; None if nothing was searched.

    The front has the splits that are the best for their time; a split says which layers are int8
    and which float.

    `nodes`: of the model that was built, with their precisions.
    """
    plan = planned_target.plan
    if not plan.settled:  # the description of what the search chose
        return None
    if _has_added_floats(plan, nodes):
        plan = plan.marked(None)  # no split of the front is marked as the one that was built
    return SearchPart(
        reused=planned_target.reused,
        probes=planned_target.probes,
        settled=plan.settled,
        front=tuple(split_rows(plan)),
    )


def _search_notes(planned_target: PlannedTarget) -> Iterator[str]:
    """Yield notes on how the plan came about."""
    if planned_target.note:
        yield planned_target.note
    if planned_target.plan.failed:
        yield f"the search was made without some of its trials: {planned_target.plan.failed}"


def _has_added_floats(plan: TargetPlan, nodes: Sequence[NodeRow]) -> bool:
    """Return whether other layers were built in float beside those of the split that was taken.

    Such as those of `--keep-float` with another's plan, or of a target's own configuration.
    """
    int8_layers = [node for node in nodes if node.op in WEIGHTED and node.quantized]
    rows = [split.row for split in plan.front if split.row.taken]
    return any(row.layers - row.float_layers > len(int8_layers) for row in rows)


def split_rows(plan: TargetPlan) -> Iterator[SplitRow]:
    """Yield the splits that can be built, each with the count of its figure alone."""
    for split in plan.front:
        count = _COUNT.match(split.row.figure)  # "27 of 28 boxes", at the start of a sentence
        yield replace(split.row, figure=count[0]) if count else split.row


def file_rows(files: Mapping[str, Path], stage: Stage) -> tuple[FileRow, ...]:
    """Return a row for each written file, by its role."""
    return tuple(
        FileRow(
            role=role,
            path=str(stage.published_path(path)),
            size_bytes=path.stat().st_size,
            sha256=sha256(path.read_bytes()),
        )
        for role, path in files.items()
    )


def _final_path(path: Path | str | None, stage: Stage) -> str | None:
    """Return the final path of a written file, as text."""
    return None if path is None else str(stage.published_path(Path(path)))


def _staged_cache(calibration: CalibrationResult, stage: Stage) -> Path | None:
    """Return the cache of this run; None without.

    A cache in the folder of the build lies in the stage, a temporary folder, until it is published.
    """
    if calibration.cache is None:
        return None
    staged_path = stage.staged_path(calibration.cache)
    is_staged = staged_path is not None and staged_path.exists()
    return staged_path if is_staged else calibration.cache


def _scale_alerts(calibration: CalibrationResult, results: Sequence[BuildResult]) -> Iterator[str]:
    """Yield a sentence for each reason why scales are missing, with the tensors that lack them.

    Only tensors are named whose missing scale keeps a node in float. Constant zeros of shape
    arithmetic, for instance, have no scale either, but no node needs one.
    """
    needed_tensors: set[str] = set()
    for result in results:
        needed_tensors.update(decision.unscaled_tensor for decision in result.decisions)
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in calibration.range_set.reasons.items():
        if name in needed_tensors:
            names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        if len(names) == 1:
            yield f"no scale for {names[0]}: it {reason}; its nodes stay float"
            continue
        listed_names = list_first(names, _MAX_NAMES)
        yield f"no scale for {listed_names}: each {reason}; their nodes stay float"


def _describe(spec: TensorSpec) -> str:
    """Return an input or output as text, such as "image float32 [N,3,224,224]"."""
    shape = ",".join(map(str, spec.shape)).replace("None", "?")
    return f"{spec.name} {spec.dtype} [{shape}]"
