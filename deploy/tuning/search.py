"""The trials of one target's search: which layers in float, and which method for each range.

Terms:
    unit: nodes that run in float or in int8 together; a split is a choice of units in float.
    trial: a split with range methods, built and run on a few samples.
    noise: power of the errors of an output slice over the power of its signal.
    loss: share of the worst output slice, or of the task, that noise destroys, 0 to 1.
    price: products of a unit, as a measure of its time.
    cost: log(time) + weight * loss of a trial (`deploy.tuning.search_options`).
    clipping method: a range method that leaves more than a few values out of the range.

Steps::

    every method, all in int8            -> the method, where that loses little
    Adds in float, the layers in int8    -> whether they stay so
    groups alone in int8, halved         -> noise of each layer (`deploy.tuning.sensitivity`)
    products, times a factor             -> price of each unit (`deploy.tuning.prices`)
    least price + weight * noise         -> one split a weight, from "fastest" to "nearly float"
    every method, the likeliest split    -> the method
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
from deploy.tuning.prices import NO_LOSSES, Prices, Units
from deploy.tuning.probe import Noise, Prober, choices_key
from deploy.tuning.search_options import COMMON_WEIGHT, Effort, Trial, clips, split_cost
from deploy.tuning.sensitivity import (
    QUIET_LOSS,
    Group,
    Sensitivity,
    adapt_sensitivity,
    measure_sensitivity,
    split_into_groups,
)

# of the float model's price: from splits by time alone to nearly everything in float
_NOISE_WEIGHTS = (0.0, *(2.0 ** (step / 2) for step in range(-12, 29)))
_FIRST_STEP_SHARE = 6  # the first step along the predicted front is a sixth of it
_ADDS_GAIN = 0.1  # loss that Adds in float must save, worth a quarter of the time
# loss added for methods that clip: new inputs are clipped more than the few of a trial
_CLIPPING_LOSS = 0.02
_SHARED_METHODS = 2  # which of two nearly level methods is best differs by grid
_OWN_METHOD = "its own method"  # of a target that ignores the method asked for
_TRIED = "tried in float"  # reason of trials, which nobody reads


@dataclass(slots=True)
class SharedFindings:
    """What the search of one target finds out about the model, for those of other targets.

    Attributes:
        sensitivity: noise of the layers; None until it is measured.
        isolated_indices: the samples that it is measured on.
        is_clipping: whether the best method clips; None until methods are compared.
        best_methods: the best methods of that kind, the best first.
    """

    sensitivity: Sensitivity | None = None
    isolated_indices: Sequence[int] | None = None
    is_clipping: bool | None = None
    best_methods: tuple[Method, ...] = ()

    def add_methods(self, ranked_methods: Sequence[Method | None]) -> None:
        """Store the methods of one search, the best first, if it is the first search."""
        if self.is_clipping is None:
            self.is_clipping = clips(ranked_methods[0])
        if not self.best_methods:
            # the target's own method (None) means nothing to another target
            likely_methods = [
                method
                for method in ranked_methods
                if method is not None and clips(method) == self.is_clipping
            ]
            self.best_methods = tuple(dict.fromkeys(likely_methods))[:_SHARED_METHODS]


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search.

    Attributes:
        prices: of the model's units.
        prober: runs the trials.
        methods: range methods to choose among, the calibration's first; None is a target's own.
        precision: of the quantized nodes, such as int8.
        effort: how much is tried.
        weight: of loss against log(time).
        size_of: returns the size of a split as a share of the float model's, which then counts in
            place of its time; None where time counts.
        rounded: whether trials have rounded weights; None without that repair.
        shared: what other targets' searches found out; this one adds to it.
        add_units: units of Adds without weights, the residual stream.
        trial_by_key: the trials that ran, in order, by their choices.
        settled_method: label of the method to build with; "" while it is open.
        sensitivity: noise of the layers; None until it is needed.
        refused: layers that stay float since they cannot run otherwise.
        float_adds: those of `add_units` that stay float for their common loss -> the reason.
    """

    prices: Prices
    prober: Prober
    methods: Sequence[Method | None]
    precision: str = "int8"
    effort: Effort
    weight: float = COMMON_WEIGHT
    size_of: Callable[[frozenset[str]], float] | None = None
    rounded: bool | None = None
    shared: SharedFindings = field(default_factory=SharedFindings)
    add_units: frozenset[str] = frozenset()
    trial_by_key: dict[object, Trial] = field(default_factory=dict)
    settled_method: str = ""
    sensitivity: Sensitivity | None = None
    refused: frozenset[str] = frozenset()
    float_adds: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Try range methods, then splits; the results are in `trial_by_key`.

        Raises:
            BackendError: the model cannot run in int8 with any method, and no single layer is the
                cause.
        """
        trials = sorted(self._try_all_in_int8(), key=_method_loss)
        base = trials[0]
        if base.loss < QUIET_LOSS:  # no layer needs to be float, and time alone decides
            self._settle_method(trials)
        else:
            base = self._settle_method_by_splits(trials)
        self._try_splits(base)

    # ------------------------------------------------------------ the trials

    @property
    def units(self) -> Units:
        """The int8 nodes of the model, in groups."""
        return self.prices.units

    @property
    def eligible(self) -> list[Trial]:
        """The trials of the settled method; all while it is open."""
        trials = list(self.trial_by_key.values())
        if not self.settled_method:
            return trials
        return [trial for trial in trials if self._method_label(trial) == self.settled_method]

    @property
    def best(self) -> Trial:
        """The trial of least cost, the first of equals."""
        return min(self.eligible, key=self.cost)

    def cost(self, trial: Trial) -> float:
        """Return the cost of a trial with the weight of this search."""
        return self._cost(trial.in_float, trial.time, trial.loss)

    def _cost(self, in_float: frozenset[str], time: float, loss: float) -> float:
        share = time if self.size_of is None else self.size_of(in_float)
        return split_cost(share, loss, self.weight)

    def try_split(self, base: Trial, in_float: frozenset[str]) -> Trial | None:
        """Try a split with the methods of a trial; return None if it could not run."""
        trials = self.try_choices([base.choices], in_float)
        return trials[0] if trials else None

    def try_choices(
        self, method_choices: Iterable[Choices], in_float: frozenset[str] = frozenset()
    ) -> list[Trial]:
        """Try a split with several choices of methods; return the trials that could run."""
        split_choices = [self._with_float(choices, in_float) for choices in method_choices]
        trials = []
        noises = self.prober.noises(split_choices)
        for choices, noise in zip(split_choices, noises, strict=True):
            if noise is not None:
                time = self.prices.time_share(in_float)
                trial = Trial(in_float=in_float, choices=choices, noise=noise, predicted_time=time)
                trials.append(self.trial_by_key.setdefault(choices_key(choices), trial))
        return trials

    def _with_float(self, choices: Choices, units: Iterable[str]) -> Choices:
        """Return the choices with these units in float."""
        float_nodes = dict.fromkeys(self.units.node_names(units), _TRIED)
        return replace(choices, float_nodes=float_nodes)

    def count_float_layers(self, in_float: Collection[str]) -> int:
        """Return the number of layers with weights that a split has in float."""
        return len(set(in_float).intersection(self.units.layers))

    def describe(self, trial: Trial) -> str:
        """Return a description such as "3 of 50 layers in float, minmax"."""
        float_layers = self.count_float_layers(trial.in_float)
        if trial.in_float == self.refused:
            scope = "all that can be run" if self.refused else "all"
            text = f"{scope} in {self.precision}"
        elif float_layers == 0:
            text = f"all layers in {self.precision}"
        else:
            text = f"{float_layers} of {len(self.units.layers)} layers in float"
        return f"{text}, {self._method_label(trial)}" if len(self.methods) > 1 else text

    # ------------------------------------------------------------ all in int8

    def _try_all_in_int8(self) -> list[Trial]:
        """Return the trials of all methods, with as much in int8 as can run."""
        # where another target's search found it better to clip, or not to clip, only such methods.
        # In the first search `is_clipping` is None, which no method equals, so all are tried
        likely_methods = [
            method for method in self.methods if clips(method) == self.shared.is_clipping
        ]
        method_choices = []
        for method in likely_methods or self.methods:
            method_choices.append(replace(NO_CHOICES, method=method, rounded=self.rounded))
        trials = self.try_choices(method_choices)
        if not trials:
            self.refused = self._find_refused()
            if self.refused:
                trials = self.try_choices(method_choices, self.refused)
        if not trials:
            raise BackendError(
                f"a search must be able to run the model with all in {self.precision}, got:"
                f" {self.prober.errors[0]}; keep in float what cannot be run (--keep-float), or"
                " build without a search (--effort 0)"
            )
        return trials

    def _settle_method(self, ranked_trials: Sequence[Trial]) -> None:
        """Build with the method of the first trial; those of other methods are not `eligible`."""
        if len(self.methods) > 1:
            self.settled_method = self._method_label(ranked_trials[0])
            self.shared.add_methods([trial.choices.method for trial in ranked_trials])

    def _settle_method_by_splits(self, int8_trials: Sequence[Trial]) -> Trial:
        """Choose the method, by trials with all in int8 and of one split; return its best trial.

        One layer with a few huge values ruins all methods that clip nothing. With all in int8 this
        hides that they may be better for the other layers, once that layer is float::

                                    noise of one layer   of 62 others   of all
            percentile 99.99                      0.05           0.20     0.21
            minmax                                0.26           0.06     0.31

        `int8_trials`: all methods, the best first, with as much in int8 as can run.
        """
        unclipped_trials = [trial for trial in int8_trials if not clips(trial.choices.method)]
        base = self._with_float_adds((unclipped_trials or int8_trials)[0])
        self.layer_losses(base)  # measures the sensitivity, by which splits are predicted
        if len(self.methods) == 1:
            return base

        likely_trials = []  # of all methods, with the split of least predicted cost
        splits = self.predicted_front()
        if splits:
            likely_split = min(splits, key=self._predicted_cost)
            likely_trials = self.try_choices([trial.choices for trial in int8_trials], likely_split)
        # trials that lose the worst slice entirely may have equal costs; they stay in the order of
        # `int8_trials`, which is by the mean loss of the slices
        ranked_trials = sorted([*likely_trials, *int8_trials], key=self._method_cost)
        self._settle_method(ranked_trials)
        best_trial = ranked_trials[0]
        if best_trial not in likely_trials and clips(best_trial.choices.method):
            # the best is to clip, all in int8. The sensitivity was measured without clipping, where
            # the layers with a few huge values lose most; with clipping others do, so it is
            # measured again
            self.sensitivity = None
            self.layer_losses(best_trial)
        return best_trial

    def _find_refused(self) -> frozenset[str]:
        """Return the groups of layers that cannot run in int8; nothing if no group can run.

        A group is one layer, or a few neighbours if the model has more layers than trials.
        """
        groups = split_into_groups(self.units.layers, self.effort.isolated_trials)
        noises = self._measure_isolated(NO_CHOICES, groups)
        refused_groups = [
            group for group, noise in zip(groups, noises, strict=True) if noise is None
        ]
        if len(refused_groups) == len(groups):
            return frozenset()
        return frozenset[str]().union(*refused_groups)

    def _with_float_adds(self, base: Trial) -> Trial:
        """Return a trial with all Adds in float if that alone saves much, else `base`.

        If so, the Adds are in float in all later trials too (`float_adds`). The noise is then in
        the residual stream that they add up, where a few tokens or channels are many times larger
        than all others. Measured one by one, each layer that writes into that stream would be
        blamed for that noise.
        """
        if not self.add_units:
            return base
        trial = self.try_split(base, base.in_float | self.add_units)
        if trial is None or base.loss - trial.loss < _ADDS_GAIN:
            return base
        gain = f"from {base.noise.db:.1f} to {trial.noise.db:.1f} dB"
        reason = f"alone in float all Adds lift {base.noise.worst_slice_label} {gain}"
        self.float_adds = dict.fromkeys(sorted(self.add_units), reason)
        return trial

    # ------------------------------------------------------------ noise of the layers

    def layer_losses(self, base: Trial) -> dict[str, float]:
        """Return layer -> the loss that it adds in int8, with the range method of a trial.

        The noise of each layer alone in int8 (`sensitivity`) is measured once, then stored.
        """
        if self.sensitivity is None:
            sensitivity = self._measure_sensitivity(base)
            self.sensitivity = sensitivity.scaled_to(base.in_float, base.noise)
        return self.sensitivity.loss_by_layer()

    def _measure_sensitivity(self, base: Trial) -> Sensitivity:
        """Return the noise of the layers with the range method of a trial.

        Once it is measured for another target or method, that measurement is adapted, with a third
        of the trials.
        """
        layers = [layer for layer in self.units.layers if layer not in self.refused]
        measure = partial(self._measure_isolated, base.choices)
        if self.shared.sensitivity is not None:
            return adapt_sensitivity(
                self.shared.sensitivity,
                layers,
                measure,
                first_count=self.effort.first_groups,
                max_trials=self.effort.isolated_trials // 3,
                int8_noise=base.noise,
            )
        sensitivity = measure_sensitivity(
            split_into_groups(layers, self.effort.first_groups),
            measure,
            max_trials=self.effort.isolated_trials,
        )
        # later searches measure on the same samples, so that their noise compares with this
        self.shared.sensitivity = sensitivity
        self.shared.isolated_indices = self.prober.isolated_indices
        return sensitivity

    def _measure_isolated(self, choices: Choices, groups: Sequence[Group]) -> list[Noise | None]:
        """Return the noise of each group in int8 with all else in float; None if it cannot run."""
        all_float = {*self.units.layers, *self.float_adds}
        trials = [self._with_float(choices, all_float.difference(group)) for group in groups]
        node_names = [self.units.node_names(group) for group in groups]
        return self.prober.isolated_noises(trials, node_names)

    # ------------------------------------------------------------ splits

    @property
    def pinned(self) -> frozenset[str]:
        """Units that are float in every split."""
        return self.refused.union(self.float_adds)

    def predicted_front(self) -> list[frozenset[str]]:
        """Return the splits of least price + weight * loss, one for each weight, the fastest first.

        Equal splits are there once. A split with all layers in float is left out.
        """
        losses = NO_LOSSES
        weights = _NOISE_WEIGHTS[:1]  # without losses, all weights give the same split
        if self.sensitivity is not None:
            losses = self.sensitivity.loss_by_layer()
            weights = _NOISE_WEIGHTS
        float_price = self.prices.float_total
        splits: dict[frozenset[str], None] = {}
        for weight in weights:
            split = self.prices.cheapest_float_units(losses, weight * float_price, self.pinned)
            if not split.issuperset(self.units.layers):
                splits[split] = None
        return sorted(splits, key=self.prices.time_share)

    def _try_splits(self, base: Trial) -> None:
        """Try splits, which say what is in float, near the one of least predicted cost.

        They are those of the predicted front: the best by the price and loss of each layer.

        ::

            split    fastest  .  .  .  x  .  .  .  nearly float
            1st                        o                  least predicted cost
            2nd, 3rd          o                 o         its neighbours at a distance
            then                 o  .  .  o               nearer, about the cheapest so far
        """
        splits = self.predicted_front()  # the fastest first
        if not splits:
            return
        center = splits.index(min(splits, key=self._predicted_cost))
        step = max(1, len(splits) // _FIRST_STEP_SHARE)
        cost_by_index: dict[int, float] = {}
        while step:
            indices = center, center - step, center + step
            nearby_indices = [index for index in indices if 0 <= index < len(splits)]
            # once `split_trials` splits have a cost, no other is tried: it counts as infinite
            for index in nearby_indices:
                if index not in cost_by_index and len(cost_by_index) < self.effort.split_trials:
                    cost_by_index[index] = self._cost_of_split(base, splits[index])
            cheapest_index = min(
                nearby_indices, key=lambda index: cost_by_index.get(index, math.inf)
            )
            if cheapest_index == center:
                step //= 2
            center = cheapest_index

    def _cost_of_split(self, base: Trial, in_float: frozenset[str]) -> float:
        """Try a split with a trial's methods; return its cost, infinite where it cannot win.

        A split whose time alone costs more than the cheapest trial cannot win and is not tried.
        """
        if self._cost(in_float, self.prices.time_share(in_float), 0.0) > self.cost(self.best):
            return math.inf
        trial = self.try_split(base, in_float)
        return math.inf if trial is None else self.cost(trial)

    def _method_cost(self, trial: Trial) -> float:
        """Return the cost of a trial, with the loss that its method adds on new inputs."""
        return self.cost(trial) + self.weight * _clipping_loss(trial)

    def _predicted_cost(self, in_float: frozenset[str]) -> float:
        loss = 0.0 if self.sensitivity is None else self.sensitivity.predict(in_float).worst
        return self._cost(in_float, self.prices.time_share(in_float), loss)

    def _method_label(self, trial: Trial) -> str:
        """Return the label of a trial's method; None is the target's own.

        A target that ignores the method asked for may also have its own method without clipping,
        which a plan calls "minmax".
        """
        method = trial.choices.method
        if self.methods[0] is None:
            return _OWN_METHOD if method is None else f"{_OWN_METHOD} without clipping"
        return method.label if method else ""


def _method_loss(trial: Trial) -> float:
    """Return the mean loss of a trial's slices, which still ranks trials that lose one entirely."""
    return trial.noise.mean + _clipping_loss(trial)


def _clipping_loss(trial: Trial) -> float:
    """Return the loss that new inputs add to that of a trial, by its method."""
    return _CLIPPING_LOSS if clips(trial.choices.method) else 0.0
