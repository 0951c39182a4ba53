"""Who observes what a calibration lacks: this machine, workers of a scheduler, or shards did.

::

    Source.observe --> on_this_machine   one pass here, with a checkpoint now and then
                   --> on_workers        the same pass in pieces, elsewhere
                   --> from_shards       merged: nothing is run

`opened` decides which of them it is, once; all that comes after it asks no more.

The ranges of one calibration: what the cache holds, what is observed beside it, and both kept.

::

    judge (the cache) --> observe what is missing --> Ranges --> keep

A cache that is trusted is taken as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deploy.calibration import one_pass
from deploy.calibration.checkpoint import Checkpoint, clear
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.observation import FOLDED, Observation, Observed, Subject, each_once
from deploy.calibration.one_pass import observe, planned
from deploy.calibration.ranges import Ranges, of_foreign
from deploy.calibration.reference import Judges, judges_of
from deploy.calibration.reuse import CachePolicy, Verdict, fingerprint_of, judge, keep
from deploy.calibration.sample_checks import Agreement, Outlier, Peaks, Until, identified
from deploy.calibration.shards import Shards, refuse_ordered
from deploy.calibration.stability import Watch
from deploy.calibration.store import Calibration
from deploy.errors import ConfigError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Asked
from deploy.feed.preview import SHOWN
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.files.staging import Stage
from deploy.frontends import LoadedModel
from deploy.graph.plan import never_negative
from deploy.targets import Target
from deploy.targets.base import CacheText, WritesCache
from deploy.terminal import phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be observed of what, and what is told of it meanwhile.

    Attributes:
        subject: the model, its forms, the method.
        feed: the images.
        wanted: target -> what it wants observed.
        policy: where the calibration is kept.
        until: when it is enough; None after all images.
        watch: is told halves of the images, and says whether they are enough.
        judges: samples that judge what is built; outputs of the float model are kept for them.
        threads: workers that were asked for.
        place: where the state of the run is kept; None for nowhere.
        resume: whether it goes on from there.
        peaks: is told the largest |x| of every tensor.
        runs: raised by the inferences, by the variant's key.
    """

    subject: Subject
    feed: Feed
    wanted: Mapping[str, tuple[Observation, ...]]
    policy: CachePolicy
    until: Until | None
    watch: Watch
    judges: Judges
    threads: int
    place: Path | None
    resume: bool
    peaks: Peaks
    runs: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the cache held and what was observed beside it.

    Attributes:
        observed: all of it.
        notes: where and how, in sentences.
        mark: what the run could be gone on from; None where no state was kept.
    """

    observed: Observed
    notes: tuple[str, ...] = ()
    mark: Checkpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The images of a calibration.

    Attributes:
        feed: them.
        called: where they came from, in words.
        part: what of a whole they are, or are put together from, in words; None for neither.
        readable: whether they can be looked at here.
        observe: (task, what the cache holds, workers that memory suffices for) -> what was seen.
    """

    feed: Feed
    called: str
    part: str | None
    readable: bool
    observe: Callable[[Task, Verdict, int], Seen]


def opened(
    loaded: LoadedModel,
    images: FeedSource | Shards,
    *,
    preprocess: Asked,
    skip_bad: bool,
    limit: Limit,
    cluster: Cluster | None,
) -> Source:
    """The images of a calibration, and who observes them.

    Args as those of `deploy.pipeline.calibrate`, and:
        images: or the shards that were observed.
        cluster: the scheduler whose workers observe.

    Raises:
        FeedError, ConfigError: as `open_feed`.
    """
    if isinstance(images, Shards):
        return Source(
            feed=images.feed,
            called=str(images),
            part="a shard (got merged)",
            readable=False,
            observe=partial(from_shards, images),
        )
    feed = open_feed(
        images,
        loaded.inputs,
        preprocess=preprocess,
        carried=loaded.carried,
        skip_bad=skip_bad,
        limit=limit,
    )
    return Source(
        feed=feed,
        called=called(images),
        part=None if feed.share is None else f"a shard (got {feed.share})",
        readable=True,
        observe=on_this_machine if cluster is None else partial(on_workers, cluster, images, limit),
    )


