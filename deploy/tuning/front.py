"""The front of splits, which shows what accuracy costs, and the rule that chooses what is built.

A split says which layers are in float; a trial is a split that ran on a few samples. The front
holds the trials that no other trial beats in both time and loss::

    loss | o                    o  the front
         |   o   .              .  other trials
         |     X     .          X  built
         |           o   o
         +------------------ time, as a share of the float model's

The rule: the trial of least cost, log(time) + weight * loss, among those with the best expected
verdict. Trials are judged in the order of their cost, on the evaluation samples and as their engine
will be, until one is good. A trial that loses about as much as one with a bad verdict is expected
to have a bad one too, so it is not judged. Where the cheapest is not good, the fastest good split
of the predicted front is looked for by halving::

    fastest   bad  .  .  bad  .  GOOD  .  .  .  .   nearly float
                             look here

When the budget of the search is spent, the best split so far is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx

from deploy.errors import BackendError
from deploy.graph.placement import WEIGHTED
from deploy.metrics.latency import MIN_GAIN
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.tuning.plan_file import PlannedSplit, SplitRow
from deploy.tuning.prices import Units
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial
from deploy.tuning.search_samples import ExpectedVerdict

MAX_POINTS = 8  # of the front that the plan stores
WORTHWHILE_SIZE = 0.75  # share of the float model's bytes: a smaller engine is worth having
_INT8_SIZE = 0.25  # of a weight, as a share of its float size
_CLEARLY_LESS = 0.8  # share of the loss of a bad split, below which a split may be better
_TIMED_SPLITS = 3  # the cheapest splits are timed before one is chosen
_RANKS = (GOOD, DOUBTFUL, FLOAT, UNUSABLE)  # FLOAT: good or doubtful, but it wins nothing
_GOOD_RANK = _RANKS.index(GOOD)


class SplitSizes:
    """Predicted sizes of a model's splits."""

    def __init__(self, model: onnx.ModelProto, units: Units) -> None:
        counts = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
        weight_by_node = {}
        for node in model.graph.node:
            if node.op_type in WEIGHTED:
                weight_by_node[node.name] = node.input[1]
        self._value_count: int = max(sum(counts.values()), 1)
        self._weight_count_by_layer: dict[str, int] = {}
        for layer in units.layers:
            weights = {weight_by_node.get(name, "") for name in units.members[layer]}
            weight_counts = (counts.get(weight, 0) for weight in weights)
            self._weight_count_by_layer[layer] = sum(weight_counts)

    def of(self, in_float: frozenset[str]) -> float:
        """Return the bytes of a split's constants, as a share of the float model's."""
        int8_layers = self._weight_count_by_layer.keys() - in_float
        int8_weights = sum(self._weight_count_by_layer[layer] for layer in int8_layers)
        return 1.0 - (1.0 - _INT8_SIZE) * int8_weights / self._value_count


