"""One pass over the feed: every sample once, through every variant, into every statistic.

::

    feed --> sample 1, 2, 3 ... --> worker --> variant A --> tensors --> recorders of A
                                |          '-> variant B --> tensors --> recorders of B
                                '--> worker ...

The observed tensors become outputs of each variant, and ONNX Runtime still optimizes the rest
(`deploy.calibration.taps`). Each worker runs one sample at a time with one intra-op thread.
Order-free statistics are recorded in parts, each used by one worker at a time, and merged at the
end. Order-dependent values wait for their turn while the workers go on, so that the number of
workers and the batch size never change a bit of the result::

    worker 0:  1   3   5 ...  --> parts, merged at the end: order-free statistics
    worker 1:    2   4   6 ...
    taken:     1 2 3 4 5 6 ... --> recorders of order-dependent statistics

With a stop rule (`should_stop`), all workers pause after 8, 16, 32 ... samples, so that the rule
sees the statistics of exactly these.

If something must be known of the first samples (TensorRT's range rule, AMCT's DMQ and AdaRound),
these are run beforehand, stored, and run again in the pass; repeatedly if needs have needs.

Memory and disk are estimated before a run. The estimates are lower bounds from the shapes that the
model states, so only what is clearly impossible is refused. If all workers together would exceed
the memory, fewer are used, which changes no result.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import prod
from pathlib import Path

import onnx

from calibrators.histogram import BINS
from calibrators.statistics import BatchRecorder, Recorder
from deploy.calibration.checkpoint import Checkpoint
from deploy.calibration.observation import Observation, ObservedStatistics, with_needs
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import merge_histograms
from deploy.calibration.taps import (
    BufferedSession,
    OutputCallback,
    VariantRecorders,
    Waiting,
    explain_error,
    is_within_limit,
    make_runners,
    record,
    sample_limit,
)
from deploy.errors import CalibrationError, ExportError, FeedError, counted
from deploy.feed.parallel import NO_PAUSE, Pause, Sample, run_in_order
from deploy.feed.sampling import next_check
from deploy.files.guard import refuse_unwritable
from deploy.files.reading import format_bytes
from deploy.graph.index import Graph
from deploy.machine import memory_bytes, trim_memory
from deploy.terminal import phase

Progress = Callable[[], None]
StopCallback = Callable[[int, ObservedStatistics, ObservedStatistics], bool]
_Recorders = dict[Observation, Recorder]
_FLOAT_BYTES = 4
_HISTOGRAM_BYTES = 8 * (2 * BINS + 1)


class _PassState:
    """The recorders of a pass over the samples.

    Statistics that do not depend on the order of the samples (order-free) are recorded in slices. A
    slice is a set of recorders, one for each observation; samples use the slices in turn, and in
    the end all slices are merged. A sample starts once the one that lies `threads` before it is
    done. So with as many slices as threads, two workers never use one slice at the same time.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        observed: ObservedStatistics,
        threads: int,
        peaks: Peaks,
        on_outputs: OutputCallback | None,
        *,
        has_halves: bool,
    ) -> None:
        """Open the forms of the model (variants), and make the recorders of their tensors.

        Args:
            observations: what the pass records.
            observed: statistics from which the variants are built.
            threads: number of workers.
            peaks: receives the largest |x| of every tensor.
            on_outputs: called with (sample number, outputs of the cleaned model for it).
            has_halves: whether `halves` will be called, so that the slices must keep the two halves
                of the samples apart.
        """
        self.runners = make_runners(observations, observed)  # one for each variant
        self._observations = observations
        self._observed = observed
        self._order_free = [
            observation for observation in observations if not observation.statistic.ordered
        ]
        self._ordered_recorders = self._make_recorders(
            observation for observation in observations if observation.statistic.ordered
        )
        self._peaks = peaks
        self._on_outputs = on_outputs
        trim_memory()  # gives back what ONNX Runtime took to optimize the models
        self._sessions = [self._make_sessions() for _ in range(threads)]
        self._worker_peaks = [Peaks() for _ in range(threads)]

        # slices are sets of recorders of order-free statistics, which samples use in turn
        self._has_halves = has_halves
        self._slice_count = threads
        if has_halves:
            # the odd slices are one half of the samples, the even ones the other, so their number
            # is even; it is larger than the number of threads, since `alternate_halves` moves a
            # sample to its neighbor's slice
            self._slice_count = threads + (1 if threads % 2 else 2)
        self._snapshot_total: _Recorders | None = None  # of all samples up to the last snapshot
        self._make_slices()

    def _make_sessions(self) -> list[BufferedSession]:
        """Return the sessions of a worker thread, one for each variant."""
        return [BufferedSession(runner.tap.session) for runner in self.runners]

    def _make_recorders(self, observations: Iterable[Observation]) -> _Recorders:
        """Return new recorders, those with a lead (see `Observation`) made from its statistics."""
        recorders = {}
        for observation in observations:
            lead_recorder = None
            if observation.lead is not None:
                lead_recorder = self._observed.recorder(observation.lead)
            recorders[observation] = observation.statistic.recorder(lead_recorder)
        return recorders

    def _make_slices(self) -> None:
        """Start empty slices, and each variant's recorders of them."""
        self._slices: list[_Recorders] = []
        self._variant_recorders: list[list[VariantRecorders]] = []
        for _ in range(self._slice_count):
            recorders = self._make_recorders(self._order_free)
            self._slices.append(recorders)
            self._variant_recorders.append([VariantRecorders(r, recorders) for r in self.runners])

    def resume(self, earlier: ObservedStatistics) -> None:
        """Start from the statistics of an earlier pass."""
        self._ordered_recorders = {
            observation: earlier.recorder(observation) for observation in self._ordered_recorders
        }
        merge_histograms(
            self._slices[0],
            {observation: earlier.recorder(observation) for observation in self._order_free},
        )

    def run_sample(self, worker: int, number: int, sample: Sample) -> list[Waiting]:
        """Run a sample through every variant of the model, and record what needs no order.

        Args:
            worker: number of the thread.
            number: number of the sample, from 1.
            sample: input -> array.

        Returns:
            Values of order-dependent statistics, which wait until earlier samples are recorded.
        """
        # a slice is a set of recorders; samples use the slices in turn. If the samples have two
        # halves to compare, one half uses the slices of odd index, the other those of even index
        turn = alternate_halves(number) if self._has_halves else number
        recorders_by_variant = self._variant_recorders[turn % self._slice_count]
        peaks = self._worker_peaks[worker]
        waiting = []
        for runner, session, recorders in zip(  # of each variant
            self.runners, self._sessions[worker], recorders_by_variant, strict=True
        ):
            if is_within_limit(runner.limit, number):
                waiting += runner.run(session, recorders, peaks, number, sample, self._on_outputs)
        return waiting

    def record_waiting(
        self, number: int, waiting: list[Waiting], inference_counts: Counter[str]
    ) -> None:
        """Record the order-dependent values of a sample, and count its runs, in sample order.

        `inference_counts`: variant key -> number of inferences, incremented.
        """
        for observation, value in waiting:
            record(self._ordered_recorders[observation], observation, number, value)
        for runner in self.runners:
            if is_within_limit(runner.limit, number):
                inference_counts[runner.key] += 1

    def has_open_batch(self, number: int) -> bool:
        """Whether a recorder that takes several samples at once has some, but not all of them."""
        for recorder in self._ordered_recorders.values():
            if isinstance(recorder, BatchRecorder) and number % recorder.samples_per_batch:
                return True
        return False

    def copy_statistics(self) -> ObservedStatistics:
        """Return a copy of all statistics; no other thread may record meanwhile."""
        self._merge_peaks()
        return self._all_statistics([self._make_recorders(self._order_free), *self._slices])

    def take_snapshot(self) -> tuple[ObservedStatistics, ObservedStatistics]:
        """Return the order-free statistics (since the last snapshot, of all samples so far)."""
        since_last_snapshot = _merge_all(self._slices)
        if self._snapshot_total is None:
            self._snapshot_total = self._make_recorders(self._order_free)
        merge_histograms(self._snapshot_total, since_last_snapshot)
        self._make_slices()
        return _by_key(since_last_snapshot), _by_key(self._snapshot_total)

    def finish(self) -> None:
        """Finish after the last sample."""
        self._merge_peaks()
        for observation, recorder in self._ordered_recorders.items():
            if not isinstance(recorder, BatchRecorder):
                continue
            try:
                recorder.end()
            except CalibrationError as error:
                raise explain_error(error, observation, f"tensor {observation.tensor}") from error

    def halves(self) -> list[ObservedStatistics]:
        """Return the order-free statistics of each half of the samples."""
        halves = []
        for slices in (self._slices[1::2], self._slices[::2]):
            half = self._make_recorders(self._order_free)  # the slices stay, for `statistics`
            halves.append(_by_key(_merge_all([half, *slices])))
        return halves

    def statistics(self) -> ObservedStatistics:
        """Return all statistics; nothing may be recorded afterwards."""
        if self._snapshot_total is None:
            return self._all_statistics(self._slices)
        return self._all_statistics([self._snapshot_total, *self._slices])

    def _all_statistics(self, slices: Sequence[_Recorders]) -> ObservedStatistics:
        """Return the statistics of all observations; the slices are merged into the first one."""
        recorders = _merge_all(slices) | self._ordered_recorders
        return _by_key(recorders).select(self._observations)

    def _merge_peaks(self) -> None:
        for worker, peaks in enumerate(self._worker_peaks):
            self._peaks.merge(peaks)
            self._worker_peaks[worker] = Peaks()


