"""The search of one target: its samples, trial models, prices and methods put together.

::

    target, request, options -> units -> a few samples with the float model's outputs
          -> prober (runs trials) + prices (times or products) + methods -> search
          -> front (timed where it can be, judged) -> plan, with a reason for every node in float
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import BackendError
from deploy.graph.plan import quantized_precision
from deploy.machine import this_machine
from deploy.method import Choices, Method, comparable_methods
from deploy.metrics.output_form import OutputForm
from deploy.runtimes.ort import continue_runs
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array
from deploy.terminal import Step, phase
from deploy.tuning.front import SplitChooser, SplitSizes
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.prices import (
    CPUS,
    Prices,
    Units,
    count_prices,
    find_add_units,
    group_units,
    measure_prices,
)
from deploy.tuning.probe import (
    DETECTION_LIST,
    Prober,
    ReferenceSample,
    add_source_outputs,
    find_pick_sources,
    replace_by_sources,
)
from deploy.tuning.reasons import float_reasons
from deploy.tuning.repairs import ROUNDING
from deploy.tuning.repairs.apply import evaluated_model
from deploy.tuning.search import Search, SharedFindings
from deploy.tuning.search_options import EFFORTS, Effort, SearchBudget, Trial, Tuning
from deploy.tuning.search_samples import (
    CANDIDATES,
    ExpectedVerdict,
    GrowingComparison,
    VerdictPredictor,
    halved_requests,
    max_sample_count,
    same_shape_samples,
    select_samples,
    with_held_out_ranges,
)
from deploy.tuning.timing import DeviceTimer, has_device, time_models

_MIN_SAMPLES = 2  # of a trial
_MIN_COMPARED = 16  # samples that two methods are compared on, however large
_SAMPLE_SHARE = 5  # at most a fifth of the samples, so that the search stays cheap
_MIN_FLOAT_US = 250.0  # a float model that is faster takes mostly the runtime's own overhead
_MAX_SHARE = 0.98  # of the float model's time: what saves less may be measurement noise
_MIN_CREDIBLE_RATIO = 0.8  # of measured to predicted time: less comes of a disturbed float run


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """Input of one search.

    Attributes:
        target: the target.
        request: its build request, with evaluation samples.
        options: of the search, with an effort of at least 1.
        has_fixed_method: whether the range method must stay: the user chose it or trusts a cache.
        build_trial: builds the trial model of a request.
        rounded: whether trials have rounded weights; None without that repair.
        is_held_out: whether ranges of trials come from other samples than their own, which are
            samples of the calibration.
        observes_again: whether to run all other samples for those ranges, if need be.
    """

    target: Target
    request: BuildRequest
    options: Tuning
    has_fixed_method: bool
    build_trial: Callable[[BuildRequest], onnx.ModelProto]
    rounded: bool | None
    is_held_out: bool = True
    observes_again: bool = True

    @property
    def effort(self) -> Effort:
        """How much the search tries."""
        return EFFORTS[self.options.level]

    @property
    def evaluation_set(self) -> EvaluationSet:
        """The evaluation samples, which every search has."""
        assert self.request.evaluation_set is not None
        return self.request.evaluation_set

    @property
    def shared_findings(self) -> SharedFindings:
        """What the searches of the build's targets have found out so far."""
        findings: SharedFindings = self.request.ranges.compute_once("findings", SharedFindings)
        return findings


