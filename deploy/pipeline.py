"""The whole line; read this first.

::

    model -> frontends -> graph (what each target needs) -> feed
          -> observe (one pass, every statistic that some target declares)
          -> calibrators (search) -> Scales -> tuning (what stays float)
          -> targets (files, build, session) -> metrics -> report

`calibrate` goes as far as what was observed and keeps it in a cache; `build` goes all the way. A
Q/DQ model brings its ranges along (`deploy.calibration.trained`): `build` observes and searches
nothing then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.searches import DEFAULT_METHOD
from deploy import atomic, manifest
from deploy.calibration import afford, store
from deploy.calibration.calibrated import Calibrated
from deploy.calibration.checkpoint import Checkpoint, beside, clear
from deploy.calibration.choices import NO_CHOICES
from deploy.calibration.expected import odd
from deploy.calibration.keep import keep, version_in
from deploy.calibration.observation import Observation, Observed, each_once
from deploy.calibration.observe import observe, planned
from deploy.calibration.outputs import FloatOutputs, judges_of
from deploy.calibration.peaks import Outlier, Peaks, identified, standing_out
from deploy.calibration.ranges import Ranges
from deploy.calibration.reuse import CachePolicy, Verdict, fingerprint_of, judge
from deploy.calibration.search import Method
from deploy.calibration.shards import Shards, refuse_ordered
from deploy.calibration.stability import Watch, refuse
from deploy.calibration.store import Calibration
from deploy.calibration.subject import FOLDED, Subject
from deploy.calibration.trained import (
    MADE_UP,
    choices_of,
    made_up,
    reference_of,
    refuse_calibrating,
    subject_of,
    taken,
)
from deploy.calibration.until import Agreement, Until
from deploy.cluster.options import Cluster, cluster_of
from deploy.errors import (
    BackendError,
    Calib8Error,
    CalibrationError,
    ConfigError,
    ExportError,
    ModelError,
)
from deploy.feed.annotated import BY_FOLDER, labels_of
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.choice import Limit
from deploy.feed.feed import Feed, FeedSource, open_feed
from deploy.feed.manifest import Changed
from deploy.feed.preprocess import Asked
from deploy.feed.raw import RawFiles
from deploy.feed.views import SHOWN
from deploy.frontends import LoadedModel, load, load_either
from deploy.graph.plan import never_negative
from deploy.graph.selection import matching
from deploy.inputs import guarded
from deploy.machine import default_threads
from deploy.metrics.coco import Annotations
from deploy.metrics.tasks import metric_of
from deploy.progress import numbered, on_request, phase
from deploy.report.verdict import Gates
from deploy.staging import Stage, recover, staged
from deploy.targets import TARGETS, Target, named
from deploy.targets.base import BuildRequest, Built, CacheText, WritesCache
from deploy.targets.options import given
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.samples import CANDIDATES
from deploy.tuning.tune import DEFAULT_EFFORT, Tuned, Tuning, keep_plan, plan_at, tuned

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.trained import Trained
    from deploy.metrics.tasks.metric import Function
    from deploy.report import Report


@guarded()
@on_request
def calibrate(
    model: str | Path | onnx.ModelProto | LoadedModel,
    images: FeedSource,
    *,
    targets: Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: Asked = None,
    cache: Path | str | CachePolicy | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: Iterable[str] = (),
    scheduler: str | Cluster | None = None,
    resume: bool = False,
    checkpoint: Path | str | None = None,
    progress: bool = False,
) -> Calibrated:
    """Observe what the targets declare, or take it from a fitting cache.

    Args:
        model: path of an ONNX file, or a model in memory, loaded or not.
        images: folder, list file, image, .npy, .npz, `RawFiles`, a `CalibratorScript`, or an
            iterable of arrays or {input: array} dicts.
        targets: names of `TARGETS`, or targets with options of their own.
        method: name of a search, or a `Method` with parameters; None is the default one.
        preprocess: how images become inputs, or some options of it by name; the rest is what the
            model's metadata says, else what its input tells.
        cache: file to keep the calibration in, or a policy; None keeps nothing.
        skip_bad: go on without unreadable images.
        limit: use at most so many images, or a `Choice` of them.
        until_stable: look at 16, 32, 64 ... of them, spread evenly over all, until the ranges of
            two halves differ by less than this share (`deploy.calibration.stability`); None looks
            at all.
        threads: worker threads, None for up to 4 cores; the result does not depend on it.
        float_nodes: nodes to keep in float, as `deploy.graph.selection.matching` reads them.
        scheduler: address of a dask scheduler whose workers observe, or a `Cluster`; None observes
            here. The result does not depend on it.
        resume: go on with a run that was ended, from its checkpoint.
        checkpoint: file to keep the state in now and then; None for one beside the cache, where
            there is one. What is found without a cache is kept by the caller, who removes it.
        progress: tell on stderr what is going on, where it takes over two seconds.

    Raises:
        ModelError, FeedError, ConfigError, CacheError, CalibrationError, BackendError: each says
            in one sentence what was wrong and what to do.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model)
    return _calibrated(
        loaded,
        _given(model),
        images,
        targets=targets_of(targets),
        method=method,
        preprocess=preprocess,
        policy=_policy(cache),
        skip_bad=skip_bad,
        limit=limit,
        until_stable=until_stable,
        threads=threads,
        float_nodes=float_nodes,
        cluster=cluster_of(scheduler),
        judging=0,
        resume=resume,
        checkpoint=None if checkpoint is None else Path(checkpoint),
    )


