"""The whole line; read this first.

::

    model -> frontends -> graph (what each target needs) -> feed
          -> observe (one pass, every statistic that some target declares)
          -> calibrators (search) -> Scales -> tuning (what stays float)
          -> targets (files, build, session) -> metrics -> report

`calibrate` goes as far as what was observed and keeps it in a cache; `build` goes all the way. A
Q/DQ model brings its ranges along (`deploy.calibration.calibrated`): `build` observes and searches
nothing then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.calibrated import Calibrated, choices_of
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.reuse import CachePolicy, policy_of
from deploy.calibration.shards import Shards
from deploy.feed.feed import FeedSource
from deploy.feed.preprocess import Asked
from deploy.feed.sampling import Limit
from deploy.files import atomic, manifest
from deploy.files.reading import guarded
from deploy.files.staging import Stage, staged
from deploy.frontends import LoadedModel, load
from deploy.method import Method
from deploy.metrics.precision import Annotations
from deploy.pipeline.building import built, searched
from deploy.pipeline.calibrating import already_calibrated, calibrated
from deploy.pipeline.request import Order, Terms, given_as, ordered
from deploy.report.verdict import Gates
from deploy.targets import Target, targets_of
from deploy.targets.base import Built
from deploy.terminal import numbered, on_request
from deploy.tuning.plan_file import TargetPlan
from deploy.tuning.search_options import Tuning
from deploy.tuning.search_samples import CANDIDATES
from deploy.tuning.tune import Tuned

if TYPE_CHECKING:
    import onnx

    from deploy.metrics.tasks.metric import Function
    from deploy.pipeline.measure import Figures
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
        float_nodes: nodes to keep in float, as `deploy.graph.index.matching` reads them.
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
    terms = Terms(
        method=method,
        preprocess=preprocess,
        skip_bad=skip_bad,
        limit=limit,
        until_stable=until_stable,
        threads=threads,
        float_nodes=tuple(float_nodes),
        scheduler=scheduler,
        resume=resume,
        checkpoint=None if checkpoint is None else Path(checkpoint),
    )
    return calibrated(
        loaded,
        given_as(model),
        images,
        terms,
        targets=targets_of(targets),
        policy=policy_of(cache),
        judging=0,
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
        given_as(model),
        Shards([Path(path) for path in shards], loaded),
        Terms(method=method, threads=1, float_nodes=tuple(float_nodes)),
        targets=targets_of(targets),
        policy=policy_of(cache),
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
            that the images show, of `deploy.metrics.precision.read_coco`; or "folders", whose
            numbers
            are the labels of the images in them.
        metric: "file.py:function" or a function (FP32 outputs, int8 outputs, label or None) ->
            number, more is better; called once a sample, its mean stands for the task's figure.
        duration_s: seconds of measuring a model; 0 leaves latency out, and time out of the search.
        tuning: how much is searched for what stays float and for ranges, or the plan to obey.
        gates: what is demanded of the engines; their verdicts say whether it is met.
        repairs: names of `deploy.tuning.repairs.REPAIRS`, `all` or `none`, to be tried and kept
        where
            they help; None tries those of `deploy.tuning.repairs.DEFAULT` where there is a search.
        settings: text of `calib8.toml`, which is written beside the rest; None writes none.

    Raises:
        Calib8Error: as `calibrate`; and what the targets raised where none could be built.
    """
    from deploy.pipeline.results import write_report

    order = ordered(
        model,
        images,
        float_model=float_model,
        targets=targets_of(targets),
        terms=Terms(
            method=method,
            preprocess=preprocess,
            skip_bad=skip_bad,
            limit=limit,
            until_stable=until_stable,
            threads=threads,
            float_nodes=tuple(float_nodes),
            scheduler=scheduler,
            resume=resume,
        ),
        policy=policy_of(cache),
        eval_images=eval_images,
        labels=labels,
        metric=metric,
        wish=tuning or Tuning(),
        repairs=repairs,
        duration_s=duration_s,
        folder=Path(out),
        settings=settings is not None,
    )
    with numbered(*order.parts), staged(order.folder) as stage:
        calibration = _observed(order, stage)
        _refuse_broken(order, calibration)
        plans, plan = _tuned(order, calibration, stage)
        results = _built(order, calibration, plans, stage)
        figures = _measured(order, calibration, results)
        report = write_report(
            calibration, results, figures, stage, plans=plans, plan=plan, gates=gates or Gates()
        )
        _published(order, calibration, settings, stage)
    return report


