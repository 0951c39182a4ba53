"""A loaded model and images -> `Calibrated`: what is refused, what is found, what is kept.

::

    opened --> prepared (repairs) --> _demands --> Task --> what is found --> Calibrated

Of a Q/DQ model `already_calibrated` takes what its pairs say instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.searches import DEFAULT_METHOD
from deploy.calibration import store
from deploy.calibration.calibrated import MADE_UP, Calibrated, made_up, subject_of, taken
from deploy.calibration.checkpoint import Checkpoint, beside
from deploy.calibration.cluster_jobs import Cluster, cluster_of
from deploy.calibration.expected import odd
from deploy.calibration.observation import Observation, Subject, each_once
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference import judges_of
from deploy.calibration.reuse import CachePolicy, version_in
from deploy.calibration.sample_checks import Outlier, Peaks, Until, standing_out
from deploy.calibration.shards import Shards, refuse_ordered
from deploy.calibration.stability import Watch, refuse
from deploy.errors import Calib8Error, ConfigError, ModelError
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.preview import SHOWN
from deploy.feed.samples import Feed
from deploy.files.staging import Stage, recover
from deploy.frontends import LoadedModel
from deploy.graph.index import matching
from deploy.machine import default_threads
from deploy.method import Method
from deploy.pipeline.observing import Found, Source, Task, called, found_in, opened, trusted
from deploy.pipeline.request import Terms
from deploy.targets import Target
from deploy.targets.base import WritesCache
from deploy.terminal import phase
from deploy.tuning.search_samples import CANDIDATES

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.base import Trained


@phase("calibration")
def calibrated(
    loaded: LoadedModel,
    given: str | Path | onnx.ModelProto | None,
    images: FeedSource | Shards,
    terms: Terms,
    *,
    targets: Sequence[Target],
    policy: CachePolicy,
    judging: int,
    repairs: Sequence[str] = (),
    stage: Stage | None = None,
) -> Calibrated:
    """`deploy.pipeline.calibrate` of a model that is loaded.

    Args beyond those of `calibrate`:
        given: the model as the user gave it.
        terms: how it is calibrated.
        policy: of the cache.
        judging: how many images, at most, will judge what is built.
        repairs: names of `REPAIRS`, of which those before observing are tried.
        stage: what the files of a build wait in; a cache of the same folder appears with them.

    Raises:
        Calib8Error: as `calibrate`.
    """
    from deploy.tuning.repairs.apply import prepared, refuse_trusted, told

    cluster = cluster_of(terms.scheduler)
    source = opened(
        loaded,
        images,
        preprocess=terms.preprocess,
        skip_bad=terms.skip_bad,
        limit=terms.limit,
        cluster=cluster,
    )
    feed = source.feed
    feed.remember(0, judging, SHOWN)
    place = _place(policy, terms)
    _refuse_foreign(policy)
    subject = Subject(
        loaded=loaded,
        given=given,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.filled,
        method=_method(terms.method),
        float_nodes=matching(loaded.model, terms.float_nodes),
        trt_version=policy.trt_version or _builds_here(targets) or version_in(policy),
    )
    workers = terms.threads or default_threads()
    if policy.trust:
        refuse_trusted(repairs)
    folder = Path() if stage is None else stage.folder
    subject, tried = prepared(targets, subject, repairs, feed, folder=folder, threads=workers)
    wanted, failed = _demands(targets, subject)
    _refuse_idle_method(terms.method, subject, wanted)
    task = _task(
        source,
        subject,
        wanted,
        terms,
        policy=policy,
        cluster=cluster,
        judging=judging,
        threads=workers,
        place=place,
    )
    started = time.perf_counter()
    if policy.trust:
        found = trusted(task)
    else:
        found = found_in(task, source, targets=targets, judging=judging, stage=stage)
    seconds = time.perf_counter() - started
    return _calibrated(task, source, found, failed=failed, repairs=told(tried), seconds=seconds)


def _task(
    source: Source,
    subject: Subject,
    wanted: Mapping[str, tuple[Observation, ...]],
    terms: Terms,
    *,
    policy: CachePolicy,
    cluster: Cluster | None,
    judging: int,
    threads: int,
    place: Path | None,
) -> Task:
    """What is to be observed.

    Raises:
        ConfigError: it cannot be observed in this way.
    """
    if source.part is not None:
        refuse_ordered(each_once(wanted), source.part)
    until = None
    if terms.until_stable is not None:
        until = Until(terms.until_stable, subject.method.label)
    if cluster is not None:
        _refuse_cluster(resume=terms.resume, stable=until is not None)
    return Task(
        subject=subject,
        feed=source.feed,
        wanted=wanted,
        policy=policy,
        until=until,
        watch=_watch(subject, wanted, source.feed, until, trusted=policy.trust),
        judges=judges_of(source.feed, subject.model, judging),
        threads=threads,
        place=place,
        resume=terms.resume,
        peaks=Peaks(),
        runs=Counter(),
    )


def _calibrated(
    task: Task,
    source: Source,
    found: Found,
    *,
    failed: Mapping[str, str],
    repairs: Iterable[str],
    seconds: float,
) -> Calibrated:
    """What was found, with what is told of it."""
    subject, policy, mark = task.subject, task.policy, found.mark
    missing = found.verdict.missing
    return Calibrated(
        subject=subject,
        images=source.called,
        feed=task.feed,
        ranges=found.ranges,
        wanted=task.wanted,
        failed=failed,
        observed_now=missing,
        reused=not missing,
        reason=found.verdict.reason,
        seconds=seconds,
        runs=task.runs,
        notes=found.notes,
        doubts=tuple(odd(subject, task.feed)) if source.readable else (),
        warnings=(
            *subject.loaded.cut,
            *_warnings(found.outliers, each_once(task.wanted), task.feed),
        ),
        cache=policy.path,
        repairs=tuple(repairs),
        peaks=task.peaks,
        checkpoint=mark.path if mark is not None and policy.path is None else None,
        resumed=_resumed(mark, task.watch),
        judges=found.judges,
        agreement=found.agreement,
    )


def already_calibrated(
    loaded: LoadedModel,
    trained: Trained,
    images: FeedSource | None,
    terms: Terms,
    *,
    targets: Sequence[Target],
    trt_version: str | None,
) -> Calibrated:
    """The calibration that the pairs of a Q/DQ model say; images are what it is tried on.

    Args as those of `deploy.pipeline.build`.

    Raises:
        Calib8Error: no target can be built for, or the images cannot be opened.
    """
    feed = open_feed(
        made_up(loaded) if images is None else images,
        loaded.inputs,
        preprocess=None if images is None else terms.preprocess,
        carried=loaded.carried,
        skip_bad=terms.skip_bad,
        limit=None if images is None else terms.limit,
    )
    feed.remember(0, CANDIDATES, SHOWN)
    subject = subject_of(loaded, feed, trt_version or _builds_here(targets))
    failed: dict[str, Calib8Error] = {}
    for target in targets:
        try:
            target.demand(subject)
        except Calib8Error as error:
            failed[target.name] = error
    if len(failed) == len(targets):
        raise next(iter(failed.values()))
    source = MADE_UP if images is None else called(images)
    told = {name: str(error) for name, error in failed.items()}
    judges = judges_of(feed, subject.model, CANDIDATES)
    return taken(trained, subject, feed, judges, source, told)


def _method(asked: str | Method | None) -> Method:
    return asked if isinstance(asked, Method) else Method.of(asked or DEFAULT_METHOD)


def _demands(
    targets: Iterable[Target], subject: Subject
) -> tuple[dict[str, tuple[Observation, ...]], dict[str, str]]:
    """What each target wants observed; and why some cannot be built for, where others can.

    Raises:
        Calib8Error: no target can be built for.
        ModelError: no target wants anything.
    """
    wanted: dict[str, tuple[Observation, ...]] = {}
    failed: dict[str, Calib8Error] = {}
    for target in targets:
        try:
            wanted[target.name] = target.demand(subject)
        except Calib8Error as error:
            failed[target.name] = error
    if failed and not wanted:
        raise next(iter(failed.values()))
    if not any(wanted.values()):
        raise ModelError(
            "at least one node of the model must be able to run in int8, got none in"
            f" {subject.loaded.name} (only the main graph counts, not If and Loop bodies);"
            " `calib8 inspect` says why"
        )
    return wanted, {name: str(error) for name, error in failed.items()}


def _refuse_foreign(policy: CachePolicy) -> None:
    """Refuse to write over what is no cache, once what an ended run left is put right."""
    if policy.path is not None and not (policy.trust or policy.require):
        recover(policy.path.parent)
        store.refuse_foreign(policy.path, force=policy.force)


def _refuse_idle_method(
    method: str | Method | None,
    subject: Subject,
    wanted: Mapping[str, tuple[Observation, ...]],
) -> None:
    """Refuse a method that no target searches by."""
    if method is None or any(o.statistic == subject.statistic for o in each_once(wanted)):
        return
    raise ConfigError(
        f"a method is for targets that search by it, got {subject.method.label} for"
        f" {', '.join(wanted)} alone, which has searches of its own; leave the method away"
    )


def _refuse_cluster(*, resume: bool, stable: bool) -> None:
    """Refuse what workers of a scheduler cannot do."""
    if resume:
        raise ConfigError(
            "--resume goes on with a run of this machine, got --scheduler, which keeps no"
            " checkpoint; leave one of them away"
        )
    if stable:
        raise ConfigError(
            "--until-stable looks at images one after the other, got --scheduler, whose workers"
            " share all of them out; leave one of them away"
        )


def _place(policy: CachePolicy, terms: Terms) -> Path | None:
    """Where the state of a run is kept; nowhere of one that looks at as few samples as it takes.

    Raises:
        ConfigError: it is to be gone on from, and there is no place; or nothing is observed.
    """
    checkpoint, resume = terms.checkpoint, terms.resume
    stable = terms.until_stable is not None
    if resume and (policy.require or policy.trust):
        flag = "--require-cache" if policy.require else "--trust-cache"
        raise ConfigError(
            f"--resume goes on observing and {flag} takes a cache as it is; leave one of them away"
        )
    if stable and resume:
        raise ConfigError(
            "--resume goes on with a run over all samples, got --until-stable, which looks at as"
            " few as it takes and keeps no checkpoint; leave one of them away"
        )
    if stable:
        return None
    if checkpoint is None and policy.path is not None:
        return beside(policy.path)
    if resume and checkpoint is None:
        raise ConfigError(
            "to go on with a run there must be a cache beside which its checkpoint stands, or the"
            " checkpoint itself, got neither; name one"
        )
    return checkpoint


def _watch(
    subject: Subject,
    wanted: Mapping[str, tuple[Observation, ...]],
    feed: Feed,
    until: Until | None,
    *,
    trusted: bool,
) -> Watch:
    """What tells whether the samples are enough; where it decides, they come spread over all.

    Raises:
        ConfigError: `until` is asked for where it cannot decide.
    """
    listed = each_once(wanted)
    searched = [o for o in listed if o.statistic == subject.statistic and not o.by_order]
    if until is not None:
        refuse(feed, listed, searched, trusted=trusted)
        feed.scatter()
    alone = searched if feed.share is None else ()  # half of a part tells nothing of the whole
    return Watch(alone, lambda found: Ranges(found, subject.method, subject.reaches), until)


def _builds_here(targets: Iterable[Target]) -> str | None:
    """The version that reads the cache on this machine, where there is one."""
    versions = (target.cache_version() for target in targets if isinstance(target, WritesCache))
    return next((version for version in versions if version is not None), None)


def _warnings(
    outliers: Iterable[Outlier], wanted: Iterable[Observation], feed: Feed
) -> tuple[str, ...]:
    """What is told of samples that stand out in what this run wants."""
    places = {(o.variant.key, o.tensor) for o in wanted}
    own = [one for one in outliers if (one.variant, one.tensor) in places]
    return (standing_out(own, feed.called()),) if own else ()


def _resumed(mark: Checkpoint | None, watch: Watch) -> tuple[str, ...]:
    """From where a run went on, and what is not known of it then."""
    if mark is None:
        return ()
    unknown = mark.counted and watch.halves is not None
    halves = "how far two halves of the samples agree is not known of a run that went on"
    return (*mark.notes, *((halves,) if unknown else ()))
