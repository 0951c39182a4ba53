"""Gather everything a build found into a `Report`, and write its files."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.fingerprint import feed_versions
from deploy.feed.feed import describe_preprocessing
from deploy.feed.samples import Feed
from deploy.files import atomic, manifest
from deploy.files.manifest import sha256
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel
from deploy.machine import this_machine
from deploy.pipeline.measure import Figures
from deploy.report import Report, model, to_html, to_json, to_markdown
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    GroupRow,
    ModelPart,
    SearchPart,
    TargetPart,
    TrialRow,
    WorkPart,
    node_rows,
)
from deploy.report.previews import box_rows, class_rows, pictures_part
from deploy.report.report_rows import clip_rows, weight_rows
from deploy.report.tables import OPTIONS, PLAN, REPORT
from deploy.report.verdict import Gates, Verdict, verdict
from deploy.targets import TARGETS, Target
from deploy.targets.base import BuildResult
from deploy.tensors import TensorSpec
from deploy.terminal import phase
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.tune import PlannedTarget
from deploy.version import __version__

_NAMED = 3  # tensors named for each reason
_FAILED = "the search was made without some of its trials: {}"
_UNUSABLE = (
    "the split of least cost would be unusable, {}; so the fastest usable one was looked for among"
    " those of less noise"
)
_DOUBTFUL = (
    "the split of least cost would be doubtful, {}; so one of less noise was taken, which wins more"
    " of the task than it costs in time"
)


@phase("report")
def write_report(
    calibrated: CalibrationResult,
    built: Sequence[BuildResult],
    figures: Figures,
    stage: Stage,
    *,
    plans: Mapping[str, PlannedTarget],
    plan: Path | None,
    gates: Gates,
    settings: bool,
) -> Report:
    """Gather the report and write it as report.json, report.md and report.html.

    `settings`: whether the options of the command are written too.
    """
    loaded, feed = calibrated.loaded, calibrated.feed
    kept = {"calibration cache": _cache_now(calibrated, stage), PLAN: plan}
    common = {role: path for role, path in kept.items() if path is not None}
    pages = [FileRow(role=REPORT, path=str(stage.folder / "report.html"))]
    if settings:
        pages.append(FileRow(role=OPTIONS, path=str(stage.folder / manifest.SETTINGS)))
    words = sorted({one.precision for one in built}, reverse=True)
    names = ", ".join(result.target for result in built)
    report = Report(
        title=f"calib8: {loaded.name} in {' and '.join(words)} for {names}",
        model=model_part(loaded),
        feed=feed_part(feed, calibrated.images),
        calibration=_calibration(calibrated, built),
        targets=tuple(
            _target(calibrated, figures, result, plans.get(result.target), stage)
            for result in built
        ),
        engines=engine_rows(
            figures,
            built,
            gates,
            stage,
            doubts=calibrated.doubts,
            draws=calibrated.has_random_outputs,
            classes=loaded.classes,
        ),
        machine=replace(this_machine(), devices=figures.devices),
        files=(*file_rows(common, stage), *pages),
        work=WorkPart(
            decodes=feed.decodes + figures.decodes,
            calibration_runs=dict(calibrated.runs),
            reference_runs=figures.reference_runs,
            engine_runs=dict(figures.engine_runs),
        ),
        alerts=(*calibrated.doubts, *calibrated.warnings, *_troubles(calibrated)),
        notes=(*calibrated.resumed, *feed.notes, *calibrated.repairs, *figures.notes),
    )
    write_pages(report, stage)
    return report


def write_pages(report: Report, stage: Stage) -> None:
    """Write a report as report.json, report.md and report.html."""
    text = json.dumps(to_json(report), indent=1, allow_nan=False) + "\n"
    for name, page in zip(
        manifest.PAGES, (text, to_markdown(report), to_html(report)), strict=True
    ):
        atomic.write_text(stage.temporary_folder / name, page)


def build_origin(
    calibrated: CalibrationResult, targets: Sequence[Target], cache: Path | None
) -> dict[str, Any]:
    """What a build was made from, for its manifest.

    `cache`: the calibration cache, if it lies outside the build's folder.
    """
    fed = calibrated.feed.manifest()
    there = cache is not None and cache.is_file()
    return {
        **({"cache": manifest.external_cache_entry(cache)} if cache is not None and there else {}),
        "versions": {"calib8": __version__, **feed_versions(fed["kind"])},
        "model": {"name": calibrated.loaded.name, "sha256": calibrated.loaded.digest},
        "images": fed,
        "shapes": {
            name: array.shape for name, array in calibrated.feed.first_samples(1)[0].items()
        },
        "method": calibrated.method.label,
        "targets": [target.name for target in targets],
    }


@phase("report")
def publish_build(
    made_from: Mapping[str, Any], stage: Stage, *, replacing: Collection[str] | None
) -> None:
    """Move a build into its folder, with its manifest.

    `replacing`: names that may be replaced although no manifest lists them; None for all.

    Raises:
        ExportError: another file would be replaced, or the disk refuses.
    """

    def complete() -> None:
        names = stage.file_names()
        if replacing is not None:
            others = [name for name in names if name not in replacing]
            manifest.refuse_foreign(stage.folder, others, force=False)
        manifest.write_manifest(stage.temporary_folder, stage.folder, names, made_from)

    stage.publish(complete)


def model_part(loaded: LoadedModel) -> ModelPart:
    """The float model's part of a report."""
    imports = loaded.model.opset_import
    return ModelPart(
        path=str(loaded.source or loaded.name),
        opset=next((o.version for o in imports if o.domain in ("", "ai.onnx")), None),
        nodes=len(loaded.model.graph.node),
        inputs=tuple(_words(spec) for spec in loaded.inputs),
        outputs=tuple(_words(spec) for spec in loaded.outputs),
        notes=loaded.notes,
    )


