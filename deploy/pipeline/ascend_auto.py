"""`calib8 ascend auto`: AMCT's accuracy-based calibration by the search of `deploy.tuning.budget`.

::

    model, images --> statistics of all searches --> layers in float, searches, repairs --> files

The ranking, the history and the final configuration are written under AMCT's names and in its
layout (hicann/amct, common/auto_calibration).
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.observation import CalibrationSubject, Key, Observation
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.errors import counted
from deploy.feed.samples import Feed
from deploy.files import atomic, manifest
from deploy.files.staging import stage_files
from deploy.pipeline.results import build_origin, publish_build
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.config import write_config
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.float16 import find_float16_tensors
from deploy.targets.ascend.layer_searches import (
    DEFAULT_SEARCH,
    SEARCHES,
    apply_searches,
    count_dmq_samples,
    find_best_searches,
    make_search_plan,
    rank_layers,
    uses_dmq,
)
from deploy.targets.ascend.models import write_models
from deploy.targets.ascend.preparation import find_weight_sharers
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.record import Records
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import BuildRequest
from deploy.terminal import phase
from deploy.tuning.budget import BudgetSearch, format_loss

RANKING = "accuracy_based_auto_calibration_ranking_information.json"
HISTORY = "accuracy_based_auto_calibration_record.json"
FINAL = "accuracy_based_auto_calibration_final_config.json"

GAIN, BINARY = "gain", "binary-search"  # strategies
_REPAIR_SAMPLES = 64  # calibration samples that repairs are computed and evaluated on
_SEARCH_SAMPLES = 8  # calibration samples that the search of each layer is chosen on
_RANKING_SAMPLES = 8  # evaluation samples that layers are ranked on


@dataclass(frozen=True, kw_only=True)
class AscendAutoTarget(Ascend):
    """The Ascend target with several searches for each layer.

    Attributes:
        has_all_searches: whether there are others than the default, if no configuration decides.
    """

    has_all_searches: bool = True

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations of all searches."""
        record_plan = self.record_plan(subject)
        observations: dict[Key, Observation] = {}
        for search in self._searches:
            for observation in make_search_plan(record_plan, search).observations:
                observations[observation.key] = observation
        return tuple(observations.values())

    def find_records(self, request: BuildRequest) -> dict[str, Records]:
        """Return search -> layer -> its record: scale, offset and factors that the search finds.

        The default search is the first. A search that balances inputs and weights (AMCT's DMQ) has
        only the layers of which it scales a channel.
        """
        records_by_search = {}
        for search in self._searches:
            _plan, calibration_record = self.search_all_layers(request, search)
            records = calibration_record.records
            if uses_dmq(search):  # it multiplies each channel by a factor
                records = {
                    layer: record
                    for layer, record in records.items()
                    if (record.dmq_factors != 1).any()
                }
            records_by_search[search] = records
        return records_by_search

    @property
    def _searches(self) -> tuple[str, ...]:
        """Names of the searches that layers may have."""
        return SEARCHES if self.has_all_searches and not self.configured else (DEFAULT_SEARCH,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCalibration:
    """The configuration that was chosen, and the files.

    Attributes:
        config: the final configuration.
        int8_layers: number of layers in int8, tensors not counted; None if no model was written.
        notes: sentences on what was done to these layers beside searching their ranges.
        paths: paths of all files.
        failure: why no model was written, and what to do; "" if one was.
    """

    config: QuantConfig
    int8_layers: int | None
    notes: tuple[str, ...]
    paths: tuple[Path, ...]
    failure: str = ""


def refuse_foreign_files(target: Ascend, folder: Path, name: str) -> None:
    """Refuse a folder with files that `auto_calibrate` would replace (`refuse_foreign`)."""
    model_files = [f"{name}{ending}" for ending in target.writes]
    names = [RANKING, HISTORY, FINAL, manifest.MANIFEST_NAME, *model_files]
    manifest.refuse_foreign(folder, names, force=None)


def auto_calibrate(
    target: AscendAutoTarget,
    calibration: CalibrationResult,
    evaluation: Feed,
    *,
    folder: Path,
    max_loss: float,
    strategy: str,
    threads: int,
    say: Callable[[str], None],
) -> AutoCalibration:
    """Choose the layers in int8 and the search of each layer's range, and write the files.

    A search is an algorithm that finds a layer's range, such as IFMR. As few layers as possible
    stay in float: so many that the loss of accuracy is at most `max_loss`.

    Args:
        target: the target.
        calibration: statistics of all its searches.
        evaluation: samples to evaluate on, with `labels` or without.
        folder: output folder.
        max_loss: largest loss, see `deploy.tuning.budget.loss_of`.
        strategy: order in which layers are put into float: `GAIN`, or AMCT's own rule `BINARY`.
        threads: samples or trials that run in parallel.
        say: called with sentences on the progress.
    """
    feed = calibration.feed
    subject = calibration.subject
    with stage_files(folder) as stage:
        # repairs of the float model, such as adaptive rounding, are computed on these samples
        repair_samples = make_evaluation_set(feed, subject.model, _REPAIR_SAMPLES)
        request = BuildRequest(
            subject=subject,
            folder=stage.temporary_folder,
            ranges=calibration.ranges,
            feed=feed,
            manifest=feed.manifest(),
            evaluation_set=repair_samples,
            threads=threads,
        )
        # the layers that can be in int8: those that are quantized with their default searches. The
        # plan has an entry for each, and for layers that do not fit the hardware
        record_plan, _, quantized_layers, _ = target.quantize(request)
        # search -> layer -> what the search finds for it, a record: scale and offset
        records_by_search = target.find_records(request)

        # (layer, similarity of its int8 and float outputs); only AMCT's strategy needs it
        ranking: list[tuple[str, float]] = []
        if strategy == BINARY:
            with phase("ranking the layers"):
                samples = evaluation.first_samples(_RANKING_SAMPLES)
                ranking = rank_layers(record_plan.model, quantized_layers, samples, threads=threads)
        # an entry of the plan with an `input_index` is no layer, but one input of a node such as an
        # Add. It can be left in float like a layer, but is not counted as one
        node_inputs = [
            name for name, entry in record_plan.layers.items() if entry.input_index is not None
        ]
        # searches that every layer can have. DMQ is none: it balances the channels of a layer's
        # input, and costs a multiplication more in front of the layer
        general_searches = [name for name in records_by_search if not uses_dmq(name)]

        def find_nearest_searches() -> dict[str, str]:
            """Return layer -> the search with the outputs nearest to float, on a few samples."""
            samples = list(feed.spread_samples(_SEARCH_SAMPLES))
            return find_best_searches(
                record_plan.model, record_plan.graph, records_by_search, samples, threads=threads
            )

        budget_search = BudgetSearch(
            target=target,
            request=request,
            evaluation=evaluation,
            max_loss=max_loss,
            layers=tuple(name for name in record_plan.layers if name in quantized_layers),
            node_inputs=node_inputs,
            layers_by_search=records_by_search,
            general_searches=general_searches,
            find_nearest=find_nearest_searches,
            say=say,
            ranking=ranking,
        )
        final_request = budget_search.run()
        result = _write_files(target, budget_search, final_request, record_plan)
        publish_build(build_origin(calibration, [target], None), stage, replaceable=())
    return replace(result, paths=tuple(map(stage.published_path, result.paths)))


def _write_files(
    target: AscendAutoTarget,
    budget_search: BudgetSearch,
    final_request: BuildRequest | None,
    record_plan: RecordPlan,
) -> AutoCalibration:
    """Write ranking, history and config; models and record if a layer stays in int8.

    The record is AMCT's text file of scales and offsets.

    Args:
        target: the target.
        budget_search: the search, with its ranking, history and rounded weights.
        final_request: what the search chose to build; None if no layer stays in int8.
        record_plan: layers and configuration before the search.
    """
    folder = budget_search.request.folder
    ranking_text = json.dumps(budget_search.ranking, indent=4)
    paths = [
        atomic.write_text(folder / RANKING, ranking_text),
        atomic.write_text(folder / HISTORY, json.dumps(budget_search.history, indent=4)),
    ]
    if final_request is None:
        config = apply_searches(record_plan.config, {})  # without a search, all are float
        paths.append(atomic.write_text(folder / FINAL, write_config(config)))
        return AutoCalibration(
            config=config,
            int8_layers=None,
            notes=(),
            paths=tuple(paths),
            failure=_describe_failure(budget_search, only_default=not target.has_all_searches),
        )

    final_plan, calibration_record, quantized_layers, config = target.quantize(final_request)
    paths.append(atomic.write_text(folder / FINAL, write_config(config)))
    recipe = Recipe(
        model=final_plan.model,
        graph=final_plan.graph,
        records=calibration_record.records,
        layers=quantized_layers,
        config=config,
    )
    model_paths = write_models(
        recipe,
        final_request,
        float16_tensors=find_float16_tensors(final_request.subject),
        weight_sharers=find_weight_sharers(record_plan.graph.layers.values(), record_plan.graph),
    )
    # a record is of a layer, or of one input of a node such as an Add, which is not counted
    layer_count = sum(not record.is_node_input for record in calibration_record.records.values())
    return AutoCalibration(
        config=config,
        int8_layers=layer_count,
        notes=tuple(_change_notes(budget_search, final_request, record_plan)),
        paths=(*paths, *model_paths.values()),
    )


def _describe_failure(budget_search: BudgetSearch, *, only_default: bool) -> str:
    """Return why no model was written, and what to do; the name of the float model follows.

    `only_default`: whether the strategy, `BINARY`, tries no other search than the default.
    """
    max_loss = budget_search.max_loss
    # an entry is of one split; its "metric_eval" is [whether the limit is held, loss]
    losses = [entry["metric_eval"][1] for entry in budget_search.history]
    least_loss = min(filter(math.isfinite, losses), default=math.inf)
    loss_text = "none that does"
    if math.isfinite(least_loss):
        loss_text = f"{format_loss(least_loss, max_loss)} at best"
    advice = "train it with int8 (calib8 qat), or deploy the float model"
    if least_loss <= 1:  # the largest limit that the command takes
        advice = f"give --max-loss {_round_up(least_loss)} or more, {advice}"
    if only_default:
        advice = f"try --strategy {GAIN}, {advice}"
    unit = budget_search.loss_unit
    return (
        f"a split must lose at most {max_loss:g} of {unit}, got {loss_text}, so no model was"
        f" written; {advice}"
    )


def _round_up(loss: float) -> str:
    """Return a loss above 0 and at most 1 as text, rounded up to two digits."""
    step = 10.0 ** (math.floor(math.log10(loss)) - 1)
    return f"{math.ceil(loss / step) * step:.2g}"


def _change_notes(
    budget_search: BudgetSearch, final_request: BuildRequest, record_plan: RecordPlan
) -> Iterator[str]:
    """Yield sentences on changes of the int8 layers other than their ranges.

    DMQ scales the channels of a layer's input and, the other way, those of its weight, so that both
    fit int8 better. Adaptive rounding changes the float model's weights.

    Args:
        budget_search: the search, with its note on rounded weights.
        final_request: what the search chose to build, with the search of each layer's range.
        record_plan: layers and configuration before the search; it knows how many images DMQ uses.
    """
    choices = final_request.choices
    dmq_layers = [
        layer
        for layer, range_search in choices.searches.items()
        if layer not in choices.float_nodes and uses_dmq(range_search)
    ]
    if dmq_layers:
        image_count = count_dmq_samples(record_plan) * record_plan.images_per_sample
        yield (
            f"DMQ balances {counted(len(dmq_layers), 'layer')}, with a multiplication more in front"
            f" of each, by the largest values of {counted(image_count, 'image')}."
        )
    if budget_search.repair_note:  # "" if no weights were rounded
        yield f"{budget_search.repair_note}."
        yield (
            f"{final_request.name}_modified_model.onnx is the float model with these weights, and"
            " goes with the configuration and the record."
        )
