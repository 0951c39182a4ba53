"""What a build is asked for, made ready: the model loaded, the evaluation opened.

Whatever can be refused is refused here, before anything is run or written.

How a model is calibrated, as the user says it, in one value for the rooms along the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration import one_pass, store
from deploy.calibration.calibrated import reference_of, refuse_calibrating
from deploy.calibration.cluster_jobs import Cluster
from deploy.calibration.reuse import CachePolicy
from deploy.errors import ConfigError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.evaluation import BY_FOLDER, objects_of
from deploy.feed.feed import FeedSource, holds_arrays, open_feed
from deploy.feed.preprocess import Asked
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.files import manifest
from deploy.frontends import LoadedModel, load_either
from deploy.machine import default_threads
from deploy.method import Method
from deploy.metrics.precision import Annotations, GroundTruth
from deploy.metrics.tasks import Metric, metric_of
from deploy.targets import Target
from deploy.tuning.search_options import DEFAULT_EFFORT, Tuning

if TYPE_CHECKING:
    import onnx

    from deploy.metrics.tasks.metric import Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The options of `deploy.pipeline.calibrate` by their names, nothing of them read yet."""

    method: str | Method | None = None
    preprocess: Asked = None
    skip_bad: bool = False
    limit: Limit = None
    until_stable: float | None = None
    threads: int | None = None
    float_nodes: tuple[str, ...] = ()
    scheduler: str | Cluster | None = None
    resume: bool = False
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A build of a model that is loaded.

    Attributes:
        loaded: the model.
        given: as it can be read again with nothing folded.
        reference: the float model that engines are judged beside.
        judged_by: what is to be said of that.
        images: what it is calibrated on, a Q/DQ model measured on; None where nothing is.
        evaluation: what judges it; None where some of the calibration images do.
        objects: that the evaluation images show; numbers of classes are the feed's own.
        metric: the user's figure.
        targets: what is built for.
        terms: how it is calibrated.
        policy: of the cache, whose file is named.
        wish: how much is searched.
        repairs: names of those that are tried.
        threads: worker threads.
        duration_s: seconds of measuring a model; 0 leaves latency out.
        folder: of everything that is written.
    """

    loaded: LoadedModel
    given: str | Path | onnx.ModelProto | None
    reference: LoadedModel
    judged_by: tuple[str, ...]
    images: FeedSource | None
    evaluation: Feed | None
    objects: GroundTruth | None
    metric: Metric | None
    targets: Sequence[Target]
    terms: Terms
    policy: CachePolicy
    wish: Tuning
    repairs: Sequence[str]
    threads: int
    duration_s: float
    folder: Path

    @property
    def parts(self) -> tuple[str, ...]:
        """What the build does, as its progress counts it."""
        before = () if self.loaded.trained else ("calibration",)
        search = ("search",) if self.wish.effort and self.wish.plan is None else ()
        accuracy = ("layers", "accuracy") if self.images is not None else ()
        latency = ("latency",) if self.duration_s > 0 else ()
        return (*before, *search, "targets", *accuracy, *latency, "report")

    @property
    def labelled(self) -> bool:
        """Whether the images that judge in the end have labels; those of a search have none."""
        own = self.evaluation.labels if self.evaluation is not None else None
        return self.objects is not None or own is not None

    @property
    def cache(self) -> Path | None:
        """The calibration cache, where it is used and stands outside the folder."""
        path = self.policy.path
        inside = path is None or path.parent.resolve() == self.folder.resolve()
        return None if inside or self.loaded.trained is not None else path

    @property
    def own_files(self) -> tuple[str, ...]:
        """Names of the cache's files and of the plan, which say themselves that calib8 wrote."""
        assert self.policy.path is not None
        return (*(path.name for path in store.files(self.policy.path)), _plan_of(self.loaded))