def run_search(setup: SearchSetup, step: Step) -> tuple[TargetPlan, int]:
    """Search which layers stay float; return the plan and the number of trial models that ran.

    The search tries models with different layers in float and different range methods on a few
    samples. Without a layer that can be int8 the plan is empty. After Ctrl-C it is that of the best
    trial so far. What was found is stored for the searches of other targets, and the outputs of the
    chosen trial for the evaluation. `step`: called after each trial.

    Raises:
        Calib8Error: what the target raises on planning the model.
        BackendError: no trial with all units in int8 could run.
        ConfigError: the user's metric fails on the best trial.
    """
    model = setup.request.model
    # without a search the target decides by its rules alone which nodes are int8
    decisions = setup.target.plan(model, tuple(setup.request.float_nodes)).decisions
    units = group_units(model, decisions)
    if not units.layers:
        return TargetPlan(), 0

    samples, form = _search_samples(setup)
    budget = SearchBudget.for_feed(
        setup.effort.calibrations,
        len(setup.request.feed),
        partial(_count_products, model, units, samples[0][0]),
    )
    timed_samples = same_shape_samples([sample for sample, _ in samples])
    prober = make_prober(setup, samples, form, step, budget)
    sizes = SplitSizes(model, units)
    search = Search(
        prices=_unit_prices(setup, units, timed_samples),
        prober=prober,
        methods=_methods(setup),
        precision=quantized_precision(decisions),
        effort=setup.effort,
        weight=setup.options.weight,
        size_of=sizes.of if setup.options.prefer == "size" else None,
        rounded=setup.rounded,
        unseen_gain_db=partial(_unseen_gain_db, setup, budget.spend),
        shared=setup.shared_findings,
        add_units=find_add_units(model, units),
    )
    chooser = _split_chooser(setup, search, sizes, form, timed_samples, budget)

    built_trial, is_interrupted = _run_and_choose(search, chooser)
    search.share_findings()
    verdict = chooser.find_verdict(built_trial)
    if verdict is not None and verdict.outputs is not None:
        setup.evaluation_set.engine_outputs[setup.target.name] = verdict.outputs
    plan = _make_plan(search, chooser, built_trial)
    return replace(plan, interrupted=is_interrupted), prober.trial_count


def _make_plan(search: Search, chooser: SplitChooser, built_trial: Trial) -> TargetPlan:
    """Return the plan that builds a trial, with the reason for each node in float."""
    float_nodes = float_reasons(search, built_trial)
    return TargetPlan(
        choices=replace(built_trial.choices, float_nodes=float_nodes),
        precision=search.precision,
        settled=_describe(search, built_trial),
        front=chooser.front(built_trial),
        timed_on=cpu_name() if search.prices.measured else "",
        failed=_describe_failures(search.prober),
    )


def _run_and_choose(search: Search, chooser: SplitChooser) -> tuple[Trial, bool]:
    """Run a search; return the trial to build, and whether Ctrl-C ended the search early."""
    try:
        search.run()
        metric_error = search.prober.metric_error
        # a metric that fails on noisy trials alone counts as a loss of all there
        if metric_error is not None and search.best.noise.accuracy is None:
            raise metric_error
        return chooser.choose(), False
    except KeyboardInterrupt:
        if not search.trial_by_key:
            raise
        continue_runs()
        return search.best, True


def _count_products(model: onnx.ModelProto, units: Units, sample: Mapping[str, Array]) -> float:
    """Return the products of the float model in a sample."""
    return count_prices(model, units, sample).float_total


def _search_samples(setup: SearchSetup) -> tuple[Sequence[ReferenceSample], OutputForm]:
    """Return the samples of every trial, which the targets share, with outputs and their form."""
    request = setup.request
    evaluation_set = setup.evaluation_set
    count = min(
        setup.effort.samples,
        len(request.feed) // _SAMPLE_SHARE,
        max_sample_count(evaluation_set),
    )
    count = max(_MIN_SAMPLES, count)
    return request.ranges.compute_once(
        (select_samples, count),
        lambda: select_samples(evaluation_set, count, setup.options.metric),
    )


def make_prober(
    setup: SearchSetup,
    samples: Sequence[ReferenceSample],
    form: OutputForm | None,
    step: Step,
    budget: SearchBudget,
) -> Prober:
    """Return the prober of a search, which runs trial models and measures their noise.

    Args:
        setup: of the search.
        samples: inputs with the float model's outputs.
        form: slices and task of these outputs; None derives them from the samples.
        step: called after each trial.
        budget: of the search; what runs here is spent from it.

    Raises:
        BackendError: ONNX Runtime refused the float model with the compared tensors as outputs.
    """
    request = setup.request
    effort = setup.effort
    model = setup.request.model
    build_trial = setup.build_trial
    # class numbers hardly change with noise, so what ArgMax, TopK or NMS picks from is compared
    sources = find_pick_sources(model)
    if sources:
        budget.spend(len(samples))
        metric = setup.options.metric
        # a metric or task of the user's reads the class numbers themselves
        keep_outputs = metric is not None and metric.is_set
        samples = replace_by_sources(
            model, samples, keep_outputs=keep_outputs, threads=request.threads
        )
        form = None  # `form` is that of the class numbers
        build_trial = partial(_trial_with_sources, build_trial, sources)
    if setup.is_held_out:
        # on samples that gave its ranges, a trial's clipping would seem to cost nothing. The ranges
        # of the others may need another pass, until a search has decided whether to clip
        observes_again = setup.observes_again and setup.shared_findings.is_clipping is None
        inputs = [sample for sample, _ in samples]
        request = with_held_out_ranges(
            setup.target, request, inputs, budget.spend, observes_again=observes_again
        )
    # the effort runs isolated layers on some of its samples; of fewer samples, on the same share
    isolated_count = len(samples) * effort.isolated_samples // effort.samples
    return Prober(
        build_trial,
        request,
        samples,
        form=form,
        runs_here=setup.target.runs_here,
        threads=setup.request.threads,
        isolated_sample_count=max(min(_MIN_SAMPLES, len(samples)), isolated_count),
        by_task=setup.options.max_loss is not None,
        metric=setup.options.metric,
        progress=step,
        count_samples=budget.spend,
    )


