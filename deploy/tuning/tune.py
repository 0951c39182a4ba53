"""The plan of each target: which nodes stay float and how ranges are found, read or searched."""

import hashlib
import json
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.searches import COMPARABLE
from deploy.errors import ConfigError
from deploy.frontends import LoadedModel
from deploy.graph.index import match_nodes, names_of
from deploy.graph.plan import Decision, quantized_precision
from deploy.machine import cpu_name
from deploy.method import Choices, Method
from deploy.targets.base import BuildRequest, Target
from deploy.terminal import phase
from deploy.tuning import PREFERENCES
from deploy.tuning.plan_file import PlanFile, TargetPlan, read_plan, write_plan
from deploy.tuning.probe import choices_key
from deploy.tuning.search_options import Tuning
from deploy.tuning.target_search import SearchSetup, run_search

_REPLANNED = (
    "the plan of {} in the folder was made with other images or options, or timed on another CPU,"
    " so it was searched again; --plan obeys a plan as it is"
)
_OVERRULED = (
    "--effort was given, so the configuration of {} is a start only: {} nodes of it stay in float;"
    " without --effort it is followed as it is"
)
_NO_TARGET = "the plan {} has no [{}], so nothing was chosen for it, and nothing was searched"

_INTERRUPTED = (
    "the search was interrupted: the best so far is built, and the next build searches again"
)
_VERSION = 34  # raised when a search of the same input would give another plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTarget:
    """Plan of one target and where it came from.

    Attributes:
        plan: the plan.
        reused: whether an existing plan was used without a search.
        searched: whether the plan comes from a search, this one or an earlier one.
        probes: number of trials.
        note: sentence on the search, or on an existing plan that was not used; "" for none.
    """

    plan: TargetPlan
    reused: bool = False
    searched: bool = True
    probes: int = 0
    note: str = ""


def plan_target(
    target: Target,
    request: BuildRequest,
    options: Tuning,
    earlier_plans: PlanFile,
    *,
    has_fixed_method: bool,
    rounds_weights: bool,
) -> PlannedTarget:
    """Return the plan of a target: an existing one that fits, else the result of a search.

    A plan says which nodes stay float and how ranges are found.

    Args:
        target: the target.
        request: its build request.
        options: of the search.
        earlier_plans: content of the plan file, with plans for any number of targets.
        has_fixed_method: whether the user chose the range method; a search does not change it then.
        rounds_weights: whether the build tries adaptive rounding.

    Raises:
        ConfigError: a plan with nodes that the model does not have, or made for another grid; a
            split that the plan does not have.
    """
    setup = SearchSetup(
        target=target,
        request=request,
        options=options,
        has_fixed_method=has_fixed_method,
        rounds_weights=rounds_weights,
    )
    # node that the plan file has in float for every target -> the reason
    pinned_nodes = dict.fromkeys(
        match_nodes(request.model, earlier_plans.float_nodes), "the plan keeps it in float"
    )
    digest = _digest_of_input(setup)
    earlier_plan = _find_earlier_plan(target, options, earlier_plans)
    if earlier_plan is not None and _is_followed(options, earlier_plan, digest):
        return _follow_plan(target, request, earlier_plan, pinned_nodes)

    # no search without effort, nor where the user's plan has nothing for this target
    if options.level == 0 or options.plan is not None:
        note = "" if options.plan is None else _NO_TARGET.format(options.plan, target.name)
        plan = TargetPlan(choices=Choices(float_nodes=pinned_nodes))
        return PlannedTarget(plan=plan, searched=False, note=note)

    setup = replace(setup, request=request.with_choices(Choices(float_nodes=pinned_nodes)))
    with phase("trials", setup.effort.trials) as step:
        plan, probes = run_search(setup, step)
    note = _describe_search(target, plan, earlier_plan, pinned_nodes)
    made_from = "" if plan.interrupted else digest  # with "" the next build searches again
    plan = _with_pinned(replace(plan, made_from=made_from), pinned_nodes)
    return PlannedTarget(plan=plan, probes=probes, note=note)


def _follow_plan(
    target: Target, request: BuildRequest, plan: TargetPlan, pinned_nodes: Mapping[str, str]
) -> PlannedTarget:
    """Return an existing plan of a target as it is used, without a search.

    Args:
        target: the target.
        request: its build request.
        plan: of the target, in the plan file.
        pinned_nodes: node that the plan file has in float for every target -> the reason.

    Raises:
        ConfigError: the model lacks a node of the plan, or the plan was made for another grid.
    """
    _check_names(request.model, plan)
    float_nodes = {**request.float_nodes, **pinned_nodes}
    decisions = target.plan(request.model, tuple(float_nodes)).decisions
    _check_precision(target, decisions, plan)
    plan = _with_chosen_split(plan, pinned_nodes)
    return PlannedTarget(plan=_with_pinned(plan, pinned_nodes), reused=True)


