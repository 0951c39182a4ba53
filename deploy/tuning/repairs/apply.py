"""Tries the repairs one after another, each on the result of those before, and keeps what helps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import Calib8Error
from deploy.feed.parallel import Sample
from deploy.targets.base import BuildRequest, Target
from deploy.tasks.rows import Outputs
from deploy.terminal import phase
from deploy.tuning.repairs import REPAIRS, ROUNDING
from deploy.tuning.repairs.base import RepairInput, RepairResult, with_new_digest
from deploy.tuning.repairs.output_rounding import rounded_trial_builder
from deploy.tuning.repairs.repair_layers import find_weighted_layers
from deploy.tuning.repairs.sample_runs import SampleComparison, gains, harms, worst_sqnr_db

# a sample and the float model's outputs on it
EvaluationSample = tuple[Sample, Outputs]

_SAMPLES = 16  # half of them compute the repairs, half evaluate them
_MIN_SPLIT = 4  # samples; fewer are not split into halves
_MAX_VALUES = 5_000_000  # input values to compute a repair from; a large sample gives many patches
_MIN_GAIN_DB = 0.1  # of the worst slice, for a repair that is kept


def repair_samples(evaluation_set: EvaluationSet | None) -> list[EvaluationSample]:
    """Return a few evaluation samples, spread over all, with the float model's outputs."""
    if evaluation_set is None:
        return []
    subset = evaluation_set.subset
    count = max(2, _SAMPLES * len(subset) // max(subset.count, 1))
    return list(evaluation_set.samples_with_outputs(count))


def trial_builder(
    target: Target,
    request: BuildRequest,
    names: Sequence[str],
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
    samples = [sample for sample, _ in repair_samples(request.evaluation_set)]
    with _repair_phase(target, request, samples) as repair_input:
        return rounded_trial_builder(request, repair_input)


@contextmanager
def _repair_phase(
    target: Target, request: BuildRequest, samples: Sequence[Sample]
) -> Iterator[RepairInput]:
    """Split the samples: every other one computes the repairs, some of the rest evaluate them."""
    computing, held_out = samples, samples[:0]
    if len(samples) >= _MIN_SPLIT:
        values = sum(value.size for value in samples[0].values())
        computing = samples[0::2][: max(2, _MAX_VALUES // max(values, 1))]
        held_out = samples[1::2][: -(-len(computing) // 2)]
    layers = len(find_weighted_layers(request.model))
    with phase("weights", layers, "layers", about=True) as step:
        yield RepairInput(
            target=target,
            reference=request.model,
            samples=computing,
            held_out=held_out,
            threads=request.threads,
            progress=step,
        )


def repair_request(
    target: Target, request: BuildRequest, names: Sequence[str], samples: Sequence[EvaluationSample]
) -> tuple[BuildRequest, list[RepairResult]]:
    """Try the named repairs that follow calibration, for one target.

    `names`: keys of `REPAIRS`. `samples`: a few samples with the float
    model's outputs; half compute the repairs, half evaluate them.

    Returns:
        The repaired request and the result of each repair.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if not names:
        return request, []
    original, results = request.model, []
    with _repair_phase(target, request, [sample for sample, _ in samples]) as repair_input:
        for name in names:
            try:
                request, result = _try_repair(request, repair_input, name, samples)
            except Calib8Error as error:
                result = _no_change(name, target.name, f"not kept, {error}")
            results.append(result)
    if request.model is not original:
        request = replace(request, subject=with_new_digest(request.subject))
    return request, results


def _try_repair(
    request: BuildRequest,
    repair_input: RepairInput,
    name: str,
    samples: Sequence[EvaluationSample],
) -> tuple[BuildRequest, RepairResult]:
    repair, target = REPAIRS[name], repair_input.target.name
    if name == ROUNDING and request.choices.rounded is False:
        return request, _no_change(name, target, "not kept, the plan has none")
    if repair.layer_repair is not None:
        repaired = repair.layer_repair(request, repair_input)
        if repaired is None:
            return request, _no_change(name, target)
        request, text = repaired
        sentence = f"{repair.title}: {text}, kept"
        return request, RepairResult(name=name, target=target, kept=True, sentence=sentence)
    assert repair.request_repair is not None
    candidate = repair.request_repair(request, repair_input)
    if candidate is None:
        return request, _no_change(name, target)
    return _choose(request, candidate, repair_input.target, name, samples)


def _choose(
    request: BuildRequest,
    candidate: BuildRequest,
    target: Target,
    name: str,
    samples: Sequence[EvaluationSample],
) -> tuple[BuildRequest, RepairResult]:
    """Return a repaired request if it helps on the samples that computed no repair."""
    if len(samples) >= _MIN_SPLIT:
        samples = samples[1::2]
    inputs, outputs = zip(*samples, strict=True)
    comparison = SampleComparison(
        request.subject, inputs, threads=request.threads, reference_outputs=outputs
    )
    original, repaired = (
        comparison.accuracy(target.trial(tried_request), int8_kernels=target.runs_here)
        for tried_request in (request, candidate)
    )
    has_helped = gains(original, repaired, _MIN_GAIN_DB) and not harms(original, repaired)
    outcome = "kept" if has_helped else "not kept"
    change = f"{worst_sqnr_db(original):.1f} -> {worst_sqnr_db(repaired):.1f} dB"
    sentence = f"{REPAIRS[name].title}: worst part {change}, {outcome}"
    result = RepairResult(name=name, target=target.name, kept=has_helped, sentence=sentence)
    return candidate if has_helped else request, result


def repair_notes(results: Iterable[RepairResult]) -> list[str]:
    """Return notes on the repairs of a target."""
    return [result.sentence for result in results]


def _no_change(name: str, target: str, reason: str = "nothing to repair") -> RepairResult:
    sentence = f"{REPAIRS[name].title}: {reason}"
    return RepairResult(name=name, target=target, kept=False, sentence=sentence)
