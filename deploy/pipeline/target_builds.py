"""Search what stays float on each target, and build every target.

A target that fails becomes a row with its error; the others are built all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.calibration_result import CalibrationResult
from deploy.errors import BackendError, Calib8Error, CalibrationError, ExportError
from deploy.feed.file_list import SampleChangedError
from deploy.files.manifest import RECORDS
from deploy.files.staging import Stage
from deploy.method import NO_CHOICES
from deploy.targets import Target
from deploy.targets.base import BuildRequest, BuildResult
from deploy.targets.options import changed_options
from deploy.terminal import phase
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.search_options import Tuning
from deploy.tuning.tune import PlannedTarget, find_plan, plan_target, store_plan

if TYPE_CHECKING:
    import onnx


@phase("search")
def search_targets(
    targets: Sequence[Target],
    calibrated: CalibrationResult,
    stage: Stage,
    wish: Tuning,
    *,
    method_asked: bool,
    repairs: Sequence[str],
    threads: int,
) -> tuple[dict[str, PlannedTarget], Path | None]:
    """Return (target -> what stays float and how ranges are searched, the plan file).

    Raises:
        ConfigError: a plan that does not fit the model.
    """
    name = f"{calibrated.loaded.name}.plan.toml"
    known = find_plan(stage.folder / RECORDS / name, wish, calibrated.loaded.digest)
    request = _request(calibrated, stage, threads)
    found = {}
    for target in targets:
        if target.name in calibrated.failed:
            continue
        try:
            with phase(target.name):
                found[target.name] = plan_target(
                    target, request, wish, known, method_asked=method_asked, repairs=repairs
                )
        except (BackendError, CalibrationError, ExportError) as error:
            found[target.name] = PlannedTarget(
                plan=TargetPlan(choices=NO_CHOICES),
                searched=False,
                note=f"nothing was searched for {target.name}: {error}",
            )
    if not (wish.effort or wish.plan is not None or known.targets):
        return found, None
    return found, store_plan(stage.records / name, known, found)


@phase("targets")
def build_targets(
    targets: Sequence[Target],
    calibrated: CalibrationResult,
    stage: Stage,
    threads: int,
    plans: Mapping[str, PlannedTarget],
    *,
    repairs: Sequence[str],
    against: onnx.ModelProto | None,
) -> list[BuildResult]:
    """Build every target; a failed one becomes its error.

    Args beyond those of `deploy.pipeline.build`:
        against: the model without repairs, if speed is measured.

    Raises:
        Calib8Error: every target failed.
    """
    from deploy.tuning.repairs.apply import repair_notes, repair_request, repair_samples

    request = replace(_request(calibrated, stage, threads), against=against)
    results: list[BuildResult] = []
    errors: list[Calib8Error] = []
    for target in targets:
        if target.name in calibrated.failed:
            results.append(BuildResult(target=target.name, error=calibrated.failed[target.name]))
            continue
        try:
            chosen = request.choosing(plans[target.name].plan.choices)
            with phase(target.name):
                samples = repair_samples(chosen.judges) if repairs else []
                own, tried = repair_request(target, chosen, repairs, samples)
                made = target.build(own)
            notes = (*repair_notes(tried), *made.notes)
            results.append(replace(made, options=changed_options(target), notes=notes))
        except SampleChangedError:
            raise
        except Calib8Error as error:
            errors.append(error)
            results.append(BuildResult(target=target.name, error=str(error)))
    if errors and all(result.error for result in results):
        raise errors[0]
    return results


def _request(calibrated: CalibrationResult, stage: Stage, threads: int) -> BuildRequest:
    return BuildRequest(
        subject=calibrated.subject,
        folder=stage.inside,
        earlier=stage.folder,
        ranges=calibrated.ranges,
        feed=calibrated.feed,
        manifest=calibrated.feed.manifest(),
        judges=calibrated.judges,
        threads=threads,
    )