def _describe_search(
    target: Target, plan: TargetPlan, earlier_plan: TargetPlan | None, pinned_nodes: Collection[str]
) -> str:
    """Return a sentence on a search; "" for none.

    It says that the search was interrupted, or which plan or configuration it replaced, and why.

    Args:
        target: the target.
        plan: found by the search.
        earlier_plan: of the target in the plan file; None without one.
        pinned_nodes: nodes that the plan file has in float for every target.
    """
    if plan.interrupted:
        return _INTERRUPTED
    if earlier_plan is not None and earlier_plan.made_from:  # "" after an interrupted search
        return _REPLANNED.format(target.name)  # its input has changed
    if target.configured:  # the user gave the target a configuration of its own
        float_count = len(plan.choices.float_nodes.keys() - pinned_nodes)
        return _OVERRULED.format(target.name, float_count)
    return ""


def _find_earlier_plan(
    target: Target, options: Tuning, earlier_plans: PlanFile
) -> TargetPlan | None:
    """Return the target's plan in the plan file, with the split that the user chose, if any."""
    earlier_plan = earlier_plans.targets.get(target.name)
    if options.split is None:
        return earlier_plan
    if earlier_plan is None or not earlier_plan.front:
        raise ConfigError(
            f"--split takes a split of an earlier build's plan, got none for {target.name};"
            " build with a search first: without --split (also in the file of --config) and"
            " --effort 0"
        )
    return earlier_plan.with_split(options.split)


def _is_followed(options: Tuning, plan: TargetPlan, digest: str) -> bool:
    """Whether an existing plan is built without a search.

    It is if the user asks for it, or if a search now would have the input that it was made from.

    `digest`: of all that a search depends on now, except measured times.
    """
    if options.plan is not None or options.split is not None:
        return True
    return plan.made_from == digest and plan.timed_on in ("", cpu_name())


def find_plan(path: Path, options: Tuning, digest: str) -> PlanFile:
    """Read the plan to follow: `options.plan` if set, else the one in the output folder.

    The latter is left out if it is of another model, or if the user wants a new search.

    `path`: of the one in the output folder. `digest`: of the model.
    """
    if options.plan is not None:
        plan_file = read_plan(options.plan)
        if plan_file.model not in ("", digest):
            raise ConfigError(
                f"a plan must be the model's, got {options.plan} of another one; build without"
                " --plan to have one made"
            )
        return plan_file
    if not options.fresh and path.exists():
        plan_file = read_plan(path)
        if plan_file.model == digest:
            return plan_file
    return PlanFile(model=digest)


def store_plan(
    path: Path, earlier_plans: PlanFile, planned_targets: Mapping[str, PlannedTarget]
) -> Path:
    """Write the new plans; plans of other targets in the file stay."""
    targets = dict(earlier_plans.targets)
    for name, planned_target in planned_targets.items():
        if planned_target.searched:
            targets[name] = planned_target.plan
    return write_plan(path, replace(earlier_plans, targets=targets))


def refuse_wrong_plan(
    path: Path,
    options: Tuning,
    loaded: LoadedModel,
    targets: Iterable[Target],
    method: Method | str | None,
) -> None:
    """Refuse a plan or split that the user asks for and that cannot be built, before anything runs.

    Args:
        path: the plan in the output folder.
        options: of the search.
        loaded: the model.
        targets: targets to build.
        method: the range method that the user chose, or its name; None for the default.

    Raises:
        ConfigError: the plan does not fit the model, has no such split, or other range methods; or
            an option of the search was given too.
    """
    if options.plan is None and options.split is None:
        return
    _refuse_search_options(options)
    if isinstance(method, str):
        method = Method.of(method)
    plan_file = find_plan(path, options, loaded.digest)
    match_nodes(loaded.model, plan_file.float_nodes)  # refuses a pattern that matches no node
    for target in targets:
        if plan_file.targets and target.name not in plan_file.targets:
            continue  # it may have failed when the plan was made
        plan = _find_earlier_plan(target, options, plan_file) or TargetPlan()
        _check_names(loaded.model, plan)
        if not target.own_method:  # else it ignores --method
            _check_method(target.name, plan.choices, method)


def _refuse_search_options(options: Tuning) -> None:
    """Refuse options of the search with a plan or split, which is built without one."""
    flag = "--split" if options.plan is None else "--plan"
    search_options = []
    if options.effort is not None:
        search_options.append(f"--effort {options.effort}")
    if options.prefer != PREFERENCES[0]:
        search_options.append(f"--prefer {options.prefer}")
    if search_options:
        raise ConfigError(
            f"{flag} is built without a search, got {search_options[0]} too; leave one of them out"
        )


