"""What stays float and how ranges are found, for every target: from its plan, or searched.

One search for one target, step by step: from what is asked of it to the plan that it leaves.

::

    target, request, wish -> units -> heard (a few samples, and what the float model says of them)
          -> prober (tries) + prices (times or products) + methods -> search
          -> settled (timed, judged) -> plan, with a reason for every node in float
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import BackendError, ConfigError
from deploy.graph.index import matching
from deploy.graph.plan import word_of
from deploy.method import NO_CHOICES, Choices, Method, comparable
from deploy.terminal import Step, phase
from deploy.tuning.plan_file import (
    BETWEEN,
    NOT_FASTER,
    NOT_USABLE,
    PlanFile,
    TargetPlan,
    read_plan,
    reasons,
    write_plan,
)
from deploy.tuning.prices import Prices, Units, counted, measured, sums_of, units_of
from deploy.tuning.probe import LISTED, Heard, Prober, ranked, telling_scores, with_scores
from deploy.tuning.repairs import ROUNDING
from deploy.tuning.repairs.apply import trials
from deploy.tuning.search import Search
from deploy.tuning.search_options import EFFORTS, Allowance, Effort, Trial, Tuning
from deploy.tuning.search_samples import Judgement, Judging, alike, as_many, telling, unseen
from deploy.tuning.usable import TELLING_US, Settled, Told, Way, by_the_clock, settled

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.reference import Judges
    from deploy.targets.base import BuildRequest, Target
    from deploy.tensors import Array


_LEAST_SAMPLES, _SHARE = 2, 5  # of few samples a fifth: the search is to cost few calibrations
_OWN = "its own method"  # of a target whatever method is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one search is asked.

    Attributes:
        target: what is built for.
        request: what it would be built from.
        wish: what the user wants, an effort included.
        method_fixed: whether the method stands, as the user chose it or trusts its ranges.
        trial: what makes a trial model of a request.
        rounded: whether the weights of the trials are rounded; None where nobody asks for it.
    """

    target: Target
    request: BuildRequest
    wish: Tuning
    method_fixed: bool
    trial: Callable[[BuildRequest], onnx.ModelProto]
    rounded: bool | None

    @property
    def effort(self) -> Effort:
        """How much is tried."""
        return EFFORTS[self.wish.effort]

    @property
    def judges(self) -> Judges:
        """Samples that judge; whoever searches has some."""
        assert self.request.judges is not None
        return self.request.judges

    @property
    def clock(self) -> bool:
        """Whether time of this machine decides."""
        return self.target.runs_here and self.wish.timed


def searched(asked: Asked, step: Step) -> tuple[TargetPlan, int]:
    """What a search finds, and how many trial models it ran.

    Args:
        asked: of it.
        step: called after every trial.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
        BackendError: no trial with all in int8 could be run.
        ConfigError: the user's metric fails on the best trial.
    """
    decisions = asked.target.plan(asked.request.model, tuple(asked.request.float_nodes)).decisions
    units = units_of(asked.request.model, decisions)
    if not units.layers:
        return TargetPlan(choices=NO_CHOICES), 0
    heard = _heard(asked)
    allowance = Allowance.of(asked.effort.calibrations, len(asked.request.feed))
    prober = _prober(asked, heard, step, allowance)
    timed = alike([sample for sample, _ in heard])
    search = Search(
        units=units,
        prices=_prices(asked, units, timed),
        prober=prober,
        methods=_methods(asked),
        own=_OWN,
        word=word_of(decisions),
        effort=asked.effort,
        weight=asked.wish.weight,
        rounded=asked.rounded,
        or_float=not asked.target.float_way,
        sums=sums_of(asked.request.model, units),
    )
    best = search.run()
    if prober.unjudged is not None and best.noise.accuracy is None:
        raise prober.unjudged  # what fails on noise alone is one that loses all
    if asked.wish.max_loss is not None:
        search.hold(asked.wish.max_loss)
    chosen = _chosen(asked, search, timed, allowance)
    float_wins = chosen.trial.cost(asked.wish.weight) > 0  # which is what the float model costs
    return _plan(search, chosen, asked.target.float_way if float_wins else ""), prober.tried


