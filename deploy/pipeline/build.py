"""Build a model: calibrate it, build every target, measure the engines, and write the report.

`build_with` has a line for each step. A Q/DQ model brings its ranges along
(`deploy.calibration.calibration_result`): nothing is observed or searched for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.calibration_result import CalibrationResult, keep_float_layers
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.reuse import CachePolicy, as_policy
from deploy.errors import Calib8Error, ConfigError
from deploy.feed.batch_axis import batch_inputs
from deploy.feed.evaluation import ImageLabels, to_labels
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.sampling import Limit
from deploy.files import atomic, manifest
from deploy.files.guard import guard_inputs
from deploy.files.staging import Stage, stage_files
from deploy.graph.index import as_names
from deploy.method import Method
from deploy.metrics.accuracy import Comparison
from deploy.metrics.output_form import derive_form
from deploy.pipeline.build_options import (
    BuildOptions,
    CalibrationOptions,
    ModelSource,
    PreparedBuild,
    UserModel,
    check_arguments,
    find_user_model,
    open_torch_module,
    prepare_build,
    saved_model_name,
)
from deploy.pipeline.calibration_run import open_dataset
from deploy.pipeline.calibration_setup import calibrate_loaded, use_qdq_calibration
from deploy.pipeline.evaluate import CALIBRATION_SAMPLES
from deploy.pipeline.measure import ALL_CALIBRATED, Figures, list_engines, measure_engines
from deploy.pipeline.readings import find_better_reading
from deploy.pipeline.results import build_origin, publish_build, write_report
from deploy.pipeline.target_builds import build_targets, discard_failed, search_targets, with_log
from deploy.report import Report
from deploy.report.parts import EngineRow, RequestPart
from deploy.report.verdict import Gates
from deploy.targets import Target, make_targets
from deploy.targets.base import BuildResult
from deploy.tasks.metric import Function
from deploy.tasks.rows import batch_length
from deploy.terminal import with_progress
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.search_options import Tuning
from deploy.tuning.search_samples import CANDIDATE_COUNT
from deploy.tuning.tune import PlannedTarget

if TYPE_CHECKING:
    from torch import nn

# dtypes of outputs that are not compared
_TYPES_WITHOUT_NUMBERS = ("str", "sequence", "map", "optional")


@check_arguments
@with_progress
def build(  # noqa: D417
    model: ModelSource | nn.Module,
    images: FeedSource | None = None,
    *,
    float_model: UserModel | nn.Module | None = None,
    out: Path | str = "build",
    targets: str | Target | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: PreprocessRequest = None,
    cache: Path | str | CachePolicy | None = None,
    eval_images: FeedSource | None = None,
    labels: Iterable[int] | ImageLabels | str | Path | None = None,
    metric: str | Function | None = None,
    task: str | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    batch_axis: str = "auto",
    states: Mapping[str, str] | None = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: str | Iterable[str] = (),
    duration_s: float | None = None,
    effort: int | None = None,
    tuning: Tuning | None = None,
    gates: Gates | None = None,
    repairs: str | None = None,
    scheduler: str | Cluster | None = None,
    settings: str | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Report:
    """Calibrate (or reuse a calibration), build every target, measure, and write the report.

    A PyTorch module may be in any mode and on any device, and is not changed: a copy is exported
    with the first item of the loader (a tensor, a tuple that begins with the inputs, or a dict by
    the names of forward's arguments) and checked against torch. The files are named after its
    class: small_net.int8.onnx for SmallNet.

    A Q/DQ model is not calibrated: the scales of its pairs are used. If a target fails, its row of
    the report has the message, and the other targets are built.

    The arguments that are not listed are those of `calibrate`.

    Args:
        images: images to calibrate with, as for `calibrate`; for a Q/DQ model images to measure
            with (as `eval_images`), or None.
        float_model: float model that a Q/DQ model's engines are compared with. With None, their
            accuracy is compared with that of the Q/DQ model; their speed and size are compared
            with those of the float model that is left if its pairs are taken out.
        out: output folder, also of the cache if `cache` names none.
        eval_images: images for the accuracy figures; None uses the calibration images.
        labels: class of each evaluation image, if the list or loader does not give it; a path of
            annotated objects (a COCO json, data.yaml, a folder of YOLO's or VOC's files) or of a
            text file with one class a line; or "folders" for one folder per class.
        metric: "file.py:function" or a function (FP32 outputs, int8 outputs, label or None) ->
            number, more is better. It is called for each sample; the mean replaces the task figure.
        task: name of the outputs' task (`deploy.tasks.TASKS`), or "none" to compare values;
            None recognises it.
        duration_s: seconds of latency runs for each model; with 0 the search measures no time
            either. None is 3, or 0 if `tuning.cpu` names another CPU than this one.
        effort: 0 does not search, 3 tries most; short for `tuning=Tuning(effort=...)`.
        tuning: options of the search, or a plan to follow.
        gates: the user's limits, for the verdicts.
        repairs: "adaround", which is kept if it helps, or "none". None tries "adaround" if there
            is a search.
        settings: text to write as `calib8.toml`; None writes none.

    Raises:
        Calib8Error: as `calibrate`, or a target's error if none could be built.
    """
    model, images = open_torch_module(model, images, preprocess)  # exports a PyTorch module
    if float_model is not None:
        opened_model, images = open_torch_module(float_model, images)
        float_model = find_user_model(opened_model)
    open_images = partial(
        to_dataset, preprocess=preprocess, skip_bad=skip_bad, batch_axis=batch_axis, states=states
    )
    dataset = None
    evaluation = None
    if images is not None:
        dataset = open_images(images, limit=limit)
    if eval_images is not None:
        # the limit is of calibration images; of evaluation images only where nothing calibrates
        eval_limit = limit if images is None else None
        evaluation = open_images(eval_images, limit=eval_limit, split="val")
    options = BuildOptions(
        calibration=CalibrationOptions(
            method=method,
            cache=as_policy(cache),
            until_stable=until_stable,
            threads=threads,
            float_nodes=as_names(float_nodes),
            scheduler=scheduler,
            resume=resume,
        ),
        targets=make_targets(targets),
        out=Path(out),
        float_model=float_model,
        evaluation=evaluation,
        labels=to_labels(labels),
        metric=metric,
        task=task,
        duration_s=duration_s,
        tuning=_with_effort(tuning or Tuning(), effort),
        gates=gates or Gates(),
        repairs=repairs,
        settings=settings,
    )
    return build_with(model, dataset, options)


def _with_effort(tuning: Tuning, effort: int | None) -> Tuning:
    """Return the options of the search with an effort that was given beside them, if any."""
    if effort is None:
        return tuning
    if tuning.effort is not None:
        raise ConfigError(
            f"an effort is given once, got {effort} and {tuning.effort} in tuning; leave one of"
            " them out"
        )
    return replace(tuning, effort=effort)


@guard_inputs()
def build_with(
    model: ModelSource,
    dataset: Dataset | None,
    options: BuildOptions,
) -> Report:
    """`build` with its options as one value.

    Calibrate, search, build, measure and report in a temporary folder, then publish all files: move
    them into the output folder together.
    """
    build = prepare_build(model, dataset, options)
    options = build.options
    with stage_files(options.out) as stage:
        calibration = _calibrate(build, stage)
        declaration = calibration.loaded.declaration
        if calibration.feed.states:  # found in the samples, or named by the user (`states`)
            declaration = replace(declaration, states=calibration.feed.states)
        metric = replace(build.metric, declared=declaration)
        build = replace(build, metric=metric)
        _refuse_other_batch_axis(build, calibration)
        _refuse_broken_metric(build, calibration)

        plans, plan_path = _plan_targets(build, calibration, stage)
        results = build_targets(build, calibration, stage, plans)
        figures = _measure(build, calibration, results, stage)
        results = discard_failed(results, figures.failures, stage)

        saved_model = _save_model(build, stage)  # None if the user's file holds the model
        # The float model was measured in memory, so its size is that of the file saved now. A Q/DQ
        # model is saved with its pairs: its file does not have the size of its float model.
        if saved_model is not None and build.loaded.qdq is None:
            figures = _with_saved_size(figures, saved_model)
        calibration = _doubt_preprocessing(build, calibration, figures)
        report = write_report(
            calibration,
            results,
            figures,
            stage,
            plans=plans,
            plan_path=plan_path,
            saved_model=saved_model,
            gates=options.gates,
            has_settings=options.settings is not None,
            request=_request_part(build),
        )
        if options.settings is not None:
            atomic.write_text(stage.temporary_folder / manifest.SETTINGS, options.settings)
        replaceable_names = None  # with --force, every file in the folder may be replaced
        if not options.calibration.cache.force:
            replaceable_names = build.cache_and_plan_names
        origin = build_origin(calibration, options.targets, build.external_cache)
        publish_build(origin, stage, replaceable=replaceable_names)
    return report


def _doubt_preprocessing(
    build: PreparedBuild, calibration: CalibrationResult, figures: Figures
) -> CalibrationResult:
    """Return the calibration; with a doubt added if the images seem to be preprocessed wrongly.

    They seem so if the float model is surer of them in other colors or scales. If there are labels
    and it misses most of them, they seem so if it is right more often in other colors or scales.
    """
    missed_images = build.evaluation if any(map(_is_mostly_wrong, figures.engines)) else None
    doubt = find_better_reading(calibration, build.metric.without_function, missed_images)
    if not doubt:
        return calibration
    return replace(calibration, doubts=(*calibration.doubts, doubt))


def _save_model(build: PreparedBuild, stage: Stage) -> Path | None:
    """Write a model that no file holds beside the build's records; None if a file holds it."""
    if build.unsaved_model is None:
        return None
    path = stage.records / Path(saved_model_name(build.loaded)).name
    return atomic.write_bytes(path, build.unsaved_model.SerializeToString(deterministic=True))


def _with_saved_size(figures: Figures, saved_model: Path) -> Figures:
    """Return the figures, with the size of the saved file as the float model's.

    This file is what `calib8 check` runs; the model that was measured was a copy in memory.
    """
    float_row, *engine_rows = figures.engines
    float_row = replace(float_row, size_bytes=saved_model.stat().st_size)
    return replace(figures, engines=(float_row, *engine_rows))


def _request_part(build: PreparedBuild) -> RequestPart:
    """Return what the user asked for, as far as a report derives its advice from it."""
    options = build.options
    tuning = options.tuning
    effort_by_target = {target.name: tuning.for_target(target).level for target in options.targets}
    # a model was exported here from a PyTorch module, or from a file to change its input shapes
    is_module = build.loaded.exported is not None and build.loaded.resized_file is None
    return RequestPart(
        effort=effort_by_target,
        prefer=tuning.prefer,
        max_loss=options.gates.max_loss,
        min_speedup=options.gates.min_speedup,
        has_method=options.calibration.method is not None,
        has_evaluation=build.evaluation is not None,
        is_module=is_module,
        is_quantized=build.loaded.qdq is not None,
    )


def _is_mostly_wrong(engine: EngineRow) -> bool:
    """Whether labels show that the float model is wrong more often than right."""
    top1 = None if engine.accuracy is None else engine.accuracy.top1_reference
    return top1 is not None and top1 < 0.5


def _calibrate(build: PreparedBuild, stage: Stage) -> CalibrationResult:
    """Return the calibration, observed or from the cache.

    The pairs of a Q/DQ model are its calibration: they give the scale of every tensor.

    `stage`: where the files of the build wait until it is complete.
    """
    options = build.options
    if build.loaded.qdq is not None:
        return use_qdq_calibration(
            build.loaded,
            build.loaded.qdq,
            build.dataset,
            targets=options.targets,
            trt_version=options.calibration.cache.trt_version,
        )
    assert build.dataset is not None, "only a Q/DQ model is built without images"
    # number of samples whose float outputs are stored: the search takes its samples from them, and
    # without evaluation images all engines are evaluated on them
    evaluation_count = CALIBRATION_SAMPLES if build.evaluation is None else CANDIDATE_COUNT
    images = open_dataset(build.loaded, build.dataset, options.calibration)
    return calibrate_loaded(
        build.loaded,
        build.user_model,
        images,
        options.calibration,
        targets=options.targets,
        evaluation_count=evaluation_count,
        task=options.task or "",
        stage=stage,
    )


def _refuse_other_batch_axis(build: PreparedBuild, calibration: CalibrationResult) -> None:
    """Refuse evaluation samples whose inputs have a batch dimension where calibration's have none.

    The reverse is refused too.
    """
    if build.evaluation is None:
        return
    batch_names = batch_inputs(calibration.loaded.inputs)
    evaluation_names = batch_inputs(build.evaluation.specs)
    if batch_names != evaluation_names:
        names = ", ".join(sorted(batch_names ^ evaluation_names))
        raise ConfigError(
            f"the first dimension of {names} is a batch in the calibration samples or in the"
            " evaluation samples, and part of a sample in the others; say which (--batch-axis)"
        )


def _refuse_broken_metric(build: PreparedBuild, calibration: CalibrationResult) -> None:
    """Refuse a user's metric or task that fails on the float model itself, before all is built.

    It is tried on the first sample: the float model's outputs are compared with themselves.
    """
    if not build.metric.is_set or build.loaded.qdq is not None:
        return
    sample, outputs = next(iter(calibration.evaluation_set.samples_with_outputs(1)))
    labels = None if build.evaluation is None else build.evaluation.labels
    if labels is not None:  # for the trial the first label serves for every row of the batch
        labels = labels[:1] * batch_length(sample, build.metric.declared.batch_inputs)
    output_form = derive_form([outputs], inputs=[sample], metric=build.metric)
    comparison = Comparison(output_form, labels=labels)
    comparison.add(sample, outputs, outputs)
    comparison.result()


def _plan_targets(
    build: PreparedBuild, calibration: CalibrationResult, stage: Stage
) -> tuple[dict[str, PlannedTarget], Path | None]:
    """Return (target -> its plan, path of the plan file or None), as `search_targets`.

    A plan says which layers stay float, and how ranges are searched. The float layers of a Q/DQ
    model stay float on every target, without a search and a plan file.
    """
    qdq = build.loaded.qdq
    if qdq is None:
        return search_targets(build, calibration, stage)
    plan = TargetPlan(choices=keep_float_layers(qdq, build.loaded))
    planned_target = PlannedTarget(plan=plan, searched=False)
    return {target.name: planned_target for target in build.options.targets}, None


def _measure(
    build: PreparedBuild, calibration: CalibrationResult, results: list[BuildResult], stage: Stage
) -> Figures:
    """Return speed and accuracy of the engines; without images, their files alone."""
    if build.dataset is None:
        figures = list_engines(build.reference, results)
    else:
        figures = _measure_on_images(build, calibration, results, stage)

    # how many of the images calibrated; none for a Q/DQ model, which is not calibrated here
    evaluation = build.evaluation
    shared_count = 0
    calibrated_text = ""
    if build.loaded.qdq is None:
        if evaluation is not None:
            shared_count = evaluation.count_shared(calibration.feed)
        if evaluation is None or shared_count == evaluation.count:
            calibrated_text = ALL_CALIBRATED
        elif shared_count:
            calibrated_text = f"{shared_count} of {evaluation.count} calibrated"
    notes = (*build.notes, *figures.notes, *_evaluation_notes(build, calibration, shared_count))
    skipped = () if evaluation is None else evaluation.skipped
    return replace(figures, notes=notes, calibrated=calibrated_text, skipped=skipped)


def _measure_on_images(
    build: PreparedBuild, calibration: CalibrationResult, results: list[BuildResult], stage: Stage
) -> Figures:
    """Return speed and accuracy of all engines on the evaluation images.

    They are compared with the model that was calibrated, whose outputs of some calibration samples
    are stored. Engines of a Q/DQ model are compared with its float reference.

    An unexpected exception is a fault of calib8. Each target is then measured alone, and counts as
    failed if that raises too. The others are measured together, without the failed ones.
    """
    evaluation_set = calibration.evaluation_set
    if build.loaded.qdq is None:
        float_model = calibration.loaded
        observed_outputs = evaluation_set.reference_outputs
    else:
        float_model = build.reference
        observed_outputs = None
    measure = partial(
        measure_engines,
        float_model,
        calibration_samples=evaluation_set.subset,
        evaluation_feed=build.evaluation,
        objects=build.annotated_objects,
        metric=build.metric,
        observed_outputs=observed_outputs,
        # each search stored the outputs of the int8 model that it chose, on calibration samples
        engine_outputs=evaluation_set.engine_outputs,
        threads=build.options.calibration.workers,
    )
    targets = build.options.targets
    try:
        return measure(targets, results, duration_s=build.duration_s)
    except (Calib8Error, MemoryError, OSError):
        raise
    except Exception:
        failures: dict[str, str] = {}  # target -> its error when it is measured alone
        for target, result in zip(targets, results, strict=True):
            try:
                measure([target], [result], duration_s=0)  # without latency runs
            except Exception as error:
                failures[target.name] = str(with_log(error, build.loaded.name, stage))
        # if no target fails alone, or each does, none of them is the cause
        if not failures or len(failures) == len(targets):
            raise

    # a target that failed has no files to measure
    measurable_results = []
    for result in results:
        if result.target in failures:
            result = BuildResult(target=result.target, error=failures[result.target])
        measurable_results.append(result)
    figures = measure(targets, measurable_results, duration_s=build.duration_s)
    return replace(figures, failures={**figures.failures, **failures})


def _evaluation_notes(
    build: PreparedBuild, calibration: CalibrationResult, shared_count: int
) -> Iterator[str]:
    """Yield notes on the evaluation images and the outputs, and on the search's metric.

    `shared_count`: number of evaluation images that are calibration images too.
    """
    skipped_outputs = [
        f"{spec.name} ({spec.dtype})"
        for spec in build.loaded.outputs
        if spec.dtype in _TYPES_WITHOUT_NUMBERS
    ]
    if skipped_outputs:
        yield f"outputs that are not numbers are not compared: {', '.join(skipped_outputs)}"

    tuning = build.options.tuning
    evaluation = build.evaluation
    is_searched = tuning.level > 0 and not tuning.plan  # effort 0, or a plan: nothing is searched
    metric = build.metric
    if metric.function is not None and build.has_labels and is_searched:
        yield (
            f"the search went by the outputs' form, not by {metric.name}: it runs calibration"
            " images, whose labels are not used"
        )

    if evaluation is None:
        return
    for note in evaluation.notes:
        if note not in calibration.feed.notes:
            yield f"of the evaluation images: {note}"
    if shared_count:
        yield (
            f"{shared_count} of the {evaluation.count} evaluation images calibrated too; ranges"
            " that clip rare values look better on these than on new images"
        )
