"""What stays float and how ranges are found, for every target: from its plan, or searched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.calibration.choices import Choices
from deploy.errors import ConfigError
from deploy.graph.plan import word_of
from deploy.graph.selection import matching
from deploy.progress import phase
from deploy.tuning.plan_file import PlanFile, TargetPlan, read_plan, write_plan
from deploy.tuning.repairs import ROUNDING
from deploy.tuning.repairs.apply import trials
from deploy.tuning.searched import Asked, searched
from deploy.tuning.wish import DEFAULT_EFFORT, Tuning

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest, Target

_ANEW = (
    "the plan of {} in the folder was made with other images or options, so it was searched anew;"
    " --plan obeys a plan as it is"
)
_SILENT = "the plan {} has no [{}], so nothing was chosen for it, and nothing was searched"
_VERSION = 16  # raised when the same input would be searched otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What was settled for one target.

    Attributes:
        plan: choices and what was tried.
        reused: whether nothing had to be searched.
        searched: whether the plan is the outcome of a search, this one or an earlier one.
        probes: trial models that were run.
        note: what the user should know of the plan that was there; "" for nothing.
    """

    plan: TargetPlan
    reused: bool = False
    searched: bool = True
    probes: int = 0
    note: str = ""


def tuned(
    target: Target,
    request: BuildRequest,
    wish: Tuning,
    known: PlanFile,
    *,
    method_asked: bool,
    repairs: Sequence[str] = (),
) -> Tuned:
    """The plan of a target: obeyed where it fits, else searched.

    Args:
        target: what is built for.
        request: what it would be built from.
        wish: what the user wants.
        known: the plan that is there.
        method_asked: whether the user chose the method, which then stands.
        repairs: what will be tried on what was settled.

    Raises:
        ConfigError: a plan that names nodes which the model does not have, or was made for another
            grid.
    """
    common = dict.fromkeys(matching(request.model, known.float_nodes), "the plan keeps it in float")
    digest = _made_from(target, request, wish, method_asked, repairs)
    there = known.targets.get(target.name)
    if there is not None and (wish.plan is not None or there.made_from == digest):
        _check_names(request, there)
        _check_precision(target, request, there)
        return Tuned(plan=_with(there, common), reused=True)
    if wish.effort == 0 or wish.plan is not None:
        note = "" if wish.plan is None else _SILENT.format(wish.plan, target.name)
        plan = TargetPlan(choices=Choices(float_nodes=common))
        return Tuned(plan=plan, searched=False, note=note)
    request = request.choosing(Choices(float_nodes=common))
    asked = Asked(
        target=target,
        request=request,
        wish=wish,
        method_fixed=method_asked or request.ranges.trusted is not None,
        trial=trials(target, request, repairs),
        rounded=True if ROUNDING in repairs else None,
    )
    with phase("trials", asked.effort.most * asked.effort.rounds, about=True) as step:
        found, probes = searched(asked, step)
    old = there is not None and there.made_from != ""
    return Tuned(
        plan=_with(replace(found, made_from=digest), common),
        probes=probes,
        note=_ANEW.format(target.name) if old and not wish.fresh else "",
    )


def plan_at(path: Path, wish: Tuning, digest: str) -> PlanFile:
    """The plan to be obeyed: the one that was named, or the one beside the output.

    Raises:
        ConfigError: the named one cannot be read, or is another model's.
    """
    if wish.plan is not None:
        found = read_plan(wish.plan)
        if found.model not in ("", digest):
            raise ConfigError(
                f"a plan must be the model's, got {wish.plan} of another one; build without --plan"
                " to have one made"
            )
        return found
    if wish.fresh or not path.exists():
        return PlanFile(model=digest)
    found = read_plan(path)
    return found if found.model == digest else PlanFile(model=digest)


def keep_plan(path: Path, known: PlanFile, found: Mapping[str, Tuned]) -> Path:
    """Write what was settled, and keep what the file says of other targets."""
    new = {name: one.plan for name, one in found.items() if one.searched}
    targets = {**known.targets, **new}
    return write_plan(path, replace(known, targets=targets))


def _check_names(request: BuildRequest, plan: TargetPlan) -> None:
    nodes = request.model.graph.node
    tensors = {name for node in nodes for name in (*node.input, *node.output)}
    _refuse_unknown("nodes", plan.choices.float_nodes, {node.name for node in nodes})
    _refuse_unknown("tensors", plan.choices.methods, tensors)


def _refuse_unknown(what: str, named: Iterable[str], known: Container[str]) -> None:
    for name in named:
        if name not in known:
            raise ConfigError(
                f"a plan must name {what} of the model, got {name!r}; delete the line, or the file"
                " to have it made anew"
            )


def _check_precision(target: Target, request: BuildRequest, plan: TargetPlan) -> None:
    """What a layer loses on one grid says nothing of another."""
    word = word_of(target.plan(request.model, request.float_nodes).decisions)
    if plan.precision not in ("", word):
        raise ConfigError(
            f"a plan must be made for the grid that is built, got one of {plan.precision} for"
            f" {target.name} in {word}; build without --plan to have one made, or with"
            f" --precision {plan.precision}"
        )


def _with(plan: TargetPlan, common: Mapping[str, str]) -> TargetPlan:
    own = {name: why for name, why in plan.choices.float_nodes.items() if name not in common}
    return replace(plan, choices=replace(plan.choices, float_nodes={**own, **common}))


def _made_from(
    target: Target,
    request: BuildRequest,
    wish: Tuning,
    method_asked: bool,
    repairs: Sequence[str],
) -> str:
    """Digest of all that a search depends on, time apart."""
    parts: dict[str, Any] = {
        "version": _VERSION,
        "model": request.digest,
        "images": dict(request.manifest),
        "target": repr(target),
        "method": [request.ranges.chosen_by, method_asked],
        "float": sorted(request.subject.float_nodes),
        "rounded": ROUNDING in repairs,
        "wish": [
            wish.effort,
            wish.min_speedup,
            wish.max_loss,
            wish.weight,
            wish.timed and target.runs_here,
        ],
    }
    if wish.metric is not None:
        parts["metric"] = [wish.metric.name, wish.metric.digest]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


__all__ = ["DEFAULT_EFFORT", "Tuned", "Tuning", "keep_plan", "plan_at", "tuned"]