@guarded()
@on_request
def merge(
    model: str | Path | onnx.ModelProto | LoadedModel,
    shards: Sequence[str | Path],
    *,
    targets: Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    cache: Path | str | CachePolicy | None = None,
    float_nodes: Iterable[str] = (),
    progress: bool = False,
) -> Calibrated:
    """Put the shards of a calibration together; the cache is that of one run over all images.

    Args beyond those of `calibrate`, of which the targets and the nodes in float must be those of
    the shards:
        shards: files of `calib8 calibrate --shard`, all of them, in any order.

    Raises:
        CacheError: a shard is broken, missing, there twice, of another model or other images.
        ModelError, ConfigError, CalibrationError: as `calibrate`.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model)
    return _calibrated(
        loaded,
        _given(model),
        Shards([Path(path) for path in shards], loaded),
        targets=targets_of(targets),
        method=method,
        preprocess=None,
        policy=_policy(cache),
        skip_bad=False,
        limit=None,
        until_stable=None,
        threads=1,
        float_nodes=float_nodes,
        judging=0,
    )


@phase("calibration")
def _calibrated(
    loaded: LoadedModel,
    given: str | Path | onnx.ModelProto | None,
    images: FeedSource | Shards,
    *,
    targets: Sequence[Target],
    method: str | Method | None,
    preprocess: Asked,
    policy: CachePolicy,
    skip_bad: bool,
    limit: Limit,
    until_stable: float | None,
    threads: int | None,
    float_nodes: Iterable[str],
    judging: int,
    repairs: Sequence[str] = (),
    stage: Stage | None = None,
    cluster: Cluster | None = None,
    resume: bool = False,
    checkpoint: Path | None = None,
) -> Calibrated:
    """`calibrate` of a model that is loaded.

    Args beyond those of `calibrate`:
        given: the model as the user gave it.
        judging: how many images, at most, will judge what is built.
        repairs: names of `REPAIRS`, of which those before observing are tried.
        stage: what the files of a build wait in; a cache of the same folder appears with them.
        cluster: the scheduler whose workers observe.
    """
    from deploy.repairs.apply import prepared, refuse_trusted, told

    if isinstance(images, Shards):
        feed = images.feed
    else:
        feed = open_feed(
            images,
            loaded.inputs,
            preprocess=preprocess,
            carried=loaded.carried,
            skip_bad=skip_bad,
            limit=limit,
        )
    feed.remember(0, judging, SHOWN)
    place = _place(policy, checkpoint, resume=resume, stable=until_stable is not None)
    if policy.path is not None and not (policy.trust or policy.require):
        recover(policy.path.parent)
        store.refuse_foreign(policy.path, force=policy.force)
    subject = Subject(
        loaded=loaded,
        given=given,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.filled,
        method=method if isinstance(method, Method) else Method.of(method or DEFAULT_METHOD),
        float_nodes=matching(loaded.model, float_nodes),
        trt_version=policy.trt_version or _builds_here(targets) or version_in(policy),
    )
    workers = threads or default_threads()
    if policy.trust:
        refuse_trusted(repairs)
    folder = Path() if stage is None else stage.folder
    subject, tried = prepared(targets, subject, repairs, feed, folder=folder, threads=workers)
    wanted, failed = _demands(targets, subject)
    _refuse_idle_method(method, subject, wanted)
    if feed.share is not None or isinstance(images, Shards):
        refuse_ordered(each_once(wanted), f"a shard (got {feed.share or 'merged'})")
    until = None if until_stable is None else Until(until_stable, subject.method.label)
    if resume and cluster is not None:
        raise ConfigError(
            "--resume goes on with a run of this machine, got --scheduler, which keeps no"
            " checkpoint; leave one of them away"
        )
    if until is not None and cluster is not None:
        raise ConfigError(
            "--until-stable looks at images one after the other, got --scheduler, whose workers"
            " share all of them out; leave one of them away"
        )
    watch = _watch(subject, wanted, feed, until, trusted=policy.trust)
    agreement: Agreement | None = None
    peaks, judges = Peaks(), judges_of(feed, subject.model, judging)
    started = time.perf_counter()
    runs: Counter[str] = Counter()
    notes: tuple[str, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    mark: Checkpoint | None = None
    if policy.trust:
        verdict, ranges = _trusted(policy, subject, wanted)
    else:
        verdict = judge(
            policy,
            lambda count: fingerprint_of(subject, feed.manifest(count)),
            each_once(wanted),
            until=until,
        )
        able = afford.workers(verdict.missing, subject.model, workers)
        if isinstance(images, Shards):
            observed = verdict.observed.and_also(images.observed(verdict.missing, peaks))
        elif cluster is not None and verdict.missing:
            from deploy.cluster.run import observe_on

            refuse_ordered(verdict.missing, "a piece of a calibration (got --scheduler)")
            able = workers
            new, notes = observe_on(
                cluster,
                verdict.missing,
                feed,
                subject=subject,
                images=images,
                limit=limit,
                peaks=peaks,
                runs=runs,
            )
            observed = verdict.observed.and_also(new)
        else:
            plan = planned(verdict.missing, verdict.observed)
            if place is not None and plan.late:
                mark = Checkpoint(
                    place, subject, feed, plan.late, peaks, resume=resume, force=policy.force
                )
            elif place is not None and resume:
                clear(place)
            observed = _completed(
                verdict,
                feed,
                plan.first,
                threads=able,
                runs=runs,
                peaks=peaks,
                mark=mark,
                outputs=judges.outputs,
                watch=watch,
            )
        if until is not None:
            feed.keep(_reached(verdict, feed, watch))
            feed.remember(0, judging, SHOWN)
            judges = judges_of(feed, subject.model, judging)
        ranges = Ranges(observed, subject.method, subject.bounds)
        agreement = watch.end(len(feed)) if verdict.missing else None
        alone = [t for t in targets if t.name in wanted and feed.share is None]
        own = _own_text(alone, subject, ranges)  # of a shard, it is that of the whole
        few = _too_few(feed) if until and verdict.missing and agreement is None else ()
        notes = (*notes, *_fewer(able, workers), *few, *(own.notes if own else ()))
        fingerprint = verdict.of_all(fingerprint_of(subject, feed.manifest()))
        outliers = (*verdict.outliers, *identified(peaks, feed.digests))
        kept = verdict.stored if not verdict.missing else None
        calibration = Calibration(
            observed=observed,
            fingerprint=fingerprint,
            outliers=outliers,
            until=kept.until if kept else until,
        )
        text = own.text if own else None
        keep(policy, subject, verdict, calibration, ranges, text=text, stage=stage)
        if mark is not None and policy.path is not None:
            mark.path.unlink(missing_ok=True)
    return Calibrated(
        subject=subject,
        images=str(images)
        if isinstance(images, str | Path | CalibratorScript | RawFiles | Shards)
        else "arrays in memory",
        feed=feed,
        ranges=ranges,
        wanted=wanted,
        failed=failed,
        observed_now=verdict.missing,
        reused=not verdict.missing,
        reason=verdict.reason,
        seconds=time.perf_counter() - started,
        runs=runs,
        notes=notes,
        warnings=(
            *loaded.cut,
            *(() if isinstance(images, Shards) else odd(subject, feed)),
            *_warnings(outliers, each_once(wanted), feed),
        ),
        cache=policy.path,
        repairs=tuple(told(tried)),
        peaks=peaks,
        checkpoint=mark.path if mark is not None and policy.path is None else None,
        resumed=_resumed(mark, watch),
        judges=judges,
        agreement=agreement,
    )


@guarded()
@on_request
def build(
    model: str | Path | onnx.ModelProto | LoadedModel,
    images: FeedSource | None = None,
    *,
    float_model: str | Path | onnx.ModelProto | None = None,
    out: Path | str = "build",
    targets: Sequence[str | Target] = ("onnxruntime",),
    method: str | Method | None = None,
    preprocess: Asked = None,
    cache: Path | str | CachePolicy | None = None,
    eval_images: FeedSource | None = None,
    labels: Sequence[int] | Annotations | str | None = None,
    metric: str | Function | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    until_stable: float | None = None,
    threads: int | None = None,
    float_nodes: Iterable[str] = (),
    duration_s: float = 3.0,
    tuning: Tuning | None = None,
    gates: Gates | None = None,
    repairs: Sequence[str] | None = None,
    scheduler: str | Cluster | None = None,
    settings: str | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Report:
    """Calibrate (or reuse a calibration), build every target, measure, and write the report.

    A target that fails is a row of the report with its sentence; the others are built all the same.

    Of a Q/DQ model, whoever trained it, the scales of its pairs are the calibration: images, where
    there are some, are what it is measured on.

    Args beyond those of `calibrate`:
        images: None for a Q/DQ model of which nothing is to be measured.
        float_model: what a Q/DQ model is judged beside; None takes its pairs out for that.
        out: folder of everything that is written; the cache too, where `cache` names none.
        eval_images: images for the accuracy figures; None takes the calibration images.
        labels: class of every evaluation image, where its list does not give it; or the objects
            that the images show, of `deploy.metrics.coco.read_coco`; or "folders", whose numbers
            are the labels of the images in them.
        metric: "file.py:function" or a function (FP32 outputs, int8 outputs, label or None) ->
            number, more is better; called once a sample, its mean stands for the task's figure.
        duration_s: seconds of measuring a model; 0 leaves latency out, and time out of the search.
        tuning: how much is searched for what stays float and for ranges, or the plan to obey.
        gates: what is demanded of the engines; their verdicts say whether it is met.
        repairs: names of `deploy.repairs.REPAIRS`, `all` or `none`, to be tried and kept where
            they help; None tries those of `deploy.repairs.DEFAULT` where there is a search.
        settings: text of `calib8.toml`, which is written beside the rest; None writes none.

    Raises:
        Calib8Error: as `calibrate`; and what the targets raised where none could be built.
    """
    from deploy.judge import CALIBRATION_SAMPLES
    from deploy.measure import measured, unmeasured
    from deploy.repairs import DEFAULT, chosen
    from deploy.results import made_from, publish, write_report

    wish = tuning or Tuning()
    folder = Path(out)
    built_for = targets_of(targets)
    score = None if metric is None else metric_of(metric)  # as the evaluation, opened first
    loaded = model if isinstance(model, LoadedModel) else load_either(model)
    policy = _policy(cache)
    trained = loaded.trained
    reference, judged_by = reference_of(loaded, float_model, images)
    if trained is not None:
        idle = _idle(images, method, policy, tuple(float_nodes), wish, repairs, until_stable)
        idle += [] if scheduler is None else ["--scheduler"]
        refuse_calibrating(trained, [*idle, *(["--resume"] if resume else [])])
        wish = replace(wish, effort=0)
    judged_on = eval_images if eval_images is not None or trained is None else images
    asked = chosen((DEFAULT if wish.effort else ()) if repairs is None else repairs)
    cache_path = policy.path or folder / f"{loaded.name}.cache"
    policy = replace(policy, path=cache_path)
    plan_name = f"{loaded.name}.plan.toml"
    if not policy.force:
        fresh = [plan_name] if policy.refresh else []  # else it is read, and must be a plan
        fresh += [] if settings is None else [manifest.SETTINGS]
        manifest.refuse_foreign(folder, [*written_by(built_for, loaded.name), *fresh])
    evaluation = None
    if judged_on is not None:  # opened first: a wrong path is told before anything is run
        evaluation = open_feed(
            judged_on,
            loaded.inputs,
            preprocess=preprocess,
            carried=loaded.carried,
            skip_bad=skip_bad,
            limit=limit if eval_images is None else None,
            labels_by_folder=labels == BY_FOLDER,
        )
    known = labels_of(labels, evaluation)
    workers = threads or default_threads()
    afford.refuse_full_disk(folder, loaded.model, len(built_for))
    duration_s = duration_s if images is not None else 0.0
    parts = _parts(wish, duration_s, trained=trained is not None, fed=images is not None)
    with numbered(*parts), staged(folder) as stage:
        if trained is None:
            assert images is not None
            calibrated = _calibrated(
                loaded,
                _given(model),
                images,
                targets=built_for,
                method=method,
                preprocess=preprocess,
                policy=policy,
                skip_bad=skip_bad,
                limit=limit,
                until_stable=until_stable,
                threads=threads,
                float_nodes=float_nodes,
                judging=CALIBRATION_SAMPLES if evaluation is None else CANDIDATES,
                repairs=asked,
                stage=stage,
                cluster=cluster_of(scheduler),
                resume=resume,
            )
            plans, plan = _tuned(
                built_for,
                calibrated,
                stage,
                replace(wish, timed=duration_s > 0, fresh=policy.refresh),
                method_asked=method is not None,
                repairs=asked,
                threads=workers,
            )
        else:
            calibrated = _taken(
                loaded,
                trained,
                images,
                targets=built_for,
                preprocess=preprocess,
                skip_bad=skip_bad,
                limit=limit,
                trt_version=policy.trt_version,
            )
            settled = TargetPlan(choices=choices_of(trained, loaded))
            plans = {one.name: Tuned(plan=settled, searched=False) for one in built_for}
            plan = None
        results = _built(
            built_for,
            calibrated,
            stage,
            workers,
            plans,
            repairs=asked,
            against=loaded.model if duration_s > 0 else None,
        )
        unchanged = not calibrated.subject.repairs
        if images is None:
            figures = unmeasured(reference, results)
        else:
            figures = measured(
                calibrated.loaded if trained is None else reference,
                built_for,
                results,
                calibration=calibrated.judges.part,
                evaluation=evaluation,
                labels=known,
                metric=score,
                outputs=calibrated.judges.outputs if trained is None and unchanged else None,
                duration_s=duration_s,
                threads=workers,
            )
        figures = replace(figures, notes=(*judged_by, *figures.notes))
        report = write_report(
            calibrated, results, figures, stage, plans=plans, plan=plan, gates=gates or Gates()
        )
        if settings is not None:
            atomic.write_text(stage.inside / manifest.SETTINGS, settings)
        own = (*(path.name for path in store.files(cache_path)), plan_name)
        publish(made_from(calibrated, built_for), stage, replacing=None if policy.force else own)
    return report


def _parts(wish: Tuning, duration_s: float, *, trained: bool, fed: bool) -> tuple[str, ...]:
    """What a build does, as its progress counts it."""
    before = () if trained else ("calibration",)
    search = ("search",) if wish.effort and wish.plan is None else ()
    accuracy = ("layers", "accuracy") if fed else ()
    latency = ("latency",) if duration_s > 0 else ()
    return (*before, *search, "targets", *accuracy, *latency, "report")


def _idle(
    images: FeedSource | None,
    method: str | Method | None,
    policy: CachePolicy,
    float_nodes: tuple[str, ...],
    wish: Tuning,
    repairs: Sequence[str] | None,
    until_stable: float | None,
) -> list[str]:
    """What was asked that says how a float model is calibrated, as the command line calls it."""
    given = {
        "--calibrator-script": isinstance(images, CalibratorScript),
        "--method": method is not None,
        "--cache": policy.path is not None,
        "--require-cache": policy.require,
        "--trust-cache": policy.trust,
        "--refresh": policy.refresh,
        "--keep-float": bool(float_nodes),
        "--effort": wish.effort not in (0, DEFAULT_EFFORT),
        "--plan": wish.plan is not None,
        "--until-stable": until_stable is not None,
        "--repair": bool(repairs) and tuple(repairs or ()) != ("none",),
    }
    return [flag for flag, asked in given.items() if asked]


def _taken(
    loaded: LoadedModel,
    trained: Trained,
    images: FeedSource | None,
    *,
    targets: Sequence[Target],
    preprocess: Asked,
    skip_bad: bool,
    limit: Limit,
    trt_version: str | None,
) -> Calibrated:
    """`_calibrated` of a model whose pairs say every range."""
    feed = open_feed(
        made_up(loaded) if images is None else images,
        loaded.inputs,
        preprocess=None if images is None else preprocess,
        carried=loaded.carried,
        skip_bad=skip_bad,
        limit=None if images is None else limit,
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
    source = images if isinstance(images, str | Path | RawFiles) else "arrays in memory"
    told = {name: str(error) for name, error in failed.items()}
    judges = judges_of(feed, subject.model, CANDIDATES)
    return taken(trained, subject, feed, judges, MADE_UP if images is None else str(source), told)


def targets_of(targets: Sequence[str | Target]) -> list[Target]:
    """Targets by name or with options of their own.

    Raises:
        ConfigError: a name that is not in the table, or two targets of one name.
    """
    found = [named(target)() if isinstance(target, str) else target for target in targets]
    if not found:
        raise ConfigError(f"at least one target is needed, of {', '.join(TARGETS)}")
    names = Counter(target.name for target in found)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise ConfigError(
            f"targets must have names of their own, got {twice[0]!r} twice, whose files would be"
            " the same; build the other one into another folder"
        )
    return found


def written_by(targets: Iterable[Target], name: str) -> list[str]:
    """Names of the files that a build of a model may write, but for its cache and plan."""
    endings = [ending for target in targets for ending in target.writes]
    return [manifest.NAME, *manifest.PAGES, *(f"{name}{ending}" for ending in endings)]


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


def _trusted(
    policy: CachePolicy, subject: Subject, wanted: Mapping[str, tuple[Observation, ...]]
) -> tuple[Verdict, Ranges]:
    """A foreign cache, taken as it is.

    Raises:
        ConfigError: no path, or a target that makes nothing of a symmetric range.
        CacheError: it is not the model's.
    """
    if policy.path is None:
        raise ConfigError("a cache to be trusted must be named, got none; give --cache")
    for name, own in wanted.items():
        if any(o.variant.key != FOLDED for o in own):
            raise ConfigError(
                f"a trusted cache holds one symmetric range a tensor, of which the target {name}"
                " with this method makes nothing; leave --trust-cache away for it"
            )
    tensors = tuple(o.tensor for o in each_once(wanted))
    found = store.trusted(policy.path, tensors, never_negative(subject.model))
    reason = f"{policy.path} is trusted as it is, without a fingerprint"
    verdict = Verdict(reason=reason, observed=Observed({}), missing=())
    return verdict, Ranges(Observed({}), subject.method, subject.bounds, trusted=found)


def _place(
    policy: CachePolicy, checkpoint: Path | None, *, resume: bool, stable: bool
) -> Path | None:
    """Where the state of a run is kept; nowhere of one that looks at as few samples as it takes.

    Raises:
        ConfigError: it is to be gone on from, and there is no place; or nothing is observed.
    """
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


def _completed(
    verdict: Verdict,
    feed: Feed,
    first: int,
    *,
    threads: int,
    runs: Counter[str],
    peaks: Peaks,
    mark: Checkpoint | None,
    outputs: FloatOutputs,
    watch: Watch,
) -> Observed:
    """What the cache holds, and what is observed now because it is missing there."""
    if not verdict.missing:
        return verdict.observed
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
            runs=runs,
            peaks=peaks,
            keeper=mark,
            keep=lambda number, values: outputs.add(feed.key(number), values),
            halves=None if counted else watch.halves,  # of those counted nobody knows the halves
            enough=watch.enough if watch.decides else None,
        )
    return verdict.observed.and_also(new)


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
    return Watch(alone, lambda found: Ranges(found, subject.method, subject.bounds), until)


def _reached(verdict: Verdict, feed: Feed, watch: Watch) -> int:
    """How many images were looked at, now or when the cache was made."""
    if not verdict.missing:
        assert verdict.stored is not None
        return verdict.stored.count
    return feed.reached(watch.samples) if watch.stopped else feed.opened


def _resumed(mark: Checkpoint | None, watch: Watch) -> tuple[str, ...]:
    """From where a run went on, and what is not known of it then."""
    if mark is None:
        return ()
    unknown = mark.counted and watch.halves is not None
    halves = "how far two halves of the samples agree is not known of a run that went on"
    return (*mark.notes, *((halves,) if unknown else ()))


def _fewer(able: int, asked: int) -> tuple[str, ...]:
    """What to say where memory does not suffice for all workers."""
    if able >= asked:
        return ()
    return (f"calibrated with {able} of {asked} threads: memory does not suffice for more.",)


def _too_few(feed: Feed) -> tuple[str, ...]:
    """What to say where there is nothing to hold the first ranges against."""
    return (f"whether samples are enough is told from 16 on: there were {len(feed)}",)


def _warnings(
    outliers: Iterable[Outlier], wanted: Iterable[Observation], feed: Feed
) -> tuple[str, ...]:
    """What is told of samples that stand out in what this run wants."""
    places = {(o.variant.key, o.tensor) for o in wanted}
    own = [one for one in outliers if (one.variant, one.tensor) in places]
    return (standing_out(own, feed.called()),) if own else ()


def _own_text(targets: Iterable[Target], subject: Subject, ranges: Ranges) -> CacheText | None:
    """The first target's own form of the cache."""
    writers = (target for target in targets if isinstance(target, WritesCache))
    return next((target.cache_text(subject, ranges) for target in writers), None)


