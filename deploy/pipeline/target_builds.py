"""Search which layers stay float on each target, and build every target.

A target that fails becomes a row with its error; the others are built all the same. If only its
engine fails, the files for another machine stay. An unexpected exception is such an error too; its
traceback is in `calib8/<model>.log`.
"""

import os
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.calibration.calibration_result import CalibrationResult
from deploy.errors import BackendError, Calib8Error, CalibrationError, ExportError
from deploy.feed.file_list import SampleChangedError
from deploy.files import atomic
from deploy.files.manifest import RECORDS
from deploy.files.staging import Stage
from deploy.machine import large_blocks_returned
from deploy.pipeline.build_options import PreparedBuild, plan_name
from deploy.targets import Target
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import changed_options
from deploy.terminal import phase
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.repairs.apply import repair_request, repair_samples
from deploy.tuning.tune import PlannedTarget, find_plan, plan_target, store_plan


@phase("search")
def search_targets(
    build: PreparedBuild, calibration: CalibrationResult, stage: Stage
) -> tuple[dict[str, PlannedTarget], Path | None]:
    """Plan every target: search which layers stay float, and how each range is searched.

    Args:
        build: the targets, and the options of the search.
        calibration: the calibration.
        stage: holds the new files until the build is complete. `stage.folder` is the final folder,
            with the files of an earlier build.

    Returns:
        (target -> its plan, path of the plan file). The path is None if there is nothing to write.
        A target whose search failed has an empty plan with a note; one that cannot be built has no
        plan.

    Raises:
        ConfigError: a plan that does not fit the model.
    """
    options = build.options
    tuning = replace(
        options.tuning,
        timed=build.duration_s > 0,  # whether the search measures times
        fresh=options.calibration.cache.refresh,  # whether it ignores the plan of the build before
        metric=build.search_metric,
    )
    plan_path = stage.folder / plan_name(calibration.loaded)
    # the user's plan, or that of the build before; a target that it fits is not searched
    earlier_plan = find_plan(plan_path, tuning, calibration.loaded.digest)
    request = _make_request(build, calibration, stage)
    plans = {}
    for target in options.targets:
        if target.name in calibration.failures:
            continue
        try:
            with phase(target.name):
                plans[target.name] = plan_target(
                    target,
                    request,
                    tuning.for_target(target),
                    earlier_plan,
                    has_fixed_method=options.calibration.method is not None,
                    rounds_weights=build.rounds_weights_of(target),
                )
        except (MemoryError, OSError):  # they end the run, not the search of one target
            raise
        except Exception as error:
            # an unexpected exception becomes a BackendError that names its log file
            logged_error = with_log(error, calibration.loaded.name, stage)
            if not isinstance(logged_error, BackendError | CalibrationError | ExportError):
                raise  # an error of the options, the model or the images ends the build
            plans[target.name] = PlannedTarget(
                plan=TargetPlan(),
                searched=False,
                note=f"nothing was searched for {target.name}: {logged_error}",
            )

    # the plan file has the plans that were searched now, and those of other targets: from the file
    # of the build before, or from the user's. Nothing is written if there is neither
    is_searched = any(planned_target.searched for planned_target in plans.values())
    if not is_searched and tuning.plan is None and not earlier_plan.targets:
        return plans, None
    return plans, store_plan(stage.records / plan_path.name, earlier_plan, plans)


@phase("targets")
def build_targets(
    build: PreparedBuild,
    calibration: CalibrationResult,
    stage: Stage,
    plans: Mapping[str, PlannedTarget],
) -> list[BuildResult]:
    """Build every target; the result of one that fails has the error, and its files are removed.

    Args:
        build: the targets, and how they are built.
        calibration: the calibration, with the targets that failed in it already.
        stage: folder of the files until the build is complete.
        plans: target -> its plan: which layers stay float, and how each range is searched.

    Returns:
        One result a target, in the order of the targets.

    Raises:
        Calib8Error: no target is usable: each failed and left no file for another machine. It is
            the first error of a build here; if all failed in the calibration, nothing is raised.
    """
    request = _make_request(build, calibration, stage)
    # If latency is measured, float engines are built too, as rivals of int8. They get the model
    # without the repairs, which change its weights or biases for the sake of int8.
    if build.duration_s > 0:
        request = replace(request, unrepaired_model=build.loaded.model)
    results = []
    errors = []
    for target in build.options.targets:
        if target.name in calibration.failures:
            error_text = calibration.failures[target.name]
            results.append(BuildResult(target=target.name, error=error_text))
            continue

        names_before = stage.file_names()
        choices = plans[target.name].plan.choices  # layers in float, and methods of ranges
        try:
            with phase(target.name):
                result = _build_target(
                    target,
                    request.with_choices(choices),
                    rounds_weights=build.rounds_weights_of(target),
                )
        except (SampleChangedError, MemoryError, OSError):  # they end the run, not one target
            raise
        except Exception as error:
            stage.discard(set(stage.file_names()).difference(names_before))
            known_error = with_log(error, calibration.loaded.name, stage)
            errors.append(known_error)
            result = BuildResult(target=target.name, error=str(known_error))
        results.append(result)

    # if only its engine failed, a target has an error and files: another machine can build it
    is_any_usable = any(result.files or not result.error for result in results)
    if errors and not is_any_usable:
        raise errors[0]
    return results