def _check_method(target: str, choices: Choices, method: Method | None) -> None:
    """Refuse a plan whose ranges are found by another method than the calibration of this build.

    Args:
        target: name of the target.
        choices: of its plan.
        method: the method that the user chose; None for the default, with which the statistics of
            all comparable methods are observed.
    """
    planned_method = choices.method  # of all tensors but those in `choices.methods`
    if method is not None:
        # a plan without methods is built with the user's
        if method != planned_method and (planned_method or choices.methods):
            raise ConfigError(
                f"ranges are found by the plan's methods or by the user's, got both for {target};"
                " leave --method out, or the methods in the plan"
            )
    # `COMPARABLE` has the names and parameters of the methods whose statistics are observed
    elif planned_method is not None and planned_method.name not in dict(COMPARABLE):
        raise ConfigError(
            f"the plan of {target} has ranges of another calibration; build with --method"
            f" {planned_method.name}"
        )


def _check_names(model: ModelProto, plan: TargetPlan) -> None:
    """Refuse a plan that names nodes or tensors that the model does not have."""
    nodes = model.graph.node
    tensors = {name for node in nodes for name in (*node.input, *node.output)}
    _refuse_unknown("nodes", plan.choices.float_nodes, names_of(nodes))
    _refuse_unknown("tensors", plan.choices.methods, tensors)


def _refuse_unknown(kind: str, names: Iterable[str], known_names: Container[str]) -> None:
    for name in names:
        if name not in known_names:
            raise ConfigError(
                f"a plan must name {kind} of the model, got {name!r}; delete the line, or the file"
                " to have it made again"
            )


def _check_precision(target: Target, decisions: Iterable[Decision], plan: TargetPlan) -> None:
    """Refuse a plan for another grid, since losses on one grid say nothing of another."""
    precision = quantized_precision(decisions)
    if plan.precision not in ("", precision):
        raise ConfigError(
            f"a plan must be made for the grid that is built, got one of {plan.precision} for"
            f" {target.name} in {precision}; build without --plan to have one made, or with"
            f" --precision {plan.precision}"
        )


def _with_chosen_split(plan: TargetPlan, pinned_nodes: Mapping[str, str]) -> TargetPlan:
    """Return the plan that says which split of its front its choices build (`marked`).

    It may be none of them, since the user may have edited the choices.

    Args:
        plan: to be followed.
        pinned_nodes: nodes that the plan file has in float for every target.
    """
    if not plan.settled:  # written by hand, without a search
        return plan
    chosen_key = _without_nodes(plan.choices, pinned_nodes)
    for split in plan.front:
        if _without_nodes(split.choices, pinned_nodes) == chosen_key:
            return plan if split.row.taken else plan.marked(split.row.number)
    return plan.marked(None)


def _without_nodes(choices: Choices, nodes: Collection[str]) -> object:
    """Return what is equal for choices that are equal but for these nodes in float."""
    other_nodes = dict.fromkeys(choices.float_nodes.keys() - nodes, "")
    return choices_key(replace(choices, float_nodes=other_nodes))


def _with_pinned(plan: TargetPlan, pinned_nodes: Mapping[str, str]) -> TargetPlan:
    """Return the plan with the nodes in float that the plan file has so for every target."""
    float_nodes = {}
    for name, reason in plan.choices.float_nodes.items():
        if name not in pinned_nodes:
            float_nodes[name] = reason
    choices = replace(plan.choices, float_nodes={**float_nodes, **pinned_nodes})
    return replace(plan, choices=choices)


def _digest_of_input(setup: SearchSetup) -> str:
    """Return a digest of all that a search depends on, except measured times.

    A stored plan has this digest; a build with another one does not follow the plan. So neither the
    keys nor the form of their values may change.
    """
    target = setup.target
    request = setup.request
    options = setup.options
    # without the engine on this machine, neither option decides anything
    timing_options = [options.is_timed, options.cpu_kind] if target.runs_here else None
    parts: dict[str, Any] = {
        "version": _VERSION,
        "model": request.subject.loaded.digest,
        "images": dict(request.manifest),
        "target": repr(target),
        "method": [request.ranges.chosen_by, setup.has_fixed_method],
        "float": sorted(request.subject.float_nodes),
        "rounded": setup.rounds_weights,
        "wish": [options.level, options.prefer, options.max_loss, timing_options],
    }
    metric = options.metric
    if metric is not None and metric.is_set:
        parts["metric"] = [metric.name, metric.digest, metric.task]
    if metric is not None and metric.declared.task:
        parts["declared"] = [metric.declared.task, metric.declared.classes]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