def _request(calibrated: Calibrated, stage: Stage, threads: int) -> BuildRequest:
    return BuildRequest(
        subject=calibrated.subject,
        folder=stage.inside,
        earlier=stage.folder,
        ranges=calibrated.ranges,
        feed=calibrated.feed,
        manifest=calibrated.feed.manifest(),
        judges=calibrated.judges,
        threads=threads,
    )


@phase("search")
def _tuned(
    targets: Sequence[Target],
    calibrated: Calibrated,
    stage: Stage,
    wish: Tuning,
    *,
    method_asked: bool,
    repairs: Sequence[str],
    threads: int,
) -> tuple[dict[str, Tuned], Path | None]:
    """What stays float and how ranges are found, of each target that can be built; and its file.

    Raises:
        ConfigError: a plan that does not fit the model.
    """
    name = f"{calibrated.loaded.name}.plan.toml"
    known = plan_at(stage.folder / name, wish, calibrated.loaded.digest)
    request = _request(calibrated, stage, threads)
    found = {}
    for target in targets:
        if target.name in calibrated.failed:
            continue
        try:
            with phase(target.name):
                found[target.name] = tuned(
                    target,
                    request,
                    wish,
                    known,
                    method_asked=method_asked,
                    repairs=repairs,
                )
        except (BackendError, CalibrationError, ExportError):  # its build says the same
            found[target.name] = Tuned(plan=TargetPlan(choices=NO_CHOICES))
    if not (wish.effort or wish.plan is not None or known.targets):
        return found, None
    return found, keep_plan(stage.inside / name, known, found)


