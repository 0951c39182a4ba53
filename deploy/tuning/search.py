"""The trials of one target's search: which layers in float, and which method for each range.

Terms:
    unit: nodes that run in float or in int8 together; a split is a choice of units in float.
    trial: a split with range methods, built and run on a few samples.
    noise: power of the errors of an output slice over the power of its signal.
    loss: share of the worst output slice, or of the task, that noise destroys, 0 to 1.
    price: time of a unit, or its products where time is not measured.
    cost: log(time) + weight * loss of a trial (`deploy.tuning.search_options`).

Steps::

    every method, all in int8            -> the best that clips and the best that does not
    these two on samples without range   -> the method
    Adds in float, the layers in int8    -> whether they stay so, where time is not measured
    groups alone in int8, halved         -> noise of each layer (`deploy.tuning.sensitivity`)
    kernels of both models, or products  -> price of each unit (`deploy.tuning.prices`)
    least price + weight * noise         -> one split a weight, from "fastest" to "nearly float"
    the likely splits, tried             -> the split of least cost

`deploy.tuning.front` chooses among the trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deploy.errors import BackendError
from deploy.method import NO_CHOICES, Choices, Method
from deploy.tuning.prices import Prices, Units, cheapest_float_units
from deploy.tuning.probe import Noise, Prober, choices_key
from deploy.tuning.search_options import COMMON_WEIGHT, Effort, Trial, clips
from deploy.tuning.sensitivity import (
    QUIET_LOSS,
    Group,
    Sensitivity,
    halve,
    measure_sensitivity,
    split_into_groups,
)

# of the float model's price: from splits by time alone to nearly everything in float
_NOISE_WEIGHTS = (0.0, *(2.0 ** (step / 2) for step in range(-12, 29)))
_ADDS_GAIN = 0.1  # loss that Adds in float must save, worth a quarter of the time
_DROWNED_LOSS = 0.3  # about 10 dB: methods are compared where the noisiest layers are float
_CLEARLY_DB = 0.5  # gain on held-back samples that a method which clips needs
_TRIED = "tried in float"  # reason of trials, which nobody reads


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search.

    Attributes:
        units: the int8 nodes of the model, in groups.
        prices: of the units.
        prober: runs the trials.
        methods: range methods to choose among, the calibration's first; None is a target's own.
        own_method: label of a target's own method.
        precision: of the quantized nodes, such as int8.
        effort: how much is tried.
        weight: of loss against log(time).
        rounded: whether trials have rounded weights; None without that repair.
        held_back_gain: returns how many dB a trial's worst slice has more than another's on samples
            that gave no range; None where all samples are needed for the ranges.
        is_clipping: whether the best method is one that clips, as this search or another target's
            found; None until they are compared.
        add_units: units of Adds without weights, the residual stream.
        prior: what another target's search measured of the layers; None measures it.
        trials: the trials that ran, in order.
        settled_method: label of the method that held-back samples chose; "" while it is open.
        sensitivity: noise of the layers; None until it is needed.
        refused: layers that stay float since they cannot run otherwise.
        float_adds: those of `add_units` that stay float for their common loss -> the reason.
    """

    units: Units
    prices: Prices
    prober: Prober
    methods: Sequence[Method | None]
    own_method: str = ""
    precision: str = "int8"
    effort: Effort
    weight: float = COMMON_WEIGHT
    rounded: bool | None = None
    held_back_gain: Callable[[Trial, Trial], float | None] = lambda trial, rival: None
    is_clipping: bool | None = None
    add_units: frozenset[str] = frozenset()
    prior: Sensitivity | None = None
    trials: list[Trial] = field(default_factory=list)
    settled_method: str = ""
    sensitivity: Sensitivity | None = None
    refused: frozenset[str] = frozenset()
    float_adds: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Try methods and splits.

        Raises:
            BackendError: the model cannot run in int8 with any method, and no single layer is the
                cause.
        """
        self._try_all_in_int8()
        best = min(self.trials, key=lambda trial: trial.mean_loss)
        if best.noise.worst > _DROWNED_LOSS:
            self._refine(best)
            best = self.best
        best = self._settle_method(best)
        if best.noise.worst < QUIET_LOSS:
            self._try_splits(best)  # by time alone: no layer needs to be float
        else:
            self._refine(best)

    # ------------------------------------------------------------ the trials

    @property
    def eligible(self) -> list[Trial]:
        """The trials of the settled method; all while it is open."""
        if not self.settled_method:
            return self.trials
        return [trial for trial in self.trials if self._label(trial) == self.settled_method]

    @property
    def best(self) -> Trial:
        """The trial of least cost, the first of equals."""
        return min(self.eligible, key=self.cost)

    def cost(self, trial: Trial) -> float:
        """Return the cost of a trial with the weight of this search."""
        return trial.cost(self.weight)

    def try_choices(
        self, choices: Mapping[str, Choices], in_float: frozenset[str] = frozenset()
    ) -> list[Trial]:
        """Try choices, each under its description, with these units in float; skip what fails."""
        trials = self._run_trials(in_float, list(choices.values()), list(choices))
        return [trial for trial in trials if trial is not None]

    def try_split(self, base: Trial, in_float: frozenset[str]) -> Trial | None:
        """Try a split with the methods of a trial; return None if it could not run."""
        (trial,) = self._run_trials(in_float, [base.choices])
        return trial

    def _run_trials(
        self, in_float: frozenset[str], choices: Sequence[Choices], names: Sequence[str] = ()
    ) -> list[Trial | None]:
        """Run trials of one split and store those that could run; None stands for the others."""
        split_choices = [self._with_float(one, in_float) for one in choices]
        if not names:
            names = [self._describe(in_float, one) for one in choices]
        trials: list[Trial | None] = []
        for name, own_choices, noise in zip(
            names, split_choices, self.prober.noises(split_choices), strict=True
        ):
            trial = None
            if noise is not None:
                trial = self._store(name, in_float, own_choices, noise)
            trials.append(trial)
        return trials

    def _store(self, name: str, in_float: frozenset[str], choices: Choices, noise: Noise) -> Trial:
        """Store and return a trial; an equal one that is stored already is returned instead."""
        key = choices_key(choices)
        for trial in self.trials:
            if trial.key == key:
                return trial
        time = self.time_of(in_float)
        trial = Trial(what=name, in_float=in_float, choices=choices, noise=noise, time=time)
        self.trials.append(trial)
        return trial

    def _describe(self, in_float: frozenset[str], choices: Choices) -> str:
        """Return a description such as "3 of 50 layers in float, minmax"."""
        layers = self.units.layers
        if in_float == self.refused:
            text = f"all in {self.precision}"
            if self.refused:
                text = f"all that can be run in {self.precision}"
        else:
            float_layers = self.count_float_layers(in_float)
            text = f"{float_layers} of {len(layers)} layers in float"
            if float_layers == 0:
                text = f"all layers in {self.precision}"
        if len(self.methods) > 1:
            text += f", {self._method_label(choices.method)}"
        return text

    def _with_float(self, choices: Choices, units: Iterable[str]) -> Choices:
        """Return the choices with these units in float."""
        return replace(choices, float_nodes=dict.fromkeys(self.units.nodes(units), _TRIED))

    def count_float_layers(self, in_float: Collection[str]) -> int:
        """Return the number of layers with weights that a split has in float."""
        return sum(layer in in_float for layer in self.units.layers)

    def time_of(self, in_float: frozenset[str]) -> float:
        """Return the predicted time of a split, as a share of the float model's."""
        float_price = self.prices.total(self.units, frozenset(self.units.members))
        return self.prices.total(self.units, in_float) / float_price if float_price else 1.0

    # ------------------------------------------------------------ all in int8

    def _try_all_in_int8(self) -> None:
        if self._try_methods_in_int8():
            return
        self.refused = self._find_refused()
        if not (self.refused and self._try_methods_in_int8()):
            raise BackendError(
                f"a search must be able to run the model with all in {self.precision}, got:"
                f" {self.prober.errors[0]}; keep in float what cannot be run (--keep-float), or"
                " build without a search (--effort 0)"
            )

    def _try_methods_in_int8(self) -> bool:
        """Try the methods with all units in int8; return whether one ran."""
        return bool(self._try_methods(self.refused, replace(NO_CHOICES, rounded=self.rounded)))

    def _find_refused(self) -> frozenset[str]:
        """Return layers that cannot run alone in int8; nothing if no group can run."""
        groups = split_into_groups(self.units.layers, self.effort.first_groups)
        tried = 0
        refused = set[str]()
        while groups:
            noises = self._measure_alone(NO_CHOICES, groups)
            failed = [group for group, noise in zip(groups, noises, strict=True) if noise is None]
            if tried == 0 and len(failed) == len(groups):
                break
            tried += len(groups)
            is_last = tried >= self.effort.isolated_trials
            groups = []
            for group in failed:
                if is_last or len(group) == 1:
                    refused.update(group)
                else:
                    groups += halve(group)
        return frozenset(refused)

    def _with_float_adds(self, base: Trial) -> Trial:
        """Return a trial with the Adds in float if that alone saves much; they then stay float.

        The noise is in the residual stream that they add up, where a few tokens or channels are
        many times larger than all others; measured layer by layer, every layer next to it would be
        blamed.
        """
        if self.prices.measured or not self.add_units:
            return base
        trial = self.try_split(base, base.in_float | self.add_units)
        if trial is None or base.noise.worst - trial.noise.worst < _ADDS_GAIN:
            return base
        gain = f"from {base.noise.db:.1f} to {trial.noise.db:.1f} dB"
        reason = f"alone in float all Adds lift {base.noise.worst_slice} {gain}"
        self.float_adds = dict.fromkeys(sorted(self.add_units), reason)
        return trial

    # ------------------------------------------------------------ noise of the layers

    def _refine(self, base: Trial) -> None:
        """Try splits with the methods of a trial, by the noise of each layer."""
        base = self._with_float_adds(base)
        self._measure_sensitivity(base)
        self._try_splits(base)

    def layer_losses(self, base: Trial) -> dict[str, float]:
        """Return the loss that each layer adds with a trial's choices; measured once a method."""
        self._measure_sensitivity(base)
        assert self.sensitivity is not None
        return self.sensitivity.loss_by_layer()

    def _measure_sensitivity(self, base: Trial) -> None:
        """Measure the noise of the layers with a trial's method, once.

        What another target's search measured with the same method says where to begin.
        """
        method = self._label(base)
        if self.sensitivity is not None and self.sensitivity.method == method:
            return
        prior, max_trials = None, self.effort.isolated_trials
        if self.prior is not None and self.prior.method == method:
            prior, max_trials = self.prior, max_trials // 2
        measured = measure_sensitivity(
            [layer for layer in self.units.layers if layer not in self.refused],
            partial(self._measure_alone, base.choices),
            first_groups=self.effort.first_groups,
            max_trials=max_trials,
            prior=prior,
        )
        fitted = measured.fitted(base.in_float, base.noise)
        self.sensitivity = replace(fitted, method=method)

    def _measure_alone(self, choices: Choices, groups: Sequence[Group]) -> list[Noise | None]:
        """Return the noise of each group with all else in float."""
        everything = {*self.units.layers, *self.float_adds}
        trials = [self._with_float(choices, everything.difference(group)) for group in groups]
        return self.prober.isolated_noises(trials, [self.units.nodes(group) for group in groups])

    # ------------------------------------------------------------ splits

    @property
    def pinned(self) -> frozenset[str]:
        """Units that are float in every split."""
        return self.refused.union(self.float_adds)

    def predicted_front(self) -> list[frozenset[str]]:
        """Return the splits of least price and noise, one a weight of noise, the fastest first."""
        losses = {} if self.sensitivity is None else self.sensitivity.loss_by_layer()
        float_price = self.prices.total(self.units, frozenset(self.units.members))
        splits: dict[frozenset[str], None] = {}
        for weight in _NOISE_WEIGHTS if losses else (0.0,):
            split = cheapest_float_units(
                self.prices, self.units, losses, weight=weight * float_price, pinned=self.pinned
            )
            if not split.issuperset(self.units.layers):
                splits[split] = None
        return sorted(splits, key=self.time_of)

    def _try_splits(self, base: Trial) -> None:
        """Try splits of the predicted front, from the most promising one on.

        ::

            split    fastest  .  .  .  x  .  .  .  nearly float
            1st                        o                  least predicted cost
            2nd, 3rd          o                 o         its neighbours at a distance
            then                 o  .  .  o               nearer, about the cheapest so far

        A split whose time alone costs more than the cheapest trial cannot win and is not tried.
        """
        splits = self.predicted_front()
        if not splits:
            return
        predicted = [self._predicted_cost(split) for split in splits]
        index, step = predicted.index(min(predicted)), max(1, len(splits) // 6)
        max_trials = self.effort.split_trials

        cost_by_index = {index: self._cost_of_split(base, splits[index])}
        while step and len(cost_by_index) < max_trials:
            nearby = [index]
            for neighbour in (index - step, index + step):
                if not 0 <= neighbour < len(splits):
                    continue
                if neighbour not in cost_by_index and len(cost_by_index) < max_trials:
                    cost_by_index[neighbour] = self._cost_of_split(base, splits[neighbour])
                if neighbour in cost_by_index:
                    nearby.append(neighbour)
            cheapest = min(nearby, key=cost_by_index.__getitem__)
            if cheapest == index:
                step //= 2
            index = cheapest

    def _cost_of_split(self, base: Trial, in_float: frozenset[str]) -> float:
        """Try a split with a trial's methods; return its cost, infinite where it cannot win."""
        if math.log(max(self.time_of(in_float), 1e-6)) > self.cost(self.best):
            return math.inf
        trial = self.try_split(base, in_float)
        return math.inf if trial is None else self.cost(trial)

    def _predicted_cost(self, in_float: frozenset[str]) -> float:
        noise = Noise({}) if self.sensitivity is None else self.sensitivity.predict(in_float)
        time = self.time_of(in_float)
        expected = Trial(what="", in_float=in_float, choices=NO_CHOICES, noise=noise, time=time)
        return self.cost(expected)

    # ------------------------------------------------------------ methods

    def _settle_method(self, base: Trial) -> Trial:
        """Return the trial of a split with the method that is settled on.

        What a range clips is rare, so the few samples of a trial may not show it: held-back samples
        decide whether the best method that clips is better than the best that does not.
        """
        if len(self.methods) == 1:
            return base
        trials = self._try_methods(base.in_float, base.choices) or [base]
        trial_by_kind: dict[bool, Trial] = {}
        for trial in sorted(trials, key=lambda trial: trial.noise.mean):
            trial_by_kind.setdefault(clips(trial.choices.method), trial)
        if len(trial_by_kind) == 2:
            settled = self._better_kind(trial_by_kind[True], trial_by_kind[False])
            self.is_clipping = clips(settled.choices.method)
        else:
            (settled,) = trial_by_kind.values()
        self.settled_method = self._label(settled)
        return settled

    def _better_kind(self, clipping: Trial, unclipping: Trial) -> Trial:
        """Return the better of two trials, of which one has ranges that clip."""
        if clipping.noise.worst >= unclipping.noise.worst:
            return unclipping
        gain_db = self.held_back_gain(clipping, unclipping)
        if gain_db is None:
            return min(unclipping, clipping, key=lambda trial: trial.mean_loss)
        return clipping if gain_db > _CLEARLY_DB else unclipping

    def best_methods(self) -> tuple[Method, ...]:
        """Return the best two methods that clip and the best two that do not, all in int8.

        Two, since the order of methods that are nearly level is another on another target's grid.
        """
        methods_by_kind: dict[bool, list[Method]] = {True: [], False: []}
        for trial in sorted(self.trials, key=lambda trial: trial.noise.mean):
            method = trial.choices.method or self.methods[0]
            if trial.in_float == self.refused and method is not None:
                methods_by_kind[clips(method)].append(method)
        return (*methods_by_kind[True][:2], *methods_by_kind[False][:2])

    def _try_methods(self, in_float: frozenset[str], choices: Choices) -> list[Trial]:
        """Try a split with the methods, other choices the same; return what ran.

        Where another target's search showed whether to clip, only methods of that kind are tried.
        """
        methods = [None, *self.methods[1:]]  # None is the first
        likely_methods = [method for method in methods if clips(method) == self.is_clipping]
        method_choices = []
        for method in likely_methods or methods:
            method_choices.append(replace(choices, method=method))
        trials = self._run_trials(in_float, method_choices)
        return [trial for trial in trials if trial is not None]

    def _label(self, trial: Trial) -> str:
        """Return the label of a trial's method."""
        return self._method_label(trial.choices.method)

    def _method_label(self, method: Method | None) -> str:
        """Return the label of a method; None is the first of the methods."""
        method = method or self.methods[0]
        return self.own_method if method is None else method.label
