"""The search for one target: which units stay float, and which method finds each range.

Terms:
    unit: nodes that run in float or in int8 together; a split is a choice of units in float.
    trial: a split with range methods, built and run on a few samples.
    noise: power of the errors of an output slice over the power of its signal.
    loss: share of the worst output slice, or of the task, that noise destroys, 0 to 1.
    price: time of a unit, or its products where time is not measured.
    cost: log(time) + weight * loss of a trial, which the search minimizes
        (`deploy.tuning.search_options`).

Steps::

    every method, all in int8            -> the best one
    Adds in float, the layers in int8    -> whether they stay so, where time is not measured
    groups alone in int8, halved         -> noise of each layer
    kernels of both models, or products  -> price of each unit
    least price + weight * noise         -> one split a weight, from "fastest" to "nearly float"
    the likely splits, tried             -> the split with the least cost
    other methods, for all tensors and for the noisiest groups -> ranges
    plain int8 and likely splits, timed where time is measured -> what is built

The noisy layers are found by halving: each group runs alone in int8, the noisy ones are split::

    1..64   8 groups:  0.1  0.02  0.3  0.01 ...        the worst group is halved first
    17..24             |--- 0.28 | 0.02 ---|
    17..20             | 0.001 | 0.28 |                 until it is one layer, or quiet

Noise of groups adds up, so the sum predicts the loss of a split. Groups are measured on few samples
and interact, so the sum is scaled to the loss of one split that was measured. A group that cannot
run alone is left out; its loss shows in the trials of splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deploy.errors import BackendError
from deploy.method import NO_CHOICES, Choices, Method
from deploy.tuning.prices import Prices, Units, cheapest_float_units
from deploy.tuning.probe import Noise, Prober
from deploy.tuning.search_options import COMMON_WEIGHT, Effort, Trial, clips

_QUIET = 0.03  # loss, about 30 dB: a group that loses less is not halved
_MUCH = 0.3  # loss, about 10 dB: from here on noise no longer adds up
_FARTHEST = 16.0  # limit of the factor between measured and summed power

_NEAR = 0.03  # loss, about 30 dB: below it no layer needs to be float
_WEIGHTS = [2.0 ** (step / 2) for step in range(-12, 29)]  # of the float model's price
_DEAREST = 100.0  # weight of noise at which time no longer matters
_QUIETER = 4.0  # factor on the weight of loss where the best split is not good
_BETTER = 0.8  # share of a group's loss: another method must lose less than this
_MOST = 0.5  # share of the layers in int8 that a split should have where time is not measured
_WON = 0.1  # loss that Adds in float must save, worth a quarter of the time

_CLEARLY_DB = 1.0  # gain on held-back samples that a method which clips needs

_TRIED = "tried in float"

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Noise of groups of layers, each alone in int8."""

    # group of units -> its noise, in the model's order; all layers but those that could not run
    # alone
    groups: dict[Group, Noise]
    scale: float = 1.0  # factor from the summed power to the measured one

    @property
    def shares(self) -> dict[str, float]:
        """Unit -> loss of the worst output slice that it adds to that of all others."""
        total = self.without(frozenset())
        return {
            unit: noise.scaled(self.scale).marginal_loss(total) / len(group)
            for group, noise in self.groups.items()
            for unit in group
        }

    def without(self, units: frozenset[str]) -> Noise:
        """Return the expected noise with these units in float."""
        total = Noise({})
        for group, noise in self.groups.items():
            left = sum(unit not in units for unit in group) / len(group)
            total = total.combined_with(noise.scaled(left * self.scale))
        return total

    def scaled(self, units: frozenset[str], measured: Noise) -> Sensitivity:
        """Return a copy whose expected noise with these units in float has the measured loss.

        Where the loss is large, noise does not add up, so the scale stays as it is.
        """
        expected, actual = self.without(units).worst, measured.worst
        if not (0 < expected < _MUCH and 0 < actual < _MUCH):
            return self
        power = (math.log1p(-actual) / math.log1p(-expected)) ** 2
        return replace(self, scale=self.scale * min(max(power, 1 / _FARTHEST), _FARTHEST))


