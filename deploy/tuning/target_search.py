"""The search of one target: its samples, trial models, prices and methods put together.

::

    target, request, options -> units -> a few samples with the float model's outputs
          -> prober (runs trials) + prices (times or products) + methods -> search
          -> front (timed where it can be, judged) -> plan, with a reason for every node in float
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx

from deploy.calibration.reference_outputs import EvaluationSet
from deploy.graph.plan import quantized_precision
from deploy.machine import cpu_name
from deploy.method import Choices, Method, comparable_methods
from deploy.metrics.output_form import OutputForm, derive_form
from deploy.runtimes.ort import continue_runs
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array
from deploy.terminal import Step
from deploy.tuning.front import SplitChooser, SplitSizes
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.prices import (
    CPUS,
    count_prices,
    find_add_units,
    group_units,
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
from deploy.tuning.repairs.apply import evaluated_model, trial_builder
from deploy.tuning.search import Search, SharedFindings
from deploy.tuning.search_options import EFFORTS, TRIAL_SAMPLES, Effort, SearchBudget, Trial, Tuning
from deploy.tuning.search_samples import (
    ExpectedVerdict,
    VerdictPredictor,
    max_sample_count,
    same_shape_samples,
    select_samples,
    with_held_out_ranges,
)
from deploy.tuning.timing import SplitTimer, has_device

TrialBuilder = Callable[[BuildRequest], onnx.ModelProto]

_MIN_SAMPLES = 2  # of a trial
_SAMPLE_SHARE = 5  # at most a fifth of the samples, so that the search stays cheap
# products of a model that is timed on a CPU, about 250 us: a smaller one takes mostly the runtime's
# own overhead
_MIN_TIMED_PRICE = 5e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetup:
    """Input of one search.

    Attributes:
        target: the target.
        request: its build request, with evaluation samples.
        options: of the search, with an effort of at least 1.
        has_fixed_method: whether the user chose the range method, which then stays.
        rounds_weights: whether the build tries adaptive rounding.
    """

    target: Target
    request: BuildRequest
    options: Tuning
    has_fixed_method: bool = False
    rounds_weights: bool = False

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
    samples. If no layer can be int8 the plan is empty; after Ctrl-C the plan is that of the best
    trial so far. Findings are added to `setup.shared_findings`, for the searches of other targets;
    `setup.evaluation_set` stores the outputs of the chosen trial. `step`: called after each trial.

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
    inputs = [sample for sample, _ in samples]
    timed_samples = same_shape_samples(inputs)
    cpu_kernels = CPUS.get(setup.options.cpu_kind) if setup.target.runs_here else None
    prices = count_prices(model, units, timed_samples[0], cpu_kernels)
    budget = SearchBudget.for_feed(
        setup.effort.calibrations, len(setup.request.feed), prices.float_total
    )
    build_trial = trial_builder(setup.target, setup.request, rounds_weights=setup.rounds_weights)
    # on samples that gave its ranges, a trial's clipping would seem to cost nothing
    trial_request = with_held_out_ranges(
        setup.target,
        setup.request,
        inputs,
        budget.spend,
        # to observe again takes long, so only until the build's searches know whether to clip
        observes_again=setup.shared_findings.is_clipping is None,
    )
    # only the trials have these ranges: engines are judged and timed with those of all samples
    trial_setup = replace(setup, request=trial_request)
    prober = make_prober(trial_setup, build_trial, samples, form, step, budget)
    # layers are measured on the samples of the build's first search, which selects them itself: to
    # it this is None
    prober.isolated_indices = setup.shared_findings.isolated_indices
    sizes = SplitSizes(model, units)
    search = Search(
        prices=prices,
        prober=prober,
        methods=_methods(setup),
        precision=quantized_precision(decisions),
        effort=setup.effort,
        weight=setup.options.weight,
        size_of=sizes.of if setup.options.prefer == "size" else None,
        rounded=setup.rounds_weights or None,  # None decides nothing; False would forbid it
        shared=setup.shared_findings,
        add_units=find_add_units(model, units),
    )
    chooser = _split_chooser(setup, search, build_trial, sizes, form, timed_samples, budget)

    built_trial, is_interrupted = _run_and_choose(search, chooser)
    verdict = built_trial.verdict
    if verdict is not None and verdict.outputs is not None:
        setup.evaluation_set.engine_outputs[setup.target.name] = verdict.outputs
    plan = _make_plan(setup, search, chooser, built_trial)
    return replace(plan, interrupted=is_interrupted), prober.trial_count


def _make_plan(
    setup: SearchSetup, search: Search, chooser: SplitChooser, built_trial: Trial
) -> TargetPlan:
    """Return the plan that builds a trial, with the reason for each node in float."""
    float_nodes = float_reasons(search, built_trial)
    is_timed_here = setup.target.runs_here and built_trial.measured_time is not None
    return TargetPlan(
        choices=replace(built_trial.choices, float_nodes=float_nodes),
        precision=search.precision,
        settled=_describe(search, built_trial),
        front=chooser.front(built_trial),
        timed_on=cpu_name() if is_timed_here else "",
        failed=_describe_failures(search.prober),
    )


def _run_and_choose(search: Search, chooser: SplitChooser) -> tuple[Trial, bool]:
    """Run a search; return the trial to build, and whether Ctrl-C ended the search early."""
    try:
        search.run()
        return chooser.choose(), False
    except KeyboardInterrupt:
        if not search.trial_by_key:
            raise
        continue_runs()
        return search.best, True


def _search_samples(setup: SearchSetup) -> tuple[Sequence[ReferenceSample], OutputForm]:
    """Return the samples of every trial, which the targets share, with outputs and their form."""
    request = setup.request
    evaluation_set = setup.evaluation_set
    count = min(
        TRIAL_SAMPLES,
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
    build_trial: TrialBuilder,
    samples: Sequence[ReferenceSample],
    form: OutputForm,
    step: Step,
    budget: SearchBudget,
    *,
    measures_accuracy: bool = False,
) -> Prober:
    """Return the prober of a search, which runs trial models and measures their noise.

    Args:
        setup: of the search.
        build_trial: builds the trial model of a request.
        samples: inputs with the float model's outputs.
        form: slices and task of these outputs.
        step: called after each trial.
        budget: of the search; what runs here is spent from it.
        measures_accuracy: whether to measure the accuracy of trials too.

    Raises:
        BackendError: ONNX Runtime refused the float model with the compared tensors as outputs.
    """
    request = setup.request
    model = request.model
    # class numbers hardly change with noise, so what ArgMax, TopK or NMS picks from is compared
    sources = find_pick_sources(model)
    if sources:
        budget.spend(len(samples))
        # a metric or task of the user's reads the class numbers themselves
        samples = replace_by_sources(
            model,
            sources.values(),
            samples,
            keep_outputs=form.metric.is_set,
            threads=request.threads,
        )
        inputs, source_outputs = zip(*samples, strict=True)
        form = derive_form(source_outputs, inputs=inputs, metric=form.metric)
        build_trial = partial(_build_with_sources, build_trial, sources)

    # an effort says how many of `TRIAL_SAMPLES` samples isolated trials have; of more or fewer
    # samples they have the same share
    isolated_count = len(samples) * setup.effort.isolated_samples // TRIAL_SAMPLES
    return Prober(
        build_trial,
        request,
        samples,
        form,
        runs_here=setup.target.runs_here,
        isolated_sample_count=max(min(_MIN_SAMPLES, len(samples)), isolated_count),
        measures_accuracy=measures_accuracy,
        progress=step,
        count_samples=budget.spend,
    )


def _build_with_sources(
    build_trial: TrialBuilder, sources: Mapping[tuple[str, int], str], request: BuildRequest
) -> onnx.ModelProto:
    """Return the trial model of a request, which also outputs the tensors of `sources`."""
    return add_source_outputs(build_trial(request), sources)


def _methods(setup: SearchSetup) -> list[Method | None]:
    """Return the range methods to choose among, the calibration's first.

    The others are all comparable ones in the first search of a build, and in the searches of
    further targets those that the first one found best. There are no others if the user chose the
    method. None stands for ranges that no method of calib8 sets: those of a trusted cache, or those
    of a target that finds its own, which may have alternatives.
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
    build_trial: TrialBuilder,
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
        build_trial: builds the trial model of a request.
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
        form=form,
        count_samples=budget.spend,
        # the first search makes an empty list, and the searches of other targets get the same one
        few_box_keys=setup.request.ranges.compute_once("few boxes", list),
    )
    target = setup.target
    # most samples that one more trial takes: to run it, and to predict its verdict
    judged_samples = TRIAL_SAMPLES + len(setup.evaluation_set.subset)

    def judge(trial: Trial) -> ExpectedVerdict:
        request = setup.request.with_added_choices(trial.choices)
        # a target without a model of its own for evaluation has one method under both names
        if target.evaluated == target.trial:
            model = build_trial(request)
        else:
            model = evaluated_model(target, request, rounds_weights=setup.rounds_weights)
        return predictor.predict(model, worst_loss=trial.noise.worst)

    return SplitChooser(
        search=search,
        sizes=sizes,
        judge=judge,
        can_judge=partial(budget.holds, judged_samples),
        measure=_choose_timer(setup, search, samples),
    )


def _choose_timer(
    setup: SearchSetup, search: Search, samples: Sequence[Mapping[str, Array]]
) -> Callable[[Sequence[Trial]], Sequence[float]] | None:
    """Return the function that times trials on the samples; None if they are not to be timed.

    On this CPU only a large model is timed; on a connected device, a model of any size.
    """
    target = setup.target
    is_worth_timing = not target.runs_here or search.prices.float_total >= _MIN_TIMED_PRICE
    if not (setup.options.is_timed and is_worth_timing and has_device(target)):
        return None
    all_nodes = search.units.node_names(search.units.members)
    float_choices = Choices(float_nodes=dict.fromkeys(all_nodes, "timed in float"))
    return SplitTimer(target, setup.request, float_choices, samples).measure


def _describe_failures(prober: Prober) -> str:
    """Return how many trials could not run, and why the first could not; "" where all ran."""
    if not prober.errors:
        return ""
    failed_trials = f"{len(prober.errors)} of {prober.trial_count} trials"
    return f"{failed_trials} could not be run; the first: {prober.errors[0]}"


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