@dataclass(slots=True, kw_only=True)
class SplitChooser:
    """Chooses what to build among the splits of a search.

    Attributes:
        search: its trials; more are tried where none is good.
        sizes: of the splits.
        judge: trial -> its expected verdict.
        can_judge: whether the budget allows judging another trial.
        measure: trials -> their times as shares of the float model's; None where time is predicted,
            as it is too once measuring raised a BackendError, which the build then reports.
    """

    search: Search
    sizes: SplitSizes
    judge: Callable[[Trial], ExpectedVerdict]
    can_judge: Callable[[], bool]
    measure: Callable[[Sequence[Trial]], Sequence[float]] | None = None

    def choose(self) -> Trial:
        """Return the trial to build."""
        choice = self._choose_best_trial()
        cheapest_trial = min(self._candidates(), key=self.search.cost)
        if self._judged_rank(cheapest_trial) == _GOOD_RANK:
            return choice

        for rank in range(len(_RANKS) - 1):
            self._try_splits_for(rank)
            choice = self._choose_best_trial()
            if self._judged_rank(choice) <= rank:
                break
        return choice

    def front_trials(self, choice: Trial) -> list[Trial]:
        """Return the trials that no other beats in both time and loss, the fastest first.

        They are at most `MAX_POINTS`. `choice`: the trial that is built; it is always among them.
        """
        points = []
        least_loss = math.inf
        for trial in sorted(self.search.eligible, key=lambda trial: (trial.time, trial.loss)):
            if trial.loss < least_loss or trial is choice:
                points.append(trial)
                least_loss = min(least_loss, trial.loss)

        # if there are too many, those that differ least from their neighbours go; both ends, and
        # the trial that is built, stay
        while len(points) > MAX_POINTS:
            inner_indices = [i for i in range(1, len(points) - 1) if points[i] is not choice]
            del points[min(inner_indices, key=partial(_gap_between_neighbours, points))]
        return points

    def front(self, choice: Trial) -> tuple[PlannedSplit, ...]:
        """Return the rows of the report's table of splits, with the choices that build each.

        They are the `front_trials`. `choice`: the trial that is built.
        """
        splits = []
        for number, trial in enumerate(self.front_trials(choice), start=1):
            verdict = trial.verdict
            task_loss = verdict.task_loss if verdict else None
            row = SplitRow(
                number=number,
                float_layers=self.search.count_float_layers(trial.in_float),
                layers=len(self.search.units.layers),
                time=round(trial.time, 4),
                is_timed=trial.measured_time is not None,
                size=round(self.sizes.of(trial.in_float), 4),
                sqnr_db=round(trial.noise.db, 2),
                figure=task_loss.words if task_loss else "",
                level=verdict.reported_level if verdict else "",
                taken=trial is choice,
            )
            splits.append(PlannedSplit(row=row, choices=trial.choices))
        return tuple(splits)

    def _choose_best_trial(self) -> Trial:
        """Return the cheapest of the trials with the best expected verdict.

        A trial is a model with some layers in float that was run on a few samples; its cost weighs
        its time and its loss. To judge a trial is to run it on the evaluation samples, which gives
        its expected verdict and takes long. So only trials that can win are judged, the cheapest
        first.
        """
        judged_trials: list[Trial] = []
        for trial in sorted(self._candidates(), key=self.search.cost):
            if trial.verdict is None:
                if _loses_like_a_worse_trial(trial, judged_trials, _GOOD_RANK):
                    continue  # it would not be good either, and it costs more
                if judged_trials and not self.can_judge():
                    break  # the budget is spent
            judged_trials.append(trial)
            if self._judged_rank(trial) == _GOOD_RANK:  # this call judges the trial
                break

        # of equal verdicts `min` returns the first trial, which is the cheapest
        return min(judged_trials, key=self._judged_rank)

    def _candidates(self) -> list[Trial]:
        """Return the trials to choose among, with their times.

        Where time is measured these are the timed trials only: measured and predicted times do not
        compare.
        """
        self._time_likely_trials()
        trials = self.search.eligible
        if self.measure is None:
            return trials
        return [trial for trial in trials if trial.measured_time is not None]

    def _time_likely_trials(self) -> None:
        """Measure the times of trials that may win: the cheapest, plain int8, and the judged ones.

        If that fails, all times are predicted: measured and predicted times cannot be compared.
        """
        if self.measure is None:
            return
        trials = sorted(self.search.eligible, key=self.search.cost)
        untimed_trials = []
        for index, trial in enumerate(trials):
            is_plain = trial.in_float == self.search.refused  # all that can be in int8 is
            is_likely = index < _TIMED_SPLITS or is_plain or trial.verdict is not None
            if is_likely and trial.measured_time is None:
                untimed_trials.append(trial)
        if not untimed_trials:  # `measure` would time the float model alone
            return
        try:
            for trial, time in zip(untimed_trials, self.measure(untimed_trials), strict=True):
                trial.measured_time = time
        except BackendError:
            self.measure = None
            for trial in trials:
                trial.measured_time = None

    def _try_splits_for(self, rank: int) -> None:
        """Try splits by halving, to find the fastest one with a verdict of this rank or better.

        A split says which layers are in float. Those that are tried become trials of the search;
        nothing is returned. For a rank that demands some gain, the splits are those of the
        predicted front that may be fast enough. FLOAT demands none, so its splits are chosen by
        noise alone: the noisiest layer in float, the two noisiest, and so on.
        """
        # all splits have the range methods of the candidate of least loss
        base = min(self._candidates(), key=lambda trial: trial.loss)
        losses = self.search.layer_losses(base)
        if _RANKS[rank] == FLOAT:
            noisiest_layers = sorted(losses, key=lambda layer: -losses[layer])
            counts = range(1, len(noisiest_layers))
            splits = [self.search.pinned.union(noisiest_layers[:count]) for count in counts]
        else:
            splits = self._predicted_splits(rank)

        def is_good_enough(trial: Trial) -> bool:
            # `eligible`: all trials of the search's method, timed or not
            if _loses_like_a_worse_trial(trial, self.search.eligible, rank):
                return False
            return self._judged_rank(trial) <= rank

        find_fastest(self.search, base, splits, is_good_enough, self.can_judge)

    def _predicted_splits(self, rank: int) -> list[frozenset[str]]:
        """Return the splits of the predicted front that may be the fastest of a rank or better.

        A slower split has more layers in float, so its verdict is assumed to be at least as good.
        So the fastest split is slower than every judged trial of a worse rank, and it is faster
        than every judged trial that has the rank already.
        """
        time_share = self.search.prices.time_share
        slowest_bad_time = 0.0
        fastest_good_time = math.inf
        for trial in self.search.eligible:
            if trial.verdict is not None:
                time = time_share(trial.in_float)
                if _RANKS.index(trial.verdict.level) <= rank:
                    fastest_good_time = min(fastest_good_time, time)
                else:
                    slowest_bad_time = max(slowest_bad_time, time)

        splits = []
        for split in self.search.predicted_front():
            time = time_share(split)
            if slowest_bad_time < time < fastest_good_time and self._is_worthwhile(split, time):
                splits.append(split)
        return splits

    def _judged_rank(self, trial: Trial) -> int:
        """Return the rank of a trial's expected verdict in `_RANKS`; judge the trial if need be."""
        if trial.verdict is None:
            trial.verdict = self.judge(trial)
        level = trial.verdict.level
        if level != UNUSABLE and not self._is_worthwhile(trial.in_float, trial.time):
            level = FLOAT
        return _RANKS.index(level)

    def _is_worthwhile(self, in_float: frozenset[str], time: float) -> bool:
        """Whether a split of some time wins some of the float model's, or a quarter of its size."""
        return time * MIN_GAIN <= 1 or self.sizes.of(in_float) <= WORTHWHILE_SIZE


