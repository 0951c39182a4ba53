"""The search: which units stay float and which method finds each range, for one target.

::

    every method, all in int8            -> the best one
    Adds in float, the layers in int8    -> whether they stay so, where time is not measured
    groups alone in int8, halved         -> noise of each layer
    kernels of both models, or products  -> price of each unit
    least price + weight * noise         -> one split a weight, from "fastest" to "all in float"
    the likely ones, tried whole         -> the split with the least cost
    other methods, whole and in the noisiest groups -> ranges
    float, plain int8 and likely splits, timed -> what is built

What a split costs, by time and noise together: `deploy.tuning.search_options`.

Which layers bring the noise: each group alone in int8, the noisy ones halved again and again.

::

    1..64   8 groups:  0.1  0.02  0.3  0.01 ...        the worst group is halved first
    17..24             |--- 0.28 | 0.02 ---|
    17..20             | 0.001 | 0.28 |                 until it is one layer, or next to quiet

What a group loses alone adds up with the others', so the sum tells what a choice would lose. They
lose it on the samples that say most, and not each for itself; so the sum is scaled to what one
choice was seen to lose whole. A group that cannot be run alone tells nothing and is left out; whole
splits show what it loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from deploy.errors import BackendError
from deploy.method import NO_CHOICES, Choices, Method
from deploy.tuning.prices import Prices, Units, cheapest
from deploy.tuning.probe import Noise, Prober
from deploy.tuning.search_options import COMMON_WEIGHT, Effort, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable


_QUIET = 0.03  # of the worst part, about 30 dB: a group that loses less is not halved

_MUCH = 0.3  # of the worst part, about 10 dB
_FARTHEST = 16.0  # times the power that is seen may be another than the sum

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Groups of layers and what each loses alone in int8.

    Attributes:
        groups: group of units -> its noise, in the model's order; together all layers but those
            that could not be run alone.
        scale: of the power that they sum up to.
    """

    groups: dict[Group, Noise]
    scale: float = 1.0

    @property
    def shares(self) -> dict[str, float]:
        """Unit -> what it loses of the worst part, on top of all others."""
        whole = self.without(frozenset())
        return {
            unit: noise.times(self.scale).weighed(whole) / len(group)
            for group, noise in self.groups.items()
            for unit in group
        }

    def without(self, units: frozenset[str]) -> Noise:
        """What is to be expected with these units in float."""
        total = Noise({})
        for group, noise in self.groups.items():
            left = sum(unit not in units for unit in group) / len(group)
            total = total.plus(noise.times(left * self.scale))
        return total

    def scaled(self, units: frozenset[str], seen: Noise) -> Sensitivity:
        """The same, so that with these units in float it expects what was seen to be lost.

        Where much is lost, noises do not add up, and what is seen tells nothing of splits that lose
        little: the sum stands.
        """
        expected, lost = self.without(units).worst, seen.worst
        if not (0 < expected < _MUCH and 0 < lost < _MUCH):
            return self
        power = (math.log1p(-lost) / math.log1p(-expected)) ** 2
        return replace(self, scale=self.scale * min(max(power, 1 / _FARTHEST), _FARTHEST))


def sensitivity(
    layers: Sequence[str],
    alone: Callable[[Sequence[Group]], list[Noise | None]],
    *,
    groups: int,
    most: int,
) -> Sensitivity:
    """Find the noisy layers.

    Args:
        layers: units that hold weights, in the model's order.
        alone: groups -> what each loses with nothing else in int8; None where it cannot be run.
        groups: how many to begin with.
        most: groups to try in all, at most.
    """
    first = groups_of(layers, groups)
    known = _that_ran(first, alone(first))
    tried, kept = len(first), set[Group]()
    while tried + 2 <= most and (group := _to_halve(known, kept)) is not None:
        both = halves(group)
        found = _that_ran(both, alone(both))
        tried += 2
        if len(found) < len(both):
            kept.add(group)  # more is known of it as a whole
        else:
            del known[group]
            known |= found
    place = {layer: number for number, layer in enumerate(layers)}
    return Sensitivity(dict(sorted(known.items(), key=lambda entry: place[entry[0][0]])))


