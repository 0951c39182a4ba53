"""The samples of a search: which few it runs, ranges made without them, and the expected verdict.

Selection. Most photos of a detector hold nothing, and a search over those would reduce noise on
nothing. So half of the samples are those with the greatest signal in the output slices
(`deploy.tuning.slice_signals`), and the other half is spread over the feed.

Expected verdict. A trial model is compared as its engine will be. Most are good on the first few
evaluation samples, and no others run then. All run only if doubling the loss (verdict "good") or
halving it (verdict "unusable") would change the verdict. Once all have run and hold few boxes,
later trial models run on those that hold boxes, and on as many as the first few at least.

Ranges. What a range clips is rare in the images that calibrate, and a search that measures on these
images finds that clipping costs nothing. So where the images are few, the ranges of the trials are
made without the samples of the search::

    calibration images  o o x o o o x o ...      x: measure the noise of every trial
                        o o   o o o   o          source of the trial's ranges

The build itself uses all of them. Among many images a few make no difference. A histogram that does
not depend on the order of samples is subtracted: only the few samples run again. Any other
statistic is observed again on the other samples.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx

from calibrators.statistics import HistogramOf
from deploy.calibration.observation import Observation, ObservedStatistics
from deploy.calibration.one_pass import observe
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import (
    MOST_BYTES,
    EngineOutputs,
    EvaluationSet,
    open_single_thread,
)
from deploy.errors import BackendError, Calib8Error
from deploy.feed.file_list import SampleChangedError, sample_digest
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.sample_reader import SampleCache
from deploy.feed.sampling import sampling_order
from deploy.feed.states import OwnStates
from deploy.frontends.base import model_digest
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import (
    DOUBTFUL,
    FLOAT_MODEL,
    GOOD,
    LEVELS,
    MIN_OBJECTS,
    UNUSABLE,
    TaskLoss,
    judge_accuracy,
    measure_loss,
)
from deploy.metrics.output_form import OutputForm, derive_from_first
from deploy.targets.base import BuildRequest, Target
from deploy.tasks import Metric, TaskFigure
from deploy.tasks.rows import Floats, Outputs
from deploy.tensors import Array
from deploy.terminal import phase
from deploy.tuning.slice_signals import rank_by_signal, slice_signals

CANDIDATE_COUNT = 48  # evaluation samples to select from
LARGE_FEED = 128  # samples from which on a few make no difference
_STRONGEST_STEP = 2  # every second one of the strongest: the very first would dominate
_MEAN_SAMPLES = 32  # samples that give the mean of what is measured about it
# input values of all samples: a large one shows as much as many small, and gives a repair as much
_MAX_VALUES = 5_000_000
_FIRST_SAMPLES = 12, CANDIDATE_COUNT  # numbers that a verdict may rest on, before all are run
MOST_OUTPUT_BYTES = MOST_BYTES // 8  # on disk, of one judged model; a search judges about eight


def max_sample_count(evaluation_set: EvaluationSet) -> int:
    """Return how many samples are enough for their size."""
    sample, _ = next(iter(evaluation_set.samples_with_outputs(CANDIDATE_COUNT)))
    return enough_samples(sample)


def select_samples(
    evaluation_set: EvaluationSet, max_count: int, metric: Metric | None = None
) -> tuple[list[tuple[Sample, Outputs]], OutputForm]:
    """Return the samples of a search with the float model's outputs, and the form of these.

    The form is that of all candidates, since the selected samples are extreme. The candidates are
    read twice, so that only the selected ones are in memory.

    Args:
        evaluation_set: its first `CANDIDATE_COUNT` samples are the candidates.
        max_count: number of samples to select, in feed order.
        metric: what outputs are judged by.
    """
    signals, form = _measure_candidates(
        evaluation_set.samples_with_outputs(CANDIDATE_COUNT), metric
    )
    selected_indices = _select_indices(signals, max_count)
    selected_samples = []
    for index, candidate in enumerate(evaluation_set.samples_with_outputs(CANDIDATE_COUNT)):
        if index in selected_indices:
            selected_samples.append(candidate)
    return selected_samples, form


def same_shape_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples to time: all of the shape of the median sample by size.

    The least time over several shapes would be that of the smallest, where int8 gains least.
    """
    median_sample = sorted(samples, key=_count_values)[len(samples) // 2]
    return [sample for sample in samples if _shapes(sample) == _shapes(median_sample)]


def enough_samples(sample: Sample) -> int:
    """Return how many samples of this size are enough: fewer the larger they are, maybe none."""
    return _MAX_VALUES // max(_count_values(sample), 1)


def _count_values(sample: Sample) -> int:
    return sum(value.size for value in sample.values())


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in sample.items()}