def _heard(asked: Asked) -> Sequence[Heard]:
    """The samples that every trial runs; targets share them."""
    request, judges = asked.request, asked.judges
    few = min(asked.effort.samples, len(request.feed) // _SHARE, as_many(judges))
    few = max(_LEAST_SAMPLES, few)
    return request.ranges.once((telling, few), lambda: telling(judges, few))


def _prober(asked: Asked, heard: Sequence[Heard], step: Step, allowance: Allowance) -> Prober:
    """What tries choices on samples that its ranges have not seen."""
    few, effort, model = len(heard), asked.effort, asked.request.model
    trial, ends = asked.trial, ranked(model)
    if ends:
        allowance.spend(few)
        every, threads = asked.wish.metric is not None, asked.request.threads
        heard = with_scores(model, heard, every=every, threads=threads)

        def trial(request: BuildRequest) -> onnx.ModelProto:
            return telling_scores(asked.trial(request), ends)

    return Prober(
        trial,
        unseen(asked.target, asked.request, [sample for sample, _ in heard], allowance.spend),
        heard,
        runs_here=asked.target.runs_here,
        threads=asked.request.threads,
        few=max(min(_LEAST_SAMPLES, few), few * effort.few // effort.samples),
        by_task=asked.wish.max_loss is not None,
        metric=asked.wish.metric,
        progress=step,
        ran=allowance.spend,
    )


@phase("timing kernels")
def _prices(asked: Asked, units: Units, samples: Sequence[Mapping[str, Array]]) -> Prices:
    """Of every unit, in time where this machine's decides, else in products."""
    target, request = asked.target, asked.request
    if asked.clock:
        every = Choices(float_nodes=dict.fromkeys(units.nodes(units.members), "timed in float"))
        float32, int8 = (target.trial(request.adding(one)) for one in (every, NO_CHOICES))
        with suppress(BackendError):  # the search finds what cannot be run
            found = measured(request.model, float32, int8, units, samples)
            if found.total(units, frozenset(units.members)) >= TELLING_US:
                return found
    return counted(request.model, units, samples[0])


def _methods(asked: Asked) -> list[Method | None]:
    """Searches of ranges to choose among."""
    if asked.target.own_method:
        return [None, *map(Method.of, asked.target.alternatives)]
    own = asked.request.ranges.method
    return [own] if asked.method_fixed else [*comparable(own)]


def _chosen(
    asked: Asked,
    search: Search,
    samples: Sequence[Mapping[str, Array]],
    allowance: Allowance,
) -> Settled:
    """What is built of what was tried."""
    target, request = asked.target, asked.request

    def choose(likely: Sequence[Trial]) -> tuple[Trial, Told]:
        if not asked.clock:
            return likely[0], []
        return by_the_clock(
            search,
            likely,
            samples,
            written=lambda trial: target.trial(request.adding(trial.choices)),
            given=request.model,
            wish=asked.wish,
            threads=request.threads,
        )

    judging = Judging(
        asked.judges,
        kernels=asked.target.runs_here,
        threads=asked.request.threads,
        max_loss=asked.wish.max_loss,
        metric=asked.wish.metric,
        ran=allowance.spend,
    )
    another = asked.effort.samples + len(asked.judges.part)  # a trial, judged on all of them

    def judge(chosen: Trial) -> Judgement:
        if search.is_float(chosen.in_float):
            return Judgement()
        return judging.of(asked.trial(asked.request.adding(chosen.choices)))

    way = Way(choose=choose, judge=judge, can_go_on=lambda: allowance.holds(another))
    return settled(search, way, or_float=asked.clock)


def _plan(search: Search, found: Settled, worthless: str) -> TargetPlan:
    """The plan of what is built."""
    units, word, best = search.units, search.word, found.trial
    why = reasons(
        best,
        units,
        search.prices,
        search.sensitivity,
        word,
        search.refused,
        sums=search.kept_sums,
        otherwise=_otherwise(found),
    )
    return TargetPlan(
        choices=replace(best.choices, float_nodes=why),
        precision=search.word,
        settled=_words(best),
        tried=(*_tried(search.trials), *found.told),
        unusable=found.unusable,
        doubtful=found.doubtful,
        worthless=worthless,
        failed=_failed(search.prober),
    )


def _otherwise(found: Settled) -> str:
    """Why a layer is float for which nothing of its own speaks."""
    if found.trial.noise.parts:
        return BETWEEN
    return NOT_USABLE if found.unusable else NOT_FASTER


def _failed(prober: Prober) -> str:
    """How many trials could not be run, and why the first could not; "" where all could."""
    failed = len(prober.errors)
    if not failed:
        return ""
    return f"{failed} of {prober.tried} trials could not be run; the first: {prober.errors[0]}"


def _words(best: Trial) -> str:
    if not best.noise.parts:
        return best.what
    accuracy = best.noise.accuracy
    if best.noise.part == LISTED and accuracy is not None and accuracy.task is not None:
        return f"{best.what}: {accuracy.task.words}"
    where = f" in {best.noise.part}" if len(best.noise.parts) > 1 else ""
    return f"{best.what}: {best.noise.db:.1f} dB{where}"


def _tried(trials: Sequence[Trial]) -> list[dict[str, str | float]]:
    return [
        {"what": trial.what, "sqnr_db": round(trial.noise.db, 2), "time": round(trial.time, 4)}
        for trial in trials
    ]


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
