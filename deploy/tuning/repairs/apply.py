"""Rounds the weights of a request, or of the trials of a search, where that helps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import Calib8Error
from deploy.feed.parallel import Sample
from deploy.frontends.base import model_digest
from deploy.targets.base import BuildRequest, Target
from deploy.terminal import phase
from deploy.tuning.repairs import TITLE
from deploy.tuning.repairs.base import RepairInput, with_repaired_model
from deploy.tuning.repairs.output_rounding import round_weights, rounded_trial_builder
from deploy.tuning.repairs.repair_layers import find_weighted_layers
from deploy.tuning.search_samples import enough_samples

_SAMPLES = 16  # half of them compute the repair, a quarter accepts it
_MIN_SPLIT = 4  # samples; fewer are not split into halves


def repair_samples(evaluation_set: EvaluationSet | None) -> list[Sample]:
    """Return a few evaluation samples, spread over all."""
    if evaluation_set is None:
        return []
    subset = evaluation_set.subset
    count = max(2, _SAMPLES * len(subset) // max(subset.count, 1))
    return [sample for _, sample in subset.spread_with_keys(count)]


def trial_builder(
    target: Target, request: BuildRequest, *, rounds_weights: bool
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of a target's trial models; the rounding is computed here, for all trials.

    Args:
        target: the target.
        request: its build request; a trial gives the builder one with other choices.
        rounds_weights: whether the models get rounded weights.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if not rounds_weights:
        return target.trial
    samples = repair_samples(request.evaluation_set)
    with _repair_phase(target, request, samples) as repair_input:
        return rounded_trial_builder(request, repair_input)


def evaluated_model(
    target: Target, request: BuildRequest, *, rounds_weights: bool
) -> onnx.ModelProto:
    """Return the model that a build of a request evaluates in place of its engine.

    `rounds_weights`: whether it gets rounded weights; `trial_builder` has computed what they need.
    """
    if rounds_weights:
        request, _ = repair_request(target, request, ())
    return target.evaluated(request)


def repair_request(
    target: Target, request: BuildRequest, samples: Sequence[Sample]
) -> tuple[BuildRequest, str]:
    """Return (the request with rounded weights if they help, else as it is; a text for the report).

    Args:
        target: the target.
        request: its build request.
        samples: a few samples, to round the weights by.
    """
    if request.choices.rounded is False:
        return request, f"{TITLE}: not kept, the plan has none"
    try:
        with _repair_phase(target, request, samples) as repair_input:
            outcome = round_weights(request, repair_input)
    except Calib8Error as error:
        return request, f"{TITLE}: not kept, {error}"
    if outcome is None:
        return request, f"{TITLE}: nothing to repair"
    model, text = outcome
    loaded = replace(request.subject.loaded, model=model, digest=model_digest(model))
    return with_repaired_model(request, loaded), f"{TITLE}: {text}, kept"


@contextmanager
def _repair_phase(
    target: Target, request: BuildRequest, samples: Sequence[Sample]
) -> Iterator[RepairInput]:
    """Yield the input of the repair; show the progress of the layers while the context is open.

    The repair is computed from every other sample, up to a limit by their size (`enough_samples`).
    Some of the samples between these accept or reject the change of a layer (`held_out`). If
    samples are few, it is computed from all of them, and none is held out.
    """
    computing_samples = samples
    held_out_samples = samples[:0]
    if len(samples) >= _MIN_SPLIT:
        computing_count = max(2, enough_samples(samples[0]))
        computing_samples = samples[0::2][:computing_count]
        # half as many as compute
        held_out_samples = samples[1::2][: (len(computing_samples) + 1) // 2]
    layer_count = len(find_weighted_layers(request.model))
    with phase("weights", layer_count, "layers") as show_progress:
        yield RepairInput(
            target=target,
            samples=computing_samples,
            held_out=held_out_samples,
            progress=show_progress,
        )
