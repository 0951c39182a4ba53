"""Chooses the split to build: by time where that is measured, then by the verdict's own limits.

A split always has a layer in int8; the report says whether int8 is worth it. Where int8 is clearly
faster on this CPU, the likely splits are timed next to the float model, and the one of least cost
is taken. Elsewhere a split with at least half of its layers in int8 is preferred if it is good. The
search measures noise in dB, the verdict counts boxes, classes and neighbours, so that split is then
judged on the evaluation samples as its engine will be::

    least cost -> good?     -> built
               -> not good? -> searched on with more weight on loss, and judged again; then the
                               first good one of the next likely splits
               -> unusable? -> the fastest of the quieter splits that is usable; none is: the
                               quietest
               -> doubtful? -> of the quieter splits that keep some of int8's gain, the fastest
                               good one; none is: the one of least cost by time and loss of the
                               task, if less than before

Most splits are clearly good on the first few of these samples, and the others are not run. When the
budget of the search is spent, the best split so far is taken.

On a busy machine float may never have run undisturbed, and int8 then seems to win more than its
kernels do: times below that are corrected.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import onnx

from deploy.tensors import Array
from deploy.tuning.plan_file import TIMED
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial
from deploy.tuning.search_samples import ExpectedVerdict
from deploy.tuning.timing import time_models

TimedRows = list[dict[str, str | float]]  # rows of what was timed, for the plan

_TIMED = 3  # splits that are timed
_KEPT_GAIN = 1 / 3  # share of log(speed-up) that a quieter split must keep if the first is doubtful
_TIMED_WEIGHT = 1.5  # factor on the weight of loss where time was measured: its gain is certain
_BELIEVED = 0.8  # share of the kernels' time: a measured time below it was disturbed in float
_LEAST_GAIN = 0.02  # share of float's time that int8 must save for time to decide


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSplit:
    """The trial to build, and why."""

    trial: Trial
    told: TimedRows  # rows of what was timed
    unusable: str = ""  # why the trial of least cost would be unusable; "" where it is built
    doubtful: str = ""  # why it would be doubtful; "" where it is built or unusable
    interrupted: bool = False  # whether it is the best of a search that the user ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChooser:
    """Chooses what to build among the splits of a search."""

    search: Search
    # picks one of some trials, the likeliest first; returns it and what was timed
    choose: Callable[[Sequence[Trial]], tuple[Trial, TimedRows]]
    judge: Callable[[Trial], ExpectedVerdict]  # returns the expected verdict of a trial
    can_go_on: Callable[[], bool]  # whether the budget allows judging another trial

    def run(self) -> ChosenSplit:
        """Choose what to build."""
        choice, judgement = self._choose_likely([self.search.best_without_float])
        loud = choice.trial
        if not judgement.is_good and self.search.can_refine():
            usual = self.search.weight
            self.search.quiet_down()
            again, judged = self._choose_likely([choice.trial])
            told = [*choice.told, *again.told]
            times = again.trial.time, choice.trial.time
            surer = bool(judgement.unusable) or self._is_worth_it(*times, judged, judgement)
            if judged.is_good or (surer and not judged.unusable):
                doubtful = "" if judgement.unusable else judgement.doubtful
                choice = replace(again, unusable=judgement.unusable, doubtful=doubtful)
                judgement = judged
            choice = replace(choice, told=told)
            if judged.is_good:
                self.search.weight = usual  # between good splits
                return self._choose_faster(choice, loud)
        if not judgement.is_good:
            choice, judgement = self._choose_next(choice, judgement)
        if judgement.unusable:
            return self._choose_usable(choice, judgement)
        return self._choose_surer(choice, judgement) if judgement.doubtful else choice

    def _choose_likely(self, more: Sequence[Trial]) -> tuple[ChosenSplit, ExpectedVerdict]:
        """Choose among the likely trials and some more; return the choice and its verdict."""
        likely = self.search.likely(_TIMED)
        first, timed = self.choose([*likely, *(one for one in more if one not in likely)])
        fuller = None if self.search.prices.measured else self.search.fuller(first)
        if fuller is not None and self.can_go_on() and (judged := self.judge(fuller)).is_good:
            return ChosenSplit(trial=fuller, told=timed), judged
        own, quick = self.judge(first), None
        if fuller is not None and own.is_good:
            quick = self.search.faster(first, lambda one: self.judge(one).is_good, self.can_go_on)
        return ChosenSplit(trial=quick or first, told=timed), own

    def _choose_next(
        self, first: ChosenSplit, judgement: ExpectedVerdict
    ) -> tuple[ChosenSplit, ExpectedVerdict]:
        """Choose the first good one of the other likely splits that keep some of int8's gain."""
        slowest = _slowest(self.search.time_of(first.trial.in_float))
        others = [
            one for one in self.search.likely(_TIMED + 1) if one.in_float != first.trial.in_float
        ]
        for trial in others:
            if trial.time < slowest and self.can_go_on() and (judged := self.judge(trial)).is_good:
                doubtful = "" if judgement.unusable else judgement.doubtful
                chosen = replace(first, trial=trial, unusable=judgement.unusable, doubtful=doubtful)
                return chosen, judged
        return first, judgement

    def _choose_faster(self, slow: ChosenSplit, loud: Trial) -> ChosenSplit:
        """Choose between a good split, the fastest good one with its methods, and a known one.

        `loud`: the split of least cost, which is not good.
        """
        between = (
            one
            for one in self.search.likely(len(self.search.trials))
            if one.time < slow.trial.time and one.noise.worst < loud.noise.worst
        )
        likely = itertools.islice(between, _TIMED)
        known = next((one for one in likely if self.can_go_on() and self.judge(one).is_good), None)
        quick = self.search.faster(slow.trial, lambda one: self.judge(one).is_good, self.can_go_on)
        good = sorted(filter(None, (quick, known)), key=lambda one: one.time)
        if not good:
            return slow
        best, timed = self.choose([slow.trial, *good])
        return replace(
            slow, trial=best if self.search.prices.measured else good[0], told=[*slow.told, *timed]
        )

    def _choose_usable(self, first: ChosenSplit, judgement: ExpectedVerdict) -> ChosenSplit:
        """Choose the fastest usable quieter split; else the quietest, usable or not judged."""
        reason = judgement.unusable
        quiet = self.search.quieter(
            first.trial, lambda one: not self.judge(one).unusable, self.can_go_on
        )
        quiet = quiet or self.search.quietest(first.trial)
        if quiet is None:
            return replace(first, unusable=reason)
        best, timed = self.choose([quiet])
        return ChosenSplit(trial=best, told=[*first.told, *timed], unusable=reason)

    def _choose_surer(self, first: ChosenSplit, judgement: ExpectedVerdict) -> ChosenSplit:
        """Choose a quieter split, if one is good or costs less by time and loss of the task."""
        promising = self._promising(first.trial, judgement)
        if promising is None:
            return first
        trial, judged = promising
        best, timed = self.choose([trial])
        timed = [*first.told, *timed]
        worth_it = self._is_worth_it(best.time, first.trial.time, judged, judgement)
        if worth_it and best.in_float == trial.in_float:
            return ChosenSplit(trial=best, told=timed, doubtful=judgement.doubtful)
        return replace(first, told=timed)

    def _promising(
        self, first: Trial, judgement: ExpectedVerdict
    ) -> tuple[Trial, ExpectedVerdict] | None:
        """Return the fastest good quieter split, or that of least predicted cost, with its verdict.

        None if the first costs less.
        """
        judged: list[tuple[float, Trial, ExpectedVerdict]] = []

        def good(trial: Trial) -> bool:
            one = self.judge(trial)
            judged.append((self._cost(trial.time, one), trial, one))
            return one.is_good

        time = self.search.time_of(first.in_float)
        fastest = self.search.quieter(first, good, self.can_go_on, within=_slowest(time))
        if fastest is not None:
            return next((trial, one) for _, trial, one in judged if trial is fastest)
        promised = self._cost(time, judgement)
        least, trial, one = min(judged, key=itemgetter(0), default=(promised, first, judgement))
        return (trial, one) if least < promised else None

    def _is_worth_it(
        self, time: float, first: float, judged: ExpectedVerdict, judgement: ExpectedVerdict
    ) -> bool:
        """Whether a quieter split keeps some of int8's gain and is good or costs less.

        `time`, `judged`: of the quieter split. `first`, `judgement`: of the first one.
        """
        less = self._cost(time, judged) < self._cost(first, judgement)
        return (judged.is_good or less) and time <= _slowest(first)

    def _cost(self, time: float, judgement: ExpectedVerdict) -> float:
        """Return the cost with the loss of the task in place of the noise."""
        lost = judgement.task_loss.share if judgement.task_loss is not None else 1.0
        return math.log(max(time, 1e-6)) + self.search.weight * lost