def ordered(
    model: str | Path | onnx.ModelProto | LoadedModel,
    images: FeedSource | None,
    *,
    float_model: str | Path | onnx.ModelProto | None,
    targets: Sequence[Target],
    terms: Terms,
    policy: CachePolicy,
    eval_images: FeedSource | None,
    labels: Sequence[int] | Annotations | str | None,
    metric: str | Function | None,
    wish: Tuning,
    repairs: Sequence[str] | None,
    duration_s: float,
    folder: Path,
    settings: bool,
) -> Order:
    """What `deploy.pipeline.build` is asked for, made ready.

    Args beyond those of `build`:
        settings: whether `calib8.toml` is written too.

    Raises:
        Calib8Error: as `build`, whatever shows before something is run.
    """
    from deploy.tuning.repairs import DEFAULT, chosen

    score = None if metric is None else metric_of(metric)  # as the evaluation, opened first
    loaded = model if isinstance(model, LoadedModel) else load_either(model)
    reference, judged_by = reference_of(loaded, float_model, images)
    if images is None:
        _refuse_unmeasured({"--eval-images": eval_images, "--labels": labels, "--metric": metric})
    judged_on = eval_images
    if loaded.trained is not None:
        refuse_calibrating(loaded.trained, _idle(images, terms, policy, wish, repairs))
        wish = replace(wish, effort=0)
        judged_on = images if eval_images is None else eval_images
    tried = chosen((DEFAULT if wish.effort else ()) if repairs is None else repairs)
    named = replace(policy, path=policy.path or folder / f"{loaded.name}.cache")
    _refuse_foreign(folder, targets, loaded, policy=named, settings=settings)
    terms, of_pictures = _divided(images, eval_images, loaded, terms)
    evaluation = None
    if judged_on is not None:  # opened first: a wrong path is told before anything is run
        evaluation = open_feed(
            judged_on,
            loaded.inputs,
            preprocess=of_pictures,
            carried=loaded.carried,
            skip_bad=terms.skip_bad,
            limit=terms.limit if eval_images is None else None,
            labels_by_folder=labels == BY_FOLDER,
        )
    known = objects_of(labels, evaluation)
    one_pass.refuse_full_disk(folder, loaded.model, len(targets))
    return Order(
        loaded=loaded,
        given=given_as(model),
        reference=reference,
        judged_by=(*judged_by, *(known.notes if known is not None else ())),
        images=images,
        evaluation=evaluation,
        objects=known,
        metric=score,
        targets=targets,
        terms=terms,
        policy=named,
        wish=wish,
        repairs=tried,
        threads=terms.threads or default_threads(),
        duration_s=duration_s if images is not None else 0.0,
        folder=folder,
    )


def given_as(
    model: str | Path | onnx.ModelProto | LoadedModel,
) -> str | Path | onnx.ModelProto | None:
    """The model as it can be read again with nothing folded."""
    if not isinstance(model, LoadedModel):
        return model
    onnx_file = model.source is not None and model.source.suffix.lower() == ".onnx"
    return model.source if onnx_file else None


def written_by(targets: Iterable[Target], name: str) -> list[str]:
    """Names of the files that a build of a model may write, but for its cache and plan."""
    endings = [ending for target in targets for ending in target.writes]
    return [manifest.NAME, *manifest.PAGES, *(f"{name}{ending}" for ending in endings)]


def _divided(
    images: FeedSource | None,
    eval_images: FeedSource | None,
    loaded: LoadedModel,
    terms: Terms,
) -> tuple[Terms, Asked]:
    """Terms of the calibration, and how what judges becomes inputs.

    Of two feeds, what is said of pictures is not said of the arrays of the other.
    """
    asked = terms.preprocess
    if images is None or eval_images is None or asked is None:
        return terms, asked
    calibrates, judges = (holds_arrays(one, loaded.inputs) for one in (images, eval_images))
    if calibrates and not judges:
        return replace(terms, preprocess=None), asked
    return terms, None if judges and not calibrates else asked


def _plan_of(loaded: LoadedModel) -> str:
    return f"{loaded.name}.plan.toml"


def _refuse_foreign(
    folder: Path,
    targets: Sequence[Target],
    loaded: LoadedModel,
    *,
    policy: CachePolicy,
    settings: bool,
) -> None:
    """Refuse to write over what no build wrote.

    Raises:
        ExportError: such a file is in the folder.
    """
    if policy.force:
        return
    plan = [_plan_of(loaded)] if policy.refresh else []  # else it is read, and must be a plan
    said = [manifest.SETTINGS] if settings else []
    manifest.refuse_foreign(folder, [*written_by(targets, loaded.name), *plan, *said])


def _refuse_unmeasured(asked: Mapping[str, object]) -> None:
    """Refuse what says how a Q/DQ model is measured, where nothing is."""
    for flag, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{flag} is of what is measured on images, which were not given; give --images too,"
                " or leave it away"
            )


def _idle(
    images: FeedSource | None,
    terms: Terms,
    policy: CachePolicy,
    wish: Tuning,
    repairs: Sequence[str] | None,
) -> list[str]:
    """What was asked that says how a float model is calibrated, as the command line calls it."""
    given = {
        "--calibrator-script": isinstance(images, CalibratorScript),
        "--method": terms.method is not None,
        "--cache": policy.path is not None,
        "--require-cache": policy.require,
        "--trust-cache": policy.trust,
        "--refresh": policy.refresh,
        "--keep-float": bool(terms.float_nodes),
        "--effort": wish.effort not in (0, DEFAULT_EFFORT),
        "--plan": wish.plan is not None,
        "--until-stable": terms.until_stable is not None,
        "--repair": bool(repairs) and tuple(repairs or ()) != ("none",),
        "--scheduler": terms.scheduler is not None,
        "--resume": terms.resume,
    }
    return [flag for flag, asked in given.items() if asked]