def _trial_with_sources(
    build_trial: Callable[[BuildRequest], onnx.ModelProto],
    sources: Mapping[tuple[str, int], str],
    request: BuildRequest,
) -> onnx.ModelProto:
    """Return the trial model of a request, with the tensors that its outputs are picked from."""
    return add_source_outputs(build_trial(request), sources)


@phase("timing kernels")
def _unit_prices(
    setup: SearchSetup, units: Units, samples: Sequence[Mapping[str, Array]]
) -> Prices:
    """Return the price of every unit: its time where int8 is clearly faster here, else products."""
    request = setup.request
    target = setup.target
    options = setup.options
    if target.runs_here and options.is_timed:
        with suppress(BackendError):  # the search itself finds layers that cannot run
            prices = _measured_prices(setup, units, samples)
            if prices is not None:
                return prices
    cpu = CPUS.get(options.cpu_kind) if target.runs_here else None
    return count_prices(request.model, units, samples[0], cpu)


def _measured_prices(
    setup: SearchSetup, units: Units, samples: Sequence[Mapping[str, Array]]
) -> Prices | None:
    """Return times of the units; None if int8 is not clearly faster here.

    A choice by such times would be chance, and the machine that builds may not be the one that
    runs.
    """
    float_model = _model_with_float(setup, units, units.members)
    int8_model = _model_with_float(setup, units, ())
    prices = measure_prices(setup.request.model, float_model, int8_model, units, samples)
    fastest_split = prices.cheapest_float_units()
    is_large = prices.float_total >= _MIN_FLOAT_US
    return prices if is_large and prices.time_share(fastest_split) <= _MAX_SHARE else None


def _model_with_float(setup: SearchSetup, units: Units, in_float: Iterable[str]) -> onnx.ModelProto:
    """Return the model with these units in float, as it would be deployed."""
    return setup.target.trial(setup.request.with_added_choices(_float_choices(units, in_float)))


def _float_choices(units: Units, in_float: Iterable[str]) -> Choices:
    return Choices(float_nodes=dict.fromkeys(units.node_names(in_float), "timed in float"))


def _methods(setup: SearchSetup) -> list[Method | None]:
    """Return the range methods to choose among: those that another target's search found best.

    The first search compares all. None stands for ranges that no method can change: the target's
    own, or those of a trusted cache.
    """
    if setup.request.ranges.trusted is not None:
        return [None]
    if setup.target.own_method:
        return [None, *map(Method.of, setup.target.alternatives)]
    method = setup.request.ranges.method
    if setup.has_fixed_method:
        return [method]
    rivals = setup.shared_findings.best_methods or comparable_methods(method)
    return list(dict.fromkeys((method, *rivals)))


def _split_chooser(
    setup: SearchSetup,
    search: Search,
    sizes: SplitSizes,
    form: OutputForm,
    samples: Sequence[Mapping[str, Array]],
    budget: SearchBudget,
) -> SplitChooser:
    """Return the chooser of the trial to build, among those of a search.

    It predicts verdicts on the evaluation samples, and measures times where the target runs here or
    on a connected device.

    Args:
        setup: of the search.
        search: its trials are chosen from.
        sizes: of the splits.
        form: slices and task of the outputs.
        samples: to time models with, all of one shape.
        budget: judging a trial must fit in what is left of it.
    """
    predictor = VerdictPredictor(
        setup.evaluation_set,
        int8_kernels=setup.target.runs_here,
        threads=setup.request.threads,
        max_loss=setup.options.max_loss,
        metric=setup.options.metric,
        form=form,
        count_samples=budget.spend,
    )
    target = setup.target
    units = search.units
    measure: Callable[[Sequence[Trial]], list[Trial]] | None = None
    if search.prices.measured:
        measure = partial(_measure_times, setup, search, samples)
    elif not target.runs_here and setup.options.is_timed and has_device(target):
        float_choices = _float_choices(units, units.members)
        measure = DeviceTimer(target, setup.request, float_choices, samples).measure
    # most samples that one more trial takes: to run it, and to predict its verdict
    judged_samples = setup.effort.samples + len(setup.evaluation_set.subset)

    def judge(trial: Trial) -> ExpectedVerdict:
        request = setup.request.with_added_choices(trial.choices)
        if target.evaluated == target.trial:  # the same method
            model = setup.build_trial(request)
        else:
            model = evaluated_model(target, request, [ROUNDING] if setup.rounded else [])
        return predictor.predict(model, noise=trial.noise.worst)

    return SplitChooser(
        search=search,
        sizes=sizes,
        judge=judge,
        can_judge=partial(budget.holds, judged_samples),
        measure=measure,
    )