def called(images: FeedSource) -> str:
    """Where images came from, in words."""
    named = isinstance(images, str | Path | CalibratorScript | RawFiles)
    return str(images) if named else "arrays in memory"


def from_shards(shards: Shards, task: Task, verdict: Verdict, threads: int) -> Seen:
    """What the shards of other machines hold, merged.

    Raises:
        CacheError: a shard lacks an observation.
    """
    return Seen(observed=verdict.observed.and_also(shards.observed(verdict.missing, task.peaks)))


def on_workers(
    cluster: Cluster,
    images: FeedSource,
    limit: Limit,
    task: Task,
    verdict: Verdict,
    threads: int,
) -> Seen:
    """What the workers of a scheduler observe.

    Raises:
        ConfigError: a statistic that the images' order shows in.
        BackendError, FeedError, Calib8Error: as `deploy.calibration.cluster.observe_on`.
    """
    if not verdict.missing:
        return Seen(observed=verdict.observed)
    from deploy.calibration.cluster import observe_on

    refuse_ordered(verdict.missing, "a piece of a calibration (got --scheduler)")
    new, notes = observe_on(
        cluster,
        verdict.missing,
        task.feed,
        subject=task.subject,
        images=images,
        limit=limit,
        peaks=task.peaks,
        runs=task.runs,
    )
    return Seen(observed=verdict.observed.and_also(new), notes=notes)


def on_this_machine(task: Task, verdict: Verdict, threads: int) -> Seen:
    """What one pass here observes.

    Raises:
        CacheError: a checkpoint that cannot be gone on from.
        FeedError, BackendError, CalibrationError: as the pass.
    """
    plan = planned(verdict.missing, verdict.observed)
    mark: Checkpoint | None = None
    if task.place is not None and plan.late:
        mark = Checkpoint(
            task.place,
            task.subject,
            task.feed,
            plan.late,
            task.peaks,
            resume=task.resume,
            force=task.policy.force,
        )
    elif task.place is not None and task.resume:
        clear(task.place)
    observed = _completed(task, verdict, plan.first, mark, threads=threads)
    return Seen(observed=observed, notes=_fewer(threads, task.threads), mark=mark)


def _completed(
    task: Task, verdict: Verdict, first: int, mark: Checkpoint | None, *, threads: int
) -> Observed:
    """What the cache holds, and what is observed now because it is missing there."""
    if not verdict.missing:
        return verdict.observed
    feed, watch, outputs = task.feed, task.watch, task.judges.outputs
    counted = 0 if mark is None else mark.counted
    with (
        phase("observing", len(feed) - counted, "samples") as step,
        nullcontext() if mark is None else mark.telling(),
        feed.samples(without=range(first, counted)) as samples,
    ):
        new = observe(
            verdict.missing,
            samples,
            known=verdict.observed,
            threads=threads,
            progress=step,
            runs=task.runs,
            peaks=task.peaks,
            keeper=mark,
            keep=lambda number, values: outputs.add(feed.key(number), values),
            halves=None if counted else watch.halves,  # of those counted nobody knows the halves
            enough=watch.enough if watch.decides else None,
        )
    return verdict.observed.and_also(new)


