"""The ranges of one calibration: what the cache holds, what is observed beside it, and both kept.

::

    judge (the cache) --> observe what is missing --> Ranges --> keep

A cache that is trusted is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.calibration import afford
from deploy.calibration.checkpoint import Checkpoint
from deploy.calibration.found import of_foreign
from deploy.calibration.keep import keep
from deploy.calibration.observation import Observed, each_once
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference import Judges, judges_of
from deploy.calibration.reuse import Verdict, fingerprint_of, judge
from deploy.calibration.sample_checks import Outlier, identified
from deploy.calibration.stability import Watch
from deploy.calibration.store import Calibration
from deploy.calibration.subject import FOLDED, Subject
from deploy.calibration.until import Agreement
from deploy.errors import ConfigError
from deploy.feed.preview import SHOWN
from deploy.feed.samples import Feed
from deploy.files.staging import Stage
from deploy.graph.plan import never_negative
from deploy.pipeline.observing import Source, Task
from deploy.targets import Target
from deploy.targets.base import CacheText, WritesCache


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
    able = afford.workers(verdict.missing, subject.model, task.threads)
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


__all__ = ["Found", "found_in", "trusted"]
