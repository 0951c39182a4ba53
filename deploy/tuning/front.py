"""The front of splits, which shows what accuracy costs, and the rule that chooses what is built.

::

    loss | o                    o  the front: no other trial is faster and loses less
         |   o   .              .  other trials
         |     X     .          X  built
         |           o   o
         +------------------ time, as a share of the float model's

The rule: the trial of least cost, log(time) + weight * loss, among those with the best expected
verdict. Trials are judged in the order of their cost, on the evaluation samples and as their engine
will be, until one is good. One that loses at least as much as another that was judged cannot have a
better verdict at more cost, so it is not judged. Where the cheapest is not good, the fastest good
split of the predicted front is looked for by halving::

    fastest   bad  .  .  bad  .  GOOD  .  .  .  .   nearly float
                             look here

When the budget of the search is spent, the best split so far is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx

from deploy.errors import BackendError
from deploy.graph.index import Graph
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
_TIMED_SPLITS = 3  # the cheapest splits are timed before one is chosen
_TIME_STEP = 1.02  # splits that differ by less time are not worth judging both
_RANKS = (GOOD, DOUBTFUL, FLOAT, UNUSABLE)  # FLOAT: good or doubtful, but it wins nothing


class SplitSizes:
    """Predicted sizes of a model's splits."""

    def __init__(self, model: onnx.ModelProto, units: Units) -> None:
        graph = Graph(model)
        nodes = {node.name: node for node in graph.nodes}
        counts = {name: int(math.prod(tensor.dims)) for name, tensor in graph.initializers.items()}
        self._value_count: int = max(sum(counts.values()), 1)
        self._weight_count_by_layer: dict[str, int] = {}
        for layer in units.layers:
            weighted = [nodes[name] for name in units.members[layer]]
            names = {node.input[1] for node in weighted if node.op_type in WEIGHTED}
            self._weight_count_by_layer[layer] = sum(counts.get(name, 0) for name in names)

    def of(self, in_float: frozenset[str]) -> float:
        """Return the bytes of a split's constants, as a share of the float model's."""
        int8_weights = 0
        for layer, count in self._weight_count_by_layer.items():
            if layer not in in_float:
                int8_weights += count
        return 1.0 - (1.0 - _INT8_SIZE) * int8_weights / self._value_count


