"""Calibrate a model: check the options, prepare the run, and run it; or merge its shards.

::

    images, or shards --> observations that the targets demand --> CalibrationRun

`use_qdq_calibration` takes the ranges of a Q/DQ model's pairs instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.searches import DEFAULT_METHOD
from deploy.calibration import store
from deploy.calibration.calibration_result import CalibrationResult, QdqModelRanges
from deploy.calibration.checkpoint import checkpoint_path
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.observation import (
    CalibrationSubject,
    Observation,
    unique_observations,
)
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import find_random_outputs, make_evaluation_set
from deploy.calibration.reuse import CachePolicy, as_policy, cached_trt_version
from deploy.calibration.sample_checks import StabilityRule
from deploy.calibration.shards import ShardSet, refuse_ordered
from deploy.calibration.stability import StabilityMonitor, refuse_until_stable
from deploy.errors import CacheError, Calib8Error, ConfigError, ModelError
from deploy.feed.bench_inputs import random_feeds
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.pixels import PREVIEW_COUNT
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.files.guard import guard_inputs
from deploy.files.manifest import RECORDS, is_of_build
from deploy.files.staging import Stage, recover
from deploy.frontends import LoadedModel, load
from deploy.frontends.base import QdqCalibration
from deploy.graph.index import as_names, match_nodes
from deploy.graph.plan import find_unkept
from deploy.method import Method
from deploy.pipeline.build_options import (
    CalibrationOptions,
    ModelSource,
    UserModel,
    check_arguments,
    find_user_model,
    open_torch_module,
    with_calibrator_method,
)
from deploy.pipeline.calibration_run import (
    CalibrationImages,
    CalibrationRun,
    calibrate_run,
    describe_source,
    open_dataset,
    open_shards,
    use_trusted_cache,
)
from deploy.targets import Target, make_targets
from deploy.terminal import phase, with_progress
from deploy.tuning.search_samples import CANDIDATE_COUNT

if TYPE_CHECKING:
    from torch import nn

_RANDOM_SAMPLES = 2  # for a Q/DQ model without images


@check_arguments
@with_progress
def calibrate(
    model: ModelSource | nn.Module,
    images: FeedSource,
    *,
    targets: str | Target | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: PreprocessRequest = None,
    cache: Path | str | CachePolicy | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    batch_axis: str = "auto",
    states: Mapping[str, str] | None = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: str | Iterable[str] = (),
    scheduler: str | Cluster | None = None,
    resume: bool = False,
    checkpoint: Path | str | None = None,
    progress: bool = False,
) -> CalibrationResult:
    """Find the range of each tensor that a target quantizes, by running the model on images.

    If the cache has statistics of the same model and images, they are reused.

    Args:
        model: path of an ONNX file, or a model in memory, loaded or not; or a PyTorch module,
            which is exported with the first item of `images` as its example input.
        images: folder, list file, image, .npy, .npz, `RawFiles`, a `CalibratorScript`, or an
            iterable of arrays or {input: array} dicts, such as a DataLoader, whose labels are not
            used. For a PyTorch module, arrays only.
        targets: names of `TARGETS`, or targets with options; or one of these.
        method: name of a search, or a `Method` with parameters; None for the default.
        preprocess: a `Preprocess`, the name of a preset, or {option: value}; options that are
            missing come from the model's metadata, else from the shape of its input.
        cache: file to store the calibration in, or a policy; None stores nothing.
        skip_bad: skip unreadable images.
        limit: the largest number of images to use, or a `Choice` of them.
        batch_axis: what the first dimension of the inputs is: "0", a batch; "none", a part of each
            sample; "auto", what the shapes of model and samples show.
        states: state input -> output of the previous step that the input reads; all other pairs
            are found by name and shape.
        until_stable: use 16, 32, 64 ... images, spread evenly over all, until the ranges of two
            halves differ by less than this share (`deploy.calibration.stability`); None uses all.
        threads: worker threads, None for up to 4 cores; the result does not depend on it.
        float_nodes: nodes to keep in float: names, patterns such as "/head/*", or "op:Sigmoid".
        scheduler: address of a dask scheduler, or a `Cluster`, to calibrate on its workers; the
            result is the same. None calibrates on this machine.
        resume: continue an interrupted run from its checkpoint.
        checkpoint: file to save the state in from time to time; None for one next to the cache, if
            there is a cache. A run without a cache leaves the file when it ends; the caller removes
            it.
        progress: report steps that take over two seconds on stderr.

    Raises:
        ModelError, FeedError, ConfigError, CacheError, CalibrationError, BackendError: the message
            says what is wrong and what to do.
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
    model, images = open_torch_module(model, images, preprocess)  # exports a PyTorch module
    dataset = to_dataset(
        images,
        preprocess=preprocess,
        skip_bad=skip_bad,
        limit=limit,
        batch_axis=batch_axis,
        states=states,
    )
    return calibrate_with(model, dataset, options, targets=make_targets(targets))


