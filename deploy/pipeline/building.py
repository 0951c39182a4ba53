"""Search what stays float on each target, and build every target.

A target that fails becomes a row with its error; the others are built all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.calibrated import Calibrated
from deploy.errors import BackendError, Calib8Error, CalibrationError, ExportError
from deploy.feed.listing import Changed
from deploy.files.staging import Stage
from deploy.method import NO_CHOICES
from deploy.targets import Target
from deploy.targets.base import BuildRequest, Built
from deploy.targets.options import given
from deploy.terminal import phase
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.search_options import Tuning
from deploy.tuning.tune import Tuned, keep_plan, plan_at, tuned

if TYPE_CHECKING:
    import onnx


@phase("search")
def search_targets(
    targets: Sequence[Target],
    calibrated: Calibrated,
    stage: Stage,
    wish: Tuning,
    *,
    method_asked: bool,
    repairs: Sequence[str],
    threads: int,
) -> tuple[dict[str, Tuned], Path | None]:
    """Return (target -> what stays float and how ranges are searched, the plan file).

    Raises:
        ConfigError: a plan that does not fit the model.
    """
    name = f"{calibrated.loaded.name}.plan.toml"
    known = plan_at(stage.folder / name, wish, calibrated.loaded.digest)
    request = _request(calibrated, stage, threads)
    found = {}
    for target in targets:
        if target.name in calibrated.failed:
            continue
        try:
            with phase(target.name):
                found[target.name] = tuned(
                    target,
                    request,
                    wish,
                    known,
                    method_asked=method_asked,
                    repairs=repairs,
                )
        except (BackendError, CalibrationError, ExportError) as error:
            found[target.name] = Tuned(
                plan=TargetPlan(choices=NO_CHOICES),
                searched=False,
                note=f"nothing was searched for {target.name}: {error}",
            )
    if not (wish.effort or wish.plan is not None or known.targets):
        return found, None
    return found, keep_plan(stage.inside / name, known, found)


@phase("targets")
def build_targets(
    targets: Sequence[Target],
    calibrated: Calibrated,
    stage: Stage,
    threads: int,
    plans: Mapping[str, Tuned],
    *,
    repairs: Sequence[str],
    against: onnx.ModelProto | None,
) -> list[Built]:
    """Build every target; a failed one becomes its error.

    Args beyond those of `deploy.pipeline.build`:
        against: the model without repairs, if speed is measured.

    Raises:
        Calib8Error: every target failed.
    """
    request = replace(_request(calibrated, stage, threads), against=against)
    results: list[Built] = []
    errors: list[Calib8Error] = []
    for target in targets:
        if target.name in calibrated.failed:
            results.append(Built(target=target.name, error=calibrated.failed[target.name]))
            continue
        try:
            chosen = request.choosing(plans[target.name].plan.choices)
            with phase(target.name):
                own, notes = _repaired(target, chosen, repairs)
                made = target.build(own)
            results.append(replace(made, options=given(target), notes=(*notes, *made.notes)))
        except Changed:
            raise
        except Calib8Error as error:
            errors.append(error)
            results.append(Built(target=target.name, error=str(error)))
    if errors and all(result.error for result in results):
        raise errors[0]
    return results


def _repaired(
    target: Target, request: BuildRequest, names: Sequence[str]
) -> tuple[BuildRequest, list[str]]:
    """(the request of one target with the repairs that help it, notes on all repairs tried)."""
    from deploy.tuning.repairs.apply import few, repaired, told

    own, tried = repaired(target, request, names, few(request.judges) if names else [])
    return own, told(tried)


def _request(calibrated: Calibrated, stage: Stage, threads: int) -> BuildRequest:
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
