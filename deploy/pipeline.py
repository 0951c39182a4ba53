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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import atomic, manifest
from deploy.building import built, searched
from deploy.calibrating import already_calibrated, calibrated
from deploy.calibration import afford, store
from deploy.calibration.calibrated import Calibrated
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.shards import Shards
from deploy.calibration.trained import choices_of, reference_of, refuse_calibrating
from deploy.cluster.options import Cluster, cluster_of
from deploy.errors import ConfigError
from deploy.feed.annotated import BY_FOLDER, labels_of
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.choice import Limit
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.preprocess import Asked
from deploy.frontends import LoadedModel, load, load_either
from deploy.inputs import guarded
from deploy.machine import default_threads
from deploy.method import Method
from deploy.metrics.coco import Annotations
from deploy.metrics.tasks import metric_of
from deploy.progress import numbered, on_request
from deploy.report.verdict import Gates
from deploy.staging import staged
from deploy.targets import TARGETS, Target, named
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.samples import CANDIDATES
from deploy.tuning.tune import DEFAULT_EFFORT, Tuned, Tuning

if TYPE_CHECKING:
    import onnx

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
    return calibrated(
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
    return calibrated(
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
        nodes = tuple(float_nodes)
        idle = _idle(
            images, method, policy, nodes, wish, repairs, until_stable, scheduler, resume=resume
        )
        refuse_calibrating(trained, idle)
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
            calibration = calibrated(
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
            plans, plan = searched(
                built_for,
                calibration,
                stage,
                replace(wish, timed=duration_s > 0, fresh=policy.refresh),
                method_asked=method is not None,
                repairs=asked,
                threads=workers,
            )
        else:
            calibration = already_calibrated(
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
        results = built(
            built_for,
            calibration,
            stage,
            workers,
            plans,
            repairs=asked,
            against=loaded.model if duration_s > 0 else None,
        )
        unchanged = not calibration.subject.repairs
        if images is None:
            figures = unmeasured(reference, results)
        else:
            figures = measured(
                calibration.loaded if trained is None else reference,
                built_for,
                results,
                calibration=calibration.judges.part,
                evaluation=evaluation,
                labels=known,
                metric=score,
                outputs=calibration.judges.outputs if trained is None and unchanged else None,
                duration_s=duration_s,
                threads=workers,
            )
        figures = replace(figures, notes=(*judged_by, *figures.notes))
        report = write_report(
            calibration, results, figures, stage, plans=plans, plan=plan, gates=gates or Gates()
        )
        if settings is not None:
            atomic.write_text(stage.inside / manifest.SETTINGS, settings)
        own = (*(path.name for path in store.files(cache_path)), plan_name)
        publish(made_from(calibration, built_for), stage, replacing=None if policy.force else own)
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
    scheduler: str | Cluster | None,
    *,
    resume: bool,
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
        "--scheduler": scheduler is not None,
        "--resume": resume,
    }
    return [flag for flag, asked in given.items() if asked]


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


def _given(
    model: str | Path | onnx.ModelProto | LoadedModel,
) -> str | Path | onnx.ModelProto | None:
    """The model as it can be read again with nothing folded."""
    if not isinstance(model, LoadedModel):
        return model
    onnx_file = model.source is not None and model.source.suffix.lower() == ".onnx"
    return model.source if onnx_file else None


def _policy(cache: Path | str | CachePolicy | None) -> CachePolicy:
    if isinstance(cache, CachePolicy):
        return cache
    return CachePolicy(path=None if cache is None else Path(cache))


__all__ = ["CachePolicy", "Calibrated", "Tuning", "build", "calibrate", "merge"]
