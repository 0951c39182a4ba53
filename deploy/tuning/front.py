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
from deploy.tuning.prices import Units
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial
from deploy.tuning.search_samples import ExpectedVerdict

MAX_POINTS = 8  # of the front that is kept
WORTHWHILE_SIZE = 0.75  # share of the float model's bytes: a smaller engine is worth having
_LIKELY = 3  # splits that are timed before one is chosen
_TIME_STEP = 1.02  # splits that differ by less time are not worth judging both
_RANKS = (GOOD, DOUBTFUL, FLOAT, UNUSABLE)  # FLOAT: good or doubtful, but it wins nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A split that could be built, and what it costs.

    Attributes:
        trial: the split with its range methods; its time is measured where `is_timed`.
        size: bytes of the constants, as a share of the float model's.
        is_timed: whether the time was measured, else it is predicted.
        verdict: the expected one; None where it was not judged.
        taken: whether it is built.
    """

    trial: Trial
    size: float
    is_timed: bool = False
    verdict: ExpectedVerdict | None = None
    taken: bool = False


class SplitSizes:
    """Predicted sizes of a model's splits."""

    def __init__(self, model: onnx.ModelProto, units: Units) -> None:
        graph = Graph(model)
        nodes = {node.name: node for node in graph.nodes}
        counts = {name: int(math.prod(tensor.dims)) for name, tensor in graph.initializers.items()}
        self._values: int = sum(counts.values())
        self._weights_by_layer: dict[str, int] = {}
        for layer in units.layers:
            weighted = [nodes[name] for name in units.members[layer]]
            names = {node.input[1] for node in weighted if node.op_type in WEIGHTED}
            self._weights_by_layer[layer] = sum(counts.get(name, 0) for name in names)

    def of(self, in_float: frozenset[str]) -> float:
        """Return the bytes of a split's constants, as a share of the float model's."""
        int8_weights = 0
        for layer, count in self._weights_by_layer.items():
            if layer not in in_float:
                int8_weights += count
        return 1.0 - 0.75 * int8_weights / max(self._values, 1)


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
    _verdicts: dict[object, ExpectedVerdict] = field(default_factory=dict)
    _timed: dict[object, Trial] = field(default_factory=dict)

    def choose(self) -> Trial:
        """Return the trial to build."""
        choice = self._choose_tried()
        cheapest = min(self._candidates(), key=self.search.cost)
        if self._level(cheapest) == GOOD:
            return choice

        for level in (GOOD, DOUBTFUL, FLOAT):
            self._look_for(level)
            choice = self._choose_tried()
            if _is_as_good(self._level(choice), level):
                break
        return choice

    def front(self, choice: Trial) -> list[FrontPoint]:
        """Return the trials that no other beats in both time and loss, the fastest first.

        `choice`: what is built; it is always among them.
        """
        taken_key = choice.key
        points: list[FrontPoint] = []
        least_loss = math.inf
        candidates = [self._with_time(trial) for trial in self.search.eligible]
        for trial in sorted(candidates, key=lambda trial: (trial.time, trial.worst_loss)):
            key = trial.key
            if key != taken_key and trial.worst_loss >= least_loss:
                continue
            least_loss = min(least_loss, trial.worst_loss)
            point = FrontPoint(
                trial=trial,
                size=self.sizes.of(trial.in_float),
                is_timed=key in self._timed,
                verdict=self._verdicts.get(key),
                taken=key == taken_key,
            )
            points.append(point)
        return _thin_out(points)

    def _choose_tried(self) -> Trial:
        """Return the trial of least cost among the tried ones with the best verdict."""
        judged: list[Trial] = []
        for trial in sorted(self._candidates(), key=self.search.cost):
            if trial.key not in self._verdicts:
                if any(cheaper.worst_loss <= trial.worst_loss for cheaper in judged):
                    continue
                if judged and not self.can_judge():
                    break
            judged.append(trial)
            if self._level(trial) == GOOD:
                break
        return min(judged, key=self._rank)

    def _candidates(self) -> list[Trial]:
        """Return the trials to choose among: where time is measured, those that were timed."""
        trials = self.search.eligible
        if self.measure is None:
            return trials
        cheapest = sorted(trials, key=self.search.cost)
        likely: dict[frozenset[str], Trial] = {}
        for trial in cheapest:
            likely.setdefault(trial.in_float, trial)
        plain = [trial for trial in cheapest if trial.in_float == self.search.refused][:1]
        judged = [trial for trial in trials if trial.key in self._verdicts]
        wanted = {trial.key: trial for trial in (*list(likely.values())[:_LIKELY], *plain, *judged)}
        untimed = [trial for key, trial in wanted.items() if key not in self._timed]
        if untimed:
            try:
                timed = self.measure(untimed)
            except BackendError:
                self.measure = None
                self._timed.clear()
                return trials
            for trial in timed:
                self._timed[trial.key] = trial
        return [self._with_time(trial) for trial in trials if trial.key in self._timed]

    def _look_for(self, level: str) -> None:
        """Try splits of the predicted front, by halving, for the fastest with a verdict.

        That a slower split has a verdict at least as good is assumed.
        """
        base = min(self._candidates(), key=lambda trial: trial.worst_loss)
        losses = self.search.layer_losses(base)
        if level == FLOAT:  # whatever its time: the noisiest layers in float
            order = sorted(losses, key=lambda layer: -losses[layer])
            pinned = self.search.pinned
            splits = [pinned.union(order[:count]) for count in range(1, len(order))]
        else:
            too_fast, good = self._bounds(level)
            splits = []
            for split in self.search.predicted_front():
                time = self.search.time_of(split)
                is_between = time > _TIME_STEP * too_fast and _TIME_STEP * time < good
                if is_between and self._is_worthwhile(split):
                    splits.append(split)
                    too_fast = time

        def is_good_enough(trial: Trial) -> bool:
            return _is_as_good(self._level(trial), level)

        find_fastest(self.search, base, splits, is_good_enough, self.can_judge)

    def _bounds(self, level: str) -> tuple[float, float]:
        """Return the times between which the fastest split with a verdict must be."""
        too_fast, good = 0.0, math.inf
        for trial in self.search.eligible:
            verdict = self._verdicts.get(trial.key)
            if verdict is None:
                continue
            time = self.search.time_of(trial.in_float)
            if _is_as_good(verdict.level, level):
                good = min(good, time)
            else:
                too_fast = max(too_fast, time)
        return too_fast, good

    def _rank(self, trial: Trial) -> tuple[int, float]:
        return _RANKS.index(self._level(trial)), self.search.cost(trial)

    def _level(self, trial: Trial) -> str:
        """Return the expected verdict of a trial; FLOAT where it would win nothing."""
        key = trial.key
        if key not in self._verdicts:
            self._verdicts[key] = self.judge(trial)
        level = self._verdicts[key].level
        if level != UNUSABLE and not self._is_worthwhile(trial.in_float, trial.time):
            return FLOAT
        return level

    def _is_worthwhile(self, in_float: frozenset[str], time: float | None = None) -> bool:
        """Whether a split wins some of the time or a quarter of the size."""
        if time is None:
            time = self.search.time_of(in_float)
        return time * MIN_GAIN <= 1 or self.sizes.of(in_float) <= WORTHWHILE_SIZE

    def _with_time(self, trial: Trial) -> Trial:
        """Return a trial with its measured time, if it was timed."""
        return self._timed.get(trial.key, trial)