@phase("targets")
def _built(
    targets: Sequence[Target],
    calibrated: Calibrated,
    stage: Stage,
    threads: int,
    plans: Mapping[str, Tuned],
    *,
    repairs: Sequence[str],
    against: onnx.ModelProto | None,
) -> list[Built]:
    """One result a target; a failed one is its sentence.

    Args beyond those of `build`:
        against: the model without repairs, where speed is measured.

    Raises:
        Calib8Error: the one target that was asked for failed, or all did.
    """
    request = replace(_request(calibrated, stage, threads), against=against)
    results: list[Built] = []
    errors: list[Calib8Error] = []
    for target in targets:
        if target.name in calibrated.failed:
            results.append(Built(target=target.name, error=calibrated.failed[target.name]))
            continue
        try:
            chosen = request.choosing(plans[target.name].plan.choices)
            with phase(target.name):
                own, said = _repaired(target, chosen, repairs)
                built = target.build(own)
            results.append(replace(built, options=given(target), notes=(*said, *built.notes)))
        except Changed:
            raise
        except Calib8Error as error:
            errors.append(error)
            results.append(Built(target=target.name, error=str(error)))
    if errors and all(result.error for result in results):
        raise errors[0]
    return results


def _repaired(
    target: Target, request: BuildRequest, names: Sequence[str]
) -> tuple[BuildRequest, list[str]]:
    """What one target is built from after the repairs that helped it, and what was tried."""
    from deploy.repairs.apply import few, repaired, told

    own, tried = repaired(target, request, names, few(request.judges) if names else [])
    return own, told(tried)


def _given(
    model: str | Path | onnx.ModelProto | LoadedModel,
) -> str | Path | onnx.ModelProto | None:
    """The model as it can be read again with nothing folded."""
    if not isinstance(model, LoadedModel):
        return model
    onnx_file = model.source is not None and model.source.suffix.lower() == ".onnx"
    return model.source if onnx_file else None


def _builds_here(targets: Iterable[Target]) -> str | None:
    """The version that reads the cache on this machine, where there is one."""
    versions = (target.cache_version() for target in targets if isinstance(target, WritesCache))
    return next((version for version in versions if version is not None), None)


def _policy(cache: Path | str | CachePolicy | None) -> CachePolicy:
    if isinstance(cache, CachePolicy):
        return cache
    return CachePolicy(path=None if cache is None else Path(cache))


__all__ = ["CachePolicy", "Calibrated", "Tuning", "build", "calibrate", "merge"]
