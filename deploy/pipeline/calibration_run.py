"""Observe what a calibration lacks, and search and store its ranges.

::

    check the cache --> observe what is missing --> Ranges --> store
                              |
    CalibrationImages.observe +--> observe_here         one pass here, with checkpoints
                              +--> observe_on_workers   the same pass in pieces, on a dask cluster
                              '--> merge_shards         merged: nothing is run

`open_dataset` and `open_shards` choose one of the three. A trusted cache is used as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from deploy.calibration import one_pass
from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.checkpoint import Checkpoint, remove_finished_checkpoint
from deploy.calibration.cluster import observe_on
from deploy.calibration.cluster_jobs import Cluster, as_cluster
from deploy.calibration.input_checks import check_feed_inputs
from deploy.calibration.observation import (
    FOLDED,
    CalibrationSubject,
    Observation,
    ObservedStatistics,
    unique_observations,
)
from deploy.calibration.one_pass import observe, schedule_observations
from deploy.calibration.ranges import Ranges, read_foreign_ranges
from deploy.calibration.reference_outputs import (
    EvaluationSet,
    find_random_outputs,
    make_evaluation_set,
)
from deploy.calibration.reuse import (
    CacheDecision,
    CachePolicy,
    check_cache,
    make_fingerprint,
    update_cache,
)
from deploy.calibration.sample_checks import (
    HalvesAgreement,
    Outlier,
    Peaks,
    StabilityRule,
    describe_outliers,
)
from deploy.calibration.shards import ShardSet, observe_unless_all_skipped, refuse_ordered
from deploy.calibration.stability import StabilityMonitor
from deploy.calibration.store import Calibration
from deploy.errors import ConfigError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import Dataset, FeedSource
from deploy.feed.paths import RawFiles
from deploy.feed.pixels import PREVIEW_COUNT
from deploy.feed.samples import Feed
from deploy.files.guard import refuse_unwritable
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel
from deploy.graph.index import float16_ends
from deploy.graph.plan import never_negative
from deploy.machine import trim_memory
from deploy.pipeline.build_options import CalibrationOptions
from deploy.pipeline.float_reference import check_cleaned_model
from deploy.targets import Target
from deploy.targets.base import CacheText
from deploy.tensors import Array
from deploy.terminal import phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The statistics of the cache and those observed now.

    Attributes:
        observed: all statistics that the targets need.
        notes: sentences on how they were observed.
        checkpoint: the checkpoint of the pass; None where no state was kept.
    """

    observed: ObservedStatistics
    notes: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationImages:
    """The images of a calibration, and what observes them.

    Attributes:
        feed: the images.
        name: their source, for the report.
        shard: which shard they are, or that they are merged shards, as text; None for neither. A
            shard is the part of the images that one of several machines observes.
        is_readable: whether the images themselves are here, not only their statistics.
        observe: (run, check of the cache) -> all statistics, with those that the cache lacked.
    """

    feed: Feed
    name: str
    shard: str | None
    is_readable: bool
    observe: Callable[[CalibrationRun, CacheDecision], PassResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """One calibration: what is observed of which model on which images, and its running state.

    Attributes:
        subject: the model, and how it is calibrated.
        images: the images.
        observations_by_target: target -> its observations.
        failures: target -> why it cannot be built.
        policy: how the cache is used.
        stop_rule: when there are enough images; None uses all.
        stability_monitor: compares halves of the samples.
        evaluation_set: evaluation samples; the float model's outputs of them are stored meanwhile.
        evaluation_count: number of evaluation samples.
        threads: worker threads.
        checkpoint_path: path of the checkpoint; None keeps none.
        resume: whether the run continues from its checkpoint.
        tensor_peaks: the largest values of each tensor, to find the samples that are outliers.
        inference_counts: variant of the model -> number of inferences.
        started: `time.perf_counter()` at its start.
    """

    subject: CalibrationSubject
    images: CalibrationImages
    observations_by_target: Mapping[str, tuple[Observation, ...]]
    failures: Mapping[str, str]
    policy: CachePolicy
    stop_rule: StabilityRule | None
    stability_monitor: StabilityMonitor
    evaluation_set: EvaluationSet
    evaluation_count: int
    threads: int
    checkpoint_path: Path | None
    resume: bool
    tensor_peaks: Peaks = field(default_factory=Peaks)
    inference_counts: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)

    @property
    def feed(self) -> Feed:
        """The calibration images."""
        return self.images.feed

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Everything that the targets need, each observation once."""
        return unique_observations(self.observations_by_target)


def open_dataset(
    loaded: LoadedModel, dataset: Dataset, options: CalibrationOptions
) -> CalibrationImages:
    """Open the images of a calibration, and choose the function that observes the model on them.

    The images may be one shard: the part that one of several machines observes.

    `options`: may name a dask scheduler. Its workers then observe, else this machine does.

    Raises:
        ConfigError: a scheduler, with an option that only a run on this machine has.
        FeedError: images that do not fit the model.
    """
    cluster = as_cluster(options.scheduler)
    observe_images = observe_here
    if cluster is not None:
        _refuse_local_options(options)
        observe_images = partial(observe_on_workers, cluster, dataset)
    feed = loaded.open_samples(dataset)
    shard_text = None
    if feed.share is not None:
        shard_text = f"a shard (got {feed.share})"  # an error message begins with it
    return CalibrationImages(
        feed=feed,
        name=describe_source(dataset.source),
        shard=shard_text,
        is_readable=True,  # of merged shards only the statistics are here, not the images
        observe=observe_images,
    )


def _refuse_local_options(options: CalibrationOptions) -> None:
    """Refuse options that only a run on this machine has."""
    is_given_by_flag = {
        "--resume": options.resume,
        "--until-stable": options.until_stable is not None,
    }
    for flag, is_given in is_given_by_flag.items():
        if is_given:
            raise ConfigError(
                f"{flag} is for a run on this machine, got --scheduler, whose workers share the"
                " images out; leave one of them out"
            )


def open_shards(shards: ShardSet) -> CalibrationImages:
    """Return the images that shards were observed on."""
    return CalibrationImages(
        feed=shards.feed,
        name=str(shards),
        shard="a shard (got merged)",
        is_readable=False,
        observe=partial(merge_shards, shards),
    )


def describe_source(images: FeedSource) -> str:
    """Return where images came from, for the report."""
    has_path = isinstance(images, str | Path | CalibratorScript | RawFiles)
    return str(images) if has_path else "arrays in memory"


def merge_shards(shards: ShardSet, run: CalibrationRun, decision: CacheDecision) -> PassResult:
    """Merge the statistics in the shards of other machines with those of the cache.

    Raises:
        CacheError: a shard lacks an observation.
    """
    merged_statistics = shards.observed(decision.missing, run.tensor_peaks)
    return PassResult(observed=decision.observed.merged_with(merged_statistics))


def observe_on_workers(
    cluster: Cluster, dataset: Dataset, run: CalibrationRun, decision: CacheDecision
) -> PassResult:
    """Observe on the workers of a scheduler, each on its part of the images.

    Args:
        cluster: the scheduler.
        dataset: the images, which the workers open themselves.
        run: the calibration: which model, images and observations, and its state.
        decision: the statistics of the cache, and the observations that it lacks.

    Raises:
        ConfigError: a statistic that depends on the order of the images.
        BackendError, FeedError, Calib8Error: as `deploy.calibration.cluster.observe_on`.
    """
    if not decision.missing:
        return PassResult(observed=decision.observed)
    # each worker has a part of the images, whose statistics are merged: their order is lost
    refuse_ordered(decision.missing, "a piece of a calibration (got --scheduler)")
    new_statistics, notes = observe_on(
        cluster,
        decision.missing,
        run.feed,
        subject=run.subject,
        images=dataset.source,
        limit=dataset.limit,
        peaks=run.tensor_peaks,
        inference_counts=run.inference_counts,
    )
    return PassResult(observed=decision.observed.merged_with(new_statistics), notes=notes)


def observe_here(run: CalibrationRun, decision: CacheDecision) -> PassResult:
    """Record the statistics that the cache lacks, in one pass on this machine.

    Args:
        run: the calibration: which model, images and observations, and its state.
        decision: the statistics of the cache, and the observations that it lacks.

    Raises:
        CacheError: a checkpoint from which the run cannot go on.
        CalibrationError: the tensors of one sample do not fit into the memory.
        CalibrationError, FeedError, BackendError: what the pass raises
            (`deploy.calibration.one_pass.observe`).
    """
    # at most `run.threads`, as many as the memory suffices for
    threads = one_pass.count_workers(decision.missing, run.subject.model, run.threads)
    # `schedule` has two kinds of statistics: those that others need are recorded first, on a few
    # samples before the pass (`preliminary`); the others are recorded in the pass (`main`), and
    # stored in the checkpoint
    schedule = schedule_observations(decision.missing, decision.observed)
    checkpoint = _open_checkpoint(run, schedule.main)
    statistics = decision.observed
    if decision.missing:
        observe_missing = partial(
            _observe_missing,
            run,
            decision,
            checkpoint,
            schedule.preliminary_sample_count,
            threads,
        )
        # a run may be one shard of several, whose samples may all be bad ones that are skipped; it
        # then has no statistics
        new_statistics = observe_unless_all_skipped(run.feed, observe_missing)
        statistics = statistics.merged_with(new_statistics)

    notes: tuple[str, ...] = ()
    if threads < run.threads:
        notes = (
            f"calibrated with {threads} of {run.threads} threads: memory does not suffice for"
            " more.",
        )
    return PassResult(observed=statistics, notes=notes, checkpoint=checkpoint)


def _open_checkpoint(run: CalibrationRun, observations: Sequence[Observation]) -> Checkpoint | None:
    """Return the checkpoint of these observations; None if none is kept, or nothing is observed.

    A checkpoint is the state of the pass on disk, from which an interrupted run goes on: the
    statistics of the samples so far, and the peaks of each tensor.
    """
    if run.checkpoint_path is None:
        return None
    if not observations:
        # the cache has all statistics; if an interrupted run wrote it, it left a checkpoint of a
        # finished pass, from which nothing can go on
        if run.resume:
            remove_finished_checkpoint(run.checkpoint_path)
        return None
    return Checkpoint(
        run.checkpoint_path,
        run.subject,
        run.feed,
        observations,
        run.tensor_peaks,
        resume=run.resume,
        force=run.policy.force,
    )


def _observe_missing(
    run: CalibrationRun,
    decision: CacheDecision,
    checkpoint: Checkpoint | None,
    preliminary_sample_count: int,
    threads: int,
) -> ObservedStatistics:
    """Run the pass over the samples that the checkpoint does not have; return its statistics.

    The float model's outputs are stored meanwhile, for the evaluation of the engines. If a rule may
    end the pass early, the stability monitor is asked after 8, 16, 32 ... samples whether they are
    enough. Otherwise it gets the statistics of each half of the samples, and compares the ranges of
    the two when the pass has ended.

    Args:
        run: the calibration: which model, images and observations, and its state.
        decision: the statistics of the cache, and the observations that it lacks.
        checkpoint: state of an interrupted run; None without.
        preliminary_sample_count: number of first samples that some statistics need in order to
            start. These samples are read again even if the checkpoint has counted them.
        threads: worker threads.
    """
    feed = run.feed
    monitor = run.stability_monitor
    counted_samples = 0 if checkpoint is None else checkpoint.counted  # the first so many
    # of these, all but the preliminary ones; the range is empty if there are no others
    skipped_samples = range(preliminary_sample_count, counted_samples)
    halves = monitor.halves  # `observe` fills it; None if it is not needed
    if counted_samples:  # a checkpoint does not hold the statistics of each half
        halves = None

    def store_outputs(sample_number: int, float_outputs: Mapping[str, Array]) -> None:
        """Store the float model's outputs of an evaluation sample."""
        run.evaluation_set.reference_outputs.add(feed.sample_key(sample_number), float_outputs)

    with (
        phase("observing", len(feed) - counted_samples, "samples") as show_progress,
        # if the run fails, the message says that --resume goes on
        nullcontext() if checkpoint is None else checkpoint.add_resume_hint(),
        feed.samples(already_read=skipped_samples) as samples,
    ):
        return observe(
            decision.missing,
            samples,
            observed=decision.observed,
            threads=threads,
            progress=show_progress,
            inference_counts=run.inference_counts,
            peaks=run.tensor_peaks,
            checkpoint=checkpoint,
            on_outputs=store_outputs,
            halves=halves,
            should_stop=monitor.is_enough if monitor.can_end_pass else None,
        )