def _is_as_good(level: str, required: str) -> bool:
    """Whether a verdict is at least as good as another."""
    return _RANKS.index(level) <= _RANKS.index(required)


def find_fastest(
    search: Search,
    base: Trial,
    splits: Sequence[frozenset[str]],
    is_good_enough: Callable[[Trial], bool],
    can_go_on: Callable[[], bool] = lambda: True,
) -> Trial | None:
    """Return the first good enough of some splits, tried by halving; None without one.

    That all after it are good enough too is assumed.

    Args:
        search: tries the splits.
        base: its methods are used.
        splits: the fastest first.
        is_good_enough: judges a trial.
        can_go_on: whether the budget allows another one.
    """
    first, end, fastest = 0, len(splits), None
    while first < end and can_go_on():
        middle = (first + end) // 2
        trial = search.try_split(base, splits[middle])
        if trial is not None and is_good_enough(trial):
            end, fastest = middle, trial
        else:
            first = middle + 1
    return fastest


def _thin_out(points: list[FrontPoint]) -> list[FrontPoint]:
    """Return at most `MAX_POINTS` points: the ends, what is built, and those farthest apart."""
    while len(points) > MAX_POINTS:
        gaps: dict[int, float] = {}
        for index in range(1, len(points) - 1):
            before, after = points[index - 1].trial, points[index + 1].trial
            if not points[index].taken:
                gaps[index] = abs(after.time - before.time) + before.worst_loss - after.worst_loss
        del points[min(gaps, key=gaps.__getitem__)]
    return points