def _loses_like_a_worse_trial(trial: Trial, other_trials: Iterable[Trial], rank: int) -> bool:
    """Whether a trial loses nearly as much as another whose verdict is worse than a rank, or more.

    Then its own verdict would not be better either. `rank`: index in `_RANKS`.
    """
    for other in other_trials:
        if other.verdict is None or _RANKS.index(other.verdict.level) <= rank:
            continue
        if _CLEARLY_LESS * other.loss <= trial.loss:
            return True
    return False


def _gap_between_neighbours(points: Sequence[Trial], index: int) -> float:
    """Return how far apart the neighbours of a point of the front are."""
    faster_trial = points[index - 1]
    slower_trial = points[index + 1]
    # time and loss are both shares of the float model's, so they can be added
    time_gap = slower_trial.time - faster_trial.time
    return time_gap + faster_trial.loss - slower_trial.loss


def find_fastest(
    search: Search,
    base: Trial,
    splits: Sequence[frozenset[str]],
    is_good_enough: Callable[[Trial], bool],
    can_go_on: Callable[[], bool] = lambda: True,
) -> Trial | None:
    """Return the first of some splits that is good enough, as a trial; None without one.

    A split says which layers are in float. The splits are tried by halving: that all slower ones
    are good enough too is assumed.

    Args:
        search: tries the splits.
        base: trial whose range methods are used.
        splits: the fastest first.
        is_good_enough: judges a trial.
        can_go_on: whether the budget allows another trial.
    """
    start = 0
    end = len(splits)
    fastest_trial = None
    while start < end and can_go_on():
        middle = (start + end) // 2
        trial = search.try_split(base, splits[middle])
        if trial is not None and is_good_enough(trial):
            end = middle
            fastest_trial = trial
        else:
            start = middle + 1
    return fastest_trial