def use_trusted_cache(run: CalibrationRun) -> CalibrationResult:
    """Return a calibration with the ranges of a cache that another program wrote, unchecked.

    Such a cache holds one symmetric range for each tensor of the folded model: BatchNormalization
    is folded there. It has no fingerprint, which would tell its model and images.

    Raises:
        ConfigError: no path, or a target that cannot use symmetric ranges.
        CacheError: the cache is of another model.
    """
    subject = run.subject
    path = run.policy.path
    if path is None:
        raise ConfigError("a cache to be trusted must be named, got none; give --cache")
    for target, observations in run.observations_by_target.items():
        # a target that observes another variant than the folded model needs ranges of that, too
        if any(observation.variant.key != FOLDED for observation in observations):
            raise ConfigError(
                f"a trusted cache holds one symmetric range a tensor, of which the target {target}"
                " with this method makes nothing; leave --trust-cache out for it"
            )
    tensors = tuple(observation.tensor for observation in run.observations)
    cached_ranges = read_foreign_ranges(
        path, tensors, never_negative(subject.model), float16_ends(subject.model)
    )
    no_statistics = ObservedStatistics({})
    ranges = Ranges(no_statistics, subject.method, subject.range_limits, trusted=cached_ranges)
    reason = f"{path} is trusted as it is, without a fingerprint"
    decision = CacheDecision(reason=reason, observed=no_statistics, missing=())
    warning = ""
    if run.evaluation_count:  # else it is a calibration without a build
        warning = find_random_outputs(subject.model, run.evaluation_set)
    return _make_result(
        run,
        decision,
        ranges,
        warning=warning,
        has_random_outputs=bool(warning),
    )


