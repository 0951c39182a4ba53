"""Chooses the split to build: by time, then by the verdict's own limits.

The likely splits are timed next to the float model, and the one of least cost is taken. The search
measures noise in dB, the verdict counts boxes, classes and neighbours, so that split is then judged
on the evaluation samples as its engine will be::

    least cost -> good?     -> built
               -> unusable? -> the fastest of the quieter splits that is usable, timed -> built
                               none is, or it is slower than float              -> float
               -> doubtful? -> of the quieter splits that keep some of int8's gain, the one of
                               least cost by time and loss of the task; if less than before -> built

Most splits are clearly good on the first few of these samples, and the others are not run. When the
budget of the search is spent, the best split so far is taken.

The float model is timed as it would be written, which may be faster than the given file; a minimum
speed-up refers to the given file. On a busy machine float may never have run undisturbed, and int8
then seems to win more than its kernels do: times below that are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from deploy.metrics.latency import OVERHEAD_MS
from deploy.tuning.plan_file import TIMED
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial, Tuning
from deploy.tuning.timing import time_models

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array
    from deploy.tuning.search_samples import ExpectedVerdict


TimedRows = list[dict[str, str | float]]  # rows of what was timed, for the plan

_TIMED = 3  # splits that are timed
_KEPT_GAIN = 1 / 3  # share of log(speed-up) that a quieter split must keep if the first is doubtful
LEAST_TIMED_US = 250.0  # float model: a smaller one takes mostly the runtime's own overhead
_TIMED_WEIGHT = 1.5  # factor on the weight of loss where time was measured: its gain is certain
_BELIEVED = 0.8  # share of the kernels' time: a measured time below it was disturbed in float
_SLOWER = 1.02  # times float's time: int8 that is slower gains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHooks:
    """Hooks that time and judge trials."""

    # picks one of some trials, the likeliest first; returns it and what was timed
    choose: Callable[[Sequence[Trial]], tuple[Trial, TimedRows]]
    judge: Callable[[Trial], ExpectedVerdict]  # returns the expected verdict of a trial
    can_go_on: Callable[[], bool]  # whether the budget allows judging another trial


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSplit:
    """The trial to build, and why."""

    trial: Trial
    told: TimedRows  # rows of what was timed
    unusable: str = ""  # why the trial of least cost would be unusable; "" where it is built
    doubtful: str = ""  # why it would be doubtful; "" where it is built or unusable


def choose_split(search: Search, hooks: SplitHooks, *, or_float: bool) -> ChosenSplit:
    """Choose what to build.

    `or_float`: whether to build the float model where no split is usable.
    """
    likely = search.likely(_TIMED)
    if search.best_without_float not in likely:
        likely.append(search.best_without_float)
    first, timed = hooks.choose(likely)
    judgement = hooks.judge(first)
    choice = ChosenSplit(trial=first, told=timed)
    if judgement.unusable:
        return _choose_usable(search, hooks, choice, judgement, or_float=or_float)
    return _choose_surer(search, hooks, choice, judgement) if judgement.doubtful else choice


def _choose_usable(
    search: Search,
    hooks: SplitHooks,
    first: ChosenSplit,
    judgement: ExpectedVerdict,
    *,
    or_float: bool,
) -> ChosenSplit:
    """Choose the fastest usable quieter split; else the float model, or the first trial."""
    reason = judgement.unusable
    quiet = search.quieter(first.trial, lambda one: not hooks.judge(one).unusable, hooks.can_go_on)
    if quiet is None:
        return replace(
            first, trial=search.all_in_float if or_float else first.trial, unusable=reason
        )
    best, timed = hooks.choose([quiet])
    return ChosenSplit(trial=best, told=[*first.told, *timed], unusable=reason)


def _choose_surer(
    search: Search, hooks: SplitHooks, first: ChosenSplit, judgement: ExpectedVerdict
) -> ChosenSplit:
    """Choose a quieter split that costs less by time and loss of the task, if there is one."""
    promising = _promising(search, hooks, first.trial, judgement)
    if promising is None:
        return first
    trial, judged = promising
    best, timed = hooks.choose([trial])
    timed = [*first.told, *timed]
    wins = _cost(search, best.time, judged) < _cost(search, first.trial.time, judgement)
    if not wins or best.time > _slowest(first.trial.time) or best.in_float != trial.in_float:
        return replace(first, told=timed)
    return ChosenSplit(trial=best, told=timed, doubtful=judgement.doubtful)


def _promising(
    search: Search, hooks: SplitHooks, first: Trial, judgement: ExpectedVerdict
) -> tuple[Trial, ExpectedVerdict] | None:
    """Return the quieter split of least predicted cost, judged; None if the first costs less."""
    judged: list[tuple[float, Trial, ExpectedVerdict]] = []

    def good(trial: Trial) -> bool:
        one = hooks.judge(trial)
        judged.append((_cost(search, trial.time, one), trial, one))
        return not (one.unusable or one.doubtful)

    time = search.time_of(first.in_float)
    search.quieter(first, good, hooks.can_go_on, within=_slowest(time))
    promised = _cost(search, time, judgement)
    least, trial, one = min(judged, key=itemgetter(0), default=(promised, first, judgement))
    return (trial, one) if least < promised else None


def _slowest(time: float) -> float:
    """Return the slowest acceptable time; where int8 is no faster than float it is float's."""
    return float(min(time, 1.0) ** _KEPT_GAIN)


def _cost(search: Search, time: float, judgement: ExpectedVerdict) -> float:
    """Return the cost with the loss of the task in place of the noise."""
    lost = judgement.lost.share if judgement.lost is not None else 1.0
    return math.log(max(time, 1e-6)) + search.weight * lost


def choose_by_time(
    search: Search,
    likely: Sequence[Trial],
    samples: Sequence[Mapping[str, Array]],
    *,
    written: Callable[[Trial], onnx.ModelProto],
    given: onnx.ModelProto,
    options: Tuning,
    threads: int,
) -> tuple[Trial, TimedRows]:
    """Time splits and the float model; return the trial to build and rows of what was timed.

    `likely`: splits, the likeliest first. `written`: builds the model of a split as it would be
    deployed.
    """
    models = [written(trial) for trial in (*likely, search.all_in_float)]
    extra = [given] if options.min_speedup > 1 else []
    times_ms = time_models([*models, *extra], samples, threads=threads)
    times, float_ms = times_ms[: len(likely)], times_ms[len(likely)]
    timed = _corrected(search, likely, [own / float_ms for own in times])
    allowed = [
        trial for trial in timed if options.max_loss is None or trial.loss <= options.max_loss
    ]
    chosen = min(allowed or timed[:1], key=lambda trial: trial.cost(_TIMED_WEIGHT * search.weight))
    slowest = max(_SLOWER, 1 + OVERHEAD_MS / max(float_ms, LEAST_TIMED_US / 1e3))
    if extra:
        slowest = min(slowest, times_ms[-1] / float_ms / options.min_speedup)
    return (search.all_in_float if chosen.time > slowest else chosen), _timed_rows(timed)


def _corrected(search: Search, likely: Sequence[Trial], shares: Sequence[float]) -> list[Trial]:
    """Return the splits with measured times, as shares of float's, corrected for disturbance."""
    lower = _BELIEVED * search.prices.too_dear(search.units)
    return [
        replace(trial, time=max(share, lower * trial.time))
        for trial, share in zip(likely, shares, strict=True)
    ]


def _timed_rows(timed: Sequence[Trial]) -> TimedRows:
    return [
        {"what": f"{TIMED}{trial.what}", "sqnr_db": trial.noise.db, "time": trial.time}
        for trial in timed
    ]
