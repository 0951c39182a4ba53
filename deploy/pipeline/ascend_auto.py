"""`calib8 ascend auto`: AMCT's accuracy-based calibration by the search of `deploy.tuning.budget`.

::

    model, images --> statistics of all searches --> layers in float, searches, repairs --> files

The ranking, the history and the final configuration are written under AMCT's names and in its
layout (hicann/amct, common/auto_calibration).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.observation import CalibrationSubject, Observation
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.feed.samples import Feed
from deploy.files import atomic, manifest
from deploy.files.staging import stage_files
from deploy.pipeline.results import build_origin, publish_build
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.atc import strip_metadata
from deploy.targets.ascend.config import write_config
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.float16 import find_float16_tensors
from deploy.targets.ascend.layer_searches import (
    CONFIGURED,
    SEARCHES,
    apply_searches,
    count_dmq_samples,
    find_best_searches,
    is_balanced,
    make_search_plan,
    rank_layers,
)
from deploy.targets.ascend.models import write_models
from deploy.targets.ascend.preparation import find_weight_sharers
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import BuildRequest
from deploy.terminal import phase
from deploy.tuning.budget import BudgetSearch

RANKING = "accuracy_based_auto_calibration_ranking_information.json"
HISTORY = "accuracy_based_auto_calibration_record.json"
FINAL = "accuracy_based_auto_calibration_final_config.json"
REPAIRED = "_corrected.onnx"  # the float model that the int8 ones are made of

GAIN, BINARY = "gain", "binary-search"  # strategies
_REPAIRING, _NEAREST = 64, 8  # calibration images
_RANKED = 8  # evaluation samples


@dataclass(frozen=True, kw_only=True)
class AscendSearching(Ascend):
    """The Ascend target with several searches for each layer.

    Attributes:
        several: whether there are others than the default, if no configuration decides.
    """

    several: bool = True

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations of all searches."""
        own = self.record_plan(subject)
        plans = [make_search_plan(own, how) for how in self._searches]
        return tuple({o.key: o for plan in plans for o in plan.observations}.values())

    def records(self, request: BuildRequest) -> dict[str, dict[str, LayerRecord]]:
        """Return search -> records of all layers, the default first; DMQ's of those it changes."""
        found = {how: self.search(request, how)[1].records for how in self._searches}
        return {
            how: {n: r for n, r in own.items() if not is_balanced(how) or (r.factors != 1).any()}
            for how, own in found.items()
        }

    @property
    def _searches(self) -> tuple[str, ...]:
        return SEARCHES if self.several and self.config is None else (CONFIGURED,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCalibration:
    """What was chosen and written.

    Attributes:
        config: the final configuration.
        in_int8: number of layers in int8, tensors not counted; None where no model was written.
        notes: sentences on what was done to these layers beside searching their ranges.
        written: paths of all files.
    """

    config: QuantConfig
    in_int8: int | None
    notes: tuple[str, ...]
    written: tuple[Path, ...]


def refuse_foreign_files(target: Ascend, folder: Path, name: str) -> None:
    """Refuse a folder with files that `auto_calibrate` would replace (`refuse_foreign`)."""
    own = (f"{name}{ending}" for ending in (*target.writes, REPAIRED))
    names = [RANKING, HISTORY, FINAL, manifest.MANIFEST_NAME, *own]
    manifest.refuse_foreign(folder, names, force=None)


def auto_calibrate(
    target: AscendSearching,
    calibrated: CalibrationResult,
    evaluation: Feed,
    *,
    folder: Path,
    max_loss: float,
    strategy: str = GAIN,
    threads: int,
    say: Callable[[str], None] = lambda sentence: None,
) -> AutoCalibration:
    """Search, and write the files.

    `evaluation`: samples to evaluate on, with `labels` or without. `max_loss`: largest loss, see
    `deploy.tuning.budget.loss_of`. `strategy`: `GAIN`, or `BINARY`, which is AMCT's own rule.
    `threads`: samples or trials that run in parallel. `say`: called with sentences on the progress.
    """
    feed, subject = calibrated.feed, calibrated.subject
    with stage_files(folder) as stage:
        request = BuildRequest(
            subject=subject,
            folder=stage.temporary_folder,
            ranges=calibrated.ranges,
            feed=feed,
            manifest=feed.manifest(),
            evaluation_set=make_evaluation_set(feed, subject.model, _REPAIRING),
            threads=threads,
        )
        plan, _, layers, _ = target.quantize(request)
        records = target.records(request)

        def nearest() -> dict[str, str]:
            samples = list(feed.spread_samples(_NEAREST))
            return find_best_searches(plan.model, plan.graph, records, samples, threads=threads)

        ranking: list[tuple[str, float]] = []
        if strategy == BINARY:
            with phase("ranking the layers"):
                first = evaluation.first_samples(_RANKED)
                ranking = rank_layers(plan.model, layers, first, threads=threads)
        search = BudgetSearch(
            target=target,
            request=request,
            evaluation=evaluation,
            max_loss=max_loss,
            layers=tuple(plan.layers),
            uncounted=[
                name for name, layer in plan.layers.items() if layer.input_index is not None
            ],
            searches=records,
            everywhere=[how for how in records if not is_balanced(how)],
            nearest=nearest,
            say=say,
            ranking=ranking,
        )
        made = _written(target, search, search.run(), plan)
        publish_build(build_origin(calibrated, [target], None), stage, replacing=())
    return replace(made, written=tuple(map(stage.published_path, made.written)))


def _written(
    target: AscendSearching, search: BudgetSearch, found: BuildRequest | None, plan: RecordPlan
) -> AutoCalibration:
    """Write ranking, history and config; models and record if a layer stays in int8."""
    config = apply_searches(plan.config, {})
    if found is not None:
        made, calibrated, layers, config = target.quantize(found)
    texts = {
        RANKING: json.dumps([list(entry) for entry in search.ranking], indent=4),
        HISTORY: json.dumps(search.history, indent=4),
        FINAL: write_config(config),
    }
    written = [atomic.write_text(search.request.folder / n, text) for n, text in texts.items()]
    if found is None:
        return AutoCalibration(config=config, in_int8=None, notes=(), written=tuple(written))
    if search.repairs:
        data = strip_metadata(found.with_plugin_nodes(made.model)).SerializeToString(
            deterministic=True
        )
        written.append(atomic.write_bytes(found.folder / f"{found.name}{REPAIRED}", data))
    records = calibrated.records
    models = write_models(
        Recipe(model=made.model, graph=made.graph, records=records, layers=layers, config=config),
        found,
        halves=find_float16_tensors(found.subject),
        shared=find_weight_sharers(plan.graph.layers.values(), plan.graph),
    )
    return AutoCalibration(
        config=config,
        in_int8=sum(not one.is_node_input for one in records.values()),
        notes=tuple(_notes(search, found, plan)),
        written=(*written, *models.values()),
    )


def _notes(search: BudgetSearch, found: BuildRequest, plan: RecordPlan) -> Iterator[str]:
    """Yield sentences on what was done to the layers in int8 beside searching their ranges."""
    searches, in_float = found.choices.searches, found.choices.float_nodes
    if count := sum(is_balanced(how) for name, how in searches.items() if name not in in_float):
        yield (
            f"DMQ balances {count} layers, with a multiplication more in front of each, by the"
            f" largest values of {count_dmq_samples(plan) * plan.images_per_sample} images."
        )
    yield from (f"{one.sentence}." for one in search.repairs)
    if search.repairs:
        yield (
            f"{found.name}{REPAIRED} is the float model with these repairs, and goes with the"
            " configuration and the record."
        )