def measure_sensitivity(
    layers: Sequence[str],
    alone: Callable[[Sequence[Group]], list[Noise | None]],
    *,
    groups: int,
    most: int,
) -> Sensitivity:
    """Find the noisy layers by halving groups.

    `layers`: units with weights, in the model's order. `alone`: groups -> noise of each with all
    else in float; None where it cannot run.
    """
    first = split_into_groups(layers, groups)
    noises = _runnable(first, alone(first))
    tried, unsplit = len(first), set[Group]()
    while tried + 2 <= most and (group := _next_to_halve(noises, unsplit)) is not None:
        both = halves(group)
        measured = _runnable(both, alone(both))
        tried += 2
        if len(measured) < len(both):
            unsplit.add(group)  # a half cannot run: the noise of the group is all there is
        else:
            del noises[group]
            noises |= measured
    place = {layer: number for number, layer in enumerate(layers)}
    return Sensitivity(dict(sorted(noises.items(), key=lambda entry: place[entry[0][0]])))


def split_into_groups(layers: Sequence[str], most: int) -> list[Group]:
    """Split layers into at most `most` groups of neighbours of equal size."""
    size = max(1, -(-len(layers) // most))
    return [tuple(layers[at : at + size]) for at in range(0, len(layers), size)]


def halves(group: Group) -> list[Group]:
    """Return the two halves of a group; nothing for a single layer."""
    middle = (len(group) + 1) // 2
    return [group[:middle], group[middle:]] if len(group) > 1 else []


def _runnable(groups: Sequence[Group], noises: Sequence[Noise | None]) -> dict[Group, Noise]:
    return {g: noise for g, noise in zip(groups, noises, strict=True) if noise is not None}


def _next_to_halve(noises: dict[Group, Noise], unsplit: Collection[Group]) -> Group | None:
    """Return the noisiest group of several layers not in `unsplit`; None if all are quiet."""
    several = [group for group in noises if len(group) > 1 and group not in unsplit]
    worst = max(several, key=lambda group: noises[group].worst, default=None)
    return worst if worst is not None and noises[worst].worst > _QUIET else None


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search."""

    units: Units
    prices: Prices
    prober: Prober
    # range methods to choose among, the calibration's first; None is a target's own method
    methods: Sequence[Method | None]
    own: str = ""
    word: str = "int8"  # precision of the quantized nodes, such as int8
    effort: Effort
    weight: float = COMMON_WEIGHT  # weight of loss against time, see `COMMON_WEIGHT`
    rounded: bool | None = None  # whether trials have rounded weights; None without that repair
    can_refine: Callable[[], bool] = lambda: True  # whether the budget allows a further round
    sums: frozenset[str] = frozenset()  # units of Adds without weights: the residual stream
    trials: list[Trial] = field(default_factory=list)  # the trials that ran, in order
    settled: str = ""  # label of the method that held-back samples chose; "" while it is open
    sensitivity: Sensitivity | None = None
    refused: frozenset[str] = frozenset()  # layers that stay float since they cannot run otherwise
    # those of `sums` that stay float for their common loss, and the reason
    kept_sums: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> Trial:
        """Return the best trial.

        Raises:
            BackendError: the model cannot run in int8 with any method, and no single layer is the
                cause.
        """
        self._try_int8()
        base = min(self.trials, key=lambda trial: trial.mean)
        if base.noise.worst < _NEAR:
            self._try_splits(base, {})
            return self.best
        return self._refine(self._keep_sums_float(base))

    def settle_method(self, held_back_db: Callable[[Trial], float]) -> None:
        """Take the best method of those that clip, or of those that do not, for the best split.

        What a range clips is rare, so the few samples of a trial may not show it.

        `held_back_db`: returns the SQNR of a trial's worst slice on samples that gave no range.
        """
        best = self.best
        clipping = clips(best.choices.method)
        rivals = [m for m in self._others(best, len(self.methods)) if clips(m) != clipping]
        if not rivals:
            return
        tried = self._try_methods(best, rivals[: self.effort.others])
        rival = min(filter(None, tried), key=lambda trial: trial.noise.worst, default=best)
        if rival is best or (not clipping and rival.noise.worst >= best.noise.worst):
            return
        gain = held_back_db(rival) - held_back_db(best)
        winner = rival if gain > (0.0 if clipping else _CLEARLY_DB) else best
        self.settled = self._label(winner.choices.method or self.methods[0])

    def quiet_down(self) -> None:
        """Continue from the best trial with more weight on loss.

        A layer that drowns all others in noise hides which method is good for them, so the
        methods are compared again where it is float.
        """
        self.weight *= _QUIETER
        self._refine(self.best)

    def _refine(self, base: Trial) -> Trial:
        """Try splits and methods from a trial on, in rounds; return the best trial.

        One more round follows where the last one found another method: it changes which layers are
        noisy.
        """
        for done in range(1, self.effort.rounds + 2):
            before, methods = self.best, _method_labels(base)
            self._measure_groups(base)
            self._try_splits(base, self._shares)
            self._try_methods(self.best, self._others(self.best, self.effort.others))
            self._swap_methods(self.best)
            if _method_labels(self.best) != methods:
                self._try_splits(self.best, self._shares, start=self.best.in_float)
            base = self.best
            settled = done >= self.effort.rounds and _method_labels(base)[0] == methods[0]
            if base is before or settled or not self.can_refine():
                break
        return self.best

    @property
    def _shares(self) -> dict[str, float]:
        return self.sensitivity.shares if self.sensitivity is not None else {}

    def tried(
        self, choices: Mapping[str, Choices], in_float: frozenset[str] = frozenset()
    ) -> list[Trial]:
        """Try choices, each with its description, with these units in float; skip what fails."""
        with_float = [self._with_float(one, in_float) for one in choices.values()]
        trials = self._try([*choices], [in_float] * len(choices), with_float)
        return [trial for trial in trials if trial is not None]

    def shares_of(self, base: Trial) -> dict[str, float]:
        """Return the loss that each layer adds with a trial's choices; measured once."""
        if self.sensitivity is None:
            self._measure_groups(base)
        return self._shares

    def int8_share(self, in_float: frozenset[str]) -> float:
        """Return the share of the layers that a split leaves in int8."""
        kept = sum(layer not in in_float for layer in self.units.layers)
        return kept / len(self.units.layers)

    def hold(self, loss: float) -> Trial:
        """Raise the weight of loss until the best trial loses at most this much of the task."""
        if self.sensitivity is None and self.best.loss > loss:
            self._measure_groups(self.best)
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
        """Return the fastest usable split with less noise than `than`; None if there is none.

        Candidates are predicted to take less than `within` of the float model's time. They are
        searched by halving while `can_go_on`, assuming that a quieter split is more usable.
        """
        if self.sensitivity is None:
            self._measure_groups(than)
        splits = self._below(than.in_float, within)
        return self.first_usable(than, splits, usable, can_go_on)

    def quietest(self, than: Trial) -> Trial | None:
        """Return the slowest split with less noise than `than`; None if there is none."""
        splits = self._below(than.in_float, 1.0)
        return self._try_split(than, splits[-1]) if splits else None

    def faster(
        self, than: Trial, usable: Callable[[Trial], bool], can_go_on: Callable[[], bool]
    ) -> Trial | None:
        """Return the fastest usable split with the methods of a slower one; None without one."""
        time = self.time_of(than.in_float)
        splits = (split for split in self._splits(self._shares) if self.time_of(split) < time)
        return self.first_usable(than, sorted(splits, key=self.time_of), usable, can_go_on)

    def first_usable(
        self,
        base: Trial,
        splits: Sequence[frozenset[str]],
        usable: Callable[[Trial], bool],
        can_go_on: Callable[[], bool] = lambda: True,
    ) -> Trial | None:
        """Return the first usable of some splits, with the choices of a trial; None without one.

        They are searched by halving while `can_go_on`, assuming that all after it are usable too.
        """
        first, last, found = 0, len(splits), None
        while first < last and can_go_on():
            middle = (first + last) // 2
            trial = self._try_split(base, splits[middle])
            if trial is not None and usable(trial):
                last, found = middle, trial
            else:
                first = middle + 1
        return found

    def _below(self, in_float: frozenset[str], within: float) -> list[frozenset[str]]:
        """Return the splits of less predicted noise and less predicted time, the fastest first."""
        assert self.sensitivity is not None
        expected = self.sensitivity.without
        limit = expected(in_float).worst
        splits = [s for s in self._splits(self._shares) if expected(s).worst < limit]
        return sorted((s for s in splits if self.time_of(s) < within), key=self.time_of)

    @property
    def best(self) -> Trial:
        """The trial of least cost, the first of equals."""
        return min(self._eligible, key=self._cost)

    @property
    def _eligible(self) -> list[Trial]:
        """The trials of the settled method; all while it is open."""
        own = [(self._label(one.choices.method or self.methods[0]), one) for one in self.trials]
        return [trial for label, trial in own if self.settled in ("", label)]

    def _cost(self, trial: Trial) -> float:
        return trial.cost(self.weight)

    def likely(self, most: int) -> list[Trial]:
        """Return the best trials of different splits, the best first."""
        by_split: dict[frozenset[str], Trial] = {}
        for trial in sorted(self._eligible, key=self._cost):
            by_split.setdefault(trial.in_float, trial)
        return list(by_split.values())[:most]

    @property
    def best_without_float(self) -> Trial:
        """The best trial with no unit in float but those that cannot run otherwise."""
        plain = [trial for trial in self._eligible if trial.in_float == self.refused]
        return min(plain, key=self._cost)

    def fuller(self, than: Trial) -> Trial | None:
        """Return the best trial with half of its layers or more in int8; None if `than` is one."""
        if self.int8_share(than.in_float) >= _MOST:
            return None
        most = [trial for trial in self._eligible if self.int8_share(trial.in_float) >= _MOST]
        return min(most, key=self._cost, default=None)

    def _try_int8(self) -> None:
        if self._try_all(f"all in {self.word}"):
            return
        self.refused = self._find_refused()
        if not (self.refused and self._try_all(f"all that can be run in {self.word}")):
            raise BackendError(
                f"a search must be able to run the model with all in {self.word}, got:"
                f" {self.prober.errors[0]}; keep in float what cannot be run (--keep-float), or"
                " build without a search (--effort 0)"
            )

    def _try_all(self, what: str) -> bool:
        """Try every method with all units in int8; return whether one ran."""
        plain = self._with_float(replace(NO_CHOICES, rounded=self.rounded), self.refused)
        choices = [plain, *(replace(plain, method=method) for method in self.methods[1:])]
        names = [f"{what}{self._method_text(one)}" for one in choices]
        return any(self._try(names, [self.refused] * len(names), choices))

    def _find_refused(self) -> frozenset[str]:
        """Return layers that cannot run alone in int8; nothing if no group can."""
        groups = split_into_groups(self.units.layers, self.effort.groups)
        tried, refused = 0, set[str]()
        while groups:
            noises = self._noise_alone(NO_CHOICES, groups)
            failed = [group for group, noise in zip(groups, noises, strict=True) if noise is None]
            if not tried and len(failed) == len(groups):
                break
            tried += len(groups)
            last = tried >= self.effort.alone
            refused |= {layer for group in failed if last or len(group) == 1 for layer in group}
            groups = [] if last else [half for group in failed for half in halves(group)]
        return frozenset(refused)

    def _keep_sums_float(self, base: Trial) -> Trial:
        """Return a trial with the Adds in float if that alone saves much; they then stay float.

        The noise is in the residual stream that they add up, where a few tokens or channels are
        many times larger than all others; measured layer by layer, every layer next to it would be
        blamed.
        """
        if self.prices.measured or not self.sums:
            return base
        trial = self._try_split(base, base.in_float | self.sums)
        if trial is None or base.noise.worst - trial.noise.worst < _WON:
            return base
        lifted = f"from {base.noise.db:.1f} to {trial.noise.db:.1f} dB"
        why = f"alone in float all Adds lift {base.noise.worst_slice} {lifted}"
        self.kept_sums = dict.fromkeys(sorted(self.sums), why)
        return trial

    def _noise_alone(self, choices: Choices, groups: Sequence[Group]) -> list[Noise | None]:
        """Return the noise of each group with all else in float."""
        every = {*self.units.layers, *self.kept_sums}
        return self.prober.isolated_noises(
            [self._with_float(choices, every - set(group)) for group in groups],
            [self.units.nodes(group) for group in groups],
        )

    def _measure_groups(self, base: Trial) -> None:
        """Measure the noise of the groups with a trial's methods."""
        found = measure_sensitivity(
            [layer for layer in self.units.layers if layer not in self.refused],
            partial(self._noise_alone, base.choices),
            groups=self.effort.groups,
            most=self.effort.alone,
        )
        self.sensitivity = found.scaled(base.in_float, base.noise)

    def _try_splits(
        self, base: Trial, noise: Mapping[str, float], *, start: frozenset[str] | None = None
    ) -> None:
        """Try splits along the weights, from the most promising one, or `start`, to neighbours."""
        splits = self._splits(noise)
        if not splits:
            return
        known: dict[int, Trial | None] = {}
        most = self.effort.whole

        def tried(place: int) -> float:
            if place not in known:
                known[place] = self._try_split(base, splits[place])
            trial = known[place]
            return self._cost(trial) if trial is not None else math.inf

        promise = [self._expected_cost(split) for split in splits]
        place, step = promise.index(min(promise)), max(1, len(splits) // 6)
        if start in splits:
            place, step, most = splits.index(start), 1, 1 + self.effort.again
            known[place] = base
        tried(place)
        while step and len(known) < most:
            neighbours = [p for p in (place - step, place + step) if 0 <= p < len(splits)]
            new = [p for p in neighbours if p not in known][: most - len(known)]
            best = min([place, *(p for p in neighbours if p in known or p in new)], key=tried)
            step = step if best != place else step // 2
            place = best

    def _splits(self, noise: Mapping[str, float]) -> list[frozenset[str]]:
        """Return one split per weight of noise, without duplicates."""
        price = self.prices.total(self.units, frozenset(self.units.members))
        unit_weight = price * self.weight / COMMON_WEIGHT
        weights = [0.0, *(weight * unit_weight for weight in _WEIGHTS)] if noise else [0.0]
        pinned = self.refused | self.kept_sums.keys()
        cut = partial(cheapest_float_units, self.prices, self.units, noise, pinned=pinned)
        found = dict.fromkeys(cut(weight=weight) for weight in weights)
        return [split for split in found if self.int8_share(split)]

    def _expected_cost(self, in_float: frozenset[str]) -> float:
        noise = self.sensitivity.without(in_float) if self.sensitivity else Noise({})
        expected = Trial(
            what="", in_float=in_float, choices=NO_CHOICES, noise=noise, time=self.time_of(in_float)
        )
        return self._cost(expected)

    def _try_split(self, base: Trial, in_float: frozenset[str]) -> Trial | None:
        """Try a split with a trial's methods; return None if it could not run."""
        layers = sum(unit in in_float for unit in self.units.layers)
        what = (
            f"{layers} of {len(self.units.layers)} layers in float{self._method_text(base.choices)}"
        )
        (trial,) = self._try([what], [in_float], [self._with_float(base.choices, in_float)])
        return trial

    def _try_methods(self, base: Trial, others: Sequence[Method | None]) -> list[Trial | None]:
        """Try the same split with other methods."""
        methods = [None if method is self.methods[0] else method for method in others]
        choices = [replace(base.choices, method=method, methods={}) for method in methods]
        names = [base.what.partition(",")[0] + self._method_text(one) for one in choices]
        return self._try(names, [base.in_float] * len(others), choices)

    def _swap_methods(self, base: Trial) -> None:
        """Try another method for the tensors of the noisiest groups that stay in int8."""
        assert self.sensitivity is not None
        listed = self._others(base, self.effort.others)
        others = [method for method in listed if method is not None]
        in_int8 = {g: n for g, n in self.sensitivity.groups.items() if not base.in_float & set(g)}
        worst = sorted(in_int8, key=lambda group: -in_int8[group].worst)[: self.effort.swaps]
        swapped: dict[str, Method] = dict(base.choices.methods)
        for group in worst if others else ():
            floats = {*self.units.layers, *self.kept_sums} - set(group)
            alone = self._with_float(replace(base.choices, methods={}), floats)
            tensors = self.units.shared_tensors(group)
            trials = [alone] + [
                replace(alone, methods=dict.fromkeys(tensors, method)) for method in others
            ]
            noises = self.prober.isolated_noises(trials, [self.units.nodes(group)] * len(trials))
            losses = [math.inf if noise is None else noise.worst for noise in noises]
            best = losses.index(min(losses))
            if best and math.isfinite(losses[0]) and losses[best] < _BETTER * losses[0]:
                swapped |= dict.fromkeys(tensors, others[best - 1])
        if swapped != base.choices.methods:
            choices = replace(base.choices, methods=swapped)
            what = base.what.partition(",")[0] + self._method_text(choices)
            self._try([what], [base.in_float], [choices])

    def _others(self, base: Trial, most: int) -> list[Method | None]:
        """Return the other methods of least loss with all in int8; none once one is settled."""
        if self.settled:
            return []
        own = self._label(base.choices.method or self.methods[0])
        losses: dict[str, float] = {}
        for trial in self.trials:
            if trial.in_float == self.refused and not trial.choices.methods:
                method = self._label(trial.choices.method or self.methods[0])
                losses[method] = min(trial.mean, losses.get(method, math.inf))
        runnable = [method for method in self.methods if self._label(method) in losses]
        others = [method for method in runnable if self._label(method) != own]
        return sorted(others, key=lambda method: losses[self._label(method)])[:most]

    def _label(self, method: Method | None) -> str:
        return method.label if method else self.own

    def _method_text(self, choices: Choices) -> str:
        """Return the words on the range methods; "" where there is only one method."""
        if len(self.methods) == 1:
            return ""
        others = len(choices.methods)
        own = f", another for {others} tensor{'s' * (others > 1)}" if others else ""
        return f", {self._label(choices.method or self.methods[0])}{own}"

    def _with_float(self, choices: Choices, units: Iterable[str]) -> Choices:
        """Return the choices with these units in float."""
        return replace(choices, float_nodes=dict.fromkeys(self.units.nodes(units), _TRIED))

    def _try(
        self, what: Sequence[str], in_float: Sequence[frozenset[str]], choices: Sequence[Choices]
    ) -> list[Trial | None]:
        """Run trials and store those that could run; return None for the others."""
        noises = self.prober.noises(choices)
        return [
            None if n is None else self._stored(w, f, c, n)
            for w, f, c, n in zip(what, in_float, choices, noises, strict=True)
        ]

    def _stored(self, what: str, in_float: frozenset[str], choices: Choices, noise: Noise) -> Trial:
        """Store and return a trial; an equal one that is stored already is returned instead."""
        for trial in self.trials:
            if trial.in_float == in_float and trial.choices == choices:
                return trial
        trial = Trial(
            what=what, in_float=in_float, choices=choices, noise=noise, time=self.time_of(in_float)
        )
        self.trials.append(trial)
        return trial

    def time_of(self, in_float: frozenset[str]) -> float:
        """Return the predicted time of a split, as a share of the float model's."""
        price = self.prices.total(self.units, frozenset(self.units.members))
        return self.prices.total(self.units, in_float) / price if price else 1.0


def _method_labels(trial: Trial) -> tuple[str, dict[str, str]]:
    own = {tensor: method.label for tensor, method in trial.choices.methods.items()}
    return trial.choices.method.label if trial.choices.method else "", own
