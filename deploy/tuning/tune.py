"""What stays float and how ranges are found, for every target: from its plan, or searched."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.calibration.choices import NO_CHOICES, Choices
from deploy.errors import ConfigError
from deploy.graph.plan import word_of
from deploy.graph.selection import matching
from deploy.method import Method, comparable
from deploy.metrics.latency import OVERHEAD_MS
from deploy.progress import Step, phase
from deploy.repairs import ROUNDING
from deploy.repairs.apply import trials
from deploy.tuning.clock import quickest_of
from deploy.tuning.plan_file import TIMED, PlanFile, TargetPlan, read_plan, write_plan
from deploy.tuning.prices import Prices, counted, measured
from deploy.tuning.probe import Prober
from deploy.tuning.reasons import reasons
from deploy.tuning.samples import alike, as_many, telling
from deploy.tuning.search import COMMON_WEIGHT, EFFORTS, Search, Trial
from deploy.tuning.units import Units, units_of
from deploy.tuning.unseen import unseen
from deploy.tuning.usable import Told, settled, unusable

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest, Target
    from deploy.tensors import Array

DEFAULT_EFFORT = 1
_TELLING_US = 250.0  # of the float model: kernels of a smaller one are the runtime's own overhead
_DEARER = 1.5  # noise beside time that was measured whole: what it buys is sure
_BELIEVED = 0.8  # of the time that the kernels tell: a clock that says less was disturbed in float
_SLOWER = 1.02  # times float's time: int8 that is slower than this gains nothing
_LEAST_SAMPLES, _SHARE = 2, 5  # of few samples a fifth: the search is to cost few calibrations
_ANEW = (
    "the plan of {} in the folder was made with other images or options, so it was searched anew;"
    " --plan obeys a plan as it is"
)
_OWN = "its own method"  # of a target whatever method is asked for
_VERSION = 8  # raised when the same input would be searched otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the user wants of the search.

    Attributes:
        effort: 0 looks for nothing, 3 as long as it finds something.
        plan: a plan to obey instead of searching; None looks beside the output.
        min_speedup: less than this, and the target gets its float model.
        max_loss: of the task, over the samples of the search: noise is made to cost more until it
            holds; None leaves it at the common cost.
        weight: what noise costs beside time, see `deploy.tuning.search`.
        timed: whether time of this machine may decide.
        fresh: search again though there is a plan.

    Raises:
        ConfigError: an effort that is not in the table, a speed-up that is no positive number.
    """

    effort: int = DEFAULT_EFFORT
    plan: Path | None = None
    min_speedup: float = 1.0
    max_loss: float | None = None
    weight: float = COMMON_WEIGHT
    timed: bool = True
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.effort not in (0, *EFFORTS):
            raise ConfigError(f"an effort is 0 to {max(EFFORTS)}, got {self.effort}")
        if not (math.isfinite(self.min_speedup) and self.min_speedup >= 0):
            raise ConfigError(f"a speed-up must be 0 or more, got {self.min_speedup}")


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
        return Tuned(plan=TargetPlan(choices=Choices(float_nodes=common)), searched=False)
    request = request.choosing(Choices(float_nodes=common))
    trial = trials(target, request, repairs)
    effort = EFFORTS[wish.effort]
    most = effort.most * effort.rounds
    with phase("trials", most, about=True) as step:
        found, probes = _searched(
            target,
            request,
            wish,
            method_asked=method_asked,
            trial=trial,
            rounded=True if ROUNDING in repairs else None,
            step=step,
        )
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