def calibrate_run(
    run: CalibrationRun, *, targets: Sequence[Target], stage: Stage | None
) -> CalibrationResult:
    """Observe what the cache lacks, check the float model, and store the calibration.

    Args:
        run: the calibration: which model, images and observations, and its state.
        targets: the targets, one of which may write the cache in a format of its own
            (TensorRT).
        stage: temporary folder of a build's files; None for a calibration alone.
    """
    subject = run.subject
    feed = run.feed
    # the fingerprint is of the model and of the first `image_count` images: a stop rule may have
    # ended the run that made the cache before the last image
    decision = check_cache(
        run.policy,
        lambda image_count: make_fingerprint(subject, feed.manifest(image_count)),
        run.observations,
        stop_rule=run.stop_rule,
    )
    if decision.missing and run.policy.path is not None:
        refuse_unwritable(run.policy.path)  # before the images are run, not after
    pass_result = run.images.observe(run, decision)

    if run.stop_rule is not None:  # it may have ended this pass, too, before the last image
        run = replace(run, evaluation_set=_end_feed_at_last_observed(run, decision))
    # if two halves of the samples give the same ranges, more samples would not change them
    halves_agreement, stability_notes = _compare_halves(run, decision)

    ranges = Ranges(pass_result.observed, subject.method, subject.range_limits)
    target_cache = _make_target_cache(run, ranges, targets)
    warning, has_random_outputs = _check_float_model(run)
    # the checks above ran the float model; targets rarely do, so its memory is freed
    run.evaluation_set.reference_outputs.close_session()
    trim_memory()

    calibration = _make_calibration(run, decision, pass_result)
    update_cache(
        run.policy,
        subject,
        decision,
        calibration,
        ranges,
        cache_text=None if target_cache is None else target_cache.text,
        stage=stage,
    )
    checkpoint = pass_result.checkpoint
    if checkpoint is not None and run.policy.path is not None:
        # the cache has its statistics now. What was resumed from it is still part of the result
        checkpoint.path.unlink(missing_ok=True)
    notes = (*pass_result.notes, *stability_notes)
    if target_cache is not None:
        notes += target_cache.notes
    return _make_result(
        run,
        decision,
        ranges,
        agreement=halves_agreement,
        notes=notes,
        warning=warning,
        has_random_outputs=has_random_outputs,
        outliers=calibration.outliers,
        checkpoint=checkpoint,
    )


