"""Automatic calibration, from what was observed to files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import atomic
from deploy.calibration.observation import Observed
from deploy.progress import phase
from deploy.targets.ascend.auto import Searched, rank, search
from deploy.targets.ascend.calibrate import RecordPlan
from deploy.targets.ascend.gain import ByGain
from deploy.targets.ascend.half import halves_of
from deploy.targets.ascend.losses import Budget, Losses
from deploy.targets.ascend.models import write_models
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.variants import CONFIGURED, config_of, recorded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.calibration.subject import Subject
    from deploy.feed.feed import Feed

_RANKED = 8  # samples that AMCT's ranking looks at


def auto_calibrate(
    plans: Mapping[str, RecordPlan],
    observed: Observed,
    evaluation: Feed,
    *,
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
        folder: where the files go.
        subject: the model that the plans are of.
        budget: what may be lost.
        strategy: "gain", or "binary-search", which is AMCT's own rule.
        say: told how it goes, a sentence a judgement.

    Raises:
        ConfigError, CalibrationError, FeedError, ExportError: as the Ascend target's `build`.
    """
    plan = plans[CONFIGURED]
    losses = Losses(
        model=plan.model,
        graph=plan.graph,
        evaluation=evaluation,
        budget=budget or Budget(),
        say=say,
    )
    if strategy == "gain":
        result = _by_gain(plans, observed, losses)
    else:
        result = _by_prefix(plan, observed, losses)
    return result, _write(result, plan, folder, subject)


def _by_gain(plans: Mapping[str, RecordPlan], observed: Observed, losses: Losses) -> Searched:
    work = ByGain(variants=recorded(plans, observed), losses=losses, budget=losses.budget.max_loss)
    chosen = work.run()
    return Searched(
        ranking=tuple(sorted(work.ranking.items(), key=lambda entry: -entry[1])),
        history=tuple(work.history),
        records=work.records or None,
        config=config_of(plans[CONFIGURED].config, chosen),
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
    layers = quantize_layers(plan.model, plan.graph, result.records)
    models = write_models(
        plan.model,
        layers,
        result.config,
        result.records,
        folder,
        subject,
        halves=halves_of(subject),
    )
    return [*written, *models.values()]