def alternate_halves(number: int) -> int:
    """Return `number` or its neighbour, so that odd results are one half of all samples.

    The Thue-Morse sequence 0 1 1 0 1 0 0 1 ... decides, which is in step with no period: if the
    classes of a feed alternate, both halves get both classes.
    """
    return number ^ ((number >> 1).bit_count() & 1)


def _checkpoint_pause(checkpoint: Checkpoint, state: _PassState) -> Pause:
    """Return a pause that stores the state when it is due and no batch of samples is open."""

    def is_due(number: int) -> bool:
        return checkpoint.is_due() and not state.has_open_batch(number)

    def save(number: int) -> None:
        if not state.has_open_batch(number):
            checkpoint.save(number, state.copy_statistics())

    return Pause(is_due=is_due, run=save)


def _merge_all(slices: Sequence[_Recorders]) -> _Recorders:
    """Merge all slices into the first and return it."""
    for recorders in slices[1:]:
        merge_histograms(slices[0], recorders)
    return slices[0]


def _by_key(recorders: _Recorders) -> ObservedStatistics:
    return ObservedStatistics(
        {observation.key: recorder for observation, recorder in recorders.items()}
    )


def observe(
    observations: Iterable[Observation],
    samples: Iterable[Sample],
    *,
    observed: ObservedStatistics | None = None,
    threads: int = 2,
    progress: Progress = lambda: None,
    inference_counts: Counter[str] | None = None,
    peaks: Peaks | None = None,
    checkpoint: Checkpoint | None = None,
    on_outputs: OutputCallback | None = None,
    halves: list[ObservedStatistics] | None = None,
    should_stop: StopCallback | None = None,
) -> ObservedStatistics:
    """Run the samples once through every form of the model; return what was recorded of them.

    An observation is a tensor of a form of the model (a variant) with the statistic to record of
    its values, such as a histogram. Some observations, the preliminary ones, are made on the first
    samples before the pass, since variants and histograms are made from them.

    Args:
        observations: what to record.
        samples: {input: array} of one inference each, in feed order; iterated once. If the run
            resumes, they are those that preliminary observations need, from the first one on, and
            then those that were not counted before.
        observed: statistics from a cache, which are not recorded again.
        threads: worker threads, each running one sample at a time.
        progress: called after each sample.
        inference_counts: variant key -> number of inferences, incremented.
        peaks: receives the largest |x| of every tensor. If the run resumes, it already holds those
            of the samples counted before.
        checkpoint: stores the state now and then; None to store nothing.
        on_outputs: called with (sample number, outputs of the cleaned model for it, possibly more).
        halves: receives the order-free statistics of each half of the samples, which are those that
            take the samples in any order.
        should_stop: stop rule, called after 8, 16, 32 ... samples with (number of samples,
            order-free statistics since the last call, those of all samples); None to run all.

    Returns:
        The statistics of the observations and of those that they needed, without `observed`.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN (names it and the sample), or a variant cannot be made.
        BackendError: ONNX Runtime refused a model or a sample.
    """
    observed = observed or ObservedStatistics()
    threads = max(1, threads)
    inference_counts = Counter() if inference_counts is None else inference_counts

    # before the pass: preliminary observations, made on the first samples
    schedule = schedule_observations(observations, observed)
    sample_stream = iter(samples)
    first_samples = list(islice(sample_stream, schedule.preliminary_sample_count))
    if schedule.preliminary:
        observed = _observe_preliminary(
            schedule.preliminary, observed, first_samples, threads, inference_counts
        )
    if not schedule.main:  # no statistic needs the pass
        return observed.select(schedule.missing)

    state = _PassState(
        schedule.main,
        observed,
        threads,
        peaks or Peaks(),
        on_outputs,
        has_halves=halves is not None,
    )
    pause = NO_PAUSE  # of all workers, to store a checkpoint
    resumed_count = 0  # samples counted by the run that this one resumes
    if checkpoint is not None:
        pause = _checkpoint_pause(checkpoint, state)
        resumed_count = checkpoint.counted
        if resumed_count:
            state.resume(checkpoint.load_observed(schedule.main))

    # the pass runs the first samples too, but none that were counted before. `sample_stream` has
    # given the first samples already, and lacks all others that were counted
    remaining_samples: Iterator[Sample] = chain(first_samples[resumed_count:], sample_stream)
    limit = sample_limit(schedule.main)  # some statistics record the first samples only
    if limit is not None:
        remaining_samples = islice(remaining_samples, max(limit - resumed_count, 0))

    def end_sample(number: int, waiting: list[Waiting]) -> None:  # `waiting`: of `run_sample`
        state.record_waiting(number, waiting, inference_counts)
        progress()

    # workers run the samples, several at a time; `end_sample` is called for them in order
    run_samples = partial(
        run_in_order,
        work=state.run_sample,
        consume=end_sample,
        threads=threads,
        pause=pause,
    )
    sample_count = _run_until(should_stop, state, run_samples, remaining_samples, resumed_count)
    if sample_count == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    state.finish()
    if halves is not None:
        halves += state.halves()
    return observed.merged_with(state.statistics()).select(schedule.missing)