@guard_inputs()
def calibrate_with(
    model: ModelSource,
    dataset: Dataset,
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
) -> CalibrationResult:
    """`calibrate` with its options as one value."""
    loaded = load(model)
    options = with_calibrator_method(options, dataset, targets)
    images = open_dataset(loaded, dataset, options)
    return calibrate_loaded(loaded, find_user_model(model), images, options, targets=targets)


@check_arguments
@with_progress
def merge(  # noqa: D417
    model: ModelSource,
    shards: Sequence[str | Path],
    *,
    targets: str | Target | Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    cache: Path | str | CachePolicy | None = None,
    float_nodes: str | Iterable[str] = (),
    progress: bool = False,
) -> CalibrationResult:
    """Merge the shards of a calibration; the result equals that of one run over all images.

    A shard is the file of statistics that one of several machines made of its part of the images.

    The arguments that are not listed are those of `calibrate`; `targets` and `float_nodes` must be
    those of the shards.

    Args:
        shards: all files of `calib8 calibrate --shard`, in any order.

    Raises:
        CacheError: a shard is broken, missing, given twice, or of another model or other images.
        ModelError, ConfigError, CalibrationError: as `calibrate`.
    """
    options = CalibrationOptions(
        method=method, cache=as_policy(cache), threads=1, float_nodes=as_names(float_nodes)
    )
    return merge_with(model, list(map(Path, shards)), options, targets=make_targets(targets))


@guard_inputs()
def merge_with(
    model: ModelSource,
    shards: Sequence[Path],
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
) -> CalibrationResult:
    """`merge` with its options as one value."""
    if options.cache.trust:
        raise ConfigError(
            "--trust-cache takes a cache as it is, and shards make one; leave one of them out"
        )
    loaded = load(model)
    images = open_shards(ShardSet(shards, loaded))
    return calibrate_loaded(loaded, find_user_model(model), images, options, targets=targets)


@phase("calibration")
def calibrate_loaded(
    loaded: LoadedModel,
    user_model: UserModel | None,
    images: CalibrationImages,
    options: CalibrationOptions,
    *,
    targets: Sequence[Target],
    evaluation_count: int = 0,
    task: str = "",
    stage: Stage | None = None,
) -> CalibrationResult:
    """Check the options against a loaded model and its targets, then calibrate.

    An observation is a tensor of the model with the statistic to record of its values.

    Args:
        loaded: the model.
        user_model: the user's file or model, from which the graph before folding can be read.
        images: the opened images; or shards, the statistics that several machines made of them.
            Either comes with a function that returns the statistics.
        options: how it is calibrated, as `calibrate` describes.
        targets: the targets, which say what is observed.
        evaluation_count: number of samples on which the engines are evaluated later; the float
            model's outputs of these are stored while it is observed.
        task: name of the outputs' task that the user set.
        stage: temporary folder of a build's files; a cache in the build's folder is published with
            them. None for a calibration alone.

    Raises:
        ConfigError: options that exclude each other, or that do nothing here.
        ModelError: no node can run in int8.
        CacheError: another file is at the path of the cache.
    """
    policy = options.cache
    feed = images.feed
    if images.is_readable:  # the samples have shown whether the inputs' first dimension is a batch
        loaded = loaded.with_inputs(feed.specs)
    # the samples to evaluate and those that a report shows: stored on disk when they are read
    feed.cache_samples(evaluation_count, PREVIEW_COUNT)
    checkpoint_file = _choose_checkpoint(options)
    _refuse_foreign_cache(policy, is_build=stage is not None)
    subject = _make_subject(loaded, user_model, feed, options, targets, task)

    observations_by_target, target_failures = _collect_observations(targets, subject)
    observations = unique_observations(observations_by_target)
    if not observations:
        remedy = "`calib8 inspect` says why"
        if subject.float_nodes:
            remedy = "leave --keep-float out, or keep fewer nodes in float"
        raise ModelError(
            "at least one node of the model must be able to run in int8, got none in"
            f" {loaded.name} (only the main graph counts, not If and Loop bodies); {remedy}"
        )
    if options.method is not None and all(target.own_method for target in targets):
        raise ConfigError(
            f"a method is for targets that search by it, got {subject.method.label} for"
            f" {', '.join(observations_by_target)} alone, which has searches of its own; leave the"
            " method out"
        )
    if images.shard is not None:  # statistics that depend on the images' order cannot be merged
        refuse_ordered(observations, images.shard)

    stop_rule = None
    if options.until_stable is not None:
        stop_rule = StabilityRule(options.until_stable, subject.method.label)
    stability_monitor = _make_monitor(
        subject, observations, feed, stop_rule, is_trusted=policy.trust
    )
    if stop_rule is not None:
        feed.use_sampling_order()  # the first n images are then spread evenly over all
    run = CalibrationRun(
        subject=subject,
        images=images,
        observations_by_target=observations_by_target,
        failures=target_failures,
        policy=policy,
        stop_rule=stop_rule,
        stability_monitor=stability_monitor,
        evaluation_set=make_evaluation_set(feed, subject.model, evaluation_count),
        evaluation_count=evaluation_count,
        threads=options.workers,
        checkpoint_path=checkpoint_file,
        resume=options.resume,
    )
    if policy.trust:  # the ranges of another program's cache are used
        result = use_trusted_cache(run)
    else:
        result = calibrate_run(run, targets=targets, stage=stage)

    warnings = [*result.warnings]
    for target in targets:
        if subject.float_nodes and target.name not in result.failures:
            plan = target.plan(subject.model, subject.float_nodes)
            warnings += find_unkept(plan, target.name, subject.float_nodes)
    return replace(result, warnings=tuple(warnings))