def _compare_halves(
    run: CalibrationRun, decision: CacheDecision
) -> tuple[HalvesAgreement | None, tuple[str, ...]]:
    """Return (how far the ranges of two halves of the samples agree, notes on that).

    The agreement is None if nothing was observed, or too little to tell.
    """
    if not decision.missing:
        return None, ()
    inference_count = len(run.feed)
    agreement = run.stability_monitor.compare_finally(inference_count)
    notes: tuple[str, ...] = ()
    if agreement is None and run.stop_rule is not None:
        # the rule compares halves for the first time at 16 samples, and there were fewer
        notes = (f"whether samples are enough is judged from 16 on: there were {inference_count}",)
    if agreement is not None and run.stop_rule is None:
        # all images were run: the monitor counted inferences, each of a batch of them. (A stop rule
        # runs one image an inference, and its agreement is of those up to the stop.)
        agreement = replace(agreement, samples=run.feed.count)
    return agreement, notes


def _check_float_model(run: CalibrationRun) -> tuple[str, bool]:
    """Return (warning, whether the float model gives other outputs at each run).

    The warning is "" for a sound model, and for a calibration without a build, which stores no
    outputs to check.
    """
    if not run.evaluation_count:
        return "", False
    randomness_warning = find_random_outputs(run.subject.model, run.evaluation_set)
    if randomness_warning:
        return randomness_warning, True
    return check_cleaned_model(run.subject, run.evaluation_set), False


