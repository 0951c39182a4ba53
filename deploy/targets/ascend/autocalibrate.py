"""Automatic calibration, from what was observed to files.

Automatic accuracy by measured gain: the step that lowers the loss most, until the budget holds.

::

    every search in all layers      0.015  0.0052  0.011      the best one to begin with
    each layer by its own search    0.0043                    biases corrected: `LossMeter.nearer`
    each layer back in float        0.0041 .. 0.0052          its gain, measured on the outputs
    AdaRound of those that gain     0.0042                    a few, each where less is lost
    the noisiest alone, together    0.0048                    where their errors cancel
    the best ones, by another search too
      |-- take the best step, look at the best again, ... until the budget holds on all images
    layers in float that are not missed go back to int8

A layer's gain is that of the whole model, so errors that cancel or pile up count, which a ranking
of layers by themselves cannot see. Gains are measured on at most 128 images, and the budget holds
on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deploy.calibration.observation import ObservedStatistics
from deploy.files import atomic
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.atc import strip_metadata
from deploy.targets.ascend.auto_layers import (
    CONFIGURED,
    Biases,
    Records,
    Rounder,
    balanced_over,
    config_of,
    is_balanced,
    is_rounded,
    records_by_search,
    with_biases,
)
from deploy.targets.ascend.auto_losses import (
    AutoSearchResult,
    LossBudget,
    ModelLosses,
    rank_layers,
    search_prefix,
)
from deploy.targets.ascend.float16 import find_float16_tensors
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.models import write_models
from deploy.targets.ascend.preparation import find_weight_sharers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.terminal import phase

if TYPE_CHECKING:
    from deploy.calibration.observation import CalibrationSubject
    from deploy.feed.samples import Feed


_CLOSE = 5  # layers that are looked at again before a step
_SWAPPED = 2  # of which other searches are tried too
_LESS = 0.97  # of the loss on the held images, where all of them say that the budget does not hold
_TOGETHER = 8  # layers that lose most by themselves, of which a few go to float together
_AS_GOOD = 1.1  # another search may leave so much more than float does, and the layer stays int8
_WORTH = 0.03  # share of the loss: a step that takes less is none, and all layers are ranked anew


class LossMeter(Protocol):
    """What is lost; `deploy.targets.ascend.auto_losses.ModelLosses`."""

    def judge(self, records: Records) -> tuple[bool, float]:
        """(the budget holds, loss) on all images."""

    def hold(self) -> None:
        """Hold the images that `of` looks at."""

    def of(self, forms: Sequence[Records]) -> list[float]:
        """Losses on the held images."""

    def nearer(self, variants: Mapping[str, Records]) -> dict[str, str]:
        """Layer -> the search that leaves it nearest; from now on biases are corrected."""

    def plain(self) -> None:
        """Judge with the biases as they were again."""

    def rounded(
        self, chosen: Mapping[str, str], records: Records, worst: Sequence[str]
    ) -> Mapping[str, Records]:
        """Search with AdaRound -> records of the layers that it was tried on, of the worst."""


@dataclass(slots=True, kw_only=True)
class GainSearch:
    """State of the search.

    Attributes:
        variants: name of a search -> records of all layers, those of DMQ and AdaRound of some.
        losses: what sets of records lose.
        budget: the loss that is allowed.
        chosen: layer in int8 -> its search.
        ranking: layer -> what it gained in float when it was last tried, in loss.
        history: one entry a judgement, as AMCT's.
    """

    variants: Mapping[str, Records]
    losses: LossMeter
    budget: float
    chosen: dict[str, str] = field(default_factory=dict)
    ranking: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)

    @property
    def records(self) -> dict[str, LayerRecord]:
        """Of the layers in int8."""
        return self._of(self.chosen)

    def run(self) -> dict[str, str]:
        """Layer in int8 -> its search; empty where only float holds the budget."""
        now = self._begin()
        holds, loss = self._judged()
        if not holds and (nearer := self._nearer(now)) < now:
            now = nearer
            holds, loss = self._judged()
        if not holds:
            self._gains(list(self.chosen), now)
            self._lowered(now, loss)
        return self.chosen

    def _lowered(self, now: float, loss: float) -> None:
        """AdaRound, then float, until the budget holds; float alone where as many layers stay so.

        A start that loses less may lead to fewer layers in the end, where errors cancel.
        """
        start = self.chosen, self.ranking, self.variants
        rounded = self._rounded(now)
        if rounded < now:
            self._floated(rounded, *self._judged())
            if len(self.chosen) == len(self._layers):
                return
        found = self.chosen, self.ranking, self.variants
        self.chosen, self.ranking, self.variants = start
        self._floated(now, False, loss)
        if rounded < now and len(found[0]) > len(self.chosen):
            self.chosen, self.ranking, self.variants = found

    def _floated(self, now: float, holds: bool, loss: float) -> None:
        """Leave layers in float until the budget holds, as few as are found."""
        if not holds:
            now = self._together(now)
        while not holds and self.chosen:
            goal = min(self.budget * now / loss, _LESS * now)
            while now > goal and self.chosen:
                now = self._step(now)
            holds, loss = self._judged()
        if holds and len(self.chosen) < len(self._layers):
            self._give_back(now * self.budget / loss if loss > 0 else now)

    @property
    def _layers(self) -> list[str]:
        return list(next(iter(self.variants.values())))

    @property
    def _whole(self) -> list[str]:
        """The searches that every layer has, and that cost nothing."""
        return [how for how in self.variants if not (is_balanced(how) or is_rounded(how))]

    def _begin(self) -> float:
        """All layers by the best search."""
        self.losses.hold()
        found = self.losses.of([self.variants[how] for how in self._whole])
        best = min(range(len(found)), key=found.__getitem__)
        self.chosen = self._all(self._whole[best])
        return found[best]

    def _nearer(self, now: float) -> float:
        """Each layer by its own search, biases corrected, where less is lost so; gives the loss."""
        chosen = self.losses.nearer(self.variants)
        (found,) = self.losses.of([self._of(chosen)])
        if found < now:
            self.chosen = chosen
        else:
            self.losses.plain()
        self._known.clear()
        return found

    def _rounded(self, now: float) -> float:
        """Give layers that lose most AdaRound's weights, each where it is worth it; gives the loss.

        They cost nothing on the device; what all layers gain in float is measured anew then.
        """
        worst = sorted(self.chosen, key=lambda name: -self.ranking[name])
        worst = [name for name in worst if self.ranking[name] > 0]
        found = self.losses.rounded(self.chosen, self.records, worst)
        self.variants = {**self.variants, **found}
        hows = {name: how for how, own in found.items() for name in own}
        least = now
        for name in filter(hows.__contains__, worst):
            form = {**self.chosen, name: hows[name]}
            (loss,) = self._tried([form])
            if loss < (1 - _WORTH) * least:
                self.chosen, least = form, loss
        if least < now:
            self._gains(list(self.chosen), least)
        return least

    def _together(self, now: float) -> float:
        """Leave the layers that lose most by themselves in float together, where that is best.

        Errors of two layers may cancel: then float for one of them gains nothing, but for both it
        does. Gives the loss after it, or the same where one layer alone gains more.
        """
        alone = self._tried({name: how} for name, how in self.chosen.items())
        lost = dict(zip(self.chosen, alone, strict=True))
        worst = sorted(self.chosen, key=lambda name: -lost[name])[:_TOGETHER]
        mixed = len(set(self.chosen.values())) > 1
        forms = [
            {name: how for name, how in start.items() if name not in worst[:count]}
            for start in ([self.chosen] if mixed else map(self._all, self._whole))
            for count in range(2, min(len(worst), len(self._layers) - 1) + 1)
        ]
        found = self._tried(forms)
        gains = [
            (now - loss) / (len(self._layers) - len(form))
            for form, loss in zip(forms, found, strict=True)
        ]
        best = max(range(len(forms)), key=gains.__getitem__, default=None)
        if best is None or gains[best] <= max(self.ranking.values()):
            return now
        self.chosen = forms[best]
        return found[best]

    def _step(self, now: float) -> float:
        """Take the best step of the layers that gained most; gives the loss after it."""
        near = sorted(self.chosen, key=lambda name: -self.ranking[name])[:_CLOSE]
        floats = self._gains(near, now)
        worth = (1 - _WORTH) * now
        name = min(floats, key=floats.__getitem__)
        if floats[name] > worth:
            floats = self._gains(list(self.chosen), now)
            name = min(floats, key=floats.__getitem__)
        swaps = [
            {**self.chosen, one: other}
            for one in near[:_SWAPPED]
            for other in self.variants
            if other != self.chosen[one] and one in self.variants[other]
        ]
        found = self._tried(swaps)
        least = min(range(len(swaps)), key=found.__getitem__, default=None)
        if least is not None and found[least] < min(worth, _AS_GOOD * floats[name]):
            self.chosen = swaps[least]
            return found[least]
        self.chosen = self._without(name)
        return floats[name]

    def _gains(self, names: Sequence[str], now: float) -> dict[str, float]:
        """Layer -> the loss with it in float; the ranking learns of it."""
        found = dict(zip(names, self._tried(map(self._without, names)), strict=True))
        self.ranking = self.ranking | {name: now - loss for name, loss in found.items()}
        return found

    def _give_back(self, goal: float) -> None:
        """Put layers back to int8 that are not missed, if the budget still holds on all images."""
        sound = self.chosen
        missing = [name for name in self._layers if name not in sound]
        for name in sorted(missing, key=lambda name: self.ranking[name]):
            forms = [
                {**self.chosen, name: how} for how, own in self.variants.items() if name in own
            ]
            found = self._tried(forms)
            best = min(range(len(found)), key=found.__getitem__)
            if found[best] <= goal:
                self.chosen = forms[best]
        if self.chosen != sound and not self._judged()[0]:
            self.chosen = sound

    def _judged(self) -> tuple[bool, float]:
        """Whether the budget holds on all images, and the loss."""
        holds, loss = self.losses.judge(self.records)
        rolled = {name: name not in self.chosen for name in self._layers}
        self.history.append({"roll_back_config": rolled, "metric_eval": [bool(holds), float(loss)]})
        return holds, loss

    def _all(self, how: str) -> dict[str, str]:
        return dict.fromkeys(self._layers, how)

    def _without(self, name: str) -> dict[str, str]:
        return {one: how for one, how in self.chosen.items() if one != name}

    def _tried(self, choices: Iterable[Mapping[str, str]]) -> list[float]:
        """What each loses on the held images; each is run once."""
        listed = [frozenset(choice.items()) for choice in choices]
        new = [one for one in dict.fromkeys(listed) if one not in self._known]
        found = self.losses.of([self._of(dict(one)) for one in new])
        self._known |= dict(zip(new, found, strict=True))
        return [self._known[one] for one in listed]

    def _of(self, chosen: Mapping[str, str]) -> dict[str, LayerRecord]:
        order = {name: chosen[name] for name in self._layers if name in chosen}
        return {name: self.variants[how][name] for name, how in order.items()}


CORRECTED = "_corrected.onnx"  # the float model that the int8 ones are made of
_RANKED = 8  # samples that AMCT's ranking looks at


def auto_calibrate(
    plans: Mapping[str, RecordPlan],
    observed: ObservedStatistics,
    evaluation: Feed,
    *,
    calibration: Feed,
    folder: Path,
    subject: CalibrationSubject,
    budget: LossBudget | None = None,
    strategy: str = "gain",
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[AutoSearchResult, list[Path]]:
    """Search, write.

    Args:
        plans: name of a search -> the layers and their settled configuration, the user's first.
        observed: what was observed for them.
        evaluation: feed to judge on, with `labels` or without.
        calibration: feed that was observed, of which a few images correct biases.
        folder: where the files go.
        subject: the model that the plans are of.
        budget: what may be lost.
        strategy: "gain", or "binary-search", which is AMCT's own rule.
        say: told how it goes, a sentence a judgement.

    Raises:
        ConfigError, CalibrationError, FeedError, ExportError: as the Ascend target's `build`.
    """
    plan = plans[CONFIGURED]
    budget = budget or LossBudget()
    rounder = Rounder(plan=plan, observed=observed, calibration=calibration, threads=budget.threads)
    losses = ModelLosses(
        model=plan.model,
        graph=plan.graph,
        evaluation=evaluation,
        calibration=calibration,
        budget=budget,
        say=say,
        rounder=rounder if len(plans) > 1 else None,
    )
    if strategy == "gain":
        result = _by_gain(plans, observed, losses, name=subject.loaded.name)
    else:
        result = _by_prefix(plan, observed, losses)
    return result, _write(result, plan, folder, subject)


def _by_gain(
    plans: Mapping[str, RecordPlan], observed: ObservedStatistics, losses: ModelLosses, *, name: str
) -> AutoSearchResult:
    work = GainSearch(
        variants=records_by_search(plans, observed), losses=losses, budget=losses.budget.max_loss
    )
    chosen = work.run()
    biases = losses.biases_of(work.records)
    return AutoSearchResult(
        ranking=tuple(sorted(work.ranking.items(), key=lambda entry: -entry[1])),
        history=tuple(work.history),
        records=work.records or None,
        config=config_of(plans[CONFIGURED].config, chosen),
        biases=biases,
        notes=tuple(_notes(chosen, biases, plans[CONFIGURED], name)),
    )


def _notes(chosen: Mapping[str, str], biases: Biases, plan: RecordPlan, name: str) -> Iterator[str]:
    """What was done to the layers in int8 beside searching their ranges."""
    if balanced := sum(map(is_balanced, chosen.values())):
        images = balanced_over(plan) * plan.images
        yield (
            f"DMQ balances {balanced} layers, with a multiplication more in front of each, by the"
            f" largest values of {images} images."
        )
    rounded = [layer for layer, how in chosen.items() if is_rounded(how)]
    if biases:
        goes = "the configuration" if rounded else "the configuration and the record"
        yield (
            f"The biases of {len(biases)} layers are corrected: {name}{CORRECTED} is the float"
            f" model that has them, and goes with {goes}."
        )
    if rounded:
        both = ", and the corrected biases," if biases else ""
        yield (
            f"AdaRound rounds the weights of {len(rounded)} layers ({', '.join(rounded)}):"
            f" {name}_modified_model.onnx is the float model that has them{both} and goes with the"
            " record."
        )


def _by_prefix(
    plan: RecordPlan, observed: ObservedStatistics, losses: ModelLosses
) -> AutoSearchResult:
    found = plan.record(observed)
    layers = quantize_layers(plan.model, plan.graph, found.records)
    with phase("ranking the layers"), losses.evaluation.samples() as samples:
        ranking = rank_layers(plan.model, layers, islice(samples, _RANKED))
    return search_prefix(found.records, ranking, plan.config, losses.judge)


def _write(
    result: AutoSearchResult, plan: RecordPlan, folder: Path, subject: CalibrationSubject
) -> list[Path]:
    """Ranking, history and config; and models and record where some layer stays in int8."""
    written = [atomic.write_text(folder / file, text) for file, text in result.files().items()]
    if result.records is None:
        return written
    model, graph = plan.model, plan.graph
    if result.biases:
        model = with_biases(model, graph, result.biases)
        graph = find_layers(model)
        data = strip_metadata(subject.loaded.whole(model)).SerializeToString(deterministic=True)
        path = folder / f"{subject.loaded.name}{CORRECTED}"
        written.append(atomic.write_bytes(path, data))
    layers = quantize_layers(model, graph, result.records)
    models = write_models(
        model,
        layers,
        result.config,
        result.records,
        folder,
        subject,
        halves=find_float16_tensors(subject),
        shared=find_weight_sharers(plan.graph.layers.values(), plan.graph),
    )
    return [*written, *models.values()]
