"""Observe what a calibration lacks, and search and store its ranges.

::

    judge (the cache) --> observe what is missing --> Ranges --> keep
                              |
    CalibrationImages.observe +--> on_this_machine   one pass here, with checkpoints
                              +--> on_workers        the same pass in pieces, on a dask cluster
                              '--> from_shards       merged: nothing is run

`open_images` decides once which of the three observes. A trusted cache is taken as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.calibration import one_pass
from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.checkpoint import Checkpoint, remove_finished_checkpoint
from deploy.calibration.cluster import observe_on
from deploy.calibration.cluster_jobs import Cluster
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
    identify_outliers,
)
from deploy.calibration.shards import ShardSet, refuse_ordered
from deploy.calibration.stability import StabilityMonitor
from deploy.calibration.store import Calibration
from deploy.errors import ConfigError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import Dataset, FeedSource
from deploy.feed.paths import RawFiles
from deploy.feed.preview import PREVIEW_COUNT
from deploy.feed.samples import Feed
from deploy.files.guard import refuse_unwritable
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel
from deploy.graph.plan import never_negative
from deploy.pipeline.float_reference import check_cleaned_model
from deploy.targets import Target
from deploy.targets.base import WritesCache
from deploy.terminal import phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What the cache held and what was observed now.

    Attributes:
        checkpoint: the checkpoint of the pass; None where no state was kept.
    """

    observed: ObservedStatistics
    notes: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationImages:
    """The images of a calibration, and what observes them.

    Attributes:
        shard: which shard they are, or that they are merged shards; None for neither.
        observe: (run, what the cache holds, worker threads that memory suffices for) -> result.
    """

    feed: Feed
    name: str
    shard: str | None
    is_readable: bool
    observe: Callable[[CalibrationRun, CacheDecision, int], PassResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """One calibration: what is observed of which model on which images, and its running state.

    Attributes:
        wanted: target -> its observations.
        until: when there are enough images; None uses all.
        judges: evaluation samples; the float model's outputs of them are stored meanwhile.
        checkpoint: path of the checkpoint; None keeps none.
        started: `time.perf_counter()` at its start.
    """

    subject: CalibrationSubject
    images: CalibrationImages
    wanted: Mapping[str, tuple[Observation, ...]]
    failed: Mapping[str, str]
    policy: CachePolicy
    until: StabilityRule | None
    watch: StabilityMonitor
    judges: EvaluationSet
    evaluation_count: int
    threads: int
    checkpoint: Path | None
    resume: bool
    repairs: tuple[str, ...] = ()
    peaks: Peaks = field(default_factory=Peaks)
    runs: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)

    @property
    def feed(self) -> Feed:
        """The calibration images."""
        return self.images.feed

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Everything that the targets want, each observation once."""
        return unique_observations(self.wanted)


def open_images(
    loaded: LoadedModel, images: Dataset | ShardSet, *, cluster: Cluster | None
) -> CalibrationImages:
    """Open the images of a calibration, or the shards that were observed of them.

    `cluster`: the scheduler whose workers observe; None observes here.
    """
    if isinstance(images, ShardSet):
        return CalibrationImages(
            feed=images.feed,
            name=str(images),
            shard="a shard (got merged)",
            is_readable=False,
            observe=partial(from_shards, images),
        )
    feed = images.open(loaded.inputs, metadata_preprocess=loaded.metadata_preprocess)
    return CalibrationImages(
        feed=feed,
        name=source_name(images.source),
        shard=None if feed.share is None else f"a shard (got {feed.share})",
        is_readable=True,
        observe=on_this_machine if cluster is None else partial(on_workers, cluster, images),
    )


def source_name(images: FeedSource) -> str:
    """Where images came from, for the report."""
    has_path = isinstance(images, str | Path | CalibratorScript | RawFiles)
    return str(images) if has_path else "arrays in memory"


def from_shards(
    shards: ShardSet, run: CalibrationRun, verdict: CacheDecision, threads: int
) -> PassResult:
    """Merge what the shards of other machines hold.

    Raises:
        CacheError: a shard lacks an observation.
    """
    new = shards.observed(verdict.missing, run.peaks)
    return PassResult(observed=verdict.observed.merged_with(new))


def on_workers(
    cluster: Cluster, images: Dataset, run: CalibrationRun, verdict: CacheDecision, threads: int
) -> PassResult:
    """Observe on the workers of a scheduler.

    Raises:
        ConfigError: a statistic that depends on the order of the images.
        BackendError, FeedError, Calib8Error: as `deploy.calibration.cluster.observe_on`.
    """
    if not verdict.missing:
        return PassResult(observed=verdict.observed)
    refuse_ordered(verdict.missing, "a piece of a calibration (got --scheduler)")
    new, notes = observe_on(
        cluster,
        verdict.missing,
        run.feed,
        subject=run.subject,
        images=images.source,
        limit=images.limit,
        peaks=run.peaks,
        runs=run.runs,
    )
    return PassResult(observed=verdict.observed.merged_with(new), notes=notes)


def on_this_machine(run: CalibrationRun, verdict: CacheDecision, threads: int) -> PassResult:
    """Observe in one pass here.

    Raises:
        CacheError: a checkpoint from which the run cannot go on.
        FeedError, BackendError, CalibrationError: as the pass.
    """
    plan = schedule_observations(verdict.missing, verdict.observed)
    checkpoint: Checkpoint | None = None
    if run.checkpoint is not None and plan.late:
        checkpoint = Checkpoint(
            run.checkpoint,
            run.subject,
            run.feed,
            plan.late,
            run.peaks,
            resume=run.resume,
            force=run.policy.force,
        )
    elif run.checkpoint is not None and run.resume:
        remove_finished_checkpoint(run.checkpoint)
    observed = verdict.observed
    if verdict.missing:
        feed, watch, outputs = run.feed, run.watch, run.judges.outputs
        counted = 0 if checkpoint is None else checkpoint.counted
        with (
            phase("observing", len(feed) - counted, "samples") as step,
            nullcontext() if checkpoint is None else checkpoint.add_resume_hint(),
            feed.samples(without=range(plan.first, counted)) as samples,
        ):
            new = observe(
                verdict.missing,
                samples,
                known=observed,
                threads=threads,
                progress=step,
                runs=run.runs,
                peaks=run.peaks,
                checkpoint=checkpoint,
                on_outputs=lambda number, values: outputs.add(feed.sample_key(number), values),
                halves=None if counted else watch.halves,  # a checkpoint does not hold the halves
                should_stop=watch.is_enough if watch.decides else None,
            )
        observed = observed.merged_with(new)
    notes: tuple[str, ...] = ()
    if threads < run.threads:
        notes = (
            f"calibrated with {threads} of {run.threads} threads: memory does not suffice for"
            " more.",
        )
    return PassResult(observed=observed, notes=notes, checkpoint=checkpoint)


def take_trusted(run: CalibrationRun) -> CalibrationResult:
    """Take a foreign cache as it is.

    Raises:
        ConfigError: no path, or a target that cannot use symmetric ranges.
        CacheError: the cache is of another model.
    """
    subject, path = run.subject, run.policy.path
    if path is None:
        raise ConfigError("a cache to be trusted must be named, got none; give --cache")
    for name, own in run.wanted.items():
        if any(o.variant.key != FOLDED for o in own):
            raise ConfigError(
                f"a trusted cache holds one symmetric range a tensor, of which the target {name}"
                " with this method makes nothing; leave --trust-cache out for it"
            )
    tensors = tuple(o.tensor for o in run.observations)
    known = read_foreign_ranges(path, tensors, never_negative(subject.model))
    reason = f"{path} is trusted as it is, without a fingerprint"
    return _calibrated(
        run,
        CacheDecision(reason=reason, observed=ObservedStatistics({}), missing=()),
        Ranges(ObservedStatistics({}), subject.method, subject.range_limits, trusted=known),
    )


def calibrate_run(
    run: CalibrationRun, *, targets: Sequence[Target], stage: Stage | None
) -> CalibrationResult:
    """Observe what the cache lacks, search all ranges, and store the calibration."""
    subject, feed, watch = run.subject, run.feed, run.watch
    verdict = check_cache(
        run.policy,
        lambda count: make_fingerprint(subject, feed.manifest(count)),
        run.observations,
        until=run.until,
    )
    if verdict.missing and run.policy.path is not None:
        refuse_unwritable(run.policy.path)
    able = one_pass.count_workers(verdict.missing, subject.model, run.threads)
    seen = run.images.observe(run, verdict, able)
    judges = run.judges
    if run.until is not None:
        feed.keep_first(_reached(verdict, feed, watch))
        feed.cache_samples(0, run.evaluation_count, PREVIEW_COUNT)
        judges = make_evaluation_set(feed, subject.model, run.evaluation_count)
    ranges = Ranges(seen.observed, subject.method, subject.range_limits)
    agreement = watch.end(len(feed)) if verdict.missing else None
    # of the first target that has a form of its own; a shard has no text: merging writes it
    alone = (t for t in targets if t.name in run.wanted and feed.share is None)
    own = next((t.cache_text(subject, ranges) for t in alone if isinstance(t, WritesCache)), None)
    few: tuple[str, ...] = ()
    if run.until and verdict.missing and agreement is None:
        few = (f"whether samples are enough is told from 16 on: there were {len(feed)}",)
    warnings: tuple[str, ...] = ()
    drawn = find_random_outputs(subject.model, judges) if run.evaluation_count else ""
    if run.evaluation_count:
        doubt = drawn or check_cleaned_model(subject, judges)
        warnings = (doubt,) if doubt else ()
    known = verdict.stored if not verdict.missing else None
    calibration = Calibration(
        observed=seen.observed,
        fingerprint=verdict.combined_fingerprint(make_fingerprint(subject, feed.manifest())),
        outliers=(*verdict.outliers, *identify_outliers(run.peaks, feed.sample_digests)),
        until=known.until if known else run.until,
    )
    text = own.text if own else None
    update_cache(run.policy, subject, verdict, calibration, ranges, text=text, stage=stage)
    if seen.checkpoint is not None and run.policy.path is not None:
        seen.checkpoint.path.unlink(missing_ok=True)
    return _calibrated(
        run,
        verdict,
        ranges,
        judges=judges,
        agreement=agreement,
        notes=(*seen.notes, *few, *(own.notes if own else ())),
        warnings=warnings,
        draws=bool(drawn),
        outliers=calibration.outliers,
        checkpoint=seen.checkpoint,
    )


def _calibrated(
    run: CalibrationRun,
    verdict: CacheDecision,
    ranges: Ranges,
    *,
    judges: EvaluationSet | None = None,
    agreement: HalvesAgreement | None = None,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    draws: bool = False,
    outliers: Iterable[Outlier] = (),
    checkpoint: Checkpoint | None = None,
) -> CalibrationResult:
    """The result of a run."""
    subject, feed, path = run.subject, run.feed, run.policy.path
    places = {(o.variant.key, o.tensor) for o in run.observations}
    own = [one for one in outliers if (one.variant, one.tensor) in places]
    far = (describe_outliers(own, feed.name_by_digest()),) if own else ()
    return CalibrationResult(
        subject=subject,
        images=run.images.name,
        feed=feed,
        ranges=ranges,
        observations_by_target=run.wanted,
        failures=run.failed,
        observed_now=verdict.missing,
        reused=not verdict.missing,
        reason=verdict.reason,
        seconds=time.perf_counter() - run.started,
        runs=run.runs,
        notes=notes,
        doubts=tuple(check_feed_inputs(subject, feed)) if run.images.is_readable else (),
        warnings=(*subject.loaded.cut_notes, *far, *warnings),
        has_random_outputs=draws,
        cache=path,
        repairs=run.repairs,
        peaks=run.peaks,
        checkpoint=checkpoint.path if checkpoint is not None and path is None else None,
        resumed=_resumed(checkpoint, run.watch),
        evaluation_set=judges or run.judges,
        agreement=agreement,
    )


def _reached(verdict: CacheDecision, feed: Feed, watch: StabilityMonitor) -> int:
    """Number of images that were observed, now or when the cache was made."""
    if not verdict.missing:
        assert verdict.stored is not None
        return verdict.stored.count
    return feed.count_entries(watch.samples) if watch.stopped else feed.entry_count


def _resumed(checkpoint: Checkpoint | None, watch: StabilityMonitor) -> tuple[str, ...]:
    """Where a run went on from its checkpoint, and what cannot be told then."""
    if checkpoint is None:
        return ()
    unknown = checkpoint.counted and watch.halves is not None
    halves = "how far two halves of the samples agree is not known of a run that went on"
    return (*checkpoint.notes, *((halves,) if unknown else ()))