def _slowest(time: float) -> float:
    """Return the slowest acceptable time; where int8 is no faster than float it is float's."""
    return float(min(time, 1.0) ** _KEPT_GAIN)


def choose_by_time(
    search: Search,
    likely: Sequence[Trial],
    samples: Sequence[Mapping[str, Array]],
    *,
    written: Callable[[Trial], onnx.ModelProto],
    float32: onnx.ModelProto,
    max_loss: float | None,
    threads: int,
) -> tuple[Trial, TimedRows]:
    """Time splits and the float model; return the trial to build and rows of what was timed.

    Where the times differ by less than they spread, the likeliest is returned.

    `likely`: splits, the likeliest first. `written`: builds the model of a split as it would be
    deployed. `float32`: the float model as it would be deployed.
    """
    *times, of_float = time_models(
        [*(written(trial) for trial in likely), float32], samples, threads=threads
    )
    lower = _BELIEVED * search.prices.measured_share(search.units)  # a time below it was disturbed
    timed = [
        replace(trial, time=max(own.ms / of_float.ms, lower * trial.time))
        for trial, own in zip(likely, times, strict=True)
    ]
    allowed = [trial for trial in timed if max_loss is None or trial.loss <= max_loss]
    chosen = min(allowed or timed[:1], key=lambda trial: trial.cost(_TIMED_WEIGHT * search.weight))
    spread = max(one.spread for one in (*times, of_float))
    if abs(math.log(chosen.time / timed[0].time)) <= spread and timed[0] in allowed:
        chosen = timed[0]
    return chosen, [
        {"what": f"{TIMED}{trial.what}", "sqnr_db": trial.noise.db, "time": trial.time}
        for trial in timed
    ]


def int8_is_faster(
    int8: onnx.ModelProto,
    float32: onnx.ModelProto,
    samples: Sequence[Mapping[str, Array]],
    *,
    threads: int,
) -> bool:
    """Whether int8 is faster here by more than times of the same model differ."""
    quick, of_float = time_models([int8, float32], samples, threads=threads)
    gain = 1 - quick.ms / of_float.ms
    return gain > max(_LEAST_GAIN, quick.spread, of_float.spread)