def _fewer(able: int, asked: int) -> tuple[str, ...]:
    """What to say where memory does not suffice for all workers."""
    if able >= asked:
        return ()
    return (f"calibrated with {able} of {asked} threads: memory does not suffice for more.",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a calibration comes to.

    Attributes:
        verdict: what the cache held.
        ranges: what was observed, and the clip ranges in it.
        judges: samples that judge what is built.
        agreement: how far halves of the samples agree, where that is known.
        notes: what is to be said of it, in sentences.
        outliers: samples that stand out.
        mark: what the run could have been gone on from.
    """

    verdict: Verdict
    ranges: Ranges
    judges: Judges
    agreement: Agreement | None = None
    notes: tuple[str, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    mark: Checkpoint | None = None


def trusted(task: Task) -> Found:
    """A foreign cache, taken as it is.

    Raises:
        ConfigError: no path, or a target that makes nothing of a symmetric range.
        CacheError: it is not the model's.
    """
    subject, path = task.subject, task.policy.path
    if path is None:
        raise ConfigError("a cache to be trusted must be named, got none; give --cache")
    for name, own in task.wanted.items():
        if any(o.variant.key != FOLDED for o in own):
            raise ConfigError(
                f"a trusted cache holds one symmetric range a tensor, of which the target {name}"
                " with this method makes nothing; leave --trust-cache away for it"
            )
    tensors = tuple(o.tensor for o in each_once(task.wanted))
    found = of_foreign(path, tensors, never_negative(subject.model))
    reason = f"{path} is trusted as it is, without a fingerprint"
    return Found(
        verdict=Verdict(reason=reason, observed=Observed({}), missing=()),
        ranges=Ranges(Observed({}), subject.method, subject.reaches, trusted=found),
        judges=task.judges,
    )


def found_in(
    task: Task, source: Source, *, targets: Sequence[Target], judging: int, stage: Stage | None
) -> Found:
    """What the cache holds and what is observed beside it, and the ranges in both; it is kept.

    Raises:
        Calib8Error: as `deploy.pipeline.calibrate`.
    """
    subject, feed, watch = task.subject, task.feed, task.watch
    verdict = judge(
        task.policy,
        lambda count: fingerprint_of(subject, feed.manifest(count)),
        each_once(task.wanted),
        until=task.until,
    )
    able = one_pass.workers(verdict.missing, subject.model, task.threads)
    seen = source.observe(task, verdict, able)
    judges = task.judges
    if task.until is not None:
        feed.keep(_reached(verdict, feed, watch))
        feed.remember(0, judging, SHOWN)
        judges = judges_of(feed, subject.model, judging)
    ranges = Ranges(seen.observed, subject.method, subject.reaches)
    agreement = watch.end(len(feed)) if verdict.missing else None
    alone = [t for t in targets if t.name in task.wanted and feed.share is None]
    own = _own_text(alone, subject, ranges)  # of a shard, it is that of the whole
    few = _too_few(feed) if task.until and verdict.missing and agreement is None else ()
    calibration = _calibration(task, verdict, seen.observed)
    text = own.text if own else None
    keep(task.policy, subject, verdict, calibration, ranges, text=text, stage=stage)
    if seen.mark is not None and task.policy.path is not None:
        seen.mark.path.unlink(missing_ok=True)
    return Found(
        verdict=verdict,
        ranges=ranges,
        judges=judges,
        agreement=agreement,
        notes=(*seen.notes, *few, *(own.notes if own else ())),
        outliers=calibration.outliers,
        mark=seen.mark,
    )


def _calibration(task: Task, verdict: Verdict, observed: Observed) -> Calibration:
    """What is kept."""
    kept = verdict.stored if not verdict.missing else None
    return Calibration(
        observed=observed,
        fingerprint=verdict.of_all(fingerprint_of(task.subject, task.feed.manifest())),
        outliers=(*verdict.outliers, *identified(task.peaks, task.feed.digests)),
        until=kept.until if kept else task.until,
    )


def _reached(verdict: Verdict, feed: Feed, watch: Watch) -> int:
    """How many images were looked at, now or when the cache was made."""
    if not verdict.missing:
        assert verdict.stored is not None
        return verdict.stored.count
    return feed.reached(watch.samples) if watch.stopped else feed.opened


def _own_text(targets: Iterable[Target], subject: Subject, ranges: Ranges) -> CacheText | None:
    """The first target's own form of the cache."""
    writers = (target for target in targets if isinstance(target, WritesCache))
    return next((target.cache_text(subject, ranges) for target in writers), None)


def _too_few(feed: Feed) -> tuple[str, ...]:
    """What to say where there is nothing to hold the first ranges against."""
    return (f"whether samples are enough is told from 16 on: there were {len(feed)}",)
