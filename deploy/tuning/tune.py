"""The plan of each target: which nodes stay float and how ranges are found, read or searched.

One search for one target::

    target, request, options -> units -> heard (a few samples with the float model's outputs)
          -> prober (runs trials) + prices (times or products) + methods -> search
          -> settled (timed, judged) -> plan, with a reason for every node in float
"""

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import BackendError, ConfigError
from deploy.graph.index import match_nodes
from deploy.graph.plan import quantized_precision
from deploy.machine import this_machine
from deploy.method import NO_CHOICES, Choices, Method, comparable_methods
from deploy.metrics.output_form import OutputForm
from deploy.runtimes.ort import continue_runs
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array
from deploy.terminal import Step, phase
from deploy.tuning.plan_file import PlanFile, TargetPlan, float_reasons, read_plan, write_plan
from deploy.tuning.prices import (
    CPUS,
    Prices,
    Units,
    cheapest_float_units,
    count_prices,
    find_add_units,
    group_units,
    measure_prices,
)
from deploy.tuning.probe import (
    DETECTION_LIST,
    Prober,
    ReferenceSample,
    add_score_outputs,
    choices_key,
    find_ranked_scores,
    replace_by_scores,
)
from deploy.tuning.repairs import ROUNDING
from deploy.tuning.repairs.apply import trial_builder
from deploy.tuning.search import Search
from deploy.tuning.search_options import EFFORTS, Effort, SearchBudget, Trial, Tuning
from deploy.tuning.search_samples import (
    CANDIDATES,
    ExpectedVerdict,
    GrowingComparison,
    VerdictPredictor,
    halved_requests,
    max_sample_count,
    same_shape_samples,
    select_samples,
    with_held_out_ranges,
)
from deploy.tuning.split_choice import (
    ChosenSplit,
    SplitChooser,
    TimedRows,
    choose_by_time,
    int8_is_faster,
)

_LEAST_SAMPLES, _SHARE = 2, 5  # at most a fifth of the samples, so that the search stays cheap
_OWN = "its own method"  # of a target that ignores the method asked for
_REPLANNED = (
    "the plan of {} in the folder was made with other images or options, so it was searched anew;"
    " --plan obeys a plan as it is"
)
_OVERRULED = (
    "--effort was given, so the configuration of {} is a start only: {} nodes of it stay in float;"
    " without --effort it is followed as it is"
)
_NO_TARGET = "the plan {} has no [{}], so nothing was chosen for it, and nothing was searched"
_OTHER_CPU = (
    "the plan of {} in the folder was timed on another CPU ({}), so it was searched anew; --plan"
    " obeys a plan as it is"
)
_INTERRUPTED = (
    "the search was interrupted: the best so far is built, and the next build searches anew"
)
_LEAST_TIMED_US = 250.0  # float model: a smaller one takes mostly the runtime's own overhead
_VERSION = 20  # raised when a search of the same input would give another plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """Input of one search."""

    target: Target
    request: BuildRequest
    options: Tuning  # options of the search, with an effort of at least 1
    method_fixed: bool  # whether the range method must stay: the user chose it or trusts a cache
    trial: Callable[[BuildRequest], onnx.ModelProto]
    rounded: bool | None  # whether trials have rounded weights; None without that repair
    # whether ranges of trials come from other samples than their own, which are samples of the
    # calibration
    held_out: bool = True

    @property
    def effort(self) -> Effort:
        """How much the search tries."""
        return EFFORTS[self.options.level]

    @property
    def judges(self) -> EvaluationSet:
        """The evaluation samples, which every search has."""
        assert self.request.evaluation_set is not None
        return self.request.evaluation_set

    @property
    def clock(self) -> bool:
        """Whether time measured on this machine may decide."""
        return self.target.runs_here and self.options.is_timed


def run_search(setup: SearchSetup, step: Step) -> tuple[TargetPlan, int]:
    """Run a search; return its plan and the number of trial models that ran.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
        BackendError: no trial with all units in int8 could run.
        ConfigError: the user's metric fails on the best trial.
    """
    decisions = setup.target.plan(setup.request.model, tuple(setup.request.float_nodes)).decisions
    units = group_units(setup.request.model, decisions)
    if not units.layers:
        return TargetPlan(choices=NO_CHOICES), 0
    samples, form = _search_samples(setup)
    allowance = SearchBudget.of(
        setup.effort.calibrations,
        len(setup.request.feed),
        partial(_count_products, setup.request.model, units, samples[0][0]),
    )
    prober = make_prober(setup, samples, form, step, allowance)
    timed = same_shape_samples([sample for sample, _ in samples])
    search = Search(
        units=units,
        prices=_unit_prices(setup, units, timed),
        prober=prober,
        methods=_methods(setup),
        own=_OWN,
        word=quantized_precision(decisions),
        effort=setup.effort,
        weight=setup.options.weight,
        rounded=setup.rounded,
        can_refine=lambda: allowance.holds(setup.effort.round_samples + 2 * _one_judged(setup)),
        sums=find_add_units(setup.request.model, units),
    )
    try:
        best = search.run()
        if prober.metric_error is not None and best.noise.accuracy is None:
            raise prober.metric_error  # a metric that fails on noisy trials only is a loss of all
        search.settle_method(partial(_held_back_db, setup, allowance.spend))
        if setup.options.max_loss is not None:
            search.hold(setup.options.max_loss)
        choice = _choose(setup, search, timed, allowance)
    except KeyboardInterrupt:
        if not search.trials:
            raise
        continue_runs()
        choice = ChosenSplit(trial=search.best, told=[], interrupted=True)
    return _target_plan(search, choice), prober.trial_count


