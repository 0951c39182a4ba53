"""The search within a loss budget: as few layers in float as hold it on all evaluation samples.

Its trials, their samples and the losses of layers are those of `deploy.tuning.search`, its repairs
those of a build. It differs in what it minimizes, layers in float instead of time and loss::

    searches of the target, each in all layers          the one that loses least
    each layer by the search nearest to float, repairs  kept if less is lost
    each layer alone in int8                            its loss, the worst first
    other searches for the worst                        those that lose less
    the worst n of them in float                        the least n that holds, by halving

The search ends as soon as the budget holds. A ranking that is given replaces the losses; then
nothing but its n worst is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from deploy.calibration.reference_outputs import EvaluationSet, make_evaluation_set
from deploy.errors import BackendError, FeedError, counted
from deploy.feed.samples import Feed
from deploy.graph.edit import copy_message
from deploy.method import Choices
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.output_form import OutputForm
from deploy.targets.base import BuildRequest, Target
from deploy.terminal import Step, phase
from deploy.tuning.front import find_fastest
from deploy.tuning.prices import Prices, Units
from deploy.tuning.probe import ReferenceSample
from deploy.tuning.repairs.apply import repair_request
from deploy.tuning.repairs.base import with_repaired_model
from deploy.tuning.repairs.output_rounding import find_exclusive_layers
from deploy.tuning.repairs.repair_layers import original_weights, restore_weights
from deploy.tuning.search import Search
from deploy.tuning.search_options import EFFORTS, SearchBudget, Trial, Tuning
from deploy.tuning.search_samples import GrowingComparison, max_sample_count, select_samples
from deploy.tuning.target_search import SearchSetup, make_prober

_EFFORT = 3  # losses of up to 64 layers are measured one by one
_SAMPLES = 32  # of each trial
_SWAPPED_LAYERS = 16  # number of layers for which other searches are tried
_MAX_REMAINING_LOSS = 0.97  # share of the loss: another search for a layer must leave less


@dataclass(slots=True, kw_only=True)
class BudgetSearch:
    """A search for the fewest layers in float that hold a loss budget.

    A "search" of a layer is the algorithm that finds its range in calibration.

    Attributes:
        target: the target.
        request: its build request; its evaluation samples are those that compute the repairs.
        evaluation: samples that must hold the budget, with labels or without.
        max_loss: the budget, see `loss_of`.
        layers: what may be float, in the model's order.
        node_inputs: those of `layers` that are one input of a node such as an Add, not counted.
        layers_by_search: search of the target -> the layers that can have it.
        general_searches: those searches that all layers can have and that cost no time.
        find_nearest: returns layer -> the search with whose range it is nearest to float.
        say: called with sentences on the progress.
        ranking: layers with their losses, in the order in which they go to float; empty until it
            is measured.
        history: for each evaluation the layers in float, whether the budget held, and the loss.
        repair_note: sentence on the rounded weights; "" where they were not kept.
        loss_unit: what is lost: cosine, or with labels top-1.
    """

    target: Target
    request: BuildRequest
    evaluation: Feed
    max_loss: float
    layers: Sequence[str]
    node_inputs: Collection[str]
    layers_by_search: Mapping[str, Collection[str]]
    general_searches: Sequence[str]
    find_nearest: Callable[[], Mapping[str, str]]
    say: Callable[[str], None]
    ranking: Sequence[tuple[str, float]] = ()
    history: list[dict[str, Any]] = field(default_factory=list)
    repair_note: str = ""
    loss_unit: str = "cosine"
    _evaluation_set: EvaluationSet = field(init=False)
    _samples: Sequence[ReferenceSample] = field(init=False)
    _form: OutputForm = field(init=False)
    _builder: RepairedBuilder = field(init=False)

    def __post_init__(self) -> None:
        feed = self.evaluation
        self._builder = RepairedBuilder(self.target, self.request, self.request)
        self._evaluation_set = make_evaluation_set(feed, self.request.model, feed.count)
        with phase("running the float model"):
            count = max(min(_SAMPLES, max_sample_count(self._evaluation_set)), 1)
            self._samples, self._form = select_samples(self._evaluation_set, count)

    def run(self) -> BuildRequest | None:
        """Return the request that holds the budget; None if only float holds it.

        Raises:
            BackendError: the int8 model cannot be run.
            FeedError: no cosine, since an output of the float model holds NaN or Inf.
            Calib8Error: what the target raises for its trial.
        """
        with phase("trying layers", len(self.layers), "trials") as step:
            trial = self._find(step)
        return None if trial is None else self._builder.final(trial.choices)

    def _find(self, step: Step) -> Trial | None:
        """Return the trial to build: the first whose loss is within the budget; None without one.

        A trial is a model with some layers in float, and, for each layer in int8, one of the
        target's searches for its range. Cheap steps come first: all layers in int8, then repairs,
        then other searches for some layers, and at last layers in float.
        """
        search = self._make_search(self._builder, step)
        base = self._try_searches_everywhere(search)
        if self._check_budget(base):
            return base
        if self.ranking:  # the user chose AMCT's strategy, which tries nothing else
            return self._with_fewest_float_layers(search, base)

        # a single search means that the user configured it for all layers: the weights stay too
        if len(self.layers_by_search) > 1:
            search_and_trial = self._try_rounding(base, step)
            if search_and_trial is not None:
                search, base = search_and_trial
                if self._check_budget(base):
                    return base
        losses = search.layer_losses(base)
        # a layer that cannot run alone in int8 has no measured loss
        loss_by_layer = {name: losses.get(name, 0.0) for name in self.layers}
        self.ranking = sorted(loss_by_layer.items(), key=lambda entry: -entry[1])
        swapped_trial = self._with_swapped_searches(search, base)
        if swapped_trial is not base and self._check_budget(swapped_trial):
            return swapped_trial
        return self._with_fewest_float_layers(search, swapped_trial)

    def _make_search(self, builder: RepairedBuilder, step: Step) -> Search:
        """Return a search on the evaluation samples whose units are the layers.

        Each layer has the price 0 in int8 and 1 in float, so the cheapest split is that with the
        fewest layers in float.

        Args:
            builder: builds its trial models.
            step: called after each trial.
        """
        setup = SearchSetup(
            target=self.target, request=self.request, options=Tuning(effort=_EFFORT)
        )
        members = {name: (name,) for name in self.layers}
        units = Units(members=members, borders=(), layers=(*members,))
        prices = dict.fromkeys(members, (0.0, 1.0))  # (in int8, in float)
        return Search(
            prices=Prices(units=units, unit_prices=prices, conversions={}),
            prober=make_prober(
                setup,
                builder.trial,
                self._samples,
                self._form,
                step,
                SearchBudget(math.inf),
                measures_accuracy=True,
            ),
            methods=[None],  # the target's own: that of each layer's search
            effort=EFFORTS[_EFFORT],
        )

    def _try_searches_everywhere(self, search: Search) -> Trial:
        """Return the trial of least loss with one search in all layers."""
        choices = [
            Choices(searches=dict.fromkeys(self.layers, name)) for name in self.general_searches
        ]
        trials = search.try_choices(choices)
        if not trials:
            raise BackendError(
                f"a search must be able to run the int8 model, got: {search.prober.errors[0]}"
            )
        return min(trials, key=_loss)

    def _try_rounding(self, base: Trial, step: Step) -> tuple[Search, Trial] | None:
        """Try weights that are rounded by output error, in place of `base`.

        Each layer gets the range with which it is nearest to float (`find_nearest`). If the rounded
        model loses less than `base`, later trials and the build have these weights too.

        Returns:
            (a search among rounded models, its first trial); None if that loses no less.
        """
        request = self.request.with_choices(replace(base.choices, searches=self.find_nearest()))
        assert request.evaluation_set is not None
        subset = request.evaluation_set.subset
        samples = [sample for _, sample in subset.spread_with_keys(len(subset))]
        repaired_request, note = repair_request(self.target, request, samples)
        # builds all trials of the new search with the rounded weights
        builder = RepairedBuilder(self.target, self.request, repaired_request)
        search = self._make_search(builder, step)
        trials = search.try_choices([repaired_request.choices])
        if not trials or _loss(trials[0]) >= _loss(base):
            return None
        self._builder = builder
        if repaired_request.is_repaired:
            self.repair_note = note
        return search, trials[0]

    def _with_fewest_float_layers(self, search: Search, base: Trial) -> Trial | None:
        """Return the trial with the fewest of the first layers of the ranking in float."""
        order = [name for name, _ in self.ranking]
        splits = [frozenset(order[:count]) for count in range(1, len(order))]
        return find_fastest(search, base, splits, self._check_budget)

    def _with_swapped_searches(self, search: Search, base: Trial) -> Trial:
        """Return a trial in which the layers that lose most have another search that loses less.

        Such a search finds a layer's range in calibration; `search` is the one that runs trials.
        """
        best_trial = base
        for layer, _ in self.ranking[:_SWAPPED_LAYERS]:
            swapped_choices = []
            for range_search, layers in self.layers_by_search.items():
                if layer in layers:
                    search_by_layer = {**best_trial.choices.searches, layer: range_search}
                    swapped_choices.append(replace(best_trial.choices, searches=search_by_layer))
            trials = search.try_choices(swapped_choices, best_trial.in_float)
            trial = min(trials, key=_loss, default=best_trial)
            if _loss(trial) < _MAX_REMAINING_LOSS * _loss(best_trial):
                best_trial = trial
        return best_trial

    def _check_budget(self, trial: Trial) -> bool:
        """Run a trial on all evaluation samples; return whether its loss is within the budget.

        The result is reported to the user and added to `history`.
        """
        # the inputs of Adds and the like may be float too, but are no layers to the user
        int8_layers = set(self.layers).difference(trial.in_float, self.node_inputs)
        trial_text = f"{counted(len(int8_layers), 'layer')} in int8"
        with phase(trial_text):
            comparison = GrowingComparison(
                self._builder.trial(self.request.with_choices(trial.choices)),
                self._evaluation_set,
                self._form,
                int8_kernels=self.target.runs_here,
                labels=self.evaluation.labels,
            )
            accuracy = comparison.compare(
                len(self._evaluation_set.subset), threads=self.request.threads
            )
        loss = loss_of(accuracy)
        # [0]: samples in which the float model's own output is not finite
        if math.isnan(loss) and any(output.not_finite[0] for output in accuracy.outputs):
            raise FeedError(
                f"the loss of cosine needs numbers, got: {accuracy.problems[0]}; leave these images"
                " out, or give labels (--labels)"
            )
        is_held = bool(loss <= self.max_loss)
        self.loss_unit = "cosine" if accuracy.top1_reference is None else "top-1"
        self.say(
            f"{trial_text}: loss {format_loss(loss, self.max_loss)} of {self.loss_unit},"
            f" {'within' if is_held else 'above'} the limit"
        )
        # the keys are those of AMCT's file on the layers that it rolled back to float
        float_by_layer = {name: name in trial.in_float for name in self.layers}
        entry = {"roll_back_config": float_by_layer, "metric_eval": [is_held, float(loss)]}
        self.history.append(entry)
        return is_held


class RepairedBuilder:
    """Builds trials of a repaired model in which layers in float have their own constants."""

    def __init__(
        self, target: Target, request: BuildRequest, repaired_request: BuildRequest
    ) -> None:
        self._target = target
        self._repaired_request = repaired_request
        self._original_by_layer = original_weights(
            request.model, find_exclusive_layers(request.model)
        )

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the trial model of a request's choices."""
        model = self._target.trial(self._repaired_request.with_choices(request.choices))
        restore_weights(model, self._original_by_layer, request.choices.float_nodes)
        return model

    def final(self, choices: Choices) -> BuildRequest:
        """Return the request to build."""
        if not self._repaired_request.is_repaired:
            return self._repaired_request.with_choices(choices)
        model = copy_message(self._repaired_request.model)
        restore_weights(model, self._original_by_layer, choices.float_nodes)
        # its digest stays that of the model with all weights rounded
        loaded = replace(self._repaired_request.subject.loaded, model=model)
        return with_repaired_model(self._repaired_request.with_choices(choices), loaded)


def loss_of(accuracy: Accuracy) -> float:
    """Return the loss of top-1 accuracy if there are labels, else of the worst mean cosine."""
    if accuracy.top1_reference is not None and accuracy.top1_candidate is not None:
        return accuracy.top1_reference - accuracy.top1_candidate
    return 1.0 - min(output.cosine_mean for output in accuracy.outputs)


def format_loss(loss: float, limit: float) -> str:
    """Return a loss with so many digits that it is above the limit only if the loss is."""
    for text in (f"{loss:.5f}", f"{loss:.3g}"):
        if (float(text) <= limit) == (loss <= limit):
            return text
    return repr(float(loss))


def _loss(trial: Trial) -> float:
    """Return the loss of a trial on its few samples; infinite if it is not a number."""
    loss = math.inf if trial.noise.accuracy is None else loss_of(trial.noise.accuracy)
    return loss if math.isfinite(loss) else math.inf
