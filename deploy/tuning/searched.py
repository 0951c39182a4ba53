"""One search for one target, step by step: from what is asked of it to the plan that it leaves.

::

    target, request, wish -> units -> heard (a few samples, and what the float model says of them)
          -> prober (tries) + prices (times or products) + methods -> search
          -> settled (timed, judged) -> plan, with a reason for every node in float
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.calibration.choices import NO_CHOICES, Choices
from deploy.errors import BackendError
from deploy.graph.plan import word_of
from deploy.method import Method, comparable
from deploy.progress import Step, phase
from deploy.tuning.allowance import Allowance
from deploy.tuning.effort import EFFORTS, Effort
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.prices import Prices, counted, measured
from deploy.tuning.probe import LISTED, Heard, Prober
from deploy.tuning.reasons import BETWEEN, NOT_FASTER, NOT_USABLE, reasons
from deploy.tuning.samples import alike, as_many, telling
from deploy.tuning.scores import ranked, telling_scores, with_scores
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial
from deploy.tuning.search_samples import Judgement, Judging
from deploy.tuning.timed import TELLING_US, by_the_clock
from deploy.tuning.units import Units, sums_of, units_of
from deploy.tuning.unseen import unseen
from deploy.tuning.usable import Settled, Told, Way, settled
from deploy.tuning.wish import Tuning

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
