"""Gather everything a build found into a `Report`, and write its files."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from deploy.machine import this_machine
from deploy.metrics.levels import measure_loss
from deploy.pipeline.measure import Figures
from deploy.report import Report, model, to_html, to_json, to_markdown
from deploy.report.documents import read_report
from deploy.report.parts import (
    CalibrationPart,
    EarlierPart,
    EngineRow,
    FeedPart,
    FileRow,
    GroupRow,
    ModelPart,
    RequestPart,
    SearchPart,
    TargetPart,
    WorkPart,
    node_rows,
)
from deploy.report.previews import box_rows, class_rows, pictures_part
from deploy.report.report_rows import clip_rows, weight_rows
from deploy.report.screen import EFFORT, IMAGES, rank_of, split_name
from deploy.report.tables import OPTIONS, PLAN, REPORT
from deploy.report.verdict import Gates, Verdict, verdict
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
    """Gather the report and write it as report.json, report.md and report.html.

    Args:
        calibration: the calibration.
        results: files of each target.
        figures: speed and accuracy of the engines.
        stage: folder of the build.
        plans: target -> its plan.
        plan_path: the plan file; None without one.
        saved_model: file of a model that was given in memory; None if it is a file of the user's.
        gates: demands on the engines.
        has_settings: whether the options of the command are written too.
        request: what the user asked for.
    """
    loaded, feed = calibration.loaded, calibration.feed
    files = {}
    cache = _staged_cache(calibration, stage)
    if cache is not None:
        files["calibration cache"] = cache
    if plan_path is not None:
        files[PLAN] = plan_path
    pages = [FileRow(role=REPORT, path=str(stage.folder / "report.html"))]
    if has_settings:
        pages.append(FileRow(role=OPTIONS, path=str(stage.folder / manifest.SETTINGS)))

    precisions = sorted({result.precision for result in results}, reverse=True)
    target_names = ", ".join(result.target for result in results)
    report = Report(
        title=f"calib8: {loaded.name} in {' and '.join(precisions)} for {target_names}",
        model=model_part(loaded, path=saved_model and stage.published_path(saved_model)),
        feed=feed_part(feed, calibration.images),
        calibration=_calibration_part(calibration, results),
        targets=tuple(
            _target_part(calibration, figures, result, plans.get(result.target), stage)
            for result in results
        ),
        engines=engine_rows(
            figures,
            results,
            gates,
            stage,
            doubts=calibration.doubts,
            has_random_outputs=calibration.has_random_outputs,
            classes=loaded.classes,
        ),
        machine=replace(this_machine(), devices=figures.devices),
        files=(*file_rows(files, stage), *pages),
        work=WorkPart(
            decodes=feed.decodes + figures.decodes,
            calibration_runs=dict(calibration.runs),
            reference_runs=figures.reference_runs,
            engine_runs=dict(figures.engine_runs),
        ),
        request=request,
        alerts=(*calibration.doubts, *calibration.warnings, *_scale_alerts(calibration)),
        notes=(*calibration.resumed, *feed.notes, *figures.notes),
    )
    report = follow_up(report, find_earlier_report(stage.folder, loaded.digest))
    write_pages(report, stage)
    return report


def find_earlier_report(folder: Path, model_digest: str) -> Report | None:
    """Return the report of the build of the same model that is in a folder; None without."""
    with suppress(CacheError, ConfigError, KeyError, TypeError):
        if manifest.read_manifest(folder).made_from["model"]["sha256"] == model_digest:
            return read_report(folder / manifest.PAGES[0], rewritable=True)
    return None


def follow_up(report: Report, earlier: Report | None) -> Report:
    """Return the report with the steps followed so far, and what the build before it had better.

    `earlier`: report of the build of the same model that was in the folder before; None without.
    """
    request = report.request or RequestPart()
    followed = list(earlier.request.followed) if earlier and earlier.request else []
    if earlier and _sample_count(report) > _sample_count(earlier):
        followed.append(IMAGES)
    if request.prefer == "accuracy" and max(request.effort.values(), default=0) > 1:
        followed.append(EFFORT)
    for target in report.targets:
        if taken := target.built_split:
            followed.append(split_name(target, taken))
    request = replace(request, followed=tuple(dict.fromkeys(followed)))
    better = tuple(_better_engines(report, earlier)) if earlier else ()
    return replace(report, request=request, earlier=better)


def _sample_count(report: Report) -> int:
    """Return the number of samples that calibrated and that engines were judged on, together."""
    judged = max((e.accuracy.samples for e in report.engines if e.accuracy), default=0)
    return judged + (report.feed.samples if report.feed else 0)


def _better_engines(report: Report, earlier: Report) -> Iterator[EarlierPart]:
    """Yield the engines of an earlier build that were better than those of this one."""
    former_by_target = {e.target: e for e in earlier.engines if not e.is_float}
    for engine in report.engines:
        former, target = former_by_target.get(engine.target), report.target_of(engine)
        former_target = earlier.target_of(former) if former else None
        if not (former and former.verdict and former_target and target):
            continue
        taken, former_taken = target.built_split, former_target.built_split
        is_faster = taken and former_taken and taken.time < former_taken.time
        flags = _flags_of(earlier, former_taken, report, target)
        if flags and not is_faster and _is_worse(engine, former):
            number = f" (its --split {former_taken.number})" if former_taken else ""
            text = f"{former.verdict.text}{number}"
            yield EarlierPart(target=target.name, text=text, flags=flags)


def _flags_of(
    earlier: Report, former_taken: SplitRow | None, report: Report, target: TargetPart
) -> str:
    """Return the options that build a target as an earlier build did; "" if this one did too."""
    if former_taken and target.search:
        for split in target.search.front:  # of the same search, or one that found this split too
            former_split = replace(split, number=former_taken.number, taken=not split.taken)
            if former_split == former_taken:
                return f"--split {split.number}"
    request = earlier.request
    if request is None:
        return ""
    equal_request = replace(
        report.request or request,
        followed=request.followed,
        max_loss=request.max_loss,
        min_speedup=request.min_speedup,
    )
    if request == equal_request:
        return ""
    effort, repairs = request.effort.get(target.name, 0), ",".join(request.repairs)
    flags = f"--effort {effort} --prefer {request.prefer} --repair {repairs or 'none'}"
    current_effort = report.request.effort.get(target.name, 0) if report.request else 0
    return f"{flags} --force" if effort < current_effort else flags


def _is_worse(engine: EngineRow, former: EngineRow) -> bool:
    """Whether an engine is worse than an earlier one that was judged on equal samples."""
    judged, former_judged = _judgement(engine), _judgement(former)
    if judged[:2] != former_judged[:2]:
        return False
    rank, former_rank, loss, former_loss = judged[2], former_judged[2], judged[3], former_judged[3]
    return rank > former_rank or (rank == former_rank and loss > former_loss + _CLEAR_LOSS)


def _judgement(engine: EngineRow) -> tuple[int, int, int, float]:
    """Return (samples, boxes in them, rank of the verdict, loss); all are 0 if not judged."""
    if engine.verdict is None or engine.accuracy is None:
        return 0, 0, 0, 0.0
    loss = measure_loss(engine.accuracy, None)
    counts = engine.accuracy.samples, (loss and loss.found) or 0
    return *counts, rank_of(engine.verdict.level), loss.share if loss else 0.0


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
    """Move a build into its folder, with its manifest.

    `replaceable`: names that may be replaced although no manifest lists them; None for all.

    Raises:
        ExportError: another file would be replaced, or the disk refuses.
    """

    def write_manifest() -> None:
        names = stage.file_names()
        if replaceable is not None:
            guarded_names = [name for name in names if name not in replaceable]
            manifest.refuse_foreign(stage.folder, guarded_names, force=False)
        manifest.write_manifest(stage.temporary_folder, stage.folder, names, origin)

    stage.publish(write_manifest)


def model_part(loaded: LoadedModel, *, path: Path | None = None) -> ModelPart:
    """Return the float model's part of a report.

    `path`: file that the build saved it in; None names the file that was loaded.
    """
    version_by_domain = {item.domain: item.version for item in loaded.model.opset_import}
    return ModelPart(
        path=str(path or loaded.source or loaded.resized_file or loaded.name),
        shapes=loaded.given_shapes,
        opset=version_by_domain.get("", version_by_domain.get("ai.onnx")),
        nodes=len(loaded.model.graph.node),
        inputs=tuple(_describe(spec) for spec in loaded.inputs),
        outputs=tuple(_describe(spec) for spec in loaded.outputs),
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
    has_random_outputs: bool = False,
) -> tuple[EngineRow, ...]:
    """Return the engines' rows, each with its verdict; float and failed engines have none.

    Args:
        figures: speed and accuracy of the engines, the float model first.
        results: files of each target.
        gates: demands on the engines.
        stage: folder of the build.
        classes: class -> name, for the boxes that are drawn.
        doubts: signs that the images differ from the model's training data.
        has_random_outputs: whether the float model itself gives other outputs at each run.
    """
    judge = partial(
        verdict,
        gates=gates,
        doubts=doubts,
        draws=has_random_outputs,
        on_calibration=figures.on_calibration,
    )
    result_by_target = {result.target: result for result in results if not result.error}
    rows = [figures.engines[0]]
    for engine in figures.engines[1:]:
        row = replace(engine, path=_final_path(engine.path, stage))
        row = _with_examples(row, figures, classes)
        is_judged = row.target in result_by_target and row.target not in figures.failures
        if is_judged and not row.baseline:
            row = model.with_speed(figures.engines, row)
            decisions = result_by_target[row.target].decisions
            is_quantized = any(decision.quantized for decision in decisions)
            judgement = _judge_engine(row, figures.engines, partial(judge, int8=is_quantized))
            row = replace(row, verdict=judgement)
        rows.append(row)
    return tuple(rows)


def _with_examples(row: EngineRow, figures: Figures, classes: Mapping[int, str]) -> EngineRow:
    """Return the row of an int8 engine with example samples."""
    examples = () if row.baseline else figures.examples.get(row.target, ())
    boxes = box_rows(examples, figures.pictures, classes)
    return replace(row, boxes=boxes, changed=class_rows(examples, figures.pictures))


def _judge_engine(
    row: EngineRow, engines: Sequence[EngineRow], judge: Callable[..., Verdict]
) -> Verdict:
    """Return the verdict on one engine; its speed is compared with the first of its rivals."""
    rivals = model.find_rivals(engines, row)
    if not rivals:
        missing_rival = "a float engine on its device" if row.on_device else "FP32"
        return judge(accuracy=row.accuracy, speed=None, rival=missing_rival)
    rival = rivals[0]
    smaller = None
    if rival.size_bytes and row.size_bytes:
        smaller = rival.size_bytes / row.size_bytes
    return judge(
        accuracy=row.accuracy,
        speed=row.speed,
        smaller=smaller,
        rival="FP32" if rival.reference else rival.label,
        device_kind="device" if row.on_device else "CPU",
    )


def _calibration_part(
    calibration: CalibrationResult, results: Sequence[BuildResult]
) -> CalibrationPart:
    method = calibration.ranges.chosen_by
    methods_of_files = {result.method for result in results if result.method}
    if methods_of_files and method not in methods_of_files:
        method = ""  # all targets have searches of their own
    has_pairs = calibration.loaded.qdq is not None
    seconds = None
    if not calibration.reused and not has_pairs:
        seconds = calibration.seconds
    observed_now = set(calibration.observed_now)
    counts = Counter[tuple[str, str, bool]]()  # (variant, statistic, reused) -> number of tensors
    for observation in calibration.observations:
        is_reused = observation not in observed_now
        counts[observation.variant.key, observation.statistic.key, is_reused] += 1
    groups = [
        GroupRow(variant=variant, statistic=statistic, tensors=count, reused=is_reused)
        for (variant, statistic, is_reused), count in counts.items()
    ]
    return CalibrationPart(
        method=method,
        reused=calibration.reused,
        reason=calibration.reason,
        seconds=seconds,
        cache=str(calibration.cache) if calibration.cache else None,
        groups=tuple(groups),
        by_model=has_pairs,
        agreement=calibration.agreement,
    )


def _target_part(
    calibration: CalibrationResult,
    figures: Figures,
    result: BuildResult,
    plan: PlannedTarget | None,
    stage: Stage,
) -> TargetPart:
    error = result.error or figures.failures.get(result.target, "")
    layers = figures.layers.get(result.target, ())
    observations = calibration.observations_by_target.get(result.target, ())
    search = None
    if plan is not None and plan.plan.settled:
        search = SearchPart(
            reused=plan.reused,
            probes=plan.probes,
            settled=plan.plan.settled,
            front=tuple(split_rows(plan.plan)),
        )
    search_notes = () if plan is None or result.error else _search_notes(plan)
    return TargetPart(
        name=result.target,
        method=result.method,
        options=result.options,
        reused=not error and not set(calibration.observed_now).intersection(observations),
        nodes=node_rows(result.decisions, calibration.loaded.model),
        tensors=clip_rows(calibration, result, layers),
        weights=weight_rows(result.weights),
        layers=layers,
        modules=_modules_by_tensor(calibration.loaded.model),
        files=file_rows(result.files, stage),
        runnable=_final_path(result.runnable, stage),
        shipped=tuple(str(stage.published_path(path)) for path in result.shipped),
        search=search,
        alerts=(
            *result.alerts,
            *_earlier_file_alerts(calibration.loaded.name, result.target, stage),
        ),
        notes=(*search_notes, *result.notes),
        error=error,
    )


def _modules_by_tensor(model: ModelProto) -> dict[str, str]:
    """Return tensor -> path of the PyTorch module that makes it."""
    path_by_node = module_paths(model)
    modules = {}
    for node in model.graph.node:
        if node.name in path_by_node:
            modules.update(dict.fromkeys(node.output, path_by_node[node.name]))
    return modules


def _earlier_file_alerts(model_name: str, target: str, stage: Stage) -> Iterator[str]:
    """Yield a note on files of an earlier build of the same model that this one did not write."""
    names = []
    for ending in TARGETS[target]().writes if target in TARGETS else ():
        name = f"{model_name}{ending}"
        if (stage.folder / name).exists() and not (stage.temporary_folder / name).exists():
            names.append(name)
    if names:
        yield f"not of this build, but of an earlier one in {stage.folder}: {', '.join(names)}"


def _search_notes(planned: PlannedTarget) -> Iterator[str]:
    """Yield notes on how the plan came about."""
    if planned.note:
        yield planned.note
    if planned.plan.failed:
        yield f"the search was made without some of its trials: {planned.plan.failed}"


def split_rows(plan: TargetPlan) -> Iterator[SplitRow]:
    """Yield rows of the front."""
    for split in plan.front:
        count = _COUNT.match(split.row.figure)  # "27 of 28 boxes" of a sentence
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
    """Return the cache of this run: in the stage if it appears with the build."""
    if calibration.cache is None:
        return None
    staged_path = stage.staged_path(calibration.cache)
    is_staged = staged_path is not None and staged_path.exists()
    return staged_path if is_staged else calibration.cache


def _scale_alerts(calibration: CalibrationResult) -> Iterator[str]:
    """Yield the tensors without a scale, by reason; their nodes stay float."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in calibration.range_set.reasons.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        if len(names) == 1:
            yield f"no scale for {names[0]}: it {reason}; its nodes stay float"
            continue
        listed_names = list_first(names, _MAX_NAMES)
        yield f"no scale for {listed_names}: each {reason}; their nodes stay float"


def _describe(spec: TensorSpec) -> str:
    shape = ",".join("?" if size is None else str(size) for size in spec.shape)
    return f"{spec.name} {spec.dtype} [{shape}]"
