"""Tries the repairs one after another, each on the result of those before, and keeps what helps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import Calib8Error
from deploy.targets.base import BuildRequest, Target
from deploy.terminal import phase
from deploy.tuning.repairs import REPAIRS, ROUNDING
from deploy.tuning.repairs.base import EvaluationSample, RepairInput, with_new_digest
from deploy.tuning.repairs.output_rounding import rounded_trial_builder
from deploy.tuning.repairs.repair_layers import find_weighted_layers

_SAMPLES = 16  # half of them compute the repairs, half evaluate them
_MIN_SPLIT = 4  # samples; fewer are not split into halves
_MAX_VALUES = 5_000_000  # input values to compute a repair from; a large sample gives many patches


@dataclass(frozen=True, slots=True)
class RepairResult:
    """Result of one repair on one target.

    Attributes:
        kept: whether it helped.
        sentence: text for the report.
    """

    kept: bool
    sentence: str


def repair_samples(evaluation_set: EvaluationSet | None) -> list[EvaluationSample]:
    """Return a few evaluation samples, spread over all, with the float model's outputs."""
    if evaluation_set is None:
        return []
    subset = evaluation_set.subset
    count = max(2, _SAMPLES * len(subset) // max(subset.count, 1))
    return list(evaluation_set.samples_with_outputs(count))


def trial_builder(
    target: Target, request: BuildRequest, names: Sequence[str]
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of a target's trial models, with rounded weights if that repair is chosen.

    Args:
        target: the target.
        request: its build request; its choices are replaced in each trial.
        names: repairs, keys of `REPAIRS`.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if ROUNDING not in names:
        return target.trial
    samples = repair_samples(request.evaluation_set)
    with _repair_phase(target, request, samples) as repair_input:
        return rounded_trial_builder(request, repair_input)


def evaluated_model(target: Target, request: BuildRequest, names: Sequence[str]) -> onnx.ModelProto:
    """Return the model that a build of a request evaluates in place of its engine.

    `names`: repairs of the trials; `trial_builder` has computed what they need.
    """
    if ROUNDING in names:
        request, _ = repair_request(target, request, (ROUNDING,), ())
    return target.evaluated(request)


def repair_request(
    target: Target, request: BuildRequest, names: Sequence[str], samples: Sequence[EvaluationSample]
) -> tuple[BuildRequest, list[RepairResult]]:
    """Try the named repairs that follow calibration, for one target.

    Args:
        target: the target.
        request: its build request.
        names: keys of `REPAIRS`.
        samples: a few samples; half compute the repairs, half evaluate them.

    Returns:
        The repaired request and the result of each repair.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if not names:
        return request, []
    original_model = request.model
    results = []
    with _repair_phase(target, request, samples) as repair_input:
        for name in names:
            repaired_request, text = _try_repair(request, repair_input, name)
            is_kept = repaired_request is not request
            results.append(RepairResult(is_kept, f"{REPAIRS[name].title}: {text}"))
            request = repaired_request
    if request.model is not original_model:
        request = replace(request, subject=with_new_digest(request.subject))
    return request, results


def _try_repair(
    request: BuildRequest, repair_input: RepairInput, name: str
) -> tuple[BuildRequest, str]:
    """Return (the request with the repair if it helps, else as it is; a text for the report)."""
    if name == ROUNDING and request.choices.rounded is False:
        return request, "not kept, the plan has none"
    try:
        outcome = REPAIRS[name].apply(request, repair_input)
    except Calib8Error as error:
        return request, f"not kept, {error}"
    if outcome is None:
        return request, "nothing to repair"
    repaired_request, text = outcome
    return repaired_request, f"{text}, {'not kept' if repaired_request is request else 'kept'}"


@contextmanager
def _repair_phase(
    target: Target, request: BuildRequest, samples: Sequence[EvaluationSample]
) -> Iterator[RepairInput]:
    """Yield the input of repairs: every other sample, up to a limit, computes them.

    The samples between these evaluate them. Some of those that evaluate also accept or reject the
    change of a single layer (`held_out`). If samples are few, all of them compute and evaluate, and
    none is held out. While the context is open, the progress of the layers is shown.
    """
    inputs = [sample for sample, _ in samples]
    computing_inputs = inputs
    held_out_inputs = inputs[:0]
    evaluation = samples
    if len(samples) >= _MIN_SPLIT:
        value_count = sum(value.size for value in inputs[0].values())  # of one sample
        computing_count = max(2, _MAX_VALUES // max(value_count, 1))
        computing_inputs = inputs[0::2][:computing_count]
        evaluation = samples[1::2]
        # half as many as compute
        held_out_inputs = inputs[1::2][: (len(computing_inputs) + 1) // 2]
    layer_count = len(find_weighted_layers(request.model))
    with phase("weights", layer_count, "layers", about=True) as show_progress:
        yield RepairInput(
            target=target,
            reference=request.model,
            samples=computing_inputs,
            held_out=held_out_inputs,
            evaluation=evaluation,
            threads=request.threads,
            progress=show_progress,
        )