def _measure_candidates(
    candidates: Iterable[tuple[Sample, Outputs]], metric: Metric | None
) -> tuple[Floats, OutputForm]:
    """Return the signal of every slice in every sample, and the form of the outputs.

    The signal, [samples, slices], shows where the float model found something. The form says which
    slices the outputs have, and what their task is.
    """
    remaining_candidates = iter(candidates)
    first_candidate = next(remaining_candidates)
    # an output that varies little is measured about its mean, which the form holds; the mean is
    # over more samples than the form needs otherwise, as memory allows
    mean_count = min(_MEAN_SAMPLES, enough_samples(first_candidate[0]))
    # the form is derived from the first candidates; `all_candidates` yields these too
    form, all_candidates = derive_from_first(
        chain([first_candidate], remaining_candidates), metric, min_count=mean_count
    )

    def slice_values() -> Iterator[list[Array]]:
        for sample, outputs in all_candidates:
            # the float model is its own reference
            yield [form.slice_values(part, outputs, sample, outputs) for part in form.parts]

    return slice_signals(form, slice_values()), form


def _select_indices(signals: Floats, max_count: int) -> frozenset[int]:
    """Return the indices of half the samples by greatest normalized signal, half spread."""
    count = len(signals)
    if count <= max_count:
        return frozenset(range(count))
    strongest_indices = rank_by_signal(signals)[
        : _STRONGEST_STEP * (max_count // 2) : _STRONGEST_STEP
    ]
    spread_indices = [index for index in sampling_order(count) if index not in strongest_indices]
    return frozenset(map(int, [*strongest_indices, *spread_indices][:max_count]))


class GrowingComparison:
    """Comparison of a model with the float one on a growing number of evaluation samples.

    Attributes:
        keys: keys of the samples that were run, in that order.
        box_keys: keys of those of them in which the float model found boxes.
        outputs: of the model, by sample key, as far as they are stored; none of a model with
            states, whose outputs depend on the samples before.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        evaluation_set: EvaluationSet,
        form: OutputForm,
        *,
        int8_kernels: bool,
        labels: Sequence[int] | None = None,
        stores_outputs: bool = False,
    ) -> None:
        """Open the model; no sample has run.

        Args:
            model: the model.
            evaluation_set: samples with the float model's outputs.
            form: slices and task of the outputs, and the user's metric.
            int8_kernels: whether ONNX Runtime's int8 kernels run the model.
            labels: class of each image, for top-1 accuracy; None without labels.
            stores_outputs: whether to store the model's outputs on disk, in `outputs`.
        """
        # without int8 kernels, the model stands in for an engine of another runtime
        self._session = open_single_thread(model, stand_in=not int8_kernels)
        self._evaluation_set = evaluation_set
        self._comparison = Comparison(form, labels=labels)
        states = evaluation_set.subset.states
        # a model with states gets those of its own last step, not of the float model's
        self._own_states = OwnStates(states)
        self.keys: list[int] = []
        self.box_keys: list[int] = []
        # `SampleCache` stores the outputs of these samples only
        stored_keys = evaluation_set.subset.keys if stores_outputs and not states else ()
        self.outputs = SampleCache(stored_keys, max_bytes=MOST_OUTPUT_BYTES)

    @phase("checking accuracy")
    def compare(
        self, max_samples: int, *, threads: int, added_keys: Collection[int] = ()
    ) -> Accuracy:
        """Return the accuracy on `max_samples` samples, or on all.

        Samples of earlier calls count too, and do not run again.

        Args:
            max_samples: number of samples, spread over all.
            threads: samples that run in parallel.
            added_keys: keys of samples that run too, whether they are among these or not.

        Raises:
            BackendError: ONNX Runtime refused a sample.
        """
        if self._evaluation_set.subset.states:
            threads = 1  # each step needs the states of the one before
        run_in_order(
            self._new_samples(max_samples, added_keys),  # without those that ran in earlier calls
            self._run,
            self._add,
            threads=threads,
            first_number=len(self.keys) + 1,  # samples have their numbers over all calls
        )
        return self._comparison.result()

    def _new_samples(self, max_samples: int, added_keys: Collection[int]) -> Iterator[Sample]:
        new_samples = self._evaluation_set.subset.spread_with_keys(
            max_samples, added_keys=added_keys, skipped_keys=frozenset(self.keys)
        )
        for key, sample in new_samples:
            self.keys.append(key)
            yield sample

    def _run(self, _: int, number: int, sample: Sample) -> Sequence[Mapping[str, Array]]:
        """Return a sample, the float outputs and those of the model."""
        key = self.keys[number - 1]
        sequence = self._evaluation_set.subset.sequence_of(key)
        outputs = self._own_states.run(self._session, sample, sequence)
        self.outputs.add(key, outputs)
        return sample, self._evaluation_set.reference_outputs.get(key, sample), outputs

    def _add(self, number: int, arrays: Sequence[Mapping[str, Array]]) -> None:
        earlier_boxes = self._comparison.box_count
        self._comparison.add(*arrays, count=self._evaluation_set.subset.unpadded_count)
        if self._comparison.box_count > earlier_boxes:
            self.box_keys.append(self.keys[number - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedVerdict:
    """The expected verdict on an engine.

    Attributes:
        level: GOOD, DOUBTFUL or UNUSABLE, as far as int8 is the cause.
        task_loss: loss of the task; None where it is not measured.
        outputs: of the model that was judged; None where it could not run.
    """

    level: str = GOOD
    task_loss: TaskLoss | None = None
    outputs: EngineOutputs | None = None

    @property
    def reported_level(self) -> str:
        """The level that a report gives the engine: of few boxes, it is at best doubtful."""
        box_count = None if self.task_loss is None else self.task_loss.found
        if self.level == GOOD and box_count is not None and box_count < MIN_OBJECTS:
            return DOUBTFUL
        return self.level


@dataclass(frozen=True, slots=True)
class VerdictPredictor:
    """Predicts the verdict on models, and reports the samples that this takes.

    Attributes:
        evaluation_set: the evaluation samples.
        int8_kernels: whether ONNX Runtime's int8 kernels run the models.
        threads: samples that run in parallel.
        max_loss: the user's limit of loss; None for none.
        form: slices and task of the outputs, and the user's metric.
        count_samples: called with the number of samples that are run.
        few_box_keys: if the evaluation samples hold few boxes in all, one entry: the keys of those
            with boxes, perhaps of none. Empty until the first model has run on all samples.
    """

    evaluation_set: EvaluationSet
    int8_kernels: bool
    threads: int
    max_loss: float | None
    form: OutputForm
    count_samples: Callable[[int], None]
    few_box_keys: list[tuple[int, ...]]

    def predict(self, model: onnx.ModelProto, *, worst_loss: float) -> ExpectedVerdict:
        """Return the expected verdict on the engine of a model, from as few samples as will do.

        `worst_loss`: loss of the model's worst slice in the search. Where the float model finds few
        boxes, it stands for the boxes that more samples would lose.
        """
        levels: frozenset[str] = frozenset()
        task_loss = None
        try:
            comparison = GrowingComparison(
                model,
                self.evaluation_set,
                self.form,
                int8_kernels=self.int8_kernels,
                stores_outputs=True,
            )
            for accuracy in self._accuracies(comparison):
                # [0]: of the float model. Where its own outputs are not finite, no split helps
                if any(output.not_finite[0] for output in accuracy.outputs):
                    return ExpectedVerdict()
                task_loss = measure_loss(accuracy, self.max_loss)
                levels = self._find_levels(accuracy, worst_loss)
                if _is_certain(levels, accuracy, task_loss, self.max_loss):
                    break  # more samples would hardly change the verdict
        except BackendError:  # reported when the engine is built
            return ExpectedVerdict()

        return ExpectedVerdict(
            level=max(levels, key=LEVELS.index, default=GOOD),
            task_loss=task_loss,
            outputs=EngineOutputs(model_digest(model), comparison.outputs),
        )

    def _find_levels(self, accuracy: Accuracy, worst_loss: float) -> frozenset[str]:
        """Return the levels of all reasons that another split may change.

        `worst_loss`: of the worst slice, which few boxes are extrapolated by.
        """
        if self.max_loss is None:  # else the user's limit is for the boxes that there are
            accuracy = _extrapolate_few_boxes(accuracy, worst_loss)
        level_reasons = judge_accuracy(accuracy, self.max_loss)
        return frozenset(
            level for level, reason in level_reasons if not reason.startswith(FLOAT_MODEL)
        )

    def _accuracies(self, comparison: GrowingComparison) -> Iterator[Accuracy]:
        """Yield the accuracy on a few samples, then on more and on all; each sample runs once.

        If the float model finds few boxes, the samples without any could only show new ones. Then
        those with boxes run (the entry of `few_box_keys`), and of the others as many as make up the
        first few.
        """
        subset = self.evaluation_set.subset
        count = len(subset)
        sample_counts = [*(limit for limit in _FIRST_SAMPLES if limit < count), count]
        box_keys: tuple[int, ...] = ()
        if self.few_box_keys:
            (box_keys,) = self.few_box_keys
            sample_counts = [max(1, _FIRST_SAMPLES[0] - len(box_keys))]
        for max_samples in sample_counts:
            earlier_count = len(comparison.keys)
            try:
                accuracy = comparison.compare(
                    max_samples, threads=self.threads, added_keys=box_keys
                )
            finally:  # samples that ran before an error are spent too
                self.count_samples(len(comparison.keys) - earlier_count)
            # each step of a model with states needs the one before, so none may be left out later
            if len(comparison.keys) == count and _few_boxes(accuracy) and not subset.states:
                self.few_box_keys[:] = [tuple(comparison.box_keys)]
            yield accuracy


def _few_boxes(accuracy: Accuracy) -> TaskFigure | None:
    """Return the task's figure if the float model finds fewer boxes than `MIN_OBJECTS`."""
    task = accuracy.task
    if task is None or task.found is None or task.found >= MIN_OBJECTS:
        return None
    return task


def _extrapolate_few_boxes(accuracy: Accuracy, worst_loss: float) -> Accuracy:
    """Return the accuracy that `MIN_OBJECTS` more boxes would show, if there are fewer boxes.

    Of few boxes, a single one that is lost or new would decide. A share `worst_loss` of the boxes
    that are added counts as lost, and as many count as new. `task.lost` is a share of the float
    model's boxes, `task.new` is a number of boxes.
    """
    task = _few_boxes(accuracy)
    if task is None:
        return accuracy
    count = task.counted + MIN_OBJECTS
    added_loss = worst_loss * MIN_OBJECTS  # boxes
    lost_share = (task.lost * task.counted + added_loss) / count
    expected_task = replace(
        task, value=task.reference - lost_share, new=int(task.new + added_loss), counted=count
    )
    return replace(accuracy, task=expected_task)


def _is_certain(
    levels: frozenset[str],
    accuracy: Accuracy,
    task_loss: TaskLoss | None,
    max_loss: float | None,
) -> bool:
    """Whether more samples would hardly change the verdict.

    Outputs with NaN, Inf or another shape (`accuracy.problems`) are certain. These are not:

    - a verdict between good and unusable;
    - one on few samples, if the model has no task, or if its task counts single things, such as
      boxes, and the samples hold few of them;
    - a good one that one more loss would turn, since it would exceed the user's limit.

    Args:
        levels: of the reasons for a verdict so far; empty if there are none.
        accuracy: on the samples so far.
        task_loss: loss of the task; None where it is not measured.
        max_loss: the user's limit of it; None for none.
    """
    if accuracy.problems:
        return True
    if accuracy.samples < CANDIDATE_COUNT:
        task = accuracy.task
        # 0: a user's metric, which counts nothing, or no box so far
        if task is None or 0 < task.counted < MIN_OBJECTS:
            return False
    if max_loss is not None and task_loss is not None and task_loss.level == GOOD:
        # images for top-1 accuracy; for a task, what it counts, such as boxes
        counted = accuracy.samples if accuracy.task is None else accuracy.task.counted
        if task_loss.share + 1 / max(counted, 1) > max_loss:
            return False
    is_extreme = UNUSABLE in levels or levels <= {GOOD}  # without a reason it is good too
    return is_extreme and (task_loss is None or task_loss.sure)


def with_held_out_ranges(
    target: Target,
    request: BuildRequest,
    samples: Sequence[Sample],
    count_samples: Callable[[int], None] = lambda _: None,
    *,
    observes_again: bool = True,
) -> BuildRequest:
    """Return the request with the ranges of all samples but these; unchanged if that fails.

    Ranges are found from statistics of tensors, such as histograms. The histograms of these samples
    are subtracted from those of all; other statistics are observed again on the other samples. The
    request is unchanged too if the feed is so large that a few samples make no difference.

    Args:
        target: the statistics that it needs (`Target.demand`) are computed.
        request: its ranges are those of all samples.
        samples: to leave out.
        count_samples: called with the number of samples that are run for it.
        observes_again: whether to run all other samples for statistics that cannot be subtracted;
            if False and there are any, the request is unchanged.
    """
    ranges = request.ranges
    if ranges.trusted is not None:  # read from the user's cache, without statistics
        return request
    other_count = len(request.feed) - len(samples)
    if not 0 < other_count < LARGE_FEED:
        return request
    subject = replace(request.subject, sample_count=other_count)
    # the searches of all targets share these, and each adds what its target needs and they lack
    statistics = ranges.compute_once("held out", ObservedStatistics)
    try:
        statistics_to_add = statistics.missing(target.demand(subject))
        subtractable = [item for item in statistics_to_add if _is_subtractable(ranges, item)]
        if len(subtractable) < len(statistics_to_add) and not observes_again:
            return request
        _add_statistics_without(
            samples, statistics, statistics_to_add, subtractable, request, count_samples
        )
    except SampleChangedError:  # a file of the user changed while it was read: the user is told
        raise
    except Calib8Error:  # a target that needs all samples, a tensor that only these have
        return request
    new_ranges = Ranges(statistics, ranges.method, ranges.range_limits)
    return replace(request, subject=subject, ranges=new_ranges)


def _add_statistics_without(
    held_out_samples: Sequence[Sample],
    statistics: ObservedStatistics,
    statistics_to_add: Sequence[Observation],
    subtractable: Sequence[Observation],
    request: BuildRequest,
    count_samples: Callable[[int], None],
) -> None:
    """Add statistics of all samples but the held-out ones to `statistics`, in place.

    Histograms of the held-out samples are subtracted from those of all samples; other statistics,
    which cannot be subtracted, are observed on all other samples.

    Args:
        held_out_samples: to leave out.
        statistics: of the other samples, as far as they are known; changed.
        statistics_to_add: which tensors' statistics to add.
        subtractable: those of them that can be subtracted.
        request: has the statistics of all samples.
        count_samples: called with the number of samples that are run for it.
    """
    if subtractable:
        count_samples(len(held_out_samples))
        held_out_statistics = observe(subtractable, held_out_samples, threads=request.threads)
        statistics |= _subtract(request.ranges, subtractable, held_out_statistics)
    if len(subtractable) < len(statistics_to_add):
        other_count = len(request.feed) - len(held_out_samples)
        count_samples(other_count)
        with phase("observing the other samples", other_count, "samples") as step:
            statistics |= observe(
                statistics_to_add,
                _other_samples(request, held_out_samples),
                observed=statistics,  # has those that were subtracted: they are not observed again
                threads=request.threads,
                progress=step,
            )


def _is_subtractable(ranges: Ranges, observation: Observation) -> bool:
    """Whether the statistic of some samples can be subtracted from that of all."""
    is_observed = observation.key in ranges.observed and not observation.variant.needs
    return is_observed and observation.statistic == HistogramOf()


def _subtract(
    ranges: Ranges, observations: Iterable[Observation], held_out_statistics: ObservedStatistics
) -> ObservedStatistics:
    """Return the histograms of all samples, which `ranges` has, minus those of held-out samples."""
    held_out_ranges = Ranges(held_out_statistics, ranges.method, ranges.range_limits)
    remaining_statistics = ObservedStatistics()
    for observation in observations:
        histogram = ranges.histogram(observation)
        remaining_statistics[observation.key] = histogram.without(
            held_out_ranges.histogram(observation)
        )
    return remaining_statistics


def _other_samples(request: BuildRequest, samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples of the feed that are none of these."""
    digests = {sample_digest(sample) for sample in samples}
    with request.feed.samples() as all_samples:
        for sample in all_samples:
            if sample_digest(sample) not in digests:
                yield sample
