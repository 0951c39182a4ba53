"""Build a model: calibrate it, build every target, measure the engines, and write the report.

`build_with` has a line for each step. A Q/DQ model brings its ranges along
(`deploy.calibration.calibration_result`): nothing is observed or searched for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from deploy.calibration.calibration_result import CalibrationResult, keep_float_layers
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.reuse import CachePolicy, as_policy
from deploy.errors import Calib8Error
from deploy.feed.evaluation import read_labels
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.sampling import Limit
from deploy.files import atomic, manifest
from deploy.files.guard import guard_inputs
from deploy.files.staging import Stage, stage_files
from deploy.frontends import LoadedModel
from deploy.graph.index import as_names
from deploy.method import Method
from deploy.metrics.accuracy import Comparison, StoredOutputs
from deploy.metrics.precision import Annotations
from deploy.pipeline.build_options import (
    BuildOptions,
    CalibrationOptions,
    PreparedBuild,
    open_torch_module,
    prepare_build,
    rereadable_model,
)
from deploy.pipeline.calibration_setup import already_calibrated, calibrate_loaded
from deploy.pipeline.evaluate import CALIBRATION_SAMPLES
from deploy.pipeline.measure import Figures, list_engines, measure_engines
from deploy.pipeline.results import build_origin, publish_build, write_report
from deploy.pipeline.target_builds import build_targets, discard_failed, search_targets, with_log
from deploy.report import Report
from deploy.report.verdict import Gates
from deploy.targets import Target, make_targets
from deploy.targets.base import BuildResult
from deploy.tasks.metric import Function
from deploy.tasks.rows import batch_length
from deploy.terminal import number_phases, with_progress
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.search_options import Tuning
from deploy.tuning.search_samples import CANDIDATES
from deploy.tuning.tune import PlannedTarget

if TYPE_CHECKING:
    from torch import nn


@with_progress
def build(
    model: str | Path | onnx.ModelProto | LoadedModel | nn.Module,
    images: FeedSource | None = None,
    *,
    float_model: str | Path | onnx.ModelProto | nn.Module | None = None,
    out: Path | str = "build",
    targets: str | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: PreprocessRequest = None,
    cache: Path | str | CachePolicy | None = None,
    eval_images: FeedSource | None = None,
    labels: Sequence[int] | Annotations | str | Path | None = None,
    metric: str | Function | None = None,
    task: str | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: str | Iterable[str] = (),
    duration_s: float | None = None,
    tuning: Tuning | None = None,
    gates: Gates | None = None,
    repairs: str | Sequence[str] | None = None,
    scheduler: str | Cluster | None = None,
    settings: str | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Report:
    """Calibrate (or reuse a calibration), build every target, measure, and write the report.

    `build(module, loader)` takes a PyTorch module as it is, in any mode and on any device, and does
    not change it: a copy is exported by the first item of the loader (a tensor, a tuple that begins
    with the inputs, or a dict by the names of forward's arguments) and checked against torch. The
    files have the name of its class: small_net.int8.onnx of SmallNet.

    A target that fails is a row of the report with its sentence; the others are built all the same.

    Of a Q/DQ model, whoever trained it, the scales of its pairs are the calibration: images, where
    there are some, are what it is measured on.

    Args beyond those of `calibrate`:
        images: None for a Q/DQ model of which nothing is to be measured.
        float_model: what a Q/DQ model is judged beside; None takes its pairs out for that.
        out: folder of everything that is written; the cache too, where `cache` names none.
        eval_images: images for the accuracy figures; None takes the calibration images.
        labels: class of every evaluation image, where its list does not give it; the path of a
            COCO json or of a text file with a class a line; or "folders", which numbers the folders
            of the images.
        metric: "file.py:function" or a function (FP32 outputs, int8 outputs, label or None) ->
            number, more is better; called once a sample, its mean stands for the task's figure.
        task: name of the outputs' task (`deploy.tasks.TASKS`), or "none" to compare values;
            None recognises it.
        duration_s: seconds of measuring a model; 0 leaves latency out, and time out of the search.
            None is 3, or 0 where `tuning.cpu` names another CPU than this one.
        tuning: how much is searched for what stays float and for ranges, or the plan to obey.
        gates: what is demanded of the engines; their verdicts say whether it is met.
        repairs: names of `deploy.tuning.repairs.REPAIRS`, `all` or `none`, to be tried and kept
            where they help; None tries `deploy.tuning.repairs.DEFAULT` where there is a search.
        settings: text of `calib8.toml`, which is written beside the rest; None writes none.

    Raises:
        Calib8Error: as `calibrate`; and what the targets raised where none could be built.
    """
    dataset, evaluation = None, None
    if isinstance(labels, str | Path):
        labels = read_labels(labels)
    elif labels is not None and not isinstance(labels, Annotations):
        labels = tuple(map(index, labels))  # an array's too
    model, images = open_torch_module(model, images, preprocess)
    if float_model is not None:
        opened, images = open_torch_module(float_model, images)
        float_model = rereadable_model(opened)
    if images is not None:
        dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    if eval_images is not None:
        evaluation = to_dataset(eval_images, preprocess=preprocess, skip_bad=skip_bad)
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
        labels=labels,
        metric=metric,
        task=task,
        duration_s=duration_s,
        tuning=tuning or Tuning(),
        gates=gates or Gates(),
        repairs=repairs,
        settings=settings,
    )
    return build_with(model, dataset, options)


@guard_inputs()
def build_with(
    model: str | Path | onnx.ModelProto | LoadedModel,
    dataset: Dataset | None,
    options: BuildOptions,
) -> Report:
    """`build` with its options as one value."""
    build = prepare_build(model, dataset, options)
    with number_phases(*build.steps), stage_files(build.options.out) as stage:
        calibration = _calibrated(build, stage)
        _refuse_broken_metric(build, calibration)
        plans, plan = _tuned(build, calibration, stage)
        results = build_targets(
            build.options.targets,
            calibration,
            stage,
            build.options.calibration.workers,
            plans,
            repairs=build.repairs_of,
            against=build.loaded.model if build.duration_s > 0 else None,
            cpu=build.options.tuning.cpu,
        )
        figures = _measured(build, calibration, results, stage)
        results = discard_failed(results, figures.failed, stage)
        report = write_report(
            calibration,
            results,
            figures,
            stage,
            plans=plans,
            plan=plan,
            gates=build.options.gates,
            settings=build.options.settings is not None,
        )
        options = build.options
        if options.settings is not None:
            atomic.write_text(stage.temporary_folder / manifest.SETTINGS, options.settings)
        replacing = None if options.calibration.cache.force else build.own_files
        origin = build_origin(calibration, options.targets, build.outside_cache)
        publish_build(origin, stage, replacing=replacing)
    return report


def _calibrated(build: PreparedBuild, stage: Stage) -> CalibrationResult:
    """The calibration, observed or from the cache; of a Q/DQ model what its pairs say."""
    options = build.options
    if build.loaded.qdq is not None:
        return already_calibrated(
            build.loaded,
            build.loaded.qdq,
            build.dataset,
            targets=options.targets,
            trt_version=options.calibration.cache.trt_version,
        )
    assert build.dataset is not None
    return calibrate_loaded(
        build.loaded,
        build.given,
        build.dataset,
        options.calibration,
        targets=options.targets,
        evaluation_count=CALIBRATION_SAMPLES if build.evaluation is None else CANDIDATES,
        repairs=build.repairs,
        task=options.task or "",
        stage=stage,
    )


def _refuse_broken_metric(build: PreparedBuild, calibration: CalibrationResult) -> None:
    """Refuse a user's metric or task that fails on the float model itself, before all is built."""
    if build.metric is None or build.loaded.qdq is not None:
        return
    sample, outputs = next(iter(calibration.evaluation_set.samples_with_outputs(1)))
    labels = None if build.evaluation is None else build.evaluation.labels
    first_labels = None if labels is None else labels[:1] * batch_length(sample)
    itself = StoredOutputs(outputs)
    comparison = Comparison(itself, itself, metric=build.metric, labels=first_labels)
    comparison.add(sample, outputs, outputs)
    comparison.result()


def _tuned(
    build: PreparedBuild, calibration: CalibrationResult, stage: Stage
) -> tuple[dict[str, PlannedTarget], Path | None]:
    """(target -> what stays float, the plan file); of a Q/DQ model what is float in it."""
    trained, options = build.loaded.qdq, build.options
    if trained is not None:
        plan = TargetPlan(choices=keep_float_layers(trained, build.loaded))
        return {one.name: PlannedTarget(plan=plan, searched=False) for one in options.targets}, None
    return search_targets(
        options.targets,
        calibration,
        stage,
        replace(
            options.tuning,
            timed=build.duration_s > 0,
            fresh=options.calibration.cache.refresh,
            metric=build.search_metric,
        ),
        method_asked=options.calibration.method is not None,
        repairs=build.repairs_of,
        threads=options.calibration.workers,
    )


def _measured(
    build: PreparedBuild, calibration: CalibrationResult, results: list[BuildResult], stage: Stage
) -> Figures:
    """Speed and accuracy of the engines; without images nothing is measured.

    After an unexpected exception each target is measured alone, and those that raise again have
    failed.
    """
    if build.dataset is None:
        figures = list_engines(build.reference, results)
    else:
        ours = build.loaded.qdq is None
        unchanged = not calibration.subject.repairs
        measured = partial(
            measure_engines,
            calibration.loaded if ours else build.reference,
            calibration=calibration.evaluation_set.subset,
            evaluation=build.evaluation,
            labels=build.objects,
            metric=build.metric,
            observed_outputs=calibration.evaluation_set.outputs if ours and unchanged else None,
            threads=build.options.calibration.workers,
        )
        targets = build.options.targets
        try:
            figures = measured(targets, results, duration_s=build.duration_s)
        except (Calib8Error, MemoryError, OSError):
            raise
        except Exception:
            failed = {}  # each target by itself, to find those that fail
            for target, result in zip(build.options.targets, results, strict=True):
                try:
                    measured([target], [result], duration_s=0)
                except Exception as error:
                    failed[target.name] = str(with_log(error, build.loaded.name, stage))
            if not failed or len(failed) == len(targets):
                raise
            sound = [
                BuildResult(target=r.target, error=failed[r.target]) if r.target in failed else r
                for r in results
            ]
            figures = measured(targets, sound, duration_s=build.duration_s)
            figures = replace(figures, failed={**figures.failed, **failed})
    return replace(figures, notes=(*build.notes, *figures.notes, *_notes(build, calibration)))


def _notes(build: PreparedBuild, calibration: CalibrationResult) -> list[str]:
    """Notes on the evaluation images and on what the search was judged by."""
    notes, tuning, evaluation = [], build.options.tuning, build.evaluation
    kinds = ("str", "sequence", "map", "optional")
    if left := [f"{s.name} ({s.dtype})" for s in build.loaded.outputs if s.dtype in kinds]:
        notes.append(f"outputs that are not numbers are not compared: {', '.join(left)}")
    own = build.metric is not None and build.metric.function is not None
    if build.metric and own and build.is_labelled and tuning.level and not tuning.plan:
        notes.append(
            f"the search went by the outputs' form, not by {build.metric.name}: its images are some"
            " that calibrate, of which no labels are used"
        )
    if evaluation is None:
        return notes
    known = calibration.feed.notes
    notes += [f"of the evaluation images: {one}" for one in evaluation.notes if one not in known]
    if build.loaded.qdq is None and (shared := evaluation.count_shared(calibration.feed)):
        notes.append(
            f"{shared} of the {evaluation.count} evaluation images calibrated too; what clips looks"
            " better on these than on others"
        )
    return notes