def _count_products(model: onnx.ModelProto, units: Units, sample: Mapping[str, Array]) -> float:
    """Return the products of the float model in a sample."""
    return count_prices(model, units, sample).total(units, frozenset(units.members))


def _search_samples(setup: SearchSetup) -> tuple[Sequence[ReferenceSample], OutputForm]:
    """Return the samples of every trial, which the targets share, with outputs and their form."""
    request, judges = setup.request, setup.judges
    few = min(setup.effort.samples, len(request.feed) // _SHARE, max_sample_count(judges))
    few = max(_LEAST_SAMPLES, few)
    metric = setup.options.metric
    return request.ranges.compute_once(
        (select_samples, few), lambda: select_samples(judges, few, metric)
    )


def make_prober(
    setup: SearchSetup,
    heard: Sequence[ReferenceSample],
    form: OutputForm | None,
    step: Step,
    allowance: SearchBudget,
) -> Prober:
    """Return the prober of a search on some samples, of which the float model's outputs are known.

    Raises:
        BackendError: ONNX Runtime refused the float model with the scores that it ranks.
    """
    request, spent = setup.request, allowance.spend
    few, effort, model = len(heard), setup.effort, setup.request.model
    trial, ends = setup.trial, find_ranked_scores(model)
    if ends:
        allowance.spend(few)
        metric, threads = setup.options.metric, setup.request.threads
        keep_outputs = metric is not None and metric.is_set
        heard = replace_by_scores(model, heard, keep_outputs=keep_outputs, threads=threads)
        form = None  # of the scores, that of the samples themselves

        def trial(request: BuildRequest) -> onnx.ModelProto:
            return add_score_outputs(setup.trial(request), ends)

    if setup.held_out:
        request = with_held_out_ranges(setup.target, request, [one for one, _ in heard], spent)
    return Prober(
        trial,
        request,
        heard,
        form=form,
        runs_here=setup.target.runs_here,
        threads=setup.request.threads,
        isolated_sample_count=max(min(_LEAST_SAMPLES, few), few * effort.few // effort.samples),
        by_task=setup.options.max_loss is not None,
        metric=setup.options.metric,
        progress=step,
        count_samples=spent,
    )


@phase("timing kernels")
def _unit_prices(
    setup: SearchSetup, units: Units, samples: Sequence[Mapping[str, Array]]
) -> Prices:
    """Return the price of every unit: its time where int8 is clearly faster here, else products."""
    request = setup.request
    if setup.clock:
        with suppress(BackendError):  # the search itself finds layers that cannot run
            prices = _measured_prices(setup, units, samples)
            if prices is not None:
                return prices
    cpu = CPUS.get(setup.options.cpu) if setup.target.runs_here else None
    return count_prices(request.model, units, samples[0], cpu)


def _measured_prices(
    setup: SearchSetup, units: Units, samples: Sequence[Mapping[str, Array]]
) -> Prices | None:
    """Return times of the units; None if int8 is not clearly faster here.

    A choice by such times would be chance, and the machine that builds may not be the one that
    runs.
    """
    request = setup.request
    float32, int8 = _with_float(setup, units, units.members), _with_float(setup, units, ())
    prices = measure_prices(request.model, float32, int8, units, samples)
    if prices.total(units, frozenset(units.members)) < _LEAST_TIMED_US:
        return None
    quickest = cheapest_float_units(prices, units, {}, weight=0.0)
    split = _with_float(setup, units, quickest)
    faster = int8_is_faster(split, float32, samples, threads=request.threads)
    return prices if faster else None


def _with_float(setup: SearchSetup, units: Units, in_float: Iterable[str]) -> onnx.ModelProto:
    """Return the model with these units in float, as it would be deployed."""
    choices = Choices(float_nodes=dict.fromkeys(units.nodes(in_float), "timed in float"))
    return setup.target.trial(setup.request.with_added_choices(choices))


def _methods(setup: SearchSetup) -> list[Method | None]:
    """Return the range methods to choose among."""
    if setup.target.own_method:
        return [None, *map(Method.of, setup.target.alternatives)]
    own = setup.request.ranges.method
    return [own] if setup.method_fixed else [*comparable_methods(own)]


def _choose(
    setup: SearchSetup,
    search: Search,
    samples: Sequence[Mapping[str, Array]],
    allowance: SearchBudget,
) -> ChosenSplit:
    """Choose what to build among the trials."""
    target, request, units = setup.target, setup.request, search.units
    float32 = _with_float(setup, units, units.members) if search.prices.measured else None

    def choose(likely: Sequence[Trial]) -> tuple[Trial, TimedRows]:
        if float32 is None:
            return likely[0], []
        return choose_by_time(
            search,
            likely,
            samples,
            written=lambda trial: target.trial(request.with_added_choices(trial.choices)),
            float32=float32,
            max_loss=setup.options.max_loss,
            threads=request.threads,
        )

    judging = VerdictPredictor(
        setup.judges,
        int8_kernels=setup.target.runs_here,
        threads=setup.request.threads,
        max_loss=setup.options.max_loss,
        metric=setup.options.metric,
        count_samples=allowance.spend,
    )
    another = _one_judged(setup)
    judged: dict[object, ExpectedVerdict] = {}

    def judge(chosen: Trial) -> ExpectedVerdict:
        key = choices_key(chosen.choices)
        if key not in judged:
            model = setup.trial(setup.request.with_added_choices(chosen.choices))
            judged[key] = judging.predict(model, noise=chosen.noise.worst)
        return judged[key]

    return SplitChooser(
        search=search, choose=choose, judge=judge, can_go_on=lambda: allowance.holds(another)
    ).run()


def _held_back_db(setup: SearchSetup, ran: Callable[[int], None], trial: Trial) -> float:
    """Return the SQNR in dB of a trial's worst slice on evaluation samples, by held-back ranges."""
    halves = halved_requests(setup.target, setup.request, ran)
    models = [setup.trial(one.with_added_choices(trial.choices)) for one in halves]
    metric = setup.options.metric
    comparison = GrowingComparison(
        models,
        setup.judges,
        None if metric is None else metric.without_function,
        int8_kernels=setup.target.runs_here,
    )
    most = max(CANDIDATES // 3, min(CANDIDATES, max_sample_count(setup.judges)))
    worst = comparison.compare(most, threads=setup.request.threads).worst
    ran(len(comparison.keys))
    return math.inf if worst is None else worst.sqnr_db


def _one_judged(setup: SearchSetup) -> int:
    """Return the samples that one more judged trial runs."""
    return setup.effort.samples + len(setup.judges.subset)


def _target_plan(search: Search, choice: ChosenSplit) -> TargetPlan:
    """Return the plan of what is built."""
    units, word, trial = search.units, search.word, choice.trial
    float_nodes = float_reasons(
        trial, units, search.prices, search.sensitivity, word, search.refused, sums=search.kept_sums
    )
    failed, errors = "", search.prober.errors
    if errors:
        many = f"{len(errors)} of {search.prober.trial_count} trials"
        failed = f"{many} could not be run; the first: {errors[0]}"
    tried: list[dict[str, str | float]] = [
        {"what": one.what, "sqnr_db": round(one.noise.db, 2), "time": round(one.time, 4)}
        for one in search.trials
    ]
    return TargetPlan(
        choices=replace(trial.choices, float_nodes=float_nodes),
        precision=search.word,
        settled=_describe(trial),
        tried=(*tried, *choice.told),
        unusable=choice.unusable,
        doubtful=choice.doubtful,
        interrupted=choice.interrupted,
        timed_on=_this_cpu() if search.prices.measured else "",
        failed=failed,
    )


def _this_cpu() -> str:
    """Return the name of this machine's CPU with its int8 instructions."""
    machine = this_machine()
    return ", ".join((machine.cpu, *machine.int8))


def _describe(best: Trial) -> str:
    if not best.noise.slice_powers:
        return best.what
    accuracy = best.noise.accuracy
    if (
        best.noise.worst_slice == DETECTION_LIST
        and accuracy is not None
        and accuracy.task is not None
    ):
        return f"{best.what}: {accuracy.task.words}"
    where = f" in {best.noise.worst_slice}" if len(best.noise.slice_powers) > 1 else ""
    return f"{best.what}: {best.noise.db:.1f} dB{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTarget:
    """Plan of one target and where it came from."""

    plan: TargetPlan
    reused: bool = False  # whether an existing plan was used without a search
    searched: bool = True  # whether the plan comes from a search, this one or an earlier one
    probes: int = 0
    note: str = ""  # note on an existing plan that was not used; "" for none


def plan_target(
    target: Target,
    request: BuildRequest,
    options: Tuning,
    known: PlanFile,
    *,
    method_asked: bool,
    repairs: Sequence[str] = (),
) -> PlannedTarget:
    """Return the plan of a target: an existing one that fits, else the result of a search.

    `method_asked`: whether the user chose the range method, which then stays.

    Raises:
        ConfigError: a plan with nodes that the model does not have, or made for another grid.
    """
    pinned = dict.fromkeys(
        match_nodes(request.model, known.float_nodes), "the plan keeps it in float"
    )
    digest = _made_from(target, request, options, method_asked, repairs)
    existing = known.targets.get(target.name)
    elsewhere = existing is not None and existing.timed_on not in ("", _this_cpu())
    fits = existing is not None and existing.made_from == digest and not elsewhere
    if existing is not None and (options.plan is not None or fits):
        _check_names(request, existing)
        _check_precision(target, request, existing)
        return PlannedTarget(plan=_with_common(existing, pinned), reused=True)
    if options.level == 0 or options.plan is not None:
        note = "" if options.plan is None else _NO_TARGET.format(options.plan, target.name)
        plan = TargetPlan(choices=Choices(float_nodes=pinned))
        return PlannedTarget(plan=plan, searched=False, note=note)
    request = request.with_choices(Choices(float_nodes=pinned))
    setup = SearchSetup(
        target=target,
        request=request,
        options=options,
        method_fixed=method_asked or request.ranges.trusted is not None,
        trial=trial_builder(target, request, repairs),
        rounded=True if ROUNDING in repairs else None,
    )
    with phase("trials", setup.effort.most * setup.effort.rounds, about=True) as step:
        searched_plan, probes = run_search(setup, step)
    note = ""
    if searched_plan.interrupted:
        note, digest = _INTERRUPTED, ""
    elif existing is not None and existing.made_from and not options.fresh:
        moved = elsewhere and existing.made_from == digest
        note = (_OTHER_CPU if moved else _REPLANNED).format(target.name, existing.timed_on)
    elif target.configured:
        count = len(set(searched_plan.choices.float_nodes).difference(pinned))
        note = _OVERRULED.format(target.name, count)
    return PlannedTarget(
        plan=_with_common(replace(searched_plan, made_from=digest), pinned),
        probes=probes,
        note=note,
    )


def find_plan(path: Path, options: Tuning, digest: str) -> PlanFile:
    """Read the plan to follow: `options.plan` if set, else the one in the output folder."""
    if options.plan is not None:
        plan = read_plan(options.plan)
        if plan.model not in ("", digest):
            raise ConfigError(
                f"a plan must be the model's, got {options.plan} of another one; build without"
                " --plan to have one made"
            )
        return plan
    if options.fresh or not path.exists():
        return PlanFile(model=digest)
    plan = read_plan(path)
    return plan if plan.model == digest else PlanFile(model=digest)


def store_plan(path: Path, known: PlanFile, found: Mapping[str, PlannedTarget]) -> Path:
    """Write the new plans; plans of other targets in the file stay."""
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
    """Refuse a plan for another grid, since losses on one grid say nothing of another."""
    word = quantized_precision(target.plan(request.model, request.float_nodes).decisions)
    if plan.precision not in ("", word):
        raise ConfigError(
            f"a plan must be made for the grid that is built, got one of {plan.precision} for"
            f" {target.name} in {word}; build without --plan to have one made, or with"
            f" --precision {plan.precision}"
        )


def _with_common(plan: TargetPlan, pinned: Mapping[str, str]) -> TargetPlan:
    own = {name: why for name, why in plan.choices.float_nodes.items() if name not in pinned}
    return replace(plan, choices=replace(plan.choices, float_nodes={**own, **pinned}))


def _made_from(
    target: Target,
    request: BuildRequest,
    options: Tuning,
    method_asked: bool,
    repairs: Sequence[str],
) -> str:
    """Return a digest of all that a search depends on, except measured times."""
    parts: dict[str, Any] = {
        "version": _VERSION,
        "model": request.digest,
        "images": dict(request.manifest),
        "target": repr(target),
        "method": [request.ranges.chosen_by, method_asked],
        "float": sorted(request.subject.float_nodes),
        "rounded": ROUNDING in repairs,
        "wish": [
            options.level,
            options.prefer,
            options.max_loss,
            [options.is_timed, options.cpu] if target.runs_here else None,
        ],
    }
    metric = options.metric
    if metric is not None and metric.is_set:
        task = (metric.task,) * (metric.task != "")
        parts["metric"] = [metric.name, metric.digest, *task]
    if metric is not None and metric.declared.task:
        parts["declared"] = [metric.declared.task, metric.declared.classes]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
