"""The samples of a search: which few it runs, ranges made without them, and the expected verdict.

Selection. Most photos of a detector hold nothing, and a search over those would reduce noise on
nothing. So half of the samples are those with the greatest signal in the output slices, and the
other half is spread over the feed.

Signal. The signal of a slice in one sample is its sum of squares. For one class per sample, after a
Softmax, that is greatest where the class is certain, and there int8 loses nothing whatever it does
before the Softmax: a search over such samples took four of eight layers for 109 dB, and they left
22. For these, and for a single probability after a Sigmoid, the signal is what is uncertain::

    sum p (1 - p)            0 where the class is certain

Of many steps or pixels in a sample some are always uncertain, and the sum of squares serves. Where
a Softmax is certain nearly everywhere, noise shows nothing until a class flips, and then all at
once. Such an output is measured as the Softmax of its logits divided by a temperature, the least
of a few at which it is no longer certain::

    logits   9 0 0  ->  0.9998 0.0001 0.0001      temperature 4  ->  0.83 0.09 0.09

For a number that is measured about its mean, all samples have the same signal, because a Softmax
or Tanh before it is certain in the extreme ones.

Expected verdict. A trial model is compared as its engine will be. Most are good on the first few
evaluation samples, and no others run then. All run only if doubling the loss (verdict "good") or
halving it (verdict "unusable") would change the verdict.

Ranges. What a range clips is rare in the images that calibrate, and a search that measures on these
images finds that clipping costs nothing. So where the images are few, the ranges of the trials are
made without the samples of the search. Between the best method that clips and the best that does
not, more samples decide: half of them run with ranges of the other half, and the other way round::

    calibration images  o o x o o o x o ...      x: measure the noise of every trial
                        o o   o o o   o          source of the trial's ranges

The build itself uses all of them. Among many images a few make no difference. A histogram that does
not depend on the order of samples is subtracted: only the few samples run again. Any other
statistic is observed again on the other samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import Key, Observation, ObservedStatistics, unique_observations
from deploy.calibration.one_pass import alternate_halves, observe
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import BackendError, Calib8Error
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.file_list import SampleChangedError, sample_digest
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.sampling import sampling_order
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import (
    DOUBTFUL,
    FLOAT_MODEL,
    GOOD,
    GOOD_LOSS,
    UNUSABLE,
    TaskLoss,
    judge_accuracy,
    measure_loss,
)
from deploy.metrics.output_errors import USUAL
from deploy.metrics.output_form import OutputForm, derive_form
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildRequest, Target
from deploy.tasks import Metric
from deploy.tasks.rows import Floats, Outputs, are_probabilities, is_floating
from deploy.tasks.slices import OutputSlice, form_samples
from deploy.tensors import Array
from deploy.terminal import phase

CANDIDATES = 48  # evaluation samples to select from
LARGE_FEED = 128  # samples from which on a few make no difference
_HALVED = 40  # samples, at least, half of which can give ranges
_STRONGEST_STEP = 2  # every second one of the strongest: the very first would dominate
_MEANS = 32  # samples that give the mean of what is measured about it
_MOST_VALUES = 5_000_000  # input values of all samples: a large one shows as much as many small
_TEMPERATURES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_NEVER = 1e-30  # least probability: a smaller one is rounded to 0
_UNCERTAIN = 0.1  # mean of 1 - sum p^2 from which a Softmax is not certain
_SHOWING = 40  # boxes or labels of the float model, at least, whose count shows a loss of 0.025


def slice_signals(form: OutputForm, outputs: Iterable[Mapping[str, Array]]) -> NDArray[np.float64]:
    """Return the signal of every slice in every sample, [samples, slices]; 0 where not finite."""
    least = 1 if len(form.parts) == 1 else 2  # one value next to others says whether they matter
    both = np.array(
        [[_signals(part.of(one[part.output]), least) for part in form.parts] for one in outputs]
    )
    if not both.size:
        return np.zeros(both.shape[:2])
    probabilities = np.isfinite(both[..., 1]).all(axis=0)
    signals = np.where(probabilities, both[..., 1], both[..., 0])
    numbers = [part.less == USUAL and part.at is None for part in form.parts]
    return np.asarray(np.where(numbers, signals > 0, signals))


def rank_by_signal(signals: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of the samples by their signal, each slice normalized, greatest first.

    Equal ones are spread.
    """
    order, largest = sampling_order(len(signals)), signals.max(axis=0)
    normalized = (signals / np.where(largest > 0, largest, 1.0)).sum(axis=1)
    return order[np.argsort(-normalized[order], kind="stable")]


