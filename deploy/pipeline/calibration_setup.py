"""Calibrate a model: check the options, prepare the run, and run it; or merge its shards.

::

    open_images --> repairs --> what the targets demand --> CalibrationRun --> Calibrated

`use_qdq_calibration` takes what the pairs of a Q/DQ model say instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from calibrators.searches import DEFAULT_METHOD
from deploy.calibration import store
from deploy.calibration.calibration_result import CalibrationResult, QdqModelRanges
from deploy.calibration.checkpoint import checkpoint_path
from deploy.calibration.cluster_jobs import Cluster, as_cluster
from deploy.calibration.observation import CalibrationSubject, Observation, unique_observations
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.calibration.reuse import CachePolicy, as_policy, cached_trt_version
from deploy.calibration.sample_checks import StabilityRule
from deploy.calibration.shards import ShardSet, refuse_ordered
from deploy.calibration.stability import StabilityMonitor, refuse_until_stable
from deploy.errors import Calib8Error, ConfigError, ModelError
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.preview import PREVIEW_COUNT
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.files.guard import guard_inputs
from deploy.files.manifest import RECORDS
from deploy.files.staging import Stage, recover
from deploy.frontends import LoadedModel, load
from deploy.frontends.base import QdqCalibration
from deploy.graph.index import as_names, match_nodes
from deploy.method import Method
from deploy.metrics.bench_inputs import random_feeds
from deploy.pipeline.build_options import (
    CalibrationOptions,
    find_user_model,
    open_torch_module,
)
from deploy.pipeline.calibration_run import (
    CalibrationRun,
    calibrate_run,
    open_images,
    source_name,
    take_trusted,
)
from deploy.targets import Target, make_targets
from deploy.targets.base import WritesCache
from deploy.terminal import phase, with_progress
from deploy.tuning.repairs.apply import refuse_model_repairs, repair_model, repair_notes
from deploy.tuning.search_samples import CANDIDATES

if TYPE_CHECKING:
    from torch import nn

_TRIED = 2  # random samples for a Q/DQ model without images


@with_progress
def calibrate(
    model: str | Path | onnx.ModelProto | LoadedModel | nn.Module,
    images: FeedSource,
    *,
    targets: str | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: PreprocessRequest = None,
    cache: Path | str | CachePolicy | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: str | Iterable[str] = (),
    scheduler: str | Cluster | None = None,
    resume: bool = False,
    checkpoint: Path | str | None = None,
    progress: bool = False,
) -> CalibrationResult:
    """Observe what the targets declare, or take it from a fitting cache.

    Args:
        model: path of an ONNX file, or a model in memory, loaded or not; or a PyTorch module,
            which the first item of `images` exports.
        images: folder, list file, image, .npy, .npz, `RawFiles`, a `CalibratorScript`, or an
            iterable of arrays or {input: array} dicts, such as a DataLoader, whose labels are left
            out. Of a PyTorch module: no files.
        targets: names of `TARGETS`, or targets with options of their own.
        method: name of a search, or a `Method` with parameters; None is the default one.
        preprocess: how images become inputs, or some options of it by name; the rest is what the
            model's metadata says, else what its input tells.
        cache: file to keep the calibration in, or a policy; None keeps nothing.
        skip_bad: leave out unreadable images.
        limit: the largest number of images to use, or a `Choice` of them.
        until_stable: look at 16, 32, 64 ... of them, spread evenly over all, until the ranges of
            two halves differ by less than this share (`deploy.calibration.stability`); None looks
            at all.
        threads: worker threads, None for up to 4 cores; the result does not depend on it.
        float_nodes: nodes to keep in float, as `deploy.graph.index.match_nodes` reads them.
        scheduler: address of a dask scheduler whose workers observe, or a `Cluster`; None observes
            here. The result does not depend on it.
        resume: continue an interrupted run from its checkpoint.
        checkpoint: file to save the state in from time to time; None for one beside the cache, if
            there is a cache. Without a cache the caller removes it.
        progress: report steps that take over two seconds on stderr.

    Raises:
        ModelError, FeedError, ConfigError, CacheError, CalibrationError, BackendError: each says
            in one sentence what was wrong and what to do.
    """
    options = CalibrationOptions(
        method=method,
        cache=as_policy(cache),
        until_stable=until_stable,
        threads=threads,
        float_nodes=as_names(float_nodes),
        scheduler=scheduler,
        resume=resume,
        checkpoint=None if checkpoint is None else Path(checkpoint),
    )
    model, images = open_torch_module(model, images, preprocess)
    dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    return calibrate_with(model, dataset, options, targets=make_targets(targets))


@guard_inputs()
def calibrate_with(
    model: str | Path | onnx.ModelProto | LoadedModel,
    dataset: Dataset,
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
) -> CalibrationResult:
    """`calibrate` with its options as one value."""
    loaded = model if isinstance(model, LoadedModel) else load(model)
    return calibrate_loaded(loaded, find_user_model(model), dataset, options, targets=targets)


@with_progress
def merge(
    model: str | Path | onnx.ModelProto | LoadedModel,
    shards: Sequence[str | Path],
    *,
    targets: str | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    cache: Path | str | CachePolicy | None = None,
    float_nodes: str | Iterable[str] = (),
    progress: bool = False,
) -> CalibrationResult:
    """Put the shards of a calibration together; the cache is that of one run over all images.

    Args beyond those of `calibrate`, of which the targets and the nodes in float must be those of
    the shards:
        shards: files of `calib8 calibrate --shard`, all of them, in any order.

    Raises:
        CacheError: a shard is broken, missing, there twice, of another model or other images.
        ModelError, ConfigError, CalibrationError: as `calibrate`.
    """
    options = CalibrationOptions(
        method=method, cache=as_policy(cache), threads=1, float_nodes=as_names(float_nodes)
    )
    paths = [Path(shard) for shard in shards]
    return merge_with(model, paths, options, targets=make_targets(targets))


@guard_inputs()
def merge_with(
    model: str | Path | onnx.ModelProto | LoadedModel,
    shards: Sequence[Path],
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
) -> CalibrationResult:
    """`merge` with its options as one value."""
    loaded = model if isinstance(model, LoadedModel) else load(model)
    shard_set = ShardSet(shards, loaded)
    return calibrate_loaded(loaded, find_user_model(model), shard_set, options, targets=targets)


@phase("calibration")
def calibrate_loaded(
    loaded: LoadedModel,
    given: str | Path | onnx.ModelProto | None,
    images: Dataset | ShardSet,
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
    evaluation_count: int = 0,
    repairs: Sequence[str] = (),
    task: str = "",
    stage: Stage | None = None,
) -> CalibrationResult:
    """Calibrate a model that is loaded; `calibrate` describes the options.

    Args beyond those of `calibrate`:
        evaluation_count: number of samples on which the engines are evaluated later; the float
            model's outputs of these are stored while it is observed.
        stage: where the files of a build wait; a cache in the same folder appears with them.
    """
    policy, cluster = options.cache, as_cluster(options.scheduler)
    source = open_images(loaded, images, cluster=cluster)
    feed = source.feed
    feed.cache_samples(0, evaluation_count, PREVIEW_COUNT)
    checkpoint = _checkpoint_path(options)
    _refuse_foreign(policy)
    asked = options.method
    subject = CalibrationSubject(
        loaded=loaded,
        user_model=given,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.padded_sample_count,
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
        judges=make_evaluation_set(feed, subject.model, evaluation_count),
        evaluation_count=evaluation_count,
        threads=options.workers,
        checkpoint=checkpoint,
        resume=options.resume,
        repairs=tuple(repair_notes(tried)),
    )
    return take_trusted(run) if policy.trust else calibrate_run(run, targets=targets, stage=stage)


def use_qdq_calibration(
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
    feed = opened.open(loaded.inputs, metadata_preprocess=loaded.metadata_preprocess)
    feed.cache_samples(0, CANDIDATES, PREVIEW_COUNT)
    subject = CalibrationSubject(
        loaded=loaded,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.padded_sample_count,
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
        feed.use_sampling_order()
    alone = searched if feed.share is None else ()  # half of a shard tells nothing of all images
    return StabilityMonitor(
        alone, lambda seen: Ranges(seen, subject.method, subject.range_limits), until
    )


def _builds_here(targets: Iterable[Target]) -> str | None:
    """The version of TensorRT that builds on this machine, where there is one."""
    versions = (target.cache_version() for target in targets if isinstance(target, WritesCache))
    return next((version for version in versions if version is not None), None)
