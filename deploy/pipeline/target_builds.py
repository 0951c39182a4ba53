"""Search what stays float on each target, and build every target.

A target that fails becomes a row with its error; the others are built all the same. If only its
engine fails, the files for another machine stay. An unexpected exception is such an error too; its
traceback is in `calib8/<model>.log`.
"""

import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from deploy.calibration.calibration_result import CalibrationResult
from deploy.errors import BackendError, Calib8Error, CalibrationError, ExportError
from deploy.feed.file_list import SampleChangedError
from deploy.files import atomic
from deploy.files.manifest import RECORDS
from deploy.files.staging import Stage
from deploy.method import NO_CHOICES
from deploy.pipeline.build_options import plan_name
from deploy.targets import Target
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import changed_options
from deploy.terminal import phase
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.repairs.apply import repair_notes, repair_request, repair_samples
from deploy.tuning.search_options import Tuning
from deploy.tuning.tune import PlannedTarget, find_plan, plan_target, store_plan


@phase("search")
def search_targets(
    targets: Sequence[Target],
    calibrated: CalibrationResult,
    stage: Stage,
    wish: Tuning,
    *,
    method_asked: bool,
    repairs: Callable[[Target], Sequence[str]],
    threads: int,
) -> tuple[dict[str, PlannedTarget], Path | None]:
    """Return (target -> what stays float and how ranges are searched, the plan file).

    Raises:
        ConfigError: a plan that does not fit the model.
    """
    path = stage.folder / plan_name(calibrated.loaded)
    known = find_plan(path, wish, calibrated.loaded.digest)
    request = _request(calibrated, stage, threads, wish.cpu)
    found = {}
    for target in targets:
        if target.name in calibrated.failures:
            continue
        try:
            with phase(target.name):
                own = wish.for_target(target)
                found[target.name] = plan_target(
                    target, request, own, known, method_asked=method_asked, repairs=repairs(target)
                )
        except (MemoryError, OSError):
            raise
        except Exception as error:
            why = with_log(error, calibrated.loaded.name, stage)
            if not isinstance(why, BackendError | CalibrationError | ExportError):
                raise
            found[target.name] = PlannedTarget(
                plan=TargetPlan(choices=NO_CHOICES),
                searched=False,
                note=f"nothing was searched for {target.name}: {why}",
            )
    searched = any(one.searched for one in found.values())
    if not (searched or wish.plan is not None or known.targets):
        return found, None
    return found, store_plan(stage.records / path.name, known, found)


@phase("targets")
def build_targets(
    targets: Sequence[Target],
    calibrated: CalibrationResult,
    stage: Stage,
    threads: int,
    plans: Mapping[str, PlannedTarget],
    *,
    repairs: Callable[[Target], Sequence[str]],
    against: onnx.ModelProto | None,
    cpu: str,
) -> list[BuildResult]:
    """Build every target; a failed one becomes its error.

    Args beyond those of `deploy.pipeline.build`:
        against: the model without repairs, if speed is measured.
        cpu: one of `deploy.tuning.CPU_NAMES`.

    Raises:
        Calib8Error: every target failed, and none left a file.
    """
    request = replace(_request(calibrated, stage, threads, cpu), unrepaired_model=against)
    results: list[BuildResult] = []
    errors: list[Calib8Error] = []
    for target in targets:
        if target.name in calibrated.failures:
            results.append(BuildResult(target=target.name, error=calibrated.failures[target.name]))
            continue
        before = stage.file_names()
        try:
            chosen = request.with_choices(plans[target.name].plan.choices)
            with phase(target.name):
                names = repairs(target)
                samples = repair_samples(chosen.evaluation_set) if names else []
                own, tried = repair_request(target, chosen, names, samples)
                made = target.build(own)
            notes = (*repair_notes(tried), *made.notes)
            results.append(replace(made, options=changed_options(target), notes=notes))
        except (SampleChangedError, MemoryError, OSError):  # of the run, not of the target
            raise
        except Exception as error:
            stage.discard({*stage.file_names()}.difference(before))
            errors.append(with_log(error, calibrated.loaded.name, stage))
            results.append(BuildResult(target=target.name, error=str(errors[-1])))
    if errors and all(result.error and not result.files for result in results):
        raise errors[0]
    return results


def with_log(error: Exception, name: str, stage: Stage) -> Calib8Error:
    """Return an unexpected exception as a BackendError, with its traceback in a log file."""
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
    results: Sequence[BuildResult], failed: Collection[str], stage: Stage
) -> list[BuildResult]:
    """Remove engines that cannot be opened or run; files for another machine stay."""
    kept = []
    for result in results:
        if result.target in failed and not result.error:
            engines = {path for path in (result.engine, *result.baselines.values()) if path}
            portable = result.engine not in (None, result.runnable)
            stays = {
                r: path for r, path in result.files.items() if portable and path not in engines
            }
            gone = {*engines, *result.files.values()}.difference(stays.values())
            stage.discard(name for path in gone for name in (path.name, f"{path.name}.json"))
            result = replace(result, engine=None, runnable=None, baselines={}, files=stays)
        kept.append(result)
    return kept


def _request(calibrated: CalibrationResult, stage: Stage, threads: int, cpu: str) -> BuildRequest:
    return BuildRequest(
        subject=calibrated.subject,
        folder=stage.temporary_folder,
        earlier_folder=stage.folder,
        ranges=calibrated.ranges,
        feed=calibrated.feed,
        manifest=calibrated.feed.manifest(),
        evaluation_set=calibrated.evaluation_set,
        threads=threads,
        cpu=cpu,
    )