def finite_sum_of_squares(values: Array) -> float:
    """Return the sum of squares; 0 where it is not finite."""
    total = sum_of_squares(values)
    return total if np.isfinite(total) else 0.0


def sum_of_squares(values: Array) -> float:
    """Return the sum of squares, finite or not."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def _signals(values: Array, least: int) -> tuple[float, float]:
    """Return (squares, sum - squares for `least` or more probabilities, else NaN)."""
    squares = finite_sum_of_squares(values)
    if values.size < least or not _are_probabilities(values):
        return squares, np.nan
    return squares, max(float(np.sum(values, dtype=np.float64)) - squares, 0.0)


def _are_probabilities(values: Array) -> bool:
    """Whether a sample is one row of probabilities, [1, C], that sum to 1, or a single one."""
    if not is_floating(values):
        return False
    if values.size == 1:  # a wake word, the quality of a signal
        return bool(values.min() >= 0 and values.max() <= 1)
    if values.ndim < 2 or values.size != values.shape[1]:
        return False
    return are_probabilities(values.reshape(-1))


def find_temperatures(
    form: OutputForm, outputs: Sequence[Mapping[str, Array]]
) -> dict[str, tuple[float, int]]:
    """Return {output of a Softmax that is certain: (temperature, axis of the classes)}."""
    found = {}
    for part in (one for one in form.parts if one == OutputSlice(output=one.output)):
        rows = [one[part.output] for one in outputs]
        axis = next((axis for axis in (1, -1) if all(_is_softmax(one, axis) for one in rows)), 0)
        if axis and not _is_uncertain(rows, 1.0, axis):
            fits = (t for t in _TEMPERATURES if _is_uncertain(rows, t, axis))
            found[part.output] = next(fits, _TEMPERATURES[-1]), axis
    return found


def apply_temperature(probabilities: Array, temperature: float, axis: int) -> Floats:
    """Return the Softmax of logits divided by a temperature, from that of the logits."""
    with np.errstate(invalid="ignore"):
        power = np.maximum(probabilities.astype(np.float64), _NEVER) ** (1 / temperature)
        return np.asarray(power / power.sum(axis=axis, keepdims=True))


def _is_softmax(value: Array, axis: int) -> bool:
    several = value.ndim > 1 and value.shape[axis] > 1 and value.size > 0
    return several and is_floating(value) and are_probabilities(value, axis)


def _is_uncertain(rows: Sequence[Array], temperature: float, axis: int) -> bool:
    shares = (apply_temperature(one, temperature, axis) for one in rows)
    return bool(np.mean([1 - np.square(one).sum(axis=axis).mean() for one in shares]) >= _UNCERTAIN)


def max_sample_count(judges: EvaluationSet) -> int:
    """Return how many samples are enough for their size."""
    first, _ = next(iter(judges.samples_with_outputs(CANDIDATES)))
    return _MOST_VALUES // max(_size(first), 1)


def select_samples(
    judges: EvaluationSet, most: int, metric: Metric | None = None
) -> tuple[list[tuple[Sample, Outputs]], OutputForm]:
    """Return at most `most` samples in feed order, with the float model's outputs, and the form.

    It is that of the candidates, since the selected ones are extreme. The candidates are read
    twice, so that only the selected ones are in memory. `metric`: what outputs are judged by.
    """
    signals, form = _slice_signals(judges.samples_with_outputs(CANDIDATES), metric)
    chosen = _selection(signals, most)
    return [
        one for place, one in enumerate(judges.samples_with_outputs(CANDIDATES)) if place in chosen
    ], form


def same_shape_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples to time: all of the shape of the median sample by size.

    The least time over several shapes would be that of the smallest, where int8 gains least.
    """
    median = sorted(samples, key=_size)[len(samples) // 2]
    shapes = {name: value.shape for name, value in median.items()}
    return [one for one in samples if {name: value.shape for name, value in one.items()} == shapes]


def _size(sample: Sample) -> int:
    return sum(value.size for value in sample.values())


def _slice_signals(
    heard: Iterable[tuple[Sample, Outputs]], metric: Metric | None
) -> tuple[NDArray[np.float64], OutputForm]:
    """Return the signal of every slice in every sample, [samples, slices], and their form."""
    samples = iter(heard)
    first = list(islice(samples, 1))
    known = min(_MEANS, _MOST_VALUES // max(_size(first[0][0]), 1))
    first += islice(samples, max(form_samples(*first[0]), known) - 1)
    fed, outputs_of_first = zip(*first, strict=True)
    form = derive_form(outputs_of_first, inputs=fed, metric=metric)
    told = (form.told(outputs, sample, outputs) for sample, outputs in chain(first, samples))
    return slice_signals(form, told), form


def _selection(signals: NDArray[np.float64], most: int) -> frozenset[int]:
    """Return the indices of half the samples by greatest normalized signal, half spread."""
    count = len(signals)
    if count <= most:
        return frozenset(range(count))
    strongest = rank_by_signal(signals)
    chosen = {int(index) for index in strongest[: _STRONGEST_STEP * (most // 2) : _STRONGEST_STEP]}
    for index in map(int, sampling_order(count)):
        if len(chosen) < most:
            chosen.add(index)
    return frozenset(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedVerdict:
    """The expected verdict on an engine."""

    unusable: str = ""  # why it would be unusable; "" where it would not
    doubtful: str = ""  # why it would be doubtful, where int8 is the cause
    task_loss: TaskLoss | None = None  # loss of the task; None where it is not measured

    @property
    def level(self) -> str:
        """GOOD, DOUBTFUL or UNUSABLE."""
        if self.unusable:
            return UNUSABLE
        return DOUBTFUL if self.doubtful else GOOD


@dataclass(frozen=True, slots=True)
class VerdictPredictor:
    """Predicts the verdict on models, and reports the samples that this takes."""

    evaluation_set: EvaluationSet
    int8_kernels: bool  # whether ONNX Runtime's int8 kernels run the models
    threads: int
    max_loss: float | None
    metric: Metric | None
    count_samples: Callable[[int], None]

    def predict(self, model: onnx.ModelProto, *, noise: float) -> ExpectedVerdict:
        """Return the expected verdict on the engine of a model.

        `noise`: loss of its worst slice in the search. It counts too where the float model finds
        so few boxes or labels that their count shows no loss.
        """
        levels: dict[str, str] = {}
        lost = None
        try:
            for accuracy in self._judged(model):
                if any(output.not_finite[0] for output in accuracy.outputs):
                    return ExpectedVerdict()  # FP32 itself is not finite: no split helps
                # all that another split may change, the first reason of each level
                found = [*judge_accuracy(accuracy, self.max_loss)]
                levels = dict(each for each in found[::-1] if not each[1].startswith(FLOAT_MODEL))
                lost = measure_loss(accuracy, self.max_loss)
                if _is_certain(levels, accuracy, lost):
                    break
        except BackendError:  # reported when the engine is built
            return ExpectedVerdict()
        unusable, doubtful = (levels.get(one, "") for one in (UNUSABLE, DOUBTFUL))
        few = None if lost is None or self.max_loss is not None else lost.found
        if lost is not None and few is not None and few < _SHOWING:
            # `_SHOWING` more that lose what the worst slice loses
            expected = (lost.share * few + noise * _SHOWING) / (few + _SHOWING)
            if expected > GOOD_LOSS:
                doubtful = doubtful or f"{lost.words}, too few to show what int8 loses"
        return ExpectedVerdict(unusable=unusable, doubtful=doubtful, task_loss=lost)

    def _judged(self, model: onnx.ModelProto) -> Iterator[Accuracy]:
        """Yield the accuracy on a few samples, then on all; each sample runs once."""
        comparison = GrowingComparison(
            [model], self.evaluation_set, self.metric, int8_kernels=self.int8_kernels
        )
        count = len(self.evaluation_set.subset)
        for most in dict.fromkeys((min(CANDIDATES, count), count)):
            before = len(comparison.keys)
            try:
                yield comparison.compare(most, threads=self.threads)
            finally:
                self.count_samples(len(comparison.keys) - before)


def _is_certain(levels: Mapping[str, str], accuracy: Accuracy, lost: TaskLoss | None) -> bool:
    """Whether more samples would hardly change the verdict."""
    if accuracy.problems:
        return True
    return (UNUSABLE in levels or set(levels) <= {GOOD}) and (lost is None or lost.sure)


class GrowingComparison:
    """Comparison of a model with the float one on a growing number of evaluation samples.

    Of two models the second runs the samples of `second_half`, the first all others.

    Attributes:
        keys: keys of the samples that were run.
    """

    def __init__(
        self,
        models: Sequence[onnx.ModelProto],
        judges: EvaluationSet,
        metric: Metric | None = None,
        *,
        int8_kernels: bool,
        labels: Sequence[int] | None = None,
    ) -> None:
        """Load the models.

        `int8_kernels`: whether ONNX Runtime's int8 kernels run them. `labels`: class of each image,
        for top-1 accuracy on all samples.
        """
        self._sessions = [
            OrtSession.open(
                model, threads=1, spin=False, reuse_memory=True, int8_kernels=int8_kernels
            )
            for model in models
        ]
        self._second = second_half(judges.subset) if len(models) > 1 else frozenset()
        self._judges, self._metric, self._labels = judges, metric, labels
        self._comparison: Comparison | None = None
        self.keys: list[int] = []

    @phase("judging")
    def compare(self, max_samples: int, *, threads: int) -> Accuracy:
        """Return the accuracy on at most `max_samples` samples; each runs once.

        Raises:
            BackendError: ONNX Runtime refused a sample.
        """
        run_in_order(
            self._new(max_samples),
            self._work,
            self._take,
            threads=threads,
            first_number=len(self.keys) + 1,
        )
        assert self._comparison is not None
        return self._comparison.result()

    def _new(self, most: int) -> Iterator[Sample]:
        for key, sample in self._judges.subset.spread_with_keys(
            most, skipped_keys=frozenset(self.keys)
        ):
            self.keys.append(key)
            yield sample

    def _work(self, _: int, number: int, sample: Sample) -> Sequence[Mapping[str, Array]]:
        key = self.keys[number - 1]
        session = self._sessions[key in self._second]
        return sample, self._judges.outputs.get(key, sample), session.run(sample)

    def _take(self, _: int, ran: Sequence[Mapping[str, Array]]) -> None:
        if self._comparison is None:
            self._comparison = Comparison(
                self._judges.outputs, self._sessions[0], labels=self._labels, metric=self._metric
            )
        self._comparison.add(*ran, count=self._judges.subset.unpadded_count)


def second_half(part: EvaluationSubset) -> frozenset[int]:
    """Return the keys of half of the evaluation samples; repetition in the feed does not matter."""
    return frozenset(key for at, key in enumerate(part.keys) if alternate_halves(at) & 1)


def halved_requests(
    target: Target, request: BuildRequest, count_samples: Callable[[int], None]
) -> list[BuildRequest]:
    """Return two requests: ranges of the second half of the evaluation samples, and of all others.

    The request alone where half of the samples is too little for ranges, or if the statistics
    cannot be subtracted. `count_samples` as in `with_held_out_ranges`.
    """
    assert request.evaluation_set is not None
    ranges, second = request.ranges, second_half(request.evaluation_set.subset)
    enough = ranges.trusted is None and len(request.feed) >= _HALVED
    wanted = unique_observations({target.name: target.demand(request.subject)})
    known = all(o.key in ranges.observed and not o.variant.needs for o in wanted)
    if not (enough and known and all(o.statistic == HistogramOf() for o in wanted)):
        return [request]
    halves = ranges.compute_once(
        "halves", lambda: [ObservedStatistics({})]
    )  # shared by the targets
    new = halves[0].missing(wanted)
    count_samples(len(second) if new else 0)
    samples = (sample for _, sample in request.feed.samples_by_key(second))
    if new:
        halves[0] = halves[0].merged_with(observe(new, samples, threads=request.threads))
    rest = ObservedStatistics(_subtracted(ranges, wanted, halves[0]))
    return [
        replace(request, ranges=Ranges(one, ranges.method, ranges.range_limits))
        for one in (halves[0], rest)
    ]


def with_held_out_ranges(
    target: Target,
    request: BuildRequest,
    judges: Sequence[Sample],
    count_samples: Callable[[int], None] = lambda _: None,
) -> BuildRequest:
    """Return the request with ranges of all samples but `judges`; unchanged if it cannot be.

    `count_samples`: called with the number of samples that are run for it.
    """
    count, ranges = len(request.feed), request.ranges
    left = count - len(judges)
    if ranges.trusted is not None or not 0 < left < LARGE_FEED:
        return request
    subject = replace(request.subject, samples=left)
    # shared by the targets
    seen = ranges.compute_once("without the judges", lambda: [ObservedStatistics({})])
    try:
        wanted = seen[0].missing(unique_observations({target.name: target.demand(subject)}))
        known = [o for o in wanted if o.key in ranges.observed and not o.variant.needs]
        subtractable = [o for o in known if o.statistic == HistogramOf()]
        count_samples(len(judges) if subtractable else 0)
        if subtractable:
            own = observe(subtractable, judges, threads=request.threads)
            seen[0] = seen[0].merged_with(_subtracted(ranges, subtractable, own))
        count_samples(left if len(subtractable) < len(wanted) else 0)
        with phase("observing without the judges", left, "samples") as step:
            seen[0] = seen[0].merged_with(
                observe(
                    wanted,
                    _other_samples(request, judges),
                    observed=seen[0],
                    threads=request.threads,
                    progress=step,
                )
            )
    except SampleChangedError:
        raise
    except Calib8Error:  # a target that needs all samples, a tensor that only these have
        return request
    return replace(
        request, subject=subject, ranges=Ranges(seen[0], ranges.method, ranges.range_limits)
    )


def _subtracted(
    ranges: Ranges, counted: Sequence[Observation], own: ObservedStatistics
) -> dict[Key, Recorder]:
    """Return the histograms of all samples minus those of some."""
    return {o.key: ranges.histogram(o).without(_histogram(own, o)) for o in counted}


def _histogram(observed: ObservedStatistics, observation: Observation) -> Histogram:
    found = observed.recorder(observation)
    assert isinstance(found, Histogram)
    return found


def _other_samples(request: BuildRequest, judges: Sequence[Sample]) -> Iterator[Sample]:
    known = {sample_digest(sample) for sample in judges}
    with request.feed.samples() as samples:
        yield from (sample for sample in samples if sample_digest(sample) not in known)
