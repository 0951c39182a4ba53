"""Check files as they were shipped: measure them on new images, and judge them as a build does.

::

    a build's folder: report.json, manifest  --> files, float model, preprocessing, limits
    or an engine, and its float model        --> files, float model
                                                   |
    images, labels, the user's limits        ----> measured --> verdicts

Nothing is built, and nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from deploy.analysis.benchmark import find_target
from deploy.analysis.build_reader import (
    StoredBuild,
    Verification,
    load_float_model,
    model_notes,
    path_in_build,
    path_near_report,
    read_stored_build,
    verify,
    with_stored_preprocess,
)
from deploy.calibration.calibration_result import find_reference_model
from deploy.calibration.input_checks import check_input_samples
from deploy.calibration.reference_outputs import find_random_outputs, make_evaluation_set
from deploy.errors import BackendError, ConfigError, list_first
from deploy.feed.evaluation import (
    BY_FOLDER,
    EvaluationSubset,
    ImageLabels,
    apply_labels,
    to_labels,
)
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel, load_float_or_qdq
from deploy.frontends.checks import is_quantized_node
from deploy.frontends.onnx_reader import read_model
from deploy.graph.index import all_nodes
from deploy.graph.plan import Decision
from deploy.machine import this_machine, worker_threads
from deploy.metrics import DURATION_S
from deploy.pipeline.build_options import ModelSource, check_arguments, open_torch_module
from deploy.pipeline.calibration_run import describe_source
from deploy.pipeline.measure import ALL_CALIBRATED, Figures, measure_engines
from deploy.pipeline.results import engine_rows, feed_part, model_part
from deploy.report import Report
from deploy.report.parts import RequestPart, TargetPart
from deploy.report.verdict import Gates
from deploy.runtimes.ort import warn_of_int8_kernels
from deploy.targets import TARGETS, Target
from deploy.targets.base import BuildResult
from deploy.tasks import make_metric
from deploy.tasks.metric import Function
from deploy.terminal import with_progress

if TYPE_CHECKING:
    from torch import nn

_MAX_NAMES = 3  # files named in a sentence
_ADAPTABLE = (".sh", ".py", "_README.txt")  # ends of files that users may change as they like
_FED_ARRAYS = (
    "the build was fed arrays, so the preprocessing of these images is unknown; name it with"
    " --preprocess, or --mean and --std"
)
_INPUT_SAMPLES = 8  # images that are looked at for odd preprocessing


@check_arguments
@with_progress
def check(
    path: Path | str,
    images: FeedSource | Dataset,
    *,
    against: Path | str | onnx.ModelProto | nn.Module | None = None,
    labels: Iterable[int] | ImageLabels | str | Path | None = None,
    metric: str | Function | None = None,
    task: str | None = None,
    gates: Gates | None = None,
    targets: Sequence[Target] = (),
    preprocess: PreprocessRequest = None,
    limit: Limit = None,
    skip_bad: bool = False,
    duration_s: float = DURATION_S,
    threads: int | None = None,
    progress: bool = False,
) -> Report:
    """Measure the files of a build, or one engine, and give verdicts by the rules of a build.

    Nothing is built or written. Preprocessing, task and limits are those of the build, unless the
    arguments set others.

    Args:
        path: output folder of a build, its report.json, or the file of an engine.
        images: evaluation images, as for `build`.
        against: the float model; None uses that of the build.
        labels: as for `build`.
        metric: "file.py:function" or a function, as for `build`.
        task: name of the outputs' task; None uses the build's, or recognises it.
        gates: limits; a limit of None is that of the build.
        targets: targets with options for running engines; others use their defaults.
        preprocess: preprocessing, or some of its options; the others come from the build.
        limit: largest number of images, or a `Choice` of them.
        skip_bad: skip unreadable images.
        duration_s: seconds of latency runs for each model; 0 measures no speed.
        threads: threads inside one inference on the CPU.
        progress: report steps that take over two seconds on stderr.

    Raises:
        ConfigError: `path` is no build and no engine, an engine has no `against`, or options do not
            fit.
        CacheError: the build's folder has no manifest.
        BackendError: no file of the build can be checked here.
        ModelError, FeedError: the float model or the images cannot be read.
    """
    # the files to check, and the float model to compare them with
    dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    # a data.yaml has several splits, of which this one is read; other images have none
    dataset = replace(dataset, split="val")
    if against is not None:
        against, source = open_torch_module(against, dataset.source)
        dataset = replace(dataset, source=source)
    if Path(path).suffix == ".json" or Path(path).is_dir():
        shipped, dataset = _read_build(path, dataset, against, targets)
    else:
        shipped = _read_engine(Path(path), against, targets)
    _refuse_unusable(shipped)

    # run them on the images
    loaded = shipped.loaded
    image_labels = to_labels(labels)
    feed = loaded.open_samples(dataset, labels_by_folder=image_labels == BY_FOLDER)
    reference, reference_notes = find_reference_model(
        loaded, float_model=None, images=dataset.source
    )
    # latency is measured with them: the build's calibration samples are not here
    latency_samples = EvaluationSubset(feed, feed.count)
    figures = measure_engines(
        reference,
        shipped.targets,
        shipped.results,
        calibration_samples=latency_samples,
        evaluation_feed=feed,
        objects=apply_labels(image_labels, feed, loaded.classes),
        metric=make_metric(metric, task or shipped.task or None, loaded.declaration),
        duration_s=duration_s,
        threads=worker_threads(threads),
    )

    # the report; its verdict says so if the images are those that the build was calibrated with
    if feed.manifest()["sha256"] == shipped.calibration_digest:
        figures = replace(figures, calibrated=ALL_CALIBRATED)
    if metric is None and shipped.metric:
        alert = f"the build was judged by its own metric, {shipped.metric}; --metric gives it here"
        shipped = replace(shipped, alerts=(*shipped.alerts, alert))
    report = _make_report(shipped, figures, feed, describe_source(dataset.source), gates or Gates())
    return replace(report, notes=(*reference_notes, *report.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShippedFiles:
    """The files to check, and what they are compared with.

    Attributes:
        title: of the report.
        loaded: the float model.
        targets: targets of the files, which open them.
        results: files of each target; `error` says why some of them cannot be checked.
        folder: folder of the files.
        gates: limits of the build.
        task: task that the user set in the build; "" without.
        metric: name of the metric that judged the build; "" without.
        calibration_digest: of the build's calibration images; "" if unknown.
        alerts: sentences on files that are not as the build wrote them, or that ONNX Runtime
            computes wrongly; "" for none.
        image_doubts: sentences on the preprocessing, for evaluation samples that are images.
        had_assumed_inputs: whether the build took calib8's default preprocessing, and the user sets
            no other.
        had_random_outputs: whether the same float model gave other outputs at each run in the
            build. A run here may not show that: ONNX Runtime may leave out its Dropout.
    """

    title: str
    loaded: LoadedModel
    targets: tuple[Target, ...]
    results: tuple[BuildResult, ...]
    folder: Path
    gates: Gates = field(default_factory=Gates)
    task: str = ""
    metric: str = ""
    calibration_digest: str = ""
    alerts: tuple[str, ...]
    image_doubts: tuple[str, ...] = ()
    had_assumed_inputs: bool = False
    had_random_outputs: bool = False


def _read_build(
    folder: Path | str,
    dataset: Dataset,
    against: ModelSource | None,
    targets: Sequence[Target],
) -> tuple[_ShippedFiles, Dataset]:
    """Read what a build left: its files to check, and how its images were prepared.

    Args:
        folder: output folder of the build, or its report.json.
        dataset: the user's images.
        against: the user's float model; None takes the one of the build.
        targets: targets with options; others use their defaults.

    Returns:
        (the files of the build, the user's images with the build's preprocessing).
    """
    build = read_stored_build(folder)
    verification = verify(build.path.parent)
    report = build.report
    request = report.request or RequestPart()
    loaded, reference_alerts = _load_reference(build, against, is_quantized=request.is_quantized)
    target_by_name = {target.name: target for target in targets}
    built_targets = []
    results = []  # the files of each of these targets
    for part in report.targets:
        if part.name not in TARGETS:  # it is of a newer calib8, or the report was edited
            continue
        built_targets.append(target_by_name.get(part.name) or TARGETS[part.name]())
        results.append(_stored_result(build, part, verification.changed))

    task, metric = _read_task_and_metric(report)
    calibration_digest = ""
    if report.feed is not None and not request.is_quantized:  # a Q/DQ model is not calibrated
        calibration_digest = report.feed.digest or ""
    stored_preprocess = report.feed.preprocess if report.feed else {}
    has_preprocess = stored_preprocess or dataset.preprocess or loaded.metadata_preprocess
    verdicts = [engine.verdict for engine in report.engines if engine.verdict]
    had_default_inputs = any(verdict.assumes_inputs for verdict in verdicts)
    shipped = _ShippedFiles(
        title=f"calib8: the files of {build.name}, checked against {loaded.source or loaded.name}",
        loaded=loaded,
        targets=tuple(built_targets),
        results=tuple(results),
        folder=build.path.parent,
        gates=Gates(max_loss=request.max_loss, min_speedup=request.min_speedup),
        task=task,
        metric=metric,
        calibration_digest=calibration_digest,
        alerts=(*_change_alerts(verification, results), *reference_alerts),
        image_doubts=() if has_preprocess else _doubt_images(report),
        had_assumed_inputs=had_default_inputs and dataset.preprocess is None,
        had_random_outputs=against is None
        and any(verdict.blames_randomness for verdict in verdicts),
    )
    return shipped, with_stored_preprocess(dataset, stored_preprocess, build.path)


def _doubt_images(report: Report) -> tuple[str, ...]:
    """Return the doubt on images of a model for which nothing says how images become inputs.

    A build that ran samples was fed arrays then. A Q/DQ model may be built without samples, and
    then has no accuracy.
    """
    ran_samples = any(engine.accuracy for engine in report.engines)
    return (_FED_ARRAYS,) if ran_samples else ()


def _read_task_and_metric(report: Report) -> tuple[str, str]:
    """Return the names of the task and of the metric that the user set in a build; "" without."""
    task = metric = ""
    for engine in report.engines:
        if engine.accuracy is None:
            continue
        task = task or engine.accuracy.set_task
        task_figure = engine.accuracy.task
        if task_figure is not None and task_figure.task == "metric":
            metric = metric or task_figure.figure
    return task, metric


def _load_reference(
    build: StoredBuild,
    against: ModelSource | None,
    *,
    is_quantized: bool,
) -> tuple[LoadedModel, tuple[str, ...]]:
    """Return (the float model of a build, alerts on it).

    Args:
        build: the build.
        against: the user's float model; None takes the one that the build was compared with.
        is_quantized: whether the build was made from a quantized model (Q/DQ), whose float model is
            another file.
    """
    model = build.report.model
    float_path = (build.options or {}).get("float")  # what the build was compared with (--float)
    if against is None and float_path:
        float_path_here = path_near_report(float_path, build.path)
        if os.path.isfile(float_path_here):
            against = float_path_here
    loaded = load_float_model(
        model.path if model else "",
        build.path,
        against,
        shapes=model.shapes if model else (),
        flag="--against",
    )
    if is_quantized and loaded.qdq is None:
        # it is the float model, and by design not the Q/DQ file of the build: no alert on that
        return loaded, ()
    alerts = list(model_notes(build.path, loaded))
    if against is None and float_path:  # neither the user nor this machine has that model
        alerts.append(
            f"the build was compared with the float model {float_path}, which is not here;"
            " --against names it"
        )
    return loaded, tuple(alerts)


def _stored_result(build: StoredBuild, part: TargetPart, changes: Mapping[str, str]) -> BuildResult:
    """Return the files of a target that can be run, at their present paths.

    They are its engine; its runnable model, which ONNX Runtime runs with the engine's numerics; and
    its baselines, float engines to compare the speed with. If a file is missing, or not as the
    build wrote it, the field `error` of the result says so.

    Args:
        build: the build.
        part: what the report says of this target.
        changes: file of the build -> "is missing", or that it was changed.
    """
    result = BuildResult(target=part.name, error=part.error)
    if part.error:
        return result

    engine: Path | None = None
    baselines = {}
    for row in build.report.engines:
        is_float_model = row.reference  # what all targets are compared with
        if row.target != part.name or is_float_model or row.path is None:
            continue
        path = path_in_build(row.path, build.path)
        if not row.baseline:
            engine = path
        elif path.is_file():
            baselines[row.label] = path
    runnable = path_in_build(part.runnable, build.path) if part.runnable else None
    if engine is None and runnable is None:
        return replace(result, error="the build wrote no file of it that can be run here")

    missing_names = [path.name for path in (engine, runnable) if path and not path.is_file()]
    if missing_names:
        fault = f"{missing_names[0]} is missing"
    else:
        fault = _find_changed(build, part, changes, {engine, runnable, *baselines.values()})
    if fault:
        return replace(result, error=f"{fault}; build again, or copy it back")
    decisions = [Decision(row.name, row.op, row.precision, row.reason) for row in part.nodes]
    return replace(
        result,
        engine=engine,
        runnable=runnable,
        baselines=baselines,
        decisions=tuple(decisions),
        method=part.method,
    )


def _find_changed(
    build: StoredBuild, part: TargetPart, changes: Mapping[str, str], run_files: Set[Path | None]
) -> str:
    """Return which file of a target is not as the build wrote it, as text; "" if there is none.

    A file that is run may differ: it is measured here as it is. So may a script, which users adapt.
    Any other file, such as the model that `atc` compiles, must be the build's: nothing that is
    measured here would show its change.

    Args:
        build: the build.
        part: what the report says of this target.
        changes: file of the build -> "is missing", or that it was changed.
        run_files: the files that are run; None in place of an engine or model that there is not.
    """
    for file in part.files:
        path = path_in_build(file.path, build.path)
        change = changes.get(path.relative_to(build.path.parent).as_posix())
        if change and path not in run_files and not path.name.endswith(_ADAPTABLE):
            return f"{path.name} {change}"
    return ""


def _change_alerts(verification: Verification, results: Sequence[BuildResult]) -> Iterator[str]:
    """Yield a sentence on changed and missing files, unless an error names all of them already."""
    errors = [result.error for result in results]
    differences = []
    for name, change in verification.changed.items():
        if not any(error.startswith(f"{Path(name).name} ") for error in errors):
            differences.append(f"{name} {change}")
    if differences:
        yield f"not all files are as the build wrote them: {list_first(differences, _MAX_NAMES)}"


def _read_engine(
    path: Path,
    against: ModelSource | None,
    targets: Sequence[Target],
) -> _ShippedFiles:
    """Return a single engine, which belongs to no build, and its float model as files to check.

    Args:
        path: file of the engine; its suffix names the target.
        against: the float model; None is refused.
        targets: targets with options, which open the files of their suffixes.

    Raises:
        ConfigError: no float model, or an engine without int8.
    """
    if against is None:
        raise ConfigError(
            f"an engine is checked against its float model, got {path} alone; name the model with"
            " --against, or give the folder of a build"
        )
    loaded = load_float_or_qdq(against)
    target = find_target(path, targets)
    # of an ONNX file, the precision of each node can be read; any other engine counts as int8
    decisions: tuple[Decision, ...] = (_UNLISTED_INT8,)
    kernel_alert = ""  # if the engine runs on kernels that compute wrongly; "" is left out later
    if target.runs_here:  # its engines are ONNX files, which ONNX Runtime runs on this machine
        model = read_model(path)
        decisions = _engine_decisions(model)
        kernel_alert = warn_of_int8_kernels(model, path.name)
    if not any(decision.quantized for decision in decisions):
        raise ConfigError(
            f"an int8 engine is checked, got {path} without QuantizeLinear and integer operators;"
            " name the int8 file, or the folder of the build if the file is for Ascend"
        )
    result = BuildResult(
        target=target.name,
        engine=path,
        runnable=path if target.runs_here else None,
        decisions=decisions,
    )
    return _ShippedFiles(
        title=f"calib8: {path}, checked against {loaded.source or loaded.name}",
        loaded=loaded,
        targets=(target,),
        results=(result,),
        folder=path.parent,
        alerts=(kernel_alert,),
    )


# stands for the nodes of an engine that is no ONNX file, and so cannot be read: it counts as int8
_UNLISTED_INT8 = Decision("engine", "engine", "int8")


def _engine_decisions(model: onnx.ModelProto) -> tuple[Decision, ...]:
    """Return the precision of each node of an engine that is an ONNX file."""
    decisions = []
    for node in all_nodes(model.graph):
        precision = "int8" if is_quantized_node(node) else "float32"
        decisions.append(Decision(node.name, node.op_type, precision))
    return tuple(decisions)


def _refuse_unusable(shipped: _ShippedFiles) -> None:
    """Refuse a build of which nothing can be checked."""
    errors = {result.target: result.error for result in shipped.results}
    if all(errors.values()):
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise BackendError(
            "a target must have its files here as the build wrote them, got none in"
            f" {shipped.folder} ({reasons or 'no target that this calib8 knows'})"
        )


def _make_report(
    shipped: _ShippedFiles, figures: Figures, feed: Feed, source: str, gates: Gates
) -> Report:
    """Return the report on the files: a row and a verdict for each.

    Args:
        shipped: the files.
        figures: what was measured of them.
        feed: the evaluation images.
        source: where the images came from.
        gates: the user's limits; a limit that is None is that of the build.
    """
    loaded = shipped.loaded
    limits = shipped.gates  # of the build; the user's limits replace them one by one
    if gates.max_loss is not None:
        limits = replace(limits, max_loss=gates.max_loss)
    if gates.min_speedup is not None:
        limits = replace(limits, min_speedup=gates.min_speedup)
    # samples spread over the feed; with a fixed batch, each has several images
    spread_samples = list(feed.spread_samples(max(1, _INPUT_SAMPLES // feed.batch)))
    input_doubts = check_input_samples(spread_samples, feed.preprocess, loaded.model)
    has_assumed_inputs = feed.has_assumed_scale
    if feed.preprocess is not None:  # images, and not arrays, which are fed as they are
        input_doubts += shipped.image_doubts
        has_assumed_inputs |= shipped.had_assumed_inputs
    evaluation_set = make_evaluation_set(feed, loaded.model, _INPUT_SAMPLES)
    randomness_warning = find_random_outputs(loaded.model, evaluation_set)
    rows = engine_rows(
        figures,
        shipped.results,
        limits,
        Stage(shipped.folder),  # nothing is staged: the files are where they are published
        classes=loaded.classes,
        doubts=input_doubts,
        has_assumed_inputs=has_assumed_inputs,
        has_random_outputs=shipped.had_random_outputs or bool(randomness_warning),
    )
    absent_alerts = _absent_alerts(shipped.results, figures.absent)
    alerts = [*shipped.alerts, *absent_alerts, *input_doubts, randomness_warning]
    return Report(
        title=shipped.title,
        model=model_part(loaded),
        feed=feed_part(feed, source),
        targets=tuple(_failed_targets(shipped.results, figures.failures)),
        engines=rows,
        machine=replace(this_machine(), devices=figures.devices),
        request=RequestPart(
            max_loss=limits.max_loss, min_speedup=limits.min_speedup, has_evaluation=True
        ),
        alerts=tuple(filter(None, alerts)),
        notes=(*feed.notes, *figures.notes),
    )


def _absent_alerts(results: Sequence[BuildResult], absent: Mapping[str, str]) -> Iterator[str]:
    """Yield one sentence for each engine that cannot be run here."""
    for result in results:
        if result.target not in absent or result.engine is None:
            continue
        checked = "so its speed is not checked, and nothing of its accuracy"
        if result.runnable is not None:
            checked = f"so its accuracy is that of {result.runnable.name}, and no speed is checked"
        yield f"{result.engine.name} cannot be run here, {checked}: {absent[result.target]}"


def _failed_targets(
    results: Iterable[BuildResult], failures: Mapping[str, str]
) -> Iterator[TargetPart]:
    """Yield the targets that could not be checked."""
    for result in results:
        error = result.error or failures.get(result.target, "")
        if error:
            yield TargetPart(name=result.target, error=error)