def _run_until(
    should_stop: StopCallback | None,
    state: _PassState,
    run_samples: Callable[..., int],
    samples: Iterator[Sample],
    sample_count: int,
) -> int:
    """Run samples until the stop rule is met or all are run; return the number observed in all.

    Args:
        should_stop: the stop rule, asked after 8, 16, 32 ... samples; None to run all.
        state: recorders of the pass.
        run_samples: (samples, first_number=number of the first) -> how many samples it ran.
        samples: the remaining samples.
        sample_count: number of samples that were observed before, by the run that this one resumes.
    """
    if should_stop is None:
        return sample_count + run_samples(samples, first_number=sample_count + 1)
    while True:
        check_at = next_check(sample_count)  # the number of samples at which to ask the rule
        next_samples = islice(samples, check_at - sample_count)
        sample_count += run_samples(next_samples, first_number=sample_count + 1)
        if sample_count < check_at:  # there were no more
            return sample_count
        new_statistics, all_statistics = state.take_snapshot()
        if should_stop(sample_count, new_statistics, all_statistics):
            return sample_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSchedule:
    """Which observations are made before the pass over all samples, and which in it.

    Attributes:
        missing: all observations to make.
        preliminary: those recorded on the first samples before the pass.
        main: those recorded in the pass.
        preliminary_sample_count: number of samples to run before the pass.
    """

    missing: tuple[Observation, ...]
    preliminary: tuple[Observation, ...]
    main: tuple[Observation, ...]
    preliminary_sample_count: int