def _searched(
    target: Target,
    request: BuildRequest,
    wish: Tuning,
    *,
    method_asked: bool,
    trial: Callable[[BuildRequest], onnx.ModelProto],
    rounded: bool | None,
    step: Step,
) -> tuple[TargetPlan, int]:
    floats = tuple(request.float_nodes)
    decisions = target.plan(request.model, floats).decisions
    units = units_of(request.model, decisions)
    if not units.layers:
        return TargetPlan(choices=NO_CHOICES), 0
    effort = EFFORTS[wish.effort]
    judges = request.judges
    assert judges is not None  # whoever searches has some
    few = min(effort.samples, len(request.feed) // _SHARE, as_many(judges))
    few = max(_LEAST_SAMPLES, few)
    heard = request.ranges.once((telling, few), lambda: telling(judges, few))
    samples = [sample for sample, _ in heard]
    here = target.runs_here
    prober = Prober(
        trial,
        unseen(target, request, samples),
        heard,
        runs_here=here,
        threads=request.threads,
        few=max(min(_LEAST_SAMPLES, few), few * effort.few // effort.samples),
        by_task=wish.max_loss is not None,
        progress=step,
    )
    clock, timed = here and wish.timed, alike(samples)
    prices = _prices(target, request, units, timed, timed=clock)
    methods: list[Method | None]
    if target.own_method:
        methods = [None, *map(Method.of, target.alternatives)]
    else:
        own, fixed = request.ranges.method, method_asked or request.ranges.trusted is not None
        methods = [own] if fixed else [*comparable(own)]
    search = Search(
        units=units,
        prices=prices,
        prober=prober,
        methods=methods,
        own=_OWN,
        word=word_of(decisions),
        effort=effort,
        weight=wish.weight,
        rounded=rounded,
    )
    search.run()
    if wish.max_loss is not None:
        search.hold(wish.max_loss)

    def choose(likely: Sequence[Trial]) -> tuple[Trial, Told]:
        if clock:
            return _by_the_clock(target, request, search, timed, wish, likely)
        return likely[0], []

    def wrong(chosen: Trial) -> str:
        if not chosen.noise.parts:  # the float model
            return ""
        model, most = trial(request.adding(chosen.choices)), wish.max_loss
        return unusable(model, judges, kernels=here, threads=request.threads, max_loss=most)

    best, clocked, spoiled = settled(search, choose, wrong, or_float=clock)
    why = reasons(best, units, prices, search.sensitivity, search.word)
    found = TargetPlan(
        choices=replace(best.choices, float_nodes=why),
        precision=search.word,
        settled=_words(best),
        tried=(*_tried(search.trials), *clocked),
        unusable=spoiled,
    )
    return found, prober.tried


@phase("timing kernels")
def _prices(
    target: Target,
    request: BuildRequest,
    units: Units,
    samples: Sequence[Mapping[str, Array]],
    *,
    timed: bool,
) -> Prices:
    if timed:
        every = Choices(float_nodes=dict.fromkeys(units.nodes(units.members), "timed in float"))
        float32, int8 = (target.trial(request.adding(one)) for one in (every, NO_CHOICES))
        found = measured(request.model, float32, int8, units, samples)
        if found.total(units, frozenset(units.members)) >= _TELLING_US:
            return found
    return counted(request.model, units, samples[0])


def _by_the_clock(
    target: Target,
    request: BuildRequest,
    search: Search,
    samples: Sequence[Mapping[str, Array]],
    wish: Tuning,
    likely: Sequence[Trial],
) -> tuple[Trial, Told]:
    """The likely splits, timed beside float; of them the one of least cost.

    Float is the model as it would be written, which may be faster than it was given; a speed-up
    that is asked for is meant beside the latter. On a machine that others use, float may never have
    had it alone, and then int8 seems to win more than all its kernels do: so much is not believed.
    """
    written = [
        target.trial(request.adding(trial.choices)) for trial in (*likely, search.all_in_float)
    ]
    given = [request.model] if wish.min_speedup > 1 else []
    found = quickest_of([*written, *given], samples, threads=request.threads)
    times, whole = found[: len(likely)], found[len(likely)]
    believed = _BELIEVED * search.prices.too_dear(search.units)
    real = [
        replace(trial, time=max(own / whole, believed * trial.time))
        for trial, own in zip(likely, times, strict=True)
    ]
    told: Told = [
        {"what": f"{TIMED}{trial.what}", "sqnr_db": trial.noise.db, "time": trial.time}
        for trial in real
    ]
    held = [trial for trial in real if wish.max_loss is None or trial.loss <= wish.max_loss]
    chosen = min(held or real[:1], key=lambda trial: trial.cost(_DEARER * search.weight))
    most = max(_SLOWER, 1 + OVERHEAD_MS / max(whole, _TELLING_US / 1e3))
    if given:
        most = min(most, found[-1] / whole / wish.min_speedup)
    return (search.all_in_float if chosen.time > most else chosen), told


def _words(best: Trial) -> str:
    if not best.noise.parts:
        return best.what
    where = f" in {best.noise.part}" if len(best.noise.parts) > 1 else ""
    return f"{best.what}: {best.noise.db:.1f} dB{where}"


def _tried(trials: Sequence[Trial]) -> list[dict[str, str | float]]:
    return [
        {"what": trial.what, "sqnr_db": round(trial.noise.db, 2), "time": round(trial.time, 4)}
        for trial in trials
    ]


def _check_names(request: BuildRequest, plan: TargetPlan) -> None:
    nodes = {node.name for node in request.model.graph.node}
    for name in plan.choices.float_nodes:
        if name not in nodes:
            raise ConfigError(
                f"a plan must name nodes of the model, got {name!r}; delete the line, or the file"
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
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