def _make_subject(
    loaded: LoadedModel,
    user_model: UserModel | None,
    feed: Feed,
    options: CalibrationOptions,
    targets: Sequence[Target],
    task: str,
) -> CalibrationSubject:
    """Return what is calibrated, and how; the arguments are those of `calibrate_loaded`.

    A cache for TensorRT names a version: the one that the user names, else the one installed on
    this machine, else that of the earlier cache.
    """
    policy = options.cache
    method = options.method or DEFAULT_METHOD
    if not isinstance(method, Method):
        method = Method.of(method)
    return CalibrationSubject(
        loaded=loaded,
        user_model=user_model,
        sample_count=len(feed),
        batch=feed.batch,
        padded_sample_count=feed.padded_sample_count,
        method=method,
        task=task,
        float_nodes=match_nodes(loaded.model, options.float_nodes),
        trt_version=(
            policy.trt_version or _find_trt_version(targets) or cached_trt_version(policy)
        ),
    )


def use_qdq_calibration(
    loaded: LoadedModel,
    qdq: QdqCalibration,
    dataset: Dataset | None,
    *,
    targets: Sequence[Target],
    trt_version: str | None,
) -> CalibrationResult:
    """Return the calibration that the pairs of a Q/DQ model hold.

    Args:
        loaded: the model without its pairs.
        qdq: its pairs.
        dataset: images to run it on; None takes random samples.
        targets: the targets.
        trt_version: TensorRT that is to read the cache; None for the one installed here.

    Raises:
        Calib8Error: no target can be built for, or the images cannot be opened.
    """
    if dataset is None:  # then no accuracy is measured
        dataset = Dataset(source=random_feeds(loaded.inputs, count=_RANDOM_SAMPLES))
        source_text = "random numbers"
    else:
        source_text = describe_source(dataset.source)
    feed = loaded.open_samples(dataset)
    feed.cache_samples(CANDIDATE_COUNT, PREVIEW_COUNT)
    loaded = loaded.with_inputs(feed.specs)
    # options of a calibration without a cache; nothing is searched by their method, the default one
    options = CalibrationOptions(cache=CachePolicy(trt_version=trt_version))
    subject = _make_subject(loaded, None, feed, options, targets, task="")
    # nothing is observed: the targets are only asked, since one that cannot be built raises then
    _, failures = _collect_observations(targets, subject)
    evaluation_set = make_evaluation_set(feed, subject.model, CANDIDATE_COUNT)
    warning = find_random_outputs(subject.model, evaluation_set)
    return CalibrationResult(
        subject=subject,
        images=source_text,
        feed=feed,
        ranges=QdqModelRanges(qdq, subject),
        evaluation_set=evaluation_set,
        observations_by_target={},
        failures=failures,
        observed_now=(),
        reused=False,
        reason="the model is quantized already, and its Q/DQ pairs give every range",
        seconds=0.0,
        runs={},
        warnings=(warning,) if warning else (),
        has_random_outputs=bool(warning),
    )