def schedule_observations(
    observations: Iterable[Observation], observed: ObservedStatistics
) -> ObservationSchedule:
    """Return which observations to make before the pass over all samples, and which in it.

    An observation is a statistic to record of a tensor in a variant, a form of the model. Two kinds
    are made before the pass, on the first samples: those from which a variant is built, and those
    that fix the range of a histogram before it counts.

    Args:
        observations: what is wanted.
        observed: statistics that exist already.
    """
    # needs of a variant: the observations from which it is built
    missing_observations = observed.missing(with_needs(observations, observed))
    prerequisites: list[Observation] = []
    for observation in missing_observations:
        prerequisites += observation.variant.needs
        if observation.lead is not None:  # which fixes the range of its histogram
            prerequisites.append(observation.lead)
    preliminary = observed.missing(with_needs(prerequisites, observed))
    # `samples`: how many of the first samples a statistic records. Preliminary statistics have a
    # number; a statistic of the entire pass would have None
    first_sample_counts = [observation.statistic.samples or 0 for observation in preliminary]
    return ObservationSchedule(
        missing=missing_observations,
        preliminary=preliminary,
        main=tuple(
            observation for observation in missing_observations if observation not in preliminary
        ),
        preliminary_sample_count=max(first_sample_counts, default=0),
    )