@dataclass(slots=True, kw_only=True)
class SplitChooser:
    """Chooses what to build among the splits of a search.

    Attributes:
        search: its trials; more are tried where none is good.
        sizes: of the splits.
        judge: trial -> its expected verdict.
        can_judge: whether the budget allows judging another trial.
        measure: trials -> the same with measured times; None where time is predicted, as it is
            too once measuring raised a BackendError, which the build then reports.
    """

    search: Search
    sizes: SplitSizes
    judge: Callable[[Trial], ExpectedVerdict]
    can_judge: Callable[[], bool]
    measure: Callable[[Sequence[Trial]], list[Trial]] | None = None
    _verdict_by_key: dict[object, ExpectedVerdict] = field(default_factory=dict)
    _timed_by_key: dict[object, Trial] = field(default_factory=dict)

    def choose(self) -> Trial:
        """Return the trial to build."""
        choice = self._choose_tried()
        cheapest = min(self._candidates(), key=self.search.cost)
        if self._expected_level(cheapest) == GOOD:
            return choice

        for level in (GOOD, DOUBTFUL, FLOAT):
            self._try_splits_for(level)
            choice = self._choose_tried()
            if _is_as_good(self._expected_level(choice), level):
                break
        return choice

    def front_trials(self, choice: Trial) -> list[Trial]:
        """Return the trials that no other beats in both time and loss, the fastest first.

        They are at most `MAX_POINTS`. `choice`: the trial that is built; it is always among them.
        """
        points: list[Trial] = []
        least_loss = math.inf
        candidates = [self._with_time(trial) for trial in self.search.eligible]
        for trial in sorted(candidates, key=lambda trial: (trial.time, trial.worst_loss)):
            if trial.worst_loss < least_loss or trial.key == choice.key:
                points.append(trial)
                least_loss = min(least_loss, trial.worst_loss)

        # if there are too many, those that differ least from their neighbours go; both ends, and
        # the trial that is built, stay
        while len(points) > MAX_POINTS:
            gaps: dict[int, float] = {}
            for index in range(1, len(points) - 1):
                faster = points[index - 1]
                slower = points[index + 1]
                if points[index].key != choice.key:
                    # time and loss are both shares of the float model's, so they can be added
                    time_gap = slower.time - faster.time
                    loss_gap = faster.worst_loss - slower.worst_loss
                    gaps[index] = time_gap + loss_gap
            del points[min(gaps, key=gaps.__getitem__)]
        return points

    def front(self, choice: Trial) -> tuple[PlannedSplit, ...]:
        """Return the rows of the report's table of splits, with the choices that build each.

        They are the `front_trials`. `choice`: what is built.
        """
        splits = []
        for number, trial in enumerate(self.front_trials(choice), start=1):
            verdict = self.find_verdict(trial)
            task_loss = verdict.task_loss if verdict else None
            row = SplitRow(
                number=number,
                float_layers=self.search.count_float_layers(trial.in_float),
                layers=len(self.search.units.layers),
                time=round(trial.time, 4),
                is_timed=trial.key in self._timed_by_key,
                size=round(self.sizes.of(trial.in_float), 4),
                sqnr_db=round(trial.noise.db, 2),
                figure=task_loss.words if task_loss else "",
                level=verdict.level if verdict else "",
                taken=trial.key == choice.key,
            )
            splits.append(PlannedSplit(row=row, choices=trial.choices))
        return tuple(splits)

    def find_verdict(self, trial: Trial) -> ExpectedVerdict | None:
        """Return the expected verdict of a trial; None if it was not judged."""
        return self._verdict_by_key.get(trial.key)

    def _choose_tried(self) -> Trial:
        """Return the cheapest of the trials with the best expected verdict.

        A trial is a model with some layers in float that was run on a few samples; its cost weighs
        its time and its loss. Its verdict is expected from a run on the evaluation samples (it is
        judged), which takes long. So only trials that can win are judged, the cheapest first.
        """
        judged_trials: list[Trial] = []
        for trial in sorted(self._candidates(), key=self.search.cost):
            if trial.key not in self._verdict_by_key:  # not judged yet: may it win at all?
                # a trial that loses as much at more cost cannot have a better verdict
                if any(cheaper.worst_loss <= trial.worst_loss for cheaper in judged_trials):
                    continue
                if judged_trials and not self.can_judge():  # the budget is spent
                    break
            judged_trials.append(trial)
            if self._expected_level(trial) == GOOD:  # this call judges the trial
                break

        # of equal verdicts `min` returns the first trial, which is the cheapest
        return min(judged_trials, key=lambda trial: _RANKS.index(self._expected_level(trial)))

    def _candidates(self) -> list[Trial]:
        """Return the trials to choose among, with their times.

        Where time is measured these are the timed trials only: measured and predicted times do not
        compare.
        """
        self._time_likely_trials()
        trials = self.search.eligible
        if self.measure is None:
            return trials
        return [self._with_time(trial) for trial in trials if trial.key in self._timed_by_key]

    def _time_likely_trials(self) -> None:
        """Measure and store the times of trials that may win (`_likely_trials`).

        If that fails, measured times are dropped and all times are predicted: the two kinds cannot
        be compared.
        """
        if self.measure is None:
            return
        untimed = {trial.key: trial for trial in self._likely_trials()}
        for key in self._timed_by_key:
            untimed.pop(key, None)
        if not untimed:
            return
        try:
            timed_trials = self.measure(list(untimed.values()))
        except BackendError:
            self.measure = None
            self._timed_by_key.clear()
        else:
            self._timed_by_key |= {trial.key: trial for trial in timed_trials}

    def _likely_trials(self) -> list[Trial]:
        """Return the trials to time: of the cheapest splits, plain int8, and the judged ones."""
        trials = sorted(self.search.eligible, key=self.search.cost)
        trial_by_split: dict[frozenset[str], Trial] = {}
        for trial in trials:
            trial_by_split.setdefault(trial.in_float, trial)
        likely = list(trial_by_split.values())[:_TIMED_SPLITS]
        if self.search.refused in trial_by_split:
            likely.append(trial_by_split[self.search.refused])
        return likely + [trial for trial in trials if trial.key in self._verdict_by_key]

    def _try_splits_for(self, level: str) -> None:
        """Try splits by halving, to find the fastest one with this verdict or a better one.

        A split says which layers are in float. Those that are tried become trials of the search;
        nothing is returned. A slower split is assumed to have a verdict at least as good.

        Args:
            level: the verdict. For GOOD and DOUBTFUL the splits are predicted from the price and
                the loss of each layer. FLOAT allows a split as slow as the float model: then more
                and more of the noisiest layers are in float.
        """
        # all splits have the range methods of the trial of least loss
        base = min(self._candidates(), key=lambda trial: trial.worst_loss)
        losses = self.search.layer_losses(base)
        if level == FLOAT:
            noisiest_layers = sorted(losses, key=lambda layer: -losses[layer])
            pinned = self.search.pinned
            counts = range(1, len(noisiest_layers))
            splits = [pinned.union(noisiest_layers[:count]) for count in counts]
        else:
            splits = self._predicted_splits(level)

        def is_good_enough(trial: Trial) -> bool:
            return _is_as_good(self._expected_level(trial), level)

        find_fastest(self.search, base, splits, is_good_enough, self.can_judge)

    def _predicted_splits(self, level: str) -> list[frozenset[str]]:
        """Return the splits of the predicted front that may be the fastest with a verdict.

        The fastest first, each slower than the one before by a step that is worth another trial.
        """
        slower_than, faster_than = self._time_bounds(level)
        splits = []
        for split in self.search.predicted_front():
            time = self.search.prices.time_share(split)
            is_between = slower_than * _TIME_STEP < time < faster_than / _TIME_STEP
            if is_between and self._is_worthwhile(split, time):
                splits.append(split)
                slower_than = time
        return splits

    def _time_bounds(self, level: str) -> tuple[float, float]:
        """Return the times between which the fastest split with this verdict must be.

        A slower split has more layers in float, so its verdict is taken to be at least as good.

        Returns:
            (time of the slowest split with a worse verdict, 0 without one; time of the fastest
            split that is as good, infinite without one), as predicted shares of the float model's
            time.
        """
        slowest_worse = 0.0
        fastest_good = math.inf
        for trial in self.search.eligible:
            verdict = self.find_verdict(trial)
            if verdict is None:
                continue
            time = self.search.prices.time_share(trial.in_float)
            if _is_as_good(verdict.level, level):
                fastest_good = min(fastest_good, time)
            else:
                slowest_worse = max(slowest_worse, time)
        return slowest_worse, fastest_good

    def _expected_level(self, trial: Trial) -> str:
        """Return the expected verdict of a trial; FLOAT where it would win nothing."""
        key = trial.key
        if key not in self._verdict_by_key:
            self._verdict_by_key[key] = self.judge(trial)
        level = self._verdict_by_key[key].level
        if level != UNUSABLE and not self._is_worthwhile(trial.in_float, trial.time):
            return FLOAT
        return level

    def _is_worthwhile(self, in_float: frozenset[str], time: float) -> bool:
        """Whether a split of some time wins some of the float model's, or a quarter of its size."""
        return time * MIN_GAIN <= 1 or self.sizes.of(in_float) <= WORTHWHILE_SIZE

    def _with_time(self, trial: Trial) -> Trial:
        """Return a trial with its measured time, if it was timed."""
        return self._timed_by_key.get(trial.key, trial)


def _is_as_good(level: str, required: str) -> bool:
    """Whether the verdict `level` is at least as good as `required`."""
    return _RANKS.index(level) <= _RANKS.index(required)


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
        base: its methods are used.
        splits: the fastest first.
        is_good_enough: judges a trial.
        can_go_on: whether the budget allows another trial.
    """
    first = 0
    end = len(splits)
    fastest = None
    while first < end and can_go_on():
        middle = (first + end) // 2
        trial = search.try_split(base, splits[middle])
        if trial is not None and is_good_enough(trial):
            end = middle
            fastest = trial
        else:
            first = middle + 1
    return fastest