def _collect_observations(
    targets: Iterable[Target], subject: CalibrationSubject
) -> tuple[dict[str, tuple[Observation, ...]], dict[str, str]]:
    """Return (target -> what it needs observed, target -> why it cannot be built for).

    Raises:
        Calib8Error: no target can be built for.
    """
    observations = {}
    failures = {}
    for target in targets:
        try:
            observations[target.name] = target.demand(subject)
        except Calib8Error as error:
            failures[target.name] = error
    if failures and not observations:
        raise next(iter(failures.values()))
    return observations, {name: str(error) for name, error in failures.items()}


def _refuse_foreign_cache(policy: CachePolicy, *, is_build: bool) -> None:
    """Refuse to overwrite a file that is no cache, or one that a build ships.

    Files that an interrupted build was putting there are completed or removed first.

    `is_build`: the cache is written by a build, which may replace the files of an earlier one.
    """
    # `reuse_flag` is --require-cache or --trust-cache, with which the cache at `path` is read and
    # not written; "" without them. If the cache is read from another file (`source`), the one at
    # `path` is always written
    is_written = policy.source is not None or not policy.reuse_flag
    if policy.path is not None and is_written:
        folder = policy.path.parent
        build_folder = folder.parent if folder.name == RECORDS else folder
        recover(build_folder)
        store.refuse_foreign_cache(policy.path, force=policy.force)
        # a build lists two kinds of caches among its files: the one that it calibrated with, whose
        # statistics it lists too, and the copy that it ships, which has none
        _, statistics_path = store.sidecars(policy.path)
        is_shipped = is_of_build(policy.path) and not is_of_build(statistics_path)
        if is_shipped and not is_build and not policy.force:
            raise CacheError(
                f"a calibration must not replace a file of a build, got {policy.path}; name another"
                " file, or replace it with --force"
            )


def _choose_checkpoint(options: CalibrationOptions) -> Path | None:
    """Return the path of the checkpoint, from which --resume goes on with an interrupted run.

    None without a cache to put it beside, and with --until-stable, which runs few samples.

    Raises:
        ConfigError: --resume, but there can be no checkpoint.
    """
    policy = options.cache
    # the flag, if any, with which not all images are run: only the first ones that are enough, or
    # none, since the cache is only read
    stops_early = options.until_stable is not None
    conflicting_flag = "--until-stable" if stops_early else policy.reuse_flag
    if options.resume and conflicting_flag:
        raise ConfigError(
            f"--resume goes on with a run over all images, got {conflicting_flag}, with which there"
            " is no such run; leave one of them out"
        )
    if stops_early:
        return None
    if options.checkpoint is not None:
        return options.checkpoint
    if policy.path is not None:
        return checkpoint_path(policy.path)
    if options.resume:
        raise ConfigError(
            "to go on with a run there must be a cache beside which its checkpoint stands, or the"
            " checkpoint itself, got neither; name one"
        )
    return None


def _make_monitor(
    subject: CalibrationSubject,
    observations: Sequence[Observation],
    feed: Feed,
    stop_rule: StabilityRule | None,
    *,
    is_trusted: bool,
) -> StabilityMonitor:
    """Return the monitor, which compares the ranges of two halves of the samples.

    Args:
        subject: the model, and how it is calibrated.
        observations: everything that the targets need.
        feed: the calibration data.
        stop_rule: ends the run when the halves agree well enough; None uses all images.
        is_trusted: whether the ranges of another program's cache are used, so that nothing is
            observed, and no halves can be compared.

    Raises:
        ConfigError: a rule with which halves of these observations or samples cannot be compared.
    """
    compared_observations = []
    for observation in observations:
        # a statistic is compared if the method finds ranges in it. One that depends on the order of
        # the samples has no halves
        is_read_by_method = observation.statistic == subject.statistic
        if is_read_by_method and not observation.is_order_dependent:
            compared_observations.append(observation)
    if stop_rule is not None:
        refuse_until_stable(feed, observations, compared_observations, is_trusted=is_trusted)
    if feed.share is not None:
        compared_observations = []  # halves of a shard tell nothing of all images

    return StabilityMonitor(
        compared_observations,
        lambda observed: Ranges(observed, subject.method, subject.range_limits),
        stop_rule,
    )


def _find_trt_version(targets: Iterable[Target]) -> str | None:
    """Return the version of TensorRT that builds on this machine; None without one."""
    for target in targets:
        version = target.cache_version()
        if version is not None:
            return version
    return None
