"""Prepare a calibration of a loaded model, check its options, and run it.

::

    open_images --> repairs --> what the targets demand --> CalibrationRun --> Calibrated

`already_calibrated` takes what the pairs of a Q/DQ model say instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx

from calibrators.searches import DEFAULT_METHOD
from deploy.calibration import store
from deploy.calibration.calibration_result import CalibrationResult, QdqModelRanges
from deploy.calibration.checkpoint import checkpoint_path
from deploy.calibration.cluster_jobs import as_cluster
from deploy.calibration.observation import CalibrationSubject, Observation, unique_observations
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.calibration.reuse import CachePolicy, cached_trt_version
from deploy.calibration.sample_checks import StabilityRule
from deploy.calibration.shards import ShardSet, refuse_ordered
from deploy.calibration.stability import StabilityMonitor, refuse_until_stable
from deploy.errors import Calib8Error, ConfigError, ModelError
from deploy.feed.feed import Dataset
from deploy.feed.preview import PREVIEW_COUNT
from deploy.feed.samples import Feed
from deploy.files.manifest import RECORDS
from deploy.files.staging import Stage, recover
from deploy.frontends import LoadedModel
from deploy.frontends.base import QdqCalibration
from deploy.graph.index import match_nodes
from deploy.method import Method
from deploy.metrics.bench_inputs import random_feeds
from deploy.pipeline.build_options import CalibrationOptions
from deploy.pipeline.calibration_run import (
    CalibrationRun,
    calibrate_run,
    open_images,
    source_name,
    take_trusted,
)
from deploy.targets import Target
from deploy.targets.base import WritesCache
from deploy.terminal import phase
from deploy.tuning.repairs.apply import refuse_model_repairs, repair_model, repair_notes
from deploy.tuning.search_samples import CANDIDATES

_TRIED = 2  # random samples for a Q/DQ model without images


@phase("calibration")
def calibrate_loaded(
    loaded: LoadedModel,
    given: str | Path | onnx.ModelProto | None,
    images: Dataset | ShardSet,
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
    judging: int,
    repairs: Sequence[str] = (),
    task: str = "",
    stage: Stage | None = None,
) -> CalibrationResult:
    """Calibrate a model that is loaded; `deploy.pipeline.calibrate` describes the options.

    `stage`: where the files of a build wait; a cache in the same folder appears with them.
    """
    policy, cluster = options.cache, as_cluster(options.scheduler)
    source = open_images(loaded, images, cluster=cluster)
    feed = source.feed
    feed.remember(0, judging, PREVIEW_COUNT)
    checkpoint = _checkpoint_path(options)
    _refuse_foreign(policy)
    asked = options.method
    subject = CalibrationSubject(
        loaded=loaded,
        user_model=given,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.filled,
        method=asked if isinstance(asked, Method) else Method.of(asked or DEFAULT_METHOD),
        task=task,
        float_nodes=match_nodes(loaded.model, options.float_nodes),
        trt_version=policy.trt_version or _builds_here(targets) or cached_trt_version(policy),
    )
    if policy.trust:
        refuse_model_repairs(repairs)
    folder = Path() if stage is None else stage.folder
    subject, tried = repair_model(
        targets, subject, repairs, feed, folder=folder, threads=options.workers
    )
    wanted, failed = _demands(targets, subject)
    if not any(wanted.values()):
        raise ModelError(
            "at least one node of the model must be able to run in int8, got none in"
            f" {subject.loaded.name} (only the main graph counts, not If and Loop bodies);"
            " `calib8 inspect` says why"
        )
    _refuse_idle_method(options.method, subject, wanted)
    if source.shard is not None:
        refuse_ordered(unique_observations(wanted), source.shard)
    until = None
    if options.until_stable is not None:
        until = StabilityRule(options.until_stable, subject.method.label)
    if cluster is not None and options.resume:
        raise ConfigError(
            "--resume goes on with a run of this machine, got --scheduler, which keeps no"
            " checkpoint; leave one of them out"
        )
    if cluster is not None and options.until_stable is not None:
        raise ConfigError(
            "--until-stable looks at images one after the other, got --scheduler, whose workers"
            " share all of them out; leave one of them out"
        )
    run = CalibrationRun(
        subject=subject,
        images=source,
        wanted=wanted,
        failed=failed,
        policy=policy,
        until=until,
        watch=_watch(subject, wanted, feed, until, trusted=policy.trust),
        judges=make_evaluation_set(feed, subject.model, judging),
        judging=judging,
        threads=options.workers,
        checkpoint=checkpoint,
        resume=options.resume,
        repairs=tuple(repair_notes(tried)),
    )
    return take_trusted(run) if policy.trust else calibrate_run(run, targets=targets, stage=stage)


def already_calibrated(
    loaded: LoadedModel,
    trained: QdqCalibration,
    dataset: Dataset | None,
    *,
    targets: Sequence[Target],
    trt_version: str | None,
) -> CalibrationResult:
    """Return the calibration that the pairs of a Q/DQ model hold.

    `dataset`: images to try it on; None makes samples up.
    `trt_version`: TensorRT that is to read the cache; None for the one that builds here.

    Raises:
        Calib8Error: no target can be built for, or the images cannot be opened.
    """
    if dataset is None:  # random samples, which are not used for accuracy
        opened, name = Dataset(source=random_feeds(loaded.inputs, count=_TRIED)), "random numbers"
    else:
        opened, name = dataset, source_name(dataset.source)
    feed = opened.open(loaded.inputs, carried=loaded.carried)
    feed.remember(0, CANDIDATES, PREVIEW_COUNT)
    subject = CalibrationSubject(
        loaded=loaded,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.filled,
        method=Method.of(),
        trt_version=trt_version or _builds_here(targets),
    )
    _, failed = _demands(targets, subject)
    return CalibrationResult(
        subject=subject,
        images=name,
        feed=feed,
        ranges=QdqModelRanges(trained, subject),
        evaluation_set=make_evaluation_set(feed, subject.model, CANDIDATES),
        observations_by_target={},
        failures=failed,
        observed_now=(),
        reused=False,
        reason="the model is quantized already, and its Q/DQ pairs give every range",
        seconds=0.0,
        runs={},
    )


def _demands(
    targets: Iterable[Target], subject: CalibrationSubject
) -> tuple[dict[str, tuple[Observation, ...]], dict[str, str]]:
    """(target -> its observations, target -> why it cannot be built for); one target can."""
    wanted: dict[str, tuple[Observation, ...]] = {}
    failed: dict[str, Calib8Error] = {}
    for target in targets:
        try:
            wanted[target.name] = target.demand(subject)
        except Calib8Error as error:
            failed[target.name] = error
    if failed and not wanted:
        raise next(iter(failed.values()))
    return wanted, {name: str(error) for name, error in failed.items()}


def _refuse_foreign(policy: CachePolicy) -> None:
    """Finish or undo an interrupted write, then refuse to overwrite a file that is no cache."""
    if policy.path is not None and not (policy.trust or policy.require):
        folder = policy.path.parent
        recover(folder.parent if folder.name == RECORDS else folder)
        store.refuse_foreign_cache(policy.path, force=policy.force)


def _refuse_idle_method(
    method: str | Method | None,
    subject: CalibrationSubject,
    wanted: Mapping[str, tuple[Observation, ...]],
) -> None:
    """Refuse a method that no target searches by."""
    if method is None or any(o.statistic == subject.statistic for o in unique_observations(wanted)):
        return
    raise ConfigError(
        f"a method is for targets that search by it, got {subject.method.label} for"
        f" {', '.join(wanted)} alone, which has searches of its own; leave the method out"
    )


def _checkpoint_path(options: CalibrationOptions) -> Path | None:
    """Path of the checkpoint; None with --until-stable, which looks at few samples."""
    policy, checkpoint, resume = options.cache, options.checkpoint, options.resume
    if resume and (policy.require or policy.trust):
        flag = "--require-cache" if policy.require else "--trust-cache"
        raise ConfigError(
            f"--resume goes on observing and {flag} takes a cache as it is; leave one of them out"
        )
    if options.until_stable is not None:
        if resume:
            raise ConfigError(
                "--resume goes on with a run over all samples, got --until-stable, which looks at"
                " as few as it takes and keeps no checkpoint; leave one of them out"
            )
        return None
    if checkpoint is None and policy.path is not None:
        return checkpoint_path(policy.path)
    if resume and checkpoint is None:
        raise ConfigError(
            "to go on with a run there must be a cache beside which its checkpoint stands, or the"
            " checkpoint itself, got neither; name one"
        )
    return checkpoint


def _watch(
    subject: CalibrationSubject,
    wanted: Mapping[str, tuple[Observation, ...]],
    feed: Feed,
    until: StabilityRule | None,
    *,
    trusted: bool,
) -> StabilityMonitor:
    """What compares halves of the samples; with `until` the samples come spread over the feed."""
    listed = unique_observations(wanted)
    searched = [o for o in listed if o.statistic == subject.statistic and not o.is_order_dependent]
    if until is not None:
        refuse_until_stable(feed, listed, searched, trusted=trusted)
        feed.scatter()
    alone = searched if feed.share is None else ()  # half of a shard tells nothing of all images
    return StabilityMonitor(
        alone, lambda seen: Ranges(seen, subject.method, subject.range_limits), until
    )


def _builds_here(targets: Iterable[Target]) -> str | None:
    """The version of TensorRT that builds on this machine, where there is one."""
    versions = (target.cache_version() for target in targets if isinstance(target, WritesCache))
    return next((version for version in versions if version is not None), None)