def _end_feed_at_last_observed(run: CalibrationRun, decision: CacheDecision) -> EvaluationSet:
    """Let the feed end with the last image that was observed; return its evaluation samples."""
    feed = run.feed
    monitor = run.stability_monitor
    # images up to the last one that was observed, with the unreadable ones that were skipped
    if not decision.missing:  # those that the cache was made of
        assert decision.stored is not None
        image_count = decision.stored.count
    elif monitor.stopped:  # the stop rule ended the pass
        image_count = feed.count_entries(monitor.sample_count)
    else:
        image_count = feed.entry_count
    feed.keep_first(image_count)
    # the samples to evaluate and those that a report shows, spread anew over fewer images
    feed.cache_samples(run.evaluation_count, PREVIEW_COUNT)
    return make_evaluation_set(feed, run.subject.model, run.evaluation_count)


def _make_calibration(
    run: CalibrationRun,
    decision: CacheDecision,
    pass_result: PassResult,
) -> Calibration:
    """Return the content of the cache: the statistics that it had, and those of this run.

    Args:
        run: the calibration: which model, images and observations, and its state.
        decision: the statistics of the cache, and the observations that it lacked.
        pass_result: all statistics.
    """
    run_fingerprint = make_fingerprint(run.subject, run.feed.manifest())  # of model and images
    stop_rule = run.stop_rule
    if decision.stored is not None and not decision.missing:
        # nothing was observed: the rule of the earlier run decided how many images were enough
        stop_rule = decision.stored.stop_rule
    return Calibration(
        observed=pass_result.observed,
        fingerprint=decision.combined_fingerprint(run_fingerprint),
        outliers=(*decision.outliers, *run.tensor_peaks.outliers(run.feed.sample_digests)),
        stop_rule=stop_rule,
    )


