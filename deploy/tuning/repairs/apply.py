"""Tries the repairs one after another, each on the result of those before, and keeps what helps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deploy.calibration.observation import CalibrationSubject, unique_observations
from deploy.calibration.one_pass import observe
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import Calib8Error, ConfigError
from deploy.feed.parallel import Sample
from deploy.feed.samples import Feed
from deploy.metrics.accuracy import Accuracy
from deploy.targets.base import BuildRequest, Target
from deploy.targets.onnxruntime.target import OnnxRuntime
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
_MIN_FLOAT_DB = 60.0  # SQNR that a repaired float model must have against the original
_MIN_GAIN_DB = 0.1  # of the worst slice, for a repair that is kept
_MIN_MODEL_GAIN_DB = 0.5  # the same of a model repair, since its ranges are those of few samples
_FALLBACK_TARGET = OnnxRuntime()  # target of the trials where no target can run one


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

    `names`: keys of `REPAIRS`; model repairs are skipped. `samples`: a few samples with the float
    model's outputs; half compute the repairs, half evaluate them.

    Returns:
        The repaired request and the result of each repair.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    names = [name for name in names if REPAIRS[name].model_repair is None]
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
    original = {target.name: _measure_trial(comparison, target, request)}
    repaired = {target.name: _measure_trial(comparison, target, candidate)}
    (result,) = _compare(name, original, repaired, _MIN_GAIN_DB)
    return candidate if result.kept else request, result


def _measure_trial(comparison: SampleComparison, target: Target, request: BuildRequest) -> Accuracy:
    return comparison.accuracy(target.trial(request), int8_kernels=target.runs_here)


def _compare(
    name: str,
    original: Mapping[str, Accuracy],
    repaired: Mapping[str, Accuracy],
    min_gain_db: float,
) -> list[RepairResult]:
    """Return the result of a repair by target; it is kept if some target gains and none loses.

    `original`, `repaired`: target -> accuracy; a target may be missing after.
    """
    shared = [target for target in original if target in repaired]
    has_helped = len(shared) == len(original)
    has_helped = has_helped and not any(
        harms(original[target], repaired[target]) for target in shared
    )
    has_helped = has_helped and any(
        gains(original[target], repaired[target], min_gain_db) for target in shared
    )
    outcome = "kept" if has_helped else "not kept"
    results = []
    for target in shared:
        change = (
            f"{worst_sqnr_db(original[target]):.1f} -> {worst_sqnr_db(repaired[target]):.1f} dB"
        )
        sentence = f"{REPAIRS[name].title}: worst part {change}, {outcome}"
        results.append(RepairResult(name=name, target=target, kept=has_helped, sentence=sentence))
    return results


def refuse_model_repairs(names: Sequence[str]) -> None:
    """Refuse model repairs for a model whose ranges come from a trusted cache."""
    changing = [name for name in names if REPAIRS[name].model_repair is not None]
    if changing:
        raise ConfigError(
            f"a trusted cache holds the ranges of the model as it is, got repair"
            f" {', '.join(changing)}, which changes them; leave one of them out"
        )


@phase("repairs")
def repair_model(
    targets: Sequence[Target],
    subject: CalibrationSubject,
    names: Sequence[str],
    feed: Feed,
    *,
    folder: Path,
    threads: int,
) -> tuple[CalibrationSubject, list[RepairResult]]:
    """Try the named model repairs, which change the model before calibration.

    A repaired model is calibrated for each target on a few samples and its int8 model compared with
    the float outputs. It is kept if some target gains and none loses.

    `targets`: the targets; those that cannot be built for are ignored. `names`: keys of `REPAIRS`;
    other repairs are skipped.

    Returns:
        The repaired subject and the result of each repair.

    Raises:
        ConfigError: a target observes the model as its file has it.
        FeedError: as the samples of the feed.
    """
    model_repairs = {name: REPAIRS[name].model_repair for name in names}
    repairs = {name: repair for name, repair in model_repairs.items() if repair is not None}
    if not repairs:
        return subject, []
    buildable = [target for target in targets if _can_build(target, subject)]
    for target in buildable:
        target.demand(replace(subject, repairs=tuple(repairs)))  # raises if repairs are refused

    samples = feed.first_samples(max(2, _SAMPLES // 2 * len(feed) // max(feed.count, 1)))
    comparison = SampleComparison(subject, samples, threads=threads)
    builds = _TrialBuilds(
        targets=buildable or [_FALLBACK_TARGET],
        samples=samples,
        comparison=comparison,
        feed=feed,
        folder=folder,
        threads=threads,
    )
    accuracies, results = builds.measure(subject), []
    for name, repair in repairs.items():
        model = repair(subject.model, samples, threads)
        if model is None or not _is_same_model(comparison, model):
            results.append(_no_change(name))
            continue
        loaded = replace(subject.loaded, model=model)
        candidate = replace(subject, loaded=loaded, repairs=(*subject.repairs, name))
        repaired_accuracies = builds.measure(candidate)
        comparisons = _compare(name, accuracies, repaired_accuracies, _MIN_MODEL_GAIN_DB)
        results += comparisons
        if any(result.kept for result in comparisons):
            subject, accuracies = candidate, repaired_accuracies
    if subject.repairs:
        subject = with_new_digest(subject)
    return subject, results


def _can_build(target: Target, subject: CalibrationSubject) -> bool:
    """Whether a target can be built for; the reason why not is reported when it is built."""
    try:
        target.demand(subject)
    except Calib8Error:
        return False
    return True


def _is_same_model(comparison: SampleComparison, model: onnx.ModelProto) -> bool:
    """Whether a repaired float model computes what the original does."""
    return worst_sqnr_db(comparison.accuracy(model, int8_kernels=True)) >= _MIN_FLOAT_DB


def repair_notes(results: Iterable[RepairResult]) -> list[str]:
    """Return notes on the repairs; they name the target where there are several."""
    results = list(results)
    targets = {result.target for result in results if result.target}
    notes = []
    for result in results:
        is_named = len(targets) > 1 and result.target
        notes.append(f"{result.target}: {result.sentence}" if is_named else result.sentence)
    if any(result.kept and REPAIRS[result.name].model_repair is not None for result in results):
        notes.append("the calibration cache belongs to the repaired float model")
    return notes


@dataclass(slots=True, kw_only=True)
class _TrialBuilds:
    """Trial builds of candidate models on a few samples, for several targets."""

    targets: Sequence[Target]
    samples: Sequence[Sample]
    comparison: SampleComparison
    feed: Feed
    folder: Path
    threads: int

    def measure(self, subject: CalibrationSubject) -> dict[str, Accuracy]:
        """Return {target: accuracy of its int8 model}, without targets that fail on few samples.

        Where all fail, ONNX Runtime replaces them.

        Raises:
            Calib8Error: ONNX Runtime fails too.
        """
        accuracies, errors = {}, []
        for target in self.targets:
            try:
                request = self._request(target, subject)
                accuracies[target.name] = _measure_trial(self.comparison, target, request)
            except Calib8Error as error:
                errors.append(error)
        if accuracies:
            return accuracies
        if self.targets == [_FALLBACK_TARGET]:
            raise errors[0]
        self.targets = [_FALLBACK_TARGET]
        return self.measure(subject)

    def _request(self, target: Target, subject: CalibrationSubject) -> BuildRequest:
        """Return a build request with ranges of the few samples."""
        subject = replace(subject, samples=len(self.samples))
        demand = unique_observations({target.name: target.demand(subject)})
        observed = observe(demand, self.samples, threads=self.threads)
        return BuildRequest(
            subject=subject,
            folder=self.folder,
            ranges=Ranges(observed, subject.method, subject.range_limits),
            feed=self.feed,
            manifest={},
            threads=self.threads,
        )


def _no_change(name: str, target: str = "", reason: str = "nothing to repair") -> RepairResult:
    sentence = f"{REPAIRS[name].title}: {reason}"
    return RepairResult(name=name, target=target, kept=False, sentence=sentence)
