"""Automatic calibration, from what was observed to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.observation import Observed
from deploy.files import atomic
from deploy.progress import phase
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.auto import Searched, rank, search
from deploy.targets.ascend.auto_layers import Biases, with_biases
from deploy.targets.ascend.auto_losses import Budget, Losses
from deploy.targets.ascend.cann import stripped
from deploy.targets.ascend.gain import ByGain
from deploy.targets.ascend.half import halves_of
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.models import write_models
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.rounder import Rounder
from deploy.targets.ascend.shared import own_of
from deploy.targets.ascend.variants import (
    CONFIGURED,
    balanced_over,
    config_of,
    is_balanced,
    is_rounded,
    recorded,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.calibration.subject import Subject
    from deploy.feed.samples import Feed

CORRECTED = "_corrected.onnx"  # the float model that the int8 ones are made of
_RANKED = 8  # samples that AMCT's ranking looks at


def auto_calibrate(
    plans: Mapping[str, RecordPlan],
    observed: Observed,
    evaluation: Feed,
    *,
    calibration: Feed,
    folder: Path,
    subject: Subject,
    budget: Budget | None = None,
    strategy: str = "gain",
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[Searched, list[Path]]:
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
    budget = budget or Budget()
    rounder = Rounder(plan=plan, observed=observed, calibration=calibration, threads=budget.threads)
    losses = Losses(
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
    plans: Mapping[str, RecordPlan], observed: Observed, losses: Losses, *, name: str
) -> Searched:
    work = ByGain(variants=recorded(plans, observed), losses=losses, budget=losses.budget.max_loss)
    chosen = work.run()
    biases = losses.biases_of(work.records)
    return Searched(
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


def _by_prefix(plan: RecordPlan, observed: Observed, losses: Losses) -> Searched:
    found = plan.record(observed)
    layers = quantize_layers(plan.model, plan.graph, found.records)
    with phase("ranking the layers"), losses.evaluation.samples() as samples:
        ranking = rank(plan.model, layers, islice(samples, _RANKED))
    return search(found.records, ranking, plan.config, losses.judge)


def _write(result: Searched, plan: RecordPlan, folder: Path, subject: Subject) -> list[Path]:
    """Ranking, history and config; and models and record where some layer stays in int8."""
    written = [atomic.write_text(folder / file, text) for file, text in result.files().items()]
    if result.records is None:
        return written
    model, graph = plan.model, plan.graph
    if result.biases:
        model = with_biases(model, graph, result.biases)
        graph = find_layers(model)
        data = stripped(subject.loaded.whole(model)).SerializeToString(deterministic=True)
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
        halves=halves_of(subject),
        shared=own_of(plan.graph.layers.values(), plan.graph),
    )
    return [*written, *models.values()]