def _make_target_cache(
    run: CalibrationRun, ranges: Ranges, targets: Sequence[Target]
) -> CacheText | None:
    """Return the cache as text in the format of a target that has one of its own (TensorRT).

    None without such a target. None also for a shard (`share`), the part of the images that one of
    several machines observes: ranges are found when all shards are merged.
    """
    if run.feed.share is not None:
        return None
    for target in targets:
        if target.name in run.observations_by_target:  # else it cannot be built
            cache = target.cache_text(run.subject, ranges)
            if cache is not None:
                return cache
    return None


def _make_result(
    run: CalibrationRun,
    decision: CacheDecision,
    ranges: Ranges,
    *,
    agreement: HalvesAgreement | None = None,
    notes: tuple[str, ...] = (),
    warning: str,
    has_random_outputs: bool,
    outliers: Iterable[Outlier] = (),
    checkpoint: Checkpoint | None = None,
) -> CalibrationResult:
    """Return the result of a run, with warnings of outliers and of doubtful inputs.

    Most arguments after `ranges` are left out if another program's cache is used unchecked: then
    nothing was observed.

    Args:
        run: the calibration: which model, images and observations, and its state.
        decision: the statistics of the cache, and the observations that it lacked.
        ranges: finds the range of each tensor in its statistics.
        agreement: how far the ranges of two halves of the samples agree; None if unknown.
        notes: sentences on the run.
        warning: sentence on the float model that needs an action; "" without.
        has_random_outputs: whether the float model gives other outputs at each run.
        outliers: samples that alone reach the extremes of a tensor.
        checkpoint: of the run; None without.
    """
    subject = run.subject
    feed = run.feed
    cache = run.policy.path
    outlier_warning = _warn_of_outliers(run, outliers)
    remaining_checkpoint = None
    if checkpoint is not None and cache is None:  # else it was removed when the cache was written
        remaining_checkpoint = checkpoint.path
    input_doubts: tuple[str, ...] = ()
    # merged shards have no images here, and in a single shard every image may be unreadable
    if run.images.is_readable and feed.count:
        input_doubts = tuple(check_feed_inputs(subject, feed))
    return CalibrationResult(
        subject=subject,
        images=run.images.name,
        feed=feed,
        ranges=ranges,
        observations_by_target=run.observations_by_target,
        failures=run.failures,
        observed_now=decision.missing,
        reused=not decision.missing,
        reason=decision.reason,
        seconds=time.perf_counter() - run.started,
        runs=run.inference_counts,
        notes=notes,
        doubts=input_doubts,
        warnings=tuple(filter(None, (*subject.loaded.alerts, outlier_warning, warning))),
        has_random_outputs=has_random_outputs,
        cache=cache,
        peaks=run.tensor_peaks,
        checkpoint=remaining_checkpoint,
        resumed=_resume_notes(checkpoint, run.stability_monitor),
        evaluation_set=run.evaluation_set,
        agreement=agreement,
    )


def _warn_of_outliers(run: CalibrationRun, outliers: Iterable[Outlier]) -> str:
    """Return a warning of samples that alone reach the extremes of a tensor; "" for none.

    The cache may have outliers of tensors that the targets of this run do not observe: of these
    nothing is said.
    """
    observed_tensors = {
        (observation.variant.key, observation.tensor) for observation in run.observations
    }
    run_outliers = [
        outlier for outlier in outliers if (outlier.variant, outlier.tensor) in observed_tensors
    ]
    return describe_outliers(run_outliers, run.feed.name_by_digest()) if run_outliers else ""


def _resume_notes(checkpoint: Checkpoint | None, monitor: StabilityMonitor) -> tuple[str, ...]:
    """Return where a run went on from its checkpoint, and what is unknown then."""
    if checkpoint is None:
        return ()
    notes = list(checkpoint.notes)
    if checkpoint.counted and monitor.halves is not None:
        notes.append("how far two halves of the samples agree is not known of a run that went on")
    return tuple(notes)
