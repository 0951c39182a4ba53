"""Tries the repairs one after another, each on the result of those before, and keeps what helps."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from deploy.tensors import Array
from deploy.terminal import phase
from deploy.tuning.repairs import REPAIRS, ROUNDING
from deploy.tuning.repairs.base import LayerwiseRepair, RepairInput, RepairResult, with_new_digest
from deploy.tuning.repairs.output_rounding import rounded_trial_builder
from deploy.tuning.repairs.repair_layers import find_weighted_layers
from deploy.tuning.repairs.sample_runs import SampleComparison, harms, helps, worst_sqnr_db

# a sample and the float model's outputs on it
EvaluationSample = tuple[Sample, Mapping[str, "Array"]]

_SAMPLES = 16  # half of them compute the after-repairs, half evaluate them
_ENOUGH = 4  # samples; fewer are not split into halves
_VALUES = 5_000_000  # input values to compute a repair from; a large sample gives many patches
_SAME_DB = 60.0  # SQNR that a repaired float model must have against the original
_CLEARLY_DB = 0.5  # gain that a before-repair needs, since its ranges are those of few samples
FALLBACK_TARGET = OnnxRuntime()  # target of the trials where no target can run one


def repair_samples(judges: EvaluationSet | None) -> list[EvaluationSample]:
    """Return a few evaluation samples, spread over all, with the float model's outputs."""
    if judges is None:
        return []
    evaluation = judges.subset
    return list(
        judges.samples_with_outputs(max(2, _SAMPLES * len(evaluation) // max(evaluation.count, 1)))
    )


def trial_builder(
    target: Target, request: BuildRequest, names: Sequence[str]
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of a target's trial models, with rounded weights if that repair is chosen.

    `request`: build request; its choices are replaced in each trial. `names`: repairs, keys of
    `REPAIRS`.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if ROUNDING not in names:
        return target.trial
    samples = [sample for sample, _ in repair_samples(request.evaluation_set)]
    with _making(target, request, samples) as making:
        return rounded_trial_builder(request, making)


@contextmanager
def _making(
    target: Target, request: BuildRequest, samples: Sequence[Sample]
) -> Iterator[RepairInput]:
    """Split the samples: every other one computes the repairs, some of the rest evaluate them."""
    layers, enough = len(find_weighted_layers(request.model)), len(samples) >= _ENOUGH
    used = samples
    if enough:  # those that give enough patches for their size
        values = sum(value.size for value in samples[0].values())
        used = samples[0::2][: max(2, _VALUES // max(values, 1))]
    with phase("weights", layers, "layers", about=True) as step:
        yield RepairInput(
            target=target,
            reference=request.model,
            samples=used,
            held_out=samples[1::2][: -(-len(used) // 2)] if enough else (),
            threads=request.threads,
            progress=step,
        )


def repair_request(
    target: Target, request: BuildRequest, names: Sequence[str], heard: Sequence[EvaluationSample]
) -> tuple[BuildRequest, list[RepairResult]]:
    """Try the named after-repairs for one target.

    `names`: keys of `REPAIRS`; before-repairs are skipped. `heard`: a few samples with the float
    model's outputs; half compute the repairs, half evaluate them.

    Returns:
        The repaired request and the result of each repair.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    after = [name for name in names if REPAIRS[name].model_repair is None]
    if not after:
        return request, []
    with _making(target, request, [sample for sample, _ in heard]) as making:
        return _try_all(request, making, after, heard)


def _try_all(
    request: BuildRequest,
    making: RepairInput,
    names: Sequence[str],
    heard: Sequence[EvaluationSample],
) -> tuple[BuildRequest, list[RepairResult]]:
    target, builds, tried = making.target, _AfterTrials(request, making, heard), []
    for name in names:
        try:
            if name == ROUNDING and request.choices.rounded is False:
                one = _no_change(name, target.name, "not kept, the plan has none")
            elif (repair := REPAIRS[name].layer_repair) is not None:
                request, one = _by_layers(request, making, name, repair)
            else:
                request, one = builds.run(request, name)
        except Calib8Error as error:
            one = _no_change(name, target.name, f"not kept, {error}")
        tried.append(one)
    return _with_digest(request, making.reference), tried


def _by_layers(
    request: BuildRequest, making: RepairInput, name: str, repair: LayerwiseRepair
) -> tuple[BuildRequest, RepairResult]:
    """Apply a repair that decides layer by layer by itself."""
    target, result = making.target.name, repair(request, making)
    if result is None:
        return request, _no_change(name, target)
    sentence = f"{REPAIRS[name].title}: {result[1]}, kept"
    return result[0], RepairResult(name=name, target=target, kept=True, sentence=sentence)


class _AfterTrials:
    """Tries after-repairs for one target by the outputs on samples that computed no repair."""

    def __init__(
        self, request: BuildRequest, making: RepairInput, heard: Sequence[EvaluationSample]
    ) -> None:
        samples, outputs = zip(*(heard[1::2] if len(heard) >= _ENOUGH else heard), strict=True)
        self._judge = SampleComparison(
            request.subject, samples, threads=request.threads, reference_outputs=outputs
        )
        self._making = making
        self._last: tuple[BuildRequest, Accuracy] | None = None

    def run(self, request: BuildRequest, name: str) -> tuple[BuildRequest, RepairResult]:
        """Return the best candidate if it helps, else the request itself."""
        repair, target = REPAIRS[name].request_repair, self._making.target
        assert repair is not None
        now = self._accuracy(request)
        forms = [(form, self._accuracy(form)) for form in repair(request, self._making)]
        if not forms:
            return request, _no_change(name, target.name)
        form, after = max(forms, key=lambda one: worst_sqnr_db(one[1]))
        kept = helps(now, after)
        self._last = (form, after) if kept else (request, now)
        return self._last[0], _result(name, target.name, now, after, kept=kept)

    def _accuracy(self, request: BuildRequest) -> Accuracy:
        if self._last is not None and self._last[0] is request:
            return self._last[1]
        target = self._making.target
        return self._judge.accuracy(target.trial(request), int8_kernels=".onnx" in target.engines)


def _with_digest(request: BuildRequest, reference: onnx.ModelProto) -> BuildRequest:
    """Update the digest of the request's model if its constants were changed."""
    if request.model is reference:
        return request
    subject = replace(request.subject, loaded=with_new_digest(request.subject.loaded))
    return replace(request, subject=subject)


def refuse_model_repairs(names: Sequence[str]) -> None:
    """Refuse before-repairs for a model whose ranges come from a trusted cache."""
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
    """Try the named before-repairs, which change the model before calibration.

    Each candidate is calibrated for each target on a few samples and its int8 model compared with
    the float outputs. The best candidate of a repair is kept if some target gains and none loses.

    `targets`: the targets; those that cannot be built for are ignored. `names`: keys of `REPAIRS`;
    after-repairs are skipped.

    Returns:
        The repaired subject and the result of each repair.

    Raises:
        ConfigError: a target observes the model as its file has it.
        FeedError: as the samples of the feed.
    """
    before = {name: one for name in names if (one := REPAIRS[name]).model_repair is not None}
    if not before:
        return subject, []
    marked = replace(subject, repairs=tuple(before))
    able = [target for target in targets if _can_build(target, subject)]
    for target in able:
        target.demand(marked)  # raises if the target cannot use a repaired model
    builds = _TrialBuilds(able or [FALLBACK_TARGET], subject, feed, folder, threads)
    now, tried = builds.accuracies(subject), []
    for name, repair in before.items():
        assert repair.model_repair is not None
        candidates = [
            (form, builds.accuracies(form))
            for model in repair.model_repair(subject.model, builds.samples, threads)
            if worst_sqnr_db(builds.judge.accuracy(model, int8_kernels=True)) >= _SAME_DB
            for form in [
                replace(
                    subject,
                    loaded=replace(subject.loaded, model=model),
                    repairs=(*subject.repairs, name),
                )
            ]
        ]
        if not candidates:
            tried.append(_no_change(name))
            continue
        candidate, after = max(candidates, key=lambda one: _gain(now, one[1]))
        # some target gains and none loses
        kept = set(now) <= set(after) and not any(harms(now[t], after[t]) for t in now)
        kept = kept and any(helps(now[t], after[t], min_gain_db=_CLEARLY_DB) for t in now)
        tried += [_result(name, t, now[t], after[t], kept=kept) for t in now if t in after]
        if kept:
            subject, now = candidate, after
    if subject.repairs:
        subject = replace(subject, loaded=with_new_digest(subject.loaded))
    return subject, tried


def _can_build(target: Target, subject: CalibrationSubject) -> bool:
    """Whether a target can be built for; the reason why not is reported when it is built."""
    try:
        target.demand(subject)
    except Calib8Error:
        return False
    return True


def repair_notes(tried: Iterable[RepairResult]) -> list[str]:
    """Return notes on the repairs; they name the target where there are several."""
    results = list(tried)
    several = len({one.target for one in results if one.target}) > 1
    notes = [f"{t.target}: {t.sentence}" if several and t.target else t.sentence for t in results]
    if any(t.kept and REPAIRS[t.name].model_repair is not None for t in results):
        notes.append("the calibration cache belongs to the repaired float model")
    return notes


class _TrialBuilds:
    """Trial builds of candidate models on a few samples, for several targets."""

    def __init__(
        self,
        targets: Sequence[Target],
        subject: CalibrationSubject,
        feed: Feed,
        folder: Path,
        threads: int,
    ) -> None:
        self.samples = feed.first_samples(max(2, _SAMPLES // 2 * len(feed) // max(feed.count, 1)))
        self._targets = list(targets)
        self._feed, self._folder, self._threads = feed, folder, threads
        self.judge = SampleComparison(subject, self.samples, threads=threads)

    def accuracies(self, subject: CalibrationSubject) -> dict[str, Accuracy]:
        """Return {target: accuracy of its int8 model}, without targets that fail on few samples.

        Where all fail, ONNX Runtime replaces them.

        Raises:
            Calib8Error: ONNX Runtime fails too.
        """
        accuracies, errors = {}, []
        few_samples = replace(subject, samples=len(self.samples))
        for target in self._targets:
            try:
                model = target.trial(self._request(target, few_samples))
                accuracies[target.name] = self.judge.accuracy(
                    model, int8_kernels=".onnx" in target.engines
                )
            except Calib8Error as error:
                errors.append(error)
        if accuracies:
            return accuracies
        if self._targets == [FALLBACK_TARGET]:
            raise errors[0]
        self._targets = [FALLBACK_TARGET]
        return self.accuracies(subject)

    def _request(self, target: Target, subject: CalibrationSubject) -> BuildRequest:
        observed = observe(
            unique_observations({target.name: target.demand(subject)}),
            self.samples,
            threads=self._threads,
        )
        return BuildRequest(
            subject=subject,
            folder=self._folder,
            ranges=Ranges(observed, subject.method, subject.range_limits),
            feed=self._feed,
            manifest={},
            threads=self._threads,
        )


def _gain(now: Mapping[str, Accuracy], after: Mapping[str, Accuracy]) -> float:
    """Return the gain of the worst output slice in dB, averaged over the targets."""
    gains = [worst_sqnr_db(after[t]) - worst_sqnr_db(now[t]) for t in now if t in after]
    return -math.inf if any(math.isnan(gain) for gain in gains) else sum(gains) / len(gains)


def _result(name: str, target: str, now: Accuracy, after: Accuracy, *, kept: bool) -> RepairResult:
    old, new = worst_sqnr_db(now), worst_sqnr_db(after)
    word = "kept" if kept else "not kept"
    sentence = f"{REPAIRS[name].title}: worst part {old:.1f} -> {new:.1f} dB, {word}"
    return RepairResult(name=name, target=target, kept=kept, sentence=sentence)


def _no_change(name: str, target: str = "", why: str = "nothing to repair") -> RepairResult:
    return RepairResult(
        name=name, target=target, kept=False, sentence=f"{REPAIRS[name].title}: {why}"
    )