def _build_target(target: Target, request: BuildRequest, *, rounds_weights: bool) -> BuildResult:
    """Build a target, from rounded weights if that helps it."""
    notes: tuple[str, ...] = ()
    if rounds_weights:
        samples = repair_samples(request.evaluation_set)
        request, note = repair_request(target, request, samples)
        notes = (note,)
    with large_blocks_returned():
        result = target.build(request)
        if request.evaluation_set is not None:  # the build may have run the float model
            request.evaluation_set.reference_outputs.close_session()
    return replace(result, options=changed_options(target), notes=(*notes, *result.notes))


def with_log(error: Exception, name: str, stage: Stage) -> Calib8Error:
    """Return an unexpected exception as a BackendError, with its traceback in a log file.

    An error of calib8's own classes is returned as it is.
    """
    if isinstance(error, Calib8Error):
        return error
    if os.environ.get("CALIB8_TRACEBACK"):
        raise error
    log = stage.folder / RECORDS / f"{name}.log"
    atomic.write_text(log, "".join(traceback.format_exception(error)))
    return BackendError(
        f"a fault of calib8 itself ({type(error).__name__}: {error}); please report it with {log}"
    )


def discard_failed(
    results: Sequence[BuildResult], failures: Collection[str], stage: Stage
) -> list[BuildResult]:
    """Remove engines that cannot be opened or run; files for another machine stay."""
    remaining_results = []
    for result in results:
        if result.target in failures and not result.error:
            result = _discard_engines(result, stage)
        remaining_results.append(result)
    return remaining_results


def _discard_engines(result: BuildResult, stage: Stage) -> BuildResult:
    """Remove the engines of a target; files from which another machine can build them stay.

    An engine such as TensorRT's was built from an ONNX file, which stays. If ONNX Runtime itself
    runs the engine, or there is no engine and ONNX Runtime failed with the model in its place, all
    files of the target are removed.
    """
    engine_paths = {path for path in (result.engine, *result.baselines.values()) if path}
    is_built_from_onnx = result.engine is not None and result.engine != result.runnable
    discarded_paths = set(engine_paths)
    remaining_files = {}
    for role, path in result.files.items():
        if is_built_from_onnx and path not in engine_paths:
            remaining_files[role] = path
        else:
            discarded_paths.add(path)

    discarded_names = []
    for path in discarded_paths:
        # an engine has a .json beside it: what it was built with
        discarded_names += [path.name, f"{path.name}.json"]
    stage.discard(discarded_names)
    return replace(
        result, engine=None, runnable=None, shipped=(), baselines={}, files=remaining_files
    )


def _make_request(
    build: PreparedBuild, calibration: CalibrationResult, stage: Stage
) -> BuildRequest:
    """Return what all targets are built from; the choices of each target's plan are added later.

    Each target is given all that are built (`companions`): a repair is computed for them together.
    """
    options = build.options
    buildable_targets = tuple(
        target for target in options.targets if target.name not in calibration.failures
    )
    return BuildRequest(
        subject=calibration.subject,
        folder=stage.temporary_folder,
        earlier_folder=stage.folder,
        ranges=calibration.ranges,
        feed=calibration.feed,
        manifest=calibration.feed.manifest(),
        evaluation_set=calibration.evaluation_set,
        threads=options.calibration.workers,
        cpu=options.tuning.cpu,
        companions=buildable_targets,
    )