def _observe_preliminary(
    observations: Sequence[Observation],
    observed: ObservedStatistics,
    samples: Sequence[Sample],
    threads: int,
    inference_counts: Counter[str],
) -> ObservedStatistics:
    """Make the observations that must be known before the pass; return `observed` with them added.

    A variant of the model may be built from other observations, its needs, so it waits for them.
    Therefore the samples may be run several times.

    Args:
        observations: what to record, each after those that its variant needs.
        observed: statistics that exist already.
        samples: the first samples.
        threads: number of workers.
        inference_counts: variant key -> number of inferences, incremented.
    """
    all_statistics = observed
    remaining = list(observations)
    with phase("the first samples"):
        # this ends: observations come after their needs, so the first remaining one is ready
        while remaining:
            ready = [
                observation
                for observation in remaining
                if not all_statistics.missing(observation.variant.needs)
            ]
            # threads record a statistic that is independent of the order of the samples in parts,
            # which are merged in the end. Of the first samples, the largest |x| is such a statistic
            # but its parts cannot be merged, so one thread records it
            are_all_ordered = all(observation.statistic.ordered for observation in ready)
            usable_threads = threads if are_all_ordered else 1
            new_statistics = observe(
                ready,
                samples,
                observed=all_statistics,
                threads=usable_threads,
                inference_counts=inference_counts,
            )
            all_statistics = all_statistics.merged_with(new_statistics)
            remaining = list(all_statistics.missing(remaining))
    return all_statistics


def count_workers(observations: Iterable[Observation], model: onnx.ModelProto, threads: int) -> int:
    """Return how many worker threads fit into memory, at most `threads`.

    A worker holds the observed tensors of a sample and a histogram of each. It needs more than is
    counted here, so only what surely does not fit is refused.

    Args:
        observations: what is recorded.
        model: the cleaned model with shapes; tensors without a known shape are not counted.
        threads: the number asked for.

    Raises:
        CalibrationError: one worker does not fit.
    """
    observations = list(observations)
    memory_size = memory_bytes()
    if not observations or memory_size is None:  # nothing to hold, or the memory is unknown
        return threads

    # a variant is a form of the model; a worker runs a sample through one after the other, so it
    # holds the tensors of one variant at a time
    value_counts = _count_values(observations, model)
    bytes_by_variant: Counter[str] = Counter()
    for observation in observations:
        value_count = value_counts.get(observation.tensor, 0)
        bytes_by_variant[observation.variant.key] += _FLOAT_BYTES * value_count
    required_bytes = max(bytes_by_variant.values())
    if required_bytes > memory_size:
        largest = max(value_counts, key=lambda name: value_counts[name])
        raise CalibrationError(
            f"the tensors that are observed of one sample must fit into the memory, got"
            f" {format_bytes(required_bytes)} of them (the largest is {largest!r} with"
            f" {value_counts[largest]:,} values) and a machine of {format_bytes(memory_size)}; use"
            " a smaller input, or a larger machine"
        )
    required_bytes += _HISTOGRAM_BYTES * len(observations)
    return max(1, min(threads, memory_size // required_bytes))


def refuse_full_disk(folder: Path, model: onnx.ModelProto, target_count: int) -> None:
    """Refuse a folder that is not writable, or too full for the int8 weights of all targets.

    Args:
        folder: the folder to write to, which need not exist yet.
        model: the float model.
        target_count: number of targets, each with its own int8 model.

    Raises:
        ExportError: it is not writable, or its disk has too little space.
    """
    refuse_unwritable(folder / "report.json")  # one of the files to come
    nearest_folders = (folder, *folder.absolute().parents)  # from the inside out
    existing_folder = next(path for path in nearest_folders if path.is_dir())
    float_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    required_bytes = target_count * float_bytes // _FLOAT_BYTES  # one byte for each float weight
    free_bytes = shutil.disk_usage(existing_folder).free
    if required_bytes > free_bytes:
        raise ExportError(
            f"{folder} must have room for {counted(target_count, 'int8 model')} of at least"
            f" {format_bytes(required_bytes)}, got"
            f" {format_bytes(free_bytes)} that are free; give another --out"
        )


def _count_values(observations: Iterable[Observation], model: onnx.ModelProto) -> dict[str, int]:
    """Return tensor -> minimum number of values per sample.

    It is 1 for a tensor of unknown shape. Tensors with a size of 0, or an open size beside the
    batch, are left out.
    """
    shapes = Graph(model).shapes
    value_counts = {}
    for observation in observations:
        # a tensor of unknown shape, or a scalar, whose shape is (), counts as one value
        batch, *other_sizes = shapes.get(observation.tensor) or (1,)
        if not isinstance(batch, int):  # it is open: one sample at least
            batch = 1
        sizes = (batch, *other_sizes)
        known_sizes = [size for size in sizes if isinstance(size, int) and size > 0]
        if len(known_sizes) == len(sizes):
            value_counts[observation.tensor] = prod(known_sizes)
    return value_counts