def feed_part(feed: Feed, source: str) -> FeedPart:
    """The images' part of a report; `source` is the path that the user gave."""
    fed = feed.manifest()
    return FeedPart(
        source=source,
        samples=feed.count,
        preprocess=fed.get("preprocess") or {},
        prepared=describe_preprocessing(feed),
        skipped=feed.skipped,
        digest=fed.get("sha256"),
        pictures=pictures_part(feed.previews(), feed.preprocess),
    )


def engine_rows(
    figures: Figures,
    built: Sequence[BuildResult],
    gates: Gates,
    stage: Stage,
    *,
    classes: Mapping[int, str],
    doubts: Sequence[str] = (),
    draws: bool = False,
) -> tuple[EngineRow, ...]:
    """The engines' rows, each with its verdict; float and failed engines have none.

    `classes`: class -> name, for the boxes that are drawn.
    """
    reference, *others = figures.engines
    final = [replace(row, path=_final(row.path, stage)) for row in others]
    rows = [_with_examples(row, figures, classes) for row in final]
    judge = partial(verdict, gates=gates, doubts=doubts, draws=draws)
    int8 = {one.target: any(d.quantized for d in one.decisions) for one in built if not one.error}
    failed = figures.failed
    judged = [reference]
    for row in rows:
        if row.target in int8 and row.target not in failed and not row.baseline:
            own = int8[row.target]
            row = model.with_speed(figures.engines, row)
            row = replace(row, verdict=_verdict(row, figures.engines, judge, int8=own))
        judged.append(row)
    return tuple(judged)


def _with_examples(row: EngineRow, figures: Figures, classes: Mapping[int, str]) -> EngineRow:
    """The row of an int8 engine with example samples."""
    own = () if row.baseline else figures.examples.get(row.target, ())
    looks = figures.pictures
    return replace(row, boxes=box_rows(own, looks, classes), changed=class_rows(own, looks))


def _verdict(
    row: EngineRow, engines: Sequence[EngineRow], judge: Callable[..., Verdict], *, int8: bool
) -> Verdict:
    """The verdict on one engine; its speed is compared with the first of its rivals."""
    rival = next(iter(model.find_rivals(engines, row)), None)
    judge = partial(judge, accuracy=row.accuracy, int8=int8)
    if rival is None:
        wanted = "a float engine on its device" if row.on_device else "FP32"
        return judge(speed=None, rival=wanted)
    return judge(
        speed=row.speed,
        slower_ms=math.inf if row.on_device else row.p50_ms - rival.p50_ms,
        rival="FP32" if rival.reference else rival.label,
        device_kind="device" if row.on_device else "CPU",
    )


def _calibration(calibrated: CalibrationResult, built: Sequence[BuildResult]) -> CalibrationPart:
    asked = calibrated.ranges.chosen_by
    used = {result.method for result in built if result.method}
    by_model = calibrated.loaded.qdq is not None
    now = set(calibrated.observed_now)
    # observations by variant and statistic, and whether the cache held them
    wanted = calibrated.observations
    counted = Counter((o.variant.key, o.statistic.key, o not in now) for o in wanted)
    return CalibrationPart(
        method=asked if asked in used or not used else "",
        reused=calibrated.reused,
        reason=calibrated.reason,
        seconds=None if calibrated.reused or by_model else calibrated.seconds,
        cache=str(calibrated.cache) if calibrated.cache else None,
        groups=tuple(
            GroupRow(variant=variant, statistic=statistic, tensors=tensors, reused=reused)
            for (variant, statistic, reused), tensors in counted.items()
        ),
        by_model=by_model,
        agreement=calibrated.agreement,
    )