def _observed(order: Order, stage: Stage) -> Calibrated:
    """What the targets declare, as it was observed or kept; of a Q/DQ model what its pairs say."""
    from deploy.pipeline.judge import CALIBRATION_SAMPLES

    if order.loaded.trained is not None:
        return already_calibrated(
            order.loaded,
            order.loaded.trained,
            order.images,
            order.terms,
            targets=order.targets,
            trt_version=order.policy.trt_version,
        )
    assert order.images is not None
    return calibrated(
        order.loaded,
        order.given,
        order.images,
        order.terms,
        targets=order.targets,
        policy=order.policy,
        judging=CALIBRATION_SAMPLES if order.evaluation is None else CANDIDATES,
        repairs=order.repairs,
        stage=stage,
    )


def _refuse_broken(order: Order, calibration: Calibrated) -> None:
    """Refuse a figure of the user's that fails on the float model itself, before all is built."""
    from deploy.metrics.accuracy import Comparison, Said
    from deploy.metrics.rows import batch_length

    if order.metric is None or order.loaded.trained is not None:
        return
    sample, said = next(iter(calibration.judges.heard(1)))
    labels = None if order.evaluation is None else order.evaluation.labels
    some = None if labels is None else labels[:1] * batch_length(sample)
    itself = Said(said)
    comparison = Comparison(itself, itself, metric=order.metric, labels=some)
    comparison.add(sample, said, said)
    comparison.result()


def _tuned(
    order: Order, calibration: Calibrated, stage: Stage
) -> tuple[dict[str, Tuned], Path | None]:
    """What stays float on each target, and the file that keeps it; of a Q/DQ model as in it."""
    trained = order.loaded.trained
    if trained is not None:
        plan = TargetPlan(choices=choices_of(trained, order.loaded))
        return {one.name: Tuned(plan=plan, searched=False) for one in order.targets}, None
    return searched(
        order.targets,
        calibration,
        stage,
        replace(
            order.wish,
            timed=order.duration_s > 0,
            fresh=order.policy.refresh,
            metric=None if order.labelled else order.metric,
        ),
        method_asked=order.terms.method is not None,
        repairs=order.repairs,
        threads=order.threads,
    )


def _built(
    order: Order, calibration: Calibrated, plans: dict[str, Tuned], stage: Stage
) -> list[Built]:
    """The files and the engine of each target."""
    return built(
        order.targets,
        calibration,
        stage,
        order.threads,
        plans,
        repairs=order.repairs,
        against=order.loaded.model if order.duration_s > 0 else None,
    )


def _measured(order: Order, calibration: Calibrated, results: list[Built]) -> Figures:
    """How fast the engines are and how near the float model; nothing of it without images."""
    from deploy.pipeline.measure import measured, unmeasured

    if order.images is None:
        figures = unmeasured(order.reference, results)
    else:
        ours = order.loaded.trained is None
        unchanged = not calibration.subject.repairs
        figures = measured(
            calibration.loaded if ours else order.reference,
            order.targets,
            results,
            calibration=calibration.judges.part,
            evaluation=order.evaluation,
            labels=order.objects,
            metric=order.metric,
            outputs=calibration.judges.outputs if ours and unchanged else None,
            duration_s=order.duration_s,
            threads=order.threads,
        )
    fed = (*_chosen_otherwise(order), *_read_otherwise(order, calibration))
    notes = (*order.judged_by, *figures.notes, *fed, *_seen_before(order, calibration))
    return replace(figures, notes=notes)


def _chosen_otherwise(order: Order) -> list[str]:
    """That a search had to do without the user's figure, which judges what it chose."""
    if order.metric is None or not order.labelled or not order.wish.effort or order.wish.plan:
        return []
    return [
        f"the search went by the outputs' form, not by {order.metric.name}: its images are some"
        " that calibrate, of which no labels are used"
    ]


def _read_otherwise(order: Order, calibration: Calibrated) -> list[str]:
    """How the evaluation images were read, where the calibration's own notes do not say it."""
    if order.evaluation is None:
        return []
    known = calibration.feed.notes
    return [
        f"of the evaluation images: {one}" for one in order.evaluation.notes if one not in known
    ]


def _seen_before(order: Order, calibration: Calibrated) -> list[str]:
    """That images which calibrated judge too."""
    if order.evaluation is None or order.loaded.trained is not None:
        return []
    shared = order.evaluation.shared(calibration.feed)
    few = f"{shared} of the {order.evaluation.count} evaluation images calibrated too"
    return [f"{few}; what clips looks better on these than on others"] if shared else []


def _published(order: Order, calibration: Calibrated, settings: str | None, stage: Stage) -> None:
    """Let all of it appear in the folder at once."""
    from deploy.pipeline.results import made_from, publish

    if settings is not None:
        atomic.write_text(stage.inside / manifest.SETTINGS, settings)
    replacing = None if order.policy.force else order.own_files
    publish(made_from(calibration, order.targets, order.cache), stage, replacing=replacing)


__all__ = ["CachePolicy", "Calibrated", "Tuning", "build", "calibrate", "merge"]