def groups_of(layers: Sequence[str], most: int) -> list[Group]:
    """Layers in at most so many groups of neighbours, as large as each other."""
    size = max(1, -(-len(layers) // most))
    return [tuple(layers[at : at + size]) for at in range(0, len(layers), size)]


def halves(group: Group) -> list[Group]:
    """The two halves of a group; none of a single layer."""
    middle = (len(group) + 1) // 2
    return [group[:middle], group[middle:]] if len(group) > 1 else []


def _that_ran(groups: Sequence[Group], noises: Sequence[Noise | None]) -> dict[Group, Noise]:
    return {g: noise for g, noise in zip(groups, noises, strict=True) if noise is not None}


def _to_halve(known: dict[Group, Noise], kept: Collection[Group]) -> Group | None:
    """The noisiest group of several layers, unless it matters little; none of those kept whole."""
    several = [group for group in known if len(group) > 1 and group not in kept]
    worst = max(several, key=lambda group: known[group].worst, default=None)
    return worst if worst is not None and known[worst].worst > _QUIET else None


_NEAR = 0.03  # lost of the worst part, about 30 dB: layers in float have no more to win
_WEIGHTS = [2.0 ** (step / 2) for step in range(-12, 15)]  # of the float model's price
_DEAREST = 100.0  # weight of noise beside which time means nothing
_BETTER = 0.8  # of a group's noise: another method must leave less than this
_WON = 0.1  # of the worst part, by Adds in float: what is worth a quarter of the time

_TRIED = "tried in float"


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search.

    Attributes:
        units: of the model, for the target.
        prices: of them.
        prober: tries choices.
        methods: searches of ranges to choose among, the calibration's own first; None stands for
            a target's own.
        own: what that is called.
        word: what the target's nodes run in where they left float.
        effort: how much is tried.
        weight: what noise costs beside time; 2.5 by default.
        rounded: whether the weights of its trials are rounded; None where nobody asks for it.
        or_float: whether a split may be the float model.
        sums: units of Adds that hold no weights: the stream of a residual network.
        trials: what was tried whole and could be run, in order.
        sensitivity: noise of the groups, once it was looked for.
        refused: layers that stay float since they cannot be run otherwise.
        kept_sums: `sums`, where they stay float for what they lose in all, and why.
    """

    units: Units
    prices: Prices
    prober: Prober
    methods: Sequence[Method | None]
    own: str = ""
    word: str = "int8"
    effort: Effort
    weight: float = COMMON_WEIGHT
    rounded: bool | None = None
    or_float: bool = True
    sums: frozenset[str] = frozenset()
    trials: list[Trial] = field(default_factory=list)
    sensitivity: Sensitivity | None = None
    refused: frozenset[str] = frozenset()
    kept_sums: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> Trial:
        """The best trial.

        Raises:
            BackendError: the model cannot be run in int8, whatever finds its ranges, and no layer
                alone is to blame.
        """
        self._whole_in_int8()
        base = min(self.trials, key=lambda trial: trial.mean)
        if base.noise.worst < _NEAR:
            self._try_splits(base, {})
            return self.best
        base = self._without_sums(base)
        for _ in range(self.effort.rounds):
            before = self.best
            self._look_inside(base)
            self._try_splits(base, self._shares)
            self._try_methods(self.best)
            self._swap_methods(self.best)
            if _methods(self.best) != _methods(base):
                self._try_splits(self.best, self._shares, start=self.best.in_float)
            base = self.best
            if base is before:
                break
        return self.best

    @property
    def _shares(self) -> dict[str, float]:
        return self.sensitivity.shares if self.sensitivity is not None else {}

    def is_float(self, in_float: frozenset[str]) -> bool:
        """Whether a split is the float model."""
        return in_float >= frozenset(self.units.members)

    def hold(self, loss: float) -> Trial:
        """Make noise cost more until the best trial loses no more than this of the task."""
        if self.sensitivity is None and self.best.loss > loss:
            self._look_inside(self.best)
        while self.best.loss > loss and self.weight < _DEAREST:
            self.weight *= 3
            if self._shares:
                self._try_splits(self.best, self._shares)
        return self.best

    def quieter(
        self,
        than: Trial,
        usable: Callable[[Trial], bool],
        can_go_on: Callable[[], bool],
        *,
        within: float = 1.0,
    ) -> Trial | None:
        """The fastest split of less noise that is usable and promises to be faster than float.

        Or faster than `within`, a share of the float model's time.

        Found by halving, for as long as that can go on: of two splits the quieter one is taken to
        be the more usable.
        """
        if self.sensitivity is None:
            self._look_inside(than)
        splits = self._below(than.in_float, within)
        first, last, found = 0, len(splits), None
        while first < last and can_go_on():
            middle = (first + last) // 2
            trial = self._try_split(than, splits[middle])
            if trial is not None and usable(trial):
                last, found = middle, trial
            else:
                first = middle + 1
        return found

    def _below(self, in_float: frozenset[str], within: float) -> list[frozenset[str]]:
        """Splits that promise less noise than one and less time than that, the fastest first."""
        assert self.sensitivity is not None
        promised = self.sensitivity.without
        most = promised(in_float).worst
        splits = [s for s in self._splits(self._shares) if promised(s).worst < most]
        return sorted((s for s in splits if self.time_of(s) < within), key=self.time_of)

    @property
    def best(self) -> Trial:
        """The trial of least cost; of equals the first."""
        return min(self.trials, key=lambda trial: trial.cost(self.weight))

    def likely(self, most: int) -> list[Trial]:
        """The best trials of different splits, the best one first."""
        found: dict[frozenset[str], Trial] = {}
        for trial in sorted(self.trials, key=lambda trial: trial.cost(self.weight)):
            found.setdefault(trial.in_float, trial)
        return list(found.values())[:most]

    @property
    def best_without_float(self) -> Trial:
        """The best of those that keep nothing in float."""
        plain = [trial for trial in self.trials if trial.in_float == self.refused]
        return min(plain, key=lambda trial: trial.cost(self.weight))

    @property
    def all_in_float(self) -> Trial:
        """The float model itself."""
        every = frozenset(self.units.members)
        choices = self._floating(NO_CHOICES, every)
        return Trial(
            what="float",
            in_float=every,
            choices=choices,
            noise=Noise({}),
            time=1.0,
            is_float=True,
        )

    def _whole_in_int8(self) -> None:
        if self._try_whole(f"all in {self.word}"):
            return
        self.refused = self._refused()
        if not (self.refused and self._try_whole(f"all that can be run in {self.word}")):
            raise BackendError(
                f"a search must be able to run the model with all in {self.word}, got:"
                f" {self.prober.errors[0]}; keep in float what cannot be run (--keep-float), or"
                " build without a search (--effort 0)"
            )

    def _try_whole(self, what: str) -> bool:
        """Whether any method has a model that can be run."""
        plain = self._floating(replace(NO_CHOICES, rounded=self.rounded), self.refused)
        choices = [plain, *(replace(plain, method=method) for method in self.methods[1:])]
        names = [f"{what}{self._by(one)}" for one in choices]
        return any(self._try(names, [self.refused] * len(names), choices))

    def _refused(self) -> frozenset[str]:
        """Layers that cannot be run alone in int8; none where that is so of all of them."""
        groups = groups_of(self.units.layers, self.effort.groups)
        tried, found = 0, set[str]()
        while groups:
            noises = self._alone(NO_CHOICES, groups)
            failed = [group for group, noise in zip(groups, noises, strict=True) if noise is None]
            if not tried and len(failed) == len(groups):
                break
            tried += len(groups)
            last = tried >= self.effort.alone
            found |= {layer for group in failed if last or len(group) == 1 for layer in group}
            groups = [] if last else [half for group in failed for half in halves(group)]
        return frozenset(found)

    def _without_sums(self, base: Trial) -> Trial:
        """The trial with Adds in float, where that alone wins much; then they stay so.

        What loses is the tensor that they add up, which every layer beside it would be blamed for:
        a few tokens or channels of it are many times larger than all others.
        """
        if self.prices.measured or not self.sums:
            return base
        trial = self._try_split(base, base.in_float | self.sums)
        if trial is None or base.noise.worst - trial.noise.worst < _WON:
            return base
        lifted = f"from {base.noise.db:.1f} to {trial.noise.db:.1f} dB"
        why = f"alone in float all Adds lift {base.noise.part} {lifted}"
        self.kept_sums = dict.fromkeys(sorted(self.sums), why)
        return trial

    def _alone(self, choices: Choices, groups: Sequence[Group]) -> list[Noise | None]:
        """Noise of each of some groups with nothing else in int8."""
        every = {*self.units.layers, *self.kept_sums}
        return self.prober.alone(
            [self._floating(choices, every - set(group)) for group in groups],
            [self.units.nodes(group) for group in groups],
        )

    def _look_inside(self, base: Trial) -> None:
        """Noise of the groups under a trial's methods."""
        found = sensitivity(
            [layer for layer in self.units.layers if layer not in self.refused],
            partial(self._alone, base.choices),
            groups=self.effort.groups,
            most=self.effort.alone,
        )
        self.sensitivity = found.scaled(base.in_float, base.noise)

    def _try_splits(
        self, base: Trial, noise: Mapping[str, float], *, start: frozenset[str] | None = None
    ) -> None:
        """Splits along the weights, from the one that promises most to its neighbours.

        Or from the trial's own, where it is to begin there.
        """
        splits = self._splits(noise)
        if not splits:
            return
        known: dict[int, Trial | None] = {}
        most = self.effort.whole

        def tried(place: int) -> float:
            if place not in known:
                known[place] = self._try_split(base, splits[place])
            trial = known[place]
            return trial.cost(self.weight) if trial is not None else math.inf

        promise = [self._promised(split) for split in splits]
        place, step = promise.index(min(promise)), max(1, len(splits) // 6)
        if start in splits:
            place, step, most = splits.index(start), 1, 1 + self.effort.again
            known[place] = base
        tried(place)
        while step and len(known) < most:
            near = [p for p in (place - step, place + step) if 0 <= p < len(splits)]
            new = [p for p in near if p not in known][: most - len(known)]
            best = min([place, *(p for p in near if p in known or p in new)], key=tried)
            step = step if best != place else step // 2
            place = best

    def _splits(self, noise: Mapping[str, float]) -> list[frozenset[str]]:
        """Units in float, one split a weight, without those that differ in nothing."""
        whole = self.prices.total(self.units, frozenset(self.units.members))
        dear = whole * self.weight / COMMON_WEIGHT
        weights = [0.0, *(weight * dear for weight in _WEIGHTS)] if noise else [0.0]
        pinned = self.refused | self.kept_sums.keys()
        cut = partial(cheapest, self.prices, self.units, noise, pinned=pinned)
        found = dict.fromkeys(cut(weight=weight) for weight in weights)
        return [split for split in found if self.or_float or not self.is_float(split)]

    def _promised(self, in_float: frozenset[str]) -> float:
        noise = self.sensitivity.without(in_float) if self.sensitivity else Noise({})
        promised = Trial(
            what="", in_float=in_float, choices=NO_CHOICES, noise=noise, time=self.time_of(in_float)
        )
        return promised.cost(self.weight)

    def _try_split(self, base: Trial, in_float: frozenset[str]) -> Trial | None:
        """A split with a trial's methods; None where it could not be run."""
        layers = sum(unit in in_float for unit in self.units.layers)
        what = f"{layers} of {len(self.units.layers)} layers in float{self._by(base.choices)}"
        what = "all in float" if self.is_float(in_float) else what
        (trial,) = self._try([what], [in_float], [self._floating(base.choices, in_float)])
        return trial

    def _try_methods(self, base: Trial) -> None:
        """The same split with every other method."""
        others = self._others(base)
        asked = [None if method is self.methods[0] else method for method in others]
        choices = [replace(base.choices, method=method, methods={}) for method in asked]
        names = [base.what.partition(",")[0] + self._by(one) for one in choices]
        self._try(names, [base.in_float] * len(others), choices)

    def _swap_methods(self, base: Trial) -> None:
        """Another method for the tensors of the noisiest groups that stay in int8."""
        assert self.sensitivity is not None
        others = [method for method in self._others(base) if method is not None]
        kept = {g: n for g, n in self.sensitivity.groups.items() if not base.in_float & set(g)}
        worst = sorted(kept, key=lambda group: -kept[group].worst)[: self.effort.swaps]
        swapped: dict[str, Method] = dict(base.choices.methods)
        for group in worst if others else ():
            other = {*self.units.layers, *self.kept_sums} - set(group)
            alone = self._floating(replace(base.choices, methods={}), other)
            tensors = self.units.around(group)
            trials = [alone] + [
                replace(alone, methods=dict.fromkeys(tensors, method)) for method in others
            ]
            noises = self.prober.alone(trials, [self.units.nodes(group)] * len(trials))
            lost = [math.inf if noise is None else noise.worst for noise in noises]
            best = lost.index(min(lost))
            if best and math.isfinite(lost[0]) and lost[best] < _BETTER * lost[0]:
                swapped |= dict.fromkeys(tensors, others[best - 1])
        if swapped != base.choices.methods:
            choices = replace(base.choices, methods=swapped)
            what = base.what.partition(",")[0] + self._by(choices)
            self._try([what], [base.in_float], [choices])

    def _others(self, base: Trial) -> list[Method | None]:
        """The methods but the trial's own that lose least with all in int8; of float none."""
        if self.is_float(base.in_float):
            return []
        own = self._called(base.choices.method or self.methods[0])
        lost: dict[str, float] = {}
        for trial in self.trials:
            if trial.in_float == self.refused and not trial.choices.methods:
                method = self._called(trial.choices.method or self.methods[0])
                lost[method] = min(trial.mean, lost.get(method, math.inf))
        ran = [method for method in self.methods if self._called(method) in lost]
        others = [method for method in ran if self._called(method) != own]
        best = sorted(others, key=lambda method: lost[self._called(method)])
        return best[: self.effort.others]

    def _called(self, method: Method | None) -> str:
        return method.label if method else self.own

    def _by(self, choices: Choices) -> str:
        """What finds the ranges, where there is a choice."""
        if len(self.methods) == 1:
            return ""
        others = len(choices.methods)
        own = f", another for {others} tensor{'s' * (others > 1)}" if others else ""
        return f", {self._called(choices.method or self.methods[0])}{own}"

    def _floating(self, choices: Choices, units: Iterable[str]) -> Choices:
        """The choices with these units in float, for the reason that the search has."""
        return replace(choices, float_nodes=dict.fromkeys(self.units.nodes(units), _TRIED))

    def _try(
        self, what: Sequence[str], in_float: Sequence[frozenset[str]], choices: Sequence[Choices]
    ) -> list[Trial | None]:
        """Try these whole, and remember those that could be run; None of the others."""
        noises = self.prober.noises(choices)
        return [
            None if n is None else self._remembered(w, f, c, n)
            for w, f, c, n in zip(what, in_float, choices, noises, strict=True)
        ]

    def _remembered(
        self, what: str, in_float: frozenset[str], choices: Choices, noise: Noise
    ) -> Trial:
        """The trial; the one before where the same was tried, whatever it was called."""
        for trial in self.trials:
            if trial.in_float == in_float and trial.choices == choices:
                return trial
        trial = Trial(
            what=what,
            in_float=in_float,
            choices=choices,
            noise=noise,
            time=self.time_of(in_float),
            is_float=self.is_float(in_float),
        )
        self.trials.append(trial)
        return trial

    def time_of(self, in_float: frozenset[str]) -> float:
        """What a split promises to take, as a share of the float model's time."""
        whole = self.prices.total(self.units, frozenset(self.units.members))
        return self.prices.total(self.units, in_float) / whole if whole else 1.0


def _methods(trial: Trial) -> tuple[str, dict[str, str]]:
    """What finds the ranges of a trial."""
    own = {tensor: method.label for tensor, method in trial.choices.methods.items()}
    return trial.choices.method.label if trial.choices.method else "", own