def _target(
    calibrated: CalibrationResult,
    figures: Figures,
    built: BuildResult,
    plan: PlannedTarget | None,
    stage: Stage,
) -> TargetPart:
    error = built.error or figures.failed.get(built.target, "")
    layers = figures.layers.get(built.target, ())
    now = set(calibrated.observed_now)
    return TargetPart(
        name=built.target,
        method=built.method,
        options=built.options,
        reused=not error
        and not now.intersection(calibrated.observations_by_target.get(built.target, ())),
        nodes=node_rows(built.decisions),
        tensors=clip_rows(calibrated, built, layers),
        weights=weight_rows(built.weights),
        layers=layers,
        files=file_rows(built.files, stage),
        runnable=_final(built.runnable, stage),
        search=None
        if plan is None or not plan.plan.tried
        else SearchPart(
            reused=plan.reused,
            probes=plan.probes,
            settled=plan.plan.settled,
            tried=tuple(trial_rows(plan.plan)),
        ),
        alerts=tuple(_left_over(calibrated.loaded.name, built.target, stage)),
        notes=(*(() if built.error else _of_search(plan)), *built.notes),
        error=error,
    )


def _left_over(name: str, target: str, stage: Stage) -> Iterator[str]:
    """A note on files of an earlier build of the same model that this one did not write."""
    endings = TARGETS[target].writes if target in TARGETS else ()
    names = [f"{name}{ending}" for ending in endings]
    left = [
        n
        for n in names
        if (stage.folder / n).exists() and not (stage.temporary_folder / n).exists()
    ]
    if left:
        yield f"not of this build, but of an earlier one in {stage.folder}: {', '.join(left)}"


def _of_search(plan: PlannedTarget | None) -> Iterator[str]:
    """Notes on how the plan came about."""
    if plan is None:
        return
    if plan.note:
        yield plan.note
    own = plan.plan
    for words, why in ((_UNUSABLE, own.unusable), (_DOUBTFUL, own.doubtful), (_FAILED, own.failed)):
        if why:
            yield words.format(why)


def trial_rows(plan: TargetPlan) -> Iterator[TrialRow]:
    """Rows of the complete trials; rows that a user's edit broke are left out."""
    for place, one in enumerate(plan.tried):
        db, time = one.get("sqnr_db"), one.get("time")
        if isinstance(db, float) and isinstance(time, float):
            what = str(one.get("what", ""))
            yield TrialRow(what=what, sqnr_db=db, time=time, taken=place == plan.taken)


def file_rows(files: Mapping[str, Path], stage: Stage) -> tuple[FileRow, ...]:
    """Rows of written files, by their role."""
    return tuple(
        FileRow(
            role=role,
            path=str(stage.published_path(path)),
            size_bytes=path.stat().st_size,
            sha256=sha256(path.read_bytes()),
        )
        for role, path in files.items()
    )


def _final(path: Path | str | None, stage: Stage) -> str | None:
    """The final path of a written file, as text."""
    return None if path is None else str(stage.published_path(Path(path)))


def _cache_now(calibrated: CalibrationResult, stage: Stage) -> Path | None:
    """The cache of this run: in the stage where it appears with the build."""
    if calibrated.cache is None:
        return None
    staged = stage.staged_path(calibrated.cache)
    return staged if staged is not None and staged.exists() else calibrated.cache


def _troubles(calibrated: CalibrationResult) -> list[str]:
    """Tensors without a scale, those of one reason together; their nodes stay float."""
    by_reason: dict[str, list[str]] = {}
    for name, why in calibrated.range_set.reasons.items():
        by_reason.setdefault(why, []).append(name)
    return [_without_scale(names, why) for why, names in by_reason.items()]


def _without_scale(names: Sequence[str], why: str) -> str:
    if len(names) == 1:
        return f"no scale for {names[0]}: it {why}; its nodes stay float"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    listed = ", ".join(names[:_NAMED]) + more
    return f"no scale for {listed}: each {why}; their nodes stay float"


def _words(spec: TensorSpec) -> str:
    shape = ",".join("?" if d is None else str(d) for d in spec.shape)
    return f"{spec.name} {spec.dtype} [{shape}]"