def _measure_times(
    setup: SearchSetup,
    search: Search,
    samples: Sequence[Mapping[str, Array]],
    trials: Sequence[Trial],
) -> list[Trial]:
    """Return the trials with measured times, as a share of the time with all units in float.

    A unit is a group of nodes that are int8 or float together, such as a Conv with its Relu. All
    models are timed in turns, as they would be deployed. If other processes disturbed every run
    of the float model, int8 seems faster than it is. So a share is never far below that which the
    times of the single kernels predict.
    """
    request = setup.request
    target = setup.target
    units = search.units
    models = [target.trial(request.with_added_choices(trial.choices)) for trial in trials]
    float_model = _model_with_float(setup, units, units.members)
    *times_ms, float_ms = time_models([*models, float_model], samples, threads=request.threads)
    timed_trials = []
    for trial, trial_ms in zip(trials, times_ms, strict=True):
        # the times of many small kernels add up to more than the model's: `measured_share` corrects
        predicted_share = search.prices.measured_share * search.prices.time_share(trial.in_float)
        share = max(trial_ms / float_ms, _MIN_CREDIBLE_RATIO * predicted_share)
        timed_trials.append(replace(trial, time=share))
    return timed_trials


def _unseen_gain_db(
    setup: SearchSetup, count_samples: Callable[[int], None], trial: Trial, rival: Trial
) -> float | None:
    """Return how many dB more a trial's worst slice has than its rival's, on unseen samples.

    Either half of the samples runs with the ranges of the other half, so that no sample runs with
    ranges that it gave. None if no ranges can be made from half of the samples.
    """
    halves = halved_requests(setup.target, setup.request, count_samples)
    if not halves:
        return None
    metric = setup.options.metric
    # half as many as a search selects from, fewer if they are large
    max_samples = max(_MIN_COMPARED, min(CANDIDATES // 2, max_sample_count(setup.evaluation_set)))
    worst_sqnr_db = []
    for candidate in (trial, rival):
        # one model for either half; it runs on the samples that did not give its ranges
        models = [setup.build_trial(half.with_added_choices(candidate.choices)) for half in halves]
        comparison = GrowingComparison(
            models,
            setup.evaluation_set,
            None if metric is None else metric.without_function,
            int8_kernels=setup.target.runs_here,
        )
        worst = comparison.compare(max_samples, threads=setup.request.threads).worst
        count_samples(len(comparison.keys))
        # None: no output is compared by value, so nothing is lost
        worst_sqnr_db.append(math.inf if worst is None else worst.sqnr_db)
    return worst_sqnr_db[0] - worst_sqnr_db[1]


def _describe_failures(prober: Prober) -> str:
    """Return how many trials could not run, and why the first could not; "" where all ran."""
    if not prober.errors:
        return ""
    failed_trials = f"{len(prober.errors)} of {prober.trial_count} trials"
    return f"{failed_trials} could not be run; the first: {prober.errors[0]}"


def cpu_name() -> str:
    """Return the name of this machine's CPU with its int8 instructions."""
    machine = this_machine()
    return ", ".join((machine.cpu, *machine.int8))


def _describe(search: Search, trial: Trial) -> str:
    """Return a trial's description with its figure."""
    text = search.describe(trial)
    noise = trial.noise
    accuracy = noise.accuracy
    if accuracy is not None and accuracy.task and noise.worst_slice_label == DETECTION_LIST:
        return f"{text}: {accuracy.task.text}"
    if not noise.powers_by_slice:
        return text
    slice_text = f" in {noise.worst_slice_label}" if len(noise.powers_by_slice) > 1 else ""
    return f"{text}: {noise.db:.1f} dB{slice_text}"
